"""The teacher of on-policy distillation behind an address: log-probs of given token ids.

The server speaks vLLM's /v1/completions with `prompt_logprobs`. A teacher in a folder needs no
client: `update.annotate` computes its log-probs.
"""

from collections.abc import Sequence
from concurrent import futures
import dataclasses
import json
import time
from typing import Any

from absl import logging
import jax
import numpy as np

from stppo_jax import types
from stppo_jax.distributed import hosts
from stppo_jax.net import api_keys
from stppo_jax.net import http_client
from stppo_jax.rollout import batching
from stppo_jax.stop_signal import NEVER
from stppo_jax.stop_signal import StopSignal
from stppo_jax.text import tokenizer as tokenizer_lib

_FIRST_WAIT_S = 1.0  # doubled for each further attempt
_LONGEST_WAIT_S = 60.0
_CONNECT_S = 10.0
_TOTAL_S = 300.0  # time limit of a row
_START_S = 60.0  # time limit of a check at the start, with all its attempts
_THREADS = 32  # requests in progress
# Two tokenizers that encode this text alike are taken to be the same.
_PROBE = 'On 3 May 1987, Zoë paid 12.50 for\n\tthe "naïve" plan: f(x) = x**2 + 1; 你好, мир!'


class TeacherServer:
  """A server that gives the log-prob of each token of a row.

  Waits for a server that does not answer, as for a retriever or an engine, and raises a RunError if
  none of its requests had an answer for `max_outage_s`. `stop_signal` ends all requests within
  seconds, and Stopped is raised.
  """

  def __init__(
      self, address: str, model: str, max_outage_s: float = 3600.0, total_s: float | None = None
  ):
    self.stop_signal = NEVER  # a run gives its own
    self._address = address
    self._model = model
    self._max_outage_s = max_outage_s
    self._row_failed = StopSignal()  # ends the requests of the other rows
    self._answered_at = 0.0  # monotonic time of the newest answer, or sign of being busy
    api_key = api_keys.read('OPENAI_API_KEY')
    limits = http_client.ClientLimits(_CONNECT_S, total_s or _TOTAL_S)
    self._server = http_client.Connection(address.rstrip('/'), limits, _THREADS, api_key)

  def check(self, tokenizer: tokenizer_lib.Tokenizer, longest: int) -> None:
    """Raises a UserError for another tokenizer, or a context that is too short for `longest`.

    `longest` is the largest number of tokens in a row. The server must answer within a minute.
    """
    started = TeacherServer(self._address, self._model, _START_S, _START_S)
    started.stop_signal = self.stop_signal
    try:
      started.check_tokenizer(tokenizer)
      started.check_length(tokenizer, longest)
    except types.RunError as error:
      raise types.UserError(str(error)) from error

  def check_tokenizer(self, tokenizer: tokenizer_lib.Tokenizer) -> None:
    """Raises a UserError if the server encodes a text otherwise than the policy's tokenizer."""
    tokens = tokenizer.encode(_PROBE)
    logp = self._logp({'prompt': _PROBE, 'add_special_tokens': False}, tokens)
    if logp is None:
      raise types.UserError(
          f'{self._name()} has another tokenizer than the policy: it scores the tokens of the '
          'policy, give a model of the same family'
      )

  def check_length(self, tokenizer: tokenizer_lib.Tokenizer, longest: int) -> None:
    """Raises a UserError if the server rejects a row of `longest` tokens.

    Such a row is common: the last turn gets what is left of config.rollout.max_total. The server
    samples one token more.
    """
    probe = tokenizer.encode(_PROBE)
    repeats = -(-longest // len(probe))
    try:
      self._request({'prompt': (probe * repeats)[:longest]})
    except http_client.Rejected as error:
      raise types.UserError(
          f'{self._name()} rejected a row of config.rollout.max_total={longest} tokens ({error}: '
          f'{error.text[:300]}): start it with a context of {longest + 1} tokens or more '
          '(--max-model-len), or lower rollout.max_total'
      ) from error

  def row_logp(self, tokens: Sequence[int]) -> list[float]:
    """Returns the log-prob of each token, given the tokens before it; 0 for the first."""
    if not tokens:
      return []
    logp = self._logp({'prompt': list(tokens)}, tokens)
    if logp is None:
      raise self._error(f'scored other tokens than the {len(tokens)} that it was given')
    return logp

  def batch_logp(
      self,
      episodes: Sequence[types.Episode],
      batch: types.TurnBatch,
      sharding: jax.sharding.Sharding | None,
  ) -> types.TurnBatch:
    """Returns the batch with `teacher_logp` [B,T]. Its first rows are those of the episodes."""
    rows = []
    for episode in episodes:
      tokens, _, _ = episode.unroll()
      rows.append(tokens[: batching.trained_length(episode)].tolist())
    is_alone = hosts.num_processes() == 1  # JSON of all these numbers would take seconds
    scored = self._score(rows) if is_alone else hosts.by_writer(self._score, rows)
    teacher_logp = np.zeros(batch.tokens.shape, np.float32)
    for b, logp in enumerate(scored):
      teacher_logp[b, : len(logp)] = logp
    return dataclasses.replace(batch, teacher_logp=hosts.put(teacher_logp, sharding))

  def _score(self, rows):
    """Returns the log-probs of each row. The first error ends the requests of the other rows."""
    self._row_failed = StopSignal()
    with futures.ThreadPoolExecutor(_THREADS, 'teacher') as pool:
      calls = [pool.submit(self.row_logp, row) for row in rows]
      done, _ = futures.wait(calls, return_when=futures.FIRST_EXCEPTION)
      for call in done:
        if call.exception() is not None:
          self._row_failed.set()
          pool.shutdown(cancel_futures=True)
          call.result()  # raises the error
    return [call.result() for call in calls]

  def _logp(self, prompt: dict[str, object], tokens: Sequence[int]) -> list[float] | None:
    """Returns the log-probs of the prompt's tokens; None if the server reads other tokens."""
    scored = self._ask(prompt)
    if len(scored) != len(tokens):
      return None
    logp = [0.0]
    for entry, token in list(zip(scored, tokens))[1:]:
      if str(token) not in entry:
        return None
      logp.append(float(entry[str(token)]['logprob']))
    return logp

  def _ask(self, prompt: dict[str, object]) -> list[dict[str, Any]]:
    """Returns {token id: its log-prob} for each token of the prompt; the first entry is {}."""
    try:
      scored = self._request(prompt)['choices'][0]['prompt_logprobs']
      return [entry or {} for entry in scored]
    except http_client.Rejected as error:
      raise self._error(f'rejected a request ({error}): {error.text[:300]}') from error
    except (ValueError, TypeError, LookupError) as error:
      raise self._error('gave no prompt_logprobs') from error

  def _request(self, prompt: dict[str, object]) -> Any:
    """Returns the JSON of an answer. Waits as long as the server may be back. Raises Rejected."""
    body = prompt | {
        'model': self._model,
        'max_tokens': 1,
        'temperature': 0.0,
        'prompt_logprobs': 0,  # only those of the prompt's own tokens
    }
    started = time.monotonic()
    wait_s = _FIRST_WAIT_S
    stop_signal = StopSignal(self._row_failed.is_set, self.stop_signal.is_set)
    while True:
      stop_signal.raise_if_set()
      try:
        answer = self._server.ask('/completions', body, stop_signal)
        self._answered_at = time.monotonic()
        return json.loads(answer)
      except http_client.Temporary as error:
        now = time.monotonic()
        if error.is_busy:
          self._answered_at = now
        left_s = max(started, self._answered_at) + self._max_outage_s - now
        if left_s <= 0:
          raise self._error(f'gave no answer for {self._max_outage_s:g} s ({error})') from error
        logging.log_every_n_seconds(
            logging.WARNING,
            '%s gave no answer (%s); the run waits up to %.0f s for it',
            60,
            self._name(),
            error,
            left_s,
        )
        pause_s = min(error.wait_s or wait_s, _LONGEST_WAIT_S, left_s)
        stop_signal.wait(pause_s)
        wait_s *= 2

  def _name(self) -> str:
    return f'config.teacher.address={self._address!r} with config.teacher.model={self._model!r}'

  def _error(self, problem: str) -> types.RunError:
    return types.RunError(
        f"{self._name()} {problem}: start a server with vLLM's /v1/completions, and run the same "
        'command again'
    )
