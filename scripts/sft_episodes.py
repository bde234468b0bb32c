r"""Trains a model to imitate saved episodes: its own best ones, or another agent's.

  python run.py --mode=import_atif --input=jobs/terminus --workdir=runs/imported
  python -m scripts.sft_episodes --episodes=runs/imported/episodes --out=models/imitated

Episodes with less than --min_score are left out, and those that fit in no bucket. The folder that
it writes is one for config.model.folder. The compute settings are the defaults of config.model:
layers are recomputed in the backward pass, and attention is a kernel where there is one.
"""

import functools
import sys

from absl import app
from absl import flags
from absl import logging
import jax

from stppo_jax import config as schema
from stppo_jax import tokenizer as chat
from stppo_jax.models import convert
from stppo_jax.models import hf_config
from stppo_jax.models import sharding
from stppo_jax.rollout import prepare
from stppo_jax.training import sft
from stppo_jax.trajectories import saved
from stppo_jax.types import UserError

_EPISODES = flags.DEFINE_string('episodes', None, 'folder of train_000001.jsonl, ..', required=True)
_OUT = flags.DEFINE_string('out', None, 'folder of the model to write', required=True)
_MODEL = flags.DEFINE_string('model', 'embedded', 'Hugging Face folder to start from')
_MIN_SCORE = flags.DEFINE_float('min_score', 0.5, 'total reward of an episode that is imitated')
_STEPS = flags.DEFINE_integer('steps', 100, 'optimizer steps', lower_bound=1)
_ROWS = flags.DEFINE_integer('rows', 32, 'episodes per step', lower_bound=1)
_MICRO_BATCH = flags.DEFINE_integer('micro_batch', 8, 'rows computed at once', lower_bound=1)
_LR = flags.DEFINE_float('lr', 1e-5, 'highest learning rate', lower_bound=0.0)
_BUCKETS = flags.DEFINE_list('buckets', ['256', '512', '1024', '2048', '4096'], 'lengths, rising')
_SEED = flags.DEFINE_integer('seed', 0, 'of the order')


def main(unused_argv):
  mesh = sft.make_mesh(_MICRO_BATCH.value)
  dtype = 'float32' if jax.default_backend() == 'cpu' else 'bfloat16'
  config = schema.Config()
  config.model = schema.ModelSettings(folder=_MODEL.value, dtype=dtype)
  folder = prepare.model_folder(config)
  tokenizer = chat.load_tokenizer(folder)
  buckets = tuple(map(int, _BUCKETS.value))
  pool = demonstrations(_EPISODES.value, tokenizer, _MIN_SCORE.value, buckets[-1])
  place = functools.partial(sharding.tree_shardings, mesh=mesh)
  shape, params = prepare.load_policy(config, shardings=place)
  chat.check_matches(tokenizer, shape.vocab_size)
  params = sft.train(
      params,
      sft.with_kernel(shape, config.model.attention, mesh, buckets),
      sft.batches(pool, _ROWS.value, _MICRO_BATCH.value, buckets),
      steps=_STEPS.value,
      optimizer=sft.make_optimizer(_LR.value, _STEPS.value),
      seed=_SEED.value,
      mesh=mesh,
      logp_chunk=config.model.logp_chunk,
      log_every=max(1, _STEPS.value // 10),
  )
  dtype = hf_config.dtype_to_write(folder, shape.param_dtype)
  convert.save_hf(_OUT.value, shape, params, folder, dtype=dtype, eos_ids=tokenizer.eos_ids)
  logging.info('wrote %s', _OUT.value)


def demonstrations(
    folder: str, tokenizer: chat.Tokenizer, min_score: float, longest: int
) -> list[sft.Demonstration]:
  """Returns the episodes of a folder that are to be imitated."""
  paths = [saved.path_of(folder, number) for number in saved.numbers(folder)]
  episodes = [episode for path in paths for episode in saved.read(path, tokenizer).episodes]
  good = [e for e in episodes if e.turns and not e.failed and e.score >= min_score]
  rows = [sft.from_episode(episode) for episode in good]
  pool = [row for row in rows if len(row.tokens) <= longest]
  logging.info(
      '%d episodes, %d of them with a score of %g or more; %d of these have at most %d tokens',
      len(episodes),
      len(good),
      min_score,
      len(pool),
      longest,
  )
  if not pool:
    raise UserError(
        f'--episodes={folder!r} has no episode to imitate: lower --min_score={min_score:g} (the '
        'best has '
        f'{max((e.score for e in episodes), default=0):g}), or add a length to --buckets'
    )
  return pool


def _main(argv):
  try:
    main(argv)
  except UserError as error:
    sys.exit(f'sft_episodes: {error}')


if __name__ == '__main__':
  app.run(_main)
