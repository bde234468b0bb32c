"""Puts a gateway together: a model and its limits in, a server that accepts connections out."""

from collections.abc import Callable
from collections.abc import Iterator
import contextlib
import dataclasses
import os
import time

from absl import logging

from stppo_jax import chat
from stppo_jax.models import decoder
from stppo_jax.rollout import sampler as sampler_lib
from stppo_jax.serving import api
from stppo_jax.serving import row_sampler
from stppo_jax.serving import scheduler as scheduler_lib
from stppo_jax.serving import server as server_lib
from stppo_jax.serving import service as service_lib
from stppo_jax.types import UserError

STEPS = 8  # tokens of a row per decode call: what a stop string may waste, and a stream's beat


@dataclasses.dataclass(frozen=True)
class Settings:
  """What of the config concerns the gateway."""

  name: str = 'stppo'  # of the model
  host: str = '127.0.0.1'
  port: int = 0  # 0: any free one
  rows: int = 32
  max_total: int = 4096
  max_waiting: int = 256
  max_body_mb: int = 4
  tool_form: str = 'hermes'
  api_key: str = ''


def make_sampler(
    model: decoder.ModelConfig,
    tokenizer: chat.Tokenizer,
    rows: int,
    max_total: int,
    top_k: int = 0,
    chunks: tuple[int, ...] = (32, 128),
    slot_buckets: tuple[int, ...] = (),
    platform: str = 'cpu',
    row_sharding=None,
) -> row_sampler.RowSampler:
  """Returns the sampler of requests, for `rows` of them at once."""
  tiled = platform == 'cpu' and row_sharding is None
  model = dataclasses.replace(
      model, row_sharding=row_sharding, cache_tile=decoder.CPU_CACHE_TILE if tiled else 0
  )
  return row_sampler.RowSampler(
      model,
      chat.stop_automaton(tokenizer.token_bytes, ()),
      tokenizer.eos_ids,
      max_total,
      top_k=top_k,
      rows=rows,
      steps=STEPS,
      slot_buckets=slot_buckets or sampler_lib.default_slot_buckets(max_total, platform),
      chunk_buckets=chunks,
      row_sharding=row_sharding,
  )


@contextlib.contextmanager
def running(
    sampler: row_sampler.RowSampler,
    params: dict,
    tokenizer: chat.Tokenizer,
    settings: Settings,
    shares_prefixes: bool = True,
) -> Iterator[server_lib.Server]:
  """Context manager of a server that accepts connections. UserError: the port is taken."""
  limits = api.Limits(max_body_bytes=settings.max_body_mb << 20)
  with contextlib.ExitStack() as resources:
    scheduler = scheduler_lib.Scheduler(
        sampler,
        params,
        tokenizer.token_bytes,
        tokenizer.eos_ids,
        settings.max_waiting,
        shares_prefixes,
    )
    resources.enter_context(scheduler)
    service = service_lib.Service(
        scheduler, tokenizer, settings.name, settings.tool_form, limits, settings.api_key
    )
    server = server_lib.Server(service, settings.host, settings.port)
    try:
      resources.enter_context(server)
    except OSError as error:
      raise UserError(
          f'--port={settings.port} on {settings.host} cannot be used ({error}): give another one'
      ) from error
    yield server


def serve(
    model: decoder.ModelConfig,
    params: dict,
    tokenizer: chat.Tokenizer,
    settings: Settings,
    stop_requested: Callable[[], bool],
    platform: str = 'cpu',
) -> None:
  """Serves until it is asked to stop. The line with the address comes when it accepts requests."""
  sampler = make_sampler(
      model, tokenizer, settings.rows, settings.max_total, platform=platform
  )
  with running(sampler, params, tokenizer, settings) as server:
    logging.info('%s at %s/v1', settings.name, server.url)
    while not stop_requested():
      if not server.service.scheduler.is_alive:
        raise RuntimeError('the engine has failed')
      time.sleep(0.2)


def api_key_of(given: str) -> str:
  """Returns the API key of the config, or of the environment variable STPPO_API_KEY."""
  return given or os.environ.get('STPPO_API_KEY', '')
