#!/usr/bin/env bash
set -euo pipefail
# Expected: jax.jit computes (x w)^T of bfloat16 matrices with a float32 result, as it does without
#   jit.
# Happens: On a CPU with AMX the compiled program raises UNIMPLEMENTED when it is called. XLA keeps
#   the product in bfloat16, because YNNPACK computes it. A later pass replaces the transpose of the
#   product by a product of transposes, which YNNPACK does not compute. With any operation between
#   product and transpose it works.
# Versions: jax 0.12.0.1; the same with 0.10.2
# Output seen:
#   without jit: ok
#   jit, x w: ok
#   jit, (x w)^T: UNIMPLEMENTED: Unsupported element type for DotThunk::Execute: BF16 x BF16 = F32
#   jit, (2 (x w))^T: ok
# Seen on: 2026-11-29, Python 3.12, two cores of a Xeon with AMX

if ! grep -q amx_bf16 /proc/cpuinfo; then
  echo 'this CPU has no AMX, so nothing can be seen here'
  exit 0
fi

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check 'jax==0.12.0.1'
cd "$folder"
JAX_PLATFORMS=cpu "$folder/venv/bin/python" - <<'PYTHON'
import jax
import jax.numpy as jnp


def product(x, w):
  return jnp.matmul(x, w, preferred_element_type=jnp.float32)


FORMS = {
    'without jit': lambda x, w: product(x, w).T,
    'jit, x w': jax.jit(product),
    'jit, (x w)^T': jax.jit(lambda x, w: product(x, w).T),
    'jit, (2 (x w))^T': jax.jit(lambda x, w: (2 * product(x, w)).T),
}
x, w = jnp.ones((4, 32), jnp.bfloat16), jnp.ones((32, 32), jnp.bfloat16)
found = {}
for name, form in FORMS.items():
  try:
    form(x, w).block_until_ready()
    found[name] = 'ok'
  except jax.errors.JaxRuntimeError as error:
    found[name] = str(error).splitlines()[0]
  print(f'{name}: {found[name]}')
assert [result == 'ok' for result in found.values()] == [True, True, False, True], found
assert found['jit, (x w)^T'].startswith('UNIMPLEMENTED'), found
PYTHON
