"""Sampling of one token per row: logits and keys in, tokens and log-probs out."""

import functools

import chex
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from stppo_jax import types

BLOCK = 128  # indices per block of `_draw`; tensor shards of logits hold whole blocks


def sample_token(
    logits: jax.Array, keys: jax.Array, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0
) -> tuple[jax.Array, jax.Array]:
  """Draws a token per row, with its log-prob: logits [B,V], keys [B] -> (token [B], logp [B]).

  The distribution is softmax(logits / temperature), cut to the top_k likeliest tokens, then to the
  fewest likeliest that hold a mass of top_p, then renormalised. The log-prob is that of this very
  distribution. Choice: among equal logits the lower id counts as likelier. Choice: temperature 0 is
  greedy and reports the model's plain log-prob, at temperature 1 and uncut.
  """
  chex.assert_rank(logits, 2)
  chex.assert_shape(keys, logits.shape[:1])
  logits = logits.astype(jnp.float32)
  if temperature == 0:
    token = jnp.argmax(logits, axis=-1)
    return token.astype(jnp.int32), _take(jax.nn.log_softmax(logits), token)
  logits = logits / temperature
  cut = 0 < top_k < logits.shape[1] or top_p < 1
  if cut:
    kept = top_k if 0 < top_k < logits.shape[1] else logits.shape[1]
    logits, ids = jax.lax.top_k(logits, kept)  # [B,kept], likeliest first
  if top_p < 1:
    probs = jax.nn.softmax(logits)
    mass_before = jnp.cumsum(probs, axis=-1) - probs
    first = jnp.arange(logits.shape[1]) == 0  # always kept, however small top_p is
    logits = jnp.where(first | (mass_before < top_p), logits, -jnp.inf)
  choice, logp = _draw(logits, keys)
  token = _take(ids, choice) if cut else choice
  return token.astype(jnp.int32), logp


def sample_sharded(
    logits: jax.Array,
    keys: jax.Array,
    temperature: float,
    top_k: int,
    top_p: float,
    row_sharding: jax.sharding.NamedSharding,
    size: int,
) -> tuple[jax.Array, jax.Array]:
  """Is `sample_token` for logits [B,V] split over rows and 'tensor', of which `size` are real.

  The shards exchange masses of blocks and the chosen block instead of logits. The draw is the same
  as on one device: the same blocks, uniform numbers and sums. Choice: top_k and top_p gather the
  logits [B,V], because their order spans all shards.
  """
  logits = logits.astype(jnp.float32)
  if temperature and (top_k or top_p < 1):
    logits = jax.lax.with_sharding_constraint(logits[:, :size], row_sharding)
    return sample_token(logits, keys, temperature, top_k, top_p)
  rows = row_sharding.spec[0]
  uniform = _uniform(keys) if temperature else jnp.zeros((len(logits), 2), jnp.float32)
  sample = jax.shard_map(
      functools.partial(_sample_shard, temperature=temperature, size=size),
      mesh=row_sharding.mesh,
      in_specs=(P(rows, 'tensor'), P(rows)),
      out_specs=(P(rows), P(rows)),
      check_vma=False,  # results are equal on all shards, which the check cannot see
  )
  return sample(logits, uniform)


def _draw(logits, keys):
  """Draws from softmax(logits): logits [B,V], keys [B] -> (index [B], logp [B]).

  By inversion: first a block of indices by the blocks' masses, then an index in it, each with a
  uniform number of its own, so that the tail of a large vocabulary is not rounded away. This takes
  one exp per index; Gumbel noise would take two logs and a random number.
  """
  peak = logits.max(axis=-1)
  mass = _block_masses(logits, peak)
  block_mass = mass.sum(axis=-1)
  uniform = _uniform(keys)
  block = _invert(block_mass, uniform[:, 0])
  mass_here = jnp.take_along_axis(mass, block[:, None, None], axis=1)[:, 0]
  choice = block * BLOCK + _invert(mass_here, uniform[:, 1])
  return choice, _take(logits, choice) - peak - jnp.log(block_mass.sum(axis=-1))


def _sample_shard(logits, uniform, temperature, size):
  """Computes `_draw`, or the greedy choice, on one tensor shard: logits [b,v], uniform [b,2].

  Three all-reduces: of the peaks [b], of the blocks' masses [b,V/128] and of one block [b,256].
  """
  rows, width = logits.shape
  first = jax.lax.axis_index('tensor') * width
  ids = first + jnp.arange(width)
  logits = jnp.where(ids < size, logits / (temperature or 1), -jnp.inf)
  peak = jax.lax.pmax(logits.max(axis=-1), 'tensor')
  if temperature == 0:
    lowest = jnp.min(jnp.where(logits == peak[:, None], ids, jnp.iinfo(jnp.int32).max), axis=-1)
    token = jax.lax.pmin(lowest, 'tensor')  # of equal logits
    total = jax.lax.psum(jnp.exp(logits - peak[:, None]).sum(axis=-1), 'tensor')
    return token.astype(jnp.int32), -jnp.log(total)
  mass = _block_masses(logits, peak)
  blocks = mass.shape[1]
  # Each shard's sums in their columns and zeros elsewhere: a sum that gathers without rounding.
  block_mass = jnp.zeros((rows, blocks * jax.lax.axis_size('tensor')), jnp.float32)
  block_mass = jax.lax.dynamic_update_slice(block_mass, mass.sum(axis=-1), (0, first // BLOCK))
  block_mass = jax.lax.psum(block_mass, 'tensor')
  block = _invert(block_mass, uniform[:, 0])
  mine = block - first // BLOCK
  is_mine = (mine >= 0) & (mine < blocks)
  index = jnp.clip(mine, 0, blocks - 1)[:, None, None]
  here = lambda array: jnp.take_along_axis(array.reshape(rows, blocks, BLOCK), index, axis=1)[:, 0]
  found = jnp.concatenate([here(mass), here(logits)], axis=1)
  found = jax.lax.psum(jnp.where(is_mine[:, None], found, 0), 'tensor')
  choice = _invert(found[:, :BLOCK], uniform[:, 1])
  logit = _take(found[:, BLOCK:], choice)
  token = (block * BLOCK + choice).astype(jnp.int32)
  return token, logit - peak - jnp.log(block_mass.sum(axis=-1))


def _uniform(keys):
  """Returns two uniform numbers per key [B,2]."""
  return jax.vmap(lambda key: jax.random.uniform(key, (2,)))(keys)


def _block_masses(logits, peak):
  """Returns exp(logits - peak) in blocks [B,blocks,BLOCK], the last one filled with zeros."""
  rows, size = logits.shape
  blocks = -(-size // BLOCK)
  mass = jnp.pad(jnp.exp(logits - peak[:, None]), ((0, 0), (0, blocks * BLOCK - size)))
  return mass.reshape(rows, blocks, BLOCK)


def _invert(mass, uniform):
  """Returns the first index at which the cumulative mass [B,n] exceeds its share `uniform` [B].

  An index without mass is never returned, whatever the rounding.
  """
  reached = jnp.cumsum(mass, axis=-1)
  beyond = (reached > uniform[:, None] * reached[:, -1:]) & (mass > 0)
  return jnp.where(beyond.any(axis=-1), jnp.argmax(beyond, axis=-1), jnp.argmax(mass, axis=-1))


def check_sampling(temperature: float, top_k: int, top_p: float) -> None:
  """Raises a UserError unless the three numbers describe a distribution."""
  if temperature < 0:
    raise types.UserError(f'temperature={temperature}: give 0 (greedy) or more')
  if top_k < 0:
    raise types.UserError(f'top_k={top_k}: give 0 (off) or more')
  if not 0 < top_p <= 1:
    raise types.UserError(f'top_p={top_p}: give more than 0 and at most 1 (off)')


def _take(values, index):
  """Takes values [B,V] at index [B] -> [B]."""
  return jnp.take_along_axis(values, index[:, None], axis=-1)[:, 0]
