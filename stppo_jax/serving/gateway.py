"""Puts a gateway together: a model and its limits in, a server that accepts connections out."""

from collections.abc import Callable
from collections.abc import Iterator
import contextlib
import dataclasses
import functools
import json
import os
import shlex
from typing import Any
from typing import NamedTuple

from absl import logging
import jax

from stppo_jax.assembly import components as components_lib
from stppo_jax.config import Config
from stppo_jax.distributed import hosts
from stppo_jax.envs import guard
from stppo_jax.envs import protocol
from stppo_jax.envs import stepping
from stppo_jax.models import decoder
from stppo_jax.models import sharding
from stppo_jax.net import api_keys
from stppo_jax.rollout import agent as agent_lib
from stppo_jax.rollout import prepare
from stppo_jax.rollout import sampler as sampler_lib
from stppo_jax.rollout import sampling
from stppo_jax.serving import grammars
from stppo_jax.serving import scheduler as scheduler_lib
from stppo_jax.serving import sessions
from stppo_jax.serving import stop_strings
from stppo_jax.stop_signal import StopSignal
from stppo_jax.text import tokenizer as tokenizer_lib
from stppo_jax.types import Stopped
from stppo_jax.types import UserError

_DEFAULT_MAX_TOTAL = 4096
_LOOPBACK = ('127.0.0.1', '::1', 'localhost')
_POLL_S = 0.2  # between two looks at the signal
_MAX_REASON = 500  # characters
_MAX_EXAMPLE = 8000  # characters of a request in the log
STEPS = 8  # tokens of a row per decode call, of which a stop string may waste most


def make_sampler(
    model: decoder.ModelConfig,
    tokenizer: tokenizer_lib.Tokenizer,
    rows: int,
    max_total: int,
    top_k: int = 0,
    chunks: tuple[int, ...] = (32, 128),
    slot_buckets: tuple[int, ...] = (),
    platform: str = 'cpu',
    row_sharding: jax.sharding.NamedSharding | None = None,
) -> sampler_lib.Sampler:
  """Returns the sampler of requests, for `rows` of them at once."""
  is_tiled = platform == 'cpu' and row_sharding is None
  cache_tile = decoder.CPU_CACHE_TILE if is_tiled else 0
  model = dataclasses.replace(model, row_sharding=row_sharding, cache_tile=cache_tile)
  sizes = sampling.Sizes(
      max_total,
      rows=rows,
      steps=STEPS,
      slot_buckets=slot_buckets or sampling.default_slot_buckets(max_total, platform),
      chunk_buckets=chunks,
  )
  return sampler_lib.Sampler(
      model,
      tokenizer_lib.stop_automaton(tokenizer.token_bytes, ()),
      tokenizer.eos_ids,
      sizes,
      sampling.Distribution(top_k=top_k),
      row_sharding,
  )


@contextlib.contextmanager
def running(
    config: Config,
    scheduler: scheduler_lib.Scheduler,
    tokenizer: tokenizer_lib.Tokenizer,
    port: int = 0,
    turn_end: stop_strings.TurnEnd = stop_strings.UNLIMITED,
) -> Iterator[Any]:
  """Context manager of an `http_server.Server` that accepts connections; port 0 is any free one.

  `turn_end` is the default of requests that are not in a session.

  The environment variable STPPO_API_KEY is the key of clients. Without it any client is accepted.
  UserError: the address cannot be used, or the HTTP libraries are not installed.
  """
  try:
    from stppo_jax.net import http_server
    from stppo_jax.serving import server as server_lib
    from stppo_jax.serving import service as service_lib
  except ImportError as error:
    raise UserError(f'the gateway needs {error.name}: pip install ".[serve]"') from error
  settings = config.serve
  rules = service_lib.ServiceSettings(
      name=config.name,
      tool_form=settings.tool_form,
      template_kwargs=config.model.chat_template_kwargs,
      plain_logp=settings.logprobs_mode == 'raw_logprobs',
      forces_in_sessions=settings.forced_choice == 'auto',
      recording=sessions.Recording(
          settings.max_rows, settings.thoughts == 'keep', config.env.branch_credit == 'program'
      ),
      turn_end=turn_end,
  )
  service = service_lib.Service(scheduler, tokenizer, rules)
  limits = http_server.ServerLimits(settings.max_body_mb << 20, grace_s=0.0)
  with scheduler, contextlib.closing(service):
    app = server_lib.GatewayApp(service, limits, api_keys.read('STPPO_API_KEY'))
    try:
      server = http_server.Server(app, settings.host, port, settings.hosts)
    except (OSError, ValueError) as error:  # the port is taken; no name of a host
      reason = ' '.join(str(error).split())
      raise UserError(
          f'--port={port} at config.serve.host={settings.host!r} cannot be used ({reason}): give '
          'another one'
      ) from error
    with server:
      yield server


def serve(
    config: Config,
    load: Callable[[], tuple[decoder.ModelConfig, dict, int, str]],
    port: int,
    stop_signal: StopSignal,
) -> None:
  """Serves until a stop is requested; logs the address when it accepts requests.

  `load` returns an `evaluation.policy.Policy`. Only the scheduler holds its parameters, so that
  they can be replaced. Process 0 has the server, and the others end with it.
  """
  settings = config.serve
  has_key = bool(api_keys.read('STPPO_API_KEY'))
  if settings.weights_folder and settings.host not in _LOOPBACK and not has_key:
    raise UserError(
        f'config.serve.host={settings.host!r} with serve.weights_folder lets any machine replace '
        'the weights: set the environment variable STPPO_API_KEY, here and (as OPENAI_API_KEY) for '
        'the trainer, or listen on 127.0.0.1'
    )
  model, params, _, description = load()
  tokenizer = prepare.load_tokenizer(config)
  tokenizer_lib.check_matches(tokenizer, model.vocab_size)
  max_total = settings.max_total or min(model.max_positions, _DEFAULT_MAX_TOTAL)
  if max_total > model.max_positions:
    raise UserError(
        f'config.serve.max_total={max_total}: the model has {model.max_positions} positions: give '
        'at most that'
    )
  sampler = make_sampler(
      model,
      tokenizer,
      settings.rows,
      max_total,
      platform=jax.devices()[0].platform,
      row_sharding=agent_lib.row_sharding(config, model, sharding.mesh_of(config.mesh)),
  )
  load_params = functools.partial(_load_params, config, model) if settings.weights_folder else None
  scheduler = scheduler_lib.Scheduler(
      sampler,
      params,
      tokenizer.token_bytes,
      tokenizer.eos_ids,
      settings.max_waiting,
      load_params=load_params,
      grammars=grammars.Grammars(tokenizer),
  )
  del params
  stop_anywhere = hosts.anywhere(stop_signal)
  if not hosts.is_writer():
    with scheduler:
      while scheduler.is_alive:
        scheduler.wait(_POLL_S)
        stop_anywhere.is_set()  # if this process has to stop, it tells process 0
    return
  run = _read_run(config, tokenizer, stop_signal)
  with running(config, scheduler, tokenizer, port, run.turn_end) as server:
    logging.info('model %s (%s) at %s/v1', config.name, description, server.url)
    _log_use(config, server.url, tokenizer, run)
    while not stop_anywhere.is_set():
      scheduler.wait(_POLL_S)


class _Run(NamedTuple):
  """What a server takes from the environment of its run."""

  turn_end: stop_strings.TurnEnd  # the default of requests
  example: dict[str, Any] | None  # fields of a chat request with a prompt of the run
  reason: str = ''  # why there is no example


def _read_run(config: Config, tokenizer: tokenizer_lib.Tokenizer, stop_signal: StopSignal) -> _Run:
  """Returns the end of a turn and an example. The model is served even without its environment."""
  turn_end = stop_strings.TurnEnd(max_tokens=config.rollout.max_turn)
  try:
    components = components_lib.resolve(config)
    env = components.env
    turn_end = dataclasses.replace(
        turn_end, stop_strings=tuple(env.stop_strings), skips_thoughts=env.skips_thoughts
    )
    if env.is_program:
      return _Run(turn_end, None, f'the program {config.env.kind} writes them')
    example = _example(config, components, tokenizer, stop_signal)
  except Stopped:
    raise
  except Exception as error:  # the code and the files of a user may raise anything
    reason = ' '.join(f'{type(error).__name__}: {error}'.split())
    return _Run(turn_end, None, reason[:_MAX_REASON])
  if len(json.dumps(example)) > _MAX_EXAMPLE:
    return _Run(turn_end, None, 'the first prompt of the run is too long to show')
  return _Run(turn_end, example)


def _example(
    config: Config,
    components: components_lib.Components,
    tokenizer: tokenizer_lib.Tokenizer,
    stop_signal: StopSignal,
) -> dict[str, object]:
  """Returns the messages and tools of a chat request about the first held-out task."""
  task = components.held_out[0]
  seed = config.seed if task.seed is None else task.seed
  limits = guard.Guard(config.rollout.env_timeout_s, stop_signal, config.rollout.threads == 0)
  observation, info = stepping.reset(components.env(task, seed, limits), seed)
  if error := info.get('environment_error'):
    raise UserError(f'config.env.kind={config.env.kind!r}: {error}')
  text = protocol.full_text(observation, info)
  tools = info.get('tools')
  if tools and tokenizer.render is not None:
    return {'messages': [{'role': 'user', 'content': text}], 'tools': list(tools)}
  return {'messages': [{'role': 'user', 'content': info.get('declaration', '') + text}]}


def _log_use(config: Config, url: str, tokenizer: tokenizer_lib.Tokenizer, run: _Run) -> None:
  """Logs where answers end, and which prompts the model was trained on, with a command."""
  ends = ', '.join(map(repr, run.turn_end.stop_strings)) or 'the eos token'
  logging.info(
      'an answer ends at %s or after %d tokens, unless the request has its own stop or max_tokens',
      ends,
      run.turn_end.max_tokens,
  )
  form = "chats in the form of the model's chat template"
  if tokenizer.render is None:
    form = 'texts in the form of its environment, because the model has no chat template'
  if run.example is None:
    logging.warning('prompts are %s. There is no example: %s', form, run.reason)
    return
  command = f"curl -s {url}/v1/chat/completions -H 'Content-Type: application/json'"
  if api_keys.read('STPPO_API_KEY'):
    command += ' -H "Authorization: Bearer $STPPO_API_KEY"'
  body = json.dumps({'model': config.name, **run.example})
  logging.info('prompts are %s: %s -d %s', form, command, shlex.quote(body))


def _load_params(config: Config, model: decoder.ModelConfig, folder: str) -> dict:
  """Returns the parameters of a folder in config.serve.weights_folder, which must fit the model.

  Raises Busy if the folder does not exist, because a network file system may show it later.
  """
  shown = f'weights_path={folder[:200]!r}'
  root = os.path.realpath(config.serve.weights_folder)
  path = os.path.realpath(folder)
  _check_is_within(root, path, shown)
  if not os.path.isdir(path):
    raise scheduler_lib.Busy(f'{shown}: there is no such folder yet')
  for name in os.listdir(path):
    _check_is_within(root, os.path.realpath(os.path.join(path, name)), shown)
  pushed = prepare.load_shape(config, folder=path)
  pushed = dataclasses.replace(
      pushed, head=model.head, family=model.family, attention=model.attention
  )
  if pushed != model:
    raise UserError(f'{shown}: its config.json is not that of the served model')
  place = functools.partial(sharding.tree_shardings, mesh=sharding.mesh_of(config.mesh))
  _, params = prepare.load_policy(config, folder=path, shardings=place)
  return params


def _check_is_within(root: str, path: str, shown: str) -> None:
  """Raises a UserError for a path outside the folder of weights."""
  if os.path.commonpath([root, path]) != root:
    raise UserError(
        f'{shown}: must be a folder in config.serve.weights_folder={root!r}, and so must its files'
    )
