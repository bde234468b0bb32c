"""Steps the environments of a rollout, in threads or at once: completions in, prompts out."""

from concurrent import futures
import contextvars

import chex

from stppo_jax.rollout.sequences import Prompt
from stppo_jax.rollout.sequences import Respond
from stppo_jax.rollout.sequences import TurnCompletion


class EnvPool:
  """Calls `respond`, which steps environments, in threads or at once. A context manager."""

  def __init__(self, respond: Respond, threads: int):
    self._respond = respond
    self._pool = futures.ThreadPoolExecutor(threads, 'rollout') if threads else None
    self._calls: dict[futures.Future, list[TurnCompletion]] = {}

  def __enter__(self) -> 'EnvPool':
    return self

  def __exit__(self, kind, *unused_error) -> None:
    if self._pool is not None:  # after an error, does not wait for the other responses
      self._pool.shutdown(wait=kind is None, cancel_futures=True)

  def step(self, completions: list[TurnCompletion]) -> None:
    """Calls `respond` once with turns that ended together."""
    if not completions:
      return
    if self._pool is None:
      call: futures.Future = futures.Future()
      call.set_result(self._respond(completions))
    else:
      context = contextvars.copy_context()  # a thread would have another one
      call = self._pool.submit(context.run, self._respond, completions)
    self._calls[call] = completions

  @property
  def in_progress(self) -> list[futures.Future]:
    """Calls of `respond` whose prompts have not been taken."""
    return list(self._calls)

  def take_prompts(self) -> list[tuple[int, Prompt]]:
    """Returns (sequence, prompt) of the calls that finished since the last time."""
    responses = []
    for call in self.in_progress:
      if call.done():
        completions = self._calls.pop(call)
        prompts = call.result()
        chex.assert_equal(len(completions), len(prompts))
        for completion, prompt in zip(completions, prompts):
          index = completion.index if prompt.sequence is None else prompt.sequence
          responses.append((index, prompt))
    return responses
