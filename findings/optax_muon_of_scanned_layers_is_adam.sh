#!/usr/bin/env bash
set -euo pipefail
# Expected: Scanning equal layers (flax's nn.scan) changes the time to compile and no number, so
#   optax.contrib.muon moves each layer's matrix as it moves the same matrix without a scan.
# Happens: The scan stacks the matrices to an array of three axes. muon treats only arrays of two
#   axes as matrices, so all layers are updated by AdamW, without a word. With
#   muon_weight_dimension_numbers that name the two axes, the steps are muon's.
# Versions: optax 0.2.8, flax 0.12.7, jax 0.10.2
# Output seen:
#   layers apart: singular values of the step 0.25 to 1.20
#   layers scanned: singular values of the step 0.00 to 21.23
#   layers scanned, axes named: singular values of the step 0.25 to 1.20
# Seen on: 2026-11-30, Python 3.11, CPU

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check \
  'optax==0.2.8' 'flax==0.12.7' 'jax==0.10.2' 'jaxlib==0.10.2'
cd "$folder"
JAX_PLATFORMS=cpu "$folder/venv/bin/python" -W ignore - <<'PYTHON'
from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

WIDTH, LAYERS = 32, 4


class Layer(nn.Module):

  @nn.compact
  def __call__(self, x, _=None):
    return x + nn.tanh(nn.Dense(WIDTH, use_bias=False)(x)), None


scanned = nn.scan(
    Layer, variable_axes={'params': 0}, split_rngs={'params': True}, length=LAYERS
)()
x = jax.random.normal(jax.random.key(0), (64, WIDTH))
stacked = scanned.init(jax.random.key(1), x)['params']
kernel = stacked['Dense_0']['kernel']
assert kernel.shape == (LAYERS, WIDTH, WIDTH)
target = jax.random.normal(jax.random.key(2), x.shape)


def scanned_loss(params):
  return ((scanned.apply({'params': params}, x)[0] - target) ** 2).sum()


def apart_loss(layers):
  y = x
  for kernel in layers:
    y, _ = Layer().apply({'params': {'Dense_0': {'kernel': kernel}}}, y)
  return ((y - target) ** 2).sum()


def step(loss, params, **settings):
  tx = optax.contrib.muon(1.0, weight_decay=0.0, **settings)
  gradient = jax.grad(loss)(params)
  updates, _ = tx.update(gradient, tx.init(params), params)
  return gradient, updates


layers = list(kernel)
apart_gradient, apart = step(apart_loss, layers)
gradient, together = step(scanned_loss, stacked)
axes = optax.contrib.MuonDimensionNumbers(reduction_axis=1, output_axis=2)
numbers = jax.tree.map(lambda _: axes, stacked)
_, named = step(scanned_loss, stacked, muon_weight_dimension_numbers=numbers)
np.testing.assert_allclose(
    gradient['Dense_0']['kernel'], jnp.stack(apart_gradient), rtol=1e-4, atol=1e-4
)
steps = {
    'layers apart': jnp.stack(apart),
    'layers scanned': together['Dense_0']['kernel'],
    'layers scanned, axes named': named['Dense_0']['kernel'],
}
ranges = {}
for name, update in steps.items():
  values = np.linalg.svd(np.asarray(update), compute_uv=False)
  ranges[name] = values.min(), values.max()
  print(f'{name}: singular values of the step {values.min():.2f} to {values.max():.2f}')
np.testing.assert_allclose(steps['layers apart'], steps['layers scanned, axes named'], atol=1e-3)
assert ranges['layers apart'][1] < 1.3 and ranges['layers scanned'][1] > 5, 'muon differs now'
PYTHON
