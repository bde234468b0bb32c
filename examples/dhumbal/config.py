"""Dhumbal, a card game, by PPO against a script.

python run.py --config=examples/dhumbal/config.py --workdir=/tmp/dhumbal
"""

from examples import settings


def get_config(mode=''):
  config = settings.tiny('dhumbal')
  config.data.source = 'examples.dhumbal.env:load'
  config.env.kind = 'examples.dhumbal.env:Dhumbal'
  config.env.options = {'opponents': ['aggressive']}
  config.env.max_searches = 8
  config.rollout.max_prompt = 64
  config.rollout.max_turn = 16
  config.rollout.max_observation = 48
  config.rollout.max_total = 384
  config.rollout.chunks = (16, 32)
  config.algorithm.variant = 'ppo'
  config.actor.lr = 3e-4
  config.critic.lr = 1e-3
  config.train.updates = 30
  config.train.episodes = 128
  config.train.mini_batch = 32
  config.train.length_buckets = (192, 384)
  config.eval.every = 10
  config.eval.rows = 128
  config.log.episodes_every = 10
  return settings.with_mode(config, mode)
