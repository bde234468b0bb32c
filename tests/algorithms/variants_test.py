"""The table of variants: each row is what its paper says, and differs only where it should."""

import dataclasses
import functools

from absl.testing import absltest
from absl.testing import parameterized
import numpy as np

from stppo_jax.algorithms import correction
from stppo_jax.algorithms import variant as variant_lib
from stppo_jax.algorithms import variants
from stppo_jax.systems import parts

# name: (ratio level, has a critic, divides by the clipping bias)
EXPECTED = {
    'ppo': ('token', True, False),
    'turn_ppo': ('turn', True, False),
    's_ppo': ('token', True, True),
    'st_ppo': ('turn', True, True),
    'rs_ppo': ('token', True, True),
    'hl_gauss_ppo': ('token', True, False),
    'distillation': ('token', False, False),
    'grpo': ('token', False, False),
    'so_grpo': ('turn', False, True),
    'gspo': ('sequence', False, False),
    'dr_grpo': ('token', False, False),
    'cispo': ('token', False, False),
    'dppo': ('token', False, False),
    'reinforce_pp': ('token', False, False),
    'reinforce_pp_baseline': ('token', False, False),
    'rloo': ('none', False, False),
    'reinforce': ('none', False, False),
    'sppo': ('sequence_product', False, False),
    'rover': ('token', False, False),
    'dpo': ('token', False, False),
    'ipo': ('token', False, False),
    'tdpo': ('token', False, False),
    'apo': ('token', False, False),
    'p3o': ('token', False, False),
    'superhf': ('none', False, False),
    'ospo': ('token', False, False),
    'ppo_max': ('token', True, False),
    'grao': ('none', False, False),
}


class VariantsTest(parameterized.TestCase):

  def test_every_row_is_expected(self):
    self.assertEqual(EXPECTED.keys(), variants.VARIANTS.keys())

  @parameterized.parameters(*EXPECTED)
  def test_row(self, name):
    row = variants.VARIANTS[name]
    ratio, needs_critic, corrected = EXPECTED[name]
    self.assertEqual(row.ratio, ratio)
    self.assertEqual(row.needs_critic, needs_critic)
    self.assertEqual(row.divisor != 'none', corrected)
    self.assertIn(row.divisor, parts.BUILT_IN['divisor'])
    self.assertIn(row.advantage, parts.BUILT_IN['advantage'])
    self.assertIn(row.surrogate, parts.BUILT_IN['surrogate'])
    self.assertIn(row.norm_of, ('gradient', 'loss'))
    self.assertEqual(row.min_advantage, 'token')
    # A z-score would divide the KL of a group with equal scores by its own small spread.
    self.assertFalse(row.advantage == 'group_zscore' and row.kl_in == 'reward')
    self.assertFalse(row.kl_in == 'loss' and row.kl_estimator == 'k1')

  def test_description_does_not_depend_on_the_process(self):
    made = lambda: functools.partial(max, 0)  # its repr holds an address
    row = variants.Variant(made(), 'token', surrogate=made())
    again = variants.Variant(made(), 'token', surrogate=made())
    self.assertEqual(row.described(), again.described())
    grouped = dataclasses.replace(row, advantage=made())
    self.assertEqual(grouped.described()['advantage'], 'partial')

  @parameterized.parameters(*EXPECTED)
  def test_rows_are_frozen_and_hashable(self, name):
    row = variants.VARIANTS[name]
    with self.assertRaises(dataclasses.FrozenInstanceError):
      row.ratio = 'token'
    self.assertEqual(hash(row), hash(dataclasses.replace(row)))

  @parameterized.parameters(*EXPECTED)
  def test_clip_ranges(self, name):
    """0.2 but for GSPO, whose geometric mean over an episode is near 1: 3e-4 and 4e-4.

    CISPO has no lower bound (1 - 1), and DPPO's are of probabilities. OSPO's upper bound is 1.28.
    """
    row = variants.VARIANTS[name]
    others = {'gspo': (3e-4, 4e-4), 'cispo': (1.0, 0.2), 'dppo': (0.15, 0.15), 'ospo': (0.2, 0.28)}
    expected = others.get(name, (0.2, 0.2))
    np.testing.assert_allclose((row.clip_low, row.clip_high), expected)

  def test_every_name_has_its_part(self):
    for column, names in parts.BUILT_IN.items():
      for name, part in names.items():
        found = variants.Variant(**{column: name}).function(column)
        self.assertEqual(found is None, part is None, f'{column} {name}')
        if column not in ('ratio', 'objective'):
          with self.assertRaisesRegex(NotImplementedError, 'use variants.Variant'):
            variant_lib.BaseVariant(**{column: name}).function(column)

  def test_divisors_have_the_names_of_their_functions(self):
    for name, function in correction.DIVISORS.items():
      self.assertIs(variants.Variant(divisor=name).function('divisor'), function)
    self.assertEqual(correction.DIVISORS.keys(), parts.BUILT_IN['divisor'].keys())

  def test_unknown_name_lists_the_parts(self):
    with self.assertRaisesRegex(ValueError, "surrogate 'clop' is none of clip, cispo"):
      variants.Variant(surrogate='clop').function('surrogate')

  @parameterized.parameters(('ppo', 's_ppo'), ('turn_ppo', 'st_ppo'))
  def test_correction_is_the_only_difference(self, plain, corrected):
    plain, corrected = variants.VARIANTS[plain], variants.VARIANTS[corrected]
    self.assertEqual(
        dataclasses.replace(plain, divisor=corrected.divisor, norm_of=corrected.norm_of), corrected
    )

  @parameterized.parameters(('ppo', 'turn_ppo'), ('s_ppo', 'st_ppo'))
  def test_ratio_is_the_only_difference(self, token, turn):
    token, turn = variants.VARIANTS[token], variants.VARIANTS[turn]
    self.assertEqual(dataclasses.replace(token, ratio='turn'), turn)


if __name__ == '__main__':
  absltest.main()
