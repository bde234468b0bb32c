r"""Makes a small model that can play an environment badly: a tokenizer, demonstrations, imitation.

  python -m scripts.warm_start --config=examples/gem_guess/config.py \
      --player=examples.gem_guess.player:Player

The player is a class as for `rollout.demonstrations`: made with a random.Random per episode, it may
have `begin(task)`, and `act(observation)` returns its action, or '' to end the episode. It plays
the config's environment, on the questions that it trains on if the config names some; where there
are several roles, there is a player for each. Tokens are bytes, and byte pairs of the episodes: a
sentence that the environment always says becomes a few tokens, while each digit stays one. Writes
the folder that config.model.folder names, and replaces only a model of its own there.
"""

import argparse
import collections
from collections.abc import Iterable
from collections.abc import Sequence
import importlib.util
import itertools
import json
import pathlib
import random
import sys

import jax
import numpy as np
import tokenizers

from stppo_jax import plugins
from stppo_jax.assembly import components
from stppo_jax.envs import factory
from stppo_jax.envs import protocol
from stppo_jax.models import convert
from stppo_jax.models import decoder
from stppo_jax.rollout import demonstrations
from stppo_jax.text import tokenizer as chat
from stppo_jax.training import supervised
from stppo_jax.types import Task
from stppo_jax.types import UserError

CONTROLS = ['<|end|>', '<|user|>', '<|agent|>']
TEMPLATE = (
    "{% for m in messages %}{{ '<|user|>' if m.role == 'user' else '<|agent|>' }}{{ m.content }}"
    '<|end|>{% endfor %}{% if add_generation_prompt %}<|agent|>{% endif %}'
)
# What a role read and did: the arguments of chat.encode_prompt; of each turn (action, observation).
Played = tuple[tuple[str, Sequence[dict], str], list[tuple[str, str]]]
FIRST_SEED = 2**31  # above those of any split


def main():
  parser = argparse.ArgumentParser(description=__doc__.partition('\n')[0])
  parser.add_argument('--config', required=True, help='FILE[:mode] of the experiment')
  parser.add_argument('--player', required=True, help='module:class of the player')
  parser.add_argument('--episodes', type=int, default=4000, help='episodes to imitate')
  parser.add_argument('--steps', type=int, default=600, help='optimizer steps')
  parser.add_argument('--vocabulary', type=int, default=1000, help='tokens at most')
  parser.add_argument('--words', action='store_true', help='no token spans several words')
  parser.add_argument('--width', type=int, default=64, help='width of the model')
  try:
    _make(parser.parse_args())
  except UserError as error:
    sys.exit(f'warm_start: {error}')


def _make(args: argparse.Namespace) -> None:
  config = load_config(args.config)
  if config.model.folder == 'embedded':
    raise UserError(
        f'--config={args.config}: set config.model.folder to the folder where the model is to be '
        'written'
    )
  named = components.resolve(config)  # before the folder exists, which has no tokenizer yet
  folder = pathlib.Path(config.model.folder)
  _check_own(folder)
  try:
    folder.mkdir(parents=True, exist_ok=True)
  except OSError as error:
    raise UserError(f'config.model.folder={str(folder)!r} ({error}): give another one') from error
  tasks = tasks_of(config, named, args.episodes)
  make_player = plugins.load('player', args.player, {})
  kind, seeds = named.env_with_retriever, itertools.count(FIRST_SEED)
  played = [play(kind, make_player, task, seed) for task, seed in zip(tasks, seeds)]
  episodes = [row for rows in played for row in rows]
  write_tokenizer(folder, episodes[:2000], args.vocabulary, args.words)
  tokenizer = chat.load_tokenizer(str(folder))
  framing = chat.make_framing(tokenizer, kind.frame, config.rollout.max_observation)
  pool = [encode(tokenizer, framing, *episode) for episode in episodes]
  lengths = sorted(len(row.tokens) for row in pool)
  print(f'{tokenizer.vocab_size} tokens; episodes of {lengths[0]} to {lengths[-1]} tokens')
  model = decoder.ModelConfig(
      vocab_size=tokenizer.vocab_size,
      d_model=args.width,
      num_layers=2,
      num_heads=4,
      num_kv_heads=2,
      head_dim=args.width // 4,
      d_ff=3 * args.width,
      tie_embeddings=True,
      family='llama',
      scan_layers=False,
  )
  params = supervised.train(
      decoder.init(jax.random.key(0), model),
      model,
      pool,
      rows=32,
      length_buckets=(32, 64, 96, 128, 192, 256, 384, 512, 1024),
      steps=args.steps,
      optimizer=supervised.make_optimizer(3e-3, args.steps),
      seed=0,
  )
  convert.save_hf(str(folder), model, jax.device_get(params))


def _check_own(folder: pathlib.Path) -> None:
  """Raises a UserError if a folder holds files, and no model of this script."""
  path = folder / 'tokenizer.json'
  is_own = path.is_file() and CONTROLS[-1] in path.read_text(encoding='utf-8')
  if folder.is_dir() and any(folder.iterdir()) and not is_own:
    raise UserError(
        f'config.model.folder={str(folder)!r} holds files that this script has not written, and a '
        'new model would replace them: give a new folder. To train an existing model: python '
        'run.py sft'
    )


def load_config(path: str):
  """Returns what get_config of an experiment file gives; `path` is FILE[:mode]."""
  file, _, mode = path.partition(':')
  if not pathlib.Path(file).is_file() or not file.endswith('.py'):
    raise UserError(f'--config={file}: no such Python file: give FILE.py or FILE.py:mode')
  spec = importlib.util.spec_from_file_location('warm_start_config', file)
  assert spec is not None and spec.loader is not None, file
  module = importlib.util.module_from_spec(spec)
  sys.modules[spec.name] = module
  try:
    spec.loader.exec_module(module)
    return module.get_config(mode)
  except Exception as error:  # whatever a user's file may raise
    message = ' '.join(str(error).split())
    raise UserError(f'--config={path}: {type(error).__name__}: {message}: correct it') from error


def tasks_of(config, named: components.Components, number: int) -> Iterable[Task]:
  """Returns tasks to play: questions of the config's data, or seeds above those of a run."""
  asks_questions = config.env.kind in components.ENVIRONMENTS
  if config.data.source == 'embedded' and not asks_questions:
    return [Task(str(FIRST_SEED + i), seed=FIRST_SEED + i) for i in range(number)]
  questions = named.load_tasks(config.data.train_split)
  by_environment = collections.defaultdict(list)  # those of a mix take turns
  for task in questions:
    by_environment[task.environment].append(task)
  turns = zip(*map(itertools.cycle, by_environment.values()))
  return itertools.islice(itertools.chain.from_iterable(turns), number)


def play(kind: factory.EnvFactory, make_player, task: Task, seed: int) -> list[Played]:
  """Plays one episode; returns what each role read and did."""
  env, rng = kind(task, seed), random.Random(seed)
  text, info = env.reset(seed=seed)
  players, prompts, turns, over = {}, {}, {}, False
  while not over:
    role, observation = info['role'] if kind.roles else '', protocol.full_text(text, info)
    if role in players:
      turns[role][-1] = turns[role][-1][0], observation
    else:
      first = random.Random(seed) if not players else random.Random(rng.random())
      prompts[role] = observation, info.get('tools', ()), info.get('declaration', '')
      players[role], turns[role] = demonstrations.begin(make_player, task, first), []
    action = players[role].act(observation)
    if not action:  # it ends the episode
      break
    turns[role].append((action, ''))
    text, _, terminated, truncated, info = env.step(action)
    over = terminated or truncated
  return [(prompts[role], turns[role]) for role in players]


def encode(tokenizer, framing, prompt, turns) -> supervised.Demonstration:
  """Returns the tokens of an episode, as a rollout has them, and which of them to imitate."""
  ids = chat.encode_prompt(tokenizer, *prompt)
  weights = [0.0] * len(ids)
  for action, observation in turns:
    said = tokenizer.encode(action)
    said += [] if framing.frame is None else [tokenizer.eos_ids[0]]
    read = framing.encode(observation, said) if observation else []
    ids, weights = [*ids, *said, *read], [*weights, *[1.0] * len(said), *[0.0] * len(read)]
  return supervised.Demonstration(np.array(ids, np.int32), np.array(weights, np.float32))


def write_tokenizer(folder: pathlib.Path, episodes, vocabulary: int, words: bool) -> None:
  """Writes a tokenizer of bytes, byte pairs of these episodes and the control tokens."""
  library = tokenizers.Tokenizer(tokenizers.models.BPE())
  library.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
      [
          tokenizers.pre_tokenizers.Digits(individual_digits=True),
          tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=words),
      ]
  )
  library.decoder = tokenizers.decoders.ByteLevel()
  trainer = tokenizers.trainers.BpeTrainer(
      vocab_size=vocabulary,
      min_frequency=100,
      special_tokens=CONTROLS,
      initial_alphabet=sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()),
      show_progress=False,
  )
  texts = (
      text
      for (question, _, declaration), turns in episodes
      for text in (declaration + question, *(t for turn in turns for t in turn))
  )
  library.train_from_iterator(texts, trainer)
  library.save(str(folder / 'tokenizer.json'))
  settings = {'eos_token': CONTROLS[0], 'pad_token': CONTROLS[0], 'chat_template': TEMPLATE}
  (folder / 'tokenizer_config.json').write_text(json.dumps(settings))


if __name__ == '__main__':
  main()
