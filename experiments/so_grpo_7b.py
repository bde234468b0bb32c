"""SO-GRPO (GRPO with turn-level ratios and the correction) on Qwen2.5-7B with Wikipedia search.

  python run.py --config=experiments/so_grpo_7b.py --config.model.folder=FOLDER/Qwen2.5-7B \\
    --config.data.source=FOLDER/train.parquet,FOLDER/test.parquet \\
    --config.retriever.url=http://HOST:8000/retrieve

Not run yet.
Does it fit?  python run.py --config=experiments/so_grpo_7b.py --mode=plan --topology=v5e:8x8
"""

from experiments import grpo_7b
from stppo_jax import config as schema


def get_config(mode=''):
  config = grpo_7b.get_config(mode)
  config.name = config.name.replace('grpo_7b', 'so_grpo_7b')
  config.algorithm = schema.AlgorithmSettings(variant='so_grpo')
  return config
