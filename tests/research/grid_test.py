"""The grid of a study: what is planned, in which order, and the error messages."""

import pathlib
import sys
import tempfile
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized

from research import study_stability
from research import study_toy
from research.study import grid
from research.study import results
from stppo_jax import config as schema
from stppo_jax.settings import validation
from stppo_jax.types import UserError

METHODS = {'ppo': {'algorithm.variant': 'ppo'}, 'st_ppo': {'algorithm.variant': 'st_ppo'}}


def study(**changes):
  options = dict(
      methods=METHODS, conditions={'calm': {}, 'harsh': {'train.epochs': 4}}, seeds=(3, 5)
  )
  return grid.Study({'system': grid.Grid(**options | changes)})


class PlanTest(parameterized.TestCase):

  def test_all_methods_run_the_first_seed_first(self):
    names = [job.name for job in grid.plan(study(), schema.Config())]
    groups = [f'system/{condition}/{name}' for condition in ('calm', 'harsh') for name in METHODS]
    self.assertEqual(names, [f'{group}/seed_{seed}' for seed in (3, 5) for group in groups])

  def test_run_gets_its_differences_as_flags(self):
    config = schema.Config()
    config.train.updates = 7  # the file's own, which the run reads itself
    methods = {'ppo': {'algorithm.variant': 'ppo', 'env.options': {'invalid_message': 'x'}}}
    methods['ppo'] |= {'train.mini_batch': 128}
    jobs = grid.plan(study(methods=methods, conditions={'harsh': {'train.epochs': 4}}), config)
    self.assertEqual(
        jobs[0].arguments,
        (
            '--config.name=system_harsh_ppo',
            '--config.seed=3',
            '--config.env.options={"invalid_message": "x"}',
            '--config.algorithm.variant=ppo',
            '--config.train.mini_batch=128',
            '--config.train.epochs=4',
        ),
    )
    self.assertEqual(jobs[0].updates, 7)

  def test_method_wins_over_condition_and_base(self):
    of = lambda **changes: grid.plan(study(**changes), schema.Config())[0].overrides['train.epochs']
    methods = {'ppo': {'train.epochs': 3}}
    conditions = {'calm': {'train.epochs': 2}}
    self.assertEqual(of(base={'train.epochs': 1}, methods=methods, conditions=conditions), 3)
    methods = {'ppo': {}}
    self.assertEqual(of(base={'train.epochs': 1}, methods=methods, conditions=conditions), 2)

  def test_only_selects_by_patterns(self):
    planned = lambda *only: [job.name for job in grid.plan(study(), schema.Config(), only=only)]
    self.assertLen(planned('system/calm/*'), 4)
    self.assertEqual(planned('*/calm/ppo'), [f'system/calm/ppo/seed_{s}' for s in (3, 5)])
    self.assertLen(planned('*/seed_5'), 4)
    with self.assertRaisesRegex(UserError, '--only=nix: no run'):
      planned('*/calm/ppo', 'nix')

  def test_digest_covers_what_changes_the_numbers(self):
    digest = lambda **values: grid.plan(study(), grid.changed(schema.Config(), values))[0].digest
    base = digest()
    self.assertEqual(digest(**{'name': 'other', 'train.checkpoint_every': 3}), base)
    for path, value in {'train.updates': 3, 'actor.lr': 1e-3, 'eval.every': 2}.items():
      self.assertNotEqual(digest(**{path: value}), base, path)
    other = grid.plan(study(score='val-core/all/won'), schema.Config())[0].digest
    self.assertNotEqual(other, base)

  @parameterized.parameters('system', 'toy')
  def test_digest_changes_with_source_name_and_score(self, task):
    folder = self.enterContext(tempfile.TemporaryDirectory())
    source = pathlib.Path(folder, f'two_ratios_{task}.py')
    self.enterContext(mock.patch.object(sys, 'path', [folder, *sys.path]))

    def digest(name='a', score='', factor=1):
      source.write_text(f'a = b = lambda batch, variant: {factor} * batch.turn_ids\n')
      methods = {'ppo': METHODS['ppo'] | {'algorithm.ratio': f'{source.stem}:{name}'}}
      made = study(methods=methods, seeds=(0, 1), task=task, score=score)
      return grid.plan(made, schema.Config())[0].digest

    digests = {digest(), digest(factor=100), digest(name='b'), digest(score='val-core/all/won')}
    self.assertLen(digests, 4)
    self.assertEqual(digest(score=grid.USUAL_SCORES[task]), digest())

  def test_digest_changes_with_the_weights(self):
    folder = self.enterContext(tempfile.TemporaryDirectory())
    for name in ('config.json', 'model.safetensors'):
      pathlib.Path(folder, name).write_bytes(b'{}')
    config = grid.changed(schema.Config(), {'model.folder': folder})
    before = grid.plan(study(), config)[0].digest
    pathlib.Path(folder, 'model.safetensors').write_bytes(b'[]')
    self.assertNotEqual(grid.plan(study(), config)[0].digest, before)

  def test_toy_task_has_one_job_for_all_seeds(self):
    methods = {'ppo': METHODS['ppo'] | {'toy.turns': 4}}
    jobs = grid.plan(study(methods=methods, seeds=tuple(range(64)), task='toy'), schema.Config())
    self.assertEqual([job.name for job in jobs], ['system/calm/ppo', 'system/harsh/ppo'])
    self.assertEqual(jobs[0].seeds, tuple(range(64)))
    self.assertEqual(jobs[0].overrides['toy.turns'], 4)

  @parameterized.parameters(
      ({'methods': METHODS | {'x': {'algorithm.variants': 'ppo'}}},
       ('study: system/calm/x', "'algorithm.variants'", 'did you mean algorithm.variant')),
      ({'methods': METHODS | {'x': {'algorithm.ratio': 'turns'}}},
       ('study: system/calm/x', "config.algorithm.ratio='turns'", 'sequence_product')),
      ({'conditions': {'calm': {}, 'harsh': {'train.mini_batch': 100}}},
       ('study: system/harsh/ppo', 'mini_batch=100', 'divisor')),
      ({'methods': METHODS | {'x': {'algorithm.variant': 'grpo'}}}, ('group_size=1',)),
      ({'methods': METHODS | {'x': 'ppo'}}, ("'x': 'ppo'", 'name -> overrides')),
      ({'methods': {}}, ('methods={}',)),
      ({'methods': METHODS | {'a/b': {}}}, ("'a/b'", 'folder')),
      ({'seeds': (1, 1)}, ('seeds=(1, 1)', 'different')),
      ({'task': 'piano'}, ("task='piano'", 'system, toy')),
      ({'task': 'toy', 'seeds': (0, 2)}, ('consecutive seeds',)),
      ({'baseline': 'pp'}, ("'pp' is no method", 'did you mean ppo')),
      ({'task': 'toy', 'seeds': (0, 1), 'methods': {'ppo': {'algorithm.ration': 1}}},
       ("'algorithm.ration'", 'algorithm.ratio')),
  )  # fmt: skip
  def test_error_names_the_method_and_the_setting(self, changes, words):
    with self.assertRaises(UserError) as caught:
      grid.plan(study(**changes), schema.Config())
    message = str(caught.exception)
    self.assertNotIn('\n', message)
    for word in words:
      self.assertIn(word, message)

  @parameterized.parameters(
      ('def get_config(mode=""): pass', 'has no get_study'),
      ('def get_config(mode=""): pass\ndef get_study(mode=""): return 1/0', 'ZeroDivisionError'),
      ('def get_config(mode=""): pass\ndef get_study(mode=""): return 7', 'returned 7'),
  )
  def test_file_without_a_study_is_an_error(self, text, words):
    with tempfile.TemporaryDirectory() as tmp:
      path = pathlib.Path(tmp, 'mine.py')
      path.write_text(text, encoding='utf-8')
      with self.assertRaisesRegex(UserError, words):
        grid.load(str(path))

  @parameterized.parameters('', 'quick', 'smoke')
  def test_stability_study_is_valid(self, mode):
    config = validation.validate(study_stability.get_config(mode))
    jobs = grid.plan(study_stability.get_study(mode), config)
    self.assertLen({job.name for job in jobs}, len(jobs))
    for job in jobs:  # A method is what its name says, whatever the variant of the file.
      self.assertIn('algorithm.variant', job.overrides, job.name)
    if mode == 'quick':
      published = results.planned(jobs, results.read(study_stability.RESULTS))
      self.assertLen(published, len(jobs))

  def test_toy_study_is_valid(self):
    jobs = grid.plan(study_toy.get_study('smoke'), study_toy.get_config('smoke'))
    self.assertLen(jobs, 1)


if __name__ == '__main__':
  absltest.main()
