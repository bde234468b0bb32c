"""Recovery: how a run gets back to where it was, after a stop, a crash or a non-finite update.

Checkpoints in; state and position of the run out. A run resumes from its newest whole checkpoint. A
run whose gradients stay non-finite ends, or rolls back to it and continues with other questions.
"""

import collections
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Sequence
import contextlib
import dataclasses
import os
from typing import Any
from typing import TypeVar

from absl import logging
import jax
import numpy as np

from stppo_jax import config as config_lib
from stppo_jax import types
from stppo_jax.algorithms.variants import Variant
from stppo_jax.assembly import components
from stppo_jax.data import tasks as tasks_lib
from stppo_jax.distributed import hosts
from stppo_jax.monitoring import provenance
from stppo_jax.monitoring import workdir as workdir_lib
from stppo_jax.rollout import batches as batches_lib
from stppo_jax.rollout import batching
from stppo_jax.settings import validation
from stppo_jax.training import checkpoint
from stppo_jax.training import learner as learner_lib
from stppo_jax.types import RunError

Tree = TypeVar('Tree')  # a tree of arrays, or of their shapes
MAX_ROLLBACKS = 3  # to one checkpoint
Ahead = batching.Sampled | batching.Unsampled
_SHARED = 'give a --workdir that all processes share'


class Stuck(Exception):
  """Training cannot continue from this state, and the run may go back to a checkpoint.

  Too many optimizer steps in a row were skipped, or the parameters are not finite.
  """

  def __init__(self, message: str, batch_number: int):
    super().__init__(message)
    self.batch_number = batch_number


@dataclasses.dataclass
class Progress:
  """How far a run is."""

  updates: int = 0  # updates in the state
  resumed: int = 0  # updates that a checkpoint held when the run started
  logged: int = 0  # updates whose metrics are written
  skipped_batches: int = 0  # batches that rollbacks skipped
  unfinished: dict[str, float] | None = None  # metrics of an update whose evaluation is to be done
  score: float | None = None  # held-out score of the state


@contextlib.contextmanager
def hold_workdir(
    config: config_lib.Config,
    variant: Variant,
    workdir: str,
    load_inputs: Callable[[], None] = lambda: None,
) -> Iterator[None]:
  """Context manager that locks `workdir` for this process, and claims it for this config.

  Calls `load_inputs` before it makes a new folder, so that a missing file leaves no empty folder.
  An existing folder is claimed first, because loading may take minutes.

  Raises UserError for the folder of another run or config, and for one that cannot hold
  checkpoints.
  """
  workdir_lib.check_path(workdir)
  is_new = not hosts.by_writer(os.path.isdir, workdir)
  if is_new:
    load_inputs()
  folder = config.train.checkpoint_folder
  with workdir_lib.lock(workdir, folder) if hosts.is_writer() else contextlib.nullcontext():
    if jax.process_count() > 1 and not workdir_lib.is_bucket(folder):
      from stppo_jax.monitoring import shared_folder

      shared_folder.check(folder or workdir)
    claim(config, variant, workdir)
    hosts.by_writer(provenance.record, workdir)
    if not is_new:
      load_inputs()
    yield


def claim(config: config_lib.Config, variant: Variant, workdir: str) -> None:
  """Checks that `workdir` belongs to this config and what it names, or writes config.json there."""
  digests = components.sources(config)
  settings = variant.described()
  hosts.require_same('plug-ins and models', [digests, settings])
  hosts.by_writer(
      workdir_lib.claim,
      workdir,
      dataclasses.asdict(config),
      validation.changeable_on_resume(config, validation.has_critic(config, variant)),
      digests,
      settings,
      config.train.accept_changed_plugins,
  )


def claim_data(
    config: config_lib.Config,
    tasks: Sequence[types.Task],
    held_out: Sequence[types.Task],
    passages_digest: str,
    workdir: str,
) -> None:
  """Checks that all processes have the same tasks and passages, and that they are `workdir`'s."""
  digests = {
      'train_questions': tasks_lib.digest(tasks),
      'held_out_questions': tasks_lib.digest(held_out),
      'passages': passages_digest,
  }
  hosts.require_same('questions and passages', digests)
  hosts.by_writer(workdir_lib.claim_data, workdir, digests, config.train.accept_changed_plugins)


class Rollbacks:
  """Counts how often a run goes back to each of its checkpoints.

  Args:
    workdir: of the run.
    on_nonfinite: 'rollback', or 'stop': a run that is stuck ends.
  """

  def __init__(self, workdir: str, on_nonfinite: str):
    self._workdir = workdir
    self._on_nonfinite = on_nonfinite
    self._counts: collections.Counter[int] = collections.Counter()

  def count(self, stuck: Stuck) -> None:
    """Counts one more rollback. Raises a RunError if the run has to end instead."""
    with checkpoint.Checkpoints(self._workdir) as checkpoints:
      newest = checkpoints.newest()
    if not newest:
      raise RunError(f'{stuck}; there is no checkpoint yet: lower the learning rate') from stuck
    if self._on_nonfinite == 'stop':
      raise RunError(
          f'{stuck}; lower the learning rate, or go back to the newest checkpoint and '
          'continue with other questions: --config.train.on_nonfinite=rollback'
      ) from stuck
    self._counts[newest] += 1
    if self._counts[newest] > MAX_ROLLBACKS:
      raise RunError(
          f'{stuck}, and so after {MAX_ROLLBACKS} rollbacks to update {newest}: lower '
          'the learning rate, in another --workdir'
      ) from stuck
    logging.warning(
        '%s; going back to update %d and continuing with other questions', stuck, newest
    )


def restore_part(workdir: str, like: Tree, which: str = 'newest') -> tuple[Tree, int | None]:
  """Returns the part `like` of the state in the newest or best checkpoint, and its updates.

  `like` is a tree of shapes with shardings, a subtree of the state. Without a checkpoint, returns
  (`like`, None). Before the first evaluation, 'best' means the newest checkpoint.
  """
  workdir_lib.check_path(workdir)
  exists = workdir_lib.has_checkpoint_folder(workdir)
  hosts.require_same(f'{workdir}/checkpoints: whether it exists', exists, _SHARED)
  if not exists:
    return like, None
  with checkpoint.Checkpoints(workdir) as checkpoints:
    updates = checkpoints.newest()
    if updates is not None and which == 'best':
      updates = checkpoints.best(updates)
    hosts.require_same('checkpoint', updates, _SHARED)
    part = like if updates is None else checkpoints.restore_part(updates, like)
    return part, updates


class RunCheckpoints(checkpoint.Checkpoints):
  """The checkpoints of a run in progress, with its position and the batches ahead."""

  def resume(
      self, learners: learner_lib.Learners, batches: batches_lib.Batches, skip_through: int | None
  ) -> tuple[Progress, list[Ahead]]:
    """Restores the newest checkpoint, if there is one: (progress, batches ahead, the next first).

    After a rollback, batches continue after `skip_through`: the same ones would fail again. Batches
    that were sampled ahead are dropped, since they may hold what failed.
    """
    newest = self.newest()
    hosts.require_same('checkpoint', newest, _SHARED)
    if newest is None:
      return Progress(), []
    self.drop_after(newest)
    learners.restore(lambda shapes: self.restore(newest, shapes))
    saved = self.progress(newest)
    progress = Progress(
        updates=newest, resumed=newest, logged=newest, skipped_batches=saved['passed_over']
    )
    # A checkpoint that was saved before its evaluation gets a score when a resumed run evaluates.
    if self.score(newest) is None:
      progress.unfinished = saved.get('unfinished')
    if progress.unfinished is not None:
      progress.logged -= 1
    if skip_through is not None:
      learners.forget_skipped_steps()
      progress.skipped_batches = skip_through - newest
      return progress, []
    logging.info('resumed after %d updates', newest)
    ahead: list[Ahead] = [batches.restored(record) for record in saved['sampled']]
    unsampled = saved['unsampled']
    if unsampled:
      num_copies = 1 + max(record['copy'] for record in unsampled)
      like = batches.copy(learners.actor)
      copies = self.restore_copies(newest, like, num_copies)
    for record in unsampled:
      params = copies[record['copy']]
      ahead.append(batching.Unsampled(record['number'], record['staleness'], params))
    ahead.sort(key=lambda batch: batch.number)
    return progress, ahead

  def save_run(self, progress: Progress, state: object, ahead: Sequence[Ahead]) -> None:
    """Begins to save the state, how far the run is, and the batches ahead.

    Choice: does not wait for batches that are still to be sampled. Saves the parameters that are
    to sample them, and the resumed run samples. So it gives the same numbers as an uninterrupted
    one. This also holds at the end of a run, whose `updates` may be raised later. If a learning
    rate has a schedule, that needs config.train.schedule_updates.
    """
    copies: dict[int, Any] = {}  # by identity: the first batches of a run share one
    sampled = []
    unsampled = []
    for batch in ahead:
      if isinstance(batch, batching.Sampled):
        sampled.append(batches_lib.to_json(batch))
        continue
      copies[id(batch.params)] = batch.params
      number = list(copies).index(id(batch.params))
      unsampled.append({'number': batch.number, 'staleness': batch.staleness, 'copy': number})
    record: dict[str, Any] = {
        'passed_over': progress.skipped_batches,
        'sampled': sampled,
        'unsampled': unsampled,
    }
    if progress.unfinished is not None:
      record['unfinished'] = {name: np.asarray(x).item() for name, x in progress.unfinished.items()}
    self.save(progress.updates, state, record, progress.score, list(copies.values()))

  def save_on_error(self, error: Exception, progress: Progress, state: object) -> None:
    """Saves the state after an error, if it is whole and a resumed run can write its metrics.

    Choice: drops batches that were sampled ahead, which may hold what failed. They are sampled
    again. All processes have to save together. They all raise a RunError, but not all of them any
    other error, for example of a plug-in.
    """
    is_resumable = progress.logged == progress.updates or progress.unfinished is not None
    is_shared = isinstance(error, RunError) or jax.process_count() == 1
    is_whole = not any(x.is_deleted() for x in jax.tree.leaves(state))  # else: donated
    if progress.updates and is_resumable and is_shared and is_whole:
      self.save_run(progress, state, ())
      logging.warning('%s: saved after %d updates', type(error).__name__, progress.updates)
