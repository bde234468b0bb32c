"""The rules of config.rollout.allocation: two rounds of sampling."""

import math

from stppo_jax.config import Config
from stppo_jax.types import UserError


def check(config: Config) -> None:
  """Checks the sizes of two rounds of sampling."""
  rollout = config.rollout
  given = f'config.rollout.allocation={rollout.allocation!r}'
  if rollout.demonstrations or rollout.max_num_gen_batches > 1:
    raise UserError(
        f'{given} divides the episodes among a fixed set of questions: leave out '
        'config.rollout.demonstrations, and set max_num_gen_batches=1'
    )
  if config.env.is_program:
    raise UserError(
        f'{given} plays an environment, and config.env.kind is a program: set it to even'
    )
  first_rows = rollout.first_rows or rollout.group_size // 2
  if not 2 <= first_rows < rollout.group_size:
    raise UserError(
        f'{given}: config.rollout.first_rows={first_rows} must be at least 2, because one score '
        f'tells little, and below group_size={rollout.group_size}, the mean size of a group: raise '
        '--config.rollout.group_size'
    )
  if 0 < rollout.max_group < rollout.group_size:
    raise UserError(
        f'{given}: config.rollout.max_group={rollout.max_group} must be at least group_size='
        f'{rollout.group_size}, the mean size of a group: raise it'
    )
  _check_allocation_acts(config, first_rows)


def _check_allocation_acts(config: Config, first_rows: int) -> None:
  """Checks that some scores give groups of unequal size, see `dars.Allocation`."""
  rollout = config.rollout
  given = f'config.rollout.allocation={rollout.allocation!r}'
  if config.train.episodes == rollout.group_size:
    raise UserError(
        f'{given} moves episodes between questions, and config.train.episodes='
        f'{config.train.episodes} is one group: set it to even'
    )

  def acts(first_rows):
    return _largest_wish(rollout.allocation, first_rows) > rollout.group_size - first_rows

  second = rollout.group_size - first_rows
  if rollout.max_group == rollout.group_size:
    raise UserError(
        f'{given}: with config.rollout.max_group={rollout.max_group}, the mean size of a group, no '
        'question can get more: raise it'
    )
  if acts(first_rows):
    return
  larger = [rows for rows in range(first_rows + 1, rollout.group_size) if acts(rows)]
  way_out = f'first_rows={larger[0]}' if larger else 'group_size=4 --config.rollout.first_rows=3'
  raise UserError(
      f'{given} would do nothing: after config.rollout.first_rows={first_rows} a question that was '
      f'never solved gets no more than the {second} further episodes that every question gets: '
      f'set --config.rollout.{way_out}'
  )


def _largest_wish(rule: str, first_rows: int) -> int:
  """Returns `dars.wanted_rows` of a question that was never solved: a = 1 / (2 N) there."""
  total = first_rows**2
  if rule == 'dars_et':
    total = math.ceil(first_rows**3 / (2 * first_rows - 1))
  return total - first_rows
