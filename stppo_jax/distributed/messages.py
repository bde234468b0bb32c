"""Messages between the processes of a run, through the key-value store of jax.distributed.

Nothing is dispatched to an accelerator, so a message does not queue behind a computation there.

  stppo/<number>/<process>/<chunk>   deleted once every process has sent the next message
  stppo/posts/<name>                 a text that one process left for the others
"""

from typing import Any

import jax

CHUNK_BYTES = 1 << 20  # limit of one value
WAIT_MS = 1000  # time limit of one call; between calls Python handles signals


class Exchange:
  """Gathers messages. Every process calls `gather` equally often, from one thread.

  Args:
    client: client of the key-value store of jax.distributed.
    process: index of this process.
    num_processes: number of processes.
    chunk_bytes: a longer message is sent in several values.
  """

  def __init__(self, client: Any, process: int, num_processes: int, chunk_bytes: int = CHUNK_BYTES):
    self._client = client
    self._process = process
    self._num_processes = num_processes
    self._chunk_bytes = chunk_bytes
    self._number = 0

  def gather(self, message: bytes) -> list[bytes]:
    """Returns the messages of all processes, in process order; waits for the last one.

    A process that dies ends the others (see `hosts.leave`), so there is no time limit.
    """
    self._number += 1
    self._send(f'stppo/{self._number}/{self._process}', message)
    messages = [
        self._receive(f'stppo/{self._number}/{process}') for process in range(self._num_processes)
    ]
    # Every process has sent this message, so every process has read the previous ones.
    self._client.key_value_delete(f'stppo/{self._number - 1}/{self._process}')
    return messages

  def post(self, name: str, text: str) -> None:
    """Leaves a text for the other processes under a name; any process may call it at any time."""
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
    """Writes the chunks of a message; the first one begins with the number of chunks."""
    size = self._chunk_bytes
    chunks = [message[i : i + size] for i in range(0, len(message), size)] or [b'']
    chunks[0] = b'%d\n' % len(chunks) + chunks[0]
    for i, chunk in enumerate(chunks):
      self._client.key_value_set_bytes(f'{name}/{i}', chunk)

  def _receive(self, name):
    count, _, message = self._read(f'{name}/0').partition(b'\n')
    for i in range(1, int(count)):
      message += self._read(f'{name}/{i}')
    return message

  def _read(self, key):
    while True:
      try:
        return self._client.blocking_key_value_get_bytes(key, WAIT_MS)
      except jax.errors.JaxRuntimeError as error:
        if 'DEADLINE_EXCEEDED' not in str(error):
          raise
