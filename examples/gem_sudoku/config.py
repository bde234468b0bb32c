"""GEM's Sudoku by ST-PPO: four by four, rewards on every turn.

python run.py --config=examples/gem_sudoku/config.py --workdir=/tmp/gem_sudoku
"""

import os

from stppo_jax import config as schema


def get_config(mode=''):
  config = schema.Config()
  config.name = 'gem_sudoku'
  config.env.kind = 'gem:game:Sudoku-v0-easy'
  config.env.max_searches = 6
  config.env.options = {'clues': 4, 'max_turns': 6}
  config.retriever.kind = 'none'
  config.model = schema.ModelSettings(
      folder=os.path.join(os.path.dirname(__file__), 'model'),
      dtype='float32',
      remat='none',
      scan_layers=False,
      logp_chunk=0,
  )
  config.rollout = schema.RolloutSettings(
      max_prompt=128,
      max_turn=12,
      max_observation=96,
      max_total=512,
      width=64,
      chunks=(16, 64),
      threads=0,
  )
  config.algorithm.variant = 'st_ppo'
  config.algorithm.kl_in = 'none'
  config.algorithm.entropy_coef = 0.003
  config.algorithm.gamma = 0.9  # a move is paid at once
  config.actor = schema.OptimizerSettings(lr=3e-4, warmup=0.0, weight_decay=0.0)
  config.critic = schema.OptimizerSettings(lr=2e-3, warmup=0.0, weight_decay=0.0)
  config.train = schema.TrainSettings(
      updates=30,
      episodes=128,
      mini_batch=32,
      micro_batch=16,
      length_buckets=(256, 512),
      checkpoint_every=0,
  )
  config.eval = schema.EvalSettings(every=10, rows=128, episodes=128)
  config.log.tensorboard = False
  if mode == 'smoke':
    config.name += '_smoke'
    config.train.updates = 2
    config.train.episodes = 32
    config.train.mini_batch = 16
    config.train.micro_batch = 8
    config.eval.episodes = 32
  elif mode:
    raise ValueError(f'mode {mode!r} does not exist: give :smoke, or no mode')
  return config
