"""Loads Hugging Face folders as (ModelConfig, params), one tensor at a time.

`hf_config.table` maps the names. A missing, unknown or misshapen key stops the load, because a
model that is slightly wrong would still train, badly.
"""

import collections
from collections.abc import Callable
import contextlib
import pathlib
from typing import Any

from absl import logging
import jax
import numpy as np
import safetensors
import safetensors.numpy

from stppo_jax import types
from stppo_jax.models import decoder
from stppo_jax.models import hf_config
from stppo_jax.models.families import family as family_lib
from stppo_jax.types import UserError

STORED = ('F32', 'BF16', 'F16')  # dtypes that a folder may hold, by safetensors' names
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


def load_hf(
    folder: str | pathlib.Path,
    head: str = 'tokens',
    param_dtype: str = 'float32',
    dtype: str = 'float32',
    shardings: Callable[[decoder.Params], decoder.Params] | None = None,
    value_labels: tuple[str, ...] = ('value',),
) -> tuple[decoder.ModelConfig, decoder.Params]:
  """Loads (ModelConfig, params) from a folder with config.json and safetensors.

  With head 'value' the output matrix is dropped. A folder without a value head gets a zero one, so
  a critic can start from its policy's folder. The loaded parameters have the dtype
  `param_dtype`, also if the folder has another one. `dtype` is that of the computation. A value
  head has the outputs `value_labels`.

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
    tensors = _checked_tensors(stack, folder, config, entries)
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


def check(folder: str | pathlib.Path, config: decoder.ModelConfig) -> None:
  """Raises the errors of `load_hf` for files and tensors that do not fit.

  Reads headers, and biases that must be 0.
  """
  with contextlib.ExitStack() as stack:
    _checked_tensors(stack, pathlib.Path(folder), config, hf_config.table(config))


def _checked_tensors(stack, folder, config, entries):
  """Returns {key: lazy slice} of the tensors of `entries`; the files close with `stack`."""
  tensors = _text_tensors(folder, _open_tensors(stack, folder))
  _check_keys(folder, config, tensors, entries)
  _check_tensors(folder, tensors, entries)
  return tensors


def _open_tensors(stack, folder):
  """Returns {key: lazy safetensors slice} of a folder; the files close with `stack`."""
  single = folder / 'model.safetensors'
  index = folder / 'model.safetensors.index.json'
  paths = [single]
  weight_map = {}
  if not single.is_file():
    if not index.is_file():
      raise UserError(
          f'{folder} has no weights: neither model.safetensors nor '
          'model.safetensors.index.json; download them, or convert another format with '
          "transformers' save_pretrained"
      )
    weight_map = _weight_map(index)
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
      named = weight_map.get(min(repeated), '')
      raise UserError(
          f'{folder}: {path.name} and another file hold {_some(sorted(repeated))}; the index names '
          f'{named} for it: remove it from the other one'
      )
    tensors |= {name: file.get_slice(name) for name in file.keys()}
  return tensors


def _weight_map(index):
  """Returns {tensor: file} of an index. UserError: it is another JSON value."""
  raw = hf_config.read_json(index)
  weight_map = raw.get('weight_map')
  if not types.is_of(weight_map, dict[str, str]):
    raise UserError(
        f'{index}: its weight_map is {types.shown(weight_map)}, and an object of file names is '
        'needed; download it again'
    )
  return weight_map


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
      from stppo_jax.models.families import experts

      renamed |= experts.split(stem, kind, tensor)
    else:
      renamed[name] = tensor
  if used < len(tensors):
    left_out = len(tensors) - used
    logging.info('%s: %d tensors beside the text model are left out', folder, left_out)
  return renamed


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
          f'{"convert it to F32" if dtype == "F64" else "use a checkpoint that is not quantized"}'
      )
    if entry.path == family_lib.ABSENT and tensor[:].any():
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
