"""Tests of the in-memory word search: ranking, ties, and the queries that find nothing."""

import contextlib
import io
import math
import os
import subprocess
import sys

from absl.testing import absltest
from absl.testing import parameterized

from stppo_jax import types
from stppo_jax.retrieval import bm25

PASSAGES = (
    types.Passage('p0', 'France', 'A country in Europe. Its capital is Paris.'),
    types.Passage('p1', 'Paris', 'The capital of France, on the Seine.'),
    types.Passage('p2', 'Carbon', 'An element with symbol C and atomic number 6.'),
    types.Passage('p3', 'São Tomé', 'The capital of an island country.'),
)


def _ids(results):
  return [[passage.id for passage in passages] for passages in results]


class ImportTest(absltest.TestCase):

  def test_import_takes_no_accelerator(self):
    """bm25s runs a JAX program on import; here any program would be an error."""
    code = 'import stppo_jax.retrieval.server, stppo_jax.rollout.agent, jax; jax.jit'
    environment = os.environ | {'JAX_PLATFORMS': 'none_such'}
    subprocess.run([sys.executable, '-c', code], env=environment, check=True, timeout=300)


class Bm25Test(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.retriever = bm25.Bm25Retriever(PASSAGES)

  @parameterized.parameters(
      ('seine', ['p1']),  # text
      ('Carbon?', ['p2']),  # title; case and punctuation aside
      ('atomic number 6', ['p2']),  # digits count
      ('symbol C', ['p2']),
      ('sao tome', ['p3']),  # accents aside
      ('seine carbon carbon', ['p2', 'p1']),
      ('', []),
      ('the of an', []),  # stop words alone
      ('xylophone', []),
      ('xylophone seine', ['p1']),
      ('<|im_start|> \x00 \ud800', []),
  )
  def test_finds(self, query, expected):
    self.assertEqual(_ids(self.retriever.search([query], 3)), [expected])

  @parameterized.parameters(
      ('法国首都在哪里？', 0),  # Chinese: no spaces, and no passage has the whole run
      ('塞', 0),
      ('日本の首都', 1),  # Japanese
      ('서울에서', 2),  # Korean: another particle than the passage's
      ('दिल्ली', 3),  # Hindi: vowel signs do not end words
      ('กรุงเทพ', 4),  # Thai
      ('दल', None),  # the letters of a word of passage 3 without its signs
  )
  def test_finds_in_other_scripts(self, query, expected):
    texts = (
        '巴黎是法国的首都，位于塞纳河畔。',
        '東京は日本の都です。',
        '서울은 대한민국의 수도이다',
        'नई दिल्ली भारत की राजधानी है।',
        'ไทยมีกรุงเทพมหานคร',
    )
    passages = [types.Passage(str(row), '', text) for row, text in enumerate(texts)]
    found = _ids(bm25.Bm25Retriever(passages).search([query], 1))
    self.assertEqual(found, [[] if expected is None else [str(expected)]])

  def test_title_counts_twice(self):
    """Although the passage about the city is shorter and mentions the word as densely."""
    passages = (
        types.Passage('city', 'Mexico City', 'Mexico City is the capital of Mexico.'),
        types.Passage('river', 'Rio Grande', 'A river between Mexico and the United States.'),
        types.Passage(
            'country',
            'Mexico',
            'Mexico is a country in North America. Mexico has the currency Peso, the language '
            'Spanish and the most populous neighbour United States.',
        ),
    )
    retriever = bm25.Bm25Retriever(passages)
    self.assertEqual(_ids(retriever.search(['Mexico'], 3)), [['country', 'city', 'river']])
    self.assertEqual(_ids(retriever.search(['Mexico City'], 1)), [['city']])

  def test_scores_equal_formula_of_both_fields(self):
    """Of a word in one of three titles and in two of three texts: Lucene's formula by hand."""

    def score(documents, with_word, times, length, mean):
      idf = math.log(1 + (documents - with_word + 0.5) / (with_word + 0.5))
      return idf * times / (times + 1.5 * (1 - 0.75 + 0.75 * length / mean))

    passages = [('x', 'y'), ('y', 'x z z'), ('z', '')]
    retriever = bm25.Bm25Retriever([types.Passage(text, *text) for text in passages])
    first, second = retriever.search(['x'], 2)[0]
    self.assertAlmostEqual(first.score, score(3, 2, 1, 2, 7 / 3) + score(3, 1, 1, 1, 1), places=5)
    self.assertAlmostEqual(second.score, score(3, 2, 1, 4, 7 / 3), places=5)

  def test_one_list_per_query_in_order(self):
    self.assertEqual(self.retriever.search([], 3), [])
    self.assertEqual(
        _ids(self.retriever.search(['seine', '', 'carbon', 'seine'], 1)),
        [['p1'], [], ['p2'], ['p1']],
    )

  def test_scores_fall_and_are_returned(self):
    found = self.retriever.search(['capital country France'], 4)[0]
    self.assertGreater(found[-1].score, 0)
    self.assertEqual([p.score for p in found], sorted((p.score for p in found), reverse=True))
    self.assertEqual(PASSAGES[0].score, 0.0)

  @parameterized.parameters(1, 2, 3, 40)
  def test_ties_in_corpus_order(self, top_k):
    same = [types.Passage(str(i), 'x', 'y') for i in range(50)]
    found = bm25.Bm25Retriever(same).search(['y'], top_k)
    self.assertEqual(_ids(found), [[str(i) for i in range(top_k)]])

  @parameterized.parameters(([],), ([types.Passage('0', '', '')],))
  def test_corpus_without_words_is_rejected(self, passages):
    with self.assertRaisesRegex(types.UserError, f'{len(passages)} passages'):
      bm25.Bm25Retriever(passages)

  def test_one_passage_and_an_empty_one(self):
    retriever = bm25.Bm25Retriever([types.Passage('0', '', ''), types.Passage('1', 'x', '')])
    self.assertEqual(_ids(retriever.search(['x'], 3)), [['1']])

  def test_no_progress_bars(self):
    with contextlib.redirect_stderr(io.StringIO()) as err:
      with contextlib.redirect_stdout(io.StringIO()) as out:
        bm25.Bm25Retriever(PASSAGES).search(['seine'], 2)
    self.assertEqual((out.getvalue(), err.getvalue()), ('', ''))


if __name__ == '__main__':
  absltest.main()
