"""The folder of a run. It belongs to one config, and at any time to one process."""

from collections.abc import Collection
from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Mapping
import contextlib
import errno
import fcntl
import json
import os
import re
import socket
from typing import Any

from absl import logging

from stppo_jax.monitoring import metrics
from stppo_jax.types import read_json
from stppo_jax.types import UserError

_FULL_DISK = (errno.ENOSPC, errno.EDQUOT)
_MAX_SHOWN = 4  # differences in an error
# Address of a part that another process computes -> what a run without the address has.
_PARTS = {'rollout.engine': 'our own sampler', 'teacher.address': 'no teacher there'}

# Keys of config.json with a digest of data -> their meaning.
_DATA = {
    'train_questions': 'the questions to train on',
    'held_out_questions': 'the held-out questions',
    'passages': 'the passages that searches find',
}
# Keys of config.json that are no settings.
RECORDED = ('plugins', 'objective', 'main_score', *_DATA)


def check_path(workdir: str) -> None:
  """Raises a UserError for the address of an object store."""
  if re.match(r'[A-Za-z][A-Za-z0-9+.-]*:/', workdir):
    raise UserError(
        f'--workdir={workdir!r}: object stores are not supported, mounted or not, because they '
        'have no locks, do not append and do not rename folders: give a folder on a local disk, '
        'NFS, Filestore or Lustre, and --config.train.checkpoint_folder=gs://BUCKET/FOLDER for '
        'the checkpoints'
    )


def checkpoint_folder(workdir: str) -> str:
  """Returns the folder of a run's checkpoints: config.train.checkpoint_folder of its config."""
  return _checkpoints(workdir, read_config(workdir))


def has_checkpoint_folder(workdir: str) -> bool:
  """Returns whether the folder of a run's checkpoints exists."""
  folder = checkpoint_folder(workdir)
  return bool(_names(folder)) or os.path.isdir(folder)


@contextlib.contextmanager
def lock(workdir: str, checkpoints: str = '') -> Iterator[None]:
  """Makes `workdir` and locks it for this process. UserError: another run has locked it.

  Also locks the folder of `checkpoints`, if it is another one.
  """
  with _lock(workdir, '--workdir'):
    if not checkpoints:
      yield
    elif is_bucket(checkpoints):
      with _buckets().hold(checkpoints, workdir):
        yield
    else:
      with _lock(checkpoints, '--config.train.checkpoint_folder'):
        yield


@contextlib.contextmanager
def _lock(folder, flag):
  """Context manager with the lock of a folder.

  The kernel holds the lock and releases it with the process, however the process ends.
  """
  given = f'{flag}={folder!r}'
  try:
    os.makedirs(folder, exist_ok=True)
    file = open(os.path.join(folder, 'lock'), 'a+', encoding='utf-8')
  except OSError as error:
    raise UserError(f'{given} cannot be made ({error.strerror}): give another') from error
  with file:
    try:
      fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
      file.seek(0)
      holder = file.read() or 'another run'
      raise UserError(
          f'{given} is in use by {holder}: wait for its end, or give another {flag}'
      ) from error
    except OSError as error:  # some network file systems have no locks
      logging.warning('%s cannot be locked (%s): start one run in it', given, error)
    file.truncate(0)
    file.write(f'process {os.getpid()} on {socket.gethostname()}')
    file.flush()
    yield


def claim(
    workdir: str,
    config: Mapping[str, object],
    may_change: Collection[str] = (),
    digests: Mapping[str, str] | None = None,
    objective: Mapping[str, object] | None = None,
    accepts_changes: bool = False,
) -> None:
  """Writes config.json into `workdir`, or checks that the existing one is the same.

  The folder of checkpoints has a copy, which is checked too: checkpoints may be copied alone. A
  folder without metrics and checkpoints may be reused, for example after a run that stopped at a
  wrong path.

  Args:
    workdir: the folder.
    config: the settings, as nested dicts.
    may_change: settings that a resumed run may change.
    digests: of the sources of plug-ins and of the models' folders, by setting.
    objective: the resolved objective, which the config only names.
    accepts_changes: whether the sources of plug-ins may have changed.
  """
  record = _as_json({**config, 'plugins': digests or {}, 'objective': objective or {}})
  checkpoints = _checkpoints(workdir, record)
  if _checkpoint_setting(record):
    record['train']['checkpoint_folder'] = checkpoints  # not relative to the current folder
  _check_moved(workdir, checkpoints)
  if _has_begun(workdir, checkpoints):
    saved = [read_config(folder) for folder in (workdir, checkpoints)]
    if not any(saved):
      raise UserError(
          f'--workdir={workdir!r} holds metrics or checkpoints of a run, and no config.json that '
          'says of which one: restore it, or give another --workdir'
      )
    for config_there in filter(None, saved):
      _check_same_run(workdir, config_there, record, may_change, accepts_changes)
      kept = config_there.keys() & {'main_score', *_DATA}
      record |= {name: config_there[name] for name in kept}
    there, here = flatten(_settings(next(filter(None, saved)))), flatten(_settings(record))
    for text in _different((*_PARTS, 'teacher.model'), there, here).values():
      logging.warning('the run continues with another %s', text)
  if not is_bucket(checkpoints):
    os.makedirs(checkpoints, exist_ok=True)
  for folder in (workdir, checkpoints):
    write_whole(os.path.join(folder, 'config.json'), json.dumps(record, indent=2))


def _check_moved(workdir, checkpoints):
  """Raises a UserError if a run's checkpoints are in another folder, and not in this one, too.

  A run that was stopped before its first checkpoint may start again, if its folder is still there.
  """
  if _has_steps(checkpoints):
    return
  config = read_config(workdir)
  former = _checkpoints(workdir, config)
  if former != checkpoints and _has_steps(former):
    raise UserError(
        f'--workdir={workdir!r} belongs to a run with its checkpoints in {former}, and '
        f'{checkpoints} has none: copy them there, or give --config.train.checkpoint_folder as '
        'before'
    )
  is_lost = _checkpoint_setting(config) and not read_config(former)
  if is_lost and _has_metrics(workdir):
    raise UserError(
        f'--workdir={workdir!r} holds metrics of a run with its checkpoints in {former}, and there '
        'is no such folder with a config.json: mount it or copy it there, give the absolute path '
        'as --config.train.checkpoint_folder, or give another --workdir to start again'
    )


def _check_same_run(workdir, saved, record, may_change, accepts_changes):
  """Raises a UserError unless a saved config is the one of the run that starts."""
  _check_same_parts(workdir, saved, record)
  there = flatten(_settings(saved))
  here = flatten(_settings(record))
  different = _different(here.keys() | there.keys(), there, here)
  if texts := [text for name, text in different.items() if name not in may_change]:
    raise UserError(
        f'--workdir={workdir!r} belongs to a run with another config: {enumerate_first(texts)}. '
        'Give another --workdir, or the same config'
    )
  for field in _changed_plugins(saved, record['plugins']):
    value = f'={here[field]!r}' if field in here else ''  # none for an item of a setting
    changed = f'what config.{field}{value} names has changed'
    if not accepts_changes:
      raise UserError(
          f'--workdir={workdir!r}: {changed} since the run began: give another --workdir, the '
          'former source, or --config.train.accept_changed_plugins'
      )
    logging.warning('%s: the run continues with it', changed)
  objective_there = saved.get('objective', {})
  objective_here = record['objective']
  common = objective_there.keys() & objective_here.keys()
  if different := _different(common, objective_there, objective_here):
    raise UserError(
        f'--workdir={workdir!r} belongs to a run with another objective, by a variant of the same '
        f'name: {enumerate_first(different.values())}. Give another --workdir, or the former '
        'variant'
    )


def claim_data(workdir: str, digests: Mapping[str, str], accepts_changes: bool = False) -> None:
  """Writes the digests of a run's data, or checks that they are the same.

  `digests` has keys of _DATA. An empty digest is not compared, and neither is one that the config
  of an earlier version lacks.
  """
  config = read_config(workdir)
  digests = {name: digest for name, digest in digests.items() if digest}
  changed = []
  if _has_begun(workdir, _checkpoints(workdir, config)):
    changed = [_DATA[name] for name in digests if config.get(name, digests[name]) != digests[name]]
  if changed:
    line = f'--workdir={workdir!r}: {" and ".join(changed)} have changed since the run began'
    if not accepts_changes:
      raise UserError(
          f'{line}: give another --workdir, the former ones, or '
          '--config.train.accept_changed_plugins'
      )
    logging.warning('%s: it continues with them', line)
  config |= digests
  write_whole(os.path.join(workdir, 'config.json'), json.dumps(config, indent=2))


def record_main_score(workdir: str, name: str) -> None:
  """Writes the name of the score that selects the best checkpoint, which the report shows."""
  config = read_config(workdir)
  if config.get('main_score') != name:
    config['main_score'] = name
    write_whole(os.path.join(workdir, 'config.json'), json.dumps(config, indent=2))


def read_config(workdir: str) -> dict[str, Any]:
  """Returns config.json of a run's folder; {} if there is none. UserError: it cannot be read."""
  path = os.path.join(workdir, 'config.json')
  if is_bucket(path):
    return _read_config_object(path)
  if not os.path.exists(path):
    return {}
  return read_json(path, 'restore it, or give another --workdir')


def _read_config_object(path):
  try:
    config = json.loads(read_text(path))
  except FileNotFoundError:
    return {}
  except ValueError:
    config = None
  if not isinstance(config, dict):
    raise UserError(f'{path} is not a JSON object: restore it, or give another folder')
  return config


def read_settings(workdir: str) -> dict[str, object]:
  """Returns the settings in config.json, as nested dicts, without what a run adds to them."""
  return _settings(read_config(workdir))


def _settings(record):
  return {name: value for name, value in record.items() if name not in RECORDED}


def differences(workdir: str, config: Mapping[str, object]) -> dict[str, str]:
  """Returns {setting: 'setting (there, here)'} of settings that differ from config.json's."""
  there = flatten(read_settings(workdir))
  here = flatten(_as_json(config))
  return _different(here.keys() | there.keys(), there, here)


def _different(names, there, here):
  """Returns {name: 'name (there, here)'} of the names whose values differ."""
  texts = {}
  for name in sorted(names):
    if here.get(name) != there.get(name):
      texts[name] = f'{name} ({there.get(name)!r} there, {here.get(name)!r} here)'
  return texts


def enumerate_first(texts: Iterable[str]) -> str:
  """Returns the first texts as a list for an error, with the number of further ones."""
  texts = list(texts)
  line = ', '.join(texts[:_MAX_SHOWN])
  further = len(texts) - _MAX_SHOWN
  return f'{line} and {further} more' if further > 0 else line


def changed_plugins(workdir: str, digests: Mapping[str, str]) -> list[str]:
  """Returns the settings whose plug-in had another source when `workdir` was claimed."""
  return _changed_plugins(read_config(workdir), digests)


def _changed_plugins(saved, digests):
  there = saved.get('plugins', {})
  return [field for field, digest in digests.items() if there.get(field, digest) != digest]


def _check_same_parts(
    workdir: str, there: Mapping[str, object], here: Mapping[str, object]
) -> None:
  """Raises a UserError if only one of two configs has a part that another process computes.

  An engine changes the default of `algorithm.old_logp` and the batches of a checkpoint, and a
  teacher the advantages.
  """
  for name, other in _PARTS.items():
    address_there = flatten(there).get(name, '')
    address_here = flatten(here).get(name, '')
    if bool(address_there) != bool(address_here):
      raise UserError(
          f'--workdir={workdir!r} belongs to a run with config.{name}={address_there!r}, and '
          f'{address_here!r} is given: a resumed run may change the address, but not switch to or '
          f'from {other}. Give another --workdir, or an address as before'
      )


def _has_begun(workdir: str, checkpoints: str) -> bool:
  """Returns whether a run has written numbers or checkpoints."""
  return _has_metrics(workdir) or _has_steps(checkpoints)


def _has_metrics(workdir):
  return os.path.exists(os.path.join(workdir, metrics.FILE_NAME))


def _has_steps(checkpoints):
  return any(map(str.isdigit, _names(checkpoints)))


def _names(folder):
  """Returns the names in a folder; [] if there is none."""
  if is_bucket(folder):
    return _buckets().names(folder)
  return os.listdir(folder) if os.path.isdir(folder) else []


def _checkpoint_setting(config):
  """Returns config.train.checkpoint_folder of a config, as nested dicts."""
  return config.get('train', {}).get('checkpoint_folder', '')


def _checkpoints(workdir, config):
  """Returns the folder of checkpoints of a config, as nested dicts."""
  folder = _checkpoint_setting(config)
  if is_bucket(folder):
    return folder.rstrip('/')
  return os.path.abspath(folder or os.path.join(workdir, 'checkpoints'))


def is_bucket(path: str) -> bool:
  """Returns whether a path is in a bucket."""
  return path.startswith('gs://')


def _buckets():
  from stppo_jax.monitoring import buckets

  return buckets


def _as_json(value: Mapping[str, object]) -> dict[str, Any]:
  """Returns the values as config.json holds them: tuples become lists."""
  return json.loads(json.dumps(value))


def flatten(tree: Mapping[str, object], prefix: str = '') -> dict[str, object]:
  """Flattens {'a': {'b': 1}} to {'a.b': 1}."""
  flat = {}
  for name, value in tree.items():
    if isinstance(value, dict):
      flat |= flatten(value, f'{prefix}{name}.')
    else:
      flat[prefix + name] = value
  return flat


def write_whole(path: str, text: str) -> None:
  """Writes `text` so that a reader never sees a part of it. UserError: it cannot be written."""
  if is_bucket(path):
    _buckets().write_text(path, text)
  else:
    write_parts(path, [text])


def read_text(path: str) -> str:
  """Returns a text. FileNotFoundError: there is none."""
  if is_bucket(path):
    return _buckets().read_text(path)
  with open(path, encoding='utf-8') as file:
    return file.read()


def write_parts(path: str, texts: Iterable[str]) -> None:
  """Writes a text that is given in parts, as `write_whole` does."""
  part = path + '.part'
  try:
    with open(part, 'w', encoding='utf-8') as file:
      file.writelines(texts)
    os.replace(part, path)
  except OSError as error:
    with contextlib.suppress(OSError):
      os.remove(part)  # the disk may be full
    if error.errno in _FULL_DISK:
      raise  # the command line says what to do
    raise UserError(
        f'{path} cannot be written ({error.strerror}): give another --workdir'
    ) from error
