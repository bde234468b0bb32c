"""Sessions: what a client did under one id, as sampled ids with log-probs; Episodes out.

A session is a list of segments. A segment is one row of training data: a prompt, then turns and
what the client put between them. A request whose messages begin with a segment's continues it: its
ids are those recorded, and only the new messages are encoded. `turns.match` says which message is a
recorded turn. Any other request starts a new segment, which is counted by its kind:

  segment 1   prompt | turn 1 | tool result | turn 2 | tool result | turn 3
  segment 2   prompt, turn 1 and tool result as above    | turn 4            (branched)
  segment 3   prompt | another text than turn 1 | tool result | turn 5       (rewritten)
  segment 4   another prompt | turn 6                                        (a conversation)

Clients may say which agent sends a request, and which agent has started it (`ClientAgent`). The
segments are then the nodes of a tree, in which every parent is older than its children:

  a segment that begins with recorded turns    comes after the last of these turns (`branched_from`)
  another segment of an agent that has one     comes after the agent's last turn   (`parent`)
  the first segment of an agent                comes after its parent's last turn  (`parent`)
"""

import collections
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
import contextlib
import dataclasses
import json
import os
import threading
from typing import NamedTuple

from absl import logging
import jax
import numpy as np

from stppo_jax import types
from stppo_jax.rollout import episode as episode_lib
from stppo_jax.text import template as template_lib
from stppo_jax.text import tokenizer as tokenizer_lib
from stppo_jax.text import turns as turns_lib

Message = template_lib.Message
_PLAIN = 'no chat'  # replaces the tools of a segment whose prompt is not a chat
_CUT = '\ufffd'  # replaces the character within which a text ends
COUNTS = (
    'conversations',
    'branched',
    'rewritten',
    'thoughts_kept',
    'unrecorded',
    'forced',
    'too_long',
    'wrong_parents',
)


class Closed(Exception):
  """The session has ended; its client should end too."""


@dataclasses.dataclass(frozen=True)
class Sampling:
  """The sampling of a session, as the trainer assumes it. Settings of the client have no effect."""

  temperature: float = 1.0
  top_p: float = 1.0
  max_turn: int = 500  # tokens


class ClientAgent(NamedTuple):
  """The agent within a program that sends a request, as the headers of its client say."""

  name: str = ''  # empty: the client does not say
  parent: str = ''  # name of the agent that has started it; empty: none has


NO_AGENT = ClientAgent()


@dataclasses.dataclass(frozen=True)
class Recording:
  """What a session records."""

  max_rows: int = 16  # the turns of further segments are not recorded
  keeps_thoughts: bool = True  # a turn that comes back without its thoughts is the recorded one
  credits_branches: bool = False  # an agent may have a reward in place of the episode's


@dataclasses.dataclass(eq=False)
class RecordedTurn:
  """A turn among the messages of a segment."""

  forms: Sequence[turns_lib.ReadMessage]  # the messages with which a client may send it back
  text: str = ''  # as an environment would read it
  rest: str = ''  # the client's text after it, in the same message
  thoughts_kept: bool = False  # the client has left out its thoughts, and the row has them


class Prefix(NamedTuple):
  """The recorded turns with which a conversation begins."""

  num_turns: int = 0  # without turns in the segment's prompt
  num_messages: int = 0  # equal messages
  size: int = 0  # messages, characters or ids of the conversation up to the last of the turns
  lacks_thoughts: Sequence[RecordedTurn] = ()  # turns that came back without their thoughts
  rest: str = ''  # text after the last of the turns, in the same message


class PlainTurn(NamedTuple):
  """A turn as a client without messages reads it."""

  text: str  # what the client has sent since the turn before, and what it got of this one
  size: int  # characters of the segment's text up to its end
  tail: str  # text of its tokens after it, such as the end of a token in which a stop string ended


@dataclasses.dataclass
class Segment:
  """A row of training data, and the messages that it stands for."""

  prompt: list[int]
  tools: str  # JSON of the tools that the prompt describes
  number: int = 0  # position among the segments that were begun
  stream: int | None = None  # for its random numbers; None: `number`
  turns: list[types.Turn] = dataclasses.field(default_factory=list)
  ids: list[int] = dataclasses.field(default_factory=list)  # prompt, turns and observations
  messages: list[turns_lib.ReadMessage | RecordedTurn] = dataclasses.field(default_factory=list)
  # Per turn: the number of messages and the number of ids at its end.
  ends: list[tuple[int, int]] = dataclasses.field(default_factory=list)
  texts: list[PlainTurn] = dataclasses.field(default_factory=list)  # without messages
  first_prompt: str | Sequence[int] = ''  # without messages
  branched_from: tuple[int, int] | None = None  # (number of a segment, turns of it)
  agent: str = ''  # name of the agent that plays it
  parent: tuple[int, int] | None = None  # (number of a segment, turns of it), without its tokens
  wrong_parent: str = ''  # the parent that its agent cannot have
  is_extended: bool = False  # a request that continues it is in progress
  num_cut: int = 0  # turns that ended at a limit
  ends_cut: bool = False  # the last turn did

  @property
  def num_prompt_messages(self) -> int:
    """Messages before its first turn. A branch has turns of another segment among them."""
    return self.ends[0][0] - 1

  def is_free_after(self, num_turns: int, agent: ClientAgent) -> bool:
    """Whether a request of an agent can continue it after this number of turns."""
    is_own = agent.name in ('', self.agent)
    return is_own and num_turns == len(self.turns) and not self.is_extended

  @property
  def place(self) -> tuple[int, int]:
    """Its number, and its turns so far."""
    return self.number, len(self.turns)

  def origin_of(self, plan: 'RequestPlan') -> tuple[int, int] | None:
    """Returns where another sample of a request of this segment branches off."""
    return (self.number, plan.num_turns) if plan.num_turns else self.branched_from

  def prefix(self, messages: Sequence[turns_lib.ReadMessage], keeps_thoughts: bool) -> Prefix:
    """Returns the turns of this segment with which a conversation begins."""
    return _prefix(messages, self.messages, self.num_prompt_messages, keeps_thoughts)

  def messages_to(
      self, num_messages: int, prefix: Prefix
  ) -> list[turns_lib.ReadMessage | RecordedTurn]:
    """Returns its messages up to a turn, for a segment that continues it or branches off."""
    *before, last = self.messages[:num_messages]
    assert isinstance(last, RecordedTurn)
    return [*before, dataclasses.replace(last, rest=prefix.rest)]

  def prefix_of_prompt(self, prompt: str | Sequence[int]) -> Prefix:
    """Returns the turns of this segment with which a prompt without messages begins."""
    num_turns = 0
    size = 0
    if isinstance(prompt, str):
      for turn in self.texts:
        if not prompt.startswith(turn.text, size):
          break
        num_turns += 1
        size = turn.size
    else:
      for _, end in self.ends:
        if prompt[size:end] != self.ids[size:end]:
          break
        num_turns += 1
        size = end
    return Prefix(num_turns, size=size)


def _origin(segment: Segment | None, prefix: Prefix) -> tuple[int, int] | None:
  """Returns (number of the segment, turns of it) that a conversation begins with; None: no turn."""
  return None if segment is None else (segment.number, prefix.num_turns)


def _prefix(
    messages: Sequence[turns_lib.ReadMessage],
    known_messages: Sequence[turns_lib.ReadMessage | RecordedTurn],
    num_prompt_messages: int,
    keeps_thoughts: bool,
) -> Prefix:
  """Returns the known turns with which a conversation begins."""
  num_turns = 0
  num_messages = 0
  size = 0
  lacks_thoughts = []
  rest = ''
  for message, known in zip(messages, known_messages):
    if isinstance(known, RecordedTurn):
      found = turns_lib.match(known.forms, message)
      if found is None or (found.lacks_thoughts and not keeps_thoughts):
        break
      num_turns += num_messages >= num_prompt_messages
      num_messages += 1
      size = num_messages
      rest = found.rest
      if found.lacks_thoughts:
        lacks_thoughts.append(known)
      if rest != known.rest:
        break
    elif known.identity == message.identity:
      num_messages += 1
    else:
      break
  return Prefix(num_turns, num_messages, size, lacks_thoughts, rest)


@dataclasses.dataclass
class RequestPlan:
  """The place of a request in its session."""

  ids: list[int]  # the whole prompt
  key: np.ndarray
  segment: Segment | None = None  # gets the turn; None: the request is outside a session
  kind: str = ''  # the count in which the segment that begins is; empty: none
  messages: Sequence[turns_lib.ReadMessage | RecordedTurn] = ()
  prompt: str | Sequence[int] = ''  # without messages
  num_turns: int = 0  # turns of the segment that the prompt holds


@dataclasses.dataclass(eq=False)
class _UnfinishedTurn:
  """The tokens that a client got of a stream, which it has ended."""

  plan: RequestPlan
  tokens: list[int]
  logp: list[float]
  text: str

  def end_in_chat(
      self,
      messages: Sequence[turns_lib.ReadMessage],
      keeps_thoughts: bool,
      decode: Callable[[Sequence[int]], str],
  ) -> int:
    """Returns how many of the tokens are the next message of a conversation; 0: it has another."""
    place = len(self.plan.messages)
    if place >= len(messages):
      return 0
    message = messages[place]
    if message.role != 'assistant' or message.calls or not self._may_begin(message.content):
      return 0
    if _prefix(messages, self.plan.messages, 0, keeps_thoughts).num_messages < place:
      return 0
    texts = [decode(self.tokens[:end]) for end in range(1, len(self.tokens) + 1)]
    if message.content in texts:
      return texts.index(message.content) + 1
    words = message.content.split()
    ends = [end for end, text in enumerate(texts, start=1) if text.split() == words]
    return min(ends, default=0)

  def _may_begin(self, content: str) -> bool:
    """Whether a text can be its beginning, but for white space. Most other texts are not."""
    whole = ''.join(self.text.split())
    beginning = ''.join(content.split())
    return whole.startswith(beginning.rstrip(_CUT))

  def end_in_prompt(
      self, prompt: str | Sequence[int], decode: Callable[[Sequence[int]], str]
  ) -> int:
    """Returns how many of the tokens are the next ones of a prompt without messages."""
    first = self.plan.prompt
    if type(first) is not type(prompt) or prompt[: len(first)] != first:
      return 0
    if not isinstance(prompt, str):
      new = list(prompt[len(first) : len(first) + len(self.tokens)])
      return len(os.path.commonprefix([new, self.tokens]))
    kept = 0
    for end in range(1, len(self.tokens) + 1):
      text = decode(self.tokens[:end])
      if prompt.startswith(text, len(first)):
        kept = end
      elif not prompt.startswith(text.rstrip(_CUT), len(first)):
        break
    return kept


@dataclasses.dataclass(eq=False)
class _Stream:
  """A streamed turn. Only the client's next request tells which part of it the client has read."""

  plan: RequestPlan
  sent: Callable[[], tuple[list[int], list[float]]]  # tokens that the client can have, log-probs
  cancel: Callable[[], None]
  turn: types.Turn | None = None  # None: it is in progress
  is_left: bool = False  # in progress, and nothing more of it is recorded


class Session:
  """The recorded turns of one client. Safe to use from several threads."""

  def __init__(
      self,
      template: template_lib.Template,
      key: jax.Array,
      sampling: Sampling,
      name: str = '',
      recording: Recording = Recording(),
  ):
    self.sampling = sampling
    self.name = name
    self._template = template
    self._key = key
    self._recording = recording
    self._lock = threading.Lock()
    self._segments: list[Segment] = []
    self._turns: list[types.Turn] = []  # in all segments, in the order of their ends
    self._index: turns_lib.TurnIndex[Segment] = turns_lib.TurnIndex()
    self._last_segments: dict[str, Segment] = {}  # name of an agent -> the one with its last turn
    self._parents: dict[str, str] = {}  # name of an agent -> that of the agent that started it
    # A request is compared with each of them, and there is no room for more rows.
    self._unfinished: collections.deque[_UnfinishedTurn] = collections.deque(
        maxlen=recording.max_rows
    )
    self._streams: collections.deque[_Stream] = collections.deque(maxlen=recording.max_rows)
    self._last_plan: RequestPlan | None = None  # the last turn has it, recorded or not
    self._last_text = ''  # text of that turn
    self._num_begun = 0  # segments, of which some may never end a turn
    self._closed = False
    self._final_reward: float | None = None
    self._agent_rewards: dict[str, float] = {}  # in place of the final reward
    self.has_reward = False  # the client has posted a reward, of whatever value
    self._metrics: dict[str, float] = {}
    self.counts = dict.fromkeys(COUNTS, 0.0)
    self.difference = ''  # where the first rewritten history differs from what was recorded

  @property
  def num_turns(self) -> int:
    """Turns so far, in all segments."""
    return len(self._turns)

  @property
  def last_text(self) -> str:
    """The last turn as an environment reads it: with an opened thought, without the eos token."""
    return self._last_text

  @property
  def transcript(self) -> str:
    """The text of the last turn's row after its prompt: turns, and what the client put between."""
    with self._lock:
      before = '' if self._last_plan is None else self._text_before(self._last_plan)
      return before + self._last_text

  @contextlib.contextmanager
  def _open(self) -> Iterator[None]:
    """Holds the lock of an open session, or raises Closed."""
    with self._lock:
      if self._closed:
        raise Closed('the session has ended')
      yield

  @contextlib.contextmanager
  def _encoding(self) -> Iterator[None]:
    """Counts prompts that are too long. The lock must be free, because encoding takes seconds."""
    try:
      yield
    except template_lib.TooLong:
      with self._open():
        self.counts['too_long'] += 1
      raise

  @property
  def wrong_parent(self) -> str:
    """The first parent that an agent cannot have; empty: there is none."""
    names = (segment.wrong_parent for segment in self._segments)
    return next(filter(None, names), '')

  @property
  def num_segments(self) -> int:
    """Segments with a recorded turn."""
    return len(self._segments)

  @property
  def has_agent_rewards(self) -> bool:
    """Whether an agent has a reward in place of the episode's."""
    return bool(self._agent_rewards)

  def plan(
      self,
      messages: Sequence[Message],
      tools: Sequence[Mapping[str, object]] = (),
      agent: ClientAgent = NO_AGENT,
  ) -> RequestPlan:
    """Returns the ids for a request. Raises Closed, and ValueError as the template does.

    The recorded turns with which the conversation begins keep their ids.
    """
    read = list(map(turns_lib.ReadMessage, messages))
    messages = self._template.resolve_results(messages)
    written = json.dumps(tools, sort_keys=True, ensure_ascii=False)
    keeps = self._recording.keeps_thoughts
    decode = self._template.tokenizer.decode
    with self._open():
      best, prefix = self._longest_of_chat(read, written, agent)
      find_end = lambda turn: turn.end_in_chat(read, keeps, decode)
      if self._recover(written, prefix, find_end):
        best, prefix = self._longest_of_chat(read, written, agent)
      for turn in prefix.lacks_thoughts:
        self.counts['thoughts_kept'] += not turn.thoughts_kept
        turn.thoughts_kept = True
      known: list[turns_lib.ReadMessage | RecordedTurn] = list(read)
      ids: list[int] = []
      if best is not None:
        num_messages, num_ids = best.ends[prefix.num_turns - 1]
        sampled = best.turns[prefix.num_turns - 1].tokens.tolist()
        ids = best.ids[:num_ids]
        known[:num_messages] = best.messages_to(num_messages, prefix)
    with self._encoding():
      if best is not None:
        try:
          ids += self._template.encode_after(sampled, messages[num_messages:], tools, prefix.rest)
        except template_lib.RejectedMessages:  # no message may follow the turn as it was sampled
          best = None
          known = list(read)
      if best is None:
        ids = self._template.encode(messages, tools)
      self._template.check(ids)
    with self._open():
      kind = ''
      if best is None or not best.is_free_after(prefix.num_turns, agent):
        if self._has_room:
          kind = self._kind_of_chat(read, written, best, prefix)
        origin = _origin(best, prefix)
        best = self._begin(Segment(ids, written, branched_from=origin), agent)
      return self._claim(ids, best, kind, known)

  def plan_prompt(self, prompt: str | Sequence[int], agent: ClientAgent = NO_AGENT) -> RequestPlan:
    """Returns the ids for a prompt that is a text or ids: a recorded text stays the ids it was.

    Control tokens of a text are tokens. Raises Closed, and TooLong.
    """
    if isinstance(prompt, str):
      prompt = self._template.without_bos(prompt)
    decode = self._template.tokenizer.decode
    with self._open():
      best, prefix = self._longest_of_prompt(prompt, agent)
      if self._recover(_PLAIN, prefix, lambda turn: turn.end_in_prompt(prompt, decode)):
        best, prefix = self._longest_of_prompt(prompt, agent)
      ids: list[int] = []
      new = prompt
      if best is not None:
        ids = best.ids[: best.ends[prefix.num_turns - 1][1]]
        new = prompt[len(ids) :]
        if isinstance(prompt, str):
          rest = prompt[prefix.size :]
          tail = best.texts[prefix.num_turns - 1].tail
          is_written = len(os.path.commonprefix([rest, tail]))  # by the client, too
          new = rest[is_written:]
    with self._encoding():
      if best is None:
        ids = self._template.encode_prompt(new)
      else:
        ids += self._template.encode_more(new)
      self._template.check(ids)
    with self._open():
      kind = ''
      if best is None or not best.is_free_after(prefix.num_turns, agent):
        kind = self._kind_of_prompt(prompt, best)
        origin = _origin(best, prefix)
        new_segment = Segment(ids, _PLAIN, first_prompt=prompt, branched_from=origin)
        best = self._begin(new_segment, agent)
      return self._claim(ids, best, kind, (), prompt)

  def _plain_segments(self) -> list[Segment]:
    return [segment for segment in self._segments if segment.tools == _PLAIN]

  def _longest_of_chat(
      self, messages: Sequence[turns_lib.ReadMessage], tools: str, agent: ClientAgent
  ) -> tuple[Segment | None, Prefix]:
    segments = [segment for segment in self._segments if segment.tools == tools]
    keeps = self._recording.keeps_thoughts
    prefixes = [segment.prefix(messages, keeps) for segment in segments]
    return self._longest(segments, prefixes, agent)

  def _longest_of_prompt(
      self, prompt: str | Sequence[int], agent: ClientAgent
  ) -> tuple[Segment | None, Prefix]:
    segments = self._plain_segments()
    prefixes = [segment.prefix_of_prompt(prompt) for segment in segments]
    return self._longest(segments, prefixes, agent)

  def _longest(
      self, segments: Sequence[Segment], prefixes: Sequence[Prefix], agent: ClientAgent
  ) -> tuple[Segment | None, Prefix]:
    """Returns the segment whose turns reach furthest into a request, and its prefix.

    A branch has the turns before it in its prompt, so the number of its turns tells nothing. Of
    equal ones, a segment is preferred whose thoughts came back, without text after the last turn,
    and that ends there, is not being continued and can be the agent's.
    """
    best = None
    longest = Prefix()
    best_rank = (0, 0, 0, False)
    for segment, prefix in zip(segments, prefixes):
      is_free = segment.is_free_after(prefix.num_turns, agent)
      rank = (prefix.size, -len(prefix.lacks_thoughts), -len(prefix.rest), is_free)
      if prefix.num_turns and (best is None or rank > best_rank):
        best = segment
        longest = prefix
        best_rank = rank
    return best, longest

  def _kind_of_chat(
      self,
      messages: Sequence[turns_lib.ReadMessage],
      tools: str,
      best: Segment | None,
      prefix: Prefix,
  ) -> str:
    """Returns the count of a conversation that continues no segment at its end.

    It has a rewritten history if it holds a turn that is not recorded where it stands.
    """
    if best is not None:
      num_messages, _ = best.ends[prefix.num_turns - 1]
      if all(message.role != 'assistant' for message in messages[num_messages:]):
        return 'branched'
    for segment in self._segments:
      equal = segment.prefix(messages, keeps_thoughts=True).num_messages
      is_prompt = equal == segment.num_prompt_messages and segment.tools != _PLAIN
      if is_prompt and len(messages) == equal and segment.tools == tools:
        return 'branched'  # another sample of the same prompt
      if is_prompt and messages[equal:] and messages[equal].role == 'assistant':
        self._show_difference(segment, messages)
        return 'rewritten'
    for message in messages:
      owner = self._index.find(message)
      if owner is not None:
        self._show_difference(owner, messages)
        return 'rewritten'
    return 'conversations'

  def _show_difference(self, segment: Segment, messages: Sequence[turns_lib.ReadMessage]) -> None:
    """Sets `difference` for the first rewritten history."""
    if self.difference:
      return
    place = segment.prefix(messages, self._recording.keeps_thoughts).num_messages
    if place >= min(len(messages), len(segment.messages)):
      self.difference = 'its tools have changed'
      return
    known = segment.messages[place]
    if isinstance(known, RecordedTurn):
      known = known.forms[-1]
    difference = turns_lib.first_difference(known, messages[place])
    self.difference = f'in message {place + 1} {difference}'

  def _kind_of_prompt(self, prompt: str | Sequence[int], best: Segment | None) -> str:
    """Returns the count of a prompt without messages that continues no segment at its end."""
    if best is not None:
      return 'branched'
    for segment in self._plain_segments():
      first = segment.first_prompt
      if type(first) is type(prompt) and prompt[: len(first)] == first:
        return 'branched' if len(prompt) == len(first) else 'rewritten'
    return 'conversations'

  @property
  def _has_room(self) -> bool:
    """Whether a segment that begins will be recorded."""
    return len(self._segments) < self._recording.max_rows

  def fork(self, plan: RequestPlan) -> RequestPlan:
    """Returns a plan for another sample of the same prompt, in a separate segment."""
    with self._lock:
      return self._claim_sample(plan)

  def _claim_sample(self, plan: RequestPlan) -> RequestPlan:
    """Returns `fork`. The lock must be held."""
    segment = plan.segment
    assert segment is not None
    origin = segment.origin_of(plan)
    sample = Segment(
        plan.ids,
        segment.tools,
        self._next_number(),
        first_prompt=plan.prompt,
        branched_from=origin,
        agent=segment.agent,
        parent=segment.parent if origin is None else None,
        wrong_parent=segment.wrong_parent,
    )
    return self._claim(plan.ids, sample, 'branched', plan.messages, plan.prompt)

  def _next_number(self) -> int:
    """Returns the number of a segment that begins."""
    self._num_begun += 1
    return self._num_begun - 1

  def _begin(self, segment: Segment, agent: ClientAgent) -> Segment:
    """Gives a new segment its number, its agent and its parent.

    Choice: an agent has the parent of its first segment, which must have a recorded turn before.
    So no agent can be its own ancestor. A segment that names another parent is recorded without it.
    """
    segment.number = self._next_number()
    segment.agent = agent.name
    own = self._last_segments.get(agent.name)
    parent = own
    if agent.name and own is None:
      parent = self._last_segments.get(agent.parent)
      self._parents[agent.name] = agent.parent if parent is not None else ''
    if agent.parent != self._parents.get(agent.name, ''):
      segment.wrong_parent = agent.parent
    if parent is not None and segment.branched_from is None:
      segment.parent = parent.place
    return segment

  def _claim(
      self,
      ids: list[int],
      segment: Segment,
      kind: str,
      messages: Sequence[turns_lib.ReadMessage | RecordedTurn],
      prompt: str | Sequence[int] = '',
  ) -> RequestPlan:
    """Returns the plan of a request that continues a segment, or begins one of a kind."""
    if not self._has_room:
      kind = ''
    if kind:
      self.counts[kind] += 1
    segment.is_extended = True
    key = self._key
    stream = segment.number if segment.stream is None else segment.stream
    if stream:  # the first has the key of the episode, as one that the engine plays
      key = jax.random.fold_in(key, stream)
    key_data = np.asarray(jax.random.key_data(key))
    num_turns = len(segment.turns)
    return RequestPlan(ids, key_data, segment, kind, messages, prompt, num_turns)

  def abandon(
      self, plan: RequestPlan, tokens: Sequence[int] = (), logp: Sequence[float] = ()
  ) -> None:
    """Ends a request whose client has left, after these tokens of a stream.

    They become a turn when the client sends their text back. Until then the turn is unrecorded.
    """
    with self._lock:
      stream = self._stream_of(plan)
      if stream is not None:
        if stream.is_left:
          return
        self._streams.remove(stream)
      self._abandon(plan, tokens, logp)

  def follow(
      self,
      plan: RequestPlan,
      sent: Callable[[], tuple[list[int], list[float]]],
      cancel: Callable[[], None],
  ) -> None:
    """Notes that the turn of a request is streamed.

    A program may stop reading and leave the connection open, or read more slowly than the turn is
    sampled. So the turn ends where a later request has it end.

    Args:
      plan: of the request.
      sent: returns the tokens that were sent so far, and their log-probs.
      cancel: ends the request.
    """
    with self._lock:
      self._streams.append(_Stream(plan, sent, cancel))

  def leave_streams(self) -> None:
    """Abandons the turns that are still streamed, because the program has ended."""
    with self._lock:
      for stream in list(self._streams):
        if stream.turn is None:
          self._leave(stream)

  def _stream_of(self, plan: RequestPlan) -> _Stream | None:
    return next((stream for stream in self._streams if stream.plan is plan), None)

  def _leave(self, stream: _Stream) -> None:
    """Ends a stream in progress. What the client may have got of it is an unfinished turn."""
    stream.is_left = True
    stream.cancel()
    self._abandon(stream.plan, *stream.sent())

  def _abandon(self, plan: RequestPlan, tokens: Sequence[int], logp: Sequence[float]) -> None:
    segment = plan.segment
    assert segment is not None
    segment.is_extended = False
    segment.stream = self._next_number()  # the next attempt is another sample
    if plan.kind:
      self.counts[plan.kind] -= 1
    if not tokens or self._closed:
      return
    text = self._template.tokenizer.decode(tokens)
    self._unfinished.append(_UnfinishedTurn(plan, list(tokens), list(logp), text))
    self.counts['unrecorded'] += 1
    self._show(plan, tokens)
    logging.log_first_n(
        logging.WARNING,
        'a program ended the stream of a turn early: the turn is recorded only if a later request '
        'has its text. Use `stop` to end turns at a text',
        1,
    )

  def _recover(
      self, tools: str, prefix: Prefix, find_end: Callable[[_UnfinishedTurn], int]
  ) -> bool:
    """Records what a request shows of turns that the client has left, and returns whether it does.

    Such a turn must surpass the `prefix` of the recorded ones. `find_end` returns the number of
    tokens that the client has kept.
    """
    is_shorter = self._end_stream(tools, prefix, find_end)
    return self._adopt(tools, prefix, find_end) or is_shorter

  def _end_stream(
      self, tools: str, prefix: Prefix, find_end: Callable[[_UnfinishedTurn], int]
  ) -> bool:
    """Ends the streamed turn of which a request has a part; returns whether it was recorded."""
    decode = self._template.tokenizer.decode
    for stream in reversed(list(self._streams)):
      turn = stream.turn
      segment = stream.plan.segment
      assert segment is not None
      if turn is not None and segment.turns[-1] is not turn:
        self._streams.remove(stream)  # another turn follows it
        continue
      if stream.is_left or segment.tools != tools:
        continue
      tokens, logp = stream.sent() if turn is None else (turn.tokens.tolist(), turn.logp.tolist())
      end = find_end(_UnfinishedTurn(stream.plan, tokens, logp, decode(tokens)))
      if not end or self._is_known(stream.plan, tokens[:end], prefix):
        continue
      if turn is None:
        self._leave(stream)
        return False
      if not segment.is_extended:
        self._shorten(stream.plan, turn, end)
        self._streams.remove(stream)
        return True
    return False

  def _is_known(self, plan: RequestPlan, tokens: Sequence[int], prefix: Prefix) -> bool:
    """Whether the recorded turns reach as far into a request as a turn with these tokens."""
    if plan.messages:
      return prefix.size > len(plan.messages) and not prefix.rest
    kept = self._template.tokenizer.decode(tokens) if isinstance(plan.prompt, str) else tokens
    return prefix.size >= len(plan.prompt) + len(kept)

  def _shorten(self, plan: RequestPlan, turn: types.Turn, end: int) -> None:
    """Cuts the last turn of a segment to its first `end` tokens."""
    segment = plan.segment
    assert segment is not None
    del segment.ids[len(segment.ids) - len(turn.tokens) + end :]
    turn.tokens = turn.tokens[:end]
    turn.logp = turn.logp[:end]
    tokens = turn.tokens.tolist()
    text = self._template.tokenizer.decode(tokens)
    if segment.tools == _PLAIN:
      segment.texts.pop()
      start = segment.ends[-2][1] if len(segment.ends) > 1 else 0
      segment.texts.append(self._plain_turn(plan, plan.ids[start:], tokens, text))
    said = turns_lib.ReadMessage({'role': 'assistant', 'content': text})
    self._index.add([said], segment)
    segment.messages[-1] = RecordedTurn([said], self._text_of(plan, tokens))
    segment.ends[-1] = (len(segment.messages), len(segment.ids))
    segment.num_cut -= segment.ends_cut
    segment.ends_cut = False
    if self._last_plan is plan:
      self._show(plan, tokens)

  def _adopt(self, tools: str, prefix: Prefix, find_end: Callable[[_UnfinishedTurn], int]) -> bool:
    """Records the unfinished turns that a request shows, see `_recover`."""
    adopts = False
    for turn in list(self._unfinished):
      plan = turn.plan
      segment = plan.segment
      assert segment is not None
      end = find_end(turn) if segment.tools == tools else 0
      tokens = turn.tokens[:end]
      if not end or self._is_known(plan, tokens, prefix):
        continue
      adopts = True
      if segment.is_extended or len(segment.turns) > plan.num_turns:  # by another request
        plan = self._claim_sample(plan)
      elif plan.kind:
        self.counts[plan.kind] += 1
      self._unfinished.remove(turn)
      self.counts['unrecorded'] -= 1
      said = {'role': 'assistant', 'content': self._template.tokenizer.decode(tokens)}
      self._record(plan, tokens, turn.logp[:end], [said])
    return adopts

  def record(
      self,
      plan: RequestPlan,
      tokens: Sequence[int],
      logp: Sequence[float],
      answers: Sequence[Message],  # messages with which the client may send the turn back
      was_cut: bool = False,
      action: str = 'other',
      text: str | None = None,  # the turn up to its stop string; None: all of it
  ) -> int | None:
    """Adds a turn; returns its number in the session, from 1.

    Returns None for a turn that is not recorded, because the session has too many rows.
    """
    with self._open():
      stream = self._stream_of(plan)
      if stream is not None and stream.is_left:
        return None
      number = self._record(plan, tokens, logp, answers, was_cut, action, text)
      if stream is not None and number is not None:
        stream.turn = self._turns[-1]
      return number

  def _record(
      self,
      plan: RequestPlan,
      tokens: Sequence[int],
      logp: Sequence[float],
      answers: Sequence[Message],
      was_cut: bool = False,
      action: str = 'other',
      text: str | None = None,
  ) -> int | None:
    forms = []
    for answer in answers:
      with contextlib.suppress(RecursionError):  # arguments that are nested too deeply
        forms.append(turns_lib.ReadMessage(answer))
    turn = types.Turn(
        tokens=np.array(tokens, np.int32), logp=np.array(logp, np.float32), action=action
    )
    segment = plan.segment
    assert segment is not None
    self._show(plan, turn.tokens)
    segment.is_extended = False
    if not segment.turns and not self._has_room:
      self.counts['unrecorded'] += 1
      return None
    new = plan.ids[len(segment.ids) :]
    if segment.tools == _PLAIN:
      segment.texts.append(self._plain_turn(plan, new, tokens, text))
    if segment.turns:
      segment.turns[-1].observation = np.array(new, np.int32)
    else:
      self._segments.append(segment)
      self.counts['wrong_parents'] += segment.wrong_parent != ''
    segment.turns.append(turn)
    if segment.agent:
      self._last_segments[segment.agent] = segment
    segment.ids += new + turn.tokens.tolist()
    self._index.add(forms, segment)
    segment.messages = [*plan.messages, RecordedTurn(forms, self._last_text)]
    segment.ends.append((len(segment.messages), len(segment.ids)))
    self._turns.append(turn)
    segment.num_cut += was_cut
    segment.ends_cut = was_cut
    return len(self._turns)

  def _show(self, plan: RequestPlan, tokens: tokenizer_lib.Ids) -> None:
    """Keeps the last turn, which a reward reads."""
    self._last_text = self._text_of(plan, tokens)
    self._last_plan = plan

  def _text_of(self, plan: RequestPlan, tokens: tokenizer_lib.Ids) -> str:
    """Returns a turn as an environment reads it."""
    tokenizer = self._template.tokenizer
    text = tokenizer.opening(plan.ids)
    if len(tokens):
      text += episode_lib.action_text(tokenizer, np.asarray(tokens))
    return text

  def _text_before(self, plan: RequestPlan) -> str:
    """Returns the text between a conversation's prompt and its next turn."""
    if plan.prompt:
      assert plan.segment is not None
      new = plan.prompt[len(plan.segment.first_prompt) :]
      return new if isinstance(new, str) else self._template.tokenizer.decode(new)
    texts = []
    for message in plan.messages:
      if isinstance(message, RecordedTurn):
        texts += [message.text, message.rest]
      elif texts:
        texts.append(message.content)
    return ''.join(texts)

  def _plain_turn(
      self, plan: RequestPlan, new: list[int], tokens: Sequence[int], text: str | None
  ) -> PlainTurn:
    """Returns the text with which a client continues a turn after the `new` ids of its prompt."""
    assert plan.segment is not None
    before = PlainTurn('', 0, '')
    if plan.segment.texts:
      before = plan.segment.texts[-1]
    decode = self._template.tokenizer.decode
    if isinstance(plan.prompt, str):
      sent = plan.prompt[before.size :]
    elif plan.segment.texts:
      sent = before.tail + decode(new)
    else:
      sent = self._template.shown(new)
    whole = decode(tokens)
    if not text or not whole.startswith(text):  # no text: every prompt would continue it
      text = whole
    return PlainTurn(sent + text, before.size + len(sent) + len(text), whole[len(text) :])

  def reward(
      self,
      value: float,
      turn: int | None = None,
      metrics: Mapping[str, float] | None = None,
      agent: str | None = None,
  ) -> None:
    """Sets the reward of a turn (from 1), of an agent in place of the whole's, or of the whole.

    UserError: there is no such turn or agent, or agents have no rewards of their own.
    """
    with self._open():
      if agent is not None:
        self._check_agent(agent, turn)
        self._agent_rewards[agent] = value
      elif turn is None:
        self._final_reward = value
        self.has_reward = True
      elif 1 <= turn <= self.num_turns:
        self._turns[turn - 1].reward = value
        self.has_reward = True
      else:
        raise types.UserError(f'turn={turn}: use a number from 1 to {self.num_turns}')
      self._metrics |= metrics or {}

  def _check_agent(self, agent: str, turn: int | None) -> None:
    """Raises a UserError unless an agent can have a reward in place of the episode's."""
    shown = f'session={agent[:80]!r}'
    if turn is not None:
      raise types.UserError(f'{shown}, turn={turn}: a reward is that of one of them: leave one out')
    if not self._recording.credits_branches:
      raise types.UserError(
          f"{shown}: with config.env.branch_credit='episode' all rows have the reward of the "
          "episode: set it to 'program', or leave out `session`"
      )
    if agent not in self._last_segments:
      known = ', '.join(map(repr, self._last_segments)) or 'none'
      raise types.UserError(
          f'{shown}: no recorded turn has this X-Session-Id: use one of those that have ({known})'
      )

  def measure(self, metrics: Mapping[str, float]) -> None:
    """Sets metrics of the whole."""
    with self._open():
      self._metrics |= metrics

  def close(self) -> None:
    """Ends the session: nothing is recorded any more."""
    with self._lock:
      self._closed = True

  def episodes(
      self, task: types.Task, group: int, failed: bool = False, first_is_whole: bool = False
  ) -> list[types.Episode]:
    """Returns a row per segment, the longest one first; one without turns if there is none.

    Choice: each segment's last turn receives the episode's reward, so that each row has it once.
    The rewards of single turns stay on their turns. Every row's `whole_score` counts each of these
    rewards once. The reward of an agent replaces the episode's on the last turn of each of its
    segments, and no `whole_score` counts it. With `first_is_whole` the rewards of the other
    segments are also on the first row's last turn, whose score is the session's.
    """
    with self._lock:
      segments = sorted(self._segments, key=lambda segment: -len(segment.turns))
      whole_score = sum((turn.reward for turn in self._turns), self._final_reward or 0.0)
      rows = []
      for segment in segments or [Segment([], '')]:
        turns = [dataclasses.replace(turn) for turn in segment.turns]
        reward = self._final_reward
        if not first_is_whole:
          reward = self._agent_rewards.get(segment.agent, reward)
        if turns and reward is not None:
          turns[-1].reward += reward
        counts = episode_lib.count_turns(turns, self._template.tokenizer)
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
                truncated=self.counts['too_long'] > 0 or segment.ends_cut,
                failed=failed or not turns,
                metrics=dict(self._metrics),
                counts=counts,
                whole_score=whole_score,
                segment=segment.number,
                branched_from=segment.branched_from,
                agent_id=segment.agent,
                parent=segment.parent,
            )
        )
      if first_is_whole and segments:
        others = [turn.reward for segment in segments[1:] for turn in segment.turns]
        rows[0].turns[-1].reward += sum(others)
      if len(rows) == 1 and not self._agent_rewards:
        rows[0].whole_score = rows[0].score  # exactly, however sums are rounded
      return rows
