"""Batches: every token in its column, and every reward on its token."""

from absl.testing import absltest
from absl.testing import parameterized
import jax
import numpy as np

from stppo_jax import types
from stppo_jax.rollout import batching

TASK = types.Task(id='q1', question='Who?', answers=('A', 'B'), dataset='toy', hops=2)
TURNS = (((3, 4), (5,)), ((6,), ()))  # (tokens, observation)


def make_episode(prompt=(1, 2), turns=TURNS, group=0, score=1.0, failed=False):
  made = [
      types.Turn(
          tokens=np.array(tokens, np.int32),
          logp=-np.array(tokens, np.float32) / 10,
          observation=np.array(observation, np.int32),
          action='search' if observation else 'answer',
      )
      for tokens, observation in turns
  ]
  if made:
    made[-1].reward = score
  return types.Episode(TASK, group, np.array(prompt, np.int32), made, failed=failed)


class ToTurnBatchTest(parameterized.TestCase):

  def test_by_hand(self):
    short = make_episode(prompt=(7,), turns=(((8, 9), ()),), group=4, score=0.5)
    batch = batching.to_turn_batch([make_episode(), short], (4, 8, 16), pad_id=99)
    np.testing.assert_array_equal(
        batch.tokens, [[1, 2, 3, 4, 5, 6, 99, 99], [7, 8, 9, 99, 99, 99, 99, 99]]
    )
    np.testing.assert_array_equal(
        batch.turn_ids, [[0, 0, 1, 1, 0, 2, 0, 0], [0, 1, 1, 0, 0, 0, 0, 0]]
    )
    np.testing.assert_array_equal(batch.action_mask, np.asarray(batch.turn_ids) > 0)
    np.testing.assert_array_equal(
        batch.rewards, [[0, 0, 0, 0, 0, 1, 0, 0], [0, 0, 0.5, 0, 0, 0, 0, 0]]
    )
    np.testing.assert_allclose(
        batch.behaviour_logp,
        [[0, 0, -0.3, -0.4, 0, -0.6, 0, 0], [0, -0.8, -0.9, 0, 0, 0, 0, 0]],
        rtol=1e-6,
    )
    np.testing.assert_array_equal(batch.group_ids, [0, 4])
    for name in ('old_logp', 'ref_logp', 'old_values', 'advantages', 'returns'):
      np.testing.assert_array_equal(getattr(batch, name), np.zeros((2, 8)))

  def test_reward_of_row_ending_in_an_observation(self):
    """A terminal reward on a masked token vanishes (verl PR 2337): it goes to an agent token."""
    cut = make_episode(turns=(((3, 4), (5, 5)),))
    batch = batching.to_turn_batch([cut], (6,))
    np.testing.assert_array_equal(batch.rewards, [[0, 0, 0, 1, 0, 0]])

  def test_reward_is_at_last_token_of_turn(self):
    """GEM's Sudoku gives .111 for each good turn and -.1 for a bad one; turns may touch."""
    played = make_episode(turns=(((3, 4), (5,)), ((6,), ()), ((7, 8), (9,))))
    for turn, reward in zip(played.turns, (0.111, 0.111, -0.1)):
      turn.reward = reward
    batch = batching.to_turn_batch([played], (10,))
    np.testing.assert_allclose(
        batch.rewards, [[0, 0, 0, 0.111, 0, 0.111, 0, -0.1, 0, 0]], rtol=1e-6
    )
    self.assertAlmostEqual(played.score, 0.122)

  def test_failed_episodes_are_masked_in_the_batch(self):
    batch = batching.to_turn_batch(
        [make_episode(), make_episode(failed=True), make_episode()], (8,), rows=5
    )
    for name in ('action_mask', 'turn_ids', 'rewards', 'behaviour_logp'):
      array = np.asarray(getattr(batch, name))
      self.assertFalse(array[[1, 3, 4]].any(), name)
      self.assertTrue(array[[0, 2]].any(), name)
    np.testing.assert_array_equal(batch.tokens[1], batch.tokens[0])
    groups = np.asarray(batch.group_ids)
    self.assertEqual(groups[0], groups[2])
    self.assertLen(set(groups.tolist()), 4)  # rows 1, 3 and 4 are alone

  def test_an_episode_that_was_never_played(self):
    batch = batching.to_turn_batch([make_episode(turns=(), failed=True)], (2,))
    self.assertFalse(np.asarray(batch.action_mask).any())

  def test_sharding(self):
    mesh = jax.make_mesh((1,), ('data',), axis_types=(jax.sharding.AxisType.Auto,))
    sharding = jax.sharding.NamedSharding(mesh, jax.P('data'))
    batch = batching.to_turn_batch([make_episode()], (8,), sharding=sharding)
    self.assertEqual(batch.tokens.sharding, sharding)
    self.assertEqual(batch.group_ids.sharding, sharding)

  def test_program_segments_are_sorted_by_own_length(self):
    rows = [make_episode(prompt=range(n)) for n in (9, 2, 5)]
    for row, number in zip(rows, (0, 0, 1)):
      row.number = number
    self.assertEqual([len(row.prompt) for row in batching.by_length(rows)], [2, 5, 9])

  def test_errors_say_what_to_do(self):
    with self.assertRaisesRegex(types.UserError, 'length buckets'):
      batching.to_turn_batch([make_episode()], (2, 4))
    with self.assertRaisesRegex(types.UserError, 'do not fit'):
      batching.to_turn_batch([make_episode()] * 3, (8,), rows=2)


if __name__ == '__main__':
  absltest.main()
