"""Tests of the mode check-data: what is understood of a file of data."""

import contextlib
import io
import json
import pathlib
import tempfile

from absl.testing import absltest

from stppo_jax.cli import entry

_QUESTION = {'question': 'Capital of Peru?', 'choices': ['Lima', 'Oslo', 'Rome'], 'split': 'train'}
_CHAT = [{'role': 'user', 'content': 'Hello'}, {'role': 'assistant', 'content': 'Good day'}]


class CheckDataTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    self.folder = self.enterContext(tempfile.TemporaryDirectory())

  def check(self, rows, *flags):
    """Returns (exit code, standard output, standard error) of the command."""
    path = pathlib.Path(self.folder, 'data.jsonl')
    path.write_text('\n'.join(map(json.dumps, rows)), encoding='utf-8')
    output = io.StringIO()
    errors = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
      code = entry.run(['run.py', 'check-data', str(path), *flags])
    return code, output.getvalue(), errors.getvalue()

  def test_questions(self):
    rows = [
        {**_QUESTION, 'answer': 0},
        {**_QUESTION, 'answer': 2, 'split': 'dev'},
        {**_QUESTION, 'answer': None},
    ]
    code, text, _ = self.check(rows)
    self.assertIsNone(code)
    for part in (
        "question in 'question'",
        "answer in 'answer' (the number of an option, from 0)",
        '  A  Lima <- right\n  B  Oslo\n  C  Rome\n',
        '2 questions: train 1, dev 1\n1 rows left out',
        "1: column 'answer' is empty",
    ):
      self.assertIn(part, text)

  def test_named_columns(self):
    flags = ['--config.data.columns.question=question', '--config.data.columns.answers=answer']
    flags += ['--config.data.columns.options=choices', '--config.data.columns.answer_is=index1']
    _, text, _ = self.check([{**_QUESTION, 'answer': 2}], *flags)
    self.assertIn('your columns (config.data.columns)', text)
    self.assertIn('  B  Oslo <- right', text)

  def test_line_of_a_refusal_settles_it(self):
    code, _, error = self.check([{**_QUESTION, 'answer': 1}])
    self.assertEqual(code, 2)
    self.assertEqual(error.count('\n'), 1)
    line = error.partition('Name the columns: ')[2].strip()
    self.assertStartsWith(line, '--config.data.columns="{')
    flag = (
        line.partition('; see')[0].replace('"', '').replace('letter|index0|index1|text', 'index0')
    )
    code, text, _ = self.check([{**_QUESTION, 'answer': 1}], flag)
    self.assertIsNone(code)
    self.assertIn('  B  Oslo <- right', text)

  def test_accepted_answers(self):
    _, text, _ = self.check([{'question': 'Who?', 'answers': ['Ann', 'A. Bell']}])
    self.assertIn('  accepted: Ann | A. Bell', text)
    self.assertIn('1 questions: in every split 1\n0 rows left out', text)

  def test_conversations(self):
    rows = [{'messages': _CHAT, 'label': 1}, {'messages': _CHAT, 'label': 0}]
    _, text, _ = self.check(rows)
    for part in (
        'conversations in messages',
        '  user: Hello\n  assistant (imitated): Good day',
        '1 conversations: no split 1\n1 rows left out',
        "1: 'label' is false",
    ):
      self.assertIn(part, text)
    code, _, error = self.check([{'chosen': _CHAT, 'rejected': _CHAT}])
    self.assertEqual(code, 2)
    self.assertIn('several columns may be the conversation: chosen, rejected', error)
    _, text, _ = self.check(
        [{'chosen': _CHAT, 'rejected': _CHAT}], '--config.data.columns.messages=chosen'
    )
    self.assertIn('conversations in chosen', text)

  def test_log_of_a_run_has_layout_and_numbers(self):
    from stppo_jax.data import row_files
    from stppo_jax.data import tasks

    row_files.log_once.cache_clear()
    path = pathlib.Path(self.folder, 'q.jsonl')
    path.write_text(json.dumps({**_QUESTION, 'answer': 0}), encoding='utf-8')
    with self.assertLogs('absl', 'INFO') as logs:
      tasks.load_tasks(str(path), 'train')
      tasks.load_tasks(str(path), 'train')
    self.assertLen(logs.output, 2)
    self.assertIn('the number of an option, from 0', logs.output[0])
    self.assertIn('1 questions (train 1)', logs.output[1])


if __name__ == '__main__':
  absltest.main()
