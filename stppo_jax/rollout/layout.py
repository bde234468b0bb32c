"""The sampling layout: where the policy, its KV cache and its logits lie while it is sampled from.

Training keeps float32 parameters in shards that every use gathers. Decoding needs all of them for
each token, so it reads a copy, made once per update in the dtype of the computation. Heads,
feed-forward and vocabulary are split over `tensor`, the rows of a call over `data` (Megatron-LM,
Shoeybi et al., arXiv 1909.08053, section 3). Nothing of the copy is gathered while sampling. A
layer costs two all-reduces of its activations.

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
import numpy as np

from stppo_jax.models import decoder
from stppo_jax.models import lora
from stppo_jax.models import sharding
from stppo_jax.rollout import sampling
from stppo_jax.types import UserError

COPY_BYTES = 4 * 2**30  # of the copy per device, at most, where the key heads allow it


def make_mesh(mesh: Mesh, model: decoder.ModelConfig, sizes: Sequence[int] = ()) -> Mesh:
  """Returns a mesh of (data, 1, tensor) over the devices of `mesh`, in their order.

  `sizes` are (data, tensor); one of them may be -1 and takes the remaining devices. If empty,
  tensor is the smallest number for which the copy takes at most COPY_BYTES per device, or the
  largest that divides the key heads and the feed-forward.
  """
  devices = mesh.devices.reshape(-1)
  data, tensor = sizes or (-1, _smallest_tensor(len(devices), model))
  known = math.prod(size for size in (data, tensor) if size != -1)
  if -1 in (data, tensor) and len(devices) % known == 0:
    data, tensor = (len(devices) // known if n == -1 else n for n in (data, tensor))
  if data * tensor != len(devices):
    raise UserError(
        f'config.rollout.mesh={tuple(sizes)} are (data, tensor) of {len(devices)} devices, which '
        'must be their product: set one of them to -1 to take what is left'
    )
  if model.num_kv_heads % tensor:
    allowed = [n for n in range(1, model.num_kv_heads + 1) if model.num_kv_heads % n == 0]
    raise UserError(
        f'config.rollout.mesh={tuple(sizes)}: tensor={tensor} does not divide the '
        f'{model.num_kv_heads} key heads of the model: choose one of {", ".join(map(str, allowed))}'
    )
  return _mesh(mesh.devices, data, 1, tensor)


def num_shards(row_sharding: NamedSharding | None, axis: str) -> int:
  """Returns the number of parts along 'data' (of rows) or 'tensor'; 1 without a sharding."""
  if row_sharding is None:
    return 1
  shape = row_sharding.mesh.shape
  return shape['tensor'] if axis == 'tensor' else shape['data'] * shape['fsdp']


def padded(model: decoder.ModelConfig, row_sharding: NamedSharding | None) -> decoder.ModelConfig:
  """Returns the model with a vocabulary of whole sampling blocks per tensor shard."""
  tensor = num_shards(row_sharding, 'tensor')
  whole = sampling.BLOCK * tensor if tensor > 1 else 1
  return dataclasses.replace(model, vocab_size=sampling.round_up(model.vocab_size, whole))


def padded_stop_table(stop_table: np.ndarray, vocab_size: int) -> np.ndarray:
  """Returns the stop table with a column for each id of a padded vocabulary, [states, V] int32.

  Ids beyond the tokenizer's have no bytes, so the automaton keeps its state.
  """
  missing = vocab_size - stop_table.shape[1]
  still = np.repeat(np.arange(len(stop_table), dtype=np.int32)[:, None], missing, axis=1)
  return np.concatenate([stop_table, still], axis=1).astype(np.int32)


def everywhere(row_sharding: NamedSharding | None) -> NamedSharding | None:
  """Returns the sharding of what every device holds and every host reads."""
  return row_sharding and NamedSharding(row_sharding.mesh, P())


def of_context(row_sharding: NamedSharding | None) -> NamedSharding | None:
  """Returns the sharding of keys and values [B,M,..] and of logits [B,V]."""
  if row_sharding is None:
    return None
  return NamedSharding(row_sharding.mesh, P(row_sharding.spec[0], 'tensor'))


def copy_function(model: decoder.ModelConfig, row_sharding: NamedSharding | None) -> Any:
  """Returns the jitted function that copies a policy for sampling.

  `model` is the `padded` one. Kernels are in the dtype of the computation, norms as they were, and
  `layers` is a tuple of L trees, because slicing a stack would copy it. The result shares no buffer
  with the policy, which training donates.
  """

  def unstacked(params):
    return jax.tree.map(jnp.copy, decoder.unstack_layers(params, model))

  if row_sharding is None:
    return jax.jit(lambda params: unstacked(_prepared(params, model)))
  mesh = row_sharding.mesh
  data, _, tensor = mesh.devices.shape
  # On the way each parameter is split over all devices, as in training. From there XLA gathers it
  # over `data`; in one step it would gather it whole.
  between = _mesh(mesh.devices, 1, data, tensor)

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
  layer = jax.tree.map(lambda place: NamedSharding(mesh, P(*place.spec[1:])), places['layers'])
  return {**places, 'layers': (layer,) * model.num_layers}


def is_copy(params: Any) -> bool:
  """Returns whether the parameters are the result of a `copy_function`."""
  return isinstance(params['layers'], tuple)


def _smallest_tensor(num_devices, model):
  if num_devices == 1:
    return 1
  size = decoder.num_params(model) * jnp.dtype(model.dtype).itemsize
  common = math.gcd(num_devices, model.num_kv_heads, model.d_ff)
  allowed = [n for n in range(1, common + 1) if common % n == 0]
  return next((n for n in allowed if size <= n * COPY_BYTES), allowed[-1])


def _mesh(devices, data, fsdp, tensor):
  """Makes a mesh without reordering devices: one program may use arrays of meshes in one order."""
  auto = (jax.sharding.AxisType.Auto,) * 3
  return Mesh(np.reshape(devices, (data, fsdp, tensor)), sharding.AXES, axis_types=auto)


def _prepared(params, model):
  """Returns the policy without adapters and value head, cast, with the padded vocabulary."""
  params = {name: branch for name, branch in params.items() if name != 'value_head'}
  params = decoder.in_compute_dtype(lora.merge(params, {}, model.lora_scale), model)
  embedding = params['embed']['embedding']
  missing = model.vocab_size - len(embedding)
  params['embed'] = {'embedding': jnp.pad(embedding, ((0, missing), (0, 0)))}
  if 'lm_head' in params:
    params['lm_head'] = {'kernel': jnp.pad(params['lm_head']['kernel'], ((0, 0), (0, missing)))}
  return params
