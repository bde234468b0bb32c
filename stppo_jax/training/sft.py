"""Supervised warm start: demonstrations in, parameters out."""

from collections.abc import Callable
from collections.abc import Sequence
import dataclasses
import functools
import math
import time
import typing

from absl import logging
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np
import optax

from stppo_jax import tokenizer as chat
from stppo_jax import types
from stppo_jax.models import attention
from stppo_jax.models import decoder
from stppo_jax.models import sharding
from stppo_jax.rollout import batching
from stppo_jax.types import UserError


def make_mesh(micro_batch: int) -> jax.sharding.Mesh:
  """Makes a mesh of all devices. UserError: rows of `--micro_batch` cannot be split over them."""
  mesh = sharding.make_mesh(1, -1, 1)
  if micro_batch % mesh.size:
    raise UserError(f'--micro_batch={micro_batch}: give a multiple of the {mesh.size} devices')
  return mesh


def with_kernel(
    config: decoder.ModelConfig, wanted: str, mesh: jax.sharding.Mesh, lengths: Sequence[int]
) -> decoder.ModelConfig:
  """Returns the model with the attention of a run: `wanted` is config.model.attention."""
  device = mesh.devices.flat[0]
  chosen = attention.choose(wanted, device, config.dtype, config.head_dim, lengths)
  return dataclasses.replace(config, attention=chosen)


def train(
    params: dict,
    config: decoder.ModelConfig,
    draw: Callable[[np.random.Generator], tuple[np.ndarray, np.ndarray]],
    *,
    steps: int,
    optimizer: optax.GradientTransformation,
    seed: int,
    mesh: jax.sharding.Mesh | None = None,
    logp_chunk: int | None = None,
    log_every: int = 100,
) -> dict:
  """Minimises the weighted mean of the tokens' negative log-probs; returns the parameters.

  `draw(rng)` returns (tokens, weights), each [micro-batches,b,T], as `batches` makes them: their
  gradients are summed, so the split changes memory and never the result. Deterministic for a seed.
  The mesh is by default the first device. Donates `params`.
  """
  mesh = mesh or sharding.make_mesh(1, 1, 1, jax.devices()[:1])
  config = dataclasses.replace(config, row_sharding=sharding.rows(mesh))
  place = lambda tree: sharding.tree_shardings(tree, mesh)
  on_rows = NamedSharding(mesh, P(None, *sharding.ROWS))

  @functools.partial(jax.jit, donate_argnums=(0, 1))
  def step(params, opt_state, tokens, weights):
    def accumulate(sums, micro):
      tokens, weights = micro
      grad = jax.value_and_grad(_sums, has_aux=True)
      (_, imitated), grads = grad(params, config, tokens, weights, logp_chunk)
      total = jax.tree.map(jnp.add, sums, (imitated, grads))
      return jax.lax.with_sharding_constraint(total, place(total)), None

    zeros = (jnp.zeros(()), jax.tree.map(jnp.zeros_like, params))
    (imitated, grads), _ = jax.lax.scan(accumulate, zeros, (tokens, weights))
    grads = jax.tree.map(lambda g: g / jnp.maximum(weights.sum(), 1), grads)
    updates, opt_state = optimizer.update(grads, opt_state, params)
    params = optax.apply_updates(params, updates)
    return params, opt_state, imitated / jnp.maximum((weights == 1).sum(), 1)

  rng = np.random.default_rng(seed)
  params = jax.device_put(params, place(params))
  opt_state = jax.jit(optimizer.init, out_shardings=place(jax.eval_shape(optimizer.init, params)))(
      params
  )
  losses, started = [], time.perf_counter()
  for n in range(1, steps + 1):
    params, opt_state, value = step(params, opt_state, *jax.device_put(draw(rng), on_rows))
    losses.append(value)
    if n % log_every == 0:
      mean = np.mean(jax.device_get(losses))
      logging.info(
          'warm start %d/%d: loss on tokens to imitate %.3f, %.2f s per step',
          n,
          steps,
          mean,
          (time.perf_counter() - started) / len(losses),
      )
      losses, started = [], time.perf_counter()
  return params


def loss(
    params: dict,
    config: decoder.ModelConfig,
    batches: Sequence[tuple[np.ndarray, np.ndarray]],
    logp_chunk: int | None = None,
) -> float:
  """Returns the mean negative log-prob of the imitated tokens of (tokens, weights) [B,T] each."""
  sums = jax.jit(lambda params, tokens, weights: _sums(params, config, tokens, weights, logp_chunk))
  imitated = [float(sums(params, tokens, weights)[1]) for tokens, weights in batches]
  return sum(imitated) / sum(int((weights == 1).sum()) for _, weights in batches)


def make_optimizer(lr: float, steps: int) -> optax.GradientTransformation:
  """Returns AdamW with a warm-up of 1/20 of the steps, at least 3, then a cosine to lr / 30."""
  warmup = max(math.ceil(steps / 20), min(3, steps // 2))
  schedule = optax.warmup_cosine_decay_schedule(0, lr, warmup, max(steps, warmup + 1), lr / 30)
  return optax.chain(
      optax.clip_by_global_norm(1.0),
      # From count + 1: at rate 0 the first step would change nothing.
      optax.adamw(lambda count: schedule(count + 1), b2=0.98, weight_decay=0.01),
  )


def _sums(params, config, tokens, weights, logp_chunk):
  """Returns sums of negative log-probs over [B,T]: weighted, and of the tokens to imitate."""
  x, _ = decoder.hidden(params, config, tokens, None)
  logp, _ = decoder.token_logp(params, config, x, tokens, chunk=logp_chunk)
  return -jnp.sum(logp * weights), -jnp.sum(logp * (weights == 1))


WINDOW = 8  # batches that are sorted by length together


class Demonstration(typing.NamedTuple):
  """One row: `weights` is 1 on the tokens to imitate (the agent's), less on the others."""

  tokens: np.ndarray  # [T] int32
  weights: np.ndarray  # [T] float32


def encode(
    tokenizer: chat.Tokenizer,
    prompt: str,
    turns: Sequence[tuple[str, str]],
    max_observation: int,
    read_weight: float = 0.0,
) -> Demonstration:
  """Encodes a prompt and (turn, observation) texts; the last observation is empty.

  Prompt, turns and observations are each encoded alone, as in an episode, and an observation is cut
  as the rollout cuts it.
  """
  ids = chat.encode_prompt(tokenizer, prompt)
  weights = [read_weight] * len(ids)
  for turn, observation in turns:
    spoken = tokenizer.encode(turn)
    read = chat.encode_observation(tokenizer, observation, max_observation) if observation else []
    ids = ids + spoken + read
    weights += [1.0] * len(spoken) + [read_weight] * len(read)
  return Demonstration(np.array(ids, np.int32), np.array(weights, np.float32))


def of_episode(episode: types.Episode, read_weight: float = 0.0) -> Demonstration:
  """Returns the demonstration of an episode: its turns are imitated, as the ids that they are."""
  tokens, turn_ids, _ = episode.unroll()
  length = batching.trained_length(episode)
  weights = np.where(turn_ids > 0, 1.0, read_weight).astype(np.float32)
  return Demonstration(tokens[:length], weights[:length])


def batches(
    pool: Sequence[Demonstration], rows: int, micro_batch: int, buckets: Sequence[int]
) -> Callable[[np.random.Generator], tuple[np.ndarray, np.ndarray]]:
  """Returns a function rng -> (tokens, weights), each [rows / micro_batch, micro_batch, T].

  Every row is as likely as any other. Rows of similar length come together, which means less
  padding: of WINDOW batches, drawn at random and sorted by length, one is taken.
  """
  if rows % micro_batch:
    raise UserError(f'micro_batch={micro_batch} does not divide rows={rows}: choose a divisor')
  if rows > len(pool):
    raise UserError(
        f'rows={rows}, and there are {len(pool)} demonstrations: lower it, or make more'
    )
  lengths = np.array([len(row.tokens) for row in pool])
  num_batches = min(WINDOW, len(pool) // rows)

  def draw(rng):
    window = rng.choice(len(pool), num_batches * rows, replace=False)
    by_length = window[np.argsort(lengths[window], kind='stable')]
    chosen = by_length.reshape(num_batches, rows)[rng.integers(num_batches)]
    fold = lambda x: x.reshape(rows // micro_batch, micro_batch, -1)
    return tuple(map(fold, pad([pool[i] for i in chosen], buckets)))

  return draw


def pad(
    demonstrations: Sequence[Demonstration], buckets: Sequence[int]
) -> tuple[np.ndarray, np.ndarray]:
  """Returns (tokens [B,T] int32, weights [B,T] float32), right-padded to the smallest bucket that
  fits.
  """
  longest = max(len(row.tokens) for row in demonstrations)
  length = next((bucket for bucket in buckets if bucket >= longest), None)
  if length is None:
    raise UserError(
        f'a demonstration of {longest} tokens does not fit in buckets {tuple(buckets)}: '
        'add one, or leave it out'
    )
  tokens = np.zeros((len(demonstrations), length), np.int32)
  weights = np.zeros((len(demonstrations), length), np.float32)
  for row, demonstration in enumerate(demonstrations):
    tokens[row, : len(demonstration.tokens)] = demonstration.tokens
    weights[row, : len(demonstration.weights)] = demonstration.weights
  return tokens, weights
