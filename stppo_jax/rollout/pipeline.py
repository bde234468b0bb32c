"""The pipeline: samples batches of episodes while others are trained on.

  main    |  train 1  |  train 2  |  train 3  |    staleness 1: while batch 2 is trained on, batch 3
  thread  | 1 |  2    |     3     |     4     |    is sampled with the parameters after update 1

Which parameters sample a batch depends only on its number, never on timing: the same staleness
gives the same run twice. A checkpoint stores the batches ahead that are sampled. For batches that
are still to be sampled, it stores the parameters that will sample them.
"""

import collections
from collections.abc import Callable
from collections.abc import Sequence
from concurrent import futures
import dataclasses
import threading

from stppo_jax.distributed import hosts
from stppo_jax.rollout import sequences
from stppo_jax.rollout.batching import Sampled
from stppo_jax.rollout.batching import Unsampled


class Pipeline:
  """Samples `staleness` batches ahead, in one thread. With 0 there is no thread.

  Args:
    sample: (copy, number, staleness) -> Sampled, as `Batches.sample`.
    staleness: batches sampled ahead.
    ahead: batches ahead that a checkpoint held, the next one first. Those that are still to be
      sampled are begun by the first `take`.
    copy: trained parameters -> those that `sample` takes. With staleness the copy must not share
      buffers with the trained parameters, because training overwrites them meanwhile.
    receive: gives all processes the batch that a function returns on process 0, where it is
      sampled. By default all processes sample it together.
  """

  def __init__(
      self,
      sample: Callable[[object, int, int], Sampled],
      staleness: int,
      ahead: Sequence[Sampled | Unsampled] = (),
      copy: Callable[[sequences.PolicyParams], object] = lambda params: params,
      receive: Callable[[Callable[[], Sampled]], Sampled] = lambda wait: wait(),
  ):
    self._sample = sample
    self._receive = receive
    self._staleness = staleness
    self._copy = copy
    self._sampling = threading.Lock()  # held while a batch is sampled
    self._thread = futures.ThreadPoolExecutor(1, 'sampling') if staleness else None
    self._queue: collections.deque[_QueuedBatch] = collections.deque(map(_QueuedBatch, ahead))

  def take(self, params: sequences.PolicyParams, number: int) -> Sampled:
    """Returns batch `number`; starts sampling batch number + staleness with `params`.

    Numbers rise by one from call to call. The first call starts all of number .. number +
    staleness, so a run's first batches are less stale than the others. A batch that was Stopped
    stays the next one.
    """
    copy = self._copy(params)
    if self._thread is None:
      return self._receive(lambda: self._sample(copy, number, 0))
    for staleness in range(len(self._queue), self._staleness + 1):
      self._queue.append(_QueuedBatch(Unsampled(number + staleness, staleness, copy)))
    for queued in self._queue:
      if queued.future is None and hosts.is_writer():  # several processes have engines
        queued.future = self._thread.submit(self._run, queued)
    first = self._queue[0]

    def wait() -> Sampled:
      assert first.future is not None
      return first.future.result()

    batch = self._receive(wait)
    self._queue.popleft()
    return batch

  def put_back(self, batch: Sampled) -> None:
    """Makes a batch the next one again, because its update was stopped.

    Without staleness the next `take` samples it again, from the same parameters.
    """
    if self._thread is not None:
      self._queue.appendleft(_QueuedBatch(batch))

  def contents(self) -> list[Sampled | Unsampled]:
    """Returns the batches ahead, the next one first.

    Does not wait for the batch in progress.
    """
    return [queued.batch for queued in self._queue]

  def idle(self) -> threading.Lock:
    """Context manager that pauses background sampling, so that evaluation can use the sampler."""
    return self._sampling

  def __enter__(self) -> 'Pipeline':
    return self

  def __exit__(self, *unused: object) -> None:
    """Waits for the batch in progress; the others are not started."""
    if self._thread is not None:
      self._thread.shutdown(wait=True, cancel_futures=True)

  def _run(self, queued: '_QueuedBatch') -> Sampled:
    """Returns the batch. Samples it if needed, and then frees the copy of the parameters."""
    batch = queued.batch
    if isinstance(batch, Unsampled):
      with self._sampling:
        batch = self._sample(batch.params, batch.number, batch.staleness)
        queued.batch = batch
    return batch


@dataclasses.dataclass
class _QueuedBatch:
  """A batch ahead; `future` samples it, unless the checkpoint held it."""

  batch: Sampled | Unsampled
  future: futures.Future[Sampled] | None = None
