"""The folder of a run belongs to one config, and has one holder at a time."""

import contextlib
import copy
import dataclasses
import functools
import json
import os
import shutil
import tempfile
import threading
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized
import jax

from stppo_jax import config as schema
from stppo_jax import types
from stppo_jax.algorithms import variants
from stppo_jax.distributed import hosts
from stppo_jax.distributed import messages
from stppo_jax.models import presets
from stppo_jax.models import sharding
from stppo_jax.monitoring import metrics as metrics_lib
from stppo_jax.monitoring import shared_folder
from stppo_jax.monitoring import workdir as workdirs
from stppo_jax.settings import validation
from stppo_jax.training import learner
from stppo_jax.training import recovery
from stppo_jax.types import UserError
from tests.support import processes


def as_dict(**data):
  return dataclasses.asdict(schema.Config(data=schema.DataSettings(**data)))


def constant_rates():
  constant = dict(lr=1e-6, warmup=0.0)
  return schema.Config(
      actor=schema.OptimizerSettings(**constant), critic=schema.OptimizerSettings(**constant)
  )


class WorkdirTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.workdir = self.enterContext(tempfile.TemporaryDirectory())

  def save_checkpoint(self):
    os.makedirs(os.path.join(self.workdir, 'checkpoints', '2'))

  def test_copied_checkpoints_belong_to_their_settings(self):
    workdirs.claim(self.workdir, as_dict())
    self.save_checkpoint()
    os.remove(os.path.join(self.workdir, 'config.json'))  # only checkpoints/ was copied
    with self.assertRaisesRegex(UserError, "data.corpus .'' there, 'other' here."):
      workdirs.claim(self.workdir, as_dict(corpus='other'))
    workdirs.claim(self.workdir, as_dict())
    self.assertEqual(workdirs.read_config(self.workdir)['data']['corpus'], '')

  def test_checkpoints_without_settings_are_refused(self):
    for make in (self.save_checkpoint, self.write_a_number):
      make()
      with self.assertRaisesRegex(UserError, 'no config.json that says of which one: restore it'):
        workdirs.claim(self.workdir, as_dict())

  def test_checkpoints_beside_another_config_are_refused(self):
    workdirs.claim(self.workdir, as_dict())
    self.save_checkpoint()
    there = dataclasses.asdict(schema.Config(seed=7))
    workdirs.write_whole(os.path.join(self.workdir, 'config.json'), json.dumps(there))
    for seed in (0, 7):
      with self.assertRaisesRegex(UserError, 'belongs to a run with another config: seed'):
        workdirs.claim(self.workdir, dataclasses.asdict(schema.Config(seed=seed)))

  def write_a_number(self):
    with open(os.path.join(self.workdir, metrics_lib.FILE_NAME), 'w', encoding='utf-8'):
      pass

  def test_a_folder_without_numbers_is_free(self):
    """A run that stopped at a misspelt path left config.json, and the corrected one was refused."""
    workdirs.claim(self.workdir, as_dict(corpus='misspelt'))
    workdirs.claim(self.workdir, as_dict())
    self.write_a_number()
    with self.assertRaisesRegex(UserError, "data.corpus .'' there, 'misspelt' here."):
      workdirs.claim(self.workdir, as_dict(corpus='misspelt'))

  def test_checkpoints_alone_belong_to_their_config_too(self):
    """With metrics.jsonl deleted, another config resumed from them."""
    workdirs.claim(self.workdir, as_dict())
    os.makedirs(os.path.join(self.workdir, 'checkpoints', '2'))
    with self.assertRaisesRegex(UserError, 'data.corpus'):
      workdirs.claim(self.workdir, as_dict(corpus='other'))

  @parameterized.parameters('{"seed": ', '[]', '')
  def test_a_broken_config_is_one_line(self, text):
    self.write_a_number()
    path = os.path.join(self.workdir, 'config.json')
    with open(path, 'w', encoding='utf-8') as file:
      file.write(text)
    for call in (workdirs.claim, workdirs.differences):
      with self.assertRaisesRegex(UserError, r'^[^\n]*config.json is not a JSON object [^\n]*$'):
        call(self.workdir, as_dict())

  def test_a_folder_that_cannot_be_written(self):
    os.makedirs(os.path.join(self.workdir, 'config.json.part'))  # as root, modes are no hindrance
    with self.assertRaisesRegex(UserError, 'cannot be written .*another --workdir'):
      workdirs.claim(self.workdir, as_dict())

  def test_other_questions_are_another_run(self):
    config = schema.Config()
    tasks = [types.Task('a', 'Who?', ('x',)), types.Task('b', 'What?', ('y',))]
    claim = lambda tasks: recovery.claim_data(config, tasks, [], '', self.workdir)
    workdirs.claim(self.workdir, as_dict())
    claim(tasks[:1])  # nothing has begun yet
    claim(tasks)
    self.write_a_number()
    claim(tasks)
    workdirs.claim(self.workdir, as_dict())  # keeps what is noted
    others = [tasks[0], dataclasses.replace(tasks[1], answers=('z',))]
    for changed in (tasks[::-1], tasks[:1], others):
      with self.assertRaisesRegex(UserError, 'questions .* changed since .*accept_changed_plugins'):
        claim(changed)
    config.train.accept_changed_plugins = True
    with self.assertLogs(level='WARNING') as logs:
      claim(others)
    self.assertIn('it continues with them', logs.output[0])
    config.train.accept_changed_plugins = False
    claim(others)
    self.assertEmpty(workdirs.differences(self.workdir, as_dict()))

  @parameterized.parameters(
      ([types.Task('a')], [], 'p', 'the held-out questions have'),
      ([types.Task('a')], [types.Task('b', answers=('y',))], 'p', 'the held-out questions have'),
      ([types.Task('a')], [types.Task('b')], 'other', 'the passages that searches find have'),
      ([], [], 'p', 'the questions to train on and the held-out questions have'),
  )
  def test_other_data_is_another_run(self, tasks, held_out, passages, line):
    config = schema.Config()
    workdirs.claim(self.workdir, as_dict())
    claim = lambda *data: recovery.claim_data(config, *data, self.workdir)
    claim([types.Task('a')], [types.Task('b')], 'p')
    self.write_a_number()
    workdirs.claim(self.workdir, as_dict())
    claim([types.Task('a')], [types.Task('b')], 'p')
    claim([types.Task('a')], [types.Task('b')], '')  # no passages are read here
    with self.assertRaisesRegex(UserError, f'{line} changed since .*accept_changed_plugins'):
      claim(tasks, held_out, passages)
    config.train.accept_changed_plugins = True
    with self.assertLogs(level='WARNING') as logs:
      claim(tasks, held_out, passages)
    self.assertIn(line, logs.output[0])

  def test_missing_digest_of_questions_is_accepted(self):
    workdirs.claim(self.workdir, as_dict())
    self.write_a_number()
    recovery.claim_data(schema.Config(), [types.Task('a')], [], 'a1', self.workdir)
    self.assertEqual(workdirs.read_config(self.workdir)['passages'], 'a1')

  def test_fields_that_affect_no_number_may_change(self):
    may_change = validation.changeable_on_resume(constant_rates())
    config = as_dict()
    config['rollout']['engine'] = config['teacher']['address'] = 'http://a'
    workdirs.claim(self.workdir, config)
    self.write_a_number()
    for path in may_change:
      section, name = path.split('.')
      value = config[section][name]
      config[section][name] = value + 1 if isinstance(value, int) else 'other'
      if name == 'checkpoint_folder':  # it is made
        config[section][name] = os.path.join(self.workdir, 'other')
      workdirs.claim(self.workdir, copy.deepcopy(config), may_change)
    with open(os.path.join(self.workdir, 'config.json'), encoding='utf-8') as file:
      self.assertEqual(json.load(file)['train']['on_nonfinite'], 'other')

  def test_relative_folder_of_checkpoints_belongs_to_the_run(self):
    config = as_dict()
    config['train']['checkpoint_folder'] = 'checks'
    may_change = ('train.checkpoint_folder',)
    here, elsewhere = (self.enterContext(tempfile.TemporaryDirectory()) for _ in range(2))
    checkpoints = os.path.join(os.path.realpath(here), 'checks')
    with contextlib.chdir(here):
      workdirs.claim(self.workdir, config, may_change)
      self.write_a_number()
      workdirs.claim(self.workdir, config, may_change)  # stopped before its first checkpoint
      os.makedirs(os.path.join('checks', '2'))
    with contextlib.chdir(elsewhere):
      self.assertEqual(workdirs.checkpoint_folder(self.workdir), checkpoints)
      with self.assertRaisesRegex(UserError, f'its checkpoints in {checkpoints}, and .* has none'):
        workdirs.claim(self.workdir, config, may_change)
      config['train']['checkpoint_folder'] = checkpoints
      workdirs.claim(self.workdir, config, may_change)

  def test_lost_folder_of_checkpoints_is_refused(self):
    config = as_dict()
    folder = os.path.join(self.workdir, 'disk')
    config['train']['checkpoint_folder'] = folder
    workdirs.claim(self.workdir, config)
    self.write_a_number()
    workdirs.claim(self.workdir, config)
    shutil.rmtree(folder)
    with self.assertRaisesRegex(UserError, f'checkpoints in {folder}, and there is no such folder'):
      workdirs.claim(self.workdir, config)

  @parameterized.product(
      addresses=(('', 'http://a'), ('http://a', '')),
      part=(('rollout', 'engine', 'our own sampler'), ('teacher', 'address', 'no teacher there')),
  )
  def test_resume_keeps_the_parts_of_other_processes(self, addresses, part):
    section, name, other = part
    may_change = validation.changeable_on_resume(constant_rates())
    config = as_dict()
    config[section][name] = addresses[0]
    workdirs.claim(self.workdir, config)
    self.write_a_number()
    config[section][name] = addresses[1]
    with self.assertRaisesRegex(types.UserError, f'not switch to or from {other}'):
      workdirs.claim(self.workdir, config, may_change)

  @parameterized.parameters('address', 'model')
  def test_another_teacher_is_logged(self, name):
    may_change = validation.changeable_on_resume(constant_rates())
    config = as_dict()
    config['teacher'] |= {'address': 'http://a', 'model': 'm'}
    workdirs.claim(self.workdir, config)
    self.write_a_number()
    config['teacher'][name] = 'http://b'
    with self.assertLogs(level='WARNING') as logs:
      workdirs.claim(self.workdir, config, may_change)
    self.assertIn(f'the run continues with another teacher.{name}', logs.output[0])

  @parameterized.parameters(('actor', 'warmup', 0.1), ('critic', 'final_lr', 0.5))
  def test_updates_are_fixed_under_a_schedule(self, model, name, value):
    config = constant_rates()
    self.assertIn('train.updates', validation.changeable_on_resume(config))
    setattr(getattr(config, model), name, value)
    self.assertNotIn('train.updates', validation.changeable_on_resume(config))
    getattr(config, model).lr = 0.0  # a rate of 0 has no schedule
    self.assertIn('train.updates', validation.changeable_on_resume(config))

  def test_rate_of_untrained_critic_is_ignored(self):
    config = constant_rates()
    config.critic.warmup = 0.1
    self.assertNotIn('train.updates', validation.changeable_on_resume(config))
    self.assertIn('train.updates', validation.changeable_on_resume(config, with_critic=False))
    self.assertFalse(validation.has_critic(config, variants.VARIANTS['grpo']))
    self.assertTrue(validation.has_critic(config, variants.VARIANTS['ppo']))
    config.model.critic = 'shared'
    self.assertFalse(validation.has_critic(config, variants.VARIANTS['ppo']))

  def test_schedule_updates_allow_more_updates(self):
    config = schema.Config()
    config.train.schedule_updates, rates = 10, []
    self.assertIn('train.updates', validation.changeable_on_resume(config))
    self.assertNotIn('train.schedule_updates', validation.changeable_on_resume(config))
    for updates in (10, 20):
      config.train.updates = updates
      spec = learner.make_spec(
          config,
          variants.VARIANTS['ppo'],
          presets.PRESETS['qwen2.5-7b'],
          None,
          sharding.make_mesh(1, 1, 1),
      )
      rates.append([float(spec.actor_lr(step)) for step in range(8)])
    self.assertEqual(*rates)
    self.assertGreater(rates[0][-1], rates[0][0])  # warm-up: round(.285 * 10 * 2) steps

  def test_a_changed_plug_in_is_refused(self):
    workdirs.claim(self.workdir, as_dict(source='m:load'), digests={'data.source': 'a1'})
    with open(os.path.join(self.workdir, 'config.json'), encoding='utf-8') as file:
      self.assertEqual(json.load(file)['plugins'], {'data.source': 'a1'})
    self.write_a_number()
    workdirs.claim(self.workdir, as_dict(source='m:load'), digests={'data.source': 'a1'})
    with self.assertRaisesRegex(
        UserError, r"^[^\n]*config.data.source='m:load' names has changed since[^\n]*$"
    ):
      workdirs.claim(self.workdir, as_dict(source='m:load'), digests={'data.source': 'b2'})
    changed = dict(digests={'data.source': 'b2'}, accepts_changes=True)
    with self.assertLogs(level='WARNING') as logged:
      workdirs.claim(self.workdir, as_dict(source='m:load'), **changed)
    self.assertIn("config.data.source='m:load' names has changed", logged.output[0])
    workdirs.claim(self.workdir, as_dict(source='m:load'), digests={'data.source': 'b2'})

  def test_changed_objective_is_rejected(self):
    first = {'clip_low': 0.2, 'betas': (1, 2), 'dropped_since': 1}
    workdirs.claim(self.workdir, as_dict(), objective=first)
    self.write_a_number()
    same = {'clip_low': 0.2, 'betas': (1, 2), 'new_since': 1}
    workdirs.claim(self.workdir, as_dict(), objective=same)
    with self.assertRaisesRegex(
        UserError, r'^[^\n]*another objective[^\n]*clip_low \(0.2 there, 0.3 here\)[^\n]*$'
    ):
      workdirs.claim(self.workdir, as_dict(), objective=same | {'clip_low': 0.3})

  def test_another_staleness_is_refused(self):
    workdirs.claim(self.workdir, as_dict())
    self.write_a_number()
    config = dataclasses.asdict(schema.Config(pipeline=schema.PipelineSettings(staleness=1)))
    with self.assertRaisesRegex(UserError, r'pipeline.staleness \(0 there, 1 here\)'):
      workdirs.claim(self.workdir, config)

  def test_a_folder_that_cannot_be_made(self):
    path = os.path.join(self.workdir, 'file')
    with open(path, 'w', encoding='utf-8'):
      pass
    with self.assertRaisesRegex(UserError, 'cannot be made'):
      with workdirs.lock(os.path.join(path, 'run')):
        pass

  def test_a_lock_has_one_holder_at_a_time(self):
    for _ in range(2):  # and is free again
      with workdirs.lock(self.workdir):
        with self.assertRaisesRegex(UserError, rf'^[^\n]*in use by process {os.getpid()} [^\n]*$'):
          with workdirs.lock(self.workdir):
            pass


class SharedFolderTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.folders = [self.enterContext(tempfile.TemporaryDirectory()) for _ in range(2)]

  def check(self, folders):
    """What two processes, as threads, are told about their work folders."""
    store, here = processes.Store(), threading.local()
    exchanges = [messages.Exchange(store, i, 2) for i in range(2)]

    def run(i):
      here.index = i
      try:
        shared_folder.check(folders[i])
      except UserError as error:
        return str(error)
      return ''

    with (
        mock.patch.object(jax, 'process_count', lambda: 2),
        mock.patch.object(jax, 'process_index', lambda: here.index),
        mock.patch.object(hosts, '_exchange', lambda: exchanges[here.index]),
        mock.patch.object(shared_folder, '_APPEARS_S', 0.0),
    ):
      return processes.in_threads(2, run)

  def test_shared_folder_is_accepted_unchanged(self):
    self.assertEqual(self.check([self.folders[0]] * 2), ['', ''])
    self.assertEmpty(os.listdir(self.folders[0]))

  def test_two_folders_are_refused_on_both(self):
    with open(os.path.join(self.folders[1], 'nonce'), 'w', encoding='utf-8') as file:
      file.write('of another start')
    for line in self.check(self.folders):
      self.assertRegex(line, r'^--workdir=[^\n]*process 1 does not see[^\n]*processes share[^\n]*$')

  def test_a_file_may_take_its_time_to_appear(self):
    now = [0.0]

    def sleep(seconds):
      now[0] += seconds
      if now[0] == 12.0:
        workdirs.write_whole(os.path.join(self.folders[0], 'nonce'), 'abc')

    sees = functools.partial(shared_folder.sees_nonce, sleep=sleep, clock=lambda: now[0])
    self.assertTrue(sees(self.folders[0], 'abc'))
    self.assertEqual(now[0], 12)
    self.assertFalse(sees(self.folders[0], 'xyz'))
    self.assertEqual(now[0], 42)

  @parameterized.parameters('gs://bucket/run', 's3://bucket/run', 'GS://bucket/run', 'gs:/bucket')
  def test_object_stores_are_refused(self, path):
    here = os.getcwd()
    self.addCleanup(os.chdir, here)
    os.chdir(self.folders[0])
    with self.assertRaisesRegex(
        UserError, r'^--workdir=[^\n]*object stores[^\n]*mounted[^\n]*NFS[^\n]*$'
    ):
      with recovery.hold_workdir(schema.Config(), variants.VARIANTS['st_ppo'], path):
        pass
    self.assertEmpty(os.listdir(self.folders[0]))


if __name__ == '__main__':
  absltest.main()
