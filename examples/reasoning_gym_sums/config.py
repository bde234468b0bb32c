"""reasoning-gym's sums by GRPO: questions of another package, made from seeds.

python run.py --config=examples/reasoning_gym_sums/config.py --workdir=/tmp/reasoning_gym_sums
"""

import os

from stppo_jax import config as schema


def get_config(mode=''):
  config = schema.Config()
  config.name = 'reasoning_gym_sums'
  config.env.kind = 'reasoning_gym:chain_sum'
  config.env.options = {
      'min_terms': 2,
      'max_terms': 3,
      'min_digits': 1,
      'max_digits': 1,
      'tagged': False,
      'partial': False,
      'stop_strings': ['\n'],
  }
  config.env.max_searches = 0
  config.retriever.kind = 'none'
  config.model = schema.ModelSettings(
      folder=os.path.join(os.path.dirname(__file__), 'model'),
      dtype='float32',
      remat='none',
      scan_layers=False,
      logp_chunk=0,
  )
  config.rollout = schema.RolloutSettings(
      group_size=8,
      max_prompt=32,
      max_turn=8,
      max_observation=8,
      max_total=64,
      width=64,
      chunks=(32,),
      threads=0,
  )
  config.algorithm.variant = 'grpo'
  config.algorithm.kl_in = 'none'
  config.algorithm.entropy_coef = 0.0
  config.actor = schema.OptimizerSettings(lr=5e-4, warmup=0.0, weight_decay=0.0)

  config.train = schema.TrainSettings(
      updates=60,
      episodes=256,
      mini_batch=128,
      micro_batch=128,
      length_buckets=(64,),
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
