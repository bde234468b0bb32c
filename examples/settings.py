"""Settings that the examples with a tiny model of their own share."""

import os

from stppo_jax import config as schema


def tiny(name):
  """Returns a config of the model in examples/<name>/model, for a CPU.

  ST-PPO without a KL penalty. An example sets its environment, its lengths, and what differs.
  """
  config = schema.Config()
  config.name = name
  config.retriever.kind = 'none'
  config.model = schema.ModelSettings(
      folder=os.path.join(os.path.dirname(__file__), name, 'model'),
      dtype='float32',
      remat='none',
      scan_layers=False,
      logp_chunk=0,
  )
  config.rollout.width = 64
  config.rollout.threads = 0
  config.algorithm.variant = 'st_ppo'
  config.algorithm.kl_in = 'none'
  config.algorithm.entropy_coef = 0.0
  config.actor = schema.OptimizerSettings(lr=1e-3, warmup=0.0, weight_decay=0.0)
  config.critic = schema.OptimizerSettings(lr=2e-3, warmup=0.0, weight_decay=0.0)
  config.train.updates = 60
  config.train.episodes = 256
  config.train.mini_batch = 64
  config.train.micro_batch = 32
  config.train.checkpoint_every = 0
  config.eval.every = 15
  config.log.tensorboard = False
  return config


def with_mode(config, mode, others=''):
  """Returns the config, with ':smoke' cut to two small updates.

  `others` lists further modes of the example for the error, as in ':sparse, '.
  """
  if mode == 'smoke':
    config.name += '_smoke'
    config.train.updates = 2
    config.train.episodes = 32
    config.train.mini_batch = 16
    config.train.micro_batch = 8
    config.eval.episodes = 32
  elif mode:
    raise ValueError(f'mode {mode!r} does not exist: give {others}:smoke, or no mode')
  return config
