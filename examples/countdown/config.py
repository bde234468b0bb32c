"""Countdown by GRPO: your own reward, questions and environment, and no retriever.

python run.py --config=examples/countdown/config.py --workdir=/tmp/countdown
"""

from examples import settings


def get_config(mode=''):
  config = settings.tiny('countdown')
  config.data.source = 'examples.countdown.env:load'
  config.env.kind = 'examples.countdown.env:Countdown'
  config.env.reward = 'examples.countdown.env:check'
  config.env.max_searches = 0
  config.rollout.group_size = 8
  config.rollout.max_prompt = 16
  config.rollout.max_turn = 8
  config.rollout.max_observation = 8
  config.rollout.max_total = 32
  config.rollout.chunks = (16,)
  config.algorithm.variant = 'grpo'
  config.train.updates = 40
  config.train.mini_batch = 128
  config.train.micro_batch = 128
  config.train.length_buckets = (32,)
  config.eval.every = 10
  return settings.with_mode(config, mode)
