"""Counts the floating-point operations of a traced program's matrix products.

XLA's own cost analysis counts the body of a loop once. Here the body counts once per iteration. For
a loop without a known trip count (over non-empty micro-batches) the caller gives an upper bound.
"""

import math
from typing import Any


def matmul_flops(jaxpr: Any, open_trips: int = 1) -> float:
  """Returns the floating-point operations of a (closed) jaxpr's matrix products, on all devices.

  A scan counts its body once per iteration, a `cond` its most expensive branch, and a `while` its
  body `open_trips` times.
  """
  total = 0.0
  for eqn in getattr(jaxpr, 'jaxpr', jaxpr).eqns:
    name = eqn.primitive.name
    if name == 'dot_general':
      total += _dot_flops(eqn)
    elif name == 'ragged_dot_general':
      total += _ragged_flops(eqn)
    else:
      inner = [matmul_flops(part, open_trips) for part in _jaxprs(eqn.params)]
      counted = max(inner) if name == 'cond' else sum(inner)
      total += counted * _times(eqn, open_trips)
  return total


def _dot_flops(eqn):
  (contracted, _), _ = eqn.params['dimension_numbers']
  left = eqn.invars[0].aval.shape
  outputs = eqn.outvars[0].aval.shape
  sums = [left[axis] for axis in contracted]
  return 2 * math.prod(outputs) * math.prod(sums)


def _ragged_flops(eqn):
  """Counts each row once, with the matrix of its group, as on a TPU."""
  numbers = eqn.params['ragged_dot_dimension_numbers']
  (_, contracted), (_, batch) = numbers.dot_dimension_numbers
  used = {*contracted, *batch, *numbers.rhs_group_dimensions}
  left = eqn.invars[0].aval.shape
  right = eqn.invars[1].aval.shape
  outputs = [size for axis, size in enumerate(right) if axis not in used]
  return 2 * math.prod(left) * math.prod(outputs)


def _times(eqn, open_trips):
  """Returns how often an equation runs the jaxpr inside it."""
  if eqn.primitive.name == 'while':
    return open_trips
  if eqn.primitive.name == 'shard_map':  # written for one device
    return eqn.params['mesh'].size
  if eqn.primitive.name == 'pallas_call':  # written for one block
    *others, last = eqn.params['grid_mapping'].grid
    # The causal kernel skips the blocks above the diagonal.
    return math.prod(others) * (last + 1) / 2
  return eqn.params.get('length', 1)


def _jaxprs(params):
  for value in params.values():
    items = value if isinstance(value, (tuple, list)) else (value,)
    for item in items:
      jaxpr = getattr(item, 'jaxpr', item)
      if hasattr(jaxpr, 'eqns'):
        yield item
