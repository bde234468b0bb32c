#!/usr/bin/env bash
set -euo pipefail
# Expected: A custom derivative decides what its backward pass keeps. If the rule returns q and ids,
#   a loop over blocks in the forward rule needs the mask of one block at a time.
# Happens: The mask depends on integers alone, so JAX computes the masks of all blocks in a loop of
#   their own when the function is differentiated within a scan over layers, and keeps them for the
#   real loop. Attention in blocks then needs memory for all scores. An optimization_barrier that
#   joins the integers to q keeps the mask in its step.
# Versions: jax 0.10.2
# Output seen:
#   plain: masks of all 64 blocks kept True, temporaries 7340484 bytes
#   barrier: masks of all 64 blocks kept False, temporaries 4194948 bytes
# Seen on: 2026-11-28, Python 3.11, CPU

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check 'jax==0.10.2'
cd "$folder"
JAX_PLATFORMS=cpu "$folder/venv/bin/python" - <<'PYTHON'
import jax
import jax.numpy as jnp

BLOCKS, SIZE = 64, 256


@jax.custom_vjp
def attend(q, ids):
  return forward(q, ids)[0]


def forward(q, ids):
  def add(total, block):
    mask = ids[:, None] >= ids[None, :] + block
    return total + jnp.where(mask, q @ q.T, 0), None

  y, _ = jax.lax.scan(add, jnp.zeros((SIZE, SIZE)), jnp.arange(BLOCKS))
  return y, (q, ids)


def backward(residuals, d):
  q, _ = residuals
  return (d + d.T) @ q, None


attend.defvjp(forward, backward)


def compiled(barrier):
  def step(total, q_and_ids):
    q, ids = q_and_ids
    if barrier:
      q, ids = jax.lax.optimization_barrier((q, ids))
    return total + jnp.tanh(attend(q, ids)).sum(), None

  def loss(qs, ids):
    return jax.lax.scan(lambda total, q: step(total, (q, ids)), 0.0, qs)[0]

  arguments = jnp.ones((4, SIZE, SIZE)), jnp.arange(SIZE)
  return jax.jit(jax.grad(loss)).lower(*arguments).compile()


kept = {}
for name, barrier in (('plain', False), ('barrier', True)):
  program = compiled(barrier)
  kept[name] = f'pred[{BLOCKS},{SIZE},{SIZE}]' in program.as_text()
  size = program.memory_analysis().temp_size_in_bytes
  print(f'{name}: masks of all {BLOCKS} blocks kept {kept[name]}, temporaries {size} bytes')
assert kept == {'plain': True, 'barrier': False}, kept
PYTHON
