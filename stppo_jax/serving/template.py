"""Messages to token ids: whole conversations, and what follows a turn that was sampled.

A sampled turn is never encoded again: `encode_after` gives the ids between its last token and the
next turn. No text of a message becomes a control token, whatever it looks like.
"""

from collections.abc import Mapping
from collections.abc import Sequence
import functools
import re
from typing import Any

from stppo_jax import chat
from stppo_jax.envs import tool_calls

Message = dict[str, Any]
_ANSWER = 'The-agent-says-this'
# Two code points that are no characters: text between them is the number of a control token.
_OPEN, _CLOSE = '\ufdd0', '\ufdd1'
_MARKED = re.compile(f'{_OPEN}(\\d+){_CLOSE}')


class Template:
  """A tokenizer's chat template; without one, messages are texts that follow each other.

  Then the first message is the prompt, and those after a turn are appended to it as the observation
  of an environment with `frame = 'inline'` is: the form that the embedded model was trained in.
  """

  def __init__(self, tokenizer: chat.Tokenizer, max_tokens: int, tool_form: str = 'hermes'):
    self.tokenizer, self._tool_form = tokenizer, tool_form
    self._max_tokens = max_tokens
    added = tokenizer.control_library.get_added_tokens_decoder()
    self._controls = [token.content for token in added.values() if token.content]
    names = sorted(self._controls, key=len, reverse=True)
    self._control = re.compile('|'.join(map(re.escape, names)) or r'(?!)')

  def encode(self, messages: Sequence[Message], tools: Sequence[Any] = ()) -> list[int]:
    """Returns the ids of a conversation up to where the next turn begins.

    Raises ValueError: the template refuses these messages.
    """
    if self.tokenizer.render is not None:
      return self._encode_rendered(self._render(messages, tools))
    ids: list[int] = []
    for after_turn, text in _runs([self._with_calls(message, tools) for message in messages]):
      ids += self._encode_inline(text) if after_turn else self.tokenizer.encode(text)
    return ids

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
    render = functools.partial(self.tokenizer.render)
    safe = self._without_controls(list(messages))
    try:
      more = {'tools': self._without_controls(list(tools))} if tools else {}
      return render(safe, **more)
    except Exception as error:  # a template may raise anything
      raise ValueError(f'the chat template refuses the messages ({error})') from error

  def _without_controls(self, value: Any) -> Any:
    """Marks the texts of control tokens in all strings of a JSON value."""
    if isinstance(value, str):
      text = value.replace(_OPEN, '?').replace(_CLOSE, '?')
      return self._control.sub(
          lambda found: f'{_OPEN}{self._controls.index(found[0])}{_CLOSE}', text
      )
    if isinstance(value, Mapping):
      return {self._without_controls(k): self._without_controls(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
      return [self._without_controls(item) for item in value]
    return value

  def _encode_rendered(self, text: str) -> list[int]:
    """Encodes the template's control tokens as such, and each text between two of them as one."""
    library, ids, end = self.tokenizer.control_library, [], 0
    encoding = library.encode(chat.valid(text), add_special_tokens=False)
    for token, (start, stop) in zip(encoding.ids, encoding.offsets):
      if token in self.tokenizer.added_ids:
        ids += [*self._encode_plain(text[end:start]), token]
        end = stop
    return ids + self._encode_plain(text[end:])

  def _encode_plain(self, text: str) -> list[int]:
    unmarked = _MARKED.sub(lambda found: self._controls[int(found[1])], text)
    return self.tokenizer.encode(unmarked) if text else []


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
