"""The command that makes a small model: which config it takes, and the folder that it writes."""

import os
import pathlib
import subprocess
import sys
import tempfile
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized

ROOT = pathlib.Path(__file__).parents[2]
# The folder of the model is two levels below what is there.
CONFIG = """
from examples.signals import config as signals

def get_config(mode=''):
  config = signals.get_config(mode)
  config.model.folder = {folder!r} + mode
  return config
"""


PLAYER = """
class Player:

  def __init__(self, rng):
    del rng

  def begin(self, task):
    self.answer = task.answers[0]
    self.has_searched = False

  def act(self, observation):
    if self.has_searched:
      assert '<information>' in observation
      return f'<answer> {self.answer}</answer>'
    self.has_searched = True
    return f'<search> {self.answer}</search>'
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

  def test_search_environment_has_its_retriever_and_questions(self):
    path = self.write(
        'from experiments import st_ppo_tiny\n\n'
        "def get_config(mode=''):\n"
        '  config = st_ppo_tiny.get_config(mode)\n'
        f'  config.model.folder = {self.folder + "/model"!r}\n'
        '  return config\n'
    )
    pathlib.Path(self.folder, 'reader.py').write_text(PLAYER)
    with mock.patch.dict(os.environ, {'PYTHONPATH': self.folder}):
      done = self.start(path, '--player=reader:Player', '--width=32')
    self.assertEqual(done.returncode, 0, done.stderr)
    self.assertIn('config.json', os.listdir(self.folder + '/model'))

  def test_another_model_is_not_replaced(self):
    for name in ('tokenizer.json', 'config.json'):
      pathlib.Path(self.folder, 'model').mkdir(exist_ok=True)
      pathlib.Path(self.folder, 'model', name).write_text('{}')
    done = self.start(self.write(CONFIG.format(folder=self.folder + '/model')), '--width=32')
    self.assertEqual(done.returncode, 1)
    self.assertRegex(done.stderr, r'^warm_start: [^\n]*has not written[^\n]*new folder[^\n]*\n$')
    self.assertEqual(pathlib.Path(self.folder, 'model', 'config.json').read_text(), '{}')

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
