"""Grammars that an answer must follow: a JSON schema or calls in, allowed tokens per step out.

The library llguidance does the work. It is imported when the first request needs it. The scheduler
asks for the allowed tokens before each step and adds each sampled token.
"""

from collections.abc import Mapping
from collections.abc import Sequence
import functools
import json
import re
import threading
import types
from typing import Any

import numpy as np

from stppo_jax.serving import text_schemas
from stppo_jax.text import tokenizer as tokenizer_lib
from stppo_jax.text import tool_calls

_MAX_CACHED = 32  # compiled grammars
_MAX_CHECKED = 1024  # terminals
# As `json.dumps` and chat templates write it. Where white space is free, a model may write nothing
# else until its answer ends.
_OPTIONS = {'whitespace_flexible': False, 'item_separator': ', ', 'key_separator': ': '}
_THOUGHT = """\
thought: "<think>" inner LINES?
inner[suffix="</think>"]: /(.|\\n)*/
LINES: /\\n{1,2}/
"""

_TAG_NAME = re.compile(r'[^<>\s](?:[^<>\n]*[^<>\s])?')
_XML_TAGS = r'/(?s:.*)<(\/?(tool_call|think)>|\/?(function|parameter)[=>])(?s:.*)/'


class Missing(Exception):
  """The library is not installed."""


class Matcher:
  """The place of an answer in its grammar."""

  def __init__(self, matcher: Any):
    self._matcher = matcher

  @property
  def is_over(self) -> bool:
    """Whether nothing but an eos token may follow."""
    return self._matcher.is_stopped()

  @property
  def error(self) -> str:
    """Says why the grammar can no longer be followed, for example because of its size."""
    return self._matcher.get_error()

  def allowed(self, num_bytes: int) -> np.ndarray:
    """Returns a bit per token, lowest first: [num_bytes] uint8."""
    bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
    padded = np.zeros(num_bytes, np.uint8)
    size = min(num_bytes, len(bits))
    padded[:size] = bits[:size]
    return padded

  def add(self, token: int) -> None:
    """Moves past a sampled token."""
    self._matcher.consume_token(token)


class Grammars:
  """Compiles grammars for a tokenizer. Safe to use from several threads."""

  def __init__(self, tokenizer: tokenizer_lib.Tokenizer):
    self._tokenizer = tokenizer
    self._lock = threading.Lock()
    self._compiled: dict[str, Any] = {}  # the oldest first
    self._contradictions: dict[tuple[str, str], bool] = {}  # whether terminals hold for no text

  def start(self, grammar: str) -> Matcher:
    """Returns the start of a grammar. Raises ValueError: it is none, and Missing."""
    with self._lock:
      if grammar not in self._compiled:
        self._compiled[grammar] = self._compile(grammar)
        for oldest in list(self._compiled)[:-_MAX_CACHED]:
          del self._compiled[oldest]
      return Matcher(self._compiled[grammar].deep_copy())

  def of_schema(self, schema: Mapping[str, object]) -> str:
    """Returns the grammar of JSON texts of a schema. Raises Missing."""
    for found in text_schemas.schemas_within(schema):
      self._check_patterns(found)
    return self._library.LLMatcher.grammar_from_json_schema(dict(schema), overrides=_OPTIONS)

  def of_answer(
      self,
      form: str,
      functions: Sequence[Mapping[str, object]],
      schema: Mapping[str, object] | None,
      has_several: bool,
      in_thought: bool = False,  # the prompt ends within a thought
  ) -> str:
    """Returns the grammar of answers that call functions, or are a JSON text of a schema.

    A call is written in a form of `tool_calls`. A thought may come before it. Raises Missing.
    """
    if not functions:
      return self.of_schema(schema or {})
    rules = []
    for number, function in enumerate(functions):
      for found in text_schemas.schemas_within(function.get('parameters')):
        self._check_patterns(found)
      rules += self._call_rules(form, number, function)
    separator = '"; "' if form == 'llama3' else 'LINES?'
    names = ' | '.join(f'call_{number}' for number in range(len(functions)))
    more = f'({separator} call)*' if has_several else ''
    thought = 'inner LINES?' if in_thought else 'thought?'
    start = f'start: {thought} call {more}'
    if schema is not None:
      for found in text_schemas.schemas_within(schema):
        self._check_patterns(found)
      start += ' | answer'
      rules.append(f'answer: %json {_json(schema)}')
    lines = [start, f'call: {names}', *rules, _THOUGHT]
    return self._library.LLMatcher.grammar_from_lark('\n'.join(lines))

  def _call_rules(self, form: str, number: int, function: Mapping[str, Any]) -> list[str]:
    """Returns the rules of a call of a function, from `call_{number}` on. Raises ValueError."""
    text_schemas.check_object(function)
    name = function['name']
    call = f'call_{number}'
    body = f'body_{number}'
    if form in ('tags', 'qwen_xml') and not _TAG_NAME.fullmatch(name):
      raise ValueError(f'the name {name[:80]!r} of a function cannot stand in a tag')
    if form == 'qwen_xml':
      return self._xml_rules(call, function)
    if form == 'tags':
      opening, closing = json.dumps(f'<{name}>'), json.dumps(f'</{name}>')
      if parameter := tool_calls.text_parameter(function):
        fields = text_schemas.fields(function)
        schema = fields[parameter].schema if parameter in fields else {}
        tags = re.escape(name).replace('/', '\\/')
        forbidden = rf'/(?s:.*)<\/?({tags}|think)>(?s:.*)/ | /\s(?s:.*)/ | /(?s:.*)\s/'
        rules = self._text_rules(body, schema, function, closing, forbidden)
        return [f'{call}: {opening} {body}', *rules]
      return [f'{call}: {opening} {body} {closing}', f'{body}: %json {_json(_schema(function))}']
    parameters = dict(_schema(function))
    arguments = 'parameters' if form == 'llama3' else 'arguments'
    schema = {
        'type': 'object',
        'properties': {'name': {'const': name}, arguments: parameters},
        'required': ['name', arguments],
        'additionalProperties': False,
    }
    for key in ('$defs', 'definitions'):  # references start at the root
      if key in parameters:
        schema[key] = parameters.pop(key)
    rule = f'{body}: %json {_json(schema)}'
    if form == 'llama3':
      return [f'{call}: {body}', rule]
    return [f'{call}: "<tool_call>\\n" {body} "\\n</tool_call>"', rule]

  def _xml_rules(self, call: str, function: Mapping[str, object]) -> list[str]:
    """Returns the rules of a call in the form 'qwen_xml', whose texts stand without quotes."""
    root = tool_calls.schema_root(function)
    end = json.dumps('\n</parameter>\n')
    parts = []
    rules = []
    for number, (key, field) in enumerate(text_schemas.fields(function).items()):
      if not _TAG_NAME.fullmatch(key):
        raise ValueError(f'the name {key[:80]!r} of a parameter cannot stand in a tag')
      rule = f'{call}_{number}'
      value = f'{rule}_value'
      if tool_calls.takes_text(field.schema, root):
        rules += self._text_rules(value, field.schema, function, end, _XML_TAGS)
      else:
        rules.append(f'{value}: {value}_json {end}')
        rules.append(f'{value}_json: %json {_json({**_definitions(root), **field.schema})}')
      rules.append(f'{rule}: {json.dumps(f"<parameter={key}>" + chr(10))} {value}')
      parts.append(rule if field.is_required else f'{rule}?')
    opening = json.dumps(f'<tool_call>\n<function={function["name"]}>\n')
    closing = json.dumps('</function>\n</tool_call>')
    return [f'{call}: {opening} {" ".join(parts)} {closing}', *rules]

  def _text_rules(
      self, rule: str, schema: object, function: Mapping[str, object], end: str, forbidden: str
  ) -> list[str]:
    """Returns the rules of a text of a schema, and of its end. Raises ValueError: there is none.

    The text holds nothing that the form would read as a tag.
    """
    root = tool_calls.schema_root(function)
    allowed = text_schemas.terminal(schema, root)
    terminal = f'{allowed} & ~({forbidden})'
    if ' & ' in allowed:  # restrictions may contradict each other
      quoted = self.of_schema({**_definitions(root), 'allOf': [schema]})
      if self._has_no_text(terminal, quoted):
        raise ValueError(f'the schema {str(schema)[:80]} allows no text')
    name = rule.upper()
    return [f'{rule}[suffix={end}]: {name}', f'{name}: {terminal}']

  def _has_no_text(self, terminal: str, quoted: str) -> bool:
    """Returns whether a terminal holds for no text. `quoted` is the grammar of the same texts.

    The library finds more contradictions in a schema than in a terminal.
    """
    key = (terminal, quoted)
    if key not in self._contradictions:
      if len(self._contradictions) >= _MAX_CHECKED:
        self._contradictions.clear()
      matcher = self._library.LLMatcher(self._vocabulary, quoted, log_level=0)
      has_none = 'nsatisfiable' in matcher.get_error() or self._is_empty(terminal)
      self._contradictions[key] = has_none
    return self._contradictions[key]

  def _check_patterns(self, schema: Mapping[str, object]) -> None:
    """Raises ValueError for names that both a pattern and the properties describe.

    The library leaves such names out of the pattern, so that a grammar may have no end.
    """
    patterns = schema.get('patternProperties')
    names = schema.get('properties')
    if not isinstance(patterns, dict) or not isinstance(names, dict):
      return
    if not patterns or not names:
      return
    of_patterns = ' | '.join(map(text_schemas.regex, patterns))
    of_names = ' | '.join(map(json.dumps, names))
    if not self._is_empty(f'({of_patterns}) & ({of_names})'):
      raise ValueError(
          'the schema is not supported: a pattern of patternProperties holds for a name of '
          f'properties, {", ".join(names)[:80]}'
      )

  def _is_empty(self, terminal: str) -> bool:
    """Returns whether no text follows a terminal. Raises ValueError: it is none."""
    grammar = self._library.LLMatcher.grammar_from_lark(f'start: TEXT\nTEXT: {terminal}')
    matcher = self._compile(grammar)
    has_next = any(matcher.compute_bitmask())
    return not has_next and not matcher.is_accepting()

  def _compile(self, grammar: str) -> Any:
    """Returns the library's matcher. Raises ValueError."""
    matcher = self._library.LLMatcher(self._vocabulary, grammar, log_level=0)
    if matcher.is_error():
      message = ' '.join(matcher.get_error().split())[:300]
      raise ValueError(f'the schema is not supported: {message}')
    return matcher

  @functools.cached_property
  def _library(self) -> types.ModuleType:
    try:
      import llguidance
    except ImportError as error:
      raise Missing('the server needs llguidance: pip install ".[grammar]"') from error
    return llguidance

  @functools.cached_property
  def _vocabulary(self) -> object:
    return self._library.LLTokenizer(
        self._library.TokenizerWrapper(_Vocabulary(self._tokenizer)),
        n_vocab=self._tokenizer.vocab_size,
        eos_token=list(self._tokenizer.eos_ids) or None,
    )


class _Vocabulary:
  """A tokenizer as llguidance reads it. Special tokens, such as the end of a turn, are no text."""

  def __init__(self, tokenizer: tokenizer_lib.Tokenizer):
    self._tokenizer = tokenizer
    self.eos_token_id = tokenizer.eos_ids[0] if tokenizer.eos_ids else None
    self.bos_token_id = None
    self.tokens = list(tokenizer.token_bytes)
    pattern = tokenizer.special_added
    special = {i for i in tokenizer.added_ids if pattern.fullmatch(tokenizer.decode([i]))}
    self.special_token_ids = sorted(special | set(tokenizer.eos_ids))

  def __call__(self, text: str | bytes) -> list[int]:
    if isinstance(text, bytes):
      text = text.decode('utf-8', 'replace')
    return self._tokenizer.encode_plain(text)


def _definitions(root: Mapping[str, object]) -> dict[str, object]:
  """Returns the schemas to which references point."""
  return {key: root[key] for key in ('$defs', 'definitions') if key in root}


def _schema(function: Mapping[str, object]) -> Mapping[str, object]:
  """Returns the schema of a function's arguments, which is an object where there is none."""
  return tool_calls.schema_root(function) or {'type': 'object'}


def _json(schema: Mapping[str, object]) -> str:
  return json.dumps(dict(schema) | {'x-guidance': _OPTIONS})
