"""The job for one GPU: time limits, what is recorded, and a rehearsal of every part on a CPU."""

import json
import os
import pathlib
import subprocess
import sys
import tarfile
import tempfile
import time
from unittest import mock
import zipfile

from absl.testing import absltest
import pytest

from benchmarks import gpu_job
from benchmarks import parcels
from stppo_jax.cli import config_file
from stppo_jax.cli import flags as flags_lib
from stppo_jax.distributed import xla_flags
from stppo_jax.settings import validation

ROOT = pathlib.Path(__file__).parents[2]
IGNORES = 'import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)'


def lines(path):
  return [json.loads(line) for line in path.read_text(encoding='utf-8').splitlines()]


class JobTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    folder = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))
    self.store = folder / 'store'
    self.out = folder / 'out'
    self.enterContext(mock.patch.object(gpu_job, 'GRACE_S', 1.0))

  def part(self, name, program, limit_s=20.0, group='runs', **fields):
    return gpu_job.Part(name, group, limit_s, [sys.executable, '-c', program], **fields)

  def run_parts(self, *parts, **options):
    gpu_job.Job(self.store, self.out, **options).run(parts)
    return {record['part']: record['result'] for record in lines(self.out / 'progress.jsonl')}

  def test_part_over_its_limit_is_cut(self):
    """A child that ignores SIGTERM ends, too, and the parts behind it run."""
    child = self.store / 'child'
    program = (
        'import subprocess, sys, pathlib, time\n'
        f'child = subprocess.Popen([sys.executable, "-c", {IGNORES!r}])\n'
        f'pathlib.Path({str(child)!r}).write_text(str(child.pid))\n'
        'print({}, flush=True)\n'
        'print("""{"what": "first", "value": 1}""", flush=True)\n'
        'time.sleep(60)\n'
    )
    results = self.run_parts(
        self.part('long', program, limit_s=3),
        self.part('fails', 'raise SystemExit(3)'),
        self.part('short', """print('{"what": "second"}')"""),
    )
    self.assertEqual(results, {'long': 'cut', 'fails': 'failed', 'short': 'done'})
    figures = lines(self.out / 'figures.jsonl')
    self.assertEqual(
        [(line['part'], line.get('what')) for line in figures],
        [('long', None), ('long', 'first'), ('short', 'second')],
    )
    self.assertFalse(is_running(int(child.read_text())))

  def test_run_that_is_cut_has_seconds_to_save(self):
    program = (
        'import pathlib, signal, sys, time\n'
        f'save = lambda *_: (pathlib.Path({str(self.store)!r}, "saved").touch(), sys.exit(0))\n'
        'signal.signal(signal.SIGTERM, save)\n'
        'time.sleep(60)\n'
    )
    self.assertEqual(self.run_parts(self.part('run', program, limit_s=2)), {'run': 'cut'})
    self.assertTrue((self.store / 'saved').exists())

  def test_sigterm_to_the_job_ends_its_part(self):
    child = self.store / 'child'
    program = f'import os, pathlib, time; pathlib.Path({str(child)!r}).write_text(str(os.getpid()))'
    part = self.part('long', f'{program}; time.sleep(60)')
    job = (
        'import sys\n'
        'from benchmarks import gpu_job\n'
        f'gpu_job.plan = lambda *_: [gpu_job.Part(*{tuple(part[:4])!r})]\n'
        'gpu_job.check_gpu = lambda _: None\n'
        'gpu_job.main()\n'
    )
    environment = os.environ | {'STORE': str(self.store)}
    command = [sys.executable, '-c', job, str(self.out)]
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL)
    while not child.exists() or not child.read_text():
      time.sleep(0.1)
    process.terminate()
    self.assertEqual(process.wait(20), 143)
    self.assertFalse(is_running(int(child.read_text())))

  def test_results_are_there_after_each_part(self):
    program = (
        'import pathlib, sys\n'
        f'sys.exit(not pathlib.Path({str(self.out)!r}, "progress.jsonl").exists())\n'
    )
    results = self.run_parts(self.part('first', 'pass'), self.part('second', program))
    self.assertEqual(results, {'first': 'done', 'second': 'done'})
    with tarfile.open(self.out / 'logs.tar.gz') as archive:
      self.assertContainsSubset(['logs/first.log', 'logs/second.log'], archive.getnames())

  def test_second_call_runs_what_is_left(self):
    """What failed, was left out or can be resumed runs again. Other parts do not."""
    count = 'import sys; open(sys.argv[1], "a").write("x")'
    arrives = self.store / 'model'
    parts = [
        self.part('done', 'pass'),
        self.part('cut', 'import time; time.sleep(60)', limit_s=1),
        self.part('run', 'import time; time.sleep(60)', limit_s=1, runs=(self.store / 'workdir',)),
        self.part('fails', 'raise SystemExit(3)'),
        self.part('needs', 'pass', needs=(arrives,)),
    ]
    counted = [
        part._replace(command=[sys.executable, '-c', f'{count}\n{part.command[-1]}', part.name])
        for part in parts
    ]
    self.enterContext(mock.patch.object(gpu_job, 'ROOT', self.store))
    first = self.run_parts(*counted)
    expected = {'done': 'done', 'cut': 'cut', 'run': 'cut', 'fails': 'failed', 'needs': 'left out'}
    self.assertEqual(first, expected)
    arrives.touch()
    self.assertEqual(self.run_parts(*counted), first | {'needs': 'done'})
    runs = {part.name: (self.store / part.name).read_text() for part in parts}
    self.assertEqual(runs, {'done': 'x', 'cut': 'x', 'run': 'xx', 'fails': 'xx', 'needs': 'x'})

  def test_failed_parts_come_last(self):
    """Except a part with needs, which the parts behind it may wait for."""
    log = self.store / 'order'
    note = f'import sys; open({str(log)!r}, "a").write(sys.argv[1] + " ")'
    model = self.store / 'model'
    parts = [
        self.part('fails', f'{note}; sys.exit(3)'),
        self.part('folder', f'{note}; sys.exit(3)', needs=(self.store,)),
        self.part('late', note, needs=(model,)),
    ]
    parts = [part._replace(command=[*part.command, part.name]) for part in parts]
    self.run_parts(*parts)
    model.touch()
    self.run_parts(*parts)
    self.assertEqual(log.read_text().split(), ['fails', 'folder', 'folder', 'late', 'fails'])

  def test_call_ends_at_its_limit(self):
    with mock.patch.object(gpu_job, 'GRACE_S', 0.0):
      results = self.run_parts(
          self.part('first', 'import time; time.sleep(60)'), self.part('second', 'pass'), total_s=2
      )
    self.assertEqual(results, {'first': 'cut', 'second': 'left out'})

  def test_parts_of_a_group_share_its_seconds(self):
    with mock.patch.object(gpu_job, 'GROUPS', {'runs': 2.0, 'model': 20.0}):
      results = self.run_parts(
          self.part('first', 'import time; time.sleep(60)'),
          self.part('second', 'pass'),
          self.part('other', 'pass', group='model'),
      )
    self.assertEqual(results, {'first': 'cut', 'second': 'left out', 'other': 'done'})

  def test_score_before_and_after_is_a_figure(self):
    workdir = self.store / 'st_ppo'
    workdir.mkdir(parents=True)
    scores = ((0, 0.25), (1, None), (2, 0.5), (3, None))
    rows = [{'step': step, 'val-core/all/em': score} for step, score in scores]
    (workdir / 'metrics.jsonl').write_text('\n'.join(map(json.dumps, rows)), encoding='utf-8')
    self.run_parts(self.part('st_ppo', 'pass', runs=(workdir,)))
    (figure,) = lines(self.out / 'figures.jsonl')
    expected = {'before': 0.25, 'after': 0.5, 'after_update': 2, 'updates': 3}
    self.assertEqual({name: figure[name] for name in expected}, expected)
    self.assertTrue((self.out / 'st_ppo_metrics.jsonl').exists())

  def test_wheels_install_once_and_whole(self):
    cargo = self.store / 'cargo'
    cargo.mkdir(parents=True)
    (cargo / 'broken-1.0-py3-none-any.whl').write_bytes(b'no archive')
    self.enterContext(mock.patch.dict(os.environ))
    with (self.store / 'log').open('wb') as log:
      with self.assertRaises(subprocess.CalledProcessError):
        gpu_job.install(self.store, log)
      self.assertFalse((self.store / 'site').exists())
      (cargo / 'broken-1.0-py3-none-any.whl').unlink()
      write_wheel(cargo / 'parcel_probe-1.0-py3-none-any.whl')
      gpu_job.install(self.store, log)
    self.assertEqual(os.environ['PYTHONPATH'].split(os.pathsep)[0], str(self.store / 'site'))
    self.assertTrue((self.store / 'site/parcel_probe.py').exists())

  def test_job_without_a_gpu_ends_and_says_why(self):
    environment = os.environ | {'STORE': str(self.store), 'PYTHON': sys.executable}
    ran = subprocess.run(
        [ROOT / 'benchmarks/gpu.sh', self.out], env=environment, capture_output=True, text=True
    )
    self.assertEqual(ran.returncode, 1)
    self.assertIn('"device": "cpu"', ran.stderr)
    self.assertIn('JAX finds no GPU', ran.stderr)
    self.assertFalse((self.store / 'progress.jsonl').exists())

  def test_variables_of_the_parts(self):
    """XLA's flags are those of this JAX. Variables that are set already stay."""
    self.enterContext(mock.patch.dict(os.environ))
    for name in ('JAX_PLATFORMS', 'XLA_FLAGS'):
      os.environ.pop(name, None)
    gpu_job.set_environment(self.store, quick=False)
    self.assertEqual(os.environ['JAX_PLATFORMS'], 'cuda,cpu')
    flags = os.environ['XLA_FLAGS'].split()
    self.assertEqual(xla_flags.known(flags), flags)
    os.environ.pop('JAX_PLATFORMS')
    os.environ['XLA_FLAGS'] = ''
    gpu_job.set_environment(self.store, quick=True)
    self.assertNotIn('JAX_PLATFORMS', os.environ)
    self.assertEqual(os.environ['XLA_FLAGS'], '')

  def test_limits_fit_into_eight_minutes(self):
    self.assertLessEqual(sum(gpu_job.GROUPS.values()), gpu_job.TOTAL_S - 20)  # to install
    self.assertEqual(gpu_job.TOTAL_S, 8 * 60)
    for variant in ('st_ppo', 'ppo'):
      for part in gpu_job.plan(self.store, variant, quick=False):
        self.assertIn(part.group, gpu_job.GROUPS)
        self.assertLessEqual(part.limit_s, gpu_job.GROUPS[part.group])

  def test_tests_run_on_the_gpu(self):
    """The folder of the tests sets CPUs and flags for quick compilation, unless they are given."""
    tests = next(part for part in gpu_job.plan(self.store, 'st_ppo', False) if part.name == 'tests')
    settings = tests.command[1 : tests.command.index(sys.executable)]
    environment = {'JAX_PLATFORMS': gpu_job.PLATFORMS}
    environment |= dict(setting.split('=', 1) for setting in settings)
    program = 'import os, tests; print(os.environ["JAX_PLATFORMS"], os.environ["XLA_FLAGS"])'
    printed = subprocess.run(
        [sys.executable, '-c', program],
        cwd=ROOT,
        env=os.environ | environment,
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    platforms, *flags = printed.split()
    self.assertEqual(platforms, 'cuda,cpu')
    self.assertContainsSubset(gpu_job.XLA_FLAGS.split(), flags)
    self.assertIn('--xla_backend_optimization_level=3', flags)
    self.assertNotIn('--xla_backend_optimization_level=0', flags)
    for name in (*gpu_job.TESTS, *gpu_job.TESTS_OF_UPDATES):
      self.assertTrue((ROOT / name).is_file())

  def test_runs_have_valid_settings(self):
    """Both runs start from their model, in bfloat16, with scores and few programs."""
    parts = [*gpu_job.plan(self.store, 'st_ppo', False), *gpu_job.plan(self.store, 'ppo', False)]
    runs = {part.name: part.command[2:] for part in parts if part.command[1] == 'run.py'}
    self.assertCountEqual(runs, ['sft', 'st_ppo', 'ppo'])
    for name, words in runs.items():
      arguments = flags_lib.parse(words)
      config = validation.validate(config_file.load(arguments, reads_run=False))
      self.assertEqual(config.model.dtype, 'bfloat16')
      self.assertEqual(arguments.flags.workdir, str(self.store / name))
      longest = (config.rollout.max_total,)  # one program each
      self.assertEqual((config.train.length_buckets, config.rollout.slot_buckets), (longest,) * 2)
      if name != 'sft':
        self.assertEqual(config.algorithm.variant, name)
        self.assertEqual(config.model.folder, str(self.store / 'sft/model'))
        self.assertLess(config.eval.every, config.train.updates)

  def test_demonstrations_have_other_questions_than_the_run(self):
    parts = {part.name: part.command for part in gpu_job.plan(self.store, 'st_ppo', False)}
    datasets = []
    for name in ('demonstrations', 'st_ppo'):
      words = [word for word in parts[name] if word.startswith('--')]
      config = config_file.load(flags_lib.parse(words), reads_run=False)
      datasets.append(config.data.datasets)
    self.assertEqual(datasets, [('elements',), ('geo',)])

  def test_attention_is_plain_once_the_kernel_failed(self):
    job = gpu_job.Job(self.store, self.out)
    found = [job.attention()]
    for program in ('pass', 'raise SystemExit(3)'):
      job.run([self.part('kernel', program)])
      found.append(job.attention())
      (self.store / 'progress.jsonl').unlink()
    self.assertEqual(found, ['auto', 'auto', 'plain'])
    parts = gpu_job.plan(self.store, 'st_ppo', False, 'plain')
    runs = [part.name for part in parts if '--config.model.attention=plain' in part.command]
    self.assertEqual(runs, ['demonstrations', 'sft', 'st_ppo'])

  def test_second_command_has_the_model_alone(self):
    names = [part.name for part in gpu_job.plan(self.store, 'ppo', quick=False)]
    self.assertEqual(names, ['model', 'numerics', 'demonstrations', 'sft', 'ppo'])

  def test_unknown_variant_is_refused(self):
    command = [ROOT / 'benchmarks/gpu.sh', self.out]
    environment = os.environ | {
        'VARIANT': 'grpo',
        'STORE': str(self.store),
        'PYTHON': sys.executable,
    }
    ran = subprocess.run(command, env=environment, capture_output=True, text=True)
    self.assertEqual(ran.returncode, 2)
    self.assertIn('VARIANT=grpo: give st_ppo or ppo', ran.stderr)

  @pytest.mark.slow
  def test_rehearsal_on_a_cpu(self):
    """Both commands in their quick form, with two parcels: every part is done."""
    cargo = self.store.with_name('cargo')
    cargo.mkdir()
    (cargo / gpu_job.GGUF).write_bytes(bytes(3 * parcels.MIB // 2))
    folder = self.store.with_name('parcels')
    self.assertEqual(parcels.pack(cargo, folder, parcels.MIB), 2)
    environment = os.environ | {'QUICK': '1', 'STORE': str(self.store), 'PYTHON': sys.executable}
    calls = [[folder / '0'], [folder / '1'], []]
    variants = ['st_ppo', 'st_ppo', 'ppo']
    for arguments, variant in zip(calls, variants, strict=True):
      command = [ROOT / 'benchmarks/gpu.sh', self.out, *arguments]
      subprocess.run(
          command, env=environment | {'VARIANT': variant}, check=True, cwd=self.store.parent
      )
    self.assertTrue((self.store / 'cargo' / gpu_job.GGUF).exists())
    records = lines(self.out / 'progress.jsonl')
    plans = [gpu_job.plan(self.store, variant, quick=True) for variant in ('st_ppo', 'ppo')]
    names = list(dict.fromkeys(part.name for parts in plans for part in parts))
    self.assertEqual(
        [(line['part'], line['result']) for line in records], [(n, 'done') for n in names]
    )
    figures = lines(self.out / 'figures.jsonl')
    self.assertContainsSubset(
        set(names) - {'tests', 'update_tests', 'demonstrations'}, {x['part'] for x in figures}
    )
    self.assertLessEqual(len(list(self.out.iterdir())), 8)


def write_wheel(path):
  """Writes a wheel with one empty module."""
  name, version = path.name.split('-')[:2]
  info = f'{name}-{version}.dist-info'
  with zipfile.ZipFile(path, 'w') as file:
    file.writestr(f'{name}.py', '')
    file.writestr(f'{info}/METADATA', f'Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n')
    file.writestr(f'{info}/WHEEL', 'Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n')
    file.writestr(f'{info}/RECORD', '')


def is_running(pid):
  """Whether a process runs, within a second. One that ended but was not reaped does not."""
  for _ in range(10):
    try:
      state = pathlib.Path(f'/proc/{pid}/stat').read_text().rpartition(')')[2].split()[0]
    except OSError:
      return False
    if state == 'Z':
      return False
    time.sleep(0.1)
  return True


if __name__ == '__main__':
  absltest.main()
