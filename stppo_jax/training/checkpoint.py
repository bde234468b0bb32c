"""Checkpoints: the state of training and the progress of the run, written whole or not at all.

Orbax saves in the background and renames a step when all its files are written. Orbax does not
detect a file that was cut or changed later. So process 0 stores a checksum of each file, and all
processes check them at the next start. Everything else that a resumed run needs (order of tasks,
random keys) is a function of the seed and the progress. See monitoring/buckets.py for what replaces
renames and checksums in a bucket.

  checkpoints/<updates>/state/..  progress/metadata  checksums.json
  checkpoints/scores.json         held-out scores by updates
"""

from collections.abc import Mapping
from collections.abc import Sequence
import contextlib
import functools
import glob
import itertools
import json
import os
import shutil
import sys
import threading
from typing import Any
from typing import TypeVar
import zlib

from absl import logging
import jax
import orbax.checkpoint as ocp
from orbax.checkpoint import checkpoint_managers

from stppo_jax import stop_signal
from stppo_jax.distributed import hosts
from stppo_jax.models import sharding
from stppo_jax.monitoring import workdir as workdir_lib
from stppo_jax.net import calls
from stppo_jax.types import RunError
from stppo_jax.types import UserError

Tree = TypeVar('Tree')  # a tree of arrays, or of their shapes
_ITEMS = ('state', 'progress', 'copies')
_CHECKSUMS = 'checksums.json'
_SCORES = 'scores.json'
_COMMITTED = 'commit_success.txt'  # Orbax writes it later, where a rename is not atomic
_MIN_BYTES_PER_S = 50e6  # slowest storage that a save has time for
_MIN_DEADLINE_S = 1200
# What a full or broken disk raises: Python's own, TensorStore's, and XLA's.
_SAVE_ERRORS = (OSError, ValueError, RuntimeError)

_POLL_S = 1.0  # between two looks whether another process has failed
_ATTEMPTS = itertools.count()  # saves of this process; all processes begin the same ones


class SaveError(RunError):
  """A checkpoint could not be saved, and the run must not continue without it."""


class _OtherProcessFailed(RuntimeError):
  """Another process could not write its part of a checkpoint."""


class Checkpoints:
  """The checkpoints of one run, by the number of updates done. A context manager.

  Args:
    workdir: the folder of the run. config.json in it may name another folder for checkpoints.
    keep: number of newest checkpoints that stay. The one with the best score stays, too. None:
      nothing is written, because another process may be training in the folder.
    on_save_error: 'continue' or 'stop'.
    num_bytes: size of the state; determines the time limit of a save.

  Attributes:
    num_failed: saves that have failed since the last good one.
  """

  def __init__(
      self,
      workdir: str,
      keep: int | None = None,
      on_save_error: str = 'continue',
      num_bytes: int = 0,
  ):
    self.num_failed = 0
    self._folder = hosts.by_writer(workdir_lib.checkpoint_folder, workdir)
    self._save_errors = _SAVE_ERRORS
    self._advice = 'make room'
    self._is_in_bucket = workdir_lib.is_bucket(self._folder)
    if self._is_in_bucket:
      _buckets().check_packages()
      self._save_errors += _buckets().errors()
      self._advice = 'see that the bucket answers'
    self._stop_on_error = on_save_error == 'stop'
    self._saving: int | None = None  # the step that was begun last
    self._attempt = ''  # the name of that save, the same on all processes
    self._error: Exception | None = None  # the error of that save, once it is known
    self._policy = _KeepNewestAndBest(keep)
    self._manager = ocp.CheckpointManager(
        self._folder,
        item_names=_ITEMS,
        options=ocp.CheckpointManagerOptions(
            preservation_policy=self._policy if keep else None,
            create=keep is not None,
            cleanup_tmp_directories=keep is not None,  # left by runs that were killed while saving
            async_options=ocp.AsyncOptions(
                timeout_secs=deadline_s(num_bytes),
                barrier_sync_fn=self._wait_for_processes,
                post_finalization_callback=self._write_checksums,
            ),
        ),
    )
    self._policy.scores.update(hosts.by_writer(self._read_scores))

  def newest(self) -> int | None:
    """Returns the updates of the newest whole checkpoint, or None if there is no checkpoint.

    Damaged ones are skipped with a warning. All processes call it. UserError: all are damaged.
    """
    steps = sorted(hosts.by_writer(lambda: list(self._manager.all_steps())), reverse=True)
    for step in steps:
      damage = self._find_damage(step)
      if not damage:
        return step
      logging.warning(
          'the checkpoint after %d updates is damaged (%s); trying the one before', step, damage
      )
    if steps:
      raise UserError(
          f'{self._folder}: none of the {len(steps)} checkpoints is whole; restore one '
          'from a copy, or delete the folder to start again'
      )
    return None

  def best(self, updates: int) -> int:
    """Returns the best checkpoint up to `updates`; without a score so far, `updates`."""
    steps = [step for step in self._manager.all_steps() if step <= updates]
    step = self._policy.best(steps)
    if step is None or step == updates:
      return updates
    if damage := self._find_damage(step):
      raise UserError(
          f'{self._folder}: the best checkpoint, after {step} updates, is damaged ({damage}): set '
          '--config.eval.checkpoint=newest'
      )
    return step

  def restore(self, updates: int, like: Tree) -> Tree:
    """Returns the state after `updates`, with structure, shapes and shardings of `like`."""
    return self._restore(updates, 'state', ocp.args.StandardRestore(sharding.shapes(like)))

  def restore_part(self, updates: int, like: Tree) -> Tree:
    """Returns the part of the state that `like` is, with its shapes and shardings.

    Nothing else of the state is read. UserError: the state has no such part.
    """
    item = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), like)
    shardings = jax.tree.map(lambda x: x.sharding, like)
    restore_args = ocp.checkpoint_utils.construct_restore_args(item, shardings)
    args = ocp.args.PyTreeRestore(item=item, restore_args=restore_args, partial_restore=True)
    advice = 'give the --config and the model.folder of its training'
    where = f'{self._folder}: the checkpoint after {updates} updates'
    try:
      part = self._restore(updates, 'state', args)
    except ValueError as error:  # another shape
      raise UserError(f'{where} does not fit ({_reason(error)}): {advice}') from error
    for path, leaf in jax.tree_util.tree_leaves_with_path(part):
      if not isinstance(leaf, jax.Array):  # Orbax leaves the shape of what is not there
        name = jax.tree_util.keystr(path, simple=True, separator='/')
        raise UserError(f'{where} has no {name}: {advice}')
    return part

  def restore_copies(self, updates: int, like: Tree, number: int) -> list[Tree]:
    """Returns the `copies` saved after `updates`, with the structure and shardings of `like`."""
    shapes = [sharding.shapes(like)] * number
    return self._restore(updates, 'copies', ocp.args.StandardRestore(shapes))

  def progress(self, updates: int) -> dict[str, Any]:
    """Returns the `progress` saved after `updates`."""
    return self._restore(updates, 'progress', ocp.args.JsonRestore())

  def _restore(self, updates, item, args):
    restored = self._manager.restore(updates, args=ocp.args.Composite(**{item: args}))
    return restored[item]

  def save(
      self,
      updates: int,
      state: object,
      progress: Mapping[str, object],
      score: float | None = None,
      copies: Sequence[object] = (),
  ) -> None:
    """Begins to save a checkpoint in the background. An existing one is kept.

    Args:
      updates: number of updates done.
      state: a tree of arrays.
      progress: JSON values.
      score: held-out score of the state.
      copies: trees of arrays, such as parameters that are still to sample a batch.
    """
    self._settle()
    if updates in self._steps():
      return
    has_failed = self._error is not None
    if self._is_in_bucket:
      hosts.by_writer(_buckets().require_held, self._folder)
    self._saving = updates
    self._error = None
    self._attempt = f'save {next(_ATTEMPTS)}'
    if score is not None:
      self._add_score(updates, score)
    items = {'state': ocp.args.StandardSave(state), 'progress': ocp.args.JsonSave(progress)}
    if copies:
      items['copies'] = ocp.args.StandardSave(list(copies))
    try:
      if has_failed:  # Orbax skips a step that it knows, and the store may not have answered since
        self._manager.reload()
      # Orbax's thread waits for what an interrupted call has not said, for minutes.
      with stop_signal.interrupt_afterwards():
        self._manager.save(updates, args=ocp.args.Composite(**items))
    except self._save_errors as error:
      self._fail(error)

  def note_score(self, updates: int, score: float | None) -> None:
    """Stores the held-out score of a checkpoint that was saved before it was evaluated."""
    self._settle()
    if score is not None and updates in self._steps():
      self._add_score(updates, score)

  def score(self, updates: int) -> float | None:
    """Returns the held-out score of a checkpoint; None before its evaluation."""
    return self._policy.scores.get(updates)

  def check(self) -> None:
    """Reports a save that has failed. Does not wait."""
    if not self._manager.is_saving_in_progress():
      self._settle()

  def drop_after(self, updates: int) -> None:
    """Deletes the checkpoints of later updates: damaged ones, whose numbers will be used again."""
    for step in self._manager.all_steps():
      if step > updates:
        self._manager.delete(step)
    scores = self._policy.scores
    later = [step for step in scores if step > updates]
    for step in later:
      del scores[step]
    if later:
      self._write_scores()

  def close(self) -> None:
    """Waits until everything is on disk. SaveError: the last checkpoint failed."""
    self._settle()
    try:
      self._manager.close()
    except self._save_errors as error:  # it asks the store, too
      logging.warning('%s could not be closed (%s)', self._folder, _reason(error))
    if self._error is not None:
      raise SaveError(
          f'the last checkpoint, after {self._saving} updates, could not be saved '
          f'({_reason(self._error)}): {self._advice}, and the same command repeats what is lost'
      )

  def __enter__(self) -> 'Checkpoints':
    return self

  def __exit__(self, error: object, *unused: object) -> None:
    try:
      self.close()
    except SaveError:
      if error is None:
        raise  # else: it was logged already, and must not hide the error that ends the run

  def _settle(self):
    """Waits for the save in progress, if there is one."""
    try:
      self._manager.wait_until_finished()
    except self._save_errors as error:
      self._fail(error)
    if self._error is None:
      self.num_failed = 0

  def _fail(self, error):
    """Records a failed save and removes its files. Earlier checkpoints stay."""
    self._error = error
    self.num_failed += 1
    self._report(error)
    if hosts.is_writer():  # the others may only have waited too long for it
      for path in self._unfinished_folders():  # their space is needed
        if self._is_in_bucket:
          _buckets().remove(path)
        else:
          shutil.rmtree(path, ignore_errors=True)
    with contextlib.suppress(*self._save_errors):  # a store that is away does not hide the error
      self._manager.reload()
    newest = max(self._steps(), default=0)
    line = (
        f'the checkpoint after {self._saving} updates could not be saved ({_reason(error)}); the '
        f'newest is that after {newest}'
    )
    if self._stop_on_error:
      raise SaveError(f'{line}: {self._advice}, and the same command resumes there') from error
    if self.num_failed > 1:
      unsaved = (self._saving or 0) - newest
      line += f'; {self.num_failed} saves in a row failed, {unsaved} updates are unsaved'
      line += f': {self._advice}'
    logging.error('%s; training continues', line)

  def _steps(self):
    """Returns the steps that Orbax knows, without that of a failed save."""
    steps = set(self._manager.all_steps())
    return steps if self._error is None else steps - {self._saving}

  def _unfinished_folders(self):
    """Returns the folder of the step that is being saved, in a list; [] if there is none."""
    if self._is_in_bucket:
      return [os.path.join(self._folder, str(self._saving))]
    return glob.glob(glob.escape(os.path.join(self._folder, f'{self._saving}.')) + '*')

  def _wait_for_processes(self, *, key: str, timeout_ms: int) -> None:
    """Orbax's barrier between processes, which also ends when a process reports a failed save.

    Orbax's own barrier would wait for the failed process until its time limit, which is 20 minutes
    or more.
    """
    error = sys.exception()
    if error is not None and threading.current_thread() is not threading.main_thread():
      self._report(error)  # Orbax's thread leaves a failed save, and no process waits for it
      return
    barrier = ocp.multihost.get_barrier_sync_fn()
    waiting = calls.ThreadedCall(functools.partial(barrier, key=key, timeout_ms=timeout_ms))
    while not waiting.wait(_POLL_S):
      if reason := hosts.posted(self._attempt):
        raise _OtherProcessFailed(reason)

  def _report(self, error):
    """Tells the other processes why the save in progress has failed here."""
    if not isinstance(error, _OtherProcessFailed):
      hosts.post(self._attempt, f'process {jax.process_index()}: {_reason(error)}')

  def _write_checksums(self):
    """Runs in Orbax's thread when all files of a step are written, before it is renamed."""
    if not hosts.is_writer():
      return
    (folder,) = self._unfinished_folders()
    checksums = _digests(folder) if self._is_in_bucket else _checksums(folder)
    checksums = json.dumps(checksums)
    workdir_lib.write_whole(os.path.join(folder, _CHECKSUMS), checksums)

  def _find_damage(self, step):
    """Describes the damage of a step on disk in a few words; '' if there is none.

    Each process checks its share of the files, and all get the result.
    """
    folder = os.path.join(self._folder, str(step))
    damage = ''
    try:
      expected = json.loads(workdir_lib.read_text(os.path.join(folder, _CHECKSUMS)))
      if self._is_in_bucket:
        present = _digests(folder)
        checksum = present.get
      else:
        checksum = lambda name: _checksum(os.path.join(folder, name))
      for name in sorted(expected)[jax.process_index() :: jax.process_count()]:
        if checksum(name) != expected[name]:
          damage = f'{name} is not what was written'
          break
    except FileNotFoundError as error:
      damage = f'{os.path.relpath(error.filename, folder)} is missing'
    except (OSError, ValueError, TypeError, LookupError, AttributeError) as error:
      damage = f'{_CHECKSUMS}: {_reason(error)}'
    return next(filter(None, hosts.share(damage)), '')

  def _add_score(self, updates, score):
    self._policy.scores[updates] = score
    self._write_scores()

  def _write_scores(self):
    if not hosts.is_writer():
      return
    path = os.path.join(self._folder, _SCORES)
    try:
      workdir_lib.write_whole(path, json.dumps(self._policy.scores))
    except (*self._save_errors, UserError) as error:
      logging.warning('%s could not be written (%s)', path, _reason(error))

  def _read_scores(self):
    """Returns [[step, score], ..] of the scores on disk."""
    try:
      scores = json.loads(workdir_lib.read_text(os.path.join(self._folder, _SCORES)))
      return [[int(step), score] for step, score in scores.items()]
    except (FileNotFoundError, ValueError):
      return []


class _KeepNewestAndBest(checkpoint_managers.PreservationPolicy):
  """Orbax's question which steps stay: the newest ones, and the one with the best score."""

  def __init__(self, newest: int | None):
    self.newest = newest
    self.scores: dict[int, float] = {}

  def best(self, steps: Sequence[int]) -> int | None:
    """Returns the step with the highest score, the first of equal ones; None without a score."""
    with_score = sorted(step for step in steps if step in self.scores)
    return max(with_score, key=self.scores.__getitem__, default=None)

  def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
    """Returns an answer per step. The steps are given in rising order."""
    del context
    steps = [checkpoint.step for checkpoint in checkpoints]
    kept = steps[-self.newest :] if self.newest else steps
    best = self.best(steps)
    return [step in kept or step == best for step in steps]


def deadline_s(num_bytes: int) -> int:
  """Returns the time limit in seconds for saving a state of this size: 20 minutes or more."""
  written_and_summed = 2 * num_bytes
  return max(_MIN_DEADLINE_S, round(written_and_summed / _MIN_BYTES_PER_S))


def fingerprint(workdir: str, updates: int) -> str:
  """Returns the CRC of a checkpoint's list of checksums; '' without one."""
  path = os.path.join(workdir_lib.checkpoint_folder(workdir), str(updates), _CHECKSUMS)
  try:
    text = workdir_lib.read_text(path)
  except FileNotFoundError:
    return ''
  return f'{zlib.crc32(text.encode()):08x}'


def _buckets():
  from stppo_jax.monitoring import buckets

  return buckets


def _digests(folder):
  """Returns {path: [bytes, digest of the store]} of the objects below a step's items."""
  digests = _buckets().digests(folder)
  return {
      name: digest
      for name, digest in digests.items()
      if name.split('/')[0] in _ITEMS and not name.endswith(_COMMITTED)
  }


def _checksums(folder):
  """Returns {path: [bytes, CRC-32]} of the files below a step's items."""
  checksums = {}
  for item in _ITEMS:
    for parent, _, names in os.walk(os.path.join(folder, item)):
      for name in names:
        path = os.path.join(parent, name)
        if name != _COMMITTED:
          checksums[os.path.relpath(path, folder)] = _checksum(path)
  return checksums


def _checksum(path):
  return [os.path.getsize(path), _crc(path)]


def _crc(path):
  value = 0
  with open(path, 'rb') as file:
    while block := file.read(1 << 20):
      value = zlib.crc32(block, value)
  return value


def _reason(error):
  """Describes an error in a few words on one line."""
  text = str(error)
  if isinstance(error, _OtherProcessFailed):
    return text
  if 'No space left' in text or 'RESOURCE_EXHAUSTED' in text:
    return 'the disk is full'
  return f'{type(error).__name__}: {" ".join(text.split())[:200]}'
