"""A game behind an OpenEnv server by ST-PPO: see README.md for the server.

python run.py --config=examples/openenv_guess/config.py --workdir=/tmp/openenv_guess
"""

from examples import settings


def get_config(mode=''):
  config = settings.tiny('openenv_guess')
  config.env.kind = 'openenv:http://127.0.0.1:8000'
  config.env.max_searches = 4
  config.rollout.max_prompt = 64
  config.rollout.max_turn = 8
  config.rollout.max_observation = 32
  config.rollout.max_total = 96
  config.rollout.chunks = (16, 64)
  config.train.length_buckets = (64, 96)
  return settings.with_mode(config, mode)
