"""Makes a folder for a new task of the user, from the templates in assets/new."""

import importlib.util
import os
import pathlib

from stppo_jax.types import UserError

_TEMPLATES = pathlib.Path(__file__).parent.parent / 'assets' / 'new'


def make(name: str) -> str:
  """Makes the folder `name` in the current folder; returns the commands to continue with."""
  if not name.isidentifier():
    raise UserError(f'new {name}: give a name of letters, digits and _, such as my_task')
  if os.path.exists(name) or importlib.util.find_spec(name):
    raise UserError(f'new {name}: there is a folder or a Python module of this name: give another')
  os.mkdir(name)
  command = 'python run.py' if os.path.exists('run.py') else 'stppo'
  for template in _TEMPLATES.iterdir():
    text = template.read_text(encoding='utf-8')
    text = text.replace('NAME', name).replace('COMMAND', command)
    path = pathlib.Path(name, template.name.removesuffix('.txt'))
    path.write_text(text, encoding='utf-8')
  return f'{name}/README.md has the commands. First: {command} --config={name}/config.py:smoke'
