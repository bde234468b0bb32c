"""A creator that explores genres by PPO, after CreAgent.

python run.py --config=examples/creators/config.py --workdir=/tmp/creators
python run.py --config=examples/creators/config.py:full
"""

from examples import settings


def get_config(mode=''):
  config = settings.tiny('creators')
  config.data.source = 'examples.creators.env:load'
  config.env.kind = 'examples.creators.env:Creators'
  config.env.max_searches = 5
  config.rollout.max_prompt = 48
  config.rollout.max_turn = 8
  config.rollout.max_observation = 32
  config.rollout.max_total = 192
  config.rollout.chunks = (16, 32)
  config.algorithm.variant = 'ppo'
  config.actor.lr = 6e-4
  config.critic.lr = 2e-3
  config.train.updates = 30
  config.train.episodes = 128
  config.train.mini_batch = 32
  config.train.length_buckets = (192,)
  config.eval.every = 10
  config.eval.rows = 128
  config.log.episodes_every = 10
  if mode == 'full':
    config.name += '_full'
    config.env.options['full_information'] = True
    mode = ''
  return settings.with_mode(config, mode, ':full, ')
