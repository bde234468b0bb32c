"""Checkpoints in a bucket of Google Cloud Storage: what replaces locks, renames and checksums.

  locks      an object that its holder writes again every 20 seconds, on the condition that nobody
             else has written it. A run takes over an object that stays as it is for 90 seconds.
  renames    Orbax writes commit_success.txt last. A checkpoint without it is not taken.
  checksums  the store computes a digest of each object. Checkpoints list them, so that a start
             compares digests and reads no arrays.

The packages of the extra `bucket` are imported when a folder is in a bucket.
"""

from collections.abc import Callable
from collections.abc import Iterator
import contextlib
import errno
import functools
import json
import logging as standard_logging
import os
import socket
import threading
import time
from typing import Any

from absl import logging

from stppo_jax import requirements
from stppo_jax.types import RunError
from stppo_jax.types import UserError

_SCHEME = 'gs://'
_LEASE = 'in_use.json'
_BEAT_S = 20.0  # between two writes of the lease
_EXPIRES_S = 90.0  # without a write of its holder, the lease is free
_REQUEST_S = 15.0  # for a request to the lease
_SETTING = '--config.train.checkpoint_folder'

_leases: dict[str, '_Lease'] = {}  # held by this process, by folder


def check_packages() -> None:
  """Raises a UserError if a package is missing that buckets need."""
  try:
    import gcsfs  # noqa: F401
    from google.cloud import storage  # noqa: F401
  except ImportError as error:
    raise UserError(
        f'{_SETTING}=gs://.. needs {error.name}: {requirements.install_command("bucket")}'
    ) from error
  # gcsfs logs a stack for each request that it gives up. Whoever sent the request reports it.
  standard_logging.getLogger('gcsfs').setLevel(standard_logging.CRITICAL)


@functools.cache
def errors() -> tuple[type[Exception], ...]:
  """Returns what the packages raise if the store does not answer, or answers with an error."""
  import aiohttp
  from google.api_core import exceptions
  from google.auth import exceptions as auth_exceptions

  return (OSError, aiohttp.ClientError, exceptions.GoogleAPIError, auth_exceptions.GoogleAuthError)


def _store():
  """Returns the file system that Orbax uses, too, without what it remembers of folders."""
  import fsspec

  store = fsspec.filesystem('gcs', finalize_on_close=True)
  store.invalidate_cache()
  return store


def read_text(path: str) -> str:
  """Returns the text of an object. FileNotFoundError: there is none."""
  try:
    return _store().cat_file(path).decode('utf-8')
  except FileNotFoundError as error:
    raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path) from error


def write_text(path: str, text: str) -> None:
  """Writes an object. A reader sees the former text or this one."""
  _store().pipe_file(path, text.encode('utf-8'))


def names(folder: str) -> list[str]:
  """Returns the names in a folder; [] if there is no such folder."""
  try:
    paths = _store().ls(folder, detail=False)
  except FileNotFoundError:
    return []
  return [path.rstrip('/').rsplit('/', 1)[-1] for path in paths]


def digests(folder: str) -> dict[str, list[Any]]:
  """Returns {name: [bytes, the store's digest]} of all objects below a folder."""
  root = folder.removeprefix(_SCHEME).rstrip('/') + '/'
  objects = _store().find(folder, detail=True)
  return {
      path.removeprefix(root): [info['size'], info.get('md5Hash') or info.get('crc32c')]
      for path, info in objects.items()
  }


def remove(folder: str) -> None:
  """Removes all objects below a folder, if the store answers."""
  with contextlib.suppress(*errors()):
    _store().rm(folder, recursive=True)


@contextlib.contextmanager
def hold(folder: str, place: str) -> Iterator[None]:
  """Context manager in which this process alone may write checkpoints into `folder`.

  Args:
    folder: of checkpoints, in a bucket.
    place: the folder of the run. Its lock shows that no other process holds a lease for it.

  Raises a UserError if another run holds it, or the store does not answer.
  """
  check_packages()
  lease = _Lease(folder, place)
  try:
    lease.acquire()
  except errors() as error:
    raise UserError(
        f'{_SETTING}={folder!r} cannot be used ({_reason(error)}): give a bucket that exists, and '
        'credentials that may list, read, write and delete its objects'
    ) from error
  _leases[folder] = lease
  try:
    with lease.beating():
      yield
  finally:
    del _leases[folder]
    lease.release()


def require_held(folder: str) -> None:
  """Raises a RunError if another run has taken over a folder that this process holds."""
  lease = _leases.get(folder)
  if lease is not None:
    lease.require_held()


class _Lease:
  """An object with the holder of a folder. Each write names the generation that it replaces."""

  def __init__(
      self,
      folder: str,
      place: str,
      clock: Callable[[], float] = time.monotonic,
      sleep: Callable[[float], None] = time.sleep,
  ):
    self._folder = folder
    self._clock = clock
    self._sleep = sleep
    host = socket.gethostname()
    self._record = {
        'holder': f'process {os.getpid()} on {host}',
        'place': f'{host} {os.stat(place).st_ino} {os.path.realpath(place)}',
    }
    self._generation = 0  # the object that this process wrote last
    self._lock = threading.Lock()  # protects the generation
    self._stop = threading.Event()

  @functools.cached_property
  def _bucket(self):
    from google.cloud import storage

    return storage.Client().bucket(self._folder.removeprefix(_SCHEME).partition('/')[0])

  @property
  def _name(self):
    path = self._folder.removeprefix(_SCHEME).partition('/')[2].rstrip('/')
    return f'{path}/{_LEASE}' if path else _LEASE

  def acquire(self) -> None:
    """Takes the lease. Waits if another run may hold it. UserError: it does."""
    from google.api_core import exceptions

    generation, record = self._read()
    if generation and record.get('place') != self._record['place']:
      generation = self._watch(generation, record)
    try:
      self._write(generation)
    except exceptions.PreconditionFailed as error:
      raise self._in_use(self._read()[1]) from error

  def _watch(self, generation, record):
    """Waits until the lease of another run expires; returns its generation, 0 if it ended."""
    logging.warning(
        '%s=%r: %s used it; waiting %g s to see whether it still does',
        _SETTING,
        self._folder,
        record.get('holder'),
        _EXPIRES_S,
    )
    deadline = self._clock() + _EXPIRES_S
    while self._clock() < deadline:
      self._sleep(_BEAT_S / 4)
      newest, record = self._read()
      if newest == 0:
        return 0
      if newest != generation:
        raise self._in_use(record)
    return generation

  def _in_use(self, record):
    holder = record.get('holder') or 'another run'
    return UserError(
        f'{_SETTING}={self._folder!r} is in use by {holder}: wait for its end, or give another '
        'folder'
    )

  def _write(self, generation):
    """Writes the object in place of that generation; 0: only if there is none."""
    blob = self._bucket.blob(self._name)
    blob.metadata = self._record
    blob.upload_from_string(
        json.dumps(self._record), if_generation_match=generation, timeout=_REQUEST_S, retry=None
    )
    self._generation = blob.generation

  def _read(self):
    """Returns (generation, record) of the object; (0, {}) if there is none."""
    blob = self._bucket.get_blob(self._name, timeout=_REQUEST_S, retry=None)
    if blob is None:
      return 0, {}
    return blob.generation, blob.metadata or {}

  @contextlib.contextmanager
  def beating(self) -> Iterator[None]:
    """Context manager in which a thread writes the lease again and again."""
    thread = threading.Thread(target=self._beat, name='lease', daemon=True)
    thread.start()
    try:
      yield
    finally:
      self._stop.set()
      thread.join()

  def _beat(self):
    from google.api_core import exceptions

    silent = False
    while not self._stop.wait(_BEAT_S):
      try:
        with self._lock:
          self._write(self._generation)
      except exceptions.PreconditionFailed:
        if not self._is_still_ours():
          return  # `require_held` ends the run at its next checkpoint
      except errors() as error:
        if not silent:
          logging.warning('%s does not answer (%s); trying again', self._folder, _reason(error))
        silent = True
      else:
        if silent:
          logging.warning('%s answers again', self._folder)
        silent = False

  def _is_still_ours(self):
    """Whether the object is this process's, by a write whose answer was lost."""
    with contextlib.suppress(*errors()), self._lock:
      generation, record = self._read()
      if generation and record != self._record:
        return False
      self._generation = generation  # 0: someone deleted it, and the next write makes it again
    return True

  def require_held(self) -> None:
    """Raises a RunError if another run has written the lease. A store without answer is no sign."""
    if not self._is_still_ours():
      raise RunError(
          f'{_SETTING}={self._folder!r}: another run has taken it over, while the store did not '
          'hear of this one: end one of them'
      )

  def release(self) -> None:
    """Deletes the object, if the store answers and it is still this process's."""
    blob = self._bucket.blob(self._name)
    with contextlib.suppress(*errors()):
      blob.delete(if_generation_match=self._generation, timeout=_REQUEST_S, retry=None)


def _reason(error):
  return f'{type(error).__name__}: {" ".join(str(error).split())[:200]}'
