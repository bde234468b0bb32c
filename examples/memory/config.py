"""A manager and an answerer share a memory by PPO, after Memory-R1: two roles, one policy.

python run.py --config=examples/memory/config.py --workdir=/tmp/memory
"""

import os

from stppo_jax import config as schema


def get_config(mode=''):
  config = schema.Config()
  config.name = 'memory'
  config.data.source = 'examples.memory.env:load'
  config.env.kind = 'examples.memory.env:Memory'
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
      max_turn=24,
      max_observation=48,
      max_total=192,
      width=64,
      chunks=(16, 32),
      threads=0,
  )
  config.algorithm.variant = 'ppo'
  config.algorithm.kl_in = 'none'
  config.algorithm.entropy_coef = 0.0
  config.actor = schema.OptimizerSettings(lr=6e-4, warmup=0.0, weight_decay=0.0)
  config.critic = schema.OptimizerSettings(lr=1e-3, warmup=0.0, weight_decay=0.0)
  config.train = schema.TrainSettings(
      updates=30,
      episodes=128,
      mini_batch=32,
      micro_batch=32,
      length_buckets=(96, 192),
      checkpoint_every=0,
  )
  config.eval = schema.EvalSettings(every=10, rows=128)
  config.log.tensorboard = False
  config.log.episodes_every = 10
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
