"""Engines in other processes: turns, pushes of weights, failures, and training with our gateway."""

from concurrent import futures
import contextlib
import dataclasses
import functools
import http.server
import json
import os
import pathlib
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized
import jax
import numpy as np
import pytest
import safetensors.numpy

from benchmarks import servers as servers_lib
from stppo_jax import config as schema
from stppo_jax import types
from stppo_jax.assembly import agents
from stppo_jax.assembly import components
from stppo_jax.data import tasks as tasks_lib
from stppo_jax.distributed import hosts
from stppo_jax.envs import factory
from stppo_jax.models import convert
from stppo_jax.models import decoder
from stppo_jax.models import lora
from stppo_jax.models import sharding
from stppo_jax.net import http_client
from stppo_jax.rollout import engines as engines_lib
from stppo_jax.rollout import env_pool
from stppo_jax.rollout import episode as episode_lib
from stppo_jax.rollout import prepare
from stppo_jax.rollout import remote
from stppo_jax.rollout import sampling
from stppo_jax.rollout import servers
from stppo_jax.rollout import weight_folders
from stppo_jax.serving import gateway
from stppo_jax.serving import scheduler as scheduler_lib
from stppo_jax.settings import objective
from stppo_jax.settings import validation
from stppo_jax.stop_signal import NEVER
from stppo_jax.stop_signal import StopSignal
from stppo_jax.text import tokenizer as tokenizer_lib
from stppo_jax.training import loop
from tests.support import tiny_run
from tests.support.processes import wait_for

pytestmark = pytest.mark.guests(
    what='Routes of vLLM and SGLang',
    version='vLLM 0.32.0 and SGLang, with stand-ins',
    date='2026-11-24',
    touches='rollout/engines.py rollout/remote.py rollout/servers.py',
)

ROOT = pathlib.Path(__file__).parents[2]
TWO_PROCESSES = """
from tests.support import tiny_run

def get_config():
  config = tiny_run.make_config({folder!r}, train__updates=3, pipeline__staleness=2)
  config.mesh.fsdp = 2
  config.rollout.engine_kind = 'stppo'
  return config
"""
VOCAB = 100
EOS = 9
STOP_TABLE = tokenizer_lib.stop_automaton([bytes([i]) for i in range(VOCAB)], ('\x05\x06',))
STOP_TABLE[:, EOS] = len(STOP_TABLE) - 1
REQUEST = servers.TurnRequest((1, 2), 8, ('\x05\x06',), sampling.AS_IS)


class FakeApi:
  """An engine that answers what a test says. `weights` is the folder that it has loaded."""

  def __init__(self, answer=None, keeps_labels=True):
    self.answer = answer or (lambda request: servers.TurnAnswer([1, EOS], [-0.5, -0.5], 'stop'))
    self.keeps_labels = keeps_labels
    self.is_down = False
    self.weights = 'start'
    self.name = 'default'
    self.loads = []
    self.sampled = []  # (request, weights)
    self.in_progress = 0

  def restart(self):
    self.weights = 'start'
    self.name = 'default'

  def _check(self):
    if self.is_down:
      raise http_client.Temporary('ConnectionError', is_silent=True)

  def sample(self, send, request):
    del send
    self._check()
    self.in_progress += 1
    try:
      self.sampled.append((request, self.weights))
      return self.answer(request)
    finally:
      self.in_progress -= 1

  def load(self, send, folder, label):
    del send
    self._check()
    assert not self.in_progress, 'weights change while a turn is sampled'
    assert os.path.isfile(os.path.join(folder, 'weights.json')), folder
    self.weights = os.path.basename(folder)
    self.name = label
    self.loads.append(self.weights)

  def resume(self, send):
    del send
    self._check()

  def labels(self, send):
    del send
    self._check()
    return [self.name if self.keeps_labels else '']


def write_numbers(params, folder):
  os.makedirs(folder)
  with open(os.path.join(folder, 'weights.json'), 'w', encoding='utf-8') as file:
    json.dump(np.asarray(params['w']).tolist(), file)


def write_file(path):
  os.makedirs(os.path.dirname(path), exist_ok=True)
  pathlib.Path(path).write_text('x', encoding='utf-8')


def parameters(number):
  return {'w': np.full(2, number)}


class FleetTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.folder = os.path.join(self.enterContext(tempfile.TemporaryDirectory()), 'weights')
    self.enterContext(mock.patch.object(remote, '_RETRY_S', 0.05))
    self.enterContext(mock.patch.object(remote, '_POLL_S', 0.01))
    self.enterContext(mock.patch.object(remote, '_IDLE_S', 3600.0))
    self.enterContext(mock.patch.object(remote, '_START_S', 0.3))
    self.enterContext(mock.patch.object(remote, '_PROBE_S', 0.1))

  def fleet(self, *apis, push_at='turn', outage_s=60.0, rows=4, stop_signal=NEVER, folder=None):
    addresses = [f'http://e{i}' for i in range(len(apis))]
    settings = schema.RolloutSettings(max_total=32, engine=','.join(addresses))
    settings.engine_push = push_at
    settings.engine_outage_s = outage_s
    folders = weight_folders.WeightFolders(folder or self.folder, 3, 2, write_numbers)
    fleet = remote.Fleet(settings, apis[0], folders, STOP_TABLE, ('\x05\x06',), rows, stop_signal)
    for engine, api in zip(fleet.engines, apis):
      engine._api = api
    self.enterContext(fleet)
    self.copy = folders.copy
    return fleet

  def test_turn_records_version_of_its_weights(self):
    api = FakeApi()
    fleet = self.fleet(api)
    first = self.copy(parameters(0))
    self.assertEqual(fleet.sample(REQUEST, first, 0).version, 3)
    second = self.copy(parameters(1))
    self.assertEqual(fleet.sample(REQUEST, first, 0).version, 4)  # the newest
    self.assertEqual(second.version, 4)
    self.assertEqual([weights for _, weights in api.sampled], ['000003', '000004'])

  def test_batch_keeps_its_version(self):
    api = FakeApi()
    fleet = self.fleet(api, push_at='batch')
    first = self.copy(parameters(0))
    second = self.copy(parameters(1))
    for weights in (first, first, second, first):
      self.assertEqual(fleet.sample(REQUEST, weights, 0).version, weights.version)
    self.assertEqual(api.loads, ['000003', '000004', '000003'])

  def test_equal_parameters_are_written_once(self):
    self.fleet(FakeApi())
    params = parameters(0)
    self.assertEqual(self.copy(params), self.copy(dict(params)))
    self.assertNotEqual(self.copy(params), self.copy(parameters(0)))

  def test_old_folders_are_deleted(self):
    self.fleet(FakeApi())
    for number in range(5):
      self.copy(parameters(number))
      self.assertLessEqual(len(os.listdir(self.folder)), 2)
    self.assertEqual(sorted(os.listdir(self.folder)), ['000006', '000007'])

  def test_folders_of_a_killed_run_are_deleted(self):
    os.makedirs(os.path.join(self.folder, '000001'))
    fleet = self.fleet(FakeApi())
    self.assertFalse(os.path.exists(self.folder))
    self.copy(parameters(0))
    fleet.__exit__()
    self.assertFalse(os.path.exists(self.folder))

  def test_files_of_others_stay(self):
    """Folders that the user has, and those of another run."""
    root = os.path.dirname(self.folder)
    names = ['thesis/a.txt', '000001/b.txt', 'run-0123456789abcdef/000001/c.txt']
    for name in names:
      write_file(os.path.join(root, name))
    folder = weight_folders.folder_of_run(root, os.path.join(root, 'work'))
    self.assertEqual(folder, weight_folders.folder_of_run(root, os.path.join(root, 'work')))
    self.assertNotEqual(folder, weight_folders.folder_of_run(root, os.path.join(root, 'work2')))
    with self.fleet(FakeApi(), folder=folder):
      self.copy(parameters(0))
      self.assertEqual(os.listdir(folder), ['000003'])
      write_file(os.path.join(folder, '20261124-notes', 'd.txt'))
    self.assertEqual(os.listdir(folder), ['20261124-notes'])
    for name in names:
      self.assertTrue(os.path.exists(os.path.join(root, name)), name)

  @parameterized.parameters('copied', 'moved', 'damaged')
  def test_copied_run_folder_has_separate_weights(self, how):
    """A copy must not remove the weights of a run that trains."""
    root = os.path.dirname(self.folder)
    first, second = os.path.join(root, 'a'), os.path.join(root, 'b')
    folder = weight_folders.folder_of_run(root, first)
    self.assertEqual(weight_folders.folder_of_run(root, first), folder)
    if how == 'copied':
      shutil.copytree(first, second)
    elif how == 'moved':
      os.rename(first, second)
    else:
      second = first
      write_file(os.path.join(first, 'weights_id'))
    other = weight_folders.folder_of_run(root, second)
    self.assertNotEqual(other, folder)
    self.assertEqual(weight_folders.folder_of_run(root, second), other)
    self.assertRegex(os.path.basename(other), '^run-[0-9a-f]{16}$')

  @parameterized.parameters(True, False)
  def test_restarted_engine_gets_weights_before_it_samples(self, keeps_labels):
    api = FakeApi(keeps_labels=keeps_labels)
    fleet = self.fleet(api)
    weights = self.copy(parameters(0))
    fleet.sample(REQUEST, weights, 0)
    api.is_down = True
    failures = []
    check = api._check

    def come_back_after_failures():
      try:
        check()
      except http_client.Temporary as error:
        failures.append(error)
        if len(failures) == 3:
          api.restart()
          api.is_down = False
        raise

    api._check = come_back_after_failures
    fleet.sample(REQUEST, weights, 0)
    self.assertEqual([weights for _, weights in api.sampled], ['000003', '000003'])

  def test_restart_between_two_turns_is_noticed(self):
    api = FakeApi()
    fleet = self.fleet(api)
    weights = self.copy(parameters(0))
    fleet.sample(REQUEST, weights, 0)
    self.enterContext(mock.patch.object(remote, '_IDLE_S', 0.0))
    fleet.sample(REQUEST, weights, 0)  # the label says that nothing changed
    self.assertEqual(api.loads, ['000003'])
    api.restart()
    turn = fleet.sample(REQUEST, weights, 0)
    self.assertEqual(turn.version, 3)
    self.assertEqual([weights for _, weights in api.sampled], ['000003'] * 3)

  @parameterized.parameters(True, False)
  def test_weights_of_another_run_are_an_error(self, is_first):
    """Its labels have the form of ours. A new run may replace those of an earlier one."""
    api = FakeApi()
    fleet = self.fleet(api)
    weights = self.copy(parameters(0))
    if not is_first:
      fleet.sample(REQUEST, weights, 0)
    api.name = '0123abcd-7'
    self.enterContext(mock.patch.object(remote, '_IDLE_S', 0.0))
    if is_first:
      self.assertEqual(fleet.sample(REQUEST, weights, 0).version, 3)
    else:
      with self.assertRaisesRegex(types.RunError, 'another run has replaced the weights'):
        fleet.sample(REQUEST, weights, 0)

  def test_failure_after_question_is_not_lost(self):
    """A turn fails while the engine is asked for its label."""
    api = FakeApi()
    fleet = self.fleet(api)
    weights = self.copy(parameters(0))
    (engine,) = fleet.engines
    engine.ensure(weights)
    engine._version = remote._UNKNOWN
    labels = api.labels

    def tell_and_restart(send):
      answer = labels(send)
      api.labels = labels
      api.restart()
      with self.assertRaises(http_client.Temporary), engine._failures():
        raise http_client.Temporary('ConnectionError')
      return answer

    api.labels = tell_and_restart
    fleet.sample(REQUEST, weights, 0)
    self.assertEqual([weights for _, weights in api.sampled], ['000003'])
    self.assertEqual(api.loads, ['000003', '000003'])

  def test_end_of_run_waits_for_push(self):
    begun, continues = threading.Event(), threading.Event()
    api = FakeApi()

    def slow_load(unused_send, unused_folder, label):
      begun.set()
      continues.wait(10)
      api.name = label

    api.load = slow_load
    fleet = self.fleet(api)
    weights = self.copy(parameters(0))
    threading.Thread(target=fleet.sample, args=(REQUEST, weights, 0)).start()
    begun.wait(10)
    threading.Timer(0.1, continues.set).start()
    fleet.__exit__()
    self.assertNotEqual(api.name, 'default')

  def test_new_run_distrusts_labels_of_earlier_runs(self):
    api = FakeApi()
    for _ in range(2):
      with self.fleet(api, push_at='batch') as fleet:
        fleet.sample(REQUEST, self.copy(parameters(0)), 0)
    self.assertEqual(api.loads, ['000003', '000003'])

  def test_busy_engine_is_asked_again_without_push(self):
    answers = iter([http_client.Temporary('HTTP status 429', is_busy=True)])

    def answer(unused_request):
      for error in answers:
        raise error
      return servers.TurnAnswer([EOS], [-0.5], 'stop')

    api = FakeApi(answer, keeps_labels=False)
    fleet = self.fleet(api, push_at='batch')
    fleet.sample(REQUEST, self.copy(parameters(0)), 0)
    self.assertLen(api.loads, 1)

  @parameterized.parameters(True, False)
  def test_outage_ends_run(self, is_down):
    """Also of an engine that only tells its label."""
    api = FakeApi(mock.Mock(side_effect=http_client.Temporary('HTTP status 500')))
    fleet = self.fleet(api, outage_s=0.2)
    weights = self.copy(parameters(0))
    api.is_down = is_down
    with self.assertRaisesRegex(types.RunError, 'engine_outage_s'):
      fleet.sample(REQUEST, weights, 0)

  def test_version_is_newest_with_existing_folder(self):
    fleet = self.fleet(FakeApi())
    self.copy(parameters(0))
    rename = os.rename
    newest = []

    def rename_later(source, target):
      newest.append(fleet.folders.newest.version)
      rename(source, target)

    with mock.patch.object(os, 'rename', rename_later):
      self.copy(parameters(1))
    self.assertEqual(newest, [3])

  def test_each_engine_is_tried_before_an_outage(self):
    dead = FakeApi()
    fleet = self.fleet(dead, FakeApi(), outage_s=0.0)
    weights = self.copy(parameters(0))
    dead.is_down = True
    self.assertEqual(fleet.sample(REQUEST, weights, 0).version, 3)

  def test_answers_of_other_turns_end_an_outage(self):
    """One turn is never answered while others are."""
    late = dataclasses.replace(REQUEST, ids=(9,))

    def answer(request):
      if request.ids == late.ids:
        time.sleep(0.1)
        raise http_client.Temporary('ReadTimeout', is_silent=True)
      return servers.TurnAnswer([EOS], [-0.5], 'stop')

    fleet = self.fleet(FakeApi(answer), outage_s=0.8)
    fleet.settings.engine_timeout_s = 0.1
    weights = self.copy(parameters(0))
    errors = []

    def sample_late():
      try:
        fleet.sample(late, weights, 0)
      except types.RunError as error:
        errors.append(str(error))

    thread = threading.Thread(target=sample_late)
    thread.start()
    while thread.is_alive():
      fleet.sample(REQUEST, weights, 0)
    self.assertRegex(errors[0], 'engine_timeout_s')

  def test_stop_ends_wait_for_engine(self):
    api = FakeApi()
    stops = StopSignal()
    fleet = self.fleet(api, stop_signal=stops)
    weights = self.copy(parameters(0))
    api.is_down = True
    threading.Timer(0.1, stops.set).start()
    with self.assertRaises(types.Stopped):
      fleet.sample(REQUEST, weights, 0)

  def test_push_waits_for_turns_in_progress(self):
    begun, goes_on = threading.Event(), threading.Event()

    def answer(unused_request):
      begun.set()
      goes_on.wait(10)
      return servers.TurnAnswer([EOS], [-0.5], 'stop')

    api = FakeApi(answer)
    fleet = self.fleet(api)
    first = self.copy(parameters(0))
    turns = []
    threads = [
        threading.Thread(target=lambda: turns.append(fleet.sample(REQUEST, first, 0)))
        for _ in range(2)
    ]
    threads[0].start()
    begun.wait(10)
    self.copy(parameters(1))
    threads[1].start()  # its push waits
    time.sleep(0.1)
    self.assertLen(api.sampled, 1)
    goes_on.set()
    for thread in threads:
      thread.join(10)
    self.assertEqual(sorted(turn.version for turn in turns), [3, 4])

  def test_rejection_ends_run_with_its_text(self):
    def answer(unused_request):
      raise http_client.Rejected(400, 'the prompt is too long')

    fleet = self.fleet(FakeApi(answer))
    with self.assertRaisesRegex(types.RunError, 'status 400: the prompt is too long'):
      fleet.sample(REQUEST, self.copy(parameters(0)), 0)

  @parameterized.named_parameters(
      ('eos', [1, EOS], 2),
      ('stop_string', [5, 6], 2),
      ('later_tokens_are_cut', [5, 6, 7, 8], 2),
      ('budget', [1] * 8, 8),
  )
  def test_turn_ends_where_our_automaton_stops(self, tokens, length):
    answer = servers.TurnAnswer(tokens, [-1.0] * len(tokens), 'stop')
    turn = remote.make_turn(answer, REQUEST, STOP_TABLE, 'http://e')
    self.assertEqual(turn.tokens.tolist(), tokens[:length])
    self.assertLen(turn.logp, length)

  @parameterized.named_parameters(
      ('early', [1, 2], [-1.0, -1.0], 'eos'),
      ('empty', [], [], 'another model'),
      ('more_than_asked', [1] * 9, [-1.0] * 9, 'another model'),
      ('lengths', [EOS], [-1.0, -1.0], 'another model'),
      ('no_log_probs', [EOS], [], 'another model'),
      ('unknown_id', [VOCAB], [-1.0], 'another model'),
      ('negative_id', [-1], [-1.0], 'another model'),
      ('no_id', [None], [-1.0], 'another model'),
  )
  def test_answer_that_is_no_turn_is_refused(self, tokens, logp, message):
    answer = servers.TurnAnswer(tokens, logp, 'stop')
    with self.assertRaisesRegex(types.RunError, message):
      remote.make_turn(answer, REQUEST, STOP_TABLE, 'http://e')

  @parameterized.parameters(
      (-9999.0, '-9999.0'),  # vLLM's minus infinity
      (-101, '-101'),
      (float('-inf'), '-inf'),
      (float('nan'), 'nan'),
      (None, 'None'),
      (0.5, '0.5'),
      ('-1', "'-1'"),
  )
  def test_turn_with_impossible_log_prob_is_sampled_again(self, logp, shown):
    """The run ends if it stays so, and tells why. A token behind the stop does not matter."""
    bad = servers.TurnAnswer([1, EOS], [-0.5, logp], 'stop')
    good = servers.TurnAnswer([1, EOS, 4], [-0.5, 1e-7, logp], 'stop')
    answers = iter([bad] * 3)
    api = FakeApi(lambda request: next(answers, good))
    fleet = self.fleet(api)
    turn = fleet.sample(REQUEST, self.copy(parameters(0)), 0)
    self.assertEqual(turn.logp.tolist(), [-0.5, 0.0])
    self.assertLen(api.sampled, 4)
    self.assertLen(api.loads, 1)  # the engine has not failed
    api.answer = lambda request: bad
    line = f'reported {shown} as the log-prob of token 2 of 2 .id 9.*processed_logprobs'
    with self.assertRaisesRegex(types.RunError, line):
      fleet.sample(REQUEST, fleet.folders.newest, 0)

  def test_engine_without_an_answer_holds_back_nobody(self):
    """It accepts connections and answers nothing, as a stopped process does."""
    listener = self.enterContext(socket.create_server(('127.0.0.1', 0)))
    self.enterContext(mock.patch.object(remote, '_QUESTION_S', 0.2))
    api = FakeApi()
    fleet = self.fleet(api, api)
    frozen = fleet.engines[0]
    frozen._api = servers.VllmApi()
    frozen.address = f'http://127.0.0.1:{listener.getsockname()[1]}'
    weights = self.copy(parameters(0))
    questions = []
    send = frozen._send
    frozen._send = lambda *args: (questions.append(args), send(*args))

    def play(index):
      for _ in range(30):
        self.assertEqual(fleet.sample(REQUEST, weights, index).version, 3)

    with futures.ThreadPoolExecutor(4) as pool:
      list(pool.map(play, range(4)))
    self.assertLen(api.sampled, 120)
    self.assertBetween(len(questions), 1, 8)  # not one per turn
    self.assertTrue(all(total_s == 0.2 for total_s, *_ in questions))

  def test_one_turn_at_once_tries_hanging_engine(self):
    """It tells its label, and answers no turn, as with a GPU that hangs."""
    begun = []

    def hang(request):
      begun.append(request)
      highest.append(hanging.in_progress)
      time.sleep(0.1)
      raise http_client.Temporary('ReadTimeout', is_silent=True)

    hanging, alive, highest = FakeApi(hang), FakeApi(), []
    fleet = self.fleet(hanging, alive)
    fleet.engines[0]._turn_s = 0.1
    weights = self.copy(parameters(0))
    with futures.ThreadPoolExecutor(4) as pool:
      for _ in range(8):
        list(pool.map(lambda index: fleet.sample(REQUEST, weights, 2 * index), range(4)))
    self.assertLen(alive.sampled, 32)
    self.assertEqual(max(highest[4:], default=1), 1)
    self.assertLess(len(begun), 12)
    hanging.answer = alive.answer
    fleet.engines[0]._retry_at = 0.0
    with futures.ThreadPoolExecutor(4) as pool:
      while len(hanging.sampled) < len(begun) + 4:  # it is back
        list(pool.map(lambda index: fleet.sample(REQUEST, weights, 2 * index), range(4)))

  def test_turn_leaves_engine_during_long_push(self):
    self.enterContext(mock.patch.object(remote, '_PASS_ON_S', 0.1))
    begun, continues = threading.Event(), threading.Event()
    self.addCleanup(continues.set)
    slow, quick = FakeApi(), FakeApi()
    load = slow.load
    slow.load = lambda *args: (begun.set(), continues.wait(10), load(*args))
    fleet = self.fleet(slow, quick)
    weights = self.copy(parameters(0))
    with futures.ThreadPoolExecutor(3) as pool:
      first = pool.submit(fleet.sample, REQUEST, weights, 0)
      self.assertTrue(begun.wait(10))
      for turn in [pool.submit(fleet.sample, REQUEST, weights, 0) for _ in range(2)]:
        self.assertEqual(turn.result(10).version, 3)
      self.assertFalse(first.done())
      continues.set()
      first.result(10)
    self.assertLen(quick.sampled, 2)

  def test_aborted_turn_is_sampled_again(self):
    answers = iter([servers.TurnAnswer([1], [-1.0], 'abort')])
    last = servers.TurnAnswer([EOS], [-0.5], 'stop')
    api = FakeApi(lambda request: next(answers, last))
    fleet = self.fleet(api)
    turn = fleet.sample(REQUEST, self.copy(parameters(0)), 0)
    self.assertEqual(turn.tokens.tolist(), [EOS])

  @parameterized.parameters(0, 2)
  def test_run_plays_every_sequence_in_its_context(self, threads):
    """A token is the sum of its context, modulo the small ids: each sequence has one outcome."""

    def next_token(context):
      return 10 + sum(context) % 50

    def answer(request):
      return servers.TurnAnswer([next_token(request.ids), EOS], [-1.0, -1.0], 'stop')

    def respond(completions):
      prompts = []
      for completion in completions:
        turns[completion.index].append(completion.turn.tokens.tolist())
        budget = 8 if len(turns[completion.index]) < 3 else 0
        prompts.append(env_pool.Prompt([completion.index], budget))
      return prompts

    fleet = self.fleet(FakeApi(answer), FakeApi(answer), rows=3)
    sampler = remote.RemoteSampler(fleet, sampling.AS_IS)
    prompts = [env_pool.Prompt([i, 1], 8 if i != 2 else 0) for i in range(7)]
    turns = [[] for _ in prompts]
    keys = jax.random.split(jax.random.key(0), len(prompts))
    report = remote.run(sampler, self.copy(parameters(0)), prompts, keys, respond, threads)
    for i, played in enumerate(turns):
      if i == 2:
        self.assertEmpty(played)
        continue
      context = [i, 1]
      for tokens in played:
        self.assertEqual(tokens, [next_token(context), EOS])
        context += [*tokens, i]
      self.assertLen(played, 3)
    self.assertEqual(report.sampled_tokens, 6 * 3 * 2)

  @parameterized.parameters(0, 2)
  def test_wait_for_environments_is_no_decoding(self, threads):
    clock = [0.0]

    def respond(completions):
      time.sleep(0.2)  # the run waits for it in the meantime
      clock[0] += 1.0
      return [env_pool.Prompt([], 0) for _ in completions]

    api = FakeApi(lambda request: servers.TurnAnswer([EOS], [-1.0], 'stop'))
    sampler = remote.RemoteSampler(self.fleet(api), sampling.AS_IS)
    keys = jax.random.split(jax.random.key(0), 1)
    with mock.patch.object(remote.time, 'perf_counter', lambda: clock[0]):
      weights = self.copy(parameters(0))
      report = remote.run(sampler, weights, [env_pool.Prompt([1], 8)], keys, respond, threads)
    self.assertEqual((clock[0], report.seconds['decode']), (1.0, 0.0))

  def test_error_of_an_environment_ends_run(self):
    def respond(unused_completions):
      raise types.RunError('no')

    fleet = self.fleet(FakeApi())
    sampler = remote.RemoteSampler(fleet, sampling.AS_IS)
    prompts = [env_pool.Prompt([1], 8)] * 3
    keys = jax.random.split(jax.random.key(0), 3)
    with self.assertRaisesRegex(types.RunError, 'no'):
      remote.run(sampler, self.copy(parameters(0)), prompts, keys, respond)

  @parameterized.named_parameters(
      ('same', 0.0, 0.7, None),
      ('raw_log_probs', 0.0, 1.0, 'processed_logprobs'),
      ('other_weights', 0.5, 0.7, 'weights that it did not load'),
  )
  def test_probe_names_likely_cause(self, offset, reported, cause):
    """Our log-prob of a token at temperature t is -t."""

    def answer(unused_request):
      return servers.TurnAnswer([1, EOS], [-reported - offset] * 2, 'stop')

    fleet = self.fleet(FakeApi(answer))
    check = functools.partial(
        remote.check_agreement,
        remote.RemoteSampler(fleet, sampling.Distribution(0.7)),
        self.copy(parameters(0)),
        [[1, 2], [3]],
        lambda tokens, temperature: np.full(tokens.shape, -temperature),
    )
    if cause is None:
      self.assertAlmostEqual(check(), 0, places=6)
      return
    with self.assertRaisesRegex(types.UserError, cause):
      check()

  def test_probe_of_absent_engine_is_an_error(self):
    api = FakeApi()
    fleet = self.fleet(api)
    api.is_down = True
    with self.assertRaisesRegex(types.UserError, 'start it'):
      score = lambda tokens, temperature: np.zeros(tokens.shape)
      sampler = remote.RemoteSampler(fleet, sampling.AS_IS)
      remote.check_agreement(sampler, self.copy(parameters(0)), [[1]], score)

  def check(self, fleet, at_start, reported=0.5, distribution=sampling.AS_IS):
    """Compares with a trainer whose log-probs are -temperature / 2."""
    sampler = remote.RemoteSampler(fleet, distribution)
    score = lambda tokens, temperature: np.full(tokens.shape, -temperature * reported)
    return remote.check_agreement(sampler, self.copy(parameters(0)), [[1]], score, at_start)

  def test_probe_waits_for_engine_that_loads_its_model(self):
    api = FakeApi()
    fleet = self.fleet(api)
    api.is_down = True
    threading.Timer(0.2, lambda: setattr(api, 'is_down', False)).start()
    self.enterContext(mock.patch.object(remote, '_START_S', 60.0))
    self.assertEqual(self.check(fleet, at_start=True), 0)

  def test_probe_in_a_run_leaves_out_absent_engine(self):
    dead = FakeApi()
    fleet = self.fleet(dead, FakeApi())
    dead.is_down = True
    self.assertEqual(self.check(fleet, at_start=False), 0)
    with self.assertRaisesRegex(types.RunError, 'nats per token'):
      self.check(fleet, at_start=False, reported=0.1)
    fleet.engines[1]._api.is_down = True
    self.assertIsNone(self.check(fleet, at_start=False))

  def test_probe_of_cut_distribution_has_another_temperature(self):
    """At temperature 1 it would not see raw log-probs."""
    fleet = self.fleet(FakeApi())  # answers -1/2 at each temperature
    with self.assertRaisesRegex(types.UserError, 'processed_logprobs'):
      self.check(fleet, at_start=True, distribution=sampling.Distribution(top_p=0.9))


class HttpFaultsTest(parameterized.TestCase):
  """Faults of a real server, as `RemoteEngine` sees them."""

  def setUp(self):
    super().setUp()
    self.faults = []  # functions of the handler, for the next turns
    self.questions = []  # the same for the next questions
    self.paths = []
    self.blocks = threading.Event()
    test = self
    choice = {'token_ids': [9], 'logprobs': {'token_logprobs': [-0.5]}, 'finish_reason': 'stop'}

    class Handler(http.server.BaseHTTPRequestHandler):

      def do_POST(self):
        self.rfile.read(int(self.headers['Content-Length']))
        test.paths.append(self.path)
        if self.path == '/collective_rpc':
          test.blocks.wait(10)
        if self.path == '/v1/completions' and test.faults:
          test.faults.pop(0)(self)
          return
        answer_with(self, 200, json.dumps({'choices': [choice]}))

      def do_GET(self):
        if test.questions:
          test.questions.pop(0)(self)
          return
        answer_with(self, 200, '{}')

      def log_message(self, *unused):
        pass

    server = http.server.ThreadingHTTPServer(('127.0.0.1', 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    self.addCleanup(server.server_close)
    self.addCleanup(server.shutdown)
    self.addCleanup(self.blocks.set)
    address = f'http://127.0.0.1:{server.server_port}/v1'
    self.stops = StopSignal()
    self.enterContext(mock.patch.dict(os.environ, {'OPENAI_API_KEY': 'key'}))
    api = servers.APIS['vllm']()
    self.engine = remote.RemoteEngine(address, api, 60.0, '0123abcd', self.stops)
    self.weights = weight_folders.RemoteWeights(3, '/weights/000003')

  def limit_turns(self, turn_s):
    self.engine._turn_s = turn_s
    self.engine._send_turn = functools.partial(self.engine._send, turn_s)

  def sample(self):
    return self.engine.sample(REQUEST, lambda: self.weights)

  @parameterized.named_parameters(
      ('no_answer', lambda handler: time.sleep(2), 'ReadTimeout|ConnectionError', 0.0),
      ('closed', lambda handler: handler.connection.close(), 'failed', 0.0),
      ('half', lambda handler: answer_with(handler, 200, '{"cho', 99), 'failed', 0.0),
      ('no_json', lambda handler: answer_with(handler, 200, '<html>'), 'KeyError', 0.0),
      ('no_turn', lambda handler: answer_with(handler, 200, '{"choices": []}'), 'IndexError', 0.0),
      ('failure', lambda handler: answer_with(handler, 503, 'it loads'), '503: it loads', 0.0),
      ('busy', lambda handler: answer_with(handler, 429, '', seconds=50), '429', 40.0),
  )
  def test_fault_is_temporary(self, fault, message, wait_s):
    self.enterContext(mock.patch.object(remote, '_RETRY_S', 30.0))  # the test ends the waits
    self.enterContext(mock.patch.object(http_client, '_MARGIN_S', 60.0))
    self.blocks.set()
    self.assertEqual(self.sample()[0].tokens, [9])
    self.faults.append(fault)
    if 'ReadTimeout' in message:
      self.limit_turns(0.5)
    with self.assertRaisesRegex(http_client.Temporary, message) as raised:
      self.sample()
    with self.assertRaisesRegex(http_client.Temporary, message):
      self.sample()  # sends nothing
    self.assertGreater(self.engine._retry_at - time.monotonic(), wait_s)
    self.engine._retry_at = 0.0
    self.limit_turns(60.0)
    self.paths.clear()
    self.assertEqual(self.sample()[0].tokens, [9])
    self.assertEqual('/collective_rpc' not in self.paths, raised.exception.is_busy)

  def test_redirect_does_not_get_the_key(self):
    self.blocks.set()
    self.faults.append(lambda handler: answer_with(handler, 302, '', location='http://e.invalid/'))
    with self.assertRaisesRegex(types.RunError, 'status 302'):
      self.sample()

  def test_proxies_of_the_environment_are_not_used(self):
    self.blocks.set()
    proxies = {'HTTP_PROXY': 'http://127.0.0.1:9', 'http_proxy': 'http://127.0.0.1:9'}
    with mock.patch.dict(os.environ, proxies | {'NO_PROXY': '', 'no_proxy': ''}):
      self.assertEqual(self.sample()[0].tokens, [9])

  def drip(self, handler):
    """Sends a byte of the header now and then."""
    while not self.blocks.wait(0.1):
      handler.wfile.write(b'H')

  @parameterized.parameters('questions', 'faults')
  def test_answer_byte_by_byte_has_a_limit(self, place):
    """Each byte restarts the time limit of a socket."""
    self.enterContext(mock.patch.object(remote, '_QUESTION_S', 1.0))
    self.limit_turns(1.0)
    self.engine._send_load = lambda path, body: (
        {} if path == '/collective_rpc' else remote.RemoteEngine._send_load(self.engine, path, body)
    )
    getattr(self, place).append(self.drip)
    with self.assertRaisesRegex(http_client.Temporary, 'no complete answer'):
      self.sample()

  @parameterized.parameters('questions', 'faults')
  def test_stop_ends_a_wait_for_an_answer(self, place):
    self.limit_turns(300.0)
    if place == 'faults':
      self.engine._version = 3
      self.engine.answered_at = time.monotonic() + 60
    getattr(self, place).append(lambda handler: self.blocks.wait(20))
    threading.Timer(0.2, self.stops.set).start()
    with self.assertRaises(types.Stopped):
      self.sample()
    self.assertFalse(self.blocks.is_set())

  def test_stop_ends_a_load_that_hangs(self):
    self.engine._stop_signal = StopSignal(lambda: '/collective_rpc' in self.paths)
    with self.assertRaises(types.Stopped):
      self.sample()
    self.assertFalse(self.blocks.is_set())
    wait_for(lambda: self.paths[-1] == '/resume')


def answer_with(handler, status, text, length=None, seconds=None, location=None):
  """Answers a request with the first bytes of `length`."""
  data = text.encode()
  handler.send_response(status)
  handler.send_header('Content-Length', str(len(data) if length is None else length))
  if seconds is not None:
    handler.send_header('Retry-After', str(seconds))
  if location is not None:
    handler.send_header('Location', location)
  handler.end_headers()
  handler.wfile.write(data)


class FolderTest(absltest.TestCase):
  """The folders that engines load."""

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    cls.model, cls.params = convert.load_hf(prepare.EMBEDDED_MODEL)

  def setUp(self):
    super().setUp()
    self.folder = self.enterContext(tempfile.TemporaryDirectory())

  def tensors(self, name):
    return safetensors.numpy.load_file(os.path.join(self.folder, name))

  def test_adapters_change_weights_as_merge_does(self):
    """W + alpha / r B A of the adapter's files, for each kernel of the merged folder."""
    scale = 3.0
    adapters = lora.init(jax.random.key(0), self.params, 2, lora.TARGETS)
    rng = np.random.default_rng(0)
    adapters = jax.tree.map(lambda x: rng.standard_normal(x.shape).astype(np.float32), adapters)
    combined = lora.combine(self.params, adapters)
    lora.save_peft(os.path.join(self.folder, 'a'), lora.adapters(combined), scale)
    convert.save_hf(os.path.join(self.folder, 'base'), self.model, self.params)
    merged = lora.merge(combined, {}, scale)
    convert.save_hf(os.path.join(self.folder, 'merged'), self.model, merged)
    with open(os.path.join(self.folder, 'a', 'adapter_config.json'), encoding='utf-8') as file:
      settings = json.load(file)
    self.assertEqual(settings['lora_alpha'] / settings['r'], scale)
    adapter = self.tensors('a/adapter_model.safetensors')
    base = self.tensors('base/model.safetensors')
    expected = self.tensors('merged/model.safetensors')
    num_changed = 0
    for name, weight in base.items():
      prefix = 'base_model.model.' + name.removesuffix('.weight')
      if f'{prefix}.lora_A.weight' in adapter:
        a = adapter[f'{prefix}.lora_A.weight']
        b = adapter[f'{prefix}.lora_B.weight']
        weight = weight + scale * b @ a
        num_changed += 1
      np.testing.assert_allclose(weight, expected[name], atol=1e-4, err_msg=name)
    self.assertEqual(2 * num_changed, len(adapter))
    self.assertEqual(num_changed, self.model.num_layers * len(lora.TARGETS))

  def test_untied_folder_is_the_same_policy(self):
    convert.save_hf(self.folder, *decoder.untied(self.model, self.params))
    model, params = convert.load_hf(self.folder)
    self.assertFalse(model.tie_embeddings)
    tokens = np.arange(12, dtype=np.int32)[None]
    expected, _ = decoder.forward(self.params, self.model, tokens, None)
    logits, _ = decoder.forward(params, model, tokens, None)
    np.testing.assert_allclose(logits, expected, atol=1e-5)

  def test_trainer_scores_probes_with_any_kernel(self):
    """The kernel of a TPU takes no row of 79 tokens, and runs on the devices of one mesh alone."""
    tokens = np.arange(79, dtype=np.int32)[None]
    score = lambda model, params: jax.jit(functools.partial(engines_lib._score, model))(
        params, tokens, 0.7
    )
    expected = score(self.model, self.params)
    model = dataclasses.replace(self.model, attention='splash')
    mesh = sharding.make_mesh(1, 2, 1, jax.devices()[:2])
    placed = jax.device_put(self.params, sharding.tree_shardings(self.params, mesh))
    for params in (self.params, placed):
      np.testing.assert_allclose(score(model, params), expected, atol=1e-4)


class ProbePromptsTest(absltest.TestCase):

  def test_tasks_whose_reset_raises_are_passed_over(self):
    class Levels:
      uses_global_random = False

      def __init__(self, task):
        self.task = task

      def reset(self, seed=None):
        if int(self.task.id) < 3:
          raise FileNotFoundError('no level')
        return f'level {self.task.id}', {}

    config = schema.Config()
    tokenizer = prepare.load_tokenizer(config)
    env = factory.make_factory('mine:Levels', Levels, {}, {})
    agent = mock.Mock(config=config, tokenizer=tokenizer, env=env)
    tasks = [types.Task(str(i)) for i in range(20)]
    prompts = engines_lib.RemoteAgent._probe_prompts(agent, tasks)
    texts = [tokenizer.decode(ids) for ids in prompts]
    self.assertEqual(texts, [f'level {i}' for i in range(3, 3 + remote.NUM_PROBES)])
    with self.assertRaisesRegex(types.UserError, r"^no task [^\n]*no level [^\n]*on task '2'"):
      engines_lib.RemoteAgent._probe_prompts(agent, tasks[:3])


class AloneTest(absltest.TestCase):
  """Process 0 plays for all, and exchanges nothing meanwhile."""

  def setUp(self):
    super().setUp()
    self.enterContext(mock.patch.object(jax, 'process_count', lambda: 2))

  def test_threads_of_the_environments_are_alone_too(self):
    numbers = []

    def respond(completions):
      numbers.append(hosts.num_processes())
      return [env_pool.Prompt((), 0)] * len(completions)

    turn = types.Turn(np.zeros(1, np.int32), np.zeros(1, np.float32))
    self.assertEqual(hosts.num_processes(), 2)
    with hosts.alone(), env_pool.EnvPool(respond, 2) as pool:
      pool.step([env_pool.TurnCompletion(0, turn)])
      futures.wait(pool.in_progress, 60)  # the end of the pool cancels what has not begun
    self.assertEqual(numbers, [1])
    self.assertEqual(hosts.num_processes(), 2)

  def test_all_processes_raise_the_error_of_the_first(self):
    self.enterContext(mock.patch.object(hosts, 'share', lambda value: [value, value]))
    for error in (types.UserError('a'), types.RunError('b'), types.Stopped('c')):

      def fail(error=error):
        raise error

      with self.assertRaisesRegex(type(error), str(error)):
        hosts.by_writer(fail)


class StatefulEngine:
  """vLLM's routes. The route that `failing` names fails once."""

  def __init__(self):
    self.failing = ''
    self.label = self.weights = self.cached = ''
    self.is_paused = False

  def send(self, path, body):
    path = path.partition('?')[0]
    fails = path == self.failing
    if fails:
      self.failing = ''
    if fails and path != '/reset_prefix_cache':
      raise http_client.Temporary('HTTP status 500')
    if path == '/weight_info':
      return {'weight_version': self.label}
    if path == '/update_weight_version':
      self.label = body['new_version']
    elif path in ('/pause', '/resume'):
      self.is_paused = path == '/pause'
    elif path == '/collective_rpc':
      self.weights = body['kwargs']['weights_path']
    elif path == '/reset_prefix_cache':
      self.cached = self.cached if fails else self.weights
      return {'success': not fails}
    return {}


class ApiTest(parameterized.TestCase):
  """The routes, as requests and answers."""

  def test_sglang(self):
    sent = []

    def send(path, body):
      sent.append((path, body))
      return {
          '/generate': {
              'text': 'a',
              'meta_info': {
                  'finish_reason': {'type': 'stop', 'matched': 9},
                  'output_token_logprobs': [[-0.25, 4, None], [-0.5, 9, None]],
              },
          },
          '/update_weights_from_disk': {'success': True, 'message': ''},
          '/model_info': {'weight_version': 'a-3'},
      }.get(path, {})

    api = servers.APIS['sglang']((9,))
    self.assertEqual(api.sample(send, REQUEST), servers.TurnAnswer([4, 9], [-0.25, -0.5], 'stop'))
    self.assertEqual(sent[0][1]['input_ids'], [1, 2])
    self.assertTrue(sent[0][1]['sampling_params']['no_stop_trim'])
    self.assertEqual(sent[0][1]['sampling_params']['stop_token_ids'], [9])
    sent.clear()
    api.load(send, '/weights/000003', 'a-3')
    self.assertEqual(
        [path for path, _ in sent],
        ['/pause_generation', '/update_weights_from_disk', '/continue_generation'],
    )
    self.assertEqual(api.labels(send), ['a-3'])

  @parameterized.parameters('/resume', '/collective_rpc', '/reset_prefix_cache')
  def test_vllm_is_never_left_paused_or_wrongly_labelled(self, failing):
    """After one failure of a route, `ensure` loads again or resumes."""
    engine = StatefulEngine()
    remote_engine = self.remote_engine('vllm', engine.send)
    remote_engine.ensure(weight_folders.RemoteWeights(3, '/weights/000003'))
    engine.failing = failing
    weights = weight_folders.RemoteWeights(4, '/weights/000004')
    with self.assertRaises(http_client.Temporary):
      remote_engine.ensure(weights)
    self.assertNotEqual(engine.label, '0123abcd-3')
    self.assertEqual(engine.is_paused, failing == '/resume')  # a failed load resumes
    remote_engine.ensure(weights)
    self.assertEqual(engine.label, '0123abcd-4')
    self.assertEqual(engine.cached, '/weights/000004')
    self.assertFalse(engine.is_paused)

  def remote_engine(self, kind, send):
    api = servers.APIS[kind]()
    engine = remote.RemoteEngine('http://e', api, 60.0, '0123abcd', NEVER)
    engine._send_load = send
    return engine

  def test_label_without_resume_ends_pause(self):
    """An engine that labels its weights before the resume, as SGLang does."""
    paths = []

    def send(path, body):
      del body
      paths.append(path)
      return {'weight_version': '0123abcd-3'}

    engine = self.remote_engine('sglang', send)
    engine.ensure(weight_folders.RemoteWeights(3, '/weights/000003'))
    self.assertEqual(paths, ['/model_info', '/continue_generation'])

  def test_engine_without_labels(self):
    def send(path, body):
      raise http_client.Rejected(404, 'Not Found')

    self.assertEqual(servers.APIS['stppo']().labels(send), [''])

  def test_vllm_adapters_have_a_name_per_version(self):
    loaded = {'base', 'a-2', 'b-7'}
    models = []

    def send(path, body):
      if path == '/v1/load_lora_adapter':
        loaded.add(body['lora_name'])
      elif path == '/v1/unload_lora_adapter':
        loaded.remove(body['lora_name'])
      elif path == '/v1/models':
        return {'data': [{'id': name} for name in loaded]}
      else:
        models.append(body['model'])
        logprobs = {'token_logprobs': [-1.0]}
        return {'choices': [{'token_ids': [9], 'logprobs': logprobs, 'finish_reason': 'stop'}]}
      return {}

    api = servers.VllmAdapterApi()
    api.load(send, '/weights/000003', 'a-3')
    self.assertIn('a-3', api.labels(send))
    self.assertEqual(loaded, {'base', 'a-3', 'b-7'})  # another run's adapter stays
    api.sample(send, dataclasses.replace(REQUEST, label='a-3'))
    self.assertEqual(models, ['a-3'])

    def send_to_restarted(path, body):
      del path, body
      raise http_client.Rejected(404, 'The model `a-3` does not exist.')

    with self.assertRaises(http_client.Temporary):
      api.sample(send_to_restarted, REQUEST)


class GatewayTest(parameterized.TestCase):
  """Training with our own gateway as the engine."""

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    cls.enterClassContext(tiny_run.on_one_device())

  def make_config(self, workdir, **values):
    config = tiny_run.make_config(**values)
    config.rollout.engine_kind = 'stppo'
    config.rollout.engine_folder = os.path.join(workdir, 'weights')
    config.serve.weights_folder = config.rollout.engine_folder
    config.serve.logprobs_mode = 'processed_logprobs'
    return config

  @contextlib.contextmanager
  def engine(self, config, port=0):
    """A gateway on the untrained model; yields its address."""
    model, params = prepare.load_policy(config)
    tokenizer = prepare.load_tokenizer(config)
    sampler = gateway.make_sampler(model, tokenizer, 8, config.rollout.max_total)
    load = functools.partial(gateway._load_params, config, model)
    scheduler = scheduler_lib.Scheduler(
        sampler, params, tokenizer.token_bytes, tokenizer.eos_ids, 64, load_params=load
    )
    with gateway.running(config, scheduler, tokenizer, port) as server:
      yield server.url

  def test_greedy_episodes_equal_those_of_our_sampler(self):
    workdir = self.enterContext(tempfile.TemporaryDirectory())
    config = self.make_config(workdir, rollout__temperature=0.8)
    model, params = prepare.load_policy(config)
    params = jax.tree.map(lambda x: 1.05 * x, params)  # others than the engine's at its start
    parts = components.resolve(config)
    own = agents.make_agent(config, parts, model)
    tasks = parts.held_out
    keys = episode_lib.row_keys(jax.random.key(0), tasks)
    expected = own.play(params, tasks, keys, greedy=True)
    with self.engine(config) as config.rollout.engine:
      agent = engines_lib.with_engines(own)
      with agent.opened(workdir, 0, params, tasks, NEVER):
        played = agent.play(params, tasks, keys, greedy=True)
        sampled = agent.play(params, tasks, keys)
    self.assertEqual(len(played), len(expected))
    for ours, theirs in zip(expected, played):
      self.assertEqual(ours.unroll()[0].tolist(), theirs.unroll()[0].tolist())
      np.testing.assert_allclose(ours.unroll()[2], theirs.unroll()[2], atol=1e-5)
      self.assertEqual(ours.score, theirs.score)
    self.assertEqual({turn.version for row in sampled for turn in row.turns}, {0})

    with self.subTest('raw log-probs are refused'):
      config.serve.logprobs_mode = 'raw_logprobs'
      with self.engine(config) as config.rollout.engine:
        agent = engines_lib.with_engines(own)
        with self.assertRaisesRegex(types.UserError, 'processed_logprobs'):
          with agent.opened(workdir, 0, params, tasks, NEVER):
            pass

  @parameterized.parameters('turn', 'batch')
  @pytest.mark.slow
  def test_stale_run_trains_and_cleans_up(self, push_at):
    workdir = self.enterContext(tempfile.TemporaryDirectory())
    config = self.make_config(workdir, train__updates=4, pipeline__staleness=2)
    config.rollout.engine_push = push_at
    with self.engine(config) as address:
      config.rollout.engine = address
      loop.start(config, os.path.join(workdir, 'run'))
    self.assertEmpty(os.listdir(config.rollout.engine_folder))
    with open(os.path.join(workdir, 'run', 'metrics.jsonl'), encoding='utf-8') as file:
      records = [json.loads(line) for line in file][1:]
    ages = [record['engine/turn_age/max'] for record in records]
    self.assertBetween(max(ages), 1, 2)
    self.assertGreaterEqual(min(record['engine/turn_age/min'] for record in records), 0)
    if push_at == 'batch':  # exactly as with our own sampler: 0, 1, 2, 2
      self.assertEqual(ages, [record['pipeline/staleness'] for record in records])
    # Both sides agree on equal weights. With older weights k3 has a heavy tail and no bound.
    self.assertLess(records[0]['rollout_corr/k3_kl'], 1e-6)
    for record in records:
      self.assertLess(record['engine/gap'], 1e-5)
      self.assertNotIn('perf/rows_busy', record)  # nobody counts the steps of an engine
      self.assertNotIn('perf/prefill_tokens', record)
    with open(
        os.path.join(workdir, 'run', 'episodes', 'train_000002.jsonl'), encoding='utf-8'
    ) as file:
      self.assertIn('versions', json.loads(next(file)))

  @pytest.mark.slow
  def test_resumed_run_plays_each_question_once(self):
    """The first process stops while batches are ahead of training."""
    workdir = self.enterContext(tempfile.TemporaryDirectory())
    config = self.make_config(workdir, train__updates=6, pipeline__staleness=2)
    run_folder = os.path.join(workdir, 'run')
    last = os.path.join(run_folder, 'checkpoints', '2')
    with self.engine(config) as address:
      config.rollout.engine = address
      loop.start(config, run_folder, StopSignal(lambda: os.path.isdir(last)))
      self.assertFalse(os.path.exists(os.path.join(run_folder, 'episodes', 'train_000006.jsonl')))
      loop.start(config, run_folder)
    tasks = components.resolve(config).load_tasks('train')
    stream = tasks_lib.TaskStream(tasks, config.train.episodes, config.seed)
    for update in range(1, 7):
      path = os.path.join(run_folder, 'episodes', f'train_{update:06d}.jsonl')
      with open(path, encoding='utf-8') as file:
        played = [json.loads(line)['task'] for line in file]
      self.assertCountEqual(played, [task.id for task in stream.take(update - 1)])

  @pytest.mark.slow
  def test_random_kills_lose_no_question(self):
    command = [sys.executable, '-m', 'benchmarks.engine_kills', '--kills=4']
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900)
    self.assertEqual(done.returncode, 0, done.stderr[-3000:])
    result = json.loads(done.stdout.splitlines()[-1])
    self.assertEqual((result['lost'], result['doubled']), (0, 0))

  @pytest.mark.slow
  def test_two_processes_train_on_what_the_first_plays(self):
    workdir = self.enterContext(tempfile.TemporaryDirectory())
    config = self.make_config(workdir)
    pathlib.Path(workdir, 'experiment.py').write_text(
        TWO_PROCESSES.format(folder=tiny_run.shared_folder()), encoding='utf-8'
    )
    with self.engine(config) as address:
      command = [sys.executable, str(ROOT / 'run.py'), f'--config={workdir}/experiment.py']
      command += [f'--workdir={workdir}/run', f'--config.rollout.engine={address}']
      command += [f'--config.rollout.engine_folder={config.rollout.engine_folder}']
      command += [f'--coordinator=localhost:{servers_lib.free_port()}', '--num_processes=2']
      environment = os.environ | {'JAX_PLATFORMS': 'cpu', 'PYTHONPATH': str(ROOT)}
      environment['XLA_FLAGS'] = '--xla_force_host_platform_device_count=1'
      processes = [
          subprocess.Popen(
              [*command, f'--process_id={i}'], stderr=subprocess.PIPE, env=environment, text=True
          )
          for i in range(2)
      ]
      texts = [process.communicate(timeout=600)[1] for process in processes]
    self.assertEqual([process.returncode for process in processes], [0, 0], texts)
    records = []
    for update in (1, 2, 3):
      path = os.path.join(workdir, 'run', 'episodes', f'train_{update:06d}.jsonl')
      with open(path, encoding='utf-8') as file:
        records += [json.loads(line) for line in file]
    self.assertLen(records, 3 * 16)
    ages = [record['step'] - 1 - version for record in records for version in record['versions']]
    self.assertBetween(max(ages), 1, 2)

  def test_engine_makes_ratios_start_at_sampler(self):
    config = tiny_run.make_config()
    self.assertEqual(objective.make_variant(config).old_logp, 'trainer')
    config.rollout.engine = 'http://e'
    self.assertEqual(objective.make_variant(config).old_logp, 'sampler')
    config.algorithm.old_logp = 'trainer'
    self.assertEqual(objective.make_variant(config).old_logp, 'trainer')
    config.algorithm.old_logp = None
    config.algorithm.rollout_is = 'turn'
    self.assertEqual(objective.make_variant(config).old_logp, 'trainer')

  def test_extrapolation_is_refused(self):
    config = tiny_run.make_config(rollout__engine='http://e:1')
    config.algorithm.extrapolation = 0.3
    with self.assertRaisesRegex(types.UserError, 'extrapolation'):
      objective.make_variant(config)

  @parameterized.parameters(
      ({'rollout__engine': 'localhost:8000'}, 'give http'),
      ({'model__role_parameters': 'own'}, 'one policy'),
      ({'rollout__routing_replay': 'sampling'}, 'experts'),
      ({'rollout__replay': 'runs/x/episodes'}, 'replay'),
      ({'rollout__engine_kind': 'sglang', 'rollout__top_p': 0.9}, 'SGLang'),
      ({'rollout__engine_kind': 'sglang', 'rollout__top_k': 5}, 'SGLang'),
      ({'rollout__engine_kind': 'stppo', 'rollout__top_k': 5}, 'no top_k'),
  )
  def test_settings_without_meaning_are_refused(self, values, message):
    config = tiny_run.make_config(**{'rollout__engine': 'http://e:1', **values})
    with self.assertRaisesRegex(types.UserError, message):
      validation.validate(config)


if __name__ == '__main__':
  absltest.main()
