"""Hugging Face folders to and from (ModelConfig, params). Weights stream tensor by tensor.

`table` is the table of names. A key that is in only one of the table and the folder, is there
twice or has the wrong shape stops the load: a model that is slightly wrong trains anyway, badly.
"""

import collections
import contextlib
import functools
import json
import math
import os
import pathlib
import shutil

import jax
from jax.experimental import multihost_utils
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
import ml_dtypes
import numpy as np
import safetensors
import safetensors.numpy

from stppo_jax.models import decoder
from stppo_jax.types import UserError

# model_type -> prefix of the classes' names in transformers.
FAMILIES = {'qwen2': 'Qwen2', 'qwen3': 'Qwen3', 'llama': 'Llama'}
HEADS = ('tokens', 'value', 'both')
DTYPES = {'float32': np.dtype(np.float32), 'bfloat16': np.dtype(ml_dtypes.bfloat16)}
STORED = ('F32', 'BF16', 'F16')  # as safetensors calls what a folder may hold
TOKEN_IDS = ('bos_token_id', 'eos_token_id', 'pad_token_id')
MAX_SHARD_BYTES = 2 * 2**30
TOKENIZER_FILES = (
    'tokenizer.json',
    'tokenizer_config.json',
    'special_tokens_map.json',
    'added_tokens.json',
    'vocab.json',
    'merges.txt',
    'tokenizer.model',
    'chat_template.jinja',
    'generation_config.json',
)

# One tensor of a folder. `shape` is the folder's; ours is its transpose, if so marked, reshaped.
Entry = collections.namedtuple('Entry', 'name path layer shape transpose')


def load_hf(folder, head='tokens', param_dtype='float32', dtype='float32', shardings=None):
  """(ModelConfig, params) of a folder with config.json and safetensors.

  With head 'value' the output matrix is dropped; a folder without a value head gets a zero one, so
  a critic starts from its policy's folder. `param_dtype` is what is stored here, whatever the
  folder holds, and `dtype` that of the computation.

  `shardings` makes a tree of NamedShardings from the tree of ShapeDtypeStructs. The parameters are
  then born in their shards: the host holds one tensor of the folder at a time, less where several
  processes share it. Without it they are NumPy arrays.

  UserError: a config or weights that are not supported, or keys that are not those of the table.
  """
  folder = pathlib.Path(folder)
  config = load_config(folder, head, param_dtype, dtype)
  files = _files_of_keys(folder)
  entries = table(config)
  _check_keys(folder, config, files, entries)
  shapes = jax.eval_shape(functools.partial(decoder.init, config=config), jax.random.key(0))
  places = () if shardings is None else (shardings(shapes),)
  rows = collections.defaultdict(list)  # path -> its tensors, layer by layer
  for entry in entries:
    rows[entry.path].append(entry)
  with contextlib.ExitStack() as stack:
    tensors = _open_tensors(stack, files)
    _check_tensors(files, tensors, entries)
    if config.tie_embeddings and 'lm_head.weight' in files and config.head != 'value':
      _check_tied(folder, tensors, entries[0])

    def make(path, leaf, place=None):
      name = jax.tree_util.keystr(path, simple=True, separator='/')
      return _make_leaf(leaf, place, rows[name], functools.partial(_read, tensors))

    params = jax.tree_util.tree_map_with_path(make, shapes, *places)
  return config, params


def load_config(folder, head='tokens', param_dtype='float32', dtype='float32'):
  """The ModelConfig of a folder's config.json, without its weights."""
  _check_choice('head', head, HEADS)
  _check_choice('param_dtype', param_dtype, DTYPES)
  _check_choice('dtype', dtype, DTYPES)
  path = pathlib.Path(folder) / 'config.json'
  raw = _read_json(path)
  family = raw.get('model_type')
  if not isinstance(family, str) or family not in FAMILIES:
    raise UserError(
        f'{path}: model_type {family!r} is not supported; allowed: '
        f'{", ".join(FAMILIES)}; choose a model of one of these'
    )
  _refuse_unsupported(path, raw)
  if head == 'tokens' and 'TokenClassification' in str(raw.get('architectures')):
    raise UserError(
        f'{folder} holds a critic (TokenClassification), not a policy; load it with '
        "head='value' or give a policy's folder"
    )
  d_model = _number(path, raw, 'hidden_size')
  num_heads = _number(path, raw, 'num_attention_heads')
  num_kv_heads = num_heads if family == 'llama' else None
  rope_theta, rope_scaling = _rope_of(path, raw)
  return decoder.ModelConfig(
      vocab_size=_number(path, raw, 'vocab_size'),
      d_model=d_model,
      num_layers=_number(path, raw, 'num_hidden_layers'),
      num_heads=num_heads,
      num_kv_heads=_number(path, raw, 'num_key_value_heads', num_kv_heads),
      head_dim=_number(path, raw, 'head_dim', 128 if family == 'qwen3' else d_model // num_heads),
      d_ff=_number(path, raw, 'intermediate_size'),
      rope_theta=rope_theta,
      rope_scaling=rope_scaling,
      rms_norm_eps=_number(path, raw, 'rms_norm_eps', 1e-6, float),
      tie_embeddings=bool(raw.get('tie_word_embeddings', False)),
      qkv_bias=family == 'qwen2',
      qk_norm=family == 'qwen3',
      family=family,
      head=head,
      dtype=dtype,
      param_dtype=param_dtype,
      max_positions=_number(path, raw, 'max_position_embeddings', 32_768),
  )


def save_hf(folder, config, params, tokenizer_folder=None, max_shard_bytes=MAX_SHARD_BYTES):
  """Writes what `load_hf` and transformers read: config.json, safetensors, the tokenizer's files.

  A critic (head 'value') becomes a TokenClassification model with one label, its value head
  `score`; head 'both' is a causal model with `score` beside it. The parameters (NumPy or jax
  arrays, sharded or not) keep their dtype and are gathered one tensor at a time; the host holds
  one file of at most `max_shard_bytes`. Where several processes share the arrays, all call this
  and the first one writes. Weights already in the folder are replaced.
  """
  folder = pathlib.Path(folder)
  token_ids = {}
  if tokenizer_folder is not None:
    tokenizer_folder = pathlib.Path(tokenizer_folder)
    if not any((tokenizer_folder / name).is_file() for name in TOKENIZER_FILES):
      raise UserError(f'{tokenizer_folder} holds no tokenizer; give a folder with tokenizer.json')
    if (tokenizer_folder / 'config.json').is_file():
      source = _read_json(tokenizer_folder / 'config.json')
      token_ids = {name: source[name] for name in TOKEN_IDS if name in source}
  dtype = str(np.dtype(params['embed']['embedding'].dtype))
  tensor_of = functools.partial(_copy_out, params)
  write_weights(folder, config, dtype, tensor_of, token_ids, max_shard_bytes)
  if tokenizer_folder is not None and jax.process_index() == 0:
    if not tokenizer_folder.samefile(folder):
      for name in TOKENIZER_FILES:
        if (tokenizer_folder / name).is_file():
          shutil.copyfile(tokenizer_folder / name, folder / name)


def write_weights(
    folder, config, dtype, tensor_of, token_ids=None, max_shard_bytes=MAX_SHARD_BYTES
):
  """Writes config.json and safetensors: `tensor_of(entry)` gives each NumPy array of the table.

  `dtype` ('float32' | 'bfloat16') is that of the arrays, `token_ids` what config.json says of
  TOKEN_IDS.
  """
  folder = pathlib.Path(folder)
  writes = jax.process_index() == 0
  shards = _shards(table(config), DTYPES[dtype].itemsize, max_shard_bytes)
  names = ['model.safetensors']
  if len(shards) > 1:
    count = len(shards)
    names = [f'model-{i + 1:05d}-of-{count:05d}.safetensors' for i in range(count)]
  if writes:
    folder.mkdir(parents=True, exist_ok=True)
  for name, shard in zip(names, shards, strict=True):
    tensors = {}
    for entry in shard:
      tensor = tensor_of(entry)  # on every process: gathering is a joint work
      if writes:
        tensors[entry.name] = tensor
    if writes:
      safetensors.numpy.save_file(tensors, folder / (name + '.partial'), {'format': 'pt'})
  if not writes:
    return
  for old in [*folder.glob('model*.safetensors'), folder / 'model.safetensors.index.json']:
    old.unlink(missing_ok=True)
  for name in names:
    os.replace(folder / (name + '.partial'), folder / name)
  if len(shards) > 1:
    weight_map = {e.name: name for name, shard in zip(names, shards, strict=True) for e in shard}
    total = DTYPES[dtype].itemsize * sum(math.prod(e.shape) for shard in shards for e in shard)
    index = {'metadata': {'total_size': total}, 'weight_map': weight_map}
    write_json(folder / 'model.safetensors.index.json', index)
  write_json(folder / 'config.json', _hf_config(config, dtype, token_ids or {}))


def table(config):
  """The table: every tensor of a folder and where it goes, for this family and head."""
  d, f, v, h = config.d_model, config.d_ff, config.vocab_size, config.head_dim
  query, key = config.num_heads * h, config.num_kv_heads * h
  entries = [Entry('model.embed_tokens.weight', 'embed/embedding', None, (v, d), False)]
  layer_rows = [
      ('input_layernorm.weight', 'attention_norm/scale', (d,), False),
      ('self_attn.q_proj.weight', 'attention/query/kernel', (query, d), True),
      ('self_attn.k_proj.weight', 'attention/key/kernel', (key, d), True),
      ('self_attn.v_proj.weight', 'attention/value/kernel', (key, d), True),
      ('self_attn.o_proj.weight', 'attention/out/kernel', (d, query), True),
      ('post_attention_layernorm.weight', 'mlp_norm/scale', (d,), False),
      ('mlp.gate_proj.weight', 'mlp/gate/kernel', (f, d), True),
      ('mlp.up_proj.weight', 'mlp/up/kernel', (f, d), True),
      ('mlp.down_proj.weight', 'mlp/down/kernel', (d, f), True),
  ]
  if config.qkv_bias:
    layer_rows += [
        ('self_attn.q_proj.bias', 'attention/query/bias', (query,), False),
        ('self_attn.k_proj.bias', 'attention/key/bias', (key,), False),
        ('self_attn.v_proj.bias', 'attention/value/bias', (key,), False),
    ]
  if config.qk_norm:
    layer_rows += [
        ('self_attn.q_norm.weight', 'attention/query_norm/scale', (h,), False),
        ('self_attn.k_norm.weight', 'attention/key_norm/scale', (h,), False),
    ]
  for l in range(config.num_layers):
    for name, path, shape, transpose in layer_rows:
      entries.append(Entry(f'model.layers.{l}.{name}', f'layers/{path}', l, shape, transpose))
  entries.append(Entry('model.norm.weight', 'final_norm/scale', None, (d,), False))
  if config.head in ('tokens', 'both') and not config.tie_embeddings:
    entries.append(Entry('lm_head.weight', 'lm_head/kernel', None, (v, d), True))
  if config.head in ('value', 'both'):
    entries.append(Entry('score.weight', 'value_head/kernel', None, (1, d), True))
    entries.append(Entry('score.bias', 'value_head/bias', None, (1,), False))
  return entries


def _files_of_keys(folder):
  """Every key of the folder's safetensors -> its file."""
  single, index = folder / 'model.safetensors', folder / 'model.safetensors.index.json'
  if single.is_file():
    paths, listed = [single], {}
  elif index.is_file():
    listed = _read_json(index).get('weight_map')
    if not isinstance(listed, dict):
      raise UserError(f'{index}: no weight_map; download the folder again')
    paths = [folder / name for name in sorted(set(listed.values()))]
  else:
    raise UserError(
        f'{folder} has no weights: neither model.safetensors nor '
        'model.safetensors.index.json; download them, or convert another format with '
        "transformers' save_pretrained"
    )
  files = {}
  for path in paths:
    if not path.is_file():
      raise UserError(f'{path} is missing although {index.name} lists it; download it')
    try:
      with safetensors.safe_open(path, framework='numpy') as tensors:
        names = list(tensors.keys())
    except safetensors.SafetensorError as error:
      raise UserError(f'{path} is not a whole safetensors file ({error}); download it') from error
    for name in names:
      if name in files:
        raise UserError(
            f'{folder}: duplicate key {name} in {files[name].name} and {path.name}; '
            'remove one of the files'
        )
      files[name] = path
  for name, file in listed.items():
    if files.get(name) != folder / file:
      raise UserError(
          f'{folder}: missing key {name}, listed in {index.name} for {file}; '
          'download the folder again'
      )
  return files


def _check_keys(folder, config, files, entries):
  """The folder's keys are the table's, but for what this head does not need."""
  wanted = {entry.name for entry in entries}
  optional = {'lm_head.weight', 'score.weight', 'score.bias'}
  if 'score.weight' not in files:
    if 'score.bias' in files:
      raise UserError(f'{folder}: score.bias without score.weight; save the value head again')
    wanted -= {'score.weight'}
  wanted -= {'score.bias'}
  missing = [e.name for e in entries if e.name in wanted and e.name not in files]
  if missing:
    raise UserError(
        f'{folder}: missing {_some(missing)}, needed by {config.family} with head '
        f'{config.head!r}; download the folder again or check config.json'
    )
  rotary = '.rotary_emb.inv_freq'  # a constant that old checkpoints carry
  unknown = [n for n in files if n not in wanted | optional and not n.endswith(rotary)]
  if unknown:
    raise UserError(
        f'{folder}: unknown {_some(unknown)}, not part of {config.family}; '
        'check model_type in config.json'
    )


def _some(names):
  more = f' and {len(names) - 3} more' if len(names) > 3 else ''
  return f'key{"s" if len(names) > 1 else ""} {", ".join(names[:3])}{more}'


def _open_tensors(stack, files):
  """Every key -> its safetensors slice, of which parts can be read; the files close with `stack`."""
  paths = sorted(set(files.values()))
  handles = {
      path: stack.enter_context(safetensors.safe_open(path, framework='numpy')) for path in paths
  }
  return {name: handles[path].get_slice(name) for name, path in files.items()}


def _check_tensors(files, tensors, entries):
  """Shapes and dtypes, by the files' headers, before anything is read."""
  for entry in entries:
    if entry.name not in tensors:
      continue
    path, shape = files[entry.name], list(tensors[entry.name].get_shape())
    if shape != list(entry.shape):
      raise UserError(
          f'{path}: {entry.name} has shape {shape}, config.json implies '
          f'{list(entry.shape)}; use the config.json that belongs to the weights'
      )
    if (stored := tensors[entry.name].get_dtype()) not in STORED:
      raise UserError(
          f'{path}: {entry.name} is stored as {stored}; allowed: {", ".join(STORED)}; '
          'use a checkpoint that is not quantized'
      )


def _check_tied(folder, tensors, embed):
  """Where the folder holds an output matrix although it is tied, the two are one."""
  lm_head, embedding = tensors['lm_head.weight'], tensors[embed.name]
  same = list(lm_head.get_shape()) == list(embed.shape)
  for start in range(0, embed.shape[0], 4096):  # few rows at a time: these are the largest tensors
    rows = slice(start, min(start + 4096, embed.shape[0]))
    same = same and np.array_equal(lm_head[rows], embedding[rows])
  if not same:
    raise UserError(
        f'{folder}: lm_head.weight differs from model.embed_tokens.weight although '
        'config.json says tie_word_embeddings; set that to false'
    )


def _make_leaf(leaf, place, rows, read):
  """The parameter of shape and dtype `leaf` from its `rows` of the table.

  On the host without a `place`, in its shards with one. `read(entry, shape, dtype, index)` gives
  a part of one layer.
  """
  if rows[0].layer is None:
    part = functools.partial(read, rows[0], leaf.shape, leaf.dtype)
    return part(_whole(leaf.shape)) if place is None else _in_shards(leaf.shape, place, part)
  parts = [functools.partial(read, entry, leaf.shape[1:], leaf.dtype) for entry in rows]
  if place is None:
    stack = np.empty(leaf.shape, leaf.dtype)
    for l, part in enumerate(parts):
      stack[l] = part(_whole(leaf.shape[1:]))
    return stack
  # Layer by layer into a stack that is on the devices from the start and is written in place: a
  # stack, or a device's part of it, may be a third of the model.
  zeros, put = _stack_functions(leaf.shape, leaf.dtype, place)
  stack = zeros()
  layer_place = NamedSharding(place.mesh, P(*place.spec[1:]))
  for l, part in enumerate(parts):
    stack = put(stack, _in_shards(leaf.shape[1:], layer_place, part), np.int32(l))
    stack.block_until_ready()  # else the layers queue up on the host
  return stack


@functools.cache  # gate and up, actor and critic share their compilations
def _stack_functions(shape, dtype, place):
  """() -> zeros [L,..], and (stack, layer, l) -> stack with that layer, in the stack's memory."""
  zeros = lambda: jnp.zeros(shape, dtype)
  put = lambda stack, layer, l: stack.at[l].set(layer)
  return (jax.jit(zeros, out_shardings=place), jax.jit(put, out_shardings=place, donate_argnums=0))


def _in_shards(shape, place, part):
  """An array of which each device holds `part(index)`; replicas are read once."""
  seen = {}

  def shard(index):
    key = str(index)
    if key not in seen:
      seen[key] = part(index)
    return seen[key]

  return jax.make_array_from_callback(shape, place, shard)


def _read(tensors, entry, shape, dtype, index):
  """The part `index` (a slice an axis) of an entry whose array here has `shape`, as `dtype`.

  Only that part is read. Several of our axes may be one of the folder's, [D,N,H] of [N * H, D]:
  the first of them is cut there, the others here.
  """
  if entry.name not in tensors:  # a value head that the folder lacks
    return np.zeros([len(range(*s.indices(n))) for s, n in zip(index, shape)], dtype)
  theirs, ours, rest, axis = [], [], [], 0
  for size in entry.shape[::-1] if entry.transpose else entry.shape:
    end = axis + 1
    while math.prod(shape[axis:end]) < size:
      end += 1
    inner = math.prod(shape[axis + 1 : end])
    start, stop, _ = index[axis].indices(shape[axis])
    theirs.append(slice(start * inner, stop * inner))
    ours += [stop - start, *shape[axis + 1 : end]]
    rest += [slice(None), *index[axis + 1 : end]]
    axis = end
  tensor = tensors[entry.name][tuple(theirs[::-1] if entry.transpose else theirs)]
  tensor = (tensor.T if entry.transpose else tensor).reshape(ours)[tuple(rest)]
  return np.ascontiguousarray(tensor, dtype)


def _whole(shape):
  return (slice(None),) * len(shape)


def _copy_out(params, entry):
  """The tensor of an entry, as the folder has it."""
  leaf = _leaf(params, entry.path)
  if entry.layer is not None:
    leaf = leaf[entry.layer] if isinstance(leaf, np.ndarray) else _layer_of(leaf, entry.layer)
  if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
    leaf = multihost_utils.process_allgather(leaf, tiled=True)
  leaf = np.asarray(leaf)
  if entry.transpose:
    leaf = leaf.reshape(entry.shape[::-1]).T
  return np.ascontiguousarray(leaf.reshape(entry.shape))  # save_file writes the buffer as it lies


@jax.jit  # with the layer as an argument: one compilation a parameter and not one a layer
def _layer_of(stack, layer):
  return jax.lax.dynamic_index_in_dim(stack, layer, keepdims=False)


def _leaf(params, path):
  for name in path.split('/'):
    params = params[name]
  return params


def _shards(entries, itemsize, max_shard_bytes):
  """The entries in runs of at most max_shard_bytes, each of at least one tensor."""
  shards, size = [[]], 0
  for entry in entries:
    num_bytes = math.prod(entry.shape) * itemsize
    if shards[-1] and size + num_bytes > max_shard_bytes:
      shards.append([])
      size = 0
    shards[-1].append(entry)
    size += num_bytes
  return shards


def _refuse_unsupported(path, raw):
  refused = {
      'use_sliding_window': bool(raw.get('use_sliding_window')),
      'attention_bias': bool(raw.get('attention_bias')),
      'mlp_bias': bool(raw.get('mlp_bias')),
      'quantization_config': raw.get('quantization_config') is not None,
      'hidden_act': raw.get('hidden_act', 'silu') != 'silu',
  }
  for name, is_refused in refused.items():
    if is_refused:
      allowed = "'silu'" if name == 'hidden_act' else 'none'
      raise UserError(
          f'{path}: {name} = {raw[name]!r} is not supported; allowed: {allowed}; '
          'choose another model'
      )


def _rope_of(path, raw):
  """(rope_theta, rope_scaling): transformers 5 has both in rope_parameters, 4 apart."""
  rope = raw.get('rope_parameters') or raw.get('rope_scaling') or {}
  if not isinstance(rope, dict):
    raise UserError(f'{path}: rope parameters {rope!r} are not an object; download it again')
  theta = {'rope_theta': rope.get('rope_theta', raw.get('rope_theta'))}
  theta = _number(path, theta, 'rope_theta', 10_000.0, float)
  kind = rope.get('rope_type', rope.get('type', 'default'))
  if kind == 'default':
    return theta, None
  if kind != 'llama3':
    raise UserError(
        f"{path}: rope type {kind!r} is not supported; allowed: 'default', 'llama3'; "
        'choose another model or remove the scaling'
    )
  names = ('factor', 'low_freq_factor', 'high_freq_factor')
  original = _number(path, rope, 'original_max_position_embeddings')
  return theta, (*(_number(path, rope, name, None, float) for name in names), original)


def _hf_config(config, dtype, token_ids):
  """config.json as both transformers 4 and 5 read it."""
  kind = 'ForTokenClassification' if config.head == 'value' else 'ForCausalLM'
  rope_scaling = None
  if config.rope_scaling is not None:
    factor, low, high, original = config.rope_scaling
    rope_scaling = {
        'rope_type': 'llama3',
        'factor': factor,
        'low_freq_factor': low,
        'high_freq_factor': high,
        'original_max_position_embeddings': original,
    }
  raw = {
      'architectures': [FAMILIES[config.family] + kind],
      'model_type': config.family,
      'vocab_size': config.vocab_size,
      'hidden_size': config.d_model,
      'num_hidden_layers': config.num_layers,
      'num_attention_heads': config.num_heads,
      'num_key_value_heads': config.num_kv_heads,
      'head_dim': config.head_dim,
      'intermediate_size': config.d_ff,
      'hidden_act': 'silu',
      'rope_theta': config.rope_theta,
      'rope_scaling': rope_scaling,
      'rms_norm_eps': config.rms_norm_eps,
      'tie_word_embeddings': config.tie_embeddings,
      'max_position_embeddings': config.max_positions,
      'attention_dropout': 0.0,
      'torch_dtype': dtype,
  }
  if config.head == 'value':
    raw |= {'id2label': {'0': 'value'}, 'label2id': {'value': 0}, 'classifier_dropout': 0.0}
  return raw | token_ids


def _number(path, raw, name, default=None, kind=int):
  value = raw.get(name)
  value = default if value is None else value
  if value is None:
    raise UserError(f'{path}: {name} is missing; download config.json again')
  if isinstance(value, bool) or not isinstance(value, (int, kind)) or not (0 < value < 2**53):
    raise UserError(f'{path}: {name} = {value!r} is not a positive number; download it again')
  return kind(value)


def _check_choice(name, value, allowed):
  if value not in allowed:
    raise UserError(f'{name} {value!r} is unknown; allowed: {", ".join(allowed)}; choose one')


def _read_json(path):
  if not path.is_file():
    raise UserError(
        f'{path} does not exist; give a folder as transformers saves it, with '
        'config.json and model.safetensors'
    )
  try:
    raw = json.loads(path.read_text(encoding='utf-8'))
  except (ValueError, RecursionError) as error:
    raise UserError(f'{path} is not JSON ({error}); download it again') from error
  if not isinstance(raw, dict):
    raise UserError(f'{path} is not a JSON object; download it again')
  return raw


def write_json(path, raw):
  path.write_text(json.dumps(raw, indent=2) + '\n', encoding='utf-8')
