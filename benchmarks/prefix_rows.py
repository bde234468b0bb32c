"""Actor, critic and rows for `benchmarks.prefixes`, in the process of a worker."""

import dataclasses
import typing

import jax
import numpy as np

from benchmarks import ours
from stppo_jax import types
from stppo_jax.algorithms import variants
from stppo_jax.models import decoder
from stppo_jax.models import sharding
from stppo_jax.training import minibatches
from stppo_jax.training import packing
from stppo_jax.training import state as state_lib
from stppo_jax.training import update

# The field's name, which is `lengths` in older checkouts.
_FIELDS = [field.name for field in dataclasses.fields(state_lib.Spec)]
_LENGTH_BUCKETS = 'length_buckets' if 'length_buckets' in _FIELDS else 'lengths'


class Case(typing.NamedTuple):
  """Rows to train, and how they are packed."""

  variant: str
  groups: int
  group_size: int
  common: int  # tokens that all rows begin with
  prompt: int  # tokens that the rows of a group begin with
  lengths: tuple[float, float]  # mean and deviation of the tokens of a row
  bins: tuple[int, ...]  # tokens per bin
  micro_batch: int
  size: str = '20M'  # a name of `ours.SHAPES`


def make_episodes(case: Case) -> list[types.Episode]:
  """Returns episodes of one turn, every other one with a reward."""
  rng = np.random.default_rng(0)
  draw = lambda n: rng.integers(1, 500, n).astype(np.int32)
  common = draw(case.common)
  episodes = []
  for group in range(case.groups):
    prompt = np.concatenate([common, draw(case.prompt - case.common)])
    for attempt in range(case.group_size):
      mean, deviation = case.lengths
      length = int(np.clip(rng.normal(mean, deviation), mean - 400, mean + 400))
      tokens = draw(length - case.prompt)
      logp = np.full(len(tokens), -6.0, np.float32)
      turn = types.Turn(tokens, logp, np.zeros(0, np.int32), reward=float(attempt % 2))
      episodes.append(types.Episode(types.Task('', ''), group, prompt, [turn]))
  return episodes


class Learner:
  """Actor, critic and the batch of a case."""

  def __init__(self, case: Case, share: bool):
    episodes = make_episodes(case)
    options: dict[str, typing.Any] = {_LENGTH_BUCKETS: case.bins}
    if share:
      options['share_prefixes'] = True
    mesh = sharding.make_mesh(1, 1, 1, jax.devices()[:1])
    variant = dataclasses.replace(variants.VARIANTS[case.variant], entropy_coef=0.0, kl_in='none')
    model = ours.SHAPES[case.size]
    optimizer, schedule = state_lib.make_optimizer(1e-5, 0, weight_decay=0.01)
    spec = state_lib.Spec(
        variant=variant,
        actor=model,
        critic=dataclasses.replace(model, head='value') if variant.needs_critic else None,
        actor_optimizer=optimizer,
        critic_optimizer=optimizer,
        actor_lr=schedule,
        critic_lr=schedule,
        actor_clip=1.0,
        critic_clip=1.0,
        micro_batch=case.micro_batch,
        temperature=1.0,
        logp_chunk=None,
        critic_warmup=0,
        num_logged_turns=5,
        **options,
    )
    actor = decoder.init(jax.random.key(0), model)
    critic = None
    if spec.critic is not None:
      critic = decoder.init(jax.random.key(1), spec.critic)
    self._case = case
    self._frozen = state_lib.Frozen()
    self._state = state_lib.create_sharded(spec, actor, critic, mesh)
    self._functions = update.compile_functions(spec, self._state, self._frozen, mesh)
    bins = minibatches.Bins(
        mini_batch=len(episodes),
        epochs=1,
        micro_batch=case.micro_batch,
        pad_id=0,
        sharding=sharding.rows(mesh),
        **options,
    )
    self._batch, (self._step,) = minibatches.to_device(episodes, bins, jax.random.key(0))
    batch = self._annotate()
    self._state, self._batch, _ = self._functions.with_advantages(self._state, batch)

  def log_probs(self) -> None:
    """Computes log-probs and values."""
    self._annotate()

  def _annotate(self):
    steps = packing.stack([self._step])
    batch, _ = self._functions.annotate(self._state, self._frozen, self._batch, steps)
    return jax.block_until_ready(batch)

  def step(self) -> None:
    """Takes an optimizer step."""
    after = self._functions.update_step(self._state, self._frozen, self._batch, self._step)
    self._state = jax.block_until_ready(after)[0]

  def step_mb(self) -> int:
    """Returns the memory of the step beside its arguments, in MiB."""
    arguments = (self._state, self._frozen, self._batch, self._step)
    compiled = self._functions.update_step.lower(*arguments).compile()
    return round(compiled.memory_analysis().temp_size_in_bytes / 2**20)

  def num_computed(self) -> int:
    """Counts the tokens that a model computes in the step, padding included."""
    return packing.num_computed(self._step.packing, self._case.micro_batch, self._case.bins)
