"""Processes of a run, as threads, the key-value store between them, and waiting for others."""

import contextlib
import socket
import threading
import time

import jax


class Store:
  """A key-value store that behaves as that of jax.distributed; each read times out once."""

  def __init__(self):
    self.values, self.changed, self.most = {}, threading.Condition(), 0
    self.largest, self.timeouts = 0, 0

  def key_value_set_bytes(self, key, value, allow_overwrite=False):
    with self.changed:
      assert allow_overwrite or key not in self.values, key
      self.values[key] = value
      self.most = max(self.most, len(self.values))
      self.largest = max(self.largest, len(value))
      self.changed.notify_all()

  def blocking_key_value_get_bytes(self, key, timeout_ms):
    del timeout_ms
    with self.changed:
      if key not in self.values and not self.timeouts:
        self.timeouts += 1
        raise jax.errors.JaxRuntimeError('DEADLINE_EXCEEDED: GetKeyValue() timed out')
      self.changed.wait_for(lambda: key in self.values)
      return self.values[key]

  def key_value_try_get_bytes(self, key):
    with self.changed:
      if key not in self.values:
        raise jax.errors.JaxRuntimeError(f'NOT_FOUND: TryGetKeyValue() {key}')
      return self.values[key]

  def key_value_delete(self, key):
    with self.changed:
      for name in [name for name in self.values if (name + '/').startswith(key + '/')]:
        del self.values[name]


def in_threads(num_processes, function):
  """Returns [function(0), function(1), ..], each called in a thread."""
  results = [None] * num_processes

  def call(i):
    results[i] = function(i)

  threads = [threading.Thread(target=call, args=(i,), daemon=True) for i in range(num_processes)]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join(60)
  return results


def wait_for(condition, seconds=60):
  """Returns the value of the condition once it is true."""
  deadline = time.monotonic() + seconds
  while not (value := condition()):
    assert time.monotonic() < deadline, 'it did not come true'
    time.sleep(0.005)
  return value


@contextlib.contextmanager
def unused_address():
  """Yields an address at which nobody listens."""
  with socket.socket() as bound:
    bound.bind(('127.0.0.1', 0))
    yield f'http://127.0.0.1:{bound.getsockname()[1]}'
