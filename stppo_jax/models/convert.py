"""Converts Hugging Face folders to and from (ModelConfig, params), one tensor at a time.

`hf_config.table` maps the names. A missing, unknown or misshapen key stops the load, because a
model that is slightly wrong would still train, badly.
"""

import collections
from collections.abc import Callable
from collections.abc import Sequence
import contextlib
import math
import pathlib
from typing import Any

from absl import logging
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
# Prefixes of a text model within one for images and text -> those of the text model alone.
TEXT_PREFIXES = {
    'model.language_model.': 'model.',
    'language_model.model.': 'model.',
    'language_model.lm_head.': 'lm_head.',
}
# Prefixes of the parts for images, and of heads that predict several tokens at once.
OTHER_PARTS = (
    'model.vision_tower.',
    'vision_tower.',
    'model.multi_modal_projector.',
    'multi_modal_projector.',
    'model.visual.',
    'visual.',
    'mtp.',
)
MAX_SHARD_BYTES = 2 * 2**30


def load_hf(
    folder: str | pathlib.Path,
    head: str = 'tokens',
    param_dtype: str = 'float32',
    dtype: str = 'float32',
    shardings: Callable[[Any], Any] | None = None,
    value_labels: tuple[str, ...] = ('value',),
) -> tuple[decoder.ModelConfig, decoder.Params]:
  """Loads (ModelConfig, params) from a folder with config.json and safetensors.

  With head 'value' the output matrix is dropped. A folder without a value head gets a zero one, so
  a critic can start from its policy's folder. `param_dtype` is that of the loaded parameters,
  whatever the folder has, and `dtype` that of the computation. A value head has the outputs
  `value_labels`.

  `shardings` maps the tree of ShapeDtypeStructs to a tree of NamedShardings. The parameters are
  then put on the devices one by one, and the host holds one at a time. Without it they are NumPy
  arrays.

  UserError: an unsupported config or weights, or keys other than the table's.
  """
  folder = pathlib.Path(folder)
  config = hf_config.load(folder, head, param_dtype, dtype, value_labels)
  entries = hf_config.table(config)
  shapes = decoder.shapes(config)
  places = () if shardings is None else (shardings(shapes),)
  entries_by_path = collections.defaultdict(list)  # layer by layer, expert by expert
  for entry in entries:
    entries_by_path[entry.path].append(entry)
  with contextlib.ExitStack() as stack:
    tensors = _text_tensors(folder, _open_tensors(stack, folder))
    _check_keys(folder, config, tensors, entries)
    _check_tensors(folder, tensors, entries)
    if config.tie_embeddings and 'lm_head.weight' in tensors and head != 'value':
      _check_tied(folder, tensors, entries[0].name)

    def load(path, leaf, place=None):
      name = jax.tree_util.keystr(path, simple=True, separator='/')
      parameter = _read(folder, tensors, entries_by_path[name], leaf)
      if place is None:
        return parameter
      return jax.make_array_from_callback(leaf.shape, place, lambda index: parameter[index])

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

  A critic (head 'value') becomes a TokenClassification model with its value head as `score`, and
  one label per output. The ends of bins are not stored. Head 'both' is a causal model with an
  additional `score`. The parameters (NumPy or jax arrays, sharded or not) are written in `dtype`,
  by default the embedding's. They are gathered one tensor at a time, and the host holds one file of
  at most `max_shard_bytes`. If several processes share the arrays, all of them call this function
  and process 0 writes. Existing weights in the folder are replaced. `eos_ids` end a generation if
  the config.json of the tokenizer's folder names none.
  """
  folder = pathlib.Path(folder)
  token_ids = {}
  if tokenizer_folder is not None:
    tokenizer_folder = pathlib.Path(tokenizer_folder)
    config = hf_config.readable_by_auto_tokenizer(config, tokenizer_folder)
    hf_config.check_has_tokenizer(tokenizer_folder)
    if (tokenizer_folder / 'config.json').is_file():
      source = hf_config.read_model(tokenizer_folder)
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
      # `save_file` would make a private file.
      data = safetensors.numpy.save(tensors, {'format': 'pt'})
      (folder / f'{name}.partial').write_bytes(data)
  if not is_writer:
    return
  for old in [*folder.glob('model*.safetensors'), folder / 'model.safetensors.index.json']:
    old.unlink(missing_ok=True)
  for name in sorted(set(weight_map.values())):
    (folder / f'{name}.partial').rename(folder / name)
  if len(shards) > 1:
    total = numpy_dtype.itemsize * sum(math.prod(entry.shape) for entry in entries)
    index = {'metadata': {'total_size': total}, 'weight_map': weight_map}
    hf_config.write_json(folder / 'model.safetensors.index.json', index)


def _open_tensors(stack, folder):
  """Returns {key: lazy safetensors slice} of a folder; the files close with `stack`."""
  single = folder / 'model.safetensors'
  index = folder / 'model.safetensors.index.json'
  paths = [single]
  if not single.is_file():
    if not index.is_file():
      raise UserError(
          f'{folder} has no weights: neither model.safetensors nor '
          'model.safetensors.index.json; download them, or convert another format with '
          "transformers' save_pretrained"
      )
    weight_map = hf_config.read_json(index).get('weight_map', {})
    names = sorted(set(weight_map.values()))
    if outside := [name for name in names if pathlib.Path(name).name != name]:
      raise UserError(
          f'{index} lists {_some(outside)}: it may only list names of files in its folder'
      )
    paths = [folder / name for name in names]
  tensors = {}
  for path in paths:
    if not path.is_file():
      raise UserError(f'{path} is missing although {index.name} lists it; download it')
    try:
      file = stack.enter_context(safetensors.safe_open(path, framework='numpy'))
    except safetensors.SafetensorError as error:
      raise UserError(f'{path} is not a whole safetensors file ({error}); download it') from error
    repeated = tensors.keys() & set(file.keys())
    if repeated:
      raise UserError(f'{folder}: two files hold {_some(sorted(repeated))}; remove one of them')
    tensors |= {name: file.get_slice(name) for name in file.keys()}
  return tensors


def _text_tensors(folder, tensors):
  """Returns the tensors of the text model, under the names that a text model alone has."""
  renamed: dict[str, Any] = {}
  used = 0
  for name, tensor in tensors.items():
    if name.startswith(OTHER_PARTS):
      continue
    for prefix, own in TEXT_PREFIXES.items():
      if name.startswith(prefix):
        name = own + name.removeprefix(prefix)
        break
    used += 1
    stem, _, kind = name.rpartition('.')
    if stem.endswith('.mlp.experts') and kind in ('gate_up_proj', 'down_proj'):
      renamed |= _experts_of(stem, kind, tensor)
    else:
      renamed[name] = tensor
  if used < len(tensors):
    left_out = len(tensors) - used
    logging.info('%s: %d tensors beside the text model are left out', folder, left_out)
  return renamed


class _ExpertPart:
  """The rows first to last of one expert of a tensor [E,..,..], as a lazy safetensors slice."""

  def __init__(self, tensor, expert, first, last):
    self._tensor = tensor
    self._expert = expert
    self._rows = slice(first, last)

  def get_shape(self):
    return [self._rows.stop - self._rows.start, self._tensor.get_shape()[2]]

  def get_dtype(self):
    return self._tensor.get_dtype()

  def __getitem__(self, index):
    return self._tensor[self._expert : self._expert + 1, self._rows][0][index]


def _experts_of(stem, kind, tensor):
  """Returns a tensor of all experts of a layer under the names of each expert's own tensors."""
  shape = tensor.get_shape()
  if len(shape) != 3:
    return {f'{stem}.{kind}': tensor}
  names = ['gate_proj', 'up_proj'] if kind == 'gate_up_proj' else ['down_proj']
  size = shape[1] // len(names)
  parts = {}
  for expert in range(shape[0]):
    for i, name in enumerate(names):
      part = _ExpertPart(tensor, expert, i * size, (i + 1) * size)
      parts[f'{stem}.{expert}.{name}.weight'] = part
  return parts


def _check_keys(folder, config, tensors, entries):
  """Raises UserError unless the folder's keys are the table's; unused heads may be there too."""
  optional = {'lm_head.weight', 'score.weight', 'score.bias'}
  required = {entry.name for entry in entries} - {'score.weight', 'score.bias'}
  missing = [entry.name for entry in entries if entry.name in required - tensors.keys()]
  if missing:
    raise UserError(
        f'{folder}: missing {_some(missing)}, needed by {config.family} with head '
        f'{config.head!r}; download the folder again or check config.json'
    )
  rotary = '.rotary_emb.inv_freq'  # a constant in old checkpoints
  unknown = [name for name in tensors.keys() - required - optional if not name.endswith(rotary)]
  if unknown:
    raise UserError(
        f'{folder}: unknown {_some(sorted(unknown))}, not part of {config.family}; '
        'check model_type in config.json'
    )


def _some(names):
  more = f' and {len(names) - 3} more' if len(names) > 3 else ''
  return f'key{"s" if len(names) > 1 else ""} {", ".join(names[:3])}{more}'


def _check_tensors(folder, tensors, entries):
  """Checks shapes and dtypes in the files' headers, before any tensor is read."""
  for entry in entries:
    if entry.name not in tensors:
      continue
    tensor = tensors[entry.name]
    shape = list(tensor.get_shape())
    dtype = tensor.get_dtype()
    if shape != list(entry.shape) and entry.name.startswith('score.'):
      raise UserError(
          f'{folder}: its value head has {shape[0]} outputs, and algorithm.value_loss needs '
          f'{entry.shape[0]}; set algorithm.value_loss and value_bins as in its training'
      )
    if shape != list(entry.shape):
      raise UserError(
          f'{folder}: {entry.name} has shape {shape}, config.json implies '
          f'{list(entry.shape)}; use the config.json that belongs to the weights'
      )
    if dtype not in STORED:
      raise UserError(
          f'{folder}: {entry.name} is stored as {dtype}; allowed: {", ".join(STORED)}; '
          'use a checkpoint that is not quantized'
      )
    if entry.path == hf_config.ABSENT and tensor[:].any():
      raise UserError(
          f'{folder}: {entry.name} is not 0, which is not supported; choose another model'
      )


def _check_tied(folder, tensors, embedding):
  """Raises UserError if a tied folder contains an output matrix that differs from the embedding."""
  if not np.array_equal(tensors['lm_head.weight'][:], tensors[embedding][:]):
    raise UserError(
        f'{folder}: lm_head.weight differs from {embedding} although config.json says '
        'tie_word_embeddings; set that to false'
    )


def _read(folder, tensors, entries, leaf):
  """Returns a whole parameter of shape and dtype `leaf`.

  The parameter is one entry of the table, or a stack of one per layer, or of one per layer and
  expert.
  """
  parameter = np.zeros(leaf.shape, leaf.dtype)
  stack = parameter.reshape(len(entries), -1)
  for part, entry in zip(stack, entries):
    if entry.name not in tensors:  # a value head that the folder lacks
      continue
    tensor = tensors[entry.name][:]
    if not np.isfinite(tensor).all():
      raise UserError(
          f'{folder}: {entry.name} holds numbers that are not finite, and every step would be '
          'skipped; use another copy or an earlier checkpoint'
      )
    if entry.transpose:
      tensor = tensor.T
    part.reshape(tensor.shape)[...] = tensor
  return parameter


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
