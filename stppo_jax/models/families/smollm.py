"""SmolLM3: some layers have no rotary positions (arXiv 2501.18795)."""

from collections.abc import Sequence
import pathlib
from typing import Any

from stppo_jax.models import decoder
from stppo_jax.models.families import family
from stppo_jax.models.families import qwen


class SmolLM3(qwen.Qwen):
  """Windows are switched on as in Qwen, and are those of the layers without rotary positions."""

  def rotary_layers(self, path: pathlib.Path, raw: dict[str, Any], num_layers: int) -> list[int]:
    """Returns 1 for each layer with rotary positions, else 0."""
    layers = raw.get('no_rope_layers')
    if layers is None:
      interval: Any = raw.get('no_rope_layer_interval')
      return [int((l + 1) % interval != 0) for l in range(num_layers)]
    if not isinstance(layers, list) or len(layers) < num_layers or set(layers) - {0, 1}:
      raise family.unsupported(path, raw, 'no_rope_layers', f'{num_layers} times 0 or 1')
    return layers[:num_layers]

  def layer_name(
      self, l: int, raw: dict[str, Any], window: int | None, rotary: Sequence[int]
  ) -> str:
    """Returns transformers' name of layer l where config.json leaves it out."""
    return family.WINDOW if window is not None and not rotary[l] else family.FULL

  def to_json(self, config: decoder.ModelConfig) -> dict[str, object]:
    """Returns the settings of config.json that are the family's own, and those of its rotations."""
    rotary = config.rotary_layers or (True,) * config.num_layers
    return super().to_json(config) | {'no_rope_layers': list(map(int, rotary))}


FAMILIES = {
    'smollm3': SmolLM3(
        'SmolLM3',
        defaults={
            'num_key_value_heads': 4,
            'rope_theta': 2_000_000.0,
            'tie_word_embeddings': True,
            'no_rope_layer_interval': 4,
        },
        allowed=qwen.SWITCHED_WINDOWS,
        chooses_layers=True,
    )
}
