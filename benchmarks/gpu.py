"""Does a run work on a GPU, how fast is it relative to the chip's peak, and what does padding cost?

  python -m benchmarks.gpu --part=first_updates         # the default run, compared with a CPU
  python -m benchmarks.gpu --part=kernel                # the attention that `auto` picks
  python -m benchmarks.gpu --part=update --size=135M    # 135M, 1.5B, 7B; --layers shortens it
  python -m benchmarks.gpu --part=rollout --size=7B
  python -m benchmarks.gpu --part=padding               # packed rows, and a row per bin
  python -m benchmarks.gpu --part=numerics --model=FOLDER
  python -m benchmarks.gpu --part=update --quick        # on a CPU: does it work?

Not run on a GPU yet. One JSON line per figure. Random weights of the published shapes, computed in
bfloat16, rows of 2,048 tokens. `mfu` = FLOPs of the result (without recomputation) / time / the
FLOP/s of a large bfloat16 matmul, measured just before. A decode step is compared with the time to
read the weights and the cache once, at the speed of a large copy. Each part is a process of its
own, so that running out of memory in one does not affect the others. benchmarks/gpu.sh calls all of
them.

`first_updates` compares with the losses of a CPU in gpu_expected.json, which `--write` makes again.
The first two batches are sampled by the first policy, so they must be equal. Losses and norms may
differ by 1%, because each of the 32 optimizer steps sums in another order.
`kernel` compares with plain attention in float32 and allows 2% of the norm, as bfloat16 has 8 bits.
`padding` has the lengths of 256 demonstrations of the search task in gpu_lengths.json. They are
those of scripts/search_trajectories.py in SmolLM2's tokens. `cpu` and `full` are the forms of
experiments/st_ppo_smollm2.py, with the embedded questions and with general_qa.jsonl.
"""

from collections.abc import Callable
import dataclasses
import functools
import importlib
import json
import math
import pathlib
import sys
import tempfile
import time
import types

from absl import app
from absl import flags
import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import ours
from benchmarks import side_by_side
from benchmarks import sizes
from experiments import st_ppo_tiny
from stppo_jax.algorithms import variants
from stppo_jax.data import tasks as task_files
from stppo_jax.envs import search
from stppo_jax.models import attention
from stppo_jax.models import convert
from stppo_jax.models import decoder
from stppo_jax.models import sharding
from stppo_jax.monitoring import metrics as metrics_lib
from stppo_jax.rollout import engine
from stppo_jax.rollout import sampler as sampler_lib
from stppo_jax.rollout import sampling
from stppo_jax.text import tokenizer as chat
from stppo_jax.training import loop
from stppo_jax.training import packing
from stppo_jax.training import state as train_state
from stppo_jax.training import update

_PART = flags.DEFINE_enum(
    'part',
    'first_updates',
    ['first_updates', 'kernel', 'update', 'rollout', 'padding', 'numerics'],
    'which',
)
_SIZE = flags.DEFINE_enum('size', '135M', ['135M', '1.5B', '7B'], 'of the model')
_LAYERS = flags.DEFINE_integer('layers', 0, 'of the model; 0: those of the table', lower_bound=0)
_MODEL = flags.DEFINE_string('model', '', 'for numerics: a Hugging Face folder')
_WRITE = flags.DEFINE_bool('write', False, 'for first_updates: write the losses of this CPU')

FOLDER = pathlib.Path(__file__).parent
EXPECTED = FOLDER / 'gpu_expected.json'
LENGTHS = FOLDER / 'gpu_lengths.json'
PASSAGES = FOLDER.parent / 'stppo_jax/assets/knowledge/corpus.jsonl'
NEW_TOKENS = 128  # per row of the rollout
EQUAL = ('critic/rewards/mean', 'stppo/agent_tokens/mean', 'num_turns/mean')  # metrics of a batch
CLOSE = (
    'actor/pg_loss', 'actor/entropy', 'actor/grad_norm', 'stppo/bias_norm', 'stppo/step_norm',
    'critic/vf_loss', 'critic/grad_norm',
)  # fmt: skip
TOLERANCE = 0.01
KERNEL_TOLERANCE = 0.02
HEADS = {'135M': (9, 3, 64), '1.5B': (12, 2, 128)}  # heads, heads of keys, channels
BINS = 16  # per micro-batch of `padding`


def main(unused_argv):
  if _PART.value == 'first_updates':
    side_by_side.print_machine()
    compare_first_updates()
  elif _PART.value == 'kernel':
    check_kernel()
  elif _PART.value == 'padding':
    measure_padding()
  elif _PART.value == 'numerics':
    compare_dtypes(_MODEL.value)
  else:
    best = measure_ceilings()
    report(**best)
    if _PART.value == 'update':
      measure_update(best)
    else:
      measure_rollout(best)


def compare_first_updates():
  """Compares the first two updates of the default run with those of a CPU.

  Raises:
    RuntimeError: a batch is not equal, or a loss or a norm is not close.
  """
  # A float32 matmul of a GPU has reduced precision by default.
  jax.config.update('jax_default_matmul_precision', 'highest')
  config = st_ppo_tiny.get_config()
  config.train.updates = 2
  config.train.length_buckets = (384,)  # one program instead of three
  config.rollout.slot_buckets = (384,)
  config.rollout.chunks = (64,)
  config.eval.episodes = 8
  config.log.tensorboard = False
  with tempfile.TemporaryDirectory() as workdir:
    loop.start(config, workdir)
    rows = metrics_lib.read_metrics(workdir)
  updates = [{name: row[name] for name in (*EQUAL, *CLOSE)} for row in rows if row['step'] > 0]
  if _WRITE.value:
    EXPECTED.write_text(json.dumps(updates, indent=1) + '\n', encoding='utf-8')
    return
  expected = json.loads(EXPECTED.read_text(encoding='utf-8'))
  problems = []
  for step, (own, cpu) in enumerate(zip(updates, expected, strict=True), start=1):
    gaps = {name: abs(own[name] - cpu[name]) / max(abs(cpu[name]), 1e-3) for name in own}
    report(what='the default run compared with a CPU', update=step, values=own, gaps=gaps)
    problems += [name for name in EQUAL if own[name] != cpu[name]]
    problems += [name for name in CLOSE if not gaps[name] <= TOLERANCE]
  if problems:
    raise RuntimeError(f'these differ from those of a CPU: {problems}')


def check_kernel():
  """Checks that `auto` picks cuDNN on a GPU, and compares it with plain attention.

  Raises:
    RuntimeError: it picks another one, or results or gradients are not close.
  """
  device = jax.devices()[0]
  wanted = 'cudnn' if device.platform == 'gpu' else 'plain'
  length = 128 if side_by_side.QUICK.value else 1024
  for size, heads in HEADS.items():
    chosen = attention.choose('auto', device, 'bfloat16', heads[-1], (length,))
    x = attention_inputs(heads, 2, length, 'bfloat16')
    ours = attend_with(functools.partial(attention.causal, backend=chosen))(*x)
    exact = [array.astype(jnp.float32) for array in x]
    with jax.default_matmul_precision('highest'):
      reference = attend_with(attention.causal)(*exact)
    gaps = {
        name: relative_gap(a, b) for name, a, b in zip(('y', 'dq', 'dk', 'dv'), ours, reference)
    }
    report(what='attention compared with plain float32', heads=size, backend=chosen, gaps=gaps)
    if chosen != wanted or not max(gaps.values()) <= KERNEL_TOLERANCE:
      raise RuntimeError(f'{chosen} on {device.device_kind}: {wanted} was expected, gaps {gaps}')


def attention_inputs(heads, rows, length, dtype):
  """Returns random q [B,T,N,H], k and v [B,T,M,H], and a cotangent as large as q."""
  num_heads, num_kv_heads, width = heads
  keys = jax.random.split(jax.random.key(0), 4)
  counts = (num_heads, num_kv_heads, num_kv_heads, num_heads)
  shapes = [(rows, length, count, width) for count in counts]
  return [jax.random.normal(key, shape, dtype) for key, shape in zip(keys, shapes)]


def attend_with(attend):
  """Returns a compiled function of q, k, v, d: the result and the gradients of sum(d result)."""

  @jax.jit
  def run(q, k, v, d, *rest):
    y, pull = jax.vjp(lambda q, k, v: attend(q, k, v, *rest), q, k, v)
    return y, *pull(d.astype(y.dtype))

  return run


def relative_gap(x, y):
  """Returns |x - y| / |y|."""
  x, y = (np.asarray(array, np.float32) for array in (x, y))
  return float(np.linalg.norm(x - y) / np.linalg.norm(y))


def measure_ceilings():
  """Measures FLOP/s of a large bfloat16 matmul and bytes/s (read plus written) of a large copy."""
  n, size, times = (512, 2**20, 2) if side_by_side.QUICK.value else (8192, 2**29, 20)
  normal = lambda key, shape: jax.random.normal(jax.random.key(key), shape, jnp.bfloat16)
  weights = normal(0, (n, n)) / n**0.5  # products keep their size
  matrix = normal(1, (n, n))  # drawn here, so that the time is that of the products alone
  # Each pass depends on the previous one, so none can be optimised away.
  matmuls = jax.jit(lambda x: jax.lax.fori_loop(0, times, lambda _, x: x @ weights, x))
  copies = jax.jit(lambda x: jax.lax.fori_loop(0, times, lambda _, x: x + 1, x))
  matmul_s = median_s(lambda: matmuls(matrix)) / times
  vector = jnp.zeros(size, jnp.bfloat16)
  copy_s = median_s(lambda: copies(vector)) / times
  return {
      'matmul_tflops': 2 * n**3 / matmul_s / 1e12,
      'copy_gb_per_s': 2 * vector.nbytes / copy_s / 1e9,
  }


class Learning:
  """An actor, and a critic where the variant has one, with compiled functions of the update."""

  def __init__(self, size, shape, capacities, micro_batch, num_rows):
    variant = dataclasses.replace(variants.VARIANTS[size.variant], entropy_coef=0.0, kl_in='none')
    self.actor = shape
    self.critic = dataclasses.replace(shape, head='value') if variant.needs_critic else None
    mesh = sharding.make_mesh(1, 1, 1, jax.devices()[:1])
    optimizer, schedule = train_state.make_optimizer(1e-6, 0, weight_decay=0.01)
    self._spec = train_state.Spec(
        variant=variant,
        actor=self.actor,
        critic=self.critic,
        actor_optimizer=optimizer,
        critic_optimizer=optimizer,
        actor_lr=schedule,
        critic_lr=schedule,
        actor_clip=1.0,
        critic_clip=1.0,
        micro_batch=micro_batch,
        length_buckets=tuple(capacities),
        temperature=1.0,
        logp_chunk=512,
        critic_warmup=0,
        num_logged_turns=5,
    )
    init = jax.jit(decoder.init, static_argnums=1)
    critic = self.critic and init(jax.random.key(1), self.critic)
    actor = init(jax.random.key(0), self.actor)
    self._state = train_state.create_sharded(self._spec, actor, critic, mesh)
    self._nothing = train_state.Frozen()  # everything is trained
    self._functions = update.compile_functions(self._spec, self._state, self._nothing, mesh)
    rng = np.random.default_rng(0)
    batch = ours.random_batch(self.actor.vocab_size, num_rows, capacities[-1], rng)
    self.batch = jax.device_put(batch, sharding.rows(mesh))

  def pack(self, lengths):
    """Returns the optimizer step on all rows, as the run packs them for this attention."""
    shared = attention.takes_segments(self.actor.attention)
    places = packing.pack(lengths, self._spec.micro_batch, self._spec.length_buckets, shared)
    return packing.OptimizerStep(np.arange(len(lengths), dtype=np.int32), places)

  def annotate(self, step):
    """Returns the batch with log-probs and values."""
    stacked = packing.stack([step])
    return self._functions.annotate(self._state, self._nothing, self.batch, stacked)[0]

  def update(self, batch, step):
    """Does an optimizer step; returns its metrics."""
    self._state, metrics, _ = self._functions.update_step(self._state, self._nothing, batch, step)
    return metrics


def with_attention(shape, lengths):
  """Returns the shape with the attention that `auto` picks on this device."""
  device = jax.devices()[0]
  chosen = attention.choose(
      'auto', device, shape.dtype, shape.head_dim, lengths, shape.attention_softcap
  )
  return dataclasses.replace(shape, attention=chosen)


def measure_update(best):
  """Measures log-probs and values, and optimizer steps without and with clipping."""
  size = _size()
  length = 128 if side_by_side.QUICK.value else 2048
  shape = sizes.shape_of(size, size.param_dtype, _LAYERS.value or size.layers)
  shape = with_attention(shape, (length,))
  learning = Learning(size, shape, (length,), size.micro_batch, size.rows)
  whole = learning.pack(np.full(size.rows, length))
  tokens = size.rows * length
  seconds = median_s(lambda: learning.annotate(whole))
  one_pass = tokens * forward_flops(learning.actor, length)
  critic_pass = tokens * forward_flops(learning.critic, length) if learning.critic else 0
  known = {
      'size': _SIZE.value,
      'layers': shape.num_layers,
      'attention': shape.attention,
      'rows': size.rows,
      'length': length,
      'params': decoder.num_params(shape),
      'critic': learning.critic is not None,
  }
  report(
      what='log-probs and values', **known, **speed(one_pass + critic_pass, tokens, seconds, best)
  )
  near = learning.annotate(whole)
  far = clipped(near)
  for what, batch, passes in (('nothing clipped', near, 3), ('something clipped', far, 5)):
    step = functools.partial(learning.update, batch, whole)
    seconds = median_s(step)
    if (float(step()['actor/pg_clipfrac']) > 0) != (batch is far):
      raise RuntimeError(f'{what}: that is not so')
    report(
        what=f'{size.variant}, {what}',
        **known,
        **speed(passes * one_pass + 3 * critic_pass, tokens, seconds, best),
    )


def clipped(batch):
  """Returns a batch whose policy was half a unit away, up and down in turn.

  Either sign of an advantage is clipped somewhere.
  """
  shift = jnp.where(batch.turn_ids % 2, 0.5, -0.5) * batch.action_mask
  return batch.replace(old_logp=batch.old_logp + shift)


def measure_padding():
  """Measures packed rows and rows in bins of their own: whole updates, and attention alone."""
  forms = json.loads(LENGTHS.read_text(encoding='utf-8'))
  if side_by_side.QUICK.value:
    short = [length // 4 for length in forms['cpu']['lengths'][:6]]
    forms = {'quick': {'lengths': short, 'capacities': [64, 128]}}
  for size in HEADS:  # a part that is cut has the first figures
    for form, fields in forms.items():
      lengths = np.array(fields['lengths'])
      capacities = fields['capacities']
      bins = min(BINS, len(lengths) // 3)
      compare_kernels(form, size, lengths, capacities, bins)
      if size == _SIZE.value:
        for kernel in sorted({'plain', with_attention(_shape(), capacities).attention}):
          compare_update(form, kernel, lengths, capacities, bins)


def _shape():
  size = _size()
  return sizes.shape_of(size, size.param_dtype, _LAYERS.value or size.layers)


def compare_update(form, kernel, lengths, capacities, bins):
  """Measures an optimizer step on rows of these lengths, packed if the kernel takes segments."""
  shape = dataclasses.replace(_shape(), attention=kernel)
  is_packed = attention.takes_segments(kernel)
  capacities = capacities_of(is_packed, capacities)
  learning = Learning(_size(), shape, capacities, bins, len(lengths))
  mask = np.arange(capacities[-1]) < lengths[:, None]
  learning.batch = learning.batch.replace(
      action_mask=learning.batch.action_mask * mask, turn_ids=learning.batch.turn_ids * mask
  )
  step = learning.pack(lengths)
  batch = clipped(learning.annotate(step))
  seconds = median_s(functools.partial(learning.update, batch, step))
  computed = packing.num_computed(step.packing, bins, capacities)
  report(
      what='update on the lengths of the search task',
      form=form,
      size=_SIZE.value,
      attention=kernel,
      packed=is_packed,
      tokens=int(lengths.sum()),
      computed=computed,
      padding=1 - lengths.sum() / computed,
      seconds=seconds,
      tokens_per_s=lengths.sum() / seconds,
      peak_gib=peak_gib(),
  )


def capacities_of(is_packed, capacities):
  """Returns the lengths of bins: packed rows fill the longest, and each length is a compilation."""
  return capacities[-1:] if is_packed else capacities


def compare_kernels(form, size, lengths, capacities, bins):
  """Measures attention, forward and backward, over all rows with each kernel that can run."""
  dtype = 'float32' if side_by_side.QUICK.value else 'bfloat16'
  heads = HEADS[size]
  for name, (attend, is_packed) in kernels(heads[-1]).items():
    known = {'what': 'attention alone', 'form': form, 'heads': size, 'kernel': name}
    try:
      seconds, gap, computed = time_kernel(
          attend, is_packed, heads, dtype, lengths, capacities, bins
      )
    except Exception as error:  # another library may raise anything  # pylint: disable=broad-except
      reason = (str(error).splitlines() or [''])[0]
      report(**known, cannot=f'{type(error).__name__}: {reason}'[:300])
      continue
    report(
        **known,
        packed=is_packed,
        tokens=int(lengths.sum()),
        computed=computed,
        seconds=seconds,
        tokens_per_s=lengths.sum() / seconds,
        gap_to_plain=gap,
    )


def time_kernel(attend, is_packed, heads, dtype, lengths, capacities, bins):
  """Returns (seconds for all micro-batches, gap of the first to plain attention, tokens)."""
  capacities = capacities_of(is_packed, capacities)
  places = packing.pack(lengths, bins, capacities, is_packed)
  run = attend_with(attend)
  batches = []
  for j in range(int(places.bin.max()) // bins + 1):
    columns = int(capacities[packing.which_bucket(places, j, bins, capacities)])
    layout = packing.layout(places, j, bins, columns)
    batches.append((*attention_inputs(heads, bins, columns, dtype), layout.segments))
  y = run(*batches[0])[0]
  reference = attend_with(attention.causal)(*batches[0])[0]
  live = np.asarray(batches[0][-1] >= 0)
  gap = relative_gap(np.asarray(y, np.float32)[live], np.asarray(reference, np.float32)[live])
  seconds = median_s(lambda: [run(*batch) for batch in batches])
  return seconds, gap, packing.num_computed(places, bins, capacities)


def kernels(width: int) -> dict[str, tuple[Callable, bool]]:
  """Returns {name: (attention of q, k, v, segments; whether several rows share a bin)}."""
  on_gpu = jax.devices()[0].platform == 'gpu'
  implementation = 'cudnn' if on_gpu else 'xla'

  def plain(q, k, v, segments):
    return attention.causal(q, k, v, segments, chunk=512)

  def row_per_bin(q, k, v, segments):
    del segments  # padding is at the end of the row
    return attention.causal(q, k, v, backend='cudnn')

  def mask(q, k, v, segments):
    same = segments[:, None, :, None] == segments[:, None, None]
    return jax.nn.dot_product_attention(
        q, k, v, mask=same, is_causal=True, implementation=implementation
    )

  def pallas(q, k, v, segments):
    from jax.experimental.pallas.ops.gpu import attention as pallas_attention

    group = q.shape[2] // k.shape[2]
    k, v = (jnp.repeat(x, group, axis=2) for x in (k, v))
    block = math.gcd(128, q.shape[1])  # the length is a multiple of it
    options = {'sm_scale': width**-0.5, 'causal': True, 'interpret': not on_gpu}
    blocks = pallas_attention.BlockSizes(*[block] * 6)
    return pallas_attention.mha(q, k, v, segments, block_sizes=blocks, **options)

  def tokamax(q, k, v, segments, kernel):
    same = segments[:, None, :, None] == segments[:, None, None]
    implementation = kernel if on_gpu else 'xla'  # without a name it falls back silently
    return import_tokamax().dot_product_attention(
        q, k, v, mask=same, is_causal=True, implementation=implementation
    )

  return {
      'plain': (plain, True),
      'cudnn': (row_per_bin, False),
      'jax.nn with a mask': (mask, True),
      'pallas': (pallas, True),
      'tokamax mosaic': (functools.partial(tokamax, kernel='mosaic'), True),
      'tokamax triton': (functools.partial(tokamax, kernel='triton'), True),
  }


def import_tokamax():
  """Returns the module, without xprof: tokamax needs its 30 MiB for its own benchmarks alone."""
  for name in ('xprof', 'xprof.cli', 'xprof.cli.tools'):
    module = types.ModuleType(name)
    module.__path__ = []
    module.get_kernel_stats_tool = None
    sys.modules.setdefault(name, module)
  return importlib.import_module('tokamax')


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


def compare_dtypes(folder):
  """Compares bfloat16 with float32 on a real model: log-probs of real text, greedy answers."""
  tokenizer = chat.load_tokenizer(folder)
  passages = task_files.load_corpus(str(PASSAGES))
  ids = tokenizer.encode(' '.join(passage.text for passage in passages[:400]))
  num_rows = min(len(ids) // 128, 4 if side_by_side.QUICK.value else 64)
  rows = np.array(ids[: 128 * num_rows]).reshape(num_rows, 128)
  table = chat.stop_automaton(tokenizer.token_bytes, search.SearchEnv.stop_strings)
  prompt = chat.encode_prompt(tokenizer, 'What is the capital of France?')
  found, models = {}, {}
  for dtype in ('float32', 'bfloat16'):
    shape, params = convert.load_hf(folder, dtype=dtype)
    params = jax.device_put(params)
    models[dtype] = shape, params

    @jax.jit
    def read(params, tokens, shape=shape):
      x, _ = decoder.trunk(params, shape, tokens, None)
      logp, _ = decoder.token_logp(params, shape, x, tokens)
      return logp[:, 1:], decoder.token_logits(params, shape, x).argmax(axis=-1)

    with _exact_if_float32(dtype):
      columns = zip(*(read(params, row[None]) for row in rows))
      found[dtype] = [np.concatenate(column) for column in columns]
    report(
        what='perplexity',
        dtype=dtype,
        tokens=found[dtype][0].size,
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
  for dtype, (shape, params) in models.items():  # last: a sampler compiles for long
    sampler = sampler_lib.Sampler(
        shape, table, tokenizer.eos_ids, sampling.Sizes(len(prompt) + 16, rows=1), sampling.GREEDY
    )
    said = []
    with _exact_if_float32(dtype):
      engine.run(
          sampler,
          params,
          [engine.Prompt(prompt, 16)],
          jax.random.split(jax.random.key(0), 1),
          lambda turns, said=said: said.extend(turns) or _ends(turns),
      )
    report(what='greedy answer', dtype=dtype, answer=tokenizer.decode(said[0].turn.tokens))


def _exact_if_float32(dtype):
  """Context manager. A float32 matmul of a GPU has reduced precision by default: no reference."""
  return jax.default_matmul_precision('highest' if dtype == 'float32' else 'default')


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
