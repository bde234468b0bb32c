"""The mode that serves an environment."""

import dataclasses
import math
import resource
import sys

from absl import logging

from stppo_jax.assembly import components as components_lib
from stppo_jax.cli import config_file
from stppo_jax.cli.command import Command
from stppo_jax.net import api_keys
from stppo_jax.settings import validation
from stppo_jax.types import UserError

_OTHER_FILES = 256  # open files of a server besides those of its sessions
# A call starts and ends after a few switches between threads, and every environment that computes
# keeps each of them waiting for this long. Python's default is 5 ms.
_SWITCH_INTERVAL_S = 0.001
_LOOPBACK = ('127.0.0.1', '::1', 'localhost')


def serve(command: Command) -> None:
  """Plays an environment for trainers and for clients of OpenEnv, over the network."""
  (kind,) = command.operands
  config = command.config
  config_file.apply(config, {'env.kind': kind})
  validation.validate(config)
  api_key = api_keys.read('STPPO_API_KEY')
  host = config.serve.host
  if host not in _LOOPBACK and not api_key:
    raise UserError(
        f'config.serve.host={host!r} lets any machine play: set the environment variable '
        'STPPO_API_KEY, here and (as OPENENV_API_KEY) for the trainer, or listen on 127.0.0.1'
    )
  try:
    import websockets.server  # uvicorn imports it later

    from stppo_jax.envs import served
    from stppo_jax.net import http_server
    from stppo_jax.serving import env_server
  except ImportError as error:
    raise UserError(f'env-server needs {error.name}: pip install ".[serve,openenv]"') from error
  del websockets
  components = components_lib.resolve(config)
  if components.env.is_program:
    raise UserError(
        f'env-server {kind}: an agent program plays where the model is sampled: give an '
        'environment class'
    )
  if config.env.mix:
    raise UserError(
        f'env-server {kind} serves one environment, and config.env.mix names several: leave it out'
    )
  factory = components.env_with_retriever
  if factory.uses_global_random:
    logging.warning(
        'calls of %s do not overlap, because each has its own state of the global random '
        'generators: set uses_global_random = False on a class that does not use them',
        kind,
    )
  description = served.Description.of_factory(kind, factory, dataclasses.asdict(config.env))
  _allow_open_files(command.flags.sessions)
  limits = env_server.SessionLimits(
      config.serve.max_body_mb << 20,
      grace_s=1.0,
      max_sessions=command.flags.sessions,
      call_s=config.rollout.env_timeout_s,
  )
  app = env_server.EnvApp(factory, description, limits, api_key)
  port = command.flags.port
  try:
    server = http_server.Server(app, host, port, config.serve.hosts)
  except (OSError, ValueError) as error:  # the port is taken; no name of a host
    raise UserError(
        f'--port={port} at config.serve.host={host!r} cannot be used ({error}): give another one'
    ) from error
  sys.setswitchinterval(_SWITCH_INTERVAL_S)
  with server:
    logging.info('%s at %s: --config.env.kind=openenv:%s', kind, server.url, server.url)
    command.stop_signal.wait(math.inf)


def _allow_open_files(num_sessions: int) -> None:
  """Raises this process's limit of open files, of which a session has one. UserError: it cannot."""
  soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
  needed = num_sessions + _OTHER_FILES
  if soft == resource.RLIM_INFINITY or soft >= needed:
    return
  if hard != resource.RLIM_INFINITY and hard < needed:
    raise UserError(
        f'--sessions={num_sessions} needs {needed} open files, and this process may have {hard}: '
        'give fewer sessions, or raise the limit (ulimit -Hn)'
    )
  resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
