"""The rules of config.rollout.engine: engines in other processes."""

import re
import urllib.parse

from stppo_jax.config import Config
from stppo_jax.config import ENGINES
from stppo_jax.types import UserError


def check(config: Config) -> None:
  """Checks settings that do not work with engines in other processes."""
  rollout = config.rollout
  given = f'config.rollout.engine={rollout.engine!r}'
  if not rollout.engine:
    raise UserError(
        'config.rollout.engine_shares_devices=True needs engines: set config.rollout.engine to '
        'their addresses'
    )
  for part in rollout.engine.split(','):
    if not re.fullmatch(ENGINES, part.strip()) or not _has_port(part):
      raise UserError(
          f'{given}: give http://HOST:PORT, dns://NAME:PORT for all addresses of a name, or '
          'file:PATH for a file with an address per line, several of them separated by commas'
      )
  if rollout.routing_replay == 'sampling':
    raise UserError(
        f'{given}: engines do not report the experts that they chose: set '
        '--config.rollout.routing_replay=old_policy'
    )
  if rollout.engine_shares_devices:
    _check_sharing(config)
  if rollout.engine_kind == 'sglang' and config.rollout.is_cut:
    raise UserError(
        f'{given}: SGLang reports log-probs without top_k and top_p: set '
        '--config.rollout.top_k=0 --config.rollout.top_p=1, or take vLLM'
    )
  if rollout.engine_kind == 'stppo' and rollout.top_k > 0:
    raise UserError(
        f'{given}: the gateway has no top_k: set --config.rollout.top_k=0, or take vLLM'
    )


def _check_sharing(config):
  rollout = config.rollout
  given = 'config.rollout.engine_shares_devices=True'
  if rollout.engine_kind != 'vllm':
    raise UserError(
        f'{given}: of the engines, only vLLM is put to sleep by the run: set '
        '--config.rollout.engine_kind=vllm, or give the engines devices of their own'
    )
  if not all(part.strip().startswith('http') for part in rollout.engine.split(',')):
    raise UserError(
        f'{given} and config.rollout.engine={rollout.engine!r}: an engine that is added while the '
        'run trains would take its memory: give each engine as http://HOST:PORT'
    )
  if config.pipeline.staleness:
    raise UserError(
        f'{given} and config.pipeline.staleness={config.pipeline.staleness}: engines cannot sample '
        'while the trainer has their devices: set --config.pipeline.staleness=0'
    )


def _has_port(address):
  """Whether the port of an address, if it has one, is one."""
  try:
    return urllib.parse.urlsplit(address.strip()).port != 0
  except ValueError:
    return False
