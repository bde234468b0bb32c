"""Which texts Python's `eval` and SymPy's `parse_expr` may compute. The policy writes the texts.

A call of a function could do anything. A large power of whole numbers takes for ever or fills the
memory. Python computes it without a break, so that neither a time limit nor a signal ends it.
"""

import ast
from collections.abc import Iterable
import fractions
import json
import math
import re
from typing import NamedTuple

from stppo_jax.envs import calculator

# A call with its name, an attribute, or a character that could hide either. A match starts at the
# start of a name, so that the time is linear in the length of a text.
_CALL = re.compile(r'((?<![\w.])[\w.]+|[\])}])\s*\(|\.\s*[^\W\d]|[\'"\\#]')
# The sine of an imaginary number is an exponential, too.
_EXPONENTIALS = frozenset('exp sinh cosh tanh sin cos tan cot sec csc erf'.split())
_FUNCTIONS = _EXPONENTIALS | frozenset(
    'asin acos atan acot asinh acosh atanh log ln sqrt abs Abs Integer Rational'.split()
)

# Notation that SymPy rewrites before Python reads it: a factorial, and `lambda`.
_REWRITTEN = re.compile(r'[\d)\]}!]\s*!(?!=)|\A\s*lambda\b')
_FACTORIAL_OF_NAME = re.compile(r'\s*!(?!=)')
_GAP = re.compile(r'(?<=[^\w\s])\s+(?=[^\w\s])')  # SymPy reads `* *` as `**`
_NOT_ASCII = re.compile(r'[^\x00-\x7f]')  # SymPy allows more of these in a name than Python
# SymPy reads a float as an exact number first.
_LARGE_EXPONENT = re.compile(r'(?<![\w.])[\d._]+e[+-]?[\d_]{3,}', re.IGNORECASE)

_CONSTANTS = {'E': 3, 'I': 1, 'pi': 4}
_SYMBOL = 4  # stands for a name of one letter; bounds its exponents by about a thousand
_MAX_REPEATS_BITS = 20
_SEQUENCE = 1 << (calculator.MAX_BITS - _MAX_REPEATS_BITS)  # so that few repeats reach the limit
_NAMED_VALUE = _SEQUENCE << (_MAX_REPEATS_BITS // 2)  # a variable of the data set, such as a text

_SUMS = (ast.Add, ast.Sub, ast.BitAnd, ast.BitOr, ast.BitXor)
_PRODUCTS = (ast.Mult, ast.MatMult)
_SHIFTS = (ast.LShift, ast.RShift)
_COLLECTIONS = (ast.List, ast.Tuple, ast.Set, ast.Dict)
_CHOICES = (ast.Compare, ast.BoolOp, ast.IfExp, ast.Starred)


def may_run_code(text: str) -> bool:
  """Returns whether Python's `eval` of a text could call more than a function of mathematics."""
  if _is_literal(text):
    return False
  return any(match[1] not in _FUNCTIONS for match in _CALL.finditer(text))


def may_be_large(text: str) -> bool:
  """Returns whether arithmetic in a text could take for ever or fill the memory.

  The answer comes from upper bounds, without computing the text. A text that is no expression is
  not large, because Python and SymPy reject it too.
  """
  number = text if '[' in text else text.replace(',', '')  # a data set leaves out commas
  if _LARGE_EXPONENT.search(number):
    return True
  if _is_literal(text):
    return False
  if _REWRITTEN.search(text):
    return True
  source = _NOT_ASCII.sub('_', text.strip())
  source = _FACTORIAL_OF_NAME.sub('__', source)  # a name with an unknown value
  source = _GAP.sub('', source)
  return _is_large(source) or _is_large(source.replace('^', '**'))


def _is_literal(text: str) -> bool:
  """Returns whether a text is a literal of Python or JSON, which calls and computes nothing."""
  try:
    ast.literal_eval(text)
    return True
  except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
    pass  # it may still be JSON
  try:
    json.loads(text)  # Python sees the same strings, and names in place of true, false and null
    return True
  except (ValueError, RecursionError):
    return False


def _is_large(source: str) -> bool:
  try:
    _bound(ast.parse(source, mode='eval').body)
    return False
  except SyntaxError:
    return False
  except (ValueError, MemoryError, RecursionError):
    return True


class _Bound(NamedTuple):
  """Upper bounds of the two parts of a fraction, both at least 1. Names and roots count, too."""

  numerator: int
  denominator: int = 1

  @property
  def height(self) -> int:
    return max(self)

  def __pow__(self, exponent: int) -> '_Bound':
    return _Bound(self.numerator**exponent, self.denominator**exponent)


def _bound(node: ast.AST) -> _Bound:
  """Returns the bound of a node of the syntax tree. ValueError: it is too large or unknown."""
  operations = []
  while isinstance(node, ast.BinOp):  # a long sum would be a deep recursion
    operations.append(node)
    node = node.left
  bound = _checked(_bound_of_operand(node))
  for operation in reversed(operations):
    bound = _checked(_bound_of_operation(operation, bound, _bound(operation.right)))
  return bound


def _checked(bound: _Bound) -> _Bound:
  if bound.height.bit_length() > calculator.MAX_BITS:
    raise ValueError('the value is too large')
  return bound


def _bound_of_operand(node: ast.AST) -> _Bound:
  match node:
    case ast.Constant(value=value):
      return _bound_of_constant(value)
    case ast.Name(id=name):
      default = _SYMBOL if len(name) == 1 else _NAMED_VALUE
      return _Bound(_CONSTANTS.get(name, default))
    case ast.UnaryOp(operand=operand):
      positive = _bound(operand)  # ~x is -x - 1
      return _Bound(positive.numerator + positive.denominator, positive.denominator)
    case ast.Call(func=ast.Name(id=name)) if name in _FUNCTIONS:
      keywords = [keyword.value for keyword in node.keywords]
      height = math.prod(_heights([*node.args, *keywords]))
      if name not in _EXPONENTIALS:
        return _Bound(height + _CONSTANTS['pi'], height)  # log(-1) is the number I*pi
      exponent = height**2 if name == 'erf' else height
      calculator.check_power(_CONSTANTS['E'], exponent)
      power = _CONSTANTS['E'] ** exponent
      return _Bound(power, power)
  children = [child for child in ast.iter_child_nodes(node) if isinstance(child, ast.expr)]
  total = sum(_heights(children))
  if isinstance(node, _COLLECTIONS):
    return _Bound(max(total, _SEQUENCE * max(1, len(children))))
  if isinstance(node, _CHOICES):
    return _Bound(total, total)
  raise ValueError(f'{type(node).__name__} is not arithmetic')


def _heights(nodes: Iterable[ast.AST]) -> list[int]:
  return [_bound(node).height for node in nodes]


def _bound_of_constant(value: object) -> _Bound:
  if isinstance(value, int):  # True and False are numbers
    return _Bound(max(1, value))
  if isinstance(value, float | complex):
    fraction = fractions.Fraction(repr(abs(value)))
    return _Bound(max(1, fraction.numerator), fraction.denominator)
  if isinstance(value, str | bytes):
    return _Bound(_SEQUENCE * max(1, len(value)))
  return _Bound(1)


def _bound_of_operation(node: ast.BinOp, left: _Bound, right: _Bound) -> _Bound:
  product = _Bound(left.numerator * right.numerator, left.denominator * right.denominator)
  if isinstance(node.op, _SUMS):
    total = left.numerator * right.denominator + right.numerator * left.denominator
    return _Bound(total, product.denominator)
  if isinstance(node.op, _PRODUCTS):
    return product
  if isinstance(node.op, _SHIFTS):
    calculator.check_power(2, right.height)
    return _Bound(left.numerator << right.height, left.denominator)
  if isinstance(node.op, ast.Pow):
    calculator.check_power(left.height, right.height)
    if isinstance(node.right, ast.Constant) and right.denominator == 1:
      return left**right.numerator
    return _Bound(left.height, left.height) ** right.height
  if isinstance(node.op, ast.Div):
    return _Bound(left.numerator * right.denominator, left.denominator * right.numerator)
  height = left.height * right.height  # // and %
  return _Bound(height, height)
