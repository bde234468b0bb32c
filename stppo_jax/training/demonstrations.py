"""Demonstrations of a task: texts in, padded rows of tokens for the warm start out.

A demonstration is a prompt, turns and observations with the very borders that an episode has: so what
is learnt from it is what is sampled later, to the token.
"""

import typing

import numpy as np

from stppo_jax import chat
from stppo_jax.types import UserError

WINDOW = 8  # batches of neighbouring lengths that a batch is drawn from


class Demonstration(typing.NamedTuple):
  """One row: `weights` is 1 on the tokens to imitate (the agent's), less on what it only reads."""

  tokens: np.ndarray  # [T] int32
  weights: np.ndarray  # [T] float32


def encode(tokenizer, prompt, turns, max_observation, read_weight=0.0) -> Demonstration:
  """The row of a prompt and [(turn, observation), ..], texts each; the last observation is empty.

  Ids with the borders of an episode: prompt, turn, observation, turn, .. are each encoded alone, and
  an observation is cut as the rollout cuts it.
  """
  ids = chat.encode_prompt(tokenizer, prompt)
  weights = [read_weight] * len(ids)
  for turn, observation in turns:
    spoken = tokenizer.encode(turn)
    read = chat.encode_observation(tokenizer, observation, max_observation) if observation else []
    ids = ids + spoken + read
    weights += [1.0] * len(spoken) + [read_weight] * len(read)
  return Demonstration(np.array(ids, np.int32), np.array(weights, np.float32))


def batches(pool, rows, micro_batch, buckets):
  """A function rng -> (tokens, weights), each [rows / micro_batch, micro_batch, T], drawn from `pool`.

  Rows of like length come together, since that means less padding: each batch is drawn from a window
  that starts anywhere in the pool sorted by length.
  """
  if rows % micro_batch:
    raise UserError(f'micro_batch={micro_batch} does not divide rows={rows}: choose a divisor')
  if rows > len(pool):
    raise UserError(f'rows={rows}, and there are {len(pool)} demonstrations: lower it, or make more')
  by_length = np.argsort([len(row.tokens) for row in pool], kind='stable')
  window = min(rows * WINDOW, len(pool))

  def draw(rng):
    start = rng.integers(0, max(1, len(pool) - window))
    chosen = rng.choice(by_length[start:start + window], rows, replace=False)
    fold = lambda x: x.reshape(rows // micro_batch, micro_batch, -1)
    return tuple(map(fold, pad([pool[i] for i in chosen], buckets)))

  return draw


def pad(demonstrations, buckets):
  """(tokens [B,T] int32, weights [B,T] float32), padded on the right to the smallest bucket that fits."""
  longest = max(len(row.tokens) for row in demonstrations)
  length = next((bucket for bucket in buckets if bucket >= longest), None)
  if length is None:
    raise UserError(f'a demonstration of {longest} tokens does not fit in buckets {tuple(buckets)}: '
                    'add one, or leave it out')
  tokens = np.zeros((len(demonstrations), length), np.int32)
  weights = np.zeros((len(demonstrations), length), np.float32)
  for row, demonstration in enumerate(demonstrations):
    tokens[row, :len(demonstration.tokens)] = demonstration.tokens
    weights[row, :len(demonstration.weights)] = demonstration.weights
  return tokens, weights
