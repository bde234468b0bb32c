"""Examples of README and docs are complete: commands are valid, and short ones train one update."""

import ast
import json
import os
import pathlib
import re
import shlex
import subprocess
import sys
import tempfile
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized
import jax
import pytest

from stppo_jax.algorithms import variants
from stppo_jax.cli import config_file
from stppo_jax.cli import entry
from stppo_jax.cli import flags as flags_lib
from stppo_jax.cli import modes
from stppo_jax.monitoring import metrics as metrics_lib
from stppo_jax.settings import validation
from tests.support import metric_meanings
from tests.support import tiny_run

ROOT = pathlib.Path(__file__).parent.parent
README = ROOT / 'README.md'
PAGES = [README, *sorted((ROOT / 'docs').glob('*.md'))]
TEXTS = {page.name: page.read_text(encoding='utf-8') for page in PAGES}
BLOCK = re.compile(r'```(\w+)\n(.*?)```', re.DOTALL)
FILE = re.compile(r'```python\n# (\w+)\.py\n(.*?)```', re.DOTALL)
MAX_LINES = 20


def examples() -> list[tuple[str, str, str, str]]:
  """Returns (page, module, code, command that names the module) of each printed file."""
  found = []
  for page, text in TEXTS.items():
    shell = ''.join(block for language, block in BLOCK.findall(text) if language == 'sh')
    shell = shell.replace('\\\n', ' ')
    for module, code in FILE.findall(text):
      users = re.findall(rf'^python run\.py .*\b{module}:.*', shell, re.MULTILINE)
      if users:
        found.append((page, module, code, users[0]))
  return found


EXAMPLES = examples()
TRAINED = ('README.md', 'data.md', 'environments.md')


def commands() -> list[tuple[str, str]]:
  """Returns (page, command) for each `python run.py ..` of the shell blocks and tables."""
  found = []
  for name, text in TEXTS.items():
    for language, block in BLOCK.findall(text):
      if language == 'sh':
        for line in block.replace('\\\n', ' ').splitlines():
          command = line.partition(' #')[0].rpartition('&& ')[2]
          if re.match(r'\S*python3? run\.py', command):
            found.append((name, command))
  return found


class CommandsTest(parameterized.TestCase):

  def test_there_are_commands(self):
    self.assertGreater(len(commands()), 30)

  @parameterized.parameters(*commands())
  def test_flags_and_experiment_files_exist(self, page, command):
    del page
    arguments = [x for x in shlex.split(command)[2:] if x != '..']
    parsed = flags_lib.parse(arguments)
    self.assertIn(parsed.flags.mode, modes.MODES)
    # Settings that do not fit each other are refused.
    validation.validate(config_file.load(parsed, reads_run=False))
    if parsed.flags.config:
      path = parsed.flags.config.partition(':')[0]
      self.assertTrue((ROOT / path).exists(), path)

  @parameterized.parameters(*TEXTS)
  def test_settings_in_code_spans_exist(self, page):
    sections = {path.partition('.')[0] for path in validation.kinds() if '.' in path}
    spans = re.findall(r'`(?:--config\.|config\.)?([a-z_]+\.[a-z_.]+)(?:=[^`]*)?`', TEXTS[page])
    if page == 'coming_from.md' or page.startswith('study'):
      return  # they name settings of other projects or of the toy task
    files = (
        '.py',
        '.md',
        '.json',
        '.jsonl',
        '.html',
        '.parquet',
        '.com',
        '.jinja',
        '.ipynb',
        '.sh',
    )
    free = validation.FREE_DICTS
    for span in spans:
      if span.partition('.')[0] in sections and not span.endswith(files):
        is_known = span in validation.kinds() or span.rpartition('.')[0] in free
        self.assertTrue(is_known, f'{page}: {span}')


class BlocksTest(parameterized.TestCase):

  @parameterized.parameters(*TEXTS)
  def test_python_and_json_blocks_parse(self, page):
    for language, block in BLOCK.findall(TEXTS[page]):
      if language == 'python':
        ast.parse(block)
      elif language == 'json':
        json.loads(block)

  def test_paper_index_has_every_algorithm(self):
    for name in variants.VARIANTS:
      self.assertIn(f'| `{name}` |', TEXTS['paper_index.md'])

  @parameterized.parameters(*TEXTS)
  def test_links_to_files_exist(self, page):
    folder = ROOT if page == 'README.md' else ROOT / 'docs'
    for link in re.findall(r'\]\(([^)#\s]+)', TEXTS[page]):
      generated = link.startswith(('reference/', 'tutorials/'))
      if '://' not in link and not generated:
        self.assertTrue((folder / link).exists(), f'{page}: {link}')
      if link.startswith('tutorials/'):
        notebook = ROOT / 'notebooks' / link.removeprefix('tutorials/')
        self.assertTrue(notebook.exists(), f'{page}: {link}')


class HowToAddTest(parameterized.TestCase):

  def test_all_printed_files_are_examples(self):
    printed = [(page, module) for page, text in TEXTS.items() for module, _ in FILE.findall(text)]
    alone = ('environments.md', 'my_run')  # imports guess_word of the same page
    self.assertCountEqual([*[example[:2] for example in EXAMPLES], alone], printed)

  @parameterized.parameters(*(example for example in EXAMPLES if example[0] in TRAINED))
  @pytest.mark.slow
  def test_an_example_runs_as_it_stands(self, page, module, code, command):
    del page
    self.assertLessEqual(len(code.strip().splitlines()) + 1, MAX_LINES)
    folder = self.enterContext(tempfile.TemporaryDirectory())
    tiny_run.write(folder)
    pathlib.Path(folder, f'{module}.py').write_text(code, encoding='utf-8')
    pathlib.Path(folder, 'small.py').write_text(
        'from tests.support import tiny_run\n'
        f'def get_config(mode=""):\n  return tiny_run.make_config({folder!r})\n',
        encoding='utf-8',
    )
    arguments = shlex.split(command)
    self.assertEqual(arguments[:2], ['python', 'run.py'])
    self.enterContext(tiny_run.on_one_device())
    # What a command sets for its process, it must not set for the other tests.
    self.enterContext(mock.patch.object(type(jax.config), 'update'))
    sys.path.insert(0, folder)
    self.addCleanup(sys.path.remove, folder)
    self.addCleanup(os.chdir, os.getcwd())
    os.chdir(folder)
    # The smallest run in place of the default one: the same flags, seconds instead of minutes.
    small = ['--config=small.py', '--config.train.updates=1', '--mode=train']
    self.assertFalse(entry.run(['run.py', *small, *arguments[2:]]))
    (workdir,) = [argument.partition('=')[2] for argument in arguments if 'workdir' in argument]
    last = metrics_lib.read_metrics(workdir)[-1]
    self.assertEqual(last['step'], 1)
    own = [metric for metric in last if metric not in ('step', 'time', 'nonfinite')]
    self.assertEmpty([metric for metric in own if not metric_meanings.meaning(metric)])
    if module == 'guess':
      self.assertIn('env/right/mean', last)
    if module == 'guess_word':
      self.assertIn('found/mean', last)

  @parameterized.parameters(*(example for example in EXAMPLES if example[0] in TRAINED))
  @pytest.mark.slow
  def test_reward_of_example_is_not_constant(self, page, module, code, command):
    """In the smoke form of the default run, with the embedded model."""
    del page
    folder = self.enterContext(tempfile.TemporaryDirectory())
    pathlib.Path(folder, f'{module}.py').write_text(code, encoding='utf-8')
    default = ROOT / 'experiments' / 'st_ppo_tiny.py'
    settings = ['train.updates=3', 'eval.episodes=2', 'log.tensorboard=False']
    small = [f'--config={default}:smoke', *(f'--config.{setting}' for setting in settings)]
    arguments = shlex.split(command)[2:]
    subprocess.run(
        [sys.executable, ROOT / 'run.py', *small, *arguments],
        cwd=folder,
        env=os.environ | {'PYTHONPATH': str(ROOT)},
        check=True,
        capture_output=True,
    )
    (workdir,) = pathlib.Path(folder, 'runs').iterdir()
    _, *updates = metrics_lib.read_metrics(workdir)
    self.assertLen(updates, 3)
    names = ('critic/score/min', 'critic/score/max')
    rewards = [update[name] for update in updates for name in names]
    self.assertGreater(max(rewards), min(rewards))


if __name__ == '__main__':
  absltest.main()
