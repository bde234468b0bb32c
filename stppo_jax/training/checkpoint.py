"""Checkpoints: the state of training and the position of the run, written whole or not at all.

Orbax saves in the background and renames a step when all its files are written. Checksums of each
step detect what Orbax does not: a file that was cut or changed later. Everything else that a
resumed run needs (order of questions, random keys) is a function of the seed and the position.

  checkpoints/<updates done>/state/..  progress/metadata  checksums.json
"""

import glob
import json
import os
import shutil
from typing import Any
import zlib

from absl import logging
import jax
import orbax.checkpoint as ocp

from stppo_jax.types import RunError
from stppo_jax.types import UserError

_ITEMS = ('state', 'progress')
_CHECKSUMS = 'checksums.json'
# What a full or broken disk raises: Python's own, TensorStore's, and XLA's.
_SAVE_ERRORS = (OSError, ValueError, RuntimeError)


class Checkpoints:
  """The checkpoints of one run. Steps are numbers of updates done.

  With `keep` None nothing is written: another process may be training in the folder.
  """

  def __init__(self, workdir: str, keep: int | None = None, on_save_error: str = 'continue'):
    self._folder = os.path.abspath(os.path.join(workdir, 'checkpoints'))
    self._stop_on_error = on_save_error == 'stop'
    self._saving: int | None = None  # the step that was begun last
    self._failed = None  # the error of that step, once it is known
    self._manager = ocp.CheckpointManager(
        self._folder,
        item_names=_ITEMS,
        options=ocp.CheckpointManagerOptions(
            max_to_keep=keep,
            create=keep is not None,
            cleanup_tmp_directories=keep is not None,  # of runs that were killed while saving
            async_options=ocp.AsyncOptions(post_finalization_callback=self._write_checksums),
        ),
    )

  def newest(self) -> int | None:
    """Returns the updates done at the newest whole checkpoint, or None without one.

    Damaged ones are skipped with a warning. Where all are damaged, raises a UserError.
    """
    steps = sorted(self._manager.all_steps(), reverse=True)
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

  def progress(self, updates: int) -> dict:
    """Returns the `progress` saved after `updates`."""
    args = ocp.args.Composite(progress=ocp.args.JsonRestore())
    return self._manager.restore(updates, args=args)['progress']

  def save(self, updates: int, state: Any, progress: dict) -> None:
    """Saves in the background, `progress` as JSON. An existing step is kept."""
    self._settle()
    if updates in self._manager.all_steps():
      return
    self._saving, self._failed = updates, None
    try:
      self._manager.save(
          updates,
          args=ocp.args.Composite(
              state=ocp.args.StandardSave(state), progress=ocp.args.JsonSave(progress)
          ),
      )
    except _SAVE_ERRORS as error:
      self._fail(error)

  def check(self) -> None:
    """Reports a save that has failed meanwhile; does not wait."""
    if not self._manager.is_saving_in_progress():
      self._settle()

  def drop_after(self, updates: int) -> None:
    """Deletes the checkpoints of later updates: damaged ones, whose numbers will be reused."""
    for step in self._manager.all_steps():
      if step > updates:
        self._manager.delete(step)

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

  def _fail(self, error):
    """Records a failed save and removes its files; earlier steps stay."""
    self._failed = error
    for path in glob.glob(glob.escape(os.path.join(self._folder, f'{self._saving}.')) + '*'):
      shutil.rmtree(path, ignore_errors=True)  # its space is needed
    self._manager.reload()
    newest = self._manager.latest_step()
    line = (
        f'the checkpoint after {self._saving} updates could not be saved ({_reason(error)}); the '
        f'newest is that after {newest or 0}'
    )
    if self._stop_on_error:
      raise RunError(f'{line}: make room, and the same command resumes there') from error
    logging.error('%s; training continues', line)

  def _write_checksums(self):
    """Runs in Orbax's thread when all files of a step are written, before it is renamed."""
    if jax.process_index():
      return  # process 0 does it
    (folder,) = glob.glob(glob.escape(os.path.join(self._folder, f'{self._saving}.')) + '*')
    with open(os.path.join(folder, _CHECKSUMS), 'w', encoding='utf-8') as file:
      json.dump(_checksums(folder), file)

  def _damage(self, step):
    """Describes the damage of a step on disk in a few words; '' if there is none."""
    folder = os.path.join(self._folder, str(step))
    try:
      with open(os.path.join(folder, _CHECKSUMS), encoding='utf-8') as file:
        expected = json.load(file)
      found = _checksums(folder)
    except (OSError, ValueError) as error:
      return f'{_CHECKSUMS}: {_reason(error)}'
    different = [name for name in expected if found.get(name) != expected[name]]
    return f'{different[0]} is not what was written' if different else ''


def _checksums(folder):
  """Returns {path: [bytes, CRC-32]} of the files below a step's items."""
  sums = {}
  for item in _ITEMS:
    for parent, _, names in os.walk(os.path.join(folder, item)):
      for name in names:
        path = os.path.join(parent, name)
        if name != 'commit_success.txt':  # Orbax's, written later where a rename is not atomic
          sums[os.path.relpath(path, folder)] = [os.path.getsize(path), _crc(path)]
  return sums


def _crc(path):
  value = 0
  with open(path, 'rb') as file:
    while block := file.read(1 << 20):
      value = zlib.crc32(block, value)
  return value


def _reason(error):
  """Describes an error in a few words on one line."""
  text = str(error)
  if 'No space left' in text or 'RESOURCE_EXHAUSTED' in text:
    return 'the disk is full'
  return f'{type(error).__name__}: {" ".join(text.split())[:200]}'
