"""The maze of LMRL-Gym by ST-PPO, from a policy that walks almost at random.

python run.py --config=examples/maze/config.py --workdir=/tmp/maze
python run.py --config=examples/maze/config.py:partly
"""

from examples import settings


def get_config(mode=''):
  config = settings.tiny('maze')
  config.data.source = 'examples.maze.env:load'
  config.env.kind = 'examples.maze.env:Maze'
  config.env.options = {'observed': 'fully'}
  config.rollout.max_prompt = 16
  config.rollout.max_turn = 2
  config.rollout.max_observation = 2
  config.rollout.max_total = 320
  config.rollout.chunks = (2, 8)
  config.algorithm.gamma = 0.99
  config.algorithm.lam = 0.95
  config.algorithm.entropy_coef = 0.02
  config.actor.lr = 3e-4
  config.critic.lr = 2e-3
  config.train.updates = 40
  config.train.episodes = 32
  config.train.mini_batch = 4
  config.train.micro_batch = 2
  config.train.critic_warmup = 0 if mode == 'smoke' else 2  # the smoke form has two updates
  config.train.length_buckets = (320,)
  config.eval.every = 20
  if mode == 'partly':
    config.name += '_partly'
    config.env.options['observed'] = 'partly'
    mode = ''
  return settings.with_mode(config, mode, ':partly, ')
