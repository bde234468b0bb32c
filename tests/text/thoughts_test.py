"""Thoughts in played environments: what ends a turn, what acts, and what a reward reads."""

import functools
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized
import jax
import numpy as np

from stppo_jax import config as schema
from stppo_jax import types
from stppo_jax.assembly import components
from stppo_jax.envs import rewards
from stppo_jax.evaluation import remote as remote_eval
from stppo_jax.rollout import demonstrations
from stppo_jax.rollout import engine
from stppo_jax.rollout import episode as episode_lib
from stppo_jax.rollout import remote
from stppo_jax.rollout import sampling
from stppo_jax.rollout import servers
from stppo_jax.serving import sessions
from stppo_jax.settings import validation
from stppo_jax.text import template as template_lib
from stppo_jax.text import thoughts
from stppo_jax.text import tokenizer as chat
from stppo_jax.text import tool_calls
from tests.envs import tools_test
from tests.text import tokenizer_test

LIMITS = episode_lib.EpisodeLimits(2000, 500, 500, 6000)
TASK = types.Task('t', 'How many?', ('14',))
ANSWER = '<answer>14</answer>'


def make_tokenizer(template=None):
  return tokenizer_test.load_chat_tokenizer(template, '<|im_end|>')


def make_env(kind='tools', form='tags', reward='format', frame=None):
  config = schema.Config()
  config.env = schema.EnvSettings(kind=kind, max_searches=3, reward=reward)
  if kind == 'tools':
    config.env.tools = ('search',)
    config.env.options = {'form': form, **({'frame': frame} if frame else {})}
  config.retriever.top_k = 1
  return components.resolve(validation.validate(config)).bind(tools_test.Found())


def play(env, template, *turns, demonstrated=False):
  """Plays turns that would go on after their end; returns (episode, actions)."""
  tokenizer = make_tokenizer(template)
  table = chat.stop_automaton(tokenizer.token_bytes, env.stop_strings, env.skips_thoughts)
  left = list(turns)
  actions = []

  def run(sampler, params, prompts, keys, respond, threads):
    (prompt,) = prompts
    while prompt.budget > 0:
      state = prompt.stop_state
      tokens = []
      for token in tokenizer.encode(left.pop(0) + ' and more<|im_end|>', control=True):
        tokens.append(token)
        state = len(table) - 1 if token in tokenizer.eos_ids else table[state, token]
        if state == len(table) - 1:
          break
      turn = types.Turn(np.array(tokens, np.int32), np.zeros(len(tokens), np.float32))
      (prompt,) = respond([engine.TurnCompletion(0, turn)])
    return engine.Report()

  def step_envs(envs, texts):
    actions.extend(texts)
    return episode_lib.stepping.step_all(envs, texts)

  keys = jax.random.split(jax.random.key(0), 1)
  inputs = episode_lib.EpisodeInputs([env(TASK, 0)], [TASK], [0], keys)
  rules = episode_lib.EpisodeRules(env, LIMITS, step_envs)
  (episode,), _ = episode_lib.play(None, None, tokenizer, inputs, rules, run)
  return episode, actions


class PlayedTest(parameterized.TestCase):

  @parameterized.product(
      form=tuple(tool_calls.FORMS),
      template=(tokenizer_test.QWEN3, tokenizer_test.THINKING),
      frame=('inline', 'tool'),
  )
  def test_draft_in_thought_ends_no_turn(self, form, template, frame):
    env = make_env(form=form, frame=frame)
    write = tool_calls.make_form(form, [tools_test.tools._SEARCH]).write
    draft = write(tool_calls.Call('search', {'query': 'a'}))
    real = write(tool_calls.Call('search', {'query': 'b'}))
    opening = '<think>\n' if template == tokenizer_test.THINKING else ''
    start = '' if opening else '<think>'
    first = f'{start}maybe {draft} or {ANSWER} no</think>{real}'
    # Only the first turn follows the generation prompt if observations are inline.
    second_opening = opening if frame == 'tool' else ''
    second = f'{"" if second_opening else "<think>"}so</think>{ANSWER}'
    if form == 'llama3':  # the call is the rest of a turn
      first += '<|im_end|>'
    with mock.patch.object(rewards, 'score_answer', wraps=rewards.score_answer) as score:
      episode, actions = play(env, template, first, second)
    more = ' and more' if frame == 'tool' else ''
    rest = '' if form == 'llama3' else more
    self.assertEqual(actions[0], f'{opening}{first}{rest}'.removesuffix('<|im_end|>'))
    self.assertEqual(actions[1], f'{second_opening}{second}{more}')
    self.assertEqual([turn.action for turn in episode.turns], ['tool', 'answer'])
    self.assertEqual(episode.turns[0].reward, 0.0)
    transcript = score.call_args.args[3]
    self.assertStartsWith(transcript, actions[0])
    self.assertEndsWith(transcript, actions[1])
    self.assertIn('Title: b', transcript)

  @parameterized.parameters('<think>', '')
  def test_thought_that_never_closes_acts_not(self, start):
    template = tokenizer_test.QWEN3 if start else tokenizer_test.THINKING
    draft = f'{start}maybe <search>a</search> {ANSWER}'
    episode, actions = play(make_env(), template, draft, *[f'<think>{ANSWER}'] * 3)
    self.assertEndsWith(actions[0], ' and more')
    self.assertEqual([turn.action for turn in episode.turns], ['invalid'] * 4)
    self.assertEqual(episode.score, 0.0)

  def test_format_reward_sees_tag_of_template(self):
    turn = f'x</think>{ANSWER}'
    self.assertFalse(rewards.well_formed(turn))
    for kind, turns in (
        ('tools', [turn]),
        ('search', [turn]),
        ('search', ['x</think><search>a</search>', f'<think>y</think>{ANSWER}']),
    ):
      episode, _ = play(make_env(kind), tokenizer_test.THINKING, *turns)
      self.assertEqual(episode.score, 1.0, kind)
    episode, _ = play(make_env(), tokenizer_test.QWEN3, turn)
    self.assertEqual(episode.score, 0.8)  # the agent has opened none
    episode, _ = play(make_env(), tokenizer_test.NO_THINKING, f'<think>{turn}')
    self.assertEqual(episode.score, 1.0)

  def test_search_environment_acts_in_thoughts(self):
    """As in Search-R1, whose checkpoints may leave a thought open: its stop strings end a turn."""
    episode, actions = play(
        make_env('search'), tokenizer_test.QWEN3, '<think>a <search>b</search>', f'<think>{ANSWER}'
    )
    self.assertEqual(actions, ['<think>a <search>b</search>', f'<think>{ANSWER}'])
    self.assertEqual([turn.action for turn in episode.turns], ['search', 'answer'])
    self.assertEqual(episode.score, 0.8)

  def test_demonstration_does_not_repeat_tag(self):
    tokenizer = make_tokenizer(tokenizer_test.THINKING)
    for text in (f'<think>\nx</think>{ANSWER} and more', f'x</think>{ANSWER}'):
      env = make_env()
      source = lambda task, text=text: functools.partial(demonstrations.Recorded, [[text]])
      player = demonstrations.Demonstrator(source, env, tokenizer, LIMITS, per_group=1)
      (row,) = player.play(jax.random.key(0), [TASK], [0])
      self.assertEqual(tokenizer.decode(row.turns[0].tokens), f'x</think>{ANSWER}')
      self.assertEqual(row.score, 1.0)


class OtherServersTest(parameterized.TestCase):

  def test_engine_is_cut_behind_thought(self):
    env = make_env()
    tokenizer = make_tokenizer(tokenizer_test.THINKING)
    table = chat.stop_automaton(tokenizer.token_bytes, env.stop_strings, env.skips_thoughts)
    text = 'maybe <search>a</search></think><search>b</search> and more'
    tokens = tokenizer.encode(text)
    answer = servers.TurnAnswer(tokens, [-1.0] * len(tokens), 'length')
    for state, end in ((chat.THOUGHT_STATE, 'b</search>'), (0, 'a</search>')):
      request = servers.TurnRequest((1,), len(tokens), (), sampling.AS_IS, stop_state=state)
      turn = remote.make_turn(answer, request, table, 'engine')
      self.assertEndsWith(tokenizer.decode(turn.tokens), end)

  def test_answer_of_served_model_gets_its_tag(self):
    policy = mock.Mock(_env=make_env())
    read = functools.partial(remote_eval.RemotePlayer._action_text, policy)
    self.assertEqual(
        read('a<search>x</search></think><search>y</search> z'),
        '<think>\na<search>x</search></think><search>y</search>',
    )
    self.assertEqual(read('<search>y</search> z'), '<search>y</search>')
    self.assertEqual(thoughts.completed('<think>a</think>b</think>'), '<think>a</think>b</think>')


class ProgramTest(parameterized.TestCase):
  """Agent programs: their rewards read what a played environment's reads."""

  @parameterized.product(
      template=(tokenizer_test.QWEN3, tokenizer_test.THINKING), end=('<|im_end|>', '')
  )
  def test_transcript_is_that_of_played_environment(self, template, end):
    tokenizer = make_tokenizer(template)
    opening = '<think>\n' if template == tokenizer_test.THINKING else ''
    start = '' if opening else '<think>\n'
    session = sessions.Session(
        template_lib.Template(tokenizer, 2000), jax.random.key(0), sessions.Sampling()
    )
    messages = [
        {'role': 'user', 'content': 'One?'},
        {'role': 'assistant', 'content': 'an example'},
        {'role': 'user', 'content': 'Two?'},
    ]
    turns = [f'{start}a</think><search>b</search>', f'{start}c</think>{ANSWER}']
    block = '<information>d</information>'
    for turn in turns:
      plan = session.plan(messages)
      tokens = tokenizer.encode(turn + end, control=True)
      said = {'role': 'assistant', 'content': turn}
      session.record(plan, tokens, [-0.5] * len(tokens), [said])
      messages += [said, {'role': 'user', 'content': block}]
    self.assertEqual(session.last_text, opening + turns[1])
    wanted = f'{opening}{turns[0]}{block}{opening}{turns[1]}'
    self.assertEqual(session.transcript, wanted)
    self.assertTrue(rewards.well_formed(session.transcript))
    branch = session.plan(messages[:-2])  # another answer to the first observation
    tokens = tokenizer.encode('no' + end, control=True)
    session.record(branch, tokens, [-0.5] * len(tokens), [])
    self.assertEqual(session.transcript, f'{opening}{turns[0]}{block}{opening}no')


if __name__ == '__main__':
  absltest.main()
