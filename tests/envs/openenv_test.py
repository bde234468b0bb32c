"""OpenEnv's client against a server of the real package, started here; skipped without it."""

import importlib.util
import json
import pathlib
import random

from absl.testing import absltest
from absl.testing import parameterized
import pytest

from stppo_jax import config as schema
from stppo_jax.assembly import components
from stppo_jax.envs import packages
from stppo_jax.envs import stepping
from stppo_jax.envs.adapters import openenv
from stppo_jax.envs.adapters import openenv_servers
from stppo_jax.settings import validation
from stppo_jax.types import Task
from stppo_jax.types import UserError
from tests.support import env_server

pytestmark = pytest.mark.guests(
    what='OpenEnv servers',
    version='openenv==0.10.0 websockets==17.4',
    date='2026-11-28',
    touches='envs/adapters/openenv.py envs/adapters/openenv_servers.py',
)

SERVER = pathlib.Path(__file__).parents[1] / 'support' / 'openenv_server.py'
SESSIONS = 3


def resolve(url, **options):
  config = schema.Config()
  config.env.kind, config.env.options = f'openenv:{url}', options
  config.retriever.kind = 'none'
  return components.resolve(validation.validate(config)).env


class ObservationTest(parameterized.TestCase):

  def env(self, **options):
    kind = packages.adapt(openenv.OpenEnvEnv, lambda *_: None, 'http://x:1', 'openenv')
    return kind(Task('t'), **options)

  @parameterized.parameters(
      ({'text': 'higher', 'tries': 1}, 'higher'),
      ({'text': '', 'tries': 1, 'history': []}, ''),
      ({'prompt': 'p', 'messages': [{'content': 'x'}]}, None),  # OpenEnv's textarena_env
      ({'game_phase': 'playing', 'info_state': [0.0, 1.0]}, None),  # OpenEnv's openspiel_env
      ({'one': 'a', 'two': 'b'}, None),
  )
  def test_text_beside_other_parts_is_not_the_observation(self, observation, text):
    shown = json.dumps(observation) if text is None else text
    self.assertEqual(self.env()._text(observation), shown)

  def test_field_of_an_observation_is_json(self):
    env = self.env(observation_field='board')
    self.assertEqual(env._text({'board': [None, True], 'text': 'x'}), '[null, true]')


class ResetTest(absltest.TestCase):
  """Errors of a server, without a server."""

  def reset(self, code):
    def construct(data, timeout_s):
      raise openenv_servers.ErrorAnswer({'code': code, 'message': 'broken'})

    kind = 'openenv:http://a:1'
    env_class = packages.adapt(openenv.OpenEnvEnv, construct, kind, 'openenv')
    return stepping.reset(env_class(Task('t')), 0)

  def test_error_of_environment_masks_the_episode(self):
    for code in ('EXECUTION_ERROR', 'FACTORY_ERROR', 'SESSION_ERROR'):
      observation, info = self.reset(code)
      self.assertEqual(observation, '')
      self.assertIn(f'{code}: broken', info['environment_error'])

  def test_server_that_does_not_understand_ends_the_run(self):
    for code in ('VALIDATION_ERROR', 'UNKNOWN_TYPE', 'INVALID_JSON'):
      with self.assertRaisesRegex(UserError, f'starts no episode .*{code}: broken'):
        self.reset(code)

  def test_episode_without_a_turn_is_masked(self):
    ended = []

    class Session:
      """A session in which the reset ends the episode."""

      def close(self):
        """Notes that the session has ended."""
        ended.append(True)

    def construct(data, timeout_s):
      return Session(), {'observation': {'text': 'you won'}, 'reward': 1.0, 'done': True}

    env_class = packages.adapt(openenv.OpenEnvEnv, construct, 'openenv:http://a:1', 'openenv')
    env = env_class(Task('t'))  # without it, its finalizer would end the session
    observation, info = stepping.reset(env, 0)
    self.assertEqual((observation, ended), ('', [True]))
    self.assertIn('over at its reset', info['environment_error'])


class OpenEnvTest(absltest.TestCase):

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    if not all(map(importlib.util.find_spec, ('openenv', 'websockets'))):
      raise absltest.SkipTest('openenv-core is not installed')
    cls.url = env_server.start(cls.addClassCleanup, SERVER, SESSIONS)

  def start(self, seed, **options):
    return self.begin(resolve(self.url, **options), seed)

  def begin(self, factory, seed):
    env = factory(Task('t', seed=seed), seed)
    self.addCleanup(env._close)
    return env, env.reset(seed=seed)

  def test_episodes_have_separate_sessions_and_seeds(self):
    (one, first), (two, second) = self.start(1), self.start(2)
    self.assertEqual((first, second), (('seed 1: guess', {}), ('seed 2: guess', {})))
    numbers = [random.Random(seed).randint(0, 9) for seed in (1, 2)]
    wrong = [(number + 1) % 10 for number in numbers]
    for env, number, guess in zip((one, two), numbers, wrong):
      text, reward, terminated, truncated, info = env.step(f'{{"guess": {guess}}}')
      self.assertEqual(text, 'higher' if guess < number else 'lower')
      self.assertEqual((reward, terminated, truncated), (0.25, False, False))
      self.assertEqual(info, {'action': 'move', 'metrics': {'tries': 1.0}})
    for env, number in zip((one, two), numbers):
      text, reward, terminated, _, info = env.step(f'{{"guess": {number}}}')
      self.assertEqual((text, reward, terminated), ('', 1.0, True))
      self.assertEqual(info['metrics'], {'tries': 2.0})

  def test_rejected_action_is_reported(self):
    env, _ = self.start(3)
    for text in ('5', 'five', '{"guess": "five"}', '{"gess": 5}', '[', '{"guess": 5, "x": 1}'):
      observation, reward, terminated, _, info = env.step(text)
      self.assertStartsWith(observation, 'Error: the action is not accepted')
      self.assertEqual((reward, terminated, info['action']), (0.0, False, 'invalid'))
    self.assertEqual(env.step('{"guess": 99}')[4]['action'], 'move')

  def test_server_error_masks_the_episode(self):
    env, _ = self.start(4)
    _, reward, terminated, truncated, info = env.step('{"guess": 13}')
    self.assertEqual((reward, terminated, truncated), (0.0, True, True))
    self.assertTrue(info['retrieval_failed'])

  def test_text_is_one_field_of_the_action(self):
    options = dict(action_field='guess', stop_strings=['.'], observation_field='tries')
    env, (text, _) = self.start(5, **options, instructions='Go. ')
    self.assertEqual(text, 'Go. 0')
    self.assertEqual(env.step('99.')[0], '1')

  def test_server_without_room_is_one_line(self):
    sessions = [self.start(seed)[0] for seed in range(SESSIONS)]
    with self.assertRaisesRegex(UserError, 'starts no episode .*max_concurrent_envs') as caught:
      self.start(9, timeout_s=2)
    self.assertNotIn('\n', str(caught.exception))
    del sessions[0]  # an episode that a limit ended
    self.doCleanups()
    self.start(9)

  def test_several_servers_share_the_sessions(self):
    stops = []  # the first one kills the second server
    second = env_server.start(lambda stop: stops.insert(0, stop), SERVER, SESSIONS)
    self.addCleanup(lambda: [stop() for stop in stops])
    factory = resolve(f'{self.url},{second}', timeout_s=5)
    envs = [self.begin(factory, seed)[0] for seed in range(2 * SESSIONS)]
    with self.assertRaisesRegex(UserError, 'CAPACITY_REACHED'):
      self.begin(factory, 9)
    stops[0]()
    infos = [env.step('{"guess": 99}')[4] for env in envs]
    self.assertEqual(sum(info.get('retrieval_failed', False) for info in infos), SESSIONS)
    with self.assertRaisesRegex(ConnectionError, '1 of 2 addresses do not answer'):
      self.begin(factory, 9)
    self.doCleanups()
    self.begin(factory, 9)

  def test_addresses(self):
    for url in ('localhost:8000', 'ftp://x', 'http://', 'http://a:1,', 'http://a:1 http://b:1'):
      with self.assertRaisesRegex(UserError, 'an address is needed'):
        resolve(url)
    with self.assertRaisesRegex(UserError, 'starts no episode .*start the server'):
      resolve('http://127.0.0.1:9', timeout_s=2)(Task('t'), 0).reset(seed=0)


if __name__ == '__main__':
  absltest.main()
