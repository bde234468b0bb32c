"""Forms of calls against transformers' `response_template`: docs/dev/response_templates.md.

The response templates are those that transformers' server takes for models whose folder has none.
"""

import functools

from absl.testing import absltest
from absl.testing import parameterized
import pytest

from stppo_jax.text import tool_calls
from stppo_jax.text import turns
from tests.text import renderers_test
from tests.text.renderers_test import ADD
from tests.text.renderers_test import CATS
from tests.text.renderers_test import hermes
from tests.text.renderers_test import parameter
from tests.text.renderers_test import TOOLS
from tests.text.renderers_test import xml
from tests.text.renderers_test import XML_CATS

pytestmark = [
    pytest.mark.slow,
    pytest.mark.guests(
        what='Response templates of transformers',
        version='transformers==5.24.0',
        date='2026-11-28',
        touches='text/tool_calls.py text/thoughts.py',
    ),
]

FORMS = {'qwen3': 'hermes', 'qwen3_5': 'qwen_xml'}  # {model type: form}
RAISES = 'ValueError'
LOST_TEXT = 'the text before the last part is lost'
NO_CHECK = 'the parsed value is not checked'
# {model type: {turn: why it is read otherwise, or '' if it is read alike}}
TURNS = {
    'qwen3': {
        'No call.': '',
        f'I look.\n{CATS}\n{hermes(*ADD)}': '',
        f'<think>\nhm {CATS}\n</think>\n\nYes.': '',
        f'<think>\nhm {CATS}': 'the token that ends the turn is a part of the open thought',
        CATS.removesuffix('\n</tool_call>'): RAISES,  # by the token that ends the turn
        f'Before.\n{CATS}\nAfter.': LOST_TEXT,
        '<think>\na\n</think>\n\nYes. <think>\nb\n</think>\n\nNo.': LOST_TEXT,
        f'I look.\n{CATS}\n<tool_call>\n{{name: now}}\n</tool_call>': RAISES,
        f'I look.\n<tool_call>\n{{name: now}}\n</tool_call>\n{CATS}': RAISES,
        hermes('search', {'query': 'a </tool_call> b'}): RAISES,
        '<tool_call>\n{"name": "search", "arg': RAISES,
        '<tool_call>\n{"arguments": {}}\n</tool_call>': NO_CHECK,
        '<tool_call>\n[{"name": "now"}]\n</tool_call>': NO_CHECK,
        hermes('search', {'query': 'cats'}, 'parameters'): NO_CHECK,
        hermes('add', '{"a": 1, "b": 2}'): NO_CHECK,
        hermes('add', {'a': float('nan')}): NO_CHECK,
    },
    'qwen3_5': {
        'No call.': '',
        f'I look.\n{XML_CATS}\n{XML_CATS}': '',
        xml('search', parameter('query', '1')): '',
        xml('add', parameter('a', 'one'), parameter('b', '2')): '',
        xml('write-file', parameter('text', 'if x:\n    y'), parameter('lines', '[1]')): '',
        f'Before.\n{XML_CATS}\nAfter.': LOST_TEXT,
        xml('write-file', parameter('text', '    return 1\n')): 'white space of values is lost',
        XML_CATS.replace('</parameter>\n', ''): 'the argument is lost',
        xml('search', 'query=cats\n'): 'a call that cannot be read is one without arguments',
        '<tool_call>\n<function=search>\n<parameter=query>\nca': 'a cut call is one that is made',
        '<tool_call>\nsearch cats\n</tool_call>': 'a call that cannot be read is text',
    },
}


@functools.cache
def response_template(model_type):
  """Returns the response template of a model type. SkipTest: transformers has it no more."""
  serving = pytest.importorskip('transformers.cli.serving.utils')
  templates = serving._RESPONSE_TEMPLATE_FALLBACKS
  return next(template for types, template in templates.items() if model_type in types)


def read_here(model_type, text):
  """Returns (text, thoughts, calls) as the form of calls reads a turn; None: a malformed call."""
  form = tool_calls.make_form(FORMS[model_type], TOOLS)
  content, calls = form.parse(text)
  thoughts, said = turns.split_thoughts(content)
  read = [None if call.error else (call.name, call.arguments) for call in calls]
  return said.strip(), thoughts, read


def read_by_transformers(model_type, text):
  """Returns the same as `read_here` of a turn, or the name of the error."""
  from transformers.utils import chat_parsing

  template = response_template(model_type)
  try:
    message = chat_parsing.parse_response(f'{text}<|im_end|>', template, prefix='', tools=TOOLS)
  except ValueError as error:
    return type(error).__name__
  functions = [call['function'] for call in message.get('tool_calls', ())]
  calls = []
  for function in functions:
    is_call = isinstance(function, dict) and function.keys() == {'name', 'arguments'}
    calls.append((function['name'], function['arguments']) if is_call else function)
  thought = ' '.join(message.get('reasoning_content', '').split())
  return message.get('content', ''), (thought,) if thought else (), calls


class ResponseTemplateTest(parameterized.TestCase):

  @parameterized.parameters(*FORMS)
  def test_turns_are_read_alike_or_listed(self, model_type):
    for text, reason in TURNS[model_type].items():
      with self.subTest(text):
        ours = read_here(model_type, text)
        theirs = read_by_transformers(model_type, text)
        if reason:
          self.assertNotEqual(ours, theirs, f'no longer a difference: {reason}')
          self.assertEqual(theirs == RAISES, reason == RAISES)
        else:
          self.assertEqual(ours, theirs)

  @parameterized.parameters(('qwen3', 'qwen3'), ('qwen3_5', 'qwen3.5'))
  def test_random_turns_are_read_alike(self, model_type, family):
    for text in renderers_test.random_turns(family):
      with self.subTest(text):
        self.assertEqual(read_here(model_type, text), read_by_transformers(model_type, text))

  def test_form_keeps_what_is_around_malformed_call(self):
    text = f'I look.\n{CATS}\n<tool_call>\n{{name: now}}\n</tool_call>\nNow.'
    said, _, calls = read_here('qwen3', text)
    self.assertEqual(said.split(), ['I', 'look.', 'Now.'])
    self.assertEqual(calls, [renderers_test.SEARCH, None])


if __name__ == '__main__':
  absltest.main()
