"""The texts that a JSON schema allows, where a form of calls writes them without quotes.

`tool_calls.takes_text` says which parameters are read as texts. Their grammar is a terminal in
llguidance's variant of Lark, which has unions (|), intersections (&) and complements (~).
"""

from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
import json
import re
from typing import Any
from typing import NamedTuple

from stppo_jax.text import tool_calls

ANY = '/(?s:.*)/'
_NULL = '"null"'
_READ_AS_NULL = r'/\s*null\s*/'
_MAX_DEPTH = 16
# Keywords that have no grammar here. Keywords that JSON Schema does not know restrict nothing.
_UNSUPPORTED_OF_TEXT = frozenset('if then else $dynamicRef $recursiveRef'.split())
_UNSUPPORTED_OF_OBJECT = frozenset(
    'allOf anyOf oneOf not if then else const enum dependentRequired dependentSchemas dependencies '
    'patternProperties propertyNames minProperties maxProperties unevaluatedProperties '
    '$dynamicRef $recursiveRef'.split()
)
_DATE = r'[0-9]{4}-(0[1-9]|1[0-2])-(0[1-9]|[12][0-9]|3[01])'
_TIME = (
    r'([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]+)?([zZ]|[+\-]([01][0-9]|2[0-3]):[0-5][0-9])'
)
_BYTE = r'(25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])'
_LABEL = r'[a-zA-Z0-9]([a-zA-Z0-9\-]{0,61}[a-zA-Z0-9])?'
_FORMATS = {
    'date': _DATE,
    'time': _TIME,
    'date-time': f'{_DATE}[tT]{_TIME}',
    'email': rf'[a-zA-Z0-9_+\-]+(\.[a-zA-Z0-9_+\-]+)*@{_LABEL}(\.{_LABEL})+',
    'hostname': rf'{_LABEL}(\.{_LABEL})*',
    'ipv4': rf'{_BYTE}(\.{_BYTE}){{3}}',
    'uuid': '[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}',
    'uri': r"[a-zA-Z][a-zA-Z0-9+.\-]*:[a-zA-Z0-9._~:\/?#@!$&'()*+,;=%\-]+",
}


class Field(NamedTuple):
  """A parameter of a function."""

  schema: Any
  is_required: bool


class _Allowed(NamedTuple):
  """What a schema allows of texts and null."""

  text: str | None  # a terminal; None: no text
  null: bool


def fields(function: Mapping[str, object]) -> dict[str, Field]:
  """Returns the parameters of a function. ValueError: its schema restricts them otherwise, too."""
  schema = tool_calls.parameters(function)
  where = _place(function)
  if wrong := sorted(_UNSUPPORTED_OF_OBJECT & set(schema)):
    raise ValueError(f'{where} is not supported with {", ".join(wrong)} at its top: leave it out')
  known = schema.get('properties') or {}
  required = schema.get('required') or []
  if not isinstance(known, dict):
    raise ValueError(f'{where} is not supported: its properties must be an object')
  if not isinstance(required, list):
    raise ValueError(f'{where} is not supported: what is required must be a list')
  unknown = [name for name in required if name not in known]
  if unknown:
    raise ValueError(f'{where} is not supported: {unknown[0]!r} is required and no property')
  found = {}
  for name, field in known.items():
    if not isinstance(field, (bool, dict)):
      raise ValueError(f'{where} is not supported: its property {name[:80]!r} must be a schema')
    if field is not False:
      found[name] = Field(field, name in required)
    elif name in required:
      raise ValueError(f'{where} is not supported: {name!r} is required and can have no value')
  return found


def check_object(function: Mapping[str, object]) -> None:
  """Raises ValueError for arguments that are no object."""
  schema = tool_calls.parameters(function)
  is_lost = '$ref' in tool_calls.schema_root(function) and (not schema or '$ref' in schema)
  types = schema.get('type', 'object')
  if is_lost or 'object' not in (types if isinstance(types, list) else [types]):
    raise ValueError(f'{_place(function)} is not supported: it must be that of an object')


def terminal(schema: object, root: Mapping[str, object]) -> str:
  """Returns the terminal of the texts that are read as a value of the schema.

  `root` is the schema in which references point. ValueError: it is not supported, or has no text.
  """
  allowed = _allowed(schema, root)
  reads_null = 'null' in tool_calls.types_of(schema, root)
  terminals = []
  if allowed.text is not None:
    terminals.append(f'({allowed.text} & ~{_READ_AS_NULL})' if reads_null else allowed.text)
  if allowed.null and reads_null:
    terminals.append(_NULL)
  if not terminals:
    raise ValueError(f'the schema {_show(schema)} allows no text')
  return _union(terminals)


def regex(pattern: str) -> str:
  """Returns the terminal of the texts in which a pattern of a schema is found."""
  alternatives = []
  for part in _alternatives(pattern):
    begins = part.startswith('^')
    ends = part.endswith('$') and not _is_escaped(part, len(part) - 1)
    inner = part[begins : len(part) - ends]
    before = '' if begins else '(?s:.*)'
    after = '' if ends else '(?s:.*)'
    alternatives.append(f'{before}({inner}){after}')
  return _slashed('|'.join(alternatives))


def schemas_within(schema: object, depth: int = 0) -> Iterator[Mapping[str, object]]:
  """Yields a schema and the schemas in it."""
  if not isinstance(schema, dict):
    return
  if depth > 8 * _MAX_DEPTH:
    raise ValueError('the schema is nested too deeply')
  yield schema
  for key, value in schema.items():
    if key in ('const', 'enum', 'default', 'examples', 'x-guidance'):
      continue
    is_named = key in ('properties', 'patternProperties', '$defs', 'definitions')
    parts = value if isinstance(value, list) else [value]
    if is_named and isinstance(value, dict):
      parts = list(value.values())
    for part in parts:
      yield from schemas_within(part, depth + 1)


def _allowed(schema: object, root: Mapping[str, object], depth: int = 0) -> _Allowed:
  """Returns what a schema allows, whatever else it allows of other types."""
  if isinstance(schema, bool):
    return _Allowed(ANY if schema else None, schema)
  if not isinstance(schema, dict):
    raise ValueError(f'{_show(schema)} is no schema')
  if depth > _MAX_DEPTH:
    raise ValueError('the schema is nested too deeply, or refers to itself')
  if wrong := sorted(_UNSUPPORTED_OF_TEXT & set(schema)):
    raise ValueError(f'the schema of a text is not supported with {", ".join(wrong)}')
  look = lambda part: _allowed(part, root, depth + 1)
  parts = []
  for keyword, value in schema.items():
    if keyword in _KEYWORDS:
      parts.append(_KEYWORDS[keyword](value, look))
    elif keyword == '$ref':
      parts.append(look(tool_calls.resolve(value, root)))
  return _all_of(parts)


def _all_of(parts: Sequence[_Allowed]) -> _Allowed:
  texts = [part.text for part in parts]
  text = None
  if None not in texts:
    restrictions = dict.fromkeys(text for text in texts if text and text != ANY)
    text = ' & '.join(restrictions) or ANY
    text = f'({text})' if len(restrictions) > 1 else text
  return _Allowed(text, all(part.null for part in parts))


def _any_of(parts: Sequence[_Allowed]) -> _Allowed:
  texts = [part.text for part in parts if part.text is not None]
  return _Allowed(_union(texts) if texts else None, any(part.null for part in parts))


def _one_of(parts: Sequence[_Allowed]) -> _Allowed:
  texts = [part.text for part in parts if part.text is not None]
  only = []
  for number, text in enumerate(texts):
    others = texts[:number] + texts[number + 1 :]
    only.append(' & '.join([text, *(f'~({other})' for other in others)]))
  return _Allowed(
      _union([f'({text})' for text in only]) if only else None,
      sum(part.null for part in parts) == 1,
  )


def _read_types(value: object, unused_look: object) -> _Allowed:
  names = value if isinstance(value, list) else [value]
  return _Allowed(ANY if 'string' in names else None, 'null' in names)


def _read_values(value: object, unused_look: object) -> _Allowed:
  values = _listed(value)
  texts = [json.dumps(each) for each in values if isinstance(each, str)]
  return _Allowed(_union(texts) if texts else None, None in values)


def _read_parts(join: Callable[[Sequence[_Allowed]], _Allowed]) -> Callable[..., _Allowed]:
  return lambda value, look: join(list(map(look, _listed(value))))


def _read_not(value: object, look: Callable[[object], _Allowed]) -> _Allowed:
  other = look(value)
  text = ANY if other.text is None else f'~({other.text})'
  return _Allowed(None if other.text == ANY else text, not other.null)


def _read_pattern(value: object, unused_look: object) -> _Allowed:
  if not isinstance(value, str):
    raise ValueError(f'pattern={_show(value)} is no text')
  return _Allowed(regex(value), True)


def _read_format(value: object, unused_look: object) -> _Allowed:
  if not isinstance(value, str) or value not in _FORMATS:
    raise ValueError(f'format={_show(value)} is not supported: use {", ".join(_FORMATS)}')
  return _Allowed(f'/{_FORMATS[value]}/', True)


def _read_length(bounds: str) -> Callable[..., _Allowed]:
  def read(value: object, unused_look: object) -> _Allowed:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value != int(value):
      raise ValueError(f'a length of {_show(value)} is no number')
    return _Allowed(f'/(?s:.{{{bounds % int(value)}}})/', True)

  return read


_KEYWORDS: dict[str, Callable[..., _Allowed]] = {
    'type': _read_types,
    'const': lambda value, look: _read_values([value], look),
    'enum': _read_values,
    'anyOf': _read_parts(_any_of),
    'oneOf': _read_parts(_one_of),
    'allOf': _read_parts(_all_of),
    'not': _read_not,
    'pattern': _read_pattern,
    'format': _read_format,
    'minLength': _read_length('%d,'),
    'maxLength': _read_length('0,%d'),
}


def _listed(value: object) -> list[object]:
  if not isinstance(value, list):
    raise ValueError(f'{_show(value)} is no list')
  return value


def _union(terminals: Sequence[str]) -> str:
  if len(terminals) == 1:
    return terminals[0]
  return f'({" | ".join(dict.fromkeys(terminals))})'


def _alternatives(pattern: str) -> list[str]:
  """Splits a pattern at the bars that are in no group, no class and not escaped."""
  parts = ['']
  depth = 0
  in_class = False
  for place, character in enumerate(pattern):
    if not _is_escaped(pattern, place):
      if in_class:
        in_class = character != ']'
      else:
        in_class = character == '['
        depth += (character == '(') - (character == ')')
        if character == '|' and depth == 0:
          parts.append('')
          continue
    parts[-1] += character
  return parts


def _is_escaped(text: str, place: int) -> bool:
  before = text[:place]
  return (len(before) - len(before.rstrip('\\'))) % 2 == 1


def _slashed(pattern: str) -> str:
  """Returns a pattern between slashes."""
  escaped = re.sub(r'\\.|/', lambda match: '\\/' if match[0] == '/' else match[0], pattern)
  return f'/{escaped}/'.replace('\n', '\\n').replace('\r', '\\r')


def _place(function: Mapping[str, object]) -> str:
  return f'the schema of the function {str(function.get("name"))[:80]!r}'


def _show(value: object) -> str:
  return repr(value)[:80]
