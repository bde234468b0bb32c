"""The scheduler of requests: equal to the engine whoever shares its calls; prefixes and stops."""

import dataclasses
import functools
import gc
import os
import threading
import time
from unittest import mock
import weakref

from absl.testing import absltest
from absl.testing import parameterized
import jax
import numpy as np

from stppo_jax.distributed import hosts
from stppo_jax.models import decoder
from stppo_jax.models import layers
from stppo_jax.rollout import engine
from stppo_jax.rollout import sampler as sampler_lib
from stppo_jax.rollout import sampling
from stppo_jax.serving import scheduler as scheduler_lib
from stppo_jax.text import tokenizer as chat

VOCAB, SLOTS, TURN, EOS = 24, 64, 10, 3
CONFIG = decoder.ModelConfig(
    vocab_size=VOCAB, d_model=16, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=8, d_ff=32
)
TOKEN_BYTES = tuple(bytes([97 + i]) for i in range(VOCAB))
NO_STOPS = chat.stop_automaton(TOKEN_BYTES, ())


@functools.cache
def make_params():
  """Random weights, large enough that the context matters and no distribution is uniform."""
  enlarge = lambda path, w: w if path[-1].key == 'scale' else 12.0 * w
  params = jax.jit(decoder.init, static_argnums=1)(jax.random.key(0), CONFIG)
  return jax.tree_util.tree_map_with_path(enlarge, params)


@functools.cache  # a sampler compiles a handful of programs
def make_sampler(stops=(), steps=3, width=6):
  table = chat.stop_automaton(TOKEN_BYTES, stops)
  sizes = sampling.Sizes(SLOTS, width, width, 2, steps, (SLOTS,), (4, 8))
  return sampler_lib.Sampler(CONFIG, table, (EOS,), sizes)


def make_scheduler(width=6, **settings):
  sampler = make_sampler(width=width)
  return scheduler_lib.Scheduler(sampler, make_params(), TOKEN_BYTES, (EOS,), **settings)


DELTA_CONFIG = dataclasses.replace(
    CONFIG,
    num_layers=3,
    layer_types=('delta', 'delta', 'full'),
    delta=layers.DeltaShape(2, 4, 4, 4, 4),
)


@functools.cache
def make_delta_model():
  """Returns (sampler, parameters) of a model with gated delta nets."""
  sizes = sampling.Sizes(SLOTS, 6, 6, 2, 8, (SLOTS,), (4, 8))
  sampler = sampler_lib.Sampler(DELTA_CONFIG, NO_STOPS, (EOS,), sizes)
  enlarge = lambda path, w: w if path[-1].key == 'scale' else 12.0 * w
  params = jax.jit(decoder.init, static_argnums=1)(jax.random.key(1), DELTA_CONFIG)
  return sampler, jax.tree_util.tree_map_with_path(enlarge, params)


class Listener:
  """Collects what a request emits."""

  def __init__(self):
    self.tokens, self.logp, self.finish = [], [], None
    self.over, self.begun = threading.Event(), threading.Event()

  def __call__(self, tokens, logp, finish):
    self.tokens += tokens
    self.logp += logp
    self.begun.set()
    if finish is not None:
      assert self.finish is None, 'two ends'
      self.finish = finish
      self.over.set()

  def wait(self):
    assert self.over.wait(120)
    return self


def key_data(seed):
  return np.asarray(jax.random.key_data(jax.random.key(seed)))


def make_request(ids, seed=0, budget=TURN, **settings):
  return scheduler_lib.Request(list(ids), budget, key_data(seed), Listener(), **settings)


def serve(scheduler, *requests):
  """Runs requests to their ends; returns what they emitted."""
  scheduler.submit(requests)
  return [request.emit.wait() for request in requests]


def make_prompts(count, seed=0):
  rng = np.random.default_rng(seed)
  return [rng.integers(4, VOCAB, rng.integers(2, 12)).tolist() for _ in range(count)]


def check_logp(found, wanted):
  """Equal bit for bit, or to the last digit with XLA's newer emitter, which rounds by shape."""
  is_exact = 'xla_cpu_use_fusion_emitters=false' in os.environ['XLA_FLAGS']
  found, wanted = (np.asarray(logp, np.float32) for logp in (found, wanted))
  np.testing.assert_allclose(found, wanted, rtol=0 if is_exact else 1e-6, atol=0)


class SchedulerTest(parameterized.TestCase):

  def test_turns_equal_engine_bit_for_bit(self):
    """Several turns, stop strings and more sequences than rows, in both; other call lengths."""
    stops, prompts, keys = ('bc', 'h'), make_prompts(15), jax.random.split(jax.random.key(1), 15)
    reply, played = [5, 6, 7], {i: [] for i in range(15)}

    def respond(completions):
      for turn in completions:
        played[turn.index].append(turn.turn)
      done = lambda turn: len(played[turn.index]) == 3
      return [engine.Prompt((), 0) if done(t) else engine.Prompt(reply, TURN) for t in completions]

    sampler = make_sampler(stops, steps=8)
    engine.run(sampler, make_params(), [engine.Prompt(p, TURN) for p in prompts], keys, respond)
    with make_scheduler(shares_prefixes=False) as scheduler:

      def play(i):
        ids, turns = list(prompts[i]), []
        for _ in range(3):
          key = np.asarray(jax.random.key_data(keys[i]))
          request = scheduler_lib.Request(ids, TURN, key, Listener(), stop=stops)
          (heard,) = serve(scheduler, request)
          turns.append(heard)
          ids = [*ids, *heard.tokens, *reply]
        got[i] = turns

      got = {}
      threads = [threading.Thread(target=play, args=(i,)) for i in range(15)]
      for first in range(0, 15, 6):  # as many at once as there are rows, so that each keeps its own
        for thread in threads[first : first + 6]:
          thread.start()
        for thread in threads[first : first + 6]:
          thread.join()
    for i in range(15):
      for wanted, heard in zip(played[i], got[i], strict=True):
        self.assertEqual(wanted.tokens.tolist(), heard.tokens)
        check_logp(wanted.logp, heard.logp)
    self.assertGreater(scheduler.counts.dropped_tokens, 0)
    self.assertGreater(scheduler.counts.reused_tokens, 15 * 10)

  @parameterized.parameters({'stop': ('bc', 'h', 'k')}, {'call_stop': ('e', 'm', 'p')})
  def test_delta_state_never_holds_dropped_tokens(self, **stops):
    """The log-probs of later turns are those of one pass over the row."""
    sampler, params = make_delta_model()
    num_reused = 0
    with scheduler_lib.Scheduler(sampler, params, TOKEN_BYTES, (EOS,)) as scheduler:
      for seed, prompt in enumerate(make_prompts(6)):
        ids = list(prompt)
        for turn in range(3):
          (heard,) = serve(scheduler, make_request(ids, 3 * seed + turn, **stops))
          row = ids + heard.tokens
          (truth,) = scheduler.control('score', [row]).result(60)
          np.testing.assert_allclose(heard.logp, truth.logp[len(ids) - 1 :], atol=1e-4)
          ids = [*row, 5, 6, 7]
      num_reused = scheduler.counts.reused_tokens
      self.assertGreater(scheduler.counts.dropped_tokens, 0)
    self.assertGreater(num_reused, 0)  # rows that ended without dropped tokens

  def test_small_decode_calls_give_the_same_tokens(self):
    requests = lambda: [make_request(ids, seed) for seed, ids in enumerate(make_prompts(6))]
    widths, sampler = [], make_sampler(width=6)
    decode = sampler.decode

    def watched(params, context, *args, **settings):
      widths.append(context.logits.shape[0])
      return decode(params, context, *args, **settings)

    with mock.patch.object(sampler, 'decode', watched):
      with make_scheduler() as scheduler:
        together = serve(scheduler, *requests())
      self.assertContainsSubset({6}, widths)
      widths.clear()
      with make_scheduler() as scheduler:
        alone = [serve(scheduler, request)[0] for request in requests()]
        again = serve(scheduler, *requests()[:2])
      self.assertEqual({2}, set(widths))
    for one, heard in zip([*alone, *again], [*together, *together[:2]], strict=True):
      self.assertEqual(one.tokens, heard.tokens)
      check_logp(one.logp, heard.logp)

  def test_shared_prefix_is_computed_once(self):
    prompt = make_prompts(1)[0]
    longer = [*prompt, 9, 9, 9]
    with make_scheduler() as alone:
      (wanted,) = serve(alone, make_request(longer, seed=2))
    with make_scheduler() as scheduler:
      serve(scheduler, make_request(prompt, seed=1, budget=1))
      before = scheduler.counts.prefill_tokens
      (heard,) = serve(scheduler, make_request(longer, seed=2))
      self.assertEqual(scheduler.counts.prefill_tokens - before, 3)
      self.assertEqual(scheduler.counts.reused_tokens, len(prompt))
      twins = serve(scheduler, *(make_request([8, *longer], seed=s) for s in range(5)))
      self.assertEqual(scheduler.counts.reused_tokens, len(prompt) + 4 * len(longer))
    self.assertEqual(heard.tokens, wanted.tokens)
    np.testing.assert_allclose(heard.logp, wanted.logp, atol=1e-5)
    self.assertLen({tuple(twin.tokens) for twin in twins}, 5)

  def test_released_rows_are_overwritten_first(self):
    long, other, new = [5] * 9, [6] * 9, [7] * 9
    with make_scheduler(width=2) as scheduler:
      serve(scheduler, make_request(long, budget=1, owner='a'))
      serve(scheduler, make_request(other, budget=1, owner='b'))
      scheduler.release('b')
      serve(scheduler, make_request(new, budget=1))
      serve(scheduler, make_request([*long, 8], budget=1, owner='a'))
      self.assertEqual(scheduler.counts.reused_tokens, len(long))

  def test_released_rows_are_the_same_in_all_processes(self):
    """Two processes as threads: with other rows they would sample in other contexts."""
    barrier, said = threading.Barrier(2), {}
    schedulers = [make_scheduler(width=2) for _ in range(2)]
    threads = [scheduler._thread for scheduler in schedulers]

    def share(message):
      said[threads.index(threading.current_thread())] = message
      barrier.wait(60)
      message = said[0]
      barrier.wait(60)
      return [message]

    is_writer = lambda: threading.current_thread() is threads[0]
    self.enterContext(mock.patch.object(jax, 'process_count', lambda: 2))
    self.enterContext(mock.patch.object(hosts, 'is_writer', is_writer))
    self.enterContext(mock.patch.object(hosts, 'share', share))
    with schedulers[1], schedulers[0]:
      for owner in 'ab':
        serve(schedulers[0], make_request([5] * 9, budget=1, owner=owner))
      schedulers[0].release('b')
      serve(schedulers[0], make_request([7] * 9, budget=1, owner='c'))
      schedulers[0].control('resume').result(60)  # then both have ended the step before
      rows = [[row.owner for row in scheduler._rows] for scheduler in schedulers]
    self.assertCountEqual(rows[0], 'ac')
    self.assertEqual(rows[0], rows[1])

  def test_overwritten_rows_leak_nothing(self):
    """Requests of all kinds in random order, with two rows: each as it is alone."""
    rng = np.random.default_rng(3)
    stems, requests = make_prompts(3), []
    for seed in range(20):
      ids = [*stems[rng.integers(3)], *rng.integers(4, VOCAB, rng.integers(0, 6))]
      requests.append(make_request(ids, seed, budget=int(rng.integers(1, TURN))))
    with make_scheduler(width=2) as scheduler:
      together = serve(scheduler, *requests)
    for request, heard in zip(requests, together):
      again = scheduler_lib.Request(request.ids, request.budget, request.key, Listener())
      with make_scheduler(width=2) as scheduler:
        (alone,) = serve(scheduler, again)
      self.assertEqual(heard.tokens, alone.tokens)
      np.testing.assert_allclose(heard.logp, alone.logp, atol=1e-4)

  def test_ignored_eos_is_an_ordinary_token(self):
    """As of a sampler to which the token means nothing."""
    sizes = sampling.Sizes(SLOTS, 6, 6, 2, 3, (SLOTS,), (4, 8))
    without = sampler_lib.Sampler(CONFIG, NO_STOPS, (VOCAB - 1,), sizes)
    requests = lambda **settings: [make_request([5, 6], s, 30, **settings) for s in range(8)]
    with scheduler_lib.Scheduler(without, make_params(), TOKEN_BYTES, ()) as scheduler:
      wanted = serve(scheduler, *requests(ignore_eos=True))
    with make_scheduler() as scheduler:
      found = serve(scheduler, *requests(ignore_eos=True))
      ended = serve(scheduler, *requests())
    for heard, one, short in zip(found, wanted, ended):
      self.assertEqual((heard.tokens, heard.finish), (one.tokens, 'length'))
      check_logp(heard.logp, one.logp)
      self.assertEqual(heard.tokens[: len(short.tokens)], short.tokens)
    self.assertTrue(any(EOS in heard.tokens[:-1] for heard in found))

  def test_ends_by_stop_string_eos_and_length(self):
    with make_scheduler() as scheduler:
      found = serve(scheduler, *(make_request([5, 6], s, TURN, stop=('bc',)) for s in range(30)))
    for heard in found:
      text = b''.join(TOKEN_BYTES[token] for token in heard.tokens)
      if heard.finish == 'length':
        self.assertLen(heard.tokens, TURN)
      elif heard.tokens[-1] != EOS:
        self.assertTrue(text.endswith(b'bc'))
      self.assertLessEqual(text.count(b'bc'), 1)
      self.assertNotIn(EOS, heard.tokens[:-1])
    self.assertEqual({heard.finish for heard in found}, {'length', 'stop'})

  def test_request_joins_running_requests(self):
    with make_scheduler() as scheduler:
      sampled = serve(scheduler, *(make_request([5, 6], s, SLOTS - 2) for s in range(24)))
      seed = max(range(24), key=lambda s: len(sampled[s].tokens))
      self.assertGreater(len(sampled[seed].tokens), 12)  # a call samples 3 of them
      long, short, over = make_request([5, 6], seed, SLOTS - 2), make_request([7], budget=1), []
      has_joined = threading.Event()
      heard, long.emit = long.emit, lambda *given: (has_joined.wait(60), heard(*given))
      for name, request in (('long', heard), ('short', short.emit)):
        request.over.set = functools.partial(self._note, request.over, over, name)
      scheduler.submit([long])
      scheduler.submit([short])
      has_joined.set()
      heard.wait()
      short.emit.wait()
    self.assertEqual(over, ['short', 'long'])
    self.assertEqual(heard.tokens, sampled[seed].tokens)

  def _note(self, event, over, name):
    over.append(name)
    threading.Event.set(event)

  def test_cancelled_request_frees_its_row(self):
    with make_scheduler(width=2) as scheduler:
      requests = [make_request([5, 6], s, SLOTS - 2) for s in range(6)]
      for request in requests:
        heard = request.emit
        request.emit = lambda *given, r=request, h=heard: (setattr(r, 'cancelled', True), h(*given))
        scheduler.submit([request])
        heard.wait()
        self.assertLessEqual(len(heard.tokens), 3)
      self.assertEqual(scheduler.running, 0)
    self.assertIn('cancelled', heard.finish)

  @parameterized.product(call=('reload', 'forget'), later_calls=(0, 2))
  def test_cancelled_during_pause_leaves_no_prefix(self, call, later_calls):
    """Nothing that the weights before a push have computed is reused, and no later copy of it."""
    prompt = [5, 6, 7, 8, 9, 10]
    arguments = ('folder',) if call == 'reload' else ()
    new = jax.tree.map(lambda w: 1.5 * w, make_params()) if call == 'reload' else make_params()
    with scheduler_lib.Scheduler(make_sampler(), new, TOKEN_BYTES, (EOS,)) as scheduler:
      (wanted,) = serve(scheduler, make_request(prompt, seed=2))
    with make_scheduler(load_params=lambda folder: new) as scheduler:
      begun = make_request(prompt, budget=SLOTS - len(prompt), ignore_eos=True)
      hold = threading.Event()
      heard = begun.emit
      begun.emit = lambda *given: (heard(*given), hold.wait(60))
      scheduler.submit([begun])
      self.assertTrue(heard.begun.wait(60))
      calls = [scheduler.control('pause', False), scheduler.control(call, *arguments)]
      hold.set()
      for done in calls:
        done.result(60)
      begun.cancelled = True
      for _ in range(later_calls):
        scheduler.control(call, *arguments).result(60)
      scheduler.control('resume').result(60)
      self.assertEqual(heard.wait().finish, 'cancelled')
      for reused in (0, len(prompt) - 1, 2 * (len(prompt) - 1)):
        (found,) = serve(scheduler, make_request(prompt, seed=2))
        self.assertEqual(scheduler.counts.reused_tokens, reused)
        self.assertEqual(found.tokens, wanted.tokens)
        np.testing.assert_allclose(found.logp, wanted.logp, atol=1e-5)

  def test_full_queue_rejects_requests(self):
    with make_scheduler(width=2, max_waiting=3) as scheduler:
      requests = [make_request([5], budget=SLOTS - 2, seed=s) for s in range(3)]
      with self.assertRaises(scheduler_lib.Busy):
        scheduler.submit([*requests, make_request([5])])
      self.assertEqual(scheduler.waiting, 0)  # all or none
      serve(scheduler, *requests)
    self.assertFalse(scheduler.is_alive)
    with self.assertRaises(scheduler_lib.Busy):
      scheduler.submit(requests)

  def test_cancelled_requests_leave_the_queue(self):
    with make_scheduler(width=2, max_waiting=2) as scheduler:
      is_free = threading.Event()
      first = make_request([5, 6])
      heard, first.emit = first.emit, lambda *given: (heard(*given), is_free.wait(60))
      scheduler.submit([first])
      self.assertTrue(heard.begun.wait(60))  # the scheduler's thread is held in `emit`
      gone, live = [make_request([7]) for _ in range(2)], make_request([8])
      scheduler.submit(gone)
      with self.assertRaises(scheduler_lib.Busy):
        scheduler.submit([live])
      for request in gone:
        request.cancelled = True
      scheduler.submit([live])
      is_free.set()
      self.assertIn(live.emit.wait().finish, ('stop', 'length'))
      self.assertEqual([request.emit.finish for request in gone], ['cancelled'] * 2)

  def test_call_given_up_leaves_engine_alive(self):
    with make_scheduler() as scheduler:
      hold = threading.Event()
      first = make_request([5, 6])
      heard, first.emit = first.emit, lambda *given: (heard(*given), hold.wait(60))
      scheduler.submit([first])
      self.assertTrue(heard.begun.wait(60))  # the scheduler's thread is held in `emit`
      calls = [scheduler.control('score', [[5, 6]]) for _ in range(3)]
      self.assertTrue(calls[0].cancel())
      self.assertTrue(calls[2].cancel())
      hold.set()
      (scores,) = calls[1].result(60)
      self.assertLen(scores.logp, 1)
      self.assertTrue(scheduler.is_alive)
      scheduler.control('pause', False).result(60)
      scheduler.control('score', [[5, 6]]).cancel()
    scheduler.wait()

  def test_failure_ends_waiting_requests(self):
    scheduler = make_scheduler()
    scheduler._decode = lambda: 1 / 0
    with self.assertLogs(level='ERROR'), scheduler:
      (heard,) = serve(scheduler, make_request([5]))
      self.assertEqual(heard.finish, 'error')
      time.sleep(0.05)
      self.assertFalse(scheduler.is_alive)

  def test_exit_frees_device_memory(self):
    """Although whoever serves requests still holds the scheduler."""
    gc.disable()
    self.addCleanup(gc.enable)
    scheduler = make_scheduler()
    with scheduler:
      serve(scheduler, make_request(make_prompts(1)[0]))
      cache = weakref.ref(scheduler._group.context.k[0])
      self.assertIsNotNone(cache())
    self.assertIsNone(cache())

  def test_refuses_what_does_not_fit(self):
    with make_scheduler() as scheduler:
      for ids, budget in (([], 1), ([5] * SLOTS, 1), ([5], SLOTS), ([5], 0)):
        with self.assertRaisesRegex(ValueError, 'do not fit'):
          scheduler.submit([make_request(ids, budget=budget)])


if __name__ == '__main__':
  absltest.main()
