"""Converts config.json of a Hugging Face folder to and from ModelConfig."""

import json
import pathlib
from typing import Any

import ml_dtypes
import numpy as np

from stppo_jax.models import decoder
from stppo_jax.types import UserError

# model_type -> prefix of the classes' names in transformers.
FAMILIES = {'qwen2': 'Qwen2', 'qwen3': 'Qwen3', 'llama': 'Llama'}
HEADS = ('tokens', 'value', 'both')
DTYPES = {'float32': np.dtype(np.float32), 'bfloat16': np.dtype(ml_dtypes.bfloat16)}


def load(
    folder: str | pathlib.Path,
    head: str = 'tokens',
    param_dtype: str = 'float32',
    dtype: str = 'float32',
) -> decoder.ModelConfig:
  """Reads the ModelConfig from a folder's config.json. UserError: not a supported model."""
  _check_choice('head', head, HEADS)
  _check_choice('param_dtype', param_dtype, DTYPES)
  _check_choice('dtype', dtype, DTYPES)
  path = pathlib.Path(folder) / 'config.json'
  raw = read_json(path)
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
  num_kv_heads = _number(path, raw, 'num_key_value_heads', num_kv_heads)
  head_dim = _number(path, raw, 'head_dim', 128 if family == 'qwen3' else d_model // num_heads)
  _check_heads(path, d_model, num_heads, num_kv_heads, head_dim, 'head_dim' in raw)
  rope_theta, rope_scaling = _rope(path, raw)
  return decoder.ModelConfig(
      vocab_size=_number(path, raw, 'vocab_size'),
      d_model=d_model,
      num_layers=_number(path, raw, 'num_hidden_layers'),
      num_heads=num_heads,
      num_kv_heads=num_kv_heads,
      head_dim=head_dim,
      d_ff=_number(path, raw, 'intermediate_size'),
      rope_theta=rope_theta,
      rope_scaling=rope_scaling,
      rms_norm_eps=_number(path, raw, 'rms_norm_eps', 1e-6, float),
      tie_embeddings=bool(raw.get('tie_word_embeddings', False)),
      qkv_bias=family == 'qwen2' or bool(raw.get('attention_bias')),
      qk_norm=family == 'qwen3',
      family=family,
      head=head,
      dtype=dtype,
      param_dtype=param_dtype,
      max_positions=_number(path, raw, 'max_position_embeddings', 32_768),
  )


def to_json(config: decoder.ModelConfig, dtype: str, token_ids: dict[str, Any]) -> dict[str, Any]:
  """Returns config.json as transformers 4 and 5 read it, with `token_ids` added."""
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
  if config.family == 'llama':
    raw['attention_bias'] = config.qkv_bias
  if config.head == 'value':
    raw |= {'id2label': {'0': 'value'}, 'label2id': {'value': 0}, 'classifier_dropout': 0.0}
  return raw | token_ids


def read_json(path: pathlib.Path) -> dict[str, Any]:
  """Reads a JSON object. UserError: no such file, or not an object."""
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


def write_json(path: pathlib.Path, raw: dict[str, Any]) -> None:
  """Writes indented JSON."""
  path.write_text(json.dumps(raw, indent=2) + '\n', encoding='utf-8')


def _refuse_unsupported(path, raw):
  """Raises UserError for settings that the decoder does not implement."""
  refused = {
      'use_sliding_window': bool(raw.get('use_sliding_window')),
      'attention_bias': bool(raw.get('attention_bias')) and raw.get('model_type') != 'llama',
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


def _check_heads(path, d_model, num_heads, num_kv_heads, head_dim, is_given):
  """Raises UserError for numbers of heads that do not divide."""
  if num_heads % num_kv_heads:
    raise UserError(
        f'{path}: num_key_value_heads = {num_kv_heads} does not divide num_attention_heads = '
        f'{num_heads}; download config.json again'
    )
  if not is_given and d_model % num_heads:
    raise UserError(
        f'{path}: num_attention_heads = {num_heads} does not divide hidden_size = {d_model}; '
        'download config.json again'
    )
  if head_dim % 2:
    raise UserError(
        f'{path}: a head is {head_dim} wide, and rotary positions need an even number; download '
        'config.json again'
    )


def _rope(path, raw):
  """Returns (rope_theta, rope_scaling), from `rope_parameters` (transformers 5) or two keys (4)."""
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


def _number(path, raw, name, default=None, kind=int):
  """Returns the positive number `raw[name]`, or the default. UserError: neither."""
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
