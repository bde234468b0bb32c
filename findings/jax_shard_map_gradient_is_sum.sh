#!/usr/bin/env bash
set -euo pipefail
# Expected: Inside shard_map, jax.grad with respect to a replicated argument is the gradient of
#   the local loss. pmean over the mesh then averages the gradients of four devices.
# Happens: With check_vma=True, the default, jax.grad already sums over the mesh, because the
#   argument does not vary over it. pmean of the sum changes nothing, so the averaged gradient is
#   four times too large. With check_vma=False the same code gives the mean.
# Versions: jax 0.10.2, numpy 2.4.6
# Output seen:
#   check_vma=True: 6.0
#   check_vma=False: 1.5
# Seen on: 2026-11-28, Python 3.11, CPU

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check 'jax==0.10.2' 'numpy==2.4.6'
cd "$folder"
JAX_PLATFORMS=cpu XLA_FLAGS=--xla_force_host_platform_device_count=4 "$folder/venv/bin/python" - <<'PYTHON'
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

mesh = jax.make_mesh((4,), ('data',), axis_types=(jax.sharding.AxisType.Auto,))
weight = jnp.float32(1.0)
examples = jnp.arange(4.0)  # one a device; the mean gradient is 1.5


def mean_gradient(weight, examples):
  gradient = jax.grad(lambda weight: jnp.sum(weight * examples))(weight)
  return jax.lax.pmean(gradient, 'data')


results = {}
for check in (True, False):
  sharded = jax.shard_map(
      mean_gradient, mesh=mesh, in_specs=(P(), P('data')), out_specs=P(), check_vma=check
  )
  results[check] = float(sharded(weight, examples))
  print(f'check_vma={check}: {results[check]}')
assert results == {True: 6.0, False: 1.5}, 'the two agree now'
PYTHON
