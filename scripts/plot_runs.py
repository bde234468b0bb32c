"""Draws several runs side by side: held-out exact match and training score by update.

python -m scripts.plot_runs --out=docs/st_ppo_tiny.png runs/seed0 runs/seed1 runs/seed2
"""

import os

from absl import app
from absl import flags
import matplotlib
import matplotlib.pyplot as plt

from stppo_jax.monitoring import metrics

_OUT = flags.DEFINE_string('out', 'runs.png', 'picture to write')
_CURVES = {
    'held-out exact match (greedy)': 'val-core/all/em',
    'score while training (sampled)': 'critic/score/mean',
    'searches per episode': 'env/searches/mean',
    'clipped share of tokens': 'actor/pg_clipfrac',
}


def main(workdirs):
  matplotlib.use('Agg')
  plt.rcParams |= {'font.size': 9, 'axes.spines.top': False, 'axes.spines.right': False}
  figure, axes = plt.subplots(
      1, len(_CURVES), figsize=(3 * len(_CURVES), 2.4), layout='constrained'
  )
  for workdir in workdirs[1:]:
    rows = metrics.read_metrics(workdir)
    for axis, (title, name) in zip(axes, _CURVES.items()):
      points = [(row['step'], row[name]) for row in rows if row.get(name) is not None]
      axis.plot(
          *zip(*points),
          marker='o' if len(points) < 15 else '',
          markersize=3,
          linewidth=1.2,
          label=os.path.basename(os.path.normpath(workdir)),
      )
      axis.set(title=title, xlabel='update')
  for axis in axes:
    axis.set_ylim(0, 1.05 * axis.dataLim.ymax)
  axes[0].legend(frameon=False)
  os.makedirs(os.path.dirname(_OUT.value) or '.', exist_ok=True)
  figure.savefig(_OUT.value, dpi=130)


if __name__ == '__main__':
  app.run(main)
