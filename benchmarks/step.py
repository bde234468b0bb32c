"""Speed of a whole PPO step compared with tunix's `PPOLearner`, on the same weights and prompts.

  python -m benchmarks.step --tunix_python=PATH              # on a machine that does nothing else
  python -m benchmarks.step --tunix_python=PATH --quick      # does the script work?
  python -m benchmarks.step --sizes=2.9M,20M,47M --threads=1 --tunix_python=PATH
  python -m benchmarks.step --profile                        # profiles ours, without a peer

A step: 32 prompts of 64 tokens with 128 sampled tokens each and no early stop; log-probs of the
policy and values of the critic; token-level GAE (gamma = lambda = 1), whitened; one optimizer step
each of actor and critic on all rows (clip .2, value clip .5, token mean, no KL, gradient norm
clipped at 1, AdamW). Tokens per second count prompts and sampled tokens. Log-probs and gradients
are computed in micro-batches, which change only the speed: both sides are measured with each of
--micro_batches.

Before timing, both sides do a step on greedy episodes. Log-probs and values of other text must
agree before the step, and so must their change by the step.

Differences: our critic's head has a bias. Ours also computes the sampler's log-probs, gradient
norms and about forty more metrics. tunix tokenizes the prompts. Embeddings are not tied, because
tunix's critic is an actor with another output layer.
"""

import tempfile

from absl import app
import numpy as np

from benchmarks import figures
from benchmarks import side_by_side

LEARNING_RATE = 1e-5


def main(unused_argv):
  if not side_by_side.PROFILE.value and side_by_side.tunix_left_out('step'):
    return
  side_by_side.run_all(run)


def run(size, threads, quick, repeats):
  """Measures one size and thread setting."""
  rows, num_prompt, num_new = (4, 16, 16) if quick else (32, 64, 128)
  shape = rows, num_prompt, num_new, LEARNING_RATE
  sizes = side_by_side.micro_batches(rows)
  with tempfile.TemporaryDirectory() as folder:

    def start_ours(micro):
      return side_by_side.Worker(threads, 'benchmarks.ours', 'PpoStep', size, folder, *shape, micro)

    def start_peer(micro):
      return side_by_side.Worker(
          threads,
          'benchmarks.tunix_peer',
          'PpoStep',
          folder,
          *shape,
          micro,
          first.call('value_head'),
          python=side_by_side.TUNIX_PYTHON.value,
      )

    ours = {micro: start_ours(micro) for micro in sizes}
    first = ours[sizes[0]]
    model = first.call('model')
    draw = lambda *shape: np.random.default_rng(0).integers(0, model['vocab_size'], shape)
    prompts = draw(rows, num_prompt)
    if side_by_side.PROFILE.value:
      side_by_side.print_ops(first.call('profile', 3, prompts))
      return
    peer = {micro: start_peer(micro) for micro in sizes}
    side_by_side.print_setting(size, threads, model, {'ours': first, 'tunix': peer[sizes[0]]})
    for micro in sizes:
      check_same_step(ours[micro], peer[micro], prompts, draw(rows, num_new))
    jobs = {
        (side, micro): (workers[micro], 'step', prompts)
        for micro in sizes
        for side, workers in (('ours', ours), ('peer', peer))
    }
    found = side_by_side.measure(jobs, rows * (num_prompt + num_new), repeats)
    figures.report_fastest(
        'step', f'PPO step, {rows} x ({num_prompt} + {num_new})', size, threads, found, 'tunix'
    )
    for worker in [*ours.values(), *peer.values()]:
      worker.close()


def check_same_step(ours, peer, prompts, completions):
  """Raises unless log-probs and values agree, and their changes by a step on greedy episodes."""
  before = [side.call('log_probs', prompts, completions) for side in (ours, peer)]
  for side in (ours, peer):
    side.call('step', prompts, True)
  after = [side.call('log_probs', prompts, completions) for side in (ours, peer)]
  for name, a, b, new_a, new_b in zip(('log-probs', 'values'), *before, *after):
    np.testing.assert_allclose(a, b, atol=1e-4, err_msg=f'{name} differ')
    change, gap = np.linalg.norm(new_a - a), np.linalg.norm((new_a - a) - (new_b - b))
    if not gap < 0.01 * change:
      raise RuntimeError(
          f'{name}: the step changed them by {change:.2g}, and by {gap:.2g} otherwise'
      )


if __name__ == '__main__':
  app.run(main)
