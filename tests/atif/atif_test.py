"""ATIF out and in: the same episodes, the same update; and documents as other agents write them."""

import dataclasses
import datetime
import json
import os
import pathlib
import re
import tempfile
from unittest import mock

from absl import logging
from absl.testing import absltest
from absl.testing import parameterized
import numpy as np
import pytest

from stppo_jax import types
from stppo_jax.algorithms import advantages
from stppo_jax.algorithms import variants
from stppo_jax.atif import reader as atif_reader
from stppo_jax.atif import writer as atif_writer
from stppo_jax.monitoring import episodes as episodes_lib
from stppo_jax.rollout import batching
from stppo_jax.rollout import saved
from stppo_jax.text import template as template_lib
from stppo_jax.text import tokenizer as chat
from stppo_jax.text import tool_calls
from stppo_jax.training import loop
from stppo_jax.training import supervised
from stppo_jax.types import UserError
from tests.support import tiny_run
from tests.support import tiny_tokenizer
from tests.text import tokenizer_test as chat_test

pytestmark = pytest.mark.guests(
    what='ATIF', version='ATIF-v1.7', date='2026-11-26', touches='atif/reader.py atif/writer.py'
)

try:
  from harbor.utils import trajectory_validator
except ImportError:
  trajectory_validator = None

tiny = tiny_tokenizer.load
CHATML = (
    '{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}'
    '{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}'
)


def step(source, message, **fields):
  return {'source': source, 'message': message, **fields}


def by_ids(message, prompt, completion, logp=None, **fields):
  metrics = {'prompt_token_ids': prompt, 'completion_token_ids': completion}
  metrics |= {} if logp is None else {'logprobs': logp}
  return step('agent', message, metrics=metrics, **fields)


def make(*steps, **fields):
  """A document as Harbor's agents write it."""
  numbered = [{'step_id': i, **one} for i, one in enumerate(steps, start=1)]
  agent = {'name': 'other-agent', 'version': '2.0'}
  return {
      'schema_version': 'ATIF-v1.5',
      'session_id': 's',
      'agent': agent,
      'steps': numbered,
      **fields,
  }


PLACE = {'step': 7, 'kind': 'train', 'row': 0}  # in its run, as the first line of its file


def write(episode, tokenizer):
  return atif_writer.document(episode, PLACE, tokenizer, 'm', 'n')


def parts(episodes):
  """(prompt, [(tokens, observation)]) of each row."""
  return [
      (
          episode.prompt.tolist(),
          [(turn.tokens.tolist(), turn.observation.tolist()) for turn in episode.turns],
      )
      for episode in episodes
  ]


class RoundTripTest(parameterized.TestCase):

  def test_exported_run_imports_exactly(self):
    self.enterContext(tiny_run.on_one_device())
    folder = self.enterContext(tempfile.TemporaryDirectory())
    path = lambda *names: os.path.join(folder, *names)
    values = {'algorithm.variant': 'grpo', 'rollout.group_size': 4, 'algorithm.rollout_is': 'token'}
    values |= {'train.updates': 1, 'eval.every': 0, 'eval.episodes': 2}
    loop.start(tiny_run.make_config(**values), path('run'))
    tokenizer = chat.load_tokenizer(os.path.join(tiny_run.shared_folder(), 'model'))
    written = atif_writer.write_folder(
        path('run', 'episodes'), path('run', 'atif'), tokenizer, 'tiny', 'hermes'
    )
    self.assertEqual(written, 16 + 2 * 2)
    self.check_job(path('run', 'atif', 'train_000001', 'result.json'), path('run', 'episodes'))
    reader = atif_reader.AtifReader(tokenizer)
    with self.assertRaisesRegex(UserError, '^[^\n]*no such file'):
      atif_reader.read_folder(path('nothing'), path('in', 'episodes'), reader, 16)
    atif_reader.read_folder(path('run', 'atif'), path('in', 'episodes'), reader, 16)
    for name in ('train_000001.jsonl', 'eval_000000.jsonl', 'eval_000001.jsonl'):
      theirs, ours = (saved.read_records(path(run, 'episodes', name)) for run in ('run', 'in'))
      for old, new in zip(theirs, ours, strict=True):
        self.assertContainsSubset(old.keys() - {'old_logp', 'advantages', 'ratio', 'clipped'}, new)
        both = new.keys() & old.keys()
        self.assertEqual({key: new[key] for key in both}, {key: old[key] for key in both})
    with self.assertRaisesRegex(UserError, '^[^\n]*holds files already[^\n]*$'):
      atif_reader.read_folder(path('run', 'atif'), path('in', 'episodes'), reader, 16)
    with self.subTest('other ids make new batches, with the same rewards'):
      again = atif_reader.AtifReader(tokenizer, retokenize=True)
      atif_reader.read_folder(path('run', 'atif'), path('again'), again, 10)
      self.assertEqual(sorted(os.listdir(path('again'))), [f'train_00000{i}.jsonl' for i in (1, 2)])
      scores = lambda *folder: [
          record['score']
          for file in pathlib.Path(path(*folder)).glob('*.jsonl')
          for record in saved.read_records(str(file))
      ]
      self.assertCountEqual(scores('again'), scores('run', 'episodes'))

  def check_job(self, job, episodes):
    """The means that Harbor's viewer shows of a file, by data set."""
    found = json.loads(pathlib.Path(job).read_text())
    records = saved.read_records(saved.path_of(episodes, 1))
    self.assertEqual(found['n_total_trials'], len(records))
    scores = {}
    for record in records:
      scores.setdefault(f'stppo-jax__tiny__{record["dataset"] or "adhoc"}', []).append(record)
    evals = found['stats']['evals']
    self.assertEqual(
        {key: one['n_trials'] for key, one in evals.items()},
        {key: len(rows) for key, rows in scores.items()},
    )
    for key, rows in scores.items():
      (metrics,) = evals[key]['metrics']
      self.assertAlmostEqual(metrics['reward'], np.mean([row['score'] for row in rows]))
      self.assertAlmostEqual(metrics['em'], np.mean([row['metrics']['em'] for row in rows]))
    self.assertLess(found['started_at'], datetime.datetime.now(datetime.UTC).isoformat())

  def test_every_field_of_an_episode_survives_a_document(self):
    tokenizer = tiny()
    ids = lambda text: np.array(tokenizer.encode(text), np.int32)
    texts = ('<search>a</search>', 'Paris', '<answer>b</answer>')
    logp = lambda x: np.linspace(-1e-7, -17 / 3, len(x), dtype=np.float32)
    turns = [
        types.Turn(ids(texts[0]), logp(ids(texts[0])), ids(texts[1]), 'search', 0.1),
        types.Turn(ids(texts[2]), logp(ids(texts[2])), ids('x'), 'answer', -1 / 3),
    ]
    turns[0].routes = np.arange(8, dtype=np.uint8).reshape(2, 2, 2)
    task = types.Task('q', 'which?', ('b',), 'toy', hops=2)
    episode = types.Episode(task, 3, ids('which?'), turns, True, False, {'em': 1 / 3}, {'cut': 1.0})
    episode.core_metrics = ('em',)
    unplayed = types.Episode(task, 4, ids('which?'), [], True, True, {}, {'prompt_too_long': 1.0})
    for one in (episode, unplayed):
      records = episodes_lib.to_records([one], tokenizer, 7, 'train')
      document = write(one, tokenizer)
      document = json.loads(json.dumps(document, allow_nan=False))
      if trajectory_validator is not None:
        validator = trajectory_validator.TrajectoryValidator()
        self.assertTrue(validator.validate(document), validator.get_errors())
      (again,) = atif_reader.AtifReader(tokenizer).episodes(document, 'n')
      self.assertEqual(episodes_lib.to_records([again], tokenizer, 7, 'train'), records)
    for shape in ([9**9, 2, 2], [2, 9**9, 2], [2, 2]):
      foreign = json.loads(json.dumps(write(episode, tokenizer)))
      foreign['extra']['stppo_jax']['routes'][0][1] = shape
      with self.assertRaisesRegex(ValueError, r'routes of shape \['):
        atif_reader.AtifReader(tokenizer).episodes(foreign, 'n')
    document = write(episode, tokenizer)
    user, search, answer = document['steps']
    self.assertEqual((user['source'], user['message']), ('user', 'which?'))
    self.assertEqual(search['message'], texts[0])
    (call,) = search['tool_calls']
    self.assertEqual((call['function_name'], call['arguments']), ('search', {'query': 'a'}))
    self.assertEqual(
        search['observation']['results'],
        [{'content': 'Paris', 'source_call_id': call['tool_call_id']}],
    )
    self.assertEqual(
        answer['metrics']['prompt_token_ids'],
        np.concatenate(list(map(ids, ('which?', *texts[:2])))).tolist(),
    )
    self.assertEqual(document['final_metrics']['extra'], {'score': 0.1 - 1 / 3, 'em': 1 / 3})

  def test_second_export_of_a_file_replaces_the_first(self):
    tokenizer = tiny()
    prompt = np.array(tokenizer.encode('which?'), np.int32)
    turn = types.Turn(prompt[:2], np.zeros(2, np.float32))
    folder = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))
    for tasks in (('a', 'b', 'c'), ('a', 'd')):
      episodes = [types.Episode(types.Task(task, 'which?'), 0, prompt, [turn]) for task in tasks]
      records = episodes_lib.to_records(episodes, tokenizer, 1, 'train')
      episodes_lib.write_lines(f'{folder}/run/train_000001.jsonl', records)
      atif_writer.write_folder(f'{folder}/run', f'{folder}/atif', tokenizer, 'm', 'hermes')
      (folder / 'atif' / 'train_000001' / 'notes.md').write_text('of a reader')
    names = sorted(path.name for path in (folder / 'atif' / 'train_000001').iterdir())
    self.assertEqual(names, ['0000_a', '0001_d', 'notes.md', 'result.json'])

  def test_branches_survive_a_folder_of_documents(self):
    """Row 1 is a sub-agent, row 2 continues row 0, row 3 inherits from row 2, as row 4 does."""
    tokenizer = tiny()
    places = (
        {'agent_id': 'main'},
        {'agent_id': 'child', 'parent': (0, 1)},
        {'agent_id': 'main', 'parent': (0, 2)},
        {'agent_id': 'other', 'branched_from': (2, 1)},
        {'agent_id': 'main', 'branched_from': (2, 2)},
    )
    task = types.Task('q', 'which?', ('b',))
    prompt = np.array(tokenizer.encode('which?'), np.int32)
    episodes = []
    for number, place in enumerate(places):
      turns = [
          types.Turn(prompt[:2], np.zeros(2, np.float32), prompt[:1]),
          types.Turn(prompt[:2], np.zeros(2, np.float32)),
      ]
      episodes.append(
          types.Episode(task, 0, prompt, turns, number=3, whole_score=0.0, segment=number, **place)
      )
    folder = self.enterContext(tempfile.TemporaryDirectory())
    records = episodes_lib.to_records(episodes, tokenizer, 1, 'train')
    episodes_lib.write_lines(f'{folder}/run/train_000001.jsonl', records)
    atif_writer.write_folder(f'{folder}/run', f'{folder}/atif', tokenizer, 'm', 'hermes')
    paths = sorted(pathlib.Path(folder, 'atif').rglob('trajectory.json'))
    documents = [json.loads(path.read_text()) for path in paths]
    if trajectory_validator is not None:
      for document in documents:
        validator = trajectory_validator.TrajectoryValidator()
        self.assertTrue(validator.validate(document), validator.get_errors())
    references = {}
    for number, (path, document) in enumerate(zip(paths, documents, strict=True)):
      found = []
      for one in document['steps']:
        for result in one.get('observation', {'results': []})['results']:
          for reference in result.get('subagent_trajectory_ref', ()):
            found.append((one['step_id'], reference['trajectory_path']))
      if 'continued_trajectory_ref' in document:
        found.append(('end', document['continued_trajectory_ref']))
      for where, place in found:
        references[number, where] = paths.index(pathlib.Path(os.path.normpath(path.parent / place)))
    self.assertEqual(references, {(0, 2): 1, (0, 'end'): 2, (2, 2): 3})
    for retokenize in (False, True):
      reader = atif_reader.AtifReader(tokenizer, retokenize=retokenize)
      back = f'{folder}/back_{retokenize}'
      atif_reader.read_folder(f'{folder}/atif', back, reader, 8)
      again = saved.read(saved.path_of(back, 1), tokenizer).episodes
      found = [(row.agent_id, row.parent, row.branched_from) for row in again]
      expected = [(row.agent_id, row.parent, row.branched_from) for row in episodes]
      self.assertEqual(found, expected)
      self.assertLen({row.number for row in again}, 1)

  @parameterized.parameters((None, 'inline'), (CHATML, 'user'), (CHATML, 'tool'))
  def test_own_texts_encode_to_the_same_ids(self, chat_template, frame):
    tokenizer = tiny(chat_template)
    framing = chat.make_framing(tokenizer, frame, 100)
    ids = lambda text: np.array(tokenizer.encode(text), np.int32)
    end = tokenizer.eos_ids[0]
    said = (ids('<search>a</search>'), np.array([*ids('<search>b</search>'), end], np.int32))
    said += (ids('<answer>b</answer>'), np.array([*ids('<answer>b</answer>'), end], np.int32))
    pages = (
        '\n\n<information>Paris <think></information>\n\n',
        'no <|im_end|> search',
        ' and on',
        'over',
    )
    turns = [
        types.Turn(x, np.zeros(len(x), np.float32), np.array(framing.encode(page, x), np.int32))
        for x, page in zip(said, pages)
    ]
    prompt = np.array(chat.encode_prompt(tokenizer, 'which <|im_end|>?'), np.int32)
    episode = types.Episode(types.Task('q', 'which?'), 0, prompt, turns)
    document = write(episode, tokenizer)
    exact = atif_reader.AtifReader(tokenizer).episodes(document, 'n')
    again = atif_reader.AtifReader(tokenizer, retokenize=True).episodes(document, 'n')
    self.assertEqual(parts(again), parts(exact))

  def test_text_is_no_control_token_of_another_tokenizer(self):
    tokenizer = tiny()
    ids = lambda text: np.array(tokenizer.encode(text), np.int32)
    page = '\n<information>Paris </search> <think> <|im_end|></information>\n'
    written = ids('<search>a</search>')
    turn = types.Turn(written, np.zeros(len(written), np.float32), ids(page))
    episode = types.Episode(types.Task('q', 'which?'), 0, ids('which?'), [turn])
    document = write(episode, tokenizer)
    other = chat_test.load_chat_tokenizer(chat_test.QWEN25, '<|im_end|>')
    (row,) = atif_reader.AtifReader(other, retokenize=True).episodes(document, 'n')
    found = row.turns[0].observation.tolist()
    inert = page.replace('</search>', '< /search>').replace('<think>', '< think>')
    self.assertEqual(other.decode(found), inert)
    self.assertNoCommonElements(found, other.added_ids)

  def test_foreign_control_tokens_are_rejected(self):
    tokenizer = chat_test.load_chat_tokenizer(chat_test.QWEN25, '<|im_end|>')
    prompt = np.array(chat.encode_prompt(tokenizer, 'which?'), np.int32)
    episode = types.Episode(types.Task('q', 'which?'), 0, prompt, [])
    document = write(episode, tokenizer)
    (row,) = atif_reader.AtifReader(tokenizer, retokenize=True).episodes(document, 'n')
    self.assertEqual(parts([row]), [(prompt.tolist(), [])])
    with self.assertRaisesRegex(ValueError, r'^its prompt holds <\|im_start\|>, no token of .*$'):
      atif_reader.AtifReader(tiny(), retokenize=True).episodes(document, 'n')

  def test_tools_of_the_run_are_calls(self):
    said = 'Hm. <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    self.assertEqual(
        atif_writer._calls('tool', said, 'hermes', False), [tool_calls.Call('add', {'a': 1})]
    )
    self.assertEqual(atif_writer._calls('answer', said, 'hermes', False), [])
    self.assertEqual(atif_writer._calls('tool', 'no call', 'hermes', False), [])


class ReaderTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.folder = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))

  def write(self, name, value):
    path = self.folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(value if isinstance(value, str) else json.dumps(value), encoding='utf-8')

  def read(self, tokenizer, episodes_per_file=8, **options):
    self.into = self.enterContext(tempfile.TemporaryDirectory())
    into = f'{self.into}/episodes'
    reader = atif_reader.AtifReader(tokenizer, **options)
    with mock.patch.object(logging, 'warning') as told:
      atif_reader.read_folder(str(self.folder), into, reader, episodes_per_file)
    self.told = [call.args[0] % call.args[1:] for call in told.call_args_list]
    return [saved.read(saved.path_of(into, n), tokenizer) for n in saved.numbers(into)]

  def test_ids_are_taken_as_they_are(self):
    tokenizer = tiny()
    asked = tokenizer.encode('go')
    # Not how the tokenizer would encode the text: a turn is what was sampled.
    odd = [tokenizer.encode(c)[0] for c in 'hi']
    later = [*asked, *odd, *tokenizer.encode('seen')]
    other = tokenizer.encode('summary of go')
    document = make(
        step('user', 'go'),
        by_ids('hi', asked, odd, [-0.1, -0.2]),
        by_ids('hi', later, odd),
        by_ids('hi', other, odd, [-0.3, -0.4]),  # the context was rewritten
    )
    rows = atif_reader.AtifReader(tokenizer).episodes(document, 'n')
    self.assertEqual(
        parts(rows), [(asked, [(odd, tokenizer.encode('seen')), (odd, [])]), (other, [(odd, [])])]
    )
    first, second = rows[0].turns
    np.testing.assert_array_equal(first.logp, np.float32([-0.1, -0.2]))
    self.assertTrue(np.isnan(second.logp).all())
    self.assertEqual(rows[0].task, types.Task('s', 'go', dataset='other-agent'))

  @parameterized.parameters(
      ({}, [0.0, 0.0], True),
      ({'extra': {'trainable': False}}, [-0.1, -0.2], True),
      ({'trainable': False}, [-0.1, -0.2], True),
      ({}, [0.0, -0.2], False),  # one token may be certain
      ({'extra': {'trainable': True}}, None, False),
  )
  def test_masked_turn_is_context(self, fields, logp, is_masked):
    """Its log-probs are unknown, or it is marked. Without another turn nothing is trained."""
    tokenizer = tiny()
    asked = tokenizer.encode('go')
    odd = [tokenizer.encode(c)[0] for c in 'hi']
    seen = tokenizer.encode('seen')
    first = by_ids('hi', asked, odd, logp, **fields)
    second = by_ids('hi', [*asked, *odd, *seen], odd, [-0.3, -0.4])
    reader = atif_reader.AtifReader(tokenizer)
    (row,) = reader.episodes(make(step('user', 'go'), first, second), 'n')
    whole = [(asked, [(odd, seen), (odd, [])])]
    self.assertEqual(parts([row]), [([*asked, *odd, *seen], [(odd, [])])] if is_masked else whole)
    self.assertEqual((row.failed, reader.num_masked), (False, int(is_masked)))
    reader = atif_reader.AtifReader(tokenizer)
    (alone,) = reader.episodes(make(step('user', 'go'), first), 'n')
    self.assertEqual((alone.failed, reader.num_masked), (is_masked, int(is_masked)))
    (marked,) = reader.episodes(make(step('user', 'go'), second, extra={'trainable': False}), 'n')
    self.assertTrue(marked.failed)
    (texts,) = atif_reader.AtifReader(tokenizer, retokenize=True).episodes(
        make(step('user', 'go'), first), 'n'
    )
    self.assertEqual(texts.failed, bool(fields) and is_masked)  # texts have no log-probs

  def test_id_of_padded_vocabulary_is_read(self):
    tokenizer = tiny()
    size = tokenizer.vocab_size
    document = make(step('user', 'go'), by_ids('hi', tokenizer.encode('go'), [size, size + 4]))
    read = lambda **options: atif_reader.AtifReader(tokenizer, **options).episodes(document, 'n')
    (row,) = read(vocab_size=size + 5)
    self.assertEqual(row.turns[0].tokens.tolist(), [size, size + 4])
    for options, wrong in (({}, size), ({'vocab_size': size + 4}, size + 4)):
      with self.assertRaisesRegex(UserError, f'has no id {wrong}, and '):
        read(**options)

  def test_prompt_without_a_user_is_read(self):
    (row,) = atif_reader.AtifReader(tiny()).episodes(make(by_ids('hi', [70], [71])), 'n')
    self.assertEqual(parts([row]), [([70], [([71], [])])])
    self.assertEqual(row.task.question, '')

  def test_ids_of_another_tokenizer_need_retokenize(self):
    tokenizer = tiny()
    for ids, said in (([5, 6, 7], 'would read'), ([10**6], 'has no id 1000000')):
      document = make(step('user', 'go on'), by_ids('hi', ids, [5]))
      with self.assertRaisesRegex(UserError, f'^[^\n]*another tokenizer[^\n]*{said}[^\n]*$'):
        atif_reader.AtifReader(tokenizer).episodes(document, 'n')
      rows = atif_reader.AtifReader(tokenizer, retokenize=True).episodes(document, 'n')
      self.assertEqual(parts(rows), [(tokenizer.encode('go on'), [(tokenizer.encode('hi'), [])])])

  @parameterized.parameters(None, CHATML)
  def test_texts_are_the_conversation_of_the_chat_template(self, chat_template):
    tokenizer = tiny(chat_template)
    document = make(
        step('system', 'You are it.'),
        step('user', 'go'),
        step('agent', 'old', is_copied_context=True),
        step('user', 'on'),
        step(
            'agent',
            'Listing.',
            reasoning_content='Hm',
            tool_calls=[{'tool_call_id': 'c', 'function_name': 'ls', 'arguments': {'a': 1}}],
            observation={'results': [{'source_call_id': 'c', 'content': 'a.txt'}]},
        ),
        step('agent', 'by rule', llm_call_count=0),
        step('agent', [{'type': 'text', 'text': 'done'}], observation={'results': []}),
    )
    (row,) = atif_reader.AtifReader(tokenizer).episodes(document, 'n')
    call = '<tool_call>\n{"name": "ls", "arguments": {"a": 1}}\n</tool_call>'
    turns = [f'<think>\nHm\n</think>\n\nListing.\n{call}', 'done']
    end = [] if chat_template is None else [tokenizer.eos_ids[0]]
    self.assertEqual(
        [turn.tokens.tolist() for turn in row.turns],
        [[*tokenizer.encode(text), *end] for text in turns],
    )
    messages = [
        {'role': role, 'content': content}
        for role, content in (
            ('system', 'You are it.'),
            ('user', 'go'),
            ('assistant', 'old'),
            ('user', 'on'),
            ('assistant', turns[0]),
            ('tool', 'a.txt'),
            ('assistant', 'by rule'),
        )
    ]
    template = template_lib.Template(tokenizer, 100)
    tokens, turn_ids, logp = row.unroll()
    if chat_template is not None:
      whole = [*template.encode(messages), *row.turns[1].tokens]
      self.assertEqual(tokens.tolist(), whole)
    self.assertEqual(
        tokenizer.decode(tokens[turn_ids == 0]).replace('<|im_start|>', '').count('by rule'), 1
    )
    self.assertTrue(np.isnan(logp[turn_ids > 0]).all())
    self.assertEqual([turn.action for turn in row.turns], ['tool', 'other'])
    imitated = supervised.from_episode(row)
    self.assertEqual(imitated.tokens[imitated.weights == 1].tolist(), tokens[turn_ids > 0].tolist())

  def test_a_folder_of_trials(self):
    asked = lambda text: make(step('user', text), step('agent', 'hi'))
    for name, task, reward in (('a', 't1', 1), ('b', 't2', 0.5), ('c', 't1', 0)):
      self.write(f'{name}/agent/trajectory.json', asked(name))
      rewards = {'speed': 9, 'reward': reward}
      self.write(
          f'{name}/result.json', {'task_name': task, 'verifier_result': {'rewards': rewards}}
      )
    self.write('d.json', asked('d'))
    self.write('other.json', {'a': 1})
    self.write('broken.json', '{')
    self.write('mute.json', make(step('user', 'go')))
    self.write('seen.json', make(step('user', [{'type': 'image'}]), step('agent', 'hi')))
    self.write('wrong.json', make({'source': 'agent'}))
    self.write('huge.json', make(step('user', 'go'), by_ids('hi', [2**40], [1])))
    tokenizer = tiny()
    with self.assertLogs('absl', 'INFO') as logs:
      first, second = self.read(tokenizer, episodes_per_file=3)
    self.assertEqual([e.task.id for e in first.episodes], ['t1', 't2', 't1'])
    self.assertEqual([e.group for e in first.episodes], [0, 1, 0])
    self.assertEqual([e.score for e in first.episodes], [1, 0.5, 0])
    self.assertEqual(first.episodes[0].metrics, {'speed': 9, 'reward': 1})
    self.assertEqual([e.task.question for e in second.episodes], ['d'])
    self.assertLen(self.told, 1)
    self.assertIn('5 trajectories are left out', self.told[0])
    self.assertIn('1 trajectories have no reward', ' '.join(logs.output))

  @parameterized.parameters(
      ({'format': 1, 'correct': 0}, "format, correct, and none of them is called 'reward'"),
      ({'reward': float('nan')}, 'finite numbers are needed'),
  )
  def test_trial_of_uncertain_reward_is_left_out(self, rewards, reason):
    for name, verdict in (('a', rewards), ('b', {'correct': 0.5})):
      self.write(f'{name}/agent/trajectory.json', make(step('user', name), step('agent', 'hi')))
      verdict = {'task_name': name, 'verifier_result': {'rewards': verdict}}
      self.write(f'{name}/result.json', verdict)
    (sampled,) = self.read(tiny())
    self.assertEqual([(e.task.id, e.score) for e in sampled.episodes], [('b', 0.5)])
    self.assertLen(self.told, 1)
    self.assertIn(reason, self.told[0])

  def test_a_trajectory_of_several_rows_is_one_episode(self):
    """Both of its rows have the trial's reward of 1, which counts once: 1 against 0 and 0."""
    asked = step('user', 'q')
    rewritten = make(asked, by_ids('a', [70], [71], [-0.5]), by_ids('b', [72], [73], [-0.5]))
    single = make(asked, by_ids('c', [70], [71], [-0.5]))
    for name, document, reward in (('a', rewritten, 1), ('b', single, 0), ('c', single, 0)):
      self.write(f'{name}/agent/trajectory.json', document)
      verdict = {'task_name': 't', 'verifier_result': {'rewards': {'reward': reward}}}
      self.write(f'{name}/result.json', verdict)
    reader = mock.patch.object(atif_reader.AtifReader, '_check_ids')  # ids above are arbitrary
    with reader:
      first, second = self.read(tiny(), episodes_per_file=2)
      (whole,) = self.read(tiny())
    self.assertEqual([e.number for e in first.episodes], [0, 0, 1])
    self.assertEqual([e.number for e in second.episodes], [0])
    self.assertEqual([e.number for e in whole.episodes], [0, 0, 1, 2])
    self.assertEqual([e.score for e in whole.episodes], [1, 1, 0, 0])
    self.assertEqual([e.whole_score for e in whole.episodes], [1, 1, 0, 0])
    batch = batching.to_turn_batch(whole.episodes, (8,))
    variant = dataclasses.replace(variants.VARIANTS['grpo'], advantage='group_centred')
    found = np.asarray(advantages.estimate(batch, variant).advantages)[:, 1]
    third = 1 / 3
    np.testing.assert_allclose(found, [2 * third, 2 * third, -third, -third], rtol=1e-6)

  def refer(self, **reference):
    """A step that delegates, as Terminus 2 writes it."""
    results = [{'subagent_trajectory_ref': [reference]}]
    return step('system', 'I delegate.', observation={'results': results})

  def tree(self, sampled):
    """Returns [(agent, parent, prompt)] of each episode of a batch, by its number."""
    episodes = {}
    for row in sampled.episodes:
      prompt = row.prompt.tolist()
      episodes.setdefault(row.number, []).append((row.agent_id, row.parent, prompt))
    return [*episodes.values()]

  def test_documents_of_a_tree_are_one_episode(self):
    """A trial with a rewritten context, two sub-agents in files and two embedded ones."""
    asked = step('user', 'q')
    turn = lambda prompt, end: by_ids('a', prompt, [end], [-0.5])
    inner = make(asked, turn([80], 81), session_id='s', trajectory_id='inner')
    lonely = make(asked, turn([90], 91), trajectory_id='lonely')
    first = make(asked, turn([60], 61), session_id='first', subagent_trajectories=[lonely])
    delegation = self.refer(trajectory_path='trajectory.sub-1.json', session_id='first')
    main = make(
        asked,
        turn([70], 71) | {'observation': delegation['observation']},
        turn([70, 71, 72], 73),
        turn([75], 76),
        self.refer(trajectory_id='inner'),
        turn([75, 76, 72], 77),
        session_id='main',
        subagent_trajectories=[inner],
        continued_trajectory_ref='trajectory.cont-1.json',
    )
    self.write('a/agent/trajectory.json', main)
    self.write('a/agent/trajectory.sub-1.json', first)
    self.write('a/agent/trajectory.cont-1.json', make(asked, turn([50], 51), session_id='main'))
    verdict = {'task_name': 't', 'verifier_result': {'rewards': {'reward': 1}}}
    self.write('a/result.json', verdict)
    self.write('b.json', make(asked, turn([40], 41)))
    with mock.patch.object(atif_reader.AtifReader, '_check_ids'):  # ids above are arbitrary
      (sampled,) = self.read(tiny())
    expected = [
        ('main', None, [70]),
        ('main', (0, 2), [75]),
        ('first', (0, 1), [60]),
        ('lonely', (2, 1), [90]),
        ('inner', (1, 1), [80]),
        ('main', (1, 2), [50]),
    ]
    self.assertEqual(self.tree(sampled), [expected, [('', None, [40])]])
    rows = sampled.episodes[:6]
    self.assertEqual([row.segment for row in rows], [*range(6)])
    self.assertEqual([(row.task.id, row.score, row.whole_score) for row in rows], [('t', 1, 1)] * 6)
    self.assertEqual(self.told, [])

  @parameterized.named_parameters(
      ('itself', {'a': 'a', 'b': None}, 1),
      ('loop', {'a': 'b', 'b': 'a'}, 1),
      ('two_parents', {'a': 'c', 'b': 'c'}, 1),
      ('unknown', {'a': '/etc/x', 'b': 'https://host/c'}, 2),
      ('other', {'a': 'other', 'b': None}, 1),
  )
  def test_reference_without_effect_loses_nothing(self, references, num_lost):
    names = {'a', 'b', 'c'}
    for name in names:
      steps = [step('user', name), step('agent', 'hi')]
      if place := references.get(name):
        steps.append(self.refer(trajectory_path=f'{place}.json'))
      self.write(f'{name}.json', make(*steps))
    self.write('other.json', {'a': 1})
    (sampled,) = self.read(tiny(), episodes_per_file=8)
    self.assertLen(sampled.episodes, 3)
    self.assertIn(f'{num_lost} references between trajectories', self.told[0])

  @parameterized.parameters(
      {'subagent_trajectories': [{'trajectory_id': 'x', 'steps': []}]},
      {'continued_trajectory_ref': 'broken.json'},
  )
  def test_unreadable_branch_is_left_out(self, **fields):
    document = make(step('user', 'q'), step('agent', 'hi'), **fields)
    self.write('a.json', document)
    self.write('broken.json', make(step('user', 'go')))
    (sampled,) = self.read(tiny())
    self.assertLen(sampled.episodes, 1)
    self.assertRegex(self.told[-1], 'trajectories are left out')

  @parameterized.parameters(
      ({'metrics': {'em': 'high'}},),
      ({'counts': {'cut': [1]}},),
      ({'rewards': ['one']},),
      ({'group': {'of': 1}},),
      ({'whole_score': 'high'},),
  )
  def test_own_document_with_another_type_is_left_out(self, wrong):
    tokenizer = tiny()
    turn = types.Turn(np.array([71], np.int32), np.zeros(1, np.float32), np.zeros(0, np.int32))
    episode = types.Episode(types.Task('q', ''), 0, np.array([70], np.int32), [turn])
    document = write(episode, tokenizer)
    document['extra']['stppo_jax'] |= wrong
    self.write('a.json', document)
    self.write('b.json', make(step('user', 'go'), step('agent', 'hi')))
    (batch,) = self.read(tokenizer)
    self.assertLen(batch.episodes, 1)
    self.assertIn('1 trajectories are left out', self.told[0])

  def test_another_version_is_left_out(self):
    document = make(step('user', 'go'), step('agent', 'hi'))
    self.write('a.json', document)
    self.write('b.json', document | {'schema_version': 'ATIF-v2.0'})
    self.write('c.json', {'schema_version': 'of another format'})
    (batch,) = self.read(tiny())
    self.assertLen(batch.episodes, 1)
    self.assertRegex(self.told[0], r"1 trajectories are left out.*b\.json.*'ATIF-v2\.0'")

  def test_session_id_that_is_no_text_is_left_out(self):
    document = make(step('user', 'go'), step('agent', 'hi'))
    self.write('a.json', document | {'session_id': {'of': 1}})
    self.write('b.json', document)
    (batch,) = self.read(tiny())
    self.assertLen(batch.episodes, 1)

  @parameterized.parameters(
      ({'kind': '../escaped'}, "kind '../escaped'"),
      ({'kind': 'escaped'}, "kind 'escaped'"),
      ({'kind': ['train']}, 'kind '),
      ({'step': -1}, 'step -1'),
      ({'step': True}, 'step True'),
      ({'step': '1'}, "step '1'"),
      ({'step': 10**300}, 'step 1'),
      ({'row': -1}, 'row -1'),
      ({'row': 0.5}, 'row 0.5'),
      ({'row': None}, 'row None'),
  )
  def test_a_place_that_no_run_writes_is_refused(self, wrong, said):
    tokenizer = tiny()
    turn = types.Turn(np.array([71], np.int32), np.zeros(1, np.float32), np.zeros(0, np.int32))
    episode = types.Episode(types.Task('q', ''), 0, np.array([70], np.int32), [turn])
    document = write(episode, tokenizer)
    document['extra']['stppo_jax'] |= wrong
    self.write('deep/in/a.json', document)
    with self.assertRaisesRegex(UserError, f'^[^\n]*extra.stppo_jax[^\n]*{re.escape(said)}[^\n]*$'):
      self.read(tokenizer)
    self.write('b.json', make(step('user', 'go'), step('agent', 'hi')))
    (batch,) = self.read(tokenizer)
    self.assertLen(batch.episodes, 1)
    self.assertIn('1 trajectories are left out', self.told[0])
    self.assertEmpty(list(pathlib.Path(self.into).rglob('escaped*')))
    for kind in saved.KINDS:
      document['extra']['stppo_jax'] |= PLACE | {'kind': kind}
      self.assertLen(atif_reader.AtifReader(tokenizer).episodes(document, 'n'), 1)

  def test_nothing_to_read_is_one_line(self):
    with self.assertRaisesRegex(UserError, '^[^\n]*no trajectory that can be read[^\n]*$'):
      self.read(tiny())
    self.write('a.json', make(step('user', 'go'), by_ids('hi', [70], [71], [-1.0, -2.0])))
    with self.assertRaisesRegex(UserError, '^[^\n]*as [^\n]*2 log-probs of 1 tokens[^\n]*$'):
      self.read(tiny())


if __name__ == '__main__':
  absltest.main()
