"""Two copies of a policy agree on a code by ST-PPO: an environment with two roles, exchanged.

python run.py --config=examples/signals/config.py --workdir=/tmp/signals
"""

import os

from stppo_jax import config as schema


def get_config(mode=''):
  config = schema.Config()
  config.name = 'signals'
  config.data.source = 'examples.signals.env:load'
  config.env.kind = 'examples.signals.env:Signals'
  config.env.max_searches = 2
  config.retriever.kind = 'none'
  config.model = schema.ModelSettings(
      folder=os.path.join(os.path.dirname(__file__), 'model'),
      dtype='float32',
      remat='none',
      scan_layers=False,
      logp_chunk=0,
  )
  config.rollout = schema.RolloutSettings(
      max_prompt=16, max_turn=4, max_observation=16, max_total=64, width=64, chunks=(8,), threads=0
  )
  config.algorithm.variant = 'st_ppo'
  config.algorithm.kl_in = 'none'
  config.algorithm.entropy_coef = 0.01
  config.algorithm.advantage = 'turn_gae'
  config.algorithm.gamma = 0.0  # what a turn earns does not depend on the other round
  config.actor = schema.OptimizerSettings(lr=5e-4, warmup=0.0, weight_decay=0.0)
  config.critic = schema.OptimizerSettings(lr=2e-3, warmup=0.0, weight_decay=0.0)
  config.train = schema.TrainSettings(
      updates=60,
      episodes=256,
      mini_batch=64,
      micro_batch=32,
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
