"""Sums by monologue, dialogue and analogue by PPO, after LTC.

python run.py --config=examples/messages/config.py --workdir=/tmp/messages
python run.py --config=examples/messages/config.py:monologue
python run.py --config=examples/messages/config.py:analogue
python run.py --config=examples/messages/config.py:lm
"""

from examples import settings
from examples.messages import env


def get_config(mode=''):
  config = settings.tiny('messages')
  config.data.source = 'examples.messages.env:load'
  config.env.kind = 'examples.messages.env:Messages'
  config.env.options = {'pattern': 'dialogue'}
  config.rollout.max_prompt = 48
  config.rollout.max_turn = 12
  config.rollout.max_observation = 40
  config.rollout.max_total = 80
  config.rollout.chunks = (16, 32)
  config.algorithm.variant = 'ppo'
  config.actor.lr = 6e-4
  config.critic.lr = 2e-3
  config.train.updates = 30
  config.train.length_buckets = (80,)
  config.eval.every = 10
  config.eval.rows = 128
  config.log.episodes_every = 10
  if mode == 'lm':
    config.name += '_lm'
    config.rollout.demonstrations = 'examples.messages.player:Expert'
    config.rollout.demonstrate_every = 8
    config.algorithm.imitation = 0.1
    mode = ''
  elif mode in (*env.PATTERNS, 'mixed'):
    config.name += f'_{mode}'
    config.env.options['pattern'] = mode
    mode = ''
  return settings.with_mode(config, mode, ':monologue, :analogue, :lm, :mixed, ')
