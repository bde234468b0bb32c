"""Filters: which tokens the policy's loss counts."""

import dataclasses

from absl.testing import absltest
from absl.testing import parameterized
import jax
import jax.numpy as jnp
import numpy as np

from stppo_jax import types
from stppo_jax.algorithms import filters
from stppo_jax.algorithms import variants
from stppo_jax.rollout import batching
from tests.training import update_test


class FiltersTest(parameterized.TestCase):

  @parameterized.parameters(
      ({}, None),
      ({'mask_truncated': True}, [1, 0, 1, 1]),
      # Rows 0 and 1 have no advantage; that of row 2 stands on one token.
      ({'mask_zero_advantage': True}, [0, 0, 1, 1]),
      ({'mask_truncated': True, 'mask_zero_advantage': True}, [0, 0, 1, 1]),
  )
  def test_whole_episodes_are_dropped(self, columns, rows):
    mask = jnp.array([[0, 1.0, 1], [1, 0, 0], [0, 1, 1], [1, 1, 1]])
    zeros = jnp.zeros_like(mask)
    batch = types.TurnBatch(
        tokens=zeros,
        action_mask=mask,
        turn_ids=mask.astype(int),
        rewards=zeros,
        old_logp=zeros,
        ref_logp=zeros,
        old_values=zeros,
        advantages=jnp.array([[5.0, 0, 0], [0, 5, 5], [0, 0, -1], [1, 1, 1]]),
        returns=zeros,
        group_ids=jnp.arange(4),
        truncated=jnp.array([0.0, 1, 0, 0]),
    )
    got = filters.loss_mask(batch, dataclasses.replace(variants.VARIANTS['ppo'], **columns))
    if rows is None:
      self.assertIsNone(got)
    else:
      np.testing.assert_array_equal(got, np.array(rows)[:, None] * mask)

  def test_rows_know_whether_episode_was_truncated(self):
    turn = lambda: types.Turn(
        np.array([3, 4], np.int32), np.zeros(2, np.float32), np.zeros(0, np.int32)
    )
    episodes = [
        types.Episode(types.Task('a'), 0, np.array([1], np.int32), [turn()], truncated=cut)
        for cut in (False, True)
    ]
    np.testing.assert_array_equal(batching.to_turn_batch(episodes, (8,), 3).truncated, [0, 1, 0])

  def test_dropped_episode_still_trains_the_critic(self):
    spec = update_test.make_spec('st_ppo', **update_test.BASE)
    mesh = update_test.one_device()
    functions = update_test.functions_of(spec, mesh)
    batch = update_test.off_policy_batch(spec, mesh)
    others = (np.arange(8) != 2)[:, None] * 1.0

    def after(mask, loss_mask):
      state = update_test.make_state(spec, mesh)
      rows = batch.replace(action_mask=mask, loss_mask=loss_mask)
      return jax.device_get(update_test.step(functions, spec, state, rows)[0])

    mask, some = batch.action_mask, batch.action_mask * others
    dropped, without, whole = after(mask, some), after(some, some), after(mask, mask)
    difference = lambda a, b: max(
        jax.tree.leaves(jax.tree.map(lambda x, y: np.abs(x - y).max(), a, b))
    )
    self.assertLess(difference(dropped.actor, without.actor), 1e-6)
    self.assertGreater(difference(dropped.actor, whole.actor), 1e-4)
    self.assertLess(difference(dropped.critic, whole.critic), 1e-7)
    self.assertGreater(difference(without.critic, whole.critic), 1e-4)


if __name__ == '__main__':
  absltest.main()
