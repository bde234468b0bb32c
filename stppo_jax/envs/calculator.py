"""The tool `calculator`: arithmetic without the evaluation of Python code."""

import ast
import operator
from typing import Any

_OPERATORS: dict[type, Any] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
}
_MAX_CHARS = 500
MAX_BITS = 4096  # size of a power


def calculator(expression: str) -> str:
  """Computes an arithmetic expression of numbers, + - * / // % ** and brackets.

  Args:
    expression: for example (3 + 4) * 2
  """
  if len(expression) > _MAX_CHARS:
    raise ValueError(f'at most {_MAX_CHARS} characters are allowed')
  source = expression.strip().replace('^', '**')
  value = _value(ast.parse(source, mode='eval').body)
  return f'{value:.15g}' if isinstance(value, float) else str(value)


def check_power(base: int, exponent: int) -> None:
  """Raises ValueError if a power of whole numbers is too large to compute."""
  size = abs(base).bit_length() * abs(exponent)
  if size > MAX_BITS:
    raise ValueError('the power is too large')


def _value(node):
  """Returns the value of a node of the syntax tree."""
  if isinstance(node, ast.Constant) and type(node.value) in (int, float):
    return node.value
  apply = _OPERATORS.get(type(getattr(node, 'op', None)))
  if isinstance(node, ast.UnaryOp) and apply:
    return apply(_value(node.operand))
  if isinstance(node, ast.BinOp) and apply:
    left = _value(node.left)
    right = _value(node.right)
    if apply is operator.pow and isinstance(left, int) and isinstance(right, int):
      check_power(left, right)
    return apply(left, right)
  raise ValueError('numbers, + - * / // % ** and brackets are allowed')
