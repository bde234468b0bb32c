"""The warm start of st_ppo_smollm2: SmolLM2 learns to think, search, read and answer from templates.

  python -m experiments.sft_smollm2 --model=models/smollm2 --source=DATA/general_qa.jsonl \\
    --corpus=DATA/general_corpus.jsonl --out=runs/sft_smollm2

Not yet run.

`--form=cpu` has the lengths of `st_ppo_smollm2.py:cpu`:
Not yet run.

A demonstration plays a training question through the real environment, with what BM25 really finds. It
is kept only if what it says stands in what it was shown, so that reading is learnt, and not guessing.
It looks up the steps that come with a question (or, without those, the question, then titles that were
mentioned), leaves out a search whose finding it has already seen, and ends with the answer. So there
are one, two and three searches, and what to search for is worded in several ways: reinforcement learning
needs such variety to choose from.
"""

import dataclasses
import functools
import json
import math
import re
import resource
import sys
import zlib

from absl import app
from absl import flags
from absl import logging
import jax
import numpy as np

from experiments import st_ppo_smollm2
from stppo_jax import chat
from stppo_jax import evaluation
from stppo_jax import tasks as task_files
from stppo_jax.envs import rewards
from stppo_jax.envs import search
from stppo_jax.models import convert
from stppo_jax.retrieval import bm25
from stppo_jax.training import demonstrations
from stppo_jax.training import sft
from stppo_jax.training import sharding
from stppo_jax.types import UserError

_FORM = flags.DEFINE_enum('form', '', ['', 'cpu', 'smoke'], 'of st_ppo_smollm2: whose lengths to use')
_MODEL = flags.DEFINE_string('model', 'models/smollm2', 'Hugging Face folder to start from')
_SOURCE = flags.DEFINE_string('source', '', 'questions, as config.data.source')
_CORPUS = flags.DEFINE_string('corpus', '', 'passages, as config.data.corpus')
_OUT = flags.DEFINE_string('out', 'runs/sft_smollm2', 'folder of the model to write')
_STEPS = flags.DEFINE_integer('steps', 300, 'optimizer steps', lower_bound=0)
_ROWS = flags.DEFINE_integer('rows', 32, 'demonstrations an optimizer step', lower_bound=1)
_MICRO_BATCH = flags.DEFINE_integer(
    'micro_batch', 16, 'of them together in memory: a multiple of the devices', lower_bound=1)
_LR = flags.DEFINE_float('lr', 1e-4, 'the highest, of a cosine', lower_bound=0)
_PER_TASK = flags.DEFINE_integer('per_task', 2, 'demonstrations to try of each question', lower_bound=1)
_HELD_OUT = flags.DEFINE_integer('held_out', 128, 'demonstrations of dev to measure', lower_bound=1)
_DTYPE = flags.DEFINE_enum(
    'dtype', '', ['', 'float32', 'bfloat16'], 'of the computation; empty: float32 on CPUs alone')
_REMAT = flags.DEFINE_enum('remat', 'full', ['none', 'dots', 'full'], 'what backward recomputes')
_SEED = flags.DEFINE_integer('seed', 0, 'of the wordings and of the order')

BEGINNINGS = ('I need to find: {}', 'First I look up: {}', 'What I have to know is: {}')
CONTINUATIONS = ('Now I need: {}', 'The next thing to look up is: {}', 'That leaves: {}')
ENDINGS = ('So the answer is {}.', 'This means that the answer is {}.', 'The answer is {}.')
WHOLE_FIRST = 0.3  # of those with steps: search for the question as it is, as one who sees no steps yet
MAX_QUOTE = 30  # words of a passage that a thought repeats


def main(unused_argv):
  config = run_config()
  dtype = _DTYPE.value or ('float32' if jax.default_backend() == 'cpu' else 'bfloat16')
  mesh = sharding.make_mesh(1, -1, 1)
  if _MICRO_BATCH.value % mesh.size:
    raise UserError(f'--micro_batch={_MICRO_BATCH.value}: give a multiple of {mesh.size} devices')
  folder = evaluation.model_folder(config)
  tokenizer = chat.load_tokenizer(folder)
  passages = task_files.load_corpus(config.data.corpus or config.data.source)
  demonstrator = Demonstrator(passages, tokenizer, config)
  pools = {}
  for split, copies in ((config.data.train_split, _PER_TASK.value), (config.data.eval_split, 1)):
    tasks = evaluation.load_tasks(config, split)
    pools[split] = demonstrator.pool(tasks, copies, _SEED.value)
    describe(split, len(tasks) * copies, pools[split])
  shape, params = convert.load_hf(
      folder, dtype=dtype, shardings=functools.partial(sharding.tree_shardings, mesh=mesh))
  shape = dataclasses.replace(
      shape, remat=_REMAT.value, scan_layers=config.model.scan_layers,
      attention_chunk=config.model.attention_chunk)
  chat.check_matches(tokenizer, shape.vocab_size)
  buckets, chunk = config.train.length_buckets, config.model.logp_chunk or None
  held_out = pools[config.data.eval_split][:_HELD_OUT.value]
  held_out = [demonstrations.pad([row], buckets) for row in held_out]
  measure('before', params, shape, held_out, chunk)
  draw = demonstrations.batches(
      pools[config.data.train_split], _ROWS.value, _MICRO_BATCH.value, buckets)
  params = sft.train(
      params, shape, draw, steps=_STEPS.value, optimizer=sft.make_optimizer(_LR.value, _STEPS.value),
      seed=_SEED.value, mesh=mesh, logp_chunk=chunk, log_every=max(1, _STEPS.value // 20))
  measure('after', params, shape, held_out, chunk)
  convert.save_hf(_OUT.value, shape, params, folder)
  logging.info('wrote %s; the process took at most %.1f GiB of host memory', _OUT.value,
               resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20)


def run_config():
  """The run that this is the warm start of, with the model and the data of the flags."""
  config = st_ppo_smollm2.get_config(_FORM.value)
  if _FORM.value != 'smoke':
    config.model.folder = _MODEL.value
  config.data.source = _SOURCE.value or config.data.source
  config.data.corpus = _CORPUS.value or config.data.corpus
  return config


def describe(split, tried, pool):
  """Logs how many demonstrations there are, and how long."""
  if not pool:
    raise UserError(f'no demonstration of the split {split!r} holds up: check that --corpus belongs to '
                    '--source')
  lengths = [len(row.tokens) for row in pool]
  logging.info('%s: %d of %d demonstrations hold up; %.0f tokens on average, at most %d; %.0f of them '
               'are imitated', split, len(pool), tried, np.mean(lengths), max(lengths),
               np.mean([(row.weights == 1).sum() for row in pool]))


def measure(when, params, shape, held_out, chunk):
  """Prints how well held-out demonstrations are foretold, as a JSON line."""
  nll = sft.loss(params, shape, held_out, chunk)
  print(json.dumps({'warm_start': when, 'demonstrations': len(held_out), 'loss': round(nll, 4),
                    'perplexity': round(math.exp(nll), 3)}), flush=True)


class Demonstrator:
  """Plays questions by template, through the run's environment and within its lengths."""

  def __init__(self, passages, tokenizer, config):
    self._passages = {passage.id: passage for passage in passages}
    self._retriever = bm25.Bm25Retriever(passages)
    self._tokenizer = tokenizer
    self._env, self._top_k, self._limits = config.env, config.retriever.top_k, config.rollout

  def pool(self, tasks, copies, seed):
    """The demonstrations that hold up, of at most `copies` a task; equal ones are kept once."""
    pool = {}
    for task in tasks:
      for copy in range(copies):
        rng = np.random.default_rng((seed, zlib.crc32(task.id.encode('utf-8')), copy))
        if (row := self.row(task, rng)) is not None:
          pool[row.tokens.tobytes()] = row
    return list(pool.values())

  def row(self, task, rng):
    """A demonstration as tokens; None if there is none, or the rollout would have cut it."""
    played, limits = self.play(task, rng), self._limits
    if played is None:
      return None
    row = demonstrations.encode(self._tokenizer, *played, limits.max_observation)
    prompt, turns = played
    longest = max(len(self._tokenizer.encode(turn)) for turn, _ in turns)
    fits = (len(row.tokens) <= limits.max_total and longest <= limits.max_turn
            and len(chat.encode_prompt(self._tokenizer, prompt)) <= limits.max_prompt)
    return row if fits else None

  def play(self, task, rng):
    """(prompt, [(turn, observation), ..]) as texts; None where a finding is not to be found."""
    env = search.SearchEnv(task, self._retriever, max_turns=self._env.max_turns, top_k=self._top_k,
                           prompt=self._env.prompt)
    story = Story(env, self._visible, rng)
    findings = self._follow_steps(task, story, rng) if task.steps else self._follow_titles(task, story)
    answer = findings and self._answer(task, story)
    if not answer:
      return None
    story.act([*findings, _pick(rng, ENDINGS).format(answer)], f'<answer> {answer} </answer>')
    return story.prompt, story.turns

  def _follow_steps(self, task, story, rng):
    """Looks up what each step asks for, unless it has been read; the findings, or None."""
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
    """Looks up the question, then titles that were mentioned and are missing; quotations, or None."""
    if not task.gold or not story.look_up([], task.question):
      return None
    while missing := [passage for passage in task.gold if passage not in story.shown]:
      titles = (re.sub(r' \(.*\)$', '', self._passages[passage].title) for passage in missing)
      title = next((title for title in titles if _contains(task.question + story.text, title)), None)
      if title is None or not story.look_up([], title):
        return None
    gold = [self._passages[passage] for passage in task.gold]
    quotes = [_quote(passage, task.answers) for passage in gold]
    if not all(_contains(story.text, quote) for quote in quotes):
      return None
    return [f'{passage.title}: {_closed(quote)}' for passage, quote in zip(gold, quotes)]

  def _has_read(self, found, task, story):
    """Whether a gold passage that was shown says so, above where the observation was cut."""
    gold = [self._passages[passage] for passage in task.gold if passage in story.shown]
    return _contains(story.text, found) and any(
        _contains(f'{passage.title} {passage.text}', found) for passage in gold)

  def _answer(self, task, story):
    """The first spelling of the answer that was read, or that needs no reading; None if there is none."""
    return next((answer for answer in task.answers
                 if answer.lower() in ('yes', 'no') or _contains(task.question, answer)
                 or self._has_read(answer, task, story)), None)

  def _visible(self, observation):
    ids = chat.encode_observation(self._tokenizer, observation, self._limits.max_observation)
    return self._tokenizer.decode(ids)


class Story:
  """A demonstration as it grows."""

  def __init__(self, env, visible, rng):
    self._env, self._visible, self._rng = env, visible, rng
    self.prompt, _ = env.reset()
    self.turns = []  # (turn, observation)
    self.shown = set()  # ids of passages
    self.text = ''  # of all observations, as far as the agent can see them

  def look_up(self, news, query):
    """A turn that tells the news and searches; False, and no turn, if there are no searches left."""
    if len(self.turns) == self._env.max_turns:
      return False
    wording = _pick(self._rng, BEGINNINGS if not self.turns else CONTINUATIONS)
    info = self.act([*news, wording.format(query)], f'<search> {query} </search>')
    self.shown.update(info['passage_ids'])
    self.text += self._visible(self.turns[-1][1])
    return True

  def act(self, thoughts, action):
    """A turn, and what the environment says to it."""
    turn = f'<think> {" ".join(thoughts)} </think>\n{action}'
    observation, _, _, _, info = self._env.step(turn)
    self.turns.append((turn, observation))
    return info


def _put_in(question, earlier):
  """A step's question with what earlier steps found: '#1 >> capital' -> 'France capital'."""
  for i, (_, found) in enumerate(earlier, 1):
    question = re.sub(rf'#{i}\b', lambda _: found, question)
  return ' '.join(question.replace('>>', ' ').split()).rstrip(' ?')


def _quote(passage, answers):
  """At most MAX_QUOTE words of the passage: up to the answer, or of its first sentence."""
  sentences = re.split(r'(?<=[.!?])\s+', passage.text)
  sentence = next((s for s in sentences if any(_contains(s, a) for a in answers)), sentences[0])
  words = sentence.split()
  end = next((i for i in range(MAX_QUOTE, len(words) + 1)
              if any(_contains(' '.join(words[:i]), a) for a in answers)), MAX_QUOTE)
  return ' '.join(words[max(0, end - MAX_QUOTE):end])


def _closed(quote):
  return quote if quote.endswith(('.', '!', '?')) else f'{quote} ...'


def _contains(text, phrase):
  """Whether the words of `phrase` stand in `text`, as exact match compares them."""
  words = rewards.normalize_answer(phrase)
  return bool(words) and f' {words} ' in f' {rewards.normalize_answer(text)} '


def _pick(rng, choices):
  return choices[rng.integers(len(choices))]


def _main(argv):
  try:
    main(argv)
  except UserError as error:
    sys.exit(f'sft_smollm2: {error}')


if __name__ == '__main__':
  app.run(_main)
