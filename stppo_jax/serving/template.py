"""Messages to token ids: whole conversations, and the ids that follow a sampled turn.

A sampled turn is never encoded again: `encode_after` gives the ids between its last token and the
next turn. No text of a message becomes a control token. An added token that is not special, such as
Qwen3's <think>, stays a token in a turn of the assistant and in the prompt, as in
`tokenizer.encode_prompt`. Texts of tools and users after that are plain text, as in
`tokenizer.Framing`.
"""

from collections.abc import Mapping
from collections.abc import Sequence
import itertools
import math
import re
from typing import Any

from absl import logging

from stppo_jax import tokenizer as tokenizer_lib
from stppo_jax.envs import tool_calls

Message = Mapping[str, Any]
_PROBE = 'The-agent-writes-this'
_RESULT = re.compile('(<tool_response>)(.*)(</tool_response>)', re.DOTALL)


class TooLong(ValueError):
  """A text is longer than the tokens that fit could be; it was not encoded."""


def _as_user(message: Message) -> Message:
  """Returns a message, of the user if it is a system message."""
  return {**message, 'role': 'user'} if message['role'] == 'system' else message


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
      max_chars: float = math.inf,  # limit of a prompt; TooLong is raised above it
      vocab_size: float = math.inf,  # the model's, which may be larger than the tokenizer's
  ):
    self.tokenizer = tokenizer
    self._tool_form = tool_form
    self._max_tokens = max_tokens
    self._max_chars = max_chars
    self._vocab_size = vocab_size

  def encode(self, messages: Sequence[Message], tools: Sequence[Any] = ()) -> list[int]:
    """Returns the ids of a conversation up to where the next turn begins.

    Raises ValueError: the template refuses these messages.
    """
    if self.tokenizer.render is not None:
      return self._encode_rendered(self._render(messages, tools))
    inline = [self._with_calls(message, tools) for message in messages]
    lengths = [len(message['content']) for message in inline]
    self._check_length(sum(lengths))
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
      self, messages: Sequence[Message], tools: Sequence[Any] = (), generation_prompt: bool = True
  ) -> str:
    """Returns the template's text of messages, for `Tokenizer.encode_marked`.

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
    self._check_length(len(prompt))
    if isinstance(prompt, str):
      return self.tokenizer.encode(prompt, control=True)
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
      tools: Sequence[Any] = (),
      rest: str = '',  # the client's text after the turn, in the same message
  ) -> list[int]:
    """Returns the ids that follow a sampled `turn` when these messages come after it.

    The template's end of a turn is left out if the turn has it. A `rest` after such an end is a
    separate message. ValueError as in `encode`.
    """
    if self.tokenizer.render is None:
      texts = [message['content'] for message in messages]
      return self._encode_inline(rest + ''.join(texts))
    question = {'role': 'user', 'content': 'Q'}
    probe = {'role': 'assistant', 'content': _PROBE}
    if rest and turn[-1:] and turn[-1] in self.tokenizer.eos_ids:
      messages = [{'role': 'assistant', 'content': rest.strip()}, *messages]
    else:
      probe['content'] += rest
    text = self._render([question, probe, *messages], tools)
    before, separator, after = text.rpartition(_PROBE)
    if not separator or _PROBE in before:
      raise ValueError('the chat template does not show an assistant turn as it is')
    ids = self._encode_rendered(after)
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

  def _check_length(self, num_chars: int) -> None:
    if num_chars > self._max_chars:
      least = -(-num_chars // tokenizer_lib.LONGEST_TOKEN)
      raise self._too_long(f'at least {least}')

  def _too_long(self, num_tokens: str) -> TooLong:
    """Returns the error in OpenAI's words, which clients search for."""
    return TooLong(
        f"This model's maximum context length is {self._max_tokens} tokens. However, your messages "
        f'resulted in {num_tokens} tokens. Please reduce the length of the messages.'
    )

  def _with_calls(self, message: Message, tools: Sequence[Any]) -> Message:
    """Returns a message whose content has its calls, as the agent would have written them."""
    if not message.get('tool_calls'):
      return message
    form = tool_calls.make_form(self._tool_form, tools)
    content = message['content']
    for call in message['tool_calls']:
      function = call['function']
      written = tool_calls.Call(function['name'], function['arguments'])
      content += form.write(written)
    return {'role': message['role'], 'content': content}

  def _encode_inline(self, text: str) -> list[int]:
    if not text:
      return []
    return tokenizer_lib.encode_observation(self.tokenizer, text, self._max_tokens)

  def _render(self, messages: Sequence[Message], tools: Sequence[Any], **options: Any) -> str:
    render = self.tokenizer.render
    assert render is not None
    try:  # marking raises too, for values that are nested too deeply
      if tools:
        options['tools'] = self.tokenizer.mark(tools)
      marked = self._mark_messages(messages)
      return render(marked, **options)
    except Exception as error:  # a template may raise anything
      if all(message['role'] != 'system' for message in messages[1:]):
        raise ValueError(f'the chat template rejects the messages ({error})') from error
      # Claude Code sends such messages, and Qwen3.5's template takes a system message first alone.
      logging.log_first_n(
          logging.WARNING,
          'the chat template rejects a later system message (%s): it is shown as one of the user',
          1,
          error,
      )
    return self._render([messages[0], *map(_as_user, messages[1:])], tools, **options)

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
    self._check_length(len(text))
    return self.tokenizer.encode_marked(text)
