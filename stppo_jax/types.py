"""The data types that all parts exchange, and the legend of array shapes.

Shape legend, used in every docstring and einsum:

  B rows (episodes)      T tokens               K turns              V vocabulary
  L layers               N query heads          M key/value heads    H head width
  D model width          S cache slots          F feed-forward width
  E experts              A active experts per token
  b rows of a step       R bins                 P tokens of a bin

A quantity has one name in every file:

  logp            log-probs of the current policy
  old_logp        log-probs that ratios start from: those of the trainer's policy before this
                  update, or with old_logp='sampler' those that the sampler reported
  behaviour_logp  log-probs that the sampler reported
  ref_logp        log-probs of the frozen reference
  action_mask     1 where the agent produced the token
  turn_ids        number of the agent's turn, from 1; 0 for the environment's tokens
"""

import base64
from collections.abc import Iterable
from collections.abc import Mapping
import dataclasses
import difflib
import json
import math
import os
import re
import types
import typing
from typing import Any
from typing import TypeVar
import zlib

import flax
import jax
import numpy as np

T = TypeVar('T')


class UserError(ValueError):
  """A mistake of the user or in their files.

  The message is one line that says what was given, what is allowed and what to do. The command
  prints it without a traceback and exits with code 2.
  """


def read_json(path: str | os.PathLike[str], advice: str = 'replace it') -> dict[str, Any]:
  """Returns the JSON object of a file. UserError: it cannot be read, with what to do."""
  try:
    with open(path, encoding='utf-8-sig') as file:
      value = json.load(file)
    if not isinstance(value, dict):
      raise ValueError(f'it holds a {type(value).__name__}')
  except (OSError, ValueError, RecursionError) as error:
    raise UserError(f'{path} is not a JSON object ({error}): {advice}') from error
  return value


def shown(value: Any) -> str:
  """Returns a value for a message; a long one in part."""
  text = repr(value)
  if len(text) <= 200:
    return text
  return f'{text[:200]}..'


def parse_json(text: str | bytes) -> Any:
  """Returns the value of a JSON text without lone surrogates. Raises ValueError, RecursionError."""
  if not isinstance(text, str):
    text = text.decode(json.detect_encoding(text), 'surrogatepass')
  value = json.loads(text)
  return without_surrogates(value) if _SURROGATE.search(text) else value


def without_surrogates(value: Any) -> Any:
  """Replaces lone surrogates, which JSON can hold and UTF-8 cannot, by '?' in all texts of a value.

  Values of JSON, tuples, tasks and passages are searched for texts.
  """
  clean = value
  if isinstance(value, str):
    clean = value if value.isascii() else value.encode('utf-8', 'replace').decode('utf-8')
  elif type(value) is dict:
    clean = {without_surrogates(key): without_surrogates(item) for key, item in value.items()}
  elif type(value) is list:
    clean = list(map(without_surrogates, value))
  elif type(value) is tuple:
    clean = tuple(map(without_surrogates, value))
  elif isinstance(value, (Passage, Task)):
    names = [field.name for field in dataclasses.fields(value)]
    fields = {name: getattr(value, name) for name in names}
    found = {name: without_surrogates(field) for name, field in fields.items()}
    if found != fields:
      clean = dataclasses.replace(value, **found)
  return clean


_SURROGATE = re.compile(r'\\u[dD][89a-fA-F]|[\ud800-\udfff]')  # also those of pairs


class RunError(RuntimeError):
  """The run cannot continue, for example because of non-finite gradients (exit code 1)."""


# The rounding error of a score, relative to the sum of its absolute rewards, which are float32.
ROUNDING = 1e-6


class Stopped(Exception):
  """A stop was requested. The run abandoned work that it can repeat."""


def hint(name: str, names: Iterable[str]) -> str:
  """Returns '; did you mean X?' for the name that is closest to a wrong one, or ''."""
  close = difflib.get_close_matches(name, list(names), n=1)
  return f'; did you mean {close[0]}?' if close else ''


class Section:
  """A dataclass of settings that rejects unknown names."""

  def __setattr__(self, name: str, value: Any) -> None:
    known = [field.name for field in dataclasses.fields(self)]  # type: ignore[arg-type]
    if name not in known:
      near = hint(name, known) or f'; there are {", ".join(known)}'
      raise UserError(f'{type(self).__name__} has no setting {name!r}{near}')
    super().__setattr__(name, value)


@dataclasses.dataclass(frozen=True)
class Rules:
  """The meaning and the bounds of a setting. They are stored as metadata of its field.

  The bounds of a tuple hold for each of its items.
  """

  meaning: str
  allowed: tuple = ()  # allowed values; empty: any
  items: tuple[str, ...] = ()  # allowed items of a tuple; empty: any
  at_least: float | None = None
  at_most: float | None = None
  above: float | None = None
  below: float | None = None
  finite: bool = True  # neither NaN nor infinite
  plugin: bool = False  # 'module:attribute' is allowed too, see plugins.py
  prefixes: tuple[str, ...] = ()  # prefixes that are no module, as in 'gem:ID'
  needs_trust: bool = False  # a run's config.json may only set it with --trust_workdir
  written: bool = False  # a folder that is written to; outside of the workdir it needs trust
  resume_safe: bool = False  # a resumed run may change it: no result depends on it
  resume_allowed: bool = False  # a resumed run may change it, although results depend on it


def setting(default: T, meaning: str, **rules: Any) -> T:
  """Returns a dataclass field with a default. `rules` are fields of `Rules`."""
  metadata = {'rules': Rules(meaning, **rules)}
  if isinstance(default, dict):
    factory: Any = default.copy
    return dataclasses.field(default_factory=factory, metadata=metadata)
  return dataclasses.field(default=default, metadata=metadata)


def is_of(value: Any, kind: Any) -> bool:
  """Returns whether a value has the annotated type. An int is a float, a bool is no number."""
  origin = typing.get_origin(kind)
  args = typing.get_args(kind)
  if kind is Any:
    return True
  if origin is types.UnionType:
    return any(is_of(value, arg) for arg in args)
  if kind is float:
    return type(value) in (int, float)  # others, such as NumPy's, cannot be written as JSON
  if kind is int:
    return type(value) is int
  if not isinstance(value, origin or kind):
    return False
  if origin is dict:
    return all(is_of(item, args[1]) for item in value.values())
  if origin is tuple and args[1:] != (Ellipsis,):
    return len(value) == len(args) and all(map(is_of, value, args))
  return not args or all(is_of(item, args[0]) for item in value)


def described(kind: Any) -> str:
  """Returns an annotated type in words: 'a tuple of 2 float'."""
  origin = typing.get_origin(kind)
  args = typing.get_args(kind)
  if origin is types.UnionType:
    return ' or '.join(map(described, args))
  if origin in (tuple, list):
    number = ''
    if origin is tuple and args[1:] != (Ellipsis,):
      number = f'{len(args)} '
    return f'a {origin.__name__} of {number}{args[0].__name__}'
  return 'None' if kind is type(None) else f'of type {(origin or kind).__name__}'


@dataclasses.dataclass(frozen=True)
class Passage:
  """One document of a corpus. `score` is set by a retriever."""

  id: str
  title: str
  text: str
  score: float = 0.0


@dataclasses.dataclass(frozen=True)
class Task:
  """One question with its gold answers, or one instance of a procedural environment.

  `options` and `letter` are set for multiple choice. All episodes of a task with a `seed` are reset
  with that seed, so that the samples of a group play the same instance. Without one, each episode
  is reset with its own seed.
  """

  id: str
  question: str = ''
  answers: tuple[str, ...] = ()
  dataset: str = 'unnamed'
  split: str = 'train'
  hops: int = 0  # facts to be combined; evaluation also scores by it; 0: unknown
  gold: tuple[str, ...] = ()  # ids of the passages that hold the answer
  options: tuple[tuple[str, str], ...] = ()  # (letter, text)
  letter: str = ''  # the right option
  steps: tuple[tuple[str, str], ...] = ()  # (sub-question, its answer), where the source has them
  seed: int | None = None  # given to `Env.reset`; None: derived from run seed, task and sample

  @property
  def environment(self) -> str:
    """The name of its environment in config.env.mix; '': the run has one environment."""
    return ''


@dataclasses.dataclass(frozen=True)
class MixTask(Task):
  """A task of an environment of config.env.mix. Its id and data set begin with that name."""

  environment: str = ''
  own: Task | None = None  # as its environment reads it; None: it is not played again


@dataclasses.dataclass
class Turn:
  """One turn of the agent, and the observation that followed it."""

  tokens: np.ndarray  # [n] int32, as sampled, with the stop string or eos token that ended it
  logp: np.ndarray  # [n] float32, log-prob under the distribution that was sampled from
  # [m] int32, tokens of the environment's reply; empty after the last turn.
  observation: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(0, np.int32))
  action: str = 'invalid'  # kind of action, as the environment calls it in `info['action']`
  reward: float = 0.0  # the reward of this turn
  # [p+n,L,A] experts that the sampler chose for the p tokens since the turn before (the prompt or
  # an observation) and for the turn's own, where they are recorded.
  routes: np.ndarray | None = None
  version: int | None = None  # updates of the policy that sampled it, where an engine did


@dataclasses.dataclass
class Episode:
  """A prompt and the turns that followed. Host data: `batching.to_turn_batch` makes the tensors.

  An environment with several roles gives one row per role, with the tokens that this role read and
  wrote.
  """

  task: Task
  group: int  # rows with the same number are samples of the same task of this batch
  prompt: np.ndarray  # [p] int32
  turns: list[Turn]
  truncated: bool = False  # ended by a limit instead of an answer
  # The environment failed (no retrieval): masked out of the update, and counted.
  failed: bool = False
  metrics: dict[str, float] = dataclasses.field(default_factory=dict)  # last `info['metrics']`
  counts: dict[str, float] = dataclasses.field(
      default_factory=dict
  )  # turns by kind: invalid, cut, ..
  core_metrics: tuple[str, ...] = ()  # those of `metrics` that are scores, the main one first
  role: str = ''  # the role that played the row; '': there is one agent
  # Number of the episode in its round of sampling, if it has several rows: one per role, or one per
  # segment of an agent program. None: the episode is this row alone.
  number: int | None = None
  # Total reward of an agent program's episode: the final reward once, and the rewards of the turns
  # in all of its rows. Every row has it. None: the episode has this row alone.
  whole_score: float | None = None
  # Number of an agent program's segment among those of its episode, and (segment, turns of it) that
  # it begins with, if it branched off another one.
  segment: int = 0
  branched_from: tuple[int, int] | None = None
  # Id of the agent within the program that played the row, as its client's headers say. `parent` is
  # (segment, turns of it) that came before the row where the row begins with none of its tokens.
  agent_id: str = ''
  parent: tuple[int, int] | None = None

  error: str = ''  # what the environment's code raised, where, and in which turn
  log: str = ''  # the end of what an agent program, if it is a command, wrote to standard error
  demonstrated: bool = False  # a demonstration: its turns were not sampled, so their logp is NaN
  weight: float = 1.0  # multiplies the policy's loss of its tokens; not in `to_dict`

  @property
  def is_segment(self) -> bool:
    """Whether an agent program played the row, so that its episode may have further rows."""
    return self.number is not None and not self.role

  @property
  def absent(self) -> bool:
    """Whether the row belongs to a role that never moved, and is empty."""
    return bool(self.role) and not self.failed and not self.turns

  @property
  def search_failed(self) -> bool:
    """Whether a search or a remote environment failed, so that a later attempt may succeed.

    A long prompt, an agent program and an exception of the environment's code will fail again.
    """
    own_fault = self.counts.get('prompt_too_long') or self.counts.get('program_failed')
    return self.failed and not (own_fault or self.error)

  @property
  def score(self) -> float:
    """Total reward."""
    return sum((turn.reward for turn in self.turns), 0.0)

  @property
  def response_length(self) -> int:
    """Tokens after the prompt, observations included: verl's count."""
    read = [len(turn.observation) for turn in self.turns[:-1]]
    return sum(len(turn.tokens) for turn in self.turns) + sum(read)

  @property
  def num_messages(self) -> int:
    """The prompt, the agent's turns, and observations that it read: verl's number of turns."""
    return 1 + len(self.turns) + max(len(self.turns) - 1, 0)

  @property
  def main_score(self) -> float:
    """The environment's main score, or the total reward where it names none."""
    return self.metrics.get(self.core_metrics[0], 0.0) if self.core_metrics else self.score

  def unroll(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns the episode as one row [T]: tokens int32, turn_ids int32, behaviour_logp float32."""
    tokens = [self.prompt]
    turn_ids = [np.zeros(len(self.prompt))]
    logp = [np.zeros(len(self.prompt))]
    for k, turn in enumerate(self.turns, start=1):
      assert turn.tokens.shape == turn.logp.shape, f'turn {k} has {turn.logp.shape} log-probs'
      tokens += [turn.tokens, turn.observation]
      turn_ids += [np.full(len(turn.tokens), k), np.zeros(len(turn.observation))]
      logp += [turn.logp, np.zeros(len(turn.observation))]
    return (
        np.concatenate(tokens).astype(np.int32),
        np.concatenate(turn_ids).astype(np.int32),
        np.concatenate(logp).astype(np.float32),
    )

  def to_dict(self) -> dict[str, Any]:
    """Returns the episode as JSON values, from which `from_dict` restores it exactly.

    Checkpoints, episodes/*.jsonl, evaluations and ATIF documents select their fields from it.
    `tokens` and `turn_ids` cover the whole row, `behaviour_logp` the agent's tokens. A number that
    is not finite is None, but an infinite log-prob is the text 'inf' or '-inf'. Fields that most
    episodes leave empty are only there if they are set.
    """
    tokens, turn_ids, logp = self.unroll()
    record: dict[str, Any] = {
        'task': self.task.id,
        'dataset': self.task.dataset,
        'hops': self.task.hops,
        'question': self.task.question,
        'answers': list(self.task.answers),
        'group': int(self.group),
        'score': finite_or_none(self.score),
        'right': bool(self.main_score > 0),
        'metrics': {name: finite_or_none(x) for name, x in self.metrics.items()},
        'core_metrics': list(self.core_metrics),
        'counts': {name: finite_or_none(x) for name, x in self.counts.items()},
        'failed': bool(self.failed),
        'truncated': bool(self.truncated),
        'tokens': tokens.tolist(),
        'turn_ids': turn_ids.tolist(),
        'actions': [turn.action for turn in self.turns],
        'rewards': [finite_or_none(turn.reward) for turn in self.turns],
        'behaviour_logp': [_exact_number(x) for x in logp[turn_ids > 0]],
    }
    if self.role:
      record['role'] = self.role
    if self.number is not None:
      record['of_episode'] = self.number
    if self.whole_score is not None:
      record['whole_score'] = finite_or_none(self.whole_score)
    if self.segment:
      record['segment'] = self.segment
    if self.branched_from is not None:
      record['branched_from'] = list(self.branched_from)
    if self.agent_id:
      record['agent_id'] = self.agent_id
    if self.parent is not None:
      record['parent'] = list(self.parent)
    if self.error:
      record['error'] = self.error
    if self.log:
      record['log'] = self.log
    if self.demonstrated:
      record['demonstrated'] = True
    if self.task.environment:
      record['environment'] = self.task.environment
    if any(turn.routes is not None for turn in self.turns):
      record['routes'] = [pack_array(turn.routes) for turn in self.turns]
    if any(turn.version is not None for turn in self.turns):
      record['versions'] = [turn.version for turn in self.turns]
    return record

  @classmethod
  def from_dict(cls, record: Mapping[str, Any], task: Task | None = None) -> 'Episode':
    """Inverts `to_dict`. A record without tokens gives an episode without tokens.

    A log-prob that is None becomes NaN. Raises ValueError, LookupError or TypeError if the record
    is not an episode.

    Args:
      record: the fields, and any others.
      task: None makes a task from the recorded question and answers.
    """
    if task is None:
      fields: dict[str, Any] = {
          'id': record['task'],
          'question': record['question'],
          'answers': tuple(record['answers']),
          'dataset': record['dataset'],
          'hops': record['hops'],
      }
      environment = record.get('environment', '')
      task = MixTask(**fields, environment=environment) if environment else Task(**fields)
    tokens = np.array(record.get('tokens', ()), np.int32)
    turn_ids = np.array(record.get('turn_ids', ()), np.int32)
    actions = record.get('actions', ())
    logp = np.full(tokens.shape, np.nan, np.float32)
    logp[turn_ids > 0] = np.array(record.get('behaviour_logp', ()), np.float32)
    if turn_ids.max(initial=0) > len(actions):
      raise ValueError(f'turn {turn_ids.max()} of {len(actions)}')
    routes = record.get('routes', [None] * len(actions))
    versions = record.get('versions', [None] * len(actions))
    numbers, firsts, lengths = np.unique(turn_ids, return_index=True, return_counts=True)
    spans = dict(zip(numbers.tolist(), zip(firsts.tolist(), lengths.tolist())))
    turns: list[Turn] = []
    end = len(tokens)
    for k in range(len(actions), 0, -1):
      start, length = spans.get(k, (end, 0))
      stop = start + length
      turn = Turn(
          tokens=tokens[start:stop],
          logp=logp[start:stop],
          observation=tokens[stop:end],
          action=actions[k - 1],
          reward=record['rewards'][k - 1],
          routes=unpack_array(routes[k - 1], len(tokens)),
          version=versions[k - 1],
      )
      turns.append(turn)
      end = start
    places: dict[str, tuple[int, int]] = {}
    for name in ('branched_from', 'parent'):
      if name in record:
        segment, num_turns = record[name]
        places[name] = segment, num_turns
    return cls(
        task=task,
        group=record['group'],
        prompt=tokens[:end],
        turns=turns[::-1],
        truncated=record['truncated'],
        failed=record['failed'],
        metrics=dict(record['metrics']),
        counts=dict(record['counts']),
        core_metrics=tuple(record['core_metrics']),
        role=record.get('role', ''),
        number=record.get('of_episode'),
        whole_score=record.get('whole_score'),
        segment=record.get('segment', 0),
        branched_from=places.get('branched_from'),
        agent_id=record.get('agent_id', ''),
        parent=places.get('parent'),
        error=record.get('error', ''),
        log=record.get('log', ''),
        demonstrated=record.get('demonstrated', False),
    )


MAX_EXPERTS = 1 << 14  # per token, in all layers


def finite_or_none(x: Any) -> float | None:
  """Returns a number unchanged, and None for a number that JSON cannot hold."""
  number = float(x)
  return number if math.isfinite(number) else None


def _exact_number(x: np.float32) -> float | str | None:
  """Returns a log-prob as a JSON value that holds it exactly; None stands for NaN."""
  text = str(x)  # at most nine digits
  if np.isinf(x):
    return text
  return finite_or_none(text)


def pack_array(array: np.ndarray | None) -> list | None:
  """Returns an array of small integers as JSON values: [dtype, shape, compressed base64]."""
  if array is None:
    return None
  data = zlib.compress(np.ascontiguousarray(array).tobytes(), 1)
  return [array.dtype.name, list(array.shape), base64.b64encode(data).decode('ascii')]


def unpack_array(record: list | None, max_tokens: float = math.inf) -> np.ndarray | None:
  """Inverts `pack_array` for the experts [n,L,A] of at most `max_tokens` tokens.

  Raises ValueError for another shape. A few bytes can expand to any size, so the function
  decompresses no more than the shape needs.
  """
  if record is None:
    return None
  name, shape, text = record
  dtype = np.dtype(name)
  fits = len(shape) == 3 and 0 <= shape[0] <= max_tokens
  if not fits or not 0 <= shape[1] * shape[2] <= MAX_EXPERTS:
    raise ValueError(f'routes of shape {shape!r:.60}, of {max_tokens} tokens')
  if dtype.kind not in 'iu':
    raise ValueError(f'{name!r}: whole numbers are needed')
  size = math.prod(shape) * dtype.itemsize
  data = zlib.decompressobj().decompress(base64.b64decode(text), size + 1)
  return np.frombuffer(data, dtype).reshape(shape)


@flax.struct.dataclass
class TurnBatch:
  """Padded training data. Column t belongs to token t: its log-prob, and the value of the state
  just before it. Rows are padded on the right. Padding has `action_mask` 0."""

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
  policy_logp: jax.Array | None = None  # [B,T] of the policy before the update; None: old_logp
  truncated: jax.Array | None = None  # [B] 1 where the episode ended by a limit
  loss_mask: jax.Array | None = None  # [B,T] 1 where the policy's loss counts a token; None: all
  teacher_logp: jax.Array | None = None  # [B,T] log-probs of a teacher; None: there is none
  is_weights: jax.Array | None = None  # [B,T] weights from the sampler to old_logp; None: 1
  labels: jax.Array | None = None  # [B,T] int labels of a custom ratio; equal labels share it
  routes: jax.Array | None = None  # [B,T,L,A] experts of each token, where they are replayed
  old_uniform: jax.Array | None = None  # [B,T] mean log-prob over the vocabulary, with old_logp
  # {role: [B] 1 for its rows}; None: all rows have the same role.
  roles: dict[str, jax.Array] | None = None
  episode_ids: jax.Array | None = None  # [B] equal for rows of an episode; None: a row is one
  # [B] correction of the sum of rewards over an episode's rows, because each row has the final
  # reward. It is equal for all rows of an episode, and 0 for a single row.
  score_offsets: jax.Array | None = None
  demonstrated: jax.Array | None = None  # [B] 1 for demonstrations; None: there are none
  row_weights: jax.Array | None = None  # [B] multiply the policy's loss of the rows; None: 1
  imitation_mask: jax.Array | None = None  # [B,T] 1 for the agent tokens of demonstrations


@dataclasses.dataclass(frozen=True)
class StepMetrics:
  """The metrics and per-token numbers of one optimizer step."""

  rows: Any  # [b] numbers of the batch's rows, NumPy or jax
  metrics: Mapping[str, Any]
  tokens: Mapping[str, Any]  # ratio, clipped [b,T]
