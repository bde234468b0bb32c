"""Two environments in one run: questions with a search engine, and sums with a calculator.

python run.py --config=examples/mix/config.py --workdir=/tmp/mix
"""

from examples import settings


def get_config(mode=''):
  config = settings.tiny('mix')
  config.name = 'mix'
  config.env.prompt = 'short'
  config.env.max_searches = 2
  config.env.mix = (
      {
          'kind': 'search',
          'share': 1,
          'data': {'source': 'embedded', 'datasets': ('geo',), 'max_hops': 1},
      },
      {
          'kind': 'tools',
          'name': 'sums',
          'share': 1,
          'tools': ('calculator',),
          'options': {'form': 'hermes', 'frame': 'inline'},
          'data': 'examples.calculator.questions:load',
      },
  )
  config.retriever.kind = 'bm25'
  config.retriever.top_k = 1
  config.rollout.max_prompt = 96
  config.rollout.max_turn = 32
  config.rollout.max_observation = 96
  config.rollout.max_total = 288
  config.rollout.chunks = (16, 64)
  config.train.updates = 40
  config.train.length_buckets = (96, 192, 288)
  config.eval.every = 10
  config.eval.episodes = 60
  return settings.with_mode(config, mode)
