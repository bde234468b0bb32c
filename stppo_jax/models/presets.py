"""Shapes of published models by name: PRESETS['qwen2.5-7b']."""

import importlib.resources
import json
import os

from stppo_jax.models import layers
from stppo_jax.models import rope_scaling
from stppo_jax.types import UserError


def _presets() -> dict[str, layers.ModelConfig]:
  """Returns the shapes of published models, as in each model's config.json, and of the own ones."""
  path = importlib.resources.files('stppo_jax.assets') / 'presets.json'
  presets = {}
  for name, fields in json.loads(path.read_text(encoding='utf-8')).items():
    scaling = fields.pop('rope_scaling', None)
    if scaling is not None:
      scaling = rope_scaling.SCALINGS[scaling[0]](*scaling[1:])
    base_of_windows = fields.pop('window_rope_theta', None)
    if base_of_windows is not None:
      fields['window_rope'] = (base_of_windows, None)
    delta = fields.pop('delta', None)
    if delta is not None:
      fields['delta'] = layers.DeltaShape(*delta)
    period = tuple(fields.pop('layer_period', ()))  # layer types, repeated over all layers
    num_layers = fields['num_layers']
    layer_types = (period * num_layers)[:num_layers]
    presets[name] = layers.ModelConfig(**fields, rope_scaling=scaling, layer_types=layer_types)
  return presets


PRESETS = _presets()


def find(folder: str) -> layers.ModelConfig:
  """Returns the shape that the name of a folder means. UserError: it means none."""
  name = os.path.basename(folder.rstrip('/')).lower()
  for suffix in ('-instruct', '-base', '-it', '-pt'):
    name = name.removesuffix(suffix)
  if name not in PRESETS:
    raise UserError(
        f'{folder}: no such folder, and {name!r} is no known shape: give a folder with a '
        f'config.json, or a name that ends in one of {", ".join(PRESETS)}'
    )
  return PRESETS[name]
