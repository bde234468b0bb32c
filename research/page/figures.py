"""Figures of a study as SVG: one panel per cell, every run thin and their middle thick.

A panel is a drawing of its own, so that a page can set as many side by side as its width allows;
`sheet` sets them in one file, for readers of Markdown. Cells are told apart by panel, not by
colour. Two colours that the colour-blind tell apart: of a cell, and of its second metric.
"""

from collections.abc import Sequence
import dataclasses
import html
import math

import numpy as np

from research.page import summary
from research.study import measures

WIDTH, HEIGHT = 200, 150
_LEFT, _RIGHT, _TOP, _BOTTOM = 34, 8, 32, 24
_FIRST, _SECOND, _OTHER = '#0072b2', '#d55e00', '#777'
_INK = '#444'
_COLUMNS = 5  # of a sheet
_LONG = 29  # characters of a text; a longer one is written smaller


@dataclasses.dataclass(frozen=True)
class Figure:
  """What a figure shows of each cell of a regime."""

  name: str
  title: str
  metrics: tuple[tuple[str, str], ...]  # (metric, label), one or two
  note: str
  log: bool = False
  trend: bool = False  # fit a line to the middle, in the axis's scale


FIGURES = (
    Figure(
        'score',
        'Held-out success',
        (('score', 'success'),),
        'Share of held-out questions (on the mechanism: exact probability) after each update.',
    ),
    Figure(
        'clip',
        'Clipped tokens',
        (('clip', 'share clipped'),),
        'Share of agent tokens whose gradient the clip removed.',
    ),
    Figure(
        'norms',
        'Gradient and clipping bias',
        (('grad_norm', '‖g‖'), ('bias_norm', '‖C‖')),
        'Norms of the gradient and of what clipping removed from it, before any division. Dashed: '
        'least-squares line through the logarithms, with its R².',
        log=True,
        trend=True,
    ),
    Figure(
        'ratios',
        'Spread of the token ratio',
        (('ratio_token', 'standard deviation'),),
        'Standard deviation of the importance ratio over agent tokens.',
        log=True,
    ),
    Figure(
        'advantages',
        'Extreme advantages',
        (('advantage_max', 'largest'), ('advantage_min', 'smallest')),
        'Largest and smallest advantage of an update.',
    ),
    Figure(
        'entropy',
        'Entropy',
        (('entropy', 'nats per token'),),
        'Of the policy at the tokens that it sampled.',
    ),
    Figure(
        'factor',
        'What the division did to a step',
        (('factor', 'factor'),),
        'Norm of the applied step over that of the step that the same optimizer state makes of the '
        'undivided gradient, as a mean over the steps of an update: 1 where the division did '
        'nothing. Cells in which it was not measured are left out.',
        log=True,
    ),
)


def panels(figure: Figure, cells: Sequence[summary.Cell]) -> list[str]:
  """Returns an SVG per cell that has the figure's metrics, with one vertical axis for all."""
  drawn = []
  for cell in cells:
    found = [cell.curve(metric) for metric, _ in figure.metrics]
    curves = [curve for curve in found if curve is not None and np.isfinite(curve.middle).any()]
    if curves:
      drawn.append((cell, curves))
  if not drawn:
    return []
  baseline = next((c for c in drawn if c[0].planned.name == c[0].planned.baseline), None)
  axes = _Axes.around([curve for _, curves in drawn for curve in curves], figure.log)
  baseline_cell, middle = (baseline[0], baseline[1][0]) if baseline else (None, None)
  return [
      _panel(figure, axes, cell, curves, middle if cell is not baseline_cell else None)
      for cell, curves in drawn
  ]


def sheet(drawn: Sequence[str]) -> str:
  """Returns panels as one SVG file, side by side."""
  columns = min(_COLUMNS, len(drawn))
  rows = math.ceil(len(drawn) / columns)
  placed = [
      panel.replace('<svg ', f'<svg x="{i % columns * WIDTH}" y="{i // columns * HEIGHT}" ', 1)
      for i, panel in enumerate(drawn)
  ]
  width, height = columns * WIDTH, rows * HEIGHT
  return (
      f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
      f'viewBox="0 0 {width} {height}"><rect width="{width}" height="{height}" fill="#fff"/>'
      + '\n'.join(placed)
      + '</svg>\n'
  )


@dataclasses.dataclass(frozen=True)
class _Axes:
  """From data to the drawing: x is linear; y is linear from 0, or logarithmic."""

  last: float
  low: float
  high: float
  log: bool

  @classmethod
  def around(cls, curves: Sequence[summary.Curve], log: bool) -> '_Axes':
    """Returns axes that hold the middles and nearly all points of runs."""
    shown = (part for c in curves for part in (c.middle, c.runs, c.low, c.high))
    values = np.concatenate([part.ravel() for part in shown if part is not None])
    values = values[np.isfinite(values)]
    last = max(float(curve.steps.max()) for curve in curves)
    if log:
      values = values[values > 0]
      if not len(values):
        return cls(last, 0.1, 1.0, True)
      low, high = np.quantile(values, [0.005, 0.995])
      low, high = 10 ** math.floor(math.log10(low)), 10 ** math.ceil(math.log10(high))
      return cls(last, max(low, high / 1e6), high if high > low else low * 10, True)
    low, high = np.quantile(values, [0.002, 0.998])
    low, high = min(0.0, float(low)), max(0.0, float(high))
    step = _round_step((high - low) or 1.0)
    return cls(last, math.floor(low / step) * step, math.ceil(high / step) * step or step, False)

  def x(self, step: float) -> float:
    return _LEFT + (WIDTH - _LEFT - _RIGHT) * step / (self.last or 1)

  def y(self, value: float) -> float:
    if self.log:
      value = min(max(value, self.low), self.high)
      share = math.log(value / self.low) / math.log(self.high / self.low)
    else:
      share = (min(max(value, self.low), self.high) - self.low) / (self.high - self.low)
    return HEIGHT - _BOTTOM - share * (HEIGHT - _TOP - _BOTTOM)

  def ticks(self) -> list[float]:
    if self.log:
      exponents = range(round(math.log10(self.low)), round(math.log10(self.high)) + 1)
      return [10.0**e for e in list(exponents)[:: math.ceil(len(exponents) / 5)]]
    step = _round_step(self.high - self.low)
    return [self.low + i * step for i in range(round((self.high - self.low) / step) + 1)]


def _round_step(span: float) -> float:
  """Returns 1, 2 or 5 times a power of ten, so that three to five of them cover a span."""
  power = 10.0 ** math.floor(math.log10(span / 3))
  return next(m * power for m in (1, 2, 5, 10) if span / (m * power) <= 5)


def _panel(figure, axes, cell, curves, baseline) -> str:
  parts = [*_frame(axes, cell.planned.name)]
  if baseline is not None:
    parts.append(_path(axes, baseline.steps, baseline.middle, _OTHER, 1.2, dash='2 2'))
  for color, curve in zip((_FIRST, _SECOND), curves):
    if curve.low is not None and curve.high is not None:
      parts.append(_band(axes, curve, color))
    parts.append(_path(axes, curve.steps, curve.runs, color, 0.7, 0.45))
    parts.append(_path(axes, curve.steps, curve.middle, color, 2))
  labels = [label for _, label in figure.metrics] if len(figure.metrics) > 1 else []
  for i, (color, curve) in enumerate(zip((_FIRST, _SECOND), curves)):
    label = labels[i] if labels else ''
    if figure.trend:
      line, fit = _trend(axes, curve, color, figure.log)
      parts.append(line)
      label += f' R² {fit:.2f}' if math.isfinite(fit) else ''
    if label:
      x, anchor = ((4, 'start'), (WIDTH - _RIGHT, 'end'))[i]
      parts.append(_text(x, 24, label, anchor, color))
  return (
      f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 '
      f'{WIDTH} {HEIGHT}" font-size="10.5" font-family="system-ui,sans-serif" fill="{_INK}" '
      f'role="img"><title>{html.escape(cell.group)}: '
      f'{html.escape(figure.title)}</title>{"".join(filter(None, parts))}</svg>'
  )


def _frame(axes, title):
  """Yields the axes with their ticks, and the name of the cell."""
  left, right, bottom = _LEFT, WIDTH - _RIGHT, HEIGHT - _BOTTOM
  for tick in axes.ticks():
    y = axes.y(tick)
    yield f'<path d="M{left} {y:.1f}H{right}" stroke="#ddd" stroke-width=".6"/>'
    yield _text(left - 4, y + 3.5, _number(tick), 'end')
  for step in sorted({0, round(axes.last / 2), round(axes.last)}):
    yield _text(axes.x(step), bottom + 12, str(step), 'middle' if step < axes.last else 'end')
  yield _text((left + right) / 2, HEIGHT - 3, 'update', 'middle')
  yield f'<path d="M{left} {bottom}H{right}" stroke="#555" stroke-width=".8"/>'
  yield _text(4, 12, title, 'start', '#000', bold=True)


def _path(axes, steps, values, color, width, opacity=1.0, dash=''):
  """Returns lines [..,P] through the finite points as one path, broken where one is missing."""
  commands = []
  for line in np.atleast_2d(values):
    last = None  # in tenths; moves are relative, which makes the file a third smaller
    for step, value in zip(steps, line):
      if not math.isfinite(value) or (axes.log and value <= 0):
        last = None
        continue
      x, y = round(10 * axes.x(step)), round(10 * axes.y(value))
      commands.append(_move('M', x, y) if last is None else _move('l', x - last[0], y - last[1]))
      last = x, y
  if not commands:
    return ''
  more = (f' stroke-opacity="{opacity}"' if opacity < 1 else '') + (
      f' stroke-dasharray="{dash}"' if dash else ''
  )
  return (
      f'<path d="{"".join(commands)}" fill="none" stroke="{color}" stroke-width="{width}"{more}/>'
  )


def _move(command: str, x: int, y: int) -> str:
  """Returns 'l6.9-2' for ('l', 69, -20)."""
  return f'{command}{x / 10:g}{" " if y >= 0 else ""}{y / 10:g}'


def _band(axes, curve, color):
  kept = [i for i in range(len(curve.steps)) if np.isfinite([curve.low[i], curve.high[i]]).all()]
  points = [(curve.steps[i], curve.high[i]) for i in kept]
  points += [(curve.steps[i], curve.low[i]) for i in reversed(kept)]
  if axes.log:
    points = [(step, max(value, axes.low)) for step, value in points]
  text = ' '.join(f'{axes.x(step):.1f},{axes.y(value):.1f}' for step, value in points)
  return f'<polygon points="{text}" fill="{color}" fill-opacity=".18"/>'


def _trend(axes, curve, color, log):
  """Returns the fitted line of a curve's middle, and its R^2."""
  values = np.log10(np.where(curve.middle > 0, curve.middle, np.nan)) if log else curve.middle
  intercept, slope, fit = measures.trend(curve.steps, values)
  if not math.isfinite(fit):
    return '', fit
  ends = np.array([curve.steps.min(), curve.steps.max()], float)
  fitted = intercept + slope * ends
  return _path(axes, ends, 10**fitted if log else fitted, color, 1.2, dash='5 3'), fit


def _text(x, y, text, anchor, color=_INK, bold=False):
  more = ' font-weight="600"' if bold else ''
  if len(text) > _LONG:
    more += f' font-size="{10.5 * _LONG / len(text):.3g}"'
  if color != _INK:
    more += f' fill="{color}"'
  return f'<text x="{x:.4g}" y="{y:.4g}" text-anchor="{anchor}"{more}>{html.escape(text)}</text>'


def _number(value):
  if value and not 0.001 <= abs(value) < 10_000:
    return f'{value:.0e}'.replace('e-0', 'e-').replace('e+0', 'e')
  return f'{value:.3f}'.rstrip('0').rstrip('.').replace('0.', '.', 1) if value else '0'
