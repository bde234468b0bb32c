"""ST-PPO on Qwen3-30B-A3B, a mixture of experts, with Wikipedia search and routing replay.

  python run.py --config=experiments/st_ppo_qwen3_30b_a3b.py \\
    --config.model.folder=FOLDER/Qwen3-30B-A3B \\
    --config.data.source=FOLDER/train.parquet,FOLDER/test.parquet \\
    --config.retriever.url=http://HOST:8000/retrieve

Not run yet.
Does it fit?  python run.py --config=experiments/st_ppo_qwen3_30b_a3b.py --mode=plan \\
  --topology=v5p:4x4x4

All 48 layers have 128 experts, 8 of them active per token. The critic is a mixture of its own.
Every optimizer step reuses the experts that the policy that sampled chose: otherwise a token whose
experts change between steps changes its ratio for no better reason.
The smoke form trains the embedded model, which has no experts: replay has no effect there.
"""

from experiments import st_ppo_7b


def get_config(mode=''):
  config = st_ppo_7b.get_config(mode)
  config.name = config.name.replace('7b', 'qwen3_30b_a3b')
  config.rollout.routing_replay = 'old_policy'
  if not mode:
    config.model.folder = 'models/Qwen3-30B-A3B'
    config.model.chat_template_kwargs = {'enable_thinking': False}  # see st_ppo_qwen3_8b
  return config
