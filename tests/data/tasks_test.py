"""Tests of stppo_jax.data.tasks, and of the knowledge set that comes with the package."""

import collections
import importlib.util
import json
import pathlib
import tempfile
import unittest

from absl.testing import absltest
from absl.testing import parameterized

from scripts.knowledge import make
from scripts.knowledge import sources
from stppo_jax import types
from stppo_jax.data import tasks

_SHARED = pathlib.Path(__file__).resolve().parents[3] / 'shared' / 'data'

_ROW = {
    'id': 'q1',
    'dataset': 'geo',
    'split': 'train',
    'hops': 2,
    'question': 'Where is Lima?',
    'answers': ['Peru'],
    'gold': ['p1', 'p2'],
    'steps': [{'q': 'country of Lima', 'a': 'Peru', 'p': 'p1'}],
}
_CHOICE = {
    'id': 'q2',
    'split': 'train',
    'question': 'Which one?',
    'options': {'B': 'no', 'A': 'yes'},
    'answer': 'B',
    'answers': ['no'],
}


def _installed(*packages):
  return all(importlib.util.find_spec(package) for package in packages)


class _FileTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    folder = tempfile.TemporaryDirectory()
    self.addCleanup(folder.cleanup)
    self.folder = pathlib.Path(folder.name)

  def write(self, name, *rows):
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    (self.folder / name).write_text('\n'.join(lines) + '\n', encoding='utf-8')
    return str(self.folder / name)


class LoadTasksTest(_FileTest):

  def test_reads_every_field(self):
    self.write('qa.jsonl', _ROW, _CHOICE)
    first, second = tasks.load_tasks(str(self.folder), 'train')
    self.assertEqual(
        first,
        types.Task(
            id='q1',
            question='Where is Lima?',
            answers=('Peru',),
            dataset='geo',
            split='train',
            hops=2,
            gold=('p1', 'p2'),
            steps=(('country of Lima', 'Peru'),),
        ),
    )
    self.assertEqual(second.hops, 0)  # unknown
    self.assertEqual(second.options, (('A', 'yes'), ('B', 'no')))
    self.assertEqual((second.letter, second.answers), ('B', ('no',)))

  def test_other_columns_keep_a_row_our_own(self):
    row = {'id': 'q1', 'question': 'q', 'answers': ['a', 'b'], 'split': 'train'}
    for extra in ({'context': 3}, {'label': 'easy'}, {'label': 9}, {'context': 'c', 'gold': ['p']}):
      (task,) = tasks.load_tasks(self.write('qa.jsonl', {**row, **extra}), 'train')
      self.assertEqual((task.answers, task.gold), (('a', 'b'), tuple(extra.get('gold', ()))))

  @parameterized.parameters(
      ({'is_impossible': True}, "column 'is_impossible' is True"),
      ({'is_impossible': 'true'}, "column 'is_impossible' is 'true'"),
      ({'answerable': False}, "column 'answerable' is False"),
      ({'answerable': 0}, "column 'answerable' is 0"),
      ({'image': 'x.png'}, "column 'image' holds an image, and only text is read"),
      ({'is_impossible': True, 'answers': []}, "column 'is_impossible' is True"),
  )
  def test_row_without_answer_is_left_out(self, mark, reason):
    row = {'question': 'q', 'answers': ['yes'], 'split': 'train'}
    other = {'is_impossible': False, 'answerable': True, 'image': None}
    path = self.write('qa.jsonl', {'id': 1, **row, **other}, {'id': 2, **row, **mark})
    loaded = tasks.load_all(path)
    self.assertEqual([task.id for task in loaded.tasks], ['1'])
    self.assertEqual(loaded.unanswered, [f'{path}:2: {reason}'])

  def test_lone_surrogates_are_replaced_everywhere(self):
    row = {
        **_ROW,
        'id': 'q\ud800',
        'question': 'Where\udc00?',
        'answers': ['P\ud83d', '\U0001f600'],
    }
    choice = {**_CHOICE, 'options': {'A': 'y\ud800', 'B': 'n'}, 'dataset': 'd\ud800'}
    self.write('qa.jsonl', row, choice)
    self.write('corpus.jsonl', {'id': 'p\ud800', 'title': 't\ud800', 'text': 'x\ud800'})
    first, second = tasks.load_tasks(str(self.folder), 'train')
    self.assertEqual((first.id, first.question), ('q?', 'Where??'))
    self.assertEqual(first.answers, ('P?', '\U0001f600'))
    self.assertEqual((second.options[0], second.dataset), (('A', 'y?'), 'd?'))
    (passage,) = tasks.load_corpus(str(self.folder))
    self.assertEqual(passage, types.Passage('p?', 't?', 'x?'))
    task = types.Task('q\ud800', options=(('A', 'y\ud800'),), seed=3)
    cleaned = types.Task('q?', options=(('A', 'y?'),), seed=3)
    self.assertEqual(types.without_surrogates(task), cleaned)

  @parameterized.parameters(
      ({'question': None}, "field 'question' is missing: must be of type str"),
      ({'question': ' '}, "field 'question' is empty"),
      ({'question': 7}, "field 'question' is 7: must be of type str"),
      ({'answers': 'Peru'}, "field 'answers' is 'Peru': must be a list of str"),
      ({'answers': []}, "field 'answers' is empty: at least one text"),
      ({'answers': [1]}, r"field 'answers' is \[1\]: must be a list of str"),
      ({'hops': 'two'}, "field 'hops' is 'two': must be of type int"),
      ({'hops': True}, "field 'hops' is True"),
      ({'gold': 'p1'}, "field 'gold' is 'p1'"),
      ({'steps': [['q', 'a']]}, "field 'steps' is"),
      ({'steps': [{'question': 'q'}]}, "'q' is missing"),
      ({'options': {'A': 'yes'}}, "field 'answer' is missing"),
      ({'options': {'A': 'yes'}, 'answer': 'C'}, "the right option is 'C': one of A is needed"),
      ({'options': ['yes']}, "field 'options' is"),
      ({'options': {'A': 1}, 'answer': 'A'}, "field 'options' is"),
  )
  def test_malformed_row_names_file_line_and_field(self, change, complaint):
    path = self.write('qa.jsonl', _ROW, {**_ROW, **change})
    with self.assertRaisesRegex(types.UserError, 'qa.jsonl:2: ' + complaint) as caught:
      tasks.load_tasks(path, 'train')
    self.assertNotIn('\n', str(caught.exception))

  @parameterized.parameters('{"id": ', '[1, 2]', '"text"')
  def test_line_that_is_not_an_object(self, line):
    path = self.write('qa.jsonl', _ROW, '', line)
    with self.assertRaisesRegex(types.UserError, r'qa.jsonl:3: .*JSON'):
      tasks.load_tasks(path, 'train')

  def test_missing_file_says_what_to_give(self):
    with self.assertRaisesRegex(types.UserError, 'no such file; give "embedded"'):
      tasks.load_tasks(str(self.folder), 'train')
    with self.assertRaisesRegex(types.UserError, 'train.parquet: no such file;.* `hf download'):
      tasks.load_tasks('nowhere/train.parquet', 'train')
    with self.assertRaisesRegex(types.UserError, 'of type .jsonl, .*.parquet, .* is needed'):
      tasks.load_tasks(self.write('qa.xlsx', 'a,b'), 'train')


@unittest.skipUnless(_installed('pyarrow'), 'pyarrow is not installed')
class ParquetTest(_FileTest):

  def write_parquet(self, *rows, name='train.parquet'):
    import pyarrow
    from pyarrow import parquet

    path = str(self.folder / name)
    parquet.write_table(pyarrow.Table.from_pylist(list(rows)), path)
    return path

  def row(self, asked='who wrote Faust?', **changes):
    prompt = f'Answer the question. Question: an example\nQuestion: {asked}\n'
    return {
        'data_source': 'nq',
        'prompt': [{'role': 'user', 'content': prompt}],
        'ability': 'fact-reasoning',
        'reward_model': {'style': 'rule', 'ground_truth': {'target': ['Goethe', 'J. Goethe']}},
        'extra_info': {'split': 'train', 'index': 7},
        **changes,
    }

  def test_search_r1_columns(self):
    path = self.write_parquet(self.row(), self.row(extra_info={'split': 'test', 'index': 8}))
    self.assertEqual(
        tasks.load_tasks(path, 'train'),
        [
            types.Task(
                id='nq-train-7',
                question='who wrote Faust?',
                answers=('Goethe', 'J. Goethe'),
                dataset='nq',
                split='train',
            )
        ],
    )

  def test_metadata_of_search_r1_changes_no_task(self):
    metadata = {
        'supporting_facts': {'title': ['Faust']},
        'context': {'title': ['Faust'], 'sentences': [['A play.']]},
    }
    last = self.row(extra_info={'split': 'test', 'index': 8})
    plain = tasks.load_tasks(self.write_parquet(self.row(), last), 'train')
    row = self.row(id='train_0', golden_answers=['Goethe'], metadata=metadata)
    path = self.write_parquet(row, last, name='more.parquet')
    self.assertEqual(tasks.load_tasks(path, 'train'), plain)
    self.assertEqual([p.title for p in tasks.load_corpus(path)], ['Faust'])

  def test_question_column_wins_over_the_prompt(self):
    path = self.write_parquet(self.row(question='Who was it?'))
    self.assertEqual(tasks.load_tasks(path, 'train')[0].question, 'Who was it?')

  @parameterized.parameters(
      ({'reward_model': {'style': 'rule', 'ground_truth': {'target': []}}}, 'reward_model'),
      ({'reward_model': {'style': 'rule'}}, 'reward_model'),
      ({'reward_model': None}, 'reward_model'),
      ({'prompt': [{'role': 'system', 'content': 'x'}]}, 'prompt'),
      ({'prompt': [{'role': 'user', 'content': 'Question: '}]}, 'prompt'),
      ({'prompt': None}, 'prompt'),
  )
  def test_malformed_row(self, change, field):
    path = self.write_parquet(self.row(**change))
    with self.assertRaisesRegex(types.UserError, rf"train.parquet:1: column '{field}'"):
      tasks.load_tasks(path, 'train')

  def test_a_file_that_is_not_parquet(self):
    with self.assertRaisesRegex(types.UserError, 'not a parquet file'):
      tasks.load_tasks(self.write('qa.parquet', 'text'), 'train')

  def test_rows_without_index_get_unique_ids(self):
    paths = [
        self.write_parquet(*[self.row(name, extra_info=None)] * 2, name=f'{name}.parquet')
        for name in ('train', 'more')
    ]
    ids = [task.id for task in tasks.load_tasks(','.join(paths), 'train')]
    self.assertLen(set(ids), 4)
    self.assertEqual(ids[0], 'nq--0')

  @parameterized.parameters(
      'Who played in Question: Time?', 'Question: Time aired when?', 'Is "Question:" a word?'
  )
  def test_a_question_may_hold_the_word(self, question):
    start = 'Think first. For example, <answer> Lima </answer>. Question: '
    prompts = [[{'role': 'user', 'content': f'{start}{q}\n'}] for q in (question, 'Who?')]
    path = self.write_parquet(
        *(self.row(prompt=p, extra_info={'index': i}) for i, p in enumerate(prompts))
    )
    found = [task.question for task in tasks.load_tasks(path, 'train')]
    self.assertEqual(found, [question, 'Who?'])


class HostileRowTest(_FileTest):

  def row(self, **changes):
    return {'id': 'q1', 'question': 'Where?', 'answers': ['Lima'], 'split': 'train'} | changes

  @parameterized.parameters(
      ({'answers': ['']}, "field 'answers' is"),
      ({'answers': ['Lima', ' ']}, "field 'answers' is"),
      ({'hops': -1}, "field 'hops' is -1"),
      ({'id': 'q0'}, "field 'id' is 'q0' a second time"),
      ({'dataset': 'all'}, "field 'dataset' is 'all'"),
      ({'dataset': 'macro'}, "field 'dataset' is 'macro'"),
  )
  def test_is_refused(self, change, complaint):
    path = self.write('qa.jsonl', self.row(id='q0'), self.row(**change))
    with self.assertRaisesRegex(types.UserError, 'qa.jsonl:2: ' + complaint):
      tasks.load_tasks(path, 'train')

  def test_a_huge_value_is_shown_in_part(self):
    path = self.write('qa.jsonl', self.row(question=['x' * 10_000_000]))
    with self.assertRaises(types.UserError) as caught:
      tasks.load_tasks(path, 'train')
    self.assertLess(len(str(caught.exception)), 1000)

  def test_questions_of_both_splits_are_a_warning(self):
    path = self.write('qa.jsonl', {k: v for k, v in self.row().items() if k != 'split'})
    both = [tasks.load_tasks(path, split) for split in ('train', 'dev')]
    with self.assertLogs('absl', 'WARNING') as logs:
      tasks.warn_of_overlap(*both)
    self.assertIn('1 of 1 held-out questions', logs.output[0])


class LoadCorpusTest(_FileTest):

  @parameterized.parameters(
      '"Lima"\nIn Peru.',
      'A single line.',
      '"Heroes"\na\nb',
      '""\na\nb',
      '""Heroes" (album)"\nBy Bowie.',
  )
  def test_contents_are_written_as_they_were_read(self, contents):
    (passage,) = tasks.load_corpus(self.write('corpus.jsonl', {'id': 1, 'contents': contents}))
    self.assertEqual(tasks.write_contents(passage), contents)

  @parameterized.parameters(
      ('Lima', 'In Peru.', 'Lima', 'In Peru.'),
      ('Lima', 'In Peru,\nby the sea.', 'Lima', 'In Peru,\nby the sea.'),
      ('Lima', 'Lima\nIn Peru.', 'Lima', 'In Peru.'),
      ('lima', '"Lima"\nIn Peru.', 'Lima', 'In Peru.'),
      (None, 'Lima\nIn Peru.', 'Lima', 'In Peru.'),
      (['Lima'], 'In Peru.', '', 'In Peru.'),
  )
  def test_title_beside_contents_is_read(self, own_title, contents, title, text):
    path = self.write('corpus.jsonl', {'id': 1, 'title': own_title, 'contents': contents})
    (passage,) = tasks.load_corpus(path)
    self.assertEqual((passage.title, passage.text), (title, text))

  @parameterized.parameters(
      ({'id': 'p2', 'title': 'Lima'}, "field 'text' is missing"),
      ({'title': 'Lima', 'id': 1.5, 'text': 'x'}, "field 'id' is 1.5"),
      ({'id': 'p1', 'title': 'Lima', 'text': 'x'}, "field 'id' is 'p1' a second time"),
      ({'id': 'p2', 'contents': 3}, "field 'contents' is 3"),
  )
  def test_malformed_row(self, row, complaint):
    self.write('corpus.jsonl', {'id': 'p1', 'title': 'a', 'text': 'b'}, row)
    with self.assertRaisesRegex(types.UserError, 'corpus.jsonl:2: ' + complaint):
      tasks.load_corpus(str(self.folder))

  @parameterized.parameters(
      ('corpus/corpus.jsonl', 'queries/queries.jsonl'),
      ('corpus/corpus-00000-of-00001.jsonl', 'queries/queries-00000-of-00001.jsonl'),
      ('corpus/test-0.jsonl', 'queries/test-0.jsonl'),
      ('corpus.jsonl', 'queries.jsonl'),
      ('passages.jsonl', 'queries.dev.jsonl'),
      ('docs/docs.jsonl', 'qrels/test.jsonl'),
      ('collection.jsonl', 'topics.jsonl'),
  )
  def test_queries_of_a_folder_are_no_passages(self, corpus, queries):
    """The hub has the files of BEIR in folders."""
    for name, text in ((corpus, 'In Peru.'), (queries, 'Where is Lima?')):
      (self.folder / name).parent.mkdir(exist_ok=True)
      self.write(name, {'_id': name, 'title': '', 'text': text})
    passages = tasks.load_corpus(str(self.folder))
    self.assertEqual([passage.text for passage in passages], ['In Peru.'])
    alone = tasks.load_corpus(str(self.folder / queries))  # the user names this file
    self.assertEqual([passage.text for passage in alone], ['Where is Lima?'])

  def test_all_files_of_corpus_folder_are_read(self):
    (self.folder / 'corpus').mkdir()
    for name in 'ab':
      self.write(f'corpus/{name}.jsonl', {'_id': name, 'text': name})
    passages = tasks.load_corpus(str(self.folder))
    self.assertEqual([passage.text for passage in passages], ['a', 'b'])

  def test_name_hides_no_passages_of_questions(self):
    row = {'question': 'q', 'answer': 'a', 'context': 'In Peru.'}
    self.write('questions_train.jsonl', row)
    passages = tasks.load_corpus(str(self.folder))
    self.assertEqual([passage.text for passage in passages], ['In Peru.'])

  def test_passages_without_ids_and_texts(self):
    rows = [{'title': 'a', 'text': 'b'}, {'title': None, 'text': ''}, {'title': 'c', 'text': ''}]
    path = self.write('wiki.jsonl', *rows)
    with self.assertLogs('absl', 'INFO') as logs:
      passages = tasks.load_corpus(path)
    expected = [types.Passage('wiki-1', 'a', 'b'), types.Passage('wiki-3', 'c', '')]
    self.assertEqual(passages, expected)
    self.assertRegex(logs.output[0], '1 passages without a text are left out: .*wiki.jsonl:2')

  def test_empty_file(self):
    with self.assertRaisesRegex(types.UserError, 'no passages'):
      tasks.load_corpus(self.write('corpus.jsonl'))


class TaskStreamTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.tasks = [types.Task(str(i), 'q', ('a',)) for i in range(7)]

  def ids(self, batch, steps, seed=0):
    """The ids of the updates `steps`, each taken from a stream of its own."""
    return [t.id for step in steps for t in tasks.TaskStream(self.tasks, batch, seed).take(step)]

  @parameterized.parameters(1, 3, 7, 10)
  def test_each_epoch_is_a_permutation(self, batch):
    # 7 questions: with batches of 3, update 2 takes the last of epoch 0 and two of epoch 1.
    ids = self.ids(batch, range(21))
    everyone = sorted(t.id for t in self.tasks)
    epochs = [ids[i : i + 7] for i in range(0, 21 * batch // 7 * 7, 7)]
    for epoch in epochs:
      self.assertEqual(sorted(epoch), everyone)
    self.assertGreater(len({tuple(epoch) for epoch in epochs}), 1)

  def test_resuming_anywhere_continues_the_same_order(self):
    stream = tasks.TaskStream(self.tasks, 3, 5)
    whole = [[t.id for t in stream.take(step)] for step in range(12)]
    for start in range(12):  # epoch ends lie within updates 2, 4, 9, 11 and after 6
      resumed = tasks.TaskStream(self.tasks, 3, 5)
      self.assertEqual([[t.id for t in resumed.take(s)] for s in range(start, 12)], whole[start:])

  def test_the_order_does_not_depend_on_the_batch(self):
    self.assertEqual(self.ids(2, range(21)), self.ids(6, range(7)))

  def test_seeds_differ(self):
    self.assertNotEqual(self.ids(7, [0], seed=0), self.ids(7, [0], seed=1))


class EmbeddedTest(parameterized.TestCase):

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    cls.corpus = {p.id: p for p in tasks.load_corpus('embedded')}
    cls.splits = {s: tasks.load_tasks('embedded', s) for s in ('train', 'dev', 'test')}
    cls.everything = [task for split in cls.splits.values() for task in split]

  def test_titles_are_unique_and_passages_short(self):
    self.assertLen({p.title for p in self.corpus.values()}, len(self.corpus))
    for passage in self.corpus.values():
      self.assertLess(len(passage.text.split()), 60, passage)
      self.assertTrue((passage.title + passage.text).isascii(), passage)

  def test_sizes(self):
    files = [tasks.EMBEDDED / name for name in ('corpus.jsonl', 'qa.jsonl', 'LICENSES.md')]
    self.assertLess(sum(file.stat().st_size for file in files), 3_000_000)
    self.assertBetween(len(self.splits['train']), 2000, 4000)
    self.assertBetween(len(self.splits['dev']), 200, 300)
    self.assertBetween(len(self.splits['test']), 300, 400)
    for split in self.splits.values():
      hops = collections.Counter(task.hops for task in split)
      for count, share in ((1, 0.35), (2, 0.25), (3, 0.15)):
        self.assertGreaterEqual(hops[count] / len(split), share)
      self.assertEqual({task.dataset for task in split}, {'geo', 'elements', 'medical'})

  def test_ids_and_questions_are_unique(self):
    self.assertLen({task.id for task in self.everything}, len(self.everything))
    self.assertLen({task.question for task in self.everything}, len(self.everything))

  def test_splits_share_no_subject_and_no_bridge(self):
    used = {s: {p for t in split for p in t.gold} for s, split in self.splits.items()}
    self.assertEmpty(used['train'] & used['dev'])
    self.assertEmpty(used['train'] & used['test'])
    self.assertEmpty(used['dev'] & used['test'])

  def test_every_hop_is_answered_by_its_own_passage(self):
    for task in self.everything:
      self.assertLen(task.gold, task.hops)
      self.assertLen({*task.gold}, task.hops)
      self.assertLen(task.steps, task.hops)
      self.assertIn(self.corpus[task.gold[0]].title, task.question)
      for i, ((_, answer), passage) in enumerate(zip(task.steps, task.gold)):
        self.assertIn(answer, self.corpus[passage].text)
        if i + 1 < task.hops:
          self.assertEqual(answer, self.corpus[task.gold[i + 1]].title)
      for answer in task.answers:
        self.assertIn(answer, self.corpus[task.gold[-1]].text)

  def test_multiple_choice(self):
    choices = [task for task in self.everything if task.options]
    letters = collections.Counter(task.letter for task in choices)
    self.assertEqual([*sorted(letters)], ['A', 'B', 'C', 'D'])
    self.assertLess(max(letters.values()), 0.3 * len(choices))
    for task in choices:
      self.assertLen({text for _, text in task.options}, 4)
      self.assertEqual(task.answers, (dict(task.options)[task.letter],))

  def test_held_out_wordings_occur_in_train(self):
    def wording(task):
      return task.question.replace(self.corpus[task.gold[0]].title, '{}')

    known = {wording(task) for task in self.splits['train']}
    for split in ('dev', 'test'):
      self.assertEmpty({wording(task) for task in self.splits[split]} - known)

  @unittest.skipUnless(_installed('bm25s'), 'bm25s is not installed')
  def test_a_title_finds_its_passage(self):
    import bm25s

    passages = list(self.corpus.values())
    gold = sorted({p for task in self.everything for p in task.gold})
    index = bm25s.BM25()
    index.index(
        bm25s.tokenize([f'{p.title}\n{p.text}' for p in passages], show_progress=False),
        show_progress=False,
    )
    found, _ = index.retrieve(
        bm25s.tokenize([self.corpus[p].title for p in gold], show_progress=False),
        k=2,
        show_progress=False,
    )
    hits = sum(p in [passages[i].id for i in row] for p, row in zip(gold, found))
    self.assertGreaterEqual(hits / len(gold), 0.97)

  @unittest.skipUnless(_installed(*sources.PACKAGES), 'the sources are not installed')
  def test_the_maker_is_deterministic(self):
    made = []
    for _ in range(2):
      with tempfile.TemporaryDirectory() as folder:
        make.make(pathlib.Path(folder))
        made.append({p.name: p.read_bytes() for p in sorted(pathlib.Path(folder).iterdir())})
    self.assertEqual(made[0], made[1])
    self.assertEqual(set(made[0]), {'corpus.jsonl', 'qa.jsonl', 'LICENSES.md'})


@unittest.skipUnless(_SHARED.is_dir(), 'the folder of real questions is not there')
class RealQuestionsTest(parameterized.TestCase):

  @parameterized.parameters('general', 'medical')
  def test_loads_and_gold_passages_exist(self, name):
    questions = tasks.load_tasks(str(_SHARED / f'{name}_qa.jsonl'), 'train')
    known = {p.id for p in tasks.load_corpus(str(_SHARED / f'{name}_corpus.jsonl'))}
    self.assertNotEmpty(questions)
    for task in questions:
      self.assertTrue(task.gold and known.issuperset(task.gold), task)
    self.assertTrue(any(t.options if name == 'medical' else t.steps for t in questions))


if __name__ == '__main__':
  absltest.main()
