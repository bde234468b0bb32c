"""Messages between processes: chunks, order and cleaning up, with threads for the processes."""

import subprocess
import sys
import threading
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized
import jax

from stppo_jax.distributed import hosts
from stppo_jax.distributed import messages
from tests.support import processes

# The client has no public name, so each release of JAX is asked for it.
STORE_OF_JAX = """
import socket
import jax
from stppo_jax.distributed import hosts, messages
with socket.create_server(('localhost', 0)) as server:
  port = server.getsockname()[1]
jax.distributed.initialize(f'localhost:{port}', 1, 0, cluster_detection_method='deactivate')
exchange = messages.Exchange(hosts._distributed_state().client, 0, 1, chunk_bytes=10)
print([exchange.gather(bytes(n) + b'end') for n in (0, 25)] == [[b'end'], [bytes(25) + b'end']])
print(repr(exchange.posted('news')))
exchange.post('news', 'first')
exchange.post('news', 'last')
print(repr(exchange.posted('news')))
"""


class ExchangeTest(parameterized.TestCase):

  @parameterized.parameters(2, 3, 5)
  def test_messages_arrive_ordered_and_are_deleted(self, num_processes):
    store = processes.Store()
    make = lambda i, n: b'%d-' % i + bytes([i, 10, n % 7]) * (n * i)  # with line breaks, 0 to 3 kB

    def run(i):
      exchange = messages.Exchange(store, i, num_processes, chunk_bytes=100)
      return [exchange.gather(make(i, n) if n else b'') for n in range(30)]

    expected = [[make(i, n) if n else b'' for i in range(num_processes)] for n in range(30)]
    for gathered in processes.in_threads(num_processes, run):
      self.assertEqual(gathered, expected)
    self.assertLess(store.largest, 110)
    self.assertTrue(all(key.startswith('stppo/30/') for key in store.values))
    # Two messages of each process at most are there at once, of at most 29 * 3 * i + 2 bytes.
    chunks = sum(29 * 3 * i // 100 + 1 for i in range(num_processes))
    self.assertLessEqual(store.most, 2 * chunks)

  def test_posted_messages_are_read_without_waiting(self):
    store = processes.Store()
    first, second = (messages.Exchange(store, i, 2) for i in range(2))
    self.assertEqual(second.posted('save 3'), '')
    first.post('save 3', 'die Platte ist voll: ä')
    self.assertEqual(second.posted('save 3'), 'die Platte ist voll: ä')
    second.post('save 3', 'again')
    self.assertEqual(first.posted('save 3'), 'again')
    self.assertEqual(first.posted('save 4'), '')

  def test_the_store_of_jax_has_what_it_uses(self):
    program = [sys.executable, '-c', STORE_OF_JAX]
    done = subprocess.run(program, capture_output=True, text=True, timeout=120, check=False)
    self.assertEqual(done.stdout.split(), ['True', "''", "'last'"], done.stderr[-2000:])

  def test_an_error_of_the_store_is_raised(self):
    store = mock.Mock()
    store.blocking_key_value_get_bytes.side_effect = jax.errors.JaxRuntimeError('UNAVAILABLE')
    with self.assertRaisesRegex(jax.errors.JaxRuntimeError, 'UNAVAILABLE'):
      messages.Exchange(store, 1, 2).gather(b'')


class ShareTest(absltest.TestCase):

  def test_json_uses_the_store(self):
    store, here = processes.Store(), threading.local()
    self.enterContext(mock.patch.object(jax, 'process_count', lambda: 2))
    self.enterContext(mock.patch.object(jax, 'process_index', lambda: here.index))
    exchanges = [messages.Exchange(store, i, 2) for i in range(2)]
    self.enterContext(mock.patch.object(hosts, '_exchange', lambda: exchanges[here.index]))
    dispatched = self.enterContext(mock.patch.object(hosts, 'multihost_utils'))

    def run(i):
      here.index = i
      return [hosts.share({'process': i, 'é': [i] * 3}), hosts.by_writer(lambda: here.index)]

    values = [{'process': i, 'é': [i] * 3} for i in range(2)]
    self.assertEqual(processes.in_threads(2, run), [[values, 0], [values, 0]])
    dispatched.assert_not_called()


if __name__ == '__main__':
  absltest.main()
