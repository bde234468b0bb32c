"""Settings of a sampler, and the draw of one token per row."""

from collections.abc import Callable
from collections.abc import Sequence
import dataclasses
import functools
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
  starts = range(0, len(items), size)
  return [items[start : start + size] for start in starts]


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


Drawn = tuple[jax.Array, jax.Array]  # (token [B], log-prob [B])
Draw = Callable[[jax.Array, jax.Array], Drawn]  # (logits [B,V], keys [B]) -> drawn

AS_IS = Distribution()
GREEDY = Distribution(temperature=0.0)


def default_slot_buckets(max_slots: int, platform: str = 'cpu') -> tuple[int, ...]:
  """Returns 128, 192, 256, 384, 512, 768, .. up to `max_slots`: at most half more than needed.

  On accelerators, where compiling a program takes minutes, there are at most four, each twice the
  one before.
  """
  sizes = []
  if platform == 'cpu':
    for power in range(7, 31):
      size = 2**power
      sizes += [size, size * 3 // 2]
  else:
    for halvings in range(ACCELERATOR_BUCKETS):
      part = math.ceil(max_slots / 2**halvings)
      size = round_up(part, 128)
      sizes.append(size)
  buckets = {min(size, max_slots) for size in sizes}
  return tuple(sorted(buckets))


def make_draw(settings: jax.Array, top_k: int = 0) -> Draw:
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
  all_greedy = is_greedy.all()
  case = jnp.where(all_greedy, 1, 2 * needs_each)

  def draw_uncut(logits, scaled, keys):
    if not 0 < top_k < logits.shape[1]:
      return _draw(scaled, keys)
    top_logits, ids = _top_k(scaled, top_k)  # likeliest first
    choice, logp = _draw(top_logits, keys)
    return _take(ids, choice), logp

  def take_likeliest(logits, scaled, keys):
    del scaled, keys
    token = _likeliest(logits)
    return token, _plain_logp(logits, token)

  def draw_each(logits, scaled, keys):
    uncut = draw_uncut(logits, scaled, keys)
    draw_cut_rows = jax.vmap(functools.partial(_draw_cut, top_k=top_k))
    draw_cut = lambda: draw_cut_rows(scaled, keys, top_p)
    cut = jax.lax.cond(any_cut, draw_cut, lambda: uncut)
    token, logp = uncut
    cut_token, cut_logp = cut
    token = jnp.where(is_cut, cut_token, token)
    logp = jnp.where(is_cut, cut_logp, logp)
    likeliest = _likeliest(logits)
    token = jnp.where(is_greedy, likeliest, token)
    plain_logp = _plain_logp(logits, token)
    logp = jnp.where(wants_plain, plain_logp, logp)
    return token, logp

  def draw(logits, keys):
    rows = len(settings)
    chex.assert_shape(logits, (rows, None))
    chex.assert_shape(keys, (rows,))
    logits = logits.astype(jnp.float32)
    divisor = jnp.where(is_greedy, 1.0, temperature)
    scaled = logits / divisor[:, None]
    cases = (draw_uncut, take_likeliest, draw_each)
    return jax.lax.switch(case, cases, logits, scaled, keys)

  return draw


@jax.vmap
def _take(values, index):
  """Takes values [B,V] at index [B] -> [B]."""
  return values[index]


def _likeliest(logits):
  token = jnp.argmax(logits, axis=-1)
  return token.astype(jnp.int32)


def _top_k(logits, k):
  """Returns (logits, ids) [..,k] of the k likeliest tokens, of logits [..,V].

  -0 equals 0, where the order of `jax.lax.top_k` would put it last. A NaN, which may be ordered
  first or last, makes all logits of its row NaN, so that it shows in the log-prob.
  """
  is_broken = jnp.isnan(logits).any(axis=-1, keepdims=True)
  logits = jnp.where(is_broken, jnp.nan, logits)
  return jax.lax.top_k(jnp.where(logits == 0, jnp.abs(logits), logits), k)


def _plain_logp(logits, token):
  """Returns the log-prob of a token at temperature 1, uncut."""
  logp = jax.nn.log_softmax(logits)
  return _take(logp, token)


def _draw_cut(logits, key, top_p, top_k):
  """Draws from the fewest likeliest tokens that hold the mass top_p: logits [V]."""
  size = logits.size
  if 0 < top_k < size:
    size = top_k
  logits, ids = _top_k(logits, size)
  probs = jax.nn.softmax(logits)
  mass_before = jnp.cumsum(probs) - probs
  is_first = jnp.arange(size) == 0  # it stays, however small top_p is
  is_inside = is_first | (mass_before < top_p)
  inside = jnp.where(is_inside, logits, -jnp.inf)
  choice, logp = _draw_row(inside, key)
  return ids[choice], logp


def _draw_row(logits, key):
  """Draws from softmax(logits): logits [V] and a key -> (index, its log-prob).

  By inversion: first a block of indices by the blocks' masses, then an index in it, each with a
  separate uniform number, so that the tail of a large vocabulary is not rounded away. This takes
  one exp per index; Gumbel noise would take two logs and a random number.
  """
  peak = logits.max()
  mass = jnp.exp(logits - peak)
  missing = -logits.size % BLOCK
  mass = jnp.pad(mass, (0, missing))
  blocks = mass.reshape(-1, BLOCK)
  block_mass = blocks.sum(axis=-1)
  uniform = jax.random.uniform(key, (2,))
  block = _invert(block_mass, uniform[0])
  index = _invert(blocks[block], uniform[1])
  choice = block * BLOCK + index
  choice = choice.astype(jnp.int32)
  total = block_mass.sum()
  logp = logits[choice] - peak - jnp.log(total)
  return choice, logp


_draw = jax.vmap(_draw_row)


def _invert(mass, uniform):
  """Returns the first index at which the cumulative mass [n] exceeds its share `uniform`.

  An index without mass is never returned, also after rounding.
  """
  reached = jnp.cumsum(mass)
  share = uniform * reached[-1]
  beyond = (reached > share) & (mass > 0)
  first_beyond = jnp.argmax(beyond)
  largest = jnp.argmax(mass)
  return jnp.where(beyond.any(), first_beyond, largest)
