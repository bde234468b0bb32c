"""Speed of a whole PPO step beside tunix's `PPOLearner`: same weights, prompts, optimizer, arithmetic.

  python -m benchmarks.step --tunix_python=PATH              # on a machine that does nothing else
  python -m benchmarks.step --tunix_python=PATH --quick      # does the script work?
  python -m benchmarks.step --sizes=2.9M,20M,47M --threads=1 --tunix_python=PATH
  python -m benchmarks.step --profile                        # where our time goes, and no peer

A step: 32 prompts of 64 tokens, 128 sampled after each, no early stop; log-probs of the policy and
values of the critic; token-level GAE (gamma = lambda = 1), whitened; one optimizer step of the actor
and one of the critic on all rows (clip .2, value clip .5, token mean, no KL, clip of the norm
at 1, AdamW). Tokens a second count prompts and sampled tokens. Log-probs and gradients are computed some
rows at a time, which changes the speed alone: both sides are measured with each of --micro_batches.

Before anything is timed, both sides make a step on greedy episodes. Log-probs and values of other
text must agree before it, and so must what the step changed of them.

What differs: our critic's head has a bias; ours has the sampler's log-probs at hand, the norms of the
gradients and some forty metrics more; tunix turns prompts from text into ids. Embeddings are not tied,
because tunix's critic is an actor whose output layer has been replaced.
"""

import tempfile

from absl import app
import numpy as np

from benchmarks import side_by_side

LEARNING_RATE = 1e-5


def main(unused_argv):
  if not side_by_side.PROFILE.value and side_by_side.tunix_left_out('step'):
    return
  side_by_side.run_all(run)


def run(size, threads, quick, repeats):
  """The figure of one size and thread setting."""
  rows, num_prompt, num_new = (4, 16, 16) if quick else (32, 64, 128)
  shape = rows, num_prompt, num_new, LEARNING_RATE
  sizes = side_by_side.micro_batches(rows)
  with tempfile.TemporaryDirectory() as folder:
    start_ours = lambda micro: side_by_side.Worker(
        threads, 'benchmarks.ours', 'PpoStep', size, folder, *shape, micro
    )
    start_peer = lambda micro: side_by_side.Worker(
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
    side_by_side.report_fastest(
        'step', f'PPO step, {rows} x ({num_prompt} + {num_new})', size, threads, found, 'tunix'
    )
    for worker in [*ours.values(), *peer.values()]:
      worker.close()


def check_same_step(ours, peer, prompts, completions):
  """Raises unless log-probs and values agree, and what a step on greedy episodes does to them."""
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
