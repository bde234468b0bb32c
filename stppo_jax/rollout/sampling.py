"""Settings of a sampler, and the draw of one token per row."""

from collections.abc import Callable
from collections.abc import Sequence
import dataclasses
import math

import chex
import jax
import jax.numpy as jnp

ACCELERATOR_BUCKETS = 4  # numbers of slots for which programs are compiled; a CPU compiles quickly
BLOCK = 128  # indices per block of `_draw`


def round_up(count: int, multiple: int) -> int:
  """Returns the smallest multiple that is at least `count`."""
  return -(-count // multiple) * multiple


def batched(items: Sequence, size: int) -> list[Sequence]:
  """Returns the items in parts of `size`, the last one with what is left."""
  return [items[i : i + size] for i in range(0, len(items), size)]


@dataclasses.dataclass(frozen=True)
class Sizes:
  """The fixed sizes of a sampler's calls, for which its programs are compiled."""

  max_slots: int  # tokens a row may ever hold
  rows: int = 64  # sequences in progress at once, rounded up to whole groups
  width: int = 0  # rows of a group, which one call decodes; 0: all
  prefill_rows: int = 8  # rows of a prefill call; all of a group where rows are split
  steps: int = 32  # tokens a row samples in one call, at most
  slot_buckets: Sequence[int] = ()  # see `default_slot_buckets`; empty: one bucket
  chunk_buckets: Sequence[int] = (32, 128)  # tokens of a row per prefill call


@dataclasses.dataclass(frozen=True)
class Distribution:
  """The distribution that a token is drawn from, see `make_draw`."""

  temperature: float = 1.0  # 0: greedy
  top_k: int = 0  # 0: off
  top_p: float = 1.0  # 1: off

  @property
  def row_settings(self) -> tuple[float, float, float]:
    """The settings of a row for `make_draw`."""
    return self.temperature, self.top_p, 0.0


AS_IS = Distribution()
GREEDY = Distribution(temperature=0.0)


def default_slot_buckets(max_slots: int, platform: str = 'cpu') -> tuple[int, ...]:
  """Returns 128, 192, 256, 384, 512, 768, .. up to `max_slots`: at most half more than needed.

  On accelerators, whose compilers take minutes per program, at most four that double.
  """
  sizes = []
  if platform == 'cpu':
    for power in range(7, 31):
      sizes += [2**power, 2**power * 3 // 2]
  else:
    for halvings in range(ACCELERATOR_BUCKETS):
      part = max_slots / 2**halvings
      sizes.append(round_up(math.ceil(part), 128))
  buckets = {min(size, max_slots) for size in sizes}
  return tuple(sorted(buckets))


def make_draw(
    settings: jax.Array, top_k: int = 0
) -> Callable[[jax.Array, jax.Array], tuple[jax.Array, jax.Array]]:
  """Returns draw(logits [B,V], keys [B]) -> (token [B], log-prob [B]), with settings per row.

  The settings [B,3] are temperature, top_p and a flag. A row's distribution is softmax(logits /
  temperature), cut to the top_k likeliest tokens, then to the fewest likeliest that hold a mass of
  top_p, then renormalised. The log-prob is that of this very distribution, or the model's plain
  log-prob (temperature 1, uncut) for a row with flag 1. A row does not depend on the settings of
  other rows. A call pays for a sort only if a row has top_p < 1. Choice: among equal logits the
  lower id counts as likelier. Choice: temperature 0 is greedy and reports the plain log-prob.
  """
  chex.assert_shape(settings, (None, 3))
  temperature, top_p, plain_flag = settings.T
  is_greedy = temperature == 0
  is_cut = ~is_greedy & (top_p < 1)
  any_cut = is_cut.any()
  wants_plain = is_greedy | (plain_flag > 0)
  # Training and evaluation are the first two cases, with fewer passes over the logits.
  needs_each = jnp.any(wants_plain | is_cut)
  case = jnp.where(is_greedy.all(), 1, 2 * needs_each)

  def draw_uncut(logits, scaled, keys):
    if not 0 < top_k < logits.shape[1]:
      return _draw(scaled, keys)
    top_logits, ids = jax.lax.top_k(scaled, top_k)  # likeliest first
    choice, logp = _draw(top_logits, keys)
    return _take(ids, choice), logp

  def take_likeliest(logits, scaled, keys):
    del scaled, keys
    token = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    return token, _take(jax.nn.log_softmax(logits), token)

  def draw_each(logits, scaled, keys):
    token, logp = draw_uncut(logits, scaled, keys)
    draw_cut = lambda: _draw_cut(scaled, keys, top_k, top_p)
    cut_token, cut_logp = jax.lax.cond(any_cut, draw_cut, lambda: (token, logp))
    token = jnp.where(is_cut, cut_token, token)
    logp = jnp.where(is_cut, cut_logp, logp)
    likeliest = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    token = jnp.where(is_greedy, likeliest, token)
    plain_logp = _take(jax.nn.log_softmax(logits), token)
    return token, jnp.where(wants_plain, plain_logp, logp)

  def draw(logits, keys):
    chex.assert_shape(logits, (len(settings), None))
    chex.assert_shape(keys, (len(settings),))
    logits = logits.astype(jnp.float32)
    scaled = logits / jnp.where(is_greedy, 1.0, temperature)[:, None]
    cases = (draw_uncut, take_likeliest, draw_each)
    return jax.lax.switch(case, cases, logits, scaled, keys)

  return draw


def _draw_cut(logits, keys, top_k, top_p):
  """Draws from the fewest likeliest tokens that hold the mass top_p [B]."""
  size = logits.shape[1]
  if 0 < top_k < size:
    size = top_k
  logits, ids = jax.lax.top_k(logits, size)
  probs = jax.nn.softmax(logits)
  mass_before = jnp.cumsum(probs, axis=-1) - probs
  is_first = jnp.arange(logits.shape[1]) == 0  # it stays, however small top_p is
  is_inside = is_first | (mass_before < top_p[:, None])
  choice, logp = _draw(jnp.where(is_inside, logits, -jnp.inf), keys)
  return _take(ids, choice), logp


def _draw(logits, keys):
  """Draws from softmax(logits): logits [B,V], keys [B] -> (index [B], logp [B]).

  By inversion: first a block of indices by the blocks' masses, then an index in it, each with a
  uniform number of its own, so that the tail of a large vocabulary is not rounded away. This takes
  one exp per index; Gumbel noise would take two logs and a random number.
  """
  peak = logits.max(axis=-1)
  mass = _block_masses(logits, peak)
  block_mass = mass.sum(axis=-1)
  draw_two = lambda key: jax.random.uniform(key, (2,))
  uniform = jax.vmap(draw_two)(keys)
  block = _invert(block_mass, uniform[:, 0])
  mass_here = jnp.take_along_axis(mass, block[:, None, None], axis=1)[:, 0]
  index = _invert(mass_here, uniform[:, 1])
  choice = (block * BLOCK + index).astype(jnp.int32)
  total = block_mass.sum(axis=-1)
  return choice, _take(logits, choice) - peak - jnp.log(total)


def _block_masses(logits, peak):
  """Returns exp(logits - peak) in blocks [B,blocks,BLOCK], the last one filled with zeros."""
  rows, size = logits.shape
  blocks = -(-size // BLOCK)
  missing = blocks * BLOCK - size
  mass = jnp.exp(logits - peak[:, None])
  mass = jnp.pad(mass, ((0, 0), (0, missing)))
  return mass.reshape(rows, blocks, BLOCK)


def _invert(mass, uniform):
  """Returns the first index at which the cumulative mass [B,n] exceeds its share `uniform` [B].

  An index without mass is never returned, whatever the rounding.
  """
  reached = jnp.cumsum(mass, axis=-1)
  share = uniform[:, None] * reached[:, -1:]
  beyond = (reached > share) & (mass > 0)
  first_beyond = jnp.argmax(beyond, axis=-1)
  largest = jnp.argmax(mass, axis=-1)
  return jnp.where(beyond.any(axis=-1), first_beyond, largest)


def _take(values, index):
  """Takes values [B,V] at index [B] -> [B]."""
  return jnp.take_along_axis(values, index[:, None], axis=-1)[:, 0]
