"""Grammars that an answer must follow: a JSON schema or calls in, allowed tokens per step out.

The library llguidance does the work. It is imported when the first request needs it. The scheduler
asks for the allowed tokens before each step and adds each sampled token.
"""

from collections.abc import Mapping
from collections.abc import Sequence
import functools
import json
import threading
from typing import Any

import numpy as np

from stppo_jax import tokenizer as tokenizer_lib

_MAX_CACHED = 32  # compiled grammars
# As `json.dumps` and chat templates write it. Where white space is free, a model may write nothing
# else until its answer ends.
_OPTIONS = {'whitespace_flexible': False, 'item_separator': ', ', 'key_separator': ': '}
_THOUGHT = """\
thought: "<think>" inner LINES?
inner[suffix="</think>"]: /(.|\\n)*/
LINES: /\\n{1,2}/
"""


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

  def start(self, grammar: str) -> Matcher:
    """Returns the start of a grammar. Raises ValueError: it is none, and Missing."""
    with self._lock:
      if grammar not in self._compiled:
        compiled = self._library.LLMatcher(self._vocabulary, grammar, log_level=0)
        if compiled.is_error():
          message = ' '.join(compiled.get_error().split())[:300]
          raise ValueError(f'the schema is not supported: {message}')
        self._compiled[grammar] = compiled
        for oldest in list(self._compiled)[:-_MAX_CACHED]:
          del self._compiled[oldest]
      return Matcher(self._compiled[grammar].deep_copy())

  def of_schema(self, schema: Mapping[str, Any]) -> str:
    """Returns the grammar of JSON texts of a schema. Raises Missing."""
    return self._library.LLMatcher.grammar_from_json_schema(dict(schema), overrides=_OPTIONS)

  def of_answer(
      self,
      form: str,
      functions: Sequence[Mapping[str, Any]],
      schema: Mapping[str, Any] | None,
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
      rules += _call_rules(form, number, function)
    separator = '"; "' if form == 'llama3' else 'LINES?'
    names = ' | '.join(f'call_{number}' for number in range(len(functions)))
    more = f'({separator} call)*' if has_several else ''
    thought = 'inner LINES?' if in_thought else 'thought?'
    start = f'start: {thought} call {more}'
    if schema is not None:
      start += ' | answer'
      rules.append(f'answer: %json {_json(schema)}')
    lines = [start, f'call: {names}', *rules, _THOUGHT]
    return self._library.LLMatcher.grammar_from_lark('\n'.join(lines))

  @functools.cached_property
  def _library(self) -> Any:
    try:
      import llguidance
    except ImportError as error:
      raise Missing('the server needs llguidance: pip install ".[grammar]"') from error
    return llguidance

  @functools.cached_property
  def _vocabulary(self) -> Any:
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


def _call_rules(form: str, number: int, function: Mapping[str, Any]) -> list[str]:
  """Returns the rules of a call of a function, from `call_{number}` on."""
  name = function['name']
  parameters = dict(function.get('parameters') or {'type': 'object'})
  call = f'call_{number}'
  body = f'body_{number}'
  if form == 'tags':
    fields = parameters.get('properties') or {}
    types = [field.get('type') for field in fields.values()]
    if types in (['string'], [None]):  # its text stands between the tags
      suffix = json.dumps(f'</{name}>')
      return [f'{call}: {json.dumps(f"<{name}>")} {body}', f'{body}[suffix={suffix}]: /(.|\\n)*/']
    tags = json.dumps(f'<{name}>'), json.dumps(f'</{name}>')
    return [f'{call}: {tags[0]} {body} {tags[1]}', f'{body}: %json {_json(parameters)}']
  if form == 'qwen_xml':
    return _xml_rules(call, name, parameters)
  arguments = 'parameters' if form == 'llama3' else 'arguments'
  schema: dict[str, Any] = {
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


def _xml_rules(call: str, name: str, parameters: Mapping[str, Any]) -> list[str]:
  """Returns the rules of a call in the form 'qwen_xml', whose texts stand without quotes."""
  definitions = {key: parameters[key] for key in ('$defs', 'definitions') if key in parameters}
  required = parameters.get('required') or ()
  end = json.dumps('\n</parameter>\n')
  parts = []
  rules = []
  for number, (key, schema) in enumerate((parameters.get('properties') or {}).items()):
    rule = f'{call}_{number}'
    root, _, defined = schema.get('$ref', '').removeprefix('#/').partition('/')
    schema = definitions.get(root, {}).get(defined, schema)
    choices = schema.get('enum', [None])
    if all(isinstance(choice, str) for choice in choices):
      value = f'({" | ".join(map(json.dumps, choices))}) {end}'
    elif schema.get('type') == 'string':
      value = f'{rule}_text'
      rules.append(f'{value}[suffix={end}]: /(.|\\n)*/')
    else:
      value = f'{rule}_json {end}'
      rules.append(f'{rule}_json: %json {_json(dict(schema) | definitions)}')
    rules.append(f'{rule}: {json.dumps(f"<parameter={key}>" + chr(10))} {value}')
    parts.append(rule if key in required else f'{rule}?')
  opening = json.dumps(f'<tool_call>\n<function={name}>\n')
  closing = json.dumps('</function>\n</tool_call>')
  return [f'{call}: {opening} {" ".join(parts)} {closing}', *rules]


def _json(schema: Mapping[str, Any]) -> str:
  return json.dumps(dict(schema) | {'x-guidance': _OPTIONS})
