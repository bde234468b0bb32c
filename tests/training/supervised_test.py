"""The warm start: demonstrations are like episodes, and disguised names cannot be memorised."""

import dataclasses
import functools
import json
import pathlib
import re
import tempfile
from unittest import mock

from absl.testing import absltest
import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax

from scripts import sft_tiny
from stppo_jax.data import tasks as task_files
from stppo_jax.models import decoder
from stppo_jax.models import sharding
from stppo_jax.rollout import prepare
from stppo_jax.text import tokenizer as chat
from stppo_jax.training import state as state_lib
from stppo_jax.training import supervised
from stppo_jax.types import RunError
from stppo_jax.types import UserError

CONFIG = decoder.ModelConfig(
    vocab_size=16,
    d_model=16,
    num_layers=1,
    num_heads=2,
    num_kv_heads=1,
    head_dim=8,
    d_ff=32,
    tie_embeddings=True,
    scan_layers=False,
)


@functools.cache
def parts():
  """(training questions, Demonstrator, Disguise, tokenizer) of the embedded model."""
  tasks = [t for t in task_files.load_tasks('embedded', 'train') if t.dataset != 'medical']
  passages = task_files.load_corpus('embedded')
  tokenizer = chat.load_tokenizer(prepare.EMBEDDED_MODEL)
  return (
      tasks,
      sft_tiny.Demonstrator(tasks, passages),
      sft_tiny.Disguise(tasks, passages, tokenizer),
      tokenizer,
  )


def good(task, demonstrator):
  """A demonstration of the task that ends in the right answer."""
  for seed in range(200):
    prompt, turns = demonstrator.play(task, np.random.default_rng(seed))
    if f'<answer> {task.answers[0]}</answer>' in turns[-1][0]:
      return prompt, turns
  raise AssertionError(f'no good demonstration of {task}')


class TrainTest(absltest.TestCase):

  def train(self, steps, length_buckets=(4, 8)):
    # Token 5 follows 3 and 4, which weigh nothing themselves.
    pool = [
        supervised.Demonstration(
            np.array([1, first, 5, 2], np.int32), np.array([0, 0, 1, 1], np.float32)
        )
        for first in (3, 4)
        for _ in range(32)
    ]
    return supervised.train(
        decoder.init(jax.random.key(0), CONFIG),
        CONFIG,
        pool,
        rows=8,
        length_buckets=length_buckets,
        steps=steps,
        optimizer=optax.adam(1e-2),
        seed=0,
    )

  def logp(self, params):
    tokens = np.array([[1, 3, 5, 2], [1, 4, 5, 2]], np.int32)
    x, _ = decoder.trunk(params, CONFIG, tokens, None)
    return np.asarray(decoder.token_logp(params, CONFIG, x, tokens)[0])

  def test_learns_what_has_weight_and_nothing_else(self):
    before, after = self.logp(self.train(0)), self.logp(self.train(60))
    self.assertLess(before[:, 2:].max(), -2)
    self.assertGreater(after[:, 2:].min(), -0.05)
    self.assertLess(after[:, 1].max(), -2)  # column 1 weighs 0: it could be known to 1 in 2

  def test_is_deterministic(self):
    a, b = (jax.device_get(self.train(3)) for _ in range(2))
    jax.tree.map(np.testing.assert_array_equal, a, b)

  def test_result_is_independent_of_bins(self):
    alone, together = (jax.device_get(self.train(3, buckets)) for buckets in ((4,), (32,)))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), alone, together)

  def test_weights_count_in_loss_and_gradient(self):
    """The loss is the weighted mean, and a step of SGD is its gradient."""
    tokens = np.array([[1, 3, 5, 2], [1, 4, 5, 2]], np.int32)
    weights = np.array([[0.3, 0.3, 1, 0], [0, 0, 0.5, 1]], np.float32)

    def loss_of(params):
      x, _ = decoder.trunk(params, CONFIG, tokens, None)
      logp, _ = decoder.token_logp(params, CONFIG, x, tokens)
      return -(logp * weights)[:, 1:].sum() / weights[:, 1:].sum()

    params = decoder.init(jax.random.key(0), CONFIG)
    expected, gradient = jax.value_and_grad(loss_of)(params)
    mesh = sharding.make_mesh(1, 1, 1, jax.devices()[:1])
    trainer = supervised.Trainer(CONFIG, state_lib.Frozen(), optax.sgd(1.0), mesh, 1, (4, 8))
    pool = [supervised.Demonstration(*row) for row in zip(tokens, weights)]
    rows = trainer.rows(pool, 2)
    state, got = trainer.step(trainer.init(jax.tree.map(jnp.copy, params)), rows)
    self.assertAlmostEqual(float(got), float(expected), places=5)
    moved = jax.tree.map(lambda a, b: a - b, params, state['actor'])
    chex.assert_trees_all_close(moved, gradient, atol=1e-5)
    self.assertAlmostEqual(trainer.loss(params, pool, 2), float(expected), places=5)

  def test_loss_that_is_not_finite_is_an_error(self):
    with mock.patch.object(supervised.Trainer, 'step', lambda self, state, rows: (state, np.nan)):
      with self.assertRaisesRegex(RunError, 'up to step 2 is not finite'):
        self.train(2)

  def test_too_few_or_too_long_rows_are_refused(self):
    with self.assertRaisesRegex(UserError, '^64 demonstrations of at most 4 tokens: at least 8'):
      self.train(1, length_buckets=(3,))

  def test_learning_rate_rises_and_falls(self):
    for steps in (1, 2, 16, 400):
      optimizer = supervised.make_optimizer(1.0, steps)
      params = {'w': np.zeros(1, np.float32)}
      state, sizes = optimizer.init(params), []
      for _ in range(steps):
        updates, state = optimizer.update({'w': np.ones(1, np.float32)}, state, params)
        sizes.append(-float(updates['w'][0]))  # a constant gradient: Adam steps by the rate itself
      self.assertAlmostEqual(max(sizes), 1, places=3)
      self.assertGreater(min(sizes), 0)

  def test_attention_is_that_of_a_run(self):
    mesh = sharding.make_mesh(1, 1, 1, jax.devices()[:1])
    chosen = lambda wanted, mesh: supervised.with_kernel(in_half, wanted, mesh, (128,)).attention
    in_half = dataclasses.replace(CONFIG, dtype='bfloat16')
    self.assertEqual(chosen('auto', mesh), 'plain')  # the kernels need an accelerator
    gpu = mock.Mock(platform='gpu', compute_capability='9.0')
    of_gpus = mock.Mock(devices=np.array([gpu]), shape={'context': 1})
    self.assertEqual(chosen('auto', of_gpus), 'cudnn')
    with self.assertRaisesRegex(UserError, "attention='cudnn' needs an NVIDIA GPU"):
      chosen('cudnn', mesh)


class DemonstrationsTest(absltest.TestCase):

  def test_every_question_can_be_demonstrated(self):
    tasks, demonstrator, _, tokenizer = parts()
    for task in tasks[::97]:
      prompt, turns = good(task, demonstrator)
      self.assertLen(re.findall('<search>', ''.join(text for text, _ in turns)), task.hops)
      row = sft_tiny.encode(tokenizer, prompt, turns)
      imitated = tokenizer.decode(row.tokens[row.weights == 1])
      self.assertEqual(imitated, ''.join(text for text, _ in turns))

  def test_disguise_renames_alike_everywhere(self):
    tasks, demonstrator, disguise, _ = parts()
    real, renamed = 0, 0
    for i, task in enumerate(tasks[::97]):
      prompt, turns = good(task, demonstrator)
      text = prompt + ''.join(turn + seen for turn, seen in turns)
      new_prompt, new_turns = disguise(prompt, turns, np.random.default_rng(i))
      new_text = new_prompt + ''.join(turn + seen for turn, seen in new_turns)
      if new_text == text:
        real += 1
        continue
      renamed += 1
      # The chain still holds: each title that is searched for stands in what comes back, and the
      # answer in the last passage.
      for turn, seen in new_turns[:-1]:
        title = re.search(r'<search> (.*?)</search>', turn)[1]
        self.assertStartsWith(seen, f'<information> {title}: ')
      answer = re.search(r'<answer> (.*?)</answer>', new_turns[-1][0])[1]
      self.assertIn(answer, new_turns[-2][1])
    self.assertGreater(renamed, 4 * real)

  def test_no_name_has_a_word_twice(self):
    """Such as 'Braga Braga'; words of earlier names may recur."""
    disguise, rng = parts()[2], np.random.default_rng(0)
    earlier = {'Paris': 'Braga', 'Rome': 'Braga City'}
    names = [disguise._new_name(earlier, rng) for _ in range(500)]
    twice = [
        name for name in names if len(set(words := re.findall('[A-Z]\\w*', name))) < len(words)
    ]
    self.assertEmpty(twice)
    self.assertGreater(sum('Braga' in name for name in names), 10)

  def test_numbers_keep_their_length(self):
    _, _, disguise, _ = parts()
    rng = np.random.default_rng(0)
    for _ in range(50):
      text = disguise._rename('in 1898 about 5,000 people, code 7.', {}, rng)
      self.assertRegex(text, r'^in [1-9]\d{3} about \d,[1-9]\d\d people, code \d\.$')


class StoredModelTest(absltest.TestCase):

  def test_tokenizer_is_that_of_the_script(self):
    tasks, demonstrator, _, _ = parts()
    folder = self.enterContext(tempfile.TemporaryDirectory())
    passages = task_files.load_corpus('embedded')
    sft_tiny.train_tokenizer(tasks, passages, demonstrator, folder)
    for name in 'tokenizer.json', 'tokenizer_config.json':
      made, stored = (
          pathlib.Path(where, name).read_text(encoding='utf-8')
          for where in (folder, prepare.EMBEDDED_MODEL)
      )
      self.assertEqual(json.loads(made), json.loads(stored))

  def test_words_of_names_are_one_token(self):
    tokenizer = parts()[3]
    titles = [p.title for p in task_files.load_corpus('embedded') if p.id[:2] in sft_tiny.KINDS]
    words = {word for title in titles for word in re.findall(r'^[A-Za-z]+$', title)}
    self.assertGreater(len(words), 800)
    split = [word for word in words if len(tokenizer.encode(' ' + word)) > 1]
    self.assertEmpty(split)


if __name__ == '__main__':
  absltest.main()
