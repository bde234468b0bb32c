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
import numpy as np
import safetensors
import safetensors.numpy

from stppo_jax.models import decoder
from stppo_jax.models import hf_config
from stppo_jax.types import UserError

STORED = ('F32', 'BF16', 'F16')  # dtypes that a folder may hold, by safetensors' names
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
  then created in their shards, and the host holds one parameter at a time.
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
  entries_by_path = collections.defaultdict(list)  # layer by layer, expert by expert
  for entry in entries:
    entries_by_path[entry.path].append(entry)
  with contextlib.ExitStack() as stack:
    tensors = _open_tensors(stack, files)
    _check_tensors(files, tensors, entries)
    if config.tie_embeddings and 'lm_head.weight' in files and config.head != 'value':
      _check_tied(folder, tensors, entries[0])

    def load(path, leaf, place=None):
      name = jax.tree_util.keystr(path, simple=True, separator='/')
      rows = entries_by_path[name]
      if place is None:
        return _read_part(folder, tensors, rows, leaf, (slice(None),) * len(leaf.shape))
      parts = {}

      def part(index):
        key = str(index)
        if key not in parts:  # replicas have the same index, and it is read once
          parts[key] = _read_part(folder, tensors, rows, leaf, index)
        return parts[key]

      return jax.make_array_from_callback(leaf.shape, place, part)

    params = jax.tree_util.tree_map_with_path(load, shapes, *places)
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
  tensor at a time, and the host holds one file of at most `max_shard_bytes`. If several processes
  share the arrays, all of them call this function and process 0 writes. Existing weights in the
  folder are replaced. `eos_ids` end a generation if the config.json of the tokenizer's folder names
  none.
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
  _write_weights(folder, config, params, dtype, max_shard_bytes)
  if jax.process_index() != 0:
    return
  hf_config.write_json(folder / 'config.json', hf_config.to_json(config, dtype, token_ids))
  if tokenizer_folder is not None:
    hf_config.copy_tokenizer(tokenizer_folder, folder, config)
    generation = folder / 'generation_config.json'
    if 'eos_token_id' in token_ids and not generation.is_file():
      hf_config.write_json(generation, {'eos_token_id': token_ids['eos_token_id']})


def _write_weights(folder, config, params, dtype, max_shard_bytes):
  """Writes the safetensors, in place of those in the folder, and their index."""
  is_writer = jax.process_index() == 0
  if is_writer:
    folder.mkdir(parents=True, exist_ok=True)
  numpy_dtype = hf_config.DTYPES[dtype]
  entries = hf_config.table(config)
  shards = _shards(entries, numpy_dtype.itemsize, max_shard_bytes)
  weight_map = {}
  for i, shard in enumerate(shards, start=1):
    name = 'model.safetensors'
    if len(shards) > 1:
      name = f'model-{i:05d}-of-{len(shards):05d}.safetensors'
    tensors = {}
    for entry in shard:
      tensor = _copy_out(params, numpy_dtype, entry)  # on all processes: gathering is a collective
      weight_map[entry.name] = name
      if is_writer:
        tensors[entry.name] = tensor
    if is_writer:
      safetensors.numpy.save_file(tensors, folder / f'{name}.partial', {'format': 'pt'})
  if not is_writer:
    return
  for old in [*folder.glob('model*.safetensors'), folder / 'model.safetensors.index.json']:
    old.unlink(missing_ok=True)
  umask = os.umask(0)
  os.umask(umask)
  for name in sorted(set(weight_map.values())):
    partial = folder / f'{name}.partial'
    partial.chmod(0o666 & ~umask)  # safetensors makes private files
    partial.rename(folder / name)
  if len(shards) > 1:
    total = numpy_dtype.itemsize * sum(math.prod(entry.shape) for entry in entries)
    index = {'metadata': {'total_size': total}, 'weight_map': weight_map}
    hf_config.write_json(folder / 'model.safetensors.index.json', index)


def _files_of_keys(folder):
  """Returns {key: file} for all keys of the folder's safetensors."""
  single = folder / 'model.safetensors'
  index = folder / 'model.safetensors.index.json'
  listed: dict[str, str] = {}
  paths = [single]
  if not single.is_file():
    if not index.is_file():
      raise UserError(
          f'{folder} has no weights: neither model.safetensors nor '
          'model.safetensors.index.json; download them, or convert another format with '
          "transformers' save_pretrained"
      )
    listed = hf_config.read_json(index).get('weight_map', {})
    if not isinstance(listed, dict) or not listed:
      raise UserError(f'{index}: no weight_map; download the folder again')
    paths = [folder / name for name in sorted(set(listed.values()))]
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
  if 'score.bias' in files and 'score.weight' not in files:
    raise UserError(f'{folder}: score.bias without score.weight; save the value head again')
  optional = {'lm_head.weight', 'score.weight', 'score.bias'}
  required = {entry.name for entry in entries} - {'score.weight', 'score.bias'}
  missing = [entry.name for entry in entries if entry.name in required - files.keys()]
  if missing:
    raise UserError(
        f'{folder}: missing {_some(missing)}, needed by {config.family} with head '
        f'{config.head!r}; download the folder again or check config.json'
    )
  rotary = '.rotary_emb.inv_freq'  # a constant in old checkpoints
  unknown = [name for name in files.keys() - required - optional if not name.endswith(rotary)]
  if unknown:
    raise UserError(
        f'{folder}: unknown {_some(sorted(unknown))}, not part of {config.family}; '
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
    path = files[entry.name]
    tensor = tensors[entry.name]
    shape = list(tensor.get_shape())
    dtype = tensor.get_dtype()
    if shape != list(entry.shape):
      raise UserError(
          f'{path}: {entry.name} has shape {shape}, config.json implies '
          f'{list(entry.shape)}; use the config.json that belongs to the weights'
      )
    if dtype not in STORED:
      raise UserError(
          f'{path}: {entry.name} is stored as {dtype}; allowed: {", ".join(STORED)}; '
          'use a checkpoint that is not quantized'
      )
    if entry.path == hf_config.ABSENT and tensor[:].any():
      raise UserError(
          f'{path}: {entry.name} is not 0, which is not supported; choose another model'
      )


def _check_tied(folder, tensors, embed):
  """Raises UserError if a tied folder contains an output matrix that differs from the embedding."""
  lm_head = tensors['lm_head.weight']
  embedding = tensors[embed.name]
  same = list(lm_head.get_shape()) == list(embed.shape)
  for start in range(0, embed.shape[0], 4096):  # by parts: these are the largest tensors
    rows = slice(start, min(start + 4096, embed.shape[0]))
    same = same and np.array_equal(lm_head[rows], embedding[rows])
  if not same:
    raise UserError(
        f'{folder}: lm_head.weight differs from model.embed_tokens.weight although '
        'config.json says tie_word_embeddings; set that to false'
    )


def _read_part(folder, tensors, entries, leaf, index):
  """Returns the part `index` (one slice per axis) of a parameter of shape and dtype `leaf`.

  The parameter is one entry of the table, or a stack of one per layer, or of one per layer and
  expert.
  """
  num_stacked = (entries[0].layer is not None) + (entries[0].expert is not None)
  stacked = leaf.shape[:num_stacked]
  shape = leaf.shape[num_stacked:]
  numbers = np.arange(len(entries)).reshape(stacked)[index[:num_stacked]]
  part = np.empty((*numbers.shape, *_lengths(index[num_stacked:], shape)), leaf.dtype)
  for place, number in np.ndenumerate(numbers):
    part[place] = _read(folder, tensors, entries[number], shape, index[num_stacked:])
  return part


def _lengths(index, shape):
  """Returns the shape of the part `index` of an array."""
  return [len(range(*part.indices(size))) for part, size in zip(index, shape)]


def _read(folder, tensors, entry, shape, index):
  """Returns the part `index` of an entry whose array here has `shape`.

  Only that part is read. Several of our axes may be one axis of the folder, as [D,N,H] and [N * H,
  D]: the first of them is sliced in the file, the others here.
  """
  if entry.name not in tensors:  # a value head that the folder lacks
    return np.zeros(_lengths(index, shape), np.float32)
  file_slices, sizes, slices = [], [], []
  axis = 0
  for file_size in entry.shape[::-1] if entry.transpose else entry.shape:
    end = axis + 1
    while math.prod(shape[axis:end]) < file_size:
      end += 1
    inner = math.prod(shape[axis + 1 : end])
    start, stop, _ = index[axis].indices(shape[axis])
    file_slices.append(slice(start * inner, stop * inner))
    sizes += [stop - start, *shape[axis + 1 : end]]
    slices += [slice(None), *index[axis + 1 : end]]
    axis = end
  if entry.transpose:
    tensor = tensors[entry.name][tuple(file_slices[::-1])].T
  else:
    tensor = tensors[entry.name][tuple(file_slices)]
  if not hf_config.is_finite(tensor):
    raise UserError(
        f'{folder}: {entry.name} holds numbers that are not finite, and every step would be '
        'skipped; use another copy or an earlier checkpoint'
    )
  return tensor.reshape(sizes)[tuple(slices)]


def _copy_out(params, dtype, entry):
  """Returns the tensor of an entry in the folder's layout."""
  if entry.path == hf_config.ABSENT:
    return np.zeros(entry.shape, dtype)
  leaf = params
  for name in entry.path.split('/'):
    leaf = leaf[name]
  index = tuple(i for i in (entry.layer, entry.expert) if i is not None)
  if isinstance(leaf, np.ndarray):
    leaf = leaf[index]
  elif index:
    leaf = _slice_of(leaf, index)
  if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
    leaf = multihost_utils.process_allgather(leaf, tiled=True)
  leaf = np.asarray(leaf).astype(dtype, copy=False)
  if entry.transpose:
    leaf = leaf.reshape(entry.shape[::-1]).T
  return np.ascontiguousarray(leaf.reshape(entry.shape))  # save_file writes the raw buffer


@jax.jit  # the index is an argument: one compilation per parameter, not per layer or expert
def _slice_of(stack, index):
  starts = (*index, *(0,) * (stack.ndim - len(index)))
  shape = stack.shape[len(index) :]
  return jax.lax.dynamic_slice(stack, starts, (1,) * len(index) + shape).reshape(shape)


def _shards(entries, itemsize, max_shard_bytes):
  """Groups the entries into files of at most max_shard_bytes, each with at least one tensor."""
  shards: list[list[hf_config.Entry]] = [[]]
  size = 0
  for entry in entries:
    entry_bytes = math.prod(entry.shape) * itemsize
    if shards[-1] and size + entry_bytes > max_shard_bytes:
      shards.append([])
      size = 0
    shards[-1].append(entry)
    size += entry_bytes
  return shards
