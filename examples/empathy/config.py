"""A simulated user with a hidden need by PPO, after RLVER: the emotion is the reward.

python run.py --config=examples/empathy/config.py --workdir=/tmp/empathy
"""

from examples import settings


def get_config(mode=''):
  config = settings.tiny('empathy')
  config.data.source = 'examples.empathy.env:load'
  config.env.kind = 'examples.empathy.env:Empathy'
  config.env.max_searches = 8
  config.rollout.max_prompt = 64
  config.rollout.max_turn = 24
  config.rollout.max_observation = 48
  config.rollout.max_total = 192
  config.rollout.chunks = (16, 32)
  config.algorithm.variant = 'ppo'
  config.actor.lr = 3e-4
  config.health.repeated = 0.0  # a good reply helps again
  config.critic.lr = 1e-3
  config.train.updates = 30
  config.train.episodes = 128
  config.train.mini_batch = 32
  config.train.length_buckets = (96, 192)
  config.eval.every = 10
  config.eval.rows = 128
  config.log.episodes_every = 10
  return settings.with_mode(config, mode)
