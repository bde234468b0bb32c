"""A verifiers taskset with a harness: questions over the passages that ship with the trainer.

verifiers' Python imports it. It needs verifiers and openai, and imports nothing of the trainer.
"""

from collections.abc import Iterator
import functools
import json
import pathlib
import re

import openai
import verifiers.v1 as vf

__all__ = ['SearchHarness', 'SearchTaskset']

MAX_TURNS = 5
_KNOWLEDGE = pathlib.Path(__file__).parents[2] / 'stppo_jax' / 'assets' / 'knowledge'


class SearchConfig(vf.TasksetConfig):
  """The settings of the taskset."""

  split: str = 'train'


class SearchData(vf.TaskData):
  """A question."""

  answers: list[str]


class SearchTask(vf.Task[SearchData, vf.State, vf.TaskConfig]):
  """Scores an episode."""

  @vf.reward
  async def exact_match(self, trace: vf.Trace) -> float:
    """Returns 1 for a right answer."""
    found = re.search(r'<answer>(.*?)(</answer>|$)', trace.last_reply, re.S)
    answers = [answer.lower() for answer in self.data.answers]
    return float(found is not None and found[1].strip().lower() in answers)

  @vf.metric
  async def turns(self, trace: vf.Trace) -> float:
    """Returns the number of turns."""
    return float(trace.num_turns)


class SearchTaskset(vf.Taskset[SearchTask, SearchConfig]):
  """The questions of a split."""

  def load(self) -> Iterator[SearchTask]:
    """Yields the tasks."""
    for row in _rows('qa.jsonl'):
      if row['split'] == self.config.split:
        data = SearchData(prompt=f'Question: {row["question"]}\n', answers=row['answers'])
        yield SearchTask(data, self.config.task)


class SearchHarness(vf.Harness[vf.HarnessConfig]):
  """Runs the searches that the model asks for, in this process."""

  EXECUTES_CODE = False
  NEEDS_CONTAINER = False

  async def launch(
      self,
      ctx: vf.ModelContext,
      trace: vf.Trace,
      runtime: vf.Runtime,
      endpoint: str,
      secret: str,
      mcp_urls: dict[str, str],
      data: vf.TaskData,
  ) -> vf.ProgramResult:
    """Plays one question."""
    messages = [{'role': 'user', 'content': data.prompt}]
    async with openai.AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=0) as client:
      for _ in range(MAX_TURNS):
        completion = await client.chat.completions.create(
            model=ctx.model, messages=messages, stop=['</search>', '</answer>']
        )
        text = completion.choices[0].message.content
        if '<answer>' in text:
          break
        query = re.search(r'<search>(.*)', text, re.S)
        passage = search(query[1]) if query else 'Invalid: search, or answer.'
        messages += [
            {'role': 'assistant', 'content': text},
            {'role': 'user', 'content': f'<information> {passage}\n</information>\n'},
        ]
    return vf.ProgramResult(exit_code=0, stdout='', stderr='')


def search(query: str) -> str:
  """Returns the passage whose title and text share most with a query, rare words first."""
  passages, weights = _index()
  wanted = _words(query)

  def score(number):
    title, text = passages[number][1:]
    return sum(weights[word] for word in wanted & title) * 2 + sum(
        weights[word] for word in wanted & text
    )

  best = max(range(len(passages)), key=score)
  return passages[best][0] if score(best) else 'nothing found'


@functools.cache
def _index():
  """Returns (passages as text and sets of words, the weight of each word)."""
  passages = []
  counts = {}
  for row in _rows('corpus.jsonl'):
    title = _words(row['title'])
    text = _words(row['text'])
    passages.append((f'{row["title"]}: {row["text"]}', title, text))
    for word in title | text:
      counts[word] = counts.get(word, 0) + 1
  return passages, {word: 1 / count for word, count in counts.items()}


def _words(text):
  return set(re.findall(r'\w+', text.lower()))


def _rows(name):
  return map(json.loads, (_KNOWLEDGE / name).read_text(encoding='utf-8').splitlines())
