"""Tests of the search environment: the contract of prompts, actions, turns and observations."""

import math
import re

from absl.testing import absltest
from absl.testing import parameterized
import hypothesis
from hypothesis import strategies

from stppo_jax import types
from stppo_jax.data import tasks
from stppo_jax.envs import protocol
from stppo_jax.envs import rewards
from stppo_jax.envs import search

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


def start(task=TASK, retriever=None, **settings):
  env = search.SearchEnv(task, retriever or FakeRetriever(), **settings)
  env.reset()
  return env


class ContractTest(parameterized.TestCase):

  def test_types_are_gems(self):
    env = search.SearchEnv(TASK, FakeRetriever())
    self.assertIsInstance(env, protocol.Env)
    self.assertEqual([type(part) for part in env.reset(seed=3)], [str, dict])
    for action in (SEARCH, 'nothing', ANSWER):
      self.assertEqual([type(part) for part in env.step(action)], [str, float, bool, bool, dict])

  def test_prompts(self):
    text, _ = search.SearchEnv(TASK, FakeRetriever()).reset()
    self.assertEndsWith(text, 'Question: what is the capital of France?\n')
    for part in ('<think>', '<search>', '<information>', '<answer> Beijing </answer>'):
      self.assertIn(part, text)
    text, _ = search.SearchEnv(CHOICE, FakeRetriever()).reset()
    self.assertEndsWith(text, 'Question: Which is a city?\nA) Carbon\nB) Paris\nC) A vitamin\n')
    braces = types.Task(id='t', question='What is {0} {x}?', answers=('y',))
    for task, expected in (
        (TASK, 'Question: what is the capital of France?\n'),
        (CHOICE, 'Question: Which is a city? A) Carbon B) Paris C) A vitamin\n'),
        (braces, 'Question: What is {0} {x}?\n'),
    ):
      self.assertEqual(search.prompt_text(task, 'short'), expected)

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
        start().step(SEARCH)[0],
        '\n\n<information>Doc 1(Title: "Paris") Capital of France.\n'
        'Doc 2(Title: "Seine") A river.</information>\n\n',
    )
    short = '<information> Paris: Capital of France.\n Seine: A river.\n</information>\n'
    self.assertEqual(start(prompt='short').step(SEARCH)[0], short)

  @hypothesis.given(
      strategies.lists(
          strategies.tuples(
              strategies.text('ab "\'', max_size=4), strategies.text('ab \n"', max_size=8)
          ),
          max_size=3,
      )
  )
  def test_passages_are_formatted_as_in_search_r1(self, pairs):
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

  def test_custom_wording(self):
    env = start(instructions='Find it. ', invalid_message='\nNo.\n')
    self.assertEqual(env.reset()[0], 'Find it. Question: what is the capital of France?\n')
    self.assertEqual(env.step('Paris!')[0], '\nNo.\n')

  def test_search_info(self):
    retriever = FakeRetriever()
    *outcome, info = start(retriever=retriever, top_k=1).step(SEARCH)
    self.assertEqual(outcome[1:], [0.0, False, False])
    self.assertEqual(retriever.calls, [(['capital of France'], 1)])
    expected = {
        'action': 'search',
        'query': 'capital of France',
        'answer': None,
        'retrieval_failed': False,
        'passage_ids': ['p1'],
        'metrics': {'em': 0.0, 'f1': 0.0, 'sub_em': 0.0, 'searches': 1.0},
    }
    self.assertEqual(info, expected)

  @parameterized.parameters('search_r1', 'short')
  def test_invalid_action_names_both_forms(self, style):
    observation, reward, terminated, truncated, info = start(prompt=style).step('Paris!')
    for part in ('<search>', '</search>', '<answer>', '</answer>'):
      self.assertIn(part, observation)
    self.assertEqual((reward, terminated, truncated), (0.0, False, False))
    self.assertEqual(info['action'], 'invalid')
    if style == 'search_r1':  # one line in the agent's own voice
      self.assertRegex(observation, r'^\n[^\n]+\bI\b[^\n]+\n$')

  @parameterized.parameters(
      ('search_r1', '\n\n<information></information>\n\n'),
      ('short', '<information></information>\n'),
  )
  def test_failed_search_is_an_empty_block(self, style, expected):
    env = start(retriever=FakeRetriever(None), prompt=style)
    observation, _, terminated, _, info = env.step(SEARCH)
    self.assertEqual(observation, expected)
    self.assertTrue(info['retrieval_failed'])
    self.assertFalse(terminated)
    self.assertEqual(env.step(ANSWER)[1], 1.0)

  def test_nothing_found_is_not_a_failure(self):
    observation, *_, info = start(retriever=FakeRetriever(())).step(SEARCH)
    self.assertEqual(observation, '\n\n<information></information>\n\n')
    self.assertFalse(info['retrieval_failed'])

  # s search, i invalid, a right answer, w wrong answer. After max_searches turns one turn is left,
  # and only an answer counts there.
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
  def test_turn_limit(self, max_searches, played, searches, reward, truncated):
    texts = {'s': SEARCH, 'i': 'hm', 'a': ANSWER, 'w': '<answer>Rome</answer>'}
    retriever = FakeRetriever()
    env = search.SearchEnv(TASK, retriever, max_searches=max_searches)
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
    env = search.SearchEnv(TASK, None, max_searches=0)
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
    _, reward, *_, info = start(CHOICE).step(f'<answer>{answer}</answer>')
    self.assertEqual((reward, info['metrics']['em']), (expected, expected))
    if expected:
      self.assertEqual(info['metrics']['f1'], 1.0)

  def test_letter_a_is_not_an_article(self):
    task = types.Task('t', 'q', ('x',), options=(('A', 'x'), ('B', 'y')), letter='A')
    for answer, expected in (('A', 1.0), ('', 0.0), ('the', 0.0), ('B', 0.0)):
      self.assertEqual(start(task).step(f'<answer>{answer}</answer>')[1], expected)

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
    env = start(reward=rewards.REWARDS[reward], max_searches=1)
    env.step(SEARCH)
    self.assertAlmostEqual(env.step(action)[1], expected)

  def test_invalid_turn_spoils_the_form(self):
    env = start(reward=rewards.REWARDS['format'])
    env.step('Paris')
    self.assertEqual(env.step(ANSWER)[1], 0.8)

  def test_reward_must_be_finite(self):
    for given in (None, 'good', math.nan, {}):
      env = start(reward=lambda task, answer, transcript, given=given: given)
      with self.assertRaisesRegex(types.UserError, "^the reward .* gave .* to the task 't"):
        env.step('<answer>red</answer>')


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
      strategies.sampled_from(['search_r1', 'short']),
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


if __name__ == '__main__':
  absltest.main()
