"""S-PPO (token PPO divided by the norm of its clipping bias) on Qwen2.5-7B with Wikipedia search.

  python run.py --config=experiments/s_ppo_7b.py --config.model.folder=FOLDER/Qwen2.5-7B \\
    --config.data.source=FOLDER/train.parquet,FOLDER/test.parquet \\
    --config.retriever.url=http://HOST:8000/retrieve

Not run yet.
Does it fit?  python run.py --config=experiments/s_ppo_7b.py --mode=plan --topology=v5e:8x8
"""

from experiments import ppo_7b
from stppo_jax import config as schema


def get_config(mode=''):
  config = ppo_7b.get_config(mode)
  config.name = config.name.replace('ppo_7b', 's_ppo_7b')
  config.algorithm = schema.AlgorithmSettings(
      variant='s_ppo'
  )  # a mean over episodes, the paper's 1/|y|
  return config
