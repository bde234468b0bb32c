"""Messages between the processes of a run, through the key-value store of jax.distributed.

Bytes of one process in, bytes of all processes out. Nothing is dispatched to an accelerator, so
that a message does not queue behind a computation there. Process 0 collects and publishes.

  stppo/<number>/from/<process>/<chunk>    one per process, deleted by process 0 when it is read
  stppo/<number>/all/<chunk>               deleted once every process has sent the next message
  stppo/posts/<name>                       what one process left for the others
"""

import json
from typing import Any

import jax

CHUNK_BYTES = 1 << 20  # of one value
WAIT_MS = 1000  # of one call; between calls Python handles signals


class Exchange:
  """Gathers messages. Every process calls `gather` equally often, from one thread.

  Args:
    client: of the key-value store, as jax.distributed has it.
    process: the index of this process.
    num_processes: how many take part.
    chunk_bytes: a longer message is sent in several values.
  """

  def __init__(self, client: Any, process: int, num_processes: int, chunk_bytes: int = CHUNK_BYTES):
    self._client, self._process, self._num_processes = client, process, num_processes
    self._chunk_bytes, self._number = chunk_bytes, 0

  def gather(self, message: bytes) -> list[bytes]:
    """Returns the messages of all processes, in their order; waits for the last one.

    A process that dies ends the others (see lifeline.py), so there is no time limit.
    """
    self._number += 1
    own, published = (f'stppo/{self._number}/{name}' for name in ('from', 'all'))
    if self._process:
      self._send(f'{own}/{self._process}', message)
      joined = self._receive(published)
    else:
      messages = [message]
      for process in range(1, self._num_processes):
        messages.append(self._receive(f'{own}/{process}'))
        self._client.key_value_delete(f'{own}/{process}')
      # Each process has read the previous message, or it would not have sent this one.
      self._client.key_value_delete(f'stppo/{self._number - 1}')
      joined = json.dumps([len(part) for part in messages]).encode() + b'\n' + b''.join(messages)
      self._send(published, joined)
    sizes, _, joined = joined.partition(b'\n')
    ends = [0]
    for size in json.loads(sizes):
      ends.append(ends[-1] + size)
    return [joined[start:end] for start, end in zip(ends, ends[1:])]

  def post(self, name: str, text: str) -> None:
    """Leaves a text for the others under a name; not every process has to call it."""
    self._client.key_value_set_bytes(f'stppo/posts/{name}', text.encode('utf-8'), True)

  def posted(self, name: str) -> str:
    """Returns the text that any process left under a name; '' without one. Does not wait."""
    try:
      return self._client.key_value_try_get_bytes(f'stppo/posts/{name}').decode('utf-8')
    except jax.errors.JaxRuntimeError as error:
      if 'NOT_FOUND' not in str(error):
        raise
      return ''

  def _send(self, name, message):
    """Writes the chunks of a message; the first one begins with their number."""
    size = self._chunk_bytes
    chunks = [message[i : i + size] for i in range(0, len(message), size)] or [b'']
    chunks[0] = b'%d\n' % len(chunks) + chunks[0]
    for i, chunk in enumerate(chunks):
      self._client.key_value_set_bytes(f'{name}/{i}', chunk)

  def _receive(self, name):
    count, _, message = self._read(f'{name}/0').partition(b'\n')
    return message + b''.join(self._read(f'{name}/{i}') for i in range(1, int(count)))

  def _read(self, key):
    while True:
      try:
        return self._client.blocking_key_value_get_bytes(key, WAIT_MS)
      except jax.errors.JaxRuntimeError as error:
        if 'DEADLINE_EXCEEDED' not in str(error):
          raise
