"""Conversations of others as episodes: messages in, prompts, turns and observations out.

A row of a file has one of these:

  messages            OpenAI's messages, with `tools`; also `conversation` and `trajectory`
  conversations       ShareGPT: `from` and `value`
  prompt, completion  TRL's and verifiers' messages, or two texts

All rows decide which one. A file with two of them, or with another column of messages, is refused,
and the user names the columns (config.data.columns).

The model's chat template renders the messages, and each turn of the assistant becomes a turn of an
episode. Contexts and turns are encoded apart, as the run encodes prompts and observations.
"""

import collections
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import functools
import pathlib
import re
import types as types_lib
from typing import Any
from typing import NamedTuple

import numpy as np

from stppo_jax import types
from stppo_jax.data import cells
from stppo_jax.data import layout_profile as profile_lib
from stppo_jax.data import row_files
from stppo_jax.text import template as template_lib
from stppo_jax.text import tokenizer as tokenizer_lib
from stppo_jax.types import shown

Message = dict[str, Any]

COLUMNS = (
    'messages conversations conversation trajectory prompt completion tools tools_json tool_defs '
    'functions chat_template_kwargs metadata system system_prompt split reward resolved target '
    'label kto_tag images videos audios error id'
).split()
_ROLES = {
    'human': 'user',
    'gpt': 'assistant',
    'ai': 'assistant',
    'model': 'assistant',
    'developer': 'system',
    'observation': 'tool',
    'function': 'tool',
    'function_response': 'tool',
    'tool_response': 'tool',
    'function_call': 'assistant',
    'tool_call': 'assistant',
}
_KNOWN_ROLES = ('system', 'user', 'assistant', 'tool')
_TEXT_PARTS = ('text', 'input_text', 'output_text')


class Unusable(Exception):
  """A conversation is left out, and counted under this reason."""


class Conversation(NamedTuple):
  """The messages of a row."""

  messages: list[Message]  # role, content, and `trained` for a turn to imitate
  tools: list[dict[str, Any]]  # schemas, as templates take them
  split: str = ''
  is_text: bool = False  # a prompt and a completion as texts, which no template renders


_WHOLE = ('messages', 'conversations', 'conversation', 'trajectory')
_PAIR = ('prompt', 'completion')
# Columns that are false for a row not to imitate: TRL and LLaMA-Factory; SWE-agent.
_FLAGS = ('label', 'kto_tag', 'target', 'resolved')
# Columns whose rows are about more than text, such as image, image_path, images or video_url.
_MEDIA_NAME = re.compile(
    '(image|picture|video|audio)s?[ _-]?([0-9]+|(path|url|file|file_?name|name|id|data|bytes)s?)?'
)
# Names that may mask turns. Only the keys that `_is_masked` reads have a known meaning.
_MASK_NAME = re.compile('mask|weight|(?<![a-z])(loss|train|learn)')
_MASKS = ('weight', 'loss', 'train', 'training')
_CONTENTS = ('content', 'value', 'text', 'system_prompt')
_THOUGHTS = ('thinking', 'reasoning', 'reasoning_content')
# Keys of a message that are read.
_KEYS = (*_MASKS, *_CONTENTS, *_THOUGHTS, 'role', 'from', 'name', 'tool_calls', 'function_call')
_NO_COLUMNS: Mapping[str, str] = types_lib.MappingProxyType({})


def read(
    path: pathlib.Path, min_reward: float, columns: Mapping[str, str] = _NO_COLUMNS
) -> Iterator[tuple[row_files.FileRow, Conversation | str]]:
  """Yields the rows of a file with their Conversation, or with the reason why there is none.

  A row with an `error`, or with a `reward` below `min_reward`, is left out. UserError: a row is no
  conversation, or its columns may mean several things. `columns` are those of config.data.columns.
  """
  source: tuple[str, ...] = ('messages',) if 'messages' in columns else _PAIR
  if not columns:
    source = find_source(path)
  elif not set(source) <= columns.keys():
    raise types.UserError(
        f"config.data.columns={dict(columns)!r} names no conversation: give 'messages', or "
        "'prompt' and 'completion'"
    )
  names = columns.values() if columns else source
  row_files.log_once(f'{path}: conversations in {", ".join(names)}')
  media = _media_columns(path)
  known = [*COLUMNS, *media, *(name.partition('.')[0] for name in names)]
  is_table = path.name.lower().endswith(('.parquet', '.arrow'))
  for row in row_files.read(path, known if is_table else ()):
    fields = cells.without_nulls(row.fields) if is_table else row.fields
    try:
      with row_files.explain(path, row.number):
        _check_is_text(fields)
        if columns:
          fields = _named_fields(fields, columns)
        else:
          _check_flags(fields, min_reward)
        conversation = _conversation(fields, source)
    except Unusable as reason:
      yield row, str(reason)
      continue
    yield row, conversation


def is_conversation(fields: Mapping[str, object]) -> bool:
  """Returns whether a row has a conversation, and no answer beside it (RLVR, verl)."""
  names = [name for name, value in fields.items() if _holds_messages(_parsed(value))]
  has_pair = all(fields.get(name) is not None for name in _PAIR)
  is_task = any(fields.get(name) is not None for name in ('ground_truth', 'reward_model', 'answer'))
  is_task = is_task or fields.get('reward_spec') is not None
  return (bool(names) or has_pair) and not is_task


def find_source(path: pathlib.Path) -> tuple[str, ...]:
  """Returns the columns with the conversation: one, or prompt and completion.

  UserError: there is none, several columns may be meant, or another column may mark bad rows.
  """
  sources: dict[tuple[str, ...], None] = {}
  marks: dict[str, None] = {}
  first = None
  prompts = _Prompts()
  for row in row_files.read(path):
    first = first or row
    present = [name for name, value in row.fields.items() if not cells.is_null(value)]
    others = [name for name in present if _holds_messages(_parsed(row.fields[name]))]
    if set(_PAIR) <= set(present):
      sources[_PAIR] = None
      others = [name for name in others if name not in _PAIR]
    sources |= dict.fromkeys((name,) for name in present if name in _WHOLE or name in others)
    if len(others) == 1:
      prompts.add(others[0], row.fields)
    for name in present:
      if name not in COLUMNS and _marks_bad(name, row.fields[name]):
        marks[name] = None
  if first is None:
    return _PAIR
  listed = cells.listed(first.fields)
  columns = {'messages': 'COLUMN'}
  if not sources:
    raise types.UserError(
        f'{path}:{first.number}: no conversation in the columns {listed}: messages, conversations, '
        f'or prompt and completion are needed. {_advice(first, columns)}'
    )
  names = [name for source in sources for name in source]
  columns = {'messages': names[0]}
  if len(sources) > 1:
    raise types.UserError(
        f'{path}:{first.number}: several columns may be the conversation: {", ".join(names)}. '
        f'{_advice(first, columns)}'
    )
  if marks:
    raise types.UserError(
        f'{path}:{first.number}: column {next(iter(marks))!r} may mark rows not to imitate. '
        f"{_advice(first, columns)}; a key 'flag' names a column that is true for good rows"
    )
  answer = prompts.answer() if len(names) == 1 else ''
  if answer:
    columns = {'prompt': names[0], 'completion': answer}
    raise types.UserError(
        f'{path}:{first.number}: the messages in {names[0]!r} end without an answer, and column '
        f'{answer!r} may hold it. {_advice(first, columns)}'
    )
  return tuple(names)


class _Prompts:
  """Conversations that end before the answer, and columns that may hold it."""

  def __init__(self) -> None:
    self._num_rows = 0
    self._num_open = 0
    self._num_texts: collections.Counter[str] = collections.Counter()  # by column, of open rows
    self._texts: dict[str, set[int]] = {}  # their hashes

  def add(self, source: str, fields: Mapping[str, object]) -> None:
    """Looks at a row. `source` is the column with its messages."""
    self._num_rows += 1
    last: Any = _parsed(fields[source])[-1]
    role = str(last.get('role', last.get('from'))).lower()
    if _ROLES.get(role, role) == 'assistant':
      return
    self._num_open += 1
    for name, value in fields.items():
      is_known = name in COLUMNS and name != 'completion'
      if not isinstance(value, str) or not value.strip() or name == source or is_known:
        continue
      if profile_lib.is_answer_name(name) or len(value.split()) > 1:
        self._num_texts[name] += 1
        self._texts.setdefault(name, set()).add(hash(value))

  def answer(self) -> str:
    """Returns the column that may hold the answers, or ''."""
    by_name = [name for name in self._num_texts if profile_lib.is_answer_name(name)]
    by_value = []
    if self._num_open == self._num_rows:
      for name, number in self._num_texts.items():
        if number == self._num_rows and 2 * len(self._texts[name]) > number:
          by_value.append(name)
    return next(iter([*by_name, *by_value]), '')


def _advice(row, columns):
  return (
      f'The columns are {cells.listed(row.fields)}, the first row is '
      f'{cells.shown_row(row.fields)}. '
      f'Name the columns: --config.data.columns="{columns}"'
  )


def _holds_messages(value):
  """Returns whether a value is a list of messages with roles."""
  is_list = isinstance(value, list) and bool(value) and types.is_of(value, list[dict])
  return is_list and all('role' in item or 'from' in item for item in value)


def _marks_bad(name, value):
  """Returns whether a column that is not read may say that its row or a part of it is bad."""
  is_masking = bool(_MASK_NAME.search(name.lower())) and not isinstance(value, str)
  if is_masking and ('mask' in name.lower() or value != 1):  # 1 may also mask a turn
    return True
  return cells.marks_bad(name, value)


def _named_fields(fields, columns):
  """Returns the columns that the user names, under their own names here. Raises Unusable."""
  named = {key: _nested(fields, name) for key, name in columns.items()}
  for key in ('messages', *_PAIR, 'flag'):
    if key in named and named[key] is None:
      raise ValueError(f'column {columns[key]!r} is empty or missing: correct config.data.columns')
  if 'flag' in named and not cells.flag(columns['flag'], named['flag']):
    raise Unusable(f'{columns["flag"]!r} is false')
  return named


def _nested(fields, name):
  """Returns the value of a column, or of a key in it (`a.b`); None: there is none."""
  if name in fields:
    return fields[name]
  outer, _, rest = name.partition('.')
  inner = _parsed(fields.get(outer))
  return _nested(inner, rest) if rest and isinstance(inner, dict) else None


def _check_flags(fields, min_reward):
  """Raises Unusable for a row that is marked as bad. ValueError: a mark is of another kind."""
  if cells.is_error(fields.get('error')):
    raise Unusable('an error')
  reward = fields.get('reward')
  if reward not in (None, ''):
    try:
      number = float(reward)
    except (TypeError, ValueError):
      raise ValueError(
          f"column 'reward' is {shown(reward)}: a number is needed, or name the columns in "
          'config.data.columns'
      ) from None
    if not number >= min_reward:
      raise Unusable(f'a reward below {min_reward:g}')
  for name in _FLAGS:
    value = fields.get(name)
    if value not in (None, '') and not cells.is_null(value) and not cells.flag(name, value):
      raise Unusable(f'{name!r} is false')


def _media_columns(path):
  """Returns the columns of a Parquet file that may name images, videos or sounds."""
  if not path.name.lower().endswith('.parquet'):
    return []
  first = next(row_files.read(path, ('',)), None)  # the names alone
  return [name for name in (first.fields if first else ()) if _is_media_name(name)]


def _is_media_name(name):
  return bool(_MEDIA_NAME.fullmatch(name.lower()))


def _check_is_text(fields):
  """Raises Unusable for a row about an image, a video or a sound."""
  for name, value in fields.items():
    is_media = _is_media_name(name) and not cells.is_null(value)
    if is_media and cells.without_nulls(_parsed(value)):
      raise Unusable(f'{name}, and only text is read')


def _conversation(fields, source):
  """Returns the conversation of a row. ValueError: it has none. Unusable: it is left out."""
  tools = _tools(fields)
  split = fields.get('split')
  split = split if isinstance(split, str) else ''
  if source == _PAIR:
    prompt, completion = (_parsed(fields.get(name)) for name in _PAIR)
    if isinstance(prompt, str) and isinstance(completion, str):
      messages = [_text_message('user', prompt), _text_message('assistant', completion)]
      messages[1]['trained'] = bool(completion)
      _check_is_in_text(prompt, fields, tools)
      return _checked(Conversation(messages, tools, split, is_text=True))
    before = _messages('prompt', prompt, 'user', is_trained=False)
    after = _messages('completion', completion, 'assistant', is_trained=True)
    messages = before + after
    _add_system(messages, fields)
    return _checked(Conversation(messages, tools, split))
  (name,) = source
  messages = _messages(name, _parsed(fields.get(name)), '', is_trained=True)
  _add_system(messages, fields)
  return _checked(Conversation(messages, tools, split))


def _check_is_in_text(prompt, fields, tools):
  """Raises ValueError if a prompt without messages leaves out a system text or tools."""
  names = [tool['function']['name'] for tool in tools]
  missing = [name for name in names if name not in prompt]
  texts: list[Message] = [_text_message('user', '')]
  _add_system(texts, fields)
  system = texts[0]['content'].strip()  # '' if no system message is added
  kind = 'tools' if missing else 'a system text'
  if missing or system not in prompt:
    raise ValueError(
        f'the row has {kind}, and a prompt and a completion as two texts, to which nothing is '
        "added: write messages, as in 'prompt': [{'role': 'user', 'content': ..}]"
    )


def _checked(conversation):
  """Returns a conversation up to its last turn to imitate."""
  trained = [i for i, m in enumerate(conversation.messages) if m.get('trained')]
  if not trained:
    raise Unusable('no turn of the assistant to imitate')
  if not trained[0]:
    raise Unusable('no message before the first turn of the assistant')
  return conversation._replace(messages=conversation.messages[: trained[-1] + 1])


def _add_system(messages, fields):
  """Adds the system message that columns beside the messages hold."""
  kwargs = _template_kwargs(fields)
  has_system = messages[0]['role'] == 'system'
  system = next(filter(None, (fields.get('system'), kwargs.get('custom_instructions'))), '')
  if isinstance(system, str) and system and not has_system:
    messages.insert(0, _text_message('system', system))
    has_system = True
  elif isinstance(system, str) and system.strip() not in messages[0]['content']:
    row_files.log_once("column 'system' is not read where the messages have a system message")
  if fields.get('system_prompt') and not has_system:
    row_files.log_once("column 'system_prompt' is not read: call it 'system' to show it")
  functions: list[str] = []
  for name in ('python_tools', 'xml_tools'):
    value = _parsed(kwargs.get(name)) or []
    value = value if isinstance(value, list) else [value]
    if name == 'python_tools' or not all(map(_is_schema, map(_parsed, value))):
      functions += map(str, value)  # no schemas that the template could show
  if functions:
    if not has_system:
      messages.insert(0, _text_message('system', ''))
    texts = [messages[0]['content'], *functions]
    messages[0]['content'] = '\n\n'.join(filter(None, texts))


def _template_kwargs(fields):
  """Returns the arguments of the chat template that a row has (smoltalk2)."""
  kwargs = _parsed(fields.get('chat_template_kwargs'))
  return kwargs if isinstance(kwargs, dict) else {}


def _parsed(value):
  return cells.parsed(value) if isinstance(value, str) else value


def _text_message(role, content):
  return {'role': role, 'content': content}


def _messages(name, value, role_of_text, is_trained):
  """Returns the messages of a column. A text is one message of `role_of_text`, if that is given."""
  if isinstance(value, str) and role_of_text:
    value = [_text_message(role_of_text, value)]
  if not types.is_of(value, list[dict]) or not value:
    raise ValueError(f'column {name!r} is {shown(value)}: a list of messages is needed')
  return [_message(name, raw, is_trained) for raw in value]


def _message(name: str, raw: Mapping[str, Any], is_trained: bool) -> Message:
  """Returns a message with role, content and calls."""
  own_role = raw.get('role', raw.get('from'))
  own_role = own_role.lower() if isinstance(own_role, str) else own_role
  role = _ROLES.get(own_role, own_role)
  if role not in _KNOWN_ROLES:
    allowed = ', '.join((*_KNOWN_ROLES, *_ROLES))
    raise ValueError(f'column {name!r} has the role {shown(own_role)}: allowed are {allowed}')
  contents = (raw[key] for key in _CONTENTS if raw.get(key) is not None)
  content = _content(name, next(contents, None))
  message: Message = {'role': role, 'content': content}
  calls = _parsed(raw.get('tool_calls'))
  if own_role in ('function_call', 'tool_call'):  # the call is the text
    calls = cells.parsed(content)
    calls = calls if isinstance(calls, list) else [calls]
    message['content'] = ''
  older = _parsed(raw.get('function_call'))  # OpenAI's older form of one call
  if older and not calls:
    calls = [older]
  if calls:
    message['tool_calls'] = [_call(name, call) for call in calls]
  for extra in (*_THOUGHTS, 'tool_call_id', 'name'):
    if isinstance(raw.get(extra), str) and raw[extra]:
      message['reasoning_content' if extra in _THOUGHTS else extra] = raw[extra]
  is_empty = not message['content'].strip() and not calls
  if role == 'assistant' and is_trained and not is_empty:
    message['trained'] = _is_imitated(name, raw)
  return message


def _is_imitated(name, raw):
  """Returns whether a turn is imitated. ValueError: only a part of it."""
  parts = raw.get('content')
  parts = parts if isinstance(parts, list) else []
  if raw.get('train_detail') or any(map(_is_masked, parts)):
    raise ValueError(f'column {name!r} masks a part of a turn: only whole turns can be masked')
  for key, value in raw.items():
    if key not in _KEYS and value is not None and _marks_bad(key, value):
      raise ValueError(
          f'column {name!r} has a turn with {key}={shown(value)}, which is not read and may mark '
          "it as bad: write 'weight': 0 into the turns not to imitate, and leave the key out"
      )
  return not _is_masked(raw)


def _is_masked(raw):
  names = [name for name in _MASKS if raw.get(name) is not None]
  return not all(cells.flag(name, raw[name]) for name in names)


def _content(name, content):
  """Returns a content as a text."""
  if content is None:
    return ''
  if isinstance(content, str):
    return content
  if not types.is_of(content, list[dict]):
    raise ValueError(f'column {name!r} has the content {shown(content)}: a text is needed')
  for part in content:
    if part.get('type') not in _TEXT_PARTS or not isinstance(part.get('text'), str):
      kind = part.get('type')
      raise ValueError(f'column {name!r} has a content of type {kind!r}: only text is read')
  return ''.join(part['text'] for part in content)


def _call(name, call):
  """Returns a call with its arguments as a dict, as templates take it."""
  call = _parsed(call)
  function = call.get('function', call) if isinstance(call, dict) else None
  if not isinstance(function, dict) or not isinstance(function.get('name'), str):
    raise ValueError(f'column {name!r} has the call {shown(call)}: a function name is needed')
  names = ('arguments', 'parameters', 'args', 'input')
  arguments = next(filter(None, map(function.get, names)), {})
  if isinstance(arguments, str):
    arguments = cells.parsed(arguments)
  if not isinstance(arguments, dict):
    raise ValueError(
        f'column {name!r} has the arguments {shown(arguments)} of {function["name"]}: a JSON '
        'object is needed'
    )
  written = {'type': 'function', 'function': {'name': function['name'], 'arguments': arguments}}
  if isinstance(call.get('id'), str):
    written['id'] = call['id']
  return written


def _tools(fields):
  """Returns the schemas of a row's tools: those of OpenAI and verifiers, also as JSON text."""
  metadata = _parsed(fields.get('metadata'))
  value = _parsed(fields.get('tools') or fields.get('tool_defs') or [])
  others = [fields.get('tools_json'), fields.get('functions')]
  others.append(_template_kwargs(fields).get('xml_tools'))
  others.append(metadata.get('tools') if isinstance(metadata, dict) else None)
  for other in map(_parsed, others):
    schemas = list(map(_parsed, other)) if isinstance(other, list) else []
    if not value and all(map(_is_schema, schemas)):
      value = schemas
  if not isinstance(value, list):
    raise ValueError(f"column 'tools' is {shown(value)}: a list of schemas is needed")
  tools = []
  for tool in map(_parsed, value):
    if not _is_schema(tool):
      raise ValueError(f"column 'tools' has {shown(tool)}: a schema with a name is needed")
    function = tool.get('function', tool)
    if isinstance(function.get('parameters'), str):
      function = {**function, 'parameters': _parsed(function['parameters'])}
    outer = tool if 'function' in tool else {'type': 'function'}
    tools.append({**outer, 'function': function})
  return tools


def _is_schema(tool):
  function = tool.get('function', tool) if isinstance(tool, dict) else None
  return isinstance(function, dict) and isinstance(function.get('name'), str)


class _Parts(NamedTuple):
  """The text of a template around a turn."""

  before: str  # all that the model has read before the turn
  turn: str  # the turn, with its end
  rest: str  # what the template writes after the end
  whole: str  # the text of all messages up to the turn, as the template shows it


@dataclasses.dataclass(frozen=True)
class Renderer:
  """Renders conversations to episodes of one tokenizer.

  Attributes:
    tokenizer: of the model that is trained.
    max_observation: tokens of an observation at most, without a chat template.
    tool_form: one of tool_calls.FORMS, for calls that no template writes.
    stop_strings: texts at which a turn ends, without a chat template.
  """

  tokenizer: tokenizer_lib.Tokenizer
  max_observation: int = 2**20
  tool_form: str = 'hermes'
  stop_strings: tuple[str, ...] = ()

  @functools.cached_property
  def _template(self) -> template_lib.Template:
    return template_lib.Template(self.tokenizer, self.max_observation, self.tool_form)

  def episode(self, conversation: Conversation, name: str) -> types.Episode:
    """Returns the episode of a conversation. ValueError: the template refuses its messages."""
    episode = types.Episode(types.Task(name), 0, _array([]), [], demonstrated=True)
    messages = conversation.messages
    positions = [i for i, message in enumerate(messages) if message.get('trained')]
    previous = None
    for i in positions:
      if self.tokenizer.render is None or conversation.is_text:
        context, ids = self._plain(conversation, previous, i, episode)
        parts = None
      else:
        parts = self._parts(conversation, i)
        ids = self.tokenizer.encode_marked(parts.turn)
        context = self._context(conversation, previous, i, parts, episode)
      if previous is None:
        episode.prompt = _array(context)
      else:
        episode.turns[-1].observation = _array(context)
      logp = np.full(len(ids), np.nan, np.float32)
      episode.turns.append(types.Turn(_array(ids), logp))
      previous = (i, parts)
    return episode

  def _plain(self, conversation, previous, i, episode):
    """Returns (ids before the turn, ids of the turn) without a chat template."""
    messages = conversation.messages
    tools = conversation.tools
    text = self._template.written(messages[: i + 1], tools)[i]['content']
    ids = self.tokenizer.encode(text, control=conversation.is_text)
    is_ended = bool(ids) and ids[-1] in self.tokenizer.eos_ids
    if not is_ended and not (self.stop_strings and text.endswith(self.stop_strings)):
      ids = ids + list(self.tokenizer.eos_ids[:1])
    if conversation.is_text:
      return self._template.encode_prompt(messages[0]['content']), ids
    if previous is None:
      context = self._template.encode(self._template.written(messages[:i], tools))
    else:
      turn = episode.turns[-1].tokens.tolist()
      context = self._template.encode_after(turn, messages[previous[0] + 1 : i], tools)
    return context, ids

  def _context(self, conversation, previous, i, parts, episode):
    """Returns the ids between a turn and the turn before, or those of the prompt."""
    if previous is None:
      return self.tokenizer.encode_marked(parts.before)
    j, earlier = previous
    if parts.before.startswith(earlier.whole):
      between = earlier.rest + parts.before[len(earlier.whole) :]
      return self.tokenizer.encode_marked(between)
    # The template shows earlier turns in another way, such as without their thoughts. In a run the
    # agent reads its turns as it wrote them.
    turn = episode.turns[-1].tokens.tolist()
    messages = [_public(message) for message in conversation.messages[j + 1 : i]]
    return self._template.encode_after(turn, messages, conversation.tools)

  def _parts(self, conversation: Conversation, i: int) -> _Parts:
    """Returns the text of the template around message i."""
    tools = conversation.tools
    written = self._template.written(conversation.messages[: i + 1], tools)
    messages = [_public(message) for message in written]
    text = functools.partial(self._template.text, tools=tools)
    message = messages[i]
    before = text(messages[:i], generation_prompt=True)
    thought = message.pop('reasoning_content', '')
    if thought:
      shows = thought.strip() in text([*messages[:i], {**message, 'reasoning_content': thought}])
      if shows:
        message['reasoning_content'] = thought
      else:
        message['content'] = f'<think>\n{thought}\n</think>\n\n{message["content"]}'
    bare = text(messages[:i], generation_prompt=False)
    whole = text(messages, generation_prompt=False)
    if not whole.startswith(bare) or not before.startswith(bare):
      raise ValueError('the chat template shows earlier messages otherwise after a turn')
    span = whole[len(bare) :]
    header = before[len(bare) :]
    if span.startswith(header):
      turn, rest = self._split_end(span[len(header) :])
      return _Parts(before, turn, rest, whole)
    return self._after_prefill(message, bare, header, span, whole)

  def _after_prefill(self, message, bare, header, span, whole):
    """Returns the parts of a turn whose generation prompt opens a thought.

    The template leaves the thought out of the turn, or the turn has none.
    """
    content = message['content']
    thought, closing, answer = content.rpartition('</think>')
    if closing:
      answer = self.tokenizer.mark(answer.strip(), only_special=True)
      start = span.rfind(answer)
      if answer and start >= 0:
        body = self.tokenizer.mark(thought.removeprefix('<think>').lstrip('\n'), only_special=True)
        turn, rest = self._split_end(f'{body}</think>\n\n{span[start:]}')
        return _Parts(bare + header, turn, rest, whole)
    starts = [match.start() for match in self.tokenizer.any_added.finditer(header)]
    shared = max((start for start in starts if span.startswith(header[:start])), default=0)
    turn, rest = self._split_end(span[shared:])
    return _Parts(bare + header[:shared], turn, rest, whole)

  def _split_end(self, text: str) -> tuple[str, str]:
    """Splits a text after the last token that ends a turn."""
    end = 0
    for i in self.tokenizer.eos_ids:
      name = self.tokenizer.decode([i])
      start = text.rfind(name) if name else -1
      if start >= 0:
        end = max(end, start + len(name))
    if not end:
      return text, ''
    return text[:end], text[end:]


def fitted(episode: types.Episode, longest: int) -> types.Episode | None:
  """Returns an episode without its last turns, so that at most `longest` tokens are left.

  None: not even the first turn fits.
  """
  turns = list(episode.turns)
  while turns:
    last = dataclasses.replace(turns[-1], observation=_array([]))
    shorter = dataclasses.replace(episode, turns=[*turns[:-1], last])
    if len(shorter.unroll()[0]) <= longest:
      return shorter
    turns.pop()
  return None


def _public(message):
  """Returns the fields of a message that a template reads."""
  return {name: value for name, value in message.items() if name != 'trained'}


def _array(ids: Sequence[int]) -> np.ndarray:
  return np.array(ids, np.int32)
