"""The examples labels, plans, dhumbal, cory, dispatch, screens, messages, creators and airwaves.

Their rules and rewards by hand, and the check that no command leaves an example's world.
"""

import dataclasses
import importlib
import json
import os
import pathlib
import random
import socket

from absl.testing import absltest
from absl.testing import parameterized
import jax.numpy as jnp
import numpy as np

from examples import curves
from examples import tasks
from examples import worlds
from examples.airwaves import env as airwaves
from examples.cory import env as cory
from examples.creators import env as creators
from examples.creators import player as creators_player
from examples.dhumbal import env as dhumbal
from examples.dhumbal import game
from examples.dhumbal import tournament
from examples.dispatch import env as dispatch
from examples.labels import env as labels
from examples.labels import player as labels_player
from examples.messages import env as messages
from examples.messages import player as messages_player
from examples.plans import env as plans
from examples.screens import best_of
from examples.screens import env as screens
from examples.screens import judge as judge_lib
from examples.screens import player as screens_player
from stppo_jax import types
from stppo_jax.algorithms import advantages
from stppo_jax.algorithms import variants

EXAMPLES = pathlib.Path(__file__).parents[2] / 'examples'
JUDGE_ACCURACY = 0.9


class LabelsTest(parameterized.TestCase):

  @parameterized.parameters(
      ('<Judgement>yes</Judgement>', 1.0),
      ('so <Judgement> Yes </Judgement>', 1.0),
      ('<Judgement>maybe</Judgement>', -1.0),
      ('yes', -3.0),
      ('<Judgement>perhaps</Judgement>', -3.0),
      ('', -3.0),
  )
  def test_rewards(self, action, want):
    env = labels.Labels(types.Task('0', question='premise', answers=('yes',)))
    self.assertEqual(env.reset(), ('premise', {}))
    self.assertEqual(env.step(action)[1:4], (want, True, False))

  @parameterized.parameters(
      ('<Judgement>3.5</Judgement>', 2.5),
      ('<Judgement>1</Judgement>', 0.0),
      ('<Judgement>9</Judgement>', -3.0),
      ('<Judgement>-1</Judgement>', -2.5),
      ('3.5', -2.5),
  )
  def test_rewards_of_numbers(self, action, want):
    env = labels.Labels(types.Task('0', answers=('3.5',)), labels=())
    self.assertEqual(env.step(action)[1], want)

  def test_each_example_has_one_label(self):
    for split in ('train', 'dev'):
      for task in labels.load(split)[:300]:
        self.assertEqual((labels_player.label_of(task.question),), task.answers)


class PlansTest(parameterized.TestCase):

  def test_solutions_pass_and_mutations_fail(self):
    for seed in range(200):
      plan = plans.make_plan(random.Random(seed), 5, 4)
      calls = list(plan.solution)
      self.assertFalse(any(plan.errors(calls).values()))
      self.assertEqual(plan.errors(calls[1:])['missing'], 1)
      self.assertEqual(plan.errors([*calls, calls[0]])['extra'], 1)
      backwards = plan.errors(calls[::-1])['violated']
      num_orders = sum(c.kind in ('before', 'after') for c in plan.constraints)
      self.assertGreaterEqual(backwards, num_orders)

  def test_errors_by_hand(self):
    constraints = (
        plans.Constraint('before', 'wash', 'cook'),
        plans.Constraint('never', 'lock'),
        plans.Constraint('for', 'cook', 'ann'),
    )
    plan = plans.Plan(('cook', 'lock', 'wash'), constraints, ())
    self.assertEqual(plan.wanted, ('cook', 'wash'))
    errors = plan.errors([('cook', 'bob'), ('lock', ''), ('wash', 'eve')])
    self.assertEqual(errors, {'violated': 3, 'missing': 0, 'extra': 0, 'arguments': 1})
    self.assertEqual(plan.errors([('wash', '')])['missing'], 1)

  def test_late_constraints_leave_a_solution(self):
    kinds = set()
    for seed in range(100):
      env = plans.Plans(None, max_turns=8, tools=5, constraints=4, update_after=2)
      expert = importlib.import_module('examples.plans.player').Expert
      metrics = curves.play_episode(env, seed, expert)
      self.assertEqual(metrics['correct'], 1)
      kinds.add(env.plan is env._whole)
    self.assertEqual(kinds, {True, False})  # some constraints were told, others came too late


class DhumbalTest(parameterized.TestCase):

  @parameterized.parameters(
      (('Ac',), True), (('3c', '3d'), True), (('3c', '4c'), False), (('3c', '4c', '5c'), True),
      (('3c', '4c', '5d'), False), (('Qc', 'Kc', 'Ac'), False), ((), False), (('3c', '3c'), False),
  )  # fmt: skip
  def test_discards(self, cards, want):
    self.assertEqual(game.is_discard(cards), want)

  def test_calls_by_hand(self):
    """Hands of 5, 4 and 30: the caller with 5 pays its hand and the fine, the second one wins."""
    played = game.Round(3, random.Random(0))
    played.hands = [['5c'], ['4c'], ['Tc', 'Kd', '7c']]
    played.play(game.Move())
    self.assertEqual((played.winner, played.costs), (1, [5 + game.FINE, 0, 30]))
    played = game.Round(2, random.Random(0))
    played.hands = [['2c', '2d'], ['4c']]
    played.play(game.Move())
    self.assertEqual((played.winner, played.costs), (1, [4 + game.FINE, 0]))  # a tie
    played = game.Round(2, random.Random(0))
    played.hands = [['Ac'], ['4c']]
    played.play(game.Move())
    self.assertEqual((played.winner, played.costs), (0, [0, 4]))

  def test_cards_are_kept(self):
    for seed in range(30):
      played = game.play_round(list(game.SCRIPTS.values()), random.Random(seed))
      cards = [card for hand in played.hands for card in hand]
      cards += [*played._stock, *played._pile, played.top]
      self.assertLen(set(cards), 52)
      self.assertLen(cards, 52)

  def test_a_script_wins_the_tournament(self):
    table = tournament.table(300)
    self.assertEqual(sum(row['wins'] for row in table.values()), 300)
    self.assertGreater(table['aggressive']['wins'], 1.3 * table['balanced']['wins'])
    low, high = tournament.interval(50, 100)
    self.assertAlmostEqual(low, 0.4038, places=4)
    self.assertAlmostEqual(high, 0.5962, places=4)

  def test_illegal_moves_cost(self):
    env = dhumbal.Dhumbal(None, max_turns=8)
    env.reset(seed=0)
    for text in ('', 'Ac Zz stock', 'stock', 'call now'):
      hand = env._round.hands[env._seat].copy()
      other = env._round.hands[1 - env._seat].copy()
      self.assertAlmostEqual(env.step(text)[1], -0.1)
      self.assertEqual(env._round.hands[env._seat], hand)
      self.assertNotEqual(env._round.hands[1 - env._seat], other)  # the script has moved


class CoryTest(parameterized.TestCase):

  def play(self, seed, *answers, **options):
    """Returns the steps of an episode, and which copy was the pioneer."""
    env = cory.Cory(None, **options)
    _, info = env.reset(seed=seed)
    env._question = (3, 8)
    return [env.step(answer) for answer in answers], info['role']

  @parameterized.parameters(('11', '11', 2.0), ('12', '11', 1.0), ('11', '12', 1.0), ('', '', 0.0))
  def test_both_have_the_sum(self, first, second, want):
    steps, pioneer = self.play(0, first, second)
    self.assertEqual(steps[0][0], f'3 plus 8? other: {first}.')
    self.assertEqual(steps[0][1:4], (0.0, False, False))
    self.assertEqual(steps[1][1:4], (want, True, False))
    self.assertEqual(steps[1][4]['rewards'], {pioneer: want})
    self.assertNotEqual(steps[0][4]['role'], pioneer)

  def test_seeds_exchange_the_roles(self):
    pioneers = [self.play(seed, '1')[1] for seed in range(400)]
    self.assertBetween(pioneers.count('first'), 160, 240)
    self.assertEqual(pioneers, [self.play(seed, '1')[1] for seed in range(400)])

  def test_alone(self):
    steps, _ = self.play(0, '11', alone=True)
    self.assertEqual(steps[0][1:4], (1.0, True, False))
    self.assertEqual(cory.Cory.attributes({'alone': True}), {'roles': ()})
    self.assertEqual(cory.Cory.attributes({}), {'roles': cory.COPIES})

  @parameterized.parameters('011', '+11', '11 ', '\u0661\u0661', '1_1', '')
  def test_other_forms_are_wrong(self, answer):
    self.assertFalse(cory.is_right((3, 8), answer))


class DispatchTest(parameterized.TestCase):

  def test_reward_by_hand(self):
    """R = 3 + trip - pickup."""
    self.assertEqual(
        [dispatch.reward(0, 6), dispatch.reward(2, 3), dispatch.reward(4, 1)], [9, 4, 0]
    )

  def test_nearest_vehicle_has_the_order(self):
    order = dispatch.Order((0, 0), (2, 3))
    other = dispatch.Order((3, 3), (3, 2))
    orders = [order, other, other]
    assign = lambda wishes: dispatch.assign([(1, 1), (0, 1), (1, 0)], orders, wishes)
    self.assertEqual(order.trip, 5)
    self.assertEqual(assign([0, 0, 0]), {1: 0})  # distances 2, 1, 1
    self.assertEqual(assign([0, None, 1]), {0: 0, 2: 1})
    self.assertEqual(assign([None, None, None]), {})

  def test_one_step_by_hand(self):
    env = dispatch.Dispatch(None, max_turns=2)
    env.reset(seed=0)
    env.places = [(0, 0), (0, 1), (3, 3)]
    order = dispatch.Order((0, 0), (0, 2))
    env.steps[0] = [order, dispatch.Order((3, 2), (0, 0)), order]
    self.assertEqual(env.describe(1), '1: pickup 1 trip 2. 2: pickup 4 trip 5. 3: pickup 1 trip 2.')
    steps = [env.step(action) for action in ('1', '1', '2')]
    self.assertEqual([step[4]['role'] for step in steps], ['green', 'blue', 'red'])
    # Red has order 1 (3 + 2), blue order 2 (3 + 5 - 1), order 3 times out: a third for each.
    self.assertAlmostEqual(steps[2][1], 7 - 1 / 3)
    rewards = steps[2][4]['rewards']
    self.assertAlmostEqual(rewards['red'], 5 - 1 / 3)
    self.assertAlmostEqual(rewards['green'], -1 / 3)
    self.assertEqual(env.places, [(0, 2), (0, 1), (0, 0)])
    self.assertAlmostEqual(steps[2][4]['metrics']['profit'], 11 / 3)
    self.assertFalse(steps[2][2])

  def test_credit_of_ospo(self):
    """An episode's choices are compared within the fleet and the step, without later rewards."""
    rewards = jnp.array([[0.0, 3, 0, 9], [0, 1, 0, 9], [0, 2, 0, 9]])
    turn_ids = jnp.array([[0, 1, 0, 2]] * 3)
    zeros = jnp.zeros(rewards.shape)
    batch = types.TurnBatch(
        tokens=turn_ids,
        action_mask=(turn_ids > 0).astype(jnp.float32),
        turn_ids=turn_ids,
        rewards=rewards,
        old_logp=zeros,
        ref_logp=zeros,
        old_values=zeros,
        advantages=zeros,
        returns=zeros,
        group_ids=jnp.arange(3),
        roles={name: jnp.eye(3)[i] for i, name in enumerate(dispatch.FLEET)},
    )
    got = advantages.estimate(batch, variants.VARIANTS['ospo']).advantages
    np.testing.assert_allclose(got, [[0, 1, 0, 0], [0, -1, 0, 0], [0, 0, 0, 0]], atol=1e-5)


class ScreensTest(parameterized.TestCase):

  def make(self, **changes):
    values = dict.fromkeys(screens.SWITCHES, 'off') | dict.fromkeys(screens.FIELDS, 'tea')
    phone = screens.Phone('alias', 'ann', 'network', values, screens.TREE)
    return dataclasses.replace(phone, **changes)

  def test_a_way_by_hand(self):
    """From the network to a field of the privacy: back, two screens, the field, and a word."""
    phone = self.make()
    self.assertEqual(phone.describe(), 'network: wifi off, mobile off, proxy.')
    for action, left in (
        ('back', 4),
        ('tap account', 3),
        ('tap privacy', 2),
        ('tap alias', 1),
        ('type ann', 0),
    ):
      self.assertTrue(phone.is_positive(action))
      phone = phone.apply(action)
      self.assertEqual(phone.distance(), left)
    self.assertEqual(phone.screen, 'privacy')

  @parameterized.parameters('tap host', 'tap', 'type ann', 'back back', '', 'tap wifi mobile')
  def test_impossible_actions(self, action):
    self.assertIsNone(self.make().apply(action))
    self.assertFalse(self.make().is_positive(action))

  def test_a_switch_can_be_left(self):
    phone = self.make(target='wifi', wanted='on')
    reached = phone.apply('tap wifi')
    self.assertEqual(reached.distance(), 0)
    self.assertEqual(reached.apply('tap wifi').distance(), 1)
    self.assertIsNone(self.make(screen='home').apply('back'))

  def test_distance_is_that_of_a_search(self):
    for seed in range(40):
      phone = screens.make_phone(random.Random(seed))
      layer = [phone]
      steps = 0
      while all(state.distance() for state in layer):
        layer = [state.apply(action) for state in layer for action in state.actions()]
        unique = {(state.screen, *state.values.values()): state for state in layer}
        layer = list(unique.values())
        steps += 1
      self.assertEqual(steps, phone.distance())

  def test_rewards(self):
    env = screens.Screens(None, max_turns=3, reward='oracle')
    env.reset(seed=0)
    env.phone = self.make(target='wifi', wanted='on')
    rewards = [env.step(action)[1] for action in ('back', 'jump', 'tap network')]
    np.testing.assert_allclose(rewards, [-0.2, -0.2, 0.2])
    env.phone = self.make(target='wifi', wanted='on')
    self.assertAlmostEqual(env.step('tap wifi')[1], 1.2)

  def test_judge_on_held_out_steps(self):
    judge = judge_lib.load()
    right = []
    for task in screens.load('dev'):
      env = screens.Judgements(None)
      text, _ = env.reset(seed=task.seed)
      label = 'positive' if judge(text) > 0.5 else 'negative'
      right.append(env.step(label)[1])
      self.assertEqual(env.step(screens_player.Judge(None).act(text))[1], 1)
    self.assertGreater(np.mean(right), JUDGE_ACCURACY)

  def test_best_of_by_hand(self):
    """Two tasks: the judge chooses right in one of them."""
    rows = [('a', 0.9, 1.0), ('a', 0.1, 0.0), ('b', 0.8, 0.0), ('b', 0.7, 1.0)]
    records = [{'task': name, 'metrics': {'judged': p, 'reached': r}} for name, p, r in rows]
    got = best_of.table(map(json.dumps, records))
    self.assertEqual(got, {'mean': 0.5, 'judge': 0.5, 'best': 1.0})


class MessagesTest(parameterized.TestCase):

  def start(self, pattern):
    env = messages.Messages(None, pattern)
    observation = env.reset(seed=0)
    env._questions = [(2, 7, 5), (3, 1, 6)]
    return env, observation[1]['role']

  def test_monologue(self):
    env, role = self.start('monologue')
    first = env.step('2 plus 7 is 9')
    last = env.step('14')
    self.assertEqual((role, first[0], first[4]['role']), ('student', 'answer.', 'student'))
    self.assertEqual((last[1], last[4]['rewards']), (1.0, {}))

  def test_dialogue(self):
    env, role = self.start('dialogue')
    first = env.step('2 plus 7 is 9')
    last = env.step('14')
    self.assertEqual((role, first[4]['role']), ('partner', 'student'))
    self.assertEqual(first[0], '2 plus 7 plus 5? hint: 2 plus 7 is 9. answer.')
    self.assertEqual((last[1], last[4]['rewards']), (1.0, {'partner': 1.0}))

  @parameterized.parameters(
      ('13', 'teacher: 2 plus 7 is 9, plus 5 is 14. 3 plus 1 plus 6? answer.', 0.0),
      ('14', '3 plus 1 plus 6? answer.', 0.5),
  )
  def test_analogue(self, answer, text, reward):
    env, role = self.start('analogue')
    first = env.step(answer)
    last = env.step('10')
    self.assertEqual((role, *first[:3]), ('student', text, reward, False))
    self.assertEqual((last[1], last[2]), (0.5, True))
    self.assertEqual(last[4]['metrics']['right'], reward + 0.5)

  def test_seeds_mix_the_patterns(self):
    env = messages.Messages(None, 'mixed')
    seen = set()
    for seed in range(30):
      env.reset(seed=seed)
      seen.add(env.pattern)
    self.assertEqual(seen, set(messages.PATTERNS))

  @parameterized.parameters(*messages.PATTERNS)
  def test_expert_is_right_in_each_pattern(self, pattern):
    for seed in range(50):
      env = messages.Messages(None, pattern)
      self.assertEqual(curves.play_episode(env, seed, messages_player.Expert)['right'], 1)


class CreatorsTest(parameterized.TestCase):

  @parameterized.parameters(('popularity', 'news'), ('factor', 'food'))
  def test_ranking(self, ranking, want):
    """A user of food: the five popular items hide an old one of food, unless factors rank."""
    platform = creators.Platform(random.Random(0), ranking)
    platform.items = [creators.Item('news', 1, 0, clicks=3) for _ in range(5)]
    platform.items.append(creators.Item('food', 1, 0, clicks=1))
    self.assertEqual(platform.top('food', number=1)[0].genre, want)
    self.assertLen(platform.top('food', number=1), creators.TOP)
    self.assertEmpty(platform.top('food', number=creators.AGE))

  def test_clicks_by_hand(self):
    """Each user clicks the first item of its genre: the agent's comes first among new ones."""
    platform = creators.Platform(random.Random(0), 'factor')
    platform.users = ['food', 'food', 'news']
    clicks = platform.play([('food', 0), ('food', 1)], 0)
    self.assertEqual(clicks, {0: {'food': 2}})
    self.assertEqual([item.clicks for item in platform.items], [2, 0])

  def test_unreadable_actions_publish_nothing(self):
    env = creators.Creators(None, max_turns=2)
    env.reset(seed=0)
    _, reward, _, _, info = env.step('[EXPLORE]:: cars')
    self.assertEqual((reward, info['action']), (0.0, 'invalid'))
    self.assertLen(env.platform.items, creators.NUM_OTHERS)

  def test_exploring_pays(self):
    """Never exploring < exploring < full information, on the same users."""
    scores = []
    for name, is_full in (('Stubborn', False), ('Expert', False), ('Expert', True)):
      player = getattr(creators_player, name)
      envs = [creators.Creators(None, 5, full_information=is_full) for _ in range(200)]
      plays = [curves.play_episode(env, i, player)['clicks'] for i, env in enumerate(envs)]
      scores.append(np.mean(plays))
    self.assertLess(scores[0] + 0.1, scores[1])
    self.assertLess(scores[1] + 0.02, scores[2])


class AirwavesTest(parameterized.TestCase):

  def test_formulas_by_hand(self):
    """SNR 3 gives log2(4) = 2 bits: ranks 1 and 3 take 4 of the 4 that a band of 2 holds."""
    self.assertAlmostEqual(airwaves.cost(3, 2, (1, 3)), 1)
    self.assertAlmostEqual(airwaves.loss(4, 8, (1, 3)), 0.4)
    state = {'snr': 3, 'band': 2, 'entropy': 4, 'novel': 8}
    self.assertAlmostEqual(airwaves.reward(state, (1, 3)), -0.4 - 0.3)
    self.assertAlmostEqual(airwaves.reward(state, (1, 4)), -0.36 - 0.375 - 1)  # above the latency

  def test_best_ranks_beat_all(self):
    rng = random.Random(0)
    for _ in range(50):
      state = {name: rng.randint(1, 4) for name in ('snr', 'band', 'entropy', 'novel')}
      best = airwaves.best(state)
      self.assertLessEqual(airwaves.cost(state['snr'], state['band'], best), 1)
      other = (rng.randrange(10), rng.randrange(10))
      self.assertGreaterEqual(airwaves.reward(state, best), airwaves.reward(state, other))

  def test_unreadable_ranks_are_zero(self):
    env = airwaves.Airwaves(None, max_turns=2)
    env.reset(seed=0)
    state = dict(env.state)
    _, reward, _, _, info = env.step('12 3')
    self.assertEqual((reward, info['action']), (airwaves.reward(state, (0, 0)), 'invalid'))


class WorldsTest(parameterized.TestCase):

  @parameterized.parameters(*worlds.FOLDERS)
  def test_no_command_leaves_the_world(self, folder):
    num_commands, events = worlds.check(folder, num_episodes=15)
    self.assertGreaterEqual(num_commands, 15)
    self.assertEqual(events, [])

  @parameterized.parameters(
      (lambda: open(os.devnull, encoding='utf-8').close(), 'open'),
      (lambda: eval('1'), 'exec'),
      (lambda: os.listdir('.'), 'os.listdir'),
      (lambda: socket.socket().close(), 'socket.'),
  )
  def test_events_are_noticed(self, function, name):
    with worlds.listening() as events:
      function()
    function()
    self.assertLen([event for event in events if event.startswith(name)], 1)

  def test_all_worlds_are_checked(self):
    """Every folder with an environment of its own is in the list."""
    folders = {path.parent.name for path in EXAMPLES.glob('*/env.py')}
    self.assertContainsSubset(folders, worlds.FOLDERS)


class TasksTest(absltest.TestCase):

  def test_splits_share_no_seed(self):
    load = tasks.seeded('name')
    train, dev = load('train'), load('dev')
    self.assertNoCommonElements([task.seed for task in train], [task.seed for task in dev])
    self.assertLen({task.id for task in train + dev}, sum(tasks.NUM_TASKS.values()))
    self.assertEqual((dev[0].dataset, dev[0].split), ('name', 'dev'))


if __name__ == '__main__':
  absltest.main()
