"""Figures of a study, by matplotlib: one per grid and condition, with a panel per metric.

A line is the interquartile mean of a method's runs. Around it are the single runs, thin, or in the
toy task a band from the 10% to the 90% quantile.
"""

from collections.abc import Sequence
from typing import NamedTuple

import matplotlib
from matplotlib import axes as axes_lib
from matplotlib import pyplot as plt
from matplotlib import ticker
import numpy as np

from research.page import summary

MAX_LINES = 10  # single runs of a method that are drawn; of more runs there is a band
DEFAULT_NUMBER = 6  # methods that are drawn if the grid does not name them
# By the palette of Okabe and Ito, which the colour-blind can tell apart.
COLORS = ('#D55E00', '#56B4E9', '#E69F00', '#0072B2', '#009E73', '#000000')
_STYLE = {'font.size': 9, 'axes.spines.top': False, 'axes.spines.right': False}


class Panel(NamedTuple):
  """One metric."""

  metric: str
  title: str
  log: bool = False


PANELS = (
    Panel('score', 'held-out success'),
    Panel('clip', 'clipped share of tokens'),
    Panel('entropy', 'entropy, nats per token'),
    Panel('grad_norm', 'norm of the gradient', log=True),
    Panel('bias_norm', 'norm of the clipping bias', log=True),
    Panel('step', 'norm of a step', log=True),
)


def draw(path: str, methods: Sequence[summary.MethodRuns]) -> None:
  """Draws the methods of one condition into a PNG file."""
  matplotlib.use('Agg')
  with plt.rc_context(_STYLE):  # type: ignore[arg-type]
    figure, grid = plt.subplots(2, 3, figsize=(11, 5.6), layout='constrained', sharex=True)
    for panel, axes in zip(PANELS, grid.flat):
      for i, one in enumerate(methods):
        _draw_curve(axes, one.curve(panel.metric), one.method, COLORS[i % len(COLORS)])
      axes.set_title(panel.title, fontsize=10)
      if panel.log:
        axes.set_yscale('log')
      else:
        axes.set_ylim(bottom=0)
    for axes in grid[-1]:
      axes.set_xlabel('update')
      axes.xaxis.set_major_locator(ticker.MaxNLocator(5, integer=True))
    handles, labels = grid[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc='outside lower center', ncols=len(labels), frameon=False)
    figure.savefig(path, dpi=80, metadata={'Software': None})
    plt.close(figure)


def _draw_curve(axes: axes_lib.Axes, curve: summary.Curve | None, label: str, color: str) -> None:
  if curve is None or not np.isfinite(curve.middle).any():
    return
  low, high = curve.low, curve.high
  if len(curve.runs) > MAX_LINES:
    low, high = np.nanquantile(curve.runs, [0.1, 0.9], axis=0)
  if low is not None and high is not None:
    axes.fill_between(curve.steps, low, high, color=color, alpha=0.12, linewidth=0)
  else:
    axes.plot(curve.steps, curve.runs.T, color=color, linewidth=0.6, alpha=0.35)
  axes.plot(curve.steps, curve.middle, color=color, linewidth=1.8, label=label)
