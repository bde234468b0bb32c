"""Gemma 2 (arXiv 2408.00118) and the text models of Gemma 3 (arXiv 2503.19786)."""

from collections.abc import Sequence
import math
import pathlib
from typing import Any

from stppo_jax.models import decoder
from stppo_jax.models.families import family
from stppo_jax.models.families import windowed

_FLAGS = {
    'norm_after': True,
    'norm_offset': True,
    'scale_embeddings': True,
    'activation': 'gelu_tanh',
}
_DEFAULTS = {
    'num_attention_heads': 8,
    'num_key_value_heads': 4,
    'head_dim': 256,
    'query_pre_attn_scalar': 256,
    'sliding_window': 4096,
    'tie_word_embeddings': True,
}
# ModelConfig's names of soft caps -> those in config.json.
_SOFTCAPS = {
    'attention_softcap': 'attn_logit_softcapping',
    'logit_softcap': 'final_logit_softcapping',
}
_ALLOWED = {'hidden_act': ('gelu_pytorch_tanh',), 'hidden_activation': ('gelu_pytorch_tanh',)}


class Gemma2(windowed.WindowedFamily):
  """Scores and logits are capped, and every layer has the same rotation."""

  def score_fields(self, path: pathlib.Path, raw: dict[str, Any], head_dim: int) -> dict[str, Any]:
    """Returns the fields of attention scores and logits."""
    return _scales(path, raw, head_dim)

  def to_json(self, config: decoder.ModelConfig) -> dict[str, object]:
    """Returns the settings of config.json that are the family's own, and those of its rotations."""
    return super().to_json(config) | _scales_to_json(config)


class Gemma3(windowed.TwoRotations):
  """Layers with a window have a rotation of their own base."""

  def layer_name(
      self, l: int, raw: dict[str, Any], window: int | None, rotary: Sequence[int]
  ) -> str:
    """Returns transformers' name of layer l where config.json leaves it out."""
    period = raw.get('sliding_window_pattern') or self.window_period
    return family.FULL if (l + 1) % period == 0 else family.WINDOW

  def score_fields(self, path: pathlib.Path, raw: dict[str, Any], head_dim: int) -> dict[str, Any]:
    """Returns the fields of attention scores and logits."""
    return _scales(path, raw, head_dim)

  def to_json(self, config: decoder.ModelConfig) -> dict[str, object]:
    """Returns the settings of config.json that are the family's own, and those of its rotations."""
    raw = super().to_json(config)
    theta, _ = config.window_rope or (config.rope_theta, None)
    raw['rope_local_base_freq'] = theta
    return raw | _scales_to_json(config)


def _scales(path, raw, head_dim):
  fields = {'attention_scale': family.attention_scale(path, raw, head_dim)}
  for field, name in _SOFTCAPS.items():
    if raw.get(name):
      fields[field] = family.number(path, raw, name, kind=float)
  return fields


def _scales_to_json(config):
  scale = config.attention_scale or config.head_dim**-0.5
  scalar = scale**-2
  if math.isclose(scalar, round(scalar)):
    scalar = round(scalar)
  return {
      'query_pre_attn_scalar': scalar,
      'hidden_act': 'gelu_pytorch_tanh',
      'hidden_activation': 'gelu_pytorch_tanh',
      'attn_logit_softcapping': config.attention_softcap or None,
      'final_logit_softcapping': config.logit_softcap or None,
  }


FAMILIES = {
    'gemma2': Gemma2(
        'Gemma2',
        _FLAGS,
        _DEFAULTS
        | {
            'vocab_size': 256_000,
            'max_position_embeddings': 8192,
            'attn_logit_softcapping': 50.0,
            'final_logit_softcapping': 30.0,
        },
        _ALLOWED
        | dict.fromkeys(('attn_logit_softcapping', 'final_logit_softcapping'), family.ANY)
        | {'sliding_window_pattern': (2,)},
        window_period=2,
    ),
    'gemma3_text': Gemma3(
        'Gemma3',
        _FLAGS | {'qk_norm': True},
        _DEFAULTS
        | {
            'vocab_size': 262_208,
            'max_position_embeddings': 131_072,
            'rope_theta': 1_000_000.0,
            'rope_local_base_freq': 10_000.0,
        },
        _ALLOWED | dict.fromkeys(('rope_local_base_freq', 'final_logit_softcapping'), family.ANY),
        window_period=6,
    ),
}
