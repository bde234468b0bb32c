"""Messages to token ids: whole conversations, and the ids that follow a sampled turn.

A sampled turn is never encoded again: `encode_after` gives the ids between its last token and the
next turn. No text of a message becomes a control token. An added token that is not special, such as
Qwen3's <think>, stays a token in a turn of the assistant and in the prompt, as in
`tokenizer.encode_prompt`. Texts of tools and users after that are plain text, as in
`tokenizer.Framing`.

What a chat template leaves out or rejects is said by a text, as in an environment: the first
message of the user declares the tools, a call is written into its turn, and results and system
messages are the user's.
"""

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
from collections.abc import Set
import functools
import hashlib
import itertools
import math
import re
from typing import Any
from typing import NamedTuple

from absl import logging

from stppo_jax.text import tokenizer as tokenizer_lib
from stppo_jax.text import tool_calls

Message = Mapping[str, Any]
_BEGINNING = 8  # characters per token that fits: only so many are encoded if they do not fit
_MARGIN = 1.125  # tokens of a beginning may differ from those of the whole text near its end
_PROBE = 'The-agent-writes-this'
_SEEN = 'The-tool-says-this'
_SEEN_LATER = 'It-says-this-later'
_LONG_ID = 'call_0123456789abcdef01234567'
_SHORT_ID = re.compile('[a-zA-Z0-9]{9}')
_RESULT = re.compile('(<tool_response>)(.*)(</tool_response>)', re.DOTALL)


class TooLong(ValueError):
  """A text has more tokens than fit. Not all of it may have been encoded."""


class RejectedMessages(ValueError):
  """The chat template rejects the messages."""


class _Needs(NamedTuple):
  """What a chat template needs to show the result of a call."""

  short_id: bool
  name: bool


class _Gaps(NamedTuple):
  """What a chat template leaves out or rejects, so that texts of the messages must say it."""

  tools: bool = False
  calls: bool = False  # in the form in which they are read
  results: bool = False  # in a conversation
  later_results: bool = False  # after a turn whose text is known, and not its calls
  first_system: bool = False
  later_system: bool = False
  short_ids: bool = False  # calls and results need ids of nine letters and digits, as for Mistral
  names: bool = False  # a result needs the name of its tool

  def includes(self, message: Message, position: int, after_turn: bool) -> bool:
    """Returns whether a message is a result or a system message that the template does not show."""
    if message['role'] == 'tool':
      return self.later_results if after_turn else self.results
    if message['role'] == 'system':
      return self.later_system if position else self.first_system
    return False


def _with_calls(message: Message, form: tool_calls.Form) -> Message:
  """Returns a message whose content has its calls, as the agent would have written them."""
  message = dict(message)
  for call in message.pop('tool_calls', None) or ():
    function = call['function']
    message['content'] += form.write(tool_calls.Call(function['name'], function['arguments']))
  return message


def _short_id(name: str) -> str:
  """Returns an id of nine letters and digits, which is the same for equal ids."""
  if _SHORT_ID.fullmatch(name):
    return name
  return hashlib.sha256(name.encode('utf-8', 'replace')).hexdigest()[:9]


def _as_user(messages: Sequence[Message], hidden: Set[int]) -> list[Message]:
  """Returns messages in which those at hidden positions are the user's.

  They are joined with their neighbours of the user, because a template may want turns to alternate.
  """
  joined: list[Message] = []
  is_users = lambda i: i in hidden or messages[i]['role'] == 'user'
  for _, run in itertools.groupby(range(len(messages)), is_users):
    positions = list(run)
    together = [messages[i] for i in positions]
    if not hidden.isdisjoint(positions):
      texts = [message['content'] for message in together]
      together = [{'role': 'user', 'content': '\n\n'.join(texts)}]
    joined += together
  return joined


class Template:
  """A tokenizer's chat template. Without a template, messages are texts that follow each other.

  Then the first message is the prompt, and messages after a turn are appended to it like the
  observation of an environment with `frame = 'inline'`. The embedded model was trained like that.
  """

  def __init__(
      self,
      tokenizer: tokenizer_lib.Tokenizer,
      max_tokens: int,
      tool_form: str = 'hermes',
      vocab_size: float = math.inf,  # the model's, which may be larger than the tokenizer's
      limits_prompts: bool = False,  # True: TooLong for a text of more than `max_tokens`
  ):
    self.tokenizer = tokenizer
    self._tool_form = tool_form
    self._max_tokens = max_tokens
    self._limits_prompts = limits_prompts
    self._vocab_size = vocab_size

  def encode(
      self, messages: Sequence[Message], tools: Sequence[Mapping[str, object]] = ()
  ) -> list[int]:
    """Returns the ids of a conversation up to where the next turn begins.

    Raises ValueError: the template refuses these messages.
    """
    if self.tokenizer.render is not None:
      written = self.written(messages, tools)
      return self._encode_rendered(self._render(written, tools))
    if tools:
      logging.log_first_n(
          logging.WARNING,
          'the model has no chat template: it sees the tools of a request only if a message '
          'describes them',
          1,
      )
    inline = self.written(messages, tools, declares=False)
    contents = [message['content'] for message in inline]
    self._check_length(''.join(contents), self.tokenizer.encode)
    ids: list[int] = []
    runs = itertools.groupby(inline, lambda message: message['role'] == 'assistant')
    for number, (is_turn, run) in enumerate(runs):
      texts = [message['content'] for message in run]
      if is_turn:
        for text in texts:
          ids += self.tokenizer.encode(text)
      elif number == 0:
        ids += self.tokenizer.begin(self.tokenizer.encode(''.join(texts)))
      else:  # between turns
        ids += self._encode_inline(''.join(texts))
    return ids

  def text(
      self,
      messages: Sequence[Message],
      tools: Sequence[Mapping[str, object]] = (),
      generation_prompt: bool = True,
  ) -> str:
    """Returns the template's text of `written` messages, for `Tokenizer.encode_marked`.

    Raises ValueError: the template refuses these messages.
    """
    return self._render(messages, tools, add_generation_prompt=generation_prompt)

  def encode_prompt(self, prompt: str | Sequence[int]) -> list[int]:
    """Returns the ids of a prompt that is not a chat. Control tokens of a text are tokens.

    A text gets the tokens that begin one, unless it has them. Ids stay as they are.
    """
    if isinstance(prompt, str):
      return self.tokenizer.begin(self.encode_more(prompt))
    return self.encode_more(prompt)

  def encode_more(self, prompt: str | Sequence[int]) -> list[int]:
    """Returns the ids of a later part of such a prompt."""
    if isinstance(prompt, str):
      encode = functools.partial(self.tokenizer.encode, control=True)
      self._check_length(prompt, encode)
      return encode(prompt)
    return list(prompt)

  def without_bos(self, text: str) -> str:
    """Returns a text prompt without the tokens that `encode_prompt` adds."""
    return text.removeprefix(self.tokenizer.decode(self.tokenizer.bos_ids))

  def shown(self, ids: Sequence[int]) -> str:
    """Returns the text of ids, as `without_bos`."""
    return self.without_bos(self.tokenizer.decode(ids))

  def encode_after(
      self,
      turn: list[int],
      messages: Sequence[Message],
      tools: Sequence[Mapping[str, object]] = (),
      rest: str = '',  # the client's text after the turn, in the same message
  ) -> list[int]:
    """Returns the ids that follow a sampled `turn` when these messages come after it.

    The template's end of a turn is left out if the turn has it. A `rest` after such an end is a
    separate message. ValueError as in `encode`.
    """
    if self.tokenizer.render is None:
      texts = [message['content'] for message in self.written(messages, tools, declares=False)]
      return self._encode_inline(rest + ''.join(texts))
    question = {'role': 'user', 'content': 'Q'}
    probe = {'role': 'assistant', 'content': _PROBE}
    if rest and turn[-1:] and turn[-1] in self.tokenizer.eos_ids:
      messages = [{'role': 'assistant', 'content': rest.strip()}, *messages]
    else:
      probe['content'] += rest
    written = self.written([question, probe, *messages], tools)
    text = self._render(written, tools, after_turn=True)
    head, separator, tail = text.rpartition(_PROBE)
    if not separator or _PROBE in head:
      raise ValueError('the chat template does not show an assistant turn as it is')
    ids = self._encode_rendered(tail)
    return self.tokenizer.without_end(ids, turn)

  def check(self, ids: Sequence[int]) -> None:
    """Raises TooLong for a prompt that leaves no room, and ValueError for one that is no text."""
    if len(ids) >= self._max_tokens:
      raise self._too_long(str(len(ids)))
    if not ids:
      raise ValueError('the prompt is empty: send a text, or at least one token id')
    if max(ids) >= self._vocab_size:
      raise ValueError(
          f'the prompt holds the id {max(ids)}, and the model has ids below {self._vocab_size}'
      )

  def _check_length(self, text: str, encode: Callable[[str], list[int]]) -> None:
    """Raises TooLong for a text that is far too long, of which only the beginning is encoded."""
    beginning = text[: self._max_tokens * _BEGINNING]
    if not self._limits_prompts or len(beginning) == len(text):
      return
    least = -(-len(text) // tokenizer_lib.LONGEST_TOKEN)
    if least <= self._max_tokens:
      least = int(len(encode(beginning)) / _MARGIN)
    if least > self._max_tokens:
      raise self._too_long(f'at least {least}')

  def _too_long(self, num_tokens: str) -> TooLong:
    """Returns the error in OpenAI's words, which clients search for."""
    return TooLong(
        f"This model's maximum context length is {self._max_tokens} tokens. However, your messages "
        f'resulted in {num_tokens} tokens. Please reduce the length of the messages.'
    )

  def resolve_results(self, messages: Sequence[Message]) -> list[Message]:
    """Returns messages whose calls and results have the ids and names that the template needs.

    A result belongs to the call with its id, or else to the first call without a result.
    """
    if not (self._gaps.short_ids or self._gaps.names):
      return list(messages)
    resolved: list[Message] = []
    names: dict[str, str] = {}  # ids of the calls without a result, and their tools
    for position, message in enumerate(messages):
      message = dict(message)
      if message.get('tool_calls'):
        calls = []
        names = {}
        for number, call in enumerate(message['tool_calls']):
          name = call.get('id') or f'{position}.{number}'
          name = _short_id(name) if self._gaps.short_ids else name
          names[name] = call['function']['name']
          calls.append({**call, 'id': name})
        message['tool_calls'] = calls
      if message['role'] == 'tool':
        name = message.get('tool_call_id') or next(iter(names), f'{position}')
        name = _short_id(name) if self._gaps.short_ids else name
        message['tool_call_id'] = name
        tool = names.pop(name, '')
        if self._gaps.names:
          message['name'] = message.get('name') or tool or 'tool'
      resolved.append(message)
    return resolved

  def written(
      self,
      messages: Sequence[Message],
      tools: Sequence[Mapping[str, object]] = (),
      declares: bool = True,
  ) -> list[Message]:
    """Returns messages whose texts say which tools there are and what is called.

    Messages stay as they are where the template shows tools and calls. Without `declares` no
    message says which tools there are.
    """
    written = self.resolve_results(messages)
    declares = declares and len(tools) > 0 and self._gaps.tools
    has_calls = any(message.get('tool_calls') for message in written)
    if not declares and not (has_calls and self._gaps.calls):
      return written
    form = tool_calls.make_form(self._tool_form, tools)
    if self._gaps.calls:
      try:
        written = [_with_calls(message, form) for message in written]
      except RecursionError:
        raise ValueError('the arguments of a call are nested too deeply') from None
    first = next((i for i, message in enumerate(written) if message['role'] == 'user'), 0)
    if declares and written[first]['role'] != 'assistant':
      content = form.declare() + written[first]['content']
      written[first] = {**written[first], 'content': content}
    return written

  @functools.cached_property
  def part_separator(self) -> str:
    """The text between the parts of a message, as in vLLM.

    A template that takes lists of parts joins them itself. For other templates vLLM joins them by
    line breaks. Without a template they are joined by nothing.
    """
    if self.tokenizer.render is None:
      return ''
    parts = [{'type': 'text', 'text': text} for text in (_SEEN, _SEEN_LATER)]
    try:
      text = self.tokenizer.render([{'role': 'user', 'content': parts}])
    except Exception:  # a template may raise anything
      return '\n'
    _, is_shown, rest = text.partition(_SEEN)
    between, is_joined, _ = rest.partition(_SEEN_LATER)
    return between if is_shown and is_joined and not between.strip() else '\n'

  @functools.cached_property
  def _gaps(self) -> _Gaps:
    """What texts must say. A template that rejects even a plain conversation has no gap.

    Raises ValueError: it does not show a text.
    """
    if self.tokenizer.render is None:
      return _Gaps(tools=True, calls=True)
    user = tool_calls.PROBE_QUESTION
    said = {'role': 'assistant', 'content': 'A'}
    if not self._shows('Q', [user, said, user]):
      if self._shows('', [user]) and not self._shows('Q', [user]):
        raise ValueError('the chat template shows no text of a user: it may be for lists of parts')
      return _Gaps()
    tool = tool_calls.PROBE_TOOL
    call = tool_calls.PROBE_TURN
    system = {'role': 'system', 'content': _SEEN}
    turn = tool_calls.shown_call(self.tokenizer.render)
    shows_calls = tool_calls.reads(self._tool_form, turn)
    shows_tools = self._shows(tool['function']['name'], [user], tools=[tool])
    if turn and not shows_calls:
      shows_tools = False  # it would ask for calls in its own form
    prompt_needs = self._needs_of_results(call if shows_calls else said)
    later_needs = self._needs_of_results(said)
    gaps = _Gaps(
        tools=not shows_tools,
        calls=not shows_calls,
        results=prompt_needs is None,
        later_results=later_needs is None,
        first_system=not self._shows(_SEEN, [system, user]),
        later_system=not self._shows(_SEEN, [user, said, system, user]),
        short_ids=any(needs.short_id for needs in (prompt_needs, later_needs) if needs),
        names=any(needs.name for needs in (prompt_needs, later_needs) if needs),
    )
    if any(gaps):
      names = [name.replace('_', ' ') for name, is_gap in gaps._asdict().items() if is_gap]
      logging.info(
          'the chat template does not show %s in the form %s: texts of the messages do',
          ', '.join(names),
          self._tool_form,
      )
    return gaps

  def _needs_of_results(self, turn: Message) -> _Needs | None:
    """Returns what results after such a turn need to be shown; None: the template never does.

    An agent calls more than once, so the template must show two calls in a row.
    """
    user = tool_calls.PROBE_QUESTION
    for needs in (
        _Needs(False, False),
        _Needs(False, True),
        _Needs(True, False),
        _Needs(True, True),
    ):
      name = 'probe0001' if needs.short_id else _LONG_ID
      turns = []
      for seen in (_SEEN, _SEEN_LATER):
        result = {'role': 'tool', 'tool_call_id': name, 'content': seen}
        if needs.name:
          result['name'] = tool_calls.PROBE_TOOL['function']['name']
        calls = [{**call, 'id': name} for call in turn.get('tool_calls', ())]
        turns += [{**turn, 'tool_calls': calls} if calls else turn, result]
      if all(self._shows(seen, [user, *turns]) for seen in (_SEEN, _SEEN_LATER)):
        return needs
    return None

  def _shows(self, probe: str, messages: Sequence[Message], **options: Any) -> bool:
    """Whether the template's text of messages has a text."""
    assert self.tokenizer.render is not None
    try:
      return probe in self.tokenizer.render(messages, **options)
    except Exception:  # a template may raise anything
      return False

  def _encode_inline(self, text: str) -> list[int]:
    if not text:
      return []
    self._check_length(text, self.tokenizer.encode)
    return tokenizer_lib.encode_observation(self.tokenizer, text, self._max_tokens)

  def _render(
      self,
      messages: Sequence[Message],
      tools: Sequence[Mapping[str, object]],
      after_turn: bool = False,
      **options: Any,
  ) -> str:
    """Returns the template's text. What it would not show is the user's."""
    gaps = self._gaps
    hidden = {i for i, message in enumerate(messages) if gaps.includes(message, i, after_turn)}
    results = {i for i, message in enumerate(messages) if message['role'] == 'tool'}
    if tools and not gaps.tools:
      options['tools'] = tools
    try:
      return self._render_marked(messages, hidden, options)
    except Exception as error:  # a template may raise anything
      has_calls = any(message.get('tool_calls') for message in messages)
      if results <= hidden and not has_calls:
        raise RejectedMessages(f'the chat template rejects the messages ({error})') from error
      logging.log_first_n(
          logging.WARNING,
          'the chat template rejects the calls and results of a conversation (%s): texts of its '
          'messages show them',
          1,
          error,
      )
    form = tool_calls.make_form(self._tool_form, tools)
    try:
      as_texts = [_with_calls(message, form) for message in messages]
      return self._render_marked(as_texts, hidden | results, options)
    except Exception as error:
      raise RejectedMessages(f'the chat template rejects the messages ({error})') from error

  def _render_marked(
      self, messages: Sequence[Message], hidden: Set[int], options: Mapping[str, object]
  ) -> str:
    """Returns the template's text. Marking raises, too, for values that are nested too deeply."""
    assert self.tokenizer.render is not None
    options = dict(options)
    if 'tools' in options:
      options['tools'] = self.tokenizer.mark(options['tools'])
    return self.tokenizer.render(_as_user(self._mark_messages(messages), hidden), **options)

  def _mark_messages(self, messages: Sequence[Message]) -> list[Message]:
    """Marks texts that must not become a token. A template sees an agent's own </think>."""
    marked_messages = []
    is_prompt = True
    for message in messages:
      is_turn = message['role'] == 'assistant'
      is_prompt = is_prompt and not is_turn
      may_hold_added = is_turn or (is_prompt and message['role'] != 'tool')
      marked = self.tokenizer.mark(message, only_special=may_hold_added)
      result = _RESULT.fullmatch(message['content'])
      if result and message['role'] == 'user':  # Qwen3's template looks for these tags
        inner = self.tokenizer.mark(result[2])
        marked['content'] = result[1] + inner + result[3]
      marked_messages.append(marked)
    return marked_messages

  def _encode_rendered(self, text: str) -> list[int]:
    self._check_length(text, self.tokenizer.encode_marked)
    return self.tokenizer.encode_marked(text)
