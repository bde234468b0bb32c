"""Speed of the update and the rollout on one GPU, relative to its measured peak.

  python -m benchmarks.gpu --part=ceilings
  python -m benchmarks.gpu --part=update --size=135M    # 135M, 1.5B, 7B; --layers shortens it
  python -m benchmarks.gpu --part=rollout --size=7B
  python -m benchmarks.gpu --part=numerics --model=FOLDER --passages=FILE.jsonl
  python -m benchmarks.gpu --part=update --quick          # seconds on a CPU: does it work?

Not run on a GPU yet. One JSON line per figure. Random weights of the published shapes, computed in
bfloat16, rows of 2,048 tokens. `mfu` = FLOPs of the result (without recomputation) / time / the
FLOP/s of a large bfloat16 matmul, measured just before. A decode step is compared with the time to
read the weights and the cache once, at the speed of a large copy. Each part is a process of its
own, so that running out of memory in one does not affect the others. benchmarks/gpu.sh calls all of
them.
"""

import dataclasses
import json
import time

from absl import app
from absl import flags
import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import ours
from benchmarks import side_by_side
from benchmarks import sizes
from stppo_jax import tasks as task_files
from stppo_jax import tokenizer as chat
from stppo_jax.algorithms import variants
from stppo_jax.envs import search
from stppo_jax.models import convert
from stppo_jax.models import decoder
from stppo_jax.models import sharding
from stppo_jax.rollout import engine
from stppo_jax.rollout import sampler as sampler_lib
from stppo_jax.rollout import sampling
from stppo_jax.training import packing
from stppo_jax.training import state as train_state
from stppo_jax.training import update

_PART = flags.DEFINE_enum(
    'part', 'ceilings', ['ceilings', 'numerics', 'update', 'rollout'], 'which'
)
_SIZE = flags.DEFINE_enum('size', '135M', ['135M', '1.5B', '7B'], 'of the model')
_LAYERS = flags.DEFINE_integer('layers', 0, 'of the model; 0: those of the table', lower_bound=0)
_MODEL = flags.DEFINE_string('model', '', 'for numerics: a Hugging Face folder')
_PASSAGES = flags.DEFINE_string('passages', '', 'for numerics: JSON lines with id, title and text')

NEW_TOKENS = 128  # per row of the rollout


def main(unused_argv):
  if _PART.value == 'ceilings':
    side_by_side.print_machine()
  if _PART.value == 'numerics':
    compare_dtypes(_MODEL.value, _PASSAGES.value)
    return
  best = measure_ceilings()
  report(**best)
  if _PART.value == 'update':
    measure_update(best)
  elif _PART.value == 'rollout':
    measure_rollout(best)


def measure_ceilings():
  """Measures FLOP/s of a large bfloat16 matmul and bytes/s (read plus written) of a large copy."""
  n, size, times = (512, 2**20, 2) if side_by_side.QUICK.value else (8192, 2**29, 20)
  normal = lambda key, shape: jax.random.normal(jax.random.key(key), shape, jnp.bfloat16)
  weights = normal(0, (n, n)) / n**0.5  # products keep their size
  # Each pass depends on the previous one, so none can be optimised away.
  matmuls = jax.jit(lambda x: jax.lax.fori_loop(0, times, lambda _, x: x @ weights, x))
  copies = jax.jit(lambda x: jax.lax.fori_loop(0, times, lambda _, x: x + 1, x))
  matmul_s = median_s(lambda: matmuls(normal(1, (n, n)))) / times
  vector = jnp.zeros(size, jnp.bfloat16)
  copy_s = median_s(lambda: copies(vector)) / times
  return {
      'matmul_tflops': 2 * n**3 / matmul_s / 1e12,
      'copy_gb_per_s': 2 * vector.nbytes / copy_s / 1e9,
  }


def measure_update(best):
  """Measures log-probs and values, and optimizer steps without and with clipping."""
  size = _size()
  length = 128 if side_by_side.QUICK.value else 2048
  actor_shape = sizes.shape_of(size, size.param_dtype, _LAYERS.value or size.layers)
  variant = dataclasses.replace(variants.VARIANTS[size.variant], entropy_coef=0.0, kl_in='none')
  critic_shape = dataclasses.replace(actor_shape, head='value') if variant.needs_critic else None
  mesh = sharding.make_mesh(1, 1, 1, jax.devices()[:1])
  optimizer, schedule = train_state.make_optimizer(1e-6, 0, weight_decay=0.01)
  spec = train_state.Spec(
      variant=variant,
      actor=actor_shape,
      critic=critic_shape,
      actor_optimizer=optimizer,
      critic_optimizer=optimizer,
      actor_lr=schedule,
      critic_lr=schedule,
      actor_clip=1.0,
      critic_clip=1.0,
      micro_batch=size.micro_batch,
      lengths=(length,),
      temperature=1.0,
      logp_chunk=512,
      critic_warmup=0,
      num_logged_turns=5,
  )
  init = jax.jit(decoder.init, static_argnums=1)
  critic = critic_shape and init(jax.random.key(1), critic_shape)
  state = train_state.create_sharded(spec, init(jax.random.key(0), actor_shape), critic, mesh)
  nothing = train_state.Frozen()  # everything is trained
  functions = update.compile_functions(spec, state, nothing, mesh)
  batch = ours.random_batch(actor_shape.vocab_size, size.rows, length, np.random.default_rng(0))
  batch = jax.device_put(batch, sharding.rows(mesh))
  tokens, rows = size.rows * length, np.arange(size.rows, dtype=np.int32)
  packed = packing.pack(np.full(size.rows, length), size.micro_batch, (length,))
  whole = packing.Step(rows, packed)

  annotate = lambda: functions.annotate(state, nothing, batch, packing.stack([whole]))
  seconds = median_s(annotate)
  one_pass = tokens * forward_flops(actor_shape, length)
  critic_pass = tokens * forward_flops(critic_shape, length) if critic_shape else 0
  known = {
      'size': _SIZE.value,
      'layers': actor_shape.num_layers,
      'rows': size.rows,
      'length': length,
      'params': decoder.num_params(actor_shape),
      'critic': critic_shape is not None,
  }
  report(
      what='log-probs and values', **known, **speed(one_pass + critic_pass, tokens, seconds, best)
  )
  near, _ = annotate()
  # Whole turns off by half a unit, up and down in turn: either sign of an advantage is clipped
  # somewhere.
  far = near.replace(
      old_logp=near.old_logp + jnp.where(near.turn_ids % 2, 0.5, -0.5) * near.action_mask
  )

  for what, batch, passes in (('nothing clipped', near, 3), ('something clipped', far, 5)):

    def step():
      nonlocal state
      state, metrics, _ = functions.update_step(state, nothing, batch, whole)
      return metrics

    seconds = median_s(step)
    if (float(step()['actor/pg_clipfrac']) > 0) != (batch is far):
      raise RuntimeError(f'{what}: that is not so')
    report(
        what=f'{size.variant}, {what}',
        **known,
        **speed(passes * one_pass + 3 * critic_pass, tokens, seconds, best),
    )


def measure_rollout(best):
  """Measures prefill and decode up to 2,048 tokens per row."""
  size = _size()
  length, new = (128, 16) if side_by_side.QUICK.value else (2048, NEW_TOKENS)
  shape, rows = sizes.shape_of(size, 'bfloat16', _LAYERS.value), size.rollout_rows
  params = jax.jit(decoder.init, static_argnums=1)(jax.random.key(0), shape)
  never = np.zeros((2, shape.vocab_size), np.int32)  # state 1, stopped, is not reached
  sampler = sampler_lib.Sampler(
      shape,
      never,
      eos_ids=(),
      sizes=sampling.Sizes(
          length, rows=rows, slot_buckets=(length,), chunk_buckets=(min(512, length - new),)
      ),
  )
  prompts = np.random.default_rng(0).integers(0, shape.vocab_size, (rows, length - new)).tolist()
  keys = jax.random.split(jax.random.key(1), rows)
  read_s, sample_s = [], []
  for _ in range(2 + side_by_side.REPEATS.value):
    taken = engine.run(
        sampler, params, [engine.Prompt(prompt, new) for prompt in prompts], keys, _ends
    ).seconds
    read_s.append(taken['prefill'])
    sample_s.append(taken['decode'])
  read_s, sample_s = np.median(read_s[2:]), np.median(sample_s[2:])
  known = {'size': _SIZE.value, 'layers': shape.num_layers, 'rows': rows, 'length': length}
  tokens = rows * (length - new)
  report(
      what='reading prompts',
      **known,
      **speed(tokens * forward_flops(shape, length - new, has_head=False), tokens, read_s, best),
  )
  looked_up = {} if shape.tie_embeddings else params['embed']
  read = lambda tree: sum(leaf.nbytes for leaf in jax.tree.leaves(tree))
  weights = read(params) - read(looked_up)
  cache = 4 * rows * length * shape.num_layers * shape.num_kv_heads * shape.head_dim  # k and v
  least_s = (weights + cache) / best['copy_gb_per_s'] / 1e9
  report(
      what='sampling',
      **known,
      tokens_per_s=rows * new / sample_s,
      ms_a_step=1e3 * sample_s / new,
      share_of_copy=least_s / (sample_s / new),
      peak_gib=peak_gib(),
  )


def _ends(turns):
  """Ends every episode after one turn."""
  return [engine.Prompt((), 0) for _ in turns]


def compare_dtypes(folder, passages):
  """Compares bfloat16 with float32 on a real model: log-probs of real text, greedy answers."""
  tokenizer = chat.load_tokenizer(folder)
  texts = [tokenizer.encode(passage.text)[:128] for passage in task_files.load_corpus(passages)]
  rows = np.array(
      [ids for ids in texts if len(ids) == 128][: 4 if side_by_side.QUICK.value else 64]
  )
  table = chat.stop_automaton(tokenizer.token_bytes, search.SearchEnv.stop_strings)
  prompt = chat.encode_prompt(tokenizer, 'What is the capital of France?')
  found = {}
  for dtype in ('float32', 'bfloat16'):
    shape, params = convert.load_hf(folder, dtype=dtype)
    params = jax.device_put(params)

    @jax.jit
    def read(params, tokens, shape=shape):
      x, _ = decoder.trunk(params, shape, tokens, None)
      logp, _ = decoder.token_logp(params, shape, x, tokens)
      return logp[:, 1:], decoder.token_logits(params, shape, x).argmax(axis=-1)

    # On a GPU a float32 matmul has reduced precision by default and would not be a reference.
    with jax.default_matmul_precision('highest' if dtype == 'float32' else 'default'):
      columns = zip(*(read(params, row[None]) for row in rows))
      found[dtype] = [np.concatenate(column) for column in columns]
      sampler = sampler_lib.Sampler(
          shape, table, tokenizer.eos_ids, sampling.Sizes(len(prompt) + 16, rows=1), sampling.GREEDY
      )
      said = []
      engine.run(
          sampler,
          params,
          [engine.Prompt(prompt, 16)],
          jax.random.split(jax.random.key(0), 1),
          lambda turns: said.extend(turns) or _ends(turns),
      )
      answer = tokenizer.decode(said[0].turn.tokens)
    report(
        what='perplexity',
        dtype=dtype,
        tokens=found[dtype][0].size,
        answer=answer,
        perplexity=float(np.exp(-found[dtype][0].mean())),
    )
  (logp, best), (logp16, best16) = found['float32'], found['bfloat16']
  gap = np.abs(logp - logp16)
  report(
      what='bfloat16 against float32',
      mean_logp_gap=float(gap.mean()),
      max_logp_gap=float(gap.max()),
      same_likeliest=float((best == best16).mean()),
  )


def _size():
  return sizes.QUICK if side_by_side.QUICK.value else sizes.SIZES[_SIZE.value]


def forward_flops(config, length, has_head=True):
  """Returns forward FLOPs per token of a row of that length: matmuls and causal attention.

  Without `has_head` those of the trunk: a prefill computes logits of a prompt's last token alone.
  """
  matmul_params = decoder.num_params(config)
  if not config.tie_embeddings or config.head == 'value':
    matmul_params -= config.vocab_size * config.d_model  # looked up, not multiplied
  if not has_head:
    matmul_params -= config.vocab_size * config.d_model
  return 2 * matmul_params + 2 * config.num_layers * config.num_heads * config.head_dim * length


def speed(flops, tokens, seconds, best):
  """Returns the figures of a computation."""
  return {
      'tokens_per_s': tokens / seconds,
      'seconds': seconds,
      'tflops': flops / seconds / 1e12,
      'mfu': flops / seconds / 1e12 / best['matmul_tflops'],
      'peak_gib': peak_gib(),
  }


def median_s(run):
  """Returns the median seconds per call until its result is ready, after two warm-up calls."""
  seconds = []
  for _ in range(2 + side_by_side.REPEATS.value):
    started = time.perf_counter()
    jax.block_until_ready(run())
    seconds.append(time.perf_counter() - started)
  return float(np.median(seconds[2:]))


def peak_gib():
  """Returns the device's peak memory so far; None if it does not report it."""
  stats = jax.devices()[0].memory_stats()
  return stats and stats['peak_bytes_in_use'] / 2**30


def report(**figures):
  """Prints a JSON line with numbers in four digits."""
  short = lambda x: float(f'{x:.4g}') if isinstance(x, (float, np.floating)) else x
  line = {'part': _PART.value, 'device': jax.devices()[0].device_kind}
  print(json.dumps(line | {name: short(x) for name, x in figures.items()}), flush=True)


if __name__ == '__main__':
  app.run(main)
