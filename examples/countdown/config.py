"""Countdown by GRPO: your own reward, questions and environment, and no retriever.

python run.py --config=examples/countdown/config.py --workdir=/tmp/countdown
"""

import os

from stppo_jax import config as schema


def get_config(mode=''):
  config = schema.Config()
  config.name = 'countdown'
  config.data.source = 'examples.countdown.env:load'
  config.env.kind = 'examples.countdown.env:Countdown'
  config.env.reward = 'examples.countdown.env:check'
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
      max_prompt=16,
      max_turn=8,
      max_observation=8,
      max_total=32,
      width=64,
      chunks=(16,),
      threads=0,
  )
  config.algorithm.variant = 'grpo'
  config.algorithm.kl_in = 'none'
  config.algorithm.entropy_coef = 0.0
  config.actor = schema.OptimizerSettings(lr=1e-3, warmup=0.0, weight_decay=0.0)
  config.train = schema.TrainSettings(
      updates=40,
      episodes=256,
      mini_batch=128,
      micro_batch=128,
      length_buckets=(32,),
      checkpoint_every=0,
  )
  config.eval = schema.EvalSettings(every=10, rows=128)
  config.log.tensorboard = False
  if mode == 'smoke':
    config.name += '_smoke'
    config.train.updates = 2
    config.train.episodes = 64
    config.train.mini_batch = 64
    config.train.micro_batch = 64
    config.eval.episodes = 32
  elif mode:
    raise ValueError(f'mode {mode!r} does not exist: give :smoke, or no mode')
  return config
