"""Tests of stppo_jax.data.public_formats and row_files: question sets in their published columns.

The columns are those of the authors' files and of the hub. The rows are short.
"""

import base64
import gzip
import json
import os
import pathlib
import tempfile

from absl.testing import absltest
from absl.testing import parameterized
import pyarrow
from pyarrow import parquet
import pytest

from stppo_jax import types
from stppo_jax.data import row_files
from stppo_jax.data import tasks

pytestmark = pytest.mark.guests(
    what='Published question sets',
    version='columns of the published files',
    date='2026-11-28',
    touches='data/layouts.py data/public_formats.py data/layout_values.py',
)

_HOTPOT = {
    '_id': '5a7a',
    'answer': 'yes',
    'question': 'Are both American?',
    'supporting_facts': [['Scott', 0], ['Ed', 0]],
    'context': [
        ['Scott', ['Scott is an American director.', ' He was born in 1966.']],
        ['Ed', ['Ed was an American filmmaker.']],
        ['Tyler', ['Tyler is a city.']],
    ],
    'type': 'comparison',
    'level': 'hard',
}
_2WIKI = {
    **_HOTPOT,
    'context': {
        'title': ['Scott', 'Ed'],
        'content': [['Scott is an American director.'], ['Ed was one.']],
    },
    'supporting_facts': {'title': ['Scott', 'Ed'], 'sent_id': [0, 0]},
    'evidences': {'fact': ['Scott'], 'relation': ['country'], 'entity': ['US']},
}
_2WIKI_TEXTS = {  # a copy on the hub writes nested columns as JSON
    **_2WIKI,
    'context': json.dumps(_HOTPOT['context']),
    'supporting_facts': json.dumps(_HOTPOT['supporting_facts']),
}
_MUSIQUE = {
    'id': '2hop__1_2',
    'paragraphs': [
        {'idx': 0, 'title': 'Green', 'paragraph_text': 'An album.', 'is_supporting': False},
        {'idx': 1, 'title': 'Steve', 'paragraph_text': 'His spouse.', 'is_supporting': True},
    ],
    'question': 'Who is the spouse of the performer?',
    'question_decomposition': [
        {'id': 1, 'question': 'Green >> performer', 'answer': 'Steve', 'paragraph_support_idx': 0},
        {'id': 2, 'question': '#1 >> spouse', 'answer': 'Miquette', 'paragraph_support_idx': 1},
    ],
    'answer': 'Miquette',
    'answer_aliases': ['M. Giraudy'],
    'answerable': True,
}
_TRIVIA = {
    'question': 'Which Lloyd Webber musical?',
    'question_id': 'tc_33',
    'question_source': 'http://x',
    'entity_pages': {'title': ['Andrew'], 'wiki_context': ['long']},
    'answer': {
        'value': 'Sunset Boulevard',
        'aliases': ['Sunset Blvd', 'Sunset Boulevard'],
        'normalized_aliases': ['sunset blvd', 'sunset boulevard'],
        'type': 'WikipediaEntity',
    },
}
_TRIVIA_OWN = {
    'Data': [
        {
            'Answer': {
                'Value': 'Sunset Boulevard',
                'Aliases': ['Sunset Blvd'],
                'NormalizedAliases': ['sunset blvd'],
                'NormalizedValue': 'sunset boulevard',
            },
            'Question': 'Which Lloyd Webber musical?',
            'QuestionId': 'tc_33',
        }
    ],
    'Domain': 'Web',
    'Version': 1.0,
}
_SQUAD = {
    'id': '57',
    'title': 'Lima',
    'context': 'Lima is in Peru.',
    'question': 'Where is Lima?',
    'answers': {'text': ['Peru', 'in Peru', 'Peru'], 'answer_start': [11, 8, 11]},
}
_SQUAD_OWN = {
    'version': 'v2.0',
    'data': [
        {
            'title': 'Lima',
            'paragraphs': [
                {
                    'context': 'Lima is in Peru.',
                    'qas': [
                        {
                            'id': '57',
                            'question': 'Where is Lima?',
                            'answers': [{'text': 'Peru', 'answer_start': 11}],
                            'is_impossible': False,
                        },
                        {
                            'id': '58',
                            'question': 'Who is it?',
                            'answers': [],
                            'plausible_answers': [{'text': 'Peru', 'answer_start': 11}],
                            'is_impossible': True,
                        },
                    ],
                }
            ],
        }
    ],
}
_MEDQA = {
    'question': 'A 23-year-old woman. Which drug?',
    'answer': 'Nitrofurantoin',
    'options': {'A': 'Ampicillin', 'B': 'Ceftriaxone', 'C': 'Nitrofurantoin'},
    'meta_info': 'step2&3',
    'answer_idx': 'C',
}
_MEDQA_PAIRS = {
    **_MEDQA,
    'options': [{'key': key, 'value': text} for key, text in _MEDQA['options'].items()],
}
_MEDMCQA = {
    'id': '4e1715fe',
    'question': 'Which term?',
    'opa': 'Leukemoid reaction',
    'opb': 'Leukopenia',
    'opc': 'Metaplasia',
    'opd': 'Neutrophilia',
    'cop': 1,
    'choice_type': 'single',
    'exp': None,
}
_PUBMED = {
    'pubid': 21645374,
    'question': 'Do mitochondria play a role?',
    'context': {'contexts': ['Cell death.', 'Lace plants.'], 'labels': ['B', 'R'], 'meshes': []},
    'long_answer': 'They do.',
    'final_decision': 'yes',
}
_PUBMED_OWN = {
    '21645374': {
        'QUESTION': 'Do mitochondria play a role?',
        'CONTEXTS': ['Cell death.', 'Lace plants.'],
        'LABELS': ['B', 'R'],
        'YEAR': '2011',
        'final_decision': 'yes',
    }
}
_VERL = {
    'data_source': 'openai/gsm8k',
    'prompt': [{'role': 'user', 'content': 'How many? Think, and answer after "####".'}],
    'ability': 'math',
    'reward_model': {'style': 'rule', 'ground_truth': '72'},
    'extra_info': {
        'split': 'train',
        'index': 0,
        'answer': 'She sold 48 + 24 = 72.\n#### 72',
        'question': 'How many?',
    },
}
_OPTIONS_OF_DECISION = (('A', 'yes'), ('B', 'no'), ('C', 'maybe'))


class _FileTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    row_files.log_once.cache_clear()
    self.folder = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))

  def write(self, name, content):
    """Writes rows as lines, another JSON value as a whole, and bytes and texts as they are."""
    path = self.folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    if name.endswith('.parquet'):
      parquet.write_table(pyarrow.Table.from_pylist(content), path)
      return str(path)
    if isinstance(content, list) and name.endswith(('.jsonl', '.jsonl.gz')):
      content = '\n'.join(map(json.dumps, content)) + '\n'
    if not isinstance(content, (str, bytes)):
      content = json.dumps(content, indent=1)
    if isinstance(content, str):
      content = content.encode()
    if name.endswith('.gz'):
      content = gzip.compress(content)
    path.write_bytes(content)
    return str(path)

  def load(self, name, content, split='train'):
    return tasks.load_tasks(self.write(name, content), split)

  def one(self, row, name='qa.jsonl'):
    (task,) = self.load(name, [row])
    return task


class FormatsTest(_FileTest):
  """One test per published layout: id, question, answers, and what else the layout holds."""

  @parameterized.named_parameters(
      (
          'flashrag',
          'a.jsonl',
          [
              {
                  'id': 'test_0',
                  'question': 'Who?',
                  'golden_answers': ['Ann', 'A. Bell'],
                  'metadata': {},
              }
          ],
          ('test_0', 'Who?', ('Ann', 'A. Bell')),
      ),
      (
          'flashrag_parquet',
          'a.parquet',
          [{'id': 'train_0', 'question': 'Who?', 'golden_answers': ['Ann'], 'data_source': 'nq'}],
          ('train_0', 'Who?', ('Ann',)),
      ),
      (
          'nq_open',
          'NQ-open.train.jsonl',
          [{'question': 'who', 'answer': ['14', '15']}],
          ('NQ-open-1', 'who', ('14', '15')),
      ),
      ('nq_text', 'nq.jsonl', [{'question': 'who', 'answer': 'Ann'}], ('nq-1', 'who', ('Ann',))),
      ('hotpotqa', 'h.json', [_HOTPOT], ('5a7a', 'Are both American?', ('yes',))),
      ('2wiki_hub', 'w.parquet', [_2WIKI], ('5a7a', 'Are both American?', ('yes',))),
      ('2wiki_texts', 'w.parquet', [_2WIKI_TEXTS], ('5a7a', 'Are both American?', ('yes',))),
      (
          'musique',
          'm.jsonl',
          [_MUSIQUE],
          ('2hop__1_2', 'Who is the spouse of the performer?', ('Miquette', 'M. Giraudy')),
      ),
      (
          'triviaqa_hub',
          't.parquet',
          [_TRIVIA],
          ('tc_33', 'Which Lloyd Webber musical?', ('Sunset Boulevard', 'Sunset Blvd')),
      ),
      (
          'triviaqa',
          't.json',
          _TRIVIA_OWN,
          ('tc_33', 'Which Lloyd Webber musical?', ('Sunset Boulevard', 'Sunset Blvd')),
      ),
      ('squad_hub', 's.parquet', [_SQUAD], ('57', 'Where is Lima?', ('Peru', 'in Peru'))),
      ('squad', 's.json', _SQUAD_OWN, ('57', 'Where is Lima?', ('Peru',))),
      (
          'popqa',
          'popQA.tsv',
          'id\tquestion\tpossible_answers\r\n42\tWhat?\t"[""politician"", ""po l""]"\r\n',
          ('42', 'What?', ('politician', 'po l')),
      ),
      (
          'popqa_hub',
          'p.parquet',
          [{'id': 42, 'question': 'What?', 'possible_answers': '["politician"]', 'obj': 'x'}],
          ('42', 'What?', ('politician',)),
      ),
      (
          'bamboogle',
          'b.csv',
          'Question,Answer\n"Who, then?",Ann Bell\n',
          ('b-2', 'Who, then?', ('Ann Bell',)),
      ),
      (
          'gsm8k',
          'g.jsonl',
          [{'question': 'How many?', 'answer': 'So\n1 + 1 = 2\n#### 1,072'}],
          ('g-1', 'How many?', ('1072',)),
      ),
      (
          'rllm',
          'r.jsonl',
          [{'question': 'Who?', 'ground_truth': '{"target": ["a"]}', 'data_source': 'nq'}],
          ('r-1', 'Who?', ('a',)),
      ),
      (
          'rllm_list',
          'r.jsonl',
          [{'question': 'Who?', 'ground_truth': '["a", "b"]'}],
          ('r-1', 'Who?', ('a', 'b')),
      ),
      (
          'rllm_verl',
          'r.parquet',
          [
              {
                  'prompt': [{'role': 'user', 'content': 'placeholder'}],
                  'reward_model': {'style': 'rule', 'ground_truth': None},
                  'extra_info': {'question': 'Who?', 'ground_truth': 'a', 'index': 3},
              }
          ],
          ('unnamed--3', 'Who?', ('a',)),
      ),
      ('frames', 'f.jsonl', [{'Prompt': 'Who?', 'Answer': 'a'}], ('f-1', 'Who?', ('a',))),
      ('gaia', 'g.jsonl', [{'Question': 'Who?', 'Final answer': '3'}], ('g-1', 'Who?', ('3',))),
      (
          'deepmath',
          'd.parquet',
          [{'question': 'Why?', 'final_answer': '0', 'answer': 'a solution', 'topic': 't'}],
          ('d-1', 'Why?', ('0',)),
      ),
      (
          'rlvr',
          'r.parquet',
          [{'messages': [{'role': 'user', 'content': 'Why?'}], 'ground_truth': '4'}],
          ('r-1', 'Why?', ('4',)),
      ),
      (
          'skyrl',
          's.parquet',
          [
              {
                  'prompt': [{'role': 'user', 'content': 'Why?'}],
                  'reward_spec': {'method': 'rule', 'ground_truth': '72'},
                  'extra_info': {'answer': 'a solution'},
              }
          ],
          ('unnamed--0', 'Why?', ('72',)),
      ),
      (
          'svamp',
          's.json',
          [{'Body': 'Jack has 8 pens.', 'Question': 'How many?', 'Answer': 8.0, 'ID': 'chal-1'}],
          ('s-1', 'Jack has 8 pens.\nHow many?', ('8',)),
      ),
      (
          'asdiv',
          'a.parquet',
          [{'body': 'Seven apples.', 'question': 'How many?', 'answer': '7 (apples)'}],
          ('a-1', 'Seven apples.\nHow many?', ('7 (apples)', '7')),
      ),
      (
          'mgsm',
          'm.parquet',
          [{'question': 'Why?', 'answer': 'So the answer is 11.', 'answer_number': 11}],
          ('m-1', 'Why?', ('11',)),
      ),
      ('aime', 'a.jsonl', [{'Problem': 'p', 'Answer': '073'}], ('a-1', 'p', ('073', '73'))),
      ('pandas', 'p.csv', 'question,answer\nq,1200.0\n', ('p-2', 'q', ('1200.0', '1200'))),
      (
          'mrqa',
          'm.parquet',
          [{'qid': 'a', 'question': 'q', 'answers': ['x'], 'context': 'x y'}],
          ('a', 'q', ('x',)),
      ),
      ('ms_marco', 'm.jsonl', [{'query': 'q', 'answers': ['x']}], ('m-1', 'q', ('x',))),
      (
          'truthfulqa',
          't.parquet',
          [{'question': 'q', 'best_answer': 'x', 'correct_answers': ['x', 'y']}],
          ('t-1', 'q', ('x', 'y')),
      ),
      ('sciq', 's.jsonl', [{'question': 'Who?', 'correct_answer': 'a'}], ('s-1', 'Who?', ('a',))),
  )
  def test_question_and_answers(self, name, content, expected):
    (task,) = self.load(name, content)
    self.assertEqual((task.id, task.question, task.answers), expected)
    self.assertEqual(task.options, ())

  @parameterized.parameters(
      ('72', '72'),
      (72, '72'),
      (0.5, '0.5'),
      (72.0, '72'),
      (['a', 'b'], 'a', 'b'),
      ({'target': ['a']}, 'a'),
      ('{"target": ["a"]}', 'a'),
      ('[1, 2]', '[1, 2]'),  # an interval
  )
  def test_ground_truth_of_verl(self, ground_truth, *answers):
    row = {**_VERL, 'reward_model': {'style': 'rule', 'ground_truth': ground_truth}}
    for name in ('v.parquet', 'v.jsonl'):
      task = self.one(row, name)
      self.assertEqual((task.id, task.question), ('openai/gsm8k-train-0', 'How many?'))
      self.assertEqual(task.answers, answers)

  @parameterized.named_parameters(
      ('medqa', 'm.jsonl', _MEDQA, 'C', 'Nitrofurantoin'),
      ('medqa_pairs', 'm.jsonl', _MEDQA_PAIRS, 'C', 'Nitrofurantoin'),
      (
          'medqa_list',
          'm.jsonl',
          {**_MEDQA, 'options': ['a', 'b', 'Nitrofurantoin']},
          'C',
          'Nitrofurantoin',
      ),
      ('medqa_without_letter', 'm.jsonl', {**_MEDQA, 'answer_idx': None}, 'C', 'Nitrofurantoin'),
      ('medqa_lower', 'm.jsonl', {**_MEDQA, 'answer_idx': 'c'}, 'C', 'Nitrofurantoin'),
      ('medqa_number', 'm.parquet', {**_MEDQA, 'answer_idx': 2}, 'C', 'Nitrofurantoin'),
      (
          'five_columns_of_four',
          'm.parquet',
          {**_MEDQA, 'options': {**_MEDQA['options'], 'E': None}},
          'C',
          'Nitrofurantoin',
      ),
      ('medmcqa', 'm.json', _MEDMCQA, 'A', 'Leukemoid reaction'),
      ('medmcqa_hub', 'm.parquet', {**_MEDMCQA, 'cop': 1}, 'B', 'Leukopenia'),
      ('medmcqa_hub_as_lines', 'm.jsonl', {**_MEDMCQA, 'cop': 0}, 'A', 'Leukemoid reaction'),
      ('medmcqa_last', 'm.parquet', {**_MEDMCQA, 'cop': 4}, 'D', 'Neutrophilia'),
      (
          'medmcqa_index',
          'm.jsonl',
          {**_MEDMCQA, 'cop': None, 'answer_idx': 'opb'},
          'B',
          'Leukopenia',
      ),
      (
          'mmlu',
          'm.parquet',
          {'question': 'q', 'subject': 's', 'choices': ['0', '4', '2'], 'answer': 1},
          'B',
          '4',
      ),
      (
          'arc',
          'm.parquet',
          {
              'id': 'a',
              'question': 'q',
              'choices': {'text': ['x', 'y'], 'label': ['1', '2']},
              'answerKey': '2',
          },
          '2',
          'y',
      ),
      (
          'flashrag_choice',
          'm.jsonl',
          {'id': 'a', 'question': 'q', 'choices': ['x', 'y'], 'golden_answers': ['B']},
          'B',
          'y',
      ),
      (
          'arc_of_its_authors',
          'a.jsonl',
          {
              'id': 'a',
              'question': {
                  'stem': 'q',
                  'choices': [{'text': 'x', 'label': 'A'}, {'text': 'y', 'label': 'B'}],
              },
              'answerKey': 'B',
          },
          'B',
          'y',
      ),
      ('pubmedqa', 'p.parquet', _PUBMED, 'A', 'yes'),
      ('strategyqa', 's.json', {'qid': 'a', 'question': 'q', 'answer': False}, 'B', 'no'),
      ('boolq', 'b.parquet', {'question': 'q', 'passage': 'p', 'answer': True}, 'A', 'yes'),
      (
          'medxpert',
          'm.jsonl',
          {'question': 'q', 'options': {'A': 'x', 'B': 'y'}, 'label': 'B'},
          'B',
          'y',
      ),
      ('aqua', 'a.jsonl', {'question': 'q', 'options': ['A)1', 'B)2'], 'correct': 'B'}, 'B', 'B)2'),
      ('mmmlu', 'm.parquet', {'Question': 'q', 'A': '2', 'B': '4', 'Answer': 'B'}, 'B', '4'),
      (
          'global_mmlu',
          'm.jsonl',
          {'question': 'q', 'option_a': 'x', 'option_b': 'y', 'answer': 'B'},
          'B',
          'y',
      ),
      (
          'mmlu_prox',
          'm.parquet',
          {'question': 'q', 'option_0': 'x', 'option_1': 'y', 'option_2': 'z', 'answer': 'B'}
          | {'answer_index': 1},
          'B',
          'y',
      ),
      (
          'cmexam',
          'c.jsonl',
          {'Question': 'q', 'Options': _MEDQA_PAIRS['options'], 'Answer': 'C'},
          'C',
          'Nitrofurantoin',
      ),
      (
          'columns_by_text',
          'm.jsonl',
          {'question': 'q', 'A': 'x', 'B': 'y', 'answer': 'y'},
          'B',
          'y',
      ),
      ('bracket', 'a.jsonl', {'question': 'q', 'choices': ['x', 'y'], 'answer': '(B)'}, 'B', 'y'),
  )
  def test_multiple_choice(self, name, row, letter, text):
    (task,) = self.load(name, [row])
    self.assertEqual((task.letter, task.answers), (letter, (text,)))
    self.assertEqual(dict(task.options)[letter], text)
    self.assertNotIn(None, dict(task.options).values())

  @parameterized.parameters(
      ('answer', 'option_a option_b option_c', (0, 2), ('A', 'C')),  # INCLUDE
      ('answer', 'A B C', (1, 3), ('A', 'C')),  # KMMLU
      (
          'correct_answer_num',
          'mc_answer1 mc_answer2 mc_answer3',
          ('1', '3'),
          ('A', 'C'),
      ),  # Belebele
      ('label', 'answer0 answer1 answer2', ('1', '0'), ('B', 'A')),  # CosmosQA
      ('label', 'answerA answerB answerC', ('3', '1'), ('C', 'A')),  # SocialIQA
  )
  def test_numbers_of_option_columns(self, name, columns, numbers, letters):
    options = dict(zip(columns.split(), ('2', '3', 'x')))  # texts that look like numbers
    rows = [{'question': 'q', **options, name: number} for number in numbers]
    self.assertEqual(tuple(t.letter for t in self.load('o.jsonl', rows)), letters)

  def test_rows_with_fewer_option_columns(self):
    rows = [
        {'question': 'q', 'option_0': 'x', 'option_1': 'y', 'answer_index': 1},
        {'question': 'q', 'option_0': 'x', 'option_1': 'y', 'option_2': 'z', 'answer_index': 0},
    ]
    self.assertEqual([t.letter for t in self.load('m.parquet', rows)], ['B', 'A'])

  def test_columns_that_are_no_options(self):
    task = self.one({'question': 'q', 'answer': 'Lima', 'A': 'x', 'B': 'y'})
    self.assertEqual((task.answers, task.options), (('Lima',), ()))
    rows = [{'question': 'q', 'answer': n, 'answer1': '2', 'answer2': '12'} for n in (1994, 12)]
    with self.assertRaisesRegex(types.UserError, "column 'answer' is 1994: none of the 2 options"):
      self.load('n.jsonl', rows)

  def test_label_of_wrong_answers(self):
    """WikiQA has a row per answer; elsewhere nothing tells what a label means."""
    rows = [
        {'question': 'q', 'answer': 'x', 'label': 0},
        {'question': 'q', 'answer': 'y', 'label': 1},
    ]
    for name in ('w.parquet', 'w.jsonl'):
      self.assertEqual([t.answers for t in self.load(name, rows)], [('y',)])
    rows[1]['question'] = 'another'
    with self.assertRaisesRegex(types.UserError, "columns 'answer' and 'label' may both be"):
      self.load('w.jsonl', rows)

  def test_pubmedqa_of_its_authors(self):
    (task,) = self.load('ori_pqal.json', _PUBMED_OWN)
    self.assertEqual((task.id, task.options), ('21645374', _OPTIONS_OF_DECISION))
    passages = tasks.load_corpus(str(self.folder / 'ori_pqal.json'))
    self.assertEqual([p.text for p in passages], ['Cell death.', 'Lace plants.'])

  def test_sets_in_one_object(self):
    """MIRAGE: {set: {id: row}}."""
    row = {'question': 'q', 'options': {'A': 'x', 'B': 'y'}, 'answer': 'B'}
    found = self.load('benchmark.json', {'medqa': {'0': row}, 'bioasq': {'0': row}})
    self.assertEqual(
        [(t.id, t.dataset) for t in found], [('medqa-0', 'medqa'), ('bioasq-0', 'bioasq')]
    )

  def test_multi_hop_columns(self):
    """HotpotQA and MuSiQue know the passages with the answer, MuSiQue the sub-questions."""
    hotpot = self.one(_HOTPOT)
    self.assertEqual((hotpot.hops, len(hotpot.gold)), (2, 2))
    musique = self.one(_MUSIQUE)
    self.assertEqual(musique.steps, (('Green >> performer', 'Steve'), ('#1 >> spouse', 'Miquette')))
    passages = {p.id: p for p in tasks.load_corpus(str(self.folder / 'qa.jsonl'))}
    self.assertEqual([passages[i].title for i in musique.gold], ['Steve'])

  def test_base_of_cop_comes_from_column(self):
    rows = [{**_MEDMCQA, 'id': str(cop), 'cop': cop} for cop in (1, 0, 3)]
    self.assertEqual([t.letter for t in self.load('m.jsonl', rows)], ['B', 'A', 'D'])
    rows = [{**_MEDMCQA, 'id': str(cop), 'cop': cop} for cop in (1, 4)]
    self.assertEqual([t.letter for t in self.load('m.parquet', rows)], ['A', 'D'])
    rows = [{**_MEDMCQA, 'id': str(cop), 'cop': cop} for cop in (0, 4)]
    with self.assertRaisesRegex(types.UserError, "m.json:1: column 'cop' is 0: none of the 4"):
      self.load('m.json', rows)


_TEXT = 'It is so because the first of the two numbers is larger than the second one is.'


class LongColumnsTest(_FileTest):
  """Published sets explain their answers at length, and their questions do not need it."""

  @parameterized.named_parameters(
      ('aime', {'problem': 'p', 'answer': '073', 'year': '2024'}, 'solution'),
      ('svamp', {'Body': 'b', 'Question': 'q', 'Answer': 8.0}, 'question_concat'),
      ('strategyqa', {'question': 'q', 'answer': True}, 'description'),
      ('medmcqa', _MEDMCQA, 'exp'),
      ('sciq', {'question': 'q', 'correct_answer': 'a'}, 'explanation'),
      ('pubmedqa', _PUBMED_OWN['21645374'], 'MESHES'),
      ('popqa', {'question': 'q', 'possible_answers': '["a"]'}, 's_aliases'),
      ('hle', {'question': 'q', 'answer': 'a'}, 'rationale'),
      ('aqua', {'question': 'q', 'options': ['A)1', 'B)2'], 'correct': 'B'}, 'rationale'),
      ('c_eval', {'question': 'q', 'A': 'x', 'B': 'y', 'answer': 'B'}, 'explanation'),
      ('gsm8k', {'question': 'q', 'answer': 'a'}, 'reasoning_steps'),
      ('natural_reasoning', {'question': 'q', 'reference_answer': 'a'}, 'responses'),
      (
          'openr1',
          {'problem': 'p', 'answer': '3', 'question_type': 'word', 'generations': [_TEXT]},
          'messages',
      ),
      ('verl', {**_VERL, 'question': 'q'}, 'extra_info.solution'),
      (
          'qasc',
          {'question': 'q', 'choices': {'text': ['x'], 'label': ['A']}, 'answerKey': 'A'},
          'combinedfact',
      ),
  )
  def test_explanation_keeps_a_file_readable(self, row, name):
    texts = [f'{_TEXT} {i}' for i in range(3)]
    rows = []
    for text in texts:
      value = [{'content': text}] if name == 'messages' else text
      rows.append({**row, name: value, 'canary': _TEXT, 'id': text})
    self.assertLen(self.load('f.json', rows), 3)

  @parameterized.parameters(
      ('https://en.wikipedia.org/wiki/Lima_Peru, https://en.wikipedia.org/wiki/Peru_Lima',),
      ("['https://en.wikipedia.org/wiki/Lima_Peru', 'https://en.wikipedia.org/wiki/Peru_Lima']",),
      ('QUJDREVGR0hJSktMTU5PUFFSU1RVVldYWVphYmNkZWZnaGlqa2xtbm9w',),
      (
          "{'topic': 'Geography', 'answer_type': 'Place', 'urls': ['https://en.wikipedia.org/Lima']}",
      ),
  )
  def test_addresses_and_keys_are_no_texts(self, value):
    row = {'Prompt': 'q', 'Answer': 'Lima', 'wiki_links': value}
    self.assertEqual(self.one(row).answers, ('Lima',))


class PassagesTest(_FileTest):

  def test_passages_come_with_the_questions(self):
    path = self.write('h.json', [_HOTPOT, {**_HOTPOT, '_id': 'b', 'answer': None}])
    with self.assertLogs('absl', 'INFO') as logs:
      passages = tasks.load_corpus(path)
    self.assertEqual([p.title for p in passages], ['Scott', 'Ed', 'Tyler'])
    self.assertEqual(passages[0].text, 'Scott is an American director. He was born in 1966.')
    self.assertRegex(logs.output[0], 'the 3 passages that come with the 2 questions of .*h.json')

  @parameterized.parameters(
      ('w.parquet', _2WIKI, 2),
      ('w.parquet', _2WIKI_TEXTS, 3),
      ('m.jsonl', _MUSIQUE, 2),
      ('s.parquet', _SQUAD, 1),
      ('p.parquet', _PUBMED, 2),
      (
          'f.jsonl',
          {
              'id': '1',
              'question': 'q',
              'golden_answers': ['a'],
              'metadata': {'context': _2WIKI['context']},
          },
          2,
      ),
  )
  def test_gold_passages_are_in_the_corpus(self, name, row, number):
    path = self.write(name, [row])
    known = {p.id for p in tasks.load_corpus(path)}
    self.assertLen(known, number)
    self.assertTrue(known.issuperset(tasks.load_tasks(path, 'train')[0].gold))

  def test_a_corpus_in_the_folder_counts(self):
    self.write('hotpot.json', [_HOTPOT])
    self.write('corpus.jsonl', [{'id': 1, 'contents': 'One text.'}])
    self.assertEqual([p.text for p in tasks.load_corpus(str(self.folder))], ['One text.'])
    self.assertEqual([t.id for t in tasks.load_tasks(str(self.folder), 'train')], ['5a7a'])

  @parameterized.parameters(
      ('psgs.tsv', 'id\ttext\ttitle\n1\t"Lima, in Peru."\tLima\n'),
      ('corpus.jsonl.gz', [{'_id': '1', 'title': 'Lima', 'text': 'Lima, in Peru.'}]),
      ('c.parquet', [{'id': 1, 'title': 'Lima', 'text': 'Lima, in Peru.'}]),
      ('c.json', [{'id': 1, 'contents': '"Lima"\nLima, in Peru.'}]),
      ('collection.tsv', '1\tLima, in Peru.\tLima\n'),  # ColBERT
      ('corpus.jsonl', [{'docid': '1', 'title': 'Lima', 'text': 'Lima, in Peru.'}]),  # Tevatron
      ('m.jsonl', [{'pid': '1', 'docid': 'd', 'title': 'Lima', 'passage': 'Lima, in Peru.'}]),
      ('kilt.jsonl', [{'_id': '1', 'wikipedia_title': 'Lima', 'text': ['Lima,', ' in Peru.\n']}]),
      ('lc.jsonl', [{'id': '1', 'page_content': 'Lima, in Peru.', 'metadata': {'title': 'Lima'}}]),
      ('h.parquet', [{'id': '1', 'content': 'Lima, in Peru.', 'meta': {'title': 'Lima'}}]),
      ('li.json', [{'id_': '1', 'text': 'Lima, in Peru.', 'metadata': {'title': 'Lima'}}]),
  )
  def test_corpora_of_other_types(self, name, content):
    passages = tasks.load_corpus(self.write(name, content))
    self.assertEqual(passages, [types.Passage('1', 'Lima', 'Lima, in Peru.')])

  def test_questions_without_passages_need_a_corpus(self):
    path = self.write('nq.jsonl', [{'question': 'q', 'answer': ['a']}])
    with self.assertRaisesRegex(types.UserError, 'no passages come with them: set --config.data'):
      tasks.load_corpus(path)


class FilesTest(_FileTest):

  @parameterized.parameters(
      ('qa.jsonl', b'\xef\xbb\xbf{"question": "q", "answer": "a"}\r\n\r\n'),
      ('qa.json', b'\xef\xbb\xbf\n  [{"question": "q", "answer": "a"}]\r\n'),
      ('qa.json', b'{"question": "q",\n "answer": "a"}'),
      ('qa.json', b'{"question": "q", "answer": "a"}\n'),
      ('qa.jsonl', b'[{"question": "q", "answer": "a"}]'),
      ('qa.jsonl.gz', b'{"question": "q", "answer": "a"}'),
      ('qa.ndjson', b'{"question": "q", "answer": "a"}'),
      ('qa.json', b'{"rows": [{"question": "q", "answer": "a"}], "num": 1}'),
      ('qa.csv', b'\xef\xbb\xbfquestion,answer\r\nq,a\r\n'),
      ('qa.tsv.gz', b'question\tanswer\nq\ta\n'),
      ('QA.CSV', b'question,answer\nq,"[""a""]"\n'),
      ('qa.csv', b'question,answer\nq,"[\'a\']"\n'),
      ('qa.csv', b'question,answer,reward_model\nq,a,\n'),
      ('qa.json', b'[{"question": "q", "answer": "a", "context": {}, "paragraphs": []}]'),
      ('qa.csv', b'question,answers\nq,"[""a""]"\n'),
  )
  def test_one_question(self, name, content):
    (task,) = self.load(name, content)
    self.assertEqual((task.question, task.answers), ('q', ('a',)))

  @parameterized.parameters(
      ('"Ann" who?\tx\n', '"Ann" who?', 'x'),
      ('"Ann\tx\n', '"Ann', 'x'),
      ('"Ann ""B"""\tx\n', 'Ann "B"', 'x'),
      ('"Ann\tB"\tx\r\n', 'Ann\tB', 'x'),
      ('"Ann\n\nB"\tx\n', 'Ann\n\nB', 'x'),
      ('Ann\t"x\ny"\n', 'Ann', 'x\ny'),
      ('"Ann\t"x\n', '"Ann', '"x'),
  )
  def test_quotes_of_tabs_join_no_rows(self, text, question, answer):
    found = self.load('qa.tsv', f'question\tanswer\n{text}next\ty"\n"last\tz')
    pairs = [(task.question, *task.answers) for task in found]
    self.assertEqual(pairs, [(question, answer), ('next', 'y"'), ('"last', 'z')])

  def test_lines_of_a_json_file(self):
    rows = [{'question': str(i), 'answer': 'a'} for i in range(3)]
    self.assertLen(self.load('qa.json', '\n'.join(map(json.dumps, rows))), 3)

  def test_null_columns_and_nan(self):
    rows = [
        {'id': 'a', 'question': 'q', 'golden_answers': ['x', None], 'answer': None, 'split': None},
        {'id': None, 'question': 'q', 'golden_answers': ['y'], 'answer': None, 'split': 'train'},
    ]
    for row in rows:
      row['answers'] = None
    found = self.load('qa.parquet', rows)
    self.assertEqual([t.answers for t in found], [('x',), ('y',)])
    self.assertEqual([t.id for t in found], ['a', 'qa-2'])
    rows[1] |= {'golden_answers': None, 'answer': 'y'}
    with self.assertRaisesRegex(types.UserError, "'golden_answers' and 'answer' may both be"):
      self.load('qa.parquet', rows)
    (task,) = self.load('qa.jsonl', '{"question": "q", "answer": NaN, "golden_answers": ["z"]}')
    self.assertEqual(task.answers, ('z',))

  def test_rows_without_answer_are_counted(self):
    rows = [
        _MUSIQUE,
        {**_MUSIQUE, 'answerable': False},  # the same id, as in musique_full
        {**_MUSIQUE, 'id': 'c', 'answer': '', 'answer_aliases': []},
        {'id': 'd', 'question': 'q'},
    ]
    with self.assertLogs('absl', 'INFO') as logs:
      found = self.load('m.jsonl', rows)
    self.assertEqual([t.id for t in found], ['2hop__1_2'])
    self.assertRegex(
        logs.output[0], "3 of 4 rows cannot be scored .*m.jsonl:2: column 'answerable'"
    )

  @parameterized.parameters(
      ([{**_MEDMCQA, 'cop': -1}], "column 'cop' is -1"),
      (
          [{'_id': 'a', 'question': 'q', 'context': []}],
          'no answer in the columns _id, question, context',
      ),
      ([{'id': 'a', 'question': 'q', 'golden_answers': ['', ' ']}], "column 'golden_answers'"),
      ([{'id': 'a', 'question': 'q', 'golden_answers': []}], "column 'golden_answers'"),
      ([{**_SQUAD, 'answers': {'text': [], 'answer_start': []}}], "column 'answers'"),
      ([{**_PUBMED, 'final_decision': None}], "column 'final_decision'"),
      ([{'Question': 'q', 'Final answer': 'a', 'file_name': 'x.xlsx'}], "column 'file_name' names"),
      ([{'Question': 'q', 'Final answer': '?', 'file_name': ''}], "column 'Final answer' is '[?]'"),
      ([{'question': 'q', 'answer': 'a', 'image': 'data:'}], "column 'image' holds an image"),
      ([{**_VERL, 'images': [{'path': 'x.png'}]}], "column 'images' holds an image"),
      (
          [{'question': 'q', 'final_answer': ['1'], 'image_1': {'bytes': ''}}],
          "column 'image_1' holds",
      ),
      (
          [{'problem': 'q', 'answer': 'proof', 'question_type': 'proof'}],
          "column 'answer' is 'proof'",
      ),
      (
          [{'Question': 'q', 'A': 'x', 'B': 'y', 'Answer': 'AB'}],
          "column 'Answer' is 'AB', which are",
      ),
      ([{'query': 'q', 'answers': ['No Answer Present.']}], "column 'answers' is .'No Answer"),
      (
          [{'problem': 'q', 'level': 'Level 1', 'type': 'Algebra', 'solution': r'So \boxed{1'}],
          "column 'solution' has no complete box",
      ),
  )
  def test_no_row_with_an_answer_is_an_error(self, rows, reason):
    with self.assertRaisesRegex(
        types.UserError, f'none of 1 rows can be scored: .*json:1: {reason}'
    ):
      self.load('qa.json', rows)

  @parameterized.named_parameters(
      ('no_question', {'id': 1, 'body': 'q', 'answer': 'a'}, 'no question in the columns id, body'),
      ('list', {'question': ['q'], 'answer': 'a'}, r"column 'question' is \['q'\]"),
      ('empty', {'question': ' ', 'answer': 'a'}, "column 'question' is empty"),
      ('bool', {'question': 'q', 'golden_answers': [True]}, "column 'golden_answers' is"),
      ('dict', {'question': 'q', 'answer': {'x': 'a'}}, "column 'answer' has the keys x"),
      (
          'code',
          {'question': 'q', 'ground_truth': '{"inputs": [], "outputs": []}'},
          "column 'ground_truth' has the keys inputs, outputs",
      ),
      (
          'numpy',
          {'question': 'q', 'golden_answers': "['a' 'b']"},
          "column 'golden_answers': .* NumPy's",
      ),
      ('id', {'_id': ['x'], 'question': 'q', 'answer': 'a'}, "column '_id' is"),
      ('letter', {**_MEDQA, 'answer_idx': 'F'}, "column 'answer_idx' is 'F'"),
      ('two_letters', {**_MEDQA, 'answer': 'Ampicillin'}, "columns 'answer_idx' and 'answer' name"),
      ('text', {**_MEDQA, 'answer_idx': None, 'answer': 'Water'}, "column 'answer' is 'Water'"),
      ('cop', {**_MEDMCQA, 'cop': 9}, "column 'cop' is 9"),
      ('cop_text', {**_MEDMCQA, 'cop': 'first'}, "column 'cop' is 'first'"),
      ('context', {**_HOTPOT, 'context': [['a', 'b', 'c']]}, "column 'context' has"),
      ('decision', {**_PUBMED, 'final_decision': 'perhaps'}, "column 'final_decision' is"),
      (
          'encrypted',
          {'problem': base64.b64encode(bytes(range(99, 159))).decode(), 'answer': 'K8x9g/lJ'},
          "column 'problem' is encrypted",
      ),
      (
          'calls',
          {'query': 'q', 'answers': '[{"name": "f", "arguments": {}}]', 'tools': '[]'},
          "column 'answers' is .*: a text, a number or a list is needed",
      ),
      (
          'options_in_answers',
          {'context': 'c', 'question': 'q', 'answers': ['x', 'y'], 'label': 1},
          r"columns 'answers' and 'label' may both be the answer, as in \['x', 'y'\] and 1",
      ),
      (
          'countdown',
          {**_VERL, 'reward_model': {'ground_truth': {'target': 65, 'numbers': [44, 19]}}},
          "column 'reward_model.ground_truth' has the keys target, numbers",
      ),
      (
          'unclear_number',
          {'question': 'q', 'A': 'x', 'B': 'y', 'C': 'z', 'answer': 2},
          "column 'answer' is 2, and no row tells whether",
      ),
      (
          'one_line_of_lists',
          {'input': 'q', 'output': [{'answer': 'a'}]},
          'no question in the columns input, output',
      ),
      ('split', {'question': 'q', 'answer': 'a', 'split': 3}, "column 'split' is 3"),
  )
  def test_a_refusal_names_their_column(self, row, complaint):
    with self.assertRaisesRegex(types.UserError, f'qa.jsonl:1: {complaint}'):
      self.load('qa.jsonl', json.dumps(row))

  def test_accented_question_is_no_code(self):
    question = 'Où est née Élisabeth 1 ?'.ljust(40, '!')  # a base64 decoder raises another error
    (task,) = self.load('qa.jsonl', json.dumps({'question': question, 'answer': 'a'}))
    self.assertEqual(task.question, question)

  def test_message_names_all_columns_of_parquet(self):
    with self.assertRaisesRegex(types.UserError, 'columns claim, label, evidence: one of'):
      self.load('fever.parquet', [{'claim': 'c', 'label': 'l', 'evidence': 'e'}])

  @parameterized.parameters(
      ('qa.json', {'question': {'0': 'q'}, 'answer': {'0': 'a'}}, "'question' holds the values"),
      ('qa.csv', 'question,answer\nq,a,b\n', 'more cells'),
      ('qa.csv', b'question,answer\n\xff\xfe,a\n', 'not a table in UTF-8'),
      ('qa.json', [['q', 'a']], 'an object is needed'),
      ('qa.json', '[{"question": "q"}', 'not JSON in UTF-8'),
      ('qa.jsonl', b'{"question": "S\xe3o?"}', 'not JSON in UTF-8'),
  )
  def test_a_file_that_is_no_table_of_rows(self, name, content, complaint):
    with self.assertRaisesRegex(types.UserError, f'{name}:[12]: .*{complaint}'):
      self.load(name, content)

  def test_a_gzip_file_that_is_cut(self):
    path = self.write('qa.jsonl.gz', [{'question': 'q' * 999, 'answer': 'a'}])
    os.truncate(path, 30)
    with self.assertRaisesRegex(types.UserError, 'not a whole gzip file'):
      tasks.load_tasks(path, 'train')

  def test_two_files_may_have_the_same_ids(self):
    """FlashRAG calls the first row of each set `dev_0`."""
    row = {'id': 'dev_0', 'golden_answers': ['a']}
    names = ('nq', 'popqa')
    paths = [self.write(f'{name}/dev.jsonl', [row | {'question': name}]) for name in names]
    ids = [task.id for task in tasks.load_tasks(','.join(paths), 'dev')]
    self.assertEqual(ids, ['dev_0', 'dev_0-dev-1'])

  @parameterized.parameters(
      ('hotpot_dev_distractor_v1.jsonl', 'hotpot_dev_fullwiki_v1.jsonl', 3),
      ('a.jsonl', 'b.jsonl', 2),  # a part of the other file
      ('main/train.jsonl', 'socratic/train.jsonl', 3),
      ('train.parquet', 'train-00000-of-00001.parquet', 3),
  )
  def test_questions_of_two_files_are_refused(self, first, second, number):
    rows = [{'question': f'q{i}', 'answer': 'a', 'id': f'{i}'} for i in range(3)]
    paths = [self.write(first, rows), self.write(second, rows[:number])]
    self.write('test.jsonl', rows)  # another split, about which a run warns
    for source in (','.join(paths), ','.join(paths[::-1]), str(self.folder)):
      with self.assertRaisesRegex(
          types.UserError, f'{number} questions are those of .*: give one of the two files'
      ):
        tasks.load_all(source)
    changed = [{**row, 'answer': 'b'} for row in rows]
    self.write(second, changed)
    self.assertLen(tasks.load_all(','.join(paths)).tasks, 6)

  def test_files_with_one_name_are_refused(self):
    rows = [{'question': 'q', 'answer': 'a'}]
    for names in (('train.jsonl', 'train.jsonl.gz'), ('Train.csv', 'train.parquet')):
      folder = names[0]
      self.write(f'{folder}/{names[0]}', 'question,answer\nq,a\n' if 'csv' in folder else rows)
      self.write(f'{folder}/{names[1]}', rows)
      with self.assertRaisesRegex(types.UserError, f'may hold the same rows as {names[0]}: give'):
        tasks.load_all(str(self.folder / folder))
    self.write('one/train.jsonl', rows)
    self.write('two/train.jsonl', [{'question': 'other', 'answer': 'a'}])
    self.assertLen(row_files.in_folder(self.folder / 'one'), 1)

  @parameterized.parameters(True, False)
  def test_caches_of_datasets_are_no_rows(self, has_state):
    """`load_from_disk(..).map(..)` writes them beside the files of the set."""
    names = ('data-00000-of-00001', 'cache-0123456789abcdef', 'cache-01234567_00000_of_00002')
    for name in names:
      self._write_arrow(f'train/{name}.arrow', [{'question': 'q', 'answer': 'a'}])
    if has_state:
      self._write_arrow('train/other.arrow', [{'question': 'q2', 'answer': 'a'}])
      files = [{'filename': 'data-00000-of-00001.arrow'}]
      self.write('train/state.json', {'_data_files': files, '_split': None})
    for folder in (self.folder, self.folder / 'train'):
      self.assertLen(tasks.load_all(str(folder)).tasks, 1)
    if has_state:
      (self.folder / 'train' / 'data-00000-of-00001.arrow').unlink()
      with self.assertRaisesRegex(types.UserError, 'state.json: lists data-0.*, which is missing'):
        tasks.load_all(str(self.folder))

  def _write_arrow(self, name, rows):
    path = self.folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    table = pyarrow.Table.from_pylist(rows)
    with pyarrow.ipc.new_stream(path, table.schema) as stream:
      stream.write_table(table)


class SplitsTest(_FileTest):

  def rows(self, *splits):
    return [{'question': f'q{i}', 'answer': 'a', 'split': s} for i, s in enumerate(splits)]

  def test_splits_of_one_file(self):
    path = self.write('qa.jsonl', self.rows('train', 'validation', 'test'))
    self.assertEqual([t.question for t in tasks.load_tasks(path, 'train')], ['q0'])
    self.assertEqual([t.question for t in tasks.load_tasks(path, 'dev')], ['q1'])
    with self.assertRaisesRegex(types.UserError, 'splits there: test, train, validation. --config'):
      tasks.load_tasks(path, 'other')

  def test_lists_of_one_object(self):
    row = {'question': 'q', 'answer': 'a'}
    path = self.write('qa.json', {'train': [row, row], 'validation': [row]})
    self.assertLen(tasks.load_tasks(path, 'train'), 2)
    self.assertLen(tasks.load_tasks(path, 'dev'), 1)

  def test_names_of_several_files_say_their_splits(self):
    for name in ('train-00000-of-00002', 'train-00001-of-00002', 'validation-00000-of-00001'):
      self.write(f'data/{name}.parquet', [{'question': name, 'answer': 'a'}])
    self.write('README.md', 'text')
    self.write('.cache/x.json', [{}])
    self.write('dataset_infos.json', {'default': {}})
    self.write('metadata.json', {'default': {}})
    source = str(self.folder)
    self.assertLen(tasks.load_tasks(source, 'train'), 2)
    self.assertLen(tasks.load_tasks(source, 'dev'), 1)
    with self.assertRaisesRegex(types.UserError, 'splits there: train, validation'):
      tasks.load_tasks(source, 'test')

  def test_split_is_name_of_folder(self):
    """The hub converts sets to train/0000.parquet, and save_to_disk writes train/data-..arrow."""
    for split in ('train', 'test'):
      table = pyarrow.Table.from_pylist([{'question': split, 'answer': 'a'}])
      (self.folder / 'hub' / split).mkdir(parents=True)
      parquet.write_table(table, self.folder / 'hub' / split / '0000.parquet')
      (self.folder / 'disk' / split).mkdir(parents=True)
      path = self.folder / 'disk' / split / 'data-00000-of-00001.arrow'
      with pyarrow.ipc.new_stream(path, table.schema) as stream:
        stream.write_table(table)
    for name in ('extra', 'train'):  # a folder whose name means something else
      self.write(f'dev/{name}.jsonl', [{'question': name, 'answer': 'a'}])
    self.assertLen(tasks.load_tasks(str(self.folder / 'dev'), 'train'), 2)
    self.write('disk/dataset_dict.json', {'splits': ['train', 'test']})
    self.write('disk/train/state.json', {'_split': 'train'})
    for name in ('hub', 'disk'):
      for split in ('train', 'test'):
        found = tasks.load_tasks(str(self.folder / name), split)
        self.assertEqual([task.question for task in found], [split])
    path.write_bytes(path.read_bytes()[:300])
    with self.assertRaisesRegex(types.UserError, 'not a whole file of Dataset.save_to_disk'):
      tasks.load_tasks(str(path), 'test')

  def test_folder_of_gaia_has_metadata_alone(self):
    row = {'Question': 'q', 'Final answer': 'a', 'file_name': ''}
    self.write('2023/validation/metadata.jsonl', [row])
    self.assertLen(tasks.load_tasks(str(self.folder), 'dev'), 1)

  def test_the_name_of_one_file_says_nothing(self):
    path = self.write('hotpot_train_v1.1.json', [_HOTPOT])
    self.assertEqual(tasks.load_tasks(path, 'dev')[0].split, '')


_LONG = 'The first half ended with a lead of three points, and the second one was quiet.'


class PromptTest(_FileTest):
  """Questions in the prompts of verl, SkyRL and Tülu."""

  def questions(self, *prompts, is_user=False, name='v.jsonl'):
    rows = [{**_VERL, 'prompt': p, 'extra_info': {'index': i}} for i, p in enumerate(prompts)]
    columns = {'question': 'prompt', 'answers': 'reward_model.ground_truth'} if is_user else {}
    return [task.question for task in tasks.load_all(self.write(name, rows), columns).tasks]

  def user(self, *texts):
    return [{'role': 'user', 'content': text} for text in texts]

  def test_a_prompt_may_be_a_text_or_parts(self):
    for prompt in (
        'Question: why?',
        [{'role': 'user', 'content': 'Question: why?', 'name': None}],
        [{'role': 'user', 'content': [{'type': 'text', 'text': 'why?'}]}],
    ):
      self.assertEqual(self.questions(prompt), ['why?'])

  def test_instruction_is_left_out_and_logged(self):
    system = [{'role': 'system', 'content': 'Be brief.'}]
    prompts = [system + self.user(f'Use tools. Question: {q}\n') for q in ('why?', 'who?')]
    for name in ('v.jsonl', 'v.parquet'):
      row_files.log_once.cache_clear()
      with self.assertLogs('absl', 'INFO') as logs:
        self.assertEqual(self.questions(*prompts, name=name), ['why?', 'who?'])
      self.assertLen([line for line in logs.output if 'Be brief. Use tools.' in line], 1)

  @parameterized.parameters(
      ('Passage: {}\n\nQuestion: ', True),
      ('Passage: {}\n\nQuestion: ', False),
      ('Answer at once.\nContext: {}\nQuestion: ', True),
      ('Question: an example\nAnswer: one\n\nPassage: {}\nQuestion: ', True),
  )
  def test_text_that_differs_belongs_to_the_question(self, start, has_rows):
    texts = [f'{start.format(_LONG + str(i))}How many yards?' for i in range(1 + 2 * has_rows)]
    found = self.questions(*map(self.user, texts))
    self.assertLen(found, len(texts))
    for question in found:
      self.assertIn(_LONG, question)
      self.assertEndsWith(question, 'How many yards?')

  def test_different_system_texts_belong_to_question(self):
    for num_rows in (1, 3):
      texts = [f'The document: {_LONG}{i}' for i in range(num_rows)]
      prompts = [[{'role': 'system', 'content': text}, *self.user('How many?')] for text in texts]
      expected = [f'{text}\n\nHow many?' for text in texts]
      self.assertEqual(self.questions(*prompts), expected)
    mixed = self.questions(prompts[0], self.user('Who?'))
    self.assertEqual(mixed, [expected[0], 'Who?'])

  @parameterized.parameters('v.jsonl', 'v.parquet')
  def test_prompt_that_says_more_than_its_question_is_not_overlooked(self, name):
    def row(i, text):
      prompt = self.user(f'{text}\nHow many yards in round {i}?')
      info = {'index': i, 'question': f'How many yards in round {i}?'}
      return {**_VERL, 'prompt': prompt, 'extra_info': info}

    passages = self.write(name, [row(i, f'{_LONG} {i // 2}') for i in range(50)])
    with self.assertRaisesRegex(types.UserError, "'prompt' says more than .*extra_info.question"):
      tasks.load_all(passages)
    columns = {'question': 'prompt', 'answers': 'reward_model.ground_truth'}
    with self.assertRaises(types.UserError) as raised:
      tasks.load_all(passages)
    self.assertIn(str(columns), str(raised.exception))
    self.assertIn(f'{_LONG} 9', tasks.load_all(passages, columns).tasks[19].question)
    columns['question'] = 'extra_info.question'
    self.assertEqual(
        tasks.load_all(passages, columns).tasks[19].question, 'How many yards in round 19?'
    )
    # Two sources with instructions of their own, of which one says the question twice.
    texts = (_LONG, f'{_LONG} How many yards in round {{}}?')
    templates = [row(i, texts[i % 2].format(i)) for i in range(50)]
    found = tasks.load_all(self.write(f'templates_{name}', templates)).tasks
    self.assertEqual(found[19].question, 'How many yards in round 19?')

  @parameterized.parameters((True,), (False,))
  def test_conversation_is_no_question(self, is_user):
    first = self.user('Tell me about Bob.')
    first += [{'role': 'assistant', 'content': 'Bob had 3 cats.'}, *self.user('How many cats?')]
    for prompts in ([first], [first, self.user('Who?')], [self.user('Bob has 3.', 'How many?')]):
      with self.assertRaisesRegex(
          types.UserError, "column 'prompt' has a conversation before its last .* column 'question'"
      ):
        self.questions(*prompts, is_user=is_user)
    second = [*first[:2], *self.user('Who?')]  # the same example in all rows
    self.assertEqual(self.questions(first, second), ['How many cats?', 'Who?'])


if __name__ == '__main__':
  absltest.main()
