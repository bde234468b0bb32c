"""The examples after other systems: their bars and commands, and the rules of the first four."""

import importlib
import os
import pathlib
import random
import string
import tempfile

from absl.testing import absltest
from absl.testing import parameterized
import pytest

from examples import curves
from examples.empathy import env as empathy
from examples.memory import env as memory
from examples.memory import player as memory_player
from examples.rooms import env as rooms
from examples.rooms import player as rooms_player
from examples.terminals import env as terminals
from examples.terminals import player as terminals_player
from examples.terminals import shell as shell_lib
from scripts import warm_start
from stppo_jax.assembly import components
from stppo_jax.monitoring import metrics as metrics_lib
from stppo_jax.settings import validation
from stppo_jax.text import tokenizer as chat
from stppo_jax.training import loop
from tests.support import tiny_run

EXAMPLES = pathlib.Path(__file__).parents[2] / 'examples'
# Folder -> its player -> the lowest and the highest mean score on the held-out tasks.
BARS = {
    'airwaves': {'Expert': (1, 1), 'Threshold': (0.9, 0.97), 'Player': (0.5, 0.65)},
    'cory': {'Expert': (1, 1), 'Player': (0.2, 0.4)},
    'creators': {'Expert': (0.4, 0.5), 'Stubborn': (0.2, 0.3), 'Player': (0.3, 0.45)},
    'dhumbal': {'Expert': (0.4, 0.6), 'Player': (0.03, 0.2)},
    'dispatch': {'Expert': (2.5, 2.8), 'Selfish': (2.1, 2.4), 'Player': (1.5, 1.9)},
    'empathy': {'Expert': (1, 1), 'Adviser': (0.2, 0.5), 'Player': (0.4, 0.7)},
    'labels': {'Expert': (1, 1), 'Player': (0.35, 0.6)},
    'memory': {'Expert': (1, 1), 'AddOnly': (0.6, 0.9), 'Player': (0.3, 0.6)},
    'messages': {'Expert': (1, 1), 'Player': (0.3, 0.5)},
    'plans': {'Expert': (1, 1), 'Player': (0.3, 0.7)},
    'rooms': {'Expert': (1, 1), 'Player': (0.2, 0.5)},
    'screens': {'Expert': (1, 1), 'Player': (0.2, 0.4)},
    'terminals': {'Expert': (1, 1), 'Player': (0.3, 0.6)},
}
FOLDERS = tuple(BARS)


def load(folder, mode=''):
  return importlib.import_module(f'examples.{folder}.config').get_config(mode)


class FolderTest(parameterized.TestCase):

  @parameterized.parameters(*FOLDERS)
  def test_players_mark_the_bars(self, folder):
    config = validation.validate(load(folder))
    module = importlib.import_module(f'examples.{folder}.player')
    for name, (low, high) in BARS[folder].items():
      score = curves.play(config, getattr(module, name))
      self.assertBetween(score, low, high, f'{folder}: {name}')

  @parameterized.parameters(*FOLDERS)
  def test_expert_episodes_fit_the_token_limits(self, folder):
    config = validation.validate(load(folder, 'smoke'))
    named = components.resolve(config)
    tokenizer = chat.load_tokenizer(config.model.folder)
    expert = importlib.import_module(f'examples.{folder}.player').Expert
    limits = config.rollout
    framing = chat.make_framing(tokenizer, named.env.frame, limits.max_observation)
    for task in named.load_tasks('dev')[:50]:
      for prompt, turns in warm_start.play(named.env, expert, task, task.seed):
        self.assertLessEqual(len(chat.encode_prompt(tokenizer, *prompt)), limits.max_prompt)
        row = warm_start.encode(tokenizer, framing, prompt, turns)
        self.assertLessEqual(len(row.tokens), limits.max_total)
        for action, _ in turns:
          self.assertLess(len(tokenizer.encode(action)), limits.max_turn)

  @parameterized.parameters(*FOLDERS)
  def test_readme_and_curve(self, folder):
    command = f'python run.py --config=examples/{folder}/config.py'
    text = (EXAMPLES / folder / 'README.md').read_text(encoding='utf-8')
    for words in (command, f'{command}:smoke', 'curve.png', 'scripts.warm_start'):
      self.assertIn(words, text)
    table = (EXAMPLES / folder / 'curve.csv').read_text(encoding='utf-8').splitlines()
    seeds = {line.split(',')[1] for line in table[1:]}
    self.assertIn({1: 'one seed', 3: 'three seeds'}[len(seeds)], text)

  @parameterized.parameters(*FOLDERS)
  @pytest.mark.slow
  def test_smoke_form_trains(self, folder):
    config = load(folder, 'smoke')
    config.train.updates = 1
    config.eval.episodes = config.eval.rows = 8
    self.enterContext(tiny_run.on_one_device())
    with tempfile.TemporaryDirectory() as workdir:
      loop.start(config, workdir)
      rows = metrics_lib.read_metrics(workdir)
      self.assertEqual([row['step'] for row in rows], [0, 1])
      self.assertIn(f'val-core/all/{components.resolve(config).env.core_metrics[0]}', rows[1])


class RoomsTest(parameterized.TestCase):

  @parameterized.parameters((2, 3, 4), (3, 4, 6), (4, 6, 8))
  def test_shortest_solution_has_the_wanted_length(self, w, o, q):
    for seed in range(20):
      world = rooms.make_world(random.Random(seed), w, o, q)
      self.assertLen(world.exits, w)
      self.assertLen(world.places, o)
      self.assertLen(world.solution(), q)

  @parameterized.parameters('sparse', 'dense')
  def test_rewards(self, reward):
    """Two goals: the dense reward pays a half for each, the sparse one pays the last."""
    env = rooms.Rooms(None, max_turns=5, reward=reward)
    env.reset(seed=0)
    env.world = rooms.World(
        exits={'hall': {'north': 'den'}, 'den': {'south': 'hall'}},
        places={'lamp': 'hall', 'cup': 'den'},
        room='hall',
        goals=[rooms.Goal('lamp', rooms.HELD), rooms.Goal('lamp', 'den')],
    )
    steps = [env.step(text) for text in ('take cup', 'take lamp', 'go north', 'put lamp')]
    want = [0, 0.5, 0, 0.5] if reward == 'dense' else [0, 0, 0, 1]
    self.assertEqual([step[1] for step in steps], want)
    self.assertEqual(steps[0][0], 'impossible.')
    self.assertEqual(steps[2][0], 'den: cup. exits: south.')
    self.assertEqual([step[2] for step in steps], [False, False, False, True])
    self.assertFalse(steps[3][3])

  def test_goals_count_in_their_order(self):
    world = rooms.make_world(random.Random(1), 2, 3, 4)
    env = rooms.Rooms(None, max_turns=9)
    env.reset(seed=1)
    commands = world.solution()
    rewards = [env.step(command)[1] for command in commands]
    self.assertAlmostEqual(sum(rewards), 1)

  def test_expert_explores_a_larger_world(self):
    for seed in range(50):
      env = rooms.Rooms(None, max_turns=20, rooms=4, objects=6, quest=8)
      metrics = curves.play_episode(env, seed, rooms_player.Expert)
      self.assertEqual(metrics['solved'], 1)


class ShellTest(parameterized.TestCase):

  @parameterized.parameters(
      ('ls', 'a\nb\nd\n'),
      ('cat a', 'red fox\nblue owl\nred owl\n'),
      ('cat a | grep red | wc -l', '2\n'),
      ('grep -v red a', 'blue owl\n'),
      ('grep -c red a b', '2\n'),
      ('sort a | head -n 1', 'blue owl\n'),
      ('sort -r a | tail -1', 'blue owl\n'),
      ('cut -d " " -f 2 a | sort -u', 'fox\nowl\n'),
      ('cut -f1 a | uniq', 'red\nblue\nred\n'),
      ('wc a', '3 6\n'),
      ('cd d && pwd && ls', '/d\nx\n'),
      ('cd ../../.. && pwd', '/\n'),
      ('cat ../../../../etc/passwd', '../../../../etc/passwd: no such file\n'),
      ('echo $HOME `id` *', '$HOME `id` *\n'),
      ('python -c 1', 'python: not found\n'),
      ('cat a > b | wc', '0 0\n'),
      ('echo "red', 'quotes are not closed\n'),
      ('cat |', 'syntax error\n'),
      ('rm -r d && ls', 'a\nb\n'),
      ('rm d', 'rm: d: cannot remove\n'),
      ('mv a d && ls d', 'a\nx\n'),
      ('mv a a && ls', 'a\nb\nd\n'),
      ('mkdir d', 'mkdir: d: cannot make\n'),
      ('echo one > d/y && cp d/y z && cat z', 'one\n'),
      ('echo two >> b && cat b', 'two\n'),
  )
  def test_commands(self, line, want):
    files = {'/a': 'red fox\nblue owl\nred owl\n', '/b': '', '/d/x': 'plum\n'}
    self.assertEqual(shell_lib.Shell(files).run(line), want)

  def test_no_line_leaves_the_tree(self):
    """10,000 random lines: no exception, no path outside, bounded sizes, no real file is made."""
    rng = random.Random(0)
    words = [*shell_lib.COMMANDS, *shell_lib.OPERATORS, '..', '/', '../..', 'a', 'd', 'd/x', '-r']
    words += ['-n', '2', '-rf', '~', '$PWD', '*', '"', "'", '\\', ';', '&', '<', '(', '\0', 'é']
    before = set(os.listdir('.'))
    shell = shell_lib.Shell({})
    for n in range(10_000):
      if n % 50 == 0:
        shell = shell_lib.Shell({'/a': 'red\n', '/d/x': 'plum\n'})
      line = ' '.join(rng.choice(words) for _ in range(rng.randint(1, 9)))
      if rng.random() < 0.1:
        line += ''.join(rng.choice(string.printable) for _ in range(10))
      output = shell.run(line)
      self.assertLessEqual(len(output), shell_lib.MAX_TEXT)
      self.assertLessEqual(len(shell.files), shell_lib.MAX_FILES)
      for path, text in shell.files.items():
        self.assertStartsWith(path, '/')
        self.assertNotIn('..', path.split('/'))
        self.assertIn(os.path.dirname(path), shell.folders)
        self.assertLessEqual(len(text), shell_lib.MAX_TEXT)
    self.assertEqual(set(os.listdir('.')), before)


class TerminalsTest(absltest.TestCase):

  def test_generated_tasks_pass_the_filter(self):
    kinds = set()
    rejected = 0
    for seed in range(100):
      task, num_rejected = terminals.make_task(seed)
      rejected += num_rejected
      kinds.add(task.kind)
      shell = task.start()
      self.assertNotEqual(shell.state(), task.goal())
      for line in task.reference:
        shell.run(line)
      self.assertEqual(shell.state(), task.goal())
      self.assertEqual(terminals_player.parse(task.text)[0], task.kind)
    self.assertEqual(kinds, set(terminals.KINDS))
    self.assertGreater(rejected, 10)  # the filter has work to do

  def test_filter_rejects(self):
    names = {'file': 'log', 'target': 'out', 'folder': 'docs', 'word': 'red', 'hidden': 'plum'}
    make = lambda kind, files: terminals.ShellTask(kind, names, files, ('/docs',))
    self.assertTrue(terminals.is_solvable(make('sort', {'/log': 'red\n'})))
    self.assertFalse(terminals.is_solvable(make('sort', {'/data': 'red\n'})))  # no such file
    self.assertFalse(terminals.is_solvable(make('write', {'/out': 'red\n'})))  # solved already

  def test_episode(self):
    env = terminals.Terminals(None, max_turns=4)
    env.reset(seed=0)
    outcomes = [env.step(f'<command>{line}</command>') for line in env.task.reference]
    self.assertEqual([outcome[1] for outcome in outcomes], [0.0] * len(outcomes))
    self.assertEqual(env.step('done')[4]['action'], 'invalid')
    outcome = env.step('<action>done</action>')
    self.assertEqual(outcome[1:4], (1.0, True, False))


class MemoryTest(parameterized.TestCase):

  def test_operations(self):
    bank = memory.Bank()
    actions = ['ADD ann lives in rome', 'ADD bob has dog', 'UPDATE 1 ann lives in oslo', 'NOOP']
    actions += ['DELETE 2', 'DELETE 2', 'UPDATE 7 x', 'add x', 'ADD', 'NOOP x']
    kinds = [bank.apply(action) for action in actions]
    self.assertEqual(kinds, ['ADD', 'ADD', 'UPDATE', 'NOOP', 'DELETE'] + ['invalid'] * 5)
    self.assertEqual(bank.texts, {1: 'ann lives in oslo'})

  def test_search_does_not_show_what_is_newer(self):
    texts = ['ann lives in rome', 'ann lives in oslo', 'bob has dog']
    shown = set()
    for order in (texts, texts[::-1]):
      bank = memory.Bank()
      for text in order:
        bank.apply(f'ADD {text}')
      found = bank.search('where does ann live?')
      shown.add(tuple(entry.split(' ', 1)[1] for entry in found.split('; ')))
    self.assertEqual(shown, {('ann lives in oslo', 'ann lives in rome')})

  def test_only_update_answers_conflicts(self):
    for kind, low, high in ((memory_player.AddOnly, 0.35, 0.65), (memory_player.Expert, 1, 1)):
      scores = []
      for seed in range(300):
        env = memory.Memory(None)
        metrics = curves.play_episode(env, seed, kind)
        if env.session.is_conflict:
          scores.append(metrics['right'])
      self.assertBetween(sum(scores) / len(scores), low, high)  # one of two cities by chance

  def test_both_roles_are_paid(self):
    env = memory.Memory(None)
    env.reset(seed=0)
    for _ in range(memory.NUM_FACTS):
      _, reward, _, _, info = env.step('NOOP')
      self.assertEqual(reward, 0)
    self.assertEqual(info['role'], 'answerer')
    _, reward, is_over, _, info = env.step(env.session.answer)
    self.assertEqual((reward, is_over, info['rewards']), (1.0, True, {'manager': 1.0}))


class EmpathyTest(parameterized.TestCase):

  @parameterized.parameters(
      (30, (50, 30, 20)),
      (39, (59, 39, 29)),
      (40, (55, 40, 20)),
      (69, (84, 69, 49)),
      (70, (80, 75, 60)),
      (95, (100, 100, 85)),
      (10, (30, 10, 0)),
  )
  def test_table_of_changes(self, emotion, want):
    self.assertEqual(tuple(empathy.change(emotion, feeling) for feeling in range(3)), want)

  def test_a_talk(self):
    env = empathy.Empathy(None, max_turns=8)
    env.reset(seed=0)
    env.user.topic = 'exam'
    env.user.needs = ['listening', 'praise']
    listen, praise = 'i hear you with the exam.', 'you did well with the exam.'
    outcomes = [env.step(text) for text in ('what do you need?', listen, listen, listen)]
    self.assertEqual(outcomes[0][0], 'i only want to talk.')
    self.assertEqual(env.user.emotion, 80)  # 30, 50, 65, 80
    self.assertEqual(outcomes[3][0], 'better. but something else is wrong.')
    outcomes += [env.step(text) for text in (praise, praise)]
    self.assertEqual(outcomes[-1][1:4], (1.0, True, False))
    self.assertEqual([outcome[1] for outcome in outcomes[:-1]], [0.0] * 5)

  def test_bad_replies_fail(self):
    env = empathy.Empathy(None, max_turns=8)
    env.reset(seed=0)
    outcomes = [env.step('hello') for _ in range(3)]
    self.assertEqual(env.user.emotion, 0)
    self.assertEqual([outcome[2] for outcome in outcomes], [False, False, True])
    self.assertEqual(outcomes[-1][1], 0.0)


if __name__ == '__main__':
  absltest.main()
