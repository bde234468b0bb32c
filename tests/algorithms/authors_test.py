"""Losses against the numbers of the authors' code, on the same small inputs.

`authors.json` holds, for each system, the repository, its commit and file, the inputs, and the
numbers that the authors' functions gave in float64. Rows of a group of two are the better and the
worse sample. Gradients are those of the loss to descend.
"""

import dataclasses
import json
import pathlib

from absl.testing import absltest
from absl.testing import parameterized
import jax
import jax.numpy as jnp
import numpy as np

from stppo_jax import types
from stppo_jax.algorithms import advantages
from stppo_jax.algorithms import correction
from stppo_jax.algorithms import losses
from stppo_jax.algorithms import objectives
from stppo_jax.algorithms import variants
from stppo_jax.systems import dars
from stppo_jax.systems import hl_gauss
from stppo_jax.systems import superhf
from stppo_jax.systems import tdpo

DATA = pathlib.Path(__file__).with_name('authors.json')


class AuthorsTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.enter_context(jax.enable_x64(True))
    self.data = json.loads(DATA.read_text())

  def load(self, name):
    """Returns (inputs, numbers) of a system as arrays."""
    entry = self.data[name]
    as_arrays = lambda values: {key: jnp.asarray(value) for key, value in values.items()}
    return as_arrays(entry['inputs']), as_arrays(entry['numbers'])

  def test_hyper_pp(self):
    inputs, numbers = self.load('hyper++')
    low, high = float(inputs['low']), float(inputs['high'])
    row = variants.Variant(value_loss='hl_gauss', value_low=low, value_high=high, value_clip=0.0)
    targets = hl_gauss.gaussian_targets(inputs['returns'], low, high, 9)
    np.testing.assert_allclose(targets, numbers['targets'], atol=1e-9)
    logits = inputs['logits'][None]
    np.testing.assert_allclose(hl_gauss.values(logits, row)[0], numbers['values'], atol=1e-9)

    def loss_of(logits):
      returns = inputs['returns'][None]
      return hl_gauss.loss(logits, returns, returns, row).mean()

    loss, gradient = jax.value_and_grad(loss_of)(logits)
    np.testing.assert_allclose(loss, numbers['loss'], rtol=1e-9)
    np.testing.assert_allclose(gradient[0], numbers['d_logits'], atol=1e-9)

  def make_batch(self, inputs, row):
    """Returns the batch of the inputs, its scores on the last tokens, with the row's advantages."""
    mask = inputs['action_mask']
    columns = jnp.arange(mask.shape[1])
    is_last = columns == jnp.max(columns * mask, axis=1, keepdims=True)
    zeros = jnp.zeros(mask.shape)
    batch = types.TurnBatch(
        tokens=zeros.astype(jnp.int32),
        action_mask=mask.astype(float),
        turn_ids=mask,
        rewards=inputs['scores'][:, None] * is_last,
        old_logp=inputs.get('old_logp', zeros),
        ref_logp=inputs.get('ref_logp', zeros),
        old_values=zeros,
        advantages=zeros,
        returns=zeros,
        group_ids=inputs['group_ids'],
        old_uniform=inputs.get('old_uniform'),
    )
    return advantages.estimate(batch, row)

  def check_objective(self, inputs, row, loss, d_logp):
    """Compares the loss of a row that compares rows, and its gradient."""
    batch = self.make_batch(inputs, row)
    outputs = objectives.TokenOutputs(inputs['logp'], uniform=inputs.get('uniform'))
    result = objectives.cotangents(outputs, batch, row)
    np.testing.assert_allclose(result.pg_loss, loss, rtol=1e-7)
    np.testing.assert_allclose(result.outputs.logp, d_logp, atol=1e-8)

  def test_sppo(self):
    inputs, numbers = self.load('sppo')
    row = dataclasses.replace(variants.VARIANTS['sppo'], beta=1 / float(inputs['eta']))
    batch = self.make_batch(inputs, row)
    d_logp, _, parts = correction.cotangents(inputs['logp'], batch, row)
    np.testing.assert_allclose(parts['pg_loss'], numbers['loss'], rtol=1e-8)
    np.testing.assert_allclose(d_logp, numbers['d_logp'], atol=1e-8)

  @parameterized.parameters('dpo', 'ipo')
  def test_pairs(self, name):
    inputs, numbers = self.load(name)
    row = dataclasses.replace(variants.VARIANTS[name], beta=float(inputs['beta']))
    self.check_objective(inputs, row, numbers['loss'], numbers['d_logp'])

  def test_tdpo(self):
    inputs, numbers = self.load('tdpo')
    row = variants.VARIANTS['tdpo']
    row = dataclasses.replace(row, beta=float(inputs['beta']), alpha=float(inputs['alpha']))
    tokens = inputs['tokens'][:, 1:, None]
    ref = jax.nn.log_softmax(inputs['ref_logits'])[:, :-1]
    to_columns = lambda x: jnp.pad(x, ((0, 0), (1, 0)))  # logits of column t are for token t + 1
    ref_logp = to_columns(jnp.take_along_axis(ref, tokens, axis=2)[..., 0])
    batch = self.make_batch(inputs | {'ref_logp': ref_logp}, row)

    def loss_of(logits):
      logp = jax.nn.log_softmax(logits)[:, :-1]
      kl = jnp.sum(jnp.exp(ref) * (ref - logp), axis=-1)
      chosen = jnp.take_along_axis(logp, tokens, axis=2)[..., 0]
      outputs = objectives.TokenOutputs(to_columns(chosen), reference_kl=to_columns(kl))
      return -tdpo.tdpo(outputs, batch, row)[0].sum()

    loss, gradient = jax.value_and_grad(loss_of)(inputs['logits'])
    np.testing.assert_allclose(loss, numbers['loss_2'], rtol=1e-7)
    np.testing.assert_allclose(gradient, numbers['d_logits_2'], atol=1e-8)

  def test_rover(self):
    inputs, numbers = self.load('rover')
    row = dataclasses.replace(variants.VARIANTS['rover'], alpha=float(inputs['beta']))
    self.check_objective(inputs, row, numbers['loss_full'], numbers['d_logp_full'])
    mean_logp = jax.nn.log_softmax(inputs['logits']).mean(axis=-1)
    np.testing.assert_allclose(mean_logp, numbers['mean_logp'], atol=1e-6)
    short = dataclasses.replace(row, objective='surrogate')
    batch = self.make_batch(inputs, short)
    weights = losses.aggregation_weights(batch.action_mask, 'token-mean')
    d_logp, _, parts = correction.cotangents(inputs['logp'], batch, short, weights)
    np.testing.assert_allclose(parts['pg_loss'], numbers['loss_target_adv_only'], rtol=1e-7)
    np.testing.assert_allclose(d_logp, numbers['d_logp_target_adv_only'], atol=1e-8)

  def test_dars(self):
    entry = self.data['dars']
    for rule in ('ET', 'HW'):
      for most in entry['inputs']['n_max']:
        rows = [
            min(dars.wanted_rows(a, 8, f'dars_{rule.lower()}'), most - 8)
            for a in entry['inputs']['means']
        ]
        self.assertEqual(rows, entry['numbers'][f'{rule}_{most}'])

  def test_superhf_keeps_the_first_best(self):
    inputs, numbers = self.load('superhf')
    best = superhf.group_best(inputs['scores'], jnp.zeros(4, jnp.int32))
    np.testing.assert_array_equal(jnp.flatnonzero(best), numbers['kept'])

  def test_ospo(self):
    inputs, numbers = self.load('ospo')
    row = variants.VARIANTS['ospo']
    ones = jnp.ones((4, 1), jnp.int32)
    columns = {name: inputs[name][:, None] for name in ('logp', 'old_logp')}
    columns |= {'action_mask': ones, 'group_ids': jnp.zeros(4, jnp.int32)}
    batch = self.make_batch(columns | {'scores': inputs['rewards']}, row)
    # The authors divide by the deviation of the population, and `group_zscore` by the sample's.
    authors = batch.advantages * (4 / 3) ** 0.5
    np.testing.assert_allclose(authors[:, 0], numbers['advantages'], rtol=1e-5)
    batch = dataclasses.replace(batch, advantages=numbers['advantages'][:, None])
    d_logp, _, parts = correction.cotangents(columns['logp'], batch, row)
    np.testing.assert_allclose(parts['pg_loss'], numbers['loss'], rtol=1e-8)
    np.testing.assert_allclose(d_logp[:, 0], numbers['d_logp'], atol=1e-8)

  def test_losses_of_ppo_max(self):
    inputs, numbers = self.load('ppo_max')
    mask = inputs['action_mask']

    def policy_loss(logp):
      ratio = jnp.exp((logp - inputs['old_logp']) * mask)
      surrogate, _ = losses.clipped_surrogate(ratio, inputs['advantages'], 0.2, 0.2)
      return -losses.aggregate(surrogate, mask, 'token-mean')

    def value_loss(values):
      loss = losses.value_loss(values, inputs['old_values'], inputs['returns'], 0.2)
      return losses.aggregate(loss, mask, 'token-mean')

    loss, gradient = jax.value_and_grad(policy_loss)(inputs['logp'])
    np.testing.assert_allclose(loss, numbers['pg_loss'], rtol=1e-8)
    np.testing.assert_allclose(gradient, numbers['d_logp'], atol=1e-8)
    loss, gradient = jax.value_and_grad(value_loss)(inputs['values'])
    np.testing.assert_allclose(loss, numbers['vf_loss'], rtol=1e-8)
    np.testing.assert_allclose(gradient, numbers['d_values'], atol=1e-8)


if __name__ == '__main__':
  absltest.main()
