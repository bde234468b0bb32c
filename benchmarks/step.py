"""Speed of a whole PPO step beside tunix's `PPOLearner`: same weights, prompts, optimizer, arithmetic.

  python -m benchmarks.step --tunix_python=PATH              # on a machine that does nothing else
  python -m benchmarks.step --tunix_python=PATH --quick      # does the script work?
  python -m benchmarks.step --sizes=2.9M,20M,47M --threads=1 --tunix_python=PATH
  python -m benchmarks.step --profile                        # where our time goes, and no peer

A step: 32 prompts of 64 tokens, 128 sampled after each, no early stop; log-probs of the policy and
values of the critic; token-level GAE (gamma = lambda = 1), whitened; one optimizer step of the actor
and one of the critic on all rows at once (clip .2, value clip .5, token mean, no KL, clip of the norm
at 1, AdamW). Tokens a second count prompts and sampled tokens.

Before anything is timed, both sides make a step on greedy episodes. Log-probs and values of other
text must agree before it, and so must what the step changed of them.

What differs: our critic's head has a bias; ours has the sampler's log-probs at hand, the norms of the
gradients and some forty metrics more; tunix turns prompts from text into ids. Embeddings are not tied,
because tunix's critic is an actor whose output layer has been replaced.
"""

import tempfile

from absl import app
from absl import flags
import numpy as np

from benchmarks import side_by_side

_MICRO_BATCH = flags.DEFINE_integer('micro_batch', 0, 'rows of our micro-batches; 0: all at once')
LEARNING_RATE = 1e-5


def main(unused_argv):
  if not side_by_side.PROFILE.value and side_by_side.tunix_left_out('step'):
    return
  side_by_side.run_all(run)


def run(size, threads, quick, repeats):
  """The figure of one size and thread setting."""
  rows, num_prompt, num_new = (4, 16, 16) if quick else (32, 64, 128)
  shape = rows, num_prompt, num_new, LEARNING_RATE
  with tempfile.TemporaryDirectory() as folder:
    ours = side_by_side.Worker(
      threads, 'benchmarks.ours', 'PpoStep', size, folder, *shape, _MICRO_BATCH.value or rows)
    model = ours.call('model')
    draw = lambda *shape: np.random.default_rng(0).integers(0, model['vocab_size'], shape)
    prompts = draw(rows, num_prompt)
    if side_by_side.PROFILE.value:
      side_by_side.print_ops(ours.call('profile', 3, prompts))
      ours.close()
      return
    peer = side_by_side.Worker(
      threads, 'benchmarks.tunix_peer', 'PpoStep', folder, *shape, ours.call('value_head'),
      python=side_by_side.TUNIX_PYTHON.value)
    side_by_side.print_setting(size, threads, model, {'ours': ours, 'tunix': peer})
    check_same_step(ours, peer, prompts, draw(rows, num_new))
    found = side_by_side.measure(
      {'ours': (ours, 'step', prompts), 'peer': (peer, 'step', prompts)},
      rows * (num_prompt + num_new), repeats)
    side_by_side.report(
      'step', f'PPO step, {rows} x ({num_prompt} + {num_new})', size, threads, found['ours'],
      'tunix', found['peer'])
    ours.close()
    peer.close()


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
      raise RuntimeError(f'{name}: the step changed them by {change:.2g}, and by {gap:.2g} otherwise')


if __name__ == '__main__':
  app.run(main)
