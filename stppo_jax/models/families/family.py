"""What all families share: how config.json describes layers and rotations."""

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import math
import pathlib
from typing import Any
from typing import TypeVar

from stppo_jax.models import attention
from stppo_jax.models import decoder
from stppo_jax.types import UserError

# A tensor of a layer: name, path, shape and transpose of a `hf_config.Entry`.
Row = tuple[str, str, tuple[int, ...], bool]
# Reads a rotation of config.json, as (base, scaling).
ReadRope = Callable[[Mapping[str, object]], tuple[float, attention.RopeScaling | None]]
Number = TypeVar('Number', int, float)
ABSENT = ''  # the path of a tensor that our model lacks, and that must be 0
ANY = ('any',)  # in `Family.allowed`: the decoder has every value
FULL = 'full_attention'
WINDOW = 'sliding_attention'
DELTA = 'linear_attention'
# transformers' name of a layer -> its name in `ModelConfig.layer_types`.
LAYER_NAMES = {FULL: 'full', WINDOW: 'window', DELTA: 'delta'}


@dataclasses.dataclass(frozen=True)
class Family:
  """What the models of one model_type share. A family with other layers overrides the methods.

  Attributes:
    prefix: of the names of the classes in transformers.
    flags: fields of ModelConfig.
    defaults: settings of config.json where the file leaves them out.
    allowed: values of settings that the decoder has for this family besides the neutral ones.
    chooses_layers: whether the types of layers in config.json may differ from the family's own.
    shares_no_keys: whether each head has its own keys if config.json has no num_key_value_heads.
  """

  prefix: str
  flags: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  allowed: Mapping[str, tuple[Any, ...]] = dataclasses.field(default_factory=dict)
  chooses_layers: bool = False
  shares_no_keys: bool = False

  def layer_fields(
      self, path: pathlib.Path, raw: dict[str, Any], num_layers: int
  ) -> dict[str, Any]:
    """Returns the fields of ModelConfig that differ between layers, but for their rotation.

    UserError: layers that the decoder does not have.
    """
    rotary = self.rotary_layers(path, raw, num_layers)
    names = self.layer_names(path, raw, rotary)
    fields = dict(self.flags)
    if not all(rotary):
      fields['rotary_layers'] = tuple(map(bool, rotary))
    if set(names) != {FULL}:
      fields['layer_types'] = tuple(LAYER_NAMES[name] for name in names)
    if WINDOW in names:
      fields['window'] = number(path, raw, 'sliding_window')
    return fields

  def rotary_layers(self, path: pathlib.Path, raw: dict[str, Any], num_layers: int) -> list[int]:
    """Returns 1 for each layer with rotary positions, else 0."""
    layers = raw.get('no_rope_layers')
    if layers and layers != [1] * len(layers):
      raise unsupported(path, raw, 'no_rope_layers', 'rotary positions in every layer')
    if raw.get('no_rope_layer_interval') and not layers:
      raise unsupported(path, raw, 'no_rope_layer_interval', 'rotary positions in every layer')
    return [1] * num_layers

  def layer_names(
      self, path: pathlib.Path, raw: dict[str, Any], rotary: Sequence[int]
  ) -> list[str]:
    """Returns transformers' name of each layer: those in config.json, or the family's."""
    window = self.window(path, raw)
    names = [self.layer_name(l, raw, window, rotary) for l in range(len(rotary))]
    written = raw.get('layer_types')
    if not written or written == names:
      return names
    allowed = self.possible_layers(window)
    if not isinstance(written, list) or len(written) != len(names) or set(written) - set(allowed):
      choice = f'{len(names)} times {" or ".join(allowed)}'
      raise unsupported(path, raw, 'layer_types', choice)
    if not self.chooses_layers:
      raise unsupported(path, raw, 'layer_types', str(names))
    return written

  def window(self, path: pathlib.Path, raw: dict[str, Any]) -> int | None:
    """Returns the number of tokens in a window. None: there are no windows."""
    del path, raw
    return None

  def layer_name(
      self, l: int, raw: dict[str, Any], window: int | None, rotary: Sequence[int]
  ) -> str:
    """Returns transformers' name of layer l where config.json leaves it out."""
    del l, raw, rotary
    return FULL if window is None else WINDOW

  def possible_layers(self, window: int | None) -> list[str]:
    """Returns the names that layers may have in config.json."""
    if self.chooses_layers and window is not None:
      return [FULL, WINDOW]
    return [FULL]

  def feed_forward(self, path: pathlib.Path, raw: dict[str, Any]) -> dict[str, Any]:
    """Returns the fields of the feed-forward network."""
    return {'d_ff': number(path, raw, 'intermediate_size')}

  def rope_fields(
      self, path: pathlib.Path, raw: dict[str, Any], read_rope: ReadRope
  ) -> dict[str, Any]:
    """Returns the rotations. `read_rope(raw)` reads one, as (base, scaling)."""
    del path
    theta, scaling = read_rope(raw)
    return {'rope_theta': theta, 'rope_scaling': scaling}

  def score_fields(self, path: pathlib.Path, raw: dict[str, Any], head_dim: int) -> dict[str, Any]:
    """Returns the fields of attention scores and logits. UserError: another scale of scores."""
    scale = attention_scale(path, raw, head_dim)
    if scale:
      raise UserError(
          f'{path}: attention_multiplier or query_pre_attn_scalar makes the scale of attention '
          f'{scale:g}; allowed: 1 / sqrt(head_dim) = {head_dim**-0.5:g}; choose another model'
      )
    return {}

  def layer_rows(self, config: decoder.ModelConfig) -> list[Row]:
    """Returns the tensors of a layer in a folder that only this family has."""
    del config
    return []

  def to_json(self, config: decoder.ModelConfig) -> dict[str, object]:
    """Returns the settings of config.json that are the family's own, and those of its rotations."""
    scaling = scaling_to_json(config.rope_scaling)
    raw: dict[str, object] = {'rope_theta': config.rope_theta, 'rope_scaling': scaling}
    if self.defaults:  # The default id may lie outside a small vocabulary.
      raw['pad_token_id'] = None
    return raw


def attention_scale(path: pathlib.Path, raw: Mapping[str, object], head_dim: int) -> float:
  """Returns ModelConfig.attention_scale; 0 is 1 / sqrt(head_dim)."""
  scale = number(path, raw, 'attention_multiplier', head_dim**-0.5, float)
  scale *= (number(path, raw, 'query_pre_attn_scalar', head_dim, float) / head_dim) ** -0.5
  return 0.0 if math.isclose(scale, head_dim**-0.5, rel_tol=1e-6) else scale


def layer_types(config: decoder.ModelConfig) -> tuple[str, ...]:
  """Returns the type of each layer."""
  return config.layer_types or ('full',) * config.num_layers


def layers_to_json(config: decoder.ModelConfig) -> list[str]:
  """Returns transformers' name of each layer."""
  names = {own: name for name, own in LAYER_NAMES.items()}
  return [names[kind] for kind in layer_types(config)]


def scaling_to_json(scaling: attention.RopeScaling | None) -> dict[str, object] | None:
  """Returns a scaling of a rotation as config.json has it."""
  return None if scaling is None else scaling.to_json()


def number(
    path: pathlib.Path,
    raw: Mapping[str, object],
    name: str,
    default: float | None = None,
    kind: type[Number] = int,
) -> Number:
  """Returns the positive number `raw[name]`, or the default. UserError: neither."""
  value: Any = raw.get(name)
  if value is None:
    value = default
  if value is None:
    raise UserError(f'{path}: {name} is missing; download config.json again')
  is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
  if not is_number or not 0 < value < 2**53 or kind(value) != value:
    whole = 'whole ' if kind is int else ''
    raise UserError(
        f'{path}: {name} = {value!r:.200} is not a positive {whole}number; use the config.json '
        'that belongs to the weights'
    )
  return kind(value)


def flag(path: pathlib.Path, raw: Mapping[str, object], name: str) -> bool:
  """Returns the truth value `raw[name]`; False if it is absent or null."""
  value = raw.get(name)
  if value is None:
    return False
  if not isinstance(value, bool):
    raise unsupported(path, raw, name, 'true, false')
  return value


def unsupported(
    path: pathlib.Path, raw: Mapping[str, object], name: str, allowed: str
) -> UserError:
  """Returns the error for a setting that the decoder does not have."""
  return UserError(
      f'{path}: {name} = {raw[name]!r:.200} is not supported; allowed: {allowed}; '
      'choose another model'
  )
