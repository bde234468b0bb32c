"""ST-PPO on Qwen3.5-0.8B: real questions, BM25 over real passages, one accelerator.

  hf download Qwen/Qwen3.5-0.8B --local-dir=models/Qwen3.5-0.8B
  DATA="--config.data.source=DATA/general_qa.jsonl --config.data.corpus=DATA/general_corpus.jsonl"
  python -m scripts.search_trajectories --config=experiments/st_ppo_qwen3_5_0_8b.py $DATA \\
    --workdir=runs/demonstrations
  python run.py sft --config=experiments/st_ppo_qwen3_5_0_8b.py \\
    --config.data.source=runs/demonstrations/episodes --workdir=runs/sft_qwen3_5_0_8b
  python run.py --config=experiments/st_ppo_qwen3_5_0_8b.py $DATA \\
    --config.model.folder=runs/sft_qwen3_5_0_8b/model

Not run with this model yet. The third line makes demonstrations from templates.
Does it fit?  python run.py --config=experiments/st_ppo_qwen3_5_0_8b.py --mode=plan \\
  --topology=v5e:2x2
"""

from experiments import st_ppo_gemma3_270m


def get_config(mode=''):
  config = st_ppo_gemma3_270m.get_config(mode)
  config.name = config.name.replace('gemma3_270m', 'qwen3_5_0_8b')
  config.model.folder = 'models/Qwen3.5-0.8B'
  config.train.micro_batch = 8  # an update with 16 needs 15.5 GiB of each of four v5e
  # Its own thoughts are longer than a turn may be. The prompt asks for short ones in <think>.
  config.model.chat_template_kwargs = {'enable_thinking': False}
  return config
