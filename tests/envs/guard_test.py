"""Time limits and stops of users' code that blocks."""

from concurrent import futures
import random
import threading
import time
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized

from stppo_jax import types
from stppo_jax.envs import factory
from stppo_jax.envs import guard as guard_lib
from stppo_jax.envs import isolation
from stppo_jax.envs import stepping
from stppo_jax.stop_signal import StopSignal
from tests.support.processes import wait_for

LIMIT_S = 0.2
TASK = types.Task('t')


class Blocks:
  """Blocks in one of its methods, until the test is over."""

  frame = 'inline'

  def __init__(self, task, where='', over=None):
    self._where = where
    self._over = over
    self._block('__init__')

  def reset(self, seed=None):
    self._block('reset')
    return 'x', {}

  def step(self, action):
    self._block('step')
    return action, random.random(), True, False, {}

  def _block(self, method):
    if self._where == method:
      self._over.wait()


class Over(threading.Event):
  """The end of a test. Whoever waits for it exceeds every limit on the clock of the test."""

  now = 0.0

  def wait(self, timeout=None):
    self.now += 60.0
    return super().wait(timeout)


class GuardTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.over = Over()
    self.addCleanup(self.over.set)

  def stop_clock(self):
    """Only `over.wait` takes time then, however long the start of a thread takes."""
    self.enterContext(mock.patch.object(time, 'monotonic', lambda: self.over.now))

  def make(self, where, isolated, guard):
    kind = factory.EnvFactory(
        Blocks, {'where': where, 'over': self.over}, uses_global_random=isolated
    )
    return kind(TASK, 3, guard)

  @parameterized.product(where=('__init__', 'reset', 'step'), isolated=(False, True))
  def test_call_without_end_fails_alone(self, where, isolated):
    self.stop_clock()
    guard = guard_lib.Guard(LIMIT_S)
    env = self.make(where, isolated, guard)
    _, info = stepping.reset(env, 0)
    if where == 'step':
      *_, info = stepping.step(env, 'a')
    self.assertStartsWith(
        info['environment_error'],
        f'the environment Blocks gave no result of {where} within 0.2 s '
        f'(config.rollout.env_timeout_s); the call was abandoned at {__file__}:',
    )
    self.assertIn('self._over.wait()', info['traceback'])
    # The lock of the random state is free again.
    other = self.make('', isolated, guard_lib.Guard(60.0))
    self.assertEqual(stepping.reset(other, 0), ('x', {}))
    expected = random.Random(3).random() if isolated else mock_any()
    self.assertEqual(stepping.step(other, 'a')[1], expected)

  @parameterized.parameters(False, True)
  def test_stop_does_not_wait_for_a_call(self, isolated):
    stop = StopSignal()
    env = self.make('step', isolated, guard_lib.Guard(stop_signal=stop))
    stepping.reset(env, 0)
    threading.Timer(0.1, stop.set).start()
    with self.assertRaises(types.Stopped):
      stepping.step(env, 'a')
    self.assertTrue(guard_lib.has_left_calls())

  def test_several_processes_stop_together(self):
    stop_signal = StopSignal(lambda: True)
    env = self.make('step', False, guard_lib.Guard(stop_signal=stop_signal, raises=False))
    *_, info = stepping.step(env, 'a')
    self.assertEqual(info['environment_error'], 'the run stops')

  def test_stop_does_not_wait_for_the_random_state(self):
    self.assertTrue(isolation._GLOBAL_RANDOM.acquire(timeout=10))
    self.addCleanup(isolation._GLOBAL_RANDOM.release)
    with self.assertRaises(types.Stopped):
      self.make('', True, guard_lib.Guard(stop_signal=StopSignal(lambda: True)))

  def test_waiting_for_others_does_not_count(self):
    """One environment at a time: three calls of 0.15 s on this clock, with a limit of 0.2 s."""
    now = [0.0]
    self.enterContext(mock.patch.object(time, 'monotonic', lambda: now[0]))

    class Slow:

      def __init__(self, task):
        del task

      def step(self, action):
        now[0] += 0.15
        return action, 0.0, True, False, {}

    kind = factory.EnvFactory(Slow, {})
    envs = [kind(TASK, seed, guard_lib.Guard(LIMIT_S)) for seed in range(3)]
    outcomes = []
    threads = [
        threading.Thread(target=lambda env=env: outcomes.append(stepping.step(env, 'a')))
        for env in envs
    ]
    for thread in threads:
      thread.start()
    for thread in threads:
      thread.join()
    self.assertEqual([info for *_, info in outcomes], [{}] * 3)

  def test_calls_one_by_one_share_a_thread(self):
    """As connections of sqlite3 and browsers need it."""
    guard = guard_lib.Guard(60.0)
    threads = {guard.call('x', threading.get_ident) for _ in range(50)}
    self.assertLen(threads, 1)

  def test_thread_of_an_abandoned_call_is_taken_last(self):
    release = threading.Event()
    left = []
    with self.assertRaises(guard_lib.TimedOut):
      guard_lib.Guard(0.05).call(
          'x', lambda: (left.append(threading.current_thread()), release.wait())
      )
    guard = guard_lib.Guard(60.0)
    thread = guard.call('x', threading.get_ident)
    release.set()
    wait_for(lambda: left and left[0] in guard_lib._IDLE)
    self.assertEqual(guard.call('x', threading.get_ident), thread)

  def test_without_limit_and_threads_calls_are_in_place(self):
    guard = guard_lib.Guard(0.0, in_place=True)
    self.assertEqual(guard.call('x', threading.get_ident), threading.get_ident())
    self.assertTrue(guard.call('x', guard_lib.is_in_main_thread))
    self.assertFalse(guard_lib.is_in_main_thread())

  def test_stop_leaves_call_of_sampling_thread(self):
    signal = StopSignal()
    signal.set()
    guard = guard_lib.Guard(0.0, signal, in_place=True)
    never = threading.Event()
    pool = futures.ThreadPoolExecutor(1)
    self.addCleanup(pool.shutdown)
    self.addCleanup(never.set)  # comes first: the thread ends, whatever the test finds
    call = pool.submit(guard.call, 'x', never.wait)
    with self.assertRaises(types.Stopped):
      call.result(10)

  @parameterized.parameters(SystemExit, KeyboardInterrupt)
  def test_exit_of_an_environment_is_an_error(self, kind):

    def ends():
      raise kind('bye')

    with self.assertRaisesRegex(RuntimeError, f'^{kind.__name__}: bye$'):
      guard_lib.Guard(60.0).call('x', ends)

  def test_pause_is_not_in_the_limit(self):

    def call():
      guard_lib.pause(1.5)
      return 'done'

    self.assertEqual(guard_lib.Guard(1.0).call('x', call), 'done')

  def test_retriever_without_end_has_failed(self):
    self.stop_clock()

    class Searches(Blocks):
      top_k = 1

      def __init__(self, task, retriever):
        super().__init__(task)
        self.retriever = retriever

      def query(self, action):
        return action

      def step(self, action, passages=()):
        return str(passages), 0.0, True, False, {}

    class Retriever:

      def __init__(self, over):
        self._over = over

      def search(self, queries, top_k):
        self._over.wait()

    settings = {'retriever': Retriever(self.over)}
    kind = factory.EnvFactory(Searches, settings, uses_global_random=False)
    env = kind(TASK, 0, guard_lib.Guard(LIMIT_S))
    self.assertEqual(stepping.step_all([env], ['a'])[0][0], 'None')


def mock_any():
  return absltest.mock.ANY


if __name__ == '__main__':
  absltest.main()
