"""The state of training, a pytree that a step takes and returns, and what stays constant."""

from collections.abc import Sequence
import dataclasses
import functools
import math
from typing import Any

import flax
import jax
import jax.numpy as jnp
import optax

from stppo_jax.algorithms.variants import Variant
from stppo_jax.models import attention
from stppo_jax.models import decoder
from stppo_jax.models import sharding


@flax.struct.dataclass
class TrainState:
  """Everything that an update changes. Constant parameters are in `Frozen`."""

  step: jax.Array  # [] int32, optimizer steps taken or skipped
  actor: dict  # what is trained of the policy or shared trunk: all, or adapters (and value head)
  critic: dict | None  # what is trained of the separate critic
  actor_opt: optax.OptState
  critic_opt: optax.OptState | None
  kl_coef: jax.Array  # [] float32, of the KL penalty
  skipped: jax.Array  # [] int32, steps skipped in a row because a gradient was not finite
  # What is trained of the policy, as it was after the update before the last one; only kept if
  # updates start from an extrapolation.
  previous_actor: dict | None = None
  score_moments: Any = None  # ScoreMoments of systems/ppo_max.py; None: scores are not normalised


def extrapolated(state: TrainState, factor: float) -> TrainState:
  """Returns the state that an update starts from: the policy is p + a (p - p_before), a = `factor`.

  (APO, arXiv 2410.06293, section 5.2, paper: Nesterov's acceleration of an exact iteration with
  the outputs p.) With adapters, whose product is not linear, and with Adam, whose moments do not
  see this step, it is a heuristic.
  """
  if state.previous_actor is None:
    return state
  start = _extrapolate(state.actor, state.previous_actor, factor)
  return dataclasses.replace(state, actor=start, previous_actor=state.actor)


@functools.partial(jax.jit, static_argnums=2)
def _extrapolate(actor, previous, factor):
  return jax.tree.map(lambda x, before: x + factor * (x - before), actor, previous)


@flax.struct.dataclass
class Frozen:
  """Parameters that no step changes, kept separately from the state.

  In full training these are the reference and the teacher. With adapters, `actor` is the base that
  they are added to. It is the reference too (the policy without its adapters), and the critic's
  base as well where both models start from the same folder.
  """

  actor: dict = dataclasses.field(default_factory=dict)
  critic: dict | None = None  # None: the same as `actor`
  reference: dict | None = None  # None: the same as `actor`
  teacher: dict | None = None  # the policy that a run distils; None: there is none

  def policy(self, actor: dict) -> dict:
    """Returns the parameters of the policy, given the trained ones."""
    return _combine(self.actor, actor)

  def value_model(self, critic: dict) -> dict:
    """Returns the parameters of the separate critic, given the trained ones."""
    base = self.actor if self.critic is None else self.critic
    return _combine(base, critic)

  def reference_policy(self) -> dict:
    """Returns the parameters of the reference."""
    return self.actor if self.reference is None else self.reference


def _combine(base, trained):
  """Returns one tree with the leaves of both. Full training has no base."""
  if not base:
    return trained
  from stppo_jax.models import lora

  return lora.combine(base, trained)


@dataclasses.dataclass(frozen=True)
class Spec:
  """What is static about an update: the objective, the shapes of the models, the optimizers.

  `critic` is None without a critic and where the critic shares the actor's trunk (actor.head
  'both').
  """

  variant: Variant
  actor: decoder.ModelConfig
  critic: decoder.ModelConfig | None
  actor_optimizer: optax.GradientTransformation
  critic_optimizer: optax.GradientTransformation
  actor_lr: optax.Schedule
  critic_lr: optax.Schedule
  micro_batch: int  # bins computed together: see packing.py
  length_buckets: tuple[int, ...]  # tokens per bin, rising; the last holds every row
  temperature: float  # divides the logits in sampler, trainer and reference alike
  logp_chunk: int | None  # tokens of a row whose logits are live at once; None: all
  critic_warmup: int  # optimizer steps that leave the actor unchanged
  num_logged_turns: int  # turns that have their own metrics
  actor_clip: float = math.inf  # bound of the global norm of the actor's gradient
  critic_clip: float = math.inf  # and of the separate critic's
  teacher: decoder.ModelConfig | None = None  # shape of `Frozen.teacher`
  teacher_coef: float = 1.0  # weight of a teacher's advantages
  routing_replay: str = 'none'  # config.rollout.routing_replay: the experts that the policy reuses
  share_prefixes: bool = False  # whether rows of a bin may share places: see packing.py
  # How devices cut bins, see packing.py. None: not at all.
  context_shards: attention.ContextShards | None = None

  @property
  def shared_bins(self) -> bool:
    """Whether a bin may hold several rows: see packing.py."""
    return attention.takes_segments(self.actor.attention)

  @property
  def models(self) -> list[decoder.ModelConfig]:
    """The models that compute the bins."""
    return [model for model in (self.actor, self.critic, self.teacher) if model is not None]

  @property
  def shared_trunk(self) -> bool:
    """Whether one tree holds both heads."""
    return self.actor.head == 'both'

  @property
  def has_values(self) -> bool:
    """Whether anything predicts values."""
    return self.critic is not None or self.shared_trunk


def make_adamw(
    lr: float,
    warmup_steps: int,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    final_lr: float = 1.0,
    num_steps: int = 0,
) -> tuple[optax.GradientTransformation, optax.Schedule]:
  """Returns AdamW, and its learning rate as a schedule.

  The rate rises to `lr` in the first `warmup_steps` and decays linearly to `final_lr` times `lr` at
  the last of `num_steps`. With final_lr 1 it is constant.
  """
  if warmup_steps > 1:
    schedule = optax.linear_schedule(lr / warmup_steps, lr, warmup_steps - 1)
  else:
    schedule = optax.constant_schedule(lr)
  if final_lr != 1:
    decay = optax.linear_schedule(lr, lr * final_lr, max(num_steps - 1 - warmup_steps, 1))
    schedule = optax.join_schedules((schedule, decay), (warmup_steps,))
  return optax.adamw(schedule, betas[0], betas[1], eps, weight_decay=weight_decay), schedule


# Equal settings, one optimizer: see update.compile_functions.
make_optimizer = functools.lru_cache(maxsize=32)(make_adamw)


def create(spec: Spec, actor: dict, critic: dict | None) -> TrainState:
  """Returns a fresh TrainState around the given parameters (host or device arrays)."""
  previous_actor = None
  if spec.variant.extrapolation:
    previous_actor = jax.tree.map(jnp.copy, actor)
  moments = None
  if spec.variant.score_norm != 'none':
    from stppo_jax.systems import ppo_max

    moments = ppo_max.ScoreMoments.zero()
  return TrainState(
      step=jnp.zeros((), jnp.int32),
      actor=actor,
      critic=critic,
      actor_opt=spec.actor_optimizer.init(actor),
      critic_opt=None if critic is None else spec.critic_optimizer.init(critic),
      kl_coef=jnp.asarray(spec.variant.kl_coef, jnp.float32),
      skipped=jnp.zeros((), jnp.int32),
      previous_actor=previous_actor,
      score_moments=moments,
  )


def create_sharded(
    spec: Spec,
    actor: dict,
    critic: dict | None,
    mesh: jax.sharding.Mesh,
    on_host: Sequence[str] = (),
) -> TrainState:
  """Returns a fresh TrainState laid out over the mesh; moments are created in their shards.

  The parameters are donated: those already in place are not copied and must not be used afterwards.
  For `on_host` see `shardings`.
  """
  make = lambda actor, critic: create(spec, actor, critic)
  places = shardings(jax.eval_shape(make, actor, critic), mesh, on_host)
  placed = jax.device_put((actor, critic), (places.actor, places.critic))
  # Donated: the parameters become part of the state without a copy.
  return jax.jit(make, out_shardings=places, donate_argnums=(0, 1))(*placed)


def shardings(
    state: TrainState, mesh: jax.sharding.Mesh, on_host: Sequence[str] = ()
) -> TrainState:
  """Returns where each leaf of a TrainState is kept between steps.

  `on_host` names what is offloaded: 'optimizer' (the moments of both models), 'critic' (the
  separate one).
  """
  host = sharding.tree_shardings(state, mesh, sharding.HOST)
  places = sharding.tree_shardings(state, mesh)
  if 'optimizer' in on_host:
    places = dataclasses.replace(places, actor_opt=host.actor_opt, critic_opt=host.critic_opt)
  if 'critic' in on_host:
    places = dataclasses.replace(places, critic=host.critic)
  return places
