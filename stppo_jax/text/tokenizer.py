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
from typing import NamedTuple

from absl import logging
import numpy as np
import tokenizers

from stppo_jax import types
from stppo_jax.text import thoughts

CLOSING_TAG = '</information>'
THOUGHT_STATE = 1  # where a `stop_automaton` that skips thoughts begins if a turn begins in one
TurnEnd = tuple[tuple[str, ...], bool]  # (stop strings, whether none of them counts in a thought)

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
_PROBE = ' Probe "1"\n '
# Two code points that are no characters: text between them is the id of an added token.
_OPEN = '\ufdd0'
_CLOSE = '\ufdd1'
_MARKED = re.compile(f'{_OPEN}(\\d+){_CLOSE}')
_TURN = 'The-agent-says-this'
_SAVE_AGAIN = (
    'save the tokenizer again, with AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)'
)

Ids = Sequence[int] | np.ndarray


@dataclasses.dataclass(frozen=True)
class Tokenizer:
  """A BPE tokenizer as its `tokenizer.json` defines it, pre-tokenizer included.

  It is byte-level, or has byte fallback as that of Gemma.
  """

  folder: str
  vocab_size: int  # largest id + 1
  eos_ids: tuple[int, ...]  # each of them ends a turn, the template's first; may be empty
  bos_ids: tuple[int, ...]  # ids before every text, as Llama 3's <|begin_of_text|>
  pad_id: int
  token_bytes: tuple[bytes, ...]  # [V]; empty for an id that has no token
  render: Callable[..., str] | None  # messages -> text with generation prompt; None: none
  text_library: tokenizers.Tokenizer  # control tokens inside a text stay text
  control_library: tokenizers.Tokenizer  # control tokens inside a text become control tokens
  passage_library: tokenizers.Tokenizer  # without control tokens and other added tokens
  added_ids: frozenset[int]  # ids that `passage_library` lacks
  any_added: re.Pattern[str]  # finds the texts of added tokens
  special_added: re.Pattern[str]  # finds those that are special, unlike Qwen3's <think>

  def encode(self, text: str, control: bool = False) -> list[int]:
    """Returns the ids of `text` alone. With `control`, '<|im_end|>' and similar are one token."""
    library = self.control_library if control else self.text_library
    return _encode(library, text).ids

  def begin(self, ids: list[int]) -> list[int]:
    """Returns the ids of a first text, after the tokens that begin one unless it has them."""
    bos_ids = list(self.bos_ids)
    return ids if ids[: len(bos_ids)] == bos_ids else bos_ids + ids

  def opening(self, ids: Ids) -> str:
    """Returns the tag with which `ids` open a thought of the turn that follows; '': they do not."""
    return thoughts.opening(self.decode(ids[-thoughts.NUM_TAIL :]))

  def mark(self, value: Any, only_special: bool = False) -> Any:
    """Returns a JSON value in whose texts the added tokens are marked.

    A chat template shows a marked text as any other. `encode_marked` makes plain text of it.
    """
    if isinstance(value, str):
      pattern = self.special_added if only_special else self.any_added
      text = value.replace(_OPEN, '?').replace(_CLOSE, '?')
      return pattern.sub(self._mark_token, text)
    if isinstance(value, Mapping):
      items = self.mark([*value.items()], only_special)
      return dict(items)
    if isinstance(value, (list, tuple)):
      return [self.mark(item, only_special) for item in value]
    return value

  def _mark_token(self, match: re.Match[str]) -> str:
    return f'{_OPEN}{self.control_library.token_to_id(match[0])}{_CLOSE}'

  def encode_marked(self, text: str) -> list[int]:
    """Returns the ids of a template's text. Added tokens are tokens unless they are marked.

    Each text between two of them is encoded as one.
    """
    text = types.without_surrogates(text)
    encoding = _encode(self.control_library, text)
    ids: list[int] = []
    end = 0
    for token, (start, stop) in zip(encoding.ids, encoding.offsets):
      if token in self.added_ids:
        ids += self._encode_unmarked(text[end:start])
        ids.append(token)
        end = stop
    return ids + self._encode_unmarked(text[end:])

  def _encode_unmarked(self, text: str) -> list[int]:
    text = _MARKED.sub(lambda match: self.decode([int(match[1])]), text)
    return self.encode_plain(text)

  def without_end(self, ids: list[int], turn: Ids) -> list[int]:
    """Returns the ids after a sampled turn, without the template's end of a turn if it has it."""
    turn_has_end = len(turn) > 0 and turn[-1] in self.eos_ids
    if turn_has_end and ids[:1] == [turn[-1]]:
      return ids[1:]
    return ids

  def encode_passage(self, text: str) -> list[int]:
    """Returns ids of an untrusted text: no added tokens, and none of our tags.

    Inserts a space after the `<` of each tag, after normalisation, which can produce a `<`.
    """
    text = types.without_surrogates(text)
    if self.passage_library.normalizer is not None:
      text = self.passage_library.normalizer.normalize_str(text)
    return self.encode_plain(_TAG.sub('< ', text))

  def encode_plain(self, text: str) -> list[int]:
    """Returns ids of a text, none of which is an added token."""
    return _encode(self.passage_library, text).ids

  def decode(self, ids: Ids) -> str:
    """Returns the bytes of the tokens as text, with control tokens; replaces bad UTF-8."""
    # Models pad their vocabulary (Qwen2.5: 151,936 rows for 151,665 tokens): such ids are empty.
    token_bytes = [self.token_bytes[i] for i in ids if i < self.vocab_size]
    text = b''.join(token_bytes)
    return text.decode('utf-8', 'replace')

  def pieces(self, ids: Ids) -> list[str]:
    """Returns one printable string per token, for reports; replaces bytes that are not UTF-8."""
    return [self.decode([i]) for i in ids]


def _encode(library: tokenizers.Tokenizer, text: str) -> tokenizers.Encoding:
  """Encodes a text. Other threads run meanwhile: `encode` would keep the interpreter's lock."""
  (encoding,) = library.encode_batch([types.without_surrogates(text)], add_special_tokens=False)
  return encoding


def load_tokenizer(
    folder: str, template_kwargs: Mapping[str, object] | None = None, default_template: str = ''
) -> Tokenizer:
  """Reads tokenizer.json and, if they exist, the files with its settings and its end tokens.

  `default_template` is the file of a chat template for a folder without one.
  """
  path = os.path.join(folder, 'tokenizer.json')
  if not os.path.isfile(path):
    raise types.UserError(
        f'no tokenizer.json in {folder!r}: give a folder in Hugging Face format that has one; '
        '`hf download NAME --local-dir=FOLDER` makes it'
    )
  definition = _read_json(path)
  unused = _tokens_without_embedding(folder, definition)
  # tokenizers.Tokenizer and not AutoTokenizer: the latter replaces the pre-tokenizer of
  # tokenizer.json by that of the model family named in config.json.
  read = functools.partial(tokenizers.Tokenizer.from_file, path)
  if unused:
    _log_unused(folder, ', '.join(token['content'] for token in unused))
    definition['added_tokens'] = [t for t in definition['added_tokens'] if t not in unused]
    read = functools.partial(tokenizers.Tokenizer.from_str, json.dumps(definition))
  try:
    control_library = read()
    text_library = read()
  except Exception as error:  # the library raises bare Exception on a malformed file
    raise types.UserError(f'{path!r} is not a tokenizer file ({error}): replace it') from error
  passage_library = tokenizers.Tokenizer.from_str(_without_added_tokens(definition))
  for library in (control_library, text_library, passage_library):
    library.no_truncation()
    library.no_padding()
  text_library.encode_special_tokens = True
  settings = _settings(folder)
  token_bytes = _token_bytes(path, definition, control_library)
  added_by_id = control_library.get_added_tokens_decoder()
  added = list(added_by_id.values())
  eos_ids = _eos_ids(folder, settings, control_library)
  pad_id = control_library.token_to_id(_token_name(settings.get('pad_token')))
  if pad_id is None:
    pad_id = eos_ids[0] if eos_ids else 0
  render = _chat_renderer(
      folder, settings, template_kwargs or {}, default_template, control_library
  )
  if render is not None:
    eos_ids = _with_turn_end(folder, eos_ids, render, control_library)
  return Tokenizer(
      folder=folder,
      vocab_size=len(token_bytes),
      eos_ids=eos_ids,
      bos_ids=_bos_ids(control_library),
      pad_id=pad_id,
      token_bytes=token_bytes,
      render=render,
      text_library=text_library,
      control_library=control_library,
      passage_library=passage_library,
      added_ids=frozenset(added_by_id),
      any_added=_pattern(added),
      special_added=_pattern([token for token in added if token.special]),
  )


def _pattern(tokens: Sequence[tokenizers.AddedToken]) -> re.Pattern[str]:
  """Returns a pattern that finds the text of any of the tokens, the longest first.

  Tokens of white space are left out, because they control nothing, and templates trim them.
  """
  texts = [token.content for token in tokens if token.content.strip()]
  texts.sort(key=len, reverse=True)
  any_text = '|'.join(map(re.escape, texts))
  return re.compile(any_text or '(?!)')


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
    return tokenizer.begin(tokenizer.encode(declaration + user_message))
  frame = _make_frame(tokenizer, [], 'user', tools)
  names = [tool['function']['name'] for tool in tools]
  if not names or names[0] not in frame.before + frame.after:
    user_message = declaration + user_message
  content = tokenizer.mark(user_message, only_special=True)
  return tokenizer.encode_marked(frame.around(content))


class _Frame(NamedTuple):
  """A chat template around a message."""

  before: str
  after: str
  change: Callable[[str], str]  # one of _CONTENT_CHANGES

  def around(self, content: str) -> str:
    """Returns the template's text of a message."""
    return self.before + self.change(content) + self.after


def _make_frame(
    tokenizer: Tokenizer, messages: Sequence[dict[str, str]], role: str, tools: Sequence[dict] = ()
) -> _Frame:
  """Returns the template around one more message with this role."""
  assert tokenizer.render is not None
  options = {'tools': list(tools)} if tools else {}
  message = {'role': role, 'content': _PROBE}
  try:
    text = tokenizer.render([*messages, message], **options)
  except Exception as error:  # a template may raise anything
    raise types.UserError(
        f'the chat template of {tokenizer.folder!r} cannot show a turn of role {role!r} ({error}): '
        "give another model, or an environment with another `frame`, such as 'inline'"
    ) from error
  for change in _CONTENT_CHANGES:
    before, found, after = text.partition(change(_PROBE))
    if found:
      return _Frame(before, after, change)
  raise types.UserError(
      f'the chat template of {tokenizer.folder!r} changes the text of a {role!r} turn in a way '
      "that is not supported: give another model, or an environment with frame = 'inline'"
  )


@dataclasses.dataclass(frozen=True)
class Framing:
  """Where observations go: appended to the agent's text, or into a turn of the chat template."""

  tokenizer: Tokenizer
  limit: int  # tokens of an observation, the template's included
  frame: _Frame | None  # None: inline

  def encode(self, text: str, turn: Ids) -> list[int]:
    """Returns at most `limit` ids, from the agent's `turn` up to where its next turn begins.

    A text that is too long is cut, but keeps a closing tag at its end, see `_end_to_keep`.
    """
    if self.frame is None:
      return encode_observation(self.tokenizer, text, self.limit)
    tail = _end_to_keep(self.tokenizer, text, self.limit)
    head = text[: len(text) - len(tail)][: self.limit * LONGEST_TOKEN]
    ids = self._around(head + tail)
    while len(ids) > self.limit and head:
      length = len(head) * self.limit // len(ids)
      head = head[: min(length, len(head) - 1)]
      ids = self._around(head + tail)
    if len(ids) > self.limit:
      raise types.UserError(
          f'an observation limit of {self.limit} tokens cannot hold the {len(ids)} tokens of the '
          "chat template's turn: raise config.rollout.max_observation"
      )
    return self.tokenizer.without_end(ids, turn)

  def _around(self, text: str) -> list[int]:
    assert self.frame is not None
    content = self.tokenizer.mark(text)
    return self.tokenizer.encode_marked(self.frame.around(content))


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
  question = {'role': 'user', 'content': 'Q'}
  turn = {'role': 'assistant', 'content': _TURN}
  around = _make_frame(tokenizer, [question, turn], frame)
  if around.before.count(_TURN) != 1:
    raise types.UserError(
        f'the chat template of {tokenizer.folder!r} does not show an assistant turn as it is: '
        "give an environment with frame = 'inline'"
    )
  after_turn = around.before.partition(_TURN)[2]
  framing = Framing(tokenizer, limit, around._replace(before=after_turn))
  framing.encode('', ())  # a limit that the template's own tokens fill is an error now
  return framing


def _end_to_keep(tokenizer: Tokenizer, text: str, limit: int) -> str:
  """Returns the end of an observation that is kept if the observation is cut.

  It begins with the last `</information>`. '' if there is none, or if its text behind the tag fills
  more than half of the limit: then the tag is one within a page or a passage.
  """
  start = text.rfind(CLOSING_TAG)
  if start < 0:
    return ''
  tail = text[start:]
  behind = tail.removeprefix(CLOSING_TAG)[: limit * LONGEST_TOKEN]
  return '' if 2 * len(tokenizer.encode(behind)) > limit else tail


def encode_observation(tokenizer: Tokenizer, text: str, limit: int) -> list[int]:
  """Returns at most `limit` ids of an inline observation, cut at the end of a character.

  A cut observation keeps `_end_to_keep`.

  The tags and what they hold are always encoded apart. So a cut observation ends in the same ids as
  a whole one, and no token of a passage closes the block, opens another, or is a control token.
  """
  start = text.rfind(CLOSING_TAG)
  if start < 0:
    head = text[: limit * LONGEST_TOKEN]
    return _cut(tokenizer, tokenizer.encode(head), limit)
  is_kept = bool(_end_to_keep(tokenizer, text, limit))
  tail = tokenizer.encode(text[start:] if is_kept else text[start:][: limit * LONGEST_TOKEN])
  if is_kept and len(tail) > limit:
    raise types.UserError(
        f'an observation limit of {limit} tokens cannot hold the {len(tail)} tokens of '
        f'{text[start:][:60]!r}: raise config.rollout.max_observation'
    )
  opening = _OPENING.match(text)
  inside = opening.end() if opening else 0
  passages = text[inside:start][: limit * LONGEST_TOKEN]
  ids = tokenizer.encode(text[:inside])
  ids += tokenizer.encode_passage(passages)
  if is_kept:
    return _cut(tokenizer, ids, limit - len(tail)) + tail
  return _cut(tokenizer, ids + tail, limit)


def _cut(tokenizer: Tokenizer, ids: list[int], limit: int) -> list[int]:
  """Returns at most `limit` ids of a text, up to the end of a character."""
  ids = ids[:limit]
  while ids and not _ends_whole(b''.join(tokenizer.token_bytes[i] for i in ids)):
    ids.pop()
  return ids


def _ends_whole(text: bytes) -> bool:
  try:
    text.decode('utf-8')
  except UnicodeDecodeError as error:
    return error.end < len(text)  # otherwise the bytes of the last character are missing
  return True


def stop_automaton(
    token_bytes: Sequence[bytes], stop_strings: Sequence[str], skips_thoughts: bool = False
) -> np.ndarray:
  """Returns `joint_stop_automaton` of turns that all end in the same way."""
  return joint_stop_automaton(token_bytes, [(tuple(stop_strings), skips_thoughts)])


def joint_stop_automaton(token_bytes: Sequence[bytes], turn_ends: Sequence[TurnEnd]) -> np.ndarray:
  """Returns the next state after each token: [states, V] int32; the last state = stopped.

  An Aho-Corasick automaton over bytes, lifted to tokens by following each token's bytes. So a stop
  string is found across tokens, inside one, or followed by more bytes of its token. A turn that
  ends by `turn_ends[i]` begins in `first_states(turn_ends)[i]`, which is 0 for the first. If its
  stop strings are not found in thoughts, a turn that begins in a thought begins `THOUGHT_STATE`
  states later.
  """
  modes: list[dict[bytes, int | None]] = []
  for stop_strings, skips_thoughts in turn_ends:
    start = len(modes)
    patterns = [text.encode('utf-8') for text in stop_strings]
    mode: dict[bytes, int | None] = dict.fromkeys(patterns)
    modes.append(mode)
    if skips_thoughts:
      mode[thoughts.OPEN.encode()] = start + THOUGHT_STATE
      modes.append({thoughts.CLOSE.encode(): start})
  steps = _byte_automaton(modes)
  lengths = np.array([*map(len, token_bytes)], np.int64)
  starts = np.cumsum(lengths) - lengths
  flat = np.frombuffer(b''.join(token_bytes), np.uint8)
  states = np.arange(len(steps), dtype=np.int32)
  table = np.repeat(states[:, None], len(token_bytes), axis=1)
  longest = int(lengths.max(initial=0))
  for position in range(longest):
    longer = np.flatnonzero(lengths > position)
    next_bytes = flat[starts[longer] + position]
    before = table[:, longer]
    table[:, longer] = steps[before, next_bytes[None]]
  return table


def turn_length(
    stop_table: np.ndarray, tokens: Sequence[int] | np.ndarray, state: int
) -> tuple[int, bool]:
  """Returns the number of tokens up to the one that ends a turn, and whether one ends it.

  Args:
    stop_table: a `joint_stop_automaton`.
    tokens: from the beginning of the turn on.
    state: in which the turn begins.
  """
  stopped = len(stop_table) - 1
  length = 0
  while length < len(tokens) and state < stopped:
    state = stop_table[state, tokens[length]]
    length += 1
  return length, state == stopped


def first_states(turn_ends: Sequence[TurnEnd]) -> list[int]:
  """Returns the state of `joint_stop_automaton` in which a turn of each of these ends begins."""
  sizes = [1 + skips_thoughts for _, skips_thoughts in turn_ends]
  return [sum(sizes[:i]) for i in range(len(sizes))]


def _byte_automaton(modes: Sequence[Mapping[bytes, int | None]]) -> np.ndarray:
  """Returns the Aho-Corasick automaton [states, 256] int32; its last state means a stop string.

  A state is a mode and a prefix of one of its patterns. A byte leads to the longest prefix that
  ends the text so far. A whole pattern leads to the mode that it maps to, or stops if that is None.
  The state with the number of a mode is its start.
  """
  states = {(mode, b''): mode for mode in range(len(modes))}
  for mode, patterns in enumerate(modes):
    if b'' in patterns:
      raise types.UserError('an empty stop string was given: leave it out or give its text')
    prefixes = set()
    for pattern in patterns:
      prefixes.update(pattern[:n] for n in range(len(pattern)))
    for prefix in sorted(prefixes):
      if not any(pattern in prefix for pattern in patterns):
        states.setdefault((mode, prefix), len(states))
  stopped = len(states)
  steps = np.full((stopped + 1, 256), stopped, np.int32)
  for (mode, prefix), state in states.items():
    patterns = modes[mode]
    steps[state] = mode
    for byte in set(b''.join(patterns)):
      text = prefix + bytes([byte])
      next_modes = [patterns[pattern] for pattern in patterns if text.endswith(pattern)]
      if next_modes:
        next_mode = next_modes[0]
        steps[state, byte] = stopped if next_mode is None or None in next_modes else next_mode
        continue
      while (mode, text) not in states:
        text = text[1:]
      steps[state, byte] = states[mode, text]
  return steps


def _tokens_without_embedding(folder: str, definition: dict) -> list[dict]:
  """Returns the special tokens of a tokenizer file whose ids config.json's vocabulary lacks.

  Gemma 3 of 270M and 1B parameters reads no images, and has the tokenizer of the models that do.
  """
  size = _read_json(os.path.join(folder, 'config.json')).get('vocab_size')
  added = definition.get('added_tokens')
  if not types.is_of(size, int) or not types.is_of(added, list[dict]):
    return []
  special = [token for token in added or () if token.get('special')]
  return [token for token in special if types.is_of(token.get('id'), int) and token['id'] >= size]


@functools.lru_cache  # once, because a run loads its tokenizer several times
def _log_unused(folder: str, tokens: str) -> None:
  logging.warning(
      'the tokenizer in %s has special tokens for which the model has no embedding: %s. They are '
      'ordinary text',
      folder,
      tokens,
  )


def _without_added_tokens(definition: dict) -> str:
  """Returns the tokenizer file as text, without its added tokens.

  They are also removed from the vocabulary, unless merges make or need them, as the line breaks of
  Gemma: with `ignore_merges` any word of the vocabulary would be one token.
  """
  model = dict(definition['model'])
  added = {token['content'] for token in definition.get('added_tokens') or ()}
  merged: set[str] = set()
  for merge in model.get('merges', ()):  # 'a b' or ['a', 'b']
    parts = merge.split(' ') if isinstance(merge, str) else merge
    merged.update(parts, [''.join(parts)])
  vocab = model['vocab']
  if isinstance(vocab, dict):  # others are refused by name, further on
    removed = added - merged
    model['vocab'] = {name: i for name, i in vocab.items() if name not in removed}
  changes = {'model': model, 'added_tokens': [], 'post_processor': None}
  return json.dumps(definition | changes)


def _token_bytes(path: str, definition: dict, library: tokenizers.Tokenizer) -> tuple[bytes, ...]:
  """Returns the bytes of every id.

  Byte-level vocabularies write each byte as a printable character. Those with byte fallback write a
  space as U+2581, and have the tokens <0x00> to <0xFF> for characters that they lack.
  """
  added = library.get_added_tokens_decoder()
  vocab = library.get_vocab(with_added_tokens=True)
  if not vocab:
    raise types.UserError(f'{path!r} has an empty vocabulary: replace it')
  ordinary = [name for name, i in vocab.items() if i not in added]
  parts = [definition.get('pre_tokenizer'), definition.get('decoder')]
  byte_level = '"ByteLevel"' in json.dumps(parts)
  byte_of = _byte_alphabet()
  if byte_level and set().union(*ordinary) <= byte_of.keys():
    read: Callable[[str], bytes] = lambda name: bytes(byte_of[character] for character in name)
    read_added: Callable[[str], bytes] = lambda name: name.encode()
  elif definition['model'].get('byte_fallback') and _has_all_bytes(vocab):
    read = read_added = _fallback_bytes
  else:
    raise types.UserError(
        f'{path!r} is neither a byte-level BPE vocabulary nor one with byte fallback (but word '
        'pieces?): supported are tokenizers such as those of Qwen2, Qwen3, Llama 3, GPT-2 and Gemma'
    )
  token_bytes = [b''] * (max(vocab.values()) + 1)
  for name, i in vocab.items():
    token_bytes[i] = read_added(added[i].content) if i in added else read(name)
  for text in ('a', ' a '):
    ids = library.encode(text, add_special_tokens=False).ids
    if b''.join(token_bytes[i] for i in ids) != text.encode():
      raise types.UserError(
          f'{path!r} puts a space before each text, as the tokenizers of Llama 2 and Mistral 7B '
          'do, or removes those around it, so a text cannot be put together from the tokens of its '
          'parts: choose another model'
      )
  return tuple(token_bytes)


def _byte_alphabet() -> dict[str, int]:
  """Returns the byte of each character of a byte-level vocabulary.

  The alphabet writes a printable byte as itself, and the others, in order, from U+0100 on.
  """
  alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
  printable = [ord(character) for character in alphabet if ord(character) < 256]
  others = sorted(set(range(256)) - set(printable))
  return dict(zip(alphabet, printable + others))


_FALLBACKS = {f'<0x{byte:02X}>': byte for byte in range(256)}


def _has_all_bytes(vocab: Mapping[str, int]) -> bool:
  """Returns whether each byte has a token. Gemma 2 has a tab as a character alone."""
  return all(name in vocab or chr(byte) in vocab for name, byte in _FALLBACKS.items())


def _fallback_bytes(name: str) -> bytes:
  """Returns the bytes of a token of a vocabulary with byte fallback."""
  if name in _FALLBACKS:
    return bytes([_FALLBACKS[name]])
  return name.replace('\u2581', ' ').encode()


def _settings(folder: str) -> dict:
  """Returns tokenizer_config.json; of an old folder with the special tokens of their own file."""
  settings = _read_json(os.path.join(folder, 'tokenizer_config.json'))
  if 'added_tokens_decoder' in settings:
    return settings
  return settings | _read_json(os.path.join(folder, 'special_tokens_map.json'))


def _eos_ids(folder: str, settings: dict, library: tokenizers.Tokenizer) -> tuple[int, ...]:
  """Returns the ids that end a turn: the tokenizer's eos token and generation_config.json's.

  Without that file config.json names them, as in transformers and vLLM.
  """
  name = _token_name(settings.get('eos_token'))
  own = library.token_to_id(name)
  if name and own is None:
    raise types.UserError(
        f'the eos token {name!r} of {folder!r} is not in its tokenizer.json: {_SAVE_AGAIN}'
    )
  file = 'generation_config.json'
  if not os.path.isfile(os.path.join(folder, file)):
    file = 'config.json'
  raw = _read_json(os.path.join(folder, file))
  listed = raw.get('eos_token_id')
  text = raw.get('text_config')
  if listed is None and isinstance(text, dict):
    listed = text.get('eos_token_id')
  ids = [own, *(listed if isinstance(listed, list) else [listed])]
  if not types.is_of(ids, list[int | None]):
    raise types.UserError(f'{file} in {folder!r} has eos_token_id {listed!r}: ids are needed')
  return tuple(dict.fromkeys(i for i in ids if i is not None))


def _bos_ids(library: tokenizers.Tokenizer) -> tuple[int, ...]:
  """Returns the ids that the post-processor of tokenizer.json puts before a text.

  Ids behind a text are left out, because the text continues. `add_bos_token` in the settings has no
  effect, as in transformers.
  """
  plain = library.encode('a', add_special_tokens=False).ids
  ids = library.encode('a').ids
  starts = [i for i in range(len(ids)) if ids[i : i + len(plain)] == plain]
  return tuple(ids[: starts[0]]) if starts else ()


def _with_turn_end(
    folder: str, eos_ids: tuple[int, ...], render: Callable[..., str], library: tokenizers.Tokenizer
) -> tuple[int, ...]:
  """Returns the eos ids, the first of which ends a turn of the assistant in the chat template.

  Base models have other eos tokens: Qwen2.5 has <|endoftext|>, and its template <|im_end|>.
  """
  messages = [{'role': 'user', 'content': 'Q'}, {'role': 'assistant', 'content': _TURN}]
  try:
    text = render(messages, add_generation_prompt=False)
  except Exception:  # a template may raise anything, and `make_framing` reports it
    return eos_ids
  after = text.rpartition(_TURN)[2] if _TURN in text else ''
  encoding = library.encode(after.lstrip(), add_special_tokens=False)
  added = library.get_added_tokens_decoder()
  first = encoding.ids[:1]
  if not first or first[0] not in added or not added[first[0]].special:
    return eos_ids
  end = first[0]
  if end not in eos_ids:
    _log_turn_end(folder, added[end].content)
  return tuple(dict.fromkeys([end, *eos_ids]))


@functools.lru_cache  # once, because a run loads its tokenizer several times
def _log_turn_end(folder: str, end: str) -> None:
  logging.info(
      'the chat template of %s ends a turn with %s: it is an eos token here, too', folder, end
  )


def _token_name(entry: str | dict | None) -> str:
  """Returns a special token's text; files hold the text or a dictionary with its `content`."""
  if isinstance(entry, dict):
    entry = entry.get('content')
  return entry if isinstance(entry, str) else ''


def _chat_renderer(
    folder: str,
    settings: dict,
    kwargs: Mapping,
    default_template: str,
    control_library: tokenizers.Tokenizer,
) -> Callable[..., str] | None:
  """Returns the function that renders messages with the chat template; None: there is none.

  UserError: the template writes a token that transformers adds, and tokenizer.json lacks.
  """
  has_own = _has_template(folder, settings)
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
  template = str(library.chat_template)
  for token in library.get_added_vocab():
    is_written = token in template or token == library.bos_token
    if is_written and control_library.token_to_id(token) is None:
      raise types.UserError(
          f'the chat template of {folder!r} writes the token {token!r}, which is not in its '
          f'tokenizer.json: {_SAVE_AGAIN}'
      )
  return functools.partial(
      library.apply_chat_template, tokenize=False, add_generation_prompt=True, **kwargs
  )


def _has_template(folder: str, settings: Mapping[str, object]) -> bool:
  """Returns whether a folder has chat templates. The settings are its tokenizer_config.json's."""
  path = pathlib.Path(folder) / 'chat_template.jinja'
  return path.is_file() or bool(settings.get('chat_template'))


def _read_json(path: str) -> dict:
  return types.read_json(path) if os.path.isfile(path) else {}
