"""The state of training: one pytree, handed into the update and handed back."""

import dataclasses

import flax
import jax
import jax.numpy as jnp
import optax

from stppo_jax.algorithms import variants
from stppo_jax.models import decoder
from stppo_jax.models import lora
from stppo_jax.models import sharding


@flax.struct.dataclass
class TrainState:
  """Everything an update changes. What stands still is in `Frozen`."""

  step: jax.Array  # [] int32, optimizer steps taken or skipped
  actor: dict  # what is trained of the policy, or of the shared trunk: all, or adapters (and value head)
  critic: dict | None  # what is trained of the separate critic
  actor_opt: optax.OptState
  critic_opt: optax.OptState | None
  kl_coef: jax.Array  # [] float32, of the KL penalty
  skipped: jax.Array  # [] int32, steps skipped in a row because a gradient was not finite


@flax.struct.dataclass
class Frozen:
  """Parameters that no step changes, held once beside the state.

  With full training there is the reference alone. With adapters `actor` is what they stand on; it is the
  reference too (the policy without its adapters), and under the critic's adapters as well where both
  models start from the same folder.
  """

  actor: dict = dataclasses.field(default_factory=dict)
  critic: dict | None = None  # None: the same as `actor`
  reference: dict | None = None  # None: the same as `actor`

  def policy(self, actor):
    """Parameters of the policy, from what is trained of it."""
    return lora.combine(self.actor, actor)

  def value_model(self, critic):
    """Parameters of the separate critic, from what is trained of it."""
    return lora.combine(self.actor if self.critic is None else self.critic, critic)

  def reference_policy(self):
    """Parameters of the reference."""
    return self.actor if self.reference is None else self.reference


@dataclasses.dataclass(frozen=True)
class Learner:
  """What is static about the compiled functions: shapes, the algorithm, the optimizers.

  `critic` is None without a critic and where the critic shares the actor's trunk (actor.head 'both').
  """

  actor: decoder.ModelConfig
  critic: decoder.ModelConfig | None
  variant: variants.Variant
  actor_optimizer: optax.GradientTransformation
  critic_optimizer: optax.GradientTransformation
  actor_lr: optax.Schedule
  critic_lr: optax.Schedule
  micro_batch: int  # bins computed together: see packing.py
  lengths: tuple[int, ...]  # that a micro-batch's bins may have, rising; the last holds every row
  temperature: float = 1.0  # divides the logits in sampler, trainer and reference alike
  logp_chunk: int | None = None
  gamma: float = 1.0
  lam: float = 1.0
  aggregation: str = 'seq-mean-token-mean'
  norm_length: int | None = None
  dual_clip: float | None = None
  entropy_coef: float = 0.0
  kl_in: str = 'none'  # 'reward' | 'loss' | 'none'
  kl_estimator: str = 'k1'
  kl_target: float | None = None
  kl_horizon: float = 10_000.0
  value_clip: float | None = None
  value_coef: float = 0.5
  old_logp: str = 'trainer'
  is_correction: str = 'none'  # see `rollout_correction`
  is_threshold: float = 2.0
  log_bias: bool = True
  critic_warmup: int = 0  # optimizer steps that leave the actor alone
  num_turns: int = 5  # turns told apart in the metrics

  @property
  def shared_trunk(self) -> bool:
    """Whether one tree holds both heads."""
    return self.actor.head == 'both'

  @property
  def has_values(self) -> bool:
    """Whether anything predicts values."""
    return self.critic is not None or self.shared_trunk


def make_optimizer(lr, warmup_steps, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0, grad_clip=1.0):
  """AdamW after a clip of the global norm, and its learning rate as a function of the step."""
  schedule = (
      optax.linear_schedule(lr / warmup_steps, lr, warmup_steps - 1)
      if warmup_steps > 1
      else (optax.constant_schedule(lr))
  )
  optimizer = optax.chain(
      optax.clip_by_global_norm(grad_clip),
      optax.adamw(schedule, b1=betas[0], b2=betas[1], eps=eps, weight_decay=weight_decay),
  )
  return optimizer, schedule


def create(learner, actor, critic, kl_coef):
  """A fresh TrainState around the given parameters (host or device arrays)."""
  return TrainState(
      step=jnp.zeros((), jnp.int32),
      actor=actor,
      critic=critic,
      actor_opt=learner.actor_optimizer.init(actor),
      critic_opt=None if critic is None else learner.critic_optimizer.init(critic),
      kl_coef=jnp.asarray(kl_coef, jnp.float32),
      skipped=jnp.zeros((), jnp.int32),
  )


def create_sharded(learner, actor, critic, kl_coef, mesh, on_host=()):
  """A fresh TrainState laid out over the mesh; the optimizer's state is born in its shards.

  Takes the parameters over: those that lie there already are not copied, and are gone after. For
  `on_host` see `shardings`.
  """
  make = lambda actor, critic: create(learner, actor, critic, kl_coef)
  places = shardings(jax.eval_shape(make, actor, critic), mesh, on_host)
  put = lambda tree, places: None if tree is None else jax.device_put(tree, places)
  actor, critic = put(actor, places.actor), put(critic, places.critic)
  # Donated: the parameters become part of the state instead of being copied into it.
  return jax.jit(make, out_shardings=places, donate_argnums=(0, 1))(actor, critic)


def shardings(state, mesh, on_host=()):
  """Where each leaf of a TrainState lies between steps.

  On the host is what `on_host` names: 'optimizer' (the moments of both models), 'critic' (the separate one).
  """
  host = sharding.tree_shardings(state, mesh, sharding.HOST)
  places = sharding.tree_shardings(state, mesh)
  if 'optimizer' in on_host:
    places = places.replace(actor_opt=host.actor_opt, critic_opt=host.critic_opt)
  if 'critic' in on_host:
    places = places.replace(critic=host.critic)
  return places
