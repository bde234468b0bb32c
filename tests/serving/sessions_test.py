"""Sessions: recorded turns, segments and rewards, by hand. Messages are tried in template_test."""

import dataclasses
import threading
import types
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized
import jax
import numpy as np

from stppo_jax.algorithms import advantages
from stppo_jax.algorithms import variants
from stppo_jax.monitoring import episodes as episodes_lib
from stppo_jax.rollout import batches as batches_lib
from stppo_jax.rollout import batching
from stppo_jax.serving import sessions
from stppo_jax.text import template as template_lib
from stppo_jax.text import turns as turns_lib
from stppo_jax.types import Episode
from stppo_jax.types import Task
from stppo_jax.types import UserError
from tests.support import tiny_tokenizer

WORDS = types.SimpleNamespace(eos_ids=(), decode=lambda ids: 'x' * len(ids), opening=lambda ids: '')
# Prompts are ids.
IDS_ONLY = types.SimpleNamespace(
    tokenizer=WORDS,
    encode_prompt=list,
    encode_more=list,
    shown=WORDS.decode,
    check=lambda ids: None,
)


class SessionTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    self.session = sessions.Session(IDS_ONLY, jax.random.key(0), sessions.Sampling())

  def turn(self, prompt, tokens):
    plan = self.session.plan_prompt(prompt)
    said = {'role': 'assistant', 'content': ''}
    return self.session.record(plan, tokens, [-0.5] * len(tokens), [said])

  def test_reward_comes_while_a_prompt_is_encoded(self):
    reward = threading.Thread(target=self.session.reward, args=(1.0,))
    was_blocked = []

    def encode(ids):
      reward.start()
      reward.join(10)
      was_blocked.append(reward.is_alive())
      return list(ids)

    with mock.patch.object(IDS_ONLY, 'encode_prompt', encode):
      self.turn([1, 2], [3])
    self.assertEqual(was_blocked, [False])
    self.assertTrue(self.session.has_reward)

  def episodes(self):
    return self.session.episodes(Task('a', 'b', ('c',)), 0)

  def test_rewritten_history_is_its_own_row(self):
    self.turn([1, 2], [3, 4])
    self.turn([1, 2, 7, 4], [5])  # the second token after the prompt is another one
    self.session.reward(1.0)
    self.session.reward(0.25, turn=1)
    first, second = self.episodes()
    np.testing.assert_array_equal(second.prompt, [1, 2, 7, 4])
    self.assertEqual([first.turns[0].reward, second.turns[0].reward], [1.25, 1.0])
    self.assertEqual(self.session.counts['rewritten'], 1)

  def test_single_row_has_each_reward_once(self):
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

  def test_rows_beyond_limit_are_not_recorded(self):
    limit = sessions.Recording(max_rows=2)
    self.session = sessions.Session(
        IDS_ONLY, jax.random.key(0), sessions.Sampling(), recording=limit
    )
    numbers = [self.turn([i], [9]) for i in range(4)]
    self.assertEqual(numbers, [1, 2, None, None])
    self.assertEqual(self.turn([0, 9, 5], [8, 8]), 3)  # recorded rows continue
    self.assertLen(self.episodes(), 2)
    self.turn([7], [8, 8, 8])
    self.assertEqual(self.session.last_text, 'xxx')  # the last answer, which is scored
    counts = {'unrecorded': 3, 'conversations': 2, 'rewritten': 0, 'branched': 0}
    self.assertEqual(self.session.counts, self.session.counts | counts)

  def test_cut_turn_counts_in_its_row(self):
    plan = self.session.plan_prompt([1, 2])
    self.session.record(plan, [3, 4], [-0.5, -0.5], [], was_cut=True)
    self.turn([1, 2, 7, 4], [5])
    self.turn([1, 2, 8, 4], [6])
    self.assertEqual([episode.counts['cut'] for episode in self.episodes()], [1.0, 0.0, 0.0])
    self.assertEqual([episode.counts['empty'] for episode in self.episodes()], [0.0, 1.0, 1.0])

  def test_reward_of_zero_is_a_reward(self):
    self.turn([1, 2], [3])
    self.assertFalse(self.session.has_reward)
    self.session.reward(0.0, turn=1)
    self.assertTrue(self.session.has_reward)

  def test_segments_have_different_keys(self):
    """Three requests at once, of which the first is aborted; then the others' segments go on."""
    plans = [self.session.plan_prompt([i, 1]) for i in range(3)]
    self.session.abandon(plans[0])
    said = {'role': 'assistant', 'content': ''}
    for plan in (plans[2], plans[1]):  # they end in another order
      self.session.record(plan, [7], [-0.5], [said])
    later = [self.session.plan_prompt([i, 1, 7, 9]) for i in (1, 2)]
    for i, plan in zip((1, 2), later):
      np.testing.assert_array_equal(plan.key, plans[i].key)  # a segment keeps its own
    self.assertLen({plan.key.tobytes() for plan in plans}, 3)

  def test_turn_that_was_given_up_is_another_sample_the_next_time(self):
    said = {'role': 'assistant', 'content': ''}
    self.session.record(self.session.plan_prompt([1, 2]), [7], [-0.5], [said])
    later = []
    for _ in range(3):
      later.append(self.session.plan_prompt([1, 2, 7, 9]))
      self.session.abandon(later[-1])
    self.assertEqual(
        [(plan.ids, plan.segment) for plan in later], 3 * [([1, 2, 7, 9], later[0].segment)]
    )
    self.assertLen({plan.key.tobytes() for plan in later}, 3)

  def test_closed_session_accepts_nothing(self):
    plan = self.session.plan_prompt([1])
    self.session.close()
    for call in (
        lambda: self.session.plan_prompt([1]),
        lambda: self.session.record(plan, [2], [-1.0], []),
        lambda: self.session.reward(1.0),
    ):
      with self.assertRaises(sessions.Closed):
        call()

  def test_reward_of_unknown_turn_is_an_error(self):
    self.turn([1], [2])
    for turn in (0, 2):
      with self.assertRaises(ValueError):
        self.session.reward(1.0, turn)


class SharedTurnTest(absltest.TestCase):
  """A row of two turns, and a row that branches off after the first one.

  row 0   1 | 2 | 9 | 3     rewards 0, 1
  row 1   1 , 2 , 8 | 4     reward 2
  """

  def setUp(self):
    super().setUp()
    session = sessions.Session(IDS_ONLY, jax.random.key(0), sessions.Sampling())
    for prompt, token in (([1], 2), ([1, 2, 9], 3), ([1, 2, 8], 4)):
      plan = session.plan_prompt(prompt)
      session.record(plan, [token], [-0.5], [{'role': 'assistant', 'content': ''}])
    session.reward(1.0, turn=2)
    session.reward(2.0, turn=3)
    rows = [
        dataclasses.replace(row, number=0) for row in session.episodes(Task('a', 'b', ('c',)), 0)
    ]
    self.assertEqual([row.branched_from for row in rows], [None, (0, 1)])
    self.batch = batching.to_turn_batch(rows, (4,))

  def test_shared_turn_is_trained_in_its_first_row(self):
    np.testing.assert_array_equal(self.batch.tokens, [[1, 2, 9, 3], [1, 2, 8, 4]])
    np.testing.assert_array_equal(self.batch.action_mask, [[0, 1, 0, 1], [0, 0, 0, 1]])

  def test_advantages_follow_path_of_their_row(self):
    """With gamma = .9 and lambda = .8, and the values .5 and .7 in row 0, .3 in row 1:

    row 0   A_2 = 1 - .7 = .3,   A_1 = 0 + .9 * .7 - .5 + .9 * .8 * .3 = .346
    row 1   A_1 = 2 - .3 = 1.7, which is no part of the advantage of the turn before it
    """
    values = np.float32([[0, 0.5, 0, 0.7], [0, 0, 0, 0.3]])
    batch = self.batch.replace(old_values=values)
    for name in ('token_gae', 'turn_gae'):
      variant = dataclasses.replace(
          variants.VARIANTS['st_ppo'], advantage=name, gamma=0.9, lam=0.8, whiten=False
      )
      estimated = advantages.estimate(batch, variant)
      expected = [[0, 0.346, 0, 0.3], [0, 0, 0, 1.7]]
      np.testing.assert_allclose(estimated.advantages, expected, rtol=1e-5, atol=1e-7)
      returns = np.where(batch.action_mask > 0, np.float32(expected) + values, 0)
      np.testing.assert_allclose(estimated.returns, returns, rtol=1e-5, atol=1e-7)


class EpisodeScoreTest(absltest.TestCase):
  """Two samples of a question earn 1 on each of three turns and .5 in the end.

  The first has one segment, the second three, and a third sample earns nothing.
  """

  def setUp(self):
    super().setUp()
    self.rows = []
    one_segment = ([1], [1, 2, 9], [1, 2, 9, 2, 9])
    three_segments = ([3], [4], [5])
    for number, (prompts, reward) in enumerate(
        ((one_segment, 1.0), (three_segments, 1.0), (([6],), 0.0))
    ):
      session = sessions.Session(IDS_ONLY, jax.random.key(0), sessions.Sampling())
      for k, prompt in enumerate(prompts, start=1):
        plan = session.plan_prompt(prompt)
        session.record(plan, [2], [-0.5], [{'role': 'assistant', 'content': ''}])
        session.reward(reward, turn=k)
      session.reward(reward / 2)
      for row in session.episodes(Task('a', 'b', ('c',)), 0):
        self.rows.append(dataclasses.replace(row, number=number))

  def advantages(self, rows, name='group_centred', kl=None):
    batch = batching.to_turn_batch(rows, (8,), rows=len(rows) + 1)  # and a row of padding
    if kl is not None:
      batch = batch.replace(rewards=batch.rewards - kl * batch.action_mask)
    variant = dataclasses.replace(variants.VARIANTS['grpo'], advantage=name)
    mask = np.asarray(batch.action_mask)
    found = np.asarray(advantages.estimate(batch, variant).advantages)
    return [row[used > 0][0] for row, used in zip(found, mask) if used.any()]

  def test_equal_episodes_have_equal_advantages(self):
    third = 3.5 / 3
    expected = {
        'group_centred': [third] * 4 + [-2 * third],
        'leave_one_out': [1.75] * 4 + [-3.5],
        'group_zscore': [0.5774] * 4 + [-1.1547],
    }
    for name, wanted in expected.items():
      np.testing.assert_allclose(self.advantages(self.rows, name), wanted, rtol=1e-4)

  def test_missing_row_keeps_score(self):
    rows = [row for row in self.rows if row.prompt.tolist() != [4]]
    third = 3.5 / 3
    np.testing.assert_allclose(self.advantages(rows), [third] * 3 + [-2 * third], rtol=1e-6)

  def test_penalty_counts_once_per_token(self):
    """Each turn has one token, so that the first two episodes pay .3 and the third one .1."""
    found = self.advantages(self.rows, kl=0.1)
    third = (3.2 - (-0.1)) / 3
    np.testing.assert_allclose(found, [third] * 4 + [-2 * third], rtol=1e-5)

  def test_files_and_checkpoints_keep_score(self):
    tokenizer = mock.Mock(pieces=lambda tokens: [''] * len(tokens))
    records = episodes_lib.to_records(self.rows, tokenizer, 1, 'train')
    again = list(map(Episode.from_dict, records))
    self.assertEqual(self.advantages(again), self.advantages(self.rows))
    sampled = batches_lib.to_json(batching.Sampled(1, 0, self.rows, {}))
    restored = batches_lib.from_json(sampled, [row.task for row in self.rows]).episodes
    self.assertEqual(self.advantages(restored), self.advantages(self.rows))

  def test_logged_score_equals_evaluation(self):
    scores = episodes_lib.summarize(self.rows)
    self.assertAlmostEqual(scores['critic/score/mean'], (3.5 + 3.5 + 0.0) / 3)
    self.assertEqual(scores['critic/score/min'], 0.0)

  def test_single_rows_equal_plain_episodes(self):
    rows = [row for row in self.rows if row.number != 1]
    plain = [dataclasses.replace(row, number=None, whole_score=None) for row in rows]
    for name in ('group_centred', 'leave_one_out', 'group_zscore'):
      for kl in (None, 0.07):
        self.assertEqual(self.advantages(rows, name, kl), self.advantages(plain, name, kl))
    self.assertEqual(batching.to_turn_batch(rows, (8,)).score_offsets.tolist(), [0.0, 0.0])


CHATML = (
    '{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}'
    '{% for c in m.tool_calls %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}'
    '<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}'
)
ALTERNATES = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{% endfor %}" + CHATML
)


def say(content, *calls):
  return {'role': 'assistant', 'content': content, 'tool_calls': list(calls)}


def ask(content):
  return {'role': 'user', 'content': content}


class ChatSessionTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.tokenizer = tiny_tokenizer.load(CHATML)
    self.session = self.make_session()

  def make_session(self, tokenizer=None, **recording):
    template = template_lib.Template(tokenizer or self.tokenizer, 10_000)
    recording = sessions.Recording(**recording)
    return sessions.Session(template, jax.random.key(0), sessions.Sampling(), recording=recording)

  def turn(self, messages, text):
    """The model says a text. Returns the messages with it."""
    plan = self.session.plan(messages)
    tokens = [*self.tokenizer.encode(text), *self.tokenizer.eos_ids]
    self.session.record(plan, tokens, [-0.5] * len(tokens), [say(text)])
    return [*messages, say(text)]

  def num_turns_of_rows(self):
    return [len(row.turns) for row in self.session.episodes(None, 0) if row.turns]

  @parameterized.parameters(0, 1, 2, 3, 5)
  def test_branch_is_continued_wherever_it_begins(self, depth):
    messages = [ask('q')]
    for number in range(depth):
      messages = [*self.turn(messages, f'turn {number}'), ask(f'and {number}?')]
    for name, length in (('first', 1), ('second', 4), ('third', 3)):
      branch = messages
      for number in range(length):
        branch = [*self.turn(branch, f'{name} {number}'), ask(f'{name} {number}?')]
    self.assertEqual(self.num_turns_of_rows(), sorted([depth + 1, 4, 3], reverse=True))
    self.assertEqual(self.session.counts['branched'], 2)
    self.assertEqual(self.session.counts['rewritten'], 0)

  def check_origins(self, expected):
    """Each row begins with the turns of the segment that it branched off, and a record knows it."""
    rows = {row.segment: row for row in self.session.episodes(Task('t', 'q'), 0)}
    self.assertEqual({number: row.branched_from for number, row in rows.items()}, expected)
    for row in rows.values():
      self.assertEqual(Episode.from_dict(row.to_dict()).branched_from, row.branched_from)
      if row.branched_from is not None:
        segment, num_turns = row.branched_from
        origin = dataclasses.replace(rows[segment], turns=rows[segment].turns[:num_turns])
        origin.turns[-1] = dataclasses.replace(origin.turns[-1], observation=np.zeros(0, np.int32))
        ids, _, _ = origin.unroll()
        np.testing.assert_array_equal(row.prompt[: len(ids)], ids)

  def test_rows_know_where_they_branched_off(self):
    messages = [*self.turn([ask('q')], 'a'), ask('b')]
    main = [*self.turn([*self.turn(messages, 'c'), ask('d')], 'e'), ask('f')]
    retry = [*self.turn(messages, 'another c'), ask('d')]  # from an earlier state
    for _ in range(2):
      self.turn([*self.turn(retry, 'g'), ask('h')], 'i')  # a branch of a branch
    self.turn([ask('a question of its own')], 'j')
    self.turn(main, 'k')
    self.check_origins({0: None, 1: (0, 1), 2: (1, 1), 3: None})

  def test_samples_of_one_request_have_one_origin(self):
    messages = [*self.turn([ask('q')], 'a'), ask('b')]
    plan = self.session.plan(messages)
    for each in (plan, self.session.fork(plan)):
      tokens = self.tokenizer.encode('c')
      self.session.record(each, tokens, [-0.5] * len(tokens), [say('c')])
    self.check_origins({0: None, 1: (0, 1)})

  @parameterized.parameters(str, list)
  def test_branch_of_prompt_is_continued(self, kind):
    def turn(prompt, text):
      plan = self.session.plan_prompt(prompt)
      tokens = self.tokenizer.encode(text)
      self.session.record(plan, tokens, [-0.5] * len(tokens), [say('')])
      return prompt + text if kind is str else [*plan.ids, *tokens]

    prompt = 'question' if kind is str else self.tokenizer.encode('question')
    for number in range(3):
      prompt = turn(prompt, f' turn {number}')
    for name in 'ab':
      branch = prompt
      for number in range(4):
        branch = turn(branch, f' {name}{number}')
    self.assertEqual(self.num_turns_of_rows(), [7, 4])

  def test_equal_samples_continue_their_own_rows(self):
    messages = self.turn(self.turn([ask('q')], 'a') + [ask('b')], 'c') + [ask('d')]
    twins = [self.turn(messages, 'same') for _ in range(2)]
    for number, twin in enumerate(twins):
      longer = self.turn([*twin, ask('e')], f'f{number}')
      self.turn([*longer, ask('g')], 'h')
    self.assertEqual(self.num_turns_of_rows(), [5, 3])

  @parameterized.parameters(1, 3, 8)
  def test_ended_stream_is_recorded_when_it_returns(self, kept):
    plan = self.session.plan([ask('q')])
    tokens = self.tokenizer.encode('Paris is the capital of France')
    logp = [-0.1 * number for number in range(len(tokens))]
    self.session.abandon(plan, tokens, logp)
    self.assertEqual(self.session.counts['unrecorded'], 1)
    self.assertEqual(self.num_turns_of_rows(), [])
    text = self.tokenizer.decode(tokens[:kept])
    self.turn([ask('q'), say(text + '\n'), ask('go on')], 'It is.')
    (row,) = self.session.episodes(None, 0)
    self.assertEqual(row.turns[0].tokens.tolist(), tokens[:kept])
    np.testing.assert_array_equal(row.turns[0].logp, np.float32(logp[:kept]))
    self.assertLen(row.turns, 2)
    self.assertEqual(self.session.counts['unrecorded'], 0)
    self.assertEqual(self.session.counts['conversations'], 1)

  def stream(self, plan, tokens):
    """A streamed request of which `tokens` were sent. Returns what is called to cancel it."""
    cancel = mock.Mock()
    self.session.follow(plan, lambda: (tokens, [-0.1 * i for i in range(len(tokens))]), cancel)
    return cancel

  @parameterized.product(kept=(1, 3, 8), is_recorded=(False, True))
  def test_stream_ends_where_the_next_request_has_it_end(self, kept, is_recorded):
    """A program stops reading and leaves the stream open, or reads slowly."""
    before = self.turn([ask('q')], 'a') + [ask('r')]
    plan = self.session.plan(before)
    tokens = self.tokenizer.encode('Paris is the capital of France')
    logp = [-0.1 * number for number in range(len(tokens))]
    cancel = self.stream(plan, tokens)
    if is_recorded:
      whole = say(self.tokenizer.decode(tokens))
      self.session.record(plan, tokens, logp, [whole], was_cut=True)
    text = self.tokenizer.decode(tokens[:kept])
    self.turn([*before, say(text), ask('go on')], 'It is.')
    if not is_recorded:
      cancel.assert_called_once()
      self.assertIsNone(self.session.record(plan, tokens, logp, [say('whole')]))
      self.session.abandon(plan, tokens, logp)
    (row,) = self.session.episodes(None, 0)
    self.assertLen(row.turns, 3)
    self.assertEqual(row.turns[1].tokens.tolist(), tokens[:kept])
    np.testing.assert_array_equal(row.turns[1].logp, np.float32(logp[:kept]))
    self.assertStartsWith(self.session.transcript, f'ar{text}')
    counts = {name: count for name, count in self.session.counts.items() if count}
    self.assertEqual(counts, {'conversations': 1})

  @parameterized.product(kind=(str, list), is_recorded=(False, True))
  def test_stream_of_prompt_ends_where_the_next_one_has_it_end(self, kind, is_recorded):
    tokens = self.tokenizer.encode('Paris is the capital')
    prompt = 'which?' if kind is str else self.tokenizer.encode('which?')
    plan = self.session.plan_prompt(prompt)
    self.stream(plan, tokens)
    if is_recorded:
      self.session.record(plan, tokens, [-0.5] * len(tokens), [say('')])
    kept = tokens[:4]
    begun = prompt + self.tokenizer.decode(kept) if kind is str else [*prompt, *kept]
    end = '#!' if kind is str else self.tokenizer.encode('#!')
    later = self.session.plan_prompt(begun + end)
    self.assertEqual(later.ids, [*plan.ids, *kept, *self.tokenizer.encode('#!')])
    self.session.record(later, [5], [-0.5], [say('')])
    (row,) = self.session.episodes(None, 0)
    self.assertEqual(row.turns[0].tokens.tolist(), kept)
    self.assertLen(row.turns, 2)

  def test_stream_that_came_back_whole_cuts_no_other_one(self):
    """Two samples, of which one begins with the other."""
    plans = [self.session.plan([ask('q')])]
    plans.append(self.session.fork(plans[0]))
    texts = ['Paris is', 'Paris']
    for plan, text in zip(plans, texts):
      tokens = self.tokenizer.encode(text)
      self.stream(plan, tokens)
      self.session.record(plan, tokens, [-0.5] * len(tokens), [say(text)])
    for text in texts:
      self.turn([ask('q'), say(text), ask('go on')], 'It is.')
    rows = self.session.episodes(None, 0)
    found = [self.tokenizer.decode(row.turns[0].tokens) for row in rows]
    self.assertCountEqual(found, texts)
    self.assertEqual(self.num_turns_of_rows(), [2, 2])

  def test_stream_with_a_turn_after_it_stays_whole(self):
    plan = self.session.plan([ask('q')])
    tokens = self.tokenizer.encode('Paris is')
    self.stream(plan, tokens)
    self.session.record(plan, tokens, [-0.5] * len(tokens), [say('Paris is')])
    self.turn([ask('q'), say('Paris is'), ask('go on')], 'It is.')
    self.turn([ask('q'), say('Paris'), ask('go on')], 'It is.')
    self.assertEqual(self.num_turns_of_rows(), [2, 1])
    self.assertEqual(self.session.counts['rewritten'], 1)

  def test_stream_in_progress_is_last_text_of_a_program_that_has_ended(self):
    plan = self.session.plan([ask('q')])
    tokens = self.tokenizer.encode('<answer> Paris </answer>')
    cancel = self.stream(plan, tokens)
    self.session.leave_streams()
    cancel.assert_called_once()
    self.assertEqual(self.session.last_text, '<answer> Paris </answer>')
    self.assertEqual(self.session.counts['unrecorded'], 1)

  def test_ended_stream_after_retry_is_not_recorded(self):
    """The row holds the answer that the client has used, although both begin with one text."""
    plan = self.session.plan([ask('q')])
    tokens = self.tokenizer.encode('Paris is')
    self.session.abandon(plan, tokens, [-0.5] * len(tokens))
    messages = self.turn([ask('q')], 'Paris is')
    self.turn([*messages, ask('go on')], 'It is.')
    self.assertEqual(self.num_turns_of_rows(), [2])
    self.assertEqual(self.session.counts['unrecorded'], 1)

  @parameterized.parameters('b', 'a branch with more tokens than the prompt of the other one has')
  def test_ended_stream_returns_after_another_branch(self, other):
    """Another request has continued the row, with fewer or with more tokens."""
    messages = self.turn([ask('q')], 'first')
    long = [*messages, ask('a follow-up with some more words')]
    plan = self.session.plan(long)
    tokens = self.tokenizer.encode('Lima is')
    self.session.abandon(plan, tokens, [-0.25] * len(tokens))
    self.turn([*messages, ask(other)], 'second')
    self.turn([*long, say('Lima is'), ask('go on')], 'It is.')
    row, branch = self.session.episodes(None, 0)
    ids, _, _ = row.unroll()
    self.assertLen(row.turns, 2)
    self.assertIn(other, self.tokenizer.decode(ids))
    self.assertEqual(branch.prompt.tolist(), plan.ids)
    self.assertEqual(branch.turns[0].tokens.tolist(), tokens)
    self.assertEqual(branch.branched_from, (0, 1))
    self.assertLen(branch.turns, 2)

  @parameterized.parameters(str, list)
  def test_ended_stream_of_prompt_is_recorded(self, kind):
    tokens = self.tokenizer.encode('Paris é中 is')
    prompt = 'which?' if kind is str else self.tokenizer.encode('which?')
    self.session.abandon(self.session.plan_prompt(prompt), tokens, [-0.5] * len(tokens))
    longer = 'which?Paris é中 so' if kind is str else [*prompt, *tokens[:-2], 7]
    plan = self.session.plan_prompt(longer)
    self.session.record(plan, [5], [-0.5], [say('')])
    (row,) = self.session.episodes(None, 0)
    begun = self.tokenizer.encode('Paris é中 ') if kind is str else tokens[:-2]
    self.assertEqual(row.turns[0].tokens.tolist(), begun[: len(row.turns[0].tokens)])
    self.assertGreater(len(row.turns[0].tokens), 2)
    self.assertLen(row.turns, 2)

  def test_lost_attempt_is_no_conversation(self):
    self.session.abandon(self.session.plan([ask('q')]))
    self.turn([ask('q')], 'a')
    self.assertEqual(self.session.counts['conversations'], 1)
    self.assertEqual(self.session.counts['unrecorded'], 0)

  def test_ended_stream_is_last_text(self):
    """A reward of the answer in the last turn reads it, recorded or not."""
    self.turn([ask('q')], 'Lima')
    plan = self.session.plan([ask('r')])
    tokens = self.tokenizer.encode('<answer> Paris </answer>')
    self.session.abandon(plan, tokens, [-0.5] * len(tokens))
    self.assertEqual(self.session.last_text, '<answer> Paris </answer>')

  @parameterized.parameters(600, 900)
  def test_nested_call_leaves_no_half_recorded_turn(self, depth):
    value = []
    for _ in range(depth):
      value = [value]
    call = {'function': {'name': 'add', 'arguments': {'a': value}}}
    plan = self.session.plan([ask('q')])
    self.session.record(plan, [5], [-0.5], [say('x'), say('', call)])
    self.turn([ask('r')], 'b')
    self.turn([ask('q'), say('x'), ask('r')], 'b')
    self.assertEqual(self.num_turns_of_rows(), [2, 1])

  def test_rejected_text_after_turn_starts_row(self):
    """A template in which roles alternate has no message for it."""
    self.session = self.make_session(tiny_tokenizer.load(ALTERNATES))
    self.turn([ask('q')], 'x = 1')
    self.turn([ask('q'), say('x = 1\n</code>'), ask('r')], 'y')
    self.assertEqual(self.num_turns_of_rows(), [1, 1])
    self.assertEqual(self.session.counts['rewritten'], 1)

  def test_planning_compares_few_turns(self):
    """A conversation with none of the recorded turns, in a session with many."""
    for row in range(8):
      messages = [ask(f'question {row}')]
      for number in range(10):
        messages = [*self.turn(messages, f'{row} says {number}'), ask('go on')]
    new = [message for number in range(100) for message in (ask('q'), say(f'other {number}'))]
    with mock.patch.object(turns_lib, 'match', wraps=turns_lib.match) as match:
      self.session.plan([*new, ask('q')])
      self.assertLess(match.call_count, 100)
      self.session.plan([*new, say('3 says  7'), ask('q')])
    self.assertEqual(self.session.counts['rewritten'], 1)


class AgentsTest(parameterized.TestCase):
  """Programs whose client says which agent sends a request, and which agent has started it."""

  def setUp(self):
    super().setUp()
    self.session = self.make_session()

  def make_session(self, **recording):
    return sessions.Session(
        IDS_ONLY, jax.random.key(0), sessions.Sampling(), recording=sessions.Recording(**recording)
    )

  def turn(self, prompt, tokens, agent='', parent=''):
    """The model says tokens. Returns the conversation with them, and an observation."""
    plan = self.session.plan_prompt(prompt, sessions.ClientAgent(agent, parent))
    self.session.record(plan, tokens, [-0.5] * len(tokens), [{'role': 'assistant', 'content': ''}])
    return [*prompt, *tokens, 99]

  def rows(self):
    """Returns {number: (agent, parent, branched_from, turns)}, as records keep them."""
    found = {}
    for row in self.session.episodes(Task('t', 'q', ('a',)), 0):
      row = Episode.from_dict(row.to_dict())
      found[row.segment] = (row.agent_id, row.parent, row.branched_from, len(row.turns))
    return found

  def test_sub_agents_and_compaction_are_a_tree(self):
    main = self.turn([1], [2], 'main')
    first = self.turn([3], [4], 'first', 'main')
    main = self.turn(main, [5], 'main')  # while the sub-agent is at work
    self.turn([6], [7], 'second', 'main')
    self.turn([8], [9], 'inner', 'first')
    self.turn(first, [10], 'first', 'main')
    self.turn([11], [12], 'main')  # a summary in place of the history
    self.turn(main, [13], 'main')  # the row before it continues
    expected = {
        0: ('main', None, None, 3),
        1: ('first', (0, 1), None, 2),
        2: ('second', (0, 2), None, 1),
        3: ('inner', (1, 1), None, 1),
        4: ('main', (0, 2), None, 1),
    }
    self.assertEqual(self.rows(), expected)
    self.assertEqual(self.session.counts['wrong_parents'], 0)

  def test_agent_that_inherits_history_has_own_row(self):
    """It continues the history to the last turn, and its parent continues it, too."""
    main = self.turn([1], [2], 'main')
    child = self.turn(main, [3], 'child', 'main')
    self.turn(main, [4], 'main')
    self.turn(child, [5], 'child', 'main')
    expected = {0: ('main', None, None, 2), 1: ('child', None, (0, 1), 2)}
    self.assertEqual(self.rows(), expected)

  def test_request_without_id_is_matched_by_tokens(self):
    main = self.turn([1], [2], 'main')
    self.turn(main, [3])
    self.turn(main, [4])
    self.turn([5], [6])
    expected = {0: ('main', None, None, 2), 1: ('', None, (0, 1), 1), 2: ('', None, None, 1)}
    self.assertEqual(self.rows(), expected)
    self.assertEqual(self.session.counts['wrong_parents'], 0)

  @parameterized.named_parameters(
      ('unknown', [('a', 'b')], 'b'),
      ('itself', [('a', 'a')], 'a'),
      ('loop', [('a', 'b'), ('b', 'a'), ('a', 'b')], 'b'),
      ('without_own_id', [('a', ''), ('', 'a')], 'a'),
      ('another_than_before', [('a', ''), ('b', ''), ('c', 'a'), ('c', 'b')], 'b'),
      ('later_than_first_row', [('a', ''), ('b', ''), ('b', 'a')], 'a'),
  )
  def test_wrong_parent_loses_no_turn(self, agents, wrong):
    """Each request begins a row. The row of every parent is older than its children."""
    for number, (agent, parent) in enumerate(agents):
      self.turn([number], [50 + number], agent, parent)
    rows = self.rows()
    self.assertLen(rows, len(agents))
    for number, (_, parent, _, _) in rows.items():
      self.assertTrue(parent is None or parent[0] < number, rows)
    num_wrong = agents.count(agents[-1])
    self.assertEqual(self.session.counts['wrong_parents'], num_wrong)
    self.assertEqual(self.session.wrong_parent, wrong)

  def test_samples_of_one_request_have_one_parent(self):
    self.turn([1], [2], 'main')
    plan = self.session.plan_prompt([3], sessions.ClientAgent('child', 'main'))
    for each in (plan, self.session.fork(plan)):
      self.session.record(each, [4], [-0.5], [{'role': 'assistant', 'content': ''}])
    self.assertEqual([parent for _, parent, _, _ in self.rows().values()], [None, (0, 1), (0, 1)])

  def rewards(self, **kwargs):
    rows = self.session.episodes(Task('t', 'q', ('a',)), 0, **kwargs)
    self.assertLen({row.whole_score for row in rows}, 1)
    by_row = {row.segment: [turn.reward for turn in row.turns] for row in rows}
    return by_row, rows[0].whole_score

  def play_with_rewards(self):
    main = self.turn([1], [2], 'main')
    self.turn([3], [4], 'child', 'main')
    self.turn([5], [6], 'child', 'main')  # after a summary
    self.turn([7], [8])
    self.turn(main, [9], 'main')
    self.session.reward(0.5, turn=2)
    self.session.reward(1.0)

  def test_reward_of_agent_replaces_that_of_episode(self):
    self.session = self.make_session(credits_branches=True)
    self.play_with_rewards()
    whole = ({0: [0.0, 1.0], 1: [1.5], 2: [1.0], 3: [1.0]}, 1.5)
    self.assertEqual(self.rewards(), whole)
    self.session.reward(-2.0, agent='child')
    self.assertEqual(self.rewards(), ({0: [0.0, 1.0], 1: [-1.5], 2: [-2.0], 3: [1.0]}, 1.5))
    single, score = self.rewards(first_is_whole=True)
    self.assertEqual((single[0], score), ([0.0, 1.5], 1.5))  # an evaluation has the episode's score

  def test_reward_of_agent_leaves_episode_to_its_score(self):
    """The reward function scores an episode whose program has posted rewards of agents only."""
    self.session = self.make_session(credits_branches=True)
    self.turn([1], [2], 'main')
    self.session.reward(0.0, agent='main')
    self.assertFalse(self.session.has_reward)
    self.session.reward(1.0)
    self.assertEqual(self.rewards(), ({0: [0.0]}, 1.0))

  @parameterized.parameters(
      (True, 'other', None, "session='other'.*('main')"),
      (True, '', None, 'X-Session-Id'),
      (True, 'main', 1, 'leave one out'),
      (False, 'main', None, 'branch_credit'),
  )
  def test_wrong_reward_of_agent_is_an_error(self, credits_branches, agent, turn, words):
    self.session = self.make_session(credits_branches=credits_branches)
    self.turn([1], [2], 'main')
    self.turn([3], [4])
    with self.assertRaisesRegex(UserError, words):
      self.session.reward(1.0, turn, agent=agent)
    self.assertEqual(self.rewards(), ({0: [0.0], 1: [0.0]}, 0.0))


if __name__ == '__main__':
  absltest.main()
