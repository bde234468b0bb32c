"""GRPO on Qwen2.5-7B with Wikipedia search: no critic, groups of five episodes.

  python run.py --config=experiments/grpo_7b.py --config.model.folder=FOLDER/Qwen2.5-7B \\
    --config.data.source=FOLDER/train.parquet,FOLDER/test.parquet \\
    --config.retriever.url=http://HOST:8000/retrieve

Not run yet.
Does it fit?  python run.py --config=experiments/grpo_7b.py --mode=plan --topology=v5e:8x8
"""

from experiments import ppo_7b
from stppo_jax import config as schema


def get_config(mode=''):
  config = ppo_7b.get_config(mode)
  config.name = config.name.replace('ppo_7b', 'grpo_7b')
  # The row is Search-R1's GRPO (KL in the loss by k3), but for the mean: over episodes here, as in
  # GRPO's formula, over tokens there.
  config.algorithm = schema.AlgorithmSettings(variant='grpo')
  # Theirs: five episodes per question. Ours: the number of episodes, a quarter of theirs (512
  # questions times five). As there, ten steps are taken on them.
  config.rollout.group_size = 4 if mode else 5
  if not mode:
    config.train.episodes, config.train.mini_batch = 640, 64
  return config
