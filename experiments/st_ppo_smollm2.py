"""ST-PPO on SmolLM2-135M-Instruct: real questions, BM25 over real passages, one GPU.

  python -m scripts.smollm2_folder --out=models/smollm2
  DATA="--config.data.source=DATA/general_qa.jsonl --config.data.corpus=DATA/general_corpus.jsonl"
  python -m scripts.search_trajectories --config=experiments/st_ppo_smollm2.py $DATA \\
    --workdir=runs/demonstrations
  python run.py sft --config=experiments/st_ppo_smollm2.py \\
    --config.data.source=runs/demonstrations/episodes --workdir=runs/sft_smollm2
  python run.py --config=experiments/st_ppo_smollm2.py $DATA \\
    --config.model.folder=runs/sft_smollm2/model

Not run on a GPU yet. benchmarks/gpu.sh does all of this. `:cpu` is a run for two CPU cores on the
embedded questions, see docs/models.md.
"""

from experiments import ppo_7b
from stppo_jax import config as schema
from stppo_jax.types import UserError


def get_config(mode=''):
  config = schema.Config()
  config.name = 'st_ppo_smollm2'
  config.data = schema.DataSettings(
      source='data/general_qa.jsonl', corpus='data/general_corpus.jsonl'
  )
  # Two hops take two searches, and a row has room for three.
  config.env = schema.EnvSettings(prompt='search_r1', max_searches=3, reward='em')
  config.retriever = schema.RetrieverSettings(kind='bm25', top_k=3)
  config.model = schema.ModelSettings(folder='models/smollm2', critic='separate')
  # Prompts have 180 tokens, three passages 360. 320 + 3 (128 + 384) would be 1,856, but few turns
  # reach half of 128 tokens.
  config.rollout = schema.RolloutSettings(
      max_prompt=320, max_turn=128, max_observation=384, max_total=1536
  )
  config.algorithm.variant = 'st_ppo'
  # Adam scales the bonus up where the policy's gradient is noise; it broke the smaller default run.
  config.algorithm.entropy_coef = 0.0
  # Search-R1's 1e-6 is for models 50 times larger, the default run's 2e-4 for one 140 times
  # smaller.
  config.actor = schema.OptimizerSettings(lr=1e-5, warmup=0.05)
  config.critic = schema.OptimizerSettings(lr=5e-5, warmup=0.05)
  config.train = schema.TrainSettings(
      # 128 episodes are about 100k tokens, seconds for such a model. Four optimizer steps per
      # update make it off-policy: otherwise nothing is clipped, and all variants are the same.
      updates=120,
      episodes=128,
      mini_batch=64,
      micro_batch=16,
      epochs=2,
      length_buckets=(512, 768, 1024, 1536),
      checkpoint_every=20,
      keep_checkpoints=1,
  )
  config.eval = schema.EvalSettings(every=20, episodes=0, rows=128)
  if mode == 'cpu':
    config.name += '_cpu'
    config.data = schema.DataSettings(datasets=('geo',), max_hops=1)
    config.env.prompt = 'short'
    config.env.max_searches = 2
    config.retriever.top_k = 1
    config.model.dtype = 'float32'
    config.model.remat = 'none'
    config.model.logp_chunk = 64  # half the time of the head
    config.model.critic = 'shared'
    config.model.lora_rank = 16
    config.rollout = schema.RolloutSettings(
        max_prompt=96, max_turn=48, max_observation=96, max_total=320
    )
    # The ratios start from the sampler's log-probs, so that the age of a batch counts as well.
    config.algorithm.old_logp = 'sampler'
    config.algorithm.kl_coef = 0.0
    # The value head's gradient in the shared trunk was 17 times the policy's.
    config.algorithm.value_coef = 0.1
    config.pipeline.staleness = 2
    config.actor.lr = 3e-4
    config.train = schema.TrainSettings(
        updates=50,
        episodes=16,
        mini_batch=8,
        micro_batch=2,
        length_buckets=(192, 256, 320),
        checkpoint_every=5,
        keep_checkpoints=1,
    )
    config.eval = schema.EvalSettings(every=25, episodes=48, rows=16)
    config.sft = schema.SftSettings(lr=1e-3, epochs=1, batch=16)
  elif mode == 'smoke':
    ppo_7b.shrink(config)
  elif mode:
    raise UserError(f'{mode!r} is not a form of this experiment: give :cpu, :smoke, or nothing')
  return config
