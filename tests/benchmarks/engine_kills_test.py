"""The benchmark that kills trainer and engines counts lost and doubled questions."""

import json
import os
import tempfile

from absl.testing import absltest
from absl.testing import parameterized

from benchmarks import engine_kills

QUESTIONS = [f'q{i}' for i in range(24)]


class CountTest(parameterized.TestCase):

  @parameterized.named_parameters(
      ('none', {}, 0, 0, 0),
      ('record_is_missing', {2: QUESTIONS[8:15]}, 1, 0, 1),
      ('record_is_written_twice', {2: QUESTIONS[8:16] + QUESTIONS[8:9]}, 0, 1, 1),
      ('question_replaces_another', {2: QUESTIONS[:1] + QUESTIONS[9:16]}, 1, 1, 0),
      ('last_epoch_repeats_an_update', {5: QUESTIONS[:8]}, 0, 8, 0),
  )
  def test_counts(self, changes, lost, doubled, uneven):
    workdir = self.enterContext(tempfile.TemporaryDirectory())
    os.mkdir(os.path.join(workdir, 'episodes'))
    for update in range(1, 6):  # an epoch of three updates, and a part of the second
      first = 8 * ((update - 1) % 3)
      tasks = changes.get(update, QUESTIONS[first : first + 8])
      path = os.path.join(workdir, 'episodes', f'train_{update:06d}.jsonl')
      with open(path, 'w', encoding='utf-8') as file:
        file.writelines(
            json.dumps({'task': task, 'failed': task == QUESTIONS[0]}) + '\n' for task in tasks
        )
    counts = engine_kills.count(workdir, 5, QUESTIONS)
    failed = counts.pop('failed')
    expected = {'updates': 5, 'epochs': 1, 'lost': lost, 'doubled': doubled, 'uneven': uneven}
    self.assertEqual(counts, expected)
    self.assertGreaterEqual(failed, 2)  # the first question of each epoch


if __name__ == '__main__':
  absltest.main()
