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
from stppo_jax.models import sharding
from stppo_jax.types import UserError

COPY_BYTES = 4 * 2**30  # most bytes of the copy per device, where the key heads allow it


def make_mesh(mesh: Mesh, model: decoder.ModelConfig, sizes: Sequence[int] = ()) -> Mesh:
  """Returns a mesh of (data, 1, tensor) over the devices of `mesh`, in the same order.

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
  heads = _divisible(model)
  tensor = devices.shape[2]
  if heads % tensor:
    allowed = map(str, _divisors(heads))
    raise UserError(
        f'{setting}: tensor={tensor} does not divide the {heads} key heads of the model: choose '
        f'one of {", ".join(allowed)}'
    )
  return _mesh(devices)


def num_shards(row_sharding: NamedSharding | None, axis: str) -> int:
  """Returns the number of parts along 'data' (of rows) or 'tensor'; 1 without a sharding."""
  if row_sharding is None:
    return 1
  shape = row_sharding.mesh.shape
  if axis == 'tensor':
    return shape['tensor']
  return shape['data'] * shape['fsdp']


def context_sharding(row_sharding: NamedSharding | None) -> NamedSharding | None:
  """Returns the sharding of keys and values [B,M,..], over rows and heads."""
  if row_sharding is None:
    return None
  rows = row_sharding.spec[0]
  return NamedSharding(row_sharding.mesh, P(rows, 'tensor'))


def copy_function(model: decoder.ModelConfig, row_sharding: NamedSharding | None) -> Any:
  """Returns the jitted function that copies a policy for sampling.

  The copy has no adapters and no value head. Kernels are in the dtype of the computation, norms as
  they were, and `layers` is a tuple of L trees, because slicing a stack would copy it. The result
  shares no buffer with the policy, which training donates.
  """

  between: Any = None
  places = None
  if row_sharding is not None:
    # On the way each parameter is split over all devices, as in training. From there XLA gathers it
    # over `data`; in one step it would gather it whole.
    devices = row_sharding.mesh.devices
    data, _, tensor = devices.shape
    between = _mesh(devices.reshape(1, data, tensor))
    places = copy_shardings(model, row_sharding)

  def copy(params):
    policy = {name: branch for name, branch in params.items() if name != 'value_head'}
    if decoder.has_adapters(policy):
      from stppo_jax.models import lora

      policy = lora.merge(policy, {}, model.lora_scale)
    policy = decoder.in_compute_dtype(policy, model)
    if between is not None:
      shardings = sharding.tree_shardings(policy, between)
      policy = jax.lax.with_sharding_constraint(policy, shardings)
    policy = decoder.unstack_layers(policy, model)
    return jax.tree.map(jnp.copy, policy)

  return jax.jit(copy, out_shardings=places)


def copy_shardings(model: decoder.ModelConfig, row_sharding: NamedSharding) -> Any:
  """Returns the sharding of each leaf of the copy."""
  mesh: Any = row_sharding.mesh
  model = dataclasses.replace(model, head='tokens', row_sharding=None)
  key = jax.random.key(0)
  stacked = jax.eval_shape(lambda key: decoder.init(key, model), key)
  places = sharding.tree_shardings(stacked, mesh)

  def without_layers(place):
    spec = place.spec[1:]
    return NamedSharding(mesh, P(*spec))

  layer = jax.tree.map(without_layers, places['layers'])
  layers = []
  for kind in model.layer_kinds:
    layers.append({part: tree for part, tree in layer.items() if decoder.has_part(kind, part)})
  return {**places, 'layers': tuple(layers)}


def is_copy(params: Any) -> bool:
  """Returns whether the parameters are the result of a `copy_function`."""
  return isinstance(params['layers'], tuple)


def _divisible(model):
  """Returns the number that `tensor` has to divide: of key heads, those of delta nets included."""
  if model.delta is None:
    return model.num_kv_heads
  return math.gcd(model.num_kv_heads, model.delta.key_heads, model.delta.value_heads)


def _smallest_tensor(num_devices, model):
  if num_devices == 1:
    return 1
  itemsize = jnp.dtype(model.dtype).itemsize
  size = decoder.num_params(model) * itemsize
  common = math.gcd(num_devices, _divisible(model), model.d_ff)
  for tensor in _divisors(common):
    if size <= tensor * COPY_BYTES:
      return tensor
  return common


def _divisors(number):
  candidates = range(1, number + 1)
  return [n for n in candidates if number % n == 0]


def _mesh(devices):
  """Makes a mesh without reordering devices: one program may use arrays of meshes in one order."""
  auto = (jax.sharding.AxisType.Auto,) * 3
  return Mesh(devices, sharding.AXES, axis_types=auto)
