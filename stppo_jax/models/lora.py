"""Low-rank adapters (LoRA), which are trained in place of the layers' kernels.

A kernel W is frozen. Its adapter is A `lora_a` [L,in..,r] and B `lora_b` [L,r,out..], in float32:

  y = x W + scale (x A) B,   scale = alpha / r      LoRA (Hu et al., arXiv 2106.09685), section 4.1

Training never forms A B or a gradient of W's shape. Adapters are a tree with the paths of the
parameters. `combine` joins both into the tree that decoder.py takes; `merge` adds A B to W.
"""

from collections.abc import Callable
from collections.abc import Collection
import json
import math
import os
from typing import Any

from flax import traverse_util
import jax
import jax.numpy as jnp
import numpy as np
import safetensors.numpy

from stppo_jax.types import UserError

Params = dict[str, Any]  # a tree of arrays or of their shapes
_ADAPTER = ('lora_a', 'lora_b')
# PEFT's name -> (path of the kernel within `layers`, number of its axes that x is contracted with).
TARGETS = {
    'q_proj': ('attention/query', 1),
    'k_proj': ('attention/key', 1),
    'v_proj': ('attention/value', 1),
    'o_proj': ('attention/out', 2),
    'gate_proj': ('mlp/gate', 1),
    'up_proj': ('mlp/up', 1),
    'down_proj': ('mlp/down', 1),
}
# The same for gated delta-net layers.
DELTA_TARGETS = {
    'in_proj_qkv': ('delta/qkv', 1),
    'in_proj_z': ('delta/z', 1),
    'out_proj': ('delta/out', 2),
}
_PEFT_PARENTS = {'attention': 'self_attn', 'delta': 'linear_attn'}


def init(key: jax.Array, params: Params, rank: int, targets: Collection[str]) -> Params:
  """Returns adapters for the kernels of `params` (arrays or shapes) that `targets` names.

  A is uniform in +-1 / sqrt(inputs), as in PEFT, and B is zero, so the adapters add 0 at first. A
  kernel's A depends only on the key and the kernel's name, not on the other targets.
  """
  adapters: Params = {}
  for index, (name, (path, contracted)) in enumerate((TARGETS | DELTA_TARGETS).items()):
    if name not in targets:
      continue
    part, module = path.split('/')
    if part == 'delta' and part not in params['layers']:
      raise UserError(
          f'config.model.lora_targets names {name!r}, and the model has no gated delta-net layers: '
          'leave out in_proj_qkv, in_proj_z and out_proj'
      )
    if part not in params['layers']:
      raise UserError(
          f'config.model.lora_targets names {name!r}, and experts take no adapters: leave out '
          'gate_proj, up_proj and down_proj; the experts stay as they are'
      )
    num_layers, *axes = params['layers'][part][module]['kernel'].shape
    inputs = axes[:contracted]
    outputs = axes[contracted:]
    bound = 1 / math.sqrt(math.prod(inputs))
    a_key = jax.random.fold_in(key, index)
    a_shape = (num_layers, *inputs, rank)
    adapters.setdefault(part, {})[module] = {
        'lora_a': jax.random.uniform(a_key, a_shape, jnp.float32, -bound, bound),
        'lora_b': jnp.zeros((num_layers, rank, *outputs), jnp.float32),
    }
  return {'layers': adapters}


def product(x: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
  """Returns (x A) B for one layer: x [X,in], A [in..,r], B [r,out..] -> [X,out]."""
  rank = len(b)
  a = a.reshape(-1, rank)
  b = b.reshape(rank, -1)
  return x @ a @ b


def combine(base: Params, trained: Params) -> Params:
  """Returns one tree with the leaves of both, without copies. combine({}, params) is params."""
  base = traverse_util.flatten_dict(base)
  trained = traverse_util.flatten_dict(trained)
  return traverse_util.unflatten_dict(base | trained)


def split(params: Params) -> tuple[Params, Params]:
  """Returns (frozen base of the adapters, parts that are trained in full).

  The value head is trained in full. Trained parameters are in float32, because most steps are too
  small to change a bfloat16.
  """
  base = dict(params)
  trained = {}
  if 'value_head' in base:
    trained['value_head'] = base.pop('value_head')
  return base, jax.tree.map(_float32, trained)


def merge(base: Params, trained: Params, scale: float) -> Params:
  """Returns parameters without adapters: W + scale A B, in W's dtype, for each adapted kernel W."""
  flat = traverse_util.flatten_dict(combine(base, trained))
  merged = {path: leaf for path, leaf in flat.items() if path[-1] not in _ADAPTER}
  for path, a in flat.items():
    if path[-1] != 'lora_a':
      continue
    module = path[:-1]
    kernel = flat[*module, 'kernel']
    b = flat[*module, 'lora_b']
    num_layers, rank = b.shape[:2]
    a = a.reshape(num_layers, -1, rank)
    b = b.reshape(num_layers, rank, -1)
    change = scale * jnp.einsum('lir,lro->lio', a, b, precision='highest')
    adapted = kernel + change.reshape(kernel.shape)
    merged[*module, 'kernel'] = adapted.astype(kernel.dtype)
  return traverse_util.unflatten_dict(merged)


def adapters(params: Params) -> Params:
  """Returns the adapters of `combine`d parameters alone."""
  flat = traverse_util.flatten_dict(params)
  parts = {path: leaf for path, leaf in flat.items() if path[-1] in _ADAPTER}
  return traverse_util.unflatten_dict(parts)


def save_peft(
    folder: str,
    adapters: Params,
    scale: float,
    layers_with: Callable[[str], list[int]] | None = None,
) -> None:
  """Writes adapters (NumPy arrays) as a folder of the PEFT library, which vLLM and SGLang read.

  `layers_with` returns the numbers of the layers that have a part, such as 'attention'. None: all.
  """
  os.makedirs(folder)
  tensors = {}
  targets = []
  for name, (path, _) in (TARGETS | DELTA_TARGETS).items():
    part, module = path.split('/')
    adapter = adapters['layers'].get(part, {}).get(module)
    if adapter is None:
      continue
    targets.append(name)
    rank = adapter['lora_a'].shape[-1]
    parent = _PEFT_PARENTS.get(part, part)
    numbers = layers_with(part) if layers_with else range(len(adapter['lora_a']))
    for layer, a, b in zip(numbers, adapter['lora_a'], adapter['lora_b'], strict=True):
      prefix = f'base_model.model.model.layers.{layer}.{parent}.{name}'
      a = a.reshape(-1, rank)
      b = b.reshape(rank, -1)
      tensors[f'{prefix}.lora_A.weight'] = np.ascontiguousarray(a.T)
      tensors[f'{prefix}.lora_B.weight'] = np.ascontiguousarray(b.T)
  safetensors.numpy.save_file(tensors, os.path.join(folder, 'adapter_model.safetensors'))
  settings = {
      'peft_type': 'LORA',
      'task_type': 'CAUSAL_LM',
      'base_model_name_or_path': '',
      'r': rank,
      'lora_alpha': scale * rank,
      'target_modules': targets,
      'bias': 'none',
  }
  with open(os.path.join(folder, 'adapter_config.json'), 'w', encoding='utf-8') as file:
    json.dump(settings, file)


def _float32(x):
  """Returns an array, or the shape of one, in float32."""
  if isinstance(x, jax.ShapeDtypeStruct):
    return jax.ShapeDtypeStruct(x.shape, jnp.float32, sharding=x.sharding)
  return x.astype(jnp.float32)
