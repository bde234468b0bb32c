"""The charts of the report: lines of metrics in, charts as plain data out.

A chart names its series by patterns of metric names. Series that a run did not write are left out,
and so are charts without series. Metrics that no chart names come last, folded, one chart per name.
"""

import dataclasses
import math
import re
from typing import Any

MAX_POINTS = 600  # per series; thinning keeps the extremes of each bin


@dataclasses.dataclass(frozen=True)
class Line:
  """Series whose names match `pattern`; `label` may use its groups. `band` shades /min to /max."""

  pattern: str
  label: str
  dashed: bool = False
  band: bool = False


@dataclasses.dataclass(frozen=True)
class Chart:
  """`unit` labels the vertical axis; a 'stack' is drawn as areas on top of one another."""

  section: str
  title: str
  unit: str
  note: str
  lines: tuple[Line, ...]
  scale: str = 'linear'  # 'linear' | 'log' | 'stack'


CHARTS = (
    Chart(
        'Outcome',
        'Exact match',
        'fraction of questions',
        '',
        (Line(r'em/mean', 'training batch'), Line(r'val-core/(.+)/em', r'held out: \1')),
    ),
    Chart(
        'Outcome',
        'Held-out exact match by hops',
        'fraction of questions',
        '',
        (Line(r'val-core/(.+)/em_hops(\d+)', r'\1 · \2-hop'),),
    ),
    Chart(
        'Outcome',
        'Score and token F1',
        'reward; fraction',
        '',
        (
            Line(r'critic/score/mean', 'score'),
            Line(r'critic/rewards/mean', 'score with KL'),
            Line(r'f1/mean', 'F1'),
            Line(r'val-core/(.+)/f1', r'F1 held out: \1'),
            Line(r'val-core/(.+)/score', r'score held out: \1'),
        ),
    ),
    Chart(
        'Outcome',
        'Metrics of the environment',
        'mean over episodes',
        '',
        (
            Line(r'(?!critic|num_turns|prompt_length|response_length|em/|f1/)(\w+)/mean', r'\1'),
            Line(r'env/(?!searches/|invalid/)(.+)/mean', r'\1'),
            Line(r'val-core/all/(?!em|f1|score)([^/]+)', r'held out: \1'),
            Line(r'val-aux/all/(?!searches)(\w+)', r'held out: \1'),
        ),
    ),
    Chart(
        'Clipping',
        'Clipped tokens',
        'fraction of agent tokens',
        '',
        (
            Line(r'actor/pg_clipfrac', 'clipped'),
            Line(r'actor/pg_clipfrac_lower', 'dual clip', dashed=True),
        ),
    ),
    Chart(
        'Clipping',
        'Clipped tokens with advantage above 0',
        'fraction of the turn’s tokens',
        '',
        (Line(r'stppo/clipfrac_turn(\d+)_pos', r'turn \1'),),
    ),
    Chart(
        'Clipping',
        'Clipped tokens with advantage below 0',
        'fraction of the turn’s tokens',
        '',
        (Line(r'stppo/clipfrac_turn(\d+)_neg', r'turn \1'),),
    ),
    Chart(
        'Update',
        'Gradient and clipping bias',
        'L2 norm',
        '‖g‖: gradient of the clipped loss. ‖C‖: gradient that the clip removed.',
        (
            Line(r'stppo/grad_norm', '‖g‖'),
            Line(r'stppo/bias_norm', '‖C‖'),
            Line(r'actor/grad_norm', '‖g‖ at the clip', dashed=True),
        ),
        'log',
    ),
    Chart(
        'Update',
        'Alignment of gradient and bias',
        'cos(g, C)',
        '',
        (Line(r'stppo/cos_g_c', 'cos(g, C)'),),
    ),
    Chart(
        'Update',
        'Divisor and effective step',
        'number; L2 norm',
        'Divisor of the gradient; the factor by which it really changed a step; norm of the '
        'parameter change.',
        (
            Line(r'stppo/divisor', 'divisor'),
            Line(r'stppo/applied_factor', 'factor'),
            Line(r'stppo/step_norm', 'step'),
        ),
        'log',
    ),
    Chart(
        'Policy',
        'Spread of the importance ratio',
        'standard deviation',
        'The same tokens, their ratios pooled at three levels.',
        tuple(Line(f'stppo/ratio_std_{level}', level) for level in ('token', 'turn', 'sequence')),
        'log',
    ),
    Chart(
        'Policy',
        'Distance',
        'KL, nats per token',
        '',
        (Line(r'actor/ppo_kl', 'to the old policy'), Line(r'actor/kl_loss', 'to the reference')),
    ),
    Chart('Policy', 'Entropy', 'nats per token', '', (Line(r'actor/entropy', 'entropy'),)),
    Chart(
        'Policy',
        'Sampler against trainer',
        'KL, nats per token',
        'Zero where both compute the same log-probs.',
        (Line(r'rollout_corr/kl', 'k1'), Line(r'rollout_corr/k3_kl', 'k3')),
    ),
    Chart(
        'Policy',
        'Sampler against trainer, largest gap',
        '|Δ log-prob| of one token',
        '',
        (Line(r'rollout_corr/logp_diff_max', 'gap'),),
        'log',
    ),
    Chart(
        'Policy',
        'Advantages',
        'reward',
        'Mean; shaded from smallest to largest.',
        (Line(r'critic/advantages/mean', 'advantages', band=True),),
    ),
    Chart(
        'Critic', 'Value loss', 'squared error', '', (Line(r'critic/vf_loss', 'value loss'),), 'log'
    ),
    Chart(
        'Critic',
        'Explained variance',
        'fraction',
        '',
        (Line(r'critic/vf_explained_var', 'explained variance'),),
    ),
    Chart(
        'Critic',
        'Values and returns',
        'reward',
        'Mean; values shaded from smallest to largest.',
        (
            Line(r'critic/values/mean', 'values', band=True),
            Line(r'critic/vpred_mean', 'predicted'),
            Line(r'critic/returns/mean', 'returns'),
        ),
    ),
    Chart(
        'Episodes and cost',
        'Turns',
        'turns per episode',
        'Mean; shaded from smallest to largest.',
        (
            Line(r'stppo/agent_turns/mean', 'turns', band=True),
            Line(r'env/searches/mean', 'searches'),
        ),
    ),
    Chart(
        'Episodes and cost',
        'Length',
        'tokens per episode',
        'Mean; shaded from smallest to largest.',
        (
            Line(r'response_length/mean', 'with observations', band=True),
            Line(r'stppo/agent_tokens/mean', "the agent's"),
            Line(r'prompt_length/mean', 'prompt'),
        ),
    ),
    Chart(
        'Episodes and cost',
        'Irregular episodes',
        'fraction; number per episode',
        '',
        (
            Line(r'env/truncated', 'cut by a limit'),
            Line(r'env/retrieval_failed', 'retrieval failed'),
            Line(r'env/environment_failed', 'environment raised'),
            Line(r'env/invalid/mean', 'invalid actions'),
        ),
    ),
    Chart(
        'Episodes and cost',
        'Throughput',
        'tokens / s',
        '',
        (Line(r'perf/throughput', 'tokens / s'),),
    ),
    Chart(
        'Episodes and cost',
        'Time of an update',
        'seconds',
        '',
        (Line(r'timing_s/(?!step$|testing$|gen)(.+)', r'\1'),),
        'stack',
    ),
    Chart(
        'Episodes and cost',
        'Time of generation',
        'seconds',
        '',
        (Line(r'timing_s/gen_(.+)', r'\1'),),
        'stack',
    ),
)

# Of environments with several roles.
ROLE_CHARTS = (
    Chart(
        'Roles',
        'Score of each role',
        'reward; fraction',
        '',
        (
            Line(r'role/(\w+)/score/mean', r'\1'),
            Line(r'val-role/(\w+)/score', r'\1, held out', dashed=True),
        ),
    ),
    Chart(
        'Roles',
        'Metrics of each role',
        'mean over episodes',
        '',
        (
            Line(r'role/(\w+)/(?!score|agent_|advant|return|value)(\w+)/mean', r'\1: \2'),
            Line(r'val-role/(\w+)/(?!score)(\w+)', r'\1: \2, held out', dashed=True),
        ),
    ),
    Chart(
        'Roles',
        'Turns of each role',
        'turns per episode',
        '',
        (Line(r'role/(\w+)/agent_turns/mean', r'\1'),),
    ),
    Chart(
        'Roles',
        'Share of each role',
        'fraction',
        'Of the agents’ tokens; dashed: episodes in which the role never moved.',
        (
            Line(r'role/(\w+)/token_share', r'\1'),
            Line(r'role/(\w+)/absent', r'\1, absent', dashed=True),
        ),
    ),
    Chart(
        'Roles',
        'Policy loss of each role',
        'loss',
        'They add up to the loss of the step.',
        (Line(r'role/(\w+)/pg_loss', r'\1'),),
    ),
    Chart(
        'Roles',
        'Clipped tokens of each role',
        'fraction of its tokens',
        '',
        (Line(r'role/(\w+)/pg_clipfrac', r'\1'),),
    ),
    Chart(
        'Roles', 'Entropy of each role', 'nats per token', '', (Line(r'role/(\w+)/entropy', r'\1'),)
    ),
    Chart(
        'Roles',
        'Values and returns of each role',
        'reward',
        '',
        (
            Line(r'role/(\w+)/values/mean', r'\1: values'),
            Line(r'role/(\w+)/returns/mean', r'\1: returns', dashed=True),
        ),
    ),
)


def charts(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
  """Returns the charts that have data, as the page's script draws them."""
  columns = {}  # name -> {step: value}; a step written twice counts once, the later line wins
  for row in rows:
    for name, value in row.items():
      if name not in ('step', 'time', 'nonfinite'):
        columns.setdefault(name, {})[row['step']] = value
  used = {'timing_s/step'}
  drawn = []
  for chart in (*CHARTS[:4], *ROLE_CHARTS, *CHARTS[4:]):
    series = []
    for line in chart.lines:
      for name in sorted(columns, key=_natural):
        match = re.fullmatch(line.pattern, name)
        if match:
          used.add(name)
          series.append(_series(columns, name, match.expand(line.label), line, chart.scale))
          used.update(_band_names(name) if name.endswith('/mean') else ())
    drawn += _chart(chart, series)
  rest = sorted(set(columns) - used, key=_natural)
  for name in rest:
    only = _series(columns, name, name, Line('', ''), 'linear')
    drawn += _chart(Chart('Other series', name, '', '', ()), [only])
  return drawn


def _chart(chart: Chart, series: list[dict[str, Any]]) -> list[dict[str, Any]]:
  series = [one for one in series if any(value is not None for value in one['y'])]
  if not series:
    return []
  prefixes = {one['label'].split(' · ')[0] for one in series}
  for hue, one in enumerate(series):
    one['hue'] = hue
    if len(series) > 1 and len(prefixes) == 1:  # one data set, so its name adds nothing
      one['label'] = one['label'].split(' · ')[-1]
  fields = {name: getattr(chart, name) for name in ('section', 'title', 'unit', 'note', 'scale')}
  return [fields | {'series': series}]


def _series(
    columns: dict[str, dict[int, float | None]], name: str, label: str, line: Line, scale: str
) -> dict[str, Any]:
  column = columns[name]
  steps = _evenly(column) if scale == 'stack' else _thin(column)
  series = {
      'name': name,
      'label': label,
      'dashed': line.dashed,
      'x': steps,
      'y': [column[step] for step in steps],
  }
  low, high = (columns.get(other) for other in _band_names(name))
  if line.band and low and high:
    series['low'] = [low.get(step) for step in steps]
    series['high'] = [high.get(step) for step in steps]
  return series


def _band_names(name: str) -> tuple[str, str]:
  stem = name.removesuffix('/mean')
  return f'{stem}/min', f'{stem}/max'


def _thin(column: dict[int, float | None]) -> list[int]:
  """Returns the steps to draw: all, or the extremes of each of MAX_POINTS / 2 bins."""
  steps = sorted(column)
  if len(steps) <= MAX_POINTS:
    return steps
  kept = {steps[0], steps[-1]}
  bins = MAX_POINTS // 2
  for index in range(bins):
    members = steps[index * len(steps) // bins : (index + 1) * len(steps) // bins]
    members.sort(key=lambda step: _sortable(column[step]))
    kept.update((members[0], members[-1]))
  return sorted(kept)


def _evenly(column: dict[int, float | None]) -> list[int]:
  """Returns every n-th step, chosen by the step alone so that the layers of a stack agree."""
  stride = max(column) // MAX_POINTS + 1
  return [step for step in sorted(column) if step % stride == 0 or step == max(column)]


def _sortable(value: float | None) -> float:
  return -math.inf if value is None else value


def _natural(name: str) -> list[tuple[int, int, str]]:
  """Returns a sort key that puts turn10 after turn2."""
  return [
      (0, int(part), '') if part.isdigit() else (1, 0, part) for part in re.split(r'(\d+)', name)
  ]
