"""Writes Hugging Face folders: config.json, weights and tokenizer, one tensor at a time."""

from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import json
import math
import pathlib
import shutil

from absl import logging
import jax
from jax.experimental import multihost_utils
import numpy as np
import safetensors.numpy

from stppo_jax.models import decoder
from stppo_jax.models import families
from stppo_jax.models import hf_config
from stppo_jax.models.families import family as family_lib

TOKEN_IDS = ('bos_token_id', 'eos_token_id', 'pad_token_id')
MAX_SHARD_BYTES = 2 * 2**30
# A part of the pre-tokenizer of Qwen2 and Qwen2.5 as JSON: a digit is a word, as is a punctuation
# mark.
_QWEN2_WORDS = r'|\\p{N}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|'
# Classes in tokenizer_config.json with which AutoTokenizer may take it for any model. None: absent.
_QWEN2_CLASSES = (None, 'Qwen2Tokenizer', 'Qwen2TokenizerFast')


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
  and process 0 writes. Existing weights in the folder are replaced. `eos_ids` end a generation as
  well, and are written into config.json if that of the tokenizer's folder names none.
  """
  folder = pathlib.Path(folder)
  token_ids = {}
  if tokenizer_folder is not None:
    tokenizer_folder = pathlib.Path(tokenizer_folder)
    config = readable_by_auto_tokenizer(config, tokenizer_folder)
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
  write_json(folder / 'config.json', to_json(config, dtype, token_ids))
  if tokenizer_folder is not None:
    copy_tokenizer(tokenizer_folder, folder, config)
    _write_ends(folder / 'generation_config.json', token_ids.get('eos_token_id'), eos_ids)


def _write_ends(path, own, eos_ids):
  """Adds `eos_ids` to the ids that end a generation, where engines read them.

  A base model's own end token does not end the turns of its chat template. `own` is that of
  config.json.
  """
  raw = hf_config.read_json(path) if path.is_file() else {}
  listed = raw.get('eos_token_id')
  before = own if listed is None else listed
  before = before if isinstance(before, list) else [before]
  ends = [i for i in dict.fromkeys([*before, *eos_ids]) if i is not None]
  if ends and ends != listed:
    write_json(path, raw | {'eos_token_id': ends[0] if len(ends) == 1 else ends})


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
    write_json(folder / 'model.safetensors.index.json', index)


def stored_dtype(folder: str | pathlib.Path) -> str:
  """Returns the dtype that a folder's config.json names ('bfloat16'), or '' without one."""
  raw = hf_config.read_model(folder)
  return str(raw.get('dtype') or raw.get('torch_dtype') or '')  # transformers 5, and 4


def dtype_to_write(source: str | pathlib.Path, param_dtype: str) -> str:
  """Returns the dtype for weights that were trained from `source`: its own, if that is bfloat16."""
  return 'bfloat16' if stored_dtype(source) == 'bfloat16' else param_dtype


def to_json(
    config: decoder.ModelConfig, dtype: str, token_ids: Mapping[str, object]
) -> dict[str, object]:
  """Returns config.json as transformers 4 and 5 read it, with `token_ids` added."""
  family = families.find(config.family)
  kind = 'ForTokenClassification' if config.head == 'value' else 'ForCausalLM'
  raw = {
      'architectures': [family.prefix + kind],
      'model_type': config.family,
      'vocab_size': config.vocab_size,
      'hidden_size': config.d_model,
      'num_hidden_layers': config.num_layers,
      'num_attention_heads': config.num_heads,
      'num_key_value_heads': config.num_kv_heads,
      'head_dim': config.head_dim,
      'intermediate_size': config.d_ff,
      'hidden_act': 'silu',
      'rms_norm_eps': config.rms_norm_eps,
      'tie_word_embeddings': config.tie_embeddings,
      'max_position_embeddings': config.max_positions,
      'attention_dropout': 0.0,
      'torch_dtype': dtype,
  }
  raw |= family.to_json(config)
  if config.num_experts:
    raw |= {
        'intermediate_size': config.d_ff * config.experts_per_token,  # dense layers, unused
        'moe_intermediate_size': config.d_ff,
        'num_experts': config.num_experts,
        'num_experts_per_tok': config.experts_per_token,
        'norm_topk_prob': config.norm_topk_prob,
        'shared_expert_intermediate_size': config.shared_d_ff,
        'decoder_sparse_step': 1,
        'mlp_only_layers': [],
    }
  if config.head == 'value':
    raw |= {
        'id2label': {str(k): label for k, label in enumerate(config.value_labels)},
        'label2id': {label: k for k, label in enumerate(config.value_labels)},
        'classifier_dropout': 0.0,
    }
  return {**raw, **token_ids}


def readable_by_auto_tokenizer(
    config: decoder.ModelConfig, folder: pathlib.Path
) -> decoder.ModelConfig:
  """Returns the config under which AutoTokenizer gives the ids of `folder`'s tokenizer.json.

  Choice: transformers 5 replaces the pre-tokenizer of model type qwen2 by Qwen2's and ignores the
  folder's. A model with another tokenizer is written as a Llama with biases. The bias of its
  output is 0, so it computes the same. A Llama has no windows, so a model with windows keeps its
  type, and a warning says how to load its tokenizer.
  """
  path = folder / 'tokenizer.json'
  if config.family != 'qwen2' or not path.is_file():
    return config
  if not _has_other_words(path):
    return config
  if any(kind.window for kind in config.layer_kinds):
    logging.warning(
        '%s: AutoTokenizer of transformers 5 reads another tokenizer than this one for a Qwen2 '
        'model with windows: load it with PreTrainedTokenizerFast(tokenizer_file=..)',
        path,
    )
    return config
  return dataclasses.replace(config, family='llama')


def _has_other_words(path):
  """Returns whether a tokenizer.json has another pre-tokenizer than Qwen2's."""
  tokenizer = hf_config.read_json(path)
  pre_tokenizer = json.dumps(tokenizer.get('pre_tokenizer'), ensure_ascii=False)
  return _QWEN2_WORDS not in pre_tokenizer and 'model' in tokenizer


def copy_tokenizer(source: pathlib.Path, folder: pathlib.Path, config: decoder.ModelConfig) -> None:
  """Copies the tokenizer's files into the folder of a model with this config.

  Qwen3.5's folders name Qwen2's class. transformers 5 corrects this for the model type with images,
  but not for that of the text model, where the class replaces the pre-tokenizer by Qwen2's.
  """
  if not source.samefile(folder):
    for name in hf_config.TOKENIZER_FILES:
      if (source / name).is_file():
        shutil.copyfile(source / name, folder / name)
    if (source / hf_config.MORE_TEMPLATES).is_dir():
      more = folder / hf_config.MORE_TEMPLATES
      shutil.copytree(source / hf_config.MORE_TEMPLATES, more, dirs_exist_ok=True)
  path = folder / 'tokenizer_config.json'
  raw = hf_config.read_json(path) if path.is_file() else {}
  words = folder / 'tokenizer.json'
  may_be_qwen2 = raw.get('tokenizer_class') in _QWEN2_CLASSES
  is_replaced = may_be_qwen2 and words.is_file() and _has_other_words(words)
  if is_replaced or (config.family == 'llama' and config.qkv_bias):
    # This class takes tokenizer.json as it is.
    write_json(path, raw | {'tokenizer_class': 'PreTrainedTokenizerFast'})


def write_json(path: pathlib.Path, raw: Mapping[str, object]) -> None:
  """Writes indented JSON."""
  path.write_text(json.dumps(raw, indent=2) + '\n', encoding='utf-8')


def _copy_out(params, dtype, entry):
  """Returns the tensor of an entry in the folder's layout."""
  if entry.path == family_lib.ABSENT:
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
