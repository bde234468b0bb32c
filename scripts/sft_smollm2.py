"""Warm start of st_ppo_smollm2: SmolLM2 learns to think, search, read and answer from templates.

  python -m scripts.sft_smollm2 --model=models/smollm2 --source=DATA/general_qa.jsonl \\
    --corpus=DATA/general_corpus.jsonl --out=runs/sft_smollm2

Not run in full yet. A small form on one CPU core, with the lengths of `st_ppo_smollm2.py:cpu`:

  python -m scripts.sft_smollm2 --form=cpu --model=models/smollm2 --source=.. --corpus=.. \\
    --steps=15 --rows=4 --micro_batch=2 --per_task=1 --held_out=6 --remat=none

Seen: perplexity of the agent's tokens in 6 held-out demonstrations 4.31 -> 1.60; 683 of 1,750
demonstrations are valid; 43 s per step, 11 minutes in total, at most 8.4 GiB. The model then
follows the protocol and answers badly.

The demonstrations are made by search_trajectories.py.
"""

import functools
import json
import math
import resource
import sys

from absl import app
from absl import flags
from absl import logging
import jax
import numpy as np

from experiments import st_ppo_smollm2
from scripts import search_trajectories
from stppo_jax import components
from stppo_jax import tasks as task_files
from stppo_jax import tokenizer as chat
from stppo_jax.distributed import huge_pages
from stppo_jax.models import convert
from stppo_jax.models import hf_export
from stppo_jax.models import sharding
from stppo_jax.rollout import prepare
from stppo_jax.training import supervised
from stppo_jax.types import UserError

_FORM = flags.DEFINE_enum(
    'form', '', ['', 'cpu', 'smoke'], 'of st_ppo_smollm2: whose lengths to use'
)
_MODEL = flags.DEFINE_string('model', 'models/smollm2', 'Hugging Face folder to start from')
_SOURCE = flags.DEFINE_string('source', '', 'questions, as config.data.source')
_CORPUS = flags.DEFINE_string('corpus', '', 'passages, as config.data.corpus')
_OUT = flags.DEFINE_string('out', 'runs/sft_smollm2', 'folder of the model to write')
_STEPS = flags.DEFINE_integer('steps', 300, 'optimizer steps', lower_bound=0)
_ROWS = flags.DEFINE_integer('rows', 32, 'demonstrations per optimizer step', lower_bound=1)
_MICRO_BATCH = flags.DEFINE_integer(
    'micro_batch', 16, 'demonstrations in memory at once: a multiple of the devices', lower_bound=1
)
_LR = flags.DEFINE_float('lr', 1e-4, 'peak of the cosine schedule', lower_bound=0)
_PER_TASK = flags.DEFINE_integer(
    'per_task', 2, 'demonstrations to try of each question', lower_bound=1
)
_HELD_OUT = flags.DEFINE_integer('held_out', 128, 'demonstrations of dev to measure', lower_bound=1)
_DTYPE = flags.DEFINE_enum(
    'dtype', '', ['', 'float32', 'bfloat16'], 'of the computation; empty: float32 on CPUs alone'
)
_REMAT = flags.DEFINE_enum('remat', 'full', ['none', 'dots', 'full'], 'what backward recomputes')
_SEED = flags.DEFINE_integer('seed', 0, 'of the wordings and of the order')


def main(unused_argv):
  config = run_config()
  config.model.dtype = _DTYPE.value or ('float32' if jax.default_backend() == 'cpu' else 'bfloat16')
  config.model.remat = _REMAT.value
  mesh = supervised.make_mesh(_MICRO_BATCH.value)
  folder = prepare.model_folder(config)
  tokenizer = chat.load_tokenizer(folder)
  passages = task_files.load_corpus(config.data.corpus or config.data.source)
  demonstrator = search_trajectories.Demonstrator(passages, tokenizer, config)
  parts = components.resolve(config)
  pools = {}
  for split, copies in ((config.data.train_split, _PER_TASK.value), (config.data.eval_split, 1)):
    tasks = parts.load_tasks(split)
    pools[split] = demonstrator.pool(tasks, copies, _SEED.value)
    describe(split, len(tasks) * copies, pools[split])
  shape, params = prepare.load_policy(
      config, shardings=functools.partial(sharding.tree_shardings, mesh=mesh)
  )
  chat.check_matches(tokenizer, shape.vocab_size)
  buckets, chunk = config.train.length_buckets, config.model.logp_chunk or None
  held_out = pools[config.data.eval_split][: _HELD_OUT.value]
  held_out = [supervised.pad([row], buckets) for row in held_out]
  measure('before', params, shape, held_out, chunk)
  draw = supervised.batches(
      pools[config.data.train_split], _ROWS.value, _MICRO_BATCH.value, buckets
  )
  params = supervised.train(
      params,
      supervised.with_kernel(shape, config.model.attention, mesh, buckets),
      draw,
      steps=_STEPS.value,
      optimizer=supervised.make_optimizer(_LR.value, _STEPS.value),
      seed=_SEED.value,
      mesh=mesh,
      logp_chunk=chunk,
      log_every=max(1, _STEPS.value // 20),
  )
  measure('after', params, shape, held_out, chunk)
  dtype = hf_export.dtype_to_write(folder, shape.param_dtype)
  convert.save_hf(_OUT.value, shape, params, folder, dtype=dtype, eos_ids=tokenizer.eos_ids)
  logging.info(
      'wrote %s; the process took at most %.1f GiB of host memory',
      _OUT.value,
      resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
  )


def run_config():
  """Returns the run's config, with the model and data of the flags."""
  config = st_ppo_smollm2.get_config(_FORM.value)
  if _FORM.value != 'smoke':
    config.model.folder = _MODEL.value
  config.data.source = _SOURCE.value or config.data.source
  config.data.corpus = _CORPUS.value or config.data.corpus
  return config


def describe(split, tried, pool):
  """Logs the number of demonstrations and their lengths."""
  if not pool:
    raise UserError(
        f'no demonstration of the split {split!r} is valid: check that --corpus belongs to --source'
    )
  lengths = [len(row.tokens) for row in pool]
  logging.info(
      '%s: %d of %d demonstrations are valid; %.0f tokens on average, at most %d; %.0f of them '
      'are imitated',
      split,
      len(pool),
      tried,
      np.mean(lengths),
      max(lengths),
      np.mean([(row.weights == 1).sum() for row in pool]),
  )


def measure(when, params, shape, held_out, chunk):
  """Prints loss and perplexity of held-out demonstrations as a JSON line."""
  nll = supervised.loss(params, shape, held_out, chunk)
  print(
      json.dumps(
          {
              'warm_start': when,
              'demonstrations': len(held_out),
              'loss': round(nll, 4),
              'perplexity': round(math.exp(nll), 3),
          }
      ),
      flush=True,
  )


def _main(argv):
  try:
    main(argv)
  except UserError as error:
    sys.exit(f'sft_smollm2: {error}')


if __name__ == '__main__':
  huge_pages.restart()
  app.run(_main)
