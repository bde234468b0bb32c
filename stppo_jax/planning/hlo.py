"""Counts the collectives of a compiled program, which the compiler adds to the traced one.

The body of a loop counts once per iteration. For a loop without a known trip count (over non-empty
micro-batches) the caller gives an upper bound.
"""

import collections
import dataclasses
import math
import re

# A program for several slices of TPUs sends what leaves a slice through the host.
BETWEEN_SLICES = 'send'
KINDS = (
    'all-reduce',
    'all-gather',
    'reduce-scatter',
    'all-to-all',
    'collective-permute',
    BETWEEN_SLICES,
)
_COMPUTATION = re.compile(r'^(ENTRY )?%?([\w.\-]+) .*\{$')
_INSTRUCTION = re.compile(r'^\s+(?:ROOT )?%?[\w.\-]+ = (.*?) ([a-z][\w\-]*)\(')
_SHAPE = re.compile(r'\b([a-z]+\d*|pred)\[([\d,]*)\]')
_CALLED = re.compile(
    r'\b(?:calls|to_apply|body|condition|true_computation|false_computation)=%?([\w.\-]+)'
)
_BRANCHES = re.compile(r'\bbranch_computations=\{([^}]*)\}')


@dataclasses.dataclass(frozen=True)
class Collective:
  """One kind of collective in one run of a program, on one device."""

  kind: str  # one of KINDS
  count: int  # executions
  bytes: int  # sum over all results, or over all operands of a reduce-scatter


def collectives(hlo_text: str, open_trips: int = 1) -> tuple[Collective, ...]:
  """Returns a Collective per kind in a compiled module's text, largest first.

  Loops without a known trip count run `open_trips` times. An asynchronous pair (`all-gather-start`,
  `all-gather-done`) counts once. All branches of a conditional count, because the text does not
  tell which one runs.
  """
  entry, computations = _computations(hlo_text)
  count: collections.Counter[str] = collections.Counter()
  size: collections.Counter[str] = collections.Counter()

  def add_collective(kind, times, instruction, channels):
    result, opcode, line = instruction
    found = re.search(r'channel_id=(\d+)', line)
    channel = found and (kind, found[1])
    if channel and channel in channels:
      return
    channels.add(channel)
    count[kind] += times
    has_operands = opcode != kind or kind == BETWEEN_SLICES
    size[kind] += times * _moved(kind, has_operands, result, line)

  def walk(name, times, channels):
    for instruction in computations.get(name, ()):
      _, opcode, line = instruction
      kind = opcode.removesuffix('-start')
      is_other_send = kind == BETWEEN_SLICES and 'megascale' not in line
      if kind in KINDS and not is_other_send:
        add_collective(kind, times, instruction, channels)
      elif not opcode.endswith(('-done', '-update')):
        trips = 1
        if opcode == 'while':
          trips = _trips(line, computations, open_trips)
        # TPU programs split one collective into many fusions that share its channel. One that
        # begins before a loop may end in or after it, and runs once.
        shares_channels = opcode in ('fusion', 'async-start')
        for inner in _called(line):
          walk(inner, times * trips, channels if shares_channels else set(channels))

  walk(entry, 1, set())
  totals = [Collective(kind, count[kind], int(size[kind])) for kind in count]
  return tuple(sorted(totals, key=lambda collective: -collective.bytes))


def _called(line):
  """Returns the names of the computations that an instruction calls."""
  called = _CALLED.findall(line)
  for branches in _BRANCHES.findall(line):
    called += [branch.strip(' %') for branch in branches.split(',')]
  return called


def _trips(line, computations, open_trips):
  """Returns a while loop's trip count: the compiler's, or that of `i < constant`, or open_trips."""
  if match := re.search(r'"known_trip_count":\{"n":"(\d+)"\}', line):
    return int(match[1])
  condition = re.search(r'condition=%?([\w.\-]+)', line)
  instructions = computations.get(condition[1], ()) if condition else ()
  constants = {}
  for _, opcode, text in instructions:
    constant = re.search(r'%?([\w.\-]+) = .* constant\((\d+)\)', text)
    if constant and opcode == 'constant':
      constants[constant[1]] = int(constant[2])
  for _, opcode, text in instructions:
    if opcode == 'compare' and 'ROOT' in text and 'direction=LT' in text:
      limit = re.search(r'compare\([^,]*, (?:[^%]* )?%?([\w.\-]+)\)', text)
      return constants.get(limit[1] if limit else '', open_trips)
  return open_trips


def _computations(text):
  """Returns (name of the entry, {computation: [(result type, opcode, line)]})."""
  entry = ''
  computations = {}
  current = []
  for line in text.splitlines():
    if match := _COMPUTATION.match(line):
      current = computations.setdefault(match[2], [])
      if match[1]:
        entry = match[2]
    elif match := _INSTRUCTION.match(line):
      current.append((match[1], match[2], line))
  return entry, computations


def _moved(kind, has_operands, result, line):
  """Returns the bytes of a collective's results, or of its operands for a reduce-scatter."""
  sizes = []
  for dtype, dims in _SHAPE.findall(result):
    if dims or not has_operands:
      lengths = [int(length) for length in dims.split(',') if length]
      sizes.append(math.prod(lengths) * _item_bytes(dtype))
  if has_operands and kind != 'all-reduce':  # (operands, results)
    half = len(sizes) // 2
    return max(sum(sizes[:half]), sum(sizes[half:]))
  moved = sum(sizes)
  if kind == 'reduce-scatter':
    moved *= _group_size(line)
  return moved


def _item_bytes(dtype):
  """Returns the bytes of a number: 2 for 'bf16', 0.5 for 's4', 1 for 'pred'."""
  bits = re.search(r'\d+', dtype)
  return int(bits[0]) / 8 if bits else 1


def _group_size(line):
  """Returns the devices per replica group: {{0,1},..}, [groups,size]<=[..], mesh['a'=2] {'a'}."""
  if match := re.search(r'replica_groups=\{\{([\d,]+)\}', line):
    return match[1].count(',') + 1
  if match := re.search(r'replica_groups=\[\d+,(\d+)\]', line):
    return int(match[1])
  if match := re.search(r'replica_groups=mesh\[([^\]]*)\] \{([^}]*)\}', line):
    sizes = dict(re.findall(r"'(\w+)'=(\d+)", match[1]))
    return math.prod(int(sizes[axis]) for axis in re.findall(r"'(\w+)'", match[2]))
  return 1
