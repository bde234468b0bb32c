"""ST-PPO on the embedded questions with the embedded model: the default run.

  python run.py                    # 2 CPU cores: minutes
"""

from stppo_jax import config as schema


def get_config(mode=''):
  config = schema.Config()
  config.name = 'st_ppo_tiny'
  config.data.datasets = ('geo', 'elements')
  config.env.prompt = 'short'
  config.retriever.top_k = 1
  config.model.dtype = 'float32'
  config.model.remat = 'none'
  config.model.scan_layers = False
  config.model.logp_chunk = 0
  config.rollout = schema.Rollout(
      max_prompt=128, max_turn=48, max_observation=160, max_total=640)
  config.algorithm.variant = 'st_ppo'
  config.algorithm.kl_in = 'none'
  config.actor = schema.Optimizer(lr=3e-4, warmup=0.0, weight_decay=0.0)
  config.critic = schema.Optimizer(lr=1e-3, warmup=0.0, weight_decay=0.0)
  config.train = schema.Train(
      updates=60, episodes=64, mini_batch=32, micro_batch=32, epochs=2,
      length_buckets=(128, 192, 256, 320, 384, 512, 640), checkpoint_every=20)
  config.eval = schema.Eval(every=20, episodes=0, rows=64)
  if mode == 'smoke':
    config.train.updates = 2
    config.eval.episodes = 32
  return config
