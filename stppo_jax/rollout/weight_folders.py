"""Folders of a run's weights, numbered by their version, which engines in other processes read."""

from collections.abc import Callable
import contextlib
import dataclasses
import glob
import itertools
import json
import os
import re
import secrets
import shutil

import jax

from stppo_jax.distributed import hosts

_VERSION = re.compile(r'\d{6,}(\.partial)?')  # the name of a version's folder


@dataclasses.dataclass(frozen=True)
class RemoteWeights:
  """A version of the policy, written for the engines."""

  version: int  # updates of the policy
  folder: str


class WeightFolders:
  """The folders of a run's newest weights.

  Args:
    folder: holds them, and belongs to this run. The engines read it under the same path.
    first_version: the number of updates of the first parameters that are copied.
    num_versions: newest versions whose folders stay.
    write: (parameters, folder) writes a folder of weights. All processes call it.
  """

  def __init__(
      self, folder: str, first_version: int, num_versions: int, write: Callable[[object, str], None]
  ):
    self._folder = os.path.abspath(folder)
    self._versions = itertools.count(first_version)
    self._num_versions = num_versions
    self._write = write
    self._written: list[RemoteWeights] = []
    self._leaves: list[jax.Array] = []  # leaves of the parameters of the newest version

  @property
  def newest(self) -> RemoteWeights:
    """The version that was written last."""
    return self._written[-1]

  def copy(self, params: object) -> RemoteWeights:
    """Writes a new version of the policy. Parameters that were written last are not written again.

    All processes call it. The folder appears complete, under its final name.
    """
    leaves = jax.tree.leaves(params)
    pairs = zip(leaves, self._leaves)
    if self._written and all(new is old for new, old in pairs):
      return self.newest
    self._leaves = leaves
    version = next(self._versions)
    weights = RemoteWeights(version, os.path.join(self._folder, f'{version:06d}'))
    partial_folder = weights.folder + '.partial'
    self._write(params, partial_folder)
    if hosts.is_writer():
      os.rename(partial_folder, weights.folder)
    self._written.append(weights)  # once it is there, because turns in other threads push it
    expired = self._written[: -self._num_versions]
    del self._written[: -self._num_versions]
    if hosts.is_writer():
      for old in expired:
        shutil.rmtree(old.folder, ignore_errors=True)
    return weights

  def move(self, old: object, new: object) -> None:
    """Notes that the parameters `old` are now those in the buffers of `new`."""
    pairs = zip(jax.tree.leaves(old), self._leaves)
    if all(leaf is newest for leaf, newest in pairs):
      self._leaves = jax.tree.leaves(new)

  def remove(self) -> None:
    """Removes all versions, and the folder if it then is empty. Other files stay."""
    if not hosts.is_writer():
      return
    names = glob.glob('*', root_dir=self._folder)
    for name in filter(_VERSION.fullmatch, names):
      shutil.rmtree(os.path.join(self._folder, name), ignore_errors=True)
    with contextlib.suppress(OSError):  # there are other files, or no folder
      os.rmdir(self._folder)


def folder_of_run(root: str, workdir: str) -> str:
  """Returns the folder in `root` for the weights of the run in `workdir`, the same at each resume.

  Several runs may share `root`, and it may hold other files. A copy of a run's folder is another
  run: its inode or path differs from that which WORKDIR/weights_id names.
  """
  os.makedirs(workdir, exist_ok=True)
  place = [os.stat(workdir).st_ino, os.path.realpath(workdir)]
  with open(os.path.join(workdir, 'weights_id'), 'a+', encoding='utf-8') as file:
    file.seek(0)
    name, *owner = file.read().splitlines() or ['']
    if not re.fullmatch('run-[0-9a-f]{16}', name) or owner != [json.dumps(place)]:
      name = f'run-{secrets.token_hex(8)}'  # a new run, a copy, or the file is damaged
      file.truncate(0)
      file.write(f'{name}\n{json.dumps(place)}\n')
  return os.path.join(root, name)
