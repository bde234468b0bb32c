"""Writes a whole run small enough for a test: model, tokenizer, questions, passages and config.

The model is random, except that its output matrix favours a few whole actions, each one token. So
its episodes search, answer (sometimes correctly), and make invalid turns.
"""

import atexit
from collections.abc import Iterator
import contextlib
import dataclasses
import functools
import json
import logging
import os
import shutil
import tempfile
from typing import Any
from unittest import mock

import jax
import numpy as np
import tokenizers

from stppo_jax import config as schema
from stppo_jax.assembly import components
from stppo_jax.models import convert
from stppo_jax.models import decoder
from stppo_jax.models import sharding
from stppo_jax.monitoring import metrics as metrics_lib
from stppo_jax.net import calls
from stppo_jax.rollout import prepare
from stppo_jax.settings import objective
from stppo_jax.training import checkpoint
from stppo_jax.training import learner as learner_lib
from stppo_jax.training import state as train_state
from stppo_jax.training import update as update_lib
from tests.support import tiny_tokenizer

ACTIONS = (
    '<search> apple</search>',
    '<search> sky</search>',
    '<answer> red</answer>',
    '<answer> blue</answer>',
    '<answer> green</answer>',
)
COLOURS = {'apple': 'red', 'sky': 'blue', 'grass': 'green', 'blood': 'red', 'sea': 'blue'}


def on_one_device() -> contextlib.AbstractContextManager:
  """Runs have the first of the simulated devices, as most users do, whatever their config says."""
  mesh = sharding.make_mesh(1, 1, 1, jax.devices()[:1])
  return mock.patch.object(sharding, 'make_mesh', lambda *sizes: mesh)


@contextlib.contextmanager
def updates_compiled_ahead() -> Iterator[list[str]]:
  """Context manager in which no function of an update may be compiled when it is called.

  Yields the names of the functions that are compiled ahead, each as often as it is compiled. A
  function that an earlier run of this process has compiled is none of them.
  """
  functions = {f'Compiling jit({name})': name for name in update_lib.Functions._fields}
  ahead = []
  late = []

  def note(record):
    for start, name in functions.items():
      if record.getMessage().startswith(start):
        (ahead if record.threadName == calls.COMPILER else late).append(name)
    return False

  logger = logging.getLogger('jax._src.interpreters.pxla')
  level = logger.level
  logger.addFilter(note)
  logger.setLevel(logging.DEBUG)
  try:
    yield ahead
  finally:
    logger.setLevel(level)
    logger.removeFilter(note)
  assert not late, f'compiled when it was called: {late}'


@contextlib.contextmanager
def reading_policies_alone() -> Iterator[None]:
  """Context manager in which a critic, optimizer state or whole checkpoint is an AssertionError."""
  load_policy = prepare.load_policy

  def load(config, head='tokens', *args, **kwargs):
    assert head != 'value', 'a critic is loaded'
    return load_policy(config, head, *args, **kwargs)

  with contextlib.ExitStack() as resources:
    for owner, name in (
        (learner_lib, 'build'),
        (train_state, 'create'),
        (checkpoint.Checkpoints, 'restore'),
    ):
      error = AssertionError(f'{name} is called')
      resources.enter_context(mock.patch.object(owner, name, side_effect=error))
    resources.enter_context(mock.patch.object(prepare, 'load_policy', load))
    yield


@functools.cache
def shared_folder() -> str:
  """Returns a folder with what `write` writes. The tests of a process share it unchanged."""
  folder = tempfile.mkdtemp(prefix='stppo_tests_')
  atexit.register(shutil.rmtree, folder, ignore_errors=True)
  write_model(os.path.join(folder, 'model'))
  write_knowledge(os.path.join(folder, 'knowledge'))
  return folder


def write(folder: str) -> None:
  """Writes `folder`/model and `folder`/knowledge."""
  shutil.copytree(shared_folder(), folder, dirs_exist_ok=True)


def replace(config: schema.Config, values: dict[str, Any]) -> schema.Config:
  """Sets fields by their dotted paths, in which '__' is a dot too; returns the config."""
  for path, value in values.items():
    *parents, name = path.replace('__', '.').split('.')
    setattr(functools.reduce(getattr, parents, config), name, value)
  return config


def make_config(folder: str | None = None, **values: Any) -> schema.Config:
  """A run on what `write` wrote, with fields replaced: make_config(folder, train__updates=3)."""
  folder = folder or shared_folder()
  config = schema.Config()
  config.name = 'tiny_run'
  config.data = schema.DataSettings(source=os.path.join(folder, 'knowledge'))
  config.env = schema.EnvSettings(prompt='short', max_searches=2)
  config.retriever.top_k = 1
  config.model = schema.ModelSettings(
      folder=os.path.join(folder, 'model'),
      dtype='float32',
      remat='none',
      scan_layers=False,
      logp_chunk=0,
  )
  config.rollout = schema.RolloutSettings(
      max_prompt=64, max_turn=6, max_observation=48, max_total=192
  )
  config.algorithm.kl_in = 'none'
  config.actor = schema.OptimizerSettings(lr=1e-2, warmup=0.0)
  config.critic = schema.OptimizerSettings(lr=1e-2, warmup=0.0)
  config.train = schema.TrainSettings(
      updates=2,
      episodes=16,
      mini_batch=8,
      micro_batch=8,
      length_buckets=(192,),
      checkpoint_every=1,
      keep_checkpoints=3,
  )
  config.eval = schema.EvalSettings(every=1, rows=4)
  config.log.tensorboard = False
  return replace(config, values)


def state_after(config: schema.Config, workdir: str, updates: int) -> train_state.TrainState:
  """The checkpointed state, on the host."""
  state = load_learners(config).state
  with checkpoint.Checkpoints(workdir) as checkpoints:
    return jax.device_get(checkpoints.restore(updates, state))


def comparable_metrics(workdir: str, left_out: tuple[str, ...] = ()) -> list[dict[str, Any]]:
  """Returns the lines of metrics without timings and compiler figures."""
  left_out = ('timing_s/', 'perf/', *left_out)
  return [
      {k: v for k, v in row.items() if k != 'time' and not k.startswith(left_out)}
      for row in metrics_lib.read_metrics(workdir)
  ]


def load_learners(config: schema.Config) -> learner_lib.Learners:
  """The learners of a config, with their weights. Nothing else of a run is made."""
  parts = components.resolve(config)
  pad_id = parts.tokenizer.pad_id
  variant = objective.make_variant(config)
  return learner_lib.build(config, variant, prepare.load_policy, parts.policies, pad_id)


def write_model(folder, favoured=ACTIONS, strength=1.2, vocab_size=None, last=(), **shape):
  """Writes a random Qwen2 of one layer that favours some actions, and its tokenizer.

  `vocab_size`: of the model alone; by default the tokenizer's. With strength 1.2 two of three
  tokens are favoured ones, with 5 all are. It may be one number per action. The end of a turn
  follows the actions of `last`. `shape`: further fields of the ModelConfig.
  """
  os.makedirs(folder)
  tiny_tokenizer.write(folder)
  path = os.path.join(folder, 'tokenizer.json')
  tokenizer = tokenizers.Tokenizer.from_file(path)
  tokenizer.add_tokens(list(dict.fromkeys((*ACTIONS, *favoured))))
  tokenizer.save(path)
  config = decoder.ModelConfig(
      vocab_size=vocab_size or tokenizer.get_vocab_size(),
      d_model=16,
      num_layers=1,
      num_heads=2,
      num_kv_heads=1,
      head_dim=8,
      d_ff=32,
      qkv_bias=True,
  )
  config = dataclasses.replace(config, **shape)
  params = jax.tree.map(np.array, decoder.init(jax.random.key(0), config))
  # One coordinate of the residual is always large: its row of the output matrix is a bias.
  params['embed']['embedding'][:, 0] = 1.0
  ids = [tokenizer.token_to_id(action) for action in favoured]
  params['lm_head']['kernel'][0, [i for i in ids if i < config.vocab_size]] = strength
  if last:
    params['embed']['embedding'][[tokenizer.token_to_id(action) for action in last], 1] = 1.0
    params['lm_head']['kernel'][1, tokenizer.token_to_id(tiny_tokenizer.END)] = 2 * np.max(strength)
  convert.save_hf(folder, config, params)


def write_knowledge(folder):
  """Writes qa.jsonl with two data sets and two splits, and corpus.jsonl."""
  os.makedirs(folder)
  write_lines(
      os.path.join(folder, 'qa.jsonl'),
      [
          {
              'id': f'{split}-{thing}',
              'question': f'Which colour has {thing}?',
              'answers': [colour],
              'dataset': 'fruit' if thing == 'apple' else 'nature',
              'split': split,
              'hops': 1,
          }
          for split in ('train', 'dev')
          for thing, colour in COLOURS.items()
      ],
  )
  write_lines(
      os.path.join(folder, 'corpus.jsonl'),
      [
          {'id': thing, 'title': thing, 'text': f'{thing} is {colour}.'}
          for thing, colour in COLOURS.items()
      ],
  )


def write_lines(path, rows):
  with open(path, 'w', encoding='utf-8') as file:
    file.writelines(json.dumps(row) + '\n' for row in rows)
