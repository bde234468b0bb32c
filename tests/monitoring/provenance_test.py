"""The provenance of a work folder."""

import json
import os
import pathlib
import subprocess
import sys
import tempfile
from unittest import mock

from absl.testing import absltest

from stppo_jax.monitoring import provenance


class ProvenanceTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    self.tmp = os.path.realpath(self.enterContext(tempfile.TemporaryDirectory()))

  def git(self, *arguments):
    """Runs git in the folder, with a name and without a signature."""
    settings = ['user.name=a', 'user.email=a@b', 'commit.gpgsign=false']
    options = [option for setting in settings for option in ('-c', setting)]
    command = ['git', '-C', self.tmp, *options, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

  def test_each_start_appends_a_line(self):
    with mock.patch.object(sys, 'argv', ['run.py', 'train', '--config.seed=1']):
      provenance.record(self.tmp)
      provenance.record(self.tmp)
    lines = pathlib.Path(self.tmp, provenance.FILE_NAME).read_text(encoding='utf-8').splitlines()
    self.assertLen(lines, 2)
    record = json.loads(lines[0])
    self.assertEqual(record['command'], ['run.py', 'train', '--config.seed=1'])
    self.assertEqual(record['processes'], 1)
    self.assertContainsSubset(['jax', 'jaxlib', 'numpy'], record['packages'])
    self.assertGreater(record['devices']['number'], 0)

  def test_torn_line_is_left_out(self):
    path = pathlib.Path(self.tmp, provenance.FILE_NAME)
    for torn in ('', '{"git": {', '{"git": {}}\n', '[]\n'):
      path.write_text(torn, encoding='utf-8')
      self.assertEqual(provenance.newest(self.tmp), {})
      provenance.record(self.tmp)
      newest = provenance.newest(self.tmp)
      self.assertContainsSubset(['jax'], newest['packages'])
      with path.open('a', encoding='utf-8') as file:
        file.write('{"git": ')  # the start after it was killed while it wrote
      self.assertEqual(provenance.newest(self.tmp), newest)

  def test_commit_and_changes_of_a_repository(self):
    self.git('init', '-q')
    file = pathlib.Path(self.tmp, 'a')
    file.write_text('1', encoding='utf-8')
    self.git('add', 'a')
    self.git('commit', '-q', '-m', 'a')
    state = {'commit': self.git('rev-parse', 'HEAD'), 'dirty': False}
    self.assertEqual(provenance.commits([self.tmp]), {self.tmp: state})
    file.write_text('2', encoding='utf-8')
    self.assertEqual(provenance.commits([self.tmp, self.tmp]), {self.tmp: state | {'dirty': True}})

  def test_folder_without_a_repository_is_left_out(self):
    with mock.patch.dict(os.environ, {'GIT_CEILING_DIRECTORIES': os.path.dirname(self.tmp)}):
      self.assertEqual(provenance.commits([self.tmp]), {})
    with mock.patch.dict(os.environ, {'PATH': ''}):
      self.assertEqual(provenance.commits([os.getcwd()]), {})


if __name__ == '__main__':
  absltest.main()
