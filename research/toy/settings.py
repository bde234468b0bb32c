"""The settings of the toy task: overrides in, one frozen description of its runs out.

A setting has the path of the ordinary schema if both have it (`algorithm.ratio`, `actor.lr`,
`train.epochs`, `pipeline.staleness`), so that grids can share overrides. Settings that only the toy
task has are under `toy`.
"""

from collections.abc import Mapping
import dataclasses
import difflib
from typing import Any

from research.toy import task
from stppo_jax import config as schema
from stppo_jax.algorithms import variants
from stppo_jax.settings import objective
from stppo_jax.settings import validation
from stppo_jax.types import Section
from stppo_jax.types import setting
from stppo_jax.types import UserError

# Settings of the ordinary schema that the toy task reads besides `algorithm`, `actor`, `critic`.
SHARED = (
    'train.updates',
    'train.schedule_updates',
    'train.episodes',
    'train.mini_batch',
    'train.epochs',
    'train.critic_warmup',
    'pipeline.staleness',
    'rollout.group_size',
)
# Numbers of a Variant, in which configs may differ and share a program.
NUMBERS = ('clip_low', 'clip_high', 'gamma', 'lam', 'entropy_coef', 'kl_coef')
MAX_STALENESS = 8  # up to here, the staleness is a number too


# A table, laid out by hand.
# fmt: off


@dataclasses.dataclass
class ToyTask(Section):
  """The small task, its models, and their warm start."""

  turns: int = setting(3, 'turns per episode', at_least=1, at_most=20)
  tokens: int = setting(
      3, 'tokens of a word at most; a turn has one more for its end', at_least=1, at_most=20)
  vocabulary: int = setting(8, 'tokens, without the end token', at_least=2, at_most=100)
  keys: int = setting(16, 'questions, and entries of each turn', at_least=2, at_most=1000)
  rewards: str = setting(
      'end', "'end': 1 for a wholly right episode; 'turn': a share per turn while all is right",
      allowed=('end', 'turn'))
  hidden: int = setting(32, 'width of the two hidden layers', at_least=1, at_most=1024)
  warm_steps: int = setting(
      300, 'supervised steps on demonstrations, before anything is measured', at_least=0)
  warm_lr: float = setting(1e-2, 'their learning rate', at_least=0)
  warm_episodes: int = setting(64, 'demonstrations per step', at_least=1)
  reliability: float = setting(
      0.4, 'least share of right demonstrations of a word; each word draws its own up to 1',
      at_least=0, at_most=1)


# fmt: on


@dataclasses.dataclass(frozen=True)
class ToyOptimizer:
  """An optimizer: numbers, but for its schedule."""

  lr: Any
  betas: Any
  eps: Any
  weight_decay: Any
  grad_clip: Any
  warmup_steps: int
  final_lr: float
  num_steps: int


@dataclasses.dataclass(frozen=True)
class WarmStart:
  """How the first policy is made. Configs that agree in it start from the same policies."""

  chain: task.Chain
  hidden: int
  steps: int
  lr: float
  episodes: int
  reliability: float


@dataclasses.dataclass(frozen=True)
class ToyConfig:
  """What one seed's run is a function of."""

  warm: WarmStart
  variant: variants.Variant
  actor: ToyOptimizer
  critic: ToyOptimizer
  updates: int
  episodes: int
  mini_batch: int
  epochs: int
  group_size: int
  critic_warmup: int  # updates
  staleness: Any
  history: int  # policies kept for sampling

  @property
  def chain(self) -> task.Chain:
    """The task."""
    return self.warm.chain

  @property
  def steps(self) -> int:
    """Optimizer steps per update."""
    return self.epochs * self.episodes // self.mini_batch


def make(settings: Mapping[str, Any]) -> ToyConfig:
  """Returns the ToyConfig of overrides {path: value}; raises a UserError for other settings."""
  toy = ToyTask()
  config = _base()
  for path, value in settings.items():
    section, _, name = path.rpartition('.')
    value = tuple(value) if isinstance(value, list) else value  # as JSON has it
    if section == 'toy':
      setattr(toy, name, value)
    elif section in ('algorithm', 'actor', 'critic') or path in SHARED:
      setattr(getattr(config, section), name, value)
    else:
      near = difflib.get_close_matches(path, [f'toy.{n}' for n in vars(toy)] + [*SHARED], n=1)
      hint = f'; did you mean {near[0]}?' if near else ''
      raise UserError(
          f'{path}={value!r}: the toy task has algorithm.*, actor.*, critic.*, toy.*, '
          f'{", ".join(SHARED)}{hint}'
      )
  validation.validate(config)
  validation.check_section('toy.', toy)
  return _make_config(toy, config, objective.make_variant(config))


def split(config: ToyConfig) -> tuple[ToyConfig, dict[str, Any]]:
  """Returns the structure of a config, which a program is compiled for, and its numbers."""

  def rate(options):
    names = ('lr', 'betas', 'eps', 'weight_decay', 'grad_clip')
    return {name: getattr(options, name) for name in names}

  numbers = {
      'variant': {name: getattr(config.variant, name) for name in NUMBERS},
      'actor': rate(config.actor),
      'critic': rate(config.critic),
      'staleness': config.staleness,
  }
  return join(config, _emptied(numbers)), numbers


def join(config: ToyConfig, numbers: Mapping[str, Any]) -> ToyConfig:
  """Returns the config with these numbers, which may be traced."""
  return dataclasses.replace(
      config,
      variant=dataclasses.replace(config.variant, **numbers['variant']),
      actor=dataclasses.replace(config.actor, **numbers['actor']),
      critic=dataclasses.replace(config.critic, **numbers['critic']),
      staleness=numbers['staleness'],
  )


def _emptied(numbers):
  return {k: _emptied(v) if isinstance(v, dict) else None for k, v in numbers.items()}


def _base() -> schema.Config:
  """Returns the schema with defaults for a policy of this size."""
  config = schema.Config()
  config.train.updates = 100
  config.train.episodes = 32
  config.train.mini_batch = 16
  config.train.micro_batch = 1
  config.actor.lr = 1e-3
  config.actor.warmup = 0.0
  config.critic.lr = 3e-3
  config.critic.warmup = 0.0
  return config


def _make_config(toy: ToyTask, config: schema.Config, variant: variants.Variant) -> ToyConfig:
  train = config.train
  staleness = config.pipeline.staleness
  chain = task.Chain(toy.turns, toy.tokens, toy.vocabulary, toy.keys, toy.rewards)
  if variant.value_loss != 'mse':
    raise UserError("config.algorithm.value_loss='hl_gauss': the toy task's critic has no bins")
  if not config.algorithm.norm_length:
    variant = dataclasses.replace(variant, norm_length=chain.turns * chain.places)
  num_steps = (train.schedule_updates or train.updates) * train.epochs
  num_steps *= train.episodes // train.mini_batch

  def rate(options: schema.OptimizerSettings) -> ToyOptimizer:
    return ToyOptimizer(
        options.lr,
        options.betas,
        options.eps,
        options.weight_decay,
        options.grad_clip,
        warmup_steps=round(options.warmup * num_steps),
        final_lr=options.final_lr,
        num_steps=num_steps,
    )

  return ToyConfig(
      warm=WarmStart(
          chain, toy.hidden, toy.warm_steps, toy.warm_lr, toy.warm_episodes, toy.reliability
      ),
      variant=variant,
      actor=rate(config.actor),
      critic=rate(config.critic),
      updates=train.updates,
      episodes=train.episodes,
      mini_batch=train.mini_batch,
      epochs=train.epochs,
      group_size=config.rollout.group_size,
      critic_warmup=train.critic_warmup,
      staleness=staleness,
      history=max(staleness, MAX_STALENESS) + 1,
  )
