"""Hostile and broken requests to the gateway: none crashes it, and its memory does not grow."""

import gc
import http.client
import json
import os
import pathlib
import socket

from absl.testing import absltest
import hypothesis
from hypothesis import strategies as st
import pytest
import requests

from tests import gateway_test

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4)
    | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)
FIELDS = (
    'messages prompt max_tokens max_completion_tokens temperature top_p n stop seed stream '
    'logprobs tools tool_choice model stream_options return_token_ids echo '
    'include_stop_str_in_output'
).split()
CONTENT = st.text(max_size=200) | st.sampled_from(
    ['<|endoftext|>', '</search>', '\ud800', '\ufdd00\ufdd1', 'x' * 5000, '\x00', '<tool_call>{']
)
MESSAGE = st.fixed_dictionaries(
    {'role': st.sampled_from(['user', 'assistant', 'tool', 'system', 'king']), 'content': CONTENT}
)
ASK = st.fixed_dictionaries(
    {'messages': st.lists(MESSAGE, max_size=3), 'prompt': CONTENT, 'max_tokens': st.just(2)},
    optional={name: JSON for name in FIELDS[4:]},
)
BODY = st.one_of(
    ASK.map(lambda fields: json.dumps(fields).encode()),
    JSON.map(lambda value: json.dumps(value).encode()),
    st.dictionaries(st.sampled_from(FIELDS), JSON).map(lambda fields: json.dumps(fields).encode()),
    st.binary(max_size=200),
)
PATH = st.sampled_from(
    ['/v1/chat/completions', '/v1/completions', '/s/x/v1/chat/completions', '/s/x/reward', '/%00']
)


def resident_mb():
  pages = int(pathlib.Path('/proc/self/statm').read_text(encoding='ascii').split()[1])
  return pages * os.sysconf('SC_PAGE_SIZE') / 2**20


@pytest.mark.slow
class HostileTest(absltest.TestCase):
  """500 examples of 20 requests, which hypothesis makes; more broken ones besides."""

  def test_ten_thousand_requests_and_no_growth(self):
    seen, before = [], []
    with gateway_test.running(max_body_mb=1) as server:

      @hypothesis.settings(max_examples=500, deadline=None, database=None, derandomize=True)
      @hypothesis.given(st.lists(st.tuples(PATH, BODY), min_size=20, max_size=20))
      def send(asked):
        connection = http.client.HTTPConnection(server.host, server.port, timeout=60)
        for path, body in asked:
          try:
            connection.request('POST', path, body)
            answer = connection.getresponse()
            text = answer.read()
          except (http.client.HTTPException, ConnectionError):
            connection.close()
            seen.append(0)
            continue
          seen.append(answer.status)
          assert answer.status < 500, (answer.status, path, body, text)
        connection.close()
        self.break_off(server, asked[0][1])
        if len(seen) == 2000:
          gc.collect()
          before.append(resident_mb())

      send()
      gc.collect()
      grown_mb = resident_mb() - before[0]
      self.assertEqual(gateway_test.post(server, gateway_test.ASKED).status_code, 200)
      self.assertEqual(server.service.scheduler.running, 0)
      metrics = requests.get(server.url + '/metrics', timeout=60).text
    print(
        f'{len(seen)} requests, grown by {grown_mb:.1f} MB;', {s: seen.count(s) for s in set(seen)}
    )
    self.assertGreaterEqual(len(seen), 10_000)
    self.assertGreater(seen.count(200), 500)
    self.assertLess(grown_mb, 40)
    self.assertIn('gateway_requests_total{status="400"}', metrics)

  def break_off(self, server, body):
    """Sends half of a request, and one that is no HTTP, and leaves."""
    head = b'POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 5000\r\n\r\n'
    for sent in (head + body, body + b'\r\n\r\n'):
      with socket.create_connection((server.host, server.port)) as connection:
        connection.sendall(sent)


if __name__ == '__main__':
  absltest.main()
