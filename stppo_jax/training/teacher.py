"""The teacher of on-policy distillation behind an address: log-probs of given token ids.

The server speaks vLLM's /v1/completions with `prompt_logprobs`. A teacher in a folder needs no
client: `update.annotate` computes its log-probs.
"""

from collections.abc import Sequence
from concurrent import futures
import dataclasses
import json
import os
from typing import Any

import numpy as np
import requests

from stppo_jax import tokenizer as tokenizer_lib
from stppo_jax import types
from stppo_jax.distributed import hosts
from stppo_jax.distributed import http_client
from stppo_jax.rollout import batching

_RETRIES = 6
_BACKOFF_S = 1.0
_LIMITS = http_client.ClientLimits(connect_s=10.0, total_s=300.0)
_THREADS = 32  # requests in progress
# Two tokenizers that encode this text alike are taken to be the same.
_PROBE = 'On 3 May 1987, Zoë paid 12.50 for\n\tthe "naïve" plan: f(x) = x**2 + 1; 你好, мир!'


class TeacherServer:
  """A server that gives the log-prob of each token of a row."""

  def __init__(self, address: str, model: str):
    self._address = address
    self._model = model
    self._session = requests.Session()
    self._session.trust_env = False  # a proxy for the outside would not reach a cluster's server
    adapter = requests.adapters.HTTPAdapter(pool_maxsize=_THREADS)
    self._session.mount('http://', adapter)
    self._session.mount('https://', adapter)
    if key := os.environ.get('OPENAI_API_KEY', ''):
      self._session.headers['Authorization'] = f'Bearer {key}'

  def check_tokenizer(self, tokenizer: tokenizer_lib.Tokenizer) -> None:
    """Raises a UserError if the server encodes a text otherwise than the policy's tokenizer."""
    tokens = tokenizer.encode(_PROBE)
    try:
      logp = self._logp({'prompt': _PROBE, 'add_special_tokens': False}, tokens)
    except types.RunError as error:
      raise types.UserError(str(error)) from error
    if logp is None:
      raise types.UserError(
          f'{self._name()} has another tokenizer than the policy: it scores the tokens of the '
          'policy, give a model of the same family'
      )

  def row_logp(self, tokens: Sequence[int]) -> list[float]:
    """Returns the log-prob of each token, given the tokens before it; 0 for the first."""
    if not tokens:
      return []
    logp = self._logp({'prompt': list(tokens)}, tokens)
    if logp is None:
      raise self._error(f'scored other tokens than the {len(tokens)} that it was given')
    return logp

  def batch_logp(
      self, episodes: Sequence[types.Episode], batch: types.TurnBatch, sharding: Any
  ) -> types.TurnBatch:
    """Returns the batch with `teacher_logp` [B,T]. Its first rows are those of the episodes."""
    rows = []
    for episode in episodes:
      tokens, _, _ = episode.unroll()
      rows.append(tokens[: batching.trained_length(episode)].tolist())
    scored = hosts.by_writer(self._score, rows)
    if isinstance(scored, str):
      raise types.RunError(scored)
    teacher_logp = np.zeros(batch.tokens.shape, np.float32)
    for b, logp in enumerate(scored):
      teacher_logp[b, : len(logp)] = logp
    return dataclasses.replace(batch, teacher_logp=hosts.put(teacher_logp, sharding))

  def _score(self, rows):
    """Returns the log-probs of each row, or the text of an error, which all processes raise."""
    try:
      with futures.ThreadPoolExecutor(_THREADS, 'teacher') as pool:
        return list(pool.map(self.row_logp, rows))
    except types.RunError as error:
      return str(error)

  def _logp(self, prompt: dict[str, Any], tokens: Sequence[int]) -> list[float] | None:
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

  def _ask(self, prompt: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns {token id: its log-prob} for each token of the prompt; the first entry is {}."""
    body = prompt | {
        'model': self._model,
        'max_tokens': 1,
        'temperature': 0.0,
        'prompt_logprobs': 0,  # only those of the prompt's own tokens
    }
    url = self._address.rstrip('/') + '/completions'

    def attempt(unused_number):
      answer = http_client.send(self._session, url, body, _LIMITS)
      return json.loads(answer)['choices'][0]['prompt_logprobs']

    try:
      scored = http_client.with_retries(attempt, _RETRIES, _BACKOFF_S)
      return [entry or {} for entry in scored]
    except http_client.Temporary as error:
      raise self._error(f'gave no answer ({error})') from error
    except http_client.Rejected as error:
      raise self._error(f'rejected a request ({error}): {error.text[:300]}') from error
    except (ValueError, TypeError, LookupError) as error:
      raise self._error('gave no prompt_logprobs') from error

  def _name(self) -> str:
    return f'config.teacher.address={self._address!r} with config.teacher.model={self._model!r}'

  def _error(self, problem: str) -> types.RunError:
    return types.RunError(
        f"{self._name()} {problem}: start a server with vLLM's /v1/completions, and run the same "
        'command again'
    )
