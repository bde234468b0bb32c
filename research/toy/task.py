"""The toy task: a chain of look-ups. All functions are pure and for one seed; `vmap` adds seeds.

A question is a key. The agent answers a key with its word, which is some tokens and END. After the
right word the environment shows the next key of the chain, as the right query finds the next fact.
After a wrong word all further keys are noise. An episode is right if all its words are:

  key | word END | key' | word' END | key'' | word'' END
   o     a a  a     o      a     a      o      a a a   a      o observation, a agent

Words have 1 to `tokens` tokens, so turns have different lengths. A row [T] has a fixed place for
each turn, and places after END are padding within the row: action_mask 0.

Letters beyond types.py: Q keys, S places of a turn (tokens and END), F features.
"""

from collections.abc import Callable
import dataclasses
from typing import Any

import flax
import jax
import jax.numpy as jnp
import numpy as np

from stppo_jax import types


@dataclasses.dataclass(frozen=True)
class Chain:
  """Sizes of the task."""

  turns: int
  tokens: int  # most tokens of a word, without END
  vocabulary: int  # without END
  keys: int
  rewards: str  # 'end' | 'turn'

  @property
  def places(self) -> int:
    """S: places of a turn."""
    return self.tokens + 1

  @property
  def columns(self) -> int:
    """T: columns of a row; each turn has one more for the key before it."""
    return self.turns * (self.places + 1)

  @property
  def end(self) -> int:
    """The token END."""
    return self.vocabulary

  @property
  def num_features(self) -> int:
    """F."""
    words = self.tokens * (self.vocabulary + 1)
    return 2 * self.keys + words + self.turns + self.places


@flax.struct.dataclass
class World:
  """One instance of the task, drawn from a seed; arrays of NumPy or JAX."""

  words: Any  # [K,Q,S] int32, the right word of each key in each turn, END from its end on
  following: Any  # [K,Q] int32, the key after the right word
  confused: Any  # [K,Q] int32, the key whose word a demonstration gives by mistake
  reliability: Any  # [K,Q] share of demonstrations with the right word


@flax.struct.dataclass
class Played:
  """Episodes as the environment saw them."""

  keys: jax.Array  # [B,K] int32, what was shown before each turn
  previous: jax.Array  # [B,K] int32, what was shown before the last turn; -1 in the first
  tokens: jax.Array  # [B,K,S] int32, END from a word's end on
  logp: jax.Array  # [B,K,S] of the sampled tokens, 0 in padding
  mask: jax.Array  # [B,K,S] bool
  right: jax.Array  # [B,K] bool, whether all words so far are right
  cut: jax.Array  # [B] bool, whether the last turn has no END


def make_world(chain: Chain, seed: int, least_reliable: float) -> World:
  """Draws words, the order of keys, and how often each word is demonstrated rightly."""
  rng = np.random.default_rng(seed)
  table = (chain.turns, chain.keys)
  words = rng.integers(0, chain.vocabulary, (*table, chain.places))
  lengths = rng.integers(1, chain.tokens + 1, table)
  away = rng.integers(1, chain.keys, table)
  return World(
      words=np.where(np.arange(chain.places) < lengths[..., None], words, chain.end),
      following=np.stack([rng.permutation(chain.keys) for _ in range(chain.turns)]),
      confused=(np.arange(chain.keys) + away) % chain.keys,
      reliability=rng.uniform(least_reliable, 1, table).astype(np.float32),
  )


def features(
    chain: Chain, keys: jax.Array, previous: jax.Array, tokens: jax.Array, turns: jax.Array
) -> jax.Array:
  """Returns what models see before each place [..,S,F]: a window, one-hot.

  The window holds the last two keys, the tokens of this turn so far, and the numbers of turn and
  place. `keys`, `previous` and `turns` (from 0) are [..], `tokens` is [..,S].
  """
  shape = tokens.shape

  def spread(x, size):
    return jnp.broadcast_to(jax.nn.one_hot(x, size)[..., None, :], (*shape, size))

  window = jax.nn.one_hot(tokens[..., : chain.tokens], chain.vocabulary + 1)  # [..,S-1,V+1]
  earlier = jnp.arange(chain.tokens) < jnp.arange(chain.places)[:, None]  # [S,S-1]
  window = jnp.where(earlier[..., None], window[..., None, :, :], 0)  # [..,S,S-1,V+1]
  place = jnp.broadcast_to(jnp.eye(chain.places), (*shape, chain.places))
  parts = (
      spread(keys, chain.keys),
      spread(previous, chain.keys),  # all 0 for -1
      window.reshape(*shape, -1),
      spread(turns, chain.turns),
      place,
  )
  return jnp.concatenate(parts, axis=-1)


def features_of(chain: Chain, played: Played) -> jax.Array:
  """Returns the features of played episodes [B,K,S,F]."""
  turns = jnp.broadcast_to(jnp.arange(chain.turns), played.keys.shape)
  return features(chain, played.keys, played.previous, played.tokens, turns)


def uniform_key(chain: Chain, chances: jax.Array) -> jax.Array:
  """Returns keys, of numbers that are uniform in [0, 1)."""
  return (chances * chain.keys).astype(jnp.int32)


def num_chances(chain: Chain, num_rows: int) -> int:
  """Returns how many uniform numbers `play` and `demonstrate` take."""
  return chain.turns * (chain.places + 1) * num_rows


def play(
    chain: Chain, world: World, log_probs: Callable, chances: jax.Array, questions: jax.Array
) -> Played:
  """Plays an episode per question [B]; `log_probs` maps features [B,F] to [B,V+1].

  `chances` [`num_chances`] are uniform in [0, 1).
  """
  num_rows = questions.shape[0]
  chances = chances.reshape(chain.turns, chain.places + 1, num_rows)

  def answer(k, shown, previous, chances):
    tokens = jnp.full((num_rows, chain.places), chain.end)
    logp = jnp.zeros(tokens.shape)
    mask = jnp.zeros(tokens.shape, bool)
    ended = jnp.zeros(num_rows, bool)
    for place in range(chain.places):
      seen = features(chain, shown, previous, tokens, jnp.full(num_rows, k))[:, place]
      scores = log_probs(seen)
      token = _draw(scores, chances[place])
      chosen = jnp.take_along_axis(scores, token[:, None], axis=1)[:, 0]
      tokens = tokens.at[:, place].set(jnp.where(ended, chain.end, token))
      logp = logp.at[:, place].set(jnp.where(ended, 0, chosen))
      mask = mask.at[:, place].set(~ended)
      ended |= token == chain.end
    return tokens, logp, mask

  return _chained(chain, world, answer, chances[:, 1:], chances[:, 0], questions)


def demonstrate(chain: Chain, world: World, chances: jax.Array, questions: jax.Array) -> Played:
  """Plays by script: the right word as often as it is reliable, else that of a confused key."""
  chances = chances.reshape(chain.turns, chain.places + 1, questions.shape[0])

  def answer(k, shown, previous, chances):
    del previous
    is_right = chances < world.reliability[k, shown]
    tokens = world.words[k, jnp.where(is_right, shown, world.confused[k, shown])]
    return tokens, jnp.zeros(tokens.shape), _until_end(chain, tokens)

  return _chained(chain, world, answer, chances[:, 1], chances[:, 0], questions)


def right_ways(chain: Chain, world: World) -> Played:
  """Returns the right episode of each of the Q questions."""

  def answer(k, shown, previous, nothing):
    del previous, nothing
    tokens = world.words[k, shown]
    return tokens, jnp.zeros(tokens.shape), _until_end(chain, tokens)

  questions = jnp.arange(chain.keys)
  nothing = jnp.zeros((chain.turns, chain.keys))
  return _chained(chain, world, answer, nothing, nothing, questions)


def to_batch(chain: Chain, played: Played, group_ids: jax.Array) -> types.TurnBatch:
  """Returns the TurnBatch of played episodes, rewards on the last token of a turn."""
  mask = played.mask.astype(jnp.float32)
  last = mask * (1 - jnp.pad(mask[..., 1:], ((0, 0), (0, 0), (0, 1))))
  if chain.rewards == 'turn':
    earned = played.right / chain.turns
  else:
    earned = played.right * (jnp.arange(chain.turns) == chain.turns - 1)
  turn_ids = jnp.arange(1, chain.turns + 1)[:, None] * played.mask
  nothing = jnp.zeros((len(group_ids), chain.columns))
  return types.TurnBatch(
      tokens=to_row(chain, played.tokens, played.keys),
      action_mask=to_row(chain, mask),
      turn_ids=to_row(chain, turn_ids),
      rewards=to_row(chain, earned[..., None] * last),
      old_logp=nothing,
      ref_logp=nothing,
      old_values=nothing,
      advantages=nothing,
      returns=nothing,
      group_ids=group_ids,
      behaviour_logp=to_row(chain, played.logp),
      truncated=played.cut.astype(jnp.float32),
  )


def to_row(chain: Chain, x: jax.Array, before: jax.Array | None = None) -> jax.Array:
  """Puts the turns [B,K,S] of rows in their columns [B,T], each after `before` [B,K] or 0."""
  before = jnp.zeros(x.shape[:-1], x.dtype) if before is None else before
  return jnp.concatenate((before[..., None], x), axis=-1).reshape(-1, chain.columns)


def _chained(chain, world, answer, turn_inputs, noise, questions):
  """Runs the environment around answer(k, keys, previous, turn_inputs[k]) -> tokens, logp, mask.

  `noise` [K,B] is uniform in [0, 1): the keys shown after a wrong word.
  """
  noise = uniform_key(chain, noise)

  def step(carry, x):
    shown, previous, right = carry
    k, given, noise = x
    tokens, logp, mask = answer(k, shown, previous, given)
    right &= (tokens == world.words[k, shown]).all(axis=-1)
    following = jnp.where(right, world.following[k, shown], noise)
    seen = (shown, previous, tokens, logp, mask, right)
    return (following, shown, right), seen

  first = (questions, jnp.full_like(questions, -1), jnp.ones(questions.shape, bool))
  _, seen = jax.lax.scan(step, first, (jnp.arange(chain.turns), turn_inputs, noise))
  shown, previous, tokens, logp, mask, right = (jnp.moveaxis(x, 0, 1) for x in seen)
  cut = mask[:, -1, -1] & (tokens[:, -1, -1] != chain.end)
  return Played(shown, previous, tokens, logp, mask, right, cut)


def _draw(log_probs, chances):
  """Returns a token of each row [B], by the inverse of the distribution function."""
  below = jnp.cumsum(jnp.exp(log_probs), axis=-1)[:, :-1] < chances[:, None]
  return below.sum(axis=-1).astype(jnp.int32)


def _until_end(chain, tokens):
  """Returns the mask [..,S] of a word and its END."""
  before = jnp.cumsum(tokens == chain.end, axis=-1) - (tokens == chain.end)
  return before == 0
