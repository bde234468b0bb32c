"""The batches of a run: the questions and groups of each, and how its episodes are played.

A batch depends only on the parameters that sample it, the seed and its number. A checkpoint stores
batches that are sampled and not yet trained on as JSON.
"""

import collections
from collections.abc import Callable
from collections.abc import Collection
from collections.abc import Iterable
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import itertools
import time
from typing import Any
from typing import Protocol
from typing import TypeVar

from absl import logging
import jax
import numpy as np

from stppo_jax import types
from stppo_jax.data import tasks as tasks_lib
from stppo_jax.distributed import hosts
from stppo_jax.envs import guard as guard_lib
from stppo_jax.envs import stepping
from stppo_jax.retrieval import protocol
from stppo_jax.rollout import agent as agent_lib
from stppo_jax.rollout import episode as episode_lib
from stppo_jax.rollout import sequences
from stppo_jax.rollout.batching import batch_keys
from stppo_jax.rollout.batching import Sampled
from stppo_jax.rollout.batching import Unsampled
from stppo_jax.stop_signal import NEVER
from stppo_jax.stop_signal import StopSignal

Questions = Mapping[int, types.Task]  # number of a group -> its question
Groups = Mapping[int, list[types.Episode]]  # number of a group -> its rows
Item = TypeVar('Item')


class DemonstrationPlayer(Protocol):
  """Plays some rows of the groups, see `demonstrations.Demonstrator`."""

  def count(self, position: int, task: types.Task) -> int:
    """Returns how many rows of the group at a position of the batch are demonstrations."""

  def play(
      self, key: jax.Array, tasks: Sequence[types.Task], groups: Sequence[int]
  ) -> list[types.Episode]:
    """Plays one episode per task; returns its rows, one per role, in the order of the tasks."""


class RowAllocation(Protocol):
  """Divides the rows of a batch among its questions, see `systems.dars.Allocation`."""

  @property
  def rule(self) -> str:
    """The name of config.rollout.allocation."""

  @property
  def first_rows(self) -> int:
    """Episodes that every question gets first."""

  def extra_rows(self, scores: Sequence[float], num_rows: int) -> list[int]:
    """Divides `num_rows` further episodes among questions with these mean scores."""


@dataclasses.dataclass(frozen=True)
class Batches:
  """The batches of a run, numbered from 1: each depends only on parameters, seed and number."""

  agent: agent_lib.Agent
  # Trained parameters -> the policy's, see `Learners.policy`.
  policy: Callable[[sequences.PolicyParams], sequences.PolicyParams]
  stream: tasks_lib.TaskStream
  group_size: int  # episodes per question
  seed: int
  max_failed_share: float = 1.0  # share of episodes; above it the run waits for the retriever
  max_outage_s: float = 0.0  # longest wait
  stop_signal: StopSignal = NEVER  # ends the batch in progress, with Stopped
  max_num_gen_batches: int = 1  # rounds of sampling, see `sample`
  max_failed: float = 0.5  # share of a batch's episodes whose environment may raise
  rows_per_episode: int = 1
  demonstrator: DemonstrationPlayer | None = None
  allocation: RowAllocation | None = None  # None: all groups have the same size

  def copy(self, params: sequences.PolicyParams) -> object:
    """Returns the policy of trained parameters as it is sampled from, in separate buffers."""
    return self.agent.sampler.copy(self.policy(params))

  def sample(self, params: object, number: int, staleness: int) -> Sampled:
    """Plays the batch with `params`, which `copy` has returned.

    With `max_num_gen_batches` above 1, groups whose scores are all equal give no advantage and are
    replaced by groups of further questions (dynamic sampling: DAPO, arXiv 2503.14476, section 3.2).
    Questions and keys of a round depend on the batch's number and the round, and which groups are
    replaced also depends on `params`. So a resumed run repeats all of it.

    With an `allocation`, a second round samples the rest of the batch by the scores of the first.
    Then `group_size` is the mean size of a group. Both rounds form one group.

    Demonstrations are the last rows of their groups. They are played when the questions are known.

    Choice: a round plays as many questions as are missing. Groups that stay without a spread after
    the last round stay, so that the batch has its size. verl raises an error there.
    """
    started = time.perf_counter()
    key, _ = batch_keys(self.seed, number)
    questions = dict(enumerate(self.stream.take(number - 1)))  # by the numbers of their groups
    rounds = [self._play(params, key, questions, self._first_sizes(questions))]
    _check_prompts(rounds[0].episodes, number)
    groups = dict(rounds[0].groups)

    # Dynamic sampling: other questions replace those whose scores are all equal.
    used = {task.id for task in questions.values()}
    while len(rounds) < self.max_num_gen_batches:
      equal = [i for i, group in groups.items() if not has_spread(group)]
      if not equal:
        break
      replaced = [questions[i] for i in equal]
      further = self.stream.further(number - 1, len(rounds), replaced, used)
      used |= {task.id for task in further}
      new_questions = dict(zip(equal, further, strict=True))
      round_key = jax.random.fold_in(key, len(rounds))
      sizes = self._first_sizes(new_questions)
      one_round = self._play(params, round_key, new_questions, sizes)
      rounds.append(one_round)
      for i, group in one_round.groups.items():
        if has_spread(group):
          groups[i] = group
          questions[i] = new_questions[i]

    # Allocation: a second round of the same questions makes the groups larger.
    if self.allocation is not None:
      round_key = jax.random.fold_in(key, 1)
      one_round = self._play(params, round_key, questions, self._further_sizes(groups))
      rounds.append(one_round)
      for i, group in one_round.groups.items():
        groups[i] = groups[i] + group

    played = _joined(one_round.episodes for one_round in rounds)
    demonstrated = self._demonstrate(key, questions)
    check_environment(played + _joined(demonstrated.values()), self.max_failed)
    measured = self._measured(rounds, groups)
    measured['timing_s/gen'] = time.perf_counter() - started
    episodes = []
    for i in questions:
      episodes += groups.get(i, [])
      episodes += demonstrated.get(i, [])
    return Sampled(number, staleness, episodes, measured)

  def _measured(self, rounds: Sequence['_Round'], groups: Groups) -> dict[str, float]:
    """Returns the metrics of a batch of these groups."""
    report = sum((one_round.report for one_round in rounds), sequences.Report())
    measured = report.metrics()
    measured['env/replays'] = sum(one_round.replays for one_round in rounds)
    if self.max_num_gen_batches > 1:
      played_groups = _joined(one_round.groups.values() for one_round in rounds)
      measured['train/num_gen_batches'] = len(rounds)
      measured['rollout/questions'] = len(played_groups)
      measured['rollout/groups_with_spread'] = _share_with_spread(played_groups)
      measured['rollout/groups_kept'] = _share_with_spread(groups.values())
    if self.allocation is not None:  # each episode has one row
      sizes = [len(group) for group in groups.values()]
      measured['rollout/group_size_max'] = max(sizes)
      measured['rollout/group_size_min'] = min(sizes)
    return measured

  def receive(self, wait: Callable[[], Sampled]) -> Sampled:
    """Returns the batch that `wait` returns. All processes have sampled it together."""
    return wait()

  def restored(self, record: Mapping[str, Any]) -> Sampled:
    """Returns a batch that a checkpoint holds as JSON, with its questions."""
    questions = self.stream.take(record['number'] - 1)
    known: dict[str, types.Task] = {}
    if self.max_num_gen_batches > 1:  # some may have been replaced
      known = self.stream.by_id()
    tasks = []
    for row in record['episodes']:
      task = questions[row['group'] // self.rows_per_episode]
      tasks.append(known.get(row['task'], task))
    return from_json(record, tasks)

  def to_save(self, ahead: Sequence[Sampled | Unsampled]) -> list[Sampled | Unsampled]:
    """Returns the batches ahead that a checkpoint stores."""
    return list(ahead)

  def _first_sizes(self, questions: Questions) -> dict[int, int]:
    """Returns the number of episodes to sample of each group."""
    if self.allocation is not None:
      return dict.fromkeys(questions, self.allocation.first_rows)
    counts = self._num_demonstrations(questions)
    return {i: self.group_size - counts[i] for i in questions}

  def _further_sizes(self, groups: Groups) -> dict[int, int]:
    """Returns the number of episodes that the allocation adds to each group."""
    assert self.allocation is not None
    scores = [_mean_score(group) for group in groups.values()]
    if not 0 <= min(scores) <= max(scores) <= 1:
      raise types.UserError(
          f'config.rollout.allocation={self.allocation.rule!r} needs scores between 0 and 1, and '
          f'the means of questions are {min(scores):g} to {max(scores):g}: change the rewards, or '
          'set it to even'
      )
    num_rows = (self.group_size - self.allocation.first_rows) * len(groups)
    return dict(zip(groups, self.allocation.extra_rows(scores, num_rows)))

  def _play(
      self, params: object, key: jax.Array, questions: Questions, sizes: Mapping[int, int]
  ) -> '_Round':
    """Plays `sizes[i]` episodes of question `questions[i]`, for each group i."""
    tasks, numbers = _repeated(questions, sizes)
    keys = episode_lib.row_keys(key, tasks)
    episodes, replays = self.until_answered(
        lambda: self.agent.play(params, tasks, keys, numbers, stop_signal=self.stop_signal)
    )
    report = self.agent.report
    assert report is not None  # `play` has set it
    return _Round(episodes, replays, report, self._by_group(episodes))

  def _by_group(self, episodes: Sequence[types.Episode]) -> dict[int, list[types.Episode]]:
    """Returns {number of the group: its rows}, in the order of the first rows."""
    groups: dict[int, list[types.Episode]] = {}
    for row in episodes:
      groups.setdefault(row.group // self.rows_per_episode, []).append(row)
    return groups

  def _num_demonstrations(self, questions: Questions) -> dict[int, int]:
    if self.demonstrator is None:
      return dict.fromkeys(questions, 0)
    return {i: self.demonstrator.count(i, task) for i, task in questions.items()}

  def _demonstrate(self, key: jax.Array, questions: Questions) -> dict[int, list[types.Episode]]:
    """Plays the demonstrations of all groups: {number of the group: their rows}."""
    demonstrator = self.demonstrator
    tasks, numbers = _repeated(questions, self._num_demonstrations(questions))
    if demonstrator is None or not tasks:
      return {}
    rows, _ = self.until_answered(lambda: demonstrator.play(key, tasks, numbers))
    return self._by_group(rows)

  def until_answered(
      self, play: Callable[[], list[types.Episode]]
  ) -> tuple[list[types.Episode], int]:
    """Calls `play_through` with the limits of this run."""
    return play_through(
        play, self.agent.retriever, self.max_failed_share, self.max_outage_s, self.stop_signal
    )


@dataclasses.dataclass(frozen=True)
class _Round:
  """One round of sampling."""

  episodes: list[types.Episode]
  replays: int
  report: sequences.Report
  groups: dict[int, list[types.Episode]]  # number of a group -> its rows


def has_spread(group: Sequence[types.Episode]) -> bool:
  """Returns whether scores of a question's rows differ by more than rounding.

  Only rows with the same group number are compared. Failed and absent rows do not count.
  """
  by_number = collections.defaultdict(list)
  for row in _scored(group):
    by_number[row.group].append(row)
  for rows in by_number.values():
    scores = [row.score for row in rows]
    largest = max(sum(abs(turn.reward) for turn in row.turns) for row in rows)
    if max(scores) - min(scores) > types.ROUNDING * largest:
      return True
  return False


def _scored(group: Sequence[types.Episode]) -> list[types.Episode]:
  """Returns the rows that were played to their end, and whose environment did not fail."""
  return [row for row in group if not (row.failed or row.absent)]


def _repeated(
    questions: Questions, counts: Mapping[int, int]
) -> tuple[list[types.Task], list[int]]:
  """Returns (tasks, numbers of their groups), each as often as `counts` says."""
  tasks: list[types.Task] = []
  numbers: list[int] = []
  for i, task in questions.items():
    tasks += [task] * counts[i]
    numbers += [i] * counts[i]
  return tasks, numbers


def _joined(lists: Iterable[Iterable[Item]]) -> list[Item]:
  return list(itertools.chain.from_iterable(lists))


def _mean_score(group: Sequence[types.Episode]) -> float:
  """Returns the mean score of the rows that were played; 1/2 if none was."""
  scores = [row.score for row in _scored(group)]
  return float(np.mean(scores)) if scores else 0.5


def _share_with_spread(groups: Collection[Sequence[types.Episode]]) -> float:
  return sum(map(has_spread, groups)) / len(groups)


def to_json(batch: Sampled) -> dict[str, object]:
  """Returns the batch as JSON values, without loss."""
  return {
      'number': batch.number,
      'staleness': batch.staleness,
      'measured': dict(batch.measured),
      'episodes': [episode.to_dict() for episode in batch.episodes],
  }


def from_json(record: Mapping[str, Any], tasks: Sequence[types.Task]) -> Sampled:
  """Inverts `to_json`; `tasks` are those of the batch's episodes, in the same order."""
  episodes = []
  for task, row in zip(tasks, record['episodes'], strict=True):
    if task.id != row['task']:
      raise types.UserError(
          f'the checkpoint holds an episode on question {row["task"]!r} where {task.id!r} is due '
          'now: resume with the same questions, or give another --workdir'
      )
    episodes.append(types.Episode.from_dict(row, task))
  return Sampled(record['number'], record['staleness'], episodes, record['measured'])


_FIRST_WAIT_S = 1.0
_LONGEST_WAIT_S = 60.0


def play_through(
    play: Callable[[], list[types.Episode]],
    retriever: protocol.Retriever | None,
    max_failed_share: float,
    max_outage_s: float,
    stop_signal: StopSignal = NEVER,
) -> tuple[list[types.Episode], int]:
  """Plays a batch until its searches are answered: returns (episodes, number of repetitions).

  If retrieval failed in more than `max_failed_share` of the episodes, discards them; once the
  retriever answers a probe, calls `play()` again. Waits double from 1 s to 60 s. Raises a RunError
  after `max_outage_s`. A lower share of failures is left to the update, which masks them.
  """
  all_stop = hosts.together(stop_signal)
  guard = guard_lib.Guard(_LONGEST_WAIT_S, stop_signal)  # calls the retriever
  episodes = play()
  replays = 0
  started = time.monotonic()
  wait_s = _FIRST_WAIT_S
  source = 'the environment' if retriever is None else 'retrieval'
  while (share := largest_share(failed_share, episodes)) > max_failed_share:
    address = getattr(retriever, 'address', '')
    failure = getattr(retriever, 'last_failure', '')
    where = f' ({address}: {failure})' if address else ''
    left_s = hosts.by_writer(lambda: max_outage_s - (time.monotonic() - started))
    if left_s <= 0:
      raise types.RunError(
          f'{source} failed in {share:.0%} of the episodes, and did so for {max_outage_s:g} s '
          f'(config.retriever.max_outage_s){where}: fix it, and the same command resumes'
      )
    wait_s = min(wait_s, left_s)
    logging.warning(
        '%s failed in %.0f%% of the episodes%s: none is trained on; the next try is in %.0f s',
        source,
        100 * share,
        where,
        wait_s,
    )
    pause(wait_s, all_stop)
    wait_s = min(2 * wait_s, _LONGEST_WAIT_S)
    if hosts.by_writer(_answers, retriever, guard):
      episodes = play()
      replays += 1
  return episodes, replays


def pause(seconds: float, all_stop: StopSignal) -> None:
  """Waits, or raises Stopped. All processes look at the signal the same number of times."""
  while seconds > 0:
    all_stop.raise_if_set()
    time.sleep(min(seconds, 1.0))
    seconds -= 1.0


def largest_share(
    share: Callable[[Sequence[types.Episode]], float], episodes: Sequence[types.Episode]
) -> float:
  """Returns the largest share among the environments of a mix, so that none can fail unnoticed."""
  return share(_of_worst_environment(share, episodes))


def _of_worst_environment(
    share: Callable[[Sequence[types.Episode]], float], episodes: Sequence[types.Episode]
) -> list[types.Episode]:
  """Returns the episodes of the environment with the largest share."""
  by_environment: dict[str, list[types.Episode]] = collections.defaultdict(list)
  for episode in episodes:
    by_environment[episode.task.environment].append(episode)
  return max(by_environment.values(), key=share, default=[])


def failed_share(episodes: Sequence[types.Episode]) -> float:
  """Returns the share of episodes in which a search failed."""
  return sum(episode.search_failed for episode in episodes) / max(len(episodes), 1)


def environment_failed_share(episodes: Sequence[types.Episode]) -> float:
  """Returns the share of episodes in which the code of the environment raised."""
  return sum(bool(episode.error) for episode in episodes) / max(len(episodes), 1)


def _check_prompts(rows: Sequence[types.Episode], number: int) -> None:
  """Raises a RunError if the prompts of all rows of batch `number` were too long."""
  present = [row for row in rows if not row.absent]
  if present and all(row.counts.get('prompt_too_long') for row in present):
    raise types.RunError(
        f'the prompts of all {len(present)} episodes of batch {number} are longer than '
        'config.rollout.max_prompt, and nothing can be trained on: raise it and max_total'
    )


def check_environment(episodes: Sequence[types.Episode], max_failed: float) -> None:
  """Raises a RunError if the environment raised in more than a share of the episodes.

  The code of the environment failed, so waiting and playing again would not help. All processes
  have the same episodes and raise the error together, so that the run can be saved.
  """
  worst = _of_worst_environment(environment_failed_share, episodes)
  share = environment_failed_share(worst)
  if share > max_failed:
    first = next(episode.error for episode in worst if episode.error)
    raise types.RunError(
        f'the environment raised in {share:.0%} of {len(worst)} episodes, and '
        f'config.rollout.max_failed={max_failed:g}: fix it, and the same command resumes, with '
        f'--config.train.accept_changed_plugins if a file of the run has changed. The first error: '
        f'{first}'
    )


def _answers(retriever: protocol.Retriever | None, guard: guard_lib.Guard) -> bool:
  """Returns whether the retriever answers a query; each probe is new, to bypass caches."""
  if retriever is None:  # the environment reported the failure and can only be tried again
    return True
  return stepping.call_retriever(retriever, [f'probe {time.time_ns()}'], 1, guard)[0] is not None
