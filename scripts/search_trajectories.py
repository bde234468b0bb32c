"""Templated trajectories of the search task: questions with their evidence in, demonstrations out.

  python -m scripts.search_trajectories --config=experiments/st_ppo_smollm2.py:cpu \\
      --workdir=runs/demonstrations
  python run.py sft --config=experiments/st_ppo_smollm2.py:cpu \\
      --config.data.source=runs/demonstrations/episodes --workdir=runs/sft_smollm2

The arguments are those of run.py, and --batches=N tries N demonstrations of each question. Model,
data and lengths are those of the config. WORKDIR/episodes holds the episodes as a run saves them.

A demonstration plays a question through the real environment with real BM25 results. It is kept
only if its claims appear in its observations, so that the model learns to read and not to guess. It
looks up the steps of a question (or, without steps, the question and then titles that were
mentioned), skips searches whose finding has already appeared, and ends with the answer. So
demonstrations have one, two or three searches in several wordings, a variety that reinforcement
learning can select from.
"""

from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
import functools
import os
import re
import sys
import zlib

import jax
import numpy as np

from stppo_jax import types
from stppo_jax.assembly import components as components_lib
from stppo_jax.cli import config_file
from stppo_jax.cli import entry
from stppo_jax.cli import flags
from stppo_jax.data import tasks as tasks_lib
from stppo_jax.envs import rewards
from stppo_jax.monitoring import episodes as records
from stppo_jax.rollout import demonstrations
from stppo_jax.rollout import prepare
from stppo_jax.rollout import saved
from stppo_jax.text import tokenizer as chat
from stppo_jax.types import Task
from stppo_jax.types import UserError

BEGINNINGS = ('I need to find: {}', 'First I look up: {}', 'What I have to know is: {}')
CONTINUATIONS = ('Now I need: {}', 'The next thing to look up is: {}', 'That leaves: {}')
ENDINGS = ('So the answer is {}.', 'This means that the answer is {}.', 'The answer is {}.')
WHOLE_FIRST = 0.3  # share of questions with steps whose first search is the whole question
MAX_QUOTE = 30  # words of a passage that a thought quotes


def main(argv):
  arguments = flags.parse(argv[1:])
  config = config_file.load(arguments, reads_run=False)
  workdir = arguments.flags.workdir
  if not workdir:
    raise UserError('--workdir names the folder of the demonstrations: give one')
  folder = os.path.join(workdir, 'episodes')
  if saved.has_batches(folder):
    raise UserError(f'{folder} holds episodes already: give another --workdir, or remove it')
  components = components_lib.resolve(config).load()
  demonstrator = Demonstrator(components)
  number = 0
  for episodes in demonstrator.batches(components.tasks, arguments.flags.batches, config.seed):
    number += 1
    lines = records.to_records(episodes, components.tokenizer, 0, 'train')
    records.write_lines(records.record_path(workdir, 'train', number), lines)
    lengths = [len(episode.unroll()[0]) for episode in episodes]
    print(
        f'{len(episodes)} of {len(components.tasks)} questions have a demonstration that fits; '
        f'{np.mean(lengths):.0f} tokens on average, at most {max(lengths)}'
    )
  if not number:
    raise UserError(
        f'no demonstration of {len(components.tasks)} questions is valid: check that '
        'config.data.corpus has the passages of config.data.source, and the lengths of '
        'config.rollout'
    )


class Demonstrator:
  """Plays questions by template in the run's environment and within its lengths."""

  def __init__(self, components: components_lib.Components):
    self._config = components.config
    self._retriever = components.retriever
    self._env = components.env_with_retriever
    self._tokenizer = components.tokenizer
    corpus = components.config.data.corpus or components.config.data.source
    self._passages = {passage.id: passage for passage in tasks_lib.load_corpus(corpus)}

  def batches(self, tasks: Sequence[Task], copies: int, seed: int) -> Iterator[list[types.Episode]]:
    """Yields up to `copies` batches of episodes, at most one of each task; no two are the same."""
    seen = set()
    for copy in range(copies):
      texts = {}
      for task in tasks:
        rng = np.random.default_rng((seed, zlib.crc32(task.id.encode('utf-8')), copy))
        played = self.play(task, rng)
        actions = tuple(action for action, _ in played[1]) if played else ()
        if actions and (task.id, actions) not in seen:
          seen.add((task.id, actions))
          texts[task.id] = actions
      if episodes := self.episodes([task for task in tasks if task.id in texts], texts):
        yield episodes

  def episodes(
      self, tasks: Sequence[Task], texts: Mapping[str, Sequence[str]]
  ) -> list[types.Episode]:
    """Returns the episodes {task id: turns} of a run that are right and within its limits."""
    player = demonstrations.Demonstrator(
        source=lambda task: functools.partial(demonstrations.Recorded, [texts[task.id]]),
        env=self._env,
        tokenizer=self._tokenizer,
        limits=prepare.limits(self._config),
        per_group=1,
    )
    played = player.play(jax.random.key(self._config.seed), tasks, range(len(tasks)))
    return [episode for episode in played if episode.score == 1 and not episode.truncated]

  def play(self, task, rng):
    """Returns (prompt, [(turn, observation), ..]) as texts; None if a finding does not appear."""
    story = Story(self._env(task, 0), self._config.env.max_searches, self._visible, rng)
    findings = (
        self._follow_steps(task, story, rng) if task.steps else self._follow_titles(task, story)
    )
    answer = findings and self._answer(task, story)
    if not answer:
      return None
    story.act([*findings, _pick(rng, ENDINGS).format(answer)], f'<answer> {answer} </answer>')
    return story.prompt, story.turns

  def _follow_steps(self, task, story, rng):
    """Looks up each step unless its finding has appeared; returns the findings, or None."""
    findings, news = [], []
    if rng.random() < WHOLE_FIRST and not story.look_up([], task.question):
      return None
    for i, (question, found) in enumerate(task.steps):
      asked = _put_in(question, task.steps[:i])
      if not self._has_read(found, task, story):
        if not story.look_up(news, asked) or not self._has_read(found, task, story):
          return None
        news = []
      news.append(f'{asked}: {found}.')
      findings.append(news[-1])
    return findings

  def _follow_titles(self, task, story):
    """Looks up the question, then missing titles that were mentioned; returns quotes, or None."""
    if not task.gold or not story.look_up([], task.question):
      return None
    while missing := [passage for passage in task.gold if passage not in story.shown]:
      titles = (re.sub(r' \(.*\)$', '', self._passages[passage].title) for passage in missing)
      title = next(
          (title for title in titles if _contains(task.question + story.text, title)), None
      )
      if title is None or not story.look_up([], title):
        return None
    gold = [self._passages[passage] for passage in task.gold]
    quotes = [_quote(passage, task.answers) for passage in gold]
    if not all(_contains(story.text, quote) for quote in quotes):
      return None
    return [f'{passage.title}: {_closed(quote)}' for passage, quote in zip(gold, quotes)]

  def _has_read(self, found, task, story):
    """Whether a gold passage contains the finding, in the visible part of the observation."""
    gold = [self._passages[passage] for passage in task.gold if passage in story.shown]
    return _contains(story.text, found) and any(
        _contains(f'{passage.title} {passage.text}', found) for passage in gold
    )

  def _answer(self, task, story):
    """Returns the first spelling of the answer that appeared or needs no evidence; else None."""
    return next(
        (
            answer
            for answer in task.answers
            if answer.lower() in ('yes', 'no')
            or _contains(task.question, answer)
            or self._has_read(answer, task, story)
        ),
        None,
    )

  def _visible(self, observation):
    ids = chat.encode_observation(
        self._tokenizer, observation, self._config.rollout.max_observation
    )
    # The last word stands right before the tag, and normalisation would join them.
    return self._tokenizer.decode(ids).replace(chat.CLOSING_TAG, '\n')


class Story:
  """A demonstration under construction."""

  def __init__(self, env, max_searches, visible, rng):
    self._env, self._max_searches, self._visible, self._rng = env, max_searches, visible, rng
    self.prompt, _ = env.reset()
    self.turns = []  # (turn, observation)
    self.shown = set()  # ids of passages
    self.text = ''  # the visible part of all observations

  def look_up(self, news, query):
    """Adds a turn that states the news and searches; returns False if no search is left."""
    if len(self.turns) == self._max_searches:
      return False
    wording = _pick(self._rng, BEGINNINGS if not self.turns else CONTINUATIONS)
    info = self.act([*news, wording.format(query)], f'<search> {query} </search>')
    self.shown.update(info['passage_ids'])
    self.text += self._visible(self.turns[-1][1])
    return True

  def act(self, thoughts, action):
    """Adds a turn and the environment's observation."""
    turn = f'<think> {" ".join(thoughts)} </think>\n{action}'
    observation, _, _, _, info = self._env.step(turn)
    self.turns.append((turn, observation))
    return info


def _put_in(question, earlier):
  """Inserts earlier findings into a step's question: '#1 >> capital' -> 'France capital'."""
  for i, (_, found) in enumerate(earlier, 1):
    question = re.sub(rf'#{i}\b', lambda _: found, question)
  return ' '.join(question.replace('>>', ' ').split()).rstrip(' ?')


def _quote(passage, answers):
  """Returns at most MAX_QUOTE words of the passage: up to the answer, or its first sentence."""
  sentences = re.split(r'(?<=[.!?])\s+', passage.text)
  sentence = next((s for s in sentences if any(_contains(s, a) for a in answers)), sentences[0])
  words = sentence.split()
  end = next(
      (
          i
          for i in range(MAX_QUOTE, len(words) + 1)
          if any(_contains(' '.join(words[:i]), a) for a in answers)
      ),
      MAX_QUOTE,
  )
  return ' '.join(words[max(0, end - MAX_QUOTE) : end])


def _closed(quote):
  return quote if quote.endswith(('.', '!', '?')) else f'{quote} ...'


def _contains(text, phrase):
  """Whether `text` contains the words of `phrase`, normalised as for exact match."""
  words = rewards.normalize_answer(phrase)
  return bool(words) and f' {words} ' in f' {rewards.normalize_answer(text)} '


def _pick(rng, choices):
  return choices[rng.integers(len(choices))]


if __name__ == '__main__':
  entry.configure_logging()
  try:
    main(sys.argv)
  except UserError as error:
    sys.exit(f'search_trajectories: {error}')
