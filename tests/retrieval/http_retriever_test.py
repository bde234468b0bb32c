"""The HTTP retriever against local servers that fail in many ways."""

from concurrent import futures
import contextlib
from http import server as http_server
import json
import os
import random
import socket
import threading
import time
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized
import pytest

from stppo_jax import config as schema
from stppo_jax import types
from stppo_jax.envs import search
from stppo_jax.net import http_client
from stppo_jax.retrieval import http
from stppo_jax.retrieval import kinds
from stppo_jax.retrieval import protocol
from stppo_jax.stop_signal import StopSignal
from tests.support import processes

pytestmark = pytest.mark.guests(
    what='Retrieval servers of Search-R1 and RAGEN, as clients see them',
    version='documentation and code of both',
    date='2026-11-28',
    touches='retrieval/http.py',
)

TASK = types.Task(id='t', question='q?', answers=('x',))


def _document(query, rank):
  return {'id': f'{query}-{rank}', 'contents': f'"Title {query}"\ntext {rank}\nmore'}


def _search_r1(question):
  return {
      'result': [
          [
              {'document': _document(query, rank), 'score': 9.5 - rank}
              for rank in range(question['topk'])
          ]
          for query in question['queries']
      ]
  }


def _ragen(question):
  documents = [_document(question['query'], rank) for rank in range(question['top_k'])]
  return {'results': [{'id': d['id'], 'content': d['contents'], 'score': 1} for d in documents]}


@contextlib.contextmanager
def _server(answer):
  """A server whose answers are `answer(question, number of the request) -> reply`, where a reply
  is what becomes JSON, or (status, body bytes), or a function that is given the handler."""
  questions = []
  counting = threading.Lock()

  class Handler(http_server.BaseHTTPRequestHandler):

    def do_POST(self):
      question = json.loads(self.rfile.read(int(self.headers['Content-Length'])))
      with counting:
        questions.append((self.path, question))
        number = len(questions) - 1
      reply = answer(question, number)
      if callable(reply):
        reply(self)
        return
      status, body = reply if isinstance(reply, tuple) else (200, json.dumps(reply).encode())
      self.send_response(status)
      self.send_header('Content-Length', str(len(body)))
      self.end_headers()
      self.wfile.write(body)

    def log_message(self, *unused):
      pass

  server = http_server.ThreadingHTTPServer(('127.0.0.1', 0), Handler)
  server.daemon_threads = True
  server.handle_error = lambda *unused: None  # clients that hang up are part of the tests
  thread = threading.Thread(target=server.serve_forever, kwargs={'poll_interval': 0.01})
  thread.start()
  try:
    yield f'http://127.0.0.1:{server.server_port}', questions
  finally:
    server.shutdown()
    thread.join()
    server.server_close()


def _retriever(url, **settings):
  fast = {'timeout_s': 5.0, 'retries': 0, 'backoff_s': 0.0}
  return http.HttpRetriever(url, http.HttpSettings(**{**fast, **settings}))


def _hang_up(handler):
  handler.connection.shutdown(socket.SHUT_RDWR)
  handler.close_connection = True


def _cut_body(handler):
  handler.send_response(200)
  handler.send_header('Content-Length', '1000')
  handler.end_headers()
  handler.wfile.write(b'{"result": [[')
  handler.close_connection = True


def _trickle_body(handler):
  handler.send_response(200)
  handler.end_headers()
  for _ in range(1200):
    handler.wfile.write(b' ')
    handler.wfile.flush()
    time.sleep(0.05)


def _trickle_headers(handler):
  for _ in range(1200):
    handler.wfile.write(b'H')
    handler.wfile.flush()
    time.sleep(0.05)


def _redirect(handler):
  handler.send_response(307)
  handler.send_header('Location', 'http://127.0.0.1:1/')
  handler.send_header('Content-Length', '0')
  handler.end_headers()


class AnswersTest(parameterized.TestCase):

  def test_given_up_search_ends_within_seconds(self):
    asked, found = threading.Event(), []

    def never(question, number):
      asked.set()
      return _trickle_body

    with _server(never) as (url, questions):
      retriever = http.HttpRetriever(url, http.HttpSettings(timeout_s=600.0))
      retriever.stop_signal = StopSignal(asked.is_set)
      with mock.patch.object(http_client, '_POLL_S', 0.01):
        search = lambda: found.append(retriever.search(['a'], 1))
        thread = threading.Thread(target=search, daemon=True)
        thread.start()
        thread.join(20)
      self.assertEqual(found, [[None]])
      self.assertLen(questions, 1)  # no further attempt
      self.assertEqual(retriever.search(['b'], 1), [None])
      self.assertLen(questions, 1)

  def test_bounded_requests_run_side_by_side(self):
    """Four requests wait for each other; one of them fails, and its queries alone."""
    together, queries = threading.Barrier(4), [f'q{i}' for i in range(100)]

    def answer(question, number):
      if number < 4:
        together.wait(60)
      return (400, b'') if 'q40' in question['queries'] else _search_r1(question)

    with _server(answer) as (url, questions):
      retriever = http.HttpRetriever(url, http.HttpSettings(max_queries=32))
      found = retriever.search(queries, 1)
    self.assertEqual(sorted(len(q['queries']) for _, q in questions), [4, 32, 32, 32])
    for i, passages in enumerate(found):
      if 32 <= i < 64:
        self.assertIsNone(passages)
      else:
        self.assertEqual([p.id for p in passages], [f'q{i}-0'])
    self.assertLen(questions, 4)

  def test_threads_share_requests_in_flight(self):
    """The default is one request at a time, because FAISS on GPUs allows no more."""
    going, most = [], []

    def answer(question, unused_number):
      going.append(1)
      most.append(len(going))
      time.sleep(0.02)
      going.pop()
      return _search_r1(question)

    with _server(answer) as (url, questions):
      for concurrency, allowed in ((0, 1), (2, 2)):
        settings = schema.RetrieverSettings(kind='http', url=url, concurrency=concurrency)
        retriever = kinds.make(kinds.RETRIEVERS['http'], settings, list)
        most.clear()
        with futures.ThreadPoolExecutor(4) as pool:
          searches = [[f'{concurrency} {i} {j}' for j in range(40)] for i in range(8)]
          found = list(pool.map(lambda queries: retriever.search(queries, 1), searches))
        self.assertEqual([len(passages) for passages in found], [40] * 8)
        self.assertEqual(max(most), allowed)
    self.assertLen(questions, 32)

  def test_search_r1(self):
    with _server(lambda question, _: _search_r1(question)) as (url, questions):
      retriever = _retriever(url)
      self.assertIsInstance(retriever, protocol.Retriever)
      found = retriever.search(['a', 'b'], 2)
    self.assertEqual(
        questions, [('/retrieve', {'queries': ['a', 'b'], 'topk': 2, 'return_scores': True})]
    )
    self.assertEqual(
        found[1],
        [
            types.Passage('b-0', 'Title b', 'text 0\nmore', 9.5),
            types.Passage('b-1', 'Title b', 'text 1\nmore', 8.5),
        ],
    )
    self.assertLen(questions, 1)

  def test_ragen(self):
    with _server(lambda question, _: _ragen(question)) as (url, questions):
      retriever = _retriever(url, dialect='ragen', concurrency=3)
      queries = [str(i) for i in range(10)]
      found = retriever.search(queries, 1)
    self.assertEqual([passages[0].id for passages in found], [f'{query}-0' for query in queries])
    self.assertEqual(found[3], [types.Passage('3-0', 'Title 3', 'text 0\nmore', 1.0)])
    self.assertCountEqual([question['query'] for _, question in questions], queries)
    self.assertEqual(questions[0][1].keys(), {'query', 'top_k'})

  def test_ragen_failures_are_independent(self):
    with _server(
        lambda question, _: (500, b'') if question['query'] == 'bad' else _ragen(question)
    ) as (url, _):
      retriever = _retriever(url, dialect='ragen')
      found = retriever.search(['a', 'bad', 'c'], 1)
    self.assertEqual([passages is None for passages in found], [False, True, False])

  def test_bare_documents_are_cut_at_top_k(self):
    with _server(lambda *_: {'result': [[_document('q', i) for i in range(5)]]}) as (url, _):
      self.assertLen(_retriever(url).search(['q'], 2)[0], 2)

  def test_title_beside_contents_is_read(self):
    document = {'id': 1, 'title': 'Lima', 'contents': 'In Peru.'}
    with _server(lambda *_: {'result': [[{'document': document, 'score': 1.0}]]}) as (url, _):
      (passage,) = _retriever(url).search(['q'], 1)[0]
    self.assertEqual((passage.title, passage.text), ('Lima', 'In Peru.'))

  def test_unusual_queries_survive(self):
    queries = ['', 'S\u00e3o "x"\n', '\ud800', '\x00']
    with _server(lambda question, _: _search_r1(question)) as (url, questions):
      self.assertNotIn(None, _retriever(url).search(queries, 1))
    self.assertEqual(questions[0][1]['queries'], queries)

  def test_path_of_the_url_is_kept(self):
    with _server(lambda question, _: _search_r1(question)) as (url, questions):
      for path in ('', '/', '/retrieve', '/v2/find'):
        _retriever(url + path).search(['q'], 1)
    self.assertEqual(
        [path for path, _ in questions], ['/retrieve', '/retrieve', '/retrieve', '/v2/find']
    )

  def test_proxies_of_the_environment_are_ignored(self):
    with mock.patch.dict(os.environ, {'http_proxy': 'http://127.0.0.1:1', 'no_proxy': ''}):
      with _server(lambda question, _: _search_r1(question)) as (url, _):
        self.assertNotIn(None, _retriever(url).search(['q'], 1))


class FailuresTest(parameterized.TestCase):

  @parameterized.named_parameters(
      ('html', (200, b'<html>busy</html>')),
      ('empty', (200, b'')),
      ('not_utf8', (200, b'{"result": "\xff\xfe"}')),
      ('too_deep', (200, b'[' * 200_000)),
      ('list', [[]]),
      ('null', None),
      ('other_key', {'results': [[]]}),
      ('too_few_results', {'result': [[]]}),
      ('too_many_results', {'result': [[], [], []]}),
      ('results_no_list', {'result': 'ab'}),
      ('not_found', (404, b'{}')),
      ('unprocessable', (422, b'{"detail": "no field queries"}')),
      ('redirect', _redirect),
      ('too_large', (200, b' ' * 70_000)),
  )
  def test_permanent_errors_are_not_retried(self, reply):
    for dialect in http.CONCURRENCY:
      with _server(lambda *_: reply) as (url, questions):
        retriever = _retriever(url, dialect=dialect, retries=3, max_response_bytes=60_000)
        if dialect == 'ragen' and isinstance(reply, dict):
          continue  # its own shapes are below
        self.assertEqual(retriever.search(['a', 'b'], 3), [None, None])
        self.assertLen(questions, 1 if dialect == 'search_r1' else 2)

  @parameterized.named_parameters(
      ('server_error', (500, b'boom')),
      ('overload', (503, b'')),
      ('rate', (429, b'')),
      ('hang_up', _hang_up),
      ('cut_body', _cut_body),
  )
  def test_temporary_errors_are_retried(self, reply):
    with _server(lambda question, number: reply if number < 2 else _search_r1(question)) as (
        url,
        questions,
    ):
      retriever = _retriever(url, retries=2)
      self.assertNotIn(None, retriever.search(['a', 'b'], 1))
      self.assertLen(questions, 3)

  def test_check_asks_as_the_run_does_and_says_what_the_server_said(self):
    def answer(question, number):
      if question['topk'] > 100:
        return 400, b'{"detail":\n "topk is at most 100"}'
      return _search_r1(question)

    with _server(answer) as (url, questions):
      _retriever(url).check_server(100)
      reason = r'HTTP status 400 {"detail": "topk is at most 100"}'
      with self.assertRaisesRegex(types.UserError, f'no usable answer [^\n]*{reason}[^\n]*$'):
        _retriever(url).check_server(200)
      self.assertEqual([question['topk'] for _, question in questions], [100, 200])
    for reply, reason in (
        ((500, b'out of memory'), 'HTTP status 500 out of memory'),
        ((200, b' ' * 70_000), 'HTTP status 200 over 60000 bytes'),
    ):
      with _server(lambda *_, reply=reply: reply) as (url, _):
        retriever = _retriever(url, max_response_bytes=60_000)
        retriever.search(['a'], 1)
        self.assertEqual(retriever.last_failure, reason)

  def test_retries_are_bounded(self):
    with _server(lambda *_: (500, b'')) as (url, questions):
      retriever = _retriever(url, retries=2)
      self.assertEqual(retriever.search(['a', 'b', 'a'], 1), [None] * 3)
      self.assertLen(questions, 3)

  def test_connection_refused(self):
    with processes.unused_address() as url:
      for dialect in http.CONCURRENCY:
        retriever = _retriever(url, dialect=dialect, retries=1)
        self.assertEqual(retriever.search(['a'], 1), [None])

  @parameterized.named_parameters(
      ('hangs', lambda handler: time.sleep(60), 2, 0.2),
      ('hangs_up', _hang_up, 2, 60.0),
      ('is_overloaded', (503, b''), 8, 60.0),
  )
  def test_dead_server_is_asked_once_per_search(self, reply, num_sent, timeout_s):
    """A server that answers at all, be it with an error, may answer the next request."""
    with _server(lambda *_: reply) as (url, questions):
      retriever = _retriever(url, timeout_s=timeout_s, retries=1, concurrency=1, max_queries=1)
      for _ in range(2):  # each search asks anew
        self.assertEqual(retriever.search(['a', 'b', 'c', 'd'], 1), [None] * 4)
      # The server's thread of a request that was given up may run late.
      processes.wait_for(lambda: len(questions) >= 2 * num_sent)
      self.assertLen(questions, 2 * num_sent)

  @parameterized.named_parameters(
      ('silence', lambda handler: time.sleep(60)),
      ('trickled_body', _trickle_body),
      ('trickled_headers', _trickle_headers),
  )
  def test_total_time_is_bounded(self, reply):
    with _server(lambda *_: reply) as (url, questions):
      took = []
      while len(took) < 10 and min(took, default=60) > 0.9:  # other processes may take their time
        retriever = _retriever(url, timeout_s=0.2, retries=1)
        started = time.monotonic()
        self.assertEqual(retriever.search(['a'], 1), [None])
        took.append(time.monotonic() - started)
        processes.wait_for(lambda: len(questions) >= 2 * len(took))
        self.assertLen(questions, 2 * len(took))
      self.assertLess(min(took), 0.9)

  def test_backoff_doubles_with_jitter(self):
    waits = []

    def fail(number):
      raise http_client.Temporary('busy')

    with self.assertRaisesRegex(http_client.Temporary, 'busy'):
      http_client.with_retries(fail, 4, 1.0, waits.append)
    self.assertLen(waits, 4)
    for attempt, wait in enumerate(waits):
      self.assertBetween(wait, 0.5 * 2**attempt, 1.5 * 2**attempt)
    self.assertLen({wait / 2**attempt for attempt, wait in enumerate(waits)}, 4)

  @parameterized.named_parameters(
      ('null', None),
      ('text', 'doc'),
      ('no_contents', {'document': {'id': '1'}}),
      ('contents_a_number', {'document': {'id': '1', 'contents': 3}}),
      ('document_null', {'document': None}),
      ('document_a_list', {'document': ['x']}),
      ('score_a_word', {'document': {'id': '1', 'contents': 'x'}, 'score': 'high'}),
      ('score_nan', {'document': {'id': '1', 'contents': 'x'}, 'score': float('nan')}),
      ('score_huge', {'document': {'id': '1', 'contents': 'x'}, 'score': 10**400}),
  )
  def test_malformed_document_fails_only_its_query(self, document):
    good = {'document': _document('b', 0), 'score': 1.0}
    with _server(lambda *_: {'result': [[good, document], [good]]}) as (url, _):
      retriever = _retriever(url)
      found = retriever.search(['a', 'b'], 3)
    self.assertIsNone(found[0])
    self.assertEqual(found[1][0].id, 'b-0')

  @parameterized.parameters(
      ({},),
      ({'results': None},),
      ({'results': {'id': 1}},),
      ({'results': [3]},),
      ({'results': [{'id': '1'}]},),
      ({'results': [{'id': '1', 'content': None}]},),
      ({'result': []},),
  )
  def test_malformed_ragen_answers(self, reply):
    with _server(lambda *_: reply) as (url, _):
      self.assertEqual(_retriever(url, dialect='ragen').search(['a', 'b'], 1), [None, None])

  def test_agent_never_reads_the_error(self):
    with _server(lambda *_: (500, b'Traceback: secret')) as (url, _):
      env = search.SearchEnv(TASK, _retriever(url))
      env.reset()
      observation, *_, info = env.step('<search>a</search>')
    self.assertEqual(observation, '\n\n<information></information>\n\n')
    self.assertTrue(info['retrieval_failed'])


class JitterTest(absltest.TestCase):

  def test_retries_leave_the_global_random_state(self):
    before = random.getstate()
    with self.assertRaises(http_client.Temporary):
      http_client.with_retries(self._fail, 2, 0.0, lambda seconds: None)
    self.assertEqual(random.getstate(), before)

  def _fail(self, number):
    raise http_client.Temporary('no')


class CacheTest(absltest.TestCase):

  def test_hits_are_not_sent(self):
    with _server(lambda question, _: _search_r1(question)) as (url, questions):
      retriever = _retriever(url)
      first = retriever.search(['a', 'b'], 1)
      first[0].append('changed by the caller')
      second = retriever.search(['b', 'a', 'c'], 1)
      self.assertEqual([passages[0].id for passages in second], ['b-0', 'a-0', 'c-0'])
      self.assertLen(second[1], 1)
      self.assertEqual(questions[1][1]['queries'], ['c'])
      self.assertLen(questions, 2)
      retriever.search(['a'], 2)  # another top_k is another question
      self.assertLen(questions, 3)

  def test_oldest_is_evicted_first(self):
    with _server(lambda question, _: _search_r1(question)) as (url, questions):
      retriever = _retriever(url, cache_size=2)
      for query in ('a', 'b', 'a', 'c', 'b', 'a'):  # c pushes a out
        retriever.search([query], 1)
    self.assertEqual(
        [question['queries'] for _, question in questions], [['a'], ['b'], ['c'], ['a']]
    )

  def test_failures_are_not_cached(self):
    with _server(lambda question, number: (500, b'') if number == 0 else _search_r1(question)) as (
        url,
        _,
    ):
      retriever = _retriever(url)
      self.assertEqual(retriever.search(['a'], 1), [None])
      self.assertNotIn(None, retriever.search(['a'], 1))


class UserErrorsTest(parameterized.TestCase):

  @parameterized.parameters(
      '',
      'localhost:8000',
      'ftp://host',
      'http://',
      'http://host:port',
      'http://[::1',
      'http://a b',
      None,
      3,
  )
  def test_url(self, url):
    with self.assertRaisesRegex(types.UserError, 'http://host:port'):
      http.HttpRetriever(url)


class WaitTest(parameterized.TestCase):

  @parameterized.parameters(
      (None, 0.0),
      ('0', 0.0),
      ('-3', 0.0),
      ('nan', 0.0),
      ('inf', 0.0),
      ('soon', 0.0),
      ('2.5', 2.5),
      ('300', 300.0),
  )
  def test_retry_after_in_seconds(self, header, seconds):
    self.assertEqual(http_client._parse_seconds(header), seconds)

  def test_retry_after_as_a_date(self):
    with mock.patch.object(time, 'time', return_value=1_445_412_400.0):
      self.assertEqual(http_client._parse_seconds('Wed, 21 Oct 2015 07:28:00 GMT'), 80.0)
      self.assertEqual(http_client._parse_seconds('Wed, 21 Oct 2015 07:26:00 GMT'), 0.0)

  @parameterized.parameters((0.0, 60.0), (30.0, 30.0), (300.0, 300.0), (9999.0, 600.0))
  def test_wait_is_what_the_server_asks_for(self, asked_s, longest_s):
    waits = []

    def attempt(number):
      if number < 2:
        raise http_client.Temporary('HTTP status 429', asked_s)
      return 'answer'

    with mock.patch.object(http_client, '_JITTER', random.Random(0)):
      self.assertEqual(http_client.with_retries(attempt, 3, 1000.0, waits.append), 'answer')
    self.assertEqual(waits, [longest_s, longest_s])


if __name__ == '__main__':
  absltest.main()
