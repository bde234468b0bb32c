"""Supervised training: the step on packed demonstrations, and a loop for scripts.

`run.py sft` (training/sft.py) has its own loop around this step, because it trains adapters, logs
and resumes.
"""

from collections.abc import Callable
from collections.abc import Sequence
import dataclasses
import functools
import math
import time
from typing import NamedTuple
from typing import TypedDict

from absl import logging
import jax
import jax.numpy as jnp
import numpy as np
import optax

from stppo_jax import types
from stppo_jax.data import tasks as tasks_lib
from stppo_jax.distributed import hosts
from stppo_jax.models import attention
from stppo_jax.models import decoder
from stppo_jax.models import sharding
from stppo_jax.rollout import batching
from stppo_jax.text import tokenizer as tokenizer_lib
from stppo_jax.training import packing
from stppo_jax.training import state as state_lib

_SAMPLE_STEPS = 16  # steps that are packed to choose the number of bins
_MOST_PADDING = 1.1  # times the fewest tokens that are computed with any number of bins


class Demonstration(NamedTuple):
  """One row: `weights` is 1 on the tokens to imitate (the agent's), and may be less on others."""

  tokens: np.ndarray  # [T] int32
  weights: np.ndarray  # [T] float32


class Rows(NamedTuple):
  """The demonstrations of a step in their bins."""

  tokens: np.ndarray  # [b,T] int32
  weights: np.ndarray  # [b,T] float32
  packing: packing.Packing


class State(TypedDict):
  """The state of supervised training, as a checkpoint holds it."""

  actor: dict  # what is trained of the policy: all, or adapters
  opt: optax.OptState


class Trainer:
  """The compiled step and the compiled loss of a model.

  The loss is the mean negative log-prob of the tokens, weighted by the weights of the rows.
  """

  def __init__(
      self,
      model: decoder.ModelConfig,
      frozen: state_lib.Frozen,
      optimizer: optax.GradientTransformation,
      mesh: jax.sharding.Mesh,
      micro_batch: int,
      length_buckets: Sequence[int],
      logp_chunk: int | None = None,
      share_prefixes: bool = False,
  ):
    self.model = dataclasses.replace(model, row_sharding=sharding.context_rows(mesh))
    self.frozen = frozen
    self.micro_batch = micro_batch
    self.length_buckets = tuple(length_buckets)
    self.shared = attention.takes_segments(model.attention)
    self.share_prefixes = share_prefixes
    self._optimizer = optimizer
    self._mesh = mesh
    self._logp_chunk = logp_chunk
    self._step = jax.jit(self._take_step, donate_argnums=0)
    self._loss = jax.jit(self._sum_loss)

  def init(self, actor: dict) -> State:
    """Returns the state of training around the parameters."""
    shapes = jax.eval_shape(self._optimizer.init, actor)
    make = jax.jit(self._optimizer.init, out_shardings=self._places(shapes))
    return {'actor': actor, 'opt': make(actor)}

  def step(self, state: State, rows: Rows) -> tuple[State, jax.Array]:
    """Returns the state after an optimizer step, and the loss before it. Donates the state.

    The loss is NaN if the gradient is not finite. Nothing waits for the device.
    """
    return self._step(state, self.frozen, self._put(rows))

  def loss(self, actor: dict, pool: Sequence[Demonstration], num_rows: int) -> float:
    """Returns the weighted mean negative log-prob of a pool."""
    total = 0.0
    count = 0.0
    for start in range(0, len(pool), num_rows):
      rows = self.rows(pool[start : start + num_rows], num_rows)
      total += float(self._loss(actor, self.frozen, self._put(rows)))
      count += float(_predicted(rows.weights).sum())
    return total / max(count, 1)

  def padding(self, rows: Rows) -> float:
    """Returns the share of padding among the tokens that a step computes."""
    size = packing.num_computed(rows.packing, self.micro_batch, self.length_buckets)
    return 1 - packing.num_places(rows.packing) / size

  def rows(self, pool: Sequence[Demonstration], num_rows: int) -> Rows:
    """Packs demonstrations, see `make_rows`."""
    share = self.share_prefixes
    return make_rows(pool, num_rows, self.micro_batch, self.length_buckets, self.shared, share)

  def _put(self, rows):
    return hosts.put(rows, sharding.replicated(self._mesh))

  def _places(self, tree):
    return sharding.tree_shardings(tree, self._mesh)

  def _micro_batch_loss(self, actor, frozen, rows, layout):
    """Returns the weighted sum of negative log-probs of a micro-batch."""
    params = frozen.policy(actor)
    tokens = layout.pack(rows.tokens)
    segments = layout.paths
    if segments is None and self.shared:
      segments = layout.segments
    x, _ = decoder.trunk(params, self.model, tokens, segments=segments)
    logp, _ = decoder.token_logp(params, self.model, x, tokens, 1.0, self._logp_chunk, layout.paths)
    return -jnp.sum(layout.unpack(logp) * rows.weights)

  def _sum(self, function, rows):
    context_shards = packing.context_shards_of(self._mesh)
    return packing.sum_over(
        function, rows.packing, self.micro_batch, self.length_buckets, context_shards
    )

  def _sum_loss(self, actor, frozen, rows):
    def one(layout):
      return self._micro_batch_loss(actor, frozen, rows, layout)

    return self._sum(one, rows)

  def _take_step(self, state, frozen, rows):
    def one(layout):
      loss_of = jax.value_and_grad(self._micro_batch_loss)
      loss, grads = loss_of(state['actor'], frozen, rows, layout)
      return loss, jax.lax.with_sharding_constraint(grads, self._places(grads))

    loss, grads = self._sum(one, rows)
    count = jnp.maximum(_predicted(rows.weights).sum(), 1)
    grads = jax.tree.map(lambda g: g / count, grads)
    updates, opt = self._optimizer.update(grads, state['opt'], state['actor'])
    actor = optax.apply_updates(state['actor'], updates)
    is_finite = jnp.isfinite(optax.tree.norm(grads))
    return {'actor': actor, 'opt': opt}, jnp.where(is_finite, loss / count, jnp.nan)


def _predicted(weights):
  """Returns the weights without the first column, whose tokens have no log-prob."""
  return weights[:, 1:]


def make_rows(
    pool: Sequence[Demonstration],
    num_rows: int,
    micro_batch: int,
    length_buckets: Sequence[int],
    shared: bool,
    share_prefixes: bool = False,
) -> Rows:
  """Packs at most `num_rows` demonstrations into bins. Rows of padding are in none of them."""
  tokens = np.zeros((num_rows, length_buckets[-1]), np.int32)
  weights = np.zeros((num_rows, length_buckets[-1]), np.float32)
  lengths = np.zeros(num_rows, np.int32)
  for i, row in enumerate(pool):
    length = len(row.tokens)
    tokens[i, :length] = row.tokens
    weights[i, :length] = row.weights
    lengths[i] = length
  identities = tokens if share_prefixes else None
  return Rows(
      tokens, weights, packing.pack(lengths, micro_batch, length_buckets, shared, identities)
  )


def choose_bins(
    lengths: np.ndarray,
    order: Callable[[int], Sequence[int]],
    most: int,
    multiple: int,
    length_buckets: Sequence[int],
    shared: bool,
) -> int:
  """Returns the number of bins per micro-batch, at most `most` and a multiple of `multiple`.

  `order` gives the rows of a step, counted from 0. The number is the largest one that computes few
  tokens: at most 1.1 times as many as any other, in the first steps. All bins of a micro-batch are
  computed, also those that hold nothing.
  """
  steps = [order(n) for n in range(_SAMPLE_STEPS)]
  num_computed = {}
  number = multiple
  while number <= most:
    packings = [packing.pack(lengths[step], number, length_buckets, shared) for step in steps]
    sizes = [packing.num_computed(rows, number, length_buckets) for rows in packings]
    num_computed[number] = sum(sizes)
    number *= 2
  limit = _MOST_PADDING * min(num_computed.values())
  return max(number for number, size in num_computed.items() if size <= limit)


def train(
    params: dict,
    config: decoder.ModelConfig,
    pool: Sequence[Demonstration],
    *,
    rows: int,
    length_buckets: Sequence[int],
    steps: int,
    optimizer: optax.GradientTransformation,
    seed: int,
    log_every: int = 100,
) -> dict:
  """Trains on the first device, and returns the parameters. Donates `params`.

  A step has `rows` demonstrations, and no bin is longer than the last bucket. The result is
  deterministic for a seed.
  UserError: there are fewer demonstrations than rows, or one is longer than the last bucket.
  RunError: a loss or a gradient is not finite.
  """
  lengths = np.array([len(row.tokens) for row in pool])
  if rows > len(pool) or lengths.max() > length_buckets[-1]:
    raise types.UserError(
        f'{len(pool)} demonstrations of at most {max(lengths, default=0)} tokens: at least {rows} '
        f'of at most {length_buckets[-1]} are needed'
    )
  order = functools.partial(tasks_lib.in_epochs, len(pool), rows, seed)
  shared = attention.takes_segments(config.attention)
  micro_batch = choose_bins(lengths, order, rows, 1, length_buckets, shared)
  mesh = sharding.make_mesh(1, 1, 1, jax.devices()[:1])
  trainer = Trainer(config, state_lib.Frozen(), optimizer, mesh, micro_batch, length_buckets)
  state = trainer.init(jax.device_put(params, sharding.tree_shardings(params, mesh)))
  del params
  losses = []
  started = time.perf_counter()
  for n in range(1, steps + 1):
    chosen = [pool[i] for i in order(n - 1)]
    state, loss = trainer.step(state, trainer.rows(chosen, rows))
    losses.append(loss)
    if n % log_every == 0 or n == steps:
      mean = np.mean(jax.device_get(losses))
      if not np.isfinite(mean):
        raise types.RunError(f'a loss or a gradient up to step {n} is not finite: lower the rate')
      step_s = (time.perf_counter() - started) / len(losses)
      logging.info('step %d/%d: loss %.3f, %.2f s per step', n, steps, mean, step_s)
      losses = []
      started = time.perf_counter()
  return state['actor']


def make_optimizer(lr: float, steps: int) -> optax.GradientTransformation:
  """Returns AdamW with a warm-up of 1/20 of the steps, at least 3, then a cosine to lr / 30."""
  shortest = min(3, steps // 2)
  warmup = max(math.ceil(steps / 20), shortest)
  decay_steps = max(steps, warmup + 1)
  schedule = optax.warmup_cosine_decay_schedule(0, lr, warmup, decay_steps, lr / 30)
  from_first_step = lambda count: schedule(count + 1)  # at rate 0 the step would change nothing
  adamw = optax.adamw(from_first_step, b2=0.98, weight_decay=0.01)
  return optax.chain(optax.clip_by_global_norm(1.0), adamw)


def with_kernel(
    config: decoder.ModelConfig, backend: str, mesh: jax.sharding.Mesh, lengths: Sequence[int]
) -> decoder.ModelConfig:
  """Returns the model with the attention of a run: `backend` is config.model.attention."""
  chosen = decoder.choose_attention(config, backend, mesh, lengths)
  return dataclasses.replace(config, attention=chosen)


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
