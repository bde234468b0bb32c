"""Demonstrations of the search task: they claim only what was read, and are episodes of a run."""

import functools
import re
import tempfile
from unittest import mock
import zlib

from absl.testing import absltest
from absl.testing import parameterized
import numpy as np

from experiments import st_ppo_smollm2
from experiments import st_ppo_tiny
from scripts import search_trajectories
from stppo_jax import types
from stppo_jax.assembly import components
from stppo_jax.data import tasks as tasks_lib
from stppo_jax.envs import search
from stppo_jax.rollout import prepare
from stppo_jax.text import tokenizer as chat
from stppo_jax.training import sft
from stppo_jax.types import Passage
from stppo_jax.types import Task

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
  config.model.folder = 'embedded'
  config.retriever.top_k = 1
  # The embedded tokenizer cuts words that it does not know into letters.
  config.rollout.max_prompt, config.rollout.max_turn, config.rollout.max_total = 1024, 512, 4096
  return config


def make_demonstrator(config=None):
  """Returns a demonstrator whose passages are `PASSAGES`."""
  parts = components.resolve(config or make_config())
  with mock.patch.object(tasks_lib, 'load_corpus', return_value=PASSAGES):
    return search_trajectories.Demonstrator(parts)


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


class EpisodesTest(parameterized.TestCase):

  @parameterized.parameters(BIRTH, YEAR, NO_STEPS, BOTH)
  def test_episode_has_turns_and_cut_observations(self, task):
    config, tokenizer = make_config(), make_tokenizer()
    whole = len(tokenizer.encode(search.observation_text([PASSAGES[0]], 'search_r1')))
    config.rollout.max_observation = whole - 10  # the evidence stands before that
    demonstrator = make_demonstrator(config)
    ((episode,),) = demonstrator.batches([task], 1, 0)
    digest = zlib.crc32(task.id.encode('utf-8'))
    _, turns = demonstrator.play(task, np.random.default_rng((0, digest, 0)))
    spoken = [tokenizer.encode(turn) for turn, _ in turns]
    self.assertEqual([turn.tokens.tolist() for turn in episode.turns], spoken)
    self.assertEqual(episode.score, 1)
    self.assertLen(episode.turns[0].observation, whole - 10)
    self.assertTrue(episode.demonstrated)
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

  def test_batches_depend_on_the_seed_alone(self):
    tasks = [BIRTH, YEAR, NO_STEPS, BOTH]
    pools = [all_tokens(tasks, 0), all_tokens(tasks[::-1], 0), all_tokens(tasks, 1)]
    same, again, other = map(set, pools)
    self.assertEqual(same, again)
    self.assertNotEqual(same, other)
    self.assertLen(pools[0], len(same))  # none twice

  @parameterized.parameters('max_prompt', 'max_turn', 'max_total')
  def test_overlong_episodes_are_left_out(self, limit):
    config = make_config()
    self.assertNotEmpty(all_tokens([BIRTH], 0, config))
    setattr(config.rollout, limit, 20)
    self.assertEmpty(all_tokens([BIRTH], 0, config))


class CommandTest(absltest.TestCase):

  def test_sft_reads_what_it_writes(self):
    workdir = tempfile.mkdtemp()
    arguments = ['', '--config=experiments/st_ppo_tiny.py', f'--workdir={workdir}', '--batches=2']
    arguments.append("--config.data.datasets=('elements',)")
    search_trajectories.main(arguments)
    config = st_ppo_tiny.get_config()
    config.data.source = f'{workdir}/episodes'
    pools = sft.load_pools(config)
    self.assertBetween(len(pools.train) + len(pools.held_out), 600, 880)  # 440 questions, twice
    with self.assertRaisesRegex(types.UserError, 'holds episodes already'):
      search_trajectories.main(arguments)

  def test_questions_without_evidence_are_refused(self):
    arguments = ['', f'--workdir={tempfile.mkdtemp()}']
    with mock.patch.object(search_trajectories.Demonstrator, 'play', return_value=None):
      with self.assertRaisesRegex(types.UserError, 'no demonstration of 1820 questions is valid'):
        search_trajectories.main(arguments)

  def test_folder_is_asked_for(self):
    with self.assertRaisesRegex(types.UserError, '--workdir names the folder'):
      search_trajectories.main([''])


def all_tokens(tasks, seed, config=None):
  """Returns the tokens of all episodes, as bytes."""
  batches = make_demonstrator(config).batches(tasks, 3, seed)
  return [episode.unroll()[0].tobytes() for batch in batches for episode in batch]


if __name__ == '__main__':
  absltest.main()
