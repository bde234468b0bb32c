"""Losses against the numbers of the authors' code, on the same small inputs.

`data/authors.json` holds, for each system, the repository, its commit and file, the inputs, and the
numbers that the authors' functions gave in float64. Rows of a group of two are the better and the
worse sample. Gradients are those of the loss to descend.
"""

import json
import pathlib

from absl.testing import absltest
import jax
import jax.numpy as jnp
import numpy as np

from stppo_jax.algorithms import value_bins
from stppo_jax.algorithms import variants

DATA = pathlib.Path(__file__).parent / 'data' / 'authors.json'


class AuthorsTest(absltest.TestCase):

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
    targets = value_bins.gaussian_targets(inputs['returns'], low, high, 9)
    np.testing.assert_allclose(targets, numbers['targets'], atol=1e-9)
    logits = inputs['logits'][None]
    np.testing.assert_allclose(value_bins.values(logits, row)[0], numbers['values'], atol=1e-9)

    def loss_of(logits):
      returns = inputs['returns'][None]
      return value_bins.loss(logits, returns, returns, row).mean()

    loss, gradient = jax.value_and_grad(loss_of)(logits)
    np.testing.assert_allclose(loss, numbers['loss'], rtol=1e-9)
    np.testing.assert_allclose(gradient[0], numbers['d_logits'], atol=1e-9)


if __name__ == '__main__':
  absltest.main()
