"""Makes the embedded model: a tokenizer, then a warm start on imperfect demonstrations.

  python -m scripts.sft_tiny      # writes stppo_jax/assets/tiny; 28 minutes on one core
  python -m scripts.sft_tiny --preset=tiny-5m --steps=2000 --lr=2e-3 --dtype=bfloat16 \\
    --out=research/model_5m     # the larger model of the study; 36 minutes on two cores

The demonstrations come from the training split only, and about half are bad on purpose: an agent
that imitates them follows the protocol, and guesses where a question needs several searches.
Reinforcement learning has to find out which habits pay.
"""

import dataclasses
import functools
import json
import os
import re
import time
import typing

from absl import app
from absl import flags
from absl import logging
import jax
import numpy as np
import tokenizers

from stppo_jax.data import tasks as task_files
from stppo_jax.distributed import malloc
from stppo_jax.envs import search
from stppo_jax.models import convert
from stppo_jax.models import decoder
from stppo_jax.models import presets
from stppo_jax.retrieval import bm25
from stppo_jax.rollout import prepare
from stppo_jax.text import tokenizer as chat
from stppo_jax.training import supervised
from stppo_jax.types import Task

_PRESET = flags.DEFINE_enum('preset', 'tiny', ['tiny', 'tiny-5m'], 'shape of the model')
_OUT = flags.DEFINE_string('out', prepare.EMBEDDED_MODEL, 'folder of the model to write')
_DTYPE = flags.DEFINE_enum('dtype', 'float32', ['float32', 'bfloat16'], 'of the file')
_STEPS = flags.DEFINE_integer('steps', 5000, 'optimizer steps')
_LR = flags.DEFINE_float('lr', 3e-3, 'highest learning rate')
_PER_TASK = flags.DEFINE_integer('per_task', 20, 'demonstrations per question')
_DRILLS = flags.DEFINE_integer('drills', 8, 'reading drills per question, see encode_drill')
_SEED = flags.DEFINE_integer('seed', 0, 'of everything')
_DATASETS = flags.DEFINE_list('datasets', ['geo', 'elements'], 'of the embedded questions')

MERGED = 514  # tokens from bytes and merges; the others are whole words
TOP_K = 1
MAX_OBSERVATION = 128
READ_WEIGHT = 0.3  # weight of prompt and observation tokens, whose names recur and are copied
REAL_SHARE = 0.05  # share of demonstrations that keep their names, see `Disguise`
# Shares of new names: one word, several, small words between them ('Isle of Man').
SHAPE_SHARES = (0.6, 0.25, 0.15)
SHARED_SHARE = 0.3  # share of words of long names that an earlier name also has
SMALL_SHARE = 0.5  # share of small words that become another one ('Isle von Man')
EOS = '<|endoftext|>'
KINDS = ('ci', 'ca', 'co', 'el', 'pe')  # prefixes of the ids of passages that the data sets need
TAG = r'</?(?:think|search|information|answer)>'
WORD = r'\b[A-Z][A-Za-z]*'  # a word in a name
SMALL = r'(?<= )[a-z]+(?= )'

# Shares of the kinds of demonstrations, by hops. Only the first kind is good. Few stop early: where
# half of them did, the model stopped or went on by the relation and did not look at the question.
HABITS = {
    1: {'good': 0.75, 'guess': 0.15, 'lost': 0.05, 'malformed': 0.05},
    2: {'good': 0.32, 'early': 0.06, 'guess': 0.54, 'lost': 0.04, 'malformed': 0.04},
    3: {'good': 0.32, 'early': 0.06, 'guess': 0.54, 'lost': 0.04, 'malformed': 0.04},
}
# How a sub-question starts -> how passages name what it asks for, which a thought quotes.
QUOTES = {
    'capital': 'capital',
    'currency': 'currency',
    'language': 'language',
    'continent': 'continent',
    'phone code': 'phone code',
    'most populous neighbour': 'populous neighbour',
    'largest city': 'largest city',
    'country': 'country',
    'nearest foreign': 'foreign capital',
    'discoverer': 'discoverer',
    'year': 'year',
    'symbol': 'symbol',
    'atomic number': 'atomic number',
    'latest element': 'latest element',
}
# What a passage says: (quote, value).
FACT = re.compile(
    rf' ({"|".join(sorted(set(QUOTES.values()), key=len, reverse=True))}) '
    r'((?:[A-Z]|\d).*?)(?=[.,]| in the | and the |$)',
    re.M,
)


def main(unused_argv):
  started = time.perf_counter()
  tasks = [
      task for task in task_files.load_tasks('embedded', 'train') if task.dataset in _DATASETS.value
  ]
  passages = task_files.load_corpus('embedded')
  os.makedirs(_OUT.value, exist_ok=True)
  demonstrator = Demonstrator(tasks, passages)
  train_tokenizer(tasks, passages, demonstrator, _OUT.value)
  tokenizer = chat.load_tokenizer(_OUT.value)
  config = dataclasses.replace(
      presets.PRESETS[_PRESET.value], vocab_size=tokenizer.vocab_size, scan_layers=False
  )
  logging.info(
      '%d parameters, %d tokens in the vocabulary', decoder.num_params(config), tokenizer.vocab_size
  )

  rng = np.random.default_rng(_SEED.value)
  disguise = Disguise(tasks, passages, tokenizer)
  pool = [
      encode(tokenizer, *disguise(*demonstrator.play(task, rng), rng))
      for task in tasks
      for _ in range(_PER_TASK.value)
  ]
  pool += [
      encode_drill(tokenizer, disguise('', demonstrator.drill(task), rng)[1][0][1], rng)
      for task in tasks
      for _ in range(_DRILLS.value)
  ]
  lengths = np.array([len(row.tokens) for row in pool])
  logging.info(
      '%d demonstrations of %.0f tokens (longest %d), made in %.0f s',
      len(pool),
      lengths.mean(),
      lengths.max(),
      time.perf_counter() - started,
  )

  params = supervised.train(
      decoder.init(jax.random.key(_SEED.value), config),
      config,
      pool,
      rows=32,
      length_buckets=(48, 64, 96, 128, 192, 256, 384),
      steps=_STEPS.value,
      optimizer=supervised.make_optimizer(_LR.value, _STEPS.value),
      seed=_SEED.value,
  )
  written = jax.tree.map(lambda x: x.astype(_DTYPE.value), jax.device_get(params))
  convert.save_hf(_OUT.value, config, written)
  logging.info('wrote %s after %.0f s', _OUT.value, time.perf_counter() - started)


class Demonstrator:
  """Plays questions by template in the real environment, well or badly."""

  def __init__(self, tasks, passages):
    retriever = bm25.Bm25Retriever(passages)
    self._look_up = functools.cache(lambda query: retriever.search([query], TOP_K)[0])
    self._title_of = {passage.id: passage.title for passage in passages}

  def play(self, task: Task, rng, habit: str | None = None):
    """Returns (prompt, [(turn, observation), ..]) as texts; the last observation is empty.

    The habit is drawn from HABITS unless it is given.
    """
    habits = HABITS[task.hops]
    habit = habit or rng.choice(list(habits), p=list(habits.values()))
    env = search.SearchEnv(task, self._look_up, max_searches=4, top_k=TOP_K, prompt='short')
    prompt, _ = env.reset()
    steps = self._steps(task)
    asked = steps[0].question
    turns = []

    def act(thought, action):
      text = f'<think> {thought}</think>{action}'
      query = env.query(text)
      turns.append((text, env.step(text, query and self._look_up(query))[0]))

    if habit == 'malformed':
      act(asked, str(rng.choice(['</search>', '<answer></search>'])))
      habit = rng.choice(['good', 'guess'])
    if habit == 'lost':  # looks up the kind of thing that is asked for, not the thing itself
      act(asked, f'<search> {asked.split()[0]}</search>')
    if habit in ('guess', 'lost'):
      act(asked, '<answer> unknown</answer>')
      return prompt, turns
    if habit == 'early':
      steps = steps[: rng.integers(1, len(steps))]
    seen = ''
    for step in steps:
      act(seen + step.question, f'<search> {step.title}</search>')
      seen = f'{step.quote} {step.found}. '
    act(seen[:-2], f'<answer> {steps[-1].found}</answer>')
    return prompt, turns

  def drill(self, task: Task):
    """Returns [('', observation)], what the last search of the task shows."""
    passages = self._look_up(self._title_of[task.gold[-1]])
    return [('', search.observation_text(passages, 'short'))]

  def _steps(self, task):
    """Returns the task's chain with earlier findings in place of #1, #2, .."""
    steps = []
    for (question, found), passage in zip(task.steps, task.gold, strict=True):
      quote = next(quote for start, quote in QUOTES.items() if question.startswith(start))
      for i, earlier in enumerate(steps, 1):
        question = question.replace(f'#{i}', earlier.found)
      steps.append(Step(question, self._title_of[passage], quote, found))
    return steps


class Step(typing.NamedTuple):
  """One hop of a question."""

  question: str  # 'capital of France'
  title: str  # what to search for: 'France'
  quote: str  # 'capital is'
  found: str  # 'Paris'


class Disguise:
  """Renames the people, places and numbers of a demonstration consistently.

  From a few hundred entities a model would memorise facts and names. With new names it learns to
  read and copy instead, and can answer about entities that it has never seen. A new name has the
  shape of a real one of the training split: 'Bosnia and Herzegovina' -> 'Tirana and Oslo'. Names of
  several words are rare in that split, and hard to copy where they share words with others, as
  Guatemala City does with Guatemala. Both kinds are more frequent here.
  """

  def __init__(self, tasks, passages, tokenizer):
    self._names = {passage.title for passage in passages} | {
        found for task in tasks for _, found in task.steps
    }
    shapes = sorted(
        {
            found
            for task in tasks
            for _, found in task.steps
            if re.fullmatch(r"[A-Z][A-Za-z' -]*", found)
        }
    )
    kind = lambda shape: 2 if re.search(r' [a-z]', shape) else len(re.findall(WORD, shape)) > 1
    self._shapes = [
        [shape for shape in shapes if kind(shape) == k] for k in range(len(SHAPE_SHARES))
    ]
    self._small = sorted({word for shape in shapes for word in re.findall(SMALL, shape)})
    vocabulary = tokenizer.pieces(range(tokenizer.vocab_size))
    self._words = [piece[1:] for piece in vocabulary if re.fullmatch(r' [A-Z][A-Za-z]*', piece)]
    self._parts = [piece for piece in vocabulary if re.fullmatch(r'[A-Z][a-z]+', piece)]

  def __call__(self, prompt, turns, rng):
    if rng.random() < REAL_SHARE:
      return prompt, turns
    known = {}
    rename = lambda text: self._rename(text, known, rng)
    return rename(prompt), [(rename(turn), rename(observation)) for turn, observation in turns]

  def _rename(self, text, known, rng):
    words = re.split(r'(\W)', text)  # words at even places, separators at odd ones
    renamed, i = [], 0
    while i < len(words):
      end = next(
          (
              j
              for j in range(min(len(words), i + 13), i, -1)
              if words[i][:1].isupper() and ''.join(words[i:j]) in self._names
          ),
          i + 1,
      )
      name = ''.join(words[i:end])
      if words[i : i + 3] == ['In', ' ', 'which']:  # not the symbol of indium
        pass
      elif name in self._names and words[i][:1].isupper():
        name = known.setdefault(name, self._new_name(known, rng))
      elif name.isdigit():
        name = known.setdefault(name, str(rng.integers(10 ** len(name) // 10, 10 ** len(name))))
      renamed.append(name)
      i = end
    return ''.join(renamed)

  def _new_name(self, known, rng):
    kind = rng.choice(len(SHAPE_SHARES), p=SHAPE_SHARES)
    shape = self._shapes[kind][rng.integers(len(self._shapes[kind]))]
    used = [word for name in known.values() for word in re.findall(WORD, name)]
    own = set()

    def word(match):
      pool = self._words
      if match[0].islower():
        pool = self._small if rng.random() < SMALL_SHARE else [match[0]]
      elif match.start() and shape[match.start() - 1] != ' ':  # as in Guinea-Bissau
        pool = self._parts
      elif set(used) - own and kind and rng.random() < SHARED_SHARE:
        pool = used
      while (chosen := pool[rng.integers(len(pool))]) in own:
        pass
      own.update([chosen] if chosen[0].isupper() else [])
      return chosen

    while (name := re.sub(f'{WORD}|{SMALL}', word, shape)) in known.values():
      own.clear()
    return name


def train_tokenizer(tasks, passages, demonstrator, folder):
  """Trains a byte-level BPE and saves it to `folder`.

  It has few merges, and every word of passages, questions and demonstrations as one token
  (`ignore_merges`, as in Llama 3), because a name that is one token is far easier to copy.
  """
  tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
  # A tag is a piece of its own, so it becomes one token and never merges with its neighbours.
  pieces = TAG + r'| ?\p{L}+| ?\d{1,2}| ?[^\s\p{L}\d<]+|<|\s+'
  tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
      [
          tokenizers.pre_tokenizers.Split(tokenizers.Regex(pieces), 'isolated'),
          tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
      ]
  )
  tokenizer.decoder = tokenizers.decoders.ByteLevel()
  texts = [space + str(number) for number in range(100) for space in ('', ' ')]
  texts += [
      search.observation_text([passage], 'short') for passage in passages if passage.id[:2] in KINDS
  ]
  for task in tasks:
    for habit in 'good', 'lost':
      prompt, turns = demonstrator.play(task, None, habit)
      texts += [prompt, *(turn for turn, _ in turns)]

  tokenizer.train_from_iterator(
      texts,
      tokenizers.trainers.BpeTrainer(
          vocab_size=MERGED,
          special_tokens=[EOS],
          show_progress=False,
          initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
      ),
  )
  model = json.loads(tokenizer.to_str())['model']
  words = {word for text in texts for word, _ in tokenizer.pre_tokenizer.pre_tokenize_str(text)}
  for word in sorted(words):
    model['vocab'].setdefault(word, len(model['vocab']))
  tokenizer.model = tokenizers.models.BPE(
      model['vocab'], [tuple(pair) for pair in model['merges']], ignore_merges=True
  )
  tokenizer.save(os.path.join(folder, 'tokenizer.json'))
  with open(os.path.join(folder, 'tokenizer_config.json'), 'w', encoding='utf-8') as file:
    json.dump(
        {
            'tokenizer_class': 'PreTrainedTokenizerFast',
            'eos_token': EOS,
            'pad_token': EOS,
            'model_max_length': 1024,
        },
        file,
        indent=2,
    )


def encode(tokenizer, prompt, turns) -> supervised.Demonstration:
  """Encodes a demonstration, with READ_WEIGHT on prompt and observation tokens that recur.

  A name cannot be predicted the first time that it appears, so learning it would be noise.
  """
  row = supervised.encode(tokenizer, prompt, turns, MAX_OBSERVATION, READ_WEIGHT)
  return row._replace(
      weights=np.where(_recurs(row.tokens), row.weights, row.weights * (row.weights == 1))
  )


def encode_drill(tokenizer, observation, rng) -> supervised.Demonstration:
  """Encodes an observation and thoughts that quote its facts in random order: practice in copying.

  The loss counts the values and where they end.
  """
  read = chat.encode_observation(tokenizer, observation, MAX_OBSERVATION)
  ids, weights = list(read), list(READ_WEIGHT * _recurs(read))
  facts = FACT.findall(observation)
  for i in rng.permutation(len(facts)):
    quote, value = facts[i]
    for text, weight in ((f'<think> {quote}', 0), (f' {value}</think>', 1)):
      spoken = tokenizer.encode(text)
      ids += spoken
      weights += [weight] * len(spoken)
  return supervised.Demonstration(np.array(ids, np.int32), np.array(weights, np.float32))


def _recurs(tokens):
  """Returns which tokens appeared before."""
  return np.array([token in tokens[:i] for i, token in enumerate(tokens)])


if __name__ == '__main__':
  malloc.restart()
  app.run(main)
