"""Recognizes a recorded turn in the message with which a client sends it back.

Frameworks change a turn without changing its meaning: they move thoughts to a field of their own or
drop them, trim white space, write arguments as another JSON text, leave out the text next to a
call, write the call into the text, or append a text. `match` compares such a message with the turn.
"""

import ast
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import functools
import json
import math
import re
from typing import Any
from typing import Generic
from typing import TypeVar

Message = Mapping[str, Any]

_TAGS = re.compile('(<think(?: [^<>]*)?>|</think>)')  # inspect-ai adds attributes
_CALL = re.compile('<tool_call>(.*?)</tool_call>', re.DOTALL)
_WORD = re.compile(r'\S+')
_SHOWN_CHARS = 80  # length of a difference
_HEAD_CHARS = 64  # turns often begin with the same words
Owner = TypeVar('Owner')


@dataclasses.dataclass(frozen=True)
class Match:
  """A message that is a recorded turn."""

  rest: str = ''  # the client's text after the turn, in the same message
  lacks_thoughts: bool = False  # the client has left out the thoughts of the turn


class ReadMessage:
  """A message, of which each view is computed once, when it is needed."""

  def __init__(self, message: Message):
    self.role: str = message['role']
    self.content: str = message['content']
    functions = [call['function'] for call in message.get('tool_calls') or ()]
    self.calls = tuple((call['name'], _write(call['arguments'])) for call in functions)
    content = self.content.strip() if self.role == 'assistant' else self.content
    # Two messages with equal identities are the same. White space around a turn does not count.
    self.identity: tuple[object, ...] = (self.role, content, self.calls)

  @functools.cached_property
  def _parts(self) -> tuple[tuple[str, ...], str]:
    return split_thoughts(self.content)

  @property
  def thoughts(self) -> tuple[str, ...]:
    """The thoughts, with single spaces."""
    return self._parts[0]

  @property
  def text(self) -> str:
    """The content without its thoughts."""
    return self._parts[1]

  @functools.cached_property
  def trimmed(self) -> str:
    """The text without white space around it."""
    return self.text.strip()

  @functools.cached_property
  def words(self) -> list[str]:
    """The text without white space."""
    return self.text.split()

  def __str__(self) -> str:
    calls = [f'{name}({arguments})' for name, arguments in self.calls]
    return ' '.join([self.content.strip(), *calls])


def match(forms: Sequence[ReadMessage], message: ReadMessage) -> Match | None:
  """Returns how a message equals one of the forms of a recorded turn; None: it is another message.

  The forms are the messages that the client got, or could have made of its answer. The closest one
  counts.
  """
  if message.role != 'assistant':
    return None
  if any(form.identity == message.identity for form in forms):
    return Match()
  matches = []
  for form in forms:
    found = _match_form(form, message)
    if found is not None:
      matches.append(found)
  return min(matches, key=lambda found: (found.lacks_thoughts, len(found.rest)), default=None)


def _match_form(form: ReadMessage, message: ReadMessage) -> Match | None:
  are_written = not message.calls and form.calls != ()
  if not are_written and message.calls != form.calls:
    return None
  lacks_thoughts = len(form.thoughts) > 0 and not message.thoughts
  is_same = _unique(message.thoughts) == _unique(form.thoughts)  # inspect-ai repeats a thought
  if not is_same and not lacks_thoughts:
    return None
  if form.calls and not are_written and not message.words:  # only the calls came back
    return Match('', lacks_thoughts)
  is_equal = form.trimmed == message.trimmed
  rest = '' if is_equal else _rest(form.words, message.text)
  if rest is None:
    is_respelled = '<tool_call>' in message.text and _spelled(form) == _spelled(message)
    return Match('', lacks_thoughts) if is_respelled else None
  if are_written:
    return Match('', lacks_thoughts) if _written_calls(rest) == form.calls else None
  has_rest = not rest.isspace() and rest != ''
  if has_rest and (form.calls or not form.words):
    return None
  return Match(rest if has_rest else '', lacks_thoughts)


class TurnIndex(Generic[Owner]):
  """Finds recorded turns among messages, without comparing each turn with each message.

  A message that is a turn has its calls, or begins with the same characters but for white space.
  """

  def __init__(self) -> None:
    self._turns: dict[Any, list[tuple[Sequence[ReadMessage], Owner]]] = {}

  def add(self, forms: Sequence[ReadMessage], owner: Owner) -> None:
    """Adds a turn by the messages with which it may come back."""
    heads = {_head(form) for form in forms} - {''}
    calls = {form.calls for form in forms} - {()}
    for key in (*heads, *calls):
      self._turns.setdefault(key, []).append((forms, owner))

  def find(self, message: ReadMessage) -> Owner | None:
    """Returns the owner of the turn that a message is; None: it is no turn with some content."""
    if message.role != 'assistant':
      return None
    head = _head(message)
    keys: list[Any] = [head[:size] for size in range(1, len(head) + 1)]
    keys += [message.calls, _written_calls(message.text)]
    for key in keys:
      for forms, owner in self._turns.get(key, ()):
        if match(forms, message):
          return owner
    return None


def _head(message: ReadMessage) -> str:
  """Returns the first characters of a text without white space. Calls are spelled in one way."""
  return ''.join(_spelled(message))[:_HEAD_CHARS]


def _unique(thoughts: Sequence[str]) -> list[str]:
  return list(dict.fromkeys(thoughts))


def _written_calls(text: str) -> tuple[tuple[str, str], ...]:
  """Returns the calls in a text, as smolagents' ToolCallingAgent writes those of a turn."""
  before, prefix, written = text.partition('Calling tools:')
  if not prefix or before.strip():
    return ()
  try:
    functions = [call['function'] for call in ast.literal_eval(written.strip())]
    return tuple((function['name'], _write(function['arguments'])) for function in functions)
  except (KeyError, MemoryError, RecursionError, SyntaxError, TypeError, ValueError):
    return ()


def _spelled(message: ReadMessage) -> list[str]:
  """Returns the words of a text whose calls are spelled in one way. Qwen-Agent parses them."""

  def spell(call: re.Match[str]) -> str:
    try:
      return f'<tool_call>{_write(json.loads(call[1]))}</tool_call>'
    except (RecursionError, ValueError):
      return call[0]

  return _CALL.sub(spell, message.text).split()


def _rest(words: Sequence[str], text: str) -> str | None:
  """Returns the text after these words; None: it does not begin with them.

  The last word may be followed by another character of its kind only where it is no letter or
  digit, so that 'Par' is not the beginning of 'Paris'.
  """
  end = 0
  found = _WORD.finditer(text)
  for number, word in enumerate(words, start=1):
    place = next(found, None)
    if place is None or not place[0].startswith(word):
      return None
    end = place.start() + len(word)
    is_cut = end < place.end()
    if is_cut and number < len(words):
      return None
    if is_cut and word[-1].isalnum() and text[end].isalnum():
      return None
  return text[end:]


def split_thoughts(text: str) -> tuple[tuple[str, ...], str]:
  """Returns (thoughts with single spaces, the other text) of a turn, in linear time.

  Empty thoughts are left out. A turn may begin inside a thought, whose tag the prompt had, and it
  may end inside one.
  """
  thoughts = []
  texts = []
  inside = False
  for part in _TAGS.split(text):
    if part == '</think>':
      if not inside and not thoughts:
        thoughts.append(''.join(texts))
        texts.clear()
      inside = False
    elif _TAGS.fullmatch(part):
      inside = True
    elif inside:
      thoughts.append(part)
    else:
      texts.append(part)
  words = [' '.join(thought.split()) for thought in thoughts]
  return tuple(filter(None, words)), ''.join(texts)


def join_thought(thought: str, content: str) -> str:
  """Returns the content of a turn whose thought is in a separate field.

  A thought without white space around it gets the line breaks with which Qwen3 writes it.
  """
  if not thought.strip() or '</think>' in content:
    return content
  if thought == thought.strip():
    return f'<think>\n{thought}\n</think>\n\n{content}'
  return f'<think>{thought}</think>{content}'


def first_difference(recorded: ReadMessage, message: ReadMessage) -> str:
  """Returns one line that shows where a message begins to differ from the recorded one."""
  old = str(recorded)
  new = str(message)
  if recorded.role != message.role:
    old = f'{recorded.role}: {old}'
    new = f'{message.role}: {new}'
  pairs = enumerate(zip(old, new))
  start = next((i for i, (a, b) in pairs if a != b), min(len(old), len(new)))
  return f'{old[start:][:_SHOWN_CHARS]!r} came back as {new[start:][:_SHOWN_CHARS]!r}'


def _write(value: object) -> str:
  """Returns the same text for values that are equal as JSON: 2 and 2.0, or a JavaScript number.

  The JSON library nests deeper than a recursive function of Python.
  """
  text = json.dumps(value)
  plain = json.loads(text, parse_int=_plain_number, parse_float=_plain_number)
  return json.dumps(plain, sort_keys=True, ensure_ascii=False)


def _plain_number(digits: str) -> float | str:
  number = float(digits) + 0.0  # -0.0 is 0.0
  return digits if math.isinf(number) else number  # no double holds it
