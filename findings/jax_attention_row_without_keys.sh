#!/usr/bin/env bash
set -euo pipefail
# Expected: a query that may see no key gets 0, as in scaled_dot_product_attention of torch 2.13.0, or
#   NaN. A sequence with key_value_seq_lengths=0 does not depend on its padding.
# Happens: jax.nn.dot_product_attention returns the mean of all values, masked and padded ones
#   included, and sends them a gradient. With key_value_seq_lengths=0 the result follows the padding.
# Versions: jax 0.10.2, numpy 2.4.6
# Output seen:
#   mask of one query all False: [1. 1.], gradient of the masked values [0.333 0.333 0.333]
#   key_value_seq_lengths=0, padding 0, 1, 2: [1. 1.], padding 0, 1, 1000: [333.667 333.667]
# Seen on: 2026-11-29, Python 3.11, CPU

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check 'jax==0.10.2' 'numpy==2.4.6'
cd "$folder"
JAX_PLATFORMS=cpu "$folder/venv/bin/python" - <<'PYTHON'
import jax
import jax.numpy as jnp
import numpy as np

query = jnp.ones((1, 2, 1, 4))  # [batch, queries, heads, channels]
key = jax.random.normal(jax.random.key(0), (1, 3, 1, 4))
values = lambda *numbers: jnp.tile(jnp.array(numbers, jnp.float32)[None, :, None, None], (1, 1, 1, 4))
show = lambda x: np.asarray(x).round(3)

mask = jnp.array([[[[False, False, False], [True, False, False]]]])
masked = lambda value: jax.nn.dot_product_attention(query, key, value, mask=mask)
result = masked(values(0, 1, 2))[0, 0, 0, :2]
gradient = jax.grad(lambda value: masked(value)[0, 0, 0, 0])(values(0, 1, 2))[0, :, 0, 0]
print(f'mask of one query all False: {show(result)}, gradient of the masked values {show(gradient)}')

lengths = jnp.array([0])
padded = lambda value: jax.nn.dot_product_attention(query, key, value, key_value_seq_lengths=lengths)
small, large = (padded(values(0, 1, last))[0, :, 0, 0] for last in (2, 1000))
print(f'key_value_seq_lengths=0, padding 0, 1, 2: {show(small)}, padding 0, 1, 1000: {show(large)}')

assert np.allclose(result, 1) and np.allclose(gradient, 1 / 3), 'a row without keys is no mean now'
assert np.allclose(small, 1) and np.allclose(large, 1001 / 3), 'padding is ignored now'
PYTHON
