"""Sequences of turns: the protocol between episodes and what samples their turns.

`episode.play` makes a sequence of prompts and turns for each environment and role. A function of
the type `Play` samples the turns, with a `PolicySampler`:

  engine.run   the compiled programs of this process, in continuous batches
  remote.run   engines in other processes, to which each turn is a request

Two other players of episodes have no such sequences. An agent program asks for its turns itself,
and writes their prompts (serving/rollouts.py, with a `play` of its own). A model at an address that
is evaluated takes and gives texts without ids and log-probs. It is a `players.Player`, as the
evaluation of a checkpoint is (evaluation/remote.py).
"""

from collections.abc import Callable
from collections.abc import Sequence
import dataclasses
import operator
from typing import Any
from typing import Protocol

import jax

from stppo_jax import types
from stppo_jax.models.decoder import Params

# The parameters of a policy, or a list of those of several policies.
PolicyParams = Params | list[Params]


@dataclasses.dataclass(frozen=True)
class Prompt:
  """What follows in a sequence before the agent's next turn."""

  ids: Sequence[int]  # to prefill
  budget: int  # most tokens of the turn that follows; 0 ends the environment's sequences
  sequence: int | None = None  # the sequence that continues; None: the one whose turn ended
  stop_state: int = 0  # state of the stop automaton at the start of the turn


@dataclasses.dataclass(frozen=True)
class TurnCompletion:
  """A turn of the agent that ended."""

  index: int  # number of its sequence
  turn: types.Turn  # without an observation


@dataclasses.dataclass
class Report:
  """The work of a run. The seconds are the host's, and add up to the whole."""

  seconds: dict[str, float] = dataclasses.field(
      default_factory=lambda: {'prefill': 0.0, 'decode': 0.0, 'env': 0.0}
  )
  prefill_tokens: int = 0
  shared_tokens: int = 0  # prompt tokens copied from the context of an equal prompt instead
  sampled_tokens: int = 0
  decode_steps: int = 0  # each of one group

  @property
  def rows_busy(self) -> float:
    """Mean number of rows of a group that sampled, over all decode steps."""
    return self.sampled_tokens / max(self.decode_steps, 1)

  def __add__(self, other: 'Report') -> 'Report':
    """Returns the report of both runs, one after the other."""
    mine = dataclasses.asdict(self)
    sums = jax.tree.map(operator.add, mine, dataclasses.asdict(other))
    return Report(**sums)

  def metrics(self) -> dict[str, float]:
    """Returns the report under the names of metrics.jsonl.

    Without decode steps nothing was sampled here, or engines in other processes have sampled, whose
    work is not known.
    """
    metrics = {
        'timing_s/gen_decode': self.seconds['decode'],
        'timing_s/gen_env': self.seconds['env'],
    }
    if self.decode_steps:
      metrics |= {
          'timing_s/gen_prefill': self.seconds['prefill'],
          'perf/rows_busy': self.rows_busy,
          'perf/decode_steps': self.decode_steps,
          'perf/prefill_tokens': self.prefill_tokens,
          'perf/shared_tokens': self.shared_tokens,
      }
    return metrics


Respond = Callable[[list[TurnCompletion]], list[Prompt]]  # steps environments, one prompt per turn


class PolicySampler(Protocol):
  """A policy's sampler, in this process or elsewhere."""

  def copy(self, params: object) -> object:
    """Returns the policy of some parameters as it is sampled from, in separate buffers.

    The form of a copy is that of the sampler. A copy is returned as it is.
    """

  def compiled_variants(self) -> dict[str, int]:
    """Returns the number of compiled programs of each function."""


class Play(Protocol):
  """Plays sequences to their end."""

  def __call__(
      self,
      sampler: Any,  # the PolicySampler that the function knows
      params: Any,  # in the form of its copies
      prompts: Sequence[Prompt],
      keys: jax.Array,
      respond: Respond,
      threads: int = 0,
  ) -> Report:
    """Plays every sequence to its end. A sequence with budget 0 waits until it is given a prompt.

    Args:
      sampler: a PolicySampler.
      params: its copy of the policy, or a list: sequence r of an environment is sampled with
        params[r].
      prompts: the first prompt of each sequence.
      keys: random keys [sequences], or [environments,R] of sequences that take turns. A sampler in
        another process draws its own.
      respond: is called with turns that ended together, from threads if there are any. An exception
        ends the sequences and is raised.
      threads: calls of `respond` in progress at once. 0: none, sampling waits for each.
    """
