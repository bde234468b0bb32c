"""Tests of stppo_jax.data.conversations: which tokens of a conversation are imitated."""

import csv
import json
import pathlib
import tempfile

from absl.testing import absltest
from absl.testing import parameterized
import numpy as np
import pyarrow
from pyarrow import parquet
import pytest
import transformers

from stppo_jax import types
from stppo_jax.data import conversations
from stppo_jax.data import row_files
from stppo_jax.text import tokenizer as tokenizer_lib
from tests.support import tiny_tokenizer

pytestmark = pytest.mark.guests(
    what='Conversations of OpenAI, ShareGPT, TRL and verifiers',
    version='columns of the published files',
    date='2026-11-28',
    touches='data/conversations.py',
)

# A template in the style of Qwen: tools, calls, and the blocks that transformers makes its mask of.
_TEMPLATE = (
    '{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}'
    "{% for m in messages %}{% if m.role == 'assistant' %}<|im_start|>assistant\n"
    '{% generation %}{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>\n'
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n'
    '</tool_call>{% endfor %}<|im_end|>{% endgeneration %}\n'
    '{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}'
    '{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}'
)
# It shows thoughts of the last turn only, as Qwen3's does.
_FORGETS = (
    '{% for m in messages %}<|im_start|>{{ m.role }}\n'
    "{{ m.content if loop.last or m.role != 'assistant' else m.content.split('</think>')[-1] }}"
    '<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}'
)
# It opens the thought in the prompt and drops it from every turn, as that of R1-Distill does.
_OPENS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content.split('</think>')[-1] | trim }}"
    '<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n'
    '{% endif %}'
)
_TOOL = {
    'type': 'function',
    'function': {
        'name': 'search',
        'parameters': {'type': 'object', 'properties': {'query': {'type': 'string'}}},
    },
}
_CALL = {
    'id': 'c1',
    'type': 'function',
    'function': {'name': 'search', 'arguments': '{"query": "capital of France"}'},
}
_MESSAGES = [
    {'role': 'system', 'content': 'You are brief.'},
    {'role': 'user', 'content': 'Question: which town is it?'},
    {'role': 'assistant', 'content': None, 'tool_calls': [_CALL]},
    {'role': 'tool', 'content': 'Paris is the <|im_end|> capital.', 'tool_call_id': 'c1'},
    {'role': 'assistant', 'content': '<answer> Paris </answer>'},
    {'role': 'user', 'content': [{'type': 'text', 'text': 'And the river?'}]},
    {'role': 'assistant', 'content': 'The Seine, <answer>b</answer>'},
    {'role': 'user', 'content': 'Thanks.'},
]
_CALL_TEXT = (
    '<tool_call>\n{"name": "search", "arguments": {"query": "capital of France"}}\n</tool_call>'
)
_TURNS = [_CALL_TEXT, '<answer> Paris </answer>', 'The Seine, <answer>b</answer>']


class _Test(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.folder = self.enterContext(tempfile.TemporaryDirectory())

  def write(self, name, rows):
    path = pathlib.Path(self.folder, name)
    if name.endswith('.parquet'):
      parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    elif name.endswith('.csv'):
      with path.open('w', newline='', encoding='utf-8') as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    else:
      path.write_text('\n'.join(map(json.dumps, rows)), encoding='utf-8')
    return path

  def read(self, row, name='chats.jsonl', min_reward=0.5, columns=None):
    path = self.write(name, [row])
    ((_, conversation),) = conversations.read(path, min_reward, columns or {})
    return conversation

  def renderer(self, template, **settings):
    tiny_tokenizer.write(self.folder, chat_template=template)
    tokenizer = tokenizer_lib.load_tokenizer(self.folder)
    return conversations.Renderer(tokenizer, **settings)

  def turns(self, renderer, conversation):
    """Returns (the text of all that is not imitated, texts of the turns)."""
    episode = renderer.episode(conversation, 'x')
    decode = renderer.tokenizer.decode
    tokens, turn_ids, _ = episode.unroll()
    return decode(tokens[turn_ids == 0]), [decode(turn.tokens) for turn in episode.turns]


class MaskTest(_Test):

  @parameterized.parameters((True,), (False,))
  def test_tokens_and_mask_are_those_of_transformers(self, with_tools):
    messages = [m for m in _MESSAGES[:-1] if '<|im_end|>' not in str(m['content'])]
    row = {'messages': messages} | ({'tools': [_TOOL]} if with_tools else {})
    renderer = self.renderer(_TEMPLATE)
    conversation = self.read(row)
    episode = renderer.episode(conversation, 'x')
    library = transformers.PreTrainedTokenizerFast.from_pretrained(self.folder)
    plain = [{k: v for k, v in m.items() if k != 'trained'} for m in conversation.messages]
    expected = library.apply_chat_template(
        plain, tools=conversation.tools or None, return_dict=True, return_assistant_tokens_mask=True
    )
    tokens, turn_ids, _ = episode.unroll()
    mask = np.array(expected['assistant_masks'])
    self.assertEqual(mask.sum(), sum(len(turn.tokens) for turn in episode.turns))
    length = len(tokens)  # the template writes a line end after the last turn
    np.testing.assert_array_equal(tokens, expected['input_ids'][:length])
    np.testing.assert_array_equal(turn_ids > 0, mask[:length] > 0)

  def test_only_turns_and_calls_are_imitated(self):
    others, turns = self.turns(self.renderer(_TEMPLATE), self.read({'messages': _MESSAGES}))
    self.assertEqual(turns, [f'{text}<|im_end|>' for text in _TURNS])
    for text in ('You are brief.', 'which town', 'Paris is the <|im_end|> capital', 'the river'):
      self.assertIn(text, others)
    self.assertNotIn('Thanks', others)  # no turn follows it

  def test_a_text_is_no_control_token(self):
    renderer = self.renderer(_TEMPLATE)
    episode = renderer.episode(self.read({'messages': _MESSAGES}), 'x')
    (end,) = renderer.tokenizer.eos_ids
    tokens, turn_ids, _ = episode.unroll()
    self.assertEqual((tokens[turn_ids > 0] == end).sum(), 3)
    self.assertEqual((tokens[turn_ids == 0] == end).sum(), 4)  # those of the template alone

  def test_weight_zero_and_prompts_are_not_imitated(self):
    renderer = self.renderer(_TEMPLATE)
    for field in ({'weight': 0}, {'loss': False}, {'train': False}, {'training': False}):
      messages = [dict(message) for message in _MESSAGES]
      messages[4] |= field
      others, turns = self.turns(renderer, self.read({'messages': messages}))
      self.assertLen(turns, 2)
      self.assertIn('<answer> Paris </answer>', others)
    row = {'prompt': _MESSAGES[:5], 'completion': _MESSAGES[5:]}
    others, turns = self.turns(renderer, self.read(row))
    self.assertEqual(turns, [_TURNS[2] + '<|im_end|>'])
    self.assertIn('<tool_call>', others)

  def test_thoughts_of_earlier_turns_stay(self):
    """A run never encodes a turn again, so its agent reads them."""
    messages = [
        {'role': 'user', 'content': 'a'},
        {'role': 'assistant', 'content': '<think>one</think>b'},
        {'role': 'user', 'content': 'c'},
        {'role': 'assistant', 'content': 'd', 'reasoning_content': 'two'},
    ]
    others, turns = self.turns(self.renderer(_FORGETS), self.read({'messages': messages}))
    self.assertEqual(
        turns, ['<think>one</think>b<|im_end|>', '<think>\ntwo\n</think>\n\nd<|im_end|>']
    )
    self.assertEqual(
        others,
        '<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n'
        '\n<|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\n',
    )

  def test_a_prompt_that_opens_the_thought(self):
    messages = [
        {'role': 'user', 'content': 'a'},
        {'role': 'assistant', 'content': '<think>\none\n</think>\n\nb'},
    ]
    others, turns = self.turns(self.renderer(_OPENS), self.read({'messages': messages}))
    self.assertEndsWith(others, '<|im_start|>assistant\n<think>\n')
    self.assertEqual(turns, ['one\n</think>\n\nb<|im_end|>'])

  def test_without_a_template_texts_follow_each_other(self):
    messages = [
        {'role': 'user', 'content': 'Question: which town\n'},
        {'role': 'assistant', 'content': '<search>a</search>'},
        {'role': 'tool', 'content': '<information>b</information>'},
        {'role': 'assistant', 'content': 'Paris'},
    ]
    renderer = self.renderer(None, stop_strings=('</search>',))
    others, turns = self.turns(renderer, self.read({'messages': messages}))
    self.assertEqual(others, 'Question: which town\n<information>b</information>')
    self.assertEqual(turns, ['<search>a</search>', 'Paris<|im_end|>'])

  def test_two_texts_are_no_chat(self):
    others, turns = self.turns(
        self.renderer(_TEMPLATE), self.read({'prompt': 'The sky is', 'completion': ' blue.'})
    )
    self.assertEqual((others, turns), ('The sky is', [' blue.<|im_end|>']))

  def test_long_conversation_is_cut_between_turns(self):
    renderer = self.renderer(_TEMPLATE)
    episode = renderer.episode(self.read({'messages': _MESSAGES}), 'x')
    first = len(episode.prompt) + len(episode.turns[0].tokens)
    cut = conversations.fitted(episode, len(episode.unroll()[0]) - 1)
    self.assertLen(cut.turns, 2)
    self.assertEqual(len(conversations.fitted(episode, first).unroll()[0]), first)
    self.assertIsNone(conversations.fitted(episode, first - 1))


class ReadTest(_Test):

  def check(self, conversation):
    turns = [m for m in conversation.messages if m.get('trained')]
    self.assertLen(turns, 3)
    function = turns[0]['tool_calls'][0]['function']
    self.assertEqual(function, {'name': 'search', 'arguments': {'query': 'capital of France'}})
    self.assertEqual(turns[2]['content'], 'The Seine, <answer>b</answer>')
    self.assertEqual([m['role'] for m in conversation.messages[:2]], ['system', 'user'])

  def test_openai(self):
    conversation = self.read({'messages': _MESSAGES, 'tools': [_TOOL], 'split': 'dev'})
    self.check(conversation)
    self.assertEqual((conversation.tools, conversation.split), ([_TOOL], 'dev'))

  def test_parquet_has_null_columns(self):
    messages = [dict(message) for message in _MESSAGES]
    messages[5]['content'] = 'And the river?'  # a column has one type
    call = {
        'id': None,
        'type': None,
        'function': {'name': 'search', 'arguments': {'query': 'capital of France', 'other': None}},
    }
    messages[2] = {'role': 'assistant', 'content': None, 'tool_calls': [call]}
    tool = {**_TOOL, 'strict': None}
    conversation = self.read({'messages': messages, 'tools': [tool]}, 'chats.parquet')
    self.check(conversation)
    self.assertEqual(conversation.tools, [_TOOL])

  def test_json_texts(self):
    row = {'messages': json.dumps(_MESSAGES), 'tools': json.dumps([_TOOL['function']])}
    conversation = self.read(row)
    self.check(conversation)
    self.assertEqual(conversation.tools, [_TOOL])

  def test_sharegpt(self):
    turns = [
        ('human', 'Question: which town is it?'),
        ('function_call', '{"name": "search", "arguments": {"query": "capital of France"}}'),
        ('observation', 'Paris is the capital.'),
        ('gpt', 'It is Paris.'),
        ('human', 'And the river?'),
        ('gpt', 'The Seine, <answer>b</answer>'),
    ]
    conversation = self.read(
        {
            'conversations': [{'from': role, 'value': value} for role, value in turns],
            'system': 'You are brief.',
        }
    )
    self.check(conversation)

  def test_older_form_of_calls(self):
    messages = [dict(message) for message in _MESSAGES]
    function = {'name': 'search', 'arguments': '{"query": "capital of France"}'}
    messages[2] = {'role': 'assistant', 'content': '', 'function_call': function}
    messages[3] = {**messages[3], 'role': 'function'}
    self.check(self.read({'messages': messages, 'tools': [_TOOL]}))

  def test_messages_may_be_in_any_column(self):
    messages = [{'role': 'user', 'content': 'a'}, {'role': 'assistant', 'content': 'b'}]
    for name in ('chats.jsonl', 'chats.parquet'):
      conversation = self.read({'dialog': messages}, name)
      self.assertEqual([message['content'] for message in conversation.messages], ['a', 'b'])

  @parameterized.parameters('resolved', 'label', 'kto_tag', 'target')
  def test_unsolved_trajectory_is_left_out(self, column):
    row = {'messages': json.dumps(_MESSAGES), column: False}
    for name in ('chats.jsonl', 'chats.parquet'):
      self.assertEqual(self.read(row, name), f'{column!r} is false')
      self.check(self.read(row | {column: True}, name))

  @parameterized.product(
      column=('resolved', 'label', 'kto_tag', 'target'),
      value=(False, 0, 0.0, 'False', 'false', '0'),
  )
  def test_false_flag_has_many_forms(self, column, value):
    row = {'messages': json.dumps(_MESSAGES), column: value}
    for name in ('chats.jsonl', 'chats.csv', 'chats.parquet'):
      self.assertEqual(self.read(row, name), f'{column!r} is false')

  @parameterized.parameters(
      ('label', 'chosen'), ('label', 2), ('kto_tag', 'good'), ('target', [1]), ('reward', 'high')
  )
  def test_flag_of_another_kind_is_refused(self, column, value):
    with self.assertRaisesRegex(types.UserError, f'chats.jsonl:1: column {column!r} is'):
      self.read({'messages': _MESSAGES, column: value})

  @parameterized.parameters(
      {'loss': 0},
      {'loss': 'false'},
      {'loss': '0'},
      {'weight': '0'},
      {'weight': 0.0},
      {'train': 'False'},
      {'training': 0},
  )
  def test_masked_turn_has_many_forms(self, **field):
    messages = [dict(message) for message in _MESSAGES]
    messages[4] |= field
    trained = [m['content'] for m in self.read({'messages': messages}).messages if m.get('trained')]
    self.assertEqual(trained, ['', 'The Seine, <answer>b</answer>'])
    messages[4] |= {'weight': 0.5}
    with self.assertRaisesRegex(types.UserError, "column 'weight' is 0.5: true or false"):
      self.read({'messages': messages})

  @parameterized.parameters(
      ({'messages': _MESSAGES, 'conversations': _MESSAGES}, 'messages, conversations'),
      ({'messages': _MESSAGES, 'chosen': _MESSAGES}, 'messages, chosen'),
      ({'chosen': _MESSAGES, 'rejected': _MESSAGES}, 'chosen, rejected'),
      ({'prompt': 'a', 'completion': 'b', 'messages': _MESSAGES}, 'prompt, completion, messages'),
  )
  def test_two_conversations_are_refused(self, row, names):
    with self.assertRaisesRegex(
        types.UserError, f'several columns may be the conversation: {names}. .*first row .* --con'
    ):
      self.read(row)

  @parameterized.parameters(
      {'is_correct': False},
      {'success': 0},
      {'passed': 'false'},
      {'rejected': True},
      {'keep': False},
      {'exclude': 1},
      {'score': 0},
      {'status': 'failed'},
      {'preference': 'Rejected'},
      {'error_message': 'Boom'},
      {'sample_weight': 0.5},
      {'loss_mask': [0, 1]},
  )
  def test_unread_mark_of_bad_rows_is_refused(self, **field):
    with self.assertRaisesRegex(types.UserError, 'may mark rows not to imitate.*--config.data.col'):
      self.read({'messages': _MESSAGES} | field)
    harmless = {'redacted': False, 'status': 'done', 'error': 'no', 'constraints': [1, 2]}
    self.check(self.read({'messages': _MESSAGES} | harmless))

  @parameterized.parameters(
      {'mask': True}, {'loss_mask': 1}, {'trainable': False}, {'ignore': 'true'}, {'correct': 0}
  )
  def test_unread_mark_of_a_turn_is_refused(self, **field):
    messages = [dict(message) for message in _MESSAGES]
    messages[4] |= field
    with self.assertRaisesRegex(types.UserError, "may mark it as bad: write 'weight': 0"):
      self.read({'messages': messages})
    messages[4] = _MESSAGES[4] | {'id': 'a', 'refusal': None, 'created': 1, 'mask': None}
    self.check(self.read({'messages': messages}))

  def test_named_columns_override_all_guessing(self):
    row = {
        'messages': [{'role': 'user', 'content': 'other'}],
        'data': {'chosen': _MESSAGES, 'ok': 'false'},
        'label': 'good',
        'fold': 'dev',
    }
    columns = {'messages': 'data.chosen', 'split': 'fold'}
    conversation = self.read(row, columns=columns)
    self.check(conversation)
    self.assertEqual(conversation.split, 'dev')
    reason = self.read(row, columns=columns | {'flag': 'data.ok'})
    self.assertEqual(reason, "'data.ok' is false")
    row = {'q': 'The sky is', 'a': ' blue.', 'label': 'x'}
    conversation = self.read(row, columns={'prompt': 'q', 'completion': 'a'})
    self.assertEqual([m['content'] for m in conversation.messages], ['The sky is', ' blue.'])
    with self.assertRaisesRegex(types.UserError, "column 'chat' is empty or missing"):
      self.read(row, columns={'messages': 'chat'})
    with self.assertRaisesRegex(types.UserError, "names no conversation: give 'messages'"):
      self.read(row, columns={'question': 'q', 'answers': 'a'})

  def test_reward_and_images_leave_rows_out(self):
    row = {
        'messages': _MESSAGES,
        'reward': '0.0',
        'images': [],
    }  # the cells of a CSV file are texts
    self.assertEqual(self.read(row), 'a reward below 0.5')
    self.check(self.read(row | {'reward': '1.0'}))
    with self.assertRaisesRegex(types.UserError, "column 'reward' is 'high': a number is needed"):
      self.read(row | {'reward': 'high'})
    reason = self.read(row | {'reward': 1, 'images': ['x.png']})
    self.assertEqual(reason, 'images, and only text is read')

  @parameterized.parameters(
      ('image', 'x.jpg'),
      ('image', {'bytes': 'AA==', 'path': None}),
      ('image_path', 'x.jpg'),
      ('images', ['x.jpg']),
      ('image_1', 'x.jpg'),
      ('video', 'x.mp4'),
      ('videos', ['x.mp4']),
      ('audio', 'x.wav'),
      ('audio_url', 'http://x'),
  )
  def test_row_about_media_is_left_out(self, column, value):
    """LLaVA writes `image`, and its text is `<image>` with a question."""
    row = {'conversations': json.dumps(_MESSAGES)}
    empty = {'path': None} if isinstance(value, dict) else None
    for name in ('chats.jsonl', 'chats.parquet'):
      reason = f'{column}, and only text is read'
      self.assertEqual(self.read(row | {column: value}, name), reason)
      columns = {'messages': 'conversations'}
      self.assertEqual(self.read(row | {column: value}, name, columns=columns), reason)
      self.check(self.read(row | {column: empty, 'imagery': 'x', 'audience': 'x'}, name))

  @parameterized.parameters('system', 's')
  def test_system_text_comes_before_prompt_and_completion(self, column):
    columns = (
        {'prompt': 'prompt', 'completion': 'completion', 'system': 's'} if column == 's' else {}
    )
    for prompt in ('Hi.', [{'role': 'user', 'content': 'Hi.'}]):
      row = {'prompt': prompt, 'completion': [{'role': 'assistant', 'content': 'Arr.'}]}
      conversation = self.read(row | {column: 'You are a pirate.'}, columns=columns)
      contents = [(m['role'], m['content']) for m in conversation.messages]
      expected = [('system', 'You are a pirate.'), ('user', 'Hi.'), ('assistant', 'Arr.')]
      self.assertEqual(contents, expected)

  @parameterized.parameters(
      ({'system': 'You are a pirate.'}, 'a system text'),
      ({'s': 'You are a pirate.'}, 'a system text'),
      ({'chat_template_kwargs': {'custom_instructions': 'Be kind.'}}, 'a system text'),
      ({'tools': [_TOOL]}, 'tools'),
  )
  def test_two_texts_show_no_system_or_tools(self, fields, kind):
    columns = (
        {'prompt': 'prompt', 'completion': 'completion', 'system': 's'} if 's' in fields else {}
    )
    row = {'prompt': 'Hi.', 'completion': 'Arr.'}
    with self.assertRaisesRegex(types.UserError, f'jsonl:1: the row has {kind}.*: write messages'):
      self.read(row | fields, columns=columns)
    whole = 'You are a pirate. Be kind. Use search. Hi.'  # the texts of all of them
    self.assertTrue(self.read(row | fields | {'prompt': whole}, columns=columns).is_text)
    self.assertTrue(self.read(row | {'system': '', 'tools': []}).is_text)

  def test_unread_system_text_is_logged(self):
    row_files.log_once.cache_clear()
    with self.assertLogs('absl', 'INFO') as logs:
      self.check(self.read({'messages': _MESSAGES, 'system': 'Be long.'}))
    self.assertIn("column 'system' is not read where the messages have", logs.output[-1])

  @parameterized.parameters(
      ('input', 'output', '4'),
      ('prompt', 'response', '4'),
      ('messages', 'answer', 'four'),
      ('messages', 'completion', 'four'),
      ('conversations', 'generation', 'It is four.'),
  )
  def test_prompt_without_its_answer_is_refused(self, column, other, text):
    messages = [m for m in _MESSAGES if isinstance(m['content'], str)]
    messages += [{'role': 'user', 'content': 'And 2 + 2?'}]
    row = {column: messages, other: text, 'category': 'chat'}
    with self.assertRaisesRegex(
        types.UserError,
        f'messages in {column!r} end without an answer, and column {other!r} may hold it.*'
        f"--config.data.columns=\"{{'prompt': {column!r}, 'completion': {other!r}}}\"",
    ):
      self.read(row)
    conversation = self.read(row, columns={'prompt': column, 'completion': other})
    trained = [m['content'] for m in conversation.messages if m.get('trained')]
    self.assertEqual(trained, [text])

  def test_texts_beside_whole_conversations_are_no_answers(self):
    whole = _MESSAGES[:-1]
    for messages, texts in ((whole, {'answer': 'b', 'problem': 'Which river?'}), (_MESSAGES, {})):
      self.check(self.read({'messages': messages, 'source': 'web', 'prompt_id': 'a1'} | texts))
    rows = [{'messages': _MESSAGES, 'license': 'CC BY 4.0'} for _ in range(3)]
    self.assertEqual(conversations.find_source(self.write('chats.jsonl', rows)), ('messages',))

  @parameterized.named_parameters(
      ('nemotron', {'tools_json': json.dumps([_TOOL])}),
      ('nemotron_v1', {'metadata': json.dumps({'tools': [_TOOL['function']]})}),
      ('older_openai', {'functions': [_TOOL['function']]}),
      ('smoltalk2', {'chat_template_kwargs': {'xml_tools': [json.dumps(_TOOL['function'])]}}),
      ('smoltalk2_python', {'chat_template_kwargs': {'xml_tools': [str(_TOOL['function'])]}}),
      (
          'axolotl',
          {
              'tools': [
                  {'name': 'search', 'parameters': json.dumps(_TOOL['function']['parameters'])}
              ]
          },
      ),
  )
  def test_prompt_shows_tools_of_other_columns(self, columns):
    for name in ('chats.jsonl', 'chats.parquet'):
      conversation = self.read({'messages': json.dumps(_MESSAGES)} | columns, name)
      self.check(conversation)
      self.assertEqual(conversation.tools, [_TOOL])

  def test_prompt_shows_functions_of_python(self):
    kwargs = {'custom_instructions': 'Be kind.', 'python_tools': ['def search(query): ..']}
    row = {
        'messages': _MESSAGES[1:],
        'chat_template_kwargs': kwargs,
        'metadata': {'tools': [{'n': 1}]},
    }
    conversation = self.read(row)
    self.check(conversation)
    self.assertEqual(conversation.messages[0]['content'], 'Be kind.\n\ndef search(query): ..')
    kwargs = {'xml_tools': ['search(query)']}  # no schema
    conversation = self.read({'messages': _MESSAGES, 'chat_template_kwargs': kwargs})
    self.assertEqual(conversation.messages[0]['content'], 'You are brief.\n\nsearch(query)')
    self.assertEqual(conversation.tools, [])

  @parameterized.parameters('thinking', 'reasoning', 'reasoning_content')
  def test_thoughts_of_other_names(self, name):
    messages = [{'role': 'user', 'content': 'q'}, {'role': 'assistant', 'content': 'a', name: 't'}]
    turn = self.read({'messages': messages}).messages[1]
    self.assertEqual((turn['content'], turn['reasoning_content']), ('a', 't'))

  def test_messages_of_other_names(self):
    """SWE-agent's trajectories, and the calls of ms-swift."""
    call = '{"name": "search", "parameters": {"query": "capital of France"}}'
    trajectory = [
        {'role': 'system', 'system_prompt': 'You are brief.', 'text': None},
        {'role': 'user', 'text': 'Question: which town is it?'},
        {'role': 'tool_call', 'content': call},
        {'role': 'tool_response', 'content': 'Paris is the capital.'},
        {'role': 'ai', 'text': '<answer> Paris </answer>'},
        {'role': 'User', 'text': 'And the river?'},
        {'role': 'ai', 'text': 'The Seine, <answer>b</answer>'},
    ]
    for column in ('trajectory', 'conversation'):
      conversation = self.read({column: trajectory})
      self.check(conversation)
      self.assertEqual(
          [m['content'] != '' for m in conversation.messages], [True] * 2 + [False] + [True] * 4
      )

  def test_message_names_all_columns_of_parquet(self):
    with self.assertRaisesRegex(types.UserError, 'in the columns prompt, response, score: mess'):
      self.read({'prompt': 'q', 'response': 'a', 'score': 4}, 'chats.parquet')

  def test_results_of_verifiers(self):
    flat = {'id': 'c1', 'name': 'search', 'arguments': '{"query": "capital of France"}'}
    completion = [dict(message) for message in _MESSAGES[2:]]
    completion[0]['tool_calls'] = [json.dumps(flat)]
    row = {
        'example_id': 0,
        'prompt': _MESSAGES[:2],
        'completion': completion,
        'reward': 1.0,
        'error': None,
        'tool_defs': [_TOOL['function']],
    }
    conversation = self.read(row, 'results.jsonl')
    self.check(conversation)
    self.assertEqual(conversation.tools, [_TOOL])
    self.assertEqual(self.read({**row, 'reward': 0.0}), 'a reward below 0.5')
    self.assertEqual(self.read({**row, 'error': {'error': 'TimeoutError'}}), 'an error')

  @parameterized.parameters(
      ([{'role': 'user', 'content': 'q'}], 'no turn of the assistant'),
      ([{'role': 'user', 'content': 'q'}, {'role': 'assistant', 'content': ''}], 'no turn of the'),
      ([{'role': 'assistant', 'content': 'a'}], 'no message before the first turn'),
  )
  def test_a_conversation_without_a_turn_is_left_out(self, messages, reason):
    self.assertIn(reason, self.read({'messages': messages}))

  @parameterized.named_parameters(
      ('columns', {'text': 'x'}, 'no conversation in the columns text: messages, conversations'),
      ('list', {'messages': []}, "column 'messages' is"),
      ('text', {'messages': 'Hello'}, "column 'messages' is 'Hello'"),
      ('role', {'messages': [{'role': 'narrator', 'content': 'x'}]}, "has the role 'narrator'"),
      (
          'image',
          {'messages': [{'role': 'user', 'content': [{'type': 'image_url'}]}]},
          "a content of type 'image_url'",
      ),
      ('number', {'messages': [{'role': 'user', 'content': 3}]}, 'has the content 3'),
      (
          'masked_part',
          {
              'messages': [
                  {'role': 'user', 'content': 'q'},
                  {'role': 'assistant', 'content': [{'type': 'text', 'text': 't', 'train': False}]},
              ]
          },
          "column 'messages' masks a part of a turn",
      ),
      (
          'arguments',
          {
              'messages': [
                  {
                      'role': 'assistant',
                      'tool_calls': [{'function': {'name': 'f', 'arguments': '{"a": '}}],
                  }
              ]
          },
          'has the arguments',
      ),
      ('call', {'messages': [{'role': 'assistant', 'tool_calls': [{}]}]}, 'has the call'),
      ('tools', {'messages': _MESSAGES, 'tools': ['search']}, "column 'tools' has 'search'"),
  )
  def test_a_refusal_names_their_column(self, row, complaint):
    with self.assertRaisesRegex(types.UserError, f'chats.jsonl:1: .*{complaint}'):
      self.read(row)


if __name__ == '__main__':
  absltest.main()
