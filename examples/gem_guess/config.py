"""GEM's GuessTheNumber by ST-PPO: an environment of another package, named by its ID.

python run.py --config=examples/gem_guess/config.py --workdir=/tmp/gem_guess
"""

from examples import settings


def get_config(mode=''):
  config = settings.tiny('gem_guess')
  config.env.kind = 'gem:game:GuessTheNumber-v0-easy'
  config.env.max_searches = 4
  config.rollout.max_prompt = 64
  config.rollout.max_turn = 8
  config.rollout.max_observation = 32
  config.rollout.max_total = 96
  config.rollout.chunks = (16, 64)
  config.train.length_buckets = (64, 96)
  return settings.with_mode(config, mode)
