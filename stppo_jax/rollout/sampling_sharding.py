"""Sharding for sampling: where the policy, its KV cache and its logits lie while turns are sampled.

Training keeps float32 parameters in shards that every use gathers. Decoding needs all of them for
each token, so it reads a copy, made once per update in the dtype of the computation. Heads,
feed-forward and vocabulary are split over `tensor`, the rows of a call over `data` (Megatron-LM,
Shoeybi et al., arXiv 1909.08053, section 3). Nothing of the copy is gathered while sampling. A
layer costs two all-reduces of its activations, and a token one gather of its logits.

Choice: adapters are merged into the copy: W + scale A B in float32, rounded once. The factored form
needs the same copy of W, and per token two more products for each kernel and two more all-reduces
for each layer. The price of merging: in bfloat16 the sum is rounded, where the trainer rounds W.
"""

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from stppo_jax.models import decoder
from stppo_jax.models import sharding


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


def copy_function(
    model: decoder.ModelConfig, row_sharding: NamedSharding | None
) -> jax.stages.Wrapped:
  """Returns the jitted function that copies a policy for sampling.

  The copy has no adapters and no value head. Kernels are in the dtype of the computation, norms as
  they were, and `layers` is a tuple of L trees, because slicing a stack would copy it. The result
  shares no buffer with the policy, which training donates.
  """

  between = None
  places = None
  if row_sharding is not None:
    from stppo_jax.rollout import sampling_mesh

    # On the way each parameter is split over all devices, as in training. From there XLA gathers it
    # over `data`; in one step it would gather it whole.
    devices = row_sharding.mesh.devices
    data, _, _, tensor = devices.shape
    between = sampling_mesh.ordered(devices.reshape(1, data, 1, tensor))
    places = sampling_mesh.copy_shardings(model, row_sharding)

  def copy(params: decoder.Params) -> decoder.Params:
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


def is_copy(params: object) -> bool:
  """Returns whether the parameters are the result of a `copy_function`."""
  return isinstance(params, dict) and isinstance(params['layers'], tuple)
