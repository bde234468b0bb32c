"""TextArena's Nim by ST-PPO against a scripted opponent: an environment of another package.

python run.py --config=examples/textarena_nim/config.py --workdir=/tmp/textarena_nim
"""

import os

from stppo_jax import config as schema


def get_config(mode=''):
  config = schema.Config()
  config.name = 'textarena_nim'
  config.env.kind = 'textarena:Nim-v0'
  config.env.options = {
      'piles': [2, 3],
      'opponent': 'examples.textarena_nim.player:opponent',
      'side': 'first',
  }
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
      max_observation=128,
      max_total=256,
      width=64,
      chunks=(32, 64),
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
      length_buckets=(128, 256),
      checkpoint_every=0,
  )
  config.eval = schema.EvalSettings(every=15, rows=128)
  config.log.tensorboard = False
  if mode == 'self':  # the policy plays both sides; held-out games are still against the script
    config.name += '_self'
    config.env.options |= {'opponent': 'self', 'eval_opponent': config.env.options['opponent']}
    config.rollout.max_prompt = 128
    config.model.folder += '_self'
  elif mode == 'smoke':
    config.name += '_smoke'
    config.train.updates = 2
    config.train.episodes = 32
    config.train.mini_batch = 16
    config.train.micro_batch = 8
    config.eval.episodes = 32
  elif mode:
    raise ValueError(f'mode {mode!r} does not exist: give :self, :smoke, or no mode')
  return config
