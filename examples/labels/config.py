"""Entailment with LoRA adapters by PPO, after PPO for natural language understanding.

python run.py --config=examples/labels/config.py --workdir=/tmp/labels
"""

from examples import settings


def get_config(mode=''):
  config = settings.tiny('labels')
  config.data.source = 'examples.labels.env:load'
  config.env.kind = 'examples.labels.env:Labels'
  config.model.lora_rank = 8
  config.rollout.max_prompt = 32
  config.rollout.max_turn = 16
  config.rollout.max_observation = 16
  config.rollout.max_total = 48
  config.rollout.chunks = (16, 32)
  config.rollout.temperature = 0.8  # the paper's
  config.algorithm.variant = 'ppo'
  config.actor.lr = 3e-3
  config.critic.lr = 3e-3
  config.train.updates = 40
  config.train.length_buckets = (48,)
  config.eval.every = 10
  config.eval.rows = 128
  config.log.episodes_every = 10
  return settings.with_mode(config, mode)
