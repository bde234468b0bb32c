"""GEM's Sudoku by ST-PPO: four by four, rewards on every turn.

python run.py --config=examples/gem_sudoku/config.py --workdir=/tmp/gem_sudoku
"""

from examples import settings


def get_config(mode=''):
  config = settings.tiny('gem_sudoku')
  config.env.kind = 'gem:game:Sudoku-v0-easy'
  config.env.max_searches = 6
  config.env.options = {'clues': 4, 'max_turns': 6}
  config.rollout.max_prompt = 128
  config.rollout.max_turn = 12
  config.rollout.max_observation = 96
  config.rollout.max_total = 512
  config.rollout.chunks = (16, 64)
  config.algorithm.entropy_coef = 0.003
  config.algorithm.gamma = 0.9  # a move is paid at once
  config.actor.lr = 3e-4
  config.train.updates = 30
  config.train.episodes = 128
  config.train.mini_batch = 32
  config.train.micro_batch = 16
  config.train.length_buckets = (256, 512)
  config.eval.every = 10
  config.eval.episodes = 128
  return settings.with_mode(config, mode)
