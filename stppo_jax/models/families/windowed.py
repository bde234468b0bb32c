"""Families in which layers with a window alternate with layers that attend to the whole row."""

from collections.abc import Sequence
import dataclasses
import pathlib
from typing import Any

from absl import logging

from stppo_jax.models import attention
from stppo_jax.models import decoder
from stppo_jax.models.families import family
from stppo_jax.types import UserError


@dataclasses.dataclass(frozen=True, kw_only=True)
class WindowedFamily(family.Family):
  """The last of `window_period` layers attends to the whole row, the others to a window."""

  window_period: int
  chooses_layers: bool = True

  def window(self, path: pathlib.Path, raw: dict[str, Any]) -> int | None:
    """Returns the number of tokens in a window."""
    del path
    return raw.get('sliding_window')

  def layer_name(
      self, l: int, raw: dict[str, Any], window: int | None, rotary: Sequence[int]
  ) -> str:
    """Returns transformers' name of layer l where config.json leaves it out."""
    return family.FULL if (l + 1) % self.window_period == 0 else family.WINDOW

  def to_json(self, config: decoder.ModelConfig) -> dict[str, object]:
    """Returns the settings of config.json that are the family's own, and those of its rotations."""
    return super().to_json(config) | {
        'layer_types': family.layers_to_json(config),
        'sliding_window': config.window or None,
    }


class TwoRotations(WindowedFamily):
  """Layers with a window may have another rotation. transformers 5 writes one per type of layer."""

  def rope_fields(
      self, path: pathlib.Path, raw: dict[str, Any], read_rope: family.ReadRope
  ) -> dict[str, Any]:
    """Returns the rotations. `read_rope(raw)` reads one, as (base, scaling)."""
    parameters = raw.get('rope_parameters') or {}
    by_type = dict(parameters) if isinstance(parameters, dict) else {}
    is_nested = any(isinstance(value, dict) for value in by_type.values())
    unknown = sorted(by_type.keys() - family.LAYER_NAMES.keys())
    if is_nested and unknown:
      raise UserError(
          f'{path}: rope_parameters has {unknown[0]}, which is not supported; allowed: '
          f'{", ".join(family.LAYER_NAMES)}; choose another model'
      )
    if by_type and not is_nested:
      logging.warning(
          '%s: rope_parameters = %r names no type of layer. It is used, its scaling in the layers '
          'without a window, and transformers 5.24 ignores it: write one entry per type of layer',
          path,
          by_type,
      )
    full = raw
    window: dict[str, Any] = {'rope_theta': raw.get('rope_local_base_freq')}
    if is_nested:
      full = raw | {'rope_parameters': by_type.get(family.FULL)}
      window['rope_parameters'] = by_type.get(family.WINDOW)
    theta, scaling = read_rope(full)
    if window['rope_theta'] is None:
      window['rope_theta'] = theta
    of_windows: tuple[float, attention.RopeScaling | None] | None = read_rope(window)
    if of_windows == (theta, scaling):
      of_windows = None
    return {'rope_theta': theta, 'rope_scaling': scaling, 'window_rope': of_windows}

  def to_json(self, config: decoder.ModelConfig) -> dict[str, object]:
    """Returns the settings of config.json that are the family's own, and those of its rotations."""
    raw = super().to_json(config)
    full = (config.rope_theta, config.rope_scaling)
    rotations = {family.FULL: full, family.WINDOW: config.window_rope or full}
    parameters: dict[str, object] = {}
    for kind, (theta, scaling) in rotations.items():
      written = family.scaling_to_json(scaling) or {'rope_type': 'default'}
      parameters[kind] = {**written, 'rope_theta': theta}
    raw['rope_parameters'] = parameters
    del raw['rope_scaling']
    return raw
