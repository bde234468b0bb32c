"""Families of models: what their config.json means, as flags of ModelConfig, and the way back.

A family is a row of `FAMILIES`. The values are those of the classes in transformers.
"""

from collections.abc import Mapping
import math
from typing import Any
from typing import NamedTuple

from stppo_jax.models import attention
from stppo_jax.models import decoder
from stppo_jax.models import layers
from stppo_jax.types import UserError

ANY = ('any',)  # in `Family.allowed`: the decoder has every value
_LAYER_NAMES = {
    'full': 'full_attention',
    'window': 'sliding_attention',
    'delta': 'linear_attention',
}
_GEMMA_FLAGS = {
    'norm_after': True,
    'norm_offset': True,
    'scale_embeddings': True,
    'activation': 'gelu_tanh',
}
_GEMMA_DEFAULTS = {
    'num_attention_heads': 8,
    'num_key_value_heads': 4,
    'head_dim': 256,
    'query_pre_attn_scalar': 256,
    'sliding_window': 4096,
    'tie_word_embeddings': True,
}
_GEMMA_ALLOWED = {'hidden_act': ('gelu_pytorch_tanh',), 'hidden_activation': ('gelu_pytorch_tanh',)}
_OLMO_FLAGS = {'norm_before': False, 'norm_after': True, 'qk_norm': True, 'qk_norm_whole': True}
_OLMO_DEFAULTS = {'rms_norm_eps': 1e-5, 'max_position_embeddings': 2048}
_QWEN35_FLAGS = {'qk_norm': True, 'norm_offset': True, 'attention_gate': True}
_QWEN35_DEFAULTS = {
    'head_dim': 256,
    'partial_rotary_factor': 0.25,
    'full_attention_interval': 4,
    'max_position_embeddings': 32_768,
    'linear_key_head_dim': 128,
    'linear_value_head_dim': 128,
    'linear_num_key_heads': 16,
    'linear_num_value_heads': 32,
    'linear_conv_kernel_dim': 4,
}
_QWEN35_ALLOWED = {
    'partial_rotary_factor': ANY,
    'attn_output_gate': (True,),
    'output_gate_type': ('silu', 'swish'),
}
_WINDOWS = {'use_sliding_window': (False, True)}


class Family(NamedTuple):
  """What the models of one model_type share.

  Attributes:
    prefix: of the names of the classes in transformers.
    flags: fields of ModelConfig.
    defaults: settings of config.json where the file leaves them out.
    allowed: values of settings that the decoder has for this family besides the neutral ones.
    window_period: the last of so many layers attends to the whole row, the others to a window.
  """

  prefix: str
  flags: Mapping[str, Any] = {}
  defaults: Mapping[str, Any] = {}
  allowed: Mapping[str, tuple[Any, ...]] = {}
  window_period: int = 0


FAMILIES = {
    'qwen2': Family('Qwen2', {'qkv_bias': True}, allowed=_WINDOWS),
    'qwen3': Family(
        'Qwen3',
        {'qk_norm': True},
        {'head_dim': 128},
        _WINDOWS | dict.fromkeys(('use_qk_norm', 'qk_norm', 'qk_layernorm'), (True,)),
    ),
    'qwen3_moe': Family(
        'Qwen3Moe',
        {'qk_norm': True},
        allowed=dict.fromkeys(('use_qk_norm', 'qk_norm', 'qk_layernorm'), (True,))
        | dict.fromkeys(('num_experts', 'num_local_experts'), ANY),
    ),
    'llama': Family('Llama', allowed={'attention_bias': (False, True)}),
    'mistral': Family('Mistral', defaults={'num_key_value_heads': 8, 'sliding_window': 4096}),
    'smollm3': Family(
        'SmolLM3',
        defaults={
            'num_key_value_heads': 4,
            'rope_theta': 2_000_000.0,
            'tie_word_embeddings': True,
            'no_rope_layer_interval': 4,
        },
        allowed=_WINDOWS,
    ),
    'olmo2': Family('Olmo2', _OLMO_FLAGS, _OLMO_DEFAULTS),
    'olmo3': Family(
        'Olmo3',
        _OLMO_FLAGS,
        _OLMO_DEFAULTS | {'rope_theta': 500_000.0, 'sliding_window': 4096},
        window_period=4,
    ),
    'gemma2': Family(
        'Gemma2',
        _GEMMA_FLAGS,
        _GEMMA_DEFAULTS
        | {
            'vocab_size': 256_000,
            'max_position_embeddings': 8192,
            'attn_logit_softcapping': 50.0,
            'final_logit_softcapping': 30.0,
        },
        _GEMMA_ALLOWED | dict.fromkeys(('attn_logit_softcapping', 'final_logit_softcapping'), ANY),
        window_period=2,
    ),
    'gemma3_text': Family(
        'Gemma3',
        _GEMMA_FLAGS | {'qk_norm': True},
        _GEMMA_DEFAULTS
        | {
            'vocab_size': 262_208,
            'max_position_embeddings': 131_072,
            'rope_theta': 1_000_000.0,
            'rope_local_base_freq': 10_000.0,
        },
        _GEMMA_ALLOWED | dict.fromkeys(('rope_local_base_freq', 'final_logit_softcapping'), ANY),
        window_period=6,
    ),
    'qwen3_5_text': Family('Qwen3_5', _QWEN35_FLAGS, _QWEN35_DEFAULTS, _QWEN35_ALLOWED),
    'qwen3_5_moe_text': Family(
        'Qwen3_5Moe',
        _QWEN35_FLAGS,
        _QWEN35_DEFAULTS
        | {
            'norm_topk_prob': True,
            'moe_intermediate_size': 512,
            'shared_expert_intermediate_size': 512,
            'num_experts': 256,
            'num_experts_per_tok': 8,
        },
        _QWEN35_ALLOWED
        | {'norm_topk_prob': (True,)}
        | dict.fromkeys(('num_experts', 'num_local_experts'), ANY)
        | {'shared_expert_intermediate_size': ANY},
    ),
}
# Checkpoints with parts for images: model_type -> that of their text_config.
TEXT_PARTS = {'gemma3': 'gemma3_text', 'qwen3_5': 'qwen3_5_text', 'qwen3_5_moe': 'qwen3_5_moe_text'}
# The sizes of gated delta-net layers in config.json, in the order of DeltaShape's fields.
_DELTA_KEYS = (
    'linear_num_key_heads',
    'linear_num_value_heads',
    'linear_key_head_dim',
    'linear_value_head_dim',
    'linear_conv_kernel_dim',
)
# The keys of a scaling in config.json, in the order of its fields.
_SCALING_KEYS = {
    'linear': ('factor',),
    'llama3': ('factor', 'low_freq_factor', 'high_freq_factor', 'original_max_position_embeddings'),
    'yarn': (
        'factor',
        'original_max_position_embeddings',
        'attention_factor',
        'beta_fast',
        'beta_slow',
        'truncate',
    ),
}
# Keys that change nothing for text: its tokens have equal positions in all three sections.
_NEUTRAL_ROPE_KEYS = {'mrope_section', 'mrope_interleaved'}


def layer_fields(path: Any, raw: dict[str, Any], num_layers: int, number: Any) -> dict[str, Any]:
  """Returns the fields of ModelConfig that differ between layers, but for their rotation.

  `number(name)` reads a positive number of `raw`. UserError: layers that the decoder does not have.
  """
  name = raw['model_type']
  family = FAMILIES[name]
  rotary = _rotary_layers(path, raw, num_layers)
  names = _layer_names(path, raw, num_layers, rotary)
  fields: dict[str, Any] = {}
  if raw.get('attention_bias'):
    fields['qkv_bias'] = True
  if not all(rotary):
    fields['rotary_layers'] = tuple(map(bool, rotary))
  if 'linear_attention' in names:
    fields['delta'] = layers.DeltaShape(*map(number, _DELTA_KEYS))
    if fields['delta'].value_heads % fields['delta'].key_heads:
      raise _unsupported(path, raw, 'linear_num_value_heads', 'a multiple of linear_num_key_heads')
    if 'full_attention' not in names:
      raise _unsupported(path, raw, 'layer_types', 'at least one layer with full_attention')
  if 'sliding_attention' in names or 'linear_attention' in names:
    short = {long: short for short, long in _LAYER_NAMES.items()}
    fields['layer_types'] = tuple(short[name] for name in names)
  if 'sliding_attention' in names:
    fields['window'] = number('sliding_window')
  return {**family.flags, **fields}


def _rotary_layers(path, raw, num_layers):
  """Returns 1 for each layer with rotary positions, else 0."""
  layers = raw.get('no_rope_layers')
  interval = raw.get('no_rope_layer_interval')
  if raw['model_type'] != 'smollm3':
    if layers and layers != [1] * len(layers):
      raise _unsupported(path, raw, 'no_rope_layers', 'rotary positions in every layer')
    if interval and not layers:
      raise _unsupported(path, raw, 'no_rope_layer_interval', 'rotary positions in every layer')
    return [1] * num_layers
  if layers is None:
    return [int((l + 1) % interval != 0) for l in range(num_layers)]
  if not isinstance(layers, list) or len(layers) < num_layers or set(layers) - {0, 1}:
    raise _unsupported(path, raw, 'no_rope_layers', f'{num_layers} times 0 or 1')
  return layers[:num_layers]


def _layer_names(path, raw, num_layers, rotary):
  """Returns transformers' name of each layer's attention."""
  name = raw['model_type']
  window = raw.get('sliding_window')
  if 'use_sliding_window' in FAMILIES[name].allowed and not raw.get('use_sliding_window'):
    window = None
  if name == 'llama' and window is not None:
    if window < raw.get('max_position_embeddings', 2048):
      raise _unsupported(path, raw, 'sliding_window', 'none')
    window = None
  if name in ('olmo2', 'qwen3_moe'):
    window = None
  names = []
  for l in range(num_layers):
    is_window = window is not None
    if FAMILIES[name].window_period:
      period = raw.get('sliding_window_pattern') or FAMILIES[name].window_period
      is_window = (l + 1) % period != 0
    elif 'linear_conv_kernel_dim' in FAMILIES[name].defaults:
      is_delta = (l + 1) % raw['full_attention_interval'] != 0
      names.append(_LAYER_NAMES['delta' if is_delta else 'full'])
      continue
    elif name == 'smollm3':
      is_window = is_window and not rotary[l]
    elif name in ('qwen2', 'qwen3'):
      is_window = is_window and l >= raw.get('max_window_layers', 28)
    names.append(_LAYER_NAMES['window' if is_window else 'full'])
  written = raw.get('layer_types')
  if not written or written == names:
    return names
  if 'linear_conv_kernel_dim' in FAMILIES[name].defaults:
    window = None
  can_differ = (
      FAMILIES[name].window_period
      or 'linear_conv_kernel_dim' in FAMILIES[name].defaults
      or name in ('qwen2', 'qwen3', 'smollm3')
  )
  allowed = ['full_attention']
  if can_differ and window is not None:
    allowed.append('sliding_attention')
  if 'linear_conv_kernel_dim' in FAMILIES[name].defaults:
    allowed.append('linear_attention')
  if not isinstance(written, list) or len(written) != num_layers or set(written) - set(allowed):
    raise _unsupported(path, raw, 'layer_types', f'{num_layers} times {" or ".join(allowed)}')
  if not can_differ:
    raise _unsupported(path, raw, 'layer_types', str(names))
  return written


def rope_fields(path: Any, raw: dict[str, Any], read_rope: Any) -> dict[str, Any]:
  """Returns the rotations. `read_rope(raw)` reads one, as (base, scaling).

  transformers 5 writes one rotation per type of layer for families with windows.
  """
  name = raw['model_type']
  if name not in ('gemma3_text', 'olmo3'):
    theta, scaling = read_rope(raw)
    fields: dict[str, Any] = {'rope_theta': theta, 'rope_scaling': scaling}
    if 'partial_rotary_factor' in FAMILIES[name].allowed:
      for rope in (raw, raw.get('rope_scaling') or {}, raw.get('rope_parameters') or {}):
        fields['rotary_share'] = rope.get('partial_rotary_factor', fields.get('rotary_share'))
    return fields
  parameters = raw.get('rope_parameters') or {}
  by_type = dict(parameters) if isinstance(parameters, dict) else {}
  is_nested = any(isinstance(value, dict) for value in by_type.values())
  if unknown := sorted(by_type.keys() - set(_LAYER_NAMES.values())) if is_nested else []:
    raise UserError(
        f'{path}: rope_parameters has {unknown[0]}, which is not supported; allowed: '
        f'{", ".join(_LAYER_NAMES.values())}; choose another model'
    )
  full = raw
  window: dict[str, Any] = {'rope_theta': raw.get('rope_local_base_freq')}
  if is_nested:
    full = raw | {'rope_parameters': by_type.get('full_attention')}
    window['rope_parameters'] = by_type.get('sliding_attention')
  theta, scaling = read_rope(full)
  if window['rope_theta'] is None:
    window['rope_theta'] = theta
  of_windows = read_rope(window)
  if of_windows == (theta, scaling):
    of_windows = None
  return {'rope_theta': theta, 'rope_scaling': scaling, 'window_rope': of_windows}


def scaling_of(path: Any, rope: dict[str, Any], positions: int, number: Any) -> Any:
  """Returns the scaling of a rotation; None: none. `number(name, default, kind)` reads `rope`.

  UserError: a kind or a key that the decoder does not have.
  """
  kind = rope['rope_type']
  known = {'rope_type', 'rope_theta', 'partial_rotary_factor'} | _NEUTRAL_ROPE_KEYS
  if kind == 'default':
    return None
  if kind not in _SCALING_KEYS:
    kinds = ', '.join(map(repr, ('default', *_SCALING_KEYS)))
    raise UserError(
        f'{path}: rope type {kind!r} is not supported; allowed: {kinds}; '
        'choose another model or remove the scaling'
    )
  known.update(_SCALING_KEYS[kind])
  if kind == 'yarn':
    known |= {'mscale', 'mscale_all_dim'}
  unknown = [name for name in rope if name not in known and rope[name] is not None]
  if unknown:
    raise UserError(
        f'{path}: rope parameters of type {kind!r} have {unknown[0]} = {rope[unknown[0]]!r}, which '
        f'is not supported; allowed: {", ".join(sorted(known))}; choose another model'
    )
  factor = number('factor', None, float)
  if kind == 'linear':
    return attention.LinearScaling(factor)
  if kind == 'llama3':
    low = number('low_freq_factor', None, float)
    high = number('high_freq_factor', None, float)
    return attention.Llama3Scaling(factor, low, high, number('original_max_position_embeddings'))
  # As in transformers, which follows YaRN's section 3.4: 0.1 ln(factor) + 1.
  attention_factor = 1.0
  if factor > 1:
    attention_factor += 0.1 * math.log(factor)
  if rope.get('mscale') and rope.get('mscale_all_dim') and factor > 1:
    log = 0.1 * math.log(factor)
    top = log * number('mscale', None, float) + 1
    attention_factor = top / (log * number('mscale_all_dim', None, float) + 1)
  return attention.YarnScaling(
      factor,
      number('original_max_position_embeddings', positions),
      number('attention_factor', attention_factor, float),
      number('beta_fast', 32.0, float),
      number('beta_slow', 1.0, float),
      bool(rope.get('truncate', True)),
  )


def to_json(config: decoder.ModelConfig) -> dict[str, Any]:
  """Returns the settings of config.json that are the family's own, and those of its rotations."""
  name = config.family
  family = FAMILIES[name]
  rope_scaling = _scaling_to_json(config.rope_scaling)
  raw: dict[str, Any] = {'rope_theta': config.rope_theta, 'rope_scaling': rope_scaling}
  if family.defaults:  # The default id may lie outside a small vocabulary.
    raw['pad_token_id'] = None
  has_windows = 'window' in config.layer_types
  if name == 'mistral':
    raw['sliding_window'] = config.window if has_windows else None
  elif family.window_period or 'use_sliding_window' in family.allowed:
    types = config.layer_types or ('full',) * config.num_layers
    if has_windows or family.window_period:
      raw['layer_types'] = [_LAYER_NAMES[kind] for kind in types]
      raw['sliding_window'] = config.window or None
    if 'use_sliding_window' in family.allowed and has_windows:
      raw['use_sliding_window'] = True
      raw['max_window_layers'] = types.index('window')  # readers without layer_types
  if name == 'smollm3':
    rotary = config.rotary_layers or (True,) * config.num_layers
    raw['no_rope_layers'] = [int(is_rotary) for is_rotary in rotary]
  if 'linear_conv_kernel_dim' in FAMILIES[name].defaults:
    types = config.layer_types or ('full',) * config.num_layers
    raw['layer_types'] = [_LAYER_NAMES[kind] for kind in types]
    raw |= dict(zip(_DELTA_KEYS, config.delta or ()))
    raw['partial_rotary_factor'] = config.rotary_share
    raw['rope_parameters'] = {
        **(rope_scaling or {'rope_type': 'default'}),
        'rope_theta': config.rope_theta,
        'partial_rotary_factor': config.rotary_share,
    }
    del raw['rope_scaling']
  if name in ('gemma3_text', 'olmo3'):
    full = (config.rope_theta, config.rope_scaling)
    rotations = {'full_attention': full, 'sliding_attention': config.window_rope or full}
    raw['rope_parameters'] = {}
    for kind, (theta, scaling) in rotations.items():
      written = _scaling_to_json(scaling) or {'rope_type': 'default'}
      raw['rope_parameters'][kind] = {**written, 'rope_theta': theta}
    del raw['rope_scaling']
  if name == 'gemma3_text':
    raw['rope_local_base_freq'] = rotations['sliding_attention'][0]
  if 'scale_embeddings' in family.flags:
    scale = config.attention_scale or config.head_dim**-0.5
    scalar = scale**-2
    raw['query_pre_attn_scalar'] = round(scalar) if math.isclose(scalar, round(scalar)) else scalar
    raw['hidden_act'] = raw['hidden_activation'] = 'gelu_pytorch_tanh'
    raw['attn_logit_softcapping'] = config.attention_softcap or None
    raw['final_logit_softcapping'] = config.logit_softcap or None
  return raw


def _scaling_to_json(scaling: attention.RopeScaling | None) -> dict[str, Any] | None:
  for kind, cls in attention.SCALINGS.items():
    if scaling is not None and isinstance(scaling, cls):
      return {'rope_type': kind} | dict(zip(_SCALING_KEYS[kind], scaling))
  return None


def _unsupported(path, raw, name, allowed):
  return UserError(
      f'{path}: {name} = {raw[name]!r} is not supported; allowed: {allowed}; choose another model'
  )
