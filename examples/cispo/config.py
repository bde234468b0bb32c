"""CISPO on the embedded questions with the embedded model: the default run with another algorithm.

python run.py --config=examples/cispo/config.py
"""

from experiments import st_ppo_tiny
from stppo_jax import config as schema


def get_config(mode=''):
  config = st_ppo_tiny.base(mode)
  config.name = config.name.replace('st_ppo_tiny', 'cispo')
  config.algorithm = schema.AlgorithmSettings(variant='examples.cispo.algorithm:CISPO')
  config.rollout.group_size = 8
  return config
