"""Quests in text worlds of growing size by ST-PPO, after the Practitioner's Guide.

python run.py --config=examples/rooms/config.py --workdir=/tmp/rooms
python run.py --config=examples/rooms/config.py:sparse
"""

from examples import settings


def get_config(mode=''):
  config = settings.tiny('rooms')
  config.data.source = 'examples.rooms.env:load'
  config.env.kind = 'examples.rooms.env:Rooms'
  config.env.options = {'rooms': 2, 'objects': 3, 'quest': 4, 'reward': 'dense'}
  config.env.max_searches = 6
  config.rollout.max_prompt = 64
  config.rollout.max_turn = 8
  config.rollout.max_observation = 32
  config.rollout.max_total = 192
  config.rollout.chunks = (16, 32)
  config.actor.lr = 3e-4
  config.critic.lr = 1e-3
  config.train.updates = 30
  config.train.episodes = 128
  config.train.mini_batch = 32
  config.train.length_buckets = (96, 192)
  config.eval.every = 10
  config.eval.rows = 128
  config.log.episodes_every = 10
  if mode == 'sparse':
    config.name += '_sparse'
    config.env.options['reward'] = 'sparse'
    mode = ''
  return settings.with_mode(config, mode, ':sparse, ')
