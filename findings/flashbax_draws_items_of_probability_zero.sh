#!/usr/bin/env bash
set -euo pipefail
# Expected: A prioritised replay buffer draws an item with a probability proportional to its
#   priority, so an item of priority 0 and a place that was never written are not drawn.
# Happens: flashbax sums priorities in float32 and draws one value up to their sum from each of the
#   equal parts of a batch. The draw of the last part may lie above what the leaves add up to, and
#   falls on an item of probability 0. With 600,000 items in 1,048,576 places one batch of 256 in
#   about 90 has one, and with 6,000 items one in 2,000. Its importance weight, 1 / probability, is
#   infinite, and so is every loss that it multiplies.
# Versions: flashbax 0.1.3, jax 0.10.2
# Output seen:
#   4000 batches of 256: 46 have an item of probability 0
#   the largest importance weight of such a batch: inf
#   with 6,000 items in 8,192 places: 2
# Seen on: 2026-11-30, Python 3.11, CPU

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check \
  'flashbax==0.1.3' 'jax==0.10.2' 'jaxlib==0.10.2'
cd "$folder"
JAX_PLATFORMS=cpu "$folder/venv/bin/python" -W ignore - <<'PYTHON'
import flashbax
import jax
import jax.numpy as jnp
import numpy as np

BATCH, NUM_BATCHES = 256, 4000


def impossible_batches(places, items):
  """Returns how many batches hold an item of probability 0, and the largest weight of an item."""
  buffer = flashbax.make_prioritised_flat_buffer(
      max_length=places,
      min_length=1,
      sample_batch_size=BATCH,
      add_sequences=True,
      priority_exponent=1.0,
  )
  state = buffer.init({'reward': jnp.zeros(())})
  state = buffer.add(state, {'reward': jnp.ones(items)})
  priorities = np.random.default_rng(0).uniform(0.001, 1.0, items - 1).astype(np.float32)
  state = buffer.set_priorities(state, jnp.arange(items - 1), jnp.array(priorities))

  @jax.jit
  def draw(key):
    def one(carry, key):
      probabilities = buffer.sample(state, key).probabilities
      found, largest = carry
      found += (probabilities == 0).any()
      return (found, jnp.maximum(largest, (1 / (items * probabilities)).max())), None

    keys = jax.random.split(key, NUM_BATCHES)
    return jax.lax.scan(one, (jnp.zeros((), int), jnp.zeros(())), keys)[0]

  found, largest = draw(jax.random.key(0))
  return int(found), float(largest)


found, weight = impossible_batches(2**20, 600_000)
print(f'{NUM_BATCHES} batches of {BATCH}: {found} have an item of probability 0')
print(f'the largest importance weight of such a batch: {weight}')
few, _ = impossible_batches(2**13, 6_000)
print(f'with 6,000 items in 8,192 places: {few}')
assert found > 0 and weight == float('inf'), 'items of probability 0 are not drawn now'
PYTHON
