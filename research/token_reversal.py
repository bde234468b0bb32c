"""Token reversal with a reward per token: our PPO compared with a published learning speed.

  python -m research.token_reversal --seeds=5 --out=research/results/token_reversal.json

The task and the settings are those of arXiv 2604.06159, Table 1: the policy reads H = 10 tokens
of a vocabulary of V and writes them in reverse. Each right token earns 1. The paper reports that
PPO reaches a token error of 1% at update 181 (V = 4) and 191 (V = 8), mean of 20 seeds. We had no
code of the authors. The surrogate, the ratio and the aggregation are the package's own functions.

Choice: what we know of the paper leaves the embedding of positions, the initialisation and the
momentum of Muon open. Here positions are learned and Muon has optax's defaults. The initialisation
decides the speed, so there are two: `pytorch` has the defaults of PyTorch's layers (embeddings of
standard deviation 1), `small` has embeddings of standard deviation .02.
Choice: the token error is that of the sampled answers of an update.
"""

import argparse
import functools
import json
import os
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib

from stppo_jax.algorithms import losses
from stppo_jax.algorithms import segments

LENGTH = 10  # H
PROMPTS = 100  # B, per update
EPOCHS = 4  # full-batch steps per update
CLIP = 0.2
LEARNING_RATE = 1e-3
LAYERS = 2
WIDTH = 64
HEADS = 2
ERROR_LEVEL = 0.01
STUDENT_95 = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78}  # by the number of seeds


class Batch(NamedTuple):
  """Prompts with their sampled answers: B rows of 2 H tokens."""

  tokens: jax.Array  # [B,2H]
  old_logp: jax.Array  # [B,H] of the answers
  rewards: jax.Array  # [B,H]


def init(key: jax.Array, vocabulary: int, initialisation: str) -> dict:
  """Returns the parameters of a pre-norm transformer."""
  keys = iter(jax.random.split(key, 3 + 6 * LAYERS))
  embedding_std = {'pytorch': 1.0, 'small': 0.02}[initialisation]

  def kernel(*shape):
    drawn = jax.random.uniform(next(keys), shape, minval=-1.0, maxval=1.0)
    return drawn / shape[0] ** 0.5

  def embedding(*shape):
    return embedding_std * jax.random.normal(next(keys), shape)

  layers = [
      {
          'query': kernel(WIDTH, WIDTH),
          'key': kernel(WIDTH, WIDTH),
          'value': kernel(WIDTH, WIDTH),
          'out': kernel(WIDTH, WIDTH),
          'up': kernel(WIDTH, 4 * WIDTH),
          'down': kernel(4 * WIDTH, WIDTH),
          'scale_1': jnp.ones(WIDTH),
          'scale_2': jnp.ones(WIDTH),
      }
      for _ in range(LAYERS)
  ]
  return {
      'embedding': embedding(vocabulary, WIDTH),
      'positions': embedding(2 * LENGTH, WIDTH),
      'layers': layers,
      'scale': jnp.ones(WIDTH),
      'unembedding': kernel(WIDTH, vocabulary),
  }


def answer_logits(params: dict, tokens: jax.Array) -> jax.Array:
  """Returns the logits of the answer's tokens [B,H,V]; tokens are [B,2H]."""
  batch, length = tokens.shape
  x = params['embedding'][tokens] + params['positions']
  causal = jnp.tril(jnp.ones((length, length), bool))
  for layer in params['layers']:
    normed = _norm(x) * layer['scale_1']
    query, key, value = (
        (normed @ layer[name]).reshape(batch, length, HEADS, -1)
        for name in ('query', 'key', 'value')
    )
    scores = jnp.einsum('bqhd,bkhd->bhqk', query, key) / (WIDTH // HEADS) ** 0.5
    weights = jax.nn.softmax(jnp.where(causal, scores, -jnp.inf))
    attended = jnp.einsum('bhqk,bkhd->bqhd', weights, value)
    x = x + attended.reshape(batch, length, WIDTH) @ layer['out']
    normed = _norm(x) * layer['scale_2']
    x = x + jax.nn.gelu(normed @ layer['up']) @ layer['down']
  logits = _norm(x) * params['scale'] @ params['unembedding']
  return logits[:, LENGTH - 1 : -1]  # position t predicts token t + 1


def _norm(x):
  return (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-6)


def sample(params: dict, key: jax.Array, vocabulary: int) -> Batch:
  """Draws prompts and answers; the reward of a position is 1 where its token is right."""
  prompt_key, answer_key = jax.random.split(key)
  prompts = jax.random.randint(prompt_key, (PROMPTS, LENGTH), 0, vocabulary)
  tokens = jnp.concatenate([prompts, jnp.zeros_like(prompts)], axis=1)

  def write(t, tokens):
    logits = answer_logits(params, tokens)[:, t]
    drawn = jax.random.categorical(jax.random.fold_in(answer_key, t), logits)
    return tokens.at[:, LENGTH + t].set(drawn)

  tokens = jax.lax.fori_loop(0, LENGTH, write, tokens)
  rewards = (tokens[:, LENGTH:] == prompts[:, ::-1]).astype(jnp.float32)
  return Batch(tokens, answer_logp(params, tokens), rewards)


def answer_logp(params: dict, tokens: jax.Array) -> jax.Array:
  """Returns the log-probs of the answer's tokens [B,H]."""
  logp = jax.nn.log_softmax(answer_logits(params, tokens))
  return jnp.take_along_axis(logp, tokens[:, LENGTH:, None], axis=-1)[..., 0]


def loss(params: dict, batch: Batch) -> jax.Array:
  """Returns PPO's clipped loss; an advantage is the own reward minus the mean of its position."""
  logp = answer_logp(params, batch.tokens)
  mask = jnp.ones_like(logp)
  advantages = batch.rewards - batch.rewards.mean(axis=0)
  ids, number = segments.segment_ids('token', mask, mask.astype(int))
  ratio = segments.importance_ratio(logp, batch.old_logp, mask, ids, number)
  surrogate, _ = losses.clipped_surrogate(ratio, advantages, CLIP, CLIP)
  return -losses.aggregate(surrogate, mask, 'seq-mean-token-sum')


@functools.partial(jax.jit, static_argnames=('vocabulary', 'updates', 'initialisation'))
def train(
    seed: jax.Array, vocabulary: int, updates: int, initialisation: str = 'pytorch'
) -> jax.Array:
  """Returns the token error of each update's sampled answers [updates]."""
  optimizer = optax.contrib.muon(LEARNING_RATE)
  init_key, run_key = jax.random.split(jax.random.key(seed))
  params = init(init_key, vocabulary, initialisation)

  def step(state, batch):
    params, opt_state = state
    changes, opt_state = optimizer.update(jax.grad(loss)(params, batch), opt_state, params)
    return optax.apply_updates(params, changes), opt_state

  def update(state, n):
    batch = sample(state[0], jax.random.fold_in(run_key, n), vocabulary)
    state = jax.lax.fori_loop(0, EPOCHS, lambda _, s: step(s, batch), state)
    return state, 1 - batch.rewards.mean()

  return jax.lax.scan(update, (params, optimizer.init(params)), jnp.arange(updates))[1]


def first_update_below(errors: np.ndarray) -> int | None:
  """Returns the first update whose token error is at most 1%; None if there is none."""
  reached = np.flatnonzero(errors <= ERROR_LEVEL)
  return int(reached[0]) if len(reached) else None


def main():
  parser = argparse.ArgumentParser(description=__doc__.partition('\n')[0])
  parser.add_argument('--seeds', type=int, default=5, choices=sorted(STUDENT_95))
  parser.add_argument('--updates', type=int, default=300)
  parser.add_argument('--out', default='')
  args = parser.parse_args()
  results = [
      run(vocabulary, initialisation, args.seeds, args.updates)
      for initialisation in ('pytorch', 'small')
      for vocabulary in (4, 8)
  ]
  if args.out:
    os.makedirs(os.path.dirname(args.out) or '.', exist_ok=True)
    with open(args.out, 'w', encoding='utf-8') as file:
      json.dump(results, file, indent=1)


def run(vocabulary: int, initialisation: str, seeds: int, updates: int) -> dict:
  """Returns when each seed reaches an error of 1%, with the mean and its 95% interval (Student)."""
  errors = [
      np.asarray(train(jnp.uint32(seed), vocabulary, updates, initialisation))
      for seed in range(seeds)
  ]
  reached = [first_update_below(of_seed) for of_seed in errors]
  result = {
      'vocabulary': vocabulary,
      'initialisation': initialisation,
      'updates': updates,
      'update_at_1_percent': reached,
      'last_error': [round(float(of_seed[-20:].mean()), 5) for of_seed in errors],
  }
  if seeds > 1 and None not in reached:
    half = STUDENT_95[seeds] * np.std(reached, ddof=1) / seeds**0.5
    result['mean'] = round(float(np.mean(reached)), 1)
    result['interval'] = [round(float(np.mean(reached) + sign * half), 1) for sign in (-1, 1)]
  print(json.dumps(result), flush=True)
  return result


if __name__ == '__main__':
  main()
