"""What a sampler is set to, and one token per row: logits and keys in, tokens and log-probs out."""

from collections.abc import Sequence
import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from stppo_jax import types

ACCELERATOR_BUCKETS = 4  # numbers of slots for which programs are compiled; a CPU compiles quickly
BLOCK = 128  # indices per block of `_draw`; tensor shards of logits hold whole blocks


def round_up(count: int, multiple: int) -> int:
  """Returns the smallest multiple that is at least `count`."""
  return -(-count // multiple) * multiple


@dataclasses.dataclass(frozen=True)
class Sizes:
  """The fixed sizes of a sampler's calls, for which its programs are compiled."""

  max_slots: int  # tokens a row may ever hold
  rows: int = 64  # sequences in progress at once, rounded up to whole groups
  width: int = 0  # rows of a group, which one call decodes; 0: all
  prefill_rows: int = 8  # rows of a prefill call; all of a group where rows are split
  steps: int = 32  # tokens a row samples in one call, at most
  slot_buckets: Sequence[int] | None = None  # None: doubling, with a step between, from 128
  chunk_buckets: Sequence[int] = (32, 128)  # tokens of a row per prefill call

  def __post_init__(self):
    numbers = (self.max_slots, self.rows, self.prefill_rows, self.steps, *self.chunk_buckets)
    if min(numbers) < 1 or self.width < 0:
      raise types.UserError(
          'max_slots, rows, prefill_rows, steps and chunks must be at least 1, width at least 0'
      )


@dataclasses.dataclass(frozen=True)
class Distribution:
  """The distribution that a token is drawn from, see `sample_token`."""

  temperature: float = 1.0  # 0: greedy
  top_k: int = 0  # 0: off
  top_p: float = 1.0  # 1: off

  def __post_init__(self):
    if self.temperature < 0:
      raise types.UserError(f'temperature={self.temperature}: give 0 (greedy) or more')
    if self.top_k < 0:
      raise types.UserError(f'top_k={self.top_k}: give 0 (off) or more')
    if not 0 < self.top_p <= 1:
      raise types.UserError(f'top_p={self.top_p}: give more than 0 and at most 1 (off)')


AS_IS, GREEDY = Distribution(), Distribution(temperature=0.0)


def default_slot_buckets(max_slots: int, platform: str = 'cpu') -> tuple[int, ...]:
  """Returns 128, 192, 256, 384, 512, 768, .. up to `max_slots`: at most half more than needed.

  On accelerators, whose compilers take minutes per program, at most four that double.
  """
  if platform != 'cpu':
    tiles = -(-max_slots // 128)
    parts = (-(-tiles // 2**i) for i in range(ACCELERATOR_BUCKETS))
    return tuple(sorted({min(part * 128, max_slots) for part in parts}))
  buckets = [b for i in range(7, 31) for b in (2**i, 3 * 2 ** (i - 1)) if b < max_slots]
  return (*buckets, max_slots)


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
  """Draws as `sample_token`, from logits [B,V] split over rows and 'tensor'; `size` are real.

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

  def here(array):
    return jnp.take_along_axis(array.reshape(rows, blocks, BLOCK), index, axis=1)[:, 0]

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


def _take(values, index):
  """Takes values [B,V] at index [B] -> [B]."""
  return jnp.take_along_axis(values, index[:, None], axis=-1)[:, 0]
