"""DARS-B on the embedded questions: large batches and full-batch steps (arXiv 2508.13755).

  python run.py --config=experiments/dars_b.py

DARS-B is settings alone (yangzhch6/DARS, read in the code): groups of eight, no division by the
spread of a group, no KL, and two epochs in which one optimizer step uses the whole batch. The
authors' batch has 3,072 episodes. This one has 256.

Seen on dev, seed 0: held-out exact match .43 -> .87 after 24 updates. Nothing is clipped.
"""

from experiments import st_ppo_tiny


def get_config(mode=''):
  config = st_ppo_tiny.base(mode)
  config.name = config.name.replace('st_ppo_tiny', 'dars_b')
  config.rollout.group_size = 8
  config.algorithm.variant = 'dr_grpo'
  config.algorithm.aggregation = 'token-mean'
  if not mode:
    config.train.updates = 24
    config.train.episodes = 256
    config.eval.every = 4
  config.train.mini_batch = config.train.episodes
  config.train.epochs = 2
  return config
