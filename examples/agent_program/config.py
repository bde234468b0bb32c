"""Trains an agent program that only knows an OpenAI client, through the gateway.

python run.py --config=examples/agent_program/config.py --workdir=/tmp/agent_program
"""

from experiments import st_ppo_tiny
from stppo_jax import config as schema


def get_config(mode=''):
  config = st_ppo_tiny.base(mode)
  config.name = 'agent_program' + ('_smoke' if mode else '')
  config.env = schema.EnvSettings(kind='gateway:examples.agent_program.agent:run')
  config.retriever.kind = 'none'  # the program has a tool of its own
  config.serve = schema.ServeSettings(rows=64, agent_timeout_s=120.0)
  config.train.updates = 2 if mode else 14
  config.eval.episodes = 16 if mode else 128
  config.eval.every = 1 if mode else 7
  return config
