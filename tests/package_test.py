"""The package: what pyproject.toml promises, and a wheel that runs the main job outside the
clone."""

import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import tomllib
import zipfile

from absl.testing import absltest
from absl.testing import parameterized
import pytest

import run
import stppo_jax
from stppo_jax import cli

ROOT = pathlib.Path(__file__).parent.parent
PYPROJECT = tomllib.loads((ROOT / 'pyproject.toml').read_text(encoding='utf-8'))
PROJECT = PYPROJECT['project']
EXTRAS = PROJECT['optional-dependencies']
PLATFORMS = ('gpu', 'gpu13', 'tpu', 'plan')  # each is jax with options
# A user's experiment: starts from a shipped one and imports a module of its own folder.
EXPERIMENT = """
from experiments import ppo_7b
import my_settings
def get_config(mode=''):
  config = ppo_7b.get_config('smoke')
  config.name = my_settings.NAME
  return config
"""


def from_file(name):
  """The requirements of a file and of the files that it includes, without base requirements."""
  found = set()
  for line in (ROOT / name).read_text(encoding='utf-8').splitlines():
    line = line.partition('#')[0].strip()
    if line.startswith('-r '):
      included = line.removeprefix('-r ')
      found |= from_file(included) if included != 'requirements.txt' else set()
    elif line:
      found.add(line)
  return found


def from_extra(name):
  """The requirements of an extra and of the extras that it includes."""
  found = set()
  for requirement in EXTRAS[name]:
    if match := re.fullmatch(rf'{PROJECT["name"]}\[(.*)\]', requirement):
      found |= set().union(*map(from_extra, match[1].split(',')))
    else:
      found.add(requirement)
  return found


class PyprojectTest(parameterized.TestCase):

  def test_dependencies_are_those_of_requirements_txt(self):
    self.assertLen(set(PROJECT['dependencies']), len(PROJECT['dependencies']))
    self.assertEqual(set(PROJECT['dependencies']), from_file('requirements.txt'))

  def test_the_extra_dev_is_requirements_dev_txt(self):
    self.assertEqual(from_extra('dev'), from_file('requirements-dev.txt'))

  @parameterized.parameters(*PLATFORMS)
  def test_a_platform_is_jax_of_the_same_range(self, extra):
    (jax,) = EXTRAS[extra]
    self.assertIn(re.sub(r'\[[\w,-]+\]', '', jax), PROJECT['dependencies'])

  def test_each_python_is_named_where_a_user_looks(self):
    lowest, end = (int(minor) for minor in re.findall(r'3\.(\d+)', PROJECT['requires-python']))
    classified = [name for name in PROJECT['classifiers'] if 'Python ::' in name]
    python = 'Programming Language :: Python :: 3.'
    self.assertEqual(classified, [f'{python}{minor}' for minor in range(lowest, end)])
    for name in ('README.md', 'docs/quickstart.md', 'requirements.txt'):
      text = (ROOT / name).read_text(encoding='utf-8')
      self.assertIn(f'Python 3.{lowest} to 3.{end - 1}', text)

  def test_the_packages_are_all_rooms_and_the_experiments(self):
    rooms = {path.parent for path in (ROOT / 'stppo_jax').rglob('__init__.py')}
    rooms = {room.relative_to(ROOT).as_posix().replace('/', '.') for room in rooms}
    self.assertCountEqual(
        PYPROJECT['tool']['setuptools']['packages'], [*rooms, 'stppo_jax.shipped.experiments']
    )

  def test_package_data_has_every_other_file(self):
    packaged = set()
    for package, patterns in PYPROJECT['tool']['setuptools']['package-data'].items():
      folder = ROOT / package.replace('.', '/')
      packaged |= {path for pattern in patterns for path in folder.glob(pattern)}
    files = {path for path in (ROOT / 'stppo_jax').rglob('*') if path.is_file()}
    self.assertEqual(
        packaged,
        {path for path in files if path.suffix != '.py' and '__pycache__' not in path.parts},
    )

  def test_run_py_equals_the_installed_command(self):
    self.assertEqual(PROJECT['scripts'], {'stppo': 'stppo_jax.cli:main'})
    self.assertIs(run.main, cli.main)

  def test_licence_names_every_embedded_source(self):
    terms = (ROOT / 'stppo_jax/assets/knowledge/LICENSES.md').read_text(encoding='utf-8')
    for words, name in (
        ('Creative Commons Attribution 4.0', 'CC-BY-4.0'),
        ('The MIT License', 'MIT'),
        ('under its own terms', 'LicenseRef-HPO'),
    ):
      self.assertIn(words, terms)
      self.assertIn(name, PROJECT['license'].split(' AND '))

  def test_citation_and_changelog_have_the_version(self):
    citation = (ROOT / 'CITATION.cff').read_text(encoding='utf-8')
    self.assertIn(f'\nversion: {PROJECT["version"]}\n', citation)
    self.assertEqual(stppo_jax.__version__, PROJECT['version'])
    changes = re.findall(r'^## (\S+)', (ROOT / 'CHANGELOG.md').read_text(encoding='utf-8'), re.M)
    released = [version for version in changes if version != 'Unreleased']
    self.assertEqual(released[0], PROJECT['version'])


def build_environment(folder):
  """Makes a virtual environment that sees this one's packages, and no other stppo_jax."""
  subprocess.run([sys.executable, '-m', 'venv', '--without-pip', folder], check=True)
  (site,) = folder.glob('lib/python*/site-packages')
  here = sysconfig.get_paths()['purelib']
  (site / 'outer.pth').write_text(f'{here}\n', encoding='utf-8')
  return folder / 'bin' / 'python'


class ImageTest(absltest.TestCase):
  """The Dockerfile, of which no test builds an image."""

  def setUp(self):
    super().setUp()
    self.dockerfile = (ROOT / 'Dockerfile').read_text(encoding='utf-8')

  def test_copied_files_exist_and_are_sent(self):
    sent = (ROOT / '.dockerignore').read_text(encoding='utf-8').splitlines()
    copies = re.findall(r'^COPY (?!--from)(.*) \S+$', self.dockerfile, re.MULTILINE)
    names = ' '.join(copies).split()
    self.assertIn('pyproject.toml', names)
    for name in names:
      self.assertTrue((ROOT / name).exists(), name)
    self.assertCountEqual([line for line in sent if line.startswith('!')], [f'!{x}' for x in names])

  def test_extras_and_python_exist(self):
    (extras,) = re.findall(r'whl\)\[([\w,]+)\$', self.dockerfile)
    devices = re.findall(r'DEVICE=(\w+)', self.dockerfile)
    self.assertContainsSubset([*extras.split(','), *devices], EXTRAS)
    for version in re.findall(r'^FROM python:([\d.]+)-', self.dockerfile, re.MULTILINE):
      self.assertIn(f'Programming Language :: Python :: {version}', PROJECT['classifiers'])
    self.assertIn('ENTRYPOINT ["stppo"]', self.dockerfile)
    self.assertIn('stppo', PROJECT['scripts'])


@pytest.mark.slow
class WheelTest(absltest.TestCase):
  """A wheel that was built from the source distribution, and installed outside the clone."""

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    cls.tmp = pathlib.Path(cls.enterClassContext(tempfile.TemporaryDirectory()))
    source, cls.folder = (cls.tmp / name for name in ('source', 'folder'))
    cls.folder.mkdir()
    committed = subprocess.run(
        ['git', 'ls-files', '-z'], cwd=ROOT, capture_output=True, text=True, check=True
    )
    for name in committed.stdout.split('\0')[:-1]:
      if (ROOT / name).is_file():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, source / name)
    # What `python -m build --no-isolation` does, without another package.
    program = 'import sys; from setuptools import build_meta; build_meta.{}(sys.argv[1])'
    build = lambda kind, folder: subprocess.run(
        [sys.executable, '-c', program.format(f'build_{kind}'), cls.tmp],
        cwd=folder,
        check=True,
        capture_output=True,
        timeout=300,
    )
    build('sdist', source)
    build('wheel', source)
    (cls.tmp / 'from_tree').mkdir()
    (wheel,) = cls.tmp.glob('*.whl')
    cls.wheel_of_tree = wheel.rename(cls.tmp / 'from_tree' / wheel.name)
    (cls.sdist,) = cls.tmp.glob('*.tar.gz')
    with tarfile.open(cls.sdist) as archive:
      archive.extractall(cls.tmp, filter='data')
    cls.unpacked = cls.tmp / cls.sdist.name.removesuffix('.tar.gz')
    build('wheel', cls.unpacked)
    (cls.wheel,) = cls.tmp.glob('*.whl')
    cls.python = build_environment(cls.tmp / 'venv')
    pip = [sys.executable, '-m', 'pip', '-q', f'--python={cls.python}', 'install']
    subprocess.run([*pip, '--no-deps', '--no-index', cls.wheel], check=True, timeout=300)
    (cls.site,) = (cls.tmp / 'venv').glob('lib/python*/site-packages')
    (cls.folder / 'mine.py').write_text(EXPERIMENT, encoding='utf-8')
    (cls.folder / 'my_settings.py').write_text('NAME = "mine"\n', encoding='utf-8')

  def stppo(self, *arguments, code=0):
    """Runs the command in the folder; returns its output."""
    result = subprocess.run(
        [self.python.parent / 'stppo', *arguments],
        cwd=self.folder,
        env={**os.environ, 'PYTHONPATH': '', 'XLA_FLAGS': '', 'JAX_PLATFORMS': 'cpu'},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=600,
        check=False,
    )
    self.assertEqual(result.returncode, code, result.stdout)
    return result.stdout

  def updates(self, workdir):
    """How many updates the run in a folder has written."""
    lines = (self.folder / workdir / 'metrics.jsonl').read_text(encoding='utf-8').splitlines()
    return max(json.loads(line)['step'] for line in lines)

  def test_sdist_and_tree_give_one_wheel(self):
    with zipfile.ZipFile(self.wheel) as ours, zipfile.ZipFile(self.wheel_of_tree) as tree:
      content = lambda archive: {x.filename: x.CRC for x in archive.infolist()}
      self.assertEqual(content(ours), content(tree))

  def test_distributions_have_licences_and_notes(self):
    with zipfile.ZipFile(self.wheel) as archive:
      names = set(archive.namelist())
    folder = f'stppo_jax-{PROJECT["version"]}.dist-info/licenses'
    for name in PROJECT['license-files']:
      self.assertIn(f'{folder}/{name}', names)
      self.assertTrue((self.unpacked / name).is_file(), name)
    for name in ('CHANGELOG.md', 'CITATION.cff', 'README.md', 'run.py'):
      self.assertTrue((self.unpacked / name).is_file(), name)

  def test_sdist_has_what_tutorials_import_and_read(self):
    for path in (ROOT / 'notebooks').glob('*.ipynb'):
      text = path.read_text(encoding='utf-8')
      for folder, module in re.findall(r'"from (examples[.\w]*) import (\w+)', text):
        name = f'{folder}.{module}'.replace('.', '/')
        self.assertTrue((self.unpacked / f'{name}.py').is_file(), name)
      for name in re.findall(r"open\('([\w/.]+)'", text):
        self.assertTrue((self.unpacked / name).is_file(), name)

  def test_default_experiment_trains_embedded_model(self):
    size = ['--config.train.episodes=8', '--config.train.mini_batch=8', '--config.eval.episodes=8']
    self.stppo('--config.train.updates=2', *size)
    self.assertEqual(self.updates('runs/st_ppo_tiny'), 2)
    self.assertTrue((self.folder / 'runs/st_ppo_tiny/report.html').is_file())

  def test_shipped_experiment_is_found_from_anywhere(self):
    said = self.stppo('--config=experiments/st_ppo_7b.py:smoke', '--mode=report', code=2)
    self.assertIn(f'config file: {self.site}/stppo_jax/shipped/experiments/st_ppo_7b.py', said)
    self.assertIn("stppo: workdir 'runs/st_ppo_7b_smoke' is not a folder", said)

  def test_user_experiment_imports_shipped_and_local_files(self):
    said = self.stppo('--config=mine.py', '--mode=report', code=2)
    self.assertIn("workdir 'runs/mine' is not a folder", said)

  def test_new_writes_a_task_that_trains(self):
    self.stppo('new', 'my_task')
    self.assertTrue((self.folder / 'my_task' / 'README.md').is_file())
    said = self.stppo('--config=my_task/config.py', '--mode=report', code=2)
    self.assertIn('is not a folder', said)

  def test_help_shows_the_command_as_it_is_called(self):
    said = self.stppo('--help')
    self.assertIn('stppo eval', said)
    self.assertNotIn('run.py', said)


if __name__ == '__main__':
  absltest.main()
