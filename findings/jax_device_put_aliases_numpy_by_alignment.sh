#!/usr/bin/env bash
set -euo pipefail
# Expected: jax.device_put and jax.make_array_from_process_local_data copy a NumPy array, so a host
#   loop may fill the same buffer again for the next batch. At least device_put with
#   may_alias=False copies.
# Happens: On a CPU the array shares the buffer's memory if its address is a multiple of 64 bytes,
#   also with may_alias=False, and a batch that was put earlier changes. At other addresses it is a
#   copy. NumPy aligns to 16 bytes, so that three of four small buffers hide the mistake.
#   jnp.asarray and jnp.array copy at both.
# Versions: jax 0.10.2, numpy 2.4.6 (jax 0.12.0 does the same)
# Output seen:
#   offset 0: device_put changed; may_alias=False changed; process_local changed; asarray kept
#   offset 16: device_put kept; may_alias=False kept; process_local kept; asarray kept
# Seen on: 2026-11-30, Python 3.11, CPU

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check \
  'jax==0.10.2' 'jaxlib==0.10.2' 'numpy==2.4.6'
cd "$folder"
JAX_PLATFORMS=cpu "$folder/venv/bin/python" -W ignore - <<'PYTHON'
import jax
import jax.numpy as jnp
import numpy as np

sharding = jax.NamedSharding(jax.make_mesh((1,), ('data',)), jax.P())


def buffer(offset):
  """Returns float32 zeros whose address is `offset` above a multiple of 64."""
  raw = np.zeros(4 * 1024 + 128, np.uint8)
  start = -raw.ctypes.data % 64 + offset
  return raw[start : start + 4 * 1024].view(np.float32)


for offset in (0, 16):
  batch = buffer(offset)
  batches = {
      'device_put': jax.device_put(batch),
      'may_alias=False': jax.device_put(batch, may_alias=False),
      'process_local': jax.make_array_from_process_local_data(sharding, batch),
      'asarray': jnp.asarray(batch),
  }
  jax.block_until_ready(batches)
  batch[:] = 1  # the next batch
  kept = {name: float(x.sum()) == 0 for name, x in batches.items()}
  words = [f'{name} {"kept" if is_kept else "changed"}' for name, is_kept in kept.items()]
  print(f'offset {offset}: {"; ".join(words)}')
  assert kept.pop('asarray')
  assert set(kept.values()) == {offset != 0}, 'device_put copies otherwise now'
PYTHON
