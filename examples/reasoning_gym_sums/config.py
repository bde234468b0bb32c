"""reasoning-gym's sums by GRPO: questions of another package, made from seeds.

python run.py --config=examples/reasoning_gym_sums/config.py --workdir=/tmp/reasoning_gym_sums
"""

from examples import settings


def get_config(mode=''):
  config = settings.tiny('reasoning_gym_sums')
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
  config.rollout.group_size = 8
  config.rollout.max_prompt = 32
  config.rollout.max_turn = 8
  config.rollout.max_observation = 8
  config.rollout.max_total = 64
  config.rollout.chunks = (32,)
  config.algorithm.variant = 'grpo'
  config.actor.lr = 5e-4
  config.train.mini_batch = 128
  config.train.micro_batch = 128
  config.train.length_buckets = (64,)
  return settings.with_mode(config, mode)
