"""Messages to token ids: whole conversations, and what follows a turn that was sampled.

A sampled turn is never encoded again: `encode_after` gives the ids between its last token and the
next turn. No text of a message becomes a control token, whatever it looks like. An added token that
is not special, such as Qwen3's <think>, is one in an assistant's turn and in the prompt, as in
`chat.encode_prompt`. What tools and users say after that is plain text, as in `chat.Framing`.
"""

from collections.abc import Mapping
from collections.abc import Sequence
import math
import re
from typing import Any

from stppo_jax import tokenizer as chat
from stppo_jax.envs import tool_calls

Message = Mapping[str, Any]
_ANSWER = 'The-agent-says-this'
# Two code points that are no characters: text between them is the number of a control token.
_OPEN, _CLOSE = '\ufdd0', '\ufdd1'
_RESULT = re.compile('(<tool_response>)(.*)(</tool_response>)', re.DOTALL)
_MARKED = re.compile(f'{_OPEN}(\\d+){_CLOSE}')


class TooLong(ValueError):
  """A text is longer than the tokens that fit could be; it was not encoded."""


class Template:
  """A tokenizer's chat template; without one, messages are texts that follow each other.

  Then the first message is the prompt, and those after a turn are appended to it as the observation
  of an environment with `frame = 'inline'` is: the form that the embedded model was trained in.
  """

  def __init__(
      self,
      tokenizer: chat.Tokenizer,
      max_tokens: int,
      tool_form: str = 'hermes',
      max_chars: float = math.inf,  # of a prompt; TooLong is raised for a longer one
  ):
    self.tokenizer, self._tool_form = tokenizer, tool_form
    self._max_tokens, self._max_chars = max_tokens, max_chars
    added = tokenizer.control_library.get_added_tokens_decoder()
    self._controls = [token.content for token in added.values() if token.content]
    self._any = _pattern(self._controls)
    self._special = _pattern([t.content for t in added.values() if t.content and t.special])

  def encode(self, messages: Sequence[Message], tools: Sequence[Any] = ()) -> list[int]:
    """Returns the ids of a conversation up to where the next turn begins.

    Raises ValueError: the template refuses these messages.
    """
    if self.tokenizer.render is not None:
      return self._encode_rendered(self._render(messages, tools))
    ids: list[int] = []
    runs = list(_runs([self._with_calls(message, tools) for message in messages]))
    self._check_length(sum(len(text) for _, text in runs))
    for after_turn, text in runs:
      ids += self._encode_inline(text) if after_turn else self.tokenizer.encode(text)
    return ids

  def encode_prompt(self, prompt: str | Sequence[int]) -> list[int]:
    """Returns the ids of a prompt that is no chat. Control tokens of a text are tokens."""
    self._check_length(len(prompt))
    return self.tokenizer.encode(prompt, control=True) if isinstance(prompt, str) else list(prompt)

  def encode_after(
      self, turn: Sequence[int], messages: Sequence[Message], tools: Sequence[Any] = ()
  ) -> list[int]:
    """Returns the ids that follow a sampled `turn` when these messages come after it.

    The template's end of a turn is left out if the turn has it. ValueError as in `encode`.
    """
    if self.tokenizer.render is None:
      return self._encode_inline(''.join(message['content'] for message in messages))
    asked = [{'role': 'user', 'content': 'Q'}, {'role': 'assistant', 'content': _ANSWER}]
    before, found, after = self._render([*asked, *messages], tools).rpartition(_ANSWER)
    if not found or _ANSWER in before:
      raise ValueError('the chat template does not show an assistant turn as it is')
    ids = self._encode_rendered(after)
    has_end = len(turn) > 0 and ids and turn[-1] in self.tokenizer.eos_ids and turn[-1] == ids[0]
    return ids[1:] if has_end else ids

  def _check_length(self, num_chars: int) -> None:
    if num_chars > self._max_chars:
      raise TooLong(f'the prompt has {num_chars} characters, and {self._max_tokens} tokens fit')

  def _with_calls(self, message: Message, tools: Sequence[Any]) -> Message:
    """Returns a message whose content has its calls, as the agent would have written them."""
    if not message.get('tool_calls'):
      return message
    form = tool_calls.make_form(self._tool_form, tools)
    calls = [call['function'] for call in message['tool_calls']]
    written = [form.write(tool_calls.Call(call['name'], call['arguments'])) for call in calls]
    return {'role': message['role'], 'content': ''.join([message['content'], *written])}

  def _encode_inline(self, text: str) -> list[int]:
    return chat.encode_observation(self.tokenizer, text, self._max_tokens) if text else []

  def _render(self, messages, tools):
    assert self.tokenizer.render is not None
    try:  # marking too, for what is nested too deeply
      more = {'tools': self._marked(list(tools), self._any)} if tools else {}
      return self.tokenizer.render(self._safe(messages), **more)
    except Exception as error:  # a template may raise anything
      raise ValueError(f'the chat template refuses the messages ({error})') from error

  def _safe(self, messages) -> list[Any]:
    """Marks what must not become a token. A template sees an agent's own </think>."""
    safe, is_prompt = [], True
    for message in messages:
      is_turn = message['role'] == 'assistant'
      is_prompt = is_prompt and not is_turn
      may_hold = is_turn or (is_prompt and message['role'] != 'tool')
      marked = self._marked(message, self._special if may_hold else self._any)
      if message['role'] == 'user' and isinstance(message['content'], str):
        result = _RESULT.fullmatch(message['content'])
        if result:  # Qwen3's template tells by its tags that no user asks
          inner = self._marked(result[2], self._any)
          marked = {**marked, 'content': result[1] + inner + result[3]}
      safe.append(marked)
    return safe

  def _marked(self, value: Any, pattern: re.Pattern[str]) -> Any:
    """Marks the texts of tokens in all strings of a JSON value."""
    if isinstance(value, str):
      text = value.replace(_OPEN, '?').replace(_CLOSE, '?')
      return pattern.sub(lambda found: f'{_OPEN}{self._controls.index(found[0])}{_CLOSE}', text)
    if isinstance(value, Mapping):
      return {self._marked(k, pattern): self._marked(v, pattern) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
      return [self._marked(item, pattern) for item in value]
    return value

  def _encode_rendered(self, text: str) -> list[int]:
    """Encodes unmarked added tokens as such, and each text between two of them as one."""
    self._check_length(len(text))
    library, ids, end = self.tokenizer.control_library, [], 0
    encoding = library.encode(chat.valid(text), add_special_tokens=False)
    for token, (start, stop) in zip(encoding.ids, encoding.offsets):
      if token in self.tokenizer.added_ids:
        ids += [*self._encode_plain(text[end:start]), token]
        end = stop
    return ids + self._encode_plain(text[end:])

  def _encode_plain(self, text: str) -> list[int]:
    unmarked = _MARKED.sub(lambda found: self._controls[int(found[1])], text)
    return self.tokenizer.encode_plain(unmarked) if text else []


def _pattern(texts: Sequence[str]) -> re.Pattern[str]:
  """Returns what finds any of the texts, the longest first."""
  longest_first = sorted(texts, key=len, reverse=True)
  return re.compile('|'.join(map(re.escape, longest_first)) or r'(?!)')


def _runs(messages):
  """Yields (whether it follows a turn, text) of the messages, joined between turns."""
  text, after_turn = '', False
  for message in messages:
    if message['role'] == 'assistant':
      if text:
        yield after_turn, text
      yield False, message['content']
      text, after_turn = '', True
    else:
      text += message['content']
  if text:
    yield after_turn, text
