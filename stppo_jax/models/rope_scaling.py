"""Scalings of rotary positions, with which a model reads longer rows than it was first trained on.

Every scaling divides some frequencies by its factor and keeps the others:

  linear  all are divided (Chen et al., arXiv 2306.15595)
  llama3  Wavelengths above original / low_freq_factor grow by `factor`, those below original /
          high_freq_factor stay, and those in between are blended.
  yarn    Pairs that turn at least beta_fast times within the original context stay, those that turn
          at most beta_slow times are divided. In between the blend is linear in the number of the
          pair (Peng et al., arXiv 2309.00071, section 3.2).
"""

from collections.abc import Callable
from collections.abc import Mapping
import math
import pathlib
from typing import Any
from typing import NamedTuple

import numpy as np

from stppo_jax.models import attention
from stppo_jax.types import UserError


class LinearScaling(NamedTuple):
  """Rotary positions are divided by `factor`."""

  factor: float

  def scale(self, radians: np.ndarray, theta: float) -> np.ndarray:
    """Returns the radians per position [H/2] after scaling, for rotations with base `theta`."""
    del theta
    return radians / self.factor

  def longest_row(self) -> int:
    """Returns 0: max_position_embeddings of config.json counts the scaled positions."""
    return 0

  def to_json(self) -> dict[str, object]:
    """Returns the scaling as config.json has it."""
    return _to_json('linear', self)


class Llama3Scaling(NamedTuple):
  """Llama 3's scaling of the low frequencies."""

  factor: float
  low_freq_factor: float
  high_freq_factor: float
  original: int  # original_max_position_embeddings

  def scale(self, radians: np.ndarray, theta: float) -> np.ndarray:
    """Returns the radians per position [H/2] after scaling, for rotations with base `theta`."""
    del theta
    turns = self.original * radians / (2 * np.pi)  # within the original context
    low, high = self.low_freq_factor, self.high_freq_factor
    keep = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return radians * (keep + (1 - keep) / self.factor)

  def longest_row(self) -> int:
    """Returns 0: max_position_embeddings of config.json counts the scaled positions."""
    return 0

  def to_json(self) -> dict[str, object]:
    """Returns the scaling as config.json has it."""
    return _to_json('llama3', self)


class YarnScaling(NamedTuple):
  """YaRN's scaling. `attention_factor` multiplies queries and keys."""

  factor: float
  original: int  # original_max_position_embeddings
  attention_factor: float
  beta_fast: float = 32.0
  beta_slow: float = 1.0
  truncate: bool = True  # whether the numbers of pairs are rounded to whole ones

  def scale(self, radians: np.ndarray, theta: float) -> np.ndarray:
    """Returns the radians per position [H/2] after scaling, for rotations with base `theta`."""
    width = 2 * len(radians)
    first = _pair_with_turns(self.beta_fast, width, theta, self.original)
    last = _pair_with_turns(self.beta_slow, width, theta, self.original)
    if self.truncate:
      first = math.floor(first)
      last = math.ceil(last)
    first = max(first, 0)
    last = min(last, width - 1)
    if first == last:
      last += 0.001
    keep = 1 - np.clip((np.arange(width // 2) - first) / (last - first), 0.0, 1.0)
    return radians * (keep + (1 - keep) / self.factor)

  def longest_row(self) -> int:
    """Returns the scaled positions, because Qwen's pages add the scaling to a shorter model."""
    return int(self.factor * self.original)

  def to_json(self) -> dict[str, object]:
    """Returns the scaling as config.json has it."""
    return _to_json('yarn', self)


SCALINGS = {'linear': LinearScaling, 'llama3': Llama3Scaling, 'yarn': YarnScaling}
# The keys of a scaling in config.json, in the order of its fields.
_KEYS = {
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
# Keys that change nothing. A text has equal positions in all three sections of mrope.
_NEUTRAL_KEYS = {'mrope_section', 'mrope_interleaved', 'finetuned', 'name'}


def read(
    path: pathlib.Path,
    rope: Mapping[str, object],
    positions: int | None,
    number: Callable[..., Any],
) -> attention.RopeScaling:
  """Returns the scaling of a rotation. `number(name, default, kind)` reads `rope`.

  UserError: a kind or a key that the decoder does not have.
  """
  kind = rope['rope_type']
  if kind not in _KEYS:
    kinds = ', '.join(map(repr, ('default', *_KEYS)))
    raise UserError(
        f'{path}: rope type {kind!r} is not supported; allowed: {kinds}; '
        'choose another model or remove the scaling'
    )
  known = {'rope_type', 'rope_theta', 'partial_rotary_factor', *_NEUTRAL_KEYS, *_KEYS[kind]}
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
    return LinearScaling(factor)
  if kind == 'llama3':
    low = number('low_freq_factor', None, float)
    high = number('high_freq_factor', None, float)
    if low >= high:
      raise UserError(
          f'{path}: low_freq_factor = {low:g} is not below high_freq_factor = {high:g}; use the '
          'config.json that belongs to the weights'
      )
    original = number('original_max_position_embeddings', positions)
    return Llama3Scaling(factor, low, high, original)
  # As in transformers, which follows YaRN's section 3.4: 0.1 ln(factor) + 1.
  attention_factor = 1.0
  if factor > 1:
    attention_factor += 0.1 * math.log(factor)
  if rope.get('mscale') and rope.get('mscale_all_dim') and factor > 1:
    log = 0.1 * math.log(factor)
    top = log * number('mscale', None, float) + 1
    attention_factor = top / (log * number('mscale_all_dim', None, float) + 1)
  return YarnScaling(
      factor,
      number('original_max_position_embeddings', positions),
      number('attention_factor', attention_factor, float),
      number('beta_fast', 32.0, float),
      number('beta_slow', 1.0, float),
      bool(rope.get('truncate', True)),
  )


def _to_json(kind, scaling):
  return {'rope_type': kind} | dict(zip(_KEYS[kind], scaling))


def _pair_with_turns(turns, width, theta, original):
  """Returns the number (a real) of the pair that turns so often in the original context."""
  return width * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))
