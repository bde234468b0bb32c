"""Placement of arrays: a mesh of four axes, and rules from a path to mesh axes.

Parameters, gradients and optimizer state follow the same rules, because an optimizer's tree
contains the parameters' paths. The rows of a batch are split over (data, fsdp). The models compute
a row on all devices of `context` together. Each of them has a shard of it, see
context_parallel.py.
"""

from collections.abc import Sequence
import functools
import math
import os
import re
import sys
from typing import Protocol
from typing import TypeVar

import jax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np

from stppo_jax.types import UserError

AXES = ('data', 'fsdp', 'context', 'tensor')
ROWS = P(('data', 'fsdp'))
PIECES = P(('data', 'fsdp', 'context'))
Tree = TypeVar('Tree')  # a tree of arrays, of their shapes or of their shardings
HOST = 'pinned_host'  # the memory kind of arrays that are offloaded to the host

# First match wins; a path that matches nothing is an error. Leading L axes are never split. The
# devices of `context` split what `fsdp` splits, see `_fit`.
RULES = (
    (r'embed/embedding$', P('tensor', 'fsdp')),  # [V,D]
    (r'lm_head/kernel$', P('fsdp', 'tensor')),  # [D,V]
    (r'value_head/', P()),
    (r'attention/(query|key|value)/kernel$', P(None, 'fsdp', 'tensor', None)),  # [L,D,N,H]
    (r'attention/(query|key|value)/bias$', P(None, 'tensor', None)),  # [L,N,H]
    (r'attention/out/kernel$', P(None, 'tensor', None, 'fsdp')),  # [L,N,H,D]
    (r'delta/(qkv|rate|decay)/kernel$', P(None, 'fsdp', 'tensor')),  # [L,D,C] and [L,D,N]
    (r'delta/z/kernel$', P(None, 'fsdp', 'tensor', None)),  # [L,D,N,V]
    (r'delta/out/kernel$', P(None, 'tensor', None, 'fsdp')),  # [L,N,V,D]
    (r'delta/(conv/kernel|log_decay|decay_bias)$', P(None, 'tensor')),  # [L,C,w] and [L,N]
    (r'(mlp|shared)/(gate|up)/kernel$', P(None, 'fsdp', 'tensor')),  # [L,D,F]
    (r'(mlp|shared)/down/kernel$', P(None, 'tensor', 'fsdp')),  # [L,F,D]
    (r'moe/(router|shared_gate)/kernel$', P(None, 'fsdp', None)),  # [L,D,E] and [L,D,1]
    (r'moe/(gate|up)$', P(None, 'fsdp', None, 'tensor')),  # [L,E,D,F]
    (r'moe/down$', P(None, 'fsdp', 'tensor', None)),  # [L,E,F,D]
    (r'norm/scale$', P()),
    # Adapters follow their kernels; the rank r is never split.
    (r'(query|key|value|gate|up|qkv|z)/lora_a$', P(None, 'fsdp', None)),  # [L,D,r]
    (r'(query|key|value|z)/lora_b$', P(None, None, 'tensor', None)),  # [L,r,N,H]
    (r'(gate|up|qkv)/lora_b$', P(None, None, 'tensor')),  # [L,r,F]
    (r'out/lora_a$', P(None, 'tensor', None, None)),  # [L,N,H,r]
    (r'down/lora_a$', P(None, 'tensor', None)),  # [L,F,r]
    (r'(out|down)/lora_b$', P(None, None, 'fsdp')),  # [L,r,D]
)


class MeshSizes(Protocol):
  """The sizes of config.mesh. One of them may be -1, see `make_mesh`."""

  @property
  def data(self) -> int:
    """Copies of the model."""

  @property
  def fsdp(self) -> int:
    """Shards of each copy, by rows of a batch."""

  @property
  def context(self) -> int:
    """Shards of each copy, by the tokens of a row."""

  @property
  def tensor(self) -> int:
    """Shards of heads, feed-forward and vocabulary."""


def mesh_of(settings: MeshSizes, devices: Sequence[jax.Device] | None = None) -> jax.sharding.Mesh:
  """Makes the mesh that config.mesh describes."""
  return make_mesh(settings.data, settings.fsdp, settings.tensor, devices, settings.context)


def make_mesh(
    data: int, fsdp: int, tensor: int, devices: Sequence[jax.Device] | None = None, context: int = 1
) -> jax.sharding.Mesh:
  """Makes a mesh over the devices; one of the sizes may be -1 and takes the remaining devices.

  If all sizes are given, one process may use fewer devices than it sees: the first ones. The
  devices of several processes, as in a plan, are all needed. Slices of TPUs hold whole copies of
  the model, so that only gradients cross the slower network between them.
  """
  if devices is None:
    devices = jax.devices()
  sizes = (data, fsdp, context, tensor)
  num_used = math.prod(sizes)
  num_processes = len({device.process_index for device in devices})
  used = devices
  if num_used > 0 and num_processes == 1:
    used = devices[:num_used]
  try:
    grid = np.array(used).reshape(sizes)
  except ValueError:
    raise UserError(
        f'config.mesh (data={data}, fsdp={fsdp}, context={context}, tensor={tensor}) does not fit '
        f'{len(devices)} devices: the sizes are at least 1 and their product is the number of '
        'devices, where one of them may be -1 and takes what is left'
    ) from None
  axis_types = (jax.sharding.AxisType.Auto,) * len(AXES)
  num_slices = 1
  if used[0].platform == 'tpu':
    num_slices = len({getattr(device, 'slice_index', None) for device in used})
  if num_slices > 1:
    return jax.sharding.Mesh(_over_slices(grid.shape, num_slices, used), AXES, axis_types)
  return jax.make_mesh(grid.shape, AXES, axis_types=axis_types, devices=used)


def _over_slices(sizes, num_slices, devices):
  """Returns the devices of several slices as an array of these sizes, a slice after the other."""
  from jax.experimental import mesh_utils

  data, *others = sizes
  if data % num_slices:
    raise UserError(
        f'config.mesh.data={data} cannot be split over {num_slices} slices, each of which holds '
        f'whole copies of the model: set config.mesh.data to a multiple of {num_slices}'
    )
  within = (data // num_slices, *others)
  between = (num_slices, *[1] * len(others))
  return mesh_utils.create_hybrid_device_mesh(
      within, between, devices, allow_split_physical_axes=True
  )


def check_rows(mesh: jax.sharding.Mesh, **counts: int) -> None:
  """Raises UserError for counts that the mesh cannot split: check_rows(mesh, micro_batch=4)."""
  parts = num_row_shards(mesh)
  for name, count in counts.items():
    if count % parts:
      raise UserError(
          f'config.train.{name}={count} rows cannot be split over data * fsdp = {parts} '
          f'devices: choose a multiple of {parts}, or fewer devices'
      )


def num_row_shards(mesh: jax.sharding.Mesh) -> int:
  """Returns how many shards the rows of a batch are split into."""
  return mesh.shape['data'] * mesh.shape['fsdp']


def rows(mesh: jax.sharding.Mesh) -> NamedSharding:
  """Returns the sharding of an array whose leading axis is the rows of a batch."""
  return NamedSharding(mesh, ROWS)


def context_rows(mesh: jax.sharding.Mesh) -> NamedSharding:
  """Returns the sharding of an array whose leading axis is the rows of a batch, or their shards."""
  return NamedSharding(mesh, PIECES)


def replicated(mesh: jax.sharding.Mesh) -> NamedSharding:
  """Returns the sharding of an array that every device holds in full."""
  return NamedSharding(mesh, P())


def memory_of(device: jax.Device) -> int:
  """Returns the bytes of a device that JAX may use. Simulated devices share the machine's."""
  if device.platform == 'cpu':
    machine = os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE')
    return machine // jax.local_device_count()
  stats = device.memory_stats()
  if stats is None:  # with XLA_PYTHON_CLIENT_ALLOCATOR=platform JAX knows no limit
    return sys.maxsize
  return stats['bytes_limit']


def check_host_memory(mesh: jax.sharding.Mesh) -> None:
  """Raises UserError for devices whose programs cannot use the host's memory."""
  device = mesh.devices.flat[0]
  kinds = [memory.kind for memory in device.addressable_memories()]
  if HOST not in kinds:
    raise UserError(
        f"config.placement asks for 'host', which needs the memory {HOST!r}, and "
        f"{device.platform} has {', '.join(kinds)}: set all of config.placement to 'device'"
    )


def to_device(tree: Tree) -> Tree:
  """Copies host-offloaded leaves to the device. Call it inside jit."""

  def fetch(x):
    if jax.typeof(x).memory_space != jax.memory.Space.Host:
      return x
    return jax.device_put(x, jax.memory.Space.Device)

  return jax.tree.map(fetch, tree)


def tree_shardings(tree: Tree, mesh: jax.sharding.Mesh, memory_kind: str | None = None) -> Tree:
  """Returns a NamedSharding per leaf (array or ShapeDtypeStruct), by RULES on the leaf's path.

  Scalars are replicated and stay on the device, whatever `memory_kind` says.

  Choice: an axis that does not divide its dimension (2 key heads over 4 tensor shards) is dropped
  for that dimension instead of being an error.
  """

  def place(path, leaf):
    if not leaf.shape:
      return replicated(mesh)
    name = jax.tree_util.keystr(path, simple=True, separator='/')
    return NamedSharding(mesh, _spec(name, leaf.shape, mesh), memory_kind=memory_kind)

  return jax.tree_util.tree_map_with_path(place, tree)


def shapes(tree: Tree) -> Tree:
  """Returns the ShapeDtypeStructs of arrays, with their shardings."""
  shardings = jax.tree.map(lambda x: x.sharding, tree)
  return placed(tree, shardings)


def placed(tree: Tree, shardings: Tree) -> Tree:
  """Returns the ShapeDtypeStructs of a tree, with these shardings."""

  def shape(x, place):
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place)

  return jax.tree.map(shape, tree, shardings)


def layer_spec(name: str, shape: tuple[int, ...], mesh: jax.sharding.Mesh) -> P:
  """Returns the axes of one layer's slice [..] of a parameter of `layers` [L,..], by RULES."""
  return P(*_spec(name, (1, *shape), mesh)[1:])


def _spec(name, shape, mesh):
  """Returns the axes of the first matching rule, without those that do not divide the dimension."""
  for pattern, spec in RULES:
    if re.search(pattern, name):
      axes = [_fit(axis, size, mesh) for axis, size in zip(spec, shape)]
      return P(*axes)
  raise ValueError(f'no sharding rule for {name!r} of shape {shape}; add one to RULES')


def _fit(axis, size, mesh):
  """Returns the axes that split a dimension in place of `axis`; None: nothing splits it."""
  choices = [axis] if axis else []
  if axis == 'fsdp' and mesh.shape['context'] > 1:
    choices = [('fsdp', 'context'), 'fsdp']
  for choice in choices:
    if size % math.prod(mesh.shape[name] for name in np.atleast_1d(choice)) == 0:
      return choice
  return None


def spread(x: jax.Array, row_sharding: jax.sharding.Sharding | None) -> jax.Array:
  """Shards the rows of x [B,...], which XLA would otherwise replicate to follow the weights."""
  if row_sharding is None:
    return x
  return jax.lax.with_sharding_constraint(x, row_sharding)


def gradient_over_rows(params: Tree, row_sharding: NamedSharding | None, width: int) -> Tree:
  """Returns the same parameters; their gradients are sharded on the axis of `width` D.

  The shards are those of the rows. The function serves a gradient that is summed over the steps of
  a loop: otherwise XLA replicates the sum, which for the head [D,V] of a 7B model in float32 is
  2 GiB. Where D does not divide evenly nothing changes.
  """
  if row_sharding is None or width % row_sharding.num_devices:
    return params

  def place(w):
    axis = w.shape.index(width)
    return _gradient_over_rows(w, row_sharding, axis)

  return jax.tree.map(place, params)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _gradient_over_rows(w, row_sharding, axis):
  del row_sharding, axis
  return w


def _forward(w, row_sharding, axis):
  del row_sharding, axis
  return w, None


def _backward(row_sharding, axis, _, gradient):
  spec = [jax.P.UNCONSTRAINED] * gradient.ndim
  spec[axis] = row_sharding.spec[0]
  placed = jax.sharding.NamedSharding(row_sharding.mesh, jax.P(*spec))
  return (jax.lax.with_sharding_constraint(gradient, placed),)


_gradient_over_rows.defvjp(_forward, _backward)
