"""Tests of stppo_jax.data.layout_fit: a file of questions is read right, or refused."""

import collections
import csv
import json
import pathlib
import random
import tempfile

from absl.testing import absltest
from absl.testing import parameterized
import pyarrow
from pyarrow import parquet
import pytest

from stppo_jax import config as config_lib
from stppo_jax import types
from stppo_jax.data import layouts
from stppo_jax.data import row_files
from stppo_jax.data import tasks
from stppo_jax.settings import validation

pytestmark = pytest.mark.guests(
    what='Unknown question sets',
    version='columns of the published files',
    date='2026-11-28',
    touches='data/layout_fit.py data/layout_profile.py data/layout_values.py',
)

_NUM_FILES = 2000
_WORDS = 'Ada Lisp Fortran Paris Lima Oslo iron neon zinc blue 1 2 3 4 12 A B C D O AB'.split()
_LETTERS = 'ABCDEFGH'
_OPTION_COLUMNS = ('A', 'option_a', 'option_0', 'opa', 'answer0', 'choice1', 'mc_answer1', 'a0')
_NOISE = {
    'subject': lambda r, *_: r.choice(['law', 'art']),
    'level': lambda r, *_: r.randint(1, 5),
    'url': lambda r, *_: f'http://x/{r.randint(1, 9)}',
    'model_answer': lambda r, texts, right: r.choice(texts),
    'prediction': lambda r, texts, right: r.choice(_LETTERS[: len(texts)]),
    'correct': lambda r, texts, right: r.randrange(len(texts)),
    'gold': lambda r, texts, right: r.choice(texts),
    'label': lambda r, texts, right: r.choice([0, 1, 2]),
    'key': lambda r, texts, right: r.choice(_LETTERS[: len(texts)]),
    'idx': lambda r, texts, right: r.randrange(len(texts) + 2),
    'final_answer': lambda r, texts, right: r.choice([texts[right], r.choice(_WORDS)]),
    'tags': lambda r, texts, right: [r.choice(_WORDS), 'x'],
    'explanation': lambda r, texts, right: f'It is {texts[right]}. ' + 'So. ' * 30,
}


class _FileTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    row_files.log_once.cache_clear()
    self.folder = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))
    self.number = 0

  def write(self, rows, suffix='.jsonl'):
    self.number += 1
    path = self.folder / f'f{self.number}{suffix}'
    if suffix == '.parquet':
      parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    elif suffix == '.csv':
      with path.open('w', newline='') as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        for row in rows:
          cells = {k: json.dumps(v) if isinstance(v, (list, dict)) else v for k, v in row.items()}
          writer.writerow(cells)
    else:
      path.write_text('\n'.join(map(json.dumps, rows)))
    return str(path)


def _random_file(r):
  """Returns (rows, [text of the right answer, and whether it is a choice])."""
  num_options = r.randint(2, 5)
  kind = r.choice(['letter', 'index0', 'index1', 'text', 'open', 'open_list'])
  place = r.choice(['list', 'dict', 'columns', 'pairs', 'other'])
  prefix = r.choice(_OPTION_COLUMNS)
  question = r.choice(['question', 'question', 'Question', 'problem', 'query'])
  options = {
      'list': r.choice(['options', 'choices', 'Options', 'answers']),
      'other': r.choice(['candidates', 'answer_options', 'texts', 'possible']),
  }.get(place, 'options')
  answer = r.choice(
      ['answer', 'answer', 'answer', 'Answer', 'label', 'answer_idx', 'answerKey', 'correct']
      + ['correct_answer', 'solution', 'extra_info.answer', 'metadata.answer', 'gold']
  )
  if kind.startswith('open'):
    answer = r.choice(['answer', 'answer', 'Answer', answer])
  second = r.choice([None, None, None, 'answer', 'answer_idx', 'answer_index', 'answer_letter'])
  second_kind = r.choice(['letter', 'index0', 'index1', 'text'])
  noise = r.sample(sorted(_NOISE), r.choice([0, 0, 0, 1, 1, 2]))
  pool = r.choice([_WORDS, _WORDS[:10], [f'{w} {i}' for i, w in enumerate(_WORDS)]])
  rows = []
  truths = []
  for i in range(r.choice([1, 3, 6, 10])):
    texts = r.sample(pool, min(num_options, len(pool)))
    right = r.randrange(len(texts))
    value = {
        'letter': _LETTERS[right],
        'index0': right,
        'index1': right + 1,
        'text': texts[right],
        'open': texts[right],
        'open_list': texts[:2],
    }
    row = {'id': f'q{i}', question: f'Which one is number {i}?'}
    if kind not in ('open', 'open_list'):
      if place == 'dict':
        row[options] = dict(zip(_LETTERS, texts))
      elif place == 'columns':
        row |= {prefix[:-1] + chr(ord(prefix[-1]) + n): text for n, text in enumerate(texts)}
      elif place == 'pairs':
        row[options] = [{'key': k, 'value': t} for k, t in zip(_LETTERS, texts)]
      else:
        row[options] = texts
    outer, _, inner = answer.rpartition('.')
    if outer:
      row[outer] = {inner: value[kind]}
    else:
      row[answer] = value[kind]
    if second and second not in row and kind not in ('open', 'open_list'):
      row[second] = value[second_kind]
    for name in noise:
      row.setdefault(name, _NOISE[name](r, texts, right))
    rows.append(row)
    is_choice = kind not in ('open', 'open_list')
    truths.append((is_choice, tuple(texts[:2]) if kind == 'open_list' else (texts[right],)))
  return rows, truths


class RandomFileTest(_FileTest):

  def test_file_is_read_right_or_refused(self):
    counts = collections.Counter()
    for seed in range(_NUM_FILES):
      r = random.Random(seed)
      rows, truths = _random_file(r)
      path = self.write(rows, r.choice(['.jsonl', '.jsonl', '.csv']))
      try:
        loaded = tasks.load_all(path)
      except types.UserError:
        counts['refused'] += 1
        continue
      by_id = {task.id: task for task in loaded.tasks}
      for row, (is_choice, answers) in zip(rows, truths, strict=True):
        task = by_id.get(row['id'])
        if task is None:
          counts['rows left out'] += 1
          continue
        found = {text for text in task.answers}
        message = f'seed {seed}: {row} is read as {task}: {loaded.readings}'
        if is_choice and not task.options:
          self.assertIn(answers[0], found, message)  # asked openly, and the text is right
          counts['choices asked openly'] += 1
        self.assertLessEqual(found, {*answers, *(a.partition(' ')[0] for a in answers)}, message)
        self.assertTrue(found & {*answers}, message)
      counts['right'] += 1
    self.assertGreater(counts['right'], _NUM_FILES / 3)


_O = ['w', 'x', 'y', 'z']
_DICT = dict(zip('ABCD', _O))
_OBJECTS = [{'option': letter, 'content': text} for letter, text in zip('BA', 'xw')]
_ARC = {'text': _O, 'label': ['A', 'B', 'C', 'D']}
_BY_COLUMN = {'a0': 'w', 'a1': 'x', 'a2': 'y'}


def _rows_with(name, values, **fields):
  return [{'question': f'q{i}', **fields, name: value} for i, value in enumerate(values)]


class LayoutTest(_FileTest):
  """The columns are those of published sets. The rows are short."""

  @parameterized.named_parameters(
      (
          'supergpqa',
          {
              'question': 'q',
              'options': ['H', 'N', 'O', 'He', 'C'],
              'answer': 'C',
              'answer_letter': 'E',
              'is_calculation': False,
          },
          'E',
          'C',
      ),
      (
          'mmlu',
          {'question': 'q', 'subject': 's', 'choices': ['1', '2', '3'], 'answer': 1},
          'B',
          '2',
      ),
      (
          'mmlu_pro',
          {'question': 'q', 'options': _O, 'answer': 'C', 'answer_index': 2, 'cot_content': ''},
          'C',
          'y',
      ),
      (
          'kmmlu',
          {'question': 'q', 'answer': 2, **_DICT, 'Category': 'c', 'Human Accuracy': 0.0},
          'B',
          'x',
      ),
      (
          'belebele',
          {
              'question_number': 1,
              'flores_passage': 'p',
              'question': 'q',
              'mc_answer1': 'w',
              'mc_answer2': 'x',
              'mc_answer3': 'y',
              'mc_answer4': 'z',
              'correct_answer_num': '3',
          },
          'C',
          'y',
      ),
      (
          'siqa',
          {
              'context': 'c',
              'question': 'q',
              'answerA': 'w',
              'answerB': 'x',
              'answerC': 'y',
              'label': '2',
          },
          'B',
          'x',
      ),
      (
          'cosmosqa',
          {
              'context': 'c',
              'question': 'q',
              'answer0': 'w',
              'answer1': 'x',
              'answer2': 'y',
              'label': 1,
          },
          'B',
          'x',
      ),
      (
          'copa',
          {
              'premise': 'p',
              'question': 'cause',
              'choice1': 'x',
              'choice2': 'y',
              'idx': 0,
              'label': 1,
          },
          'B',
          'y',
      ),
      ('piqa', {'goal': 'q', 'sol1': 'x', 'sol2': 'y', 'label': 1}, 'B', 'y'),
      ('winogrande', {'sentence': 's _', 'option1': 'x', 'option2': 'y', 'answer': '2'}, 'B', 'y'),
      (
          'hellaswag',
          {'ctx_a': 'c', 'ctx_b': 'd', 'ctx': 'c d', 'endings': _O, 'label': '2'},
          'C',
          'y',
      ),
      ('openbookqa', {'question_stem': 'q', 'choices': _ARC, 'answerKey': 'C'}, 'C', 'y'),
      (
          'qasc',
          {
              'question': 'q',
              'choices': _ARC,
              'answerKey': 'C',
              'fact1': 'f',
              'combinedfact': 'g',
              'formatted_question': 'q (A) w',
          },
          'C',
          'y',
      ),
      ('race', {'article': 'a', 'question': 'q', 'options': _O, 'answer': 'C'}, 'C', 'y'),
      (
          'reclor',
          {'context': 'c', 'question': 'q', 'answers': _O, 'label': 1, 'id_string': 't'},
          'B',
          'x',
      ),
      (
          'quail',
          {
              'context_id': 'f',
              'context': 'c',
              'question': 'q',
              'question_type': 't',
              'answers': _O,
              'correct_answer_id': 1,
          },
          'B',
          'x',
      ),
      (
          'sciq',
          {
              'question': 'q',
              'distractor1': 'a',
              'distractor2': 'b',
              'distractor3': 'c',
              'correct_answer': 'k',
              'support': 's',
          },
          'D',
          'k',
      ),
      (
          'gpqa',
          {
              'Question': 'q',
              'Correct Answer': 'm',
              'Incorrect Answer 1': 'z',
              'Incorrect Answer 2': 'y',
              'Incorrect Answer 3': 'x',
              'Pre-Revision Correct Answer': 'o',
          },
          'A',
          'm',
      ),
      (
          'agieval',
          {
              'passage': None,
              'question': 'q',
              'options': ['(A)w', '(B)x'],
              'label': 'B',
              'answer': None,
          },
          'B',
          '(B)x',
      ),
      (
          'species',  # no letters of options
          {
              'question': 'q',
              'options': ['E. coli', 'S. aureus', 'H. pylori', 'K. pneumoniae'],
              'answer': 'B',
          },
          'B',
          'S. aureus',
      ),
      (
          'musr',
          {
              'narrative': 'n',
              'question': 'q',
              'choices': "['a', 'b']",
              'answer_index': 1,
              'answer_choice': 'b',
          },
          'B',
          'b',
      ),
  )
  def test_option(self, row, letter, text):
    (task,) = tasks.load_all(self.write([row])).tasks
    self.assertEqual((task.letter, task.answers), (letter, (text,)))

  @parameterized.named_parameters(
      ('aime', {'problem': 'p', 'solution': 's', 'answer': '073', 'year': '2024'}, '073', '73'),
      ('text_of_digits', {'question': 'q', 'answer': '007'}, '007'),
      ('two_numbers', {'question': 'q', 'answer': 'So\n#### 3, 4'}, '3, 4'),
      ('thousands', {'question': 'q', 'answer': 'So\n#### -1,234,567.5'}, '-1234567.5'),
      (
          'numina',
          {
              'problem': 'p',
              'solution': 's',
              'answer': '3',
              'question_type': 'word',
              'solution_is_valid': 'Yes',
          },
          '3',
      ),
      ('same_answer_twice', {'question': 'q', 'answer': 'a', 'extra_info': {'answer': 'A'}}, 'a'),
      ('letter_of_the_question', {'question': 'q A) w B) x', 'answer': 'B', 'topic': 't'}, 'B'),
      ('no_error', {'question': 'q', 'answer': 'a', 'error_type': 'ok', 'valid': True}, 'a'),
      ('solve_rate', {'question': 'q', 'answer': 'a', 'success_rate': 0.0}, 'a'),
      ('tolerance', {'question': 'q', 'answer': '5.1', 'error': '1e-1'}, '5.1'),
      ('popqa', {'question': 'q', 'possible_answers': '["a", "b"]', 'obj': 'a'}, 'a', 'b'),
      ('hops', {'question': 'q', 'answers': ['a', 'b'], 'hops': 2, 'year': 1999}, 'a', 'b'),
      ('set_of_sets', {'question': 'q', 'answer': '{{1,2},{3}}'}, '{{1,2},{3}}'),
      (
          'box',
          {'question': 'q', 'answer': r'Not $\boxed{1}$. So $x=\boxed{\{\frac{1}{2}\}}$.'},
          r'\{\frac{1}{2}\}',
      ),
      ('box_without_braces', {'question': 'q', 'answer': r'So it is $\boxed 5$.'}, '5'),
  )
  def test_text(self, row, *answers):
    (task,) = tasks.load_all(self.write([row])).tasks
    self.assertEqual((task.options, task.answers), ((), answers))

  @parameterized.named_parameters(
      ('movieqa', {'question': 'q', 'answers': _O, 'correct_index': 2}),
      ('onestopqa', {'question': 'q', 'answers': _O, 'a_span': [1, 2], 'd_span': [3, 4]}),
      ('answers_and_answer', {'question': 'q', 'answers': _O, 'answer': 'x'}),
      ('answers_and_number', {'question': 'q', 'answers': _O, 'answer': 2}),
      ('answers_and_correct', {'question': 'q', 'answers': _O, 'correct': 'B'}),
      ('answers_and_label', {'question': 'q', 'answers': _O, 'label': 2}),
      ('answers_and_votes', {'question': 'q', 'answers': _O, 'votes': [1, 5, 2, 0]}),
      ('answers_and_shares', {'question': 'q', 'answers': _O, 'weights': [0.1, 0.7, 0.2, 0.0]}),
      ('answers_and_class', {'question': 'q', 'answers': _O, 'class': 2}),
      ('answers_and_letter', {'question': 'q', 'answers': _O, 'marked': 'C'}),
      ('answers_and_text', {'question': 'q', 'answers': _O, 'picked': 'x'}),
      ('possible_answers', {'question': 'q', 'possible_answers': _O, 'answer': 'x'}),
      ('options_in_a_text', {'question': 'q', 'answer': 'B', 'note': 'A) w B) x'}),
      ('options_in_lines', {'question': 'q', 'answer': '2', 'options': 'w\nx\ny'}),
      ('options_by_numerals', {'question': 'q', 'answer': 2, 'first': 'w', 'second': 'x'}),
      ('name_of_a_column', {'question': 'q', 'answer': 'op2', 'op1': 'w', 'op2': 'x'}),
      ('options_as_objects', {'question': 'q', 'options': _OBJECTS, 'answer': 'A'}),
      ('letters_in_options', {'question': 'q', 'options': ['B. x', 'A. w'], 'answer': 'A'}),
      ('letters_in_brackets', {'question': 'q', 'options': ['(B)x', '(A)w'], 'answer': 'A'}),
      ('an_option_is_lost', {'question': 'q', 'options': ['B) x', 'C) y'], 'answer': 'B'}),
      (
          'letter_twice',
          {'question': 'q', 'choices': {'text': _O, 'label': list('AABC')}, 'answerKey': 'A'},
      ),
      ('invalid', {'question': 'q', 'answer': 'a', 'valid': False}),
      ('not_verified', {'question': 'q', 'answer': 'a', 'human_verified': 'no'}),
      ('not_passed', {'question': 'q', 'options': _O, 'answer': 'A', 'passed': 0}),
      ('error_of_a_row', {'question': 'q', 'answer': 'a', 'error_type': 'wrong groundtruth'}),
      ('verdict', {'question': 'q', 'answer': 'a', 'verdict': 'incorrect'}),
      ('revised', {'question': 'q', 'answer': 'a', 'revised': 'b'}),
      ('blood_groups', {'question': 'q', 'choices': ['O', 'A', 'B', 'AB'], 'answer': 'B'}),
      ('articles', {'question': 'q', 'choices': ['an', 'the', 'a', '(none)'], 'answer': 'a'}),
      ('languages', {'question': 'q', 'choices': ['Ada', 'Lisp', 'Fortran', 'C'], 'answer': 'C'}),
      ('numbers', {'question': 'q', 'options': [1, 2, 3, 4], 'answer': 2}),
      ('parsinlu', {'question': 'q', 'candidates': _O, 'answer': 2}),
      ('mctest', {'question': 'q', 'answer_options': _DICT, 'answer': 'B'}),
      ('unknown_options', {'question': 'q', 'possible': _O, 'answer': 'B'}),
      ('options_by_text', {'question': 'q', 'possible': _O, 'answer': 'x'}),
      ('nextqa', {'question': 'q', **_BY_COLUMN, 'answer': 1}),
      ('nextqa_video', {'question': 'q', 'video': '42', **_BY_COLUMN, 'answer': 1}),
      ('nested_metadata', {'question': 'q', 'answer': 'a', 'metadata': {'final_answer': 'z'}}),
      ('nested_extra_info', {'question': 'q', 'answer': 'a', 'extra_info': {'expected': 'z'}}),
      ('answer_of_a_model', {'question': 'q', 'answer': 2, 'final_answer': 3}),
      ('wikitablequestions', {'question': 'q', 'answers': ['a'], 'table': {'rows': [['r']]}}),
      ('finqa', {'question': 'q', 'answer': '5%', 'pre_text': ['t'], 'post_text': ['t']}),
      ('multirc', {'paragraph': 'p', 'question': 'q', 'answer': 'a', 'label': 1}),
      ('drop', {'passage': 'p', 'question': 'q', 'answers_spans': {'spans': ['a', 'b']}}),
      ('narrativeqa', {'document': {'text': 'd'}, 'question': 'q', 'answers': ['a']}),
      ('gpqa_with_other_names', {'question': 'q', 'answer': 'c', 'incorrect_answers': ['a', 'b']}),
      (
          'marked_answers',
          {
              'question': 'q',
              'answers': [{'text': 'x', 'correct': False}, {'text': 'y', 'correct': True}],
          },
      ),
      ('numbers_by_column', {'question': 'q', 'a0': 5, 'a1': 6, 'a2': 7, 'answer': 1}),
      ('dialogue', {'question': 'q', 'answer': 'a', 'history': ['Hello.', 'Who?']}),
      ('two_questions', {'question': 'q', 'problem': 'p', 'answer': 'a'}),
      ('two_option_columns', {'question': 'q', 'options': _O, 'choices': _O[::-1], 'answer': 'A'}),
      ('countdown', {'question': 'q', 'answer': {'target': 65, 'numbers': [44, 19]}}),
      ('scienceqa', {'question': 'q', 'choices': _O, 'answer': 0, 'hint': 'h'}),
      ('truthfulqa_mc', {'question': 'q', 'mc1_targets': {'choices': _O, 'labels': [1, 0, 0, 0]}}),
      (
          'corrections',
          {'question': 'q', 'choices': _O, 'subject': 's', 'answer': 1, 'correct_answer': '2'},
      ),
  )
  def test_unclear_file_is_refused(self, row):
    for suffix in ('.parquet', '.jsonl'):
      self._check_refused(row, suffix)

  def _check_refused(self, row, suffix):
    path = self.write([row], suffix)
    with self.assertRaisesRegex(
        types.UserError,
        r'f[12].\w+:1: .*The columns are .*first row is \{.*--config.data.columns="\{',
    ) as caught:
      tasks.load_all(path)
    self.assertNotIn('\n', str(caught.exception))

  @parameterized.parameters('label', 'correct', 'answer')
  def test_file_tells_where_options_count_from(self, name):
    for values, letters in (((1, 2, 4), 'ABD'), ((0, 1, 3), 'ABD'), (('A', 'D', 'B'), 'ADB')):
      rows = _rows_with(name, values, choices=_O)
      found = tasks.load_all(self.write(rows)).tasks
      self.assertEqual(''.join(task.letter for task in found), letters)
    for values in ((1, 2, 3), (0, 4), (1, 5), ('A', 'E'), ('A', 1)):
      with self.assertRaises(types.UserError):
        tasks.load_all(self.write(_rows_with(name, values, choices=_O)))

  def test_truths_of_a_table_are_a_choice(self):
    rows = _rows_with('answer', ['True', 'False'], passage='p')
    found = tasks.load_all(self.write(rows, '.csv')).tasks
    self.assertEqual([(t.letter, t.answers) for t in found], [('A', ('yes',)), ('B', ('no',))])
    rows = _rows_with('answer', ['True', 'Lima'], passage='p')
    found = tasks.load_all(self.write(rows, '.csv')).tasks
    self.assertEqual([(t.letter, t.answers) for t in found], [('', ('True',)), ('', ('Lima',))])

  def test_parts_of_an_answer_are_no_alternatives(self):
    spans = {'text': ['Ann', 'Bob'], 'answer_start': [0, 8]}
    rows = _rows_with('answers', [spans, {'text': ['Ann'], 'answer_start': [0]}], context='c')
    loaded = tasks.load_all(self.write(rows))
    self.assertEqual([task.answers for task in loaded.tasks], [('Ann',)])
    self.assertIn('has parts that are apart', loaded.unanswered[0])

  def test_numbered_options_and_padding(self):
    row = {'question': 'q', 'options': {'1': 'x', '2': 'y'}, 'answer': 2}
    (task,) = tasks.load_all(self.write([row])).tasks
    self.assertEqual((task.letter, task.answers), ('2', ('y',)))
    rows = _rows_with('answer', ['A', 'C'], A='x', B=None, C='z')
    found = tasks.load_all(self.write(rows)).tasks
    self.assertEqual([task.answers for task in found], [('x',), ('z',)])
    self.assertEqual(found[0].options, (('A', 'x'), ('C', 'z')))

  def test_empty_option_is_left_out(self):
    for suffix in ('.jsonl', '.parquet'):
      rows = [
          {'question': f'{i}', 'option_a': 'x', 'option_b': 'y', 'option_c': ' ', 'answer': a}
          for i, a in enumerate('AB')
      ]
      found = tasks.load_all(self.write(rows, suffix)).tasks
      self.assertEqual(found[0].options, (('A', 'x'), ('B', 'y')))


_NEEDED = 'Anne is kind. All kind people are big. All big people who are kind are also green.'
_CHINESE = '安妮很善良。善良的人都很高大。善良而高大的人都是绿色的。' * 2


class UnreadTextTest(_FileTest):
  """A text that the question may need is read, or the file is refused."""

  def rows(self, name, texts):
    return [
        {'question': f'Is Anne number {i} green?', 'answer': answer, name: text}
        for i, (text, answer) in enumerate(zip(texts, ('red', 'blue', 'it'), strict=False))
    ]

  @parameterized.parameters(
      *(
          'theory contract para premises lecture summary evidence content code rules report ctxs '
          'knowledge support source_text vignette lyrics x info'
      ).split(),
      'metadata.text',
  )
  def test_long_unread_text_is_refused(self, name):
    for texts in ([_NEEDED], [_NEEDED + str(i) for i in range(3)], [_CHINESE, _CHINESE[1:]]):
      rows = self.rows(name.partition('.')[0], texts)
      if '.' in name:
        rows = [row | {'metadata': {'text': row['metadata']}} for row in rows]
      for suffix in ('.jsonl', '.parquet'):
        path = self.write(rows, suffix)
        with self.assertRaisesRegex(
            types.UserError, f"column {name!r} is not read.*--config.data.columns=.*{name}'"
        ):
          tasks.load_all(path)
      columns = {'question': 'question', 'answers': 'answer'}
      self.assertLen(tasks.load_all(path, columns).tasks, len(texts))
      found = tasks.load_all(path, columns | {'context': name}).tasks
      expected = [f'{text}\nIs Anne number {i} green?' for i, text in enumerate(texts)]
      self.assertEqual([task.question for task in found], expected)

  def test_prose_is_not_suggested_as_an_answer(self):
    path = self.write([{'problem': f'Is {i} even?', 'solution': _NEEDED} for i in range(2)])
    with self.assertRaisesRegex(types.UserError, "'question': 'problem', 'answers': 'COLUMN'"):
      tasks.load_all(path)

  def test_lists_and_rare_texts_count(self):
    for values in (
        [[{'title': 't', 'text': _NEEDED}], [{'title': 't', 'text': _NEEDED[1:]}]],
        [[_NEEDED], [_NEEDED, 'x']],
        [None, _NEEDED],
    ):
      with self.assertRaisesRegex(types.UserError, "column 'docs' is not read"):
        tasks.load_all(self.write(self.rows('docs', values)))
    columns = {'question': 'question', 'answers': 'answer', 'context': 'docs'}
    with self.assertRaisesRegex(types.UserError, "column 'docs' is .*: a text is needed"):
      tasks.load_all(self.write(self.rows('docs', [[_NEEDED]])), columns)

  def test_constant_and_short_texts_are_ignored(self):
    for texts in ([_NEEDED, _NEEDED], ['Geography', 'Physics'], ['a b', 'Is it?']):
      self.assertLen(tasks.load_all(self.write(self.rows('notes', texts))).tasks, 2)
    row = {'question': f'{_NEEDED} {_NEEDED} Is Anne green?', 'answer': 'it', 'notes': _NEEDED}
    self.assertLen(tasks.load_all(self.write([row])).tasks, 1)  # shorter than the question

  def test_own_file_with_gold_needs_no_texts(self):
    row = {'question': 'Is Anne green?', 'answers': ['it'], 'theory': _NEEDED}
    with self.assertRaisesRegex(types.UserError, "column 'theory' is not read"):
      tasks.load_all(self.write([row]))
    self.assertLen(tasks.load_all(self.write([row | {'gold': ['p1']}])).tasks, 1)


class UserColumnsTest(_FileTest):

  @parameterized.parameters(
      ('She asked: Why? He said: rain.', 'Why?', 'She asked: Why? He said: rain.\nWhy?'),
      ('He fell because of the ice.', 'cause', 'He fell because of the ice.\ncause'),
      ('He fell just because', 'cause', 'He fell just because\ncause'),
      ('Ann has 3 cats. How many?', 'How many?', 'Ann has 3 cats. How many?'),
      ('Ann has 3 cats.', 'Ann has 3 cats. How many?', 'Ann has 3 cats. How many?'),
  )
  def test_context_is_kept_and_not_doubled(self, context, question, text):
    path = self.write([{'q': question, 'a': 'x', 'c': context}])
    (task,) = tasks.load_all(path, {'question': 'q', 'answers': 'a', 'context': 'c'}).tasks
    self.assertEqual(task.question, text)

  @parameterized.parameters((('B', 'A'),), (('option_b', 'option_a'),))
  def test_columns_of_options_in_another_order_are_refused(self, names):
    path = self.write([{'q': 'Which?', 'k': 'B', **dict(zip(names, 'yx'))}])
    columns = {'question': 'q', 'answers': 'k', 'answer_is': 'letter', 'options': names}
    with self.assertRaisesRegex(types.UserError, 'have the letters B, A, in another order'):
      tasks.load_all(path, columns)
    (task,) = tasks.load_all(path, columns | {'options': names[::-1]}).tasks
    self.assertEqual(task.answers, ('y',))

  @parameterized.parameters(('index0', 'C', 'y'), ('index1', 'B', 'x'), ('text', 'D', '2'))
  def test_user_says_what_an_answer_is(self, kind, letter, text):
    row = {'q': 'Which?', 'info': {'gold': 2}, 'c': ['w', 'x', 'y', '2'], 'model': 'A', 'nr': 7}
    columns = {'question': 'q', 'answers': 'info.gold', 'options': 'c', 'answer_is': kind}
    path = self.write([row])
    (task,) = tasks.load_all(path, columns | {'id': 'nr'}).tasks
    self.assertEqual((task.id, task.letter, task.answers), ('7', letter, (text,)))
    with self.assertRaisesRegex(types.UserError, 'f1.jsonl:1: no column .wrong.'):
      tasks.load_all(path, columns | {'question': 'wrong'})

  def test_options_in_columns_and_a_split(self):
    row = {'q': 'Which?', 'a': 'B', **_BY_COLUMN, 'fold': 'dev', 'text': 'Long.'}
    columns = {'question': 'q', 'answers': 'a', 'options': [*_BY_COLUMN], 'split': 'fold'}
    path = self.write([row])
    (task,) = tasks.load_tasks(path, 'dev', columns | {'passages': 'text'})
    self.assertEqual((task.letter, task.answers, task.split), ('B', ('x',), 'dev'))
    self.assertLen(task.gold, 1)
    passages = tasks.load_corpus(path, columns | {'passages': 'text'})
    self.assertEqual([passage.text for passage in passages], ['Long.'])

  def test_user_answers_may_be_several_columns(self):
    row = {'q': 'Which?', 'a': 'x', 'b': ['y', 'z'], 'answer': 'other', 'answer_aliases': ['o']}
    row['context'] = 'Long.'
    (task,) = tasks.load_all(self.write([row]), {'question': 'q', 'answers': ['a', 'b']}).tasks
    self.assertEqual((task.answers, task.gold), (('x', 'y', 'z'), ()))

  def test_kind_that_does_not_fit_is_refused(self):
    columns = {'question': 'question', 'answers': 'answer', 'options': 'c', 'answer_is': 'index1'}
    path = self.write(_rows_with('answer', [1, 0], c=_O))
    with self.assertRaisesRegex(types.UserError, "f1.jsonl:2: column 'answer' is 0: none of the 4"):
      tasks.load_all(path, columns)

  @parameterized.parameters(
      ({'quesion': 'q'}, 'allowed keys are question'),
      ({'question': 3, 'answers': 'a'}, "'question' must be the name of a column"),
      ({'question': 'q'}, "give 'question' and 'answers'"),
      ({'question': 'q', 'answers': 'a', 'tools': 't'}, "'tools' does not go with these"),
      ({'question': 'q', 'answers': 'a', 'answer_is': 'index2'}, "'answer_is' must be one of text"),
      ({'question': 'q', 'answers': 'a', 'answer_is': 'letter'}, "which needs 'options'"),
      ({'messages': 'm', 'question': 'q', 'answers': 'a'}, "give 'question' and 'answers', or for"),
  )
  def test_setting_is_checked(self, columns, complaint):
    config = config_lib.Config()
    config.data.columns = columns
    config.data.source = 'x.jsonl'
    with self.assertRaisesRegex(types.UserError, f'^config.data.columns=.*{complaint}'):
      validation.validate(config)


class DocsTest(absltest.TestCase):

  def test_each_layout_is_in_the_docs(self):
    text = pathlib.Path(__file__).parents[2].joinpath('docs', 'data.md').read_text()
    for layout in layouts.LAYOUTS:
      for name in layout.name.split(', '):
        self.assertIn(name, text)
      self.assertTrue(layout.source and layout.date, layout)

  def test_layouts_are_unique(self):
    self.assertLen({layout.name for layout in layouts.LAYOUTS}, len(layouts.LAYOUTS))


if __name__ == '__main__':
  absltest.main()
