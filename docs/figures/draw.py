"""Draws the pictures of the pages `concepts` and `developer`.

  python docs/figures/draw.py

research/draw_episode.py draws episode.png, from a real run.
"""

import pathlib

import matplotlib
import matplotlib.pyplot as plt
import numpy as np

FOLDER = pathlib.Path(__file__).parent
BLUE = '#0072B2'
GREEN = '#009E73'
PINK = '#CC79A7'
ORANGE = '#E69F00'
RED = '#D55E00'
GREY = '#d9d9d9'
PALE = '#eef3f8'
TURN_COLOURS = (BLUE, GREEN, PINK)

# An episode of three turns: (text, turn), where turn 0 is the environment's.
TOKENS = (
    ('question', 0),
    ('think', 1),
    ('search', 1),
    ('result', 0),
    ('result', 0),
    ('think', 2),
    ('more', 2),
    ('search', 2),
    ('result', 0),
    ('think', 3),
    ('answer', 3),
)


def box(axis, x, y, width, height, text, colour, text_colour='black', size=9):
  """Draws a rectangle with a centred text."""
  patch = plt.Rectangle((x, y), width, height, facecolor=colour, edgecolor='white', linewidth=1.5)
  axis.add_patch(patch)
  axis.text(
      x + width / 2,
      y + height / 2,
      text,
      ha='center',
      va='center',
      color=text_colour,
      fontsize=size,
  )


def arrow(axis, start, end, colour='#555555'):
  """Draws an arrow."""
  axis.annotate('', xy=end, xytext=start, arrowprops={'arrowstyle': '-|>', 'color': colour})


def new_axis(width, height, xlim, ylim):
  """Returns a figure and an axis without ticks."""
  figure, axis = plt.subplots(figsize=(width, height))
  axis.set(xlim=xlim, ylim=ylim)
  axis.axis('off')
  return figure, axis


def save(figure, name):
  """Writes the picture next to this file."""
  figure.savefig(FOLDER / f'{name}.png', dpi=150, bbox_inches='tight', facecolor='white')
  plt.close(figure)


def draw_segments():
  """Draws one episode, its masks, and the tokens that share a ratio."""
  figure, axis = new_axis(10, 3.9, (-2.6, len(TOKENS)), (-6.6, 1.2))
  turns = [turn for _, turn in TOKENS]
  for column, (text, turn) in enumerate(TOKENS):
    colour = TURN_COLOURS[turn - 1] if turn else GREY
    box(axis, column, 0, 1, 1, text, colour, 'white' if turn else '#444444')
    box(axis, column, -1.0, 1, 0.8, str(turn), 'white')
    box(axis, column, -1.8, 1, 0.8, str(int(turn > 0)), 'white')
  for y, label in ((0.5, 'token'), (-0.6, 'turn_ids'), (-1.4, 'action_mask')):
    axis.text(-0.15, y, label, ha='right', va='center', fontsize=10)

  agent = [column for column, turn in enumerate(turns) if turn]
  ratios = ['w' + '₁₂₃₄₅₆₇'[i] for i in range(len(agent))]
  axis.text(-0.15, -2.7, "ratio='token'", ha='right', va='center', fontsize=10, family='monospace')
  for column, ratio in zip(agent, ratios):
    box(axis, column, -3.1, 1, 0.8, ratio, TURN_COLOURS[turns[column] - 1], 'white')
  axis.text(-0.15, -3.9, "ratio='turn'", ha='right', va='center', fontsize=10, family='monospace')
  for turn in (1, 2, 3):
    columns = [column for column in agent if turns[column] == turn]
    label = 'w' + '¹²³'[turn - 1]
    width = len(columns)
    box(axis, columns[0], -4.3, width, 0.8, label, TURN_COLOURS[turn - 1], 'white')
  axis.text(
      -0.15, -5.1, "ratio='sequence'", ha='right', va='center', fontsize=10, family='monospace'
  )
  for turn in (1, 2, 3):
    columns = [column for column in agent if turns[column] == turn]
    box(axis, columns[0], -5.5, len(columns), 0.8, 'w', '#555555', 'white')
  axis.text(-0.15, -6.2, 'rewards', ha='right', va='center', fontsize=10)
  for column, text in ((2, 'r¹'), (7, 'r²'), (10, 'r³')):
    box(axis, column, -6.6, 1, 0.8, text, PALE)
  save(figure, 'segments')


def draw_clip():
  """Draws the surrogate as a function of the ratio, and where its gradient is 0."""
  figure, axes = plt.subplots(1, 2, figsize=(9, 2.9), layout='constrained')
  ratio = np.linspace(0.5, 1.5, 201)
  clipped = np.clip(ratio, 0.8, 1.2)
  for axis, advantage in zip(axes, (1.0, -1.0)):
    surrogate = np.minimum(ratio * advantage, clipped * advantage)
    is_clipped = (ratio > 1.2) if advantage > 0 else (ratio < 0.8)
    axis.plot(ratio, ratio * advantage, '--', color='#999999', label='ratio × advantage')
    axis.plot(ratio, surrogate, color=BLUE, linewidth=2.2, label='objective of the token')
    axis.axvspan(
        ratio[is_clipped].min(),
        ratio[is_clipped].max(),
        color=RED,
        alpha=0.15,
        label='the clip removes the gradient',
    )
    sign = 'positive' if advantage > 0 else 'negative'
    axis.set(title=f'{sign} advantage', xlabel='ratio', xticks=(0.5, 0.8, 1.0, 1.2, 1.5))
    axis.spines[['top', 'right']].set_visible(False)
  axes[0].legend(frameon=False, fontsize=8)
  save(figure, 'clip')


def draw_update():
  """Draws the steps of an update, and a pipeline with staleness 1."""
  figure, axis = new_axis(10, 3.6, (0, 20), (-4.4, 3.6))
  axis.text(0, 3.2, 'One update', fontsize=11, weight='bold')
  steps = (
      (3.2, 'sample\ntrain.episodes', BLUE),
      (3.4, 'annotate: old_logp,\nvalues, advantages', GREEN),
  )
  x = 0.0
  for width, text, colour in steps:
    box(axis, x, 1.2, width, 1.5, text, colour, 'white')
    x += width + 0.3
  start = x
  for epoch in (1, 2):
    for step in (1, 2):
      box(axis, x, 1.2, 2.2, 1.5, f'step {step}\nmini_batch', ORANGE)
      x += 2.3
    axis.text(x - 2.4, 0.75, f'epoch {epoch} of train.epochs', ha='center', fontsize=8.5)
  box(axis, x + 0.2, 1.2, 2.2, 1.5, 'write\nmetrics', GREY)
  axis.plot((start, start, x - 0.1, x - 0.1), (2.85, 3.0, 3.0, 2.85), color='#555555', linewidth=1)
  axis.text((start + x) / 2, 3.15, 'optimizer steps', ha='center', fontsize=9)

  axis.text(0, -0.6, 'With pipeline.staleness=1', fontsize=11, weight='bold')
  axis.text(0, -1.65, 'sampler', va='center', fontsize=9.5)
  axis.text(0, -3.05, 'trainer', va='center', fontsize=9.5)
  width = 4.2
  for n in range(4):
    left = 2 + n * (width + 0.15)
    box(axis, left, -2.2, width, 1.1, f'batch {n + 1}, by policy {max(n - 1, 0)}', BLUE, 'white')
    if n:
      box(axis, left, -3.6, width, 1.1, f'update {n} on batch {n}', ORANGE)
      arrow(axis, (left - 0.6, -2.2), (left + 0.4, -2.5))
  axis.text(
      2, -4.2, 'Policy n is the policy after update n. Batch n was sampled one update ago.', size=9
  )
  save(figure, 'update')


def draw_forest():
  """Draws three rows with a common prefix, the places that they share, and the mask."""
  rows = (('p', 'q', 'a', 'b'), ('p', 'q', 'c', 'd'), ('p', 'q', 'c', 'd', 'e'))
  places = ('p', 'q', 'a', 'b', 'c', 'd', 'e')
  parents = (None, 0, 1, 2, 1, 4, 5)
  colours = (BLUE, BLUE, ORANGE, ORANGE, GREEN, GREEN, PINK)
  columns = ((0, 1, 2, 3), (0, 1, 4, 5), (0, 1, 4, 5, 6))
  figure, axis = new_axis(10, 3.6, (-1.6, 20.2), (-7.2, 1.2))
  axis.text(0, 0.7, 'Rows', fontsize=11, weight='bold')
  for index, (row, own) in enumerate(zip(rows, columns)):
    axis.text(-0.15, -0.7 - index, f'row {index + 1}', ha='right', va='center')
    for t, (text, place) in enumerate(zip(row, own)):
      box(axis, t, -1.1 - index, 1, 0.8, text, colours[place], 'white')
  axis.text(0, -4.5, 'Their bin', fontsize=11, weight='bold')
  for place, text in enumerate(places):
    box(axis, place, -5.7, 1, 0.8, text, colours[place], 'white')
  for child, parent in ((2, 1), (4, 1)):
    bend = {'arrowstyle': '-|>', 'color': '#555555', 'connectionstyle': 'arc3,rad=-.5'}
    axis.annotate('', xy=(parent + 0.6, -5.75), xytext=(child + 0.5, -5.75), arrowprops=bend)
  axis.text(0, -7.1, 'The token before a and before c is q.', size=9)
  axis.text(9, 0.7, 'What each token attends to', fontsize=11, weight='bold')
  for query, text in enumerate(places):
    path = {query}
    while parents[min(path)] is not None:
      path.add(parents[min(path)])
    axis.text(8.85, -0.7 - query * 0.9, text, ha='right', va='center')
    for key in range(len(places)):
      colour = colours[key] if key in path else GREY
      box(axis, 9 + key, -1.1 - query * 0.9, 1, 0.8, '', colour)
  for key, text in enumerate(places):
    axis.text(9.5 + key, -6.95, text, ha='center', va='center')
  axis.text(16.4, -1.4, '7 places for\n13 tokens', va='center', size=10)
  save(figure, 'forest')


def draw_architecture():
  """Draws the folders of the package in the order of their imports."""
  figure, axis = new_axis(10, 6.5, (0, 20), (0, 13))
  rows = (
      (('cli', 'the command'),),
      (
          ('training', 'loop, learner, update,\ncheckpoints'),
          ('evaluation', 'scores, statistics,\nremote models'),
          ('planning', 'does a run fit?'),
          ('serving', "OpenAI's API,\nagent programs"),
      ),
      (
          ('rollout', 'agent, sampler,\nengine, pipeline'),
          ('assembly', 'names in the config\nbecome objects'),
          ('monitoring', 'metrics, health,\nreport'),
          ('atif', 'trajectories of\nHarbor'),
      ),
      (
          ('envs', 'environments, tools,\nrewards, adapters'),
          ('retrieval', 'BM25, dense, HTTP'),
          ('distributed', 'hosts, devices'),
      ),
      (
          ('settings', 'rules of the settings,\nthe objective'),
          ('config', 'the settings'),
          ('models', 'decoder, families,\nLoRA, experts'),
          ('data', 'files to tasks and\nconversations'),
      ),
      (
          ('systems', 'one file per\npublished system'),
          ('algorithms', 'advantages, losses,\nratios, correction'),
          ('text', 'tokenizer, templates,\ncalls'),
          ('net', 'HTTP'),
      ),
      (('types, plugins', 'Task, Turn, Episode, TurnBatch'),),
  )
  colours = ('#555555', BLUE, GREEN, PINK, ORANGE, RED, '#777777')
  height = 1.45
  for index, (row, colour) in enumerate(zip(rows, colours)):
    bottom = 11.4 - index * 1.85
    width = 20 / len(row)
    for column, (name, text) in enumerate(row):
      left = column * width
      patch = plt.Rectangle((left + 0.1, bottom), width - 0.2, height, facecolor=colour)
      axis.add_patch(patch)
      middle = left + width / 2
      axis.text(
          middle,
          bottom + height - 0.33,
          name,
          ha='center',
          va='center',
          color='white',
          weight='bold',
          fontsize=9.5,
      )
      axis.text(
          middle,
          bottom + (height - 0.6) / 2,
          text,
          ha='center',
          va='center',
          color='white',
          fontsize=8,
      )
    if index:
      arrow(axis, (10, bottom + 1.85), (10, bottom + height))
  save(figure, 'architecture')


def main():
  matplotlib.use('Agg')
  plt.rcParams |= {'font.family': 'DejaVu Sans', 'font.size': 9}
  draw_segments()
  draw_clip()
  draw_update()
  draw_forest()
  draw_architecture()


if __name__ == '__main__':
  main()
