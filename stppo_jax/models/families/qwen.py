"""Qwen2, Qwen2.5 and Qwen3: windows only where `use_sliding_window` is set."""

from collections.abc import Sequence
import pathlib
from typing import Any

from stppo_jax.models import decoder
from stppo_jax.models.families import family

SWITCHED_WINDOWS = {'use_sliding_window': (False, True)}
NORMS = dict.fromkeys(('use_qk_norm', 'qk_norm', 'qk_layernorm'), (True,))


class Qwen(family.Family):
  """The later layers have windows, if `use_sliding_window` is set."""

  def window(self, path: pathlib.Path, raw: dict[str, Any]) -> int | None:
    """Returns the number of tokens in a window. None: there are no windows."""
    if not raw.get('use_sliding_window'):
      return None
    if 'sliding_window' not in raw:
      raise family.unsupported(path, raw, 'use_sliding_window', 'False without sliding_window')
    return raw['sliding_window']

  def layer_name(
      self, l: int, raw: dict[str, Any], window: int | None, rotary: Sequence[int]
  ) -> str:
    """Returns transformers' name of layer l where config.json leaves it out."""
    is_late = l >= raw.get('max_window_layers', 28)
    return family.WINDOW if window is not None and is_late else family.FULL

  def to_json(self, config: decoder.ModelConfig) -> dict[str, object]:
    """Returns the settings of config.json that are the family's own, and those of its rotations."""
    raw = super().to_json(config)
    if 'window' in config.layer_types:
      raw['layer_types'] = family.layers_to_json(config)
      raw['sliding_window'] = config.window
      raw['use_sliding_window'] = True
      raw['max_window_layers'] = config.layer_types.index('window')  # readers without layer_types
    return raw


FAMILIES = {
    'qwen2': Qwen(
        'Qwen2',
        {'qkv_bias': True},
        allowed=SWITCHED_WINDOWS | {'attention_bias': (False, True)},  # it has the bias anyway
        chooses_layers=True,
    ),
    'qwen3': Qwen(
        'Qwen3', {'qk_norm': True}, {'head_dim': 128}, SWITCHED_WINDOWS | NORMS, chooses_layers=True
    ),
}
