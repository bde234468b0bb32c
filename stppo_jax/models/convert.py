"""Converts Hugging Face folders to and from (ModelConfig, params), one tensor at a time.

`hf_config.table` maps the names. A missing, unknown, duplicate or misshapen key stops the load,
because a model that is slightly wrong would still train, badly.
"""

import collections
from collections.abc import Callable
from collections.abc import Sequence
import contextlib
import functools
import math
import os
import pathlib
from typing import Any

import jax
from jax.experimental import multihost_utils
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np
import safetensors
import safetensors.numpy

from stppo_jax.models import decoder
from stppo_jax.models import hf_config
from stppo_jax.types import UserError

STORED = ('F32', 'BF16', 'F16')  # as safetensors calls what a folder may hold
TOKEN_IDS = ('bos_token_id', 'eos_token_id', 'pad_token_id')
MAX_SHARD_BYTES = 2 * 2**30


def load_hf(
    folder: str | pathlib.Path,
    head: str = 'tokens',
    param_dtype: str = 'float32',
    dtype: str = 'float32',
    shardings: Callable[[Any], Any] | None = None,
) -> tuple[decoder.ModelConfig, decoder.Params]:
  """Loads (ModelConfig, params) from a folder with config.json and safetensors.

  With head 'value' the output matrix is dropped. A folder without a value head gets a zero one, so
  a critic can start from its policy's folder. `param_dtype` is that of the loaded parameters,
  whatever the folder has, and `dtype` that of the computation.

  `shardings` maps the tree of ShapeDtypeStructs to a tree of NamedShardings. The parameters are
  then created in their shards, and the host holds at most one tensor of the folder at a time.
  Without it they are NumPy arrays.

  UserError: an unsupported config or weights, or keys other than the table's.
  """
  folder = pathlib.Path(folder)
  config = hf_config.load(folder, head, param_dtype, dtype)
  files = _files_of_keys(folder)
  entries = hf_config.table(config)
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
      return _make_leaf(leaf, place, rows[name], functools.partial(_read, folder, tensors))

    params = jax.tree_util.tree_map_with_path(make, shapes, *places)
  return config, params


def save_hf(
    folder: str | pathlib.Path,
    config: decoder.ModelConfig,
    params: decoder.Params,
    tokenizer_folder: str | pathlib.Path | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    dtype: str | None = None,
    eos_ids: Sequence[int] = (),
) -> None:
  """Writes a folder for `load_hf` and transformers: config.json, safetensors and the tokenizer.

  A critic (head 'value') becomes a TokenClassification model with one label and its value head as
  `score`. Head 'both' is a causal model with an additional `score`. The parameters (NumPy or jax
  arrays, sharded or not) are written in `dtype`, by default the embedding's. They are gathered one
  tensor at a time; the host holds one file of at most `max_shard_bytes`. Where several processes
  share the arrays, all of them call this and process 0 writes. Existing weights in the folder are
  replaced. `eos_ids` end a generation where the config.json beside the tokenizer names none.
  """
  folder = pathlib.Path(folder)
  token_ids = {}
  if tokenizer_folder is not None:
    tokenizer_folder = pathlib.Path(tokenizer_folder)
    config = hf_config.readable_by_auto_tokenizer(config, tokenizer_folder)
    hf_config.check_has_tokenizer(tokenizer_folder)
    if (tokenizer_folder / 'config.json').is_file():
      source = hf_config.read_json(tokenizer_folder / 'config.json')
      token_ids = {name: source[name] for name in TOKEN_IDS if name in source}
  if eos_ids:  # transformers would take the family's default
    token_ids.setdefault('eos_token_id', eos_ids[0] if len(eos_ids) == 1 else list(eos_ids))
  dtype = dtype or str(np.dtype(params['embed']['embedding'].dtype))
  tensor_of = functools.partial(_copy_out, params, hf_config.DTYPES[dtype])
  write_weights(folder, config, dtype, tensor_of, token_ids, max_shard_bytes)
  if tokenizer_folder is not None and jax.process_index() == 0:
    hf_config.copy_tokenizer(tokenizer_folder, folder, config)
    generation = folder / 'generation_config.json'
    if 'eos_token_id' in token_ids and not generation.is_file():
      hf_config.write_json(generation, {'eos_token_id': token_ids['eos_token_id']})


def write_weights(
    folder: str | pathlib.Path,
    config: decoder.ModelConfig,
    dtype: str,
    tensor_of: Callable[[hf_config.Entry], np.ndarray],
    token_ids: dict[str, Any] | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
  """Writes config.json and safetensors; `tensor_of(entry)` returns each NumPy array of the table.

  `dtype` ('float32' | 'bfloat16') is that of the arrays; `token_ids` go into config.json.
  """
  folder = pathlib.Path(folder)
  writes = jax.process_index() == 0
  shards = _shards(hf_config.table(config), hf_config.DTYPES[dtype].itemsize, max_shard_bytes)
  names = ['model.safetensors']
  if len(shards) > 1:
    count = len(shards)
    names = [f'model-{i + 1:05d}-of-{count:05d}.safetensors' for i in range(count)]
  if writes:
    folder.mkdir(parents=True, exist_ok=True)
  for name, shard in zip(names, shards, strict=True):
    tensors = {}
    for entry in shard:
      tensor = tensor_of(entry)  # on every process, because gathering is a collective
      if writes:
        tensors[entry.name] = tensor
    if writes:
      safetensors.numpy.save_file(tensors, folder / (name + '.partial'), {'format': 'pt'})
  if not writes:
    return
  for old in [*folder.glob('model*.safetensors'), folder / 'model.safetensors.index.json']:
    old.unlink(missing_ok=True)
  umask = os.umask(0)
  os.umask(umask)
  for name in names:
    (folder / (name + '.partial')).chmod(0o666 & ~umask)  # safetensors' own files are private
    os.replace(folder / (name + '.partial'), folder / name)
  if len(shards) > 1:
    weight_map = {e.name: name for name, shard in zip(names, shards, strict=True) for e in shard}
    total = hf_config.DTYPES[dtype].itemsize * sum(
        math.prod(e.shape) for shard in shards for e in shard
    )
    index = {'metadata': {'total_size': total}, 'weight_map': weight_map}
    hf_config.write_json(folder / 'model.safetensors.index.json', index)
  hf_config.write_json(folder / 'config.json', hf_config.to_json(config, dtype, token_ids or {}))


def _files_of_keys(folder):
  """Returns {key: file} for all keys of the folder's safetensors."""
  single, index = folder / 'model.safetensors', folder / 'model.safetensors.index.json'
  listed: dict[str, str] = {}
  if single.is_file():
    paths = [single]
  elif index.is_file():
    listed = hf_config.read_json(index).get('weight_map', {})
    if not isinstance(listed, dict) or not listed:
      raise UserError(f'{index}: no weight_map; download the folder again')
    paths = [folder / name for name in sorted(set(listed.values()))]
  else:
    raise UserError(
        f'{folder} has no weights: neither model.safetensors nor '
        'model.safetensors.index.json; download them, or convert another format with '
        "transformers' save_pretrained"
    )
  files: dict[str, pathlib.Path] = {}
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
  """Raises UserError unless the folder's keys are the table's; unused heads may be there too."""
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
  rotary = '.rotary_emb.inv_freq'  # a constant in old checkpoints
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
  """Returns {key: lazy safetensors slice}; the files close with `stack`."""
  paths = sorted(set(files.values()))
  handles = {
      path: stack.enter_context(safetensors.safe_open(path, framework='numpy')) for path in paths
  }
  return {name: handles[path].get_slice(name) for name, path in files.items()}


def _check_tensors(files, tensors, entries):
  """Checks shapes and dtypes in the files' headers, before any tensor is read."""
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
    if entry.path == hf_config.NOT_OURS and tensors[entry.name][:].any():
      raise UserError(
          f'{path}: {entry.name} is not 0, which is not supported; choose another model'
      )


def _check_tied(folder, tensors, embed):
  """Raises UserError if a tied folder contains an output matrix that differs from the embedding."""
  lm_head, embedding = tensors['lm_head.weight'], tensors[embed.name]
  same = list(lm_head.get_shape()) == list(embed.shape)
  for start in range(0, embed.shape[0], 4096):  # by parts: these are the largest tensors
    rows = slice(start, min(start + 4096, embed.shape[0]))
    same = same and np.array_equal(lm_head[rows], embedding[rows])
  if not same:
    raise UserError(
        f'{folder}: lm_head.weight differs from model.embed_tokens.weight although '
        'config.json says tie_word_embeddings; set that to false'
    )


def _make_leaf(leaf, place, rows, read):
  """Returns the parameter of shape and dtype `leaf` from its `rows` of the table.

  It is on the host without a `place`, and in its shards with one. `read(entry, shape, dtype,
  index)` returns a part of one layer.
  """
  if rows[0].layer is None:
    part = functools.partial(read, rows[0], leaf.shape, leaf.dtype)
    return part(_whole(leaf.shape)) if place is None else _in_shards(leaf.shape, place, part)
  layers = collections.defaultdict(list)
  for entry in rows:
    layers[entry.layer].append(entry)
  parts = [
      functools.partial(_read_layer, read, entries, leaf.shape[1:], leaf.dtype)
      for _, entries in sorted(layers.items())
  ]
  if place is None:
    stack = np.empty(leaf.shape, leaf.dtype)
    for l, part in enumerate(parts):
      stack[l] = part(_whole(leaf.shape[1:]))
    return stack
  # Layer by layer into a stack on the devices, which is written in place: a stack, or a device's
  # part of it, may be a third of the model.
  zeros, put = _stack_functions(leaf.shape, leaf.dtype, place)
  stack = zeros()
  layer_place = NamedSharding(place.mesh, P(*place.spec[1:]))
  for l, part in enumerate(parts):
    stack = put(stack, _in_shards(leaf.shape[1:], layer_place, part), np.int32(l))
    stack.block_until_ready()  # otherwise the layers would pile up on the host
  return stack


def _read_layer(read, entries, shape, dtype, index):
  """Returns the part `index` of a layer, which is one tensor of the folder or one per expert."""
  if entries[0].expert is None:
    return read(entries[0], shape, dtype, index)
  experts = [read(entry, shape[1:], dtype, index[1:]) for entry in entries[index[0]]]
  return np.stack(experts)


@functools.cache  # gate and up, and actor and critic, share their compilations
def _stack_functions(shape, dtype, place):
  """Returns two compiled functions: zeros [L,..], and an in-place write of one layer."""
  zeros = lambda: jnp.zeros(shape, dtype)
  put = lambda stack, layer, l: stack.at[l].set(layer)
  return (jax.jit(zeros, out_shardings=place), jax.jit(put, out_shardings=place, donate_argnums=0))


def _in_shards(shape, place, part):
  """Returns an array whose shard on each device is `part(index)`; replicas are read once."""
  seen = {}

  def shard(index):
    key = str(index)
    if key not in seen:
      seen[key] = part(index)
    return seen[key]

  return jax.make_array_from_callback(shape, place, shard)


def _read(folder, tensors, entry, shape, dtype, index):
  """Returns the part `index` (one slice per axis) of an entry whose array here has `shape`.

  Only that part is read. Several of our axes may be one axis of the folder, as [D,N,H] and [N * H,
  D]: the first of them is sliced in the file, the others here.
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
  if not hf_config.is_finite(tensor):
    raise UserError(
        f'{folder}: {entry.name} holds numbers that are not finite, and every step would be '
        'skipped; use another copy or an earlier checkpoint'
    )
  tensor = (tensor.T if entry.transpose else tensor).reshape(ours)[tuple(rest)]
  return np.ascontiguousarray(tensor, dtype)


def _whole(shape):
  return (slice(None),) * len(shape)


def _copy_out(params, dtype, entry):
  """Returns the tensor of an entry in the folder's layout."""
  if entry.path == hf_config.NOT_OURS:
    return np.zeros(entry.shape, dtype)
  leaf = _leaf(params, entry.path)
  if entry.layer is not None:
    index = (entry.layer,) if entry.expert is None else (entry.layer, entry.expert)
    leaf = leaf[index] if isinstance(leaf, np.ndarray) else _slice_of(leaf, index)
  if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
    leaf = multihost_utils.process_allgather(leaf, tiled=True)
  leaf = np.asarray(leaf).astype(dtype, copy=False)
  if entry.transpose:
    leaf = leaf.reshape(entry.shape[::-1]).T
  return np.ascontiguousarray(leaf.reshape(entry.shape))  # save_file writes the raw buffer


@jax.jit  # with the index as an argument: one compilation per parameter, not per layer or expert
def _slice_of(stack, index):
  starts = (*index, *(0,) * (stack.ndim - len(index)))
  shape = stack.shape[len(index) :]
  return jax.lax.dynamic_slice(stack, starts, (1,) * len(index) + shape).reshape(shape)


def _leaf(params, path):
  for name in path.split('/'):
    params = params[name]
  return params


def _shards(entries, itemsize, max_shard_bytes):
  """Groups the entries into files of at most max_shard_bytes, each with at least one tensor."""
  shards: list[list[hf_config.Entry]] = [[]]
  size = 0
  for entry in entries:
    num_bytes = math.prod(entry.shape) * itemsize
    if shards[-1] and size + num_bytes > max_shard_bytes:
      shards.append([])
      size = 0
    shards[-1].append(entry)
    size += num_bytes
  return shards
