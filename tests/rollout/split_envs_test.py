"""Environments of several processes: what their outcomes may hold."""

from absl.testing import absltest

from stppo_jax import types
from stppo_jax.envs import stepping
from stppo_jax.rollout import split_envs


class Wanders:
  """An environment with a further key in `info`, whose value JSON cannot hold."""

  metrics: dict[str, object] = {'rooms': 1.0}

  def reset(self, seed=None):
    return f'go {seed}', {'visited': {1, 2}, 'prefix': 'Then '}

  def step(self, action):
    return action, 1.0, True, False, {'visited': {1, 2}, 'metrics': self.metrics}


class SplitTest(absltest.TestCase):

  def test_other_keys_of_info_are_ignored(self):
    env = Wanders()
    resets = split_envs.split_resets(map)(stepping.reset, [env], [3])
    self.assertEqual(resets, [('go 3', {'prefix': 'Then '})])
    self.assertEqual(resets, [stepping.reset(env, 3)])
    steps = split_envs.split_steps([env])([env], ['x'])
    self.assertEqual(steps, [('x', 1.0, True, False, {'metrics': {'rooms': 1.0}})])
    self.assertEqual(steps, stepping.step_all([env], ['x']))

  def test_outcome_that_cannot_be_sent_is_one_line(self):
    env = Wanders()
    env.metrics = {'rooms': {1, 2}}
    with self.assertRaisesRegex(types.UserError, r'^\{1, 2\} of set cannot be sent .* be JSON$'):
      split_envs.split_steps([env])([env], ['x'])


if __name__ == '__main__':
  absltest.main()
