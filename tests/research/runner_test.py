"""The runner of a study, with a small program in place of a run."""

import json
import os
import pathlib
import signal
import sys
import tempfile
import threading
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized
import numpy as np

from research.study import grid
from research.study import results
from research.study import runner
from stppo_jax import config as schema
from stppo_jax.types import UserError

# A run: writes a line per update, with a score; SIGTERM ends it after its line, as the real one.
# The learning rate says how it behaves: .1 well, .2 fails, .3 is not finite, .4 is slow, .5 hangs.
RUN = """
import json, os, pathlib, signal, sys, time
arguments = dict(a.split('=', 1) for a in sys.argv[1:])
folder = pathlib.Path(arguments['--workdir'])
kind = float(arguments.get('--config.actor.lr', .1))
updates = int(arguments['--config.train.updates'])
seed = int(arguments.get('--config.seed', 0))
path = folder / 'metrics.jsonl'
done = len(path.read_text().splitlines()) if path.exists() else 0
(folder / 'checkpoints').mkdir(exist_ok=True)
cores = sorted(os.sched_getaffinity(0))
(folder / 'seen.json').write_text(json.dumps(dict(cores=cores, env=dict(os.environ))))
stop = []
signal.signal(signal.SIGTERM, lambda *_: stop.append(1))
print('started at', done, flush=True)
if kind == .2:
  print('a traceback')
  sys.exit('run.py: the retriever is gone: start it')
for n in range(done, updates + 1):
  line = {'step': n, 'time': 0., 'critic/score/mean': .5, 'stppo/grad_norm': 1., 'actor/skipped': 0}
  if n % 2 == 0 or n == updates:
    line['val-core/all/em'] = .1 * n + .01 * seed
  if kind == .3 and n == 2:
    line |= {'stppo/grad_norm': None, 'nonfinite': ['stppo/grad_norm'], 'actor/skipped': 3}
  with open(path, 'a') as file:
    file.write(json.dumps(line) + chr(10))
  if kind == .3 and n == 2:
    sys.exit('run.py: gradients were not finite')
  for _ in range(600):
    if not (kind == .4 and n == 1) and kind != .5:
      break
    time.sleep(.05)
    if stop:
      break
  if stop:
    sys.exit(0)
"""


class RunnerTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.tmp = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))
    self.workdir = self.tmp / 'study'
    (self.tmp / 'fake.py').write_text(RUN, encoding='utf-8')
    self.enterContext(mock.patch.object(runner, '_POLL_S', 0.02))

  def make(self, methods, seeds=(0,), num_jobs=2, **options):
    """A runner of methods given by their learning rates."""
    methods = {name: {'actor.lr': lr} for name, lr in methods.items()}
    system = grid.Grid(
        methods, base={'train.updates': 4}, seeds=seeds, baseline=next(iter(methods))
    )
    study = grid.Study({'system': system}, **options)
    jobs = grid.plan(study, schema.Config())
    command = [sys.executable, str(self.tmp / 'fake.py')]
    return runner.Runner(str(self.workdir), study, jobs, command, runner.make_slots(num_jobs))

  def folder(self, name):
    return self.workdir / 'runs/system/default' / name

  def log(self, name):
    return (self.folder(name) / 'log.txt').read_text()

  def test_failed_run_is_reported_and_stops_no_other(self):
    made = self.make({'bad': 0.2, 'good': 0.1, 'nan': 0.3})
    made.run()
    self.assertEqual(made.counts(), {'done': 2, 'running': 0, 'left': 0, 'failed': 1})
    table = made.table()
    self.assertIn(
        'failed: system/default/bad/seed_0: run.py: the retriever is gone: start it (exit', table
    )
    self.assertIn('2 done, 0 running, 0 left, 1 failed', table)
    records = made.records()
    nan, good = (records[f'system/default/{name}/seed_0'] for name in ('nan', 'good'))
    self.assertEqual((nan['status'], nan['measures']['collapsed']), ('nonfinite', 1.0))
    # Held out after updates 0, 2 and 4; final is the mean of the trained ones.
    self.assertEqual(good['score'], {'steps': [0, 2, 4], 'values': [0.0, 0.2, 0.4]})
    self.assertAlmostEqual(good['measures']['final'], 0.3)
    self.assertGreater(good['cost']['core_s'], 0)
    self.assertFalse((self.folder('good/seed_0') / 'checkpoints').exists())
    # The same command tries the failed run again, and no other.
    made = self.make({'bad': 0.2, 'good': 0.1, 'nan': 0.3})
    made.run()
    self.assertEqual(self.log('good/seed_0').count('started'), 1)
    self.assertEqual(self.log('bad/seed_0').count('started'), 2)

  @parameterized.parameters('results', 'folders')
  def test_finished_runs_are_found(self, source):
    committed = str(self.tmp / 'committed')
    self.make({'good': 0.1}, results=committed).run()
    if source == 'results':
      self.workdir = self.tmp / 'another'  # The machine was lost.
    else:
      os.remove(self.tmp / 'committed/system.jsonl')
    made = self.make({'good': 0.1}, results=committed)
    made.run()
    self.assertEqual(made.counts()['done'], 1)
    if source == 'results':
      self.assertFalse((self.workdir / 'runs').exists())
    else:
      self.assertEqual(self.log('good/seed_0').count('started'), 1)

  def test_stopped_run_resumes_with_the_same_command(self):
    made = self.make({'slow': 0.4}, keep_checkpoints=True)
    path = self.folder('slow/seed_0') / 'metrics.jsonl'
    made.run(lambda: path.exists() and len(path.read_text().splitlines()) >= 2)
    self.assertEqual(made.counts(), {'done': 0, 'running': 0, 'left': 1, 'failed': 0})
    before = json.loads((self.folder('slow/seed_0') / 'job.json').read_text())['core_s']
    self.assertGreater(before, 0)
    made = self.make({'slow': 0.4}, keep_checkpoints=True)
    made.run()
    (record,) = made.records().values()
    self.assertIn('started at 2', self.log('slow/seed_0'))
    self.assertGreater(record['cost']['core_s'], before)  # Both parts are counted.
    self.assertTrue((self.folder('slow/seed_0') / 'checkpoints').exists())

  def test_ctrl_c_stops_the_runs_gracefully(self):
    made = self.make({'hang': 0.5})

    def stop():
      if (self.folder('hang/seed_0') / 'metrics.jsonl').exists():
        raise KeyboardInterrupt
      return False

    with self.assertRaises(KeyboardInterrupt):
      made.run(stop)
    self.assertEqual(made.counts(), {'done': 0, 'running': 0, 'left': 1, 'failed': 0})

  def test_second_ctrl_c_kills_the_runs(self):
    made = self.make({'hang': 0.5})
    (self.tmp / 'fake.py').write_text(
        'import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n'
        'print("deaf", flush=True)\ntime.sleep(60)\nprint("awake")\n',
        encoding='utf-8',
    )

    def stop():
      if 'deaf' in (self.log('hang/seed_0') if made._running else ''):
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
        raise KeyboardInterrupt
      return False

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # pytest-xdist ignores it
    self.addCleanup(signal.signal, signal.SIGINT, before)
    with self.assertRaises(KeyboardInterrupt):
      made.run(stop)
    self.assertNotIn('awake', self.log('hang/seed_0'))
    self.assertEqual(made.counts()['left'], 1)

  def test_jobs_have_cores_and_threads_of_their_own(self):
    cores = sorted(os.sched_getaffinity(0))
    self.make({'a': 0.1, 'b': 0.1}).run()
    first, second = (
        json.loads((self.folder(f'{name}/seed_0') / 'seen.json').read_text()) for name in 'ab'
    )
    if len(cores) >= 2:
      self.assertEmpty(set(first['cores']) & set(second['cores']))
      self.assertEqual(sorted(first['cores'] + second['cores']), cores)
    self.assertEqual(first['env']['OMP_NUM_THREADS'], str(len(first['cores'])))
    self.assertEqual(first['env']['JAX_PLATFORMS'], 'cpu')
    self.assertEqual(sorted(os.sched_getaffinity(0)), cores)  # The runner's own are as before.

  @parameterized.parameters(
      ('gpu', {'CUDA_VISIBLE_DEVICES': '1'}), ('tpu', {'TPU_VISIBLE_CHIPS': '1'})
  )
  def test_jobs_have_accelerators_of_their_own(self, devices, expected):
    slots = runner.make_slots(2, devices)
    self.assertEqual(slots[1].environment | expected, slots[1].environment)
    self.assertNotIn('JAX_PLATFORMS', slots[1].environment)

  def test_changed_method_runs_in_new_folder(self):
    self.make({'good': 0.1}).run()
    made = self.make({'good': 0.11})
    made.run()
    self.assertEqual(made.counts()['done'], 1)
    self.assertLen(list(self.folder('good').iterdir()), 2)
    self.assertLen(results.read(made.results), 2)
    self.assertLen(made.records(), 1)

  def test_one_study_per_folder(self):
    made = self.make({'good': 0.1})
    again = self.make({'good': 0.1})

    def stop():
      with self.assertRaisesRegex(UserError, 'in use by process'):
        again.run()
      return True

    made.run(stop)

  def test_toy_task_runs_all_seeds_in_one_process(self):
    (self.tmp / 'fake.py').write_text(
        'import json, sys, numpy as np\n'
        'job = json.load(open(sys.argv[1] + "/job.json"))\n'
        'score = np.linspace(0, job["overrides"]["actor.lr"], 5)[None] * np.ones((64, 1))\n'
        'np.savez(sys.argv[1] + "/metrics.npz", **{"toy/success": score, "stppo/grad_norm": score})'
        '\n',
        encoding='utf-8',
    )
    methods = {'ppo': {'algorithm.variant': 'ppo', 'actor.lr': 0.4}}
    study = grid.Study({'toy': grid.Grid(methods, seeds=tuple(range(64)), task='toy')})
    jobs = grid.plan(study, schema.Config())
    toy_command = [sys.executable, str(self.tmp / 'fake.py')]
    slots = runner.make_slots(1)
    made = runner.Runner(str(self.workdir), study, jobs, ['false'], slots, toy_command)
    made.run()
    self.assertEqual(made.counts()['done'], 1, made.table())
    record = made.records()['toy/default/ppo']
    # .4 * (0, 1/4, 1/2, 3/4, 1): the last three are .2, .3, .4.
    np.testing.assert_allclose(record['measures']['final'], [0.3] * 64)
    self.assertEqual(np.shape(record['score']['values']), (64, 5))
    self.assertEqual(record['series']['grad_norm']['iqm'], [0.0, 0.1, 0.2, 0.3, 0.4])


if __name__ == '__main__':
  absltest.main()
