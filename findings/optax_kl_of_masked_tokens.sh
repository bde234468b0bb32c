#!/usr/bin/env bash
set -euo pipefail
# Expected: A token that is masked with a logit of -inf has probability 0 in both distributions, so
#   it adds nothing to a KL divergence or a cross entropy. distrax and rlax compute it so.
# Happens: optax's kl_divergence, kl_divergence_with_log_targets and softmax_cross_entropy return
#   NaN. The gradients of kl_divergence and softmax_cross_entropy are right, so training goes on
#   while the logged loss is NaN.
# Versions: optax 0.2.8, distrax 0.1.9, rlax 0.1.9, jax 0.10.2
# Output seen:
#   distrax KL 0.1201, rlax KL 0.1201
#   optax.kl_divergence: nan, largest error of its gradient 0.0
#   optax.softmax_cross_entropy: nan, largest error of its gradient 0.0
#   optax.kl_divergence_with_log_targets: nan
# Seen on: 2026-11-30, Python 3.11, CPU

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check \
  'optax==0.2.8' 'distrax==0.1.9' 'rlax==0.1.9' 'jax==0.10.2' 'jaxlib==0.10.2'
cd "$folder"
JAX_PLATFORMS=cpu "$folder/venv/bin/python" -W ignore - <<'PYTHON'
import distrax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import rlax

logits = jnp.array([0.0, 1.0, -jnp.inf])  # the third token is masked
target = jnp.array([0.5, 0.5, 0.0])
log_target = jnp.log(target)
other = distrax.Categorical(logits=log_target)
by_distrax = float(other.kl_divergence(distrax.Categorical(logits=logits)))
by_rlax = float(rlax.categorical_kl_divergence(log_target, logits))
print(f'distrax KL {by_distrax:.4f}, rlax KL {by_rlax:.4f}')
by_hand = -0.5 * np.log(4 * 0.731059 * 0.268941)
np.testing.assert_allclose([by_distrax, by_rlax], by_hand, rtol=1e-4)
losses = {
    'kl_divergence': lambda x: optax.kl_divergence(jax.nn.log_softmax(x), target),
    'softmax_cross_entropy': lambda x: optax.softmax_cross_entropy(x, target),
}
for name, loss in losses.items():
  value = float(loss(logits))
  error = float(jnp.abs(jax.grad(loss)(logits) - (jax.nn.softmax(logits) - target)).max())
  print(f'optax.{name}: {value}, largest error of its gradient {error:.1f}')
  assert np.isnan(value) and error < 1e-6, f'{name} differs now'
value = float(
    optax.losses.kl_divergence_with_log_targets(jax.nn.log_softmax(logits), log_target)
)
print(f'optax.kl_divergence_with_log_targets: {value}')
assert np.isnan(value), 'kl_divergence_with_log_targets differs now'
PYTHON
