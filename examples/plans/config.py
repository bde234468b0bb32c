"""Plans under constraints by PPO, after PDoctor: an evaluation suite that can train as well.

python run.py --config=examples/plans/config.py --workdir=/tmp/plans
"""

from examples import settings


def get_config(mode=''):
  config = settings.tiny('plans')
  config.data.source = 'examples.plans.env:load'
  config.env.kind = 'examples.plans.env:Plans'
  config.env.options = {'tools': 3, 'constraints': 2}
  config.env.max_searches = 5
  config.rollout.max_prompt = 64
  config.rollout.max_turn = 16
  config.rollout.max_observation = 16
  config.rollout.max_total = 128
  config.rollout.chunks = (16, 32)
  config.algorithm.variant = 'ppo'
  config.actor.lr = 6e-4
  config.critic.lr = 1e-3
  config.train.updates = 60
  config.train.episodes = 128
  config.train.mini_batch = 32
  config.train.length_buckets = (64, 128)
  config.eval.every = 15
  config.eval.rows = 128
  config.log.episodes_every = 10
  return settings.with_mode(config, mode)
