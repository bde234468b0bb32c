"""Trains the policy in a verifiers environment, whose Python may be another one.

export PYTHONPATH=examples/verifiers_search
python run.py --config=examples/verifiers_search/config.py \
  --config.env.options.python=.verifiers/bin/python --workdir=/tmp/verifiers_search
"""

from experiments import st_ppo_tiny
from stppo_jax import config as schema


def get_config(mode=''):
  config = st_ppo_tiny.base(mode)
  config.name = 'verifiers_search' + ('_smoke' if mode else '')
  config.env = schema.EnvSettings(kind='verifiers:knowledge-search')
  config.env.options = {'eval_taskset': {'split': 'dev'}}
  config.data.datasets = ()
  config.retriever.kind = 'none'  # the harness has a search of its own
  config.serve = schema.ServeSettings(rows=64, agent_timeout_s=120.0)
  config.train.updates = 2 if mode else 14
  config.eval.episodes = 16 if mode else 128
  config.eval.every = 1 if mode else 7
  return config
