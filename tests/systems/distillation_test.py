"""On-policy distillation: the advantage by hand, a teacher in a folder and behind an address."""

import contextlib
import dataclasses
import http.server
import json
import math
import os
import socket
import tempfile
import threading
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized
import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stppo_jax import config as schema
from stppo_jax import types
from stppo_jax.algorithms import variants
from stppo_jax.models import convert
from stppo_jax.models import decoder
from stppo_jax.monitoring import timing
from stppo_jax.rollout import prepare
from stppo_jax.stop_signal import StopSignal
from stppo_jax.systems import distillation
from stppo_jax.training import learner as learner_lib
from stppo_jax.training import loop
from stppo_jax.training import minibatches
from stppo_jax.training import run as run_lib
from stppo_jax.training import state as train_state
from stppo_jax.training import teacher as teacher_lib
from stppo_jax.training import update
from tests.support import tiny_run
from tests.training import update_test

ROW = variants.VARIANTS['distillation']


class AdvantageTest(absltest.TestCase):

  def test_by_hand(self):
    teacher_logp = jnp.log(jnp.array([[0.5, 0.25, 0.9, 1e-30]]))
    old_logp = jnp.log(jnp.array([[0.5, 0.5, 0.1, 0.5]]))
    mask = jnp.array([[1.0, 1.0, 0.0, 1.0]])
    got = distillation.token_advantages(teacher_logp, old_logp, mask)
    np.testing.assert_allclose(got, [[0, -math.log(2), 0, -20]], rtol=1e-6)

  def test_expected_gradient_is_that_of_the_reverse_kl(self):
    # Two tokens, p = (1/2, 1/2), teacher q = (1/4, 3/4): A = (log 1/2, log 3/2), and the gradient
    # for the first logit is 1/4 (log 1/2 - log 3/2) = -.2747.
    teacher = jnp.log(jnp.array([0.25, 0.75]))

    def kl_of(logits):
      logp = jax.nn.log_softmax(logits)
      return jnp.sum(jnp.exp(logp) * (logp - teacher))

    def expected_objective(logits):
      logp = jax.nn.log_softmax(logits)
      old_logp = jax.lax.stop_gradient(logp)
      mask = jnp.ones((1, 2))
      advantages = distillation.token_advantages(teacher[None], old_logp[None], mask)[0]
      return jnp.sum(jnp.exp(old_logp) * advantages * logp)

    gradient = jax.grad(expected_objective)(jnp.zeros(2))
    np.testing.assert_allclose(gradient, [-0.27465307, 0.27465307], rtol=1e-5)
    for logits in (jnp.zeros(2), jnp.array([0.3, -1.2])):
      expected = -jax.grad(kl_of)(logits)
      np.testing.assert_allclose(jax.grad(expected_objective)(logits), expected, rtol=1e-5)


class StepTest(parameterized.TestCase):

  def annotated(self, row, seed):
    """Returns (functions, state, batch with advantages, metrics); the teacher has this seed."""
    spec = update_test.make_spec(row=row, critic=None)
    spec = dataclasses.replace(spec, teacher=update_test.MODEL, teacher_coef=0.5)
    mesh = update_test.one_device()
    state = update_test.make_state(spec, mesh)
    self.teacher = decoder.init(jax.random.key(seed), update_test.MODEL)
    self.frozen = train_state.Frozen(teacher=self.teacher)
    functions = update.compile_functions(spec, state, self.frozen, mesh)
    batch = update_test.make_batch()
    batch = update_test.annotate(functions, spec, state, batch, frozen=self.frozen)
    state, batch, metrics = functions.with_advantages(state, batch)
    return spec, functions, state, batch, metrics

  def test_teacher_that_is_the_student_changes_nothing(self):
    spec, functions, state, batch, metrics = self.annotated(ROW, seed=1)  # as `first_state`
    self.assertEqual(metrics['actor/teacher_kl'], 0)
    np.testing.assert_array_equal(batch.advantages, np.zeros(batch.advantages.shape))
    before = jax.tree.map(jnp.copy, state.actor)
    state, metrics, _ = update_test.step(functions, spec, state, batch, frozen=self.frozen)
    self.assertEqual(metrics['stppo/grad_norm'], 0)
    chex.assert_trees_all_equal(state.actor, before)

  def test_teacher_logp_is_the_model_s(self):
    spec, _, _, batch, metrics = self.annotated(ROW, seed=7)
    expected, _ = update_test.log_probs(spec, self.teacher, batch)
    mask = batch.action_mask
    np.testing.assert_allclose(batch.teacher_logp * mask, expected * mask, atol=1e-5)
    gap = (expected - batch.old_logp) * mask
    np.testing.assert_allclose(batch.advantages, 0.5 * gap, atol=1e-5)
    np.testing.assert_allclose(metrics['actor/teacher_kl'], -gap.sum() / mask.sum(), rtol=1e-4)

  def test_added_to_the_advantages_of_a_row(self):
    row = variants.VARIANTS['grpo']
    _, _, _, batch, _ = self.annotated(row, seed=7)
    _, _, _, alone, _ = self.annotated(ROW, seed=7)
    spec = update_test.make_spec(row=row, critic=None)
    mesh = update_test.one_device()
    functions = update_test.functions_of(spec, mesh)
    state = update_test.make_state(spec, mesh)
    without = update_test.annotate(functions, spec, state, update_test.make_batch())
    self.assertIsNone(without.teacher_logp)
    _, without, metrics = functions.with_advantages(state, without)
    self.assertNotIn('actor/teacher_kl', metrics)
    self.assertGreater(float(jnp.abs(without.advantages).max()), 0)
    both = without.advantages + alone.advantages
    np.testing.assert_allclose(batch.advantages, both, atol=1e-6)


class RunTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.folder = self.enterContext(tempfile.TemporaryDirectory())
    self.enterContext(tiny_run.on_one_device())
    tiny_run.write(self.folder)
    self.teacher = os.path.join(self.folder, 'teacher')
    tiny_run.write_model(self.teacher, tiny_run.ACTIONS[2:3], strength=1.5)

  def make_config(self, **values):
    values = {'algorithm.variant': 'distillation', 'teacher.folder': self.teacher} | values
    return tiny_run.make_config(self.folder, **values)

  def train(self, name, **values):
    """The metrics of a run's updates."""
    workdir = os.path.join(self.folder, name)
    values = {'train.checkpoint_every': 0, 'eval.every': 0} | values
    with tiny_run.updates_compiled_ahead():
      loop.start(self.make_config(**values), workdir)
    with open(os.path.join(workdir, 'metrics.jsonl'), encoding='utf-8') as file:
      rows = [json.loads(line) for line in file]
    return [row for row in rows if 'actor/teacher_kl' in row]

  @pytest.mark.slow
  def test_kl_falls_with_address_or_folder(self):
    rows = self.train('folder', **{'train.updates': 10})
    kl = [row['actor/teacher_kl'] for row in rows]
    self.assertLen(kl, 10)
    self.assertLess(sum(kl[-3:]), 0.5 * sum(kl[:3]))

    model, params = convert.load_hf(self.teacher)
    params = jax.device_put(params)

    @jax.jit
    def logp_of(row):
      x, _ = decoder.trunk(params, model, row)
      logp, _ = decoder.token_logp(params, model, x, row)
      return logp[0]

    def score(tokens):
      row = np.zeros((1, 192), np.int32)
      row[0, : len(tokens)] = tokens
      return np.asarray(logp_of(row))

    tokenizer = prepare.load_tokenizer(self.make_config())
    with recorded_server() as server:
      server.score = score
      server.tokens = tokenizer.encode(teacher_lib._PROBE)
      address = {'teacher.address': server.address, 'teacher.model': 'large'}
      served = self.train('address', **{'train.updates': 2, 'teacher.folder': ''} | address)
    self.assertLen(served, 2)
    for name in ('actor/teacher_kl', 'critic/advantages/min', 'actor/pg_loss', 'stppo/grad_norm'):
      for expected, got in zip(rows, served):
        np.testing.assert_allclose(got[name], expected[name], rtol=1e-3, atol=1e-6, err_msg=name)

  @pytest.mark.slow
  def test_stop_during_scoring_repeats_the_batch(self):
    """Also where the batch was sampled ahead, by parameters that are gone at the resumption."""
    tokenizer = prepare.load_tokenizer(self.make_config())
    server = self.enterContext(recorded_server())
    server.tokens = tokenizer.encode(teacher_lib._PROBE)
    values = {'train.updates': 3, 'teacher.folder': '', 'pipeline.staleness': 1}
    values |= {'teacher.address': server.address, 'teacher.model': 'large'}
    expected = self.train('whole', **values)

    in_update_2 = 2 + (len(server.bodies) - 2) // 3 + 1  # two requests are those of the check
    server.bodies.clear()
    stopping = threading.Event()
    released = threading.Event()
    score = server.score

    def score_or_freeze(tokens):
      if len(server.bodies) >= in_update_2 and not released.is_set():
        stopping.set()
        released.wait(60)
      return score(tokens)

    server.score = score_or_freeze
    config = self.make_config(**values | {'train.checkpoint_every': 0, 'eval.every': 0})
    loop.start(config, os.path.join(self.folder, 'stopped'), StopSignal(stopping.is_set))
    self.assertTrue(stopping.is_set())
    released.set()
    got = self.train('stopped', **values)
    self.assertLen(got, 3)
    for name in ('actor/teacher_kl', 'actor/pg_loss', 'stppo/grad_norm', 'pipeline/staleness'):
      self.assertEqual([row[name] for row in got], [row[name] for row in expected], name)

  def load_inputs(self):
    variant, parts = run_lib.check(self.make_config())
    run_lib.load_inputs(parts, variant)

  def test_other_tokenizer_is_refused(self):
    path = os.path.join(self.teacher, 'tokenizer.json')
    with open(path, encoding='utf-8') as file:
      text = file.read()
    with open(path, 'w', encoding='utf-8') as file:
      file.write(text.replace('<answer> red</answer>', '<answer> tea</answer>'))
    with self.assertRaisesRegex(types.UserError, 'teacher.folder.*another tokenizer'):
      self.load_inputs()
    os.remove(path)
    os.remove(os.path.join(self.teacher, 'tokenizer_config.json'))
    with self.assertRaisesRegex(types.UserError, 'holds no tokenizer'):
      self.load_inputs()

  @parameterized.parameters(
      ({'teacher.folder': ''}, 'no advantage but that of a teacher'),
      ({'teacher.address': 'http://h/v1', 'teacher.model': 'm'}, 'two teachers'),
      ({'teacher.address': 'ftp://h', 'teacher.model': 'm'}, 'give http://HOST:PORT/v1'),
      ({'teacher.address': 'http://h/v1'}, 'need each other'),
      ({'teacher.coef': 0.0}, 'above 0'),
      ({'algorithm.variant': 'dpo', 'rollout.group_size': 4}, 'compares rows'),
      ({'rollout.top_p': 0.9, 'algorithm.old_logp': 'sampler'}, 'uncut distribution'),
      ({'algorithm.kl_in': 'reward'}, 'reads no rewards'),
      (
          {
              'algorithm.variant': 'grpo',
              'rollout.group_size': 4,
              'algorithm.mask_zero_advantage': True,
          },
          'would drop nothing',
      ),
      (
          {
              'teacher.folder': '',
              'teacher.address': 'http://h/v1',
              'teacher.model': 'm',
              'rollout.temperature': 0.7,
          },
          'log-probs at temperature 1',
      ),
  )
  def test_contradictions_are_refused(self, values, words):
    with self.assertRaisesRegex(types.UserError, words):
      run_lib.check(self.make_config(**values))


class Recorded(http.server.BaseHTTPRequestHandler):
  """Answers as vLLM with `self.server.score`, log-probs of tokens. A text is `server.tokens`."""

  def do_POST(self):
    body = json.loads(self.rfile.read(int(self.headers['Content-Length'])))
    self.server.bodies.append(body)
    prompt = body['prompt']
    tokens = self.server.tokens if isinstance(prompt, str) else prompt
    scored = [None]
    logp = self.server.score(tokens)
    for token, x in list(zip(tokens, logp))[1:]:
      entry = {'logprob': float(x), 'rank': 1, 'decoded_token': '?'}
      scored.append({str(token): entry})
    scored = scored[: self.server.most]
    status = self.server.status
    if len(tokens) + body['max_tokens'] > self.server.context:
      status = 400
    answer = json.dumps({'choices': [{'index': 0, 'text': 'x', 'prompt_logprobs': scored}]})
    self.send_response(status)
    self.end_headers()
    self.wfile.write(answer.encode())

  def log_message(self, *args):
    pass


@contextlib.contextmanager
def recorded_server():
  server = http.server.ThreadingHTTPServer(('127.0.0.1', 0), Recorded)
  server.tokens, server.bodies, server.most, server.status = [], [], None, 200
  server.context = 1_000_000
  server.score = lambda tokens: [-token / 100 for token in tokens]
  server.address = f'http://127.0.0.1:{server.server_port}/v1'
  thread = threading.Thread(target=server.serve_forever, daemon=True)
  thread.start()
  try:
    yield server
  finally:
    server.shutdown()
    server.server_close()
    thread.join()


class ServerTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    self.server = self.enterContext(recorded_server())
    self.client = teacher_lib.TeacherServer(self.server.address, 'large', max_outage_s=0.2)
    self.enterContext(mock.patch.object(teacher_lib, '_FIRST_WAIT_S', 0.01))

  def test_log_probs_are_at_their_tokens(self):
    turn = types.Turn(np.array([5, 6], np.int32), np.zeros(2, np.float32))
    prompt = np.array([3, 4], np.int32)
    episode = types.Episode(types.Task('a'), 0, prompt, [turn])
    failed = dataclasses.replace(episode, failed=True)
    batch = update_test.make_batch(rows=4, length=6)
    batch = self.client.batch_logp([failed, episode], batch, None)
    expected = np.zeros((4, 6), np.float32)
    expected[1, :4] = [0, -0.04, -0.05, -0.06]
    np.testing.assert_allclose(batch.teacher_logp, expected)
    (body,) = self.server.bodies
    self.assertEqual(body['prompt'], [3, 4, 5, 6])
    self.assertEqual((body['model'], body['prompt_logprobs']), ('large', 0))

  def test_tokenizers_are_compared(self):
    tokenizer = prepare.load_tokenizer(schema.Config())
    self.server.tokens = list(tokenizer.encode(teacher_lib._PROBE))
    self.client.check_tokenizer(tokenizer)
    self.assertFalse(self.server.bodies[0]['add_special_tokens'])
    self.server.tokens[5] += 1
    with self.assertRaisesRegex(types.UserError, 'another tokenizer'):
      self.client.check_tokenizer(tokenizer)
    self.server.tokens = self.server.tokens[:-1]
    with self.assertRaisesRegex(types.UserError, 'another tokenizer'):
      self.client.check_tokenizer(tokenizer)

  def test_failures_are_one_line(self):
    self.server.most = 2
    with self.assertRaisesRegex(types.RunError, 'scored other tokens than the 3'):
      self.client.row_logp([1, 2, 3])
    self.server.status = 400
    with self.assertRaisesRegex(types.RunError, 'rejected a request .HTTP status 400'):
      self.client.row_logp([1, 2, 3])
    self.server.status = 503
    with self.assertRaisesRegex(types.RunError, 'gave no answer for 0.2 s .HTTP status 503'):
      self.client.row_logp([1, 2, 3])

  def test_an_outage_is_waited_for(self):
    self.client = teacher_lib.TeacherServer(self.server.address, 'large')
    self.server.status = 503

    def recover(signal, seconds):
      self.server.status = 200
      return False

    with mock.patch.object(StopSignal, 'wait', recover):
      self.assertEqual(self.client.row_logp([1, 2, 3]), [0, -0.02, -0.03])
    self.assertLen(self.server.bodies, 2)

  def test_a_context_must_hold_one_token_more(self):
    tokenizer = prepare.load_tokenizer(schema.Config())
    self.server.tokens = list(tokenizer.encode(teacher_lib._PROBE))
    self.server.context = 100
    self.client.check(tokenizer, 99)
    with self.assertRaisesRegex(types.UserError, 'max_total=100 tokens.*400.*101 tokens or more'):
      self.client.check(tokenizer, 100)

  def test_server_down_at_start_is_refused(self):
    self.enterContext(mock.patch.object(teacher_lib, '_START_S', 0.05))
    self.server.status = 503
    with self.assertRaisesRegex(types.UserError, 'gave no answer for 0.05 s'):
      self.client.check(prepare.load_tokenizer(schema.Config()), 9)


class FrozenTest(absltest.TestCase):
  """A server that accepts connections and answers nothing."""

  def setUp(self):
    super().setUp()
    listener = self.enterContext(socket.create_server(('127.0.0.1', 0), backlog=64))
    self.address = f'http://127.0.0.1:{listener.getsockname()[1]}/v1'
    turn = types.Turn(np.array([5, 6], np.int32), np.zeros(2, np.float32))
    prompt = np.array([3, 4], np.int32)
    self.episodes = [types.Episode(types.Task('a'), i, prompt, [turn]) for i in range(64)]
    self.batch = update_test.make_batch(rows=64, length=6)

  def test_a_stop_ends_all_requests(self):
    client = teacher_lib.TeacherServer(self.address, 'large')
    asked = []
    is_set = lambda: asked.append(0) or len(asked) > 40
    client.stop_signal = StopSignal(is_set)  # after 32 threads have begun
    with self.assertRaises(types.Stopped):
      client.batch_logp(self.episodes, self.batch, None)
    self.assertLess(len(asked), 200)  # the rows that wait for a thread do not start

  def test_an_outage_ends_with_one_error(self):
    self.enterContext(mock.patch.object(teacher_lib, '_TOTAL_S', 0.1))
    client = teacher_lib.TeacherServer(self.address, 'large', max_outage_s=0.2)
    with self.assertRaisesRegex(types.RunError, 'gave no answer for 0.2 s'):
      client.batch_logp(self.episodes, self.batch, None)


class MissingTest(absltest.TestCase):

  def test_row_without_a_teacher_trains_on_nothing(self):
    spec = update_test.make_spec(row=ROW, critic=None)
    functions = update_test.functions_of(spec, update_test.one_device())
    state = update_test.make_state(spec, update_test.one_device())
    with self.assertRaisesRegex(ValueError, 'has no teacher'):
      functions.with_advantages(state, update_test.make_batch())

  def test_a_server_that_fails_leaves_all_policies_whole(self):
    """The rows of all policies are scored before the first state gives up its buffers."""
    functions = mock.Mock()
    teacher = mock.Mock()
    teacher.batch_logp.side_effect = [mock.DEFAULT, types.RunError('gone')]
    spec = update_test.make_spec(row=ROW, critic=None)
    mesh = update_test.one_device()
    bins = minibatches.Bins(2, 1, 2, (8,), 0, None)
    states = {'asker': mock.Mock(), 'answerer': mock.Mock()}
    learners = learner_lib.Learners(
        spec, update_test.NOTHING, mesh, functions, bins, states, 0, teacher
    )
    turn = types.Turn(np.array([5, 6], np.int32), np.zeros(2, np.float32))
    prompt = np.array([3], np.int32)
    episodes = [types.Episode(types.Task('a'), i, prompt, [turn]) for i in range(4)]
    for i, episode in enumerate(episodes):
      episode.role = ('asker', 'answerer')[i % 2]
    with self.assertRaisesRegex(types.RunError, 'gone'):
      learners.update(mock.Mock(number=1, episodes=episodes), timing.Timing())
    self.assertEqual(teacher.batch_logp.call_count, 2)
    self.assertEqual(functions.mock_calls, [])


if __name__ == '__main__':
  absltest.main()
