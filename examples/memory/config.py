"""A manager and an answerer share a memory by PPO, after Memory-R1: two roles, one policy.

python run.py --config=examples/memory/config.py --workdir=/tmp/memory
"""

from examples import settings


def get_config(mode=''):
  config = settings.tiny('memory')
  config.data.source = 'examples.memory.env:load'
  config.env.kind = 'examples.memory.env:Memory'
  config.env.max_searches = 4
  config.rollout.max_prompt = 64
  config.rollout.max_turn = 24
  config.rollout.max_observation = 48
  config.rollout.max_total = 192
  config.rollout.chunks = (16, 32)
  config.algorithm.variant = 'ppo'
  config.actor.lr = 6e-4
  config.critic.lr = 1e-3
  config.train.updates = 30
  config.train.episodes = 128
  config.train.mini_batch = 32
  config.train.length_buckets = (96, 192)
  config.eval.every = 10
  config.eval.rows = 128
  config.log.episodes_every = 10
  return settings.with_mode(config, mode)
