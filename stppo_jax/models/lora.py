"""Low-rank adapters: what is trained instead of the layers' kernels, and how it becomes part of them.

A kernel W stays as it is. Beside it lie A `lora_a` [L,in..,r] and B `lora_b` [L,r,out..], float32:

  y = x W + scale (x A) B,   scale = alpha / r        LoRA (Hu et al., arXiv 2106.09685), section 4.1

Neither A B nor a gradient of W's shape is ever made in training. Adapters are a tree with the paths of the
parameters: `combine` lays both into the one tree that decoder.py reads, `merge` makes plain parameters
of them.
"""

import math

from flax import traverse_util
import jax
import jax.numpy as jnp

# PEFT's name -> (path of the kernel within `layers`, how many of its axes x contracts).
TARGETS = {
    'q_proj': ('attention/query', 1),
    'k_proj': ('attention/key', 1),
    'v_proj': ('attention/value', 1),
    'o_proj': ('attention/out', 2),
    'gate_proj': ('mlp/gate', 1),
    'up_proj': ('mlp/up', 1),
    'down_proj': ('mlp/down', 1),
}


def init(key, params, rank, targets):
  """Adapters for the kernels of `params` (arrays or shapes) that `targets` names; they add 0 at first.

  A is uniform in +-1 / sqrt(inputs), as PEFT draws it, and B is zero. A kernel's A depends on the
  key and its name alone, not on the other targets.
  """
  adapters = {}
  for index, (name, (path, contracted)) in enumerate(TARGETS.items()):
    if name not in targets:
      continue
    part, module = path.split('/')
    layers, *axes = params['layers'][part][module]['kernel'].shape
    inputs, outputs = axes[:contracted], axes[contracted:]
    bound = 1 / math.sqrt(math.prod(inputs))
    a_key, shape = jax.random.fold_in(key, index), (layers, *inputs, rank)
    adapters.setdefault(part, {})[module] = {
        'lora_a': jax.random.uniform(a_key, shape, jnp.float32, -bound, bound),
        'lora_b': jnp.zeros((layers, rank, *outputs), jnp.float32),
    }
  return {'layers': adapters}


def product(x, a, b):
  """(x A) B in the place of x W: x [X,in], A [in..,r], B [r,out..] of one layer -> [X,out]."""
  rank = len(b)
  return x @ a.reshape(-1, rank) @ b.reshape(rank, -1)


def combine(base, trained):
  """One tree with the leaves of both; nothing is copied. combine({}, params) is params."""
  base, trained = traverse_util.flatten_dict(base), traverse_util.flatten_dict(trained)
  if both := base.keys() & trained.keys():
    raise ValueError(f'{sorted(map("/".join, both))} are both frozen and trained')
  return traverse_util.unflatten_dict(base | trained)


def split(params):
  """(what adapters stand on, what is trained whole beside them: the value head, where there is one)."""
  base = {name: branch for name, branch in params.items() if name != 'value_head'}
  return base, {name: branch for name, branch in params.items() if name == 'value_head'}


def merge(base, trained, scale):
  """Plain parameters that compute the same: W + scale A B, in W's dtype, for each adapted kernel W."""
  flat = traverse_util.flatten_dict(combine(base, trained))
  merged = {path: leaf for path, leaf in flat.items() if path[-1] not in ('lora_a', 'lora_b')}
  for path in flat:
    if path[-1] != 'lora_a':
      continue
    module, kernel = path[:-1], flat[*path[:-1], 'kernel']
    a, b = flat[path], flat[*module, 'lora_b']
    layers, rank = b.shape[:2]
    change = scale * jnp.einsum(
        'lir,lro->lio',
        a.reshape(layers, -1, rank),
        b.reshape(layers, rank, -1),
        precision='highest',
    )
    merged[*module, 'kernel'] = (kernel + change.reshape(kernel.shape)).astype(kernel.dtype)
  return traverse_util.unflatten_dict(merged)
