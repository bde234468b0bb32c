"""BM25 search over a corpus in memory: queries in, passages out, no server."""

from collections.abc import Iterable
from collections.abc import Sequence
import functools
import logging
import re
import types as types_lib
from typing import Any
import unicodedata

import numpy as np

from stppo_jax import types
from stppo_jax.data import scripts
from stppo_jax.retrieval import protocol

# Python's \w leaves out the vowel signs of the scripts of India and of South-East Asia.
_MARKS = ''.join(
    char for char in map(chr, range(0x900, 0x1D00)) if unicodedata.category(char)[0] == 'M'
)
_WORD = re.compile(rf'[\w{_MARKS}]+')


class Bm25Retriever:
  """Searches by BM25 (Lucene's form, k1 = 1.5, b = 0.75) over each passage's title and text.

  A score is that of title and text together plus that of the title alone. So the passage about
  Mexico comes before the one about Mexico City, which is shorter and mentions the word as densely.

  Ties go to the passage that comes first in the corpus. Passages that share no word with the query
  are not returned, so a query may get fewer than `top_k` or none. It runs in the calling thread: a
  query over a few thousand passages takes less time than waking another thread.
  """

  def __init__(self, passages: Sequence[types.Passage]):
    self._passages = list(passages)
    whole = _index(f'{passage.title} {passage.text}' for passage in self._passages)
    if whole is None:
      raise types.UserError(
          f'retriever: got {len(self._passages)} passages without a single word; '
          'check that the corpus is not empty'
      )
    titles = _index(passage.title for passage in self._passages)
    self._indexes = [whole] if titles is None else [whole, titles]

  def search(self, queries: Sequence[str], top_k: int) -> protocol.Results:
    """Returns at most `top_k` passages per query, best first."""
    return [self._search_one(query, top_k) for query in queries]

  def _search_one(self, query: str, top_k: int) -> list[types.Passage]:
    words = _words(query)
    words_of_index = [(index, index.get_tokens_ids(words)) for index in self._indexes]
    if not words_of_index[0][1] or top_k < 1:
      return []
    scores = sum(index.get_scores_from_ids(ids) for index, ids in words_of_index if ids)
    positive = np.flatnonzero(scores > 0)
    best = protocol.best_rows(scores[positive], top_k)
    rows = positive[best]
    return protocol.scored(self._passages, rows, scores[rows])


def _index(texts: Iterable[str]) -> Any:
  """Returns the index of texts; None where they hold no word."""
  bm25s = _library()
  # Numbers instead of words halve the memory: each word is stored once, not a million times.
  numbers: dict[str, int] = {}
  rows = []
  for text in texts:
    rows.append([numbers.setdefault(word, len(numbers)) for word in _words(text)])
  if not numbers:
    return None
  index = bm25s.BM25()
  index.index((rows, numbers), show_progress=False)
  return index


@functools.cache
def _library() -> types_lib.ModuleType:
  """Imports bm25s, which runs a JAX program on import: it must not run before JAX is set up."""
  import bm25s

  logging.getLogger('bm25s').setLevel(logging.WARNING)  # the library sets it to DEBUG
  return bm25s


def _words(text: str) -> list[str]:
  """Splits into lower-case words without accents and stop words, keeping letters and digits.

  A run of a script without spaces gives its characters and their pairs.
  """
  text = text.lower()
  if not text.isascii():  # the loop over characters takes most of the time of indexing
    text = unicodedata.normalize('NFKD', text)
    text = ''.join(char for char in text if not unicodedata.combining(char))
    text = scripts.with_pairs(unicodedata.normalize('NFC', text))  # NFC: syllables of Korean
  stop_words = _library().stopwords.STOPWORDS_EN
  return [word for word in _WORD.findall(text) if word not in stop_words]
