"""The tutorials run from top to bottom in a short form, and are stored with outputs."""

import contextlib
import importlib.util
import json
import os
import pathlib
import re
import subprocess
import sys
import tarfile
import tempfile
import types
import unittest
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized
import pytest

from scripts import notebook_heads

REPO = pathlib.Path(__file__).parents[2]
FOLDER = REPO / 'notebooks'
NAMES = sorted(path.name for path in FOLDER.glob('*.ipynb'))
FAST = ('302_collapse.ipynb',)  # draws stored results; the others train

try:
  import ipykernel  # noqa: F401  # the notebooks need both
  import matplotlib  # noqa: F401
  import nbclient
  import nbformat
except ImportError as error:
  raise unittest.SkipTest(f'needs the extra dev: {error}') from error


def read(name: str):
  """Returns a notebook."""
  return nbformat.read(FOLDER / name, as_version=4)


def code_cells(name: str) -> list:
  """Returns the code cells of a notebook."""
  return [cell for cell in read(name).cells if cell.cell_type == 'code']


class RunTest(parameterized.TestCase):

  @parameterized.parameters([(name,) for name in FAST])
  @pytest.mark.slow
  def test_fast_tutorial_runs(self, name):
    self._run(name)

  @parameterized.parameters(*(name for name in NAMES if name not in FAST))
  @pytest.mark.slow
  def test_tutorial_runs(self, name):
    self._run(name)

  def _run(self, name):
    workdir = self.enterContext(tempfile.TemporaryDirectory())
    # One device, as a user has it, and not the eight that the other tests simulate.
    flags = f'{os.environ.get("XLA_FLAGS", "")} --xla_force_host_platform_device_count=1'
    variables = {'STPPO_JAX': str(REPO), 'STPPO_WORKDIR': workdir, 'STPPO_SHORT': '1'}
    self.enterContext(mock.patch.dict(os.environ, variables | {'XLA_FLAGS': flags}))
    # A failing cell raises an error with its output.
    nbclient.NotebookClient(read(name), timeout=600, kernel_name='python3').execute()


class StoredTest(parameterized.TestCase):

  @parameterized.parameters(*NAMES)
  def test_first_cell_installs_what_is_missing(self, name):
    names = re.findall(r'^[\w-]+', (REPO / 'requirements.txt').read_text(), re.MULTILINE)
    modules = {'absl-py': 'absl', 'orbax-checkpoint': 'orbax'}
    first = code_cells(name)[0].source
    self.enterContext(contextlib.chdir(REPO))
    self.enterContext(mock.patch.object(sys, 'path', list(sys.path)))  # the cell adds to it
    self.enterContext(mock.patch.dict(os.environ, {'STPPO_JAX': str(REPO)}))
    find = importlib.util.find_spec
    run = self.enterContext(mock.patch('subprocess.run'))
    for missing in ('', 'matplotlib', *(modules.get(package, package) for package in names)):
      found = lambda package, missing=missing: None if package == missing else find(package)
      with mock.patch.object(importlib.util, 'find_spec', found):
        exec(first, {})
      installed = [call.args[0][5:8] for call in run.call_args_list]
      expected = [['-r', 'requirements.txt', 'matplotlib']] if missing else []
      self.assertEqual(installed, expected, missing)
      run.reset_mock()

  def colab(self):
    """Makes a stand-in for Colab; returns its drive and what runs the first cell of a notebook."""
    folder = self.enterContext(tempfile.TemporaryDirectory())
    self.enterContext(contextlib.chdir(folder))
    self.enterContext(mock.patch.object(sys, 'path', list(sys.path)))
    self.enterContext(mock.patch.dict(os.environ))
    os.environ.pop('STPPO_JAX', None)
    os.environ.pop('STPPO_WORKDIR', None)
    kept = pathlib.Path(folder, 'drive', 'MyDrive', 'stppo_jax')
    kept.mkdir(parents=True)
    colab = types.ModuleType('google.colab')
    colab.drive = types.SimpleNamespace(mount=mock.Mock())
    modules = {'google': types.ModuleType('google'), 'google.colab': colab}
    self.enterContext(mock.patch.dict(sys.modules, modules))
    run = subprocess.run

    def run_all_but_pip(command, **options):
      if command[0] == 'tar':
        run(command, **options)

    self.enterContext(mock.patch('subprocess.run', run_all_but_pip))

    def execute(name):
      exec(code_cells(name)[0].source.replace("'/content/", f"'{folder}/"), {})
      colab.drive.mount.assert_called_with(f'{folder}/drive')

    return kept, execute

  def test_first_cell_unpacks_archive_of_drive(self):
    kept, execute = self.colab()
    with tarfile.open(kept / 'stppo_jax-1.2.3.tar.gz', 'w:gz') as archive:
      archive.addfile(tarfile.TarInfo('stppo_jax-1.2.3/run.py'))
    execute(NAMES[0])
    self.assertEqual(os.path.basename(os.getcwd()), 'stppo_jax')
    (kept / 'stppo_jax-1.2.3.tar.gz').unlink()
    execute(NAMES[0])  # a second time it has nothing to unpack

  def test_first_cell_asks_for_missing_archive(self):
    _, execute = self.colab()
    with self.assertRaisesRegex(
        AssertionError, 'put the file stppo_jax-VERSION.tar.gz in .*/drive'
    ):
      execute(NAMES[0])

  @parameterized.parameters(*NAMES)
  def test_runs_are_kept_in_drive(self, name):
    kept, execute = self.colab()
    os.mkdir('stppo_jax')
    pathlib.Path('stppo_jax', 'run.py').touch()
    execute(name)
    self.assertEqual(os.environ['STPPO_WORKDIR'], f'{kept}/runs/{name[:3]}')

  @parameterized.parameters(*NAMES)
  def test_head_is_that_of_notebook_heads(self, name):
    notebook = json.loads((FOLDER / name).read_text(encoding='utf-8'))
    written = notebook_heads.with_head(name, notebook, notebook_heads.repository())
    self.assertEqual(notebook, written, 'run python -m scripts.notebook_heads')

  def test_badge_opens_notebook_of_public_repository(self):
    notebook = json.loads((FOLDER / NAMES[0]).read_text(encoding='utf-8'))
    address = 'https://github.com/owner/name'
    title, code, *_ = notebook_heads.with_head(NAMES[0], notebook, address)['cells']
    self.assertIn(f'/github/owner/name/blob/main/notebooks/{NAMES[0]})', ''.join(title['source']))
    self.assertIn(f"'{address}', 'stppo_jax']", ''.join(code['source']))
    self.assertNotIn('tar.gz', ''.join(code['source']))
    self.assertIn('drive.mount', ''.join(code['source']))

  @parameterized.parameters(*NAMES)
  def test_is_stored_with_outputs(self, name):
    cells = code_cells(name)
    self.assertGreaterEqual(sum(bool(cell.outputs) for cell in cells), 3)
    self.assertNotIn('Traceback', str(cells))
    self.assertNotRegex(str([cell.outputs for cell in cells]), r'/(home|tmp|root|work)/\w')

  @parameterized.parameters(*NAMES)
  def test_states_its_time(self, name):
    source = read(name).cells[0].source
    minutes = re.search(r'\*\*Time:\*\* about (\d+) minutes? on two CPU', source)[1]
    page = (REPO / 'docs' / 'tutorials.md').read_text(encoding='utf-8')
    self.assertRegex(page, rf'tutorials/{name}.*\| {minutes} \|')


if __name__ == '__main__':
  absltest.main()
