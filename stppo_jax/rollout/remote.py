"""Samples with engines in other processes: a sampling server of vLLM, SGLang or this package.

  copy      trained parameters -> a folder of weights, numbered by their version (weight_folders.py)
  run       plays sequences as `engine.run` does; each turn is one request
  push      an engine gets the weights of a folder before it samples with them

                  turn 1          turn 2                     turn 3
  engine 0   ----[version 4]-----[version 4]---| push 5 |---[version 5]----
                                                 no turn is in progress

Each turn is sampled with one version of the weights, and records that version. A turn that needs
other weights than the engine has pushes them first, and later turns wait. After a failure the run
requests the label of the engine's weights before the next turn, because a restarted engine has the
weights that it started with.
"""

from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Sequence
from concurrent import futures
import contextlib
import dataclasses
import functools
import json
import numbers
import re
import secrets
import socket
import threading
import time
from typing import Any
import urllib.parse

from absl import logging
import jax
import numpy as np

from stppo_jax import types
from stppo_jax.distributed import hosts
from stppo_jax.net import api_keys
from stppo_jax.net import http_client
from stppo_jax.rollout import directory
from stppo_jax.rollout import env_pool
from stppo_jax.rollout import sampling
from stppo_jax.rollout import sequences
from stppo_jax.rollout import servers
from stppo_jax.rollout.weight_folders import RemoteWeights
from stppo_jax.rollout.weight_folders import WeightFolders
from stppo_jax.stop_signal import NEVER
from stppo_jax.stop_signal import StopSignal
from stppo_jax.text import tokenizer as tokenizer_lib

NUM_PROBES = 8  # turns of `check_agreement`
_PROBE_TOKENS = 32
_PROBE_BLOCK = 128  # scored rows are multiples of it, so that they can be computed in chunks
_UNKNOWN = -1  # version of an engine whose label has to be requested
_IN_QUESTION = -2  # version while the label is requested, or weights are loaded
_RETRY_S = 2.0  # wait before an engine that failed is tried again; doubled after each failure
_LONGEST_RETRY_S = 30.0
_RESOLVE_S = 5.0  # the engines are looked up again before a turn after this time
_POLL_S = 0.2  # between two looks at the signal
_CONNECT_S = 5.0
_LONGEST_WAIT_S = 60.0  # an engine may ask for this wait
_IDLE_S = 1.0  # no engine ends, starts again and answers within this time
_START_S = 600.0  # time limit for an engine that still loads its model
_PROBE_S = 60.0  # time limit for an engine that has answered before
_PROBE_TEMPERATURE = 0.8
_PASS_ON_S = 10.0  # a turn waits this long for a push before another engine samples it
_QUESTION_S = 10.0  # time limit of a GET, such as the request for the label
_CONTROL_S = 60.0  # time limit of a command, such as a pause
_LOAD_S = 900.0  # time limit of a command that loads weights
_BAD_TURNS = 8  # turns in a row with an impossible log-prob, after which the run ends
# Sampling in float32 draws no token with a log-prob below about -30. vLLM reports -9999 for minus
# infinity.
_LEAST_LOGP = -100.0
_LARGEST_LOGP = 1e-3  # rounding may give a number above 0
_MAX_SOCKETS = 1024
_LABEL = re.compile('([0-9a-f]{8})-.*')  # the run, and the version of its weights


class BadLogprob(http_client.Temporary):
  """A turn with a number that is no log-prob of a sampled token."""


class RemoteEngine:
  """One engine: its address, the version of its weights, and its turns in progress.

  Args:
    address: with or without /v1. The key for it is OPENAI_API_KEY in the environment.
    api: its interface.
    turn_s: time limit of a turn.
    run: eight hexadecimal digits that distinguish the weights of this run from those of others.
    stop_signal: ends requests and waits, with Stopped.
  """

  def __init__(
      self, address: str, api: servers.ServerApi, turn_s: float, run: str, stop_signal: StopSignal
  ):
    self.address = address.strip().rstrip('/').removesuffix('/v1')
    self.answered_at = 0.0  # monotonic time of the newest turn, load or sign of being busy
    self.is_asleep = False  # whether it must not be used, because the trainer uses its devices
    self.push_s = 0.0  # seconds of all pushes
    self._api = api
    self._run = run
    self._stop_signal = stop_signal
    self._version = _UNKNOWN
    self._had_weights = False  # those of this run
    self._entrance = threading.Lock()  # each turn passes it; a push holds it
    self._turn_ended = threading.Condition()  # its lock guards the version and the number of turns
    self._num_turns = 0  # in progress
    self._failure = http_client.Temporary('')  # the newest failure
    self._retry_at = 0.0  # monotonic time until which each turn raises the newest failure
    self._num_failures = 0  # attempts that failed since the newest answer
    self._hangs = False  # whether a turn had no answer in time, and no later turn had one
    self._has_trial = False  # whether a single turn tests an engine that hangs
    api_key = api_keys.read('OPENAI_API_KEY')
    limits = http_client.ClientLimits(_CONNECT_S, turn_s)
    self._server = http_client.Connection(self.address, limits, _MAX_SOCKETS, api_key)
    self._turn_s = turn_s
    self._send_turn = functools.partial(self._send, turn_s)

  def sample(
      self,
      request: servers.TurnRequest,
      wanted: Callable[[], RemoteWeights],
      passes_on: bool = False,
  ) -> tuple[servers.TurnAnswer, int]:
    """Samples a turn with the weights that `wanted` returns; returns it with their version.

    After a turn without an answer, only one turn at a time is sent, until one is answered.

    Raises Temporary if another attempt, or another engine, may succeed, Stopped, and a RunError if
    the engine rejects the request for good.

    Args:
      request: the turn.
      wanted: returns the weights.
      passes_on: whether another engine can sample the turn. Then the turn does not wait for a long
        push, and not for an engine that has failed.
    """
    self._enter(passes_on)
    try:
      self._stop_signal.raise_if_set()
      if self.is_asleep:
        raise types.Stopped  # a turn of a batch that has ended with an error
      if time.monotonic() < self._retry_at or self._has_trial:
        raise self._failure.with_traceback(None)
      weights = wanted()
      self.ensure(weights)
      is_trial = self._hangs
      with self._turn_ended:
        self._num_turns += 1
        self._has_trial = is_trial
    finally:
      self._entrance.release()
    request = dataclasses.replace(request, label=self._label(weights))
    started = time.monotonic()
    try:
      with self._failures():
        answer = self._api.sample(self._send_turn, request)
      self.answered_at = time.monotonic()
      self._num_failures = 0
      self._hangs = False
      return answer, weights.version
    except http_client.Temporary as failure:
      self._hangs |= failure.is_silent and time.monotonic() - started >= self._turn_s
      raise
    finally:
      with self._turn_ended:
        self._num_turns -= 1
        if is_trial:
          self._has_trial = False
        self._turn_ended.notify_all()

  def _enter(self, passes_on: bool) -> None:
    """Acquires the entrance. Raises Stopped, or Temporary for a turn that passes on."""
    started = time.monotonic()
    while not self._entrance.acquire(timeout=_POLL_S):
      self._stop_signal.raise_if_set()
      if not passes_on:
        continue
      if self._num_failures:
        raise self._failure.with_traceback(None)
      if time.monotonic() - started > _PASS_ON_S:
        raise http_client.Temporary(f'{self.address} still loads weights', is_busy=True)

  def ensure(self, weights: RemoteWeights) -> None:
    """Gives the engine these weights unless it has them. No turn may start meanwhile.

    An engine without requests for _IDLE_S may have been restarted, so its label is requested again.
    Raises as `sample` does.
    """
    if not self._num_turns and time.monotonic() - self.answered_at > _IDLE_S:
      self._version = _UNKNOWN
    while self._version != weights.version:
      with self._failures():
        self._push(weights)

  def await_sleep_mode(self) -> None:
    """Puts an engine to sleep that may still load its model. Raises a UserError if it cannot."""
    deadline = time.monotonic() + _START_S
    try:
      while self._is_gone() and time.monotonic() < deadline:
        self._stop_signal.raise_if_set()
        time.sleep(_POLL_S)
      if self._is_gone():
        raise types.UserError(
            f'config.rollout.engine: {self.address} does not answer: start it, or correct the '
            'address'
        )
      self.fall_asleep(checks_mode=True)
    except types.RunError as error:
      raise types.UserError(f'config.rollout.engine: {error}') from error

  def fall_asleep(self, checks_mode: bool = False) -> None:
    """Ends the engine's turns and frees its devices. An engine without a process needs nothing.

    Waits for a push in progress. A stop of the run does not end it. Raises a RunError if the engine
    may still have its memory.
    """
    self.is_asleep = True
    send = functools.partial(self._send, _CONTROL_S, stop_signal=NEVER)
    deadline = time.monotonic() + _CONTROL_S
    with self._entrance:
      self._version = _UNKNOWN
      api = self._api
      assert isinstance(api, servers.VllmApi)  # see settings.sections.engine
      while True:
        try:
          if checks_mode:
            api.check_sleep_mode(send)
          api.sleep(send)
          return
        except http_client.Rejected as error:
          text = ' '.join(error.text.split())[:300]
          raise types.RunError(
              f'{self.address} cannot sleep (status {error.status}: {text}): start vLLM with '
              'VLLM_SERVER_DEV_MODE=1 and --enable-sleep-mode, or set '
              '--config.rollout.engine_shares_devices=false'
          ) from error
        except http_client.Temporary as error:
          if self._is_gone():
            logging.warning('%s is not put to sleep, because nothing listens there', self.address)
            return
          if time.monotonic() > deadline:
            raise types.RunError(
                f'{self.address} did not fall asleep within {_CONTROL_S:g} s ({error}), and the '
                'update needs its memory: end it and start it again, and the same command resumes'
            ) from error
        time.sleep(_POLL_S)

  def _is_gone(self):
    """Whether no process listens at the address."""
    place = urllib.parse.urlsplit(self.address)
    try:
      port = place.port or (443 if place.scheme == 'https' else 80)
      socket.create_connection((place.hostname, port), _CONNECT_S).close()
    except ConnectionRefusedError:
      return True
    except OSError:
      return False
    return False

  def await_push(self) -> None:
    """Waits for a push in progress. An interrupted push could leave the engine paused."""
    with self._entrance:
      pass

  def _push(self, weights):
    """Loads the weights, unless the label of the engine shows that it has them.

    The version stays unknown if a turn fails after the label was requested.
    """
    started = time.monotonic()
    label = self._label(weights)
    self._version = _IN_QUESTION
    labels = self._api.labels(self._send_load)
    if label in labels:
      self._api.resume(self._send_load)  # the last request of an earlier load may have failed
    else:
      self._check_owner(labels)
      with self._turn_ended:
        while not self._turn_ended.wait_for(lambda: not self._num_turns, _POLL_S):
          self._stop_signal.raise_if_set()
      self._version = _IN_QUESTION  # turns that failed before the load do not matter
      self._api.load(self._send_load, weights.folder, label)
      self.answered_at = time.monotonic()
      self.push_s += self.answered_at - started
    self._had_weights = True
    with self._turn_ended:
      if self._version == _IN_QUESTION:
        self._version = weights.version

  def _check_owner(self, labels):
    """Raises a RunError if another run has replaced the weights of this one."""
    matches = map(_LABEL.fullmatch, labels)
    runs = {match[1] for match in matches if match}
    if self._had_weights and runs and self._run not in runs:
      raise types.RunError(
          f'{self.address}: another run has replaced the weights of this one: give each run '
          'engines of its own, and the same command resumes'
      )

  def _label(self, weights):
    return f'{self._run}-{weights.version}'

  def _send(self, total_s, path, body, stop_signal=None):
    """Returns the JSON of an answer; {} for an empty answer and for a text.

    Raises Stopped if the run ends first, and Temporary after `total_s`, even if a part of the
    answer has arrived.
    """
    answer = self._server.ask(path, body, stop_signal or self._stop_signal, total_s)
    try:
      return json.loads(answer)
    except ValueError:
      return {}

  def _send_load(self, path, body):
    """Sends a request that is not a turn."""
    total_s = _CONTROL_S
    if body is None:
      total_s = _QUESTION_S
    elif path in servers.LOADS:
      total_s = _LOAD_S
    return self._send(total_s, path, body)

  @contextlib.contextmanager
  def _failures(self) -> Iterator[None]:
    """Context manager of requests. After a failure the engine's weights are unknown."""
    try:
      yield
    except http_client.Temporary as error:
      raise self._failed(error) from error
    except (LookupError, TypeError, ValueError) as error:  # its answer has another form
      raise self._failed(http_client.Temporary(repr(error))) from error
    except http_client.Rejected as error:
      text = ' '.join(error.text.split())[:300]
      raise types.RunError(
          f'{self.address} rejected a request with status {error.status}: {text}. docs/engines.md '
          'has the command that starts an engine'
      ) from error

  def _failed(self, reason):
    """Notes a failure of the engine; returns it as the error of the next attempts."""
    now = time.monotonic()
    with self._turn_ended:
      if reason.is_busy:
        self.answered_at = now
      else:
        self._version = _UNKNOWN
        if now >= self._retry_at or not self._num_failures:  # turns that fail together count once
          self._num_failures += 1
      retry_s = min(_RETRY_S * 2 ** max(self._num_failures - 1, 0), _LONGEST_RETRY_S)
      self._retry_at = now + min(reason.wait_s or retry_s, _LONGEST_WAIT_S)
    cause = f'{reason}: {reason.text}' if reason.text else reason
    self._failure = http_client.Temporary(
        f'{self.address} failed ({cause})', is_silent=reason.is_silent, is_busy=reason.is_busy
    )
    return self._failure


class Fleet:
  """The engines of a run. A context manager, at whose end all requests end.

  Args:
    settings: the run's RolloutSettings.
    api: the interface of the engines.
    folders: the weights that they are given.
    stop_table: `Sampler.stop_table`, which decides where a turn ends.
    stop_strings: those that the engines look for.
    rows: turns in progress at once.
    stop_signal: ends all turns, with Stopped.
  """

  def __init__(
      self,
      settings: Any,
      api: servers.ServerApi,
      folders: WeightFolders,
      stop_table: np.ndarray,
      stop_strings: Sequence[str],
      rows: int,
      stop_signal: StopSignal,
  ):
    self.settings = settings
    self.folders = folders
    self.stop_strings = tuple(stop_strings)
    self.rows = rows
    self._stop_table = stop_table
    self.stop_signal = StopSignal(stop_signal.is_set)  # also set at the end
    self._reported_push_s = 0.0
    self._make = functools.partial(
        RemoteEngine,
        api=api,
        turn_s=settings.engine_timeout_s,
        run=secrets.token_hex(4),
        stop_signal=self.stop_signal,
    )
    self._known: dict[str, RemoteEngine] = {}  # by address; also those that are gone
    self.engines: list[RemoteEngine] = []  # those that there are now
    self._resolution = threading.Lock()
    self._resolved_at = 0.0  # monotonic time
    if directory.is_fixed(settings.engine):
      self.resolve()

  def __enter__(self) -> 'Fleet':
    self.folders.remove()  # left by a process that was killed
    return self

  def __exit__(self, *unused_error) -> None:
    self.stop_signal.set()
    for engine in list(self._known.values()):
      engine.await_push()
    self.folders.remove()

  def resolve(self) -> None:
    """Finds out which engines there are now, see `directory`. Another thread may do it already.

    An engine that is new gets the weights before its first turn, as one that was restarted does. If
    a name server or a file does not answer, the engines stay.
    """
    if not self._resolution.acquire(blocking=False):
      return
    try:
      addresses = directory.addresses(self.settings.engine)
      for address in addresses:
        if address not in self._known:
          self._known[address] = self._make(address)
      before = [engine.address for engine in self.engines]
      self.engines = [self._known[address] for address in addresses]
      if self._resolved_at and before != addresses:
        logging.info('engines are now %s', ', '.join(addresses) or 'none: waiting for one')
    except (OSError, ValueError) as error:
      logging.log_every_n_seconds(
          logging.WARNING, 'config.rollout.engine: %s; the engines stay as they are', 60, error
      )
    finally:
      self._resolved_at = time.monotonic()
      self._resolution.release()

  def wake(self) -> None:
    """Allows turns. An engine that sleeps wakes when it gets the weights for its first one."""
    for engine in self.engines:
      engine.is_asleep = False

  def sleep(self) -> None:
    """Frees the devices of all engines. Raises a RunError if one may still have its memory."""
    with futures.ThreadPoolExecutor(max(len(self.engines), 1)) as threads:
      list(threads.map(RemoteEngine.fall_asleep, self.engines))

  def engine_at(self, address: str) -> RemoteEngine:
    """Returns the engine with an address, which may be gone."""
    return self._known[address]

  def wait_for_engine(self, limit_s: float) -> list[str]:
    """Returns the addresses of the engines as soon as there is one; [] after `limit_s` seconds."""
    deadline = time.monotonic() + limit_s
    self.resolve()
    if not self.engines:
      logging.info('config.rollout.engine=%s: waiting for an engine', self.settings.engine)
    while not self.engines and time.monotonic() < deadline:
      self.stop_signal.raise_if_set()
      time.sleep(_POLL_S)
      self.resolve()
    return [engine.address for engine in self.engines]

  def _in_order(self, index):
    """Returns the engines that there are now, that of sequence `index` first."""
    if time.monotonic() - self._resolved_at > _RESOLVE_S:
      self.resolve()
    engines = self.engines
    first = index % max(len(engines), 1)
    return engines[first:] + engines[:first]

  def sample(self, request: servers.TurnRequest, weights: RemoteWeights, index: int) -> types.Turn:
    """Returns the turn of sequence `index`, from its engine or, if that fails, another one.

    Raises a RunError if none has answered any turn for settings.engine_outage_s.
    """
    outage_s = self.settings.engine_outage_s
    engines = functools.partial(self._in_order, index)
    try:
      return self.sample_from(engines, request, weights, outage_s, outage_s)
    except http_client.Temporary as error:
      raise types.RunError(
          f'no engine of config.rollout.engine={self.settings.engine!r} answered for '
          f'{outage_s:g} s (config.rollout.engine_outage_s), the last one because {error}: start '
          'one, and the same command resumes'
      ) from error

  def sample_from(
      self,
      find: Callable[[], Sequence[RemoteEngine]],
      request: servers.TurnRequest,
      weights: RemoteWeights,
      silent_s: float,
      failing_s: float,
  ) -> types.Turn:
    """Tries the engines that `find` returns one after the other, and returns the first turn.

    It asks for them again after each round, because engines may be lost and added. The turn is
    sampled with `weights` if settings.engine_push is 'batch', else with the newest weights. Raises
    Temporary if no engine has answered any turn for `silent_s` seconds (requests time out or are
    refused) or `failing_s` seconds (engines report failures). Raises a RunError if only this turn
    takes too long.
    """
    settings = self.settings
    is_exact = settings.engine_push == 'batch'
    wanted = lambda: weights if is_exact else self.folders.newest
    started = time.monotonic()
    num_bad = 0
    while True:
      engines = find()
      failure = http_client.Temporary('there is none', is_silent=True)
      for engine in engines:
        self.stop_signal.raise_if_set()
        try:
          answer, version = engine.sample(request, wanted, passes_on=len(engines) > 1)
          turn = make_turn(answer, request, self._stop_table, engine.address)
          turn.version = version
          return turn
        except http_client.Temporary as error:
          logging.log_every_n_seconds(logging.WARNING, 'a turn is sampled again: %s', 10, error)
          failure = error
        num_bad += isinstance(failure, BadLogprob)
        if num_bad == _BAD_TURNS:
          raise types.RunError(f'{failure}, in each of {num_bad} attempts') from failure
        time.sleep(_POLL_S / len(engines))
      if failure.is_busy:
        continue
      if not engines:
        self.stop_signal.raise_if_set()
        time.sleep(_POLL_S)
      now = time.monotonic()
      answered_at = max((engine.answered_at for engine in engines), default=started)
      limit_s = silent_s if failure.is_silent else failing_s
      if now - max(started, answered_at) > limit_s:
        raise failure
      if now - started > settings.engine_outage_s + 3 * settings.engine_timeout_s:
        raise types.RunError(
            f'a turn got no answer for {now - started:.0f} s, while others did ({failure}): raise '
            f'config.rollout.engine_timeout_s={settings.engine_timeout_s:g}, or lower '
            'config.rollout.rows'
        )

  def take_push_s(self) -> float:
    """Returns the seconds of all pushes since the last call."""
    total_s = sum(engine.push_s for engine in list(self._known.values()))
    push_s = total_s - self._reported_push_s
    self._reported_push_s = total_s
    return push_s


@dataclasses.dataclass(frozen=True)
class RemoteSampler:
  """Stands for a `sampler.Sampler` whose turns are sampled by engines."""

  fleet: Fleet
  distribution: sampling.Distribution

  def copy(self, params: object) -> RemoteWeights:
    """Returns the policy as the engines read it."""
    if isinstance(params, RemoteWeights):
      return params
    return self.fleet.folders.copy(params)

  def compiled_variants(self) -> dict[str, int]:
    """Returns the numbers of compiled programs, of which there are none here."""
    return {}


def run(
    sampler: RemoteSampler,
    weights: RemoteWeights,
    prompts: Sequence[sequences.Prompt],
    keys: jax.Array,
    respond: sequences.Respond,
    threads: int = 0,
) -> sequences.Report:
  """Plays every sequence to its end, see `sequences.Play`. The keys have no effect.

  Each request has a thread that waits for its answer. This thread alone gives turns to the
  environments and starts requests, so turns that end together step their environments together.
  """
  del keys
  fleet = sampler.fleet
  report = sequences.Report()
  contexts = [list(prompt.ids) for prompt in prompts]
  # The last item is played next, so a sequence in progress comes before a new sequence.
  waiting = [(i, prompt) for i, prompt in enumerate(prompts) if prompt.budget > 0][::-1]
  turns: set[futures.Future] = set()  # in progress

  def play_turn(index, request):
    return sequences.TurnCompletion(index, fleet.sample(request, weights, index))

  with env_pool.EnvPool(respond, threads) as pool:
    while waiting or turns or pool.in_progress:
      while waiting and len(turns) < fleet.rows:
        index, prompt = waiting.pop()
        request = servers.TurnRequest(
            tuple(contexts[index]),
            prompt.budget,
            fleet.stop_strings,
            sampler.distribution,
            stop_state=prompt.stop_state,
        )
        turns.add(_in_thread(play_turn, index, request))
      started = time.perf_counter()
      waits_for = 'decode' if turns else 'env'
      done: set[futures.Future] = set()
      while not done:
        fleet.stop_signal.raise_if_set()
        events = [*turns, *pool.in_progress]
        done, _ = futures.wait(events, _POLL_S, futures.FIRST_COMPLETED)
      ended = time.perf_counter()
      report.seconds[waits_for] += ended - started
      completions = [turn.result() for turn in done & turns]
      turns -= done
      for completion in completions:
        contexts[completion.index] += completion.turn.tokens.tolist()
        report.sampled_tokens += len(completion.turn.tokens)
      pool.step(completions)
      for index, prompt in pool.take_prompts():
        contexts[index] += prompt.ids
        if prompt.budget > 0:
          waiting.append((index, prompt))
      report.seconds['env'] += time.perf_counter() - ended
  return report


def _in_thread(function, *args):
  """Calls a function in a thread that ends with the process; returns the future of its result."""
  future: futures.Future = futures.Future()

  def call():
    try:
      future.set_result(function(*args))
    except Exception as error:  # raised by the thread that waits for it
      future.set_exception(error)

  threading.Thread(target=call, daemon=True).start()
  return future


def make_turn(
    answer: servers.TurnAnswer, request: servers.TurnRequest, stop_table: np.ndarray, address: str
) -> types.Turn:
  """Returns an engine's answer as a turn, cut after the token at which our own sampler would stop.

  A prefix of what was sampled is distributed as if the engine had stopped there. Raises Temporary
  for a turn that was aborted or has an impossible log-prob, and a RunError for an invalid answer or
  a turn that ended too early.
  """
  tokens = answer.tokens
  if answer.finish not in ('stop', 'length'):
    raise http_client.Temporary(f'{address} ended a turn with {answer.finish!r}')
  vocab_size = stop_table.shape[1]
  are_ids = all(isinstance(x, numbers.Integral) and 0 <= x < vocab_size for x in tokens)
  if not 0 < len(tokens) == len(answer.logp) <= request.budget or not are_ids:
    raise types.RunError(
        f'{address} answered with {len(tokens)} tokens and {len(answer.logp)} log-probs where 1 to '
        f'{request.budget} ids below {vocab_size} were asked for: it serves another model, or '
        'config.rollout.engine_kind is wrong'
    )
  length, has_ended = tokenizer_lib.turn_length(stop_table, tokens, request.stop_state)
  if not has_ended and length < request.budget:
    raise types.RunError(
        f'{address} ended a turn ({answer.finish!r}) after {length} of {request.budget} tokens, '
        'without a stop string or an eos id of the trainer: its generation_config.json names '
        'another eos id, or its context is shorter than config.rollout.max_total'
    )
  for number, reported in enumerate(answer.logp[:length]):
    is_number = isinstance(reported, numbers.Real)
    if not is_number or not _LEAST_LOGP <= reported <= _LARGEST_LOGP:  # also not for NaN
      raise BadLogprob(
          f'{address} reported {reported!r} as the log-prob of token {number + 1} of {length} (id '
          f'{tokens[number]}), which no sampled token has: start the engine with log-probs of the '
          'distribution that it samples from (vLLM: --logprobs-mode processed_logprobs, and no '
          'logits processor)'
      )
  logp = np.minimum(np.array(answer.logp[:length], np.float32), 0.0)
  return types.Turn(tokens=np.array(tokens[:length], np.int32), logp=logp)


def check_agreement(
    sampler: RemoteSampler,
    weights: RemoteWeights,
    prompts: Sequence[Sequence[int]],
    score: Callable[[np.ndarray, float], np.ndarray],
    at_start: bool = True,
    engines_awake: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext,
) -> float | None:
  """Compares each engine's log-probs of short turns with our own; returns the largest mean |dlogp|.

  All processes call it. At the start of a run it waits for engines that load their model, and it is
  a UserError if one does not answer or its mean |dlogp| is too large. Later an engine that does not
  answer is left out, and a mean |dlogp| that is too large is a RunError. None: no engine answers.

  Choice: the probes are not cut by top_k and top_p, because the trainer has no cut. At temperature
  1 they would not show that an engine reports log-probs before the cut, so the probes of a cut
  distribution have another temperature.

  Args:
    sampler: its engines are given `weights`.
    weights: the version that is scored.
    prompts: token ids.
    score: (tokens [1,T], temperature) -> our log-probs [1,T].
    at_start: whether the run begins.
    engines_awake: context manager in which the engines may sample. `score` is called after it.
  """
  max_gap = sampler.fleet.settings.engine_gap
  drawn_from = sampler.distribution
  temperature = drawn_from.temperature
  is_cut = drawn_from.top_k > 0 or drawn_from.top_p < 1
  if is_cut and temperature == 1:
    temperature = _PROBE_TEMPERATURE
  length = sampling.round_up(max(map(len, prompts)) + _PROBE_TOKENS, _PROBE_BLOCK)
  gaps = []
  fleet = sampler.fleet
  limit_s = _START_S if at_start else _PROBE_S
  with engines_awake():
    addresses = hosts.by_writer(fleet.wait_for_engine, limit_s)
    if at_start and not addresses:
      raise types.UserError(
          f'config.rollout.engine={fleet.settings.engine!r}: no engine in {limit_s:g} s: start '
          'one, or correct the name'
      )
    probes_of = {}
    for address in addresses:
      probes_of[address] = hosts.by_writer(
          _sample_probes, sampler, address, weights, prompts, temperature, at_start
      )
  for address, probes in probes_of.items():
    if probes is None:
      continue

    def mean_gap(used_temperature, probes=probes):
      differences = []
      for ids, logp in probes:
        row = np.zeros((1, length), np.int32)  # one length: one program
        row[0, : len(ids)] = ids
        ours = score(row, used_temperature)[0, : len(ids)]
        differences.append(np.abs(ours[-len(logp) :] - np.array(logp)))
      return float(np.concatenate(differences).mean())

    gap = mean_gap(temperature)
    gaps.append(gap)
    logging.info('%s: its log-probs differ from ours by %.2g on average', address, gap)
    if gap <= max_gap:
      continue
    causes = (
        'another dtype (start the engine with that of config.model.dtype), weights that it did not '
        'load, or another model'
    )
    if mean_gap(1.0) <= max_gap:
      causes = (
          'it reports log-probs of temperature 1: start vLLM with --logprobs-mode '
          'processed_logprobs, our gateway with --config.serve.logprobs_mode=processed_logprobs'
      )
    kind = types.UserError if at_start else types.RunError
    raise kind(
        f'{address}: its log-probs differ from those of the trainer by {gap:.3g} nats per '
        f'token, and config.rollout.engine_gap={max_gap:g} is allowed. Likely causes: {causes}'
    )
  return max(gaps, default=None)


def _sample_probes(sampler, address, weights, prompts, temperature, at_start):
  """Returns (ids of prompt and turn, log-probs of the turn); None if the engine is left out."""
  fleet = sampler.fleet
  engine = fleet.engine_at(address)
  distribution = sampling.Distribution(temperature)
  silent_s = _START_S if at_start else _PROBE_S
  probes = []
  for prompt in prompts:
    room = fleet.settings.max_total - len(prompt)
    budget = min(_PROBE_TOKENS, room)
    request = servers.TurnRequest(prompt, budget, fleet.stop_strings, distribution)
    try:
      turn = fleet.sample_from(lambda: [engine], request, weights, silent_s, _PROBE_S)
    except http_client.Temporary as error:
      if not at_start:
        logging.warning('an engine is not checked: %s', error)
        return None
      advice = 'start it, or correct the address'
      if not error.is_silent:
        advice = f'it must serve this model, and read {weights.folder} under the same path'
      raise types.UserError(f'config.rollout.engine: {error}: {advice}') from error
    except types.RunError as error:
      if not at_start:
        raise
      raise types.UserError(f'config.rollout.engine: {error}') from error
    ids = [*prompt, *turn.tokens.tolist()]
    probes.append((ids, turn.logp.tolist()))
  return probes
