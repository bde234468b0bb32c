"""The folder of a run belongs to one config, and has one holder at a time."""

import copy
import dataclasses
import json
import os
import tempfile

from absl.testing import absltest
from absl.testing import parameterized

from stppo_jax import config as schema
from stppo_jax import validation
from stppo_jax.monitoring import metrics as metrics_lib
from stppo_jax.monitoring import workdir as workdirs
from stppo_jax.types import UserError


def as_dict(**data):
  return dataclasses.asdict(schema.Config(data=schema.Data(**data)))


def constant_rates():
  constant = dict(lr=1e-6, warmup=0.0)
  return schema.Config(actor=schema.Optimizer(**constant), critic=schema.Optimizer(**constant))


class WorkdirTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.workdir = self.enterContext(tempfile.TemporaryDirectory())

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
      with self.assertRaisesRegex(UserError, r'^[^\n]*config.json cannot be read [^\n]*$'):
        call(self.workdir, as_dict())

  def test_a_folder_that_cannot_be_written(self):
    os.makedirs(os.path.join(self.workdir, 'config.json.part'))  # as root, modes are no hindrance
    with self.assertRaisesRegex(UserError, 'cannot be written .*another --workdir'):
      workdirs.claim(self.workdir, as_dict())

  def test_fields_that_affect_no_number_may_change(self):
    may_change = validation.may_change(constant_rates())
    workdirs.claim(self.workdir, as_dict())
    self.write_a_number()
    config = as_dict()
    for path in may_change:
      section, name = path.split('.')
      value = config[section][name]
      config[section][name] = value + 1 if isinstance(value, int) else 'other'
      workdirs.claim(self.workdir, copy.deepcopy(config), may_change)
    with open(os.path.join(self.workdir, 'config.json'), encoding='utf-8') as file:
      self.assertEqual(json.load(file)['train']['on_nonfinite'], 'other')

  @parameterized.parameters(('actor', 'warmup', 0.1), ('critic', 'final_lr', 0.5))
  def test_updates_may_not_change_where_the_rate_depends_on_them(self, model, name, value):
    config = constant_rates()
    self.assertIn('train.updates', validation.may_change(config))
    setattr(getattr(config, model), name, value)
    self.assertNotIn('train.updates', validation.may_change(config))
    getattr(config, model).lr = 0.0  # which has no schedule
    self.assertIn('train.updates', validation.may_change(config))

  def test_a_changed_plug_in_is_refused(self):
    workdirs.claim(self.workdir, as_dict(source='m:load'), digests={'data.source': 'a1'})
    with open(os.path.join(self.workdir, 'config.json'), encoding='utf-8') as file:
      self.assertEqual(json.load(file)['plugins'], {'data.source': 'a1'})
    self.write_a_number()
    workdirs.claim(self.workdir, as_dict(source='m:load'), digests={'data.source': 'a1'})
    with self.assertRaisesRegex(
        UserError, r"^[^\n]*config.data.source='m:load' has changed since[^\n]*$"
    ):
      workdirs.claim(self.workdir, as_dict(source='m:load'), digests={'data.source': 'b2'})

  def test_the_objective_behind_a_name_is_part_of_the_numbers(self):
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
    config = dataclasses.asdict(schema.Config(pipeline=schema.Pipeline(staleness=1)))
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


if __name__ == '__main__':
  absltest.main()
