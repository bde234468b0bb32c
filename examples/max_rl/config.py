"""MaxRL on the embedded questions with the embedded model: the default run with another algorithm.

python run.py --config=examples/max_rl/config.py
"""

from experiments import st_ppo_tiny
from stppo_jax import config as schema


def get_config(mode=''):
  config = st_ppo_tiny.base(mode)
  config.name = config.name.replace('st_ppo_tiny', 'max_rl')
  config.algorithm = schema.AlgorithmSettings(variant='examples.max_rl.algorithm:MAX_RL')
  config.rollout.group_size = 8
  return config
