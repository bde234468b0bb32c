"""Steps of several environments: shared searches, threads, and checks of what they return."""

from concurrent import futures
import threading
from unittest import mock

from absl.testing import absltest
import numpy as np

from stppo_jax import types
from stppo_jax.envs import factory
from stppo_jax.envs import guard
from stppo_jax.envs import isolation
from stppo_jax.envs import search
from stppo_jax.envs import stepping
from tests.envs.search_env_test import ANSWER
from tests.envs.search_env_test import FakeRetriever
from tests.envs.search_env_test import FOUND
from tests.envs.search_env_test import SEARCH
from tests.envs.search_env_test import start


class ForeignEnv:
  """Another package's environment: no `query`, no `passages`."""

  def reset(self, seed=None):
    return f'guess {seed}', {'suffix': ' Enter a number: '}

  def step(self, action):
    return action.upper(), 0.5, False, False, {}


class StepAllTest(absltest.TestCase):

  def test_one_search_per_round(self):
    shared, other = FakeRetriever(), FakeRetriever(None)
    envs = [start(retriever=shared) for _ in range(4)] + [
        ForeignEnv(),
        start(retriever=other),
        start(retriever=shared, top_k=1),
    ]
    actions = [SEARCH, ANSWER, 'hm', '<search>x</search>', 'up', SEARCH, SEARCH]
    steps = stepping.step_all(envs, actions)
    self.assertEqual(shared.calls, [(['capital of France', 'x'], 3), (['capital of France'], 1)])
    self.assertLen(other.calls, 1)
    alone = [
        env.step(action)
        for env, action in zip(
            [start() for _ in range(4)]
            + [ForeignEnv(), start(retriever=FakeRetriever(None)), start(top_k=1)],
            actions,
        )
    ]
    self.assertEqual(steps, alone)

  def test_a_retriever_may_return_tuples(self):
    retriever = FakeRetriever()
    search = lambda queries, top_k: tuple(map(tuple, FakeRetriever().search(queries, top_k)))
    retriever.search = search
    (step,) = stepping.step_all([start(retriever=retriever)], [SEARCH])
    self.assertEqual(step, start().step(SEARCH))

  def test_no_search_in_the_last_generation(self):
    retriever = FakeRetriever()
    envs = [start(retriever=retriever, max_searches=1) for _ in range(2)]
    stepping.step_all(envs, [SEARCH, SEARCH])
    self.assertEqual(
        [step[1:4] for step in stepping.step_all(envs, [SEARCH, ANSWER])],
        [(0.0, True, True), (1.0, True, False)],
    )
    self.assertLen(retriever.calls, 1)

  def test_threads_step_environments_at_once(self):
    """The four wait for each other, so that steps one by one would never end."""
    barrier = threading.Barrier(4, timeout=60)

    class Waits:

      def step(self, action):
        barrier.wait()
        return action, 0.0, True, False, {}

    with futures.ThreadPoolExecutor(4) as pool:
      steps = stepping.step_all([Waits() for _ in range(4)], list('abcd'), pool.map)
    self.assertEqual([step[0] for step in steps], list('abcd'))

  def test_outcomes_are_checked(self):
    env = ForeignEnv()
    good = ('text', 1, np.bool_(True), 0, {})
    with mock.patch.object(env, 'step', return_value=good):
      self.assertEqual(stepping.step_all([env], ['a']), [good])
    no_tuple = ('text', 1, True, {})
    for found in (None, no_tuple, ('text', 1, 'False', False, {}), (None, 1, True, False, {})):
      with mock.patch.object(env, 'step', return_value=found):
        with self.assertRaisesRegex(types.UserError, '^step of ForeignEnv returned .*two booleans'):
          stepping.step_all([env], ['a'])
    with mock.patch.object(ForeignEnv, 'step', return_value=None):  # not the name of a wrapper
      with self.assertRaisesRegex(types.UserError, '^step of ForeignEnv returned None'):
        stepping.step_all([isolation.IsolatedEnv(ForeignEnv, 0)], ['a'])
    for found in ('text', ('text',), (1, {})):
      with mock.patch.object(env, 'reset', return_value=found):
        with self.assertRaisesRegex(types.UserError, '^reset of ForeignEnv returned .*a dict$'):
          stepping.reset(env, 0)

  def test_lone_surrogates_of_an_environment_are_replaced(self):
    env = ForeignEnv()
    info = {'action': 'a\ud800', 'tools': [{'name': 'f\ud800'}]}
    clean = {'action': 'a?', 'tools': [{'name': 'f?'}]}
    with mock.patch.object(env, 'step', return_value=('s\ud800', 1, False, False, info)):
      self.assertEqual(stepping.step(env, 'a'), ('s?', 1, False, False, clean))
    with mock.patch.object(env, 'reset', return_value=('q\ud800', info)):
      self.assertEqual(stepping.reset(env, 0), ('q?', clean))
    with mock.patch.object(env, 'step', side_effect=ValueError('no \ud800')):
      self.assertIn('raised ValueError: no ? (', stepping.step(env, 'a')[-1]['environment_error'])

  def test_search_results_are_checked(self):
    for found in (None, [], [['text']], ['text'], [7], [[FOUND[0]], None, None]):
      retriever = FakeRetriever()
      retriever.search = lambda queries, top_k, found=found: found
      env = start(retriever=retriever)
      with self.assertRaisesRegex(types.UserError, '^the retriever returned .* for 1 queries'):
        stepping.step_all([env], ['<search>x</search>'])

  def test_outage_of_a_retriever_is_a_failed_search(self):
    error = mock.Mock(side_effect=ConnectionResetError('by peer'))
    retriever = FakeRetriever()
    retriever.search = lambda queries, top_k: error()
    with mock.patch.object(stepping.logging, 'log_every_n_seconds') as log:
      step, other = stepping.step_all([start(retriever=retriever) for _ in range(2)], [SEARCH] * 2)
    _, text, _, *values = log.call_args.args
    line = rf'^the retriever FakeRetriever raised ConnectionResetError: by peer \({__file__}:\d+\)$'
    self.assertRegex(text % tuple(values), line)
    self.assertEqual(step, start(retriever=FakeRetriever(None)).step(SEARCH))
    self.assertEqual(step, other)
    self.assertEqual(step, start(retriever=retriever).step(SEARCH))
    for kind in (types.UserError, types.RunError, types.Stopped):
      error.side_effect = kind
      with self.assertRaises(kind):
        stepping.step_all([start(retriever=retriever)], [SEARCH])
    error.side_effect = KeyError('text')
    with self.assertRaisesRegex(types.RunError, r"^the retriever .* raised KeyError: 'text' \("):
      stepping.step_all([start(retriever=retriever)], [SEARCH])

  def test_error_of_query_is_the_outcome_of_the_step(self):
    class Asks(ForeignEnv):
      retriever, top_k, uses_global_random = FakeRetriever(), 3, False
      steps = 0

      def __init__(self, task):
        del task

      def query(self, action):
        never.wait() if action == 'slow' else {}[action]

      def step(self, action, passages=()):
        Asks.steps += 1
        return super().step(action)

    never = threading.Event()
    self.addCleanup(never.set)
    kind = factory.make_factory('mine:Asks', Asks, {}, {})
    envs = [kind(None, 0, guard.Guard(0.3)) for _ in range(2)]
    fast, slow = stepping.step_all(envs, ['fast', 'slow'])
    self.assertEqual((fast[:4], slow[:4], Asks.steps), (('', 0.0, True, False),) * 2 + (0,))
    self.assertIn("Asks raised KeyError: 'fast' (", fast[4]['environment_error'])
    self.assertIn('no result of query within 0.3 s', slow[4]['environment_error'])

  def test_empty_round(self):
    self.assertEqual(stepping.step_all([], []), [])

  def test_other_attributes_are_no_shared_search(self):
    env = ForeignEnv()
    env.retriever, env.top_k, env.query = object(), 3, 'the question'
    closed = search.SearchEnv(types.Task('t', 'q', ('a',)), None, max_searches=0)
    closed.reset()
    outcomes = stepping.step_all([env, closed], ['a', '<answer>a</answer>'])
    self.assertEqual([outcome[1] for outcome in outcomes], [0.5, 1.0])


if __name__ == '__main__':
  absltest.main()
