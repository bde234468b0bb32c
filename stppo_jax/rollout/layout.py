"""The sampling layout: where the policy, its KV cache and its logits lie while it is sampled from.

Training keeps float32 parameters in shards that every use gathers. Decoding needs all of them for
each token, so it reads a copy, made once per update in the dtype of the computation. Heads,
feed-forward and vocabulary are split over `tensor`, the rows of a call over `data` (Megatron-LM,
Shoeybi et al., arXiv 1909.08053, section 3). Nothing of the copy is gathered while sampling. A
layer costs two all-reduces of its activations, and a token one gather of its logits.

Choice: adapters are merged into the copy: W + scale A B in float32, rounded once. The factored form
needs the same copy of W, and per token two more products for each kernel and two more all-reduces
for each layer. The price of merging: in bfloat16 the sum is rounded, where the trainer rounds W.
"""

from collections.abc import Sequence
import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from stppo_jax.models import decoder
from stppo_jax.models import lora
from stppo_jax.models import sharding
from stppo_jax.types import UserError

COPY_BYTES = 4 * 2**30  # most bytes of the copy per device, where the key heads allow it


def make_mesh(mesh: Mesh, model: decoder.ModelConfig, sizes: Sequence[int] = ()) -> Mesh:
  """Returns a mesh of (data, 1, tensor) over the devices of `mesh`, in their order.

  `sizes` are (data, tensor); one of them may be -1 and takes the remaining devices. If empty,
  tensor is the smallest number for which the copy takes at most COPY_BYTES per device, or the
  largest that divides the key heads and the feed-forward.
  """
  setting = f'config.rollout.mesh={tuple(sizes)}'
  try:
    data, tensor = sizes or (-1, _smallest_tensor(mesh.size, model))
    devices = mesh.devices.reshape(data, 1, tensor)
  except ValueError:
    raise UserError(
        f'{setting} are (data, tensor) of {mesh.size} devices, which must be their product: set '
        'one of them to -1 to take what is left'
    ) from None
  heads = model.num_kv_heads
  tensor = devices.shape[2]
  if heads % tensor:
    allowed = ', '.join(str(n) for n in _divisors(heads))
    raise UserError(
        f'{setting}: tensor={tensor} does not divide the {heads} key heads of the model: choose '
        f'one of {allowed}'
    )
  return _mesh(devices)


def num_shards(row_sharding: NamedSharding | None, axis: str) -> int:
  """Returns the number of parts along 'data' (of rows) or 'tensor'; 1 without a sharding."""
  if row_sharding is None:
    return 1
  shape = row_sharding.mesh.shape
  return shape['tensor'] if axis == 'tensor' else shape['data'] * shape['fsdp']


def of_context(row_sharding: NamedSharding | None) -> NamedSharding | None:
  """Returns the sharding of keys and values [B,M,..], over rows and heads."""
  if row_sharding is None:
    return None
  return NamedSharding(row_sharding.mesh, P(row_sharding.spec[0], 'tensor'))


def copy_function(model: decoder.ModelConfig, row_sharding: NamedSharding | None) -> Any:
  """Returns the jitted function that copies a policy for sampling.

  Kernels are in the dtype of the computation, norms as they were, and `layers` is a tuple of L
  trees, because slicing a stack would copy it. The result shares no buffer with the policy, which
  training donates.
  """

  def unstacked(params):
    params = decoder.unstack_layers(params, model)
    return jax.tree.map(jnp.copy, params)

  if row_sharding is None:
    return jax.jit(lambda params: unstacked(_prepared(params, model)))
  mesh = row_sharding.mesh
  data, _, tensor = mesh.devices.shape
  # On the way each parameter is split over all devices, as in training. From there XLA gathers it
  # over `data`; in one step it would gather it whole.
  between = _mesh(mesh.devices.reshape(1, data, tensor))

  def copy(params):
    params = _prepared(params, model)
    places = sharding.tree_shardings(params, between)
    return unstacked(jax.lax.with_sharding_constraint(params, places))

  return jax.jit(copy, out_shardings=copy_shardings(model, row_sharding))


def copy_shardings(model: decoder.ModelConfig, row_sharding: NamedSharding) -> Any:
  """Returns the sharding of each leaf of the copy."""
  mesh: Any = row_sharding.mesh
  model = dataclasses.replace(model, head='tokens', row_sharding=None)
  stacked = jax.eval_shape(lambda key: decoder.init(key, model), jax.random.key(0))
  places = sharding.tree_shardings(stacked, mesh)
  of_layer = lambda place: NamedSharding(mesh, P(*place.spec[1:]))
  layer = jax.tree.map(of_layer, places['layers'])
  return {**places, 'layers': (layer,) * model.num_layers}


def is_copy(params: Any) -> bool:
  """Returns whether the parameters are the result of a `copy_function`."""
  return isinstance(params['layers'], tuple)


def _smallest_tensor(num_devices, model):
  if num_devices == 1:
    return 1
  size = decoder.num_params(model) * jnp.dtype(model.dtype).itemsize
  common = math.gcd(num_devices, model.num_kv_heads, model.d_ff)
  for tensor in _divisors(common):
    if size <= tensor * COPY_BYTES:
      return tensor
  return common


def _divisors(number):
  return [n for n in range(1, number + 1) if number % n == 0]


def _mesh(devices):
  """Makes a mesh without reordering devices: one program may use arrays of meshes in one order."""
  auto = (jax.sharding.AxisType.Auto,) * 3
  return Mesh(devices, sharding.AXES, axis_types=auto)


def _prepared(params, model):
  """Returns the policy without adapters and value head, in the dtype of the computation."""
  params = {name: branch for name, branch in params.items() if name != 'value_head'}
  return decoder.in_compute_dtype(lora.merge(params, {}, model.lora_scale), model)
