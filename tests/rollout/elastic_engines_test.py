"""Engines that come and go during a run: where their addresses come from, and what turns meet."""

import os
import pathlib
import random
import socket
import tempfile
import threading
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized
import jax
import numpy as np

from stppo_jax import config as schema
from stppo_jax import types
from stppo_jax.rollout import directory
from stppo_jax.rollout import env_pool
from stppo_jax.rollout import remote
from stppo_jax.rollout import sampling
from stppo_jax.rollout import servers
from stppo_jax.rollout import weight_folders
from stppo_jax.settings import validation
from stppo_jax.stop_signal import StopSignal
from tests.rollout import engines_test

NEVER = StopSignal()
EOS = engines_test.EOS


def info(host):
  return socket.AF_INET, socket.SOCK_STREAM, 6, '', (host, 8000)


class DirectoryTest(parameterized.TestCase):

  def test_all_addresses_of_a_name_are_engines(self):
    infos = [info('10.0.0.2'), info('10.0.0.1'), info('10.0.0.2'), info('fd00::1')]
    with mock.patch.object(socket, 'getaddrinfo', return_value=infos) as look_up:
      found = directory.addresses('dns://engines.svc:8000, http://h:1/v1')
    look_up.assert_called_once_with('engines.svc', 8000, type=socket.SOCK_STREAM)
    self.assertEqual(
        found,
        ['http://10.0.0.1:8000', 'http://10.0.0.2:8000', 'http://[fd00::1]:8000', 'http://h:1'],
    )

  def test_a_real_name_is_found(self):
    self.assertIn('http://127.0.0.1:80', directory.addresses('dns://localhost:80'))

  def test_name_without_addresses_is_no_failure(self):
    missing = socket.gaierror(socket.EAI_NONAME, 'unknown')
    with mock.patch.object(socket, 'getaddrinfo', side_effect=missing):
      self.assertEmpty(directory.addresses('dns://engines:8000'))
    silent = socket.gaierror(socket.EAI_AGAIN, 'no name server')
    with mock.patch.object(socket, 'getaddrinfo', side_effect=silent):
      with self.assertRaises(OSError):
        directory.addresses('dns://engines:8000')

  def test_file_has_an_address_per_line(self):
    path = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()), 'engines')
    path.write_text('# rack 1\nhttp://a:1/v1/\n\n http://b:2 \nhttp://a:1\n', encoding='utf-8')
    self.assertEqual(directory.addresses(f'file:{path}'), ['http://a:1', 'http://b:2'])
    path.write_text('http://a:1\nb:2\n', encoding='utf-8')
    with self.assertRaisesRegex(ValueError, "'b:2' is no http"):
      directory.addresses(f'file:{path}')

  @parameterized.parameters(
      'dns://engines',
      'dns://:8000',
      'dns://engines:99999',
      'http://engines:99999',
      'dns://engines:0',
      'file:',
      'engines:8000',
      'http://a:1,',
  )
  def test_other_texts_are_refused_at_the_start(self, text):
    config = schema.Config()
    config.rollout.engine = text
    with self.assertRaisesRegex(types.UserError, 'dns://NAME:PORT'):
      validation.validate(config)


class ElasticFleetTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.tmp = self.enterContext(tempfile.TemporaryDirectory())
    self.list = os.path.join(self.tmp, 'engines')
    self.apis = {}  # by address
    for name, value in dict(
        _RETRY_S=0.01, _POLL_S=0.01, _RESOLVE_S=0.0, _START_S=0.3, _PROBE_S=0.1
    ).items():
      self.enterContext(mock.patch.object(remote, name, value))

  def write(self, *names):
    partial = f'{self.list}.partial'
    pathlib.Path(partial).write_text(''.join(f'http://{n}\n' for n in names), encoding='utf-8')
    os.replace(partial, self.list)

  def api(self, name, answer=None):
    return self.apis.setdefault(f'http://{name}', engines_test.FakeApi(answer))

  def fleet(self, outage_s=60.0, rows=4, engine=''):
    settings = schema.RolloutSettings(max_total=64, engine=engine or f'file:{self.list}')
    settings.engine_outage_s = outage_s
    folder = os.path.join(self.tmp, 'weights')
    folders = weight_folders.WeightFolders(folder, 0, 2, engines_test.write_numbers)
    table = engines_test.STOP_TABLE
    fleet = remote.Fleet(settings, self.api('first'), folders, table, (), rows, NEVER)
    make = fleet._make
    fleet._make = lambda address: make(address, api=self.apis[address])
    self.copy = folders.copy
    return self.enterContext(fleet)

  def test_new_engine_gets_weights_and_lost_one_no_turn(self):
    old, new = self.api('old'), self.api('new')
    self.write('old')
    fleet = self.fleet()
    fleet.resolve()
    weights = self.copy(engines_test.parameters(0))
    fleet.sample(engines_test.REQUEST, weights, 0)
    self.write('new')
    fleet.resolve()
    fleet.sample(engines_test.REQUEST, weights, 0)
    self.assertEqual((old.loads, new.loads), (['000000'], ['000000']))
    self.assertEqual([len(old.sampled), len(new.sampled)], [1, 1])

  def test_turn_moves_to_an_engine_that_comes_during_an_outage(self):
    old, new = self.api('old'), self.api('new')
    self.write('old')
    fleet = self.fleet()
    fleet.resolve()
    old.is_down = True
    threading.Timer(0.2, self.write, ['new']).start()
    turn = fleet.sample(engines_test.REQUEST, self.copy(engines_test.parameters(0)), 0)
    self.assertEqual(turn.version, 0)
    self.assertLen(new.sampled, 1)

  def test_no_engine_is_waited_for_with_one_line(self):
    self.api('late')
    self.write('late')
    fleet = self.fleet()
    fleet.resolve()
    self.write()
    weights = self.copy(engines_test.parameters(0))
    with self.assertLogs('absl', 'INFO') as logs:
      fleet.resolve()
      threading.Timer(0.3, self.write, ['late']).start()
      fleet.sample(engines_test.REQUEST, weights, 0)
    waits = [line for line in logs.output if 'waiting for one' in line]
    self.assertLen(waits, 1)
    self.assertIn('engines are now http://late', logs.output[-1])

  def test_outage_without_engines_ends_run(self):
    self.write()
    fleet = self.fleet(outage_s=0.2)
    with self.assertRaisesRegex(types.RunError, 'there is none'):
      fleet.sample(engines_test.REQUEST, self.copy(engines_test.parameters(0)), 0)

  def test_list_that_cannot_be_read_changes_nothing(self):
    self.api('one')
    self.write('one')
    fleet = self.fleet()
    fleet.resolve()
    os.remove(self.list)
    with self.assertLogs('absl', 'WARNING') as logs:
      fleet.resolve()
    self.assertIn('the engines stay as they are', logs.output[0])
    fleet.sample(engines_test.REQUEST, self.copy(engines_test.parameters(0)), 0)

  def test_run_waits_at_the_start_and_then_gives_up(self):
    self.write()
    sampler = remote.RemoteSampler(self.fleet(), sampling.AS_IS)
    weights = self.copy(engines_test.parameters(0))
    score = lambda tokens, temperature: np.full(tokens.shape, -0.5)
    with self.assertRaisesRegex(types.UserError, 'no engine in 0.3 s'):
      remote.check_agreement(sampler, weights, [[1]], score)
    self.assertIsNone(remote.check_agreement(sampler, weights, [[1]], score, at_start=False))
    self.api('late')
    self.enterContext(mock.patch.object(remote, '_START_S', 60.0))
    threading.Timer(0.1, self.write, ['late']).start()
    self.assertEqual(remote.check_agreement(sampler, weights, [[1]], score), 0)

  def test_episodes_of_changing_engines_equal_those_of_fixed_ones(self):
    """Engines are killed, added and replaced at random during 30 updates of seven episodes."""
    rng = random.Random(0)

    def answer(request):
      token = 10 + sum(request.ids) % 50
      return servers.TurnAnswer([token, EOS], [-1.0, -1.0], 'stop')

    def play(fleet, number):
      turns = [[] for _ in range(7)]

      def respond(completions):
        prompts = []
        for completion in completions:
          turn = completion.turn
          turns[completion.index].append((turn.tokens.tolist(), turn.version))
          budget = 8 if len(turns[completion.index]) < 3 else 0
          prompts.append(env_pool.Prompt([completion.index], budget))
        return prompts

      sampler = remote.RemoteSampler(fleet, sampling.AS_IS)
      weights = self.copy(engines_test.parameters(number))
      prompts = [env_pool.Prompt([i, number], 8) for i in range(7)]
      keys = jax.random.split(jax.random.key(0), len(prompts))
      remote.run(sampler, weights, prompts, keys, respond)
      return turns

    names = 'abcde'
    for name in [*names, 'first']:
      self.api(name, answer)
    expected = [play(self.fleet(engine='http://first'), 0)]
    expected += [play_of(expected[0], number) for number in range(1, 30)]
    self.write('a', 'b')
    fleet = self.fleet(rows=3)
    over = threading.Event()

    def change():
      while not over.wait(0.003):
        for name in names:
          self.api(name).is_down = rng.random() < 0.3
          if rng.random() < 0.2:
            self.api(name).restart()
        self.write(*rng.sample(names, rng.randint(0, 3)))

    changer = threading.Thread(target=change)
    changer.start()
    try:
      found = [play(fleet, number) for number in range(30)]
    finally:
      over.set()
      changer.join()
    self.assertEqual(found, expected)
    self.assertGreaterEqual(sum(bool(self.api(name).sampled) for name in names), 4)


def play_of(first, number):
  """Returns the turns of a later batch: its prompts begin with another number."""
  turns = []
  for index, _ in enumerate(first):
    context = [index, number]
    played = []
    for _ in range(3):
      token = 10 + sum(context) % 50
      played.append(([token, EOS], number))
      context += [token, EOS, index]
    turns.append(played)
  return turns


if __name__ == '__main__':
  absltest.main()
