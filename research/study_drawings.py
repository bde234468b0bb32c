"""The figures of docs/study.md and docs/rows.md."""

from collections.abc import Mapping
from collections.abc import Sequence
import os

import matplotlib
from matplotlib import axes as axes_lib
from matplotlib import patches
from matplotlib import pyplot as plt
import numpy as np

from research.page import summary

BLUE, ORANGE, RED, SKY, GREEN, GREY = (
    '#0072B2', '#E69F00', '#D55E00', '#56B4E9', '#009E73', '#666666',
)  # fmt: skip
STYLE = {'font.size': 9.5, 'axes.spines.top': False, 'axes.spines.right': False}
DPI = 130

PPO, TURN, S_PPO, ST_PPO, RS_PPO, LOWER = (
    'ppo', 'turn_ppo', 's_ppo', 'st_ppo', 'ppo+relative.step', 'ppo+step_of.relative.step',
)  # fmt: skip
LABELS = {
    PPO: 'token PPO',
    TURN: 'Turn-PPO',
    S_PPO: 'S-PPO',
    ST_PPO: 'ST-PPO',
    RS_PPO: 'RS-PPO (ours)',
    LOWER: 'token PPO, lower rate',
    'rs_ppo': 'RS-PPO (ours)',
    'ppo+sampler': "token PPO, sampler's log-probs",
}
COLOURS = {
    PPO: RED,
    TURN: SKY,
    S_PPO: ORANGE,
    ST_PPO: BLUE,
    RS_PPO: GREEN,
    'rs_ppo': GREEN,
    LOWER: GREY,
    'ppo+sampler': '#CC79A7',
}
SCORES = (  # title, grid and condition
    ('toy task: reuse', 'toy_reuse/reuse'),
    ('toy task: stale', 'toy_stale/stale'),
    ('search agent: harsh', 'system_harsh/harsh'),
    ('search agent: stale', 'system_stale/stale'),
)
RATES = ('0.0005', '0.001', '0.002')  # rates of the sweeps, besides that of the condition
SWEEPS = (('toy task: reuse', 'reuse', 3.5e-3), ('toy task: stale', 'stale', 3e-3))

Methods = Mapping[str, summary.MethodRuns]


def draw(methods: Methods, folder: str) -> None:
  """Writes setup.png, scores.png, rates.png and curves.png."""
  matplotlib.use('Agg')
  with plt.rc_context(STYLE):  # type: ignore[arg-type]
    for name, function in (('scores', draw_scores), ('rates', draw_rates), ('curves', draw_curves)):
      _save(function(methods), folder, name)
    _save(draw_setup(), folder, 'setup')


def draw_rows(methods: Methods, folder: str) -> None:
  """Writes rows.png: a panel per row with the held-out scores of its seeds, next to PPO's."""
  matplotlib.use('Agg')
  rows = {one.method: one for one in methods.values() if one.grid == 'rows' and one.num_runs}
  others = [name for name in rows if name != PPO]
  if PPO not in rows or not others:
    return
  with plt.rc_context(STYLE):  # type: ignore[arg-type]
    height = -(-len(others) // 5)
    figure, panels = plt.subplots(
        height, 5, figsize=(9.4, 2.1 * height), layout='constrained', sharex=True, sharey=True,
        squeeze=False,
    )  # fmt: skip
    for axes in panels.flat[len(others) :]:
      axes.axis('off')
    for axes, name in zip(panels.flat, others):
      for one, colour in ((rows[PPO], '#bbbbbb'), (rows[name], BLUE)):
        curve = one.curve('score')
        axes.plot(curve.steps, curve.runs.T, color=colour, linewidth=1.3)
      axes.set(title=name, ylim=(0, 1), xticks=(0, 4, 8, 12))
    for axes in panels[-1]:
      axes.set_xlabel('update')
    _save(figure, folder, 'rows')


def draw_scores(methods: Methods) -> plt.Figure:
  """Draws final scores with intervals and the counts of collapsed runs, a panel per condition."""
  names = (PPO, TURN, S_PPO, ST_PPO, RS_PPO, LOWER)
  figure, panels = plt.subplots(2, 2, figsize=(8.4, 4.9), layout='constrained', sharey=True)
  for axes, (title, group) in zip(panels.flat, SCORES):
    for row, name in enumerate(names):
      one = methods[f'{group}/{name}']
      final = one.estimate('final')
      axes.plot((final.low, final.high), (row, row), color=COLOURS[name], linewidth=2)
      axes.plot(final.value, row, 'o', color=COLOURS[name], markersize=6)
      collapsed = f'{int(one.values("collapsed").sum())}/{one.num_runs}'
      axes.text(1.04, row, collapsed, va='center', ha='left', fontsize=9)
    first = float(methods[f'{group}/{PPO}'].curve('score').middle[0])
    axes.axvline(first, color='#999999', linestyle='--', linewidth=1, zorder=0)
    axes.text(1.04, -0.75, 'collapsed', va='bottom', ha='left', fontsize=8.5, color=GREY)
    axes.set_title(title, loc='left', fontsize=10)
    axes.set(xlim=(-0.03, 1), ylim=(len(names) - 0.5, -0.6))
    axes.xaxis.set_ticks((0, 0.25, 0.5, 0.75, 1), ('0', '.25', '.5', '.75', '1'))
  panels[0, 0].set_yticks(range(len(names)), [LABELS[name] for name in names])
  for axes in panels[1]:
    axes.set_xlabel('final score')
  for axes in panels.flat:
    axes.tick_params(axis='y', length=0)
    axes.spines['left'].set_visible(False)
  return figure


def draw_rates(methods: Methods) -> plt.Figure:
  """Draws final scores of four rules at several learning rates, a panel per condition."""
  names = (PPO, TURN, ST_PPO, RS_PPO)
  figure, panels = plt.subplots(1, 2, figsize=(8.6, 3.1), layout='constrained', sharey=True)
  for axes, (title, condition, own_rate) in zip(panels, SWEEPS):
    for name in names:
      groups = {
          float(rate): f'toy_{condition}_sweep/{condition}/{name}+lr.{rate}' for rate in RATES
      }
      groups[own_rate] = f'toy_{condition}/{condition}/{name}'
      estimates = [methods[group].estimate('final') for group in groups.values()]
      values = np.array([(x.value, x.low, x.high) for x in estimates]).T
      axes.plot(list(groups), values[0], 'o-', color=COLOURS[name], label=LABELS[name])
      axes.fill_between(
          list(groups), values[1], values[2], color=COLOURS[name], alpha=0.18, linewidth=0
      )
    axes.set(title=title, xlabel='learning rate', xscale='log', ylim=(0, 1))
    axes.set_xticks(
        [5e-4, 1e-3, 2e-3, own_rate], ['5e-4', '1e-3', '2e-3', f'{1000 * own_rate:g}e-3']
    )
    axes.minorticks_off()
  panels[0].set_ylabel('final score')
  panels[0].legend(frameon=False, loc='lower left')
  return figure


def draw_curves(methods: Methods) -> plt.Figure:
  """Draws held-out scores by update: the default run, and the search agent on stale batches."""
  figure, panels = plt.subplots(1, 2, figsize=(9.6, 3.3), layout='constrained', sharey=True)
  left = (ST_PPO, TURN, S_PPO, PPO, 'rs_ppo')
  right = (PPO, ST_PPO, LOWER, 'ppo+sampler')
  _draw_group(panels[0], methods, 'default_run/best_rate', left)
  _draw_group(panels[1], methods, 'system_stale/stale', right)
  panels[0].set(title='default run', xlabel='update', ylabel='held-out exact match', ylim=(0, 1))
  panels[1].set(title='search agent: stale', xlabel='update')
  for axes in panels:
    axes.legend(frameon=False, loc='lower right' if axes is panels[0] else 'lower left', fontsize=8)
  return figure


def draw_setup() -> plt.Figure:
  """Draws the training loop, with the part that each question changes."""
  figure, axes = plt.subplots(figsize=(9.4, 2.9), layout='constrained')
  axes.set(xlim=(0, 110), ylim=(1, 31))
  axes.axis('off')
  boxes = (  # the part of the loop, and what is varied there
      ('the policy\nsamples a batch\nof episodes', 'Q1  batches are\n0 or 8 updates old', BLUE),
      ('ratios to the\nold policy', 'Q2, Q6  per token, turn,\nchunk or sequence', GREEN),
      ('clip: gradient g,\nclipping bias C', 'Q7  other clips\nand advantages', GREEN),
      ('divide g by\nthe norm of C', 'Q3  divide or not', GREEN),
      ('gradient clip,\nthen Adam', 'Q4  or divide\nafter the clip', ORANGE),
      ('applied step', 'Q4  or divide here\nQ5  length of the step', ORANGE),
  )
  width, gap, bottom, height = 14.5, 4.2, 12, 9
  centres = []
  for i, (text, varied, colour) in enumerate(boxes):
    left = 0.5 + i * (width + gap)
    centres.append(left + width / 2)
    text_colour = 'black' if colour == ORANGE else 'white'
    style = 'round,pad=0,rounding_size=.8'
    axes.add_patch(
        patches.FancyBboxPatch((left, bottom), width, height, style, fc=colour, ec='none')
    )
    axes.text(centres[i], bottom + height / 2, text, ha='center', va='center', color=text_colour)
    axes.text(centres[i], bottom - 1.5, varied, ha='center', va='top', fontsize=9)
    if i:
      _arrow(axes, (left - gap, bottom + height / 2), (left, bottom + height / 2))
  top = bottom + height
  axes.plot(
      (centres[-1], centres[-1], centres[1]), (top, top + 4, top + 4), color='#444444', lw=1.2
  )
  _arrow(axes, (centres[1], top + 4.1), (centres[1], top))
  middle = (centres[1] + centres[-1]) / 2
  text = 'Q1  next mini-batch or epoch of the same batch (reuse, harsh)'
  axes.text(middle, top + 5, text, ha='center', va='bottom', fontsize=9)
  text = "The old policy's log-probs are those of the trainer, or those of the sampler (Q7)."
  axes.text(centres[1] - width / 2, 3, text, ha='left', va='center', fontsize=9, color=GREY)
  return figure


def _arrow(axes: axes_lib.Axes, start: tuple[float, float], end: tuple[float, float]) -> None:
  axes.annotate('', end, start, arrowprops={'arrowstyle': '-|>', 'color': '#444444'})


def _draw_group(axes: axes_lib.Axes, methods: Methods, group: str, names: Sequence[str]) -> None:
  """Draws the mean score of methods, with a band from the lowest to the highest run."""
  for name in names:
    curve = methods[f'{group}/{name}'].curve('score')
    axes.plot(
        curve.steps, curve.runs.mean(axis=0), color=COLOURS[name], label=LABELS[name], linewidth=1.8
    )
    low, high = curve.runs.min(axis=0), curve.runs.max(axis=0)
    axes.fill_between(curve.steps, low, high, color=COLOURS[name], alpha=0.13, linewidth=0)


def _save(figure: plt.Figure, folder: str, name: str) -> None:
  figure.savefig(os.path.join(folder, f'{name}.png'), dpi=DPI, metadata={'Software': None})
  plt.close(figure)
