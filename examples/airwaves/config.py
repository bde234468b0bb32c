"""Ranks of adapters over a radio channel by PPO, after AirLLM.

python run.py --config=examples/airwaves/config.py --workdir=/tmp/airwaves
"""

from examples import settings


def get_config(mode=''):
  config = settings.tiny('airwaves')
  config.data.source = 'examples.airwaves.env:load'
  config.env.kind = 'examples.airwaves.env:Airwaves'
  config.env.max_searches = 5
  config.rollout.max_prompt = 32
  config.rollout.max_turn = 6
  config.rollout.max_observation = 24
  config.rollout.max_total = 144
  config.rollout.chunks = (16, 32)
  config.algorithm.variant = 'ppo'
  config.algorithm.advantage = 'turn_gae'
  config.algorithm.gamma = 0.0  # a choice has its own reward at once
  config.actor.lr = 6e-4
  config.critic.lr = 2e-3
  config.train.updates = 30
  config.train.episodes = 128
  config.train.mini_batch = 32
  config.train.length_buckets = (144,)
  config.eval.every = 10
  config.eval.rows = 128
  config.log.episodes_every = 10
  return settings.with_mode(config, mode)
