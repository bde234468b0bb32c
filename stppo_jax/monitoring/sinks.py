"""Copies of the metrics for TensorBoard and trackers; none can stop a run.

A sink has `name`, `write(step, numbers)` and `close()`, and may raise anything.
"""

from collections.abc import Callable
from collections.abc import Mapping
import contextlib
import os
import socket
import time
from typing import Any

from absl import logging


class Sinks:
  """The sinks of a run; one that fails is logged once and left out from then on."""

  def __init__(self) -> None:
    self._sinks: list[Any] = []

  def add(self, name: str, make: Callable[[], object]) -> None:
    """Opens a sink; a package that is not installed, or no network, costs one warning."""
    try:
      self._sinks.append(make())
    except ImportError as error:
      logging.warning('no metrics for %s: %s (pip install it)', name, error)
    except Exception as error:  # whatever its package raises
      logging.warning('no metrics for %s (%s: %s)', name, type(error).__name__, error)

  def write(self, step: int, numbers: Mapping[str, int | float]) -> None:
    """Writes finite numbers to all sinks."""
    for sink in list(self._sinks):
      try:
        sink.write(step, numbers)
      except Exception as error:  # as above
        logging.warning('%s takes no more metrics (%s); metrics.jsonl continues', sink.name, error)
        self._sinks.remove(sink)
        with contextlib.suppress(Exception):
          sink.close()

  def close(self) -> None:
    """Closes all sinks."""
    for sink in self._sinks:
      try:
        sink.close()
      except Exception as error:  # as above
        logging.warning('%s did not end cleanly (%s)', sink.name, error)
    self._sinks = []


class TensorBoard:
  """An event file in `workdir`/tensorboard, written by the thread that calls.

  Choice: not tensorboardX's SummaryWriter. Its own thread ends when the disk is full, and then
  each write, its `close` and the end of the process wait for that thread.
  """

  name = 'TensorBoard'

  def __init__(self, workdir: str, first_step: int):
    """Opens a new file; steps from `first_step` on replace those of earlier files."""
    import tensorboardX  # pylint: disable=import-outside-toplevel
    from tensorboardX import proto  # pylint: disable=import-outside-toplevel
    from tensorboardX import summary  # pylint: disable=import-outside-toplevel

    self._event = proto.event_pb2
    self._scalar = summary.scalar
    folder = os.path.join(workdir, 'tensorboard')
    os.makedirs(folder, exist_ok=True)
    name = f'events.out.tfevents.{time.time_ns() // 10**9}.{socket.gethostname()}.{os.getpid()}'
    self._file = tensorboardX.RecordWriter(os.path.join(folder, name))
    self._add(file_version='brain.Event:2')
    start = self._event.SessionLog(status=self._event.SessionLog.START)
    self._add(step=first_step, session_log=start)
    self._file.flush()

  def write(self, step: int, numbers: Mapping[str, int | float]) -> None:
    """Writes one event per number."""
    for name, number in numbers.items():
      self._add(step=step, summary=self._scalar(name, number))
    self._file.flush()

  def close(self) -> None:
    """Closes the file."""
    self._file.close()

  def _add(self, **fields):
    event = self._event.Event(wall_time=time.time_ns() / 1e9, **fields)
    self._file.write(event.SerializeToString())
