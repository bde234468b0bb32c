"""Time of an update: seconds per phase for the metrics, and a profiler trace of N updates.

TensorBoard (with the plugin xprof) and Perfetto read the trace, which names the phases.
"""

import collections
from collections.abc import Callable
from collections.abc import Iterator
import contextlib
import os
import time

from absl import logging
import jax


class Timing(collections.defaultdict):
  """The seconds of each phase, filled by `with timing('gen'):`; repeated phases add up."""

  def __init__(self):
    super().__init__(float)

  @contextlib.contextmanager
  def __call__(self, phase: str) -> Iterator[None]:
    started = time.perf_counter()
    with jax.profiler.TraceAnnotation(phase):
      yield
    self[phase] += time.perf_counter() - started

  def metrics(self) -> dict[str, float]:
    """Returns the seconds under the names of metrics.jsonl."""
    return {f'timing_s/{phase}': seconds for phase, seconds in self.items()}


@contextlib.contextmanager
def trace_updates(
    folder: str, count: int, first: int, last: int
) -> Iterator[Callable[[int], None]]:
  """Context manager; yields a function to call before each update with the number of updates done.

  The trace starts after update first + 1, which compiles, or earlier if the run has fewer updates
  left. It ends `count` updates later, or with update `last`. `count` 0 traces nothing.
  """
  begin = max(first, min(first + 1, last - count))
  with contextlib.ExitStack() as trace:

    def before_update(n):
      if n == begin + count:
        trace.close()
      elif count and n == begin:
        os.makedirs(folder, exist_ok=True)
        trace.enter_context(jax.profiler.trace(folder))
        trace.callback(logging.info, 'the trace is in %s: tensorboard --logdir=%s', folder, folder)

    yield before_update
