"""Sums with a calculator by ST-PPO: a tool call, its result, an answer.

python run.py --config=examples/calculator/config.py --workdir=/tmp/calculator
"""

from examples import settings


def get_config(mode=''):
  config = settings.tiny('calculator')
  config.data.source = 'examples.calculator.questions:load'
  config.env.kind = 'tools'
  config.env.tools = ('calculator',)
  config.env.options = {'form': 'hermes', 'frame': 'inline'}
  config.env.max_searches = 2
  config.rollout.max_prompt = 96
  config.rollout.max_turn = 24
  config.rollout.max_observation = 24
  config.rollout.max_total = 192
  config.rollout.chunks = (16, 64)
  config.train.updates = 40
  config.train.length_buckets = (96, 192)
  config.eval.every = 10
  return settings.with_mode(config, mode)
