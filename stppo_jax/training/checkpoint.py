"""Checkpoints: the state of training and the position of the run, written whole or not at all.

Orbax saves in the background and renames a step when all its files are written. Checksums of each
step detect what Orbax does not: a file that was cut or changed later. Each process sums the files
that it wrote, and checks its share of the files at the next start. Everything else that a resumed
run needs (order of questions, random keys) is a function of the seed and the position.

  checkpoints/<updates done>/state/..  progress/metadata  checksums.json
"""

from collections.abc import Sequence
import functools
import glob
import itertools
import json
import os
import shutil
import sys
from typing import Any
import zlib

from absl import logging
import jax
import orbax.checkpoint as ocp
from orbax.checkpoint import checkpoint_managers

from stppo_jax.distributed import calls
from stppo_jax.distributed import hosts
from stppo_jax.types import RunError
from stppo_jax.types import UserError

_ITEMS = ('state', 'progress', 'copies')
_CHECKSUMS = 'checksums.json'
_NOTED = 'noted_score.json'  # of a step that was saved before its evaluation
_WRITTEN = 'async_write_complete'  # in the name of Orbax's barrier after all processes' writes
_COMMITTED = 'async_commit_complete'  # and of that after process 0 has renamed it
_PROGRESS = 'set_value'  # and of those around the note whether a save is in progress
_SLOWEST = 50e6  # bytes per second that storage takes and gives at least
_SHORTEST_S = 1200
# What a full or broken disk raises: Python's own, TensorStore's, and XLA's.
_SAVE_ERRORS = (OSError, ValueError, RuntimeError)


_LOOK_S = 1.0  # between two looks whether another process has failed
_ATTEMPTS = itertools.count()  # saves of this process; all processes begin the same ones


class _OthersFailed(RuntimeError):
  """Another process could not write its part of a checkpoint."""


class Checkpoints:
  """The checkpoints of one run. Steps are numbers of updates done.

  With `keep` None nothing is written: another process may be training in the folder.

  Args:
    workdir: the folder of the run.
    keep: how many of the newest steps stay; the one with the best score stays besides.
    on_save_error: 'continue' or 'stop'.
    num_bytes: of the state; determines the time limit of a save.
  """

  def __init__(
      self,
      workdir: str,
      keep: int | None = None,
      on_save_error: str = 'continue',
      num_bytes: int = 0,
  ):
    self._folder = os.path.abspath(os.path.join(workdir, 'checkpoints'))
    self._stop_on_error = on_save_error == 'stop'
    self._saving: int | None = None  # the step that was begun last
    self._attempt = ''  # the name of that save, the same on all processes
    self._begun = self._committed = False  # how far Orbax is with it
    self._failed = None  # the error of that step, once it is known
    self.num_failed = 0  # saves since the last good one
    self._keep = _Keep(keep)
    self._best_before = self._keep.best
    self._manager = ocp.CheckpointManager(
        self._folder,
        item_names=_ITEMS,
        options=ocp.CheckpointManagerOptions(
            preservation_policy=self._keep if keep else None,
            create=keep is not None,
            cleanup_tmp_directories=keep is not None,  # of runs that were killed while saving
            async_options=ocp.AsyncOptions(
                timeout_secs=deadline_s(num_bytes),
                barrier_sync_fn=self._sync,
                post_finalization_callback=self._write_checksums,
            ),
        ),
    )

  @property
  def best(self) -> tuple[float, int] | None:
    """The best score so far and the step that holds it."""
    return self._keep.best

  def newest(self) -> int | None:
    """Returns the updates done at the newest whole checkpoint, or None without one.

    Damaged ones are skipped with a warning. Where all are damaged, raises a UserError. All
    processes call it.
    """
    steps = sorted(hosts.by_writer(lambda: list(self._manager.all_steps())), reverse=True)
    for step in steps:
      if not (damage := self._damage(step)):
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

  def restore(self, updates: int, like: Any) -> Any:
    """Returns the state saved after `updates`, with structure, shapes and shardings of `like`."""
    target = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), like
    )
    args = ocp.args.Composite(state=ocp.args.StandardRestore(target))
    return self._manager.restore(updates, args=args)['state']

  def restore_actor(self, updates: int, like: Any) -> Any:
    """Returns the trained parameters of the policy alone, with the shapes and shardings of `like`.

    Of a list, those of each role. Nothing else of the state is read.
    """
    several = isinstance(like, list)
    shapes = {'members': [{'actor': one} for one in like]} if several else {'actor': like}
    item = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), shapes)
    how = ocp.checkpoint_utils.construct_restore_args(
        item, jax.tree.map(lambda x: x.sharding, shapes)
    )
    restore = ocp.args.PyTreeRestore(item=item, restore_args=how, partial_restore=True)
    found = self._manager.restore(updates, args=ocp.args.Composite(state=restore))['state']
    return [member['actor'] for member in found['members']] if several else found['actor']

  def restore_copies(self, updates: int, like: Any, number: int) -> list[Any]:
    """Returns the `copies` saved after `updates`, with the structure and shardings of `like`."""
    leaves, tree = jax.tree.flatten(like)
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding) for x in leaves]
    target = {str(i): dict(zip(map(str, range(len(shapes))), shapes)) for i in range(number)}
    args = ocp.args.Composite(copies=ocp.args.StandardRestore(target))
    found = self._manager.restore(updates, args=args)['copies']
    return [
        jax.tree.unflatten(tree, [found[str(i)][str(j)] for j in range(len(leaves))])
        for i in range(number)
    ]

  def progress(self, updates: int) -> dict:
    """Returns the `progress` saved after `updates`; restores the best score known then."""
    args = ocp.args.Composite(progress=ocp.args.JsonRestore())
    progress = self._manager.restore(updates, args=args)['progress']
    noted = self._noted()
    known = [progress.get('best'), noted if noted and noted[1] <= updates else None]
    whole = [tuple(best) for best in known if best and best[1] in self._manager.all_steps()]
    self._keep.best = max(whole, default=None)
    return progress

  def _noted(self):
    """Returns [score, step] of `note_score`; None without one."""
    try:
      with open(os.path.join(self._folder, _NOTED), encoding='utf-8') as file:
        return json.load(file)
    except (FileNotFoundError, ValueError):
      return None

  def save(
      self,
      updates: int,
      state: Any,
      progress: dict,
      score: float | None = None,
      copies: Sequence[Any] = (),
  ) -> None:
    """Saves in the background, `progress` as JSON. An existing step is kept.

    `copies` are trees of arrays, such as parameters that are still to sample a batch.
    A step with a higher held-out `score` than all before stays until there is a better one.
    """
    self._settle()
    if updates in self._manager.all_steps():
      return
    self._saving, self._failed, self._best_before = updates, None, self._keep.best
    self._attempt, self._begun, self._committed = f'save {next(_ATTEMPTS)}', False, False
    if score is not None and self.is_best(score):
      self._keep.best = (score, updates)
    progress = {**progress, 'best': self._keep.best}
    items = {'state': ocp.args.StandardSave(state), 'progress': ocp.args.JsonSave(progress)}
    if copies:
      items['copies'] = ocp.args.StandardSave(
          {
              str(i): {str(j): leaf for j, leaf in enumerate(jax.tree.leaves(tree))}
              for i, tree in enumerate(copies)
          }
      )
    try:
      self._manager.save(updates, args=ocp.args.Composite(**items))
    except _SAVE_ERRORS as error:
      self._fail(error)

  def note_score(self, updates: int, score: float) -> None:
    """Notes the held-out score of a step that was saved before it was evaluated, in a file."""
    self._settle()
    if self.is_best(score) and updates in self._manager.all_steps():
      self._keep.best = (score, updates)
      if hosts.is_writer():
        path = os.path.join(self._folder, _NOTED)
        with open(path + '.part', 'w', encoding='utf-8') as file:
          json.dump(self._keep.best, file)
        os.replace(path + '.part', path)

  def best_before(self, updates: int) -> int:
    """Returns the step with the best score up to the whole step `updates`, or that without one."""
    self.progress(updates)
    if self.best is None or (step := self.best[1]) == updates:
      return updates
    if damage := self._damage(step):
      raise UserError(
          f'{self._folder}: the best checkpoint, after {step} updates, is damaged ({damage}): set '
          '--config.eval.checkpoint=newest'
      )
    return step

  def is_best(self, score: float | None) -> bool:
    """Returns whether a score is higher than those saved so far."""
    return score is not None and (self.best is None or score > self.best[0])

  def check(self) -> None:
    """Reports a save that has failed meanwhile; does not wait."""
    if not self._manager.is_saving_in_progress():
      self._settle()

  def drop_after(self, updates: int) -> None:
    """Deletes the checkpoints of later updates: damaged ones, whose numbers will be reused."""
    for step in self._manager.all_steps():
      if step > updates:
        self._manager.delete(step)
    if (noted := self._noted()) and noted[1] > updates and hosts.is_writer():
      os.remove(os.path.join(self._folder, _NOTED))

  def close(self) -> None:
    """Waits until everything is on disk; raises a RunError if the last checkpoint failed."""
    self._settle()
    self._manager.close()
    if self._failed is not None:
      raise RunError(
          f'the last checkpoint, after {self._saving} updates, could not be saved '
          f'({_reason(self._failed)}): make room, and the same command repeats what is lost'
      )

  def __enter__(self):
    return self

  def __exit__(self, error, *unused):
    try:
      self.close()
    except RunError:
      if error is None:
        raise  # else: it was logged already, and must not hide the error that ends the run

  def _settle(self):
    """Waits for the save in progress, if there is one."""
    try:
      self._manager.wait_until_finished()
    except _SAVE_ERRORS as error:
      self._fail(error)
    if self._failed is None:
      self.num_failed = 0

  def _fail(self, error):
    """Records a failed save and removes its files; earlier steps stay."""
    self._failed, self._keep.best = error, self._best_before
    self.num_failed += 1
    if not isinstance(error, _OthersFailed):
      self._post(error)
    if hosts.is_writer():  # the others may only have waited too long for it
      for path in self._unfinished():
        shutil.rmtree(path, ignore_errors=True)  # its space is needed
    self._manager.reload()
    newest = self._manager.latest_step() or 0
    line = (
        f'the checkpoint after {self._saving} updates could not be saved ({_reason(error)}); the '
        f'newest is that after {newest}'
    )
    if self._stop_on_error:
      raise RunError(f'{line}: make room, and the same command resumes there') from error
    if self.num_failed > 1:
      unsaved = (self._saving or 0) - newest
      line += f'; {self.num_failed} saves in a row failed, {unsaved} updates are unsaved: make room'
    logging.error('%s; training continues', line)

  def _unfinished(self):
    """Returns the folder of the step that is being saved, in a list; [] if there is none."""
    return glob.glob(glob.escape(os.path.join(self._folder, f'{self._saving}.')) + '*')

  def _sync(self, *, key, timeout_ms):
    """Orbax's barrier between processes. Sums what this one wrote before it enters the first.

    A process whose save has failed does not come. It posts its reason, which ends the wait here:
    Orbax's own ends after `deadline_s`.
    """
    if _WRITTEN in key:
      for folder in self._unfinished():
        sums = _own_checksums(folder, jax.process_index())
        path = os.path.join(folder, f'checksums_{jax.process_index()}.json')
        with open(path, 'w', encoding='utf-8') as file:
          json.dump(sums, file)
    if _PROGRESS in key and self._begun and not self._committed:
      # Orbax's last word on a save that failed here or elsewhere: nobody waits for it.
      error = sys.exception()
      if error is not None and not isinstance(error, _OthersFailed):
        self._post(error)
      return
    barrier = ocp.multihost.get_barrier_sync_fn()
    waiting = calls.Call(functools.partial(barrier, key=key, timeout_ms=timeout_ms))
    while not waiting.has_ended(_LOOK_S):
      if reason := hosts.posted(self._attempt):
        raise _OthersFailed(reason)
    self._begun |= f'{_PROGRESS}_end' in key
    self._committed |= _COMMITTED in key

  def _post(self, error):
    """Tells the other processes why the save in progress has failed here."""
    hosts.post(self._attempt, f'process {jax.process_index()}: {_reason(error)}')

  def _write_checksums(self):
    """Runs in Orbax's thread when all files of a step are written, before it is renamed."""
    if not hosts.is_writer():
      return
    (folder,) = self._unfinished()
    sums = _checksums(folder)
    with open(os.path.join(folder, _CHECKSUMS), 'w', encoding='utf-8') as file:
      json.dump(sums, file)

  def _damage(self, step):
    """Describes the damage of a step on disk in a few words; '' if there is none.

    Each process checks its share of the files, and all get the result.
    """
    folder = os.path.join(self._folder, str(step))
    try:
      with open(os.path.join(folder, _CHECKSUMS), encoding='utf-8') as file:
        expected = json.load(file)
      mine = _share(expected, jax.process_index(), jax.process_count())
      different = [name for name in mine if _sum(os.path.join(folder, name)) != expected[name]]
      damage = f'{different[0]} is not what was written' if different else ''
    except FileNotFoundError as error:
      damage = f'{os.path.relpath(error.filename, folder)} is missing'
    except (OSError, ValueError, TypeError, LookupError, AttributeError) as error:
      damage = f'{_CHECKSUMS}: {_reason(error)}'
    return next(filter(None, hosts.share(damage)), '')


class _Keep(checkpoint_managers.PreservationPolicy):
  """Orbax's question which steps stay: the newest ones and the best one."""

  def __init__(self, newest: int | None):
    self.newest = newest
    self.best: tuple[float, int] | None = None  # (score, step)

  def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
    """Returns an answer per step; they are given in rising order."""
    del context
    steps = [checkpoint.step for checkpoint in checkpoints]
    kept = set(steps[-self.newest :] if self.newest else steps)
    return [step in kept or (self.best is not None and step == self.best[1]) for step in steps]


def deadline_s(num_bytes: int) -> int:
  """Returns the time limit in seconds for saving a state of this size: 20 minutes or more."""
  return max(_SHORTEST_S, round(2 * num_bytes / _SLOWEST))  # written, then read for its checksums


def _share(sums, process, num_processes):
  """Returns the files that one of several processes checks, about as many bytes as the others."""
  by_size = sorted(sums, key=lambda name: (-sums[name][0], name))
  return by_size[process::num_processes]


def _checksums(folder):
  """Returns {path: [bytes, CRC-32]} of the files below a step's items.

  Takes the sums that other processes left, and removes their files.
  """
  sums = {}
  for path in glob.glob(os.path.join(glob.escape(folder), 'checksums_*.json')):
    with open(path, encoding='utf-8') as file:
      sums |= json.load(file)
    os.remove(path)
  for item in _ITEMS:
    for parent, _, names in os.walk(os.path.join(folder, item)):
      for name in names:
        path = os.path.join(parent, name)
        relative = os.path.relpath(path, folder)
        # commit_success.txt is Orbax's, written later where a rename is not atomic.
        if name != 'commit_success.txt' and relative not in sums:
          sums[relative] = _sum(path)
  return sums


def _own_checksums(folder, process):
  """Returns the sums of what a process wrote; Orbax keeps it apart, and renames `state` later."""
  sums = {}
  for state in glob.glob(os.path.join(glob.escape(folder), 'state*')):
    for parent, _, names in os.walk(os.path.join(state, f'ocdbt.process_{process}')):
      for name in names:
        path = os.path.join(parent, name)
        sums[os.path.join('state', os.path.relpath(path, state))] = _sum(path)
  return sums


def fingerprint(workdir: str, updates: int) -> str:
  """Returns the CRC of a checkpoint's list of checksums; '' without one."""
  path = os.path.join(workdir, 'checkpoints', str(updates), _CHECKSUMS)
  return f'{_crc(path):08x}' if os.path.exists(path) else ''


def _sum(path):
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
  if isinstance(error, _OthersFailed):
    return text
  if 'No space left' in text or 'RESOURCE_EXHAUSTED' in text:
    return 'the disk is full'
  return f'{type(error).__name__}: {" ".join(text.split())[:200]}'
