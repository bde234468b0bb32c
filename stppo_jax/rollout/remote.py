"""Samples with engines in other processes: a sampling server of vLLM, SGLang or this package.

  copy      trained parameters -> a folder of weights, numbered by their version
  run       plays sequences as `engine.run` does; each turn is one request
  push      an engine gets the weights of a folder before it samples with them

                  turn 1          turn 2                     turn 3
  engine 0   ----[version 4]-----[version 4]---| push 5 |---[version 5]----
                                                 no turn is in progress

A turn is sampled by one version of the weights, and records it. An engine that fails is asked for
the label of its weights before it samples again, because a restarted one has those of its start.
"""

from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Sequence
import contextlib
import dataclasses
import functools
import itertools
import json
import os
import queue
import re
import secrets
import shutil
import threading
import time
from typing import Any

from absl import logging
import jax
import numpy as np
import requests

from stppo_jax import types
from stppo_jax.distributed import hosts
from stppo_jax.distributed import http_client
from stppo_jax.rollout import engine as engine_lib
from stppo_jax.rollout import env_pool
from stppo_jax.rollout import sampling
from stppo_jax.rollout import servers

NUM_PROBES = 8  # turns of `check_agreement`
_PROBE_TOKENS = 32
_UNKNOWN = -1  # version of an engine that has to be asked
_RETRY_S = 2.0  # until an engine that failed is tried again
_POLL_S = 0.2  # between two questions whether to give up
_CONNECT_S = 5.0
_LONGEST_WAIT_S = 60.0  # an engine may ask for this wait
_IDLE_S = 1.0  # no engine ends, starts again and answers within this time
_CLOSE_S = 10.0  # time for a push in progress at the end of a run
_START_S = 600.0  # until an engine that loads its model answers
_PROBE_S = 60.0  # until an engine that has answered before answers again
_PROBE_TEMPERATURE = 0.8
_LOAD_S = 900.0  # most seconds of a request that is not a turn
_MAX_CONNECTIONS = 1024


@dataclasses.dataclass(frozen=True)
class RemoteWeights:
  """A version of the policy, written for the engines."""

  version: int  # updates of the policy
  folder: str


class RemoteEngine:
  """One engine: its address, the version of its weights, and its turns in progress."""

  def __init__(self, address: str, api: servers.ServerApi, api_key: str, turn_s: float):
    self.address = address.strip().rstrip('/').removesuffix('/v1')
    self.retry_at = 0.0  # monotonic time before which it is not tried again
    self._api = api
    self._version = _UNKNOWN
    self._run = ''  # distinguishes the weights of this run from those of others
    self._session = requests.Session()
    self._session.trust_env = False  # no proxy between trainer and engine, no key of ~/.netrc
    if api_key:
      self._session.headers['Authorization'] = f'Bearer {api_key}'
    adapter = requests.adapters.HTTPAdapter(pool_maxsize=_MAX_CONNECTIONS)
    self._session.mount('http://', adapter)
    self._session.mount('https://', adapter)
    limits = http_client.ClientLimits(_CONNECT_S, turn_s)
    self._send_turn = functools.partial(_send, self._session, self.address, limits)
    self._give_up: Callable[[], bool] = lambda: False
    self._changed = threading.Condition()
    self._num_turns = 0  # in progress
    self._is_pushing = False
    self._num_forgotten = 0  # calls of `forget`
    self._answered_at = 0.0  # monotonic time of the newest answer

  def begin(self, give_up: Callable[[], bool]) -> None:
    """Starts a run. Its labels differ from those of earlier runs. `give_up` ends all waits."""
    self._run = secrets.token_hex(4)
    self._give_up = give_up
    self.forget()

  def forget(self) -> None:
    """Makes the next `ensure` ask the engine for its weights."""
    self._version = _UNKNOWN
    self._num_forgotten += 1

  def sample(
      self, request: servers.TurnRequest, weights: RemoteWeights, exact: bool
  ) -> tuple[servers.TurnAnswer, int]:
    """Samples a turn; returns it with the version of the engine's weights.

    They are `weights` if `exact`. Raises Temporary if another attempt, or another engine, may
    succeed, and Stopped.
    """
    with self._changed:
      self._wait_for(lambda: not self._is_pushing)
      version = self._version
      if version == _UNKNOWN or (exact and version != weights.version):
        raise http_client.Temporary(f'{self.address} has other weights')
      self._num_turns += 1
    try:
      with self._failures():
        request = dataclasses.replace(request, label=f'{self._run}-{version}')
        answer = self._api.sample(self._send_turn, request)
        self._answered_at = time.monotonic()
        return answer, version
    finally:
      with self._changed:
        self._num_turns -= 1
        self._changed.notify_all()

  def ensure(self, weights: RemoteWeights, exact: bool) -> bool:
    """Gives the engine these weights unless it has them; returns whether they were pushed.

    Newer weights are accepted unless `exact`. A push waits for the turns in progress. An engine
    without requests for _IDLE_S may have been started again, and is asked for its weights. Raises
    Temporary and Stopped.
    """
    with self._changed:
      self._wait_for(lambda: not self._is_pushing)
      if not self._num_turns and time.monotonic() - self._answered_at > _IDLE_S:
        self.forget()
      is_newer = self._version > weights.version
      if self._version == weights.version or (is_newer and not exact):
        return False
      self._is_pushing = True
    label = f'{self._run}-{weights.version}'
    try:
      with self._failures():
        num_forgotten = self._num_forgotten
        is_there = self._api.holds(self._send_load, label)
        if is_there:
          self._api.resume(self._send_load)  # after a load whose last request failed
        else:
          with self._changed:
            self._wait_for(lambda: not self._num_turns)
          num_forgotten = self._num_forgotten
          self._api.load(self._send_load, weights.folder, label)
        if num_forgotten == self._num_forgotten:  # else a turn has failed since the question
          self._version = weights.version
        self._answered_at = time.monotonic()
        return not is_there
    finally:
      with self._changed:
        self._is_pushing = False
        self._changed.notify_all()

  def _wait_for(self, condition):
    """Waits for a condition, with `_changed` held. Raises Stopped."""
    while not self._changed.wait_for(condition, _POLL_S):
      if self._give_up():
        raise types.Stopped

  def _send_load(self, path, body):
    """Sends a request that is not a turn. Raises Stopped before its end if the run is to end."""
    limits = http_client.ClientLimits(_CONNECT_S, _LOAD_S)
    call = functools.partial(_send, self._session, self.address, limits, path, body)
    try:
      return http_client.call_within(call, _LOAD_S, self._give_up)
    except http_client.GivenUp:
      raise types.Stopped from None

  @contextlib.contextmanager
  def _failures(self) -> Iterator[None]:
    """Context manager of a request. After a failure the engine's weights are unknown.

    Raises Temporary, or a RunError where the engine rejects the request for good.
    """
    try:
      yield
    except (http_client.Temporary, LookupError, TypeError, ValueError) as error:
      is_busy = getattr(error, 'is_busy', False)
      is_silent = getattr(error, 'is_silent', False)
      wait_s = min(getattr(error, 'wait_s', 0.0), _LONGEST_WAIT_S)
      if not is_busy:
        self.forget()
        wait_s = max(wait_s, _RETRY_S)
      self.retry_at = time.monotonic() + wait_s
      reason = f'{type(error).__name__}: {error}'
      if text := getattr(error, 'text', ''):
        reason += f': {text}'
      raise http_client.Temporary(
          f'{self.address} failed ({reason})', is_silent=is_silent, is_busy=is_busy
      ) from error
    except http_client.Rejected as error:
      text = ' '.join(error.text.split())[:300]
      raise types.RunError(
          f'{self.address} rejected a request with status {error.status}: {text}. docs/engines.md '
          'has the command that starts an engine'
      ) from error


class Fleet:
  """The engines of a run and the weights that they are given.

  Args:
    engines: at least one.
    settings: the run's RolloutSettings.
    stop_table: `Sampler.stop_table`, which decides where a turn ends.
    stop_strings: those that the engines look for.
    rows: turns in progress at once.
    num_versions: newest versions whose folders stay.
    write: (parameters, folder) writes a folder of weights. All processes call it.
  """

  def __init__(
      self,
      engines: Sequence[RemoteEngine],
      settings: Any,
      stop_table: np.ndarray,
      stop_strings: Sequence[str],
      rows: int,
      num_versions: int,
      write: Callable[[Any, str], None],
  ):
    self.engines = engines
    self.settings = settings
    self.stop_table = stop_table
    self.stop_strings = tuple(stop_strings)
    self.rows = rows
    self._num_versions = num_versions
    self._write = write
    self._is_exact = settings.engine_push == 'batch'
    self._push_s = 0.0  # since the last `take_push_s`

  @contextlib.contextmanager
  def opened(self, folder: str, first_version: int, give_up: Callable[[], bool]) -> Iterator[None]:
    """Context manager of a run.

    Args:
      folder: will hold the folders of weights, and belongs to this run. The engines read it under
        the same path.
      first_version: the number of updates of the first parameters that are copied.
      give_up: whether to abandon all turns and raise Stopped.
    """
    self._folder = os.path.abspath(folder)
    self._version = first_version - 1
    self._written: list[RemoteWeights] = []
    self._leaves: list[Any] = []  # leaves of the parameters of the newest version
    self._over = threading.Event()  # ends all requests
    self._is_closing = threading.Event()
    self._has_new = threading.Event()  # a version that the engines may not have
    self._answered_at = time.monotonic()  # the time of the newest answer
    self._give_up = lambda: self._over.is_set() or give_up()
    self._remove_versions()  # left by a process that was killed
    for engine in self.engines:
      engine.begin(self._give_up)
    pushes = threading.Thread(target=self._push_newest, name='push', daemon=True)
    pushes.start()
    try:
      yield
    finally:
      self._is_closing.set()
      if not give_up():
        pushes.join(_CLOSE_S)
      self._over.set()
      pushes.join()
      self._remove_versions()

  def copy(self, params: Any) -> RemoteWeights:
    """Writes a new version of the policy. Parameters that were written last are not written again.

    All processes call it. The folder appears complete, under its final name.
    """
    if isinstance(params, RemoteWeights):
      return params
    leaves = jax.tree.leaves(params)
    pairs = zip(leaves, self._leaves)
    if self._written and all(new is old for new, old in pairs):
      return self._written[-1]
    self._leaves = leaves
    self._version += 1
    folder = os.path.join(self._folder, f'{self._version:06d}')
    self._write(params, folder + '.partial')
    if hosts.is_writer():
      os.rename(folder + '.partial', folder)
    weights = RemoteWeights(self._version, folder)
    self._written.append(weights)
    if len(self._written) > self._num_versions:
      self._remove(self._written.pop(0).folder)
    if hosts.is_writer() and not self._is_exact:
      self._has_new.set()
    return weights

  def prepare(self, weights: RemoteWeights) -> None:
    """Gives all engines the weights, at the start of a batch.

    The engines are asked what they have, because one may have been started again. An engine that
    does not answer gets the weights later.
    """
    for engine in self.engines:
      engine.forget()
      with contextlib.suppress(http_client.Temporary):  # `sample` tries again
        self._ensure(engine, weights)

  def sample(self, request: servers.TurnRequest, weights: RemoteWeights, index: int) -> types.Turn:
    """Returns the turn of sequence `index`, from its engine or, if that fails, another one.

    Raises a RunError if none has answered any turn for settings.engine_outage_s.
    """
    started = time.monotonic()
    last_error = None
    for attempt in itertools.count(1):
      self.check_stopped()
      engine = self.engines[index % len(self.engines)]
      index += 1
      if engine.retry_at <= time.monotonic():
        try:
          return self.sample_once(engine, request, weights)
        except http_client.Temporary as error:
          logging.log_every_n_seconds(logging.WARNING, 'a turn is sampled again: %s', 10, error)
          last_error = error
          if error.is_busy:
            self._answered_at = time.monotonic()
      if attempt >= len(self.engines) and last_error is not None and not last_error.is_busy:
        self._check_outage(started, last_error)
      time.sleep(_POLL_S / len(self.engines))
    raise AssertionError('unreachable')

  def _check_outage(self, started, error):
    """Raises a RunError if the engines, or the turn that began at `started`, take too long."""
    settings = self.settings
    now = time.monotonic()
    if now - max(started, self._answered_at) > settings.engine_outage_s:
      raise types.RunError(
          f'no engine of config.rollout.engine={settings.engine!r} answered for '
          f'{settings.engine_outage_s:g} s (config.rollout.engine_outage_s), the last one because '
          f'{error}: start one, and the same command resumes'
      )
    if now - started > settings.engine_outage_s + 3 * settings.engine_timeout_s:
      raise types.RunError(
          f'a turn got no answer for {now - started:.0f} s, while others did ({error}): raise '
          f'config.rollout.engine_timeout_s={settings.engine_timeout_s:g}, or lower '
          'config.rollout.rows'
      )

  def sample_once(
      self, engine: RemoteEngine, request: servers.TurnRequest, weights: RemoteWeights
  ) -> types.Turn:
    """Returns a turn of this engine, or raises Temporary."""
    self._ensure(engine, weights)
    answer, version = engine.sample(request, weights, self._is_exact)
    self._answered_at = time.monotonic()
    turn = make_turn(answer, request, self.stop_table, engine.address)
    turn.version = version
    return turn

  def take_push_s(self) -> float:
    """Returns the seconds of all pushes since the last call."""
    push_s = self._push_s
    self._push_s = 0.0
    return push_s

  def check_stopped(self) -> None:
    """Raises Stopped if the run is to end."""
    if self._give_up():
      raise types.Stopped

  def _ensure(self, engine, weights):
    """Pushes the weights, or newer ones, to the engine unless it has them. Raises Temporary."""
    if not self._is_exact:
      weights = self._written[-1]
    started = time.monotonic()
    if engine.ensure(weights, self._is_exact):
      self._push_s += time.monotonic() - started
      self._answered_at = time.monotonic()

  def _push_newest(self):
    """Pushes new weights while turns are sampled, until the run ends."""
    while not self._is_closing.is_set():
      if not self._has_new.wait(_POLL_S):
        continue
      self._has_new.clear()
      for engine in self.engines:
        # A turn meets the same error.
        with contextlib.suppress(http_client.Temporary, types.RunError, types.Stopped):
          self.check_stopped()
          self._ensure(engine, self._written[-1])

  def _remove(self, folder):
    if hosts.is_writer():
      shutil.rmtree(folder, ignore_errors=True)

  def _remove_versions(self):
    """Removes all versions, and the run's folder if it then is empty. Other files stay."""
    if not (hosts.is_writer() and os.path.isdir(self._folder)):
      return
    for name in os.listdir(self._folder):
      if re.fullmatch(r'\d{6,}(\.partial)?', name):
        self._remove(os.path.join(self._folder, name))
    if not os.listdir(self._folder):
      os.rmdir(self._folder)


def folder_of_run(root: str, workdir: str) -> str:
  """Returns the folder in `root` for the weights of the run in `workdir`, the same at each resume.

  Several runs may share `root`, and it may hold other files.
  """
  path = os.path.join(workdir, 'weights_id')
  name = ''
  if os.path.exists(path):
    with open(path, encoding='utf-8') as file:
      name = file.read()
  if not re.fullmatch('run-[0-9a-f]{16}', name):  # a new run, or the file is damaged
    name = f'run-{secrets.token_hex(8)}'
    os.makedirs(workdir, exist_ok=True)
    with open(path, 'w', encoding='utf-8') as file:
      file.write(name)
  return os.path.join(root, name)


@dataclasses.dataclass(frozen=True)
class RemoteSampler:
  """Stands for a `sampler.Sampler` whose turns are sampled by engines."""

  fleet: Fleet
  distribution: sampling.Distribution

  @property
  def max_slots(self) -> int:
    """Tokens that a sequence may hold."""
    return self.fleet.settings.max_total

  def copy(self, params: Any) -> RemoteWeights:
    """Returns the policy as the engines read it."""
    return self.fleet.copy(params)

  def compiled_variants(self) -> dict[str, int]:
    """Returns the numbers of compiled programs, of which there are none here."""
    return {}


def run(
    sampler: RemoteSampler,
    weights: RemoteWeights,
    prompts: Sequence[env_pool.Prompt],
    keys: jax.Array,
    respond: Callable[[list[env_pool.TurnCompletion]], list[env_pool.Prompt]],
    threads: int = 0,
) -> engine_lib.Report:
  """Plays every sequence to its end, as `engine.run` does. The keys have no effect.

  Each request has a thread that waits for its answer. This thread alone gives turns to the
  environments and starts requests, so turns that end together step their environments together.
  """
  del keys
  fleet = sampler.fleet
  report = engine_lib.Report()
  events: queue.SimpleQueue = queue.SimpleQueue()
  contexts = [list(prompt.ids) for prompt in prompts]
  # The last one is played next, so that a sequence in progress comes before a new one.
  waiting = [(i, prompt.budget) for i, prompt in enumerate(prompts) if prompt.budget > 0][::-1]
  num_active = 0
  fleet.prepare(weights)

  def play_turn(index: int, request: servers.TurnRequest) -> None:
    try:
      turn = fleet.sample(request, weights, index)
      events.put(env_pool.TurnCompletion(index, turn))
    except Exception as error:  # raised by the thread that waits for it
      events.put(error)

  with env_pool.EnvPool(respond, threads) as pool:
    while waiting or num_active or pool.in_progress:
      while waiting and num_active < fleet.rows:
        index, budget = waiting.pop()
        request = servers.TurnRequest(
            tuple(contexts[index]), budget, fleet.stop_strings, sampler.distribution
        )
        num_active += 1
        threading.Thread(target=play_turn, args=(index, request), daemon=True).start()
      started = time.perf_counter()
      completions = _take_completions(events, fleet)
      ended = time.perf_counter()
      report.seconds['decode'] += ended - started
      num_active -= len(completions)
      for completion in completions:
        contexts[completion.index] += completion.turn.tokens.tolist()
        report.sampled_tokens += len(completion.turn.tokens)
      pool.step(completions, lambda: events.put(None))
      for index, prompt in pool.take_prompts():
        contexts[index] += prompt.ids
        report.prefill_tokens += len(prompt.ids)
        if prompt.budget > 0:
          waiting.append((index, prompt.budget))
      report.seconds['env'] += time.perf_counter() - ended
  return report


def _take_completions(events: queue.SimpleQueue, fleet: Fleet) -> list[env_pool.TurnCompletion]:
  """Waits for an event, a turn or None; returns all turns that are there, or raises an error."""
  while events.empty():
    fleet.check_stopped()
    with contextlib.suppress(queue.Empty):
      events.put(events.get(timeout=_POLL_S))
  completions = []
  while not events.empty():
    event = events.get()
    if isinstance(event, Exception):
      raise event
    if event is not None:
      completions.append(event)
  return completions


def make_turn(
    answer: servers.TurnAnswer, request: servers.TurnRequest, stop_table: np.ndarray, address: str
) -> types.Turn:
  """Returns an engine's answer as a turn, cut after the token at which our own sampler would stop.

  A prefix of what was sampled is distributed as if the engine had stopped there. Raises Temporary
  for a turn that was aborted, and a RunError for an answer that is no turn or ended too early.
  """
  tokens = answer.tokens
  logp = np.array(answer.logp, np.float32)
  if answer.finish not in ('stop', 'length'):
    raise http_client.Temporary(f'{address} ended a turn with {answer.finish!r}')
  num_states, vocab_size = stop_table.shape
  is_turn = 0 < len(tokens) == len(logp) <= request.budget
  if not is_turn or not np.isfinite(logp).all() or max(tokens) >= vocab_size:
    raise types.RunError(
        f'{address} answered with {len(tokens)} tokens and {len(logp)} log-probs where 1 to '
        f'{request.budget} ids below {vocab_size} were asked for: it serves another model, or '
        'config.rollout.engine_kind is wrong'
    )
  length = 0
  state = 0
  while length < len(tokens) and state < num_states - 1:
    state = stop_table[state, tokens[length]]
    length += 1
  if state < num_states - 1 and length < request.budget:
    raise types.RunError(
        f'{address} ended a turn ({answer.finish!r}) after {length} of {request.budget} tokens, '
        'without a stop string or an eos id of the trainer: its generation_config.json names '
        'another eos id, or its context is shorter than config.rollout.max_total'
    )
  return types.Turn(tokens=np.array(tokens[:length], np.int32), logp=logp[:length])


def _send(session, address, limits, path, body):
  """Returns the JSON of an answer; {} for an empty answer and for a text."""
  answer = http_client.send(session, address + path, body, limits)
  try:
    return json.loads(answer)
  except ValueError:
    return {}


def check_agreement(
    sampler: RemoteSampler,
    weights: RemoteWeights,
    prompts: Sequence[Sequence[int]],
    score: Callable[[np.ndarray, float], np.ndarray],
    at_start: bool = True,
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
  """
  max_gap = sampler.fleet.settings.engine_gap
  drawn_from = sampler.distribution
  temperature = drawn_from.temperature
  is_cut = drawn_from.top_k > 0 or drawn_from.top_p < 1
  if is_cut and temperature == 1:
    temperature = _PROBE_TEMPERATURE
  length = max(map(len, prompts)) + _PROBE_TOKENS
  gaps = []
  for engine in sampler.fleet.engines:
    turns = hosts.by_writer(
        _sample_probes, sampler, engine, weights, prompts, temperature, at_start
    )
    if turns is None:
      continue

    def mean_gap(used_temperature):
      differences = []
      for prompt, (tokens, logp) in zip(prompts, turns):
        end = len(prompt) + len(tokens)
        row = np.zeros((1, length), np.int32)  # one length: one program
        row[0, :end] = [*prompt, *tokens]
        ours = score(row, used_temperature)[0, len(prompt) : end]
        differences.append(np.abs(ours - np.array(logp)))
      return float(np.concatenate(differences).mean())

    gap = mean_gap(temperature)
    gaps.append(gap)
    logging.info('%s: its log-probs differ from ours by %.2g on average', engine.address, gap)
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
        f'{engine.address}: its log-probs differ from those of the trainer by {gap:.3g} nats per '
        f'token, and config.rollout.engine_gap={max_gap:g} is allowed. Likely causes: {causes}'
    )
  return max(gaps, default=None)


def _sample_probes(sampler, engine, weights, prompts, temperature, at_start):
  """Returns (tokens, log-probs) of a turn after each prompt; None if the engine is left out."""
  fleet = sampler.fleet
  distribution = sampling.Distribution(temperature)
  turns = []
  for prompt in prompts:
    budget = min(_PROBE_TOKENS, sampler.max_slots - len(prompt))
    request = servers.TurnRequest(prompt, budget, fleet.stop_strings, distribution)
    try:
      turn = _sample_probe(fleet, engine, request, weights, at_start)
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
    turns.append((turn.tokens.tolist(), turn.logp.tolist()))
  return turns


def _sample_probe(fleet, engine, request, weights, at_start):
  """Returns a turn of this engine, after several attempts. Raises Temporary."""
  started = time.monotonic()
  while True:
    fleet.check_stopped()
    try:
      return fleet.sample_once(engine, request, weights)
    except http_client.Temporary as error:
      limit_s = _START_S if at_start and error.is_silent else _PROBE_S
      if time.monotonic() - started > limit_s:
        raise
      logging.log_every_n_seconds(logging.WARNING, 'waits for an engine: %s', 10, error)
    time.sleep(_POLL_S)
