"""The command that makes a small model: which config it takes, and the folder that it writes."""

import os
import pathlib
import subprocess
import sys
import tempfile

from absl.testing import absltest
from absl.testing import parameterized

ROOT = pathlib.Path(__file__).parent.parent
# The folder of the model is two levels below what is there.
CONFIG = """
from examples.signals import config as signals

def get_config(mode=''):
  config = signals.get_config(mode)
  config.model.folder = {folder!r} + mode
  return config
"""


class WarmStartTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.folder = self.enterContext(tempfile.TemporaryDirectory())

  def write(self, text):
    path = os.path.join(self.folder, 'my config.py')
    pathlib.Path(path).write_text(text)
    return path

  def start(self, config, *more):
    command = [sys.executable, '-m', 'scripts.warm_start', f'--config={config}']
    command += ['--player=examples.signals.player:Player', '--episodes=64', '--steps=1', *more]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)

  def test_config_and_folder_at_any_path(self):
    folder = os.path.join(self.folder, 'deep', 'model')
    path = self.write(CONFIG.format(folder=folder))
    done = self.start(path + ':smoke', '--width=32')
    self.assertEqual(done.returncode, 0, done.stderr)
    self.assertContainsSubset(['tokenizer.json', 'config.json'], os.listdir(folder + 'smoke'))

  @parameterized.parameters(
      (None, '--config=/nowhere/config.py: no such Python file: give'),
      ('import nothing_like_it', 'ModuleNotFoundError: No module named'),
      (CONFIG.format(folder='embedded'), 'set config.model.folder to the folder'),
      (CONFIG.format(folder='/dev/null/model'), "config.model.folder='/dev/null/model' "),
  )
  def test_mistakes_are_one_line(self, text, said):
    done = self.start('/nowhere/config.py' if text is None else self.write(text))
    self.assertEqual(done.returncode, 1)
    self.assertRegex(done.stderr, rf'^warm_start: [^\n]*{said}[^\n]*\n$')


if __name__ == '__main__':
  absltest.main()
