"""The environments of a rollout, in threads or not: completions in, prompts out."""

from collections.abc import Callable
from collections.abc import Sequence
from concurrent import futures
import dataclasses

import chex
import numpy as np


@dataclasses.dataclass(frozen=True)
class Prompt:
  """What follows in a sequence before the agent's next turn."""

  ids: Sequence[int]  # to prefill
  budget: int  # most tokens of the turn that follows; 0 ends the sequence


@dataclasses.dataclass(frozen=True)
class Completion:
  """A turn of the agent that ended."""

  index: int  # of its sequence
  tokens: np.ndarray  # [n] int32
  logp: np.ndarray  # [n] float32
  routes: np.ndarray | None = None  # [p+n,L,A] experts of the p tokens prefilled before, and of it


class EnvPool:
  """Calls `respond`, which steps environments, in threads or at once. A context manager."""

  def __init__(self, respond: Callable[[list[Completion]], list[Prompt]], threads: int):
    self._respond = respond
    self._pool = futures.ThreadPoolExecutor(threads, 'rollout') if threads else None
    self._in_progress: dict[futures.Future, list[Completion]] = {}
    self._responses: list[tuple[int, Prompt]] = []

  def __enter__(self) -> 'EnvPool':
    return self

  def __exit__(self, kind, *unused_error) -> None:
    if self._pool is not None:  # after an error, does not wait for the other responses
      self._pool.shutdown(wait=kind is None, cancel_futures=True)

  def hand_over(self, completions: list[Completion]) -> None:
    """Takes turns that ended together: one call of `respond`."""
    if not completions:
      return
    if self._pool is None:
      self._note(completions, self._respond(completions))
    else:
      self._in_progress[self._pool.submit(self._respond, completions)] = completions

  @property
  def in_progress(self) -> list[futures.Future]:
    """Calls of `respond` that have not been collected."""
    return list(self._in_progress)

  def responses(self) -> list[tuple[int, Prompt]]:
    """Returns (sequence, prompt) of the calls that finished since the last time."""
    for future in [future for future in self._in_progress if future.done()]:
      self._note(self._in_progress.pop(future), future.result())
    responses, self._responses = self._responses, []
    return responses

  def _note(self, completions, prompts):
    chex.assert_equal(len(completions), len(prompts))
    self._responses += [(turn.index, prompt) for turn, prompt in zip(completions, prompts)]
