"""ST-PPO on Qwen2.5-7B, medical multiple choice with search over medical passages.

  python run.py --config=experiments/st_ppo_med_7b.py --config.model.folder=FOLDER/Qwen2.5-7B \\
    --config.data.source=FOLDER/qa.jsonl --config.data.corpus=FOLDER/corpus.jsonl

Not run yet.
Does it fit?  python run.py --config=experiments/st_ppo_med_7b.py --mode=plan --topology=v5e:8x8

Questions with `options` and the correct letter as `answer` become multiple choice. The paper names
this task but not its settings, so all differences from st_ppo_7b are ours. Retrieval is in-process
BM25.
"""

from experiments import st_ppo_7b
from stppo_jax import config as schema


def get_config(mode=''):
  config = st_ppo_7b.get_config(mode)
  config.name = config.name.replace('st_ppo_7b', 'st_ppo_med_7b')
  if mode:  # the embedded medical questions
    config.data.datasets = ('medical',)
    return config
  config.data = schema.DataSettings(
      source='data/medical/qa.jsonl', corpus='data/medical/corpus.jsonl'
  )
  config.retriever = schema.RetrieverSettings(kind='bm25', top_k=3)
  config.train.updates = 200
  return config
