"""Sessions: recorded turns, segments and rewards, by hand. Messages are tried in template_test."""

import types

from absl.testing import absltest
import jax
import numpy as np

from stppo_jax.serving import sessions
from stppo_jax.types import Task


class SessionTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    ids_only = types.SimpleNamespace(tokenizer=None, encode_prompt=list)  # prompts are ids
    self.session = sessions.Session(ids_only, jax.random.key(0), sessions.Sampling())

  def turn(self, prompt, tokens):
    plan = self.session.plan_prompt(prompt)
    said = {'role': 'assistant', 'content': ''}
    return self.session.record(plan, tokens, [-0.5] * len(tokens), [said])

  def episodes(self):
    return self.session.episodes(Task('a', 'b', ('c',)), 0)

  def test_a_prompt_that_extends_the_ids_continues_the_segment(self):
    self.assertEqual(self.turn([1, 2], [3, 4]), 1)
    self.assertEqual(self.turn([1, 2, 3, 4, 9, 8], [5]), 2)
    (episode,) = self.episodes()
    np.testing.assert_array_equal(episode.prompt, [1, 2])
    np.testing.assert_array_equal(episode.turns[0].tokens, [3, 4])
    np.testing.assert_array_equal(episode.turns[0].observation, [9, 8])
    np.testing.assert_array_equal(episode.turns[1].tokens, [5])
    self.assertEqual(self.session.counts['rewritten'], 0)

  def test_a_rewritten_history_is_a_row_of_its_own_with_the_reward_of_the_whole(self):
    self.turn([1, 2], [3, 4])
    self.turn([1, 2, 7, 4], [5])  # the second token after the prompt is another one
    self.session.reward(1.0)
    self.session.reward(0.25, turn=1)
    first, second = self.episodes()
    np.testing.assert_array_equal(second.prompt, [1, 2, 7, 4])
    self.assertEqual([first.turns[0].reward, second.turns[0].reward], [1.25, 1.0])
    self.assertEqual(self.session.counts['rewritten'], 1)

  def test_one_row_for_the_whole_has_each_reward_once(self):
    self.turn([1, 2], [3])
    self.turn([1, 2, 3, 9], [4])
    self.turn([7], [5])
    self.turn([8], [6])
    for turn, value in enumerate((0.5, 2.0, 4.0, 8.0), start=1):
      self.session.reward(value, turn=turn)
    self.session.reward(1.0)
    first, *_ = self.session.episodes(Task('a', 'b', ('c',)), 0, first_is_whole=True)
    self.assertEqual([turn.reward for turn in first.turns], [0.5, 2.0 + 1.0 + 4.0 + 8.0])
    self.assertEqual([row.score for row in self.episodes()], [0.5 + 2 + 1, 4 + 1, 8 + 1])

  def test_a_cut_turn_counts_in_its_own_row(self):
    plan = self.session.plan_prompt([1, 2])
    self.session.record(plan, [3, 4], [-0.5, -0.5], [], was_cut=True)
    self.turn([1, 2, 7, 4], [5])
    self.turn([1, 2, 8, 4], [6])
    self.assertEqual([episode.counts['cut'] for episode in self.episodes()], [1.0, 0.0, 0.0])

  def test_a_reward_of_zero_is_a_reward(self):
    self.turn([1, 2], [3])
    self.assertFalse(self.session.has_reward)
    self.session.reward(0.0, turn=1)
    self.assertTrue(self.session.has_reward)

  def test_no_two_turns_of_segments_draw_with_one_key(self):
    """Three requests at once, of which the first is aborted; then the others' segments go on."""
    plans = [self.session.plan_prompt([i, 1]) for i in range(3)]
    self.session.abandon(plans[0])
    said = {'role': 'assistant', 'content': ''}
    for plan in (plans[2], plans[1]):  # which end in another order
      self.session.record(plan, [7], [-0.5], [said])
    later = [self.session.plan_prompt([i, 1, 7, 9]) for i in (1, 2)]
    for i, plan in zip((1, 2), later):
      np.testing.assert_array_equal(plan.key, plans[i].key)  # a segment keeps its own
    self.assertLen({plan.key.tobytes() for plan in plans}, 3)

  def test_a_closed_session_takes_nothing(self):
    plan = self.session.plan_prompt([1])
    self.session.close()
    for call in (
        lambda: self.session.plan_prompt([1]),
        lambda: self.session.record(plan, [2], [-1.0], []),
        lambda: self.session.reward(1.0),
    ):
      with self.assertRaises(sessions.Closed):
        call()

  def test_rewards_are_checked(self):
    self.turn([1], [2])
    for value, turn in (
        (float('nan'), None),
        (10**400, None),
        ('1', None),
        (1.0, 2),
        (1.0, 0),
        (1.0, True),
    ):
      with self.assertRaises(ValueError):
        self.session.reward(value, turn)


if __name__ == '__main__':
  absltest.main()
