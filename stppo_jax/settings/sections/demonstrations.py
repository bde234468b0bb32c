"""The rules of config.rollout.demonstrations."""

from stppo_jax.algorithms.variants import Variant
from stppo_jax.config import Config
from stppo_jax.types import UserError


def check(config: Config) -> None:
  """Checks that demonstrations can be played, and leave rows to sample."""
  rollout = config.rollout
  given = f'config.rollout.demonstrations={rollout.demonstrations!r}'
  if config.env.is_program:
    raise UserError(f'{given} plays an environment, and config.env.kind is a program: leave it out')
  if rollout.routing_replay == 'sampling':
    raise UserError(
        f"{given}: config.rollout.routing_replay='sampling' needs recorded experts, and "
        "demonstrations have none: set it to 'old_policy' or 'none'"
    )
  if config.env.mix and rollout.demonstrate_every > 1:
    raise UserError(
        f'config.rollout.demonstrate_every={rollout.demonstrate_every} counts the questions of a '
        'batch, which config.env.mix sorts by environment: set it to 1'
    )
  questions = config.train.episodes // rollout.group_size
  groups = -(-questions // rollout.demonstrate_every)
  most = rollout.group_size - int(groups == questions)
  if rollout.demonstrated > most:
    raise UserError(
        f'config.rollout.demonstrated={rollout.demonstrated} leaves nothing to sample in groups '
        f'of {rollout.group_size}: lower it, or set --config.rollout.demonstrate_every=2 or more. '
        'To imitate only: python run.py sft'
    )


def check_variant(config: Config, variant: Variant) -> None:
  """Checks that demonstrations train something, and leave groups to compare."""
  rollout = config.rollout
  name = config.algorithm.variant
  if not (variant.imitation or variant.uses_demonstrations):
    raise UserError(
        f'config.rollout.demonstrations={rollout.demonstrations!r}: {name!r} does not train on '
        'demonstrations: set --config.algorithm.imitation=0.1, or --config.algorithm.variant=grao'
    )
  sampled = rollout.group_size - rollout.demonstrated
  if variant.needs_groups and not variant.uses_demonstrations and sampled == 1:
    raise UserError(
        f'config.rollout.demonstrated={rollout.demonstrated} leaves one sampled episode of a '
        f'group, which config.algorithm.variant={name!r} compares with nothing: lower it, or raise '
        'group_size'
    )
