"""The command line: every mistake is one line on stderr and a non-zero exit code."""

from concurrent import futures
import contextlib
import dataclasses
import importlib
import io
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
import types
from unittest import mock

from absl import flags
from absl.testing import absltest
from absl.testing import flagsaver
from absl.testing import parameterized
import jax

from stppo_jax import config as schema
from stppo_jax import tasks as tasks_lib
from stppo_jax import validation
from stppo_jax.cli import entry
from stppo_jax.cli import parsing
from stppo_jax.cli import saved_config
from stppo_jax.training import loop
from stppo_jax.types import RunError
from stppo_jax.types import Stopped
from stppo_jax.types import UserError
from tests.support import tiny_run

ROOT = pathlib.Path(__file__).parent.parent
BROKEN = 'def get_config(mode=""):\n  return undefined_name\n'

RULES = {path: rules for path, rules, _ in validation.fields(schema.Config())}

# Arguments ({tmp}: a folder), and the text of the one line. Each runs in a process of its own.
PROCESSES = {
    'unknown field': (['--config.train.updatez=3'], ['train.updatez', 'mean train.updates']),
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
    'wrong mode': (['--mode=trian'], ['mode', 'train|eval']),
    'forgotten dashes': (['config.train.updates=3'], ['config.train.updates=3', '--']),
    'rule of validate': (
        ['--config.rollout.top_k=5', '--config.algorithm.old_logp=trainer', '--workdir={tmp}/run'],
        ['top_k=5', 'old_logp=sampler'],
    ),
    'report of nothing': (['--mode=report', '--workdir={tmp}/nothing'], ['nothing']),
}


class ProcessTest(parameterized.TestCase):

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    cls.tmp = cls.enterClassContext(tempfile.TemporaryDirectory())
    (pathlib.Path(cls.tmp) / 'broken.py').write_text(BROKEN, encoding='utf-8')
    with futures.ThreadPoolExecutor(os.cpu_count()) as pool:
      cls.results = dict(zip(PROCESSES, pool.map(cls.start, PROCESSES)))

  @classmethod
  def start(cls, name):
    arguments = [argument.format(tmp=cls.tmp) for argument in PROCESSES[name][0]]
    return subprocess.run(
        [sys.executable, str(ROOT / 'run.py'), *arguments],
        cwd=cls.tmp,
        timeout=900,
        check=False,
        capture_output=True,
        text=True,
        env={**os.environ, 'JAX_PLATFORMS': 'cpu'},
    )

  @parameterized.parameters(*PROCESSES)
  def test_one_line_and_exit_code_2(self, name):
    result, words = self.results[name], PROCESSES[name][1]
    self.assertEqual(result.stderr.count('\n'), 1, result.stderr)
    self.assertStartsWith(result.stderr, 'run.py: ')
    self.assertEqual(result.returncode, 2)
    self.assertEmpty(result.stdout)
    for word in words:
      self.assertIn(word, result.stderr)


class HelpTest(parameterized.TestCase):

  def help(self, argument, program='run.py'):
    """Returns what the command prints; its exit code must be 0."""
    stdout = io.StringIO()
    with contextlib.redirect_stdout(stdout), self.assertRaises(SystemExit) as caught:
      entry._parse([f'/somewhere/{program}', argument])
    self.assertEqual(caught.exception.code, 0)
    return stdout.getvalue()

  @parameterized.parameters('--help', '-help', '-h', '--helpfull')
  def test_it_fits_a_screen_and_names_every_flag_mode_and_section(self, argument):
    text = self.help(argument)
    self.assertLess(text.count('\n'), 60)
    for name in (
        '--workdir',
        '--topology',
        '--coordinator',
        '--profile',
        '--config.FIELD',
        *entry._MODES,
    ):
      self.assertIn(name, text)
    for path in RULES:
      self.assertIn(path.split('.')[0], text)

  def test_the_files_of_its_examples_exist(self):
    files = re.findall(r'--config=(experiments/[\w.]+)', entry.__doc__)
    self.assertNotEmpty(files)
    for file in files:
      self.assertTrue((ROOT / file).is_file(), file)

  def test_it_shows_the_command_as_it_was_called(self):
    self.assertIn('  stppo --mode=eval', self.help('--help', 'stppo'))
    self.assertIn('  python run.py --mode=eval', self.help('--help'))

  def test_a_section_has_each_setting_with_value_default_and_meaning(self):
    config = schema.Config()
    config.retriever.top_k = 7
    text = parsing._section_help('retriever', config)
    for path, rules, value in validation.fields(schema.Config()):
      if path == 'retriever.top_k':
        self.assertIn(f'--config.{path}=7  (default 3)\n    {rules.meaning}', text)
      elif path.startswith('retriever.'):
        self.assertIn(f'--config.{path}={value!r}\n    {rules.meaning}', text)
    self.assertIn('[bm25 | http | dense | hybrid | none | module:attribute]', text)
    self.assertNotIn('--config.train.updates', text)

  def test_columns_of_the_objective_are_shown_with_those_of_the_row(self):
    config = schema.Config()
    config.algorithm.variant, config.algorithm.clip_low = 'gspo', 0.1
    text = parsing._section_help('algorithm', config)
    for line in (
        "--config.algorithm.variant='gspo'  (default 'st_ppo')",
        "--config.algorithm.ratio=None  (gspo: 'sequence')",
        '--config.algorithm.clip_low=0.1  (default None)',
        '--config.algorithm.clip_high=None  (gspo: 0.0004)',
        '    [none | paper | floor | relative | module:attribute]',
    ):
      self.assertIn(line, text.splitlines())

  def test_it_is_of_the_run_that_the_line_names(self):
    arguments = ['--config=experiments/grpo_7b.py', '--help=train', '--config.train.epochs=2']
    result = subprocess.run(
        [sys.executable, 'run.py', *arguments], cwd=ROOT, check=True, capture_output=True, text=True
    )
    self.assertIn('--config.train.mini_batch=64  (default 256)', result.stdout)
    self.assertIn('--config.train.epochs=2  (default 1)', result.stdout)


class ShippedExperimentTest(absltest.TestCase):

  def resolved(self, *arguments):
    return parsing._with_shipped_experiment(list(arguments))

  def test_it_is_taken_where_the_folder_has_no_such_file(self):
    shipped = str(ROOT / 'experiments' / 'st_ppo_7b.py')
    self.enterContext(contextlib.chdir(self.enterContext(tempfile.TemporaryDirectory())))
    name = 'experiments/st_ppo_7b.py'
    self.assertEqual(self.resolved(f'--config={name}:smoke'), [f'--config={shipped}:smoke'])
    self.assertEqual(self.resolved('--config', name), ['--config', shipped])
    self.assertEqual(self.resolved('--workdir', name), ['--workdir', name])
    self.assertEqual(
        self.resolved('--config=experiments/mine.py'), ['--config=experiments/mine.py']
    )

  def test_a_file_of_the_folder_comes_first(self):
    self.enterContext(contextlib.chdir(self.enterContext(tempfile.TemporaryDirectory())))
    os.mkdir('experiments')
    pathlib.Path('experiments/st_ppo_7b.py').touch()
    given = '--config=experiments/st_ppo_7b.py'
    self.assertEqual(self.resolved(given), [given])


class MainTest(parameterized.TestCase):
  """Mistakes that are found after the command line was parsed; run in this process."""

  def setUp(self):
    super().setUp()
    # What a command sets for its process, it must not set for the other tests.
    self.enterContext(mock.patch.object(entry, '_quiet_libraries'))
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
    argv = [
        'run.py',
        f'--config={self.experiment}',
        f'--workdir={self.tmp}/run',
        '--mode=train',
        *arguments,
    ]
    for name in [name for name in flags.FLAGS if name.split('.')[0] == 'config']:
      delattr(flags.FLAGS, name)  # a process defines them once; the tests share one
    stderr = io.StringIO()
    with contextlib.redirect_stderr(stderr):
      code = entry._main(entry._parse(argv))
    self.assertEqual(stderr.getvalue().count('\n'), 1, stderr.getvalue())
    self.assertStartsWith(stderr.getvalue(), 'run.py: ')
    return stderr.getvalue(), code

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

  def test_a_question_without_answers(self):
    self.edit('qa.jsonl', 3, json.dumps({'id': 'x', 'question': 'Which?', 'split': 'train'}))
    self.refused('qa.jsonl:3', "'answers'", 'missing')

  def test_a_passage_that_is_no_json(self):
    self.edit('corpus.jsonl', 2, '{"id": "x", "title"')
    self.refused('corpus.jsonl:2', 'JSON')

  def test_a_corrected_config_may_use_the_same_folder(self):
    self.refused(
        'nowhere',
        arguments=['--config.data.source=nowhere', f'--config.data.corpus={self.tmp}/knowledge'],
    )
    with mock.patch.object(tasks_lib, 'TaskStream', side_effect=RunError('far enough')):
      self.assertIn('far enough', self.complaint()[0])

  @parameterized.parameters(
      ('--topology=v5e:8x8', '--mode=plan'),
      ('--port=1', '--mode=serve'),
      ('--input=x', '--mode=export_atif and --mode=import_atif'),
      ('--batches=2', '--mode=sample'),
  )
  def test_a_flag_of_another_mode_is_refused(self, flag, mode):
    name = flag.partition('=')[0].removeprefix('--')
    with flagsaver.flagsaver():
      line, code = self.complaint(flag)
    self.assertEqual(code, 2)
    self.assertIn(f'--{name}=', line)
    self.assertIn(f'is for {mode}, and this is --mode=train: leave it out', line)

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
      (
          ['--config.rollout.top_p=0.9', '--config.algorithm.old_logp=trainer'],
          ['top_p=0.9', 'old_logp=sampler'],
      ),
      (['--config.model.attention=splash'], ['splash', 'needs a TPU', 'cpu', 'plain']),
      (['--workdir={tmp}/experiment.py/run'], ['experiment.py/run']),
  )
  def test_impossible_settings(self, arguments, words):
    self.refused(*words, arguments=[argument.format(tmp=self.tmp) for argument in arguments])

  def test_a_model_folder_without_weights(self):
    os.remove(os.path.join(self.tmp, 'model', 'model.safetensors'))
    self.refused('no weights', os.path.join(self.tmp, 'model'))

  def test_a_model_folder_without_a_tokenizer(self):
    os.remove(os.path.join(self.tmp, 'model', 'tokenizer.json'))
    self.refused('tokenizer.json', os.path.join(self.tmp, 'model'))

  def test_the_tokenizer_of_another_model(self):
    tiny_run.write_model(os.path.join(self.tmp, 'small'), vocab_size=300)
    self.refused('ids', '300', arguments=[f'--config.model.folder={self.tmp}/small'])

  def test_a_folder_of_another_run(self):
    os.makedirs(os.path.join(self.tmp, 'run'))
    other = dataclasses.asdict(tiny_run.make_config(self.tmp)) | {'seed': 7}
    for name, text in (('config.json', json.dumps(other)), ('metrics.jsonl', '')):
      pathlib.Path(self.tmp, 'run', name).write_text(text, encoding='utf-8')
    self.refused('seed (7 there, 0 here)', '--workdir')

  def test_an_export_of_a_folder_without_a_run(self):
    self.refused('--workdir', 'no checkpoint to export', '--config', arguments=['--mode=export'])

  def test_a_full_disk_is_not_reported_by_every_thread(self):
    told, say = [], lambda error: types.SimpleNamespace(exc_value=error)
    for error in (RuntimeError('Event loop is closed'), RuntimeError('of ours')):
      entry._tell_unraisable(told.append, say(error))
    self.assertLen(told, 1)

  def test_a_stop_in_a_callback_is_not_told_where_it_is_asked_for_again(self):
    say = lambda error: types.SimpleNamespace(exc_value=error)
    with mock.patch.object(sys, 'unraisablehook', mock.Mock()) as told:
      with entry._stop_requested():
        for error in (KeyboardInterrupt(), Stopped(), RuntimeError('of ours')):
          sys.unraisablehook(say(error))
      self.assertLen(told.mock_calls, 1)
      sys.unraisablehook(say(KeyboardInterrupt()))
      self.assertLen(told.mock_calls, 2)

  def test_exit_codes_of_a_run_that_fails_and_of_an_interrupt(self):
    for error, word, code in (
        (RunError('several\nlines'), 'several lines', 1),
        (KeyboardInterrupt(), 'interrupted', 130),
    ):
      with mock.patch.object(loop, 'train', side_effect=error):
        line, exit_code = self.complaint()
      self.assertIn(word, line)
      self.assertEqual(exit_code, code)

  def test_an_interrupt_that_a_library_swallows_is_not_lost(self):
    """Python ignores exceptions in a finalizer, for example."""
    before = signal.getsignal(signal.SIGINT)

    def train(config, workdir, stop_requested, profile):
      del config, workdir, profile
      self.assertFalse(stop_requested())
      with contextlib.suppress(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
      stop_requested()

    with mock.patch.object(loop, 'train', train):
      line, exit_code = self.complaint()
    self.assertIn('interrupted', line)
    self.assertEqual(exit_code, 130)
    self.assertIs(signal.getsignal(signal.SIGINT), before)


class ExperimentFileTest(parameterized.TestCase):

  def parse(self, source, *arguments):
    """Returns the config of an experiment file with flags; 'error' is the one line if it fails."""
    for name in [name for name in flags.FLAGS if name.split('.')[0] == 'config']:
      delattr(flags.FLAGS, name)
    self.enterContext(contextlib.chdir(self.enterContext(tempfile.TemporaryDirectory())))
    pathlib.Path('mine.py').write_text(source, encoding='utf-8')
    stderr = io.StringIO()
    with contextlib.redirect_stderr(stderr):
      try:
        entry._parse(['run.py', '--config=mine.py', *arguments])
        return flags.FLAGS.config
      except SystemExit as exit_:
        self.assertEqual(exit_.code, 2)
    self.assertEqual(stderr.getvalue().count('\n'), 1, stderr.getvalue())
    return stderr.getvalue()

  @parameterized.parameters(
      ('config.train.updaets = 3', "no setting 'updaets': did you mean updates?"),
      ('config.train = schema.Train(updaets=3)', 'updaets'),
      ('config.train.updates = undefined', 'undefined'),
      ('1 / 0', 'division by zero'),
      ('config.train.updates = = 3', 'invalid syntax'),
  )
  def test_an_error_has_file_and_line(self, line, words):
    source = 'from stppo_jax import config as schema\ndef get_config(mode=""):\n'
    error = self.parse(source + f'  config = schema.Config()\n  {line}\n  return config\n')
    self.assertIn(words, error)
    self.assertIn('mine.py:4', error)

  def test_a_file_that_returns_no_config(self):
    self.assertIn('return a stppo_jax.config.Config', self.parse('get_config = lambda: 7\n'))

  def test_none_is_typed_where_it_is_documented(self):
    source = (
        'from stppo_jax import config as schema\ndef get_config(mode=""):\n'
        '  return schema.Config(algorithm=schema.Algorithm(clip_low=0.3, whiten=True))\n'
    )
    config = self.parse(
        source, '--config.algorithm.clip_low=None', '--config.algorithm.whiten=None'
    )
    self.assertEqual(config.algorithm, schema.Algorithm())
    self.assertIn('updates', self.parse(source, '--config.train.updates=None'))
    given = ('--config.algorithm.clip_low=None', '--config.algorithm.clip_low=0.1')  # the last wins
    self.assertEqual(self.parse(source, *given).algorithm.clip_low, 0.1)
    self.assertIsNone(self.parse(source, *given[::-1]).algorithm.clip_low)

  @parameterized.parameters(
      ('  sys.exit(7)\n', 'exits with 7 '),
      ('  sys.exit()\n', 'exits with None '),
      ('  return schema.Config()\nsys.exit("bye")\n', "exits with 'bye' "),
  )
  def test_an_experiment_file_that_exits_is_named(self, end, words):
    source = f'import sys\nfrom stppo_jax import config as schema\ndef get_config(mode=""):\n{end}'
    error = self.parse(source)
    self.assertIn(words, error)
    self.assertIn('mine.py:', error)

  def test_an_experiment_file_may_begin_with_a_byte_order_mark(self):
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
  )
  def test_an_experiments_data_sets_are_those_of_its_source(self, arguments, datasets):
    source = (
        'from stppo_jax import config as schema\ndef get_config(mode=""):\n'
        '  return schema.Config(data=schema.Data(datasets=("geo",)))\n'
    )
    self.assertEqual(self.parse(source, *arguments).data.datasets, datasets)


class OfRunTest(parameterized.TestCase):
  """Modes that read a run take its config where none is given."""

  def setUp(self):
    super().setUp()
    self.workdir = self.enterContext(tempfile.TemporaryDirectory())
    self.path = pathlib.Path(self.workdir) / 'config.json'

  def write(self, config):
    values = dataclasses.asdict(config) | {'plugins': {}, 'objective': {'ratio': 'turn'}}
    self.path.write_text(json.dumps(values), encoding='utf-8')

  @parameterized.parameters('st_ppo_tiny', 'st_ppo_7b', 'st_ppo_qwen3_30b_a3b', 'st_ppo_smollm2')
  def test_a_config_is_read_as_it_was(self, name):
    config = importlib.import_module(f'experiments.{name}').get_config()
    config.env.options = {'low': 1, 'sizes': [2, 3]}
    config.algorithm.clip_low = 0.1
    self.write(config)
    self.assertEqual(saved_config.get_config(self.workdir), config)

  def test_which_command_lines_take_it(self):
    workdir, eval_ = f'--workdir={self.workdir}', '--mode=eval'
    self.assertEqual(saved_config.find([eval_, workdir]), '')  # there is no config.json yet
    self.write(schema.Config())
    expected = f'{saved_config.__file__}:{self.workdir}'
    self.assertEqual(saved_config.find([workdir, '--config.eval.samples=2', eval_]), expected)
    self.assertEqual(saved_config.find(['--mode', 'eval', '-workdir', self.workdir]), expected)
    for others in ([workdir], [eval_], [eval_, workdir, '--config=a.py'], [eval_, '--workdir']):
      self.assertEqual(saved_config.find(others), '')

  @parameterized.parameters(
      ('{"train": {"updatez": 1, "epochs": 2}, "more": {}}', ' has train.updatez, more, which '),
      ('{"train": null}', ' has train, which '),
      ('{"train":', ' cannot be read '),
  )
  def test_one_of_another_version_is_refused(self, text, words):
    self.path.write_text(text, encoding='utf-8')
    with self.assertRaises(UserError) as caught:
      parsing.parse(['run.py', '--mode=eval', f'--workdir={self.workdir}'], '', [])
    self.assertStartsWith(str(caught.exception), f'{self.path}{words}')
    self.assertNotIn('\n', str(caught.exception))

  def parse(self, *arguments):
    # A process of its own, since absl's flags are global.
    return subprocess.run(
        [sys.executable, 'run.py', '--mode=eval', f'--workdir={self.workdir}', *arguments],
        cwd=ROOT,
        check=False,
        capture_output=True,
        text=True,
        env={**os.environ, 'JAX_PLATFORMS': 'cpu'},
    )

  def test_commands_in_a_folder_need_trust(self):
    mark = pathlib.Path(self.workdir) / 'executed'
    config = schema.Config()
    config.data.source, config.data.eval_split = 'os:system', f'id > {mark}'
    self.write(config)
    result = self.parse('--help=algorithm')
    self.assertEqual(result.returncode, 2)
    line = (
        f"run.py: {self.path} names data.source='os:system': code, commands, addresses and folders "
        'to write to are taken from a folder with --trust_workdir only; add it if you trust the '
        'folder, or give your own --config\n'
    )
    self.assertEqual(result.stderr, line)
    self.assertFalse(mark.exists())
    self.assertEqual(self.parse('--help=algorithm', '--trust_workdir').returncode, 0)
    # A setting of the command line is the user's own.
    self.assertEqual(self.parse('--help=data', '--config.data.source=embedded').returncode, 0)
    self.assertIn('--trust_workdir', self.parse('--help').stdout)

  @parameterized.parameters(
      ('env.kind', 'm:Env'),
      ('env.kind', 'gateway:m:f'),
      ('env.kind', 'openenv:http://host'),
      ('env.tools', ('calculator', 'mcp:rm -r x')),
      ('env.tools', ('m:f',)),
      ('algorithm.variant', 'm:V'),
      ('retriever.kind', 'm:f'),
      ('retriever.url', 'http://host/retrieve'),
      ('eval.address', 'http://host/v1'),
      ('serve.host', '0.0.0.0'),
      ('serve.hosts', ('rebound.example',)),
      ('eval.folder', '/elsewhere'),
      ('eval.folder', '..'),
      ('retriever.embeddings', 'elsewhere'),
      ('env.options', {'opponent': 'm:f'}),
      ('env.options', {'opponent': 'my-module:f'}),
      ('env.options', {'host': 'my-host.example:80/path'}),
      ('env.options', {'deep': [{'url': 'https://host'}]}),
      ('algorithm.options', {'f': 'm.n:f'}),
  )
  def test_code_and_addresses_in_a_folder_are_found(self, path, value):
    config = schema.Config()
    self.write(config)
    self.assertEqual(
        saved_config.untrusted(self.workdir, saved_config.get_config(self.workdir), (), {}), []
    )
    section, name = path.split('.')
    setattr(getattr(config, section), name, value)
    self.write(config)
    found = saved_config.get_config(self.workdir)
    (text,) = saved_config.untrusted(self.workdir, found, (), {})
    self.assertStartsWith(text, path)
    if isinstance(value, dict):
      self.assertEqual(saved_config.untrusted(self.workdir, found, (), {path: value}), [])
      return
    self.assertEqual(saved_config.untrusted(self.workdir, found, {path}, {}), [])

  @parameterized.parameters(
      ('env.kind', 'gem:game:GuessTheNumber-v0-easy'),
      ('env.kind', 'textarena:GuessTheNumber-v0'),
      ('env.tools', ('calculator', 'search')),
      ('data.source', '/data/train.parquet'),
      ('env.options', {'instructions': 'Question: what is 1:2?', 'low': 1}),
      ('retriever.kind', 'http'),
  )
  def test_built_in_names_in_a_folder_need_no_trust(self, path, value):
    config = schema.Config()
    section, name = path.split('.')
    setattr(getattr(config, section), name, value)
    self.write(config)
    self.assertEqual(
        saved_config.untrusted(self.workdir, saved_config.get_config(self.workdir), (), {}), []
    )

  def test_a_folder_to_write_to_within_the_run_needs_no_trust(self):
    config = schema.Config()
    link = os.path.join(self.workdir, 'link')
    os.symlink('/', link)
    for folder, is_found in ((os.path.join(self.workdir, 'scores'), False), (link, True)):
      config.eval.folder = folder
      self.write(config)
      found = saved_config.untrusted(self.workdir, saved_config.get_config(self.workdir), (), {})
      self.assertEqual(bool(found), is_found)

  def test_a_byte_order_mark_is_no_error(self):
    self.write(schema.Config(seed=5))
    self.path.write_bytes(b'\xef\xbb\xbf' + self.path.read_bytes())
    self.assertEqual(saved_config.get_config(self.workdir).seed, 5)

  def test_the_log_says_where_the_settings_are_from(self):
    self.write(importlib.import_module('experiments.st_ppo_tiny').get_config())
    result = self.parse()
    self.assertIn(f'the settings are those of {self.workdir}/config.json', result.stderr)
    self.assertIn('has no checkpoint to evaluate', result.stderr)


class OptionsTest(parameterized.TestCase):

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
  def test_an_environments_options_are_set_one_by_one_or_as_a_dict(self, arguments, want):
    others = ['--config=x.py', '--config.env.max_searches=3']
    rest, found = parsing._take_options([others[0], *arguments, others[1]])
    self.assertEqual(rest, others)
    self.assertEqual(
        {path: values for path, values in found.items() if values}, {'env.options': want}
    )

  def test_a_variants_own_fields_are_set_in_the_same_way(self):
    found = parsing._take_options(['--config.algorithm.options.tau=0.5'])[1]
    self.assertEqual(found['algorithm.options'], {'tau': 0.5})

  def test_a_templates_arguments_are_set_in_the_same_way(self):
    argument = '--config.model.chat_template_kwargs.enable_thinking=False'
    found = parsing._take_options([argument])[1]
    self.assertEqual(found['model.chat_template_kwargs'], {'enable_thinking': False})

  def test_options_must_be_a_dict(self):
    with self.assertRaisesRegex(UserError, 'options=3: give a dict'):
      parsing._take_options(['--config.env.options=3'])


if __name__ == '__main__':
  absltest.main()
