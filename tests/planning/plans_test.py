"""The table of plans in docs/scaling.md is the one that today's planner prints."""

import dataclasses
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized
import pytest

from benchmarks import contexts
from benchmarks import plans
from stppo_jax.planning import plan as plan_lib
from stppo_jax.types import UserError

RECORDS = plans.read()
ROWS = [row for row in plans.ROWS if row.name in RECORDS]


class ContextsTest(absltest.TestCase):

  def test_page_has_the_plans_of_long_rows(self):
    records = contexts.read(contexts.ROOT / 'benchmarks' / 'contexts.jsonl')
    page = plans.PAGE.read_text(encoding='utf-8')
    for line in contexts.table(records).splitlines():
      if line.startswith('|'):
        self.assertIn(line + '\n', page)
    by_context = {record['context']: record for record in records if 'h100' in record['topology']}
    _, rest = contexts.fit(list(by_context.values()))
    activations = {n: record['temporaries'] - rest for n, record in by_context.items()}
    self.assertGreater(activations[1] / activations[4], 3)
    self.assertTrue(by_context[8]['fits'])


class TableTest(parameterized.TestCase):

  def test_page_has_the_planners_table(self):
    (printed,) = plans.TABLE.findall(plans.PAGE.read_text(encoding='utf-8'))
    self.assertEqual(printed, plans.table(RECORDS))

  def test_every_row_is_recorded(self):
    self.assertCountEqual(RECORDS, [row.name for row in plans.ROWS])

  def test_changed_formula_changes_the_table(self):
    """Headroom decides what fits. On a TPU it is a limit of the compiler, too."""
    tpu, gpu, *_ = ROWS
    with mock.patch.object(plan_lib, 'HEADROOM', 0.3):
      self.assertIn('82%, does not fit', plans.cells(gpu, plans.recorded(RECORDS, gpu)))
      with self.assertRaisesRegex(UserError, 'benchmarks.plans --compile'):
        plans.recorded(RECORDS, tpu)

  def test_changed_sizes_have_no_record(self):
    row, *_ = ROWS
    shorter = ('rollout.max_total=3072', 'train.length_buckets=(1024,3072)')
    for settings in (('train.micro_batch=128',), ('rollout.width=128',), shorter):
      other = row._replace(settings=settings)
      records = RECORDS | {other.name: RECORDS[row.name]}
      with self.assertRaisesRegex(UserError, 'benchmarks.plans --compile'):
        plans.recorded(records, other)

  @parameterized.parameters(*ROWS)
  @pytest.mark.slow
  def test_programs_have_the_recorded_shapes(self, *row):
    """What the compilers were given: shapes, and FLOPs of the traced programs."""
    row = plans.Row(*row)
    plan = plans.recorded(RECORDS, row)
    for program in plan.programs:
      record = RECORDS[row.name]['programs'][program.name]
      counted = dataclasses.replace(program)
      counted.count_flops()
      self.assertEqual(plans.traced(counted), record['traced'], program.name)
      self.assertEqual(counted.flops, record['flops'], program.name)


if __name__ == '__main__':
  absltest.main()
