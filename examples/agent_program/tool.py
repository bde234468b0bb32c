"""The agent's tool: the best passage for a query, from the passages that ship with the package."""

import functools

from stppo_jax.data import tasks
from stppo_jax.retrieval import bm25


def search(query: str) -> str:
  """Returns the title and text of the best passage, if any has a word of the query."""
  for passage in _index().search([query], 1)[0]:
    return f'{passage.title}: {passage.text}'
  return 'nothing found'


@functools.cache
def _index():
  return bm25.Bm25Retriever(tasks.load_corpus('embedded'))
