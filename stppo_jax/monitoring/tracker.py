"""Metrics for Weights & Biases and trackio."""

from collections.abc import Mapping
import contextlib
import importlib
import json
import os
import secrets
from typing import Any

from absl import logging

from stppo_jax.net import calls

FINISH_S = 60.0  # time limit of the last upload


class Tracker:
  """A run of W&B, or of trackio, which has the same API and needs no account.

  A resumed run continues under the id that `workdir`/<package>_id holds. It repeats the steps after
  its checkpoint, and steps up to `last_step`, which the tracker has already, are left out. Choice:
  a rollback gets a new id, because its steps are other ones than those of the abandoned branch.
  So does a copy of the folder of a run. `is_continued` says whether the tracker has earlier steps.
  Without a login, W&B stays offline in `workdir`. trackio stores all runs in one local folder.
  """

  def __init__(
      self,
      package: str,
      workdir: str,
      project: str,
      run_name: str,
      config_json: str,
      is_resumed: bool = False,
  ):
    self.name = package
    self.last_step = -1
    module = importlib.import_module(package)
    run_id, self.is_continued = _run_id(workdir, f'{package}_id', is_resumed)
    options: dict[str, Any] = {
        'project': project,
        'config': json.loads(config_json),
        'resume': 'allow',
    }
    if package == 'wandb':
      options |= {'name': run_name or None, 'id': run_id, 'dir': workdir}
      is_online = os.environ.get('WANDB_MODE') or module.api.api_key
      options['mode'] = None if is_online else 'offline'
    else:  # trackio finds a run by its name
      options['name'] = f'{run_name}_{run_id}'
    self._run = module.init(**options)

  def write(self, step: int, numbers: Mapping[str, int | float]) -> None:
    """Logs the numbers of a step."""
    if step > self.last_step:
      self._run.log(dict(numbers), step=step)

  def close(self) -> None:
    """Finishes the upload, within a time limit: without network it may wait for ever."""
    if not calls.ThreadedCall(self._run.finish).wait(FINISH_S):
      raise TimeoutError(f'the upload did not end within {FINISH_S:g} s: see `{self.name} sync`')


def _run_id(workdir: str, name: str, is_resumed: bool) -> tuple[str, bool]:
  """Returns (id, whether it is an old one). The file `name` has the id and the path of its folder.

  A moved folder keeps its id. A folder is a copy if the original still exists.
  """
  path = os.path.join(workdir, name)
  here = os.path.realpath(workdir)
  saved, owner = _read_id(path) if is_resumed else ('', '')
  if saved and owner and _read_id(os.path.join(owner, name))[0] == saved:
    if not os.path.samefile(owner, here):
      logging.info('%s is a copy of %s: it gets a run of its own in the tracker', here, owner)
      saved = ''
  run_id = saved or secrets.token_hex(4)
  with open(path, 'w', encoding='utf-8') as file:
    file.write(f'{run_id}\n{here}\n')
  return run_id, bool(saved)


def _read_id(path: str) -> tuple[str, str]:
  """Returns (id, path of the folder that it was made for); empty texts if there are none."""
  lines = []
  with contextlib.suppress(OSError, UnicodeDecodeError):
    with open(path, encoding='utf-8') as file:
      lines = file.read().splitlines()
  run_id, owner, *_ = [*lines, '', '']
  return run_id.strip(), owner
