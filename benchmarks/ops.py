"""Where our time goes: the ops of a compiled run, longest first, by their source in the program."""

import collections
import glob
import os
import re
import tempfile

import jax


def top(run, repeats):
  """Returns the ops of `repeats` runs by time: [(source, ms per run, executions per run)].

  The source is the op's origin in the program. The same line of all layers counts together, and
  transpose(..) marks the backward pass. Loops are left out, because their bodies count.
  """
  run()
  total, count = collections.Counter(), collections.Counter()
  with tempfile.TemporaryDirectory() as folder:
    with jax.profiler.trace(folder):
      for _ in range(repeats):
        run()
    (path,) = glob.glob(os.path.join(folder, '**', '*.xplane.pb'), recursive=True)
    trace = jax.profiler.ProfileData.from_file(path)
  sources = _sources()
  for event in (e for plane in trace.planes for line in plane.lines for e in line.events):
    stats = dict(event.stats)
    module, op = stats.get('hlo_module'), stats.get('hlo_op')
    if op is not None and not op.startswith(('while', 'call', 'conditional')):
      source = sources.get((module, op)) or f'{module}: {op}'
      total[source] += event.duration_ns / 1e6 / repeats
      count[source] += 1 / repeats
  return [(source, ms, count[source]) for source, ms in total.most_common()]


def _sources():
  """Returns {(module, op): op_name from tracing} of all programs; '' where they differ."""
  found = {}
  for executable in jax.devices()[0].client.live_executables():
    for module in executable.hlo_modules():
      for op, source in re.findall(r'%([\w.-]+) = [^\n]*op_name="([^"]*)"', module.to_string()):
        key = module.name, op
        found[key] = source if found.get(key, source) == source else ''
  return found
