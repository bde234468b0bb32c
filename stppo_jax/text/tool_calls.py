"""Tool calls in an agent's text, in the forms of common model families.

  hermes    <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>          Qwen, Hermes
  qwen_xml  <tool_call><function=add><parameter=a>1</parameter></function></tool_call>, with line
            breaks around each value                                          Qwen3-Coder, Qwen3.5
  llama3    {"name": "add", "parameters": {"a": 1}}, after <|python_tag|> or as the whole turn,
            several with ';' between
  tags      <search>cats</search>: the tool's name as a tag, around the text of its only parameter
            or a JSON object                                                             Search-R1

`parse` never raises and takes linear time, whatever text a model writes. A call in a thought is
none: a thought is content, also one that lacks one of its two tags. Tools are
described by JSON schemas as chat templates take them: {"type": "function", "function": {"name",
"description", "parameters": {"properties", "required", ..}}}.
"""

import ast
from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import functools
import json
import math
import re
from typing import Any

from stppo_jax import types
from stppo_jax.text import thoughts

Schema = Mapping[str, Any]

_MAX_ENDS = 3  # tags at which a JSON text may end: the first ones may be inside its strings
_SHOWN_CHARS = 80  # length of a malformed call in its error
_DECLARATION = 'You may call these tools:'
_PYTHON_TAG = '<|python_tag|>'
_BARE_CALL = re.compile(r'\s*(?:```(?:json)?\s*)?\{\s*"(?:name|type|function)"\s*:')
_OPEN_THOUGHT = re.compile(r'\s*<think>')
_SPACE = re.compile(r'\s*')
_FENCE = re.compile(r'\s*```')
_LANGUAGE = re.compile(r'\w*\s')  # after the start of a code fence
_NAMING_KEYS = {'name', 'type', 'id'}  # keys of a call besides its arguments
_MAX_DEPTH = 3  # limit on the search for types in a schema
_MAX_PARTS = 16  # limit on its alternatives
AUTO = 'auto'  # the form in which the chat template shows calls


@dataclasses.dataclass(frozen=True)
class Call:
  """One call. With an `error` it is malformed, and the other fields hold its readable part."""

  name: str
  arguments: dict[str, Any]
  error: str = ''  # says to the agent what is wrong


Calls = tuple[Call, ...]
Parsed = tuple[str, Calls]  # content of a turn, and its calls


_PROBE = Call('look_up', {'query': 'rivers'})
_PLAIN = 'The-agent-says-this'
_FUNCTION = {
    'name': _PROBE.name,
    'description': 'Looks it up.',
    'parameters': {'type': 'object', 'properties': {'query': {'type': 'string'}}},
}
# A call with which a chat template is tried. Mistral's wants an id of nine characters.
PROBE_TOOL: Schema = {'type': 'function', 'function': _FUNCTION}
PROBE_QUESTION = {'role': 'user', 'content': 'Q'}
PROBE_TURN: dict[str, Any] = {
    'role': 'assistant',
    'content': '',
    'tool_calls': [
        {
            'id': 'probe0001',
            'type': 'function',
            'function': {'name': _PROBE.name, 'arguments': dict(_PROBE.arguments)},
        }
    ],
}


class Form:
  """How a model family writes its calls. Here they are JSON objects."""

  stop_strings: tuple[str, ...] = ()  # end a turn if the agent has no other end
  keys: tuple[str, ...]  # names of the arguments in a call, the one to write first
  template: str  # '%s' stands for the JSON object
  advice: str  # tells the agent how to write a call

  def __init__(self, tools: Sequence[Schema] = ()):
    self._tools = tuple(tools)
    functions = [tool['function'] for tool in tools]
    self._functions = {function['name']: function for function in functions}

  def parse(self, text: str, in_thought: bool = False) -> Parsed:
    """Returns (content, calls) of an agent's turn: the text without its calls, stripped.

    With `in_thought` the turn begins in a thought that its prompt has opened.
    """
    raise NotImplementedError

  def write(self, call: Call) -> str:
    """Returns a call as `parse` reads it."""
    value = {'name': call.name, self.keys[0]: call.arguments}
    return self.template % json.dumps(value, ensure_ascii=False)

  def declare(self) -> str:
    """Returns a text that tells the agent the tools and the form, for models without a template."""
    tools = [json.dumps(tool, ensure_ascii=False) for tool in self._tools]
    lines = [_DECLARATION, *tools, self.advice]
    return '\n'.join(lines) + '\n'


def form_name(setting: str, render: Callable[..., str] | None) -> str:
  """Returns the form of a setting. 'auto' is the form in which a chat template shows calls.

  `render` is Tokenizer.render.
  """
  if setting != AUTO:
    return setting
  turn = shown_call(render)
  return next((name for name in FORMS if reads(name, turn)), 'hermes')


def shown_call(render: Callable[..., str] | None) -> str:
  """Returns the turn with a call, as a chat template shows it; '': it shows no call."""
  if render is None:
    return ''
  try:
    plain = render([PROBE_QUESTION, {'role': 'assistant', 'content': _PLAIN}])
    called = render([PROBE_QUESTION, PROBE_TURN])
  except Exception:  # a template may raise anything
    return ''
  before, _, after = plain.rpartition(_PLAIN)
  return called.removeprefix(before).removesuffix(after) if _PROBE.name in called else ''


def reads(name: str, turn: str) -> bool:
  """Returns whether a form reads a `shown_call`."""
  return make_form(name, [PROBE_TOOL]).parse(turn)[1] == (_PROBE,)


def make_form(name: str, tools: Sequence[Schema] = ()) -> Form:
  """Returns one of FORMS for these tools, which 'tags' and 'qwen_xml' need for parsing."""
  if name not in FORMS:
    raise types.UserError(f'config.env.options.form={name!r}: allowed are {", ".join(FORMS)}')
  return FORMS[name](tools)


class Hermes(Form):
  """The form of Qwen and Hermes: JSON objects between <tool_call> tags, among other text."""

  stop_strings = ('</tool_call>',)
  keys = ('arguments', 'parameters')
  template = '<tool_call>\n%s\n</tool_call>'
  advice = 'To call one, write <tool_call>{"name": .., "arguments": {..}}</tool_call>.'

  def parse(self, text: str, in_thought: bool = False) -> Parsed:
    """Returns (content, calls). The last block may lack its closing tag if its JSON is complete."""
    return _parse_blocks(text, 'tool_call', self._read, in_thought, may_be_open=True)

  def _read(self, unused_tag: str, body: str) -> Calls:
    return _read_values(_without_fence(body), self.keys)


class QwenXml(Form):
  """The form of Qwen3-Coder: a tag for the function and one for each of its parameters.

  Values are texts, and the schema of a parameter gives their type.
  """

  stop_strings = ('</tool_call>',)
  advice = (
      'To call one, write <tool_call>, <function=NAME>, <parameter=KEY>, the value, </parameter>, '
      '</function> and </tool_call>, each on a line of its own.'
  )

  def parse(self, text: str, in_thought: bool = False) -> Parsed:
    """Returns (content, calls). The model may have left out a tag around the functions."""
    content, calls = _parse_blocks(
        text,
        'tool_call',
        self._read,
        in_thought,
        may_be_open=True,
        read_gaps=self._read_gaps,
        gaps_may_be_open=text.rstrip().endswith('</function>'),
    )
    if not calls:
      functions = r'function(?:=[^<>\n]+)?'
      read = self._read_function
      read_gaps = functools.partial(read, has_gaps=True)
      content, calls = _parse_blocks(text, functions, read, in_thought, read_gaps=read_gaps)
      if calls:
        content = content.removesuffix('</tool_call>').rstrip()
    return content, calls

  def write(self, call: Call) -> str:
    """Returns a call as `parse` reads it. Arguments of other types than the schema's stay texts."""
    lines = ['<tool_call>', f'<function={call.name}>']
    arguments: Any = call.arguments
    if not isinstance(arguments, dict):
      arguments = {}
    for name, value in arguments.items():
      if not isinstance(value, str):
        value = json.dumps(value, ensure_ascii=False)
      lines += [f'<parameter={name}>', value, '</parameter>']
    return '\n'.join([*lines, '</function>', '</tool_call>'])

  def _read_function(self, name: str, body: str, has_gaps: bool = False) -> Calls:
    return self._read('', f'<{name}>{body}</function>', has_gaps)

  def _read_gaps(self, tag: str, body: str) -> Calls:
    return self._read(tag, body, has_gaps=True)

  def _read(self, unused_tag: str, body: str, has_gaps: bool = False) -> Calls:
    """Returns the calls of the functions in a block. With `has_gaps` it may lack closing tags."""
    calls: list[Call] = []
    end = _skip_space(body, 0)
    while end < len(body):
      call, end = self._read_one(body, end, has_gaps)
      calls.append(call)
      if call.error:
        break
      end = _skip_space(body, end)
    return tuple(calls) or (Call('', {}, 'a block without a <function=NAME>'),)

  def _read_one(self, body: str, start: int, has_gaps: bool) -> tuple[Call, int]:
    """Returns the call that begins at a position, and its end."""
    name, end = _read_tag(body, start, 'function')
    if not name:
      return Call('', {}, f'<function=NAME> is needed: {_show(body[start:])}'), end
    function = self._functions.get(name, {})
    schemas = properties(function)
    root = schema_root(function)
    arguments: dict[str, Any] = {}
    while True:
      end = _skip_space(body, end)
      if body.startswith('</function>', end):
        return Call(name, arguments), end + len('</function>')
      if has_gaps and (end == len(body) or body.startswith('<function=', end)):
        return Call(name, arguments), end
      parameter, value_start = _read_tag(body, end, 'parameter')
      if parameter and has_gaps:
        value_end, end = _end_of_value(body, value_start)
        value = body[value_start:value_end].removeprefix('\n').removesuffix('\n')
        arguments[parameter] = _typed(value, schemas.get(parameter), root)
        continue
      close = body.find('</parameter>', value_start)
      if not parameter or close < 0:
        error = f'</parameter> or </function> is missing: {_show(body[end:])}'
        return Call(name, arguments, error), len(body)
      end = close + len('</parameter>')
      if left_out := _LEFT_OUT.search(body, value_start, close):
        close = left_out.start()
        end = close
      value = body[value_start:close].removeprefix('\n').removesuffix('\n')
      arguments[parameter] = _typed(value, schemas.get(parameter), root)


def _end_of_value(body: str, start: int) -> tuple[int, int]:
  """Returns the end of a value whose closing tag may be missing, and where the text continues."""
  match = _VALUE_END.search(body, start)
  if match is None:
    return len(body), len(body)
  return match.start(), match.end() if match[0] == '</parameter>' else match.start()


class Llama3(Form):
  """The form of Llama 3: the whole turn is a call, or the text after <|python_tag|>."""

  keys = ('parameters', 'arguments')
  template = '%s'
  advice = 'To call one, write {"name": .., "parameters": {..}} and nothing else.'

  def parse(self, text: str, in_thought: bool = False) -> Parsed:
    """Returns (content, calls). A turn of JSON that does not begin like a call is content."""
    start = 0
    if in_thought or _OPEN_THOUGHT.match(text):
      start = _after_thought(text, 0)
    calls, content_end, end = self._read(text, start)
    # A closing tag behind the calls says that they were drafts. One in their strings says nothing.
    while text.find(thoughts.CLOSE, end) >= 0:
      calls, content_end, end = self._read(text, _after_thought(text, end))
    return text[:content_end].strip(), calls

  def _read(self, text: str, start: int) -> tuple[Calls, int, int]:
    """Returns the calls in a text that is no thought at `start`, and the ends of content and calls.

    A call that cannot be read ends where it begins.
    """
    close = text.find(thoughts.CLOSE, start)
    limit = len(text) if close < 0 else close
    tag = text.find(_PYTHON_TAG, start, limit)
    content_end = start
    if not _BARE_CALL.match(text, start):
      if tag < 0 or text.find(thoughts.OPEN, start, tag) >= 0:
        return (), len(text), start
      content_end = tag
      start = tag + len(_PYTHON_TAG)
    if _skip_space(text, start) == len(text):
      return (Call('', {}, 'nothing follows the tag: '),), content_end, len(text)
    if fence := _FENCE.match(text, start):
      calls = _read_values(_without_fence(text[fence.start() :]), self.keys)
    else:
      calls = _read_values(text, self.keys, start)
    has_error = any(call.error for call in calls)
    return calls, content_end, start if has_error else len(text)


class Tags(Form):
  """Each tool's name is a tag around its argument."""

  advice = 'To call one, write its name as a tag: <NAME>..</NAME>.'

  def __init__(self, tools: Sequence[Schema] = ()):
    super().__init__(tools)
    self.stop_strings = tuple(f'</{name}>' for name in self._functions)

  def parse(self, text: str, in_thought: bool = False) -> Parsed:
    """Returns (content, calls). A tag that is not closed is a malformed call."""
    names = '|'.join(map(re.escape, self._functions)) or '(?!)'
    return _parse_blocks(text, names, self._read, in_thought)

  def write(self, call: Call) -> str:
    """Returns the tags of a call. Arguments that are a text, as a client may send, stay a text."""
    parameter = self._only_parameter(call.name)
    body: Any = call.arguments
    if parameter and isinstance(body, dict) and parameter in body:
      body = 'null' if body[parameter] is None else body[parameter]
    if not isinstance(body, str):
      body = json.dumps(call.arguments, ensure_ascii=False)
    return f'<{call.name}>{body}</{call.name}>'

  def declare(self) -> str:
    """Returns one line per tool."""
    lines = [_DECLARATION]
    for name, function in self._functions.items():
      body = self._only_parameter(name)
      if not body:
        fields = [f'"{parameter}": ..' for parameter in properties(function)]
        body = f'{{{", ".join(fields)}}}'
      description = ' '.join(str(function.get('description') or '').split())
      lines.append(f'<{name}>{body}</{name}>: {description}')
    return '\n'.join(lines) + '\n'

  def _only_parameter(self, name: str) -> str:
    """Returns the name of the parameter that takes the text between the tags; '': there is none."""
    return text_parameter(self._functions.get(name, {}))

  def _read(self, name: str, body: str) -> Calls:
    """Returns the call between the tags of a tool."""
    if parameter := self._only_parameter(name):
      if thoughts.CLOSE in body and thoughts.owns_tags(self.stop_strings):
        return (Call(name, {}, f'a thought ends in it: {_show(body)}'),)
      function = self._functions[name]
      schema = properties(function)[parameter]
      return (Call(name, {parameter: _typed(body.strip(), schema, schema_root(function))}),)
    try:
      value = _load(_without_fence(body)) if body.strip() else {}
    except ValueError as error:
      return (Call(name, {}, f'{error}: {_show(body)}'),)
    names = list(properties(self._functions[name]))
    if len(names) == 1 and not isinstance(value, dict):  # a number, for example
      value = {names[0]: value}
    if not isinstance(value, dict):
      return (Call(name, {}, f'the arguments are no JSON object: {_show(body)}'),)
    return (Call(name, value),)


FORMS: dict[str, type[Form]] = {
    'hermes': Hermes,
    'qwen_xml': QwenXml,
    'llama3': Llama3,
    'tags': Tags,
}


def properties(function: Mapping[str, object]) -> dict[str, object]:
  """Returns {parameter: schema} of a tool's 'function'; {} if its schema names none."""
  found = parameters(function).get('properties')
  return found if isinstance(found, dict) else {}


def parameters(function: Mapping[str, object]) -> Mapping[str, object]:
  """Returns the schema of a function's arguments, which may be a reference; {}: there is none."""
  root = schema_root(function)
  schema = resolve(root['$ref'], root) if '$ref' in root else root
  return schema if isinstance(schema, dict) else {}


def schema_root(function: Mapping[str, object]) -> Mapping[str, object]:
  """Returns the schema in which the references of a function's arguments point."""
  root = function.get('parameters')
  return root if isinstance(root, dict) else {}


def resolve(reference: object, root: Mapping[str, object]) -> object:
  """Returns the schema that a reference within `root` names; None: there is none."""
  if not isinstance(reference, str) or not reference.startswith('#'):
    return None
  target: Any = root
  for key in reference[1:].split('/')[1:]:
    key = key.replace('~1', '/').replace('~0', '~')
    target = target.get(key) if isinstance(target, dict) else None
  return target


def text_parameter(function: Mapping[str, object]) -> str:
  """Returns the parameter that takes the text between the tags of 'tags'; '': there is none."""
  schemas = properties(function)
  if len(schemas) != 1:
    return ''
  ((name, schema),) = schemas.items()
  if schema is False:  # the parameter has no value
    return ''
  return name if types_of(schema, schema_root(function)) <= {'string', 'null'} else ''


def takes_text(schema: object, root: Mapping[str, object]) -> bool:
  """Returns whether a value that stands without quotes is read as a text.

  It is wherever the schema allows a text, or does not tell. The grammar of a forced call uses the
  same rule.
  """
  names = types_of(schema, root)
  return 'string' in names or not names


def types_of(schema: object, root: Mapping[str, object], depth: int = 0) -> frozenset[str]:
  """Returns the JSON types that a schema allows; none if it does not tell.

  `root` is the schema in which its references point.
  """
  if not isinstance(schema, dict) or depth > _MAX_DEPTH:
    return frozenset()
  if '$ref' in schema:
    return types_of(resolve(schema['$ref'], root), root, depth + 1)
  names = schema.get('type')
  values = [schema['const']] if 'const' in schema else schema.get('enum')
  of_values: frozenset[str] = frozenset()
  if isinstance(values, list):
    of_values = frozenset(map(_type_of, values))
  if names is not None:
    listed = names if isinstance(names, list) else [names]
    found = frozenset(name for name in listed if isinstance(name, str))
    return found & of_values or found
  found = of_values
  for key in ('anyOf', 'oneOf', 'allOf'):
    parts = schema.get(key)
    if found or not isinstance(parts, list):
      continue
    for part in parts[:_MAX_PARTS]:
      found |= types_of(part, root, depth + 1)
  return found


def _type_of(value: object) -> str:
  """Returns the JSON type of a value."""
  for kind, name in _TYPE_NAMES.items():
    if isinstance(value, kind):
      return name
  return 'null'


def _typed(text: str, schema: object, root: Mapping[str, object]) -> object:
  """Returns the value that a text stands for; the text itself if it has no type of the schema."""
  allowed = types_of(schema, root)
  stripped = text.strip()
  if takes_text(schema, root):
    return None if stripped == 'null' and 'null' in allowed else text
  try:
    value = _load_python(stripped)
  except ValueError:
    return text
  kind = _type_of(value)
  is_number = kind == 'integer' and 'number' in allowed
  is_whole = kind == 'number' and 'integer' in allowed and value.is_integer()
  return value if kind in allowed or is_number or is_whole else text


def _load_python(text: str) -> Any:
  """Returns the value of a JSON text, or of a literal of Python that JSON has too.

  Raises ValueError.
  """
  try:
    return _load(_PYTHON_NAMES.get(text, text))
  except ValueError:
    if text[:1] not in ('[', '{'):
      raise
  try:
    return _load(json.dumps(ast.literal_eval(text)))
  except (MemoryError, RecursionError, SyntaxError, TypeError) as error:
    raise ValueError(f'no literal ({error})') from error


def _skip_space(text: str, start: int) -> int:
  match = _SPACE.match(text, start)
  return match.end() if match else start


def _read_tag(text: str, start: int, kind: str) -> tuple[str, int]:
  """Returns the name in a tag <kind=name> at a position, and its end; '' if there is none."""
  match = _NAMED_TAG.match(text, start)
  if not match or match[1] != kind:
    return '', start
  return match[2].strip(), match.end()


def _parse_blocks(
    text: str,
    names: str,  # pattern of the names of tags
    read: Callable[[str, str], Calls],
    in_thought: bool = False,
    may_be_open: bool = False,
    read_gaps: Callable[[str, str], Calls] | None = None,  # reads a body without some of its tags
    gaps_may_be_open: bool = False,  # as `may_be_open`, for such a body
) -> Parsed:
  """Returns the text between blocks, and the calls `read(name, body)` of each block.

  A body ends at the first of the next _MAX_ENDS tags at which it can be read. Tags before that one
  are inside its strings. With `may_be_open` it also ends at another block's tag or the text's end.
  A block in a thought is content, and so is all before a closing tag of no thought.
  """
  has_thoughts = not re.fullmatch(names, 'think')
  pattern = re.compile(f'<(/?)({names}{"|think" if has_thoughts else ""})>')
  tags = list(pattern.finditer(text))
  is_thought = [has_thoughts and tag[2] == 'think' for tag in tags]
  blocks = [tag for tag, of_thought in zip(tags, is_thought) if not of_thought]
  content: list[str] = []
  calls: list[Call] = []
  end = 0
  number = 0  # block tags so far
  for tag, of_thought in zip(tags, is_thought):
    number += not of_thought
    is_closing, name = tag.groups()
    if tag.start() < end:  # inside the last block
      continue
    if of_thought:
      if is_closing and not in_thought:  # its opening tag is missing
        content = [text[: tag.end()]]
        calls = []
        end = tag.end()
      in_thought = not is_closing
      continue
    if is_closing or in_thought:
      continue
    block_calls, stop = _read_block(
        text, tag, blocks[number : number + _MAX_ENDS], read, may_be_open
    )
    if read_gaps is not None and any(call.error for call in block_calls):
      gap_calls, gap_stop = _read_block(
          text, tag, blocks[number : number + 1], read_gaps, gaps_may_be_open
      )
      if not any(call.error for call in gap_calls):
        block_calls = gap_calls
        stop = gap_stop
    is_draft = any(call.error for call in block_calls) and has_thoughts
    if is_draft and text.find(thoughts.CLOSE, tag.end(), stop) >= 0:
      continue
    content.append(text[end : tag.start()])
    calls += block_calls
    end = stop
  content.append(text[end:])
  return ''.join(content).strip(), tuple(calls)


def _read_block(
    text: str,
    opening: re.Match[str],
    tags: Sequence[re.Match[str]],  # the next ones
    read: Callable[[str, str], Calls],
    may_be_open: bool,
) -> tuple[Calls, int]:
  """Returns the calls of the block that a tag opens, and the end of the block."""
  name = opening[2]
  closing = f'</{name.partition("=")[0]}>'
  attempts: list[tuple[Calls, int]] = []
  ends = [*tags, None]  # None: the end of the text
  for tag in ends[:_MAX_ENDS]:
    stop = tag.start() if tag else len(text)
    body = text[opening.end() : stop]
    closes = tag is not None and tag[0] == closing
    last = body.rfind('<', max(0, len(body) - len(closing)))
    if tag is None and last >= 0 and closing.startswith(body[last:]):  # a limit has cut the tag
      body = body[:last]
    calls: Calls = (Call(name, {}, f'</{name}> is missing: {_show(body)}'),)
    if closes or may_be_open:
      calls = read(name, body)
    if tag and closes:
      stop = tag.end()
    if not any(call.error for call in calls):
      return calls, stop
    attempts.append((calls, stop))
  return attempts[0]


def _after_thought(text: str, start: int) -> int:
  """Returns the end of the thought that a position is in."""
  close = text.find(thoughts.CLOSE, start)
  return len(text) if close < 0 else close + len(thoughts.CLOSE)


def _without_fence(text: str) -> str:
  """Returns the text in a code fence, if it is all of this text."""
  stripped = text.strip()
  if len(stripped) < 6 or not stripped.startswith('```') or not stripped.endswith('```'):
    return text
  inner = stripped[3:-3]
  language = _LANGUAGE.match(inner)
  return inner[language.end() :] if language else inner


def _reject_constant(name: str) -> None:
  raise ValueError(f'{name} is no JSON')


def _read_float(text: str) -> float:
  value = float(text)
  if math.isinf(value):
    raise ValueError(f'{text[:40]} is too large a number')
  return value


_TYPE_NAMES: dict[type, str] = {
    bool: 'boolean',  # a bool is an int, too
    int: 'integer',
    float: 'number',
    str: 'string',
    list: 'array',
    dict: 'object',
}
_PYTHON_NAMES = {'True': 'true', 'False': 'false', 'None': 'null'}
_VALUE_END = re.compile('</parameter>|(?=<parameter=)|(?=</?function[=>])')
# What follows a value without its closing tag: a parameter, or the end of a call and the next call.
_LEFT_OUT = re.compile(r'\n<parameter=|</function>\s*(?:</tool_call>\s*<tool_call>\s*)?<function=')
_NAMED_TAG = re.compile(r'<(function|parameter)=([^<>\n]+)>')
_DECODER = json.JSONDecoder(parse_constant=_reject_constant, parse_float=_read_float)


def _load(text: str) -> object:
  """Returns the value of a JSON text. Raises ValueError."""
  try:
    return _DECODER.decode(text)
  except (ValueError, RecursionError) as error:
    raise ValueError(f'not JSON ({error})') from error


def _read_values(text: str, keys: Sequence[str], start: int = 0) -> Calls:
  """Returns the calls of JSON objects that follow each other from `start`, or are in a list."""
  calls: list[Call] = []
  end = _skip_space(text, start)
  while end < len(text) or not calls:
    try:
      value, end = _DECODER.raw_decode(text, end)
    except (ValueError, RecursionError) as error:
      calls.append(Call('', {}, f'not JSON ({error}): {_show(text[end : end + 1000])}'))
      break
    values = value if isinstance(value, list) and value else [value]
    calls += [_make_call(each, text, keys) for each in values]
    while text[end : end + 1].isspace() or text[end : end + 1] in (';', ','):
      end += 1
  return tuple(calls)


def _make_call(value: Any, text: str, keys: Sequence[str]) -> Call:
  """Returns the call in a JSON value. Its arguments are under one of `keys`, also as JSON text."""
  name = None
  if isinstance(value, dict):
    name = value.get('name')
  if not isinstance(name, str) or not name:
    return Call('', {}, f'a JSON object with a "name" is needed: {_show(text)}')
  present = [value[key] for key in keys if key in value]
  others = value.keys() - _NAMING_KEYS
  if others and not present:  # the arguments may be under one of these
    return Call(name, {}, f'"{keys[0]}" is missing: {_show(text)}')
  arguments = next(iter(present), None) or {}
  try:
    if isinstance(arguments, str):
      arguments = _load(_without_fence(arguments)) if arguments.strip() else {}
  except ValueError as error:
    return Call(name, {}, f'"{keys[0]}" is {error}: {_show(text)}')
  if not isinstance(arguments, dict):
    return Call(name, {}, f'"{keys[0]}" must be a JSON object: {_show(text)}')
  return Call(name, arguments)


def _show(text: str) -> str:
  text = ' '.join(text[: 4 * _SHOWN_CHARS].split())
  if len(text) <= _SHOWN_CHARS:
    return text
  return f'{text[:_SHOWN_CHARS]}..'
