"""ST-PPO on Gemma 3 270M: the smallest model of 2025 that follows instructions, one accelerator.

  hf download google/gemma-3-270m-it --local-dir=models/gemma-3-270m-it
  DATA="--config.data.source=DATA/general_qa.jsonl --config.data.corpus=DATA/general_corpus.jsonl"
  python -m scripts.search_trajectories --config=experiments/st_ppo_gemma3_270m.py $DATA \\
    --workdir=runs/demonstrations
  python run.py sft --config=experiments/st_ppo_gemma3_270m.py \\
    --config.data.source=runs/demonstrations/episodes --workdir=runs/sft_gemma3_270m
  python run.py --config=experiments/st_ppo_gemma3_270m.py $DATA \\
    --config.model.folder=runs/sft_gemma3_270m/model

Not run with this model yet. The third line makes demonstrations from templates.
Does it fit?  python run.py --config=experiments/st_ppo_gemma3_270m.py --mode=plan \\
  --topology=v5e:2x2
"""

from experiments import st_ppo_smollm2


def get_config(mode=''):
  config = st_ppo_smollm2.get_config(mode)
  config.name = config.name.replace('smollm2', 'gemma3_270m')
  config.model.folder = 'models/gemma-3-270m-it'
  # The logits of 262,144 tokens are live for this many columns at once.
  config.model.logp_chunk = 64
  return config
