"""Calls environments: checks what they return, and turns their errors into ended episodes."""

import collections
from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Mapping
from collections.abc import Sequence
import reprlib
import traceback
from typing import Any
from typing import TypedDict

from absl import logging

from stppo_jax import plugins
from stppo_jax import types
from stppo_jax.envs import factory
from stppo_jax.envs import guard as guard_lib
from stppo_jax.envs import guarded
from stppo_jax.envs import outages
from stppo_jax.envs import protocol
from stppo_jax.envs import rewards

_Passages = list[types.Passage] | tuple[types.Passage, ...] | None  # None: the search failed
_Results = list[_Passages] | tuple[_Passages, ...]  # one per query
_MAX_FRAMES = 5  # shown of a call that was left running


class ErrorInfo(TypedDict, total=False):
  """What `info` holds of an error in the code of an environment."""

  environment_error: str  # one line
  traceback: str
  timed_out: bool  # the call was abandoned
  given_up: bool  # the run stops


_INFO_KEYS = frozenset().union(
    *(kind.__annotations__ for kind in (protocol.RoleResetInfo, protocol.RoleStepInfo, ErrorInfo))
)
StepEnvs = Callable[[Sequence[protocol.Env], Sequence[str]], Sequence[protocol.Step]]


def reset(env: protocol.Env, seed: int) -> tuple[str, Any]:
  """Resets an environment and returns (observation, info).

  If it raises an error or takes too long, `info` is an ErrorInfo. Keys of `info` that nothing
  reads are left out. UserError: it returned something else.
  """
  outcome, error_info = _call(env, 'reset', seed=seed)
  if error_info:
    return '', types.without_surrogates(error_info)
  if types.is_of(outcome, tuple[str, Mapping]):
    observation, info = outcome
    return types.without_surrogates(observation), _read_info(info)
  raise types.UserError(
      f'reset of {factory.class_name(env)} returned {reprlib.repr(outcome)}: needed are '
      '(observation, info), a string and a dict'
  )


def step(env: protocol.Env, action: str, **passages: Any) -> protocol.Step:
  """Steps an environment and returns (observation, reward, terminated, truncated, info).

  If it raises an error, its episode ends, and `info` is as in `reset`. UserError: it returned
  something else.
  """
  outcome, error_info = _call(env, 'step', action, **passages)
  if error_info:
    return _failed_step(error_info)
  if types.is_of(outcome, tuple[str, Any, Any, Any, Mapping]):
    observation, reward, terminated, truncated, info = outcome
    if terminated in (True, False) and truncated in (True, False):
      observation = types.without_surrogates(observation)
      return observation, reward, terminated, truncated, _read_info(info)
  raise types.UserError(
      f'step of {factory.class_name(env)} returned {reprlib.repr(outcome)}: needed are '
      '(observation, reward, terminated, truncated, info), a string, a number, two booleans and a '
      'dict'
  )


def _read_info(info: Mapping[str, Any]) -> Any:
  """Returns `info` without other keys, whose values may be of any type."""
  return types.without_surrogates({key: info[key] for key in info if key in _INFO_KEYS})


def _failed_step(error_info) -> protocol.Step:
  """Returns the outcome of a turn in which a method of the environment raised."""
  return '', 0.0, True, False, {'action': 'error', **types.without_surrogates(error_info)}


def _call(env, method, *args, **kwargs):
  """Calls a method. Returns (its result, None), or (None, info about the error that it raised)."""
  try:
    return getattr(env, method)(*args, **kwargs), None
  except factory.ENDS_RUN:
    raise
  except guard_lib.TimedOut as error:
    return None, {
        'environment_error': f'the environment {factory.class_name(env)} gave {error}',
        'traceback': ''.join(error.stack.format()[-_MAX_FRAMES:]),
        'timed_out': True,
    }
  except guard_lib.StopSeen:  # all processes raise Stopped after this turn
    return None, {'environment_error': 'the run stops', 'traceback': '', 'given_up': True}
  except rewards.RewardError as error:
    return None, {
        'environment_error': str(error),
        'traceback': ''.join(traceback.format_exception(error.__cause__)),
    }
  except Exception as error:  # the environment's code may raise anything on a model's text
    message = f'{factory.class_name(env)} raised {type(error).__name__}: {error}'
    line = ' '.join(message.split())[:500]
    return None, {
        'environment_error': f'the environment {line} ({plugins.raised_at(error)})',
        'traceback': ''.join(traceback.format_exception(error)),
    }


def step_all(
    envs: Sequence[protocol.Env], actions: Sequence[str], map_all: Callable[..., Iterable] = map
) -> list[protocol.Step]:
  """Steps every environment once, with one search per (retriever, top_k) for all of them.

  An environment takes part in the shared search if it has `query(action) -> str | None`,
  `retriever`, `top_k`, and a `step` that accepts `passages`. If its `query` raises an error, this
  is the outcome of the step. `map_all` steps the others: the built-in map, or the one of a pool of
  threads.
  """
  steps: dict[int, protocol.Step] = {}
  queries: dict[int, str] = {}
  for row, (env, action) in enumerate(zip(envs, actions, strict=True)):
    query, error_info = _query(env, action)
    if error_info:  # `step` is not called, because `query` may still run in its thread
      steps[row] = _failed_step(error_info)
    elif query is not None:
      queries[row] = query
  passages = _search(envs, queries)
  rows = range(len(envs))
  others = [row for row in rows if row not in passages and row not in steps]
  step_row = lambda row: step(envs[row], actions[row])
  steps |= zip(others, map_all(step_row, others))
  for row, result in passages.items():
    steps[row] = step(envs[row], actions[row], passages=result)
  return [steps[row] for row in rows]


def _search(envs: Sequence[Any], queries: Mapping[int, str]) -> dict[int, _Passages]:
  """Returns {row: passages} for the queries {row: query} of a shared search."""
  rows_per_search = collections.defaultdict(list)
  for row in queries:
    search = (id(envs[row].retriever), envs[row].top_k)
    rows_per_search[search].append(row)

  passages: dict[int, _Passages] = {}
  for (_, top_k), rows in rows_per_search.items():
    retriever = envs[rows[0]].retriever
    texts = [queries[row] for row in rows]
    first = envs[rows[0]]
    guard = first.guard if isinstance(first, guarded.GuardedEnv) else guard_lib.IN_PLACE
    results = call_retriever(retriever, texts, top_k, guard)
    is_list = types.is_of(results, _Results)
    if not is_list or len(results) != len(rows):
      raise types.UserError(
          f'the retriever returned {reprlib.repr(results)} for {len(rows)} queries: a list of '
          'stppo_jax.types.Passage is needed for each query, or None if its search failed'
      )
    passages |= zip(rows, results)
  return passages


def call_retriever(
    retriever: Any, queries: Sequence[str], top_k: int, guard: guard_lib.Guard = guard_lib.IN_PLACE
) -> Any:
  """Returns the retriever's results. None per query: the search took too long, or had an outage.

  A retriever that can give up by itself has its own time limits. RunError: it raised another error,
  which would come back however long the run waited.
  """
  limit = guard.unlimited() if hasattr(retriever, 'stop_signal') else guard
  try:
    return limit.call('search', retriever.search, queries, top_k)
  except factory.ENDS_RUN:
    raise
  except guard_lib.StopSeen:
    pass
  except guard_lib.TimedOut as error:
    _log_failed_search(retriever, f'gave {error}')
  except Exception as error:  # a user's code may raise anything
    message = ' '.join(f'{type(error).__name__}: {error}'.split())[:300]
    reason = f'raised {message} ({plugins.raised_at(error)})'
    if not outages.is_outage(error):
      name = type(retriever).__name__
      raise types.RunError(
          f'the retriever {name} {reason}: correct it, and the same command resumes, with '
          '--config.train.accept_changed_plugins'
      ) from error
    _log_failed_search(retriever, reason)
  return [None] * len(queries)


def _log_failed_search(retriever, reason):
  """Logs the first failure of each minute."""
  name = type(retriever).__name__
  logging.log_every_n_seconds(logging.WARNING, 'the retriever %s %s', 60, name, reason)


def _query(env, action):
  """Returns (the query for the shared search or None, None or info about the error it raised).

  The query is None, too, if the environment takes no part in the search.
  """
  has_retriever = getattr(env, 'retriever', None) is not None
  has_query = callable(getattr(env, 'query', None))
  if not (has_retriever and has_query and hasattr(env, 'top_k')):
    return None, None
  return _call(env, 'query', action)
