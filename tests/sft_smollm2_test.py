"""The warm start of a real model: demonstrations claim only what was read, cut as in a rollout."""

import functools
import re

from absl.testing import absltest
from absl.testing import parameterized
import jax
import numpy as np

from experiments import st_ppo_smollm2
from scripts import search_trajectories
from stppo_jax import tokenizer as chat
from stppo_jax.envs import factory
from stppo_jax.envs import search
from stppo_jax.rollout import engine
from stppo_jax.rollout import episode as episode_loop
from stppo_jax.rollout import prepare
from stppo_jax.types import Passage
from stppo_jax.types import Task
from stppo_jax.types import Turn

PASSAGES = [
    Passage(
        'bridge',
        'Ardlen Bridge',
        'Ardlen Bridge was designed by Mira Toven and opened in 1930. ' + 6 * 'It carries a road. ',
    ),
    Passage(
        'toven',
        'Mira Toven',
        'Mira Toven was an engineer. She was born in Kestwick. She died in 1960.',
    ),
    Passage('film', 'Sunfall (film)', 'Sunfall is a silent film that came out in 1931.'),
    Passage('town', 'Kestwick', 'Kestwick is a town by the sea.'),
    Passage('other', 'Oldham Rovers', 'Oldham Rovers play football in the second league.'),
]
BIRTH = Task(
    'birth',
    'Where was the designer of Ardlen Bridge born?',
    ('the town of Kestwick', 'Kestwick'),
    hops=2,
    gold=('bridge', 'toven'),
    steps=(('Ardlen Bridge >> designer', 'Mira Toven'), ('#1 >> place of birth', 'Kestwick')),
)
YEAR = Task(
    'year',
    'In which year did the bridge of Mira Toven at Ardlen open?',
    ('1930',),
    gold=('bridge',),
    steps=(('Which Ardlen Bridge did Mira Toven build ?', 'Ardlen Bridge'), ('#1 opened', '1930')),
)
NO_STEPS = Task('quoted', BIRTH.question, ('Kestwick',), hops=2, gold=BIRTH.gold)
BOTH = Task(
    'both',
    'Was Ardlen Bridge, which Mira Toven designed, opened before Sunfall?',
    ('yes',),
    hops=2,
    gold=('bridge', 'film'),
)


@functools.cache
def make_tokenizer():
  return chat.load_tokenizer(prepare.EMBEDDED_MODEL)


def make_config():
  config = st_ppo_smollm2.get_config()
  config.retriever.top_k = 1
  # The embedded tokenizer cuts words that it does not know into letters.
  config.rollout.max_prompt, config.rollout.max_turn, config.rollout.max_total = 1024, 512, 4096
  return config


def make_demonstrator(config=None):
  return search_trajectories.Demonstrator(PASSAGES, make_tokenizer(), config or make_config())


def play(task, seed=0, config=None):
  """(searches, final turn) of a demonstration, or None."""
  played = make_demonstrator(config).play(task, np.random.default_rng(seed))
  if played is None:
    return None
  *searches, (final, nothing) = played[1]
  assert nothing == ''
  return [re.search(r'<search> (.*) </search>$', turn)[1] for turn, _ in searches], final


class StoryTest(parameterized.TestCase):

  def test_steps_are_looked_up_one_after_the_other(self):
    ways = [play(BIRTH, seed) for seed in range(20)]
    self.assertEqual(
        {tuple(searches) for searches, _ in ways},
        {
            ('Ardlen Bridge designer', 'Mira Toven place of birth'),
            (BIRTH.question, 'Mira Toven place of birth'),
        },
    )  # the whole question finds what step 1 asks
    for _, final in ways:
      self.assertRegex(
          final,
          r'^<think> Ardlen Bridge designer: Mira Toven\. Mira Toven place of birth: Kestwick\. '
          r'.*answer is Kestwick\. </think>\n<answer> Kestwick </answer>$',
      )

  def test_thought_states_finding_before_next_search(self):
    _, turns = make_demonstrator().play(BIRTH, np.random.default_rng(0))
    self.assertStartsWith(turns[1][0], '<think> Ardlen Bridge designer: Mira Toven. ')
    self.assertIn('Mira Toven was an engineer', turns[1][1])

  def test_a_finding_that_appeared_is_not_searched_again(self):
    for seed in range(5):
      self.assertLen(play(YEAR, seed)[0], 1)

  def test_without_steps_it_follows_titles_that_were_mentioned(self):
    searches, final = play(NO_STEPS)
    self.assertEqual(searches, [NO_STEPS.question, 'Mira Toven'])
    self.assertIn('Mira Toven: She was born in Kestwick.', final)

  def test_title_is_asked_for_as_written(self):
    searches, final = play(BOTH)
    self.assertEqual(searches[1:], ['Sunfall'])
    self.assertEndsWith(final, '<answer> yes </answer>')

  @parameterized.named_parameters(
      ('a finding that no passage has', dict(steps=(('Ardlen Bridge >> designer', 'Ann Dale'),))),
      (
          'a finding in a passage that is not gold, when it is in a gold one that was not shown',
          dict(gold=('bridge', 'town')),
      ),
      ('a finding in no gold passage', dict(gold=('bridge',))),
      ('an answer that was not read', dict(answers=('Oldham',))),
      ('a title that was not mentioned', dict(steps=(), gold=('bridge', 'town'))),
      ('nothing to look for', dict(steps=(), gold=())),
  )
  def test_there_is_no_demonstration_of(self, changes):
    fields = {name: getattr(BIRTH, name) for name in ('id', 'question', 'answers', 'gold', 'steps')}
    for seed in range(5):
      self.assertIsNone(play(Task(**fields | changes), seed))

  def test_text_beyond_the_cut_observation_counts_as_unread(self):
    config = make_config()
    num_tokens = lambda text: len(make_tokenizer().encode(text))
    whole = num_tokens(search.observation_text([PASSAGES[1]], 'search_r1'))
    config.rollout.max_observation = whole
    self.assertIsNotNone(play(BIRTH, 0, config))
    config.rollout.max_observation = whole - num_tokens(' Kestwick. She died in 1960')
    self.assertIsNone(play(BIRTH, 0, config))

  def test_the_number_of_searches_is_limited(self):
    config = make_config()
    config.env.max_searches = 1
    for task in (BIRTH, BOTH):
      self.assertIsNone(play(task, 0, config))

  def test_long_quotations_end_with_the_answer(self):
    passage = Passage('x', 'X', 'The ' + 'very ' * 40 + 'old town of Kestwick lies by the sea.')
    quote = search_trajectories._quote(passage, ('kestwick',))
    self.assertEndsWith(quote, 'old town of Kestwick')
    self.assertLen(quote.split(), search_trajectories.MAX_QUOTE)


def scripted(turns):
  """Returns an `engine.run` with one sequence, which samples the given turns."""

  def run(sampler, params, prompts, keys, respond, threads):
    del sampler, params, keys, threads
    [prompt], left = prompts, list(turns)
    while prompt.budget:
      turn = np.array(left.pop(0), np.int32)
      assert len(turn) <= prompt.budget
      [prompt] = respond([engine.TurnCompletion(0, Turn(turn, np.zeros(len(turn), np.float32)))])
    return engine.Report()

  return run


class TokensTest(parameterized.TestCase):

  @parameterized.parameters(BIRTH, YEAR, NO_STEPS, BOTH)
  def test_row_is_episode_of_its_turns(self, task):
    """Prompt, turns and cut observations, as the rollout plays them token by token."""
    config, tokenizer = make_config(), make_tokenizer()
    whole = len(tokenizer.encode(search.observation_text([PASSAGES[0]], 'search_r1')))
    config.rollout.max_observation = whole - 10  # the evidence stands before that
    demonstrator = make_demonstrator(config)
    row = demonstrator.row(task, np.random.default_rng(0))
    _, turns = demonstrator.play(task, np.random.default_rng(0))
    spoken = [tokenizer.encode(turn) for turn, _ in turns]
    env = search.SearchEnv(task, demonstrator._retriever, config.env.max_searches, 1, 'search_r1')
    limits = episode_loop.EpisodeLimits(
        config.rollout.max_prompt, config.rollout.max_turn, whole - 10, config.rollout.max_total
    )
    env_factory = factory.EnvFactory(search.SearchEnv, {})
    [episode], _ = episode_loop.play(
        None,
        None,
        tokenizer,
        episode_loop.EpisodeInputs([env], [task], [0], jax.random.split(jax.random.key(0), 1)),
        episode_loop.EpisodeRules(env_factory, limits),
        scripted(spoken),
    )
    tokens, turn_ids, _ = episode.unroll()
    np.testing.assert_array_equal(row.tokens, tokens)
    np.testing.assert_array_equal(row.weights, (turn_ids > 0).astype(np.float32))
    self.assertEqual(episode.metrics['em'], 1)
    self.assertLen(episode.turns[0].observation, whole - 10)
    self.assertEqual(
        [turn.action for turn in episode.turns], ['search'] * (len(turns) - 1) + ['answer']
    )

  def test_turn_stops_at_its_last_token(self):
    tokenizer = make_tokenizer()
    table = chat.stop_automaton(tokenizer.token_bytes, search.SearchEnv.stop_strings)
    for seed in range(10):
      for turn, _ in make_demonstrator().play(BIRTH, np.random.default_rng(seed))[1]:
        states = [0]
        for token in tokenizer.encode(turn):
          states.append(table[states[-1], token])
        stopped = [state == len(table) - 1 for state in states]
        self.assertEqual(stopped, [False] * (len(states) - 1) + [True])

  def test_a_pool_depends_on_the_seed_alone(self):
    tasks = [BIRTH, YEAR, NO_STEPS, BOTH]
    pools = [
        make_demonstrator().pool(order, 3, seed)
        for order, seed in ((tasks, 0), (tasks[::-1], 0), (tasks, 1))
    ]
    same, again, other = ({row.tokens.tobytes() for row in pool} for pool in pools)
    self.assertEqual(same, again)
    self.assertNotEqual(same, other)
    self.assertLen(pools[0], len(same))  # none twice

  @parameterized.parameters('max_prompt', 'max_turn', 'max_total')
  def test_pool_leaves_out_overlong_episodes(self, limit):
    config = make_config()
    self.assertNotEmpty(make_demonstrator(config).pool([BIRTH], 3, 0))
    setattr(config.rollout, limit, 20)
    self.assertEmpty(make_demonstrator(config).pool([BIRTH], 3, 0))


if __name__ == '__main__':
  absltest.main()
