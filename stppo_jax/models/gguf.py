"""Converts a GGUF file to a Hugging Face folder for `convert.load_hf` and transformers.

  python -m stppo_jax.models.gguf FILE FOLDER        needs the extra `gguf`

Quantised tensors are written dequantised. The tokenizer is rebuilt from the file's tokens and
merges. The file is not trusted: it is read as numbers and text, and an inconsistent file is
rejected before anything is written.
"""

import argparse
from collections.abc import Sequence
import dataclasses
import functools
import pathlib
import sys
from typing import Any

import numpy as np
import tokenizers

from stppo_jax.models import attention
from stppo_jax.models import convert
from stppo_jax.models import decoder
from stppo_jax.models import hf_config
from stppo_jax.types import UserError

ARCHITECTURES = ('llama', 'qwen2', 'qwen3')

# How text is split before merging, by llama.cpp's name. Qwen2 and Llama 3 share the pattern and
# differ in how many digits stay together.
_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r'|\s*[\r\n]+|\s+(?!\S)|\s+'
)
_BYTES = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
_GPT2 = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _split(pattern):
  return tokenizers.pre_tokenizers.Split(tokenizers.Regex(pattern), 'isolated')


PRE_TOKENIZERS: dict[str, list[Any]] = {
    'gpt-2': [_GPT2],
    'smollm': [tokenizers.pre_tokenizers.Digits(individual_digits=True), _GPT2],
    'qwen2': [_split(_PATTERN % r'\p{N}'), _BYTES],
    'llama-bpe': [_split(_PATTERN % r'\p{N}{1,3}'), _BYTES],
}


def convert_file(
    path: str | pathlib.Path, folder: str | pathlib.Path, dtype: str = 'float32'
) -> decoder.ModelConfig:
  """Writes config.json, weights, tokenizer and generation_config.json; returns the ModelConfig.

  The weights are stored as `dtype`; bfloat16 rounds the dequantised values. UserError: an
  incomplete file, an unsupported architecture, quantisation or tokenizer, or tensors that
  contradict the header.
  """
  path, folder = pathlib.Path(path), pathlib.Path(folder)
  if dtype not in hf_config.DTYPES:
    raise UserError(
        f'dtype {dtype!r} is unknown; allowed: {", ".join(hf_config.DTYPES)}; choose one'
    )
  if folder.exists() and not folder.is_dir():
    raise UserError(f'{folder} is a file; give the name of a folder')
  header = Header(path)
  config = model_config(header)
  names = _check_tensors(header, config)
  tokens = header.texts('tokenizer.ggml.tokens')
  ids = _token_ids(header, tokens)
  tokenizer = _tokenizer(header, tokens, ids)

  def tensor_of(entry):
    return _tensor(header, config, names, entry).astype(hf_config.DTYPES[dtype])

  settings = {
      'tokenizer_class': 'PreTrainedTokenizerFast',
      'clean_up_tokenization_spaces': False,
      'model_max_length': config.max_positions,
      **{f'{name}_token': tokens[i] for name, i in ids.items() if name != 'eot'},
  }
  if template := header.value('tokenizer.chat_template', str, ''):
    settings['chat_template'] = template
  config_ids = {f'{name}_token_id': ids[name] for name in ('bos', 'eos', 'pad') if name in ids}
  ends = list(dict.fromkeys(ids[name] for name in ('eos', 'eot') if name in ids))
  folder.mkdir(parents=True, exist_ok=True)
  convert.write_weights(folder, config, dtype, tensor_of, config_ids)
  tokenizer.save(str(folder / 'tokenizer.json'))
  hf_config.write_json(folder / 'tokenizer_config.json', settings)
  hf_config.write_json(
      folder / 'generation_config.json', config_ids | ({'eos_token_id': ends} if ends else {})
  )
  return config


class Header:
  """The metadata of a GGUF file, and its tensors, memory-mapped.

  Attributes:
    path: the file.
    library: the package `gguf`.
    tensors: name -> the package's ReaderTensor.
  """

  def __init__(self, path):
    try:
      import gguf  # here, because only this command needs it
    except ImportError as error:
      raise UserError(f'the package gguf is missing ({error}); pip install ".[gguf]"') from error

    class Reader(gguf.GGUFReader):
      """Raises ValueError at the end of the file, where the base class returns empty values."""

      def _get(self, offset, dtype, count=1, override_order=None):
        part = super()._get(offset, dtype, count, override_order)
        if len(part) != int(count):
          raise ValueError(f'it ends before byte {int(offset) + int(count)}')
        return part

    try:
      reader = Reader(path)
    except OSError as error:
      raise UserError(f'{path} cannot be read ({error.strerror}); give a GGUF file') from error
    except (ValueError, KeyError, IndexError, TypeError, OverflowError, RecursionError) as error:
      raise UserError(f'{path} is not a whole GGUF file ({error}); download it again') from error
    if reader.byte_order != 'I':
      raise UserError(f'{path} has the other byte order than this machine; choose another file')
    self.path = path
    self.library = gguf
    self.tensors = {tensor.name: tensor for tensor in reader.tensors}
    self._fields = reader.fields

  def value(self, name: str, kind: type, *default: Any) -> Any:
    """Returns the value of a key. UserError: missing without a default, or of another type."""
    if name not in self._fields:
      if default:
        return default[0]
      raise UserError(f'{self.path}: {name} is missing; choose a file with a whole header')
    try:
      value = self._fields[name].contents()
    except UnicodeDecodeError as error:
      raise UserError(f'{self.path}: {name} is not UTF-8; download it again') from error
    if type(value) is not kind:
      raise UserError(
          f'{self.path}: {name} is of type {type(value).__name__}, not {kind.__name__}; '
          'choose another file'
      )
    return value

  def size(self, name: str, *default: int) -> int:
    """Returns an integer that is at least 1."""
    value = self.value(name, int, *default)
    if value < 1:
      raise UserError(f'{self.path}: {name} = {value} is not a positive number; download it again')
    return value

  def texts(self, name: str) -> list[str]:
    """Returns a list of strings."""
    values = self.value(name, list)
    if not all(type(value) is str for value in values):
      raise UserError(f'{self.path}: {name} is not a list of texts; choose another file')
    return values

  def real(self, name: str, *default: float) -> float:
    """Returns a positive float32 in its shortest form: 1e-05, not 9.999999747378752e-06."""
    value = float(str(np.float32(self.value(name, float, *default))))
    if not 0 < value < np.inf:
      raise UserError(f'{self.path}: {name} = {value} is not a positive number; download it again')
    return value


def model_config(header: Header) -> decoder.ModelConfig:
  """Returns the ModelConfig that a header describes."""
  family = header.value('general.architecture', str)
  if family not in ARCHITECTURES:
    raise UserError(
        f'{header.path}: architecture {family!r} is not supported; allowed: '
        f'{", ".join(ARCHITECTURES)}; choose a model of one of these'
    )
  key = lambda name: f'{family}.{name}'
  old_factor = header.value(key('rope.scale_linear'), float, 1.0)
  factor = header.value(key('rope.scaling.factor'), float, old_factor)
  default = 'none' if factor in (0, 1) else 'linear'  # as llama.cpp reads a file without a type
  scaling = header.value(key('rope.scaling.type'), str, default)
  if scaling != 'none':
    raise UserError(
        f"{header.path}: rope scaling {scaling!r} is not supported; allowed: 'none', or "
        "Llama 3's, which is a tensor rope_freqs.weight; choose another model"
    )
  num_layers = header.size(key('block_count'))
  if num_layers > len(header.tensors):
    raise UserError(
        f'{header.path}: {key("block_count")} = {num_layers}, but the file holds only '
        f'{len(header.tensors)} tensors; download it again'
    )
  d_model = header.size(key('embedding_length'))
  num_heads = header.size(key('attention.head_count'))
  head_dim = header.size(key('attention.key_length'), d_model // num_heads)
  rotated = header.size(key('rope.dimension_count'), head_dim)
  if rotated != head_dim or head_dim % 2:
    raise UserError(
        f'{header.path}: {key("rope.dimension_count")} = {rotated} of {head_dim} '
        'channels; all channels of a head must be rotated; choose another model'
    )
  config = decoder.ModelConfig(
      vocab_size=len(header.texts('tokenizer.ggml.tokens')),
      d_model=d_model,
      num_layers=num_layers,
      num_heads=num_heads,
      num_kv_heads=header.size(key('attention.head_count_kv'), num_heads),
      head_dim=head_dim,
      d_ff=header.size(key('feed_forward_length')),
      rope_theta=header.real(key('rope.freq_base'), 10_000.0),
      rms_norm_eps=header.real(key('attention.layer_norm_rms_epsilon')),
      tie_embeddings='output.weight' not in header.tensors,
      qkv_bias=family == 'qwen2',
      qk_norm=family == 'qwen3',
      family=family,
      max_positions=header.size(key('context_length')),
  )
  return _with_rope_scaling(header, config) if 'rope_freqs.weight' in header.tensors else config


def _with_rope_scaling(header, config):
  """Returns `config` with the rope scaling of Llama 3, stored as a divisor per frequency [H/2]."""
  divisors = _dequantize(header, 'rope_freqs.weight')
  # The file lacks the four numbers behind the divisors; within Llama 3 only the first one differs.
  scaling = (float(np.round(divisors.max(), 4)), 1.0, 4.0, 8192)
  radians = functools.partial(attention.frequencies, config.head_dim, config.rope_theta)
  stretch = radians(None) / radians(scaling)
  if divisors.shape != stretch.shape or not np.allclose(divisors, stretch, rtol=1e-4):
    raise UserError(
        f'{header.path}: rope_freqs.weight is not the scaling of Llama 3; choose another model'
    )
  return dataclasses.replace(config, rope_scaling=scaling)


def _check_tensors(header, config):
  """Returns {entry name: tensor name} for the whole table; UserError unless all tensors match."""
  architectures = {name: arch for arch, name in header.library.MODEL_ARCH_NAMES.items()}
  name_map = header.library.get_tensor_name_map(architectures[config.family], config.num_layers)
  names = {}
  for entry in hf_config.table(config):
    name = name_map.get_name(entry.name, try_suffixes=('.weight', '.bias'))
    if name not in header.tensors:
      raise UserError(
          f'{header.path}: missing tensor {name}, needed by {config.family}; download it again'
      )
    shape = header.tensors[name].shape.tolist()[::-1]
    if shape != list(entry.shape):
      raise UserError(
          f'{header.path}: {name} has shape {shape}, the header implies '
          f'{list(entry.shape)}; download it again'
      )
    names[entry.name] = name
  unknown = sorted(header.tensors.keys() - set(names.values()) - {'rope_freqs.weight'})
  if unknown:
    raise UserError(
        f'{header.path}: unknown tensor {unknown[0]} ({len(unknown)} in all), not part '
        f'of {config.family}; choose another model'
    )
  return names


def _tensor(header, config, names, entry):
  """Returns the float32 array of an entry in Hugging Face's layout."""
  tensor = _dequantize(header, names[entry.name])
  heads = {'q_proj': config.num_heads, 'k_proj': config.num_kv_heads}
  projection = entry.name.split('.')[-2]
  if config.family == 'llama' and projection in heads:
    # A rotary pair is rows (2i, 2i + 1) of its head in GGUF, and (i, i + H/2) here.
    pairs = tensor.reshape(heads[projection], config.head_dim // 2, 2, -1)
    tensor = pairs.swapaxes(1, 2).reshape(tensor.shape)
  return tensor


def _dequantize(header, name):
  tensor = header.tensors[name]
  try:
    return header.library.quants.dequantize(tensor.data, tensor.tensor_type)
  except NotImplementedError as error:
    raise UserError(
        f'{header.path}: {name} is stored as {tensor.tensor_type.name}, which the '
        'package gguf cannot read; choose another quantisation'
    ) from error


def _token_ids(header, tokens):
  """Returns the header's ids of 'bos', 'eos', 'pad', 'unk' and 'eot' (end of a turn)."""
  theirs = {'bos': 'bos', 'eos': 'eos', 'pad': 'padding', 'unk': 'unknown', 'eot': 'eot'}
  ids = {}
  for name, their in theirs.items():
    key = f'tokenizer.ggml.{their}_token_id'
    number = header.value(key, int, None)
    if number is None:
      continue
    if not 0 <= number < len(tokens):
      raise UserError(
          f'{header.path}: {key} = {number}, but there are {len(tokens)} tokens; '
          'download it again'
      )
    ids[name] = number
  return ids


def _tokenizer(header, tokens, ids):
  """Returns the tokenizers.Tokenizer: a split by PRE_TOKENIZERS, then byte-level BPE."""
  key = lambda name: f'tokenizer.ggml.{name}'
  path, kind, pre = header.path, header.value(key('model'), str), header.value(key('pre'), str, '')
  if kind != 'gpt2' or pre not in PRE_TOKENIZERS:
    raise UserError(
        f'{path}: tokenizer {kind!r} with pre-tokenizer {pre!r} is not supported; '
        f"allowed: 'gpt2' (byte-level BPE) with {', '.join(PRE_TOKENIZERS)}; "
        'choose another model'
    )
  merges = [merge.split(' ') for merge in header.texts(key('merges'))]
  types = header.value(key('token_type'), list, [1] * len(tokens))
  if len(types) != len(tokens) or len(set(tokens)) != len(tokens):
    raise UserError(
        f'{path}: {len(tokens)} tokens, {len(set(tokens))} different ones, {len(types)} '
        'token types: these should be equal; download it again'
    )
  TokenType = header.library.TokenType
  used = [(i, token) for i, token in enumerate(tokens) if types[i] != TokenType.UNUSED]
  try:
    tokenizer = tokenizers.Tokenizer(
        tokenizers.models.BPE(
            {token: i for i, token in used},
            [tuple(merge) for merge in merges],
            ignore_merges=pre == 'llama-bpe',
        )
    )
  except Exception as error:  # the library raises bare Exception, and TypeError for no pairs
    raise UserError(
        f'{path}: tokens and merges do not agree ({error}); download it again'
    ) from error
  if pre == 'qwen2':
    tokenizer.normalizer = tokenizers.normalizers.NFC()
  tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(PRE_TOKENIZERS[pre])
  tokenizer.decoder = tokenizers.decoders.ByteLevel()
  for i, token in used:
    if types[i] in (TokenType.CONTROL, TokenType.USER_DEFINED):
      special = types[i] == TokenType.CONTROL
      added = tokenizers.AddedToken(token, special=special, normalized=False)
      (tokenizer.add_special_tokens if special else tokenizer.add_tokens)([added])
  if header.value(key('add_bos_token'), bool, False) and 'bos' in ids:
    bos = {'id': 'BOS', 'ids': [ids['bos']], 'tokens': [tokens[ids['bos']]]}
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single='BOS $A', pair='BOS $A BOS $B', special_tokens=[bos]
    )
  return tokenizer


def main(argv: Sequence[str] | None = None) -> int:
  """Runs the command line; returns the exit status."""
  parser = argparse.ArgumentParser(
      prog='python -m stppo_jax.models.gguf',
      description='Converts a GGUF file to a Hugging Face folder.',
  )
  parser.add_argument('file', metavar='FILE')
  parser.add_argument('folder', metavar='FOLDER')
  parser.add_argument('--dtype', default='float32', help='float32 (default) or bfloat16')
  args = parser.parse_args(argv)
  try:
    config = convert_file(args.file, args.folder, args.dtype)
  except UserError as error:
    print('gguf:', *str(error).split(), file=sys.stderr)  # one line, whatever the message
    return 2
  print(f'{args.folder}: {config.family}, {config.num_layers} layers, {config.vocab_size} tokens')
  return 0


if __name__ == '__main__':
  sys.exit(main())
