"""Generated shell tasks in a simulated shell by PPO, after Endless Terminals.

python run.py --config=examples/terminals/config.py --workdir=/tmp/terminals
"""

from examples import settings


def get_config(mode=''):
  config = settings.tiny('terminals')
  config.data.source = 'examples.terminals.env:load'
  config.env.kind = 'examples.terminals.env:Terminals'
  config.env.max_searches = 4
  config.rollout.max_prompt = 64
  config.rollout.max_turn = 24
  config.rollout.max_observation = 48
  config.rollout.max_total = 192
  config.rollout.chunks = (16, 32)
  config.algorithm.variant = 'ppo'
  config.algorithm.clip_high = 0.28  # the paper's
  config.actor.lr = 5e-4
  config.critic.lr = 1e-3
  config.train.updates = 30
  config.train.episodes = 128
  config.train.mini_batch = 32
  config.train.length_buckets = (96, 192)
  config.eval.every = 10
  config.eval.rows = 128
  config.log.episodes_every = 10
  return settings.with_mode(config, mode)
