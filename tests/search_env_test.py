"""Tests of the search environment: the contract of prompts, actions, turns and observations."""

from concurrent import futures
import inspect
import math
import random
import re
import threading
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized
import hypothesis
from hypothesis import strategies
import numpy as np

from stppo_jax import tasks
from stppo_jax import types
from stppo_jax.envs import factory
from stppo_jax.envs import protocol
from stppo_jax.envs import search
from stppo_jax.envs import stepping

TASK = types.Task(id='t0', question=' what is the capital of France ', answers=('Paris', 'Lutetia'))
CHOICE = types.Task(
    id='t1',
    question='Which is a city?',
    answers=('Paris',),
    letter='B',
    options=(('A', 'Carbon'), ('B', 'Paris'), ('C', 'A vitamin')),
)
FOUND = (
    types.Passage('p1', 'Paris', 'Capital of France.'),
    types.Passage('p2', 'Seine', 'A river.'),
)
SEARCH = '<think>hm</think><search> capital of France </search>'
ANSWER = '<think>so</think><answer> Paris </answer>'


class FakeRetriever:
  """Answers from a table, and records the queries."""

  def __init__(self, results=FOUND):
    self.results = results
    self.calls = []

  def search(self, queries, top_k):
    self.calls.append((list(queries), top_k))
    return [None if self.results is None else list(self.results)[:top_k] for _ in queries]


class ForeignEnv:
  """Like the games of GEM: seeds the process; no `query`, no `passages`."""

  def reset(self, seed=None):
    random.seed(seed)
    np.random.seed(seed)
    return f'guess {random.random()} {np.random.rand()}', {'suffix': ' Enter a number: '}

  def step(self, action):
    return action.upper(), 0.5, False, False, {}


def _start(task=TASK, retriever=None, **settings):
  env = search.SearchEnv(task, retriever or FakeRetriever(), **settings)
  env.reset()
  return env


class ContractTest(parameterized.TestCase):

  def test_signature_is_gems(self):
    env = search.SearchEnv(TASK, FakeRetriever())
    self.assertIsInstance(env, protocol.Env)
    self.assertIsInstance(ForeignEnv(), protocol.Env)
    self.assertIsNone(inspect.signature(env.reset).parameters['seed'].default)
    self.assertEqual([type(part) for part in env.reset(seed=3)], [str, dict])
    for action in (SEARCH, 'nothing', ANSWER):
      self.assertEqual([type(part) for part in env.step(action)], [str, float, bool, bool, dict])

  def test_prompt(self):
    text, _ = search.SearchEnv(TASK, FakeRetriever()).reset()
    self.assertEndsWith(text, 'Question: what is the capital of France?\n')
    for part in ('<think>', '<search>', '<information>', '<answer> Beijing </answer>'):
      self.assertIn(part, text)

  def test_prompt_short(self):
    text, _ = search.SearchEnv(TASK, FakeRetriever(), prompt='short').reset()
    self.assertEqual(text, 'Question: what is the capital of France?\n')

  def test_prompt_of_multiple_choice(self):
    text, _ = search.SearchEnv(CHOICE, FakeRetriever(), prompt='short').reset()
    self.assertEqual(text, 'Question: Which is a city? A) Carbon B) Paris C) A vitamin\n')
    text, _ = search.SearchEnv(CHOICE, FakeRetriever()).reset()
    self.assertEndsWith(text, 'Question: Which is a city?\nA) Carbon\nB) Paris\nC) A vitamin\n')

  def test_question_with_braces(self):
    task = types.Task(id='t', question='What is {0} {x}?', answers=('y',))
    self.assertEndsWith(search.prompt_text(task, 'search_r1'), 'Question: What is {0} {x}?\n')

  @parameterized.parameters(
      ('<search> a b </search>', 'search', 'a b'),
      ('<answer>\nx\ny </answer>', 'answer', 'x\ny'),
      ('<answer>1</answer><search>2</search>', 'answer', '1'),
      ('<search>1</search><answer>2</answer>', 'search', '1'),
      ('<search>1 <answer>2</answer>', 'answer', '2'),  # the first complete one
      ('<search>1</answer>', 'invalid', ''),
      ('<search></search>', 'search', ''),
      ('<Answer>x</Answer>', 'invalid', ''),
      ('', 'invalid', ''),
  )
  def test_parse_action(self, text, kind, content):
    self.assertEqual(search.parse_action(text), (kind, content))

  def test_observation(self):
    self.assertEqual(
        _start().step(SEARCH)[0],
        '\n\n<information>Doc 1(Title: "Paris") Capital of France.\n'
        'Doc 2(Title: "Seine") A river.</information>\n\n',
    )
    short = '<information> Paris: Capital of France.\n Seine: A river.\n</information>\n'
    self.assertEqual(_start(prompt='short').step(SEARCH)[0], short)
    self.assertEqual(_start(observation='short').step(SEARCH)[0], short)

  @hypothesis.given(
      strategies.lists(
          strategies.tuples(
              strategies.text('ab "\'', max_size=4), strategies.text('ab \n"', max_size=8)
          ),
          max_size=3,
      )
  )
  def test_passages_are_shown_as_search_r1_shows_their_contents(self, pairs):
    """`contents` in; per passage its first line as the title, and the rest; stripped as a whole."""
    contents = [f'"{title}"\n{text}' if title else text.strip() for title, text in pairs]
    passages = [types.Passage('', *tasks.read_contents(text)) for text in contents]
    docs = ''
    for i, passage in enumerate(passages, start=1):
      lines = tasks.write_contents(passage).split('\n')
      docs += f'Doc {i}(Title: {lines[0]}) ' + '\n'.join(lines[1:]) + '\n'
    self.assertEqual(
        search.observation_text(passages, 'search_r1'),
        '\n\n<information>' + docs.strip() + '</information>\n\n',
    )

  def test_the_message_on_an_invalid_action_is_a_line_of_its_own(self):
    message = _start().step('Paris!')[0]
    self.assertRegex(message, r'^\n[^\n]+\bI\b[^\n]+\n$')
    self.assertLess(
        message.index('<search> and </search>'), message.index('<answer> and </answer>')
    )

  def test_a_checkpoint_of_other_sentences_gets_them(self):
    env = _start(instructions='Find it. ', invalid_message='\nNo.\n')
    self.assertEqual(env.reset()[0], 'Find it. Question: what is the capital of France?\n')
    self.assertEqual(env.step('Paris!')[0], '\nNo.\n')

  def test_search_info(self):
    retriever = FakeRetriever()
    observation, reward, terminated, truncated, info = _start(retriever=retriever, top_k=1).step(
        SEARCH
    )
    self.assertEqual((reward, terminated, truncated), (0.0, False, False))
    self.assertEqual(retriever.calls, [(['capital of France'], 1)])
    self.assertEqual(
        info,
        {
            'action': 'search',
            'query': 'capital of France',
            'answer': None,
            'retrieval_failed': False,
            'metrics': {'em': 0.0, 'f1': 0.0, 'sub_em': 0.0, 'searches': 1.0},
            'passage_ids': ['p1'],
            'suffix': '',
        },
    )
    self.assertEqual(protocol.full_text(observation, info), observation)

  @parameterized.parameters('search_r1', 'short')
  def test_invalid_action_names_both_forms(self, style):
    observation, reward, terminated, truncated, info = _start(prompt=style).step('Paris!')
    for part in ('<search>', '</search>', '<answer>', '</answer>'):
      self.assertIn(part, observation)
    self.assertEqual((reward, terminated, truncated), (0.0, False, False))
    self.assertEqual(info['action'], 'invalid')

  @parameterized.parameters(
      ('search_r1', '\n\n<information></information>\n\n'),
      ('short', '<information></information>\n'),
  )
  def test_failed_retrieval_is_an_empty_block(self, style, expected):
    env = _start(retriever=FakeRetriever(None), prompt=style)
    observation, _, terminated, _, info = env.step(SEARCH)
    self.assertEqual(observation, expected)
    self.assertTrue(info['retrieval_failed'])
    self.assertEqual(info['passage_ids'], [])
    self.assertFalse(terminated)
    self.assertEqual(env.step(ANSWER)[1], 1.0)

  def test_nothing_found_is_not_a_failure(self):
    observation, *_, info = _start(retriever=FakeRetriever(())).step(SEARCH)
    self.assertEqual(observation, '\n\n<information></information>\n\n')
    self.assertFalse(info['retrieval_failed'])

  # s search, i invalid, a right answer, w wrong answer. After max_turns actions one generation is
  # left, and only an answer counts there.
  @parameterized.parameters(
      # turns, played, searches, reward, truncated
      (0, 'a', 0, 1.0, False),
      (0, 's', 0, 0.0, True),
      (0, 'i', 0, 0.0, True),
      (1, 'a', 0, 1.0, False),
      (1, 'sa', 1, 1.0, False),
      (1, 'ss', 1, 0.0, True),
      (1, 'ia', 0, 1.0, False),
      (1, 'is', 0, 0.0, True),  # an invalid action uses up the only turn
      (1, 'ii', 0, 0.0, True),
      (2, 'ssa', 2, 1.0, False),
      (2, 'siw', 1, 0.0, False),
      (2, 'sss', 2, 0.0, True),
      (2, 'sw', 1, 0.0, False),
      (4, 'ssssa', 4, 1.0, False),
      (4, 'sssss', 4, 0.0, True),
  )
  def test_turn_limit(self, max_turns, played, searches, reward, truncated):
    texts = {'s': SEARCH, 'i': 'hm', 'a': ANSWER, 'w': '<answer>Rome</answer>'}
    retriever = FakeRetriever()
    env = search.SearchEnv(TASK, retriever, max_turns=max_turns)
    for _ in range(2):  # reset() starts again
      retriever.calls.clear()
      env.reset()
      for letter in played[:-1]:
        observation, step_reward, *over, _ = env.step(texts[letter])
        self.assertEqual((step_reward, over), (0.0, [False, False]))
        self.assertNotEmpty(observation)
      observation, *last, info = env.step(texts[played[-1]])
      self.assertEqual((observation, last), ('', [reward, True, truncated]))
      self.assertEqual((info['metrics']['em'], info['metrics']['f1']), (reward, reward))
      self.assertLen(retriever.calls, searches)
      with self.assertRaises(RuntimeError):
        env.step(ANSWER)

  def test_closed_book_needs_no_retriever(self):
    env = search.SearchEnv(TASK, None, max_turns=0)
    text, _ = env.reset()
    self.assertNotIn('search', text)
    for part in ('<think>', '<answer> Beijing </answer>', 'Question: what is the capital of'):
      self.assertIn(part, text)
    self.assertIsNone(env.query(SEARCH))
    self.assertEqual(env.step(SEARCH)[1:4], (0.0, True, True))

  def test_step_before_reset(self):
    with self.assertRaises(RuntimeError):
      search.SearchEnv(TASK, FakeRetriever()).step(ANSWER)

  @parameterized.parameters(
      ('B', 1.0),
      ('b', 1.0),
      ('(B)', 1.0),
      ('B.', 1.0),
      ('B) Paris', 1.0),
      ('the paris', 1.0),
      ('B)Paris', 1.0),
      ('B) Carbon', 0.0),
      ('A', 0.0),
      ('A) Paris', 0.0),
      ('Carbon', 0.0),
      ('', 0.0),
      ('D', 0.0),
      ('Bparis', 0.0),
      ('A. Paris', 0.0),
      ('A Paris', 1.0),
      ('C', 0.0),
      ('A vitamin', 0.0),
  )
  def test_multiple_choice(self, answer, expected):
    _, reward, *_, info = _start(CHOICE).step(f'<answer>{answer}</answer>')
    self.assertEqual((reward, info['metrics']['em']), (expected, expected))

  def test_multiple_choice_letter_has_full_f1(self):
    *_, info = _start(CHOICE).step('<answer>B</answer>')
    self.assertEqual(info['metrics']['f1'], 1.0)

  def test_letter_a_is_not_an_article(self):
    task = types.Task('t', 'q', ('x',), options=(('A', 'x'), ('B', 'y')), letter='A')
    for answer, expected in (('A', 1.0), ('', 0.0), ('the', 0.0), ('B', 0.0)):
      self.assertEqual(_start(task).step(f'<answer>{answer}</answer>')[1], expected)

  @parameterized.parameters(
      ('em', '<answer>It is Paris</answer>', 0.0),
      ('sub_em', '<answer>It is Paris</answer>', 1.0),
      ('f1', '<answer>It is Paris</answer>', 0.5),  # P 1/3, R 1
      ('format', ANSWER, 1.0),
      ('format', '<answer>lutetia</answer>', 0.8),
      ('format', ANSWER.replace('Paris', 'Rome'), 0.2),
      ('format', '<answer>Rome</answer>', 0.1),
      ('format', 'Rome', 0.0),
  )
  def test_rewards(self, reward, action, expected):
    env = _start(reward=reward, max_turns=1)
    env.step(SEARCH)
    self.assertAlmostEqual(env.step(action)[1], expected)

  def test_an_invalid_turn_spoils_the_form(self):
    env = _start(reward='format')
    env.step('Paris')
    self.assertEqual(env.step(ANSWER)[1], 0.8)

  @parameterized.parameters(
      ({'max_turns': -1}, 'max_turns=-1'),
      ({'top_k': 0}, 'top_k=0'),
      ({'prompt': 'long'}, "prompt='long'"),
      ({'observation': 'x'}, "observation='x'"),
      ({'reward': 'bleu'}, "reward='bleu'"),
      ({'retriever': None}, 'without a retriever'),
      ({'task': types.Task('t', 'q', ('a',), options=(('A', 'x'),), letter='B')}, "letter='B'"),
  )
  def test_user_errors(self, settings, message):
    with self.assertRaisesRegex(types.UserError, re.escape(message)):
      search.SearchEnv(**{'task': TASK, 'retriever': FakeRetriever(), **settings})


MARKERS = (
    '<think>',
    '</think>',
    '<search>',
    '</search>',
    '<information>',
    '</information>',
    '<answer>',
    '</answer>',
    '<|im_start|>',
    '<|im_end|>',
    '<|eot_id|>',
    '<s>',
    '</s>',
    '<start_of_turn>',
    '[INST]',
    '[/INST]',
    '<<SYS>>',
    '<\uff5cUser\uff5c>',
    '<tool_call>',
)


class ForgeryTest(parameterized.TestCase):

  @hypothesis.given(
      strategies.lists(
          strategies.tuples(
              *[
                  strategies.lists(
                      strategies.sampled_from(
                          MARKERS + ('<', '/', '>', '|', ' ', '\n', 'information>')
                      )
                      | strategies.text(max_size=3),
                      max_size=8,
                  ).map(''.join)
              ]
              * 2
          ),
          max_size=3,
      ),
      strategies.sampled_from(search.STYLES),
  )
  def test_no_passage_closes_or_forges_a_block(self, texts, style):
    passages = [types.Passage(str(i), *text) for i, text in enumerate(texts)]
    block = search.observation_text(passages, style)
    head, inside, tail = re.split('(?s)<information>(.*)</information>', block)
    self.assertEqual((head.strip(), tail.strip()), ('', ''))
    self.assertIsNone(re.search(r'<\S', inside))
    for marker in MARKERS:
      self.assertNotIn(marker, inside)
    self.assertEqual(search.neutralize(inside), inside)

  def test_wide_brackets(self):
    """Tokenizers with compatibility normalisation read these as the plain bracket."""
    self.assertEqual(
        search.neutralize('\uff1c/information>\ufe64s>'), '\uff1c /information>\ufe64 s>'
    )

  def test_plain_text_stays(self):
    for text in ('2 < 3 > 1, [NASA]', 'a\nb'):
      self.assertEqual(search.neutralize(text), text)


class StepAllTest(absltest.TestCase):

  def test_one_search_per_round(self):
    shared, other = FakeRetriever(), FakeRetriever(None)
    envs = [_start(retriever=shared) for _ in range(4)] + [
        ForeignEnv(),
        _start(retriever=other),
        _start(retriever=shared, top_k=1),
    ]
    actions = [SEARCH, ANSWER, 'hm', '<search>x</search>', 'up', SEARCH, SEARCH]
    steps = stepping.step_all(envs, actions)
    self.assertEqual(shared.calls, [(['capital of France', 'x'], 3), (['capital of France'], 1)])
    self.assertLen(other.calls, 1)
    alone = [
        env.step(action)
        for env, action in zip(
            [_start() for _ in range(4)]
            + [ForeignEnv(), _start(retriever=FakeRetriever(None)), _start(top_k=1)],
            actions,
        )
    ]
    self.assertEqual(steps, alone)

  def test_no_search_in_the_last_generation(self):
    retriever = FakeRetriever()
    envs = [_start(retriever=retriever, max_turns=1) for _ in range(2)]
    stepping.step_all(envs, [SEARCH, SEARCH])
    self.assertEqual(
        [step[1:4] for step in stepping.step_all(envs, [SEARCH, ANSWER])],
        [(0.0, True, True), (1.0, True, False)],
    )
    self.assertLen(retriever.calls, 1)

  def test_environments_may_be_stepped_at_once(self):
    """Four that wait for each other: one by one they would wait for ever."""
    barrier = threading.Barrier(4, timeout=60)

    class Waits:

      def step(self, action):
        barrier.wait()
        return action, 0.0, True, False, {}

    with futures.ThreadPoolExecutor(4) as pool:
      steps = stepping.step_all([Waits() for _ in range(4)], list('abcd'), pool.map)
    self.assertEqual([step[0] for step in steps], list('abcd'))

  def test_what_an_environment_returns_is_checked(self):
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
        stepping.step_all([factory.IsolatedEnv(ForeignEnv, 0)], ['a'])
    for found in ('text', ('text',), (1, {})):
      with mock.patch.object(env, 'reset', return_value=found):
        with self.assertRaisesRegex(types.UserError, '^reset of ForeignEnv returned .*a dict$'):
          stepping.reset(env, 0)

  def test_what_a_retriever_returns_is_checked(self):
    for found in (None, [], [['text']], ['text'], [7], [[FOUND[0]], None, None]):
      retriever = FakeRetriever()
      retriever.search = lambda queries, top_k, found=found: found
      env = _start(retriever=retriever)
      with self.assertRaisesRegex(types.UserError, '^the retriever returned .* for 1 queries'):
        stepping.step_all([env], ['<search>x</search>'])

  def test_what_a_reward_gives_is_checked(self):
    for given in (None, 'good', math.nan, {}):
      env = _start(reward=lambda task, answer, transcript, given=given: given)
      with self.assertRaisesRegex(types.UserError, "^the reward .* gave .* to the task 't"):
        env.step('<answer>red</answer>')

  def test_empty_round(self):
    self.assertEqual(stepping.step_all([], []), [])

  def test_an_isolated_environment_leaves_the_process_its_random_state(self):
    random.seed(1)
    np.random.seed(1)
    expected = random.random(), np.random.rand()
    random.seed(1)
    np.random.seed(1)
    env = factory.IsolatedEnv(ForeignEnv, 5)
    first, info = env.reset(seed=7)
    self.assertEqual((random.random(), np.random.rand()), expected)
    self.assertEqual(env.reset(seed=7)[0], first)
    self.assertEndsWith(protocol.full_text(first, info), ' Enter a number: ')

  def test_search_env_leaves_the_random_state_alone(self):
    state, numpy_state = random.getstate(), np.random.get_state()[1].copy()
    _start().reset(seed=3)
    self.assertEqual(random.getstate(), state)
    np.testing.assert_array_equal(np.random.get_state()[1], numpy_state)


if __name__ == '__main__':
  absltest.main()
