"""The grid of a study: what is planned, in which order, and how mistakes are told."""

import pathlib
import sys
import tempfile
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized

from research import study_mechanism
from research import study_stability
from research.study import grid
from research.study import results
from research.toy import cell
from stppo_jax import config as schema
from stppo_jax import validation
from stppo_jax.types import UserError

CELLS = {'ppo': {'algorithm.variant': 'ppo'}, 'st_ppo': {'algorithm.variant': 'st_ppo'}}


def study(**changes):
  options = dict(cells=CELLS, regimes={'calm': {}, 'harsh': {'train.epochs': 4}}, seeds=(3, 5))
  return grid.Study({'system': grid.Grid(**options | changes)})


class PlanTest(parameterized.TestCase):

  def test_every_cell_has_its_first_seed_before_any_has_its_second(self):
    names = [job.name for job in grid.plan(study(), schema.Config())]
    cells = [f'system/{regime}/{cell}' for regime in ('calm', 'harsh') for cell in CELLS]
    self.assertEqual(names, [f'{cell}/seed_{seed}' for seed in (3, 5) for cell in cells])

  def test_a_run_is_given_its_differences_from_the_files_config(self):
    config = schema.Config()
    config.train.updates = 7  # the file's own, which the run reads itself
    cells = {'ppo': {'algorithm.variant': 'ppo', 'env.options': {'observation': 'x'}}}
    cells['ppo'] |= {'train.mini_batch': 128}
    jobs = grid.plan(study(cells=cells, regimes={'harsh': {'train.epochs': 4}}), config)
    self.assertEqual(
        jobs[0].arguments,
        (
            '--config.name=system_harsh_ppo',
            '--config.seed=3',
            '--config.env.options={"observation": "x"}',
            '--config.algorithm.variant=ppo',
            '--config.train.mini_batch=128',
            '--config.train.epochs=4',
        ),
    )
    self.assertEqual(jobs[0].updates, 7)

  def test_a_cell_wins_over_its_regime_and_both_over_the_base(self):
    of = lambda **changes: grid.plan(study(**changes), schema.Config())[0].overrides['train.epochs']
    cells = {'ppo': {'train.epochs': 3}}
    regimes = {'calm': {'train.epochs': 2}}
    self.assertEqual(of(base={'train.epochs': 1}, cells=cells, regimes=regimes), 3)
    cells = {'ppo': {}}
    self.assertEqual(of(base={'train.epochs': 1}, cells=cells, regimes=regimes), 2)

  def test_only_chooses_by_patterns_of_run_or_cell(self):
    planned = lambda *only: [job.name for job in grid.plan(study(), schema.Config(), only=only)]
    self.assertLen(planned('system/calm/*'), 4)
    self.assertEqual(planned('*/calm/ppo'), [f'system/calm/ppo/seed_{s}' for s in (3, 5)])
    self.assertLen(planned('*/seed_5'), 4)
    with self.assertRaisesRegex(UserError, '--only=nix: no run'):
      planned('*/calm/ppo', 'nix')

  def test_the_digest_is_of_what_a_runs_numbers_depend_on(self):
    digest = lambda **values: grid.plan(study(), grid.changed(schema.Config(), values))[0].digest
    base = digest()
    self.assertEqual(digest(**{'name': 'other', 'train.checkpoint_every': 3}), base)
    for path, value in {'train.updates': 3, 'actor.lr': 1e-3, 'eval.every': 2}.items():
      self.assertNotEqual(digest(**{path: value}), base, path)
    other = grid.plan(study(score='val-core/all/won'), schema.Config())[0].digest
    self.assertNotEqual(other, base)

  def test_the_digest_changes_with_the_source_of_a_plugin(self):
    folder = self.enterContext(tempfile.TemporaryDirectory())
    source = pathlib.Path(folder, 'a_changing_module.py')
    self.enterContext(mock.patch.object(sys, 'path', [folder, *sys.path]))
    digests = []
    for factor in (1, 100):
      source.write_text(f'reward = lambda task, answer, transcript: {factor}.0\n', encoding='utf-8')
      config = grid.changed(schema.Config(), {'env.reward': 'a_changing_module:reward'})
      digests.append(grid.plan(study(), config)[0].digest)
    self.assertNotEqual(*digests)

  def test_so_does_that_of_the_mechanism(self):
    folder = self.enterContext(tempfile.TemporaryDirectory())
    source = pathlib.Path(folder, 'a_changing_ratio.py')
    self.enterContext(mock.patch.object(sys, 'path', [folder, *sys.path]))
    own = {'ppo': CELLS['ppo'] | {'algorithm.ratio': 'a_changing_ratio:labels'}}
    made, digests = study(cells=own, seeds=(0, 1), instrument='mechanism'), []
    for factor in (1, 100):
      source.write_text(f'labels = lambda batch, variant: {factor} * batch.turn_ids\n')
      digests.append(grid.plan(made, schema.Config())[0].digest)
    self.assertNotEqual(*digests)

  @parameterized.parameters('system', 'mechanism')
  def test_the_digest_changes_with_the_function_and_with_the_score(self, instrument):
    folder = self.enterContext(tempfile.TemporaryDirectory())
    source = pathlib.Path(folder, f'two_ratios_{instrument}.py')
    source.write_text('a = b = lambda batch, variant: batch.turn_ids\n')
    self.enterContext(mock.patch.object(sys, 'path', [folder, *sys.path]))

    def digest(name, score):
      cells = {'ppo': CELLS['ppo'] | {'algorithm.ratio': f'{source.stem}:{name}'}}
      made = study(cells=cells, seeds=(0, 1), instrument=instrument, score=score)
      return grid.plan(made, schema.Config())[0].digest

    cases = [('a', 'val-core/all/em'), ('b', 'val-core/all/em'), ('a', 'mechanism/success')]
    self.assertLen({digest(*case) for case in cases}, 3)

  def test_the_digest_changes_with_the_weights(self):
    folder = self.enterContext(tempfile.TemporaryDirectory())
    for name in ('config.json', 'model.safetensors'):
      pathlib.Path(folder, name).write_bytes(b'{}')
    config = grid.changed(schema.Config(), {'model.folder': folder})
    before = grid.plan(study(), config)[0].digest
    pathlib.Path(folder, 'model.safetensors').write_bytes(b'[]')
    self.assertNotEqual(grid.plan(study(), config)[0].digest, before)

  def test_the_mechanism_has_one_job_per_cell_for_all_seeds(self):
    cells = {'ppo': CELLS['ppo'] | {'mechanism.turns': 4}}
    jobs = grid.plan(
        study(cells=cells, seeds=tuple(range(64)), instrument='mechanism'), schema.Config()
    )
    self.assertEqual([job.name for job in jobs], ['system/calm/ppo', 'system/harsh/ppo'])
    self.assertEqual(jobs[0].seeds, tuple(range(64)))
    self.assertEqual(jobs[0].overrides['mechanism.turns'], 4)

  @parameterized.parameters(
      ({'cells': CELLS | {'x': {'algorithm.variants': 'ppo'}}},
       ('study: system/calm/x', "'algorithm.variants'", 'did you mean algorithm.variant')),
      ({'cells': CELLS | {'x': {'variant': 'ppo'}}}, ("'variant'", 'algorithm.variant')),
      ({'cells': CELLS | {'x': {'algorithm.ratio': 'turns'}}},
       ('study: system/calm/x', "config.algorithm.ratio='turns'", 'sequence_product')),
      ({'cells': CELLS | {'x': {'actor.lr': '2e-4'}}}, ("config.actor.lr='2e-4'", 'float')),
      ({'regimes': {'calm': {}, 'harsh': {'train.mini_batch': 100}}},
       ('study: system/harsh/ppo', 'mini_batch=100', 'divisor')),
      ({'cells': CELLS | {'x': {'algorithm.variant': 'pppo'}}}, ("'pppo'", 'ppo')),
      ({'cells': CELLS | {'x': {'algorithm.variant': 'grpo'}}}, ('group_size=1',)),
      ({'cells': CELLS | {'x': 'ppo'}}, ("cells['x']='ppo'", 'path -> value')),
      ({'cells': {}}, ('cells={}',)),
      ({'cells': CELLS | {'a/b': {}}}, ("'a/b'", 'folder')),
      ({'seeds': ()}, ('seeds=()',)),
      ({'seeds': (1, 1)}, ('seeds=(1, 1)', 'no two equal')),
      ({'seeds': (0.5,)}, ('seeds=(0.5,)',)),
      ({'instrument': 'piano'}, ("instrument='piano'", 'system, mechanism')),
      ({'instrument': 'mechanism', 'seeds': (0, 2)}, ('takes a range',)),
      ({'baseline': 'pp'}, ("baseline='pp'", 'did you mean ppo')),
      ({'instrument': 'mechanism', 'seeds': (0, 1), 'cells': {'ppo': {'algorithm.ration': 1}}},
       ("'algorithm.ration'", 'algorithm.ratio')),
  )  # fmt: skip
  def test_a_mistake_in_any_cell_is_one_line_before_anything_starts(self, changes, words):
    with self.assertRaises(UserError) as caught:
      grid.plan(study(**changes), schema.Config())
    message = str(caught.exception)
    self.assertNotIn('\n', message)
    for word in words:
      self.assertIn(word, message)

  def test_a_misspelt_field_of_a_grid_is_named(self):
    made = study()
    with self.assertRaisesRegex(UserError, "no setting 'seed'.*seeds"):
      made.grids['system'].seed = (1,)

  @parameterized.parameters(
      ('def get_config(mode=""): pass', 'has no get_study'),
      ('def get_config(mode=""): pass\ndef get_study(mode=""): return 1/0', 'ZeroDivisionError'),
      ('def get_config(mode=""): pass\ndef get_study(mode=""): return 7', 'returned 7'),
  )
  def test_a_file_without_a_study_is_told(self, text, words):
    with tempfile.TemporaryDirectory() as tmp:
      path = pathlib.Path(tmp, 'mine.py')
      path.write_text(text, encoding='utf-8')
      with self.assertRaisesRegex(UserError, words):
        grid.load(str(path))

  @parameterized.product(study=(study_stability, study_mechanism), mode=('', 'quick', 'smoke'))
  def test_the_two_studies_are_valid(self, study, mode):
    config = validation.validate(study.get_config(mode))
    jobs = grid.plan(study.get_study(mode), config, check_mechanism=cell.make)
    self.assertLen({job.name for job in jobs}, len(jobs))
    self.assertLen({job.digest for job in jobs}, len(jobs))  # no two cells are the same run
    for job in jobs:  # a cell is what its name says, whatever the file's own variant
      self.assertIn('algorithm.variant', job.overrides, job.name)

  def test_the_short_form_repeats_published_runs(self):
    short = study_stability.get_study('quick')
    jobs = grid.plan(short, study_stability.get_config('quick'), check_mechanism=cell.make)
    published = results.unchanged(jobs, results.read(short.published))
    self.assertLen(published, len(jobs))
    whole = grid.plan(study_stability.get_study(), study_stability.get_config())
    share = sum(len(job.seeds) for job in jobs) / sum(len(job.seeds) for job in whole)
    self.assertBetween(share, 0.2, 0.3)


if __name__ == '__main__':
  absltest.main()
