"""The writer of metrics.jsonl: every line is strict JSON, and a resumed run repeats no line."""

import contextlib
import dataclasses
import errno
import glob
import json
import math
import os
import shutil
import sys
import tempfile
import threading
import types as python_types
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stppo_jax import config as schema
from stppo_jax import types
from stppo_jax.monitoring import journal
from stppo_jax.monitoring import metrics
from stppo_jax.monitoring import timing
from stppo_jax.monitoring import tracker
from stppo_jax.training import summary

of_trackers = pytest.mark.guests(
    what='Weights & Biases and trackio',
    version='stand-ins',
    date='2026-11-28',
    touches='monitoring/tracker.py',
)

TRACKIO = {'project': 'p', 'tracker': 'trackio', 'run_name': 'r'}


def _strict_lines(workdir):
  def refuse(token):
    raise AssertionError(f'bare {token}')

  with open(os.path.join(workdir, 'metrics.jsonl'), encoding='utf-8') as file:
    return [json.loads(line, parse_constant=refuse) for line in file]


class MetricsWriterTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.workdir = self.enterContext(tempfile.TemporaryDirectory())

  def _tracker(self, name):
    """Returns `init` of a package that stands for a tracker's."""
    api = python_types.SimpleNamespace(api_key=None)
    module = python_types.SimpleNamespace(init=mock.Mock(), api=api)
    self.enterContext(mock.patch.dict(sys.modules, {name: module}))
    return module.init

  def _write_steps(self, steps, **kwargs):
    with metrics.MetricsWriter(self.workdir, **kwargs) as writer:
      for step in steps:
        writer.write(step, {'a': float(step)})

  def test_scalars_of_every_kind(self):
    with metrics.MetricsWriter(self.workdir) as writer:
      writer.write(
          1,
          {
              'python': 0.5,
              'count': 3,
              'numpy': np.float32(0.25),
              'device': jnp.float32(2.0),
              'bfloat16': jnp.bfloat16(1.5),
              'one': np.ones([1]),
              'integer': jnp.int32(7),
          },
      )
    (line,) = _strict_lines(self.workdir)
    self.assertEqual(line['step'], 1)
    self.assertGreater(line['time'], 1e9)
    del line['step'], line['time']
    self.assertEqual(
        line,
        {
            'python': 0.5,
            'count': 3,
            'numpy': 0.25,
            'device': 2.0,
            'bfloat16': 1.5,
            'one': 1.0,
            'integer': 7,
        },
    )

  def test_nonfinite_is_null_and_named(self):
    with metrics.MetricsWriter(self.workdir) as writer:
      writer.write(1, {'nan': math.nan, 'fine': 1.0, 'inf': jnp.inf, 'minus': -np.inf})
    (line,) = _strict_lines(self.workdir)
    self.assertEqual([line['nan'], line['fine'], line['inf'], line['minus']], [None, 1, None, None])
    self.assertEqual(line['nonfinite'], ['nan', 'inf', 'minus'])

  @parameterized.parameters((3, [1, 2, 3]), (0, []), (-1, []), (9, [1, 2, 3, 4, 5]))
  def test_resume_drops_later_steps(self, resume_step, left):
    self._write_steps([1, 2, 3, 4, 5])
    self._write_steps([6], resume_step=resume_step)
    self.assertEqual([line['step'] for line in _strict_lines(self.workdir)], left + [6])

  @parameterized.parameters(
      b'{"step": 4, "a": 0.',
      b'{"step": 4, "a"\n',
      b'4\n',
      b'{"a": 1}\n',
      b'{"step": "4"}\n',
      b'{"step": 1e400}\n',
  )
  def test_torn_last_line(self, torn):
    """A crash in the middle of a write: the next line must not be joined to the partial one."""
    self._write_steps([1, 2, 3])
    path = os.path.join(self.workdir, 'metrics.jsonl')
    with open(path, 'ab') as file:
      file.write(torn)
    self.assertEqual([line['step'] for line in metrics.read_metrics(self.workdir)], [1, 2, 3])
    self._write_steps([4], resume_step=3)
    self.assertEqual([line['step'] for line in _strict_lines(self.workdir)], [1, 2, 3, 4])

  def test_whole_last_line_without_newline_is_kept(self):
    with open(os.path.join(self.workdir, 'metrics.jsonl'), 'w', encoding='utf-8') as file:
      file.write('{"step": 1, "a": 2.0}')
    self._write_steps([2], resume_step=1)
    self.assertEqual([line['step'] for line in _strict_lines(self.workdir)], [1, 2])

  def test_restart_keeps_old_lines_in_another_file(self):
    self._write_steps([0, 1, 2])
    with self.assertLogs('absl', 'WARNING') as logs:
      self._write_steps([0], resume_step=-1)
    self.assertIn('starts again', logs.output[0])
    self.assertEqual([line['step'] for line in metrics.read_metrics(self.workdir)], [0])
    with open(os.path.join(self.workdir, metrics.FILE_NAME + '.old'), encoding='utf-8') as file:
      self.assertLen(file.readlines(), 3)
    self._write_steps([0, 1])
    self._write_steps([0], resume_step=-1)  # once more
    self.assertContainsSubset(['metrics.jsonl.old', 'metrics.jsonl.old2'], os.listdir(self.workdir))

  def test_reserved_names_and_arrays_are_refused(self):
    with metrics.MetricsWriter(self.workdir) as writer:
      with self.assertRaisesRegex(AssertionError, 'reserved'):
        writer.write(1, {'step': 2})
      with self.assertRaisesRegex(AssertionError, 'one number'):
        writer.write(1, {'a': np.zeros([2])})

  def test_time_left_does_not_count_compiling(self):
    """The first update takes an hour, and the others a second each."""
    config = dataclasses.asdict(schema.Config(train=schema.TrainSettings(updates=26)))
    config['log'] |= {'tensorboard': False, 'episodes': False}
    clock = iter([0.0, 3600.0, 3600.0, 3601.0])
    with mock.patch.object(journal.time, 'perf_counter', lambda: next(clock)):
      with journal.Journal(self.workdir, config, 0) as made, self.assertLogs('absl') as logs:
        made.log_update(1, {})
        made.log_update(2, {})
    self.assertEqual(
        [line.split(':')[-3:] for line in logs.output if 'update' in line],
        [['INFO', 'absl', 'update 1/26'], ['update 2/26  0', '00', '24 left']],
    )

  def test_finished_run_says_so(self):
    config = dataclasses.asdict(schema.Config(train=schema.TrainSettings(updates=3)))
    config['log'] |= {'tensorboard': False, 'episodes': False}
    with journal.Journal(self.workdir, config, 3) as made, self.assertLogs('absl') as logs:
      made.log_end(3)
    self.assertIn('all 3 updates of this run are done', logs.output[0])

  def test_reading(self):
    self.assertEqual(metrics.read_metrics(self.workdir), [])
    with self.assertRaisesRegex(types.UserError, 'not a folder') as caught:
      metrics.read_metrics(os.path.join(self.workdir, 'nowhere'))
    self.assertNotIn('\n', str(caught.exception))

  def test_tensorboard_gets_the_finite_numbers(self):
    with metrics.MetricsWriter(self.workdir, tensorboard=True, resume_step=6) as writer:
      writer.write(7, {'a': 1.0, 'b': math.nan})
    begin, start, event = self._events()
    self.assertEqual(begin.file_version, 'brain.Event:2')
    self.assertEqual((start.step, start.session_log.status), (7, start.session_log.START))
    self.assertEqual(event.step, 7)
    self.assertEqual([(x.tag, x.simple_value) for x in event.summary.value], [('a', 1.0)])

  def _events(self):
    """The events of the one file."""
    from tensorboardX.proto import event_pb2

    (path,) = glob.glob(os.path.join(self.workdir, 'tensorboard', 'events.out.tfevents.*'))
    with open(path, 'rb') as file:
      data = file.read()
    events = []
    while data:
      size = 12 + int.from_bytes(data[:8], 'little')
      events.append(event_pb2.Event.FromString(data[12:size]))
      data = data[size + 4 :]
    return events

  def test_full_disk_under_tensorboard_never_waits(self):
    """With the package's own writer its thread ended, and the next writes waited for it."""
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def run():
      with mock.patch('tensorboardX.record_writer.RecordWriter.write', side_effect=[0, 0, full]):
        with self.assertLogs(level='WARNING') as logs:
          self._write_steps(range(30), tensorboard=True)
      told.extend(logs.output)

    told = []
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(60)
    self.assertFalse(thread.is_alive())
    self.assertLen(told, 1)
    self.assertIn('TensorBoard takes no more metrics ([Errno 28]', told[0])
    self.assertLen(_strict_lines(self.workdir), 30)

  @of_trackers
  def test_wandb_goes_on_under_the_same_id(self):
    init = self._tracker('wandb')
    for resume_step in (-1, 3, 5, -1):
      metrics.MetricsWriter(self.workdir, project='p', resume_step=resume_step).close()
    ids = [call.kwargs['id'] for call in init.call_args_list]
    self.assertEqual(ids[0], ids[1])
    self.assertEqual(ids[0], ids[2])
    self.assertNotEqual(ids[0], ids[3])  # a run that begins anew
    self.assertEqual({call.kwargs['resume'] for call in init.call_args_list}, {'allow'})

  def test_trackio_finds_a_run_by_its_name(self):
    init = self._tracker('trackio')
    for resume_step in (-1, 3, -1):
      self._write_steps([4], resume_step=resume_step, **TRACKIO)
    names = [call.kwargs['name'] for call in init.call_args_list]
    self.assertStartsWith(names[0], 'r_')
    self.assertEqual(names[0], names[1])
    self.assertNotEqual(names[0], names[2])
    init.return_value.log.assert_called_with({'a': 4.0}, step=4)
    init.return_value.finish.assert_called_with()

  @parameterized.parameters(
      (shutil.copytree, True), (os.rename, False), (lambda old, new: os.symlink(old, new), False)
  )
  def test_only_copied_folder_gets_new_run(self, transfer, is_new):
    init = self._tracker('trackio')
    log = init.return_value.log
    original = os.path.join(self.workdir, 'original')
    other = os.path.join(self.workdir, 'other')
    for workdir, resume_step in ((original, -1), (other, 1), (other, 2)):
      if resume_step == 1:
        transfer(original, other)
        log.reset_mock()
      writer = metrics.MetricsWriter(workdir, resume_step=resume_step, **TRACKIO)
      for step in (1, 2):
        if step > resume_step:
          writer.write(step, {'a': step})
      writer.close()
    first, second, third = [call.kwargs['name'] for call in init.call_args_list]
    self.assertEqual(first != second, is_new)
    self.assertEqual(second, third)
    steps = [call.kwargs['step'] for call in log.call_args_list]
    self.assertEqual(steps, [1, 2] if is_new else [])

  @of_trackers
  def test_a_tracker_has_each_step_once(self):
    init = self._tracker('trackio')
    log = init.return_value.log
    steps = lambda: [call.kwargs['step'] for call in log.call_args_list]
    self._write_steps([1, 2, 3], **TRACKIO)
    self._write_steps([2, 3, 4], resume_step=1, **TRACKIO)  # after a crash
    self.assertEqual(steps(), [1, 2, 3, 4])
    log.reset_mock()
    self._write_steps([3, 4], resume_step=2, is_rollback=True, **TRACKIO)
    self.assertEqual(steps(), [1, 2, 3, 4])  # a new run has the steps before
    names = [call.kwargs['name'] for call in init.call_args_list]
    self.assertEqual(names[0], names[1])
    self.assertNotEqual(names[1], names[2])

  def test_a_missing_tensorboardx_costs_one_warning(self):
    with mock.patch.dict(sys.modules, {'tensorboardX': None}):
      with self.assertLogs(level='WARNING') as logs:
        self._write_steps([1, 2], tensorboard=True)
    self.assertLen(logs.output, 1)
    self.assertLen(_strict_lines(self.workdir), 2)

  @of_trackers
  def test_wandb_gets_the_numbers_and_may_fail(self):
    init = self._tracker('wandb')
    run = init.return_value
    run.log.side_effect = [None, OSError('no network')]
    with mock.patch.dict(os.environ):
      os.environ.pop('WANDB_MODE', None)
      with self.assertLogs(level='WARNING') as logs:
        self._write_steps([1, 2, 3], project='p', run_name='name', config_json='{"lr": 0.1}')
    self.assertEqual(init.call_args.kwargs['mode'], 'offline')
    self.assertEqual(init.call_args.kwargs['config'], {'lr': 0.1})
    run.log.assert_called_with({'a': 2.0}, step=2)
    self.assertLen(logs.output, 1)
    self.assertLen(_strict_lines(self.workdir), 3)

  @of_trackers
  def test_wandb_has_a_time_limit(self):
    waits = threading.Event()
    self.addCleanup(waits.set)
    run = self._tracker('wandb').return_value
    for limit_s, finish, message in (
        (0.1, waits.wait, 'within 0.1 s'),
        (60.0, OSError('no route'), 'no route'),
    ):
      self.enterContext(mock.patch.object(tracker, 'FINISH_S', limit_s))
      run.finish.side_effect = finish
      with self.assertLogs(level='WARNING') as logs:
        self._write_steps([1], project='p', resume_step=1)
      self.assertLen(logs.output, 1)
      self.assertIn('wandb did not end cleanly', logs.output[0])
      self.assertIn(message, logs.output[0])

  @of_trackers
  def test_a_missing_wandb_costs_one_warning(self):
    with mock.patch.dict(sys.modules, {'wandb': None}):
      with self.assertLogs(level='WARNING') as logs:
        self._write_steps([1], project='p')
    self.assertLen(logs.output, 1)


class MeansTest(absltest.TestCase):

  def test_undefined_cosine_does_not_count(self):
    nan, cos = math.nan, 'stppo/cos_g_c'
    made = summary.means([{cos: nan, 'loss': 1.0}, {cos: -0.8, 'loss': 2.0}])
    self.assertEqual(made, {cos: -0.8, 'loss': 1.5})
    self.assertEqual(summary.means([{cos: nan, 'loss': 1.0}]), {'loss': 1.0})
    self.assertTrue(math.isnan(summary.means([{'loss': nan}])['loss']))  # never hidden


class TextTest(parameterized.TestCase):

  def test_progress_line(self):
    scalars = {
        'critic/score/mean': 0.42,
        'em/mean': np.float32(0.44),
        'actor/pg_clipfrac': 0.0312,
        'perf/throughput': 1890.0,
    }
    # 50.25 s for 12 updates leave 48 * 50.25 / 12 = 201 s = 3:21.
    self.assertEqual(
        metrics.progress_line(12, 60, scalars, 50.25),
        'update 12/60  reward 0.420  em 0.440  clip 0.031  1,890 tok/s  0:03:21 left',
    )

  def test_progress_line_tells_of_skipped_steps(self):
    line = lambda skipped: metrics.progress_line(1, 2, {'actor/skipped': skipped}, 1.0)
    self.assertIn('skipped 3 in a row (not finite)', line(3))
    self.assertNotIn('skipped', line(0))

  def test_progress_line_tells_of_an_environment_that_raises(self):
    line = lambda share: metrics.progress_line(1, 2, {'env/environment_failed': share}, 1.0)
    self.assertIn('environment raised in 49%', line(0.49))
    self.assertNotIn('raised', line(0.0))

  def test_an_evaluation_whose_environment_raised_is_warned(self):
    make = lambda error: types.Episode(types.Task('t'), 0, np.zeros(1, np.int32), [], error=error)
    made = mock.Mock(_main='val-core/all/em')
    for errors, expected in ((('', 'the environment E raised'), 1), (('', ''), 0)):
      with mock.patch.object(journal.logging, 'warning') as warned:
        episodes = [make(error) for error in errors]
        journal.Journal.log_evaluation(made, 1, {'val-core/all/em': 0.5}, episodes, None)
      lines = [call.args[0] % call.args[1:] for call in warned.call_args_list]
      self.assertLen([line for line in lines if 'raised in 1 of 2' in line], expected)

  def test_progress_of_resumed_run_counts_its_updates(self):
    # 2 updates in 20 s: 10 s each, 48 to go.
    self.assertEqual(
        metrics.progress_line(12, 60, {}, 20.0, first_step=10), 'update 12/60  0:08:00 left'
    )

  @parameterized.parameters(
      ({'critic/score/mean': math.nan}, 'update 1/2  reward nan  0:00:05 left'),
      ({'critic/score/mean': -0.5}, 'update 1/2  reward -0.500  0:00:05 left'),
      ({'critic/score/mean': 1.0}, 'update 1/2  reward 1.000  0:00:05 left'),
      ({'critic/score/mean': 10.25}, 'update 1/2  reward 10.250  0:00:05 left'),
      ({'critic/score/mean': None}, 'update 1/2  0:00:05 left'),
  )
  def test_progress_line_numbers(self, scalars, line):
    self.assertEqual(metrics.progress_line(1, 2, scalars, 5.0), line)

  def test_progress_line_before_update_1_and_for_days(self):
    self.assertEqual(metrics.progress_line(0, 60, {}, 0.0), 'update 0/60')
    # 3600 s per update, 25 to go.
    self.assertEqual(metrics.progress_line(1, 26, {}, 3600.0), 'update 1/26  1 day, 1:00:00 left')

  def test_trace_of_short_run_begins_earlier(self):
    for count, last, traced in ((2, 2, [0, 1]), (2, 3, [1, 2]), (1, 9, [1]), (5, 3, [0, 1, 2])):
      started, on = [], []
      profiler = mock.patch.object(timing.jax.profiler, 'trace', lambda folder: trace(on))

      @contextlib.contextmanager
      def trace(on):
        on.append(True)
        yield
        on.clear()

      with profiler, timing.trace_updates(tempfile.gettempdir(), count, 0, last) as before:
        for n in range(last):
          before(n)
          if on:
            started.append(n)
      self.assertEqual(started, traced)

  def test_host_memory_sees_what_is_taken(self):
    before = metrics.host_memory_gb()
    taken = np.ones(1 << 25)  # a quarter GiB
    self.assertAlmostEqual(metrics.host_memory_gb() - before, 0.25, delta=0.05)
    del taken

  def test_the_peak_of_the_devices(self):
    device = lambda stats: mock.Mock(**{'memory_stats.return_value': stats})
    devices = [device({'peak_bytes_in_use': 3 << 30}), device({'peak_bytes_in_use': 5 << 29})]
    with mock.patch.object(jax, 'local_devices', lambda: devices):
      self.assertEqual(metrics.device_memory(), {'perf/max_memory_allocated_gb': 3.0})
    with mock.patch.object(jax, 'local_devices', lambda: [device(None), device({})]):
      self.assertEqual(metrics.device_memory(), {})

  def test_summarize(self):
    summary = metrics.summarize('a', [1, 2, 5])
    self.assertAlmostEqual(summary.pop('a/mean'), 8 / 3)
    self.assertEqual(summary, {'a/max': 5.0, 'a/min': 1.0})
    self.assertEqual(metrics.summarize('a', []), {})


if __name__ == '__main__':
  absltest.main()
