"""Function calls in text: what each family writes, what is broken, and any text at all."""

import json
import time

from absl.testing import absltest
from absl.testing import parameterized
import hypothesis
from hypothesis import strategies as st
import pytest

from stppo_jax.text import tool_calls
from stppo_jax.text.tool_calls import Call
from tests.support import tiny_tokenizer

pytestmark = pytest.mark.guests(
    what='Calls as model families write them',
    version='chat templates, as published',
    date='2026-11-26',
    touches='text/tool_calls.py',
)


def schema(name, **parameters):
  """A tool with parameters of these JSON types."""
  properties = {key: {'type': kind, 'description': key} for key, kind in parameters.items()}
  parameters = {'type': 'object', 'properties': properties, 'required': list(properties)}
  function = {'name': name, 'description': f'Does {name}.', 'parameters': parameters}
  return {'type': 'function', 'function': function}


TOOLS = (
    schema('search', query='string'),
    schema('add', a='number', b='number'),
    schema('wait', seconds='number'),
    schema('now'),
)
CAT = Call('search', {'query': 'cats'})
SUM = Call('add', {'a': 1, 'b': 2})
NOW = Call('now', {})


XML_SUM = (
    '<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\n2\n</parameter>\n'
    '</function>\n</tool_call>'
)


def parse(form, text, in_thought=False):
  return tool_calls.make_form(form, TOOLS).parse(text, in_thought)


class ParseTest(parameterized.TestCase):

  @parameterized.parameters(
      # Qwen2.5 and Qwen3: text, then one block per call.
      (
          'hermes',
          'Let me see.\n<tool_call>\n{"name": "search", "arguments": {"query": "cats"}}\n'
          '</tool_call>\n<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>',
          'Let me see.',
          (CAT, SUM),
      ),
      ('hermes', 'No call.', 'No call.', ()),
      ('hermes', '<tool_call>{"name": "now"}</tool_call>', '', (Call('now', {}),)),
      ('hermes', '<tool_call>{"name": "now", "arguments": null}', '', (Call('now', {}),)),
      (
          'hermes',
          '<tool_call>{"name": "add", "arguments": "{\\"a\\": 1, \\"b\\": 2}"}</tool_call> ok',
          'ok',
          (SUM,),
      ),
      # A closing tag within a string; a call that the model only thinks of.
      (
          'hermes',
          '<tool_call>{"name": "search", "arguments": {"query": "</tool_call><tool_call>"}}'
          '</tool_call>',
          '',
          (Call('search', {'query': '</tool_call><tool_call>'}),),
      ),
      (
          'hermes',
          '<think><tool_call>{</think><tool_call>{"name": "now"}</tool_call>',
          '<think><tool_call>{</think>',
          (Call('now', {}),),
      ),
      # Nested values, other scripts, an escaped character outside the basic plane.
      (
          'hermes',
          '<tool_call>{"name": "f", "arguments": {"x": [{"y": {"z": [1, 2.5, null, true]}}], '
          '"ключ": "猫 \\ud83d\\ude00"}}</tool_call>',
          '',
          (Call('f', {'x': [{'y': {'z': [1, 2.5, None, True]}}], 'ключ': '猫 😀'}),),
      ),
      # Without its closing tag before the next block.
      (
          'hermes',
          '<tool_call>{"name": "now"}<tool_call>{"name": "now"}</tool_call>',
          '',
          (Call('now', {}),) * 2,
      ),
      # Several calls in one block, and code fences.
      (
          'hermes',
          '<tool_call>\n{"name": "search", "arguments": {"query": "cats"}}\n'
          '{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>',
          '',
          (CAT, SUM),
      ),
      ('hermes', '<tool_call>[{"name": "now"}, {"name": "now"}]</tool_call>', '', (NOW, NOW)),
      ('hermes', '<tool_call>\n```json\n{"name": "now"}\n```\n</tool_call>', '', (NOW,)),
      (
          'hermes',
          '<tool_call>{"name": "add", "arguments": "```json\\n{\\"a\\": 1, \\"b\\": 2}\\n```"}'
          '</tool_call>',
          '',
          (SUM,),
      ),
      ('tags', '<add>```json\n{"a": 1, "b": 2}\n```</add>', '', (SUM,)),
      ('llama3', '```json\n{"name": "now"}\n```', '', (NOW,)),
      # Qwen3-Coder, also with a tag that it has left out.
      ('qwen_xml', f'Let me see.\n{XML_SUM}\n{XML_SUM}', 'Let me see.', (SUM, SUM)),
      ('qwen_xml', XML_SUM.removeprefix('<tool_call>\n'), '', (SUM,)),
      ('qwen_xml', XML_SUM.removesuffix('\n</tool_call>'), '', (SUM,)),
      ('qwen_xml', XML_SUM.replace('</parameter>\n<parameter=b', '<parameter=b'), '', (SUM,)),
      ('qwen_xml', '<tool_call><function=now></function></tool_call>', '', (NOW,)),
      (
          'qwen_xml',
          '<tool_call>\n<function=search>\n<parameter=query>\n\n def f():\n  </function>'
          '</tool_call>\n'
          '</parameter>\n</function>\n</tool_call>',
          '',
          (Call('search', {'query': '\n def f():\n  </function></tool_call>'}),),
      ),
      ('llama3', '{"name": "search", "parameters": {"query": "cats"}}', '', (CAT,)),
      (
          'llama3',
          '<|python_tag|>{"name": "search", "parameters": {"query": "cats"}}; '
          '{"type": "function", "name": "add", "parameters": {"a": 1, "b": 2}}',
          '',
          (CAT, SUM),
      ),
      ('llama3', '{"answer": 3}', '{"answer": 3}', ()),
      ('llama3', 'It is {"name": 3}', 'It is {"name": 3}', ()),
      ('tags', '<think>x</think> <search> cats </search>', '<think>x</think>', (CAT,)),
      ('tags', '<add>{"a": 1, "b": 2}</add><now></now>', '', (SUM, Call('now', {}))),
      ('tags', '<wait>2</wait>', '', (Call('wait', {'seconds': 2}),)),
      ('tags', '<search>a <add> b</search>', '', (Call('search', {'query': 'a <add> b'}),)),
      ('tags', '</search> <other>x</other>', '</search> <other>x</other>', ()),
  )
  def test_forms_of_model_families(self, form, text, content, calls):
    self.assertEqual(parse(form, text), (content, calls))

  @parameterized.parameters(
      ('hermes', '<tool_call>{"name": "add", "arguments": {"a": 1,', r'not JSON .*\(char \d+'),
      ('hermes', '<tool_call>add(1, 2)</tool_call> done', 'not JSON .*: add'),
      ('hermes', '<tool_call></tool_call>', 'not JSON'),
      ('hermes', '<tool_call>{"arguments": {}}</tool_call>', 'a "name" is needed'),
      ('hermes', '<tool_call>{"name": 3}</tool_call>', 'a "name" is needed'),
      ('hermes', '<tool_call>["now"]</tool_call>', 'a "name" is needed'),
      ('hermes', '<tool_call>{"name": "now", "arguments": [1]}</tool_call>', '"arguments" must be'),
      ('hermes', '<tool_call>{"name": "wait", "arguments": {"seconds": NaN}}', 'NaN is no JSON'),
      (
          'hermes',
          '<tool_call>{"name": "wait", "arguments": {"seconds": 1e400}}',
          'too large a numb',
      ),
      ('hermes', '<tool_call>{"name": "now", "argument": {}}</tool_call>', '"arguments" is miss'),
      ('hermes', '<tool_call>{"name": "wait", "seconds": 1}</tool_call>', '"arguments" is missing'),
      ('llama3', '{"name": "wait", "seconds": 1}', '"parameters" is missing'),
      ('hermes', '<tool_call>' + '[' * 10**5, 'not JSON .*(recursion|overflow)'),
      ('hermes', '<tool_call>' + '1' * 10**5, 'not JSON'),
      ('qwen_xml', '<tool_call>{"name": "now"}</tool_call>', 'is needed: {"name"'),
      ('qwen_xml', XML_SUM[:60], 'is missing'),
      ('qwen_xml', '<tool_call></tool_call>', 'without a <function=NAME>'),
      ('llama3', '{"name": "add", "parameters": {"a": 1', 'not JSON'),
      ('llama3', '<|python_tag|>print(1)', 'not JSON'),
      ('llama3', '<|python_tag|>', 'nothing follows'),
      ('llama3', '<|python_tag|>search.call(query="cats")', 'not JSON'),
      ('tags', '<search>cats', '</search> is missing: cats'),
      ('tags', '<add>1 + 2</add>', 'not JSON'),
      ('tags', '<add>[1, 2]</add>', 'no JSON object'),
  )
  def test_malformed_call_has_reason(self, form, text, message):
    _, (call,) = parse(form, text)
    self.assertRegex(call.error, message)
    self.assertLess(len(call.error), 300)
    self.assertNotIn('\n', call.error)

  @parameterized.parameters(*tool_calls.FORMS)
  def test_call_in_thought_is_none(self, form):
    write = tool_calls.make_form(form, TOOLS).write
    draft = write(SUM)
    real = write(CAT)
    for text, in_thought in (
        (f'<think>maybe {draft}', False),  # never closed
        (f'<think>\n{draft}', False),
        (f'maybe {draft}', True),  # the template has opened the thought
        (draft, True),
        (f'<think>a {draft}</think> none', False),
        (f'a</think>\n<think>again {draft}', True),
        (f'{draft}</think> none', False),
    ):
      self.assertEqual(parse(form, text, in_thought), (text.strip(), ()), text)
    for text, in_thought in (
        (f'<think>maybe {draft}</think>', False),
        (f'maybe {draft}</think>', True),
        (f'maybe {draft}</think>', False),
        (f'<think>{draft}\n<think>{draft}</think>', False),  # the tag appears again
        (f'{draft}</think><think>{draft}</think>', True),
        (f'<think>maybe {draft[:-9]} no</think>', False),  # a draft that is not complete
        (f'maybe {draft[:-9]} no</think>', True),
    ):
      self.assertEqual(parse(form, f'{text}\n{real}', in_thought), (text, (CAT,)), text)

  @parameterized.parameters('hermes', 'qwen_xml', 'tags')
  def test_call_between_thoughts_is_one(self, form):
    write = tool_calls.make_form(form, TOOLS).write
    draft = write(SUM)
    real = write(CAT)
    for before, after in (
        ('<think>a</think>', f'<think>{draft}</think>'),
        ('', f'<think>{draft}</think> b'),
        ('<think>a</think>', f'<think>{draft}'),  # never closed
    ):
      self.assertEqual(parse(form, before + real + after), (before + after, (CAT,)))
    self.assertEqual(
        parse(form, f'a</think>{real}<think>b</think>{real}', True),
        ('a</think><think>b</think>', (CAT, CAT)),
    )

  @parameterized.parameters('hermes', 'qwen_xml', 'llama3')
  def test_tag_of_thought_in_string_ends_none(self, form):
    call = Call('search', {'query': 'what is </think> and <think>'})
    written = tool_calls.make_form(form, TOOLS).write(call)
    self.assertEqual(parse(form, written), ('', (call,)))
    self.assertEqual(parse(form, f'a</think>{written}', True), ('a</think>', (call,)))

  def test_tool_that_is_called_think(self):
    form = tool_calls.make_form('tags', (schema('think', thought='string'),))
    call = Call('think', {'thought': 'it is'})
    self.assertEqual(form.parse('<think>it is</think>'), ('', (call,)))

  @parameterized.parameters(
      '</parameter>\n', '</function>\n', '</parameter>\n</function>\n', '\n</parameter>'
  )
  def test_closing_tags_of_xml_may_be_missing(self, missing):
    def write(*calls):
      form = tool_calls.make_form('qwen_xml', TOOLS)
      return '\n'.join(form.write(call).replace(missing, '') for call in calls)

    paris = Call('search', {'query': 'Paris\nand its river'})
    for calls in ((paris,), (SUM,), (paris, SUM), (SUM, paris)):
      self.assertEqual(parse('qwen_xml', write(*calls))[1], calls)
    if '</function>' not in missing:
      open_block = write(SUM).removesuffix('</tool_call>')
      self.assertEqual(parse('qwen_xml', open_block)[1], (SUM,))
    together = write(paris, SUM).replace('\n</tool_call>\n<tool_call>', '')
    self.assertEqual(parse('qwen_xml', together)[1], (paris, SUM))

  @parameterized.product(
      found=('</parameter>\n', '\n</parameter>', '</parameter>'),
      written=('', '</param', '</paramter>'),
      separator=('\n', ''),
      between=('</tool_call>\n<tool_call>\n', ''),
  )
  def test_broken_xml_tag_loses_no_later_call(self, found, written, separator, between):
    form = tool_calls.make_form('qwen_xml', TOOLS)
    for first in (CAT, SUM):
      broken = form.write(first)
      place = broken.rindex(found)
      broken = broken[:place] + written + broken[place + len(found) :]
      text = f'{broken}\n{form.write(CAT)}\n{form.write(NOW)}'
      text = text.replace('</tool_call>\n<tool_call>\n', between).replace('\n', separator)
      _, calls = parse('qwen_xml', text)
      self.assertEqual(calls[0].name, first.name)
      self.assertEqual(calls[1:], (CAT, NOW))

  def test_cut_xml_call_is_malformed(self):
    """A limit may have cut a value whose closing tags are missing."""
    text = '<tool_call>\n<function=search>\n<parameter=query>\nParis and'
    for end in ('', '\n', '\n</parameter>', '\n</parameter>\n'):
      _, (call,) = parse('qwen_xml', text + end)
      self.assertIn('is missing', call.error)

  @parameterized.parameters(
      '</tool_call>', '</function>', '<function=add>', '</tool_call></function>'
  )
  def test_tags_in_xml_value_are_text(self, tag):
    call = Call('search', {'query': f'What is {tag} there?'})
    text = tool_calls.make_form('qwen_xml', TOOLS).write(call)
    self.assertEqual(parse('qwen_xml', text)[1], (call,))

  @parameterized.parameters(
      ('array', "['a', 'b']", ['a', 'b']),
      ('object', "{'a': True, 'b': None}", {'a': True, 'b': None}),
      ('array', "[('a', 1)]", [['a', 1]]),
      ('array', '["a", null]', ['a', None]),
      ('array', "['a', null]", "['a', null]"),
      ('array', "[open('x')]", "[open('x')]"),
      ('array', '[' * 5000, '[' * 5000),
      ('object', '{' + '-' * 5000 + '1}', '{' + '-' * 5000 + '1}'),
      ('string', "['a', 'b']", "['a', 'b']"),
      (['array', 'null'], 'None', None),
  )
  def test_literals_of_python_are_values(self, kind, text, value):
    tool = {'name': 'f', 'parameters': {'type': 'object', 'properties': {'x': {'type': kind}}}}
    form = tool_calls.make_form('qwen_xml', [{'type': 'function', 'function': tool}])
    body = f'<function=f>\n<parameter=x>\n{text}\n</parameter>\n</function>'
    (call,) = form.parse(f'<tool_call>\n{body}\n</tool_call>')[1]
    self.assertEqual(call.arguments, {'x': value})

  @parameterized.parameters(
      ('string', '1', '1'),
      ('integer', '1', 1),
      ('number', '2.5', 2.5),
      ('number', '3', 3),
      ('boolean', 'True', True),
      ('boolean', 'false', False),
      ('array', '[1, "x"]', [1, 'x']),
      ('object', '{"k": null}', {'k': None}),
      ('integer', 'many', 'many'),  # the check of the arguments says what is wrong
      ('integer', '"1"', '"1"'),
      (['integer', 'null'], 'null', None),
      (['string', 'null'], 'null', None),
      ('string', 'null', 'null'),
  )
  def test_xml_values_have_types_of_schema(self, kind, text, value):
    written = (
        f'<tool_call>\n<function=f>\n<parameter=x>\n{text}\n</parameter>\n</function>\n</tool_call>'
    )
    for described in (
        {'type': kind},
        {'$ref': '#/$defs/Kind'},
        {'anyOf': [{'type': each} for each in ([kind] if isinstance(kind, str) else kind)]},
    ):
      parameters = {'properties': {'x': described}, '$defs': {'Kind': {'type': kind}}}
      form = tool_calls.make_form(
          'qwen_xml', [{'function': {'name': 'f', 'parameters': parameters}}]
      )
      self.assertEqual(form.parse(written), ('', (Call('f', {'x': value}),)))
      call = Call('f', {'x': value})
      self.assertEqual(form.parse(form.write(call)), ('', (call,)))

  @parameterized.parameters(
      ({'properties': {'q': 'text'}},),
      ({'properties': {'q': True}},),
      ({'properties': ['q']},),
      ({'properties': {'q': {'type': 5}}},),
      ({'properties': {'q': {'anyOf': 'x'}}},),
      ({'properties': {'q': {'$ref': '#/a/b'}}},),
      ('text',),
      (None,),
  )
  def test_odd_schema_raises_nothing(self, parameters):
    tool = {'function': {'name': 'f', 'parameters': parameters}}
    for name in tool_calls.FORMS:
      form = tool_calls.make_form(name, [tool])
      form.declare()
      _, (call,) = form.parse(form.write(Call('f', {'q': 'cats'})))
      self.assertEqual((call.name, call.error), ('f', ''))

  @parameterized.named_parameters(
      ('hermes', '<tool_call>\n{{ f | tojson }}\n</tool_call>', 'hermes'),
      (
          'qwen_xml',
          '<tool_call>\n<function={{ f.name }}>\n{% for key, value in f.arguments.items() %}'
          '<parameter={{ key }}>\n{{ value }}\n</parameter>\n{% endfor %}</function>\n</tool_call>',
          'qwen_xml',
      ),
      ('llama3', '{"name": "{{ f.name }}", "parameters": {{ f.arguments | tojson }}}', 'llama3'),
      ('python_tag', '<|python_tag|>{{ f | tojson }}', 'llama3'),
      ('mistral', '[TOOL_CALLS][{{ f | tojson }}]', ''),
      ('no_call', '', ''),
  )
  def test_template_chooses_form(self, call, name):
    source = (
        '{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% for c in m.tool_calls %}'
        '{% set f = c.function %}CALL{% endfor %}<|im_end|>\n{% endfor %}'
        '{% if add_generation_prompt %}<|assistant|>{% endif %}'
    )
    render = tiny_tokenizer.load(source.replace('CALL', call)).render
    self.assertEqual(tool_calls.form_name('auto', render), name or 'hermes')
    turn = tool_calls.shown_call(render)
    self.assertEqual('rivers' in turn, call != '')
    reading = [form for form in tool_calls.FORMS if tool_calls.reads(form, turn)]
    self.assertEqual(reading, [name] if name else [])
    self.assertEqual(tool_calls.form_name('tags', render), 'tags')
    self.assertEqual(tool_calls.form_name('auto', None), 'hermes')

  def test_broken_call_does_not_hide_next(self):
    call = '<tool_call>{"name": "now"}</tool_call>'
    content, (first, second) = parse('hermes', f'a<tool_call>{{</tool_call>b{call}c')
    self.assertEqual((content, second), ('abc', Call('now', {})))
    self.assertNotEmpty(first.error)

  def test_declarations_name_every_tool(self):
    for form in tool_calls.FORMS:
      text = tool_calls.make_form(form, TOOLS).declare()
      for tool in TOOLS:
        self.assertIn(tool['function']['name'], text)
    self.assertEqual(
        tool_calls.make_form('tags', TOOLS[:2]).declare(),
        'You may call these tools:\n<search>query</search>: Does search.\n'
        '<add>{"a": .., "b": ..}</add>: Does add.\n',
    )


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)  # fmt: skip
PIECES = st.sampled_from([
    '<tool_call>', '</tool_call>', '<search>', '</search>', '<add>', '</add>', '</think>', '{', '}',
    '"', '\\', '{"name": "add", "arguments": {"a": 1}}', '{"name": "x"', ';', '<|python_tag|>', '[',
    'search.call(', ')', '<think>', '<function=add>', '<parameter=a>', '</parameter>',
    '</function>', '```', '\ud800', '\x00', 'é', '😀', ' ', '\n', '{"name":"search","parameters":{',
])  # fmt: skip


class FuzzTest(parameterized.TestCase):

  @hypothesis.settings(max_examples=80, deadline=None)
  @hypothesis.given(st.lists(PIECES | st.text(), max_size=30))
  def test_no_text_raises(self, pieces):
    text = ''.join(pieces)
    for form in tool_calls.FORMS:
      content, calls = parse(form, text)
      self.assertIsInstance(content, str)
      for call in calls:
        json.dumps(call.arguments, allow_nan=False)
        self.assertIsInstance(call.name, str)
        self.assertTrue(call.name or call.error)

  @hypothesis.settings(max_examples=50, deadline=None)
  @hypothesis.given(st.dictionaries(st.text(), VALUES, max_size=4), st.text())
  def test_parse_inverts_write(self, arguments, query):
    call = Call('add', arguments)
    ends = sum(json.dumps(arguments).count(tag) for tag in ('tool_call>', 'add>'))
    hypothesis.assume(ends < 3)
    for form in ('hermes', 'llama3', 'tags'):  # an XML value has the type of its schema
      made = tool_calls.make_form(form, TOOLS)
      self.assertEqual(made.parse(made.write(call)), ('', (call,)), form)
    hypothesis.assume('</parameter>' not in query and '\n<parameter=' not in query)
    xml = tool_calls.make_form('qwen_xml', TOOLS)
    found = Call('search', {'query': query})
    self.assertEqual(xml.parse(xml.write(found)), ('', (found,)))
    tags = tool_calls.make_form('tags', TOOLS)
    hypothesis.assume('<' not in query)
    written = tags.write(Call('search', {'query': query}))
    self.assertEqual(tags.parse(written), ('', (Call('search', {'query': query.strip()}),)))

  @hypothesis.settings(max_examples=50, deadline=None)
  @hypothesis.given(st.integers(0, 200))
  def test_cut_turn_is_at_most_one_call(self, cut):
    for form in tool_calls.FORMS:
      made = tool_calls.make_form(form, TOOLS)
      text = made.write(Call('add', {'a': 1, 'b': 'x' * 50}))
      _, calls = made.parse(text[: min(cut, len(text) - 1)])
      self.assertLessEqual(len(calls), 1)

  @parameterized.parameters(
      '<tool_call>', '<tool_call>{"a": "', '<tool_call>["', '<tool_call>[","</tool_call>',
      '<search>',
      '<tool_call>{"name": "now"}</tool_call>', '<think>', '<think></think>', '{"name":</think>',
      '<tool_call><function=add>', '<tool_call><function=add><parameter=a>1', '<function=add>',
      '<parameter=a></parameter>', '```', '{"name": "now"}</think>', '<|python_tag|></think>',
      '<add>{', '<tool_call>[[[[[', '{"name":',
      '{"name": "now"};', '<|python_tag|>', '<|python_tag|>a.call(', '</think>', '\\"', '<', ' ',
  )  # fmt: skip
  def test_parse_takes_linear_time(self, unit):
    """Quadratic time would take minutes. The limit is twenty times the usual CPU time."""
    for form in tool_calls.FORMS:
      text = '<|python_tag|>' * (form == 'llama3') + unit * (10**5 // len(unit))
      started = time.thread_time()
      parse(form, text)
      self.assertLess(time.thread_time() - started, 8, form)


class WriteTest(absltest.TestCase):

  def test_arguments_that_are_no_object(self):
    """A client may send any JSON value, or a text that is no JSON, as a call's arguments."""
    one = {'type': 'object', 'properties': {'query': {'type': 'string'}}}
    two = {'type': 'object', 'properties': {'a': {}, 'b': {}}}
    tools = [{'function': {'name': 'f', 'parameters': parameters}} for parameters in (one, two)]
    for tool in tools:
      form = tool_calls.make_form('tags', [tool])
      write = lambda arguments, form=form: form.write(tool_calls.Call('f', arguments))
      self.assertEqual(write('cats'), '<f>cats</f>')
      self.assertEqual(write([1, 'x']), '<f>[1, "x"]</f>')


if __name__ == '__main__':
  absltest.main()
