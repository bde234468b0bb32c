"""The HTTP interfaces of sampling engines: token ids in, token ids and log-probs out.

  vllm    vLLM with VLLM_SERVER_DEV_MODE=1 and --logprobs-mode processed_logprobs
  stppo   the gateway of this package, which has the same routes
  sglang  SGLang's native interface

No text passes a tokenizer of this package. The engine looks for the stop strings in its own text,
and `remote` checks the ids that come back.
"""

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
from typing import Any
from typing import Protocol

from stppo_jax.net import http_client
from stppo_jax.rollout import sampling

# (path, body; None: a GET) -> JSON. Raises Temporary and Rejected.
Send = Callable[[str, Any], Any]
# Routes that load weights, which may take minutes.
LOADS = ('/collective_rpc', '/update_weights_from_disk', '/v1/load_lora_adapter')
_ASLEEP = 'asleep'  # label of an engine whose weights are discarded


@dataclasses.dataclass(frozen=True)
class TurnRequest:
  """A turn to be sampled."""

  ids: Sequence[int]  # the whole context
  budget: int  # most tokens
  stop: Sequence[str]  # texts that end the turn and belong to it
  distribution: sampling.Distribution
  label: str = ''  # label of the weights
  stop_state: int = 0  # the trainer's stop automaton begins the turn in it


@dataclasses.dataclass(frozen=True)
class TurnAnswer:
  """A turn as the engine reports it."""

  tokens: list[int]
  logp: list[float]  # as many as tokens; may hold values that are no numbers
  finish: str  # 'stop', 'length', or another reason


class ServerApi(Protocol):
  """The interface of a kind of engine."""

  def sample(self, send: Send, request: TurnRequest) -> TurnAnswer:
    """Samples one turn."""
    ...

  def load(self, send: Send, folder: str, label: str) -> None:
    """Replaces the weights by those of a folder and empties the prefix cache.

    No turn may be in progress. If it raises, the engine may be paused.
    """
    ...

  def resume(self, send: Send) -> None:
    """Ends a pause that a failed `load` may have left."""
    ...

  def labels(self, send: Send) -> list[str]:
    """Returns the labels of the engine's weights, which may be the weights that it started with."""
    ...


@dataclasses.dataclass(frozen=True)
class VllmApi:
  """vLLM's interface: OpenAI's completions, and the routes of its development mode.

  The engine also stops at the eos ids of the generation_config.json of its model.
  """

  eos_ids: tuple[int, ...] = ()  # end a turn, and belong to it
  sleeps: bool = False  # whether the engine is put to sleep between batches
  sleep_level = 2  # discards the weights, because each batch begins with a load

  def sample(self, send: Send, request: TurnRequest) -> TurnAnswer:
    """Samples one turn.

    All sampling settings are sent, because vLLM takes missing ones from generation_config.json.
    """
    body = {
        'prompt': list(request.ids),
        'max_tokens': request.budget,
        'temperature': request.distribution.temperature,
        'top_k': request.distribution.top_k,
        'top_p': request.distribution.top_p,
        'min_p': 0.0,
        'repetition_penalty': 1.0,
        'logprobs': 1,
        'return_token_ids': True,
        'stop': list(request.stop),
        'stop_token_ids': list(self.eos_ids),
        'include_stop_str_in_output': True,
        'skip_special_tokens': False,  # else stop strings that contain such tokens are not found
    }
    choice = send('/v1/completions', body)['choices'][0]
    logprobs = choice['logprobs'] or {}
    return TurnAnswer(
        tokens=choice['token_ids'] or [],
        logp=logprobs.get('token_logprobs') or [],
        finish=choice['finish_reason'],
    )

  def load(self, send: Send, folder: str, label: str) -> None:
    """Pauses, loads the weights, empties the prefix cache, resumes and sets the label.

    A load that fails may leave weights of two versions, so they lose their label before it. An
    engine that sleeps gets the memory of its weights first, and that of its cache after the load.
    vLLM ignores a request to wake what is awake.
    """
    _unless_missing(send, '/update_weight_version', {'new_version': f'{label}-loading'})
    if self.sleeps:
      send('/wake_up?tags=weights', {})
    send('/pause?mode=keep', {})
    try:
      reload_weights = {'method': 'reload_weights', 'kwargs': {'weights_path': folder}}
      send('/collective_rpc', reload_weights)
      if self.sleeps:
        send('/wake_up?tags=kv_cache', {})
      # Requests of other clients, and turns that the trainer abandoned, hold blocks of the cache.
      answer = send('/reset_prefix_cache?reset_running_requests=true&reset_external=true', {})
      if not answer.get('success', True):
        raise http_client.Temporary('the engine did not empty its prefix cache')
    finally:
      self.resume(send)
    _unless_missing(send, '/update_weight_version', {'new_version': label})

  def resume(self, send: Send) -> None:
    """Ends a pause, and wakes an engine that sleeps.

    vLLM's route /resume alone would start turns that have no cache, and this ends its process.
    """
    send('/wake_up' if self.sleeps else '/resume', {})

  def check_sleep_mode(self, send: Send) -> None:
    """Raises Rejected for an engine that answers /sleep and frees no memory."""
    config = _unless_missing(send, '/server_info?config_format=json', None).get('vllm_config')
    if not isinstance(config, dict):  # an older vLLM has no such answer
      return
    if not config.get('model_config', {}).get('enable_sleep_mode', True):
      raise http_client.Rejected(400, 'its sleep mode is off')

  def sleep(self, send: Send) -> None:
    """Aborts the turns in progress, and frees the devices until the next `load` or `resume`.

    Weights that are discarded lose their label.
    """
    self._forget_label(send)
    send(f'/sleep?level={self.sleep_level}', {})
    if not send('/is_sleeping', None).get('is_sleeping'):
      raise http_client.Temporary('the engine did not fall asleep')

  def _forget_label(self, send):
    _unless_missing(send, '/update_weight_version', {'new_version': _ASLEEP})

  def labels(self, send: Send) -> list[str]:
    """Returns the label of the engine's weights. An older vLLM keeps none."""
    return [_unless_missing(send, '/weight_info', None).get('weight_version', '')]


class VllmAdapterApi(VllmApi):
  """vLLM's interface for LoRA adapters on the weights that it started with.

  Each version is a new adapter with the label as its name. A restarted engine does not list the
  name. Cached prefixes belong to one adapter, so they need no reset.
  """

  sleep_level = 1  # keeps weights and adapters in the host's memory, because no load brings them

  def sample(self, send: Send, request: TurnRequest) -> TurnAnswer:
    """Samples one turn with the adapter of the label."""

    def send_with_model(path: str, body: Any) -> Any:
      return send(path, {**body, 'model': request.label})

    try:
      return super().sample(send_with_model, request)
    except http_client.Rejected as error:
      if error.status != 404:
        raise
      # The engine was started again without the adapter.
      raise http_client.Temporary(f'there is no adapter {request.label}') from error

  def load(self, send: Send, folder: str, label: str) -> None:
    """Adds the adapter, and removes those that the run added before."""
    self.resume(send)
    run = label.partition('-')[0]
    old = [name for name in self.labels(send) if name.partition('-')[0] == run]
    send('/v1/load_lora_adapter', {'lora_name': label, 'lora_path': folder})
    for name in old:
      send('/v1/unload_lora_adapter', {'lora_name': name})

  def resume(self, send: Send) -> None:
    """Wakes an engine that sleeps. A new adapter needs no pause."""
    if self.sleeps:
      send('/wake_up', {})

  def _forget_label(self, send):
    """Does nothing, because the adapters stay."""

  def labels(self, send: Send) -> list[str]:
    """Returns the names of the adapters, and that of the model."""
    return [model['id'] for model in send('/v1/models', None)['data']]


@dataclasses.dataclass(frozen=True)
class SglangApi:
  """SGLang's interface."""

  eos_ids: tuple[int, ...] = ()  # as in VllmApi

  def sample(self, send: Send, request: TurnRequest) -> TurnAnswer:
    """Samples one turn."""
    distribution = request.distribution
    settings = {
        'max_new_tokens': request.budget,
        'temperature': distribution.temperature,
        'top_k': distribution.top_k or -1,
        'top_p': distribution.top_p,
        'min_p': 0.0,
        'repetition_penalty': 1.0,
        'stop': list(request.stop),
        'stop_token_ids': list(self.eos_ids),
        'no_stop_trim': True,
        'skip_special_tokens': False,
    }
    body = {'input_ids': list(request.ids), 'sampling_params': settings, 'return_logprob': True}
    info = send('/generate', body)['meta_info']
    sampled = info['output_token_logprobs']  # (log-prob, id, text) of each token
    return TurnAnswer(
        tokens=[entry[1] for entry in sampled],
        logp=[entry[0] for entry in sampled],
        finish=info['finish_reason']['type'],
    )

  def load(self, send: Send, folder: str, label: str) -> None:
    """Pauses, loads the weights with their label, empties the prefix cache and resumes."""
    send('/pause_generation', {'mode': 'retract'})
    try:
      weights = {'model_path': folder, 'flush_cache': True, 'weight_version': label}
      answer = send('/update_weights_from_disk', weights)
      if not answer.get('success', False):
        raise http_client.Temporary(f'the engine did not load {folder}: {answer.get("message")}')
    finally:
      self.resume(send)

  def resume(self, send: Send) -> None:
    """Ends a pause."""
    send('/continue_generation', {})

  def labels(self, send: Send) -> list[str]:
    """Returns the label of the engine's weights."""
    return [_unless_missing(send, '/model_info', None).get('weight_version', '')]


APIS: Mapping[str, type[VllmApi | SglangApi]] = {
    'vllm': VllmApi,
    'sglang': SglangApi,
    'stppo': VllmApi,
}


def _unless_missing(send: Send, path: str, body: object) -> dict[str, Any]:
  """Returns the answer of a route; {} from an engine without it."""
  try:
    return send(path, body)
  except http_client.Rejected as error:
    if error.status not in (404, 405):
      raise
    return {}
