"""Tests of stppo_jax.layout_fit: a file of questions is read right, or refused."""

import collections
import csv
import json
import pathlib
import random
import tempfile

from absl.testing import absltest
from absl.testing import parameterized

from stppo_jax import layout_fit
from stppo_jax import row_files
from stppo_jax import tasks
from stppo_jax import types

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
    if suffix == '.csv':
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
    print(counts)
    self.assertGreater(counts['right'], _NUM_FILES / 3)


if __name__ == '__main__':
  absltest.main()
