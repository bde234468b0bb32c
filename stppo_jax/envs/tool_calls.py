"""Tool calls in an agent's text, in the forms of common model families.

  hermes   <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>           Qwen, Hermes
  llama3   {"name": "add", "parameters": {"a": 1}}, after <|python_tag|> or as the whole turn,
           several with ';' between
  tags     <search>cats</search>: the tool's name as a tag, around the text of its only parameter or
           a JSON object                                                           Search-R1

`parse` never raises and takes linear time, whatever text a model writes. Text before `</think>` is
content. Tools are described by JSON schemas as chat templates take them: {"type": "function",
"function": {"name", "description", "parameters": {"properties", "required", ..}}}.
"""

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import json
import re
from typing import Any

from stppo_jax import types

Schema = Mapping[str, Any]

_MAX_ENDS = 3  # tags at which a JSON text may end: the first ones may be inside its strings
_SHOWN_CHARS = 80  # length of a malformed call in its error
_DECLARATION = 'You may call these tools:'
_PYTHON_TAG = '<|python_tag|>'
_BARE_CALL = re.compile(r'\{\s*"(?:name|type|function)"\s*:')


@dataclasses.dataclass(frozen=True)
class Call:
  """One call. With an `error` it is malformed, and the other fields hold its readable part."""

  name: str
  arguments: dict[str, Any]
  error: str = ''  # says to the agent what is wrong


Parsed = tuple[str, tuple[Call, ...]]  # content of a turn, and its calls


class Form:
  """How a model family writes its calls. Here they are JSON objects."""

  stop_strings: tuple[str, ...] = ()  # end a turn if the agent has no other end
  keys: tuple[str, ...]  # names of the arguments in a call, the one to write first
  template: str  # '%s' stands for the JSON object
  advice: str  # tells the agent how to write a call

  def __init__(self, tools: Sequence[Schema] = ()):
    self._tools = tuple(tools)

  def parse(self, text: str) -> Parsed:
    """Returns (content, calls) of an agent's turn: the text without its calls, stripped."""
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


def make_form(name: str, tools: Sequence[Schema] = ()) -> Form:
  """Returns one of FORMS for these tools. Only 'tags' needs them for parsing."""
  if name not in FORMS:
    raise types.UserError(f'config.env.options.form={name!r}: allowed are {", ".join(FORMS)}')
  return FORMS[name](tools)


class Hermes(Form):
  """The form of Qwen and Hermes: JSON objects between <tool_call> tags, among other text."""

  stop_strings = ('</tool_call>',)
  keys = ('arguments', 'parameters')
  template = '<tool_call>\n%s\n</tool_call>'
  advice = 'To call one, write <tool_call>{"name": .., "arguments": {..}}</tool_call>.'

  def parse(self, text: str) -> Parsed:
    """Returns (content, calls). The last block may lack its closing tag if its JSON is complete."""
    return _parse_blocks(text, ['tool_call'], self._read, may_be_open=True)

  def _read(self, unused_tag: str, body: str) -> Call:
    try:
      return _make_call(_load(body), body, self.keys)
    except ValueError as error:
      return Call('', {}, f'{error}: {_show(body)}')


class Llama3(Form):
  """The form of Llama 3: the whole turn is a call, or the text after <|python_tag|>."""

  keys = ('parameters', 'arguments')
  template = '%s'
  advice = 'To call one, write {"name": .., "parameters": {..}} and nothing else.'

  def parse(self, text: str) -> Parsed:
    """Returns (content, calls). A turn of JSON that does not begin like a call is content."""
    thought, text = _split_thought(text)
    before, tag, body = text.partition(_PYTHON_TAG)
    if _BARE_CALL.match(text.lstrip()):
      before = ''
      body = text
    elif not tag:
      return (thought + text).strip(), ()
    content = (thought + before).strip()
    body = body.strip()
    if not body:
      return content, (Call('', {}, 'nothing follows the tag: '),)
    calls = []
    end = 0
    while end < len(body):
      try:
        value, end = _DECODER.raw_decode(body, end)
      except (ValueError, RecursionError) as error:
        calls.append(Call('', {}, f'not JSON ({error}): {_show(body[end:])}'))
        break
      calls.append(_make_call(value, body, self.keys))
      while body[end : end + 1].isspace() or body[end : end + 1] in (';', ','):
        end += 1
    return content, tuple(calls)


class Tags(Form):
  """Each tool's name is a tag around its argument."""

  advice = 'To call one, write its name as a tag: <NAME>..</NAME>.'

  def __init__(self, tools: Sequence[Schema] = ()):
    super().__init__(tools)
    functions = [tool['function'] for tool in tools]
    self._functions = {function['name']: function for function in functions}
    self.stop_strings = tuple(f'</{name}>' for name in self._functions)

  def parse(self, text: str) -> Parsed:
    """Returns (content, calls). A tag that is not closed is a malformed call."""
    return _parse_blocks(text, list(self._functions), self._read)

  def write(self, call: Call) -> str:
    """Returns the tags of a call. Arguments that are a text, as a client may send, stay a text."""
    parameter = self._only_parameter(call.name)
    body: Any = call.arguments
    if parameter and isinstance(body, dict):
      body = body.get(parameter)
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
      description = ' '.join(function.get('description', '').split())
      lines.append(f'<{name}>{body}</{name}>: {description}')
    return '\n'.join(lines) + '\n'

  def _only_parameter(self, name: str) -> str:
    """Returns the name of the parameter that takes the text between the tags; '': there is none."""
    parameters = properties(self._functions.get(name, {}))
    if len(parameters) != 1:
      return ''
    ((parameter, schema),) = parameters.items()
    takes_text = schema.get('type') in ('string', None)
    return parameter if takes_text else ''

  def _read(self, name: str, body: str) -> Call:
    """Returns the call between the tags of a tool."""
    if parameter := self._only_parameter(name):
      return Call(name, {parameter: body.strip()})
    try:
      value = _load(body) if body.strip() else {}
    except ValueError as error:
      return Call(name, {}, f'{error}: {_show(body)}')
    parameters = list(properties(self._functions[name]))
    if len(parameters) == 1 and not isinstance(value, dict):  # a number, for example
      value = {parameters[0]: value}
    if not isinstance(value, dict):
      return Call(name, {}, f'the arguments are no JSON object: {_show(body)}')
    return Call(name, value)


FORMS: dict[str, type[Form]] = {'hermes': Hermes, 'llama3': Llama3, 'tags': Tags}


def properties(function: Mapping[str, Any]) -> dict[str, Any]:
  """Returns {parameter: schema} of a tool's 'function'."""
  parameters = function.get('parameters') or {}
  return parameters.get('properties') or {}


def _parse_blocks(
    text: str, names: Sequence[str], read: Callable[[str, str], Call], may_be_open: bool = False
) -> Parsed:
  """Returns the text between blocks, and the call `read(name, body)` of each block.

  A body ends at the first of the next _MAX_ENDS tags at which it can be read. Tags before that one
  are inside its strings. With `may_be_open` it also ends at another block's tag or the text's end.
  """
  thought, text = _split_thought(text)
  any_name = '|'.join(map(re.escape, names))
  pattern = any_name or '(?!)'
  tags = list(re.finditer(f'<(/?)({pattern})>', text))
  content = [thought]
  calls = []
  end = 0
  for i, opening in enumerate(tags):
    is_closing, name = opening.groups()
    if is_closing or opening.start() < end:  # it closes nothing, or is inside the last block
      continue
    content.append(text[end : opening.start()])
    attempts = []
    ends = [*tags[i + 1 : i + 1 + _MAX_ENDS], None]  # None: the end of the text
    for tag in ends[:_MAX_ENDS]:
      stop = tag.start() if tag else len(text)
      body = text[opening.end() : stop]
      closes = tag is not None and tag[0] == f'</{name}>'
      call = Call(name, {}, f'</{name}> is missing: {_show(body)}')
      if closes or may_be_open:
        call = read(name, body)
      if tag and closes:
        stop = tag.end()
      attempts.append((call, stop))
      if not call.error:
        break
    call, end = attempts[-1]
    if call.error:
      call, end = attempts[0]
    calls.append(call)
  content.append(text[end:])
  return ''.join(content).strip(), tuple(calls)


def _split_thought(text: str) -> tuple[str, str]:
  """Returns (text up to the first </think>, the rest). A turn that begins with a call has none."""
  before, tag, after = text.partition('</think>')
  start = text.lstrip()[:8]
  begins_with_call = start.startswith(('<', '{')) and not start.startswith('<think>')
  if not tag or begins_with_call:
    return '', text
  return before + tag, after


def _reject_constant(name: str) -> None:
  raise ValueError(f'{name} is no JSON')


_DECODER = json.JSONDecoder(parse_constant=_reject_constant)


def _load(text: str) -> Any:
  """Returns the value of a JSON text. Raises ValueError."""
  try:
    return _DECODER.decode(text)
  except (ValueError, RecursionError) as error:
    raise ValueError(f'not JSON ({error})') from error


def _make_call(value: Any, text: str, keys: Sequence[str]) -> Call:
  """Returns the call in a JSON value. Its arguments are under one of `keys`, also as JSON text."""
  name = None
  if isinstance(value, dict):
    name = value.get('name')
  if not isinstance(name, str) or not name:
    return Call('', {}, f'a JSON object with a "name" is needed: {_show(text)}')
  present = [value[key] for key in keys if key in value]
  arguments = next(iter(present), None) or {}
  try:
    if isinstance(arguments, str):
      arguments = _load(arguments)
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
