"""The command line: every mistake is one line on stderr and a non-zero exit code."""

import contextlib
import dataclasses
import importlib
import io
import json
import logging as std_logging
import os
import pathlib
import platform
import pty
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import types
import unittest
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized
import jax
import numpy as np
import pytest

from stppo_jax import config as schema
from stppo_jax import plugins as plugins_lib
from stppo_jax import requirements
from stppo_jax.algorithms import variants
from stppo_jax.cli import config_file
from stppo_jax.cli import doc_pages
from stppo_jax.cli import doctor
from stppo_jax.cli import entry
from stppo_jax.cli import flags
from stppo_jax.cli import help as help_lib
from stppo_jax.cli import modes
from stppo_jax.cli import saved_config
from stppo_jax.cli import signals
from stppo_jax.data import tasks as tasks_lib
from stppo_jax.evaluation import policy as policy_lib
from stppo_jax.monitoring import metrics
from stppo_jax.settings import validation
from stppo_jax.training import loop
from stppo_jax.types import Episode
from stppo_jax.types import MixTask
from stppo_jax.types import RunError
from stppo_jax.types import Stopped
from stppo_jax.types import Task
from stppo_jax.types import UserError
from tests.support import tiny_run

ROOT = pathlib.Path(__file__).parents[2]
BROKEN = 'def get_config(mode=""):\n  return undefined_name\n'

RULES = {path: rules for path, rules, _ in validation.fields(schema.Config())}


def run(*arguments, program='/somewhere/run.py'):
  """Runs a command; returns (exit code, stdout, stderr)."""
  stdout, stderr = io.StringIO(), io.StringIO()
  with contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(stderr):
    code = entry.run([program, *arguments])
  return code, stdout.getvalue(), stderr.getvalue()


def load(*arguments, reads_run=False):
  """Returns the config of a command line."""
  return config_file.load(flags.parse(arguments), reads_run)


# Name: arguments ({tmp}: a folder), and words of the one line.
MISTAKES = {
    'unknown field': (['--config.train.updatez=3'], ['updatez', 'mean --config.train.updates']),
    'field of a section that is not there': (['--config.lrr=3'], ['lrr']),
    'a whole section': (['--config.train=5'], ['config.train:', 'train.updates']),
    'wrong type': (
        ['--config.train.updates=many'],
        ['config.train.updates', 'many', 'it means: ' + RULES['train.updates'].meaning],
    ),
    'help on a section that is not there': (['--help=trian'], ['--help=trian', 'no such section']),
    'missing config file': (['--config=nowhere.py'], ['nowhere.py', 'no such file']),
    'missing config file, and an override': (
        ['--config=nowhere.py:smoke', '--config.seed=1'],
        ['nowhere.py', 'no such file'],
    ),
    'missing config file, other spelling': (['--config', 'nowhere.py'], ['nowhere.py']),
    'config file with an error': (['--config={tmp}/broken.py'], ['undefined_name']),
    'misspelt flag': (['--wrokdir=x'], ['wrokdir', 'workdir']),
    'wrong mode': (
        ['--mode=trian'],
        ['trian: there is no such mode', 'mean train', 'train, sft, eval'],
    ),
    'wrong word': (['evla'], ['evla: there is no such mode', 'mean eval']),
    'a word too many': (
        ['eval', 'runs/a'],
        ['eval is followed by runs/a: give run.py eval. Flags'],
    ),
    'a word is missing': (['compare', 'runs/a'], ['give run.py compare RUN RUN']),
    'a mode twice': (['--mode=eval', 'train'], ['eval is followed by train']),
    'an unknown shell': (['completion', 'fish'], ['fish', 'bash and zsh']),
    'a name that is none': (['new', 'my-task'], ['my-task', 'such as my_task']),
    'a name that is taken': (['new', 'json'], ['new json', 'give another']),
    'a port that is none': (['--mode=serve', '--port=70000'], ['--port=70000', 'at most 65535']),
    'no value': (['--config.seed'], ['--config.seed', 'give a value']),
    'a flag instead of a value': (['report', '--workdir', '--config.seed=1'], ['give a value']),
    'forgotten dashes': (['config.train.updates=3'], ['config.train.updates=3', '--']),
    'rule of validate': (
        ['--config.rollout.top_k=5', '--config.algorithm.old_logp=trainer', '--workdir={tmp}/run'],
        ['top_k=5', 'old_logp=sampler'],
    ),
    'report of nothing': (['--mode=report', '--workdir={tmp}/nothing'], ['nothing']),
}


class MistakesTest(parameterized.TestCase):

  @parameterized.parameters(*MISTAKES)
  def test_mistake_is_one_line(self, name):
    arguments, words = MISTAKES[name]
    tmp = self.enterContext(tempfile.TemporaryDirectory())
    (pathlib.Path(tmp) / 'broken.py').write_text(BROKEN, encoding='utf-8')
    self.enterContext(contextlib.chdir(tmp))
    code, stdout, stderr = run(*[argument.format(tmp=tmp) for argument in arguments])
    self.assertEqual(stderr.count('\n'), 1, stderr)
    self.assertStartsWith(stderr, 'run.py: ')
    self.assertEqual(code, 2)
    self.assertEmpty(stdout)
    for word in words:
      self.assertIn(word, stderr)

  def test_process_exits_with_one_line_and_code_2(self):
    result = subprocess.run(
        [sys.executable, str(ROOT / 'run.py'), '--config.train.updatez=3'],
        check=False,
        capture_output=True,
        text=True,
        env={**os.environ, 'JAX_PLATFORMS': 'cpu'},
    )
    self.assertEqual(result.returncode, 2)
    self.assertEqual(result.stderr.count('\n'), 1, result.stderr)
    self.assertIn('did you mean --config.train.updates?', result.stderr)


class HelpTest(parameterized.TestCase):

  @parameterized.parameters('--help', '-help', '-h')
  def test_help_names_every_flag_mode_and_section(self, argument):
    code, text, _ = run(argument)
    self.assertEqual(code, 0)
    self.assertLess(text.count('\n'), 64)
    for name in (
        '--workdir',
        '--topology',
        '--coordinator',
        '--profile',
        '--config.FIELD',
        *modes.MODES,
    ):
      self.assertIn(name, text)
    for path in RULES:
      self.assertIn(path.split('.')[0], text)

  def test_help_shows_the_command_and_files_that_exist(self):
    text = run('--help')[1]
    self.assertIn('  python run.py eval', text)
    self.assertIn('  stppo eval', run('--help', program='/bin/stppo')[1])
    files = re.findall(r'--config=(experiments/[\w.]+)', text)
    self.assertNotEmpty(files)
    for file in files:
      self.assertTrue((ROOT / file).is_file(), file)

  def test_section_help_lists_its_settings(self):
    config = schema.Config()
    config.retriever.top_k = 7
    text = help_lib.section('retriever', config)
    for path, rules, value in validation.fields(schema.Config()):
      if path == 'retriever.top_k':
        self.assertIn(f'--config.{path}=7  (default 3)\n    {rules.meaning}', text)
      elif path.startswith('retriever.'):
        self.assertIn(f'--config.{path}={value!r}\n    {rules.meaning}', text)
    self.assertIn('[bm25 | http | dense | hybrid | none | module:attribute]', text)
    self.assertNotIn('--config.train.updates', text)

  def test_algorithm_help_shows_the_values_of_the_variant(self):
    config = schema.Config()
    config.algorithm.variant, config.algorithm.clip_low = 'gspo', 0.1
    text = help_lib.section('algorithm', config)
    for line in (
        "--config.algorithm.variant='gspo'  (default 'st_ppo')",
        "--config.algorithm.ratio=None  (gspo: 'sequence')",
        '--config.algorithm.clip_low=0.1  (default None)',
        '--config.algorithm.clip_high=None  (gspo: 0.0004)',
        '    [none | paper | floor | relative | module:attribute]',
    ):
      self.assertIn(line, text.splitlines())

  def test_section_help_shows_the_values_of_the_command(self):
    _, text, _ = run(
        f'--config={ROOT}/experiments/grpo_7b.py', '--help=train', '--config.train.epochs=2'
    )
    self.assertIn('--config.train.mini_batch=64  (default 256)', text)
    self.assertIn('--config.train.epochs=2  (default 1)', text)


class WordsTest(absltest.TestCase):
  """The first word of a command is its mode."""

  def test_word_and_flag_give_the_same_mode(self):
    for arguments in (['plan'], ['--mode=plan'], ['--mode', 'plan'], ['--config.seed=1', 'plan']):
      self.assertEqual(flags.parse(arguments).flags.mode, 'plan')
    self.assertEqual(flags.parse([]).flags.mode, 'train')
    self.assertEqual(flags.parse(['--mode=compare', 'a', 'b']).operands, ['a', 'b'])

  def test_home_folder_in_a_value(self):
    arguments = ['--workdir=~/run', '--config.model.folder', '~/model', '--config.name=~']
    with mock.patch.dict(os.environ, HOME='/home/me'):
      parsed = flags.parse(arguments)
    self.assertEqual(parsed.flags.workdir, '/home/me/run')
    self.assertEqual(parsed.overrides, {'model.folder': '/home/me/model', 'name': '~'})

  def test_list_names_each_experiment_and_algorithm(self):
    code, text, _ = run('list')
    self.assertIsNone(code)
    self.assertRegex(text, 'experiments/st_ppo_tiny.py +ST-PPO on the embedded questions')
    self.assertRegex(text, '\n  st_ppo +advantage=token_gae ratio=turn divisor=paper')
    self.assertContainsSubset(variants.VARIANTS, text.split())

  def test_completion_offers_modes_and_settings(self):
    script = run('completion', 'bash')[1]
    for start, expected in (('tra', 'train'), ('--config.train.upd', '--config.train.updates=')):
      result = subprocess.run(
          ['bash', '-c', f'{script}\n_stppo stppo {start} stppo; echo "${{COMPREPLY[@]}}"'],
          capture_output=True,
          text=True,
      )
      self.assertEqual(result.stdout.split(), [expected], result.stderr)

  @absltest.skipIf(shutil.which('zsh') is None, 'zsh is not installed')
  def test_completion_works_in_zsh_without_settings(self):
    """As on Debian, whose zsh does not run compinit."""
    folder = self.enterContext(tempfile.TemporaryDirectory())
    pathlib.Path(folder, '.zshrc').write_text(run('completion', 'zsh')[1], encoding='utf-8')
    terminal, child = pty.openpty()
    env = {**os.environ, 'ZDOTDIR': folder, 'TERM': 'dumb'}
    process = subprocess.Popen(['zsh', '-i'], stdin=child, stdout=child, stderr=child, env=env)
    os.close(child)
    self.addCleanup(process.wait)
    self.addCleanup(process.kill)
    self.addCleanup(os.close, terminal)
    shown = ''
    os.write(terminal, b'stppo --config.train.upd\t')
    while 'train.updates=' not in shown:
      ready, _, _ = select.select([terminal], [], [], 60)
      self.assertTrue(ready, shown)
      shown += os.read(terminal, 4096).decode('utf-8', 'replace')
    self.assertNotIn('compdef', shown)

  def test_pages_for_errors_exist(self):
    for _, page in doc_pages.PAGES:
      self.assertTrue((ROOT / 'docs' / f'{page}.md').is_file(), page)
    self.assertEndsWith(
        doc_pages.with_page('config.env.kind=7: no.'), 'no; see docs/environments.md'
    )
    message = "config.rollout.demonstrations='x.jsonl', line 1: ids of another tokenizer"
    self.assertEndsWith(doc_pages.with_page(message), 'see docs/demonstrations.md')
    message = "chats.json:1: column 'messages' is 'x': a list of messages is needed"
    self.assertEndsWith(doc_pages.with_page(message), 'see docs/warm_start.md')
    message = "hotpot.json:1: column 'answer' is True"
    self.assertEndsWith(doc_pages.with_page(message), 'see docs/data.md')
    self.assertEqual(doc_pages.with_page('no such flag'), 'no such flag')

  @pytest.mark.slow
  def test_new_folder_passes_its_own_tests(self):
    tmp = self.enterContext(tempfile.TemporaryDirectory())
    self.enterContext(contextlib.chdir(tmp))
    self.enterContext(mock.patch.object(sys, 'path', [tmp, *sys.path]))
    code, text, _ = run('new', 'my_task')
    self.assertIsNone(code)
    self.assertIn('stppo --config=my_task/config.py:smoke', text)
    self.assertIn('stppo watch', pathlib.Path('my_task/README.md').read_text(encoding='utf-8'))
    importlib.invalidate_caches()
    result = unittest.TestResult()
    unittest.TestLoader().loadTestsFromName('my_task.env_test').run(result)
    self.assertEqual(result.testsRun, 2)
    self.assertEmpty(result.errors + result.failures)
    config = importlib.import_module('my_task.config').get_config()
    with tiny_run.on_one_device():
      loop.start(config, 'run')
    shares = {row['step']: row.get('val-core/all/share') for row in metrics.read_metrics('run')}
    self.assertLess(shares[0], 0.3)
    self.assertGreater(shares[14], 0.8)


class DoctorTest(absltest.TestCase):

  def test_packages_of_the_clone_are_installed(self):
    text, is_complete = doctor.packages_text()
    self.assertTrue(is_complete)
    self.assertRegex(text, r'jax +[\d.]+ +<0.13,>=0.10.2')

  def test_missing_package_is_named_with_the_command(self):
    lines = {'': ['jax>=99', 'no_such_package>=1'], 'serve': ['uvicorn', 'nowhere']}
    with mock.patch.object(requirements, '_texts', return_value=lines):
      text, is_complete = doctor.packages_text()
      packages = requirements.groups()['']
    self.assertFalse(is_complete)
    self.assertFalse(packages[0].is_tested)
    lacks = 'missing, or not in the tested range'
    self.assertIn(f'{lacks}: jax, no_such_package: pip install "."', text)
    self.assertIn(f'{lacks}: nowhere: pip install ".[serve]"', text)

  def test_versions_above_the_tested_range_are_named(self):
    lines = {'': ['jax>=0.1,<0.2', 'absl-py>=99', 'numpy>=1']}
    with (
        mock.patch.object(requirements, '_texts', return_value=lines),
        mock.patch.object(platform, 'python_version', lambda: '3.99.1'),
    ):
      text, is_complete = doctor.packages_text()
    self.assertTrue(is_complete)
    self.assertRegex(text, r'(?m)^Python +3\.99\.1 .*<3\.15.* newer than tested$')
    self.assertRegex(text, r'(?m)^jax .* newer than tested$')
    self.assertRegex(text, r'(?m)^absl-py .* not tested$')
    self.assertRegex(text, r'(?m)^numpy +[\d.]+ +>=1$')

  def test_extras_of_a_package_are_checked_too(self):
    lines = {'gpu': ['jax[cuda12]>=0.10']}
    with mock.patch.object(requirements, '_texts', return_value=lines):
      names = [package.name for package in requirements.groups()['gpu']]
    self.assertContainsSubset(['jax', 'jax-cuda12-plugin'], names)


class CompareTest(absltest.TestCase):

  def write(self, name, seed, scores):
    """Writes a run with one question per score, and an older evaluation."""
    workdir = pathlib.Path(self.tmp, name)
    (workdir / 'episodes').mkdir(parents=True)
    config = dataclasses.asdict(schema.Config(seed=seed))
    (workdir / 'config.json').write_text(json.dumps(config), encoding='utf-8')
    lines = []
    for i, score in enumerate(scores):
      episode = Episode(Task(f'q{i}', dataset='geo'), 0, np.zeros(1, np.int32), [])
      episode.metrics = {'em': score}
      episode.core_metrics = ('em',)
      lines.append(json.dumps(episode.to_dict()))
    (workdir / 'episodes/eval_000004.jsonl').write_text('\n'.join(lines), encoding='utf-8')
    (workdir / 'episodes/eval_000000.jsonl').write_text('', encoding='utf-8')
    return str(workdir)

  def setUp(self):
    super().setUp()
    self.tmp = self.enterContext(tempfile.TemporaryDirectory())

  def test_differences_are_paired_by_question(self):
    # B is better by .25 on each of the first four questions. The fifth was only played by B.
    a = self.write('a', 0, [0.0, 0.25, 0.5, 0.75])
    b = self.write('b', 1, [0.25, 0.5, 0.75, 1.0, 0.0])
    code, text, _ = run('compare', a, b)
    self.assertIsNone(code)
    (row,) = [line.split() for line in text.splitlines() if line.startswith('| em')]
    self.assertEqual(row[3:5], ['4', '|'])
    self.assertEqual(' '.join(row[-4:-1]), '.250 [.250, .250]')
    self.assertEqual([row[5], row[9]], ['.375', '.625'])
    (setting,) = [line.split() for line in text.splitlines() if line.startswith('| seed')]
    self.assertEqual(setting, ['|', 'seed', '|', '0', '|', '1', '|'])

  def test_metric_of_a_mix_is_that_of_its_environments(self):
    """Questions of the other environment do not count in it, and neither do other questions."""
    a = self.write('a', 0, [])
    lines = []
    for i, (name, metric) in enumerate([('guess', 'won')] * 3 + [('sums', 'solved')] * 3):
      task = MixTask(f'{name}.{i}', f'question {i}', dataset=name, environment=name)
      episode = Episode(task, 0, np.zeros(1, np.int32), [])
      episode.metrics = {metric: 1.0}
      episode.core_metrics = (metric,)
      lines.append(json.dumps(episode.to_dict()))
    path = pathlib.Path(a, 'episodes/eval_000004.jsonl')
    path.write_text('\n'.join(lines), encoding='utf-8')
    b = self.write('b', 0, [])
    lines[0] = lines[0].replace('question 0', 'another question')
    path = pathlib.Path(b, 'episodes/eval_000004.jsonl')
    path.write_text('\n'.join(lines), encoding='utf-8')
    text = run('compare', a, b)[1]
    lines = [line for line in text.splitlines() if line.startswith(('| won', '| solved'))]
    rows = [line.split()[1:6:2] for line in lines]
    self.assertEqual(rows, [['won', '2', '1.000'], ['solved', '3', '1.000']])

  def test_metric_that_one_run_lacks_is_not_compared(self):
    a, b = self.write('a', 0, [0.0, 1.0]), self.write('b', 0, [1.0, 1.0])
    path = pathlib.Path(b, 'episodes/eval_000004.jsonl')
    path.write_text(path.read_text(encoding='utf-8').replace('"em"', '"solved"'), encoding='utf-8')
    text = run('compare', a, b)[1]
    self.assertIn('| score', text)
    self.assertNotIn('| em ', text)

  def test_settings_are_shown_without_a_common_question(self):
    a = self.write('a', 0, [0.0, 1.0])
    b = self.write('b', 1, [1.0])
    path = pathlib.Path(b, 'episodes/eval_000004.jsonl')
    path.write_text(path.read_text(encoding='utf-8').replace('"q0"', '"p0"'), encoding='utf-8')
    code, text, _ = run('compare', a, b)
    self.assertIsNone(code)
    self.assertRegex(text, r'\| seed +\| 0 +\| 1 +\|')
    self.assertIn('no question in common', text)

  def test_outcomes_of_both_are_counted(self):
    a = self.write('a', 0, [0.0, 1.0])
    text = run('compare', a, self.write('b', 0, [1.0, 1.0, 1.0]))[1]
    self.assertIn('| answered           | 2 | 3 |', text)
    self.assertIn('The settings are the same.', text)

  def test_other_versions_of_packages_are_shown(self):
    a, b = self.write('a', 0, [0.0, 1.0]), self.write('b', 0, [1.0, 1.0])
    for folder, version in ((a, '1.0'), (b, '2.0')):
      record = {'git': {}, 'python': '3.11.1', 'packages': {'jax': version}, 'devices': {}}
      pathlib.Path(folder, 'provenance.jsonl').write_text(json.dumps(record), encoding='utf-8')
    self.assertIn("| provenance.packages.jax | '1.0' | '2.0' |", run('compare', a, b)[1])

  def test_folder_without_episodes_is_rejected(self):
    a = self.write('a', 0, [0.0, 1.0])
    os.mkdir(f'{self.tmp}/c')
    for folder, words in ((f'{self.tmp}/c', 'has no config.json'), (f'{a}/episodes', 'no config')):
      code, _, stderr = run('compare', a, folder)
      self.assertEqual(code, 2)
      self.assertIn(words, stderr)


class ShippedExperimentTest(absltest.TestCase):

  def test_local_file_comes_before_the_shipped_one(self):
    name = 'experiments/st_ppo_7b.py'
    self.enterContext(contextlib.chdir(self.enterContext(tempfile.TemporaryDirectory())))
    self.assertEqual(config_file.find(name), str(ROOT / name))
    os.mkdir('experiments')
    pathlib.Path(name).touch()
    self.assertEqual(config_file.find(name), name)
    with self.assertRaisesRegex(UserError, 'no such file'):
      config_file.find('experiments/mine.py')


class LogTest(absltest.TestCase):

  def test_clone_named_like_the_package_shows_no_library(self):
    """Everything in such a clone has the name of the package in its path, libraries included."""
    clone = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()), 'stppo_jax')
    libraries = clone / '.venv' / 'lib'
    libraries.mkdir(parents=True)
    for name in ('stppo_jax', 'experiments'):
      shutil.copytree(ROOT / name, clone / name, ignore=shutil.ignore_patterns('*.pyc'))
    shutil.copy(ROOT / 'run.py', clone)
    (libraries / 'a_library.py').write_text(
        "from absl import logging\nlogging.info('info of a library')\n"
        "logging.warning('warning of a library')\n",
        encoding='utf-8',
    )
    result = subprocess.run(
        [sys.executable, 'run.py', '--config.data.source=a_library:missing'],
        cwd=clone,
        env=os.environ | {'PYTHONPATH': str(libraries)},
        capture_output=True,
        text=True,
        check=False,
    )
    self.assertEqual(result.returncode, 2, result.stderr)
    self.assertIn('warning of a library', result.stderr)
    self.assertNotIn('info of a library', result.stderr)
    self.assertLen(result.stderr.splitlines(), 2)  # the warning, and what is wrong

  def test_own_messages_are_shown_and_those_of_orbax_are_not(self):
    def shown(path, level):
      return entry._is_shown(std_logging.LogRecord('absl', level, path, 1, '', (), None))

    package = os.path.dirname(os.path.dirname(entry.__file__))
    self.assertTrue(shown(os.path.join(package, 'training', 'run.py'), std_logging.INFO))
    self.assertFalse(shown('/stppo_jax/.venv/lib/orbax/checkpoint.py', std_logging.ERROR))
    self.assertFalse(shown('/stppo_jax/.venv/lib/jax/xla_bridge.py', std_logging.INFO))
    self.assertTrue(shown('/stppo_jax/.venv/lib/jax/xla_bridge.py', std_logging.WARNING))


class MainTest(parameterized.TestCase):
  """Mistakes that are found after the command line was parsed; run in this process."""

  def setUp(self):
    super().setUp()
    # What a command sets for its process, it must not set for the other tests.
    self.enterContext(mock.patch.object(type(jax.config), 'update'))
    self.tmp = self.enterContext(tempfile.TemporaryDirectory())
    tiny_run.write(self.tmp)
    self.experiment = os.path.join(self.tmp, 'experiment.py')
    pathlib.Path(self.experiment).write_text(
        'from tests.support import tiny_run\n'
        f'def get_config(mode=""):\n  return tiny_run.make_config({self.tmp!r})\n',
        encoding='utf-8',
    )

  def complaint(self, *arguments):
    """Returns (the one line, exit code) of a command."""
    code, _, stderr = run(f'--config={self.experiment}', f'--workdir={self.tmp}/run', *arguments)
    self.assertEqual(stderr.count('\n'), 1, stderr)
    self.assertStartsWith(stderr, 'run.py: ')
    return stderr, code

  def refused(self, *words, arguments=()):
    line, code = self.complaint(*arguments)
    self.assertEqual(code, 2)
    for word in words:
      self.assertIn(word, line)

  def edit(self, name, number, line):
    """Replaces one line of a file of the knowledge folder."""
    path = pathlib.Path(self.tmp) / 'knowledge' / name
    lines = path.read_text(encoding='utf-8').splitlines()
    lines[number - 1] = line
    path.write_text('\n'.join(lines), encoding='utf-8')

  def test_passage_that_is_no_json(self):
    self.edit('corpus.jsonl', 2, '{"id": "x", "title"')
    self.refused('corpus.jsonl:2', 'JSON')

  def test_corrected_config_may_use_the_same_folder(self):
    self.refused(
        'nowhere',
        arguments=['--config.data.source=nowhere', f'--config.data.corpus={self.tmp}/knowledge'],
    )
    with mock.patch.object(tasks_lib, 'TaskStream', side_effect=RunError('far enough')):
      self.assertIn('far enough', self.complaint()[0])

  def test_settings_that_sft_does_not_read_are_named(self):
    read = ['--config.sft.lr=1e-4', '--config.env.options.x=1', '--config.data.columns.answers=a']
    unread = (
        'data.datasets data.max_hops placement.optimizer rollout.temperature train.updates '
        'train.epochs log.project log.tracker actor.lr env_not_a_section'
    ).split()
    overrides = flags.parse(['sft', *read]).overrides
    with self.assertNoLogs('absl', 'WARNING'):
      entry._warn_of_unread('sft', overrides)
    with self.assertLogs('absl', 'WARNING') as logs:
      entry._warn_of_unread('sft', [*overrides, *unread])
    expected = ', '.join(f'config.{path}' for path in unread)
    self.assertIn(f'sft does not read {expected}: no effect', logs.output[0])

  def test_command_warns_of_settings_without_effect(self):
    with self.assertLogs('absl', 'WARNING') as logs:
      line, _ = self.complaint('sft', '--config.log.project=a')  # it names no conversations
    self.assertIn('conversations', line)
    self.assertIn('sft does not read config.log.project', logs.output[0])

  def test_settings_that_modes_read_exist(self):
    sections = {path.rpartition('.')[0] for path in RULES}
    for mode in modes.MODES.values():
      self.assertContainsSubset(mode.reads, RULES.keys() | sections)

  @parameterized.parameters(
      ('--topology=v5e:8x8', 'plan and doctor'),
      ('--port=1', 'serve and env-server and watch'),
      ('--input=x', 'export_atif and import_atif'),
      ('--batches=2', 'sample'),
  )
  def test_flag_of_another_mode_is_rejected(self, flag, mode):
    name = flag.partition('=')[0].removeprefix('--')
    line, code = self.complaint(flag)
    self.assertEqual(code, 2)
    self.assertIn(f'--{name}=', line)
    self.assertIn(f'is for {mode}, and this is train: leave it out', line)

  @parameterized.parameters(
      (['--config.data.source={tmp}/nowhere'], ['nowhere', 'no such file']),
      (['--config.data.train_split=trian'], ["'trian'", 'train']),
      (['--config.data.datasets=nonsense'], ['nonsense', 'fruit', 'nature']),
      (['--config.model.folder={tmp}/nowhere'], ['nowhere', 'config.json']),
      (
          ['--config.retriever.kind=http', '--config.retriever.url=localhost:8000'],
          ['localhost:8000', 'http://'],
      ),
      (
          ['--config.train.micro_batch=4', '--config.mesh.data=8'],
          ['micro_batch=4', 'multiple of 8'],
      ),
      (['--config.mesh.data=3', '--config.mesh.fsdp=3'], ['data=3', '8']),
      (['--config.model.attention=splash'], ['splash', 'needs a TPU', 'cpu', 'plain']),
      (['--workdir={tmp}/experiment.py/run'], ['experiment.py/run']),
  )
  def test_impossible_settings(self, arguments, words):
    self.refused(*words, arguments=[argument.format(tmp=self.tmp) for argument in arguments])

  def test_model_folder_without_weights(self):
    os.remove(os.path.join(self.tmp, 'model', 'model.safetensors'))
    self.refused('no weights', os.path.join(self.tmp, 'model'))

  def test_model_folder_without_tokenizer(self):
    os.remove(os.path.join(self.tmp, 'model', 'tokenizer.json'))
    self.refused('tokenizer.json', os.path.join(self.tmp, 'model'))

  def test_tokenizer_of_another_model(self):
    tiny_run.write_model(os.path.join(self.tmp, 'small'), vocab_size=300)
    self.refused('ids', '300', arguments=[f'--config.model.folder={self.tmp}/small'])

  def test_folder_of_another_run(self):
    os.makedirs(os.path.join(self.tmp, 'run'))
    other = dataclasses.asdict(tiny_run.make_config(self.tmp)) | {'seed': 7}
    for name, text in (('config.json', json.dumps(other)), ('metrics.jsonl', '')):
      pathlib.Path(self.tmp, 'run', name).write_text(text, encoding='utf-8')
    self.refused('seed (7 there, 0 here)', '--workdir')

  def test_export_of_a_folder_without_run(self):
    self.refused('--workdir', 'no checkpoint to export', '--config', arguments=['--mode=export'])

  @parameterized.parameters('eval', 'sample', 'chat', 'serve')
  def test_policy_of_a_folder_without_run(self, mode):
    folder = f'{self.tmp}/misspelt'
    settings = ['--config.data.source=' + os.path.join(self.tmp, 'knowledge')]
    code, _, stderr = run(mode, f'--workdir={folder}', *settings)
    self.assertEqual(code, 2)
    self.assertRegex(stderr, f"^run.py: --workdir='{folder}' has no checkpoint: [^\n]*\n$")
    self.assertFalse(os.path.exists(folder))

  @parameterized.parameters(('--config={experiment}',), ('--config.train.updates=0',))
  def test_untrained_policy_on_request(self, argument):
    argument = argument.format(experiment=self.experiment)
    untrained = mock.patch.object(policy_lib, '_untrained', side_effect=RunError('far enough'))
    with untrained:
      code, _, stderr = run('chat', argument, f'--workdir={self.tmp}/new')
    self.assertIn('far enough', stderr)
    self.assertEqual(code, 1)

  def test_repeated_thread_error_is_hidden(self):
    reported = []
    for text in ('Event loop is closed', 'another error'):
      unraisable = types.SimpleNamespace(exc_value=RuntimeError(text))
      entry._report_unraisable(reported.append, unraisable)
    self.assertLen(reported, 1)

  def test_sigterm_in_callback_is_reported_once(self):
    say = lambda error: types.SimpleNamespace(exc_value=error)
    with mock.patch.object(sys, 'unraisablehook', mock.Mock()) as told:
      with signals.handled():
        for error in (KeyboardInterrupt(), Stopped(), RuntimeError('of ours')):
          sys.unraisablehook(say(error))
      self.assertLen(told.mock_calls, 1)
      sys.unraisablehook(say(KeyboardInterrupt()))
      self.assertLen(told.mock_calls, 2)

  def test_chat_is_for_one_process(self):
    with mock.patch.object(jax, 'process_count', lambda: 2):
      code, _, stderr = run('chat', '--config.model.folder=nowhere')
    self.assertEqual(code, 2)
    self.assertIn('chat is for one process', stderr)

  def test_exit_codes_of_failure_and_interrupt(self):
    for error, word, code in (
        (RunError('several\nlines'), 'several lines', 1),
        (KeyboardInterrupt(), 'interrupted', 130),
    ):
      with mock.patch.object(loop, 'start', side_effect=error):
        line, exit_code = self.complaint()
      self.assertIn(word, line)
      self.assertEqual(exit_code, code)

  def test_swallowed_interrupt_is_not_lost(self):
    """Python ignores exceptions in a finalizer, for example."""
    before = signal.getsignal(signal.SIGINT)

    def train(config, workdir, stop_signal, profile):
      del config, workdir, profile
      self.assertFalse(stop_signal.is_set())
      with contextlib.suppress(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
      stop_signal.is_set()

    with mock.patch.object(loop, 'start', train):
      line, exit_code = self.complaint()
    self.assertIn('interrupted', line)
    self.assertEqual(exit_code, 130)
    self.assertIs(signal.getsignal(signal.SIGINT), before)


class ExperimentFileTest(parameterized.TestCase):

  def parse(self, source, *arguments):
    """Returns the config of an experiment file with flags, or the error."""
    self.enterContext(contextlib.chdir(self.enterContext(tempfile.TemporaryDirectory())))
    pathlib.Path('mine.py').write_text(source, encoding='utf-8')
    try:
      return load('--config=mine.py', *arguments)
    except UserError as error:
      self.assertNotIn('\n', str(error))
      return str(error)

  @parameterized.parameters(
      ('config.train.updaets = 3', "no setting 'updaets'; did you mean updates?"),
      ('config.train = schema.TrainSettings(updaets=3)', 'updaets'),
      ('config.train.updates = undefined', 'undefined'),
      ('1 / 0', 'division by zero'),
      ('config.train.updates = = 3', 'invalid syntax'),
  )
  def test_error_names_file_and_line(self, line, words):
    source = 'from stppo_jax import config as schema\ndef get_config(mode=""):\n'
    error = self.parse(source + f'  config = schema.Config()\n  {line}\n  return config\n')
    self.assertIn(words, error)
    self.assertIn('mine.py:4', error)

  def test_file_that_returns_no_config(self):
    self.assertIn('return a stppo_jax.config.Config', self.parse('get_config = lambda: 7\n'))

  def test_none_is_a_value(self):
    source = (
        'from stppo_jax import config as schema\ndef get_config(mode=""):\n'
        '  return schema.Config(algorithm=schema.AlgorithmSettings(clip_low=0.3, whiten=True))\n'
    )
    config = self.parse(
        source, '--config.algorithm.clip_low=None', '--config.algorithm.whiten=None'
    )
    self.assertEqual(config.algorithm, schema.AlgorithmSettings())
    self.assertIn('updates', self.parse(source, '--config.train.updates=None'))
    given = ('--config.algorithm.clip_low=None', '--config.algorithm.clip_low=0.1')  # the last wins
    self.assertEqual(self.parse(source, *given).algorithm.clip_low, 0.1)
    self.assertIsNone(self.parse(source, *given[::-1]).algorithm.clip_low)

  @parameterized.parameters(
      ('  sys.exit(7)\n', 'exits with 7 '),
      ('  sys.exit()\n', 'exits with None '),
      ('  return schema.Config()\nsys.exit("bye")\n', "exits with 'bye' "),
  )
  def test_experiment_file_that_exits_is_named(self, end, words):
    source = f'import sys\nfrom stppo_jax import config as schema\ndef get_config(mode=""):\n{end}'
    error = self.parse(source)
    self.assertIn(words, error)
    self.assertIn('mine.py:', error)

  def test_byte_order_mark_is_accepted(self):
    source = (
        '\ufefffrom stppo_jax import config as schema\ndef get_config(mode=""):\n'
        '  return schema.Config(seed=5)\n'
    )
    self.assertEqual(self.parse(source).seed, 5)

  @parameterized.parameters(
      ((), ('geo',)),
      (('--config.data.source=mine',), ()),
      (('--config.data.source', 'mine'), ()),
      (('--config.data.corpus=mine',), ('geo',)),
      (('--config.data.source=embedded',), ('geo',)),
      (('--config.data.source=mine', "--config.data.datasets=('a',)"), ('a',)),
      (('--config.data.datasets=()',), ()),
      (('--config.env.kind=gem:game:GuessTheNumber-v0-easy',), ()),
      (('--config.env.kind=m:Env',), ('geo',)),
  )
  def test_datasets_belong_to_their_source(self, arguments, datasets):
    source = (
        'from stppo_jax import config as schema\ndef get_config(mode=""):\n'
        '  return schema.Config(data=schema.DataSettings(datasets=("geo",)))\n'
    )
    self.assertEqual(self.parse(source, *arguments).data.datasets, datasets)

  @parameterized.parameters(
      ((), 1),
      (('--config.data.source=mine',), 0),
      (('--config.data.source=mine', '--config.data.max_hops=2'), 2),
      (('--config.data.corpus=mine',), 1),
  )
  def test_hops_belong_to_their_source(self, arguments, max_hops):
    source = (
        'from stppo_jax import config as schema\ndef get_config(mode=""):\n'
        '  return schema.Config(data=schema.DataSettings(max_hops=1))\n'
    )
    self.assertEqual(self.parse(source, *arguments).data.max_hops, max_hops)

  def test_options_of_the_file_are_named_for_another_environment(self):
    text = (
        'from stppo_jax.config import Config\n\n'
        "def get_config(mode=''):\n"
        '  config = Config()\n'
        "  config.env.kind, config.env.options = 'm:Env', {'tries': 2}\n"
        '  return config\n'
    )
    path = os.path.join(self.enterContext(tempfile.TemporaryDirectory()), 'own.py')
    pathlib.Path(path).write_text(text, encoding='utf-8')
    with self.assertLogs('absl', 'WARNING') as logs:
      load(f'--config={path}', '--config.env.kind=search')
    self.assertRegex(logs.output[0], r"env.options={'tries': 2} are those of .*own.py.*'m:Env'")
    with self.assertNoLogs('absl', 'WARNING'):
      load(f'--config={path}', '--config.env.kind=search', '--config.env.options={}')
      load(f'--config={path}')


class SavedConfigTest(parameterized.TestCase):
  """Modes that read a run take its config where none is given."""

  def setUp(self):
    super().setUp()
    self.workdir = self.enterContext(tempfile.TemporaryDirectory())
    self.path = pathlib.Path(self.workdir) / 'config.json'

  def write(self, config):
    values = dataclasses.asdict(config) | {'plugins': {}, 'objective': {'ratio': 'turn'}}
    self.path.write_text(json.dumps(values), encoding='utf-8')

  @parameterized.parameters('st_ppo_tiny', 'st_ppo_7b', 'st_ppo_qwen3_30b_a3b', 'st_ppo_smollm2')
  def test_saved_config_is_read_as_written(self, name):
    config = importlib.import_module(f'experiments.{name}').get_config()
    config.env.options = {'low': 1, 'sizes': [2, 3]}
    config.algorithm.clip_low = 0.1
    self.write(config)
    self.assertEqual(saved_config.get_config(self.workdir), config)

  def test_config_of_workdir_is_the_default(self):
    workdir = f'--workdir={self.workdir}'
    default = load(workdir, reads_run=True)
    self.assertEqual(default.name, 'st_ppo_tiny')  # there is no config.json yet
    self.write(schema.Config(name='saved'))
    self.assertEqual(load(workdir, '--config.seed=3', reads_run=True).name, 'saved')
    self.assertEqual(load(workdir, reads_run=False).name, 'st_ppo_tiny')
    tiny = f'--config={config_file.DEFAULT}'
    self.assertEqual(load(workdir, tiny, reads_run=True).name, 'st_ppo_tiny')

  @parameterized.parameters(
      ('{"train": {"updatez": 1, "epochs": 2}}', ' does not fit this version (TrainSettings has '),
      ('{"more": {}}', ' does not fit this version (Config has no setting'),
      ('{"__class__": {"name": "x"}}', ' does not fit this version (Config has no setting'),
      ('{"train": null}', ' does not fit this version '),
      ('{"train":', ' is not a JSON object '),
  )
  def test_config_of_another_version_is_rejected(self, text, words):
    self.path.write_text(text, encoding='utf-8')
    with self.assertRaises(UserError) as caught:
      load(f'--workdir={self.workdir}', reads_run=True)
    self.assertStartsWith(str(caught.exception), f'{self.path}{words}')
    self.assertNotIn('\n', str(caught.exception))

  def test_commands_in_a_folder_need_trust(self):
    mark = pathlib.Path(self.workdir) / 'executed'
    config = schema.Config()
    module = pathlib.Path(self.workdir) / 'stranger_tasks.py'
    module.write_text(f'open({str(mark)!r}, "w").close()\n', encoding='utf-8')
    self.enterContext(mock.patch.object(sys, 'path', [self.workdir, *sys.path]))
    config.data.source = 'stranger_tasks:load'
    self.write(config)
    command = ('--mode=eval', f'--workdir={self.workdir}')
    code, _, stderr = run(*command)
    self.assertEqual(code, 2)
    line = (
        f"run.py: {self.path} names data.source='stranger_tasks:load': code, commands, addresses "
        'and folders to write to are taken from a folder with --trust_workdir only; add it if you '
        'trust the folder, or give your own --config; see docs/checkpoints.md\n'
    )
    self.assertEqual(stderr, line)
    self.assertFalse(mark.exists())
    self.assertEqual(run(*command, '--help=algorithm', '--trust_workdir')[0], 0)
    # A setting of the command line is the user's own.
    self.assertEqual(run(*command, '--help=data', '--config.data.source=embedded')[0], 0)

  @parameterized.parameters(
      ('env.kind', 'm:Env'),
      ('env.kind', 'gateway:m:f'),
      ('env.kind', 'gateway:command:program'),
      ('env.kind', 'gem:code:CodeContest'),
      ('env.kind', 'verifiers:gsm8k'),
      ('env.kind', 'openenv:http://host'),
      ('env.tools', ('calculator', 'mcp:program x')),
      ('env.tools', ('m:f',)),
      ('algorithm.variant', 'm:V'),
      ('retriever.kind', 'm:f'),
      ('retriever.url', 'http://host/retrieve'),
      ('eval.address', 'http://host/v1'),
      ('rollout.engine', 'http://host:8000'),
      ('teacher.address', 'http://host/v1'),
      ('rollout.engine_folder', '/elsewhere'),
      ('serve.host', '0.0.0.0'),
      ('serve.hosts', ('rebound.example',)),
      ('serve.weights_folder', '/'),
      ('eval.folder', '/elsewhere'),
      ('eval.folder', '..'),
      ('retriever.embeddings', 'elsewhere'),
      ('env.options', {'opponent': 'm:f'}),
      ('env.options', {'opponent': 'my-module:f'}),
      ('env.options', {'host': 'my-host.example:80/path'}),
      ('env.options', {'deep': [{'url': 'https://host'}]}),
      ('env.options', {'deep': [{'m:f': 1}]}),
      ('algorithm.options', {'f': 'm.n:f'}),
  )
  def test_code_and_addresses_need_trust(self, path, value):
    config = schema.Config()
    self.write(config)
    self.assertEqual(
        saved_config.untrusted(self.workdir, saved_config.get_config(self.workdir), ()), []
    )
    section, name = path.split('.')
    setattr(getattr(config, section), name, value)
    self.write(config)
    found = saved_config.get_config(self.workdir)
    (text,) = saved_config.untrusted(self.workdir, found, ())
    self.assertStartsWith(text, path)
    own = {f'{path}.{name}' for name in value} if isinstance(value, dict) else {path}
    self.assertEqual(saved_config.untrusted(self.workdir, found, own), [])

  @parameterized.parameters(
      ('env.kind', 'gem:game:GuessTheNumber-v0-easy'),
      ('env.kind', 'textarena:GuessTheNumber-v0'),
      ('env.kind', 'reasoning_gym:chain_sum'),
      ('env.tools', ('calculator', 'search')),
      ('data.source', '/data/train.parquet'),
      ('env.options', {'instructions': 'Question: what is 1:2?', 'low': 1}),
      ('retriever.kind', 'http'),
  )
  def test_built_in_names_need_no_trust(self, path, value):
    config = schema.Config()
    section, name = path.split('.')
    setattr(getattr(config, section), name, value)
    self.write(config)
    self.assertEqual(
        saved_config.untrusted(self.workdir, saved_config.get_config(self.workdir), ()), []
    )

  def test_packages_are_registries_for_env_kind_alone(self):
    """Elsewhere their names are imported, with any attribute."""
    plugins = [path for path, rules in RULES.items() if rules.plugin and path != 'env.kind']
    self.assertIn('algorithm.ratio', plugins)
    for path in plugins:
      for package in ('gem:game', 'textarena', 'reasoning_gym'):
        config = schema.Config()
        section, name = path.split('.')
        value = f'{package}:a.b.c'
        setattr(getattr(config, section), name, value)
        self.write(config)
        found = saved_config.untrusted(self.workdir, saved_config.get_config(self.workdir), ())
        self.assertEqual(found, [f'{path}={value!r}'])

  @parameterized.parameters('x y', '', ' y', 'y ')
  def test_option_imports_nothing_without_its_trust(self, attribute):
    """What `untrusted` does not take for a name is none for an environment either."""
    config = schema.Config()
    config.env.options = {'opponent': f'stranger:{attribute}'}
    self.write(config)
    is_trusted = not saved_config.untrusted(self.workdir, saved_config.get_config(self.workdir), ())
    with mock.patch.object(plugins_lib, 'import_module') as imported:
      with contextlib.suppress(UserError):
        plugins_lib.load('env.options.opponent', config.env.options['opponent'], {})
    self.assertFalse(is_trusted and imported.called)

  def test_options_of_verifiers_need_trust(self):
    """The user names the environment, and a stranger's config.json has the options."""
    config = schema.Config()
    config.env.options = {'python': './evil', 'taskset': {'split': 'train'}}
    self.write(config)
    found = saved_config.get_config(self.workdir)
    self.assertEqual(saved_config.untrusted(self.workdir, found, ()), [])  # no environment has them
    found.env.kind = 'verifiers:gsm8k'
    names = saved_config.untrusted(self.workdir, found, {'env.kind', 'env.options.taskset'})
    self.assertEqual(names, ["env.options.python='./evil'"])

  def test_folder_within_the_run_needs_no_trust(self):
    config = schema.Config()
    link = os.path.join(self.workdir, 'link')
    os.symlink('/', link)
    for folder, is_found in ((os.path.join(self.workdir, 'scores'), False), (link, True)):
      config.eval.folder = folder
      self.write(config)
      found = saved_config.untrusted(self.workdir, saved_config.get_config(self.workdir), ())
      self.assertEqual(bool(found), is_found)

  def test_a_byte_order_mark_is_no_error(self):
    self.write(schema.Config(seed=5))
    self.path.write_bytes(b'\xef\xbb\xbf' + self.path.read_bytes())
    self.assertEqual(saved_config.get_config(self.workdir).seed, 5)


class FlagsTest(parameterized.TestCase):

  @parameterized.parameters(
      (['--config.env.options.low=1'], {'low': 1}),
      (['--config.env.options.low=1', '--config.env.options.high=2.5'], {'low': 1, 'high': 2.5}),
      (['--config.env.options.name=two words'], {'name': 'two words'}),
      (
          ['--config.env.options.on=true', '-config.env.options.off=False'],
          {'on': True, 'off': False},
      ),
      (['--config.env.options.sizes=(1, 2)'], {'sizes': (1, 2)}),
      (['--config.env.options={"a": [1, null]}'], {'a': [1, None]}),
      (["--config.env.options={'a': 1}", '--config.env.options.a=2'], {'a': 2}),
  )
  def test_options_are_set_singly_or_as_dict(self, arguments, expected):
    overrides = flags.parse(['--config=x.py', *arguments]).overrides
    self.assertEqual(overrides, {f'env.options.{name}': value for name, value in expected.items()})
    config = schema.Config()
    config_file.apply(config, overrides)
    self.assertEqual(config.env.options, expected)

  def test_options_of_variants_and_templates(self):
    parsed = flags.parse(
        [
            '--config.algorithm.options.tau=0.5',
            '--config.model.chat_template_kwargs.enable_thinking=False',
        ]
    )
    self.assertEqual(
        parsed.overrides,
        {'algorithm.options.tau': 0.5, 'model.chat_template_kwargs.enable_thinking': False},
    )

  def test_options_must_be_a_dict(self):
    with self.assertRaisesRegex(UserError, 'options=3: give a dict'):
      flags.parse(['--config.env.options=3'])
    with self.assertRaisesRegex(UserError, 'give a dict'):
      flags.parse(['--config.env.options={"a.b": 1}'])

  @parameterized.parameters(
      (['--config.train.updates', '3'], 'train.updates', 3),
      (['--config.actor.lr=1e-5'], 'actor.lr', 1e-5),
      (['--config.train.deterministic'], 'train.deterministic', True),
      (['-config.algorithm.whiten=False'], 'algorithm.whiten', False),
      (['--config.rollout.mesh=(-1, 4)'], 'rollout.mesh', (-1, 4)),
      (['--config.rollout.chunks=64'], 'rollout.chunks', (64,)),
      (['--config.data.datasets=geo'], 'data.datasets', ('geo',)),
      (['--config.name=a=b'], 'name', 'a=b'),
  )
  def test_value_has_the_type_of_its_setting(self, arguments, path, expected):
    self.assertEqual(flags.parse(arguments).overrides, {path: expected})


if __name__ == '__main__':
  absltest.main()
