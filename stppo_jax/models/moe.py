"""Mixture of experts: a router sends each token through the best few of E feed-forward networks.

Router logits in, a weighted sum of experts out. Tokens are sorted by expert, so that each expert
multiplies only the rows that chose it (`jax.lax.ragged_dot`). No token is ever dropped. This holds
on a TPU. On a GPU it needs JAX_RAGGED_DOT_USE_GPU_PALLAS_TRITON_LOWERING=1 in JAX 0.10. Otherwise,
as on a CPU, all experts multiply all rows, masked.

Routing replay (Zheng et al., arXiv 2507.18071, section 5.3) repeats the choices of an earlier pass:
`recorded_routes` stores them, `route` takes them, `routing_sums` counts what they changed.

Einsum letters are those of `types.py`: E experts, A of them active per token.
"""

from collections.abc import Sequence
import dataclasses
import functools
import math
from typing import Any

import chex
import flax
import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from stppo_jax.models import layers
from stppo_jax.models import sharding

KERNELS = ('gate', 'up', 'down')  # names of the experts' kernels, in this order


@flax.struct.dataclass
class Routing:
  """The decisions of the router in one layer, or in all layers with a leading L axis.

  Attributes:
    chosen: [B,T,A] int32, the experts of each token, the likeliest first.
    entropy: [B,T] nats, entropy of the distribution over all experts.
    replaced: [B,T] share of `chosen` that the router itself would not have chosen.
  """

  chosen: jax.Array
  entropy: jax.Array
  replaced: jax.Array


def route(
    logits: jax.Array, active: int, renormalise: bool, chosen: jax.Array | None = None
) -> tuple[jax.Array, Routing]:
  """Returns (weights [B,T,A] float32, Routing) for router logits [B,T,E].

  A weight is the softmax over all E experts, at the chosen experts. With `renormalise` the weights
  of a token sum to 1. `chosen` [B,T,A] replays an earlier choice: it gives the experts, and the
  logits give their weights with the gradient.
  """
  chex.assert_rank(logits, 3)
  num_experts = logits.shape[-1]
  log_probs = jax.nn.log_softmax(logits.astype(jnp.float32))
  probs = jnp.exp(log_probs)
  _, likeliest = jax.lax.top_k(probs, active)
  if chosen is None:
    chosen = likeliest
  chosen = chosen.astype(jnp.int32)
  chex.assert_shape(chosen, (*logits.shape[:2], active))
  # A sum over E with one term: its derivative needs no scatter.
  is_chosen = jnp.arange(num_experts) == chosen[..., None]
  probs_of_chosen = jnp.where(is_chosen, probs[..., None, :], 0)
  weights = jnp.sum(probs_of_chosen, axis=-1)
  if renormalise:
    weights /= jnp.sum(weights, axis=-1, keepdims=True)
  is_equal = chosen[..., None] == likeliest[..., None, :]
  is_likeliest = is_equal.any(axis=-1)  # [B,T,A]
  replaced = 1 - jnp.mean(is_likeliest, axis=-1, dtype=jnp.float32)
  entropy = -jnp.sum(probs * log_probs, axis=-1)
  return weights, Routing(chosen, entropy, replaced)


def experts(
    x: jax.Array,
    weights: jax.Array,
    chosen: jax.Array,
    kernels: Sequence[jax.Array],
    row_sharding: NamedSharding | None = None,
) -> jax.Array:
  """Returns the sum over the chosen experts of weight times down(silu(gate(x)) * up(x)).

  x [B,T,D], weights and chosen [B,T,A], kernels (gate and up [E,D,F], down [E,F,D]) -> [B,T,D].

  Choice: on several devices each sorts the tokens of its own rows. A sort over all of them would
  move every token. The kernels are gathered over fsdp, as in dense layers, and
  each part of `tensor` computes its part of F.
  """
  if row_sharding is None:
    return _experts(x, weights, chosen, kernels)
  mesh: Any = row_sharding.mesh
  rows = P(row_sharding.spec[0])
  places = []
  for name, kernel in zip(KERNELS, kernels):
    places.append(sharding.layer_spec(f'moe/{name}', kernel.shape, mesh))
  down_place = places[2]
  part_axis = down_place[1]  # down is [E,F,D]

  def on_each_device(x, weights, chosen, *kernels):
    gathered = []
    for kernel, place in zip(kernels, places):
      fsdp_axis = place[0]
      if fsdp_axis is not None:
        kernel = jax.lax.all_gather(kernel, fsdp_axis, axis=0, tiled=True)
      gathered.append(kernel)
    y = _experts(x, weights, chosen, gathered)
    if part_axis is not None:
      y = jax.lax.psum(y, part_axis)
    return y

  in_specs = (rows, rows, rows, *places)
  mapped = jax.shard_map(on_each_device, mesh=mesh, in_specs=in_specs, out_specs=rows)
  return mapped(x, weights, chosen, *kernels)


class Experts(nn.Module):
  """Returns the weighted sum of each token's chosen experts; see `experts`."""

  config: layers.ModelConfig

  @nn.compact
  def __call__(self, x, chosen=None):
    """Maps x [B,T,D] to (y [B,T,D], Routing); `chosen` [B,T,A] replays an earlier choice.

    Choice: the router computes in float32, because bfloat16 makes many experts equal.
    """
    config = self.config
    d = config.d_model
    f = config.d_ff
    e = config.num_experts
    exact = dataclasses.replace(config, dtype='float32')
    router = layers.Project(exact, (d, e), precision='highest', name='router')
    logits = router(x.astype(jnp.float32))

    def kernel(name, shape, stddev):
      return self.param(name, nn.initializers.normal(stddev), shape, config.param_dtype)

    gate = kernel('gate', (e, d, f), 0.02)
    up = kernel('up', (e, d, f), 0.02)
    down = kernel('down', (e, f, d), 0.02 / math.sqrt(2 * config.num_layers))
    weights, routing = route(logits, config.experts_per_token, config.norm_topk_prob, chosen)
    shared = 0.0
    if config.shared_d_ff:
      wide = dataclasses.replace(config, d_ff=config.shared_d_ff)
      share = layers.Project(config, (d, 1), name='shared_gate')(x)
      shared = jax.nn.sigmoid(share) * layers.Mlp(wide, name='shared')(x)
    if self.is_initializing():  # under vmap, which a sharded sort does not support
      return x, routing
    kernels = [kernel.astype(config.dtype) for kernel in (gate, up, down)]
    y = experts(x, weights, routing.chosen, kernels, config.row_sharding)
    if config.shared_d_ff:
      y = y + shared
    return y, routing


def route_dtype(num_experts: int) -> jax.typing.DTypeLike:
  """Returns the smallest type of an expert's number, in which routes are stored."""
  return jnp.uint8 if num_experts <= 256 else jnp.uint16


def recorded_routes(routing: Routing, num_experts: int) -> jax.Array:
  """Returns the experts of each token [B,T,L,A] of a Routing of all layers, for a later replay."""
  routes = jnp.moveaxis(routing.chosen, 0, 2)
  return routes.astype(route_dtype(num_experts))


def no_routes(config: layers.ModelConfig, rows: int, length: int) -> jax.Array:
  """Returns zeros of the shape and type of `recorded_routes`."""
  shape = (rows, length, config.num_layers, config.experts_per_token)
  return jnp.zeros(shape, route_dtype(config.num_experts))


def routing_sums(routing: Routing, counts: jax.Array, num_experts: int) -> dict[str, jax.Array]:
  """Returns sums over tokens of a Routing of all layers; they add over batches.

  `counts` [B,T] is how often each token counts: the number of rows that have it, 0 in padding.
  'tokens' [L,E] counts the tokens of each expert, 'entropy' [L] sums the router's entropies. Of a
  replay, 'replaced' sums the share of a token's experts that the router itself would not have
  chosen, as a mean over layers, and 'changed' counts the tokens with such an expert in any layer.
  """
  is_chosen = jnp.arange(num_experts) == routing.chosen[..., None]  # [L,B,T,A,E]
  counted = is_chosen * counts[..., None, None]
  replaced = routing.replaced * counts  # [L,B,T]
  is_changed = (replaced > 0).any(axis=0)
  return {
      'tokens': jnp.sum(counted, axis=(1, 2, 3), dtype=jnp.float32),
      'entropy': jnp.sum(routing.entropy * counts, axis=(1, 2)),
      'replaced': jnp.sum(replaced) / len(replaced),
      'changed': jnp.sum(is_changed * counts, dtype=jnp.float32),
  }


def load_metrics(
    sums: dict[str, jax.Array], active: int, is_replay: bool = False
) -> dict[str, jax.Array]:
  """Returns metrics of how evenly the experts are used, from the sums of `routing_sums`.

  An expert's load is its share of the tokens times E / A. It is 1 if all experts are used evenly,
  and at most E / A. The largest, the smallest and the spread are over all experts of all layers.
  A replay adds how much its experts differ from those of the router itself.
  """
  tokens = sums['tokens']  # [L,E]
  num_experts = tokens.shape[1]
  live = tokens.sum(axis=1, keepdims=True) / active  # [L,1]
  live = jnp.maximum(live, 1)
  relative = tokens / live * (num_experts / active)
  metrics = {
      'moe/load_max': relative.max(),
      'moe/load_min': relative.min(),
      'moe/load_std': jnp.sqrt(jnp.mean(jnp.square(relative - 1))),
      'moe/unused_experts': jnp.mean(tokens == 0),
      'moe/router_entropy': jnp.mean(sums['entropy'] / live[:, 0]),
  }
  if is_replay:
    metrics['moe/replaced_experts'] = sums['replaced'] / live[0, 0]
    metrics['moe/tokens_routed_otherwise'] = sums['changed'] / live[0, 0]
  return metrics


def _experts(x, weights, chosen, kernels):
  """Computes `experts` for the tokens of one device."""
  gate, up, down = kernels
  active = chosen.shape[-1]
  width = x.shape[-1]
  num_experts = len(gate)
  expert = chosen.reshape(-1)  # [XA], an entry per copy of a token
  order = jnp.argsort(expert)
  inverse = jnp.argsort(order)
  is_of_expert = expert[:, None] == jnp.arange(num_experts)
  sizes = jnp.sum(is_of_expert, axis=0, dtype=jnp.int32)
  product = functools.partial(jax.lax.ragged_dot, group_sizes=sizes)
  tokens = x.reshape(-1, 1, width)
  copies = jnp.repeat(tokens, active, axis=1)
  copies = copies.reshape(-1, width)
  rows = _permute(copies, order, inverse)
  gated = jax.nn.silu(product(rows, gate))
  hidden = gated * product(rows, up)
  y = product(hidden, down)
  y = _permute(y, inverse, order)
  y = y.reshape(*chosen.shape, width)
  y = jnp.sum(y * weights[..., None], axis=-2)
  return y.astype(x.dtype)


@jax.custom_vjp
def _permute(x, order, inverse):
  """Returns x[order]; the derivative is the inverse permutation instead of a scatter."""
  del inverse
  return x[order]


def _permute_forward(x, order, inverse):
  return x[order], inverse


def _permute_backward(inverse, d):
  return d[inverse], None, None


_permute.defvjp(_permute_forward, _permute_backward)
