"""Writing systems that do not mark their words by spaces."""

import re

# Thai to Tibetan, Burmese, Khmer, Japanese, Chinese; and Korean, whose particles are attached.
_RANGES = (
    (0x0E00, 0x0FFF),
    (0x1000, 0x109F),
    (0x1780, 0x17FF),
    (0x3005, 0x3007),
    (0x3040, 0x30FF),
    (0x3400, 0x9FFF),
    (0xAC00, 0xD7AF),
    (0xF900, 0xFAFF),
    (0x20000, 0x3FFFF),
)
_ONE = '[' + ''.join(f'{chr(first)}-{chr(last)}' for first, last in _RANGES) + ']'
UNSPACED = re.compile(f'{_ONE}+')  # a run of letters without the limits of words


def spaced(text: str) -> str:
  """Returns a text with spaces around each character of UNSPACED, so that each is a word.

  This is the unit in which MLQA counts the overlap of Chinese answers and KorQuAD that of Korean.
  """
  if text.isascii():
    return text
  return UNSPACED.sub(lambda run: f' {" ".join(run[0])} ', text)


def with_pairs(text: str) -> str:
  """Returns a text whose runs of UNSPACED are their characters and pairs of neighbours, as words.

  These are the terms that Lucene's CJK bigram filter indexes with its unigrams.
  """

  def terms(run):
    characters = run[0]
    return f' {" ".join([*characters, *map("".join, zip(characters, characters[1:]))])} '

  return UNSPACED.sub(terms, text)
