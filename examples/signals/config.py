"""Two copies of a policy agree on a code by ST-PPO: an environment with two roles, exchanged.

python run.py --config=examples/signals/config.py --workdir=/tmp/signals
"""

from examples import settings


def get_config(mode=''):
  config = settings.tiny('signals')
  config.data.source = 'examples.signals.env:load'
  config.env.kind = 'examples.signals.env:Signals'
  config.env.max_searches = 2
  config.rollout.max_prompt = 16
  config.rollout.max_turn = 4
  config.rollout.max_observation = 16
  config.rollout.max_total = 64
  config.rollout.chunks = (8,)
  config.algorithm.entropy_coef = 0.01
  config.algorithm.advantage = 'turn_gae'
  config.algorithm.gamma = 0.0  # what a turn earns does not depend on the other round
  config.actor.lr = 5e-4
  config.train.length_buckets = (64,)
  return settings.with_mode(config, mode)
