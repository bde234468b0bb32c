"""Llama and Mistral. Mistral has windows in all layers or in none."""

import pathlib
from typing import Any

from stppo_jax.models import decoder
from stppo_jax.models.families import family


class Llama(family.Family):
  """Llama has no windows. `attention_bias` adds a bias to query, key and value."""

  def layer_fields(
      self, path: pathlib.Path, raw: dict[str, Any], num_layers: int
  ) -> dict[str, Any]:
    """Returns the fields of ModelConfig that differ between layers, but for their rotation."""
    fields = super().layer_fields(path, raw, num_layers)
    if raw.get('attention_bias'):
      fields['qkv_bias'] = True
    return fields

  def window(self, path: pathlib.Path, raw: dict[str, Any]) -> int | None:
    """Returns None: Llama has no windows. UserError: one that is shorter than the longest row."""
    window = raw.get('sliding_window')
    if window is not None and window < raw.get('max_position_embeddings', 2048):
      raise family.unsupported(path, raw, 'sliding_window', 'none')
    return None

  def layer_rows(self, config: decoder.ModelConfig) -> list[family.Row]:
    """Returns the bias of attention's output, which must be 0."""
    if not config.qkv_bias:
      return []
    return [('self_attn.o_proj.bias', family.ABSENT, (config.d_model,), False)]

  def to_json(self, config: decoder.ModelConfig) -> dict[str, object]:
    """Returns the settings of config.json that are the family's own, and those of its rotations."""
    return super().to_json(config) | {'attention_bias': config.qkv_bias}


class Mistral(family.Family):
  """All layers have the window of `sliding_window`."""

  def window(self, path: pathlib.Path, raw: dict[str, Any]) -> int | None:
    """Returns the number of tokens in a window. None: there are no windows."""
    del path
    return raw.get('sliding_window')

  def to_json(self, config: decoder.ModelConfig) -> dict[str, object]:
    """Returns the settings of config.json that are the family's own, and those of its rotations."""
    window = config.window if 'window' in config.layer_types else None
    return super().to_json(config) | {'sliding_window': window}


FAMILIES = {
    'llama': Llama('Llama', allowed={'attention_bias': (False, True)}, shares_no_keys=True),
    'mistral': Mistral('Mistral', defaults={'num_key_value_heads': 8, 'sliding_window': 4096}),
}
