"""TextArena's Nim by ST-PPO against a scripted opponent: an environment of another package.

python run.py --config=examples/textarena_nim/config.py --workdir=/tmp/textarena_nim
"""

from examples import settings


def get_config(mode=''):
  config = settings.tiny('textarena_nim')
  config.env.kind = 'textarena:Nim-v0'
  config.env.options = {
      'piles': [2, 3],
      'opponent': 'examples.textarena_nim.player:opponent',
      'side': 'first',
  }
  config.env.max_searches = 4
  config.rollout.max_prompt = 64
  config.rollout.max_turn = 8
  config.rollout.max_observation = 128
  config.rollout.max_total = 256
  config.rollout.chunks = (32, 64)
  config.train.length_buckets = (128, 256)
  if mode == 'self':  # the policy plays both sides; held-out games are still against the script
    config.name += '_self'
    config.env.options |= {'opponent': 'self', 'eval_opponent': config.env.options['opponent']}
    config.rollout.max_prompt = 128
    config.model.folder += '_self'
    return config
  return settings.with_mode(config, mode, ':self, ')
