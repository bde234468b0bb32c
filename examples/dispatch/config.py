"""A fleet of vehicles that share orders by OSPO: each choice is credited with its own reward.

python run.py --config=examples/dispatch/config.py --workdir=/tmp/dispatch
python run.py --config=examples/dispatch/config.py:grpo
python run.py --config=examples/dispatch/config.py:ppo
"""

from examples import settings


def get_config(mode=''):
  config = settings.tiny('dispatch')
  config.data.source = 'examples.dispatch.env:load'
  config.env.kind = 'examples.dispatch.env:Dispatch'
  config.env.max_searches = 3
  config.rollout.group_size = 4
  config.rollout.max_prompt = 48
  config.rollout.max_turn = 4
  config.rollout.max_observation = 40
  config.rollout.max_total = 128
  config.rollout.chunks = (16, 32)
  config.algorithm.variant = 'ospo'
  config.actor.lr = 6e-4
  config.critic.lr = 2e-3
  config.train.updates = 45
  config.train.episodes = 128
  config.train.mini_batch = 32
  config.train.length_buckets = (128,)
  config.eval.every = 15
  config.eval.rows = 128
  config.log.episodes_every = 10
  if mode in ('grpo', 'ppo'):
    config.name += f'_{mode}'
    config.algorithm.variant = mode
    mode = ''
  return settings.with_mode(config, mode, ':grpo, :ppo, ')
