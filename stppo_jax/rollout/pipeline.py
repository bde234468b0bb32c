"""The pipeline: batches of episodes that are sampled while others are trained on.

  main    |  train 1  |  train 2  |  train 3  |      staleness 1: while batch 2 is trained on, batch 3
  thread  | 1 |  2    |     3     |     4     |      is sampled with the parameters after update 1

Which parameters sample a batch depends on its number alone, never on who is faster: the same
staleness gives the same run twice. What is sampled and not yet trained on is host data, which a
checkpoint holds as JSON.
"""

import collections
from collections.abc import Callable
from collections.abc import Sequence
from concurrent import futures
import contextlib
import dataclasses
import threading
import time

from absl import logging
import jax
import jax.numpy as jnp
import numpy as np

from stppo_jax import types
from stppo_jax.retrieval import protocol
from stppo_jax.rollout import episode as episode_loop
from stppo_jax.runtime import hosts


@dataclasses.dataclass
class Sampled:
  """A batch of episodes that is yet to be trained on."""

  number: int  # of the batch: its questions and its random key
  staleness: int  # updates between the parameters that sampled it and those it will find
  episodes: list[types.Episode]
  measured: dict[str, float]  # metrics of its sampling: timing_s/gen.., perf/..


@dataclasses.dataclass(frozen=True)
class Batches:
  """The batches of a run by number, from 1: each a function of the parameters, seed and number."""

  agent: object  # evaluation.Agent: plays, and reports what it took
  policy: Callable  # what is trained -> the parameters that play, see `state.Frozen.policy`
  stream: object  # tasks.TaskStream
  group_size: int  # episodes a question
  seed: int
  max_failed_share: float = 1.0  # of a batch's episodes; above it the retriever is waited for
  max_outage_s: float = 0.0  # for so long
  sleep: Callable = time.sleep  # waits for it
  give_up: Callable | None = None  # () -> whether the episodes under way are to be left: Stopped

  def tasks(self, number):
    """The question of each episode."""
    return [task for task in self.stream.take(number - 1) for _ in range(self.group_size)]

  def sample(self, params, number, staleness) -> Sampled:
    """Plays the batch."""
    tasks = self.tasks(number)
    groups = [i // self.group_size for i in range(len(tasks))]
    key, _ = batch_keys(self.seed, number)
    started = time.perf_counter()
    keys = episode_loop.row_keys(key, tasks)
    episodes, replays = play_through(
        lambda: self.agent.play(self.policy(params), tasks, keys, groups, give_up=self.give_up),
        self.agent.retriever,
        self.max_failed_share,
        self.max_outage_s,
        self.sleep,
    )
    measured = {'timing_s/gen': time.perf_counter() - started, 'env/replays': replays}
    measured |= self.agent.report.metrics()
    return Sampled(number, staleness, episodes, measured)


def batch_keys(seed, number):
  """Random keys of a batch: (of its sampling, of its mini-batches)."""
  return jax.random.split(jax.random.fold_in(jax.random.key(seed), number))


class Pipeline:
  """Samples `staleness` batches ahead, in one thread; with 0 there is neither thread nor copy.

  Args:
    sample: (params, number, staleness) -> Sampled, as `Batches.sample`.
    staleness: batches sampled ahead.
    ready: batches that a checkpoint held, the next one first.
  """

  def __init__(self, sample, staleness, ready=()):
    self._sample, self._staleness = sample, staleness
    self._sampling = threading.Lock()
    self._thread = futures.ThreadPoolExecutor(1, 'sampling') if staleness else None
    self._ahead = collections.deque(map(_done, ready))

  def take(self, params, number):
    """Batch `number`; sets the sampling of batch number + staleness going with `params`.

    Numbers rise by one from call to call. The first call has nothing to take and sets all of
    number .. number + staleness going: a run's first batches are less stale than the others.
    Where the batch was Stopped, it stays the next one.
    """
    if not self._staleness:
      return self._sample(params, number, 0)
    own = jax.tree.map(jnp.copy, params)  # training donates its own, and they are overwritten
    for ahead in range(len(self._ahead), self._staleness + 1):
      self._ahead.append(self._thread.submit(self._run, own, number + ahead, ahead))
    batch = self._ahead[0].result()
    self._ahead.popleft()
    return batch

  def contents(self):
    """The batches sampled ahead, the next one first; waits for those under way. None comes after one
    that was Stopped: it is sampled anew when the run goes on."""
    batches = []
    with contextlib.suppress(types.Stopped):
      for future in self._ahead:
        batches.append(future.result())
    return batches

  @contextlib.contextmanager
  def idle(self):
    """Nothing is sampled within: who plays episodes besides has the sampler to himself."""
    with self._sampling:
      yield

  def __enter__(self):
    return self

  def __exit__(self, *unused):
    """Waits for the batch under way; the others are not begun."""
    if self._thread is not None:
      self._thread.shutdown(wait=True, cancel_futures=True)

  def _run(self, params, number, staleness):
    with self._sampling:
      return self._sample(params, number, staleness)


def to_json(batch):
  """A Sampled as what JSON can hold, exactly: a float32 is a double, too."""
  return {
      'number': batch.number,
      'staleness': batch.staleness,
      'measured': dict(batch.measured),
      'episodes': [
          {
              'task': episode.task.id,
              'group': int(episode.group),
              'prompt': episode.prompt.tolist(),
              'turns': [
                  {
                      'tokens': turn.tokens.tolist(),
                      'logp': turn.logp.tolist(),
                      'observation': turn.observation.tolist(),
                      'action': turn.action,
                  }
                  for turn in episode.turns
              ],
              'score': float(episode.score),
              'truncated': bool(episode.truncated),
              'failed': bool(episode.failed),
              'metrics': {name: float(x) for name, x in episode.metrics.items()},
          }
          for episode in batch.episodes
      ],
  }


def from_json(record, tasks):
  """The inverse of `to_json`; `tasks`: those of the batch's episodes, in their order."""
  ids = lambda values: np.array(values, np.int32)
  episodes = []
  for task, row in zip(tasks, record['episodes'], strict=True):
    if task.id != row['task']:
      raise types.UserError(
          f'the checkpoint holds an episode on question {row["task"]!r} where {task.id!r} is due now: '
          'resume with the same questions, or give another --workdir'
      )
    turns = [
        types.Turn(
            ids(turn['tokens']),
            np.array(turn['logp'], np.float32),
            ids(turn['observation']),
            turn['action'],
        )
        for turn in row['turns']
    ]
    episodes.append(
        types.Episode(
            task,
            row['group'],
            ids(row['prompt']),
            turns,
            row['score'],
            row['truncated'],
            row['failed'],
            row['metrics'],
        )
    )
  return Sampled(record['number'], record['staleness'], episodes, record['measured'])


def _done(batch):
  future = futures.Future()
  future.set_result(batch)
  return future


_FIRST_WAIT_S = 1.0
_LONGEST_WAIT_S = 60.0


def play_through(
    play: Callable[[], list[types.Episode]],
    retriever: protocol.Retriever,
    max_failed_share: float,
    max_outage_s: float,
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> tuple[list[types.Episode], int]:
  """(episodes, how often they were played again) of a batch whose searches were answered.

  If retrieval failed in more than `max_failed_share` of the episodes, they are thrown away; once the
  retriever answers a probe, `play()` is called again. Waits double from 1 s to 60 s. A RunError
  after `max_outage_s` of this; single failures below the share are the update's to mask.
  """
  episodes, replays = play(), 0
  started, wait_s = clock(), _FIRST_WAIT_S
  while (share := failed_share(episodes)) > max_failed_share:
    left_s = hosts.by_writer(lambda: max_outage_s - (clock() - started))
    if left_s <= 0:
      raise types.RunError(
          f'retrieval failed in {share:.0%} of the episodes, and did so for {max_outage_s:g} s '
          f'(config.retriever.max_outage_s): see to the retriever; the same command then resumes'
      )
    wait_s = min(wait_s, left_s)
    logging.warning(
        'retrieval failed in %.0f%% of the episodes: none is trained on; the retriever is '
        'asked again in %.0f s',
        100 * share,
        wait_s,
    )
    sleep(wait_s)
    wait_s = min(2 * wait_s, _LONGEST_WAIT_S)
    if hosts.by_writer(answers, retriever):
      episodes, replays = play(), replays + 1
  return episodes, replays


def pause(
    seconds: float, stop_requested: Callable[[], bool], sleep: Callable[[float], None] = time.sleep
) -> None:
  """Sleeps; raises Stopped within a second of `stop_requested()`."""
  while seconds > 0:
    hosts.end_if(stop_requested)
    sleep(min(seconds, 1.0))
    seconds -= 1.0


def failed_share(episodes: Sequence[types.Episode]) -> float:
  """The share of the episodes in which a search failed; prompts that were too long are no search."""
  failed = [episode.failed and not episode.metrics.get('prompt_too_long') for episode in episodes]
  return sum(failed) / max(len(failed), 1)


def answers(retriever: protocol.Retriever) -> bool:
  """Whether the retriever answers a query; each probe is another, lest a cache answer it."""
  return retriever.search([f'probe {time.time_ns()}'], 1)[0] is not None
