"""Qwen3.5: layers with gated delta nets and layers with gated attention, dense or with experts."""

from collections.abc import Sequence
import pathlib
from typing import Any

from stppo_jax.models import decoder
from stppo_jax.models import layers
from stppo_jax.models.families import experts
from stppo_jax.models.families import family

_FLAGS = {'qk_norm': True, 'norm_offset': True, 'attention_gate': True}
_DEFAULTS = {
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
_ALLOWED = {
    'partial_rotary_factor': family.ANY,
    'attn_output_gate': (True,),
    'output_gate_type': ('silu', 'swish'),
}
# The sizes of gated delta-net layers in config.json, in the order of DeltaShape's fields.
_DELTA_KEYS = (
    'linear_num_key_heads',
    'linear_num_value_heads',
    'linear_key_head_dim',
    'linear_value_head_dim',
    'linear_conv_kernel_dim',
)


class Qwen35(family.Family):
  """Every `full_attention_interval`-th layer has attention, and a part of a head is rotated."""

  def layer_fields(
      self, path: pathlib.Path, raw: dict[str, Any], num_layers: int
  ) -> dict[str, Any]:
    """Returns the fields of ModelConfig that differ between layers, but for their rotation."""
    fields = super().layer_fields(path, raw, num_layers)
    kinds = fields.get('layer_types', ())
    if 'delta' not in kinds:
      return fields
    shape = layers.DeltaShape(*(family.number(path, raw, name) for name in _DELTA_KEYS))
    if shape.value_heads % shape.key_heads:
      multiple = 'a multiple of linear_num_key_heads'
      raise family.unsupported(path, raw, 'linear_num_value_heads', multiple)
    if 'full' not in kinds:
      least = 'at least one layer with full_attention'
      raise family.unsupported(path, raw, 'layer_types', least)
    return fields | {'delta': shape}

  def layer_name(
      self, l: int, raw: dict[str, Any], window: int | None, rotary: Sequence[int]
  ) -> str:
    """Returns transformers' name of layer l where config.json leaves it out."""
    is_attention = (l + 1) % raw['full_attention_interval'] == 0
    return family.FULL if is_attention else family.DELTA

  def possible_layers(self, window: int | None) -> list[str]:
    """Returns the names that layers may have in config.json."""
    return [family.FULL, family.DELTA]

  def rope_fields(
      self, path: pathlib.Path, raw: dict[str, Any], read_rope: family.ReadRope
  ) -> dict[str, Any]:
    """Returns the rotations. `read_rope(raw)` reads one, as (base, scaling)."""
    if raw.get('partial_rotary_factor') is None:  # null, too
      raw = raw | {'partial_rotary_factor': _DEFAULTS['partial_rotary_factor']}
    fields = super().rope_fields(path, raw, read_rope)
    for rope in (raw, raw.get('rope_scaling') or {}, raw.get('rope_parameters') or {}):
      share = rope.get('partial_rotary_factor')
      if share is not None:
        fields['rotary_share'] = family.number(path, rope, 'partial_rotary_factor', kind=float)
        if share > 1:
          raise family.unsupported(path, rope, 'partial_rotary_factor', 'at most 1')
    return fields

  def layer_rows(self, config: decoder.ModelConfig) -> list[family.Row]:
    """Returns the tensors of a gated delta-net layer."""
    if config.delta is None:
      return []
    d = config.d_model
    shape = config.delta
    values = shape.value_heads * shape.value_dim
    channels = 2 * shape.key_heads * shape.key_dim + values
    heads = (shape.value_heads,)
    name = 'linear_attn'
    path = 'layers/delta'
    conv_shape = (channels, 1, shape.conv_width)
    return [
        (f'{name}.in_proj_qkv.weight', f'{path}/qkv/kernel', (channels, d), True),
        (f'{name}.in_proj_z.weight', f'{path}/z/kernel', (values, d), True),
        (f'{name}.in_proj_b.weight', f'{path}/rate/kernel', (*heads, d), True),
        (f'{name}.in_proj_a.weight', f'{path}/decay/kernel', (*heads, d), True),
        (f'{name}.conv1d.weight', f'{path}/conv/kernel', conv_shape, False),
        (f'{name}.A_log', f'{path}/log_decay', heads, False),
        (f'{name}.dt_bias', f'{path}/decay_bias', heads, False),
        (f'{name}.norm.weight', f'{path}/norm/scale', (shape.value_dim,), False),
        (f'{name}.out_proj.weight', f'{path}/out/kernel', (d, values), True),
    ]

  def to_json(self, config: decoder.ModelConfig) -> dict[str, object]:
    """Returns the settings of config.json that are the family's own, and those of its rotations."""
    raw = super().to_json(config)
    raw['layer_types'] = family.layers_to_json(config)
    raw |= dict(zip(_DELTA_KEYS, config.delta or ()))
    raw['partial_rotary_factor'] = config.rotary_share
    del raw['rope_scaling']
    raw['rope_parameters'] = {
        **(family.scaling_to_json(config.rope_scaling) or {'rope_type': 'default'}),
        'rope_theta': config.rope_theta,
        'partial_rotary_factor': config.rotary_share,
    }
    return raw


class Qwen35Experts(Qwen35):
  """Every layer has experts, and one that every token goes through."""

  def feed_forward(self, path: pathlib.Path, raw: dict[str, Any]) -> dict[str, Any]:
    """Returns the fields of the experts."""
    return experts.fields(path, raw)


FAMILIES = {
    'qwen3_5_text': Qwen35('Qwen3_5', _FLAGS, _DEFAULTS, _ALLOWED, chooses_layers=True),
    'qwen3_5_moe_text': Qwen35Experts(
        'Qwen3_5Moe',
        _FLAGS,
        _DEFAULTS
        | {
            'norm_topk_prob': True,
            'moe_intermediate_size': 512,
            'shared_expert_intermediate_size': 512,
            'num_experts': 256,
            'num_experts_per_tok': 8,
        },
        _ALLOWED
        | {'norm_topk_prob': (True,), 'shared_expert_intermediate_size': family.ANY}
        | experts.COUNTS,
        chooses_layers=True,
    ),
}
