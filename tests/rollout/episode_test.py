"""Whole episodes of a random model in scripted environments: sampled ids are never re-encoded."""

from concurrent import futures
import functools
import random
import threading
import time
from unittest import mock

from absl import logging
from absl.testing import absltest
from absl.testing import parameterized
import hypothesis
from hypothesis import strategies as st
import jax
import jax.numpy as jnp
import numpy as np

from stppo_jax import types
from stppo_jax.distributed import hosts
from stppo_jax.envs import factory
from stppo_jax.envs import guard as guard_lib
from stppo_jax.envs import stepping
from stppo_jax.models import decoder
from stppo_jax.rollout import batching
from stppo_jax.rollout import engine
from stppo_jax.rollout import episode as episode_lib
from stppo_jax.rollout import sampler as sampler_lib
from stppo_jax.rollout import sampling
from stppo_jax.text import tokenizer as chat
from tests.support import tiny_tokenizer

T = 96
make_tokenizer = tiny_tokenizer.load
LIMITS = episode_lib.EpisodeLimits(
    max_prompt_tokens=24,
    max_turn_tokens=6,
    max_observation_tokens=20,
    max_total_tokens=T,
    min_turn_tokens=2,
)
ENV = factory.EnvFactory(make=None, settings={})
PROMPTS = ('Question: who?\n', 'where', 'the river goes to France?', 'a', 'Paris is', 'x y z')
SEARCH = (
    '\n\n<information>Paris is a town. <|im_end|>é</information>\n\n',
    0.0,
    False,
    False,
    {'action': 'search'},
)
LONG = (
    f"<information>{'the capital of France ' * 20}</information>\n",
    0.0,
    False,
    False,
    {'action': 'search'},
)
INVALID = ('try again\n', 0.0, False, False, {'action': 'invalid'})
EMPTY = ('', 0.25, False, False, {'suffix': ''})  # a GEM environment without class attributes
ANSWER = ('', 1.0, True, False, {'action': 'answer', 'metrics': {'em': 1.0, 'f1': 0.5}})
NO_RETRIEVAL = (
    '<information></information>',
    0.0,
    False,
    False,
    {'action': 'search', 'retrieval_failed': True},
)
LIMIT_HIT = ('', 0.0, True, True, {'action': 'invalid'})
SCRIPTS = [
    [SEARCH, INVALID, ANSWER],
    [LONG, ANSWER],
    [EMPTY, EMPTY, SEARCH, ANSWER],
    [ANSWER],
    [INVALID, ANSWER],
    [SEARCH, NO_RETRIEVAL, ANSWER],
]


class ScriptedEnv:
  """Returns a list of outcomes whatever the agent does, and records the agent's texts."""

  def __init__(self, prompt, outcomes):
    self.prompt, self.outcomes, self.heard = prompt, list(outcomes), []

  def reset(self, seed=None):
    return self.prompt, {'suffix': ''}

  def step(self, action):
    self.heard.append(action)
    return self.outcomes[len(self.heard) - 1]


@functools.cache
def make_config():
  return decoder.ModelConfig(
      vocab_size=make_tokenizer().vocab_size + 3,  # padded, as real ones are
      d_model=16,
      num_layers=2,
      num_heads=2,
      num_kv_heads=1,
      head_dim=8,
      d_ff=32,
  )


@functools.cache
def make_params():
  """Random weights, large enough that the context matters and no distribution is uniform."""
  enlarge = lambda path, w: w if path[-1].key == 'scale' else 10.0 * w
  params = jax.jit(decoder.init, static_argnums=1)(jax.random.key(0), make_config())
  return jax.tree_util.tree_map_with_path(enlarge, params)


@functools.cache
def make_sampler(**draw):
  tokenizer = make_tokenizer()
  table = chat.stop_automaton(tokenizer.token_bytes, ('</search>', '</answer>', 's>', 'an'))
  sizes = sampling.Sizes(T, rows=4, prefill_rows=2, slot_buckets=(T,), chunk_buckets=(8,), steps=4)
  distribution = sampling.Distribution(**draw)
  return sampler_lib.Sampler(make_config(), table, tokenizer.eos_ids, sizes, distribution)


def play(
    prompts, scripts, keys=None, limits=LIMITS, sampler=None, groups=None, run=engine.run, **how
):
  envs = [ScriptedEnv(prompt, script) for prompt, script in zip(prompts, scripts)]
  tasks = [types.Task(id=prompt, question=prompt, answers=('a',)) for prompt in prompts]
  groups = range(len(envs)) if groups is None else groups
  if keys is None:
    keys = episode_lib.row_keys(jax.random.key(0), tasks)
  episodes, _ = episode_lib.play(
      sampler or make_sampler(),
      make_params(),
      make_tokenizer(),
      episode_lib.EpisodeInputs(envs, tasks, groups, keys),
      episode_lib.EpisodeRules(ENV, limits, **how),
      run,
  )
  return episodes, envs


def slowly(envs, actions):
  """Runs `stepping.step_all` after a random delay."""
  time.sleep(random.uniform(0, 0.02))
  return stepping.step_all(envs, actions)


@jax.jit
def plain_forward(params, tokens, temperature):
  """(log-probs [B,T], logits [B,T,V] that token t was drawn from) of one forward, no cache."""
  x, _ = decoder.trunk(params, make_config(), tokens, None)
  logp, _ = decoder.token_logp(params, make_config(), x, tokens, temperature)
  return logp, jnp.roll(decoder.token_logits(params, make_config(), x), 1, axis=1)


def renormalised(logits, token, temperature, top_k, top_p):
  """log-prob of `token` after top-k and top-p, in float64."""
  probs = np.exp(np.float64(logits) / temperature)
  order = np.argsort(-probs, kind='stable')[:top_k]
  probs = probs[order] / probs[order].sum()
  kept = np.cumsum(probs) - probs < top_p
  probs = np.where(kept, probs, 0) / probs[kept].sum()
  return np.log(probs[order == token][0])


class RaisingEnv(ScriptedEnv):
  """Raises an outcome that is an exception, and in `reset` a prompt that is one."""

  def reset(self, seed=None):
    if isinstance(self.prompt, Exception):
      raise self.prompt
    return super().reset(seed)

  def step(self, action):
    outcome = super().step(action)
    if isinstance(outcome, Exception):
      raise outcome
    return outcome


scripts_strategy = st.lists(
    st.lists(st.sampled_from([SEARCH, LONG, INVALID, EMPTY, NO_RETRIEVAL]), max_size=4),
    min_size=1,
    max_size=4,
)


class PlayTest(parameterized.TestCase):

  @hypothesis.settings(deadline=None, max_examples=12)
  @hypothesis.given(scripts_strategy, st.integers(0, 2**31), st.permutations(PROMPTS))
  def test_sampled_tokens_are_trained_tokens(self, scripts, seed, prompts):
    """Re-tokenised turns train tokens that were never sampled (verl 6719): ids must stay ids."""
    sampled, fed = ([[] for _ in scripts] for _ in range(2))
    prompts = prompts[: len(scripts)]
    scripts = [script + [ANSWER] for script in scripts]
    keys = jax.random.split(jax.random.key(seed), len(scripts))
    run = functools.partial(spied_run, engine.run, sampled, fed)
    episodes, envs = play(prompts, scripts, keys, run=run)
    for episode in episodes:
      episode.failed = False  # so that the batch shows all rows
    batch = batching.to_turn_batch(episodes, (T,), rows=4)
    tokens, turn_ids = np.asarray(batch.tokens), np.asarray(batch.turn_ids)
    for b, (episode, env) in enumerate(zip(episodes, envs)):
      by_sampler = sampled[b]
      self.assertEqual(tokens[b][turn_ids[b] > 0].tolist(), [int(i) for t in by_sampler for i in t])
      self.assertEqual(turn_ids[b].max(), len(by_sampler))
      to_model = fed[b]
      used = len(to_model) + sum(map(len, by_sampler))
      self.assertEqual(tokens[b][:used][turn_ids[b][:used] == 0].tolist(), to_model)
      self.assertEqual(len(episode.unroll()[0]), used)
      self.assertEqual(episode.prompt.tolist(), make_tokenizer().encode(prompts[b]))
      for turn, outcome in zip(episode.turns[:-1], scripts[b]):
        want = chat.encode_observation(make_tokenizer(), outcome[0], LIMITS.max_observation_tokens)
        self.assertEqual(turn.observation.tolist(), want)
      self.assertEmpty(episode.turns[-1].observation)
      self.assertLen(env.heard, len(episode.turns))
      for turn, heard in zip(episode.turns, env.heard):
        self.assertEqual(heard, make_tokenizer().decode(turn.tokens).removesuffix('<|im_end|>'))
      self.assertEqual(episode.score, sum(o[1] for o in scripts[b][: len(episode.turns)]))
      self.assertLessEqual(used, T)
    logp, _ = plain_forward(make_params(), batch.tokens, 1.0)
    mask = np.asarray(batch.action_mask)
    np.testing.assert_allclose(logp * mask, batch.behaviour_logp, atol=1e-5)

  @parameterized.parameters((0.7, 0, 1.0), (0.7, 40, 0.8))
  def test_logp_is_that_of_the_distribution_sampled_from(self, temperature, top_k, top_p):
    sampler = make_sampler(temperature=temperature, top_k=top_k, top_p=top_p)
    episodes, _ = play(PROMPTS[:4], [[SEARCH, INVALID, ANSWER]] * 4, sampler=sampler)
    batch = batching.to_turn_batch(episodes, (T,))
    logp, logits = map(np.asarray, plain_forward(make_params(), batch.tokens, temperature))
    got, mask = np.asarray(batch.behaviour_logp), np.asarray(batch.action_mask)
    if top_k == 0:
      np.testing.assert_allclose(logp * mask, got, atol=1e-5)
      return
    for b, t in zip(*np.nonzero(mask)):
      want = renormalised(logits[b, t], int(batch.tokens[b, t]), temperature, top_k, top_p)
      self.assertAlmostEqual(got[b, t], want, delta=2e-5)

  def test_episode_does_not_depend_on_its_batch(self):
    keys = jax.random.split(jax.random.key(3), 6)
    together, _ = play(PROMPTS, SCRIPTS, keys)  # six in 4 rows
    order = np.array([5, 3, 1, 0, 4, 2])
    shuffled, _ = play([PROMPTS[i] for i in order], [SCRIPTS[i] for i in order], keys[order])
    for i, episode in zip(order, shuffled):
      self.assert_same(episode, together[i])
    for i in (0, 2, 5):
      alone, _ = play(PROMPTS[i : i + 1], SCRIPTS[i : i + 1], keys[i : i + 1])
      self.assert_same(alone[0], together[i])

  def test_row_keys_are_unique_and_batch_independent(self):
    def keys_of(ids):
      tasks = [types.Task(id=i, question='', answers=()) for i in ids]
      keys = jax.random.key_data(episode_lib.row_keys(jax.random.key(0), tasks))
      return [tuple(key) for key in np.asarray(keys).tolist()]

    a1, a2, b1, b2 = keys_of('aabb')
    self.assertLen({a1, a2, b1, b2}, 4)
    self.assertEqual(keys_of('bcab')[::2] + keys_of('bcab')[3:], [b1, a1, b2])

  def test_total_limit(self):
    # prompt 'a': 1 token. A turn is at most 6 tokens, SEARCH's observation at most 20.
    limits = episode_lib.EpisodeLimits(24, 6, 20, max_total_tokens=40, min_turn_tokens=2)
    episodes, envs = play(['a'] * 4, [[SEARCH] * 9] * 4, limits=limits)
    for episode, env in zip(episodes, envs):
      length = len(episode.unroll()[0])
      self.assertLessEqual(length, 40)
      self.assertGreater(length + 20 + 2, 40)  # one more observation would not have fitted
      self.assertTrue(episode.truncated)
      self.assertFalse(episode.failed)
      self.assertEmpty(episode.turns[-1].observation)
      self.assertLess(len(env.heard), 9)

  def test_turn_at_its_limit_truncates_the_episode(self):
    tokenizer = make_tokenizer()
    rules = episode_lib.EpisodeRules(factory.EnvFactory(None, {}, stop_strings=('</a>',)), LIMITS)
    framing = chat.make_framing(tokenizer, 'inline', LIMITS.max_observation_tokens)
    eos = tokenizer.eos_ids[0]
    stop = tokenizer.encode('</a>')
    filler = tokenizer.encode('a')[0]
    longest = LIMITS.max_turn_tokens
    self.assertLessEqual(len(stop), longest)
    turns = {
        'cut': ([filler] * longest, True),
        'short': ([filler], False),
        'eos at the limit': ([filler] * (longest - 1) + [eos], False),
        'stop string at the limit': ([filler] * (longest - len(stop)) + stop, False),
    }
    for name, (tokens, is_cut) in turns.items():
      for outcome in (ANSWER, LIMIT_HIT):
        with self.subTest(name, outcome=outcome):
          state = episode_lib.EpisodeState(types.Task('t'), framing, rules, 0, 0)
          state.observe('Question: who?\n', {})
          ids = np.array(tokens, np.int32)
          state.record(types.Turn(ids, np.zeros(len(ids), np.float32)), outcome)
          (episode,) = state.episodes
          self.assertEqual(episode.truncated, is_cut or outcome is LIMIT_HIT)
          self.assertEqual(episode.counts['cut'], is_cut)

  def test_how_episodes_end(self):
    episodes, _ = play(
        PROMPTS[:4],
        [[SEARCH, ANSWER], [INVALID, LIMIT_HIT], [NO_RETRIEVAL, ANSWER], [EMPTY, ANSWER]],
    )
    is_cut = [len(e.turns[-1].tokens) == LIMITS.max_turn_tokens for e in episodes]
    self.assertIn(True, is_cut)
    self.assertEqual([e.truncated for e in episodes], np.logical_or(is_cut, [0, 1, 0, 0]).tolist())
    self.assertEqual([e.failed for e in episodes], [False, False, True, False])
    self.assertEqual([e.score for e in episodes], [1.0, 0.0, 1.0, 1.25])
    self.assertEqual(
        [[t.action for t in e.turns] for e in episodes],
        [['search', 'answer'], ['invalid', 'invalid'], ['search', 'answer'], ['other', 'answer']],
    )
    self.assertEqual(episodes[0].metrics, {'em': 1.0, 'f1': 0.5})
    self.assertLen(episodes[0].turns, 2)
    self.assertEqual(
        episodes[0].counts,
        {'invalid': 0, 'prompt_too_long': 0, 'repeated': 0, 'empty': 0, 'cut': 2},
    )
    self.assertEqual(episodes[1].counts['invalid'], 2)
    self.assertEqual(episodes[1].metrics, {})
    self.assertEqual(
        [[t.reward for t in e.turns] for e in episodes], [[0, 1], [0, 0], [0, 1], [0.25, 1]]
    )
    batch = batching.to_turn_batch(episodes, (T,))
    np.testing.assert_array_equal(batch.rewards.sum(axis=1), [1.0, 0.0, 0.0, 1.25])
    ids, ends = np.asarray(batch.turn_ids[3]), [0.25, 1.0]  # each on the last token of its turn
    columns = [np.flatnonzero(ids == k)[-1] for k in (1, 2)]
    np.testing.assert_array_equal(np.asarray(batch.rewards)[3, columns], ends)
    np.testing.assert_array_equal(batch.action_mask.any(axis=1), [True, True, False, True])

  def test_prompt_too_long_is_counted_and_not_played(self):
    episodes, envs = play(['where ' * 30, 'where'], [[ANSWER], [ANSWER]])
    self.assertEqual([e.counts['prompt_too_long'] for e in episodes], [1.0, 0.0])
    self.assertTrue(episodes[0].truncated and episodes[0].failed)
    self.assertEmpty(envs[0].heard)
    self.assertLen(episodes[0].prompt, LIMITS.max_prompt_tokens)
    self.assertFalse(episodes[1].failed)

  def test_observation_has_prefix_and_suffix(self):
    info = {'prefix': '2.', 'suffix': 'now?'}
    episodes, _ = play(['a'], [[('higher', 0.0, False, False, info), ANSWER]])
    observation = episodes[0].turns[0].observation
    self.assertEqual(make_tokenizer().decode(observation), '2.\nhigher\nnow?')

  @parameterized.parameters(
      (float('nan'), {}, 'reward'),
      (None, {}, 'reward'),
      (0.0, {'metrics': {'won': float('inf')}}, 'info..metrics....won'),
      (0.0, {'metrics': {'won': 'yes'}}, 'info..metrics....won'),
  )
  def test_rewards_and_metrics_must_be_finite_numbers(self, reward, info, message):
    with self.assertRaisesRegex(types.UserError, f'{message}.*finite number'):
      play(['a'], [[('', reward, True, False, info)]])

  def test_reset_seeds(self):
    seeds = []

    class Seeded(ScriptedEnv):

      def reset(self, seed=None):
        seeds.append(seed)
        return super().reset(seed)

    tasks = [types.Task('a', seed=7), types.Task('b'), types.Task('b')]
    keys = episode_lib.row_keys(jax.random.key(0), tasks)
    envs = [Seeded('a', [ANSWER]) for _ in tasks]
    rows = episode_lib.EpisodeInputs(envs, tasks, range(3), keys)
    rules = episode_lib.EpisodeRules(ENV, LIMITS)
    episode_lib.play(make_sampler(), make_params(), make_tokenizer(), rows, rules)
    self.assertEqual(seeds, [7, *episode_lib.episode_seeds(keys)[1:]])
    self.assertLen(set(seeds), 3)

  def test_threads_and_slow_environments_change_nothing(self):
    keys = jax.random.split(jax.random.key(4), 6)
    want, _ = play(PROMPTS, SCRIPTS, keys)
    got, _ = play(PROMPTS, SCRIPTS, keys, threads=3, step_envs=slowly)
    for a, b in zip(want, got):
      self.assert_same(a, b)
      self.assertEqual(
          (a.score, a.failed, a.metrics, a.counts), (b.score, b.failed, b.metrics, b.counts)
      )

  def test_environments_may_be_reset_at_once(self):
    """Six that wait for each other: one by one they would wait for ever."""
    barrier, scripts = threading.Barrier(6, timeout=60), [[SEARCH, ANSWER]] * 6
    want, _ = play(PROMPTS, scripts)
    reset = ScriptedEnv.reset

    def waits(env, seed=None):
      barrier.wait()
      return reset(env, seed)

    with futures.ThreadPoolExecutor(6) as pool:
      with mock.patch.object(ScriptedEnv, 'reset', waits):
        got, _ = play(PROMPTS, scripts, map_resets=pool.map)
    for a, b in zip(want, got):
      self.assert_same(a, b)

  @parameterized.parameters(0, 2)
  def test_an_environment_that_raises_ends_the_run(self, threads):
    def broken(envs, actions):
      raise KeyError('the environment is broken')

    with self.assertRaisesRegex(KeyError, 'the environment is broken'):
      play(PROMPTS, [[ANSWER]] * 6, threads=threads, step_envs=broken)

  def test_all_processes_need_the_same_prompts(self):
    with mock.patch.object(hosts, 'share', lambda value: [value, 'of another process']):
      with self.assertRaisesRegex(types.UserError, '^prompts of the .* `reset` depend on its seed'):
        play(['Hello'], [[ANSWER]])

  def assert_same(self, a, b):
    self.assertEqual(len(a.turns), len(b.turns))
    np.testing.assert_array_equal(a.prompt, b.prompt)
    for x, y in zip(a.turns, b.turns):
      np.testing.assert_array_equal(x.tokens, y.tokens)
      np.testing.assert_array_equal(x.observation, y.observation)
      np.testing.assert_allclose(x.logp, y.logp, atol=1e-5)


def spied_run(run, sampled, fed, sampler, params, prompts, keys, respond, threads):
  """`engine.run` that also notes what each sequence was given to prefill and what was sampled."""

  def spy(turns):
    next_prompts = respond(turns)
    for turn, prompt in zip(turns, next_prompts):
      sampled[turn.index].append(turn.turn.tokens.copy())
      fed[turn.index] += prompt.ids
    return next_prompts

  for ids, prompt in zip(fed, prompts):
    ids += prompt.ids
  return run(sampler, params, prompts, keys, spy, threads)


class EnvironmentErrorTest(parameterized.TestCase):
  """An environment whose code raises: in turn 2, in `reset`, or not at all."""

  def play(self, **how):
    boom = ValueError('no such\nmove')
    prompts = ['where', KeyError('task'), 'Paris is']
    scripts = [[SEARCH, boom], [], [SEARCH, ANSWER]]
    envs = [RaisingEnv(prompt, script) for prompt, script in zip(prompts, scripts)]
    tasks = [types.Task(f't{i}', 'q', ('a',)) for i in range(3)]
    keys = episode_lib.row_keys(jax.random.key(0), tasks)
    rows = episode_lib.EpisodeInputs(envs, tasks, range(3), keys)
    rules = episode_lib.EpisodeRules(ENV, LIMITS, **how)
    return episode_lib.play(make_sampler(), make_params(), make_tokenizer(), rows, rules)[0]

  @parameterized.parameters(0, 2)
  def test_raising_environment_masks_its_episode_only(self, threads):
    logging._log_counter_per_token.clear()  # log_first_n counts in it
    with self.assertLogs('absl', 'WARNING') as logs:
      first, second, third = self.play(threads=threads)
    self.assertEqual([e.failed for e in (first, second, third)], [True, True, False])
    self.assertEqual([len(e.turns) for e in (first, second, third)], [2, 0, 2])
    self.assertEqual(third.score, 1.0)
    here = f'{__file__}:'
    self.assertStartsWith(first.error, 'the environment RaisingEnv raised ValueError: no such move')
    self.assertIn(here, first.error)
    self.assertEndsWith(first.error, "on task 't0', in turn 2")
    self.assertEndsWith(second.error, "on task 't1', before its first turn")
    self.assertEqual(third.error, '')
    self.assertLen(logs.output, 1)  # the first one, with its traceback
    self.assertIn('Traceback', logs.output[0])
    self.assertIn(here, logs.output[0].splitlines()[0])
    self.assertEqual([e.search_failed for e in (first, second)], [False, False])  # no waiting
    batch = batching.to_turn_batch([first, second, third], (T,))
    self.assertEqual(batch.action_mask.any(axis=1).tolist(), [False, False, True])

  @parameterized.parameters(0, 2)
  def test_call_without_end_masks_its_episode_only(self, threads):
    over = threading.Event()
    self.addCleanup(over.set)

    class Blocks(ScriptedEnv):

      def step(self, action):
        if self.prompt == 'where' and self.heard:
          over.wait()
        return super().step(action)

    guard = guard_lib.Guard(1.0)
    tasks = [types.Task(prompt, prompt, ('a',)) for prompt in ('where', 'Paris is')]
    make = lambda task: Blocks(task.question, [SEARCH, ANSWER])
    kind = factory.EnvFactory(make, {}, uses_global_random=False)
    envs = [kind(task, 0, guard) for task in tasks]
    keys = episode_lib.row_keys(jax.random.key(0), tasks)
    rows = episode_lib.EpisodeInputs(envs, tasks, range(2), keys)
    rules = episode_lib.EpisodeRules(ENV, LIMITS, threads=threads)
    with self.assertLogs('absl', 'WARNING') as logs:
      (first, second), _ = episode_lib.play(
          make_sampler(), make_params(), make_tokenizer(), rows, rules
      )
    self.assertEqual([first.failed, second.failed], [True, False])
    self.assertEqual(second.score, 1.0)
    (line,) = [line for line in logs.output if 'no result of step within 1 s' in line]
    for words in ('Blocks gave', "on task 'where', in turn 2", 'over.wait()'):
      self.assertIn(words, line)
    batch = batching.to_turn_batch([first, second], (T,))
    self.assertEqual(batch.action_mask.any(axis=1).tolist(), [False, True])

  def test_strict_rules_end_the_run_with_one_line(self):
    line = r"^[^\n]*RaisingEnv raised KeyError: 'task' [^\n]*episode_test.py:\d+[^\n]*'t1'[^\n]*$"
    with self.assertRaisesRegex(types.UserError, line):
      self.play(strict=True)

  def test_a_constructor_that_raises_fails_in_reset(self):

    def make(task):
      raise OSError(f'no file for {task.id}')

    kind = factory.make_factory('m:make', make, {}, {})
    observation, info = stepping.reset(kind(types.Task('t7', 'q'), 0), 0)
    self.assertEqual(observation, '')
    self.assertIn('make raised OSError: no file for t7', info['environment_error'])
    self.assertIn(f'{__file__}:', info['environment_error'])

  def test_user_error_ends_the_run_unchanged(self):
    env = RaisingEnv('a', [types.UserError('give another option')])
    with self.assertRaisesRegex(types.UserError, '^give another option$'):
      stepping.step(env, 'x')


if __name__ == '__main__':
  absltest.main()
