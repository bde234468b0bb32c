"""The quickstart notebook runs from top to bottom, and its stored outputs are of this code."""

import contextlib
import importlib.util
import os
import pathlib
import re
import tempfile
import unittest
from unittest import mock

from absl.testing import absltest
import pytest

REPO = pathlib.Path(__file__).parent.parent
PATH = REPO / 'notebooks' / 'quickstart.ipynb'

try:
  import ipykernel  # noqa: F401  # the notebook needs both
  import matplotlib  # noqa: F401
  import nbclient
  import nbformat
except ImportError as error:
  raise unittest.SkipTest(f'needs the extra dev: {error}') from error


class NotebookTest(absltest.TestCase):

  @pytest.mark.slow
  def test_runs_from_top_to_bottom(self):
    workdir = self.enterContext(tempfile.TemporaryDirectory())
    # One device, as a user has it, and not the eight that the other tests simulate.
    flags = f'{os.environ["XLA_FLAGS"]} --xla_force_host_platform_device_count=1'
    self.enterContext(
        mock.patch.dict(
            os.environ, {'STPPO_JAX': str(REPO), 'STPPO_WORKDIR': workdir, 'XLA_FLAGS': flags}
        )
    )
    notebook = nbformat.read(PATH, as_version=4)
    nbclient.NotebookClient(notebook, timeout=600, kernel_name='python3').execute()
    text = str([cell.get('outputs') for cell in notebook.cells])
    self.assertIn('update 2/2', text)
    self.assertIn('</think>', text)
    self.assertTrue(os.path.exists(os.path.join(workdir, 'report.html')))

  def test_missing_packages_are_installed(self):
    names = re.findall(r'^[\w-]+', (REPO / 'requirements.txt').read_text(), re.MULTILINE)
    modules = {'absl-py': 'absl', 'orbax-checkpoint': 'orbax'}
    cells = nbformat.read(PATH, as_version=4).cells
    first = next(cell.source for cell in cells if cell.cell_type == 'code')
    self.enterContext(contextlib.chdir(REPO))
    self.enterContext(mock.patch.dict(os.environ, {'STPPO_JAX': str(REPO)}))
    find = importlib.util.find_spec
    run = self.enterContext(mock.patch('subprocess.run'))
    for missing in ('', 'matplotlib', *(modules.get(name, name) for name in names)):
      found = lambda name, missing=missing: None if name == missing else find(name)
      with mock.patch.object(importlib.util, 'find_spec', found):
        exec(first, {})
      installed = [call.args[0][-2:] for call in run.call_args_list]
      expected = [['requirements.txt', 'matplotlib']] if missing else []
      self.assertEqual(installed, expected, missing)
      run.reset_mock()

  def test_ships_with_outputs(self):
    cells = [cell for cell in nbformat.read(PATH, as_version=4).cells if cell.cell_type == 'code']
    self.assertGreaterEqual(sum(bool(cell.outputs) for cell in cells), 4)
    self.assertNotIn('Traceback', str(cells))


if __name__ == '__main__':
  absltest.main()
