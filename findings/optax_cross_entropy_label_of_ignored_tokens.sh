#!/usr/bin/env bash
set -euo pipefail
# Expected: -100 marks the tokens that a loss ignores, as the data collators of transformers write
#   it and torch reads it. optax's cross entropy, which takes integer labels and has no such
#   argument, ignores these tokens or refuses the label.
# Happens: A negative label counts from the end of the vocabulary. With Qwen's 151,936 tokens, -100
#   is token 151,836: the loss is finite, and its gradient teaches the model to write that token on
#   every place that was to be ignored. With fewer than 100 tokens the loss is NaN.
# Versions: optax 0.2.8, jax 0.10.2
# Output seen:
#   151936 tokens, label -100: loss 11.9312, that of token 151836: 11.9312
#   the gradient raises logit 151836: True
#   50 tokens, label -100: loss nan
# Seen on: 2026-11-29, Python 3.11, CPU

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check 'optax==0.2.8' 'jax==0.10.2'
cd "$folder"
JAX_PLATFORMS=cpu "$folder/venv/bin/python" - <<'PYTHON'
import jax
import jax.numpy as jnp
import optax

IGNORED = -100
size = 151936  # of Qwen2.5
loss = optax.softmax_cross_entropy_with_integer_labels
logits = jnp.zeros(size)
ignored, last = (float(loss(logits, jnp.array(label))) for label in (IGNORED, size + IGNORED))
print(f'{size} tokens, label {IGNORED}: loss {ignored:g}, that of token {size + IGNORED}: {last:g}')
slope = jax.grad(lambda x: loss(x, jnp.array(IGNORED)))(logits)
is_taught = bool(jnp.argmin(slope) == size + IGNORED)
print(f'the gradient raises logit {size + IGNORED}: {is_taught}')
few = float(loss(jnp.zeros(50), jnp.array(IGNORED)))
print(f'50 tokens, label {IGNORED}: loss {few}')
assert ignored == last and is_taught, 'negative labels are treated otherwise now'
assert few != few, 'a label out of range gives a number now'
PYTHON
