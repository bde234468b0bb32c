"""Text to token ids and back, for one tokenizer folder, and the turns of its chat template.

Prompts and observations are encoded here, once. An agent's turn is ids from the start: it is
decoded for the environment, and never encoded again. The stop strings of an environment become an
automaton over tokens (`stop_automaton`), which the sampler carries on the device.
"""

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import functools
import json
import os
import pathlib
import re
from typing import Any

import numpy as np
import tokenizers

from stppo_jax import types

CLOSING_TAG = '</information>'

_OPENING = re.compile(r'\s*<information>')
_TAG = re.compile(r'<(?=/?(?:think|search|information|answer)>)')
# Characters, an upper bound for known vocabularies; text is cut by it before it is encoded.
LONGEST_TOKEN = 128
# How templates change a message's content. The first that matches a template is applied.
_CONTENT_CHANGES: tuple[Callable[[str], str], ...] = (
    lambda text: text,
    str.strip,
    functools.partial(json.dumps, ensure_ascii=False),
)
_Messages = list[dict[str, str]]


@dataclasses.dataclass(frozen=True)
class Tokenizer:
  """A byte-level BPE tokenizer as its `tokenizer.json` defines it, pre-tokenizer included."""

  folder: str
  vocab_size: int  # largest id + 1
  eos_ids: tuple[int, ...]  # each of them ends a turn; may be empty
  pad_id: int
  token_bytes: tuple[bytes, ...]  # [V]; empty for an id that has no token
  render: Callable[..., str] | None  # messages -> text with generation prompt; None: none
  text_library: tokenizers.Tokenizer  # control tokens inside a text stay text
  control_library: tokenizers.Tokenizer  # control tokens inside a text become control tokens
  passage_library: tokenizers.Tokenizer  # without control tokens and other added tokens
  added_ids: frozenset[int]  # ids that `passage_library` lacks

  def encode(self, text: str, control: bool = False) -> list[int]:
    """Returns the ids of `text` alone. With `control`, '<|im_end|>' and similar are one token."""
    library = self.control_library if control else self.text_library
    return library.encode(valid(text), add_special_tokens=False).ids

  def find_controls(self, text: str) -> tuple[tokenizers.Encoding, list[int]]:
    """Returns the encoding of a text, and the places of its control tokens."""
    encoding = self.control_library.encode(text, add_special_tokens=False)
    return encoding, [i for i, token in enumerate(encoding.ids) if token in self.added_ids]

  def encode_passage(self, text: str) -> list[int]:
    """Returns ids of an untrusted text: no added tokens, and none of our tags.

    Inserts a space after the `<` of each tag, after normalisation, which can produce a `<`.
    """
    text = valid(text)
    if self.passage_library.normalizer is not None:
      text = self.passage_library.normalizer.normalize_str(text)
    return self.encode_plain(_TAG.sub('< ', text))

  def encode_plain(self, text: str) -> list[int]:
    """Returns ids of a text, none of which is an added token."""
    return self.passage_library.encode(valid(text), add_special_tokens=False).ids

  def decode(self, ids: Sequence[int] | np.ndarray) -> str:
    """Returns the bytes of the tokens as text, with control tokens; replaces bad UTF-8."""
    return b''.join(self._bytes(i) for i in ids).decode('utf-8', 'replace')

  def pieces(self, ids: Sequence[int] | np.ndarray) -> list[str]:
    """Returns one printable string per token, for reports; replaces bytes that are not UTF-8."""
    return [self._bytes(i).decode('utf-8', 'replace') for i in ids]

  def _bytes(self, token_id: int) -> bytes:
    # Models pad their vocabulary (Qwen2.5: 151,936 rows for 151,665 tokens): such ids are empty.
    return self.token_bytes[token_id] if token_id < self.vocab_size else b''


def load_tokenizer(
    folder: str, template_kwargs: Mapping[str, Any] | None = None, default_template: str = ''
) -> Tokenizer:
  """Reads tokenizer.json and, if they exist, tokenizer_config.json and generation_config.json.

  `default_template` is the file of a chat template for a folder without one.
  """
  path = os.path.join(folder, 'tokenizer.json')
  if not os.path.isfile(path):
    raise types.UserError(
        f'no tokenizer.json in {folder!r}: give a folder in Hugging Face format that has one; '
        '`hf download NAME --local-dir=FOLDER` makes it'
    )
  definition = _read_json(path)
  # tokenizers.Tokenizer and not AutoTokenizer: the latter replaces the pre-tokenizer of
  # tokenizer.json by that of the model family named in config.json.
  try:
    control_library = tokenizers.Tokenizer.from_file(path)
    text_library = tokenizers.Tokenizer.from_file(path)
  except Exception as error:  # the library raises bare Exception on a malformed file
    raise types.UserError(f'{path!r} is not a tokenizer file ({error}): replace it') from error
  passage_library = tokenizers.Tokenizer.from_str(_without_added_tokens(definition))
  for library in (control_library, text_library, passage_library):
    library.no_truncation()
    library.no_padding()
  text_library.encode_special_tokens = True
  settings = _read_json(os.path.join(folder, 'tokenizer_config.json'))
  token_bytes = _token_bytes(path, definition, control_library)
  eos_ids = _eos_ids(folder, settings, control_library)
  pad_id = control_library.token_to_id(_token_name(settings.get('pad_token')))
  if pad_id is None:
    pad_id = eos_ids[0] if eos_ids else 0
  return Tokenizer(
      folder=folder,
      vocab_size=len(token_bytes),
      eos_ids=eos_ids,
      pad_id=pad_id,
      token_bytes=token_bytes,
      render=_chat_renderer(folder, settings, template_kwargs or {}, default_template),
      text_library=text_library,
      control_library=control_library,
      passage_library=passage_library,
      added_ids=frozenset(control_library.get_added_tokens_decoder()),
  )


def check_matches(tokenizer: Tokenizer, model_vocab_size: int) -> None:
  """Raises a UserError if the tokenizer can produce an id that the model has no embedding for."""
  if tokenizer.vocab_size > model_vocab_size:
    raise types.UserError(
        f'the tokenizer in {tokenizer.folder!r} has {tokenizer.vocab_size} ids but the model only '
        f'{model_vocab_size}: use the tokenizer that belongs to the model'
    )


def encode_prompt(
    tokenizer: Tokenizer, user_message: str, tools: Sequence[dict] = (), declaration: str = ''
) -> list[int]:
  """Returns one user message, with a chat template as its first turn and the generation prompt.

  No text of a message becomes a control token. `tools` (schemas) are shown by the template, or by
  the text `declaration` before the message where the template does not show them.
  """
  if tokenizer.render is None:
    return tokenizer.encode(declaration + user_message)
  before, after, change = _around(tokenizer, [], 'user', tools)
  if tools and tools[0]['function']['name'] not in before + after:
    user_message = declaration + user_message
  return _Frame.split(tokenizer, before, after, change).around(user_message, tokenizer.encode)


@dataclasses.dataclass(frozen=True)
class _Frame:
  """The template around a message: control tokens, and text between them and the message.

  before_ids | before_text content after_text | after_ids
  The middle is encoded as one text, as a tokenizer does that first splits at control tokens.
  """

  before_ids: tuple[int, ...]
  before_text: str
  after_text: str
  after_ids: tuple[int, ...]
  change: Callable[[str], str]  # one of _CONTENT_CHANGES

  @classmethod
  def split(
      cls, tokenizer: Tokenizer, before: str, after: str, change: Callable[[str], str]
  ) -> '_Frame':
    """Splits the template's text before and after a message."""
    before_ids: list[int] = []
    after_ids: list[int] = []
    encoding, controls = tokenizer.find_controls(before)
    if controls:
      last = controls[-1]
      before_ids = encoding.ids[: last + 1]
      before = before[encoding.offsets[last][1] :]
    encoding, controls = tokenizer.find_controls(after)
    if controls:
      first = controls[0]
      after_ids = encoding.ids[first:]
      after = after[: encoding.offsets[first][0]]
    return cls(tuple(before_ids), before, after, tuple(after_ids), change)

  def around(self, content: str, encode: Callable[[str], list[int]]) -> list[int]:
    """Returns the message with the template's tokens before and after it."""
    text = self.before_text + self.change(content) + self.after_text
    return [*self.before_ids, *encode(text), *self.after_ids]


@dataclasses.dataclass(frozen=True)
class Framing:
  """Where observations go: appended to the agent's text, or into a turn of the chat template."""

  tokenizer: Tokenizer
  limit: int  # tokens of an observation, the template's included
  frame: _Frame | None  # None: inline

  def encode(self, text: str, turn: Sequence[int] | np.ndarray) -> list[int]:
    """Returns the ids that follow the agent's `turn` up to where its next turn begins.

    The template's end of an assistant turn is left out if the agent has sampled it.
    """
    if self.frame is None:
      return encode_observation(self.tokenizer, text, self.limit)
    ids = self.frame.around(self._cut(text), self.tokenizer.encode_plain)
    ends = len(turn) > 0 and turn[-1] in self.tokenizer.eos_ids
    has_end = ends and ids[:1] == [turn[-1]]
    return ids[1:] if has_end else ids

  def _cut(self, text):
    """Returns the text, cut so that it fits with its frame; keeps a closing tag."""
    assert self.frame is not None
    encode = self.tokenizer.encode_plain
    start = text.rfind(CLOSING_TAG)
    if start < 0:
      start = len(text)
    head = text[:start]
    tail = text[start:]
    least = len(self.frame.around('', encode)) + len(encode(tail))
    if least > self.limit:
      raise types.UserError(
          f'an observation limit of {self.limit} tokens cannot hold the {least} tokens of the chat '
          "template's turn: raise config.rollout.max_observation"
      )
    head = head[: self.limit * LONGEST_TOKEN]
    while (size := len(self.frame.around(head + tail, encode))) > self.limit and head:
      head = head[: min(len(head) - 1, len(head) * self.limit // size)]
    return head + tail


def make_framing(tokenizer: Tokenizer, frame: str, limit: int) -> Framing:
  """Returns the framing 'inline', 'user' or 'tool' for this tokenizer.

  The text that the template puts between the end of an assistant turn and the next generation
  prompt is rendered once, here.
  """
  if frame == 'inline':
    return Framing(tokenizer, limit, None)
  if tokenizer.render is None:
    raise types.UserError(
        f'the environment puts observations into {frame!r} turns, and {tokenizer.folder!r} has no '
        "chat template: give a model with one, or an environment with frame = 'inline'"
    )
  asked = [{'role': 'user', 'content': 'Q'}, {'role': 'assistant', 'content': _ANSWER}]
  before, after, change = _around(tokenizer, asked, frame)
  if before.count(_ANSWER) != 1:
    raise types.UserError(
        f'the chat template of {tokenizer.folder!r} does not show an assistant turn as it is: '
        "give an environment with frame = 'inline'"
    )
  before = before.partition(_ANSWER)[2]
  framing = Framing(tokenizer, limit, _Frame.split(tokenizer, before, after, change))
  framing.encode('', ())  # a limit that the template's own tokens fill is an error now
  return framing


_ANSWER = 'The-agent-says-this'


def _around(
    tokenizer: Tokenizer, messages: _Messages, role: str, tools: Sequence[dict] = ()
) -> tuple[str, str, Callable[[str], str]]:
  """Returns (text before, text after, change) of the content of one more message with this role."""
  assert tokenizer.render is not None
  probe = ' Probe "1"\n '
  try:
    also = {'tools': list(tools)} if tools else {}
    text = tokenizer.render([*messages, {'role': role, 'content': probe}], **also)
  except Exception as error:  # a template may raise anything
    raise types.UserError(
        f'the chat template of {tokenizer.folder!r} cannot show a turn of role {role!r} ({error}): '
        "give another model, or an environment with another `frame`, such as 'inline'"
    ) from error
  for change in _CONTENT_CHANGES:
    before, found, after = text.partition(change(probe))
    if found:
      return before, after, change
  raise types.UserError(
      f'the chat template of {tokenizer.folder!r} changes the text of a {role!r} turn in a way '
      "that is not supported: give another model, or an environment with frame = 'inline'"
  )


def encode_observation(tokenizer: Tokenizer, text: str, limit: int) -> list[int]:
  """Returns at most `limit` ids of an inline observation; keeps its end from `</information>` on.

  The tags and what they hold are always encoded apart. So a cut observation ends in the same ids as
  a whole one, and no token of a passage closes the block, opens another, or is a control token.
  """
  start = text.rfind(CLOSING_TAG)
  if start < 0:
    return tokenizer.encode(text[: limit * LONGEST_TOKEN])[:limit]
  tail = tokenizer.encode(text[start:])
  if len(tail) > limit:
    raise types.UserError(
        f'an observation limit of {limit} tokens cannot hold the {len(tail)} tokens of '
        f'{text[start:][:60]!r}: raise config.rollout.max_observation'
    )
  opening = _OPENING.match(text)
  inside = opening.end() if opening else 0
  passages = text[inside:start][: limit * LONGEST_TOKEN]
  ids = tokenizer.encode(text[:inside]) + tokenizer.encode_passage(passages)
  return ids[: limit - len(tail)] + tail


def stop_automaton(token_bytes: Sequence[bytes], stop_strings: Sequence[str]) -> np.ndarray:
  """Returns the next state after each token: [states, V] int32; 0 = start, last = stopped.

  An Aho-Corasick automaton over bytes, lifted to tokens by following each token's bytes. So a stop
  string is found across tokens, inside one, or followed by more bytes of its token.
  """
  steps = _byte_automaton([s.encode('utf-8') for s in stop_strings])  # [states, 256]
  lengths = np.array([len(b) for b in token_bytes], np.int64)
  starts = np.cumsum(lengths) - lengths
  flat = np.frombuffer(b''.join(token_bytes), np.uint8)
  states = np.arange(len(steps), dtype=np.int32)
  table = np.repeat(states[:, None], len(token_bytes), axis=1)
  for position in range(int(lengths.max(initial=0))):
    longer = np.flatnonzero(lengths > position)
    next_bytes = flat[starts[longer] + position]
    table[:, longer] = steps[table[:, longer], next_bytes[None]]
  return table


def _byte_automaton(patterns: list[bytes]) -> np.ndarray:
  """Returns the Aho-Corasick automaton [states, 256] int32; its last state means any match.

  A state is a prefix of a pattern. A byte leads to the longest prefix that ends the text so far.
  """
  if b'' in patterns:
    raise types.UserError('an empty stop string was given: leave it out or give its text')
  prefixes = {pattern[:n] for pattern in patterns for n in range(len(pattern))}
  states: dict[bytes, int] = {b'': 0}
  for prefix in sorted(prefixes):
    if not any(pattern in prefix for pattern in patterns):
      states.setdefault(prefix, len(states))
  stopped = len(states)
  steps = np.zeros((stopped + 1, 256), np.int32)
  steps[stopped] = stopped
  for prefix, state in states.items():
    for byte in set(b''.join(patterns)):
      text = prefix + bytes([byte])
      if any(text.endswith(pattern) for pattern in patterns):
        steps[state, byte] = stopped
        continue
      while text not in states:
        text = text[1:]
      steps[state, byte] = states[text]
  return steps


def _without_added_tokens(definition: dict) -> str:
  """Returns the tokenizer file as text, without its added tokens.

  They are also removed from the vocabulary, unless merges make them: with `ignore_merges` any word
  of the vocabulary would be one token.
  """
  model = dict(definition['model'])
  added = {token['content'] for token in definition.get('added_tokens') or ()}
  merged = set()
  for merge in model.get('merges', ()):
    pair = merge.split(' ') if isinstance(merge, str) else merge
    merged.add(''.join(pair))
  if isinstance(model['vocab'], dict):  # others are refused by name, further on
    removed = added - merged
    model['vocab'] = {name: i for name, i in model['vocab'].items() if name not in removed}
  changes = {'model': model, 'added_tokens': [], 'post_processor': None}
  return json.dumps(definition | changes)


def valid(text: str) -> str:
  """Replaces lone surrogates, which JSON can hold and UTF-8 cannot, by '?'."""
  return text.encode('utf-8', 'replace').decode('utf-8')


def _token_bytes(path: str, definition: dict, library: tokenizers.Tokenizer) -> tuple[bytes, ...]:
  """Returns the bytes of every id. Byte-level vocabularies write each byte as a printable
  character.
  """
  added = library.get_added_tokens_decoder()
  byte_of = {character: byte for byte, character in enumerate(_byte_alphabet())}
  names = {i: name for name, i in library.get_vocab(with_added_tokens=True).items()}
  if not names:
    raise types.UserError(f'{path!r} has an empty vocabulary: replace it')
  ordinary = [name for i, name in names.items() if i not in added]
  parts = [definition.get('pre_tokenizer'), definition.get('decoder')]
  byte_level = '"ByteLevel"' in json.dumps(parts)
  if not byte_level or not byte_of.keys() >= set().union(*ordinary):
    raise types.UserError(
        f'{path!r} is not a byte-level BPE vocabulary (but sentencepiece or word pieces?): '
        'supported are byte-level BPE tokenizers, such as those of Qwen2, Qwen3, Llama 3 and GPT-2'
    )
  token_bytes = [b''] * (max(names) + 1)
  for i, name in names.items():
    if i in added:
      token_bytes[i] = added[i].content.encode('utf-8')
    else:
      token_bytes[i] = bytes(byte_of[character] for character in name)
  return tuple(token_bytes)


def _byte_alphabet() -> list[str]:
  """Returns the character for each byte: itself if printable, else the next from U+0100."""
  printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
  spare = iter(range(0x100, 0x200))
  return [chr(byte if byte in printable else next(spare)) for byte in range(256)]


def _eos_ids(folder: str, settings: dict, library: tokenizers.Tokenizer) -> tuple[int, ...]:
  """Returns the ids that end a turn: the tokenizer's eos token and generation_config.json's."""
  listed = _read_json(os.path.join(folder, 'generation_config.json')).get('eos_token_id')
  named = library.token_to_id(_token_name(settings.get('eos_token')))
  ids = [named, *(listed if isinstance(listed, list) else [listed])]
  if not all(isinstance(i, int | None) for i in ids):
    raise types.UserError(
        f'generation_config.json in {folder!r} has eos_token_id {listed!r}: ids are needed'
    )
  return tuple(dict.fromkeys(i for i in ids if i is not None))


def _token_name(entry: str | dict | None) -> str:
  """Returns a special token's text; files hold the text or a dictionary with its `content`."""
  name = entry.get('content') if isinstance(entry, dict) else entry
  return name if isinstance(name, str) else ''


def _chat_renderer(
    folder: str, settings: dict, kwargs: Mapping, default_template: str
) -> Callable[..., str] | None:
  has_file = os.path.isfile(os.path.join(folder, 'chat_template.jinja'))
  has_own = has_file or bool(settings.get('chat_template'))
  if not has_own and not default_template:
    return None
  import transformers  # here, since it takes seconds and a folder without template needs none

  try:
    library = transformers.PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True)
  except Exception as error:  # whatever a malformed file makes it raise
    raise types.UserError(
        f'transformers cannot read the tokenizer of {folder!r}, whose chat template is needed '
        f'({type(error).__name__}: {" ".join(str(error).split())[:200]}): replace its files'
    ) from error
  if not has_own:
    library.chat_template = pathlib.Path(default_template).read_text(encoding='utf-8')
  fixed = dict(tokenize=False, add_generation_prompt=True)
  return functools.partial(library.apply_chat_template, **fixed, **kwargs)


def _read_json(path: str) -> dict:
  return types.read_json(path) if os.path.isfile(path) else {}
