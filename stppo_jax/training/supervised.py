"""Parts of supervised training, and its loop for scripts that write their own rows.

`run.py sft` (training/sft.py) uses the parts. It has its own step, because it packs conversations
into bins, trains adapters, and resumes.
"""

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

from stppo_jax import types
from stppo_jax.models import decoder
from stppo_jax.models import sharding
from stppo_jax.rollout import batching
from stppo_jax.text import tokenizer as tokenizer_lib
from stppo_jax.types import UserError

WINDOW = 8  # batches that are sorted by length together

Batch = tuple[np.ndarray, np.ndarray]  # (tokens int32, weights float32), both [..,B,T]


class Demonstration(typing.NamedTuple):
  """One row: `weights` is 1 on the tokens to imitate (the agent's), less on the others."""

  tokens: np.ndarray  # [T] int32
  weights: np.ndarray  # [T] float32


def make_mesh(micro_batch: int) -> jax.sharding.Mesh:
  """Makes a mesh of all devices. UserError: rows of `--micro_batch` cannot be split over them."""
  mesh = sharding.make_mesh(1, -1, 1)
  if micro_batch % mesh.size:
    raise UserError(f'--micro_batch={micro_batch}: give a multiple of the {mesh.size} devices')
  return mesh


def with_kernel(
    config: decoder.ModelConfig, backend: str, mesh: jax.sharding.Mesh, lengths: Sequence[int]
) -> decoder.ModelConfig:
  """Returns the model with the attention of a run: `backend` is config.model.attention."""
  chosen = decoder.choose_attention(config, backend, mesh, lengths)
  return dataclasses.replace(config, attention=chosen)


def train(
    params: dict,
    config: decoder.ModelConfig,
    draw: Callable[[np.random.Generator], Batch],
    *,
    steps: int,
    optimizer: optax.GradientTransformation,
    seed: int,
    mesh: jax.sharding.Mesh | None = None,
    logp_chunk: int | None = None,
    log_every: int = 100,
) -> dict:
  """Minimises the weighted mean of the tokens' negative log-probs; returns the parameters.

  `draw(rng)` returns (tokens, weights), each [micro-batches,b,T], as `batches` makes them. Their
  gradients are summed, so the split changes memory and never the result. Deterministic for a seed.
  The mesh is by default the first device. Donates `params`.
  """
  if mesh is None:
    first_device = jax.devices()[:1]
    mesh = sharding.make_mesh(1, 1, 1, first_device)
  config = dataclasses.replace(config, row_sharding=sharding.rows(mesh))
  place = functools.partial(sharding.tree_shardings, mesh=mesh)
  row_sharding = NamedSharding(mesh, P(None, *sharding.ROWS))
  differentiate = jax.value_and_grad(_sums, has_aux=True)

  @functools.partial(jax.jit, donate_argnums=(0, 1))
  def step(params, opt_state, tokens, weights):
    def accumulate(sums, micro_batch):
      (_, imitated), grads = differentiate(params, config, *micro_batch, logp_chunk)
      sums = optax.tree.add(sums, (imitated, grads))
      return jax.lax.with_sharding_constraint(sums, place(sums)), None

    no_grads = optax.tree.zeros_like(params)
    zeros = (jnp.zeros(()), no_grads)
    (imitated, grads), _ = jax.lax.scan(accumulate, zeros, (tokens, weights))
    total = jnp.maximum(weights.sum(), 1)
    is_imitated = weights == 1
    num_imitated = jnp.maximum(is_imitated.sum(), 1)
    grads = jax.tree.map(lambda g: g / total, grads)
    updates, opt_state = optimizer.update(grads, opt_state, params)
    params = optax.apply_updates(params, updates)
    return params, opt_state, imitated / num_imitated

  rng = np.random.default_rng(seed)
  params = jax.device_put(params, place(params))
  opt_shapes = jax.eval_shape(optimizer.init, params)
  init = jax.jit(optimizer.init, out_shardings=place(opt_shapes))
  opt_state = init(params)
  losses = []
  started = time.perf_counter()
  for n in range(1, steps + 1):
    batch = jax.device_put(draw(rng), row_sharding)
    params, opt_state, value = step(params, opt_state, *batch)
    losses.append(value)
    if n % log_every == 0:
      mean = np.mean(jax.device_get(losses))
      step_s = (time.perf_counter() - started) / len(losses)
      logging.info(
          'warm start %d/%d: loss on tokens to imitate %.3f, %.2f s per step',
          n,
          steps,
          mean,
          step_s,
      )
      losses = []
      started = time.perf_counter()
  return params


def loss(
    params: dict,
    config: decoder.ModelConfig,
    batches: Sequence[Batch],
    logp_chunk: int | None = None,
) -> float:
  """Returns the mean negative log-prob of the imitated tokens of (tokens, weights) [B,T] each."""
  sums_of = functools.partial(_sums, config=config, logp_chunk=logp_chunk)
  sums = jax.jit(sums_of)
  total = 0.0
  count = 0
  for tokens, weights in batches:
    _, imitated = sums(params, tokens=tokens, weights=weights)
    total += float(imitated)
    count += int((weights == 1).sum())
  return total / count


def make_optimizer(lr: float, steps: int) -> optax.GradientTransformation:
  """Returns AdamW with a warm-up of 1/20 of the steps, at least 3, then a cosine to lr / 30."""
  shortest = min(3, steps // 2)
  warmup = max(math.ceil(steps / 20), shortest)
  decay_steps = max(steps, warmup + 1)
  schedule = optax.warmup_cosine_decay_schedule(0, lr, warmup, decay_steps, lr / 30)
  from_first_step = lambda count: schedule(count + 1)  # at rate 0 the step would change nothing
  adamw = optax.adamw(from_first_step, b2=0.98, weight_decay=0.01)
  return optax.chain(optax.clip_by_global_norm(1.0), adamw)


def _sums(params, config, tokens, weights, logp_chunk):
  """Returns sums of negative log-probs over [B,T]: weighted, and of the tokens to imitate."""
  x, _ = decoder.trunk(params, config, tokens, None)
  logp, _ = decoder.token_logp(params, config, x, tokens, chunk=logp_chunk)
  weighted = -jnp.sum(logp * weights)
  imitated = -jnp.sum(logp * (weights == 1))
  return weighted, imitated


def encode(
    tokenizer: tokenizer_lib.Tokenizer,
    prompt: str,
    turns: Sequence[tuple[str, str]],
    max_observation: int,
    read_weight: float = 0.0,
) -> Demonstration:
  """Encodes a prompt and (turn, observation) texts; the last observation is empty.

  Prompt, turns and observations are each encoded separately, as in an episode, and an observation
  is cut as the rollout cuts it.
  """
  ids = tokenizer_lib.encode_prompt(tokenizer, prompt)
  weights = [read_weight] * len(ids)
  for turn, observation in turns:
    turn_ids = tokenizer.encode(turn)
    observation_ids = []
    if observation:
      observation_ids = tokenizer_lib.encode_observation(tokenizer, observation, max_observation)
    ids = ids + turn_ids + observation_ids
    weights += [1.0] * len(turn_ids)
    weights += [read_weight] * len(observation_ids)
  all_tokens = np.array(ids, np.int32)
  return Demonstration(all_tokens, np.array(weights, np.float32))


def from_episode(episode: types.Episode) -> Demonstration:
  """Returns the demonstration of an episode, whose turns are imitated token by token."""
  tokens, turn_ids, _ = episode.unroll()
  length = batching.trained_length(episode)
  is_agent = turn_ids > 0
  weights = is_agent.astype(np.float32)
  return Demonstration(tokens[:length], weights[:length])


def batches(
    pool: Sequence[Demonstration], rows: int, micro_batch: int, buckets: Sequence[int]
) -> Callable[[np.random.Generator], Batch]:
  """Returns a function rng -> (tokens, weights), each [rows / micro_batch, micro_batch, T].

  Every row is equally likely. Rows of similar length come together, which means less padding: of
  WINDOW batches, drawn at random and sorted by length, one is taken.
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
    order = np.argsort(lengths[window], kind='stable')
    by_length = window[order].reshape(num_batches, rows)
    chosen = by_length[rng.integers(num_batches)]
    columns = pad([pool[i] for i in chosen], buckets)
    shape = (-1, micro_batch, columns[0].shape[1])
    return tuple(column.reshape(shape) for column in columns)

  return draw


def pad(demonstrations: Sequence[Demonstration], buckets: Sequence[int]) -> Batch:
  """Returns (tokens, weights), both [B,T], padded on the right to the smallest bucket that fits."""
  longest = max(len(row.tokens) for row in demonstrations)
  length = next((bucket for bucket in buckets if bucket >= longest), None)
  if length is None:
    raise UserError(
        f'a demonstration of {longest} tokens does not fit in buckets {tuple(buckets)}: '
        'add one, or leave it out'
    )
  shape = (len(demonstrations), length)
  tokens = np.zeros(shape, np.int32)
  weights = np.zeros(shape, np.float32)
  for row, demonstration in enumerate(demonstrations):
    tokens[row, : len(demonstration.tokens)] = demonstration.tokens
    weights[row, : len(demonstration.weights)] = demonstration.weights
  return tokens, weights
