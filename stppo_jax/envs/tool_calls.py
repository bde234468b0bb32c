"""Function calls in an agent's text: text in, calls out, in the forms of common model families.

  hermes   <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>           Qwen, Hermes
  llama3   {"name": "add", "parameters": {"a": 1}}, after <|python_tag|> or alone, several with ';'
           between; <|python_tag|>search.call(query="cats") of the built-in tools  Llama 3
  tags     <search>cats</search>: the tool's name as a tag, around the text of its only parameter or
           a JSON object                                                           Search-R1

`parse` never raises and takes linear time, whatever a model wrote. What stands before `</think>` is
content. Tools are described by JSON schemas as chat templates take them: {"type": "function",
"function": {"name", "description", "parameters": {"properties", "required", ..}}}.
"""

import ast
from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import json
import re
from typing import Any
from typing import cast
from typing import Protocol

Schema = Mapping[str, Any]

_MOST_ENDS = 3  # tags at which a JSON text may end: the first ones may stand inside its strings
_LONGEST_BUILT_IN = 10_000  # characters; a parser of Python is not made for hostile texts
_SHOWN = 80  # characters of a broken call in its error
_PYTHON_TAG = '<|python_tag|>'
_BARE_CALL = re.compile(r'\{\s*"(?:name|type|function)"\s*:')
_BUILT_IN = re.compile(r'\s*([A-Za-z_]\w*)\.call\(')


@dataclasses.dataclass(frozen=True)
class Call:
  """One call. With an `error` it is malformed, and the other fields hold what could be read."""

  name: str
  arguments: dict[str, Any]
  error: str = ''  # what is wrong, for the agent to read


class Form(Protocol):
  """How a model family writes its calls."""

  stop_strings: tuple[str, ...]  # end a turn where the agent has no other end

  def parse(self, text: str) -> tuple[str, tuple[Call, ...]]:
    """Returns (content, calls) of an agent's turn: the text without its calls, stripped."""
    ...

  def write(self, call: Call) -> str:
    """Returns a call as `parse` reads it."""
    ...

  def declare(self) -> str:
    """Returns a text that tells the agent the tools and the form, for models without a template."""
    ...


def make_form(name: str, tools: Sequence[Schema] = ()) -> Form:
  """Returns one of FORMS for these tools; only 'tags' needs them for parsing."""
  form: Form = FORMS[name](tuple(tools))
  return form


class Hermes:
  """Qwen's and Hermes' form: JSON objects between <tool_call> tags, among other text."""

  stop_strings = ('</tool_call>',)

  def __init__(self, tools: Sequence[Schema] = ()):
    self._tools = tools

  def parse(self, text: str) -> tuple[str, tuple[Call, ...]]:
    """Returns (content, calls). The last block may lack its closing tag if its JSON is whole."""
    content, calls = [], []
    read = lambda unused_name, body: _load(body)
    for inside, piece, found in _blocks(text, ('tool_call',), read, may_be_open=True):
      if not inside:
        content.append(piece)
      else:
        calls.append(_call(found, piece, ('arguments', 'parameters')))
    return ''.join(content).strip(), tuple(calls)

  def write(self, call: Call) -> str:
    """Returns the block of a call."""
    return f'<tool_call>\n{_written(call, "arguments")}\n</tool_call>'

  def declare(self) -> str:
    """Returns the schemas, one per line, and an example."""
    example = '<tool_call>{"name": .., "arguments": {..}}</tool_call>'
    return _declaration(self._tools, f'To call one, write {example}.')


class Llama3:
  """Llama 3's form: the whole turn is a call, or what follows <|python_tag|>."""

  stop_strings = ()  # nothing marks the end of a call

  def __init__(self, tools: Sequence[Schema] = ()):
    self._tools = tools

  def parse(self, text: str) -> tuple[str, tuple[Call, ...]]:
    """Returns (content, calls). A turn of JSON that does not begin as a call does is content."""
    thought, text = _split_thought(text)
    before, tag, body = text.partition(_PYTHON_TAG)
    if _BARE_CALL.match(text.lstrip()):
      before, tag, body = '', '', text
    elif not tag:
      return (thought + text).strip(), ()
    content = (thought + before).strip()
    if built_in := _BUILT_IN.match(body):
      return content, (_built_in_call(built_in[1], body),)
    calls = []
    decoder, at, body = json.JSONDecoder(parse_constant=_refuse), 0, body.strip()
    while at < len(body):
      try:
        found, at = decoder.raw_decode(body, at)
      except (ValueError, RecursionError) as error:
        found, rest, at = _Broken(_reason(error)), body[at:], len(body)
        calls.append(_call(found, rest, ()))
        break
      calls.append(_call(found, body, ('parameters', 'arguments')))
      at = _skip(body, at)
    if tag and not calls:
      calls.append(_call(_Broken('nothing follows the tag'), '', ()))
    return content, tuple(calls)

  def write(self, call: Call) -> str:
    """Returns the turn of a call."""
    return _written(call, 'parameters')

  def declare(self) -> str:
    """Returns the schemas, one per line, and an example."""
    example = '{"name": .., "parameters": {..}}'
    return _declaration(self._tools, f'To call one, write {example} and nothing else.')


class Tags:
  """Each tool's name is a tag around its argument."""

  def __init__(self, tools: Sequence[Schema] = ()):
    self._functions = {tool['function']['name']: tool['function'] for tool in tools}
    self.stop_strings = tuple(f'</{name}>' for name in self._functions)

  def parse(self, text: str) -> tuple[str, tuple[Call, ...]]:
    """Returns (content, calls). A tag that is not closed is a malformed call."""
    content, calls = [], []
    for inside, piece, found in _blocks(text, tuple(self._functions), self._arguments):
      if not inside:
        content.append(piece)
      elif isinstance(found, _Broken):
        calls.append(Call(inside, {}, f'{found.reason}: {_shown(piece)}'))
      else:
        calls.append(Call(inside, found))
    return ''.join(content).strip(), tuple(calls)

  def write(self, call: Call) -> str:
    """Returns the tags of a call. Arguments that are a text, as a client may send, stay one."""
    only, value = self._only_parameter(call.name), cast(Any, call.arguments)
    if only and isinstance(value, dict):
      value = value.get(only)
    body = value if isinstance(value, str) else json.dumps(call.arguments, ensure_ascii=False)
    return f'<{call.name}>{body}</{call.name}>'

  def declare(self) -> str:
    """Returns one line per tool."""
    lines = []
    for name, function in self._functions.items():
      names = ', '.join(f'"{p}": ..' for p in _properties(function))
      body = self._only_parameter(name) or f'{{{names}}}'
      lines.append(f'<{name}>{body}</{name}>: {_one_line(function.get("description", ""))}')
    return '\n'.join(['You may call these tools:', *lines]) + '\n'

  def _only_parameter(self, name):
    """Returns the name of the parameter that takes the text between the tags, or None."""
    properties = _properties(self._functions.get(name, {}))
    parameter, *others = properties or (None,)
    if others or parameter is None or properties[parameter].get('type') not in ('string', None):
      return None
    return parameter

  def _arguments(self, name, body):
    if only := self._only_parameter(name):
      return {only: body.strip()}
    found = _load(body) if body.strip() else {}
    if isinstance(found, dict) or isinstance(found, _Broken):
      return found
    properties = list(_properties(self._functions[name]))
    if len(properties) == 1:  # a number, say
      return {properties[0]: found}
    return _Broken('the arguments are no JSON object')


FORMS: dict[str, Callable[..., Any]] = {'hermes': Hermes, 'llama3': Llama3, 'tags': Tags}


@dataclasses.dataclass(frozen=True)
class _Broken:
  reason: str


def _blocks(text, names, read, may_be_open=False):
  """Yields (name, body, `read(name, body)`) per block, and ('', text, None) for what is between.

  A body ends at the first tag at which it can be read, among the next _MOST_ENDS: earlier tags are
  inside its strings. With `may_be_open` it also ends at another block's tag or at the text's end.
  """
  thought, text = _split_thought(text)
  yield '', thought, None
  pattern = '|'.join(re.escape(name) for name in names)
  tags = list(re.finditer(rf'<(/?)({pattern})>', text)) if names else []
  at, i = 0, 0
  while i < len(tags):
    closing, name = tags[i].groups()
    if closing:  # of nothing
      i += 1
      continue
    yield '', text[at : tags[i].start()], None
    start, found = tags[i].end(), None
    for tag in [*tags[i + 1 : i + 1 + _MOST_ENDS], None][:_MOST_ENDS]:
      is_end = tag is not None and tag.groups() == ('/', name)
      end = len(text) if tag is None else tag.start()
      attempt = _Broken(f'</{name}> is missing')
      if is_end or may_be_open:
        attempt = read(name, text[start:end])
      if found is None or not isinstance(attempt, _Broken):
        found, body, at = attempt, text[start:end], tag.end() if tag and is_end else end
      if not isinstance(found, _Broken):
        break
    yield name, body, found
    while i < len(tags) and tags[i].start() < at:
      i += 1
  yield '', text[at:], None


def _split_thought(text):
  """Returns (text up to the first </think>, the rest). A turn that begins with a call has none."""
  start = text.lstrip()[:8]
  before, tag, after = text.partition('</think>')
  is_thought = bool(tag) and (start.startswith('<think>') or start[:1] not in ('<', '{'))
  return (before + tag, after) if is_thought else ('', text)


def _load(text):
  """Returns the value of a JSON text, or a _Broken."""
  try:
    return json.loads(text, parse_constant=_refuse)
  except (ValueError, RecursionError) as error:
    return _Broken(_reason(error))


def _refuse(name):
  raise ValueError(f'{name} is no JSON')


def _reason(error):
  if isinstance(error, json.JSONDecodeError):
    return f'not JSON ({error.msg} at character {error.pos})'
  return (
      'not JSON (nested too deeply)' if isinstance(error, RecursionError) else f'not JSON ({error})'
  )


def _call(found, text, keys):
  """Makes a call of a JSON value; the arguments are under one of `keys`, also as JSON in a text."""
  if isinstance(found, _Broken):
    return Call('', {}, f'{found.reason}: {_shown(text)}')
  if not isinstance(found, dict) or not isinstance(found.get('name'), str) or not found['name']:
    return Call('', {}, f'a JSON object with a "name" is needed: {_shown(text)}')
  arguments = next((found[key] for key in keys if key in found), {})
  if isinstance(arguments, str):
    arguments = _load(arguments)
  if arguments is None:
    arguments = {}
  if not isinstance(arguments, dict):
    return Call(found['name'], {}, f'"{keys[0]}" must be a JSON object: {_shown(text)}')
  return Call(found['name'], arguments)


def _built_in_call(name, body):
  """Reads `name.call(key="value", ..)`, of which Llama 3's built-in tools make use."""
  try:
    assert len(body) <= _LONGEST_BUILT_IN
    node = ast.parse(body.strip(), mode='eval').body
    assert isinstance(node, ast.Call) and not node.args
    arguments = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in node.keywords}
    json.dumps(arguments, allow_nan=False)
  except Exception:  # a parser of Python raises many kinds, a model's text may cause any
    return Call(name, {}, f'{name}.call(key="value") is needed: {_shown(body)}')
  return Call(name, arguments)


def _skip(text, at):
  """Returns the place after white space, ';' and ','."""
  while at < len(text) and (text[at].isspace() or text[at] in ';,'):
    at += 1
  return at


def _written(call, key):
  return json.dumps({'name': call.name, key: call.arguments}, ensure_ascii=False)


def _declaration(tools, how):
  lines = [json.dumps(tool, ensure_ascii=False) for tool in tools]
  return '\n'.join(['You may call these tools:', *lines, how]) + '\n'


def _properties(function):
  return (function.get('parameters') or {}).get('properties') or {}


def _one_line(text):
  return ' '.join(text.split())


def _shown(text):
  text = _one_line(text[: 4 * _SHOWN])
  return text if len(text) <= _SHOWN else f'{text[:_SHOWN]}..'
