"""Draws one episode as a strip of tokens: turns, masked observations, ratios, and the clip.

  python run.py && python run.py --mode=export
  python -m research.draw_episode --model=runs/st_ppo_tiny/export \
      --episodes=runs/st_ppo_tiny/episodes/train_000020.jsonl --out=docs/figures/episode.png

The episode was sampled by an older policy. The ratios compare the exported policy with it.
"""

import argparse
import itertools
import json

import jax
import jax.numpy as jnp
import matplotlib
import matplotlib.colors
import matplotlib.pyplot as plt
import numpy as np

from stppo_jax.algorithms import losses
from stppo_jax.algorithms import segments
from stppo_jax.models import categorical
from stppo_jax.models import convert
from stppo_jax.models import decoder

CLIP = 0.2
TURN_COLOURS = ('#0072B2', '#009E73', '#CC79A7', '#E69F00', '#56B4E9')
MASKED = '#d9d9d9'
CLIPPED = '#D55E00'
COLUMNS = 34  # tokens in a line, at most
KEPT = 3  # tokens at each end of a long masked part
TOKEN_HEIGHT = 2.5
LINE_HEIGHT = 5.8
NORM = matplotlib.colors.TwoSlopeNorm(1.0, 0.5, 2.0)


def log_probs(model: str, records: list[dict]) -> np.ndarray:
  """Returns the log-prob [B,T] of each token under the model; column 0 is 0."""
  config, params = convert.load_hf(model)
  params = jax.tree.map(jnp.asarray, params)
  longest = max(len(record['tokens']) for record in records)
  ids = np.zeros((len(records), longest), np.int32)
  for row, record in zip(ids, records):
    row[: len(record['tokens'])] = record['tokens']
  positions = np.broadcast_to(np.arange(longest), ids.shape)

  @jax.jit
  def compute(ids, positions):
    logits, _ = decoder.forward(params, config, ids, positions)
    logp, _ = categorical.logp_and_entropy(logits[:, :-1].astype(jnp.float32), ids[:, 1:])
    return jnp.pad(logp, ((0, 0), (1, 0)))

  return np.asarray(compute(ids, positions))


def ratios(record: dict, logp: np.ndarray) -> dict[str, np.ndarray]:
  """Returns token and turn ratios, and what the clip removes with each: arrays [T]."""
  num_tokens = len(logp)
  turn_ids = np.zeros(num_tokens, np.int32)
  turn_ids[: len(record['turn_ids'])] = record['turn_ids']
  mask = (turn_ids > 0).astype(np.float32)
  old_logp = np.zeros(num_tokens, np.float32)
  old_logp[mask > 0] = record['behaviour_logp']
  advantages = np.zeros(num_tokens, np.float32)
  advantages[mask > 0] = record['advantages']
  result = {}
  for level in ('token', 'turn'):
    ids, num_segments = segments.segment_ids(level, jnp.asarray(mask)[None], turn_ids[None])
    ratio = segments.importance_ratio(
        logp[None], old_logp[None], jnp.asarray(mask)[None], ids, num_segments
    )
    _, clipped = losses.clipped_surrogate(ratio, advantages[None], CLIP, CLIP)
    result[level] = np.asarray(ratio[0])
    result[f'{level}_clipped'] = np.asarray(clipped[0] * mask) > 0
  return result


def columns_of(turn_ids: list[int]) -> list[int | None]:
  """Returns the tokens to draw, in order. None stands for the middle of a long masked part."""
  shown: list[int | None] = []
  start = 0
  for turn, run in itertools.groupby(turn_ids):
    indices = list(range(start, start + len(list(run))))
    start += len(indices)
    if turn > 0 or len(indices) <= 2 * KEPT + 1:
      shown += indices
    else:
      shown += [*indices[:KEPT], None, *indices[-KEPT:]]
  return shown


def draw(record: dict, values: dict[str, np.ndarray], out: str) -> None:
  """Writes the picture: lines of tokens, and two rows of ratios below each line."""
  plt.rcParams |= {'font.size': 9, 'font.family': 'DejaVu Sans'}
  turn_ids = record['turn_ids']
  shown = columns_of(turn_ids)
  num_lines = -(-len(shown) // COLUMNS)
  columns = -(-len(shown) // num_lines)
  figure, axis = plt.subplots(figsize=(10, 1.9 * num_lines + 0.4))
  for i, token in enumerate(shown):
    column = i % columns
    top = -LINE_HEIGHT * (i // columns)
    if token is None:
      middle = top + TOKEN_HEIGHT / 2
      axis.text(column + 0.47, middle, '…', ha='center', va='center', fontsize=14)
      continue
    turn = turn_ids[token]
    draw_token(axis, column, top, record['pieces'][token], turn)
    if turn > 0:
      for row, level in enumerate(('token', 'turn')):
        bottom = top - 1.1 * (row + 1)
        is_clipped = values[f'{level}_clipped'][token]
        draw_ratio(axis, column, bottom, values[level][token], is_clipped)
  for line in range(num_lines):
    top = -LINE_HEIGHT * line
    axis.text(-0.3, top + TOKEN_HEIGHT / 2, 'token', ha='right', va='center')
    axis.text(-0.3, top - 0.6, 'token ratio', ha='right', va='center')
    axis.text(-0.3, top - 1.7, 'turn ratio', ha='right', va='center')
  draw_legend(axis, max(turn_ids))
  axis.set(xlim=(-4, columns), ylim=(-LINE_HEIGHT * num_lines + 3.2, TOKEN_HEIGHT + 1.6))
  axis.axis('off')
  figure.savefig(out, dpi=140, bbox_inches='tight')


def draw_token(axis, column: int, top: float, piece: str, turn: int) -> None:
  """Draws a token in the colour of its turn."""
  colour = TURN_COLOURS[(turn - 1) % len(TURN_COLOURS)] if turn > 0 else MASKED
  text_colour = 'white' if turn > 0 else '#444444'
  axis.add_patch(plt.Rectangle((column, top), 0.94, TOKEN_HEIGHT, color=colour))
  text = piece.replace('\n', '⏎').strip()
  if len(text) > 9:
    text = text[:8] + '…'
  axis.text(
      column + 0.47,
      top + TOKEN_HEIGHT / 2,
      text,
      ha='center',
      va='center',
      color=text_colour,
      fontsize=7.5,
      rotation=90,
  )


def draw_ratio(axis, column: int, bottom: float, value: float, is_clipped: bool) -> None:
  """Draws a ratio, with a frame where the clip removes the gradient of its token."""
  shade = matplotlib.colormaps['PuOr_r'](NORM(value))
  is_dark = value < 0.75 or value > 1.7
  axis.add_patch(plt.Rectangle((column + 0.03, bottom + 0.05), 0.88, 0.95, facecolor=shade))
  if is_clipped:
    frame = plt.Rectangle(
        (column + 0.05, bottom + 0.09), 0.84, 0.87, fill=False, edgecolor=CLIPPED, linewidth=1.8
    )
    axis.add_patch(frame)
  axis.text(
      column + 0.47,
      bottom + 0.5,
      f'{value:.1f}',
      ha='center',
      va='center',
      fontsize=7,
      color='white' if is_dark else 'black',
  )


def draw_legend(axis, num_turns: int) -> None:
  """Explains the colours."""
  handles = [plt.Rectangle((0, 0), 1, 1, color=MASKED)]
  labels = ['prompt and search results (masked)']
  for turn in range(num_turns):
    handles.append(plt.Rectangle((0, 0), 1, 1, color=TURN_COLOURS[turn % len(TURN_COLOURS)]))
    labels.append(f'turn {turn + 1}')
  handles.append(plt.Rectangle((0, 0), 1, 1, fill=False, edgecolor=CLIPPED, linewidth=1.8))
  labels.append('the clip removes the gradient')
  axis.legend(
      handles,
      labels,
      ncols=len(labels),
      fontsize=8.5,
      columnspacing=1.2,
      loc='upper left',
      bbox_to_anchor=(0.0, 1.06),
      frameon=False,
  )


def interest(record: dict, values: dict[str, np.ndarray]) -> float:
  """Returns how well an episode shows the method.

  It should have some turns that the clip removes with turn ratios, some that it keeps, and single
  tokens that it removes with token ratios.
  """
  turn_ids = np.array(record['turn_ids'])
  turns = range(1, turn_ids.max() + 1)
  removed = [values['turn_clipped'][: len(turn_ids)][turn_ids == turn].any() for turn in turns]
  num_shown = len(columns_of(record['turn_ids']))
  if not 2 <= len(removed) <= 4 or num_shown > 2 * COLUMNS or all(removed) or not any(removed):
    return -1.0
  return float(min(values['token_clipped'].sum(), 10)) + len(removed)


def main():
  parser = argparse.ArgumentParser(description=__doc__.partition('\n')[0])
  parser.add_argument('--model', required=True)
  parser.add_argument('--episodes', required=True)
  parser.add_argument('--out', required=True)
  args = parser.parse_args()
  matplotlib.use('Agg')
  with open(args.episodes, encoding='utf-8') as file:
    records = [json.loads(line) for line in file]
  best = None
  for record, logp in zip(records, log_probs(args.model, records)):
    values = ratios(record, logp)
    score = interest(record, values)
    if best is None or score > best[0]:
      best = (score, record, values)
  draw(best[1], best[2], args.out)


if __name__ == '__main__':
  main()
