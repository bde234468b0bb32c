"""Examples of README and docs are complete: each command trains one update."""

import os
import pathlib
import re
import shlex
import sys
import tempfile
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized
import jax

from stppo_jax.cli import entry
from stppo_jax.monitoring import metrics as metrics_lib
from tests.support import tiny_run

ROOT = pathlib.Path(__file__).parent.parent
TEXTS = ''.join((ROOT / name).read_text(encoding='utf-8') for name in ('README.md', 'docs/data.md'))
EXAMPLE = re.compile(r'```python\n# (\w+\.py)\n(.*?)```\n\n```sh\n(.*?)```', re.DOTALL)
MAX_LINES = 15


class HowToAddTest(parameterized.TestCase):

  def test_there_are_three_examples(self):
    self.assertLen(EXAMPLE.findall(TEXTS), 3)

  @parameterized.parameters(*EXAMPLE.findall(TEXTS))
  def test_an_example_runs_as_it_stands(self, name, code, command):
    self.assertLessEqual(len(code.strip().splitlines()) + 1, MAX_LINES)
    folder = self.enterContext(tempfile.TemporaryDirectory())
    tiny_run.write(folder)
    pathlib.Path(folder, name).write_text(code, encoding='utf-8')
    pathlib.Path(folder, 'small.py').write_text(
        'from tests.support import tiny_run\n'
        f'def get_config(mode=""):\n  return tiny_run.make_config({folder!r})\n',
        encoding='utf-8',
    )
    arguments = shlex.split(command.replace('\\\n', ' '))
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
    if name == 'guess.py':
      self.assertIn('env/right/mean', last)


if __name__ == '__main__':
  absltest.main()
