"""The nouns of the project, and the legend of array shapes. Everything else passes these around.

Shape legend, used in every docstring and einsum:

  B rows (episodes)      T tokens               K turns              V vocabulary
  L layers               N query heads          M key/value heads    H head width
  D model width          S cache slots          F feed-forward width

Names that mean one thing everywhere: `logp` (of the current policy), `old_logp` (the policy that
sampled, recomputed by the trainer), `behaviour_logp` (what the sampler itself reported), `ref_logp`
(the frozen reference), `action_mask` (1 where the agent produced the token), `turn_ids` (0 where
it did not, else the number of its turn, from 1).
"""

import dataclasses

import flax
import jax
import numpy as np


class UserError(ValueError):
  """A mistake of the user or of their files: one line saying what was given, what is allowed and
  what to do. `run.py` prints it without a traceback and exits with code 2."""


class RunError(RuntimeError):
  """The run itself cannot go on (gradients stay non-finite, say): one line, exit code 1."""


class Stopped(Exception):
  """The run was asked to stop, and gave up what it was waiting for or could do again."""


@dataclasses.dataclass(frozen=True)
class Passage:
  """One document of a corpus; `score` is the retriever's, where there is one."""

  id: str
  title: str
  text: str
  score: float = 0.0


@dataclasses.dataclass(frozen=True)
class Task:
  """One question with its gold answers. `options` and `letter` are set for multiple choice."""

  id: str
  question: str
  answers: tuple[str, ...]
  dataset: str = 'unnamed'
  split: str = 'train'
  hops: int = 1
  gold: tuple[str, ...] = ()  # ids of the passages that hold the answer
  options: tuple[tuple[str, str], ...] = ()  # (letter, text)
  letter: str = ''  # the right option
  steps: tuple[tuple[str, str], ...] = ()  # (sub-question, its answer), where the source has them


@dataclasses.dataclass
class Turn:
  """One run of agent tokens and the observation that followed it."""

  tokens: np.ndarray  # [n] int32, sampled by the agent, its closing tag included
  logp: np.ndarray  # [n] float32, log-prob under the distribution it was really sampled from
  observation: np.ndarray  # [m] int32, forced tokens that came back; empty after the last turn
  action: str = 'invalid'  # 'search' | 'answer' | 'invalid'


@dataclasses.dataclass
class Episode:
  """A prompt and the turns that followed. Host data; `batching.to_turn_batch` makes tensors."""

  task: Task
  group: int  # rows with the same number answer the same question of this batch
  prompt: np.ndarray  # [p] int32
  turns: list[Turn]
  score: float = 0.0  # the environment's total reward
  truncated: bool = False  # ended by a limit, not by an answer
  failed: bool = False  # the world failed (no retrieval): kept out of the update, and counted
  metrics: dict[str, float] = dataclasses.field(default_factory=dict)  # em, f1, searches, ..


@flax.struct.dataclass
class TurnBatch:
  """Padded training data. Column t belongs to token t: its log-prob, and the value of the state
  just before it. Rows are padded on the right; padding has `action_mask` 0."""

  tokens: jax.Array  # [B,T] int32
  action_mask: jax.Array  # [B,T] 1 for agent tokens
  turn_ids: jax.Array  # [B,T] int32, 0 = not an agent token, k = k-th turn
  rewards: jax.Array  # [B,T] on agent tokens only
  old_logp: jax.Array  # [B,T]
  ref_logp: jax.Array  # [B,T]
  old_values: jax.Array  # [B,T]
  advantages: jax.Array  # [B,T]
  returns: jax.Array  # [B,T]
  group_ids: jax.Array  # [B] int32
  behaviour_logp: jax.Array | None = None  # [B,T] as the sampler reported it
