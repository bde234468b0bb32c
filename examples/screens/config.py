"""Settings on text screens with a process reward model by PPO, after GUI-Shepherd.

python run.py --config=examples/screens/config.py --workdir=/tmp/screens
python run.py --config=examples/screens/config.py:outcome
python run.py --config=examples/screens/config.py:oracle
python run.py --config=examples/screens/config.py:judge --mode=eval
"""

from examples import settings
from examples.screens import judge


def get_config(mode=''):
  config = settings.tiny('screens')
  config.data.source = 'examples.screens.env:load'
  config.env.kind = 'examples.screens.env:Screens'
  config.env.options = {'reward': 'process'}
  config.env.max_searches = 6
  config.rollout.max_prompt = 48
  config.rollout.max_turn = 8
  config.rollout.max_observation = 32
  config.rollout.max_total = 192
  config.rollout.chunks = (16, 32)
  config.algorithm.variant = 'ppo'
  config.actor.lr = 3e-4
  config.critic.lr = 1e-3
  config.train.updates = 30
  config.train.episodes = 128
  config.train.mini_batch = 32
  config.train.length_buckets = (96, 192)
  config.eval.every = 10
  config.eval.rows = 128
  config.log.episodes_every = 10
  if mode in ('outcome', 'oracle'):
    config.name += f'_{mode}'
    config.env.options['reward'] = mode
    mode = ''
  elif mode == 'judge':
    config.name += '_judge'
    config.env.kind = 'examples.screens.env:Judgements'
    config.env.options = {}
    config.model.folder = str(judge.FOLDER)
    config.rollout.max_prompt = judge.LENGTH
    mode = ''
  return settings.with_mode(config, mode, ':outcome, :oracle, :judge, ')
