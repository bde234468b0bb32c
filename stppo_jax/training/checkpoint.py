"""What a run leaves in its folder, and how it is taken up again.

The folder belongs to one config: `claim` refuses another. Checkpoints are Orbax's, written whole or not
at all; everything else a resumed run needs (order of questions, random keys) is a function of the seed
and the number of updates done.
"""

import dataclasses
import json
import os

import jax
import orbax.checkpoint as ocp

from stppo_jax import metrics
from stppo_jax.types import UserError

# These may differ between a run and its resumption: they change no number that was already computed.
FREE_FIELDS = ('train.updates', 'train.checkpoint_every', 'train.keep_checkpoints', 'eval.every',
               'log.tensorboard', 'log.wandb_project', 'log.episodes', 'mesh.data', 'mesh.fsdp',
               'mesh.tensor', 'placement.optimizer', 'placement.critic', 'placement.reference')


def claim(workdir, config):
  """Writes config.json into `workdir`, or checks that the one there says the same.

  A folder in which no number was computed yet (a run that stopped at a wrong path, say) is free.
  """
  path = os.path.join(workdir, 'config.json')
  mine = json.loads(json.dumps(dataclasses.asdict(config)))
  try:
    os.makedirs(workdir, exist_ok=True)
  except OSError as error:
    raise UserError(f'--workdir={workdir!r} cannot be made ({error.strerror}): give another') from error
  if not os.path.exists(path) or not os.path.exists(os.path.join(workdir, metrics.FILE_NAME)):
    _write_whole(path, json.dumps(mine, indent=2))
    return
  with open(path, encoding='utf-8') as file:
    theirs = flatten(json.load(file))
  mine = flatten(mine)
  different = [name for name in sorted(mine.keys() | theirs.keys())
               if name not in FREE_FIELDS and mine.get(name) != theirs.get(name)]
  if different:
    shown = ', '.join(f'{name} ({theirs.get(name)!r} there, {mine.get(name)!r} here)'
                      for name in different[:4])
    more = f' and {len(different) - 4} more' if len(different) > 4 else ''
    raise UserError(f'--workdir={workdir!r} belongs to a run with another config: {shown}{more}. '
                    'Give another --workdir, or the same config')
  _write_whole(path, json.dumps(unflatten(mine), indent=2))


class Checkpoints:
  """The checkpoints of one run. Steps are numbers of updates done."""

  def __init__(self, workdir, keep):
    folder = os.path.abspath(os.path.join(workdir, 'checkpoints'))
    self._manager = ocp.CheckpointManager(
        folder, options=ocp.CheckpointManagerOptions(max_to_keep=keep, create=True))

  def latest(self):
    """Updates done at the newest checkpoint, or None."""
    return self._manager.latest_step()

  def save(self, updates, state):
    """Saves in the background; a step that is already there stays as it is."""
    if updates not in self._manager.all_steps():
      self._manager.save(updates, args=ocp.args.StandardSave(state))

  def restore(self, updates, like):
    """The state saved after `updates`, with the structure, the shapes and the places of `like`."""
    target = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), like)
    return self._manager.restore(updates, args=ocp.args.StandardRestore(target))

  def close(self):
    """Waits until everything is on disk."""
    self._manager.wait_until_finished()
    self._manager.close()


def flatten(tree, prefix=''):
  """{'a': {'b': 1}} -> {'a.b': 1}."""
  flat = {}
  for name, value in tree.items():
    if isinstance(value, dict):
      flat |= flatten(value, f'{prefix}{name}.')
    else:
      flat[prefix + name] = value
  return flat


def unflatten(flat):
  """The inverse of `flatten`."""
  tree = {}
  for path, value in flat.items():
    *parents, last = path.split('.')
    branch = tree
    for name in parents:
      branch = branch.setdefault(name, {})
    branch[last] = value
  return tree


def _write_whole(path, text):
  """Writes `text` so that a reader never sees half of it."""
  with open(path + '.part', 'w', encoding='utf-8') as file:
    file.write(text)
  os.replace(path + '.part', path)
