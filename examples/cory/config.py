"""Two copies of a model learn together and exchange their roles by PPO, after CORY.

python run.py --config=examples/cory/config.py --workdir=/tmp/cory
python run.py --config=examples/cory/config.py:alone
"""

from examples import settings


def get_config(mode=''):
  config = settings.tiny('cory')
  config.data.source = 'examples.cory.env:load'
  config.env.kind = 'examples.cory.env:Cory'
  config.model.role_parameters = 'own'
  config.rollout.max_prompt = 32
  config.rollout.max_turn = 4
  config.rollout.max_observation = 16
  config.rollout.max_total = 40
  config.rollout.chunks = (16,)
  config.algorithm.variant = 'ppo'
  config.algorithm.kl_in = 'reward'
  config.algorithm.kl_coef = 0.01
  config.critic.lr = 3e-3
  config.train.updates = 100
  config.train.length_buckets = (40,)
  config.eval.every = 20
  config.eval.rows = 128
  config.log.episodes_every = 10
  if mode == 'alone':
    config.name += '_alone'
    config.model.role_parameters = 'shared'
    config.env.options['alone'] = True
    mode = ''
  return settings.with_mode(config, mode, ':alone, ')
