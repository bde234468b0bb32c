"""The mesh of sampling, if there are several devices: see sampling_sharding.py."""

from collections.abc import Sequence
import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np

from stppo_jax.models import decoder
from stppo_jax.models import sharding
from stppo_jax.types import UserError

COPY_BYTES = 4 * 2**30  # most bytes of the copy per device, where the key heads allow it


def make_mesh(mesh: Mesh, model: decoder.ModelConfig, sizes: Sequence[int] = ()) -> Mesh:
  """Returns a mesh of (data, 1, 1, tensor) over the devices of `mesh`, in the same order.

  `sizes` are (data, tensor); one of them may be -1 and takes the remaining devices. If empty,
  tensor is the smallest number for which the copy takes at most COPY_BYTES per device, or the
  largest that divides the key heads and the feed-forward.
  """
  setting = f'config.rollout.mesh={tuple(sizes)}'
  try:
    data, tensor = sizes or (-1, _smallest_tensor(mesh.size, model))
    devices = mesh.devices.reshape(data, 1, 1, tensor)
  except ValueError:
    raise UserError(
        f'{setting} are (data, tensor) of {mesh.size} devices, which must be their product: set '
        'one of them to -1 to take what is left'
    ) from None
  heads = _divisible(model)
  tensor = devices.shape[-1]
  if heads % tensor:
    allowed = map(str, _divisors(heads))
    raise UserError(
        f'{setting}: tensor={tensor} does not divide the {heads} key heads of the model: choose '
        f'one of {", ".join(allowed)}'
    )
  return ordered(devices)


def copy_shardings(model: decoder.ModelConfig, row_sharding: NamedSharding) -> decoder.Params:
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


def ordered(devices: np.ndarray) -> Mesh:
  """Makes a mesh without reordering devices: one program may use arrays of meshes in one order."""
  auto = (jax.sharding.AxisType.Auto,) * len(sharding.AXES)
  return Mesh(devices, sharding.AXES, axis_types=auto)


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
