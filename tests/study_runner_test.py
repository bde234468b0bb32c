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
  sys.exit('run.py: the retriever has no roof: mend it')
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

  def make(self, cells, seeds=(0, 1), num_jobs=2, **options):
    """A runner of cells given by their learning rates."""
    cells = {name: {'actor.lr': lr} for name, lr in cells.items()}
    study = grid.Study(
        {
            'system': grid.Grid(
                cells, base={'train.updates': 4}, seeds=seeds, baseline=next(iter(cells))
            )
        },
        **options,
    )
    jobs = grid.plan(study, schema.Config())
    command = [sys.executable, str(self.tmp / 'fake.py')]
    return runner.Runner(str(self.workdir), study, jobs, command, runner.make_slots(num_jobs))

  def seen(self, name):
    return json.loads((self.workdir / 'runs/system/default' / name / 'seen.json').read_text())

  def log(self, name):
    return (self.workdir / 'runs/system/default' / name / 'log.txt').read_text()

  def test_a_run_that_fails_is_told_and_stops_no_other(self):
    made = self.make({'bad': 0.2, 'good': 0.1, 'nan': 0.3})
    made.run()
    self.assertEqual(made.counts(), {'done': 4, 'running': 0, 'left': 0, 'failed': 2})
    table = made.table()
    self.assertIn(
        'failed: system/default/bad/seed_1: run.py: the retriever has no roof: mend it (exit', table
    )
    self.assertIn('4 done, 0 running, 0 left, 2 failed', table)
    state = json.loads((self.workdir / 'study.json').read_text())
    self.assertEqual(state['counts'], made.counts())
    self.assertGreater(state['jobs']['system/default/good/seed_0']['core_s'], 0)
    records = made.records()
    self.assertEqual(
        {name.split('/')[2]: record['status'] for name, record in records.items()},
        {'good': 'done', 'nan': 'nonfinite'},
    )
    self.assertEqual(records['system/default/nan/seed_0']['measures']['collapsed'], 1.0)
    good = records['system/default/good/seed_1']
    # Held out after updates 0, 2 and 4: .01, .21, .41 with seed 1; final is the trained ones' mean.
    self.assertEqual(good['score'], {'steps': [0, 2, 4], 'values': [0.01, 0.21, 0.41]})
    self.assertAlmostEqual(good['measures']['final'], 0.31)
    self.assertFalse((self.workdir / 'runs/system/default/good/seed_0/checkpoints').exists())

  def test_finished_runs_are_not_started_again_and_failed_ones_are(self):
    self.make({'bad': 0.2, 'good': 0.1}).run()
    made = self.make({'bad': 0.2, 'good': 0.1})
    made.run()
    self.assertEqual(self.log('good/seed_0').count('started'), 1)
    self.assertEqual(self.log('bad/seed_0').count('started'), 2)

  def test_results_alone_say_what_is_done(self):
    folder = str(self.tmp / 'committed')
    self.make({'good': 0.1}, results=folder).run()
    self.workdir = self.tmp / 'another'  # the machine was lost
    made = self.make({'good': 0.1}, results=folder)
    made.run()
    self.assertEqual(made.counts()['done'], 2)
    self.assertFalse((self.workdir / 'runs').exists())

  def test_folders_alone_say_what_is_done(self):
    self.make({'good': 0.1}).run()
    os.remove(self.workdir / 'results/system.jsonl')
    os.remove(self.workdir / 'study.json')
    made = self.make({'good': 0.1})
    made.run()
    self.assertEqual(made.counts()['done'], 2)
    self.assertEqual(self.log('good/seed_0').count('started'), 1)

  def test_sigterm_ends_the_runs_gracefully_and_the_same_command_goes_on(self):
    made = self.make({'slow': 0.4}, keep_checkpoints=True)
    path = self.workdir / 'runs/system/default/slow/seed_{}/metrics.jsonl'

    def stop():  # once both runs are at update 1
      return all(
          os.path.exists(str(path).format(s)) and len(open(str(path).format(s)).readlines()) >= 2
          for s in (0, 1)
      )

    made.run(stop)
    self.assertEqual(made.counts(), {'done': 0, 'running': 0, 'left': 2, 'failed': 0})
    before = made.core_hours()
    self.assertGreater(before, 0)
    made = self.make({'slow': 0.4}, keep_checkpoints=True)
    made.run()
    self.assertEqual(made.counts()['done'], 2)
    self.assertIn('started at 2', self.log('slow/seed_0'))
    self.assertGreater(made.core_hours(), before)  # both parts are counted
    self.assertTrue((self.workdir / 'runs/system/default/slow/seed_0/checkpoints').exists())

  def test_ctrl_c_ends_the_runs_gracefully_too(self):
    made = self.make({'hang': 0.5}, seeds=(0,))

    def stop():
      if (self.workdir / 'runs/system/default/hang/seed_0/metrics.jsonl').exists():
        raise KeyboardInterrupt
      return False

    with self.assertRaises(KeyboardInterrupt):
      made.run(stop)
    self.assertEqual(made.counts(), {'done': 0, 'running': 0, 'left': 1, 'failed': 0})

  def test_a_second_ctrl_c_kills_them(self):
    made = self.make({'hang': 0.5}, seeds=(0,))
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

  def test_each_job_has_cores_and_threads_of_its_own(self):
    cores = sorted(os.sched_getaffinity(0))
    self.make({'a': 0.1, 'b': 0.1}, seeds=(0,), num_jobs=2).run()
    first, second = self.seen('a/seed_0'), self.seen('b/seed_0')
    if len(cores) >= 2:
      self.assertEmpty(set(first['cores']) & set(second['cores']))
      self.assertEqual(sorted(first['cores'] + second['cores']), cores)
    self.assertEqual(first['env']['OMP_NUM_THREADS'], str(len(first['cores'])))
    self.assertEqual(first['env']['JAX_PLATFORMS'], 'cpu')
    self.assertEqual(sorted(os.sched_getaffinity(0)), cores)  # the runner's own are as before

  @parameterized.parameters(
      ('gpu', {'CUDA_VISIBLE_DEVICES': '1'}), ('tpu', {'TPU_VISIBLE_CHIPS': '1'})
  )
  def test_each_job_sees_its_accelerator(self, devices, expected):
    slots = runner.make_slots(2, devices)
    self.assertEqual(slots[1].environment | expected, slots[1].environment)
    self.assertNotIn('JAX_PLATFORMS', slots[1].environment)

  def test_a_changed_cell_is_run_again_and_the_old_folder_is_kept(self):
    self.make({'good': 0.1}, seeds=(0,)).run()
    made = self.make({'good': 0.11}, seeds=(0,))
    made.run()
    self.assertEqual(made.counts()['done'], 1)
    self.assertLen(list((self.workdir / 'runs/system/default/good').iterdir()), 2)
    lines = (self.workdir / 'results/system.jsonl').read_text().splitlines()
    self.assertLen(lines, 2)
    self.assertLen(made.records(), 1)

  def test_one_study_per_folder(self):
    made = self.make({'good': 0.1}, seeds=(0,))
    again = self.make({'good': 0.1}, seeds=(0,))

    def stop():
      with self.assertRaisesRegex(UserError, 'in use by process'):
        again.run()
      return True

    made.run(stop)

  def test_a_state_that_cannot_be_read_is_one_line(self):
    self.workdir.mkdir()
    (self.workdir / 'study.json').write_text('{', encoding='utf-8')
    with self.assertRaisesRegex(UserError, 'study.json cannot be read .* delete it'):
      self.make({'good': 0.1})


class MechanismTest(absltest.TestCase):

  def test_a_cell_of_the_mechanism_is_one_process_for_all_seeds(self):
    tmp = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))
    (tmp / 'fake.py').write_text(
        'import json, sys, numpy as np\n'
        'job = json.load(open(sys.argv[1] + "/job.json"))\n'
        'score = np.linspace(0, job["overrides"]["mechanism.top"], 5)[None] * np.ones((64, 1))\n'
        'np.savez(sys.argv[1] + "/metrics.npz", **{"score": score, "stppo/grad_norm": score})\n',
        encoding='utf-8',
    )
    cells = {'ppo': {'mechanism.top': 0.8}, 'st_ppo': {'mechanism.top': 0.4}}
    study = grid.Study(
        {
            'mechanism': grid.Grid(
                cells, seeds=tuple(range(64)), instrument='mechanism', score='score'
            )
        }
    )
    jobs = grid.plan(study, schema.Config())
    made = runner.Runner(
        str(tmp / 'study'), study, jobs, ['false'], runner.make_slots(1),
        of_mechanism=[sys.executable, str(tmp / 'fake.py')],
    )  # fmt: skip
    made.run()
    self.assertEqual(made.counts()['done'], 2, made.table())
    record = made.records()['mechanism/default/st_ppo']
    # .4 * (0, 1/4, 1/2, 3/4, 1): the last three are .2, .3, .4.
    np.testing.assert_allclose(record['measures']['final'], [0.3] * 64)
    self.assertEqual(np.shape(record['score']['values']), (64, 5))
    self.assertEqual(record['series']['grad_norm']['iqm'], [0.0, 0.1, 0.2, 0.3, 0.4])


if __name__ == '__main__':
  absltest.main()
