"""GEM's GuessTheNumber by ST-PPO: an environment of another package, named by its ID.

python run.py --config=examples/gem_guess/config.py --workdir=/tmp/gem_guess
"""

import os

from stppo_jax import config as schema


def get_config(mode=''):
  config = schema.Config()
  config.name = 'gem_guess'
  config.env.kind = 'gem:game:GuessTheNumber-v0-easy'
  config.env.max_searches = 4
  config.retriever.kind = 'none'
  config.model = schema.ModelSettings(
      folder=os.path.join(os.path.dirname(__file__), 'model'),
      dtype='float32',
      remat='none',
      scan_layers=False,
      logp_chunk=0,
  )
  config.rollout = schema.RolloutSettings(
      max_prompt=64,
      max_turn=8,
      max_observation=32,
      max_total=96,
      width=64,
      chunks=(16, 64),
      threads=0,
  )
  config.algorithm.variant = 'st_ppo'
  config.algorithm.kl_in = 'none'
  config.algorithm.entropy_coef = 0.0
  config.actor = schema.OptimizerSettings(lr=1e-3, warmup=0.0, weight_decay=0.0)
  config.critic = schema.OptimizerSettings(lr=2e-3, warmup=0.0, weight_decay=0.0)
  config.train = schema.TrainSettings(
      updates=60,
      episodes=256,
      mini_batch=64,
      micro_batch=32,
      length_buckets=(64, 96),
      checkpoint_every=0,
  )
  config.eval = schema.EvalSettings(every=15, rows=128)
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
