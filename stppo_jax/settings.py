"""One field of the schema: its default with its meaning, unit, allowed values and bounds."""

import dataclasses
from typing import Any
from typing import TypeVar

T = TypeVar('T')


@dataclasses.dataclass(frozen=True)
class Rules:
  """The meaning and the bounds of a field, stored with its default.

  Bounds hold for each item of a tuple.
  """

  meaning: str
  allowed: tuple = ()  # the values it may have; empty: any
  items: tuple[str, ...] = ()  # what the items of a tuple may be; empty: any
  at_least: float | None = None
  at_most: float | None = None
  above: float | None = None
  below: float | None = None
  finite: bool = True  # neither NaN nor infinite
  plugin: bool = False  # also takes 'module:attribute', see plugins.py
  prefixes: tuple[str, ...] = ()  # before a ':', no module: 'gem:ID'
  may_change: bool = False  # a resumed run may differ: no number computed so far depends on it


def setting(default: T, meaning: str, **rules: Any) -> T:
  """Returns a dataclass field; `rules` are fields of `Rules`."""
  metadata = {'rules': Rules(meaning, **rules)}
  if isinstance(default, dict):
    make: Any = default.copy
    return dataclasses.field(default_factory=make, metadata=metadata)
  return dataclasses.field(default=default, metadata=metadata)
