"""Sessions: what a client did under one id, as sampled ids with log-probs; Episodes out.

A session is a list of segments. A segment is one row of training data: a prompt, then turns and
what the client put between them. A request whose messages begin with a segment's continues it: its
ids are those recorded, and only the new messages are encoded. One that begins with a part of a
segment, or that rewrites the history, starts a new segment, which is counted.

  segment 1   prompt | turn 1 | tool result | turn 2 | tool result | turn 3
  segment 2   prompt, turn 1 and tool result as above    | turn 4            (branched)
  segment 3   another prompt | turn 5                                        (rewritten)
"""

from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
import contextlib
import dataclasses
import json
import threading
from typing import Any

import jax
import numpy as np

from stppo_jax import types
from stppo_jax.rollout import episode as episode_lib
from stppo_jax.serving import template as template_lib

Message = template_lib.Message
Identity = tuple[Any, ...]  # two messages with equal identities are the same
_PLAIN = 'no chat'  # replaces the tools of a segment whose prompt is not a chat


class Closed(Exception):
  """The session has ended; its client should end too."""


@dataclasses.dataclass(frozen=True)
class Sampling:
  """The sampling of a session, as the trainer assumes it, whatever the client sends."""

  temperature: float = 1.0
  top_p: float = 1.0
  max_turn: int = 500  # tokens


@dataclasses.dataclass
class Segment:
  """A row of training data, and the messages that it stands for."""

  prompt: list[int]
  tools: str  # JSON of the tools that the prompt describes
  number: int = 0  # position among the segments that were begun
  turns: list[types.Turn] = dataclasses.field(default_factory=list)
  ids: list[int] = dataclasses.field(default_factory=list)  # prompt, turns and observations
  # Per message: each identity with which a client may send it back.
  accepted: list[frozenset[Identity]] = dataclasses.field(default_factory=list)
  # Per turn: the number of messages and the number of ids at its end.
  ends: list[tuple[int, int]] = dataclasses.field(default_factory=list)
  is_extended: bool = False  # a request that continues it is in progress
  num_cut: int = 0  # turns that ended at a limit

  def is_free_after(self, num_turns: int) -> bool:
    """Whether a request can continue it after this number of turns."""
    return num_turns == len(self.turns) and not self.is_extended

  def num_known_turns(self, identities: Sequence[Identity]) -> int:
    """Returns the number of this segment's turns with which a conversation begins."""
    num_equal = 0
    for identity, accepted in zip(identities, self.accepted):
      if identity not in accepted:
        break
      num_equal += 1
    return sum(num_messages <= num_equal for num_messages, _ in self.ends)


@dataclasses.dataclass
class RequestPlan:
  """The place of a request in its session."""

  ids: list[int]  # the whole prompt
  key: np.ndarray
  segment: Segment | None = None  # gets the turn; None: the request is outside a session
  identities: Sequence[Identity] = ()  # one per message


class Session:
  """The recorded turns of one client. Safe to use from several threads."""

  def __init__(
      self, template: template_lib.Template, key: jax.Array, sampling: Sampling, name: str = ''
  ):
    self.sampling = sampling
    self.name = name
    self._template = template
    self._key = key
    self._lock = threading.Lock()
    self._segments: list[Segment] = []
    self._turns: list[types.Turn] = []  # in all segments, in the order of their ends
    self._num_begun = 0  # segments, of which some may never end a turn
    self._closed = False
    self._final_reward: float | None = None
    self.has_reward = False  # the client has posted a reward, of whatever value
    self._metrics: dict[str, float] = {}
    self.counts = dict.fromkeys(('branched', 'rewritten', 'too_long', 'forced'), 0.0)

  @property
  def num_turns(self) -> int:
    """Turns so far, in all segments."""
    return len(self._turns)

  @property
  def last_text(self) -> str:
    """The last turn as text."""
    if not self._turns:
      return ''
    return self._template.tokenizer.decode(self._turns[-1].tokens)

  @contextlib.contextmanager
  def _open(self) -> Iterator[None]:
    """Holds the lock of an open session, or raises Closed. Counts prompts that are too long."""
    with self._lock:
      if self._closed:
        raise Closed('the session has ended')
      try:
        yield
      except template_lib.TooLong:
        self.counts['too_long'] += 1
        raise

  def plan(self, messages: Sequence[Message], tools: Sequence[Any] = ()) -> RequestPlan:
    """Returns the ids for a request. Raises Closed, and ValueError as the template does.

    The recorded turns with which the conversation begins keep their ids.
    """
    identities = [identify(message) for message in messages]
    written = _json(tools)
    with self._open():
      num_known = []
      for segment in self._segments:
        has_tools = segment.tools == written
        num_known.append(segment.num_known_turns(identities) if has_tools else 0)
      best, num_turns = self._longest(num_known)
      if best is None:
        ids = self._template.encode(messages, tools)
      else:
        num_messages, num_ids = best.ends[num_turns - 1]
        sampled = best.turns[num_turns - 1].tokens.tolist()
        new = self._template.encode_after(sampled, messages[num_messages:], tools)
        ids = best.ids[:num_ids] + new
      return self._begin(ids, best, num_turns, identities, written)

  def plan_prompt(self, prompt: str | Sequence[int]) -> RequestPlan:
    """Returns the ids for a prompt that is a text or ids: a recorded text stays the ids it was.

    Control tokens of a text are tokens. Raises Closed, and TooLong.
    """
    read: Callable[[list[int]], Any] = list
    if isinstance(prompt, str):
      read = self._template.shown
      prompt = self._template.without_bos(prompt)
    with self._open():
      num_known = []
      for segment in self._segments:
        known = read(segment.ids)
        begins = segment.tools == _PLAIN and prompt[: len(known)] == known
        num_known.append(len(segment.turns) if begins else 0)
      best, num_turns = self._longest(num_known)
      if best is None:
        ids = self._template.encode_prompt(prompt)
      else:
        new = prompt[len(read(best.ids)) :]
        ids = best.ids + self._template.encode_more(new)
      return self._begin(ids, best, num_turns, [], _PLAIN)

  def _longest(self, num_known: Sequence[int]) -> tuple[Segment | None, int]:
    """Returns the segment of which a request has most turns, and their number.

    Of equal ones, a segment that ends there and is not being continued is preferred.
    """
    best = None
    rank = (0, False)
    for segment, num_turns in zip(self._segments, num_known):
      segment_rank = (num_turns, segment.is_free_after(num_turns))
      if num_turns and segment_rank > rank:
        best = segment
        rank = segment_rank
    return best, rank[0]

  def _begin(
      self,
      ids: list[int],
      segment: Segment | None,
      num_turns: int,
      identities: list[Identity],
      tools: str,
  ) -> RequestPlan:
    """Claims the end of a segment, or begins a new one and counts it. Raises TooLong."""
    self._template.check(ids)
    if segment is None:
      self.counts['rewritten'] += bool(self._segments)
    elif not segment.is_free_after(num_turns):
      self.counts['branched'] += 1
      segment = None
    return self._claim(ids, segment, identities, tools)

  def fork(self, plan: RequestPlan) -> RequestPlan:
    """Returns a plan for another sample of the same prompt, in a segment of its own."""
    assert plan.segment is not None
    with self._lock:
      self.counts['branched'] += bool(plan.segment.turns)
      return self._claim(plan.ids, None, plan.identities, plan.segment.tools)

  def _claim(
      self, ids: list[int], segment: Segment | None, identities: Sequence[Identity], tools: str
  ) -> RequestPlan:
    """Returns the plan of a request that continues a segment, or begins one."""
    if segment is None:
      segment = Segment(ids, tools, self._num_begun)
      self._num_begun += 1
    segment.is_extended = True
    key = self._key
    if segment.number:  # the first has the key of the episode, as one that the engine plays
      key = jax.random.fold_in(key, segment.number)
    return RequestPlan(ids, np.asarray(jax.random.key_data(key)), segment, identities)

  def abandon(self, plan: RequestPlan) -> None:
    """Ends a request that gave no turn."""
    assert plan.segment is not None
    with self._lock:
      plan.segment.is_extended = False

  def record(
      self,
      plan: RequestPlan,
      tokens: Sequence[int],
      logp: Sequence[float],
      answers: Sequence[Message],  # messages with which the client may send the turn back
      was_cut: bool = False,
      action: str = 'other',
  ) -> int:
    """Adds a turn; returns its number in the session, from 1."""
    turn = types.Turn(
        tokens=np.array(tokens, np.int32), logp=np.array(logp, np.float32), action=action
    )
    with self._open():
      segment = plan.segment
      assert segment is not None
      new = plan.ids[len(segment.ids) :]
      if segment.turns:
        segment.turns[-1].observation = np.array(new, np.int32)
      else:
        self._segments.append(segment)
      more = plan.identities[len(segment.accepted) :]
      segment.ids += new
      segment.accepted += [frozenset([identity]) for identity in more]
      segment.is_extended = False
      segment.turns.append(turn)
      segment.ids += turn.tokens.tolist()
      segment.accepted.append(frozenset(map(identify, answers)))
      segment.ends.append((len(segment.accepted), len(segment.ids)))
      self._turns.append(turn)
      segment.num_cut += was_cut
      return len(self._turns)

  def reward(
      self, value: float, turn: int | None = None, metrics: Mapping[str, float] | None = None
  ) -> None:
    """Sets the reward of a turn (from 1), or of the whole; UserError: there is no such turn."""
    with self._open():
      if turn is None:
        self._final_reward = value
      elif 1 <= turn <= self.num_turns:
        self._turns[turn - 1].reward = value
      else:
        raise types.UserError(f'turn={turn}: use a number from 1 to {self.num_turns}')
      self.has_reward = True
      self._metrics |= metrics or {}

  def close(self) -> None:
    """Ends the session: nothing is recorded any more."""
    with self._lock:
      self._closed = True

  def episodes(
      self, task: types.Task, group: int, failed: bool = False, first_is_whole: bool = False
  ) -> list[types.Episode]:
    """Returns a row per segment, the longest one first; one without turns if there is none.

    Choice: the reward of the whole stands on the last turn of every segment, so that each row has
    it once. The rewards of single turns stay on their turns. Every row's `whole_score` counts each
    of these rewards once. With `first_is_whole` the rewards of the other segments are also on the
    first row's last turn, whose score is the session's.
    """
    with self._lock:
      segments = sorted(self._segments, key=lambda segment: -len(segment.turns))
      whole_score = sum((turn.reward for turn in self._turns), self._final_reward or 0.0)
      rows = []
      for segment in segments or [Segment([], '')]:
        turns = [dataclasses.replace(turn) for turn in segment.turns]
        if turns and self._final_reward is not None:
          turns[-1].reward += self._final_reward
        counts = episode_lib.count_turns(turns, self._template.tokenizer, self.sampling.max_turn)
        counts |= self.counts
        counts |= {
            'empty': float(sum(len(turn.tokens) <= 1 for turn in turns)),
            'cut': float(segment.num_cut),
            'prompt_too_long': 0.0,
            'segments': float(len(segments)),
            'program_failed': float(failed or not turns),
        }
        rows.append(
            types.Episode(
                task=task,
                group=group,
                prompt=np.array(segment.prompt, np.int32),
                turns=turns,
                truncated=self.counts['too_long'] > 0,
                failed=failed or not turns,
                metrics=dict(self._metrics),
                counts=counts,
                whole_score=whole_score,
            )
        )
      if first_is_whole and segments:
        others = [turn.reward for segment in segments[1:] for turn in segment.turns]
        rows[0].turns[-1].reward += sum(others)
      if len(rows) == 1:
        rows[0].whole_score = rows[0].score  # exactly, however sums are rounded
      return rows


def identify(message: Message) -> Identity:
  """Returns a message's identity. White space around an agent's turn does not count."""
  content = message['content']
  if message['role'] == 'assistant':
    content = content.strip()
  functions = [call['function'] for call in message.get('tool_calls') or ()]
  calls = tuple((function['name'], _json(function['arguments'])) for function in functions)
  return message['role'], content, calls


def _json(value: Any) -> str:
  return json.dumps(value, sort_keys=True, ensure_ascii=False)
