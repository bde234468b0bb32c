"""ST-PPO on Qwen3-8B with Wikipedia search: another model family, as the paper's reviewers asked.

  python run.py --config=experiments/st_ppo_qwen3_8b.py --config.model.folder=FOLDER/Qwen3-8B \\
    --config.data.source=FOLDER/train.parquet,FOLDER/test.parquet \\
    --config.retriever.url=http://HOST:8000/retrieve

Not run yet.
Does it fit?  python run.py --config=experiments/st_ppo_qwen3_8b.py --mode=plan --topology=v5e:8x8
"""

from experiments import st_ppo_7b


def get_config(mode=''):
  config = st_ppo_7b.get_config(mode)
  config.name = config.name.replace('7b', 'qwen3_8b')
  if not mode:
    config.model.folder = 'models/Qwen3-8B'
    # Its own thoughts are longer than a turn may be; the prompt asks for short ones in <think>.
    config.model.chat_template_kwargs = {'enable_thinking': False}
  return config
