"""Recorded turns against returned messages: which ones are the same turn, and what is left."""

from absl.testing import absltest
from absl.testing import parameterized

from stppo_jax.serving import api
from stppo_jax.text import turns

CALL = {'function': {'name': 'add', 'arguments': {'a': 2, 'b': [1.5, {'c': True}]}}}
THOUGHT = '<think>\nHm, France.\n</think>\n\n'
SAME = turns.Match()
NO_THOUGHTS = turns.Match(lacks_thoughts=True)


def say(content, *calls):
  return {'role': 'assistant', 'content': content, 'tool_calls': list(calls)}


def call(**arguments):
  return {'function': {'name': 'add', 'arguments': arguments}}


def match(forms, message):
  return turns.match(list(map(turns.ReadMessage, forms)), turns.ReadMessage(message))


class MatchTest(parameterized.TestCase):

  @parameterized.parameters(
      ('It is Paris.', ' It is Paris.\n', SAME),
      ('It is\n\nParis.', 'It is\r\nParis.', SAME),
      ('It is Paris.', 'It is Lima.', None),
      ('It is Paris.', 'It is', None),
      ('It is Paris.', '', None),
      ('', '', SAME),
      ('', 'Paris', None),
      # Thoughts.
      (THOUGHT + 'Paris', '<think>Hm, France.</think>Paris', SAME),
      (THOUGHT + 'Paris', '<think>\nHm, Peru.\n</think>\n\nParis', None),
      (THOUGHT + 'Paris', 'Paris', NO_THOUGHTS),
      (THOUGHT + 'Paris', '<think></think>Paris', NO_THOUGHTS),
      (THOUGHT + 'Paris', 'Lima', None),
      (THOUGHT, '', NO_THOUGHTS),
      ('<think>\n\n</think>\n\nParis', 'Paris', SAME),
      ('Paris', '<think>\n\n</think>\n\nParis', SAME),
      ('Paris', THOUGHT + 'Paris', None),
      ('Hm, France.\n</think>\n\nParis', THOUGHT + 'Paris', SAME),  # the prompt had the tag
      ('Hm, France.\n</think>\n\nParis', 'Paris', NO_THOUGHTS),
      ('<think>a</think>b\n<think>c</think>d', '<think>\na\n</think>\nb\n<think>c</think> d', SAME),
      ('<think>a</think>b\n<think>c</think>d', 'b\nd', NO_THOUGHTS),
      ('<think>cut', '<think>cut', SAME),
      (THOUGHT + 'Paris', '<think internal="x=">\nHm, France.\n</think>\n\nParis', SAME),
      (THOUGHT + 'Paris', f'<think signature="">Hm, France.</think>{THOUGHT}Paris', SAME),
      (THOUGHT + 'Paris', f'<think a="">Hm, Peru.</think>{THOUGHT}Paris', None),
      ('<thinking>a', '<thinking>a', SAME),
      # A text that the client has appended.
      ('x = 1', 'x = 1\nCalling tools:\n[..]', turns.Match('\nCalling tools:\n[..]')),
      (THOUGHT + '</code>', THOUGHT + '</code>Calling', turns.Match('Calling')),
      (THOUGHT + 'x', 'x Calling', turns.Match(' Calling', True)),
      ('Par', 'Paris', None),
  )  # fmt: skip
  def test_texts(self, recorded, returned, expected):
    self.assertEqual(match([say(recorded)], say(returned)), expected)

  @parameterized.parameters(
      (say('I add.', CALL), SAME),
      (say('', CALL), SAME),  # the text is left out
      (say('I add.', call(b=[1.5, {'c': True}], a=2.0)), SAME),
      (say('I add.', call(a=2, b=[1.5, {'c': 1}])), None),
      (say('I add.', call(a=3, b=[1.5, {'c': True}])), None),
      (say('I subtract.', CALL), None),
      (say('I add. Calling', CALL), None),
      (say('I add.'), None),
      (say('I add.', CALL, CALL), None),
      (say('I add.<tool_call>..</tool_call>'), SAME),  # the client has not parsed it
  )
  def test_calls(self, returned, expected):
    forms = [say('I add.<tool_call>..</tool_call>'), say('I add.', CALL)]
    self.assertEqual(match(forms, returned), expected)

  @parameterized.parameters(
      (
          "[{'id': 'c', 'type': 'function', 'function': {'name': 'add', 'arguments': {'a': 2}}}]",
          SAME,
      ),
      (
          "[{'id': 'c', 'type': 'function', 'function': {'name': 'add', 'arguments': {'a': 3}}}]",
          None,
      ),
      ("[{'function': {'name': 'sub', 'arguments': {'a': 2}}}]", None),
      ("[{'function': {'name': 'add', 'arguments': {'a': f('x')}}}]", None),
      ('[' * 10_000, None),
      ("[{'function': 1}, 2]", None),
      ('[]', None),
      ('', None),
  )
  def test_calls_written_into_text(self, written, expected):
    """smolagents' ToolCallingAgent writes the calls of a turn as Python."""
    recorded = [say(THOUGHT + 'Now.', call(a=2))]
    self.assertEqual(match(recorded, say(f'{THOUGHT}Now.\nCalling tools:\n{written}')), expected)
    if expected is SAME:
      self.assertEqual(match(recorded, say(f'Now.\nCalling tools:\n{written}')), NO_THOUGHTS)
      self.assertIsNone(match(recorded, say(f'Then.\nCalling tools:\n{written}')))
      self.assertIsNone(match(recorded, say(f'{THOUGHT}Now.\nCalling no tools:\n{written}')))
      self.assertIsNone(match(recorded, say('')))

  @parameterized.parameters(
      ('{"name": "add", "arguments": {"a": "é", "b": 2}}', True),
      ('{"arguments": {"b": 2.0, "a": "\\u00e9"}, "name": "add"}', True),
      ('{"name": "add", "arguments": {"a": "e", "b": 2}}', False),
      ('{"name": "add", "arguments": {"a": "é", "b": 2}', False),
      ('[' * 10_000, False),
  )
  def test_call_in_text_is_equal_as_json(self, written, is_same):
    """Qwen-Agent parses the calls of a text, and writes them again."""
    tagged = 'Now.\n<tool_call>\n{}\n</tool_call>'
    recorded = [say(THOUGHT + tagged.format('{"name":"add","arguments":{"a":"\\u00e9","b":2}}'))]
    expected = SAME if is_same else None
    self.assertEqual(match(recorded, say(THOUGHT + tagged.format(written))), expected)
    self.assertIsNone(match(recorded, say(f'{THOUGHT}{tagged.format(written)} More.')))

  def test_numbers_as_javascript_writes_them(self):
    for ours, theirs in ((2.0, 2), (-0.0, 0), (12345678901234567890, 12345678901234567000)):
      self.assertEqual(match([say('', call(a=ours))], say('', call(a=theirs))), SAME)
    self.assertIsNone(match([say('', call(a=10**400))], say('', call(a=10**400 + 1))))

  def test_call_without_text_keeps_thought(self):
    forms = [say(THOUGHT + 'I add.', CALL)]
    self.assertEqual(match(forms, say('', CALL)), NO_THOUGHTS)
    self.assertEqual(match(forms, say(THOUGHT, CALL)), SAME)

  def test_closest_form_counts(self):
    forms = [say('I search'), say('I search </search>')]
    self.assertEqual(match(forms, say('I search </search>')), SAME)

  def test_user_repeats_no_turn(self):
    self.assertIsNone(match([say('Paris')], {'role': 'user', 'content': 'Paris'}))

  def test_many_tags_take_linear_time(self):
    """In quadratic time this would take hours."""
    text = '<think>' * 1_000_000
    self.assertEqual(turns.split_thoughts(text), ((), ''))
    self.assertEqual(turns.split_thoughts(text.replace('<', '</')), ((), ''))

  def test_difference_is_short(self):
    old = turns.ReadMessage(say('It is Paris' + '!' * 200, CALL))
    new = turns.ReadMessage(say('It is Lima'))
    shown = turns.first_difference(old, new)
    self.assertEqual(shown, f"'Paris{'!' * 75}' came back as 'Lima'")


class ThoughtFieldsTest(parameterized.TestCase):

  @parameterized.parameters(
      ({'reasoning_content': 'Hm'}, '<think>\nHm\n</think>\n\nParis'),
      ({'reasoning_content': ' Hm '}, '<think> Hm </think>Paris'),
      ({'reasoning': 'Hm'}, '<think>\nHm\n</think>\n\nParis'),
      ({'reasoning_text': 'Hm'}, '<think>\nHm\n</think>\n\nParis'),
      ({'thinking': {'type': 'enabled', 'thinking': 'Hm'}}, '<think>\nHm\n</think>\n\nParis'),
      (
          {'reasoning_details': [{'type': 'reasoning.text', 'text': 'Hm'}], 'reasoning': 'Hm'},
          '<think>\nHm\n</think>\n\nParis',
      ),
      (
          {'thinking_blocks': [{'type': 'thinking', 'thinking': 'Hm', 'signature': ''}]},
          '<think>\nHm\n</think>\n\nParis',
      ),
      ({'reasoning_content': ''}, 'Paris'),
      ({'reasoning_content': None}, 'Paris'),
      ({'reasoning_details': [{'type': 'reasoning.encrypted', 'data': 'x'}]}, 'Paris'),
      ({'reasoning_content': 3, 'reasoning_details': [None, 'x']}, 'Paris'),
      ({'content': '<think>Hm</think>Paris', 'reasoning_content': 'Hm'}, '<think>Hm</think>Paris'),
      ({'role': 'user', 'reasoning_content': 'Hm'}, 'Paris'),
  )
  def test_thought_is_in_content(self, fields, content):
    message = api.Message.model_validate({'role': 'assistant', 'content': 'Paris'} | fields)
    self.assertEqual(message.to_dict()['content'], content)


if __name__ == '__main__':
  absltest.main()
