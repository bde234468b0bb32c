"""Environments with packages of others: `scripts/client_envs.sh` makes them, tests run them."""

import json
import os
import pathlib
import unittest

_REPOSITORY = pathlib.Path(__file__).parents[2]
FOLDER = pathlib.Path(os.environ.get('STPPO_CLIENTS') or _REPOSITORY / '.clients')
SCRIPTS = pathlib.Path(__file__).parent / 'clients'


def find(path: str) -> str:
  """Returns the path of a program in the folder. SkipTest: it is not there."""
  program = FOLDER / path
  if not program.exists():
    raise unittest.SkipTest(f'{program} is missing: scripts/client_envs.sh makes it')
  return str(program)


def call(name: str, **arguments: str) -> str:
  """Returns a call in the hermes form."""
  text = json.dumps({'name': name, 'arguments': arguments})
  return f'<tool_call>\n{text}\n</tool_call>'


def thought(text: str) -> str:
  """Returns a thought as Qwen3 writes it."""
  return f'<think>\n{text}\n</think>\n\n'
