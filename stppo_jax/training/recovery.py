"""Recovery: how a run gets back to where it was, after a stop, a crash or a non-finite update.

Checkpoints in; state and position of the run out. A run resumes from its newest whole checkpoint. A
run whose gradients stay non-finite ends, or rolls back to it and continues with other questions.
"""

import collections
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
import contextlib
import dataclasses
import hashlib
import os
from typing import Any

from absl import logging
import jax
import numpy as np

from stppo_jax import config as schema
from stppo_jax import types
from stppo_jax import validation
from stppo_jax.algorithms import variants
from stppo_jax.distributed import hosts
from stppo_jax.monitoring import workdir as workdirs
from stppo_jax.rollout import pipeline as pipelines
from stppo_jax.rollout import prepare
from stppo_jax.training import checkpoint
from stppo_jax.training.state import State
from stppo_jax.types import RunError
from stppo_jax.types import Stopped
from stppo_jax.types import UserError

MAX_ROLLBACKS = 3  # to one checkpoint
_SHARED = 'give a --workdir that all processes share'


class Stuck(Exception):
  """The last optimizer steps were all skipped for non-finite gradients."""

  def __init__(self, message: str, batch_number: int):
    super().__init__(message)
    self.batch_number = batch_number


@dataclasses.dataclass
class Position:
  """How far a run is."""

  updates: int = 0  # done
  passed_over: int = 0  # batches that rollbacks skipped
  ahead: Sequence[pipelines.Sampled | pipelines.Unsampled] = ()  # batches, the next one first
  unfinished: dict[str, float] | None = None  # metrics of an update whose evaluation is to be done


@contextlib.contextmanager
def claimed(config: schema.Config, variant: variants.Variant, workdir: str) -> Iterator[None]:
  """Context manager that holds `workdir` for this run.

  Refuses that of another run or config, and one that cannot hold checkpoints.
  """
  workdirs.check_path(workdir)
  with workdirs.lock(workdir) if hosts.is_writer() else contextlib.nullcontext():
    check_shared(workdir)
    claim(config, variant, workdir)
    yield


def check_shared(workdir: str) -> None:
  """Refuses a `workdir` in which the other processes do not see what process 0 writes.

  Such a run would train until its first checkpoint, and then wait for the files of the others.
  """
  if jax.process_count() == 1:
    return
  nonce = hosts.by_writer(workdirs.write_nonce, workdir)
  seen = hosts.share(hosts.is_writer() or workdirs.sees_nonce(workdir, nonce))
  hosts.by_writer(workdirs.remove_nonce, workdir)
  if not all(seen):
    raise UserError(
        f'--workdir={workdir!r}: process {seen.index(False)} does not see what process 0 writes '
        f'there: {_SHARED}, such as one on NFS'
    )


def claim(config: schema.Config, variant: variants.Variant, workdir: str) -> None:
  """Checks that `workdir` belongs to this config and what it names, or writes config.json there."""
  digests, objective = prepare.sources(config), variant.described()
  hosts.require_same('plug-ins and models', [digests, objective])
  hosts.by_writer(
      workdirs.claim,
      workdir,
      dataclasses.asdict(config),
      validation.changeable_on_resume(config, validation.has_critic(config, variant)),
      digests,
      objective,
      config.train.accept_changed_plugins,
  )


def claim_questions(
    config: schema.Config,
    questions: Sequence[types.Task],
    held_out: Sequence[types.Task],
    workdir: str,
) -> None:
  """Checks that all processes have the same questions, and `workdir` those to train on."""
  digest = hashlib.sha256('\n'.join(map(repr, questions)).encode()).hexdigest()[:16]
  hosts.require_same('questions', [digest, *(task.id for task in held_out)])
  hosts.by_writer(workdirs.claim_questions, workdir, digest, config.train.accept_changed_plugins)


def with_rollbacks(train: Callable[[int | None], Any], workdir: str, on_nonfinite: str) -> Any:
  """Returns train(None); where it is Stuck, calls train(last batch) again or raises a RunError."""
  last_batch, rollbacks = None, collections.Counter()
  while True:
    try:
      return train(last_batch)
    except Stuck as stuck:
      with checkpoint.Checkpoints(workdir) as checkpoints:
        newest = checkpoints.newest()
      rollbacks[newest] += 1
      if not newest:
        raise RunError(f'{stuck}; there is no checkpoint yet: lower the learning rate') from stuck
      if on_nonfinite == 'stop':
        raise RunError(
            f'{stuck}; lower the learning rate, or go back to the newest checkpoint and '
            'continue with other questions: --config.train.on_nonfinite=rollback'
        ) from stuck
      if rollbacks[newest] > MAX_ROLLBACKS:
        raise RunError(
            f'{stuck}, and so after {MAX_ROLLBACKS} rollbacks to update {newest}: lower '
            'the learning rate, in another --workdir'
        ) from stuck
      logging.warning(
          '%s; going back to update %d and continuing with other questions', stuck, newest
      )
      last_batch = stuck.batch_number


def saved(workdir: str, like: Any, which: str = 'newest') -> tuple[Any, int | None]:
  """Returns (trained parameters of the policy, updates) of the newest or best checkpoint.

  Without one, (`like`, None). Without an evaluation so far the newest one is the best. `like` has
  their shapes and shardings, and is a list where roles have parameters of their own.
  """
  workdirs.check_path(workdir)
  folder = os.path.join(workdir, 'checkpoints')
  hosts.require_same(f'{folder}: whether it exists', os.path.isdir(folder), _SHARED)
  if not os.path.isdir(folder):
    return like, None
  with checkpoint.Checkpoints(workdir) as checkpoints:
    updates = checkpoints.newest()
    if updates is not None and which == 'best':
      updates = checkpoints.best_before(updates)
    hosts.require_same('checkpoint', updates, _SHARED)
    return (like if updates is None else checkpoints.restore_actor(updates, like)), updates


def _is_whole(state):
  """Whether no array of the state has been donated to an update that failed."""
  return not any(x.is_deleted() for x in jax.tree.leaves(state))


class Saves:
  """The checkpoints of a run that trains: resumption, and saves in the background.

  Args:
    workdir: the folder of the run.
    settings: config.train.
    num_bytes: of the state.
  """

  def __init__(self, workdir: str, settings: schema.Train, num_bytes: int = 0):
    self._every = settings.checkpoint_every
    self._checkpoints = checkpoint.Checkpoints(
        workdir, settings.keep_checkpoints, settings.on_save_error, num_bytes
    )
    self.position = Position()

  @property
  def num_failed(self) -> int:
    """Saves that have failed since the last good one."""
    return self._checkpoints.num_failed

  def resume(self, run: Any, batches: pipelines.Batches, last_batch: int | None) -> None:
    """Sets `run.state` and `position` to the newest checkpoint, if there is one.

    After a rollback, batches continue after `last_batch`: the same ones would fail again. What was
    sampled ahead is dropped, since it may hold what failed.
    """
    first = self._checkpoints.newest()
    hosts.require_same('checkpoint', first, _SHARED)
    if first is None:
      return
    self._checkpoints.drop_after(first)
    shapes = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), run.state
    )
    run.state = None  # makes room
    run.state = self._checkpoints.restore(first, shapes)
    progress = self._checkpoints.progress(first)
    unfinished = progress.get('unfinished')
    if last_batch is not None:
      run.state = run.state.unskipped()
      self.position = Position(first, last_batch - first, unfinished=unfinished)
      return
    logging.info('resumed after %d updates', first)
    ahead: list[Any] = [batches.restored(record) for record in progress['sampled']]
    unsampled = progress.get('unsampled', [])  # version 0.7 waited for all
    if unsampled:
      num_copies = 1 + max(record['copy'] for record in unsampled)
      copies = self._checkpoints.restore_copies(first, batches.copy(run.state.actor), num_copies)
    for record in unsampled:
      params = copies[record['copy']]
      ahead.append(pipelines.Unsampled(record['number'], record['staleness'], params))
    ahead.sort(key=lambda batch: batch.number)
    self.position = Position(first, progress['passed_over'], ahead, unfinished)

  @contextlib.contextmanager
  def kept_on_error(
      self,
      updates: int,
      state: State,
      unfinished: Mapping[str, float] | None = None,
      score: float | None = None,
  ) -> Iterator[None]:
    """Context manager that saves the state after `updates` if an error is raised; see `last`.

    Choice: drops batches sampled ahead, which may hold what failed. They are sampled again.
    """
    try:
      yield
    except Stopped:
      raise
    except Exception as error:
      # Of other errors, of a plug-in say: all processes have to save, and have the state.
      expected = isinstance(error, RunError)
      if updates and (expected or jax.process_count() == 1 and _is_whole(state)):
        self._save(updates, state, [], unfinished, score)
        logging.warning('%s: saved after %d updates', type(error).__name__, updates)
      raise

  def evaluated(self, updates: int, score: float) -> None:
    """Notes the held-out score of a checkpoint that was saved before its evaluation ended."""
    self._checkpoints.note_score(updates, score)

  def after(
      self, updates: int, state: State, pipeline: pipelines.Pipeline, score: float | None = None
  ) -> None:
    """Reports a save that failed; begins the next one where it is due.

    Choice: a held-out `score` makes no checkpoint due, because a large state takes long to write.
    The best checkpoint is chosen among those that are due and have a score.
    """
    self._checkpoints.check()
    if self._every and updates % self._every == 0:
      self.last(updates, state, pipeline, score=score)

  def last(
      self,
      updates: int,
      state: State,
      pipeline: pipelines.Pipeline,
      unfinished: Mapping[str, float] | None = None,
      score: float | None = None,
  ) -> None:
    """Saves the state after `updates`, and the batches ahead.

    `unfinished` are the metrics of an update whose evaluation is left to the resumed run.

    Choice: does not wait for batches that are still to be sampled, at a stop or otherwise. Saves
    the parameters that are to sample them, which the resumed run does. So it gives the same numbers
    as an undisturbed one. This also holds at the end of a run, whose `updates` may be raised later.
    Where a learning rate has a schedule, that needs config.train.schedule_updates.
    """
    self._save(updates, state, pipeline.contents(), unfinished, score)

  def _save(self, updates, state, ahead, unfinished=None, score=None):
    copies: dict[int, Any] = {}  # by identity: the first batches of a run share one
    sampled, unsampled = [], []
    for batch in ahead:
      if isinstance(batch, pipelines.Sampled):
        sampled.append(pipelines.to_json(batch))
        continue
      copies[id(batch.params)] = batch.params
      number = list(copies).index(id(batch.params))
      unsampled.append({'number': batch.number, 'staleness': batch.staleness, 'copy': number})
    progress = {'passed_over': self.position.passed_over, 'sampled': sampled}
    progress['unsampled'] = unsampled
    if unfinished is not None:
      progress['unfinished'] = {name: np.asarray(x).item() for name, x in unfinished.items()}
    self._checkpoints.save(updates, state, progress, score, list(copies.values()))

  def __enter__(self) -> 'Saves':
    self._checkpoints.__enter__()
    return self

  def __exit__(self, *error: Any) -> None:
    self._checkpoints.__exit__(*error)
