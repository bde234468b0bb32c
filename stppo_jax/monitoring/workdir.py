"""The folder of a run: it belongs to one config, and at any time to one process."""

from collections.abc import Callable
from collections.abc import Collection
from collections.abc import Mapping
import contextlib
import errno
import fcntl
import json
import os
import re
import secrets
import socket
import tempfile
import time
from typing import Any

from absl import logging

from stppo_jax import config as config_lib
from stppo_jax.monitoring import metrics
from stppo_jax.types import UserError

_APPEARS_S = 30.0  # within this a new file is visible to all clients of a network file system
_FULL = (errno.ENOSPC, errno.EDQUOT)
_SUPPORTED = 'a folder on a local disk, NFS, Filestore or Lustre'


def check_path(workdir: str) -> None:
  """Refuses the address of an object store."""
  if re.match(r'[A-Za-z][A-Za-z0-9+.-]*:/', workdir):
    raise UserError(
        f'--workdir={workdir!r}: object stores are not supported, mounted or not, because they '
        f'have no locks, do not append and do not rename folders: give {_SUPPORTED}'
    )


def write_nonce(workdir: str) -> str:
  """Writes a new text into `workdir`; returns it."""
  nonce = secrets.token_hex(8)
  write_whole(os.path.join(workdir, 'nonce'), nonce)
  return nonce


def sees_nonce(
    workdir: str,
    nonce: str,
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> bool:
  """Returns whether this process reads that text in `workdir`; waits for it to appear."""
  last = clock() + _APPEARS_S
  while True:
    with contextlib.suppress(OSError):
      with open(os.path.join(workdir, 'nonce'), encoding='utf-8') as file:
        if file.read() == nonce:
          return True
    if clock() >= last:
      return False
    sleep(1.0)


def remove_nonce(workdir: str) -> None:
  """Removes that file."""
  with contextlib.suppress(OSError):
    os.remove(os.path.join(workdir, 'nonce'))


@contextlib.contextmanager
def lock(workdir):
  """Makes `workdir` and holds it for this process; refuses one that another run holds.

  The lock is the kernel's and ends with the process, however it ends: there is nothing to clean up.
  """
  try:
    os.makedirs(workdir, exist_ok=True)
    file = open(os.path.join(workdir, 'lock'), 'a+', encoding='utf-8')
  except OSError as error:
    raise UserError(
        f'--workdir={workdir!r} cannot be made ({error.strerror}): give another'
    ) from error
  with file:
    try:
      fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
      file.seek(0)
      raise UserError(
          f'--workdir={workdir!r} is in use by {file.read() or "another run"}: wait for '
          'its end, or give another --workdir'
      ) from error
    except OSError as error:  # some network file systems have no locks
      logging.warning('--workdir=%r cannot be locked (%s): start one run in it', workdir, error)
    file.truncate(0)
    file.write(f'process {os.getpid()} on {socket.gethostname()}')
    file.flush()
    yield


def check_renames(workdir: str) -> None:
  """Refuses a `workdir` in which a folder cannot be renamed, as in a bucket mounted by gcsfuse.

  Orbax renames each checkpoint when it is whole, so every save would fail.
  """
  try:
    with tempfile.TemporaryDirectory(
        prefix='probe_', dir=workdir, ignore_cleanup_errors=True
    ) as probe:
      written, renamed = os.path.join(probe, 'written'), os.path.join(probe, 'renamed')
      os.mkdir(written)
      with open(os.path.join(written, 'file'), 'w', encoding='utf-8') as file:
        file.write('some')  # object stores have no empty folders
      os.rename(written, renamed)
  except OSError as error:
    if error.errno in _FULL:
      raise  # the command line says what to do
    raise UserError(
        f'--workdir={workdir!r} cannot rename a folder ({error.strerror}), which checkpoints need: '
        f'give {_SUPPORTED}'
    ) from error


def claim(
    workdir: str,
    config: Mapping[str, Any],
    may_change: Collection[str] = (),
    digests: Mapping[str, str] | None = None,
    objective: Mapping[str, Any] | None = None,
    accepts_changes: bool = False,  # of plug-ins' sources
) -> None:
  """Writes config.json into `workdir`, or checks that the existing one is the same.

  `config` is given as nested dicts; a resumed run may differ in the fields `may_change`. `digests`
  of plug-ins' sources and models' folders, by field, are kept under the key 'plugins', the resolved
  `objective` under its own: its columns may come from a table of the package, which the config only
  names. A folder without metrics (of a run that stopped at a wrong path, say) may be reused.
  """
  path = os.path.join(workdir, 'config.json')
  mine = json.loads(json.dumps(config))
  beside = json.loads(
      json.dumps({'plugins': dict(digests or {}), 'objective': dict(objective or {})})
  )
  mine |= {name: value for name, value in beside.items() if value}
  if not _has_begun(workdir):
    write_whole(path, json.dumps(mine, indent=2))
    return
  different = [
      text for name, text in differences(workdir, config).items() if name not in may_change
  ]
  if different:
    more = f' and {len(different) - 4} more' if len(different) > 4 else ''
    raise UserError(
        f'--workdir={workdir!r} belongs to a run with another config: {", ".join(different[:4])}'
        f'{more}. Give another --workdir, or the same config'
    )
  for field in changed_plugins(workdir, digests or {}):
    changed = f'what config.{field}={flatten(mine)[field]!r} names has changed'
    if not accepts_changes:
      raise UserError(
          f'--workdir={workdir!r}: {changed} since the run began: give another --workdir, the '
          'one as it was, or --config.train.accept_changed_plugins'
      )
    logging.warning('%s: the run goes on with it', changed)
  _check_objective(workdir, read_config(workdir).get('objective', {}), mine.get('objective', {}))
  if (questions := read_config(workdir).get('train_questions')) is not None:
    mine['train_questions'] = questions
  write_whole(path, json.dumps(mine, indent=2))


def claim_questions(workdir: str, digest: str, accepts_changes: bool = False) -> None:
  """Checks that a run goes on with the questions that it began with, or notes them."""
  config = read_config(workdir)
  if _has_begun(workdir) and config.get('train_questions', digest) != digest:
    changed = f'--workdir={workdir!r}: the questions to train on have changed since the run began'
    if not accepts_changes:
      raise UserError(
          f'{changed}: give another --workdir, the questions as they were, or '
          '--config.train.accept_changed_plugins'
      )
    logging.warning('%s: it goes on with them', changed)
  config['train_questions'] = digest
  write_whole(os.path.join(workdir, 'config.json'), json.dumps(config, indent=2))


def read_config(workdir: str) -> dict[str, Any]:
  """Returns config.json of a run's folder; {} without one. UserError: it cannot be read."""
  path = os.path.join(workdir, 'config.json')
  if not os.path.exists(path):
    return {}
  try:
    with open(path, encoding='utf-8-sig') as file:
      config = json.load(file)
    if not isinstance(config, dict):
      raise ValueError(f'a {type(config).__name__}')
  except (OSError, ValueError) as error:
    raise UserError(
        f'{path} cannot be read ({error}): restore it, or give another --workdir'
    ) from error
  return config_lib.with_current_names(config)


def differences(workdir: str, config: Mapping[str, Any]) -> dict[str, str]:
  """Returns {dotted name: 'name (there, here)'} of settings that differ from config.json's."""
  theirs, mine = _settings(read_config(workdir)), _settings(json.loads(json.dumps(config)))
  return {
      name: f'{name} ({theirs.get(name)!r} there, {mine.get(name)!r} here)'
      for name in sorted(mine.keys() | theirs.keys())
      if mine.get(name) != theirs.get(name)
  }


BESIDE = ('plugins', 'objective', 'train_questions')  # in config.json, and no settings


def _settings(tree):
  return flatten({name: value for name, value in tree.items() if name not in BESIDE})


def _has_begun(workdir):
  """Whether a run has written numbers or checkpoints under config.json."""
  if not os.path.exists(os.path.join(workdir, 'config.json')):
    return False
  checkpoints = os.path.join(workdir, 'checkpoints')
  saved = os.listdir(checkpoints) if os.path.isdir(checkpoints) else []
  return os.path.exists(os.path.join(workdir, metrics.FILE_NAME)) or any(map(str.isdigit, saved))


def changed_plugins(workdir: str, digests: Mapping[str, str]) -> list[str]:
  """Returns the fields whose plug-in had another source when `workdir` was claimed."""
  theirs = read_config(workdir).get('plugins', {})
  return [field for field, digest in digests.items() if theirs.get(field, digest) != digest]


def _check_objective(workdir, theirs, mine):
  """Refuses another objective under the same name. A column that either lacks is no difference."""
  different = [name for name in theirs.keys() & mine.keys() if theirs[name] != mine[name]]
  if different:
    shown = ', '.join(
        f'{name} ({theirs[name]!r} there, {mine[name]!r} here)' for name in sorted(different)[:4]
    )
    raise UserError(
        f'--workdir={workdir!r} belongs to a run with another objective, by a variant of the same '
        f'name: {shown}. Give another --workdir, or the variant as it was'
    )


def flatten(tree, prefix=''):
  """Flattens {'a': {'b': 1}} to {'a.b': 1}."""
  flat = {}
  for name, value in tree.items():
    if isinstance(value, dict):
      flat |= flatten(value, f'{prefix}{name}.')
    else:
      flat[prefix + name] = value
  return flat


def write_whole(path, text):
  """Writes `text` so that a reader never sees a part of it. UserError: it cannot be written."""
  try:
    with open(path + '.part', 'w', encoding='utf-8') as file:
      file.write(text)
    os.replace(path + '.part', path)
  except OSError as error:
    if error.errno in _FULL:
      raise  # the command line says what to do
    raise UserError(
        f'{path} cannot be written ({error.strerror}): give another --workdir'
    ) from error
