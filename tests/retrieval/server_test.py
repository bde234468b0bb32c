"""The retrieval server: both dialects, refusals, slow clients, and shutdown."""

import argparse
import concurrent.futures
import contextlib
import gc
import http.client
import json
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import tracemalloc
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized
import hypothesis
from hypothesis import strategies as st
import pydantic
import pytest

from stppo_jax import types
from stppo_jax.net import http_server
from stppo_jax.retrieval import bm25
from stppo_jax.retrieval import http as client
from stppo_jax.retrieval import server
from tests.retrieval import dense_test
from tests.support.processes import wait_for

pytestmark = pytest.mark.guests(
    what='Retrieval clients of Search-R1 and RAGEN',
    version='documentation and code of both',
    date='2026-11-28',
    touches='retrieval/server.py',
)

PASSAGES = (
    types.Passage('p0', 'Paris', 'The capital of France, on the Seine.'),
    types.Passage('p1', 'Carbon "C"', 'An element.\nIts number is 6.'),
    types.Passage('p2', 'Lima', 'The capital of Peru.'),
)
JSON = {'Content-Type': 'application/json'}
HEADER = b'POST /retrieve HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n'
ROOT = str(pathlib.Path(__file__).parents[2])


class Gate:
  """A retriever that waits until it is opened, to keep requests running."""

  def __init__(self):
    self.open = threading.Event()
    self.entered = threading.Semaphore(0)

  def search(self, queries, top_k):
    self.entered.release()
    assert self.open.wait(60)
    return [list(PASSAGES[:top_k]) for _ in queries]


@contextlib.contextmanager
def running(retriever=None, threads=1, **limits):
  """A server in a thread of its own: yields (port, application, function that stops it)."""
  limits = {'grace_s': 5.0} | limits
  app = server.RetrievalApp(
      retriever or bm25.Bm25Retriever(PASSAGES),
      len(PASSAGES),
      http_server.ServerLimits(**limits),
      threads,
  )
  with http_server.Server(app) as running_server:
    stop = lambda: threading.Thread(target=running_server.__exit__).start()
    yield running_server.port, app, stop
  app.close()


def ask(port, method='POST', path='/retrieve', body=None, headers=None):
  """(status, JSON or text, headers) of one request on a connection of its own."""
  connection = http.client.HTTPConnection('127.0.0.1', port, timeout=60)
  with contextlib.closing(connection):
    if not isinstance(body, (bytes, type(None))):
      body = json.dumps(body).encode()
    connection.request(method, path, body, JSON if headers is None else headers)
    response = connection.getresponse()
    text = response.read().decode()
    is_json = response.headers['Content-Type'] == 'application/json'
    return response.status, json.loads(text) if is_json else text, response.headers


def metric(port, name):
  _, text, _ = ask(port, 'GET', '/metrics')
  found = re.search(rf'^{re.escape(name)} (\S+)$', text, re.MULTILINE)
  return float(found[1]) if found else 0.0


def can_connect(port):
  with socket.socket() as probe:
    return probe.connect_ex(('127.0.0.1', port)) == 0


class DialectsTest(parameterized.TestCase):

  @parameterized.parameters(*client.CONCURRENCY)
  def test_client_reads_what_corpus_holds(self, dialect):
    local = bm25.Bm25Retriever(PASSAGES)
    queries = ['capital', 'number 6', 'xylophone', '', 'São \ud800 \x00 "x"\n']
    with running() as (port, _, _):
      retriever = client.HttpRetriever(
          f'http://127.0.0.1:{port}', client.HttpSettings(dialect=dialect, retries=0)
      )
      self.assertEqual(retriever.search(queries, 2), local.search(queries, 2))

  def test_search_r1_with_and_without_scores(self):
    with running() as (port, _, _):
      _, scored, _ = ask(port, body={'queries': ['lima', 'x'], 'topk': 1, 'return_scores': True})
      _, bare, _ = ask(port, body={'queries': ['lima'], 'topk': 1})
      _, none, _ = ask(port, body={'queries': []})
      _, default, _ = ask(port, body={'queries': ['capital element']})
    document = {'id': 'p2', 'contents': '"Lima"\nThe capital of Peru.'}
    self.assertEqual(scored['result'][1], [])
    self.assertEqual(scored['result'][0][0]['document'], document)
    self.assertGreater(scored['result'][0][0]['score'], 0)
    self.assertEqual(bare, {'result': [[document]]})
    self.assertEqual(none, {'result': []})
    self.assertLen(default['result'][0], 3)

  def test_ragen(self):
    with running() as (port, _, _):
      status, answer, _ = ask(port, body={'query': 'lima', 'top_k': 2})
    self.assertEqual(status, 200)
    self.assertEqual(answer['results'][0].keys(), {'id', 'content', 'score'})
    self.assertEqual(answer['results'][0]['content'], '"Lima"\nThe capital of Peru.')

  def test_health_and_metrics(self):
    with running() as (port, _, _):
      self.assertEqual(ask(port, 'GET', '/health')[:2], (200, {'status': 'ok', 'passages': 3}))
      ask(port, body={'queries': ['a', 'b']})
      ask(port, body={'queries': 3})
      wait_for(lambda: metric(port, 'retrieval_in_flight') == 0)
      self.assertEqual(metric(port, 'retrieval_queries_total'), 2)
      self.assertEqual(metric(port, 'retrieval_requests_total{status="200"}'), 1)
      self.assertEqual(metric(port, 'retrieval_requests_total{status="400"}'), 1)
      self.assertEqual(metric(port, 'retrieval_request_seconds_count'), 2)

  def test_large_requests_are_searched_in_chunks(self):
    sizes = []

    class Counting:

      def search(self, queries, top_k):
        sizes.append(len(queries))
        return [[] for _ in queries]

    with running(Counting()) as (port, _, _):
      _, answer, _ = ask(port, body={'queries': ['q'] * 70})
    self.assertLen(answer['result'], 70)
    self.assertEqual(sizes, [32, 32, 6])


class RejectionsTest(parameterized.TestCase):

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    cls.port, *_ = cls.enterClassContext(running(max_body_bytes=200_000))
    cls.enterClassContext(mock.patch.object(server, '_MAX_PASSAGES', 20))

  @parameterized.parameters(
      (b'', 'not JSON'),
      (b'\xff\xfe', 'not JSON'),
      (b'[' * 100_000, 'not JSON'),
      (b'1' * 5_000, 'not JSON'),
      (b'[]', 'must be a JSON object'),
      (b'{}', 'queries: Field required'),
      (b'{"query": "a", "queries": []}', 'queries is not supported'),
      (b'{"queries": "a"}', 'queries: Input should be a valid list'),
      (b'{"queries": ["a", null]}', 'queries.1: Input should be a valid string'),
      (json.dumps({'queries': ['a'] * 4097}).encode(), 'queries: List should have at most 4096'),
      (b'{"query": "a", "top_k": 0}', 'top_k: Input should be greater than or equal to 1'),
      (b'{"queries": [], "topk": 101}', 'topk: Input should be less than or equal to 100'),
      (b'{"queries": [], "topk": 2.5}', 'topk: Input should be a valid integer'),
      (b'{"queries": [], "topk": true}', 'topk: Input should be a valid integer'),
      (b'{"queries": [], "return_scores": 1}', 'return_scores: Input should be'),
      (b'{"queries": ["a", "b", "c"], "topk": 7}', 'topk: ask for at most 20 passages'),
  )
  def test_wrong_body_is_one_line(self, body, message):
    status, answer, _ = ask(self.port, body=body)
    self.assertEqual(status, 400)
    self.assertIn(message, answer['error'])
    self.assertNotIn('\n', answer['error'])
    self.assertNotRegex(answer['error'], '^:')

  def test_connection_continues_after_one_line_errors(self):
    connection = http.client.HTTPConnection('127.0.0.1', self.port, timeout=60)
    with contextlib.closing(connection):
      for method, path, body, expected in (
          ('POST', '/retrieve', b'{', 400),
          ('POST', '/retrieve', b' ' * 1_000_000, 413),
          ('POST', '/search', b'{}', 404),
          ('POST', '/health', b'', 405),
          ('GET', '/retrieve', None, 405),
          ('PROPFIND', '/retrieve', None, 405),
          ('GET', '/', None, 404),
      ):
        connection.request(method, path, body, JSON)
        response = connection.getresponse()
        answer = json.loads(response.read())
        self.assertEqual((response.status, answer.keys()), (expected, {'error'}), path)
        self.assertNotIn('\n', answer['error'])
        self.assertNotIn('Server', response.headers)
        connection.request('GET', '/health')
        self.assertIn(b'ok', connection.getresponse().read())
    self.assertEqual(metric(self.port, 'retrieval_in_flight'), 0)

  @parameterized.parameters(
      ({'Content-Type': 'text/plain'}, 415),
      (JSON | {'Host': 'rebound.example:8000'}, 403),
      (JSON | {'Host': '[::1]:8000'}, 200),
  )
  def test_page_of_another_site_gets_no_answer(self, headers, status):
    """Its rules are those of the gateway, whose test has more."""
    found, answer, _ = ask(self.port, body={'queries': ['lima']}, headers=headers)
    self.assertEqual(found, status, answer)

  def test_body_in_chunks_is_bounded(self):
    with socket.create_connection(('127.0.0.1', self.port), timeout=60) as connection:
      connection.sendall(HEADER + b'Transfer-Encoding: chunked\r\n\r\n')
      with contextlib.suppress(OSError):  # it may hang up while we send
        for _ in range(3):
          connection.sendall(b'186a0\r\n' + b' ' * 100_000 + b'\r\n')
      self.assertStartsWith(connection.recv(100).decode(), 'HTTP/1.1 413')
    wait_for(lambda: metric(self.port, 'retrieval_in_flight') == 0)

  def test_long_query_is_cut(self):
    retriever = mock.Mock(search=mock.Mock(return_value=[[], []]))
    with running(retriever) as (port, _, _), mock.patch.object(server, '_MAX_QUERY_CHARS', 3):
      ask(port, body={'queries': ['abcdef', 'x']})
    self.assertEqual(retriever.search.call_args.args[0], ['abc', 'x'])

  def test_error_of_retriever_is_500_without_details(self):
    with running(mock.Mock(search=mock.Mock(side_effect=ValueError('secret')))) as (port, _, _):
      with self.assertLogs(level='ERROR'):
        status, answer, _ = ask(port, body={'queries': ['a']})
      self.assertEqual((status, answer), (500, {'error': 'Internal Server Error'}))
      self.assertEqual(metric(port, 'retrieval_in_flight'), 0)

  @hypothesis.settings(deadline=None, max_examples=50, derandomize=True)
  @hypothesis.given(
      st.dictionaries(
          st.sampled_from(['query', 'queries', 'topk', 'top_k', 'return_scores']),
          st.recursive(
              st.one_of(st.none(), st.booleans(), st.integers(), st.text(max_size=5)),
              lambda inner: st.one_of(st.lists(inner, max_size=3)),
              max_leaves=8,
          ),
          max_size=3,
      )
  )
  def test_any_object_is_answered_or_rejected(self, fields):
    try:
      body = server.parse_body(fields)
    except pydantic.ValidationError:
      return
    self.assertBetween(body.topk, 1, 100)


class LoadTest(parameterized.TestCase):

  def test_requests_beyond_limit_get_503(self):
    gate = Gate()
    self.enterContext(mock.patch.object(server, '_MAX_IN_FLIGHT', 2))
    with running(gate) as (port, service, _):
      with concurrent.futures.ThreadPoolExecutor() as pool:
        held = [pool.submit(ask, port, body={'query': 'a'}) for _ in range(2)]
        wait_for(lambda: service.in_flight == 2)
        status, answer, headers = ask(port, body={'query': 'a'})
        self.assertEqual((status, headers['Retry-After']), (503, '1'))
        self.assertIn('2 requests are running', answer['error'])
        self.assertEqual(ask(port, 'GET', '/health')[0], 200)  # while the searching thread is held
        gate.open.set()
        self.assertEqual([future.result()[0] for future in held], [200, 200])
      wait_for(lambda: service.in_flight == 0)
      self.assertEqual(ask(port, body={'query': 'a'})[0], 200)
      self.assertEqual(metric(port, 'retrieval_requests_total{status="503"}'), 1)
      self.assertEqual(metric(port, 'retrieval_requests_total{status="499"}'), 0)

  def test_incomplete_bodies_block_nobody(self):
    half = HEADER + b'Content-Length: 100\r\n\r\n{"quer'
    self.enterContext(mock.patch.object(server, '_MAX_IN_FLIGHT', 2))
    with running() as (port, _, _), contextlib.ExitStack() as connections:
      for _ in range(8):
        connect = socket.create_connection(('127.0.0.1', port), timeout=60)
        connections.enter_context(connect).sendall(half)
      self.assertEqual(ask(port, body={'queries': ['lima']})[0], 200)

  @parameterized.parameters(b'', b'{"quer')
  def test_slow_body_gets_408(self, part):
    with running(body_timeout_s=1.0) as (port, app, _):
      with socket.create_connection(('127.0.0.1', port), timeout=60) as connection:
        connection.sendall(HEADER + b'Content-Length: 100\r\n\r\n' + part)
        self.assertEqual(connection.recv(100)[:12], b'HTTP/1.1 408')
      self.assertEqual(app.in_flight, 0)
      self.assertEqual(ask(port, body={'queries': ['lima']})[0], 200)

  def test_pauses_and_long_searches_keep_a_connection(self):
    gate = Gate()
    with running(gate, body_timeout_s=0.5) as (port, _, _):
      connection = http.client.HTTPConnection('127.0.0.1', port, timeout=60)
      with contextlib.closing(connection):
        for _ in range(2):
          gate.open.clear()
          threading.Timer(0.8, gate.open.set).start()
          connection.request('POST', '/retrieve', json.dumps({'queries': ['a']}), JSON)
          sock = connection.sock
          self.assertEqual(connection.getresponse().read()[:10], b'{"result":')
          time.sleep(0.8)
        self.assertIs(connection.sock, sock)

  def test_disconnected_client_counts_until_its_search_ends(self):
    gate = Gate()
    with running(gate) as (port, app, _):
      with socket.create_connection(('127.0.0.1', port)) as connection:
        connection.sendall(HEADER + b'Content-Length: 14\r\n\r\n' b'{"query": "a"}')
        self.assertTrue(gate.entered.acquire(timeout=60))
      self.assertEqual(app.in_flight, 1)
      wait_for(lambda: metric(port, 'retrieval_requests_total{status="499"}') == 1)
      self.assertEqual(app.in_flight, 1)
      gate.open.set()
      wait_for(lambda: app.in_flight == 0)

  def test_running_requests_are_finished_at_shutdown(self):
    gate = Gate()
    with running(gate, grace_s=60.0) as (port, app, stop):
      with concurrent.futures.ThreadPoolExecutor() as pool:
        held = pool.submit(ask, port, body={'query': 'a'})
        self.assertTrue(gate.entered.acquire(timeout=60))
        stop()
        wait_for(lambda: app.stopping)
        wait_for(lambda: not can_connect(port))
        gate.open.set()
        self.assertEqual(held.result()[0], 200)

  def test_wait_for_running_requests_is_bounded(self):
    gate = Gate()
    with running(gate, grace_s=0.0) as (port, _, stop):
      with concurrent.futures.ThreadPoolExecutor() as pool:
        held = pool.submit(ask, port, body={'query': 'a'})
        self.assertTrue(gate.entered.acquire(timeout=60))
        stop()
        status, answer, _ = held.result()
        self.assertEqual((status, answer.keys()), (503, {'error'}))
        gate.open.set()

  def test_memory_does_not_grow(self):
    """After a warm-up, 300 requests of all sorts leave the heap as it was."""
    bodies = [
        json.dumps({'queries': ['capital of peru', 'number 6']}).encode(),
        b'{',
        b'{}',
        json.dumps({'query': 'seine'}).encode(),
    ]
    with running() as (port, _, _):
      connection = http.client.HTTPConnection('127.0.0.1', port, timeout=60)

      def requests(n):
        for i in range(n):
          connection.request('POST', '/retrieve', bodies[i % len(bodies)], JSON)
          connection.getresponse().read()

      requests(100)
      tracemalloc.start()
      self.addCleanup(tracemalloc.stop)
      requests(100)
      gc.collect()
      before = tracemalloc.get_traced_memory()[0]
      requests(300)
      gc.collect()
      self.assertLess(tracemalloc.get_traced_memory()[0] - before, 30_000)
      connection.close()


class CommandTest(parameterized.TestCase):

  def start(self, *arguments):
    environment = {**os.environ, 'PYTHONUNBUFFERED': '1', 'JAX_PLATFORMS': 'cpu'}
    return subprocess.Popen(
        [sys.executable, '-m', 'stppo_jax.retrieval.server', *arguments],
        cwd=ROOT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment,
    )

  def test_command_answers_and_stops_on_sigterm(self):
    with self.start('--corpus=embedded', '--port=0') as process:
      try:
        ready = process.stdout.readline()
        match = re.fullmatch(r'ready: (http://127\.0\.0\.1:(\d+)/retrieve)\n', ready)
        self.assertIsNotNone(match, ready or process.stderr)
        found = client.HttpRetriever(match[1], client.HttpSettings(retries=0)).search(
            ['capital of Peru'], 3
        )
        self.assertLen(found[0], 3)
        self.assertEqual(ask(int(match[2]), body={'query': 'a', 'top_k': 101})[0], 400)
        process.send_signal(signal.SIGTERM)
        self.assertEqual(process.wait(120), 0, process.stderr.read())
      finally:
        process.kill()

  @parameterized.parameters(
      (['--corpus=/nowhere.jsonl'], 2, 'no such file'),
      (['--corpus=embedded', '--kind=dense'], 2, 'needs --encoder=FOLDER'),
      (['--corpus=embedded', '--host=256.0.0.1'], 1, 'cannot listen on 256.0.0.1:8000'),
      (['--corpus=embedded', '--host=' + 'h' * 80], 1, 'hhh:8000 ('),
  )
  def test_mistakes_are_one_line(self, arguments, status, message):
    with mock.patch('sys.stderr') as err:
      self.assertEqual(server.main(arguments), status)
    text = ''.join(call.args[0] for call in err.write.call_args_list)
    self.assertIn(message, text)
    self.assertEqual(text.count('\n'), 1)

  def test_unwritable_embeddings_folder_is_one_line(self):
    folder = dense_test.write_encoder(self.enterContext(tempfile.TemporaryDirectory()))
    error = OSError(30, 'Read-only file system')
    with mock.patch.object(server, 'make_retriever', side_effect=error):
      with mock.patch('sys.stderr') as err:
        flags = ['--kind=dense', f'--encoder={folder}', '--embeddings=/nowhere/else']
        self.assertEqual(server.main(['--corpus=embedded', *flags]), 1)
    self.assertIn('--embeddings=/nowhere/else', str(err.write.call_args_list))
    self.assertNotIn('--port', str(err.write.call_args_list))

  @absltest.skipUnless(dense_test.HAS_LIBRARY, 'sentence-transformers is not installed')
  def test_every_kind_finds(self):
    folder = dense_test.write_encoder(self.enterContext(tempfile.TemporaryDirectory()))
    for kind in server.KINDS:
      flags = argparse.Namespace(
          kind=kind,
          encoder=folder,
          embeddings=folder,
          device='cpu',
          query_prompt=None,
          passage_prompt=None,
      )
      retriever = server.make_retriever(flags, PASSAGES)
      with running(retriever) as (port, _, _):
        _, answer, _ = ask(port, body={'queries': ['seine', 'lima'], 'topk': 1})
      self.assertLen(answer['result'], 2)
      if kind == 'bm25':
        self.assertEqual(answer['result'][0][0]['id'], 'p0')

  def test_taken_port_is_one_line(self):
    with socket.socket() as taken, mock.patch('sys.stderr') as err:
      taken.bind(('127.0.0.1', 0))
      taken.listen()
      self.assertEqual(server.main(['--corpus=embedded', f'--port={taken.getsockname()[1]}']), 1)
    self.assertIn('another --host or --port', str(err.write.call_args_list))

  def test_wrong_flags_are_rejected(self):
    for bad in ('--kind=x', '--nonsense=1', '--threads=0', '--port=65536'):
      with self.assertRaises(SystemExit), mock.patch('sys.stderr'):
        server._parse(['--corpus=x', bad])


if __name__ == '__main__':
  absltest.main()
