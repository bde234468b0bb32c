"""Guess a number by ST-PPO: an environment of several chat turns with a reward for each.

python run.py --config=examples/guess_number/config.py --workdir=/tmp/guess_number
"""

from examples import settings


def get_config(mode=''):
  config = settings.tiny('guess_number')
  config.data.source = 'examples.guess_number.env:load'
  config.env.kind = 'examples.guess_number.env:GuessNumber'
  config.env.options = {'low': 1, 'high': 9}
  config.env.max_searches = 4
  config.rollout.max_prompt = 16
  config.rollout.max_turn = 4
  config.rollout.max_observation = 16
  config.rollout.max_total = 64
  config.rollout.chunks = (8,)
  config.train.length_buckets = (64,)
  return settings.with_mode(config, mode)
