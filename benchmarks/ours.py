"""Our side of the benchmarks, run in a Worker process. torch_peer.py is the other side."""

from concurrent import futures
import dataclasses
import os
import threading
import time
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import ops
from stppo_jax import types
from stppo_jax.algorithms import variants
from stppo_jax.models import convert
from stppo_jax.models import decoder
from stppo_jax.models import presets
from stppo_jax.models import sharding
from stppo_jax.rollout import batching
from stppo_jax.rollout import engine
from stppo_jax.rollout import sampler as sampler_lib
from stppo_jax.rollout import sampling
from stppo_jax.serving import gateway
from stppo_jax.serving import scheduler as scheduler_lib
from stppo_jax.training import packing
from stppo_jax.training import state as train_state
from stppo_jax.training import update

# The settings of a CPU run (experiments/st_ppo_tiny.py, rollout/agent.py).
_TINY = dataclasses.replace(
    presets.PRESETS['tiny'], scan_layers=False, remat='none', cache_tile=decoder.CPU_CACHE_TILE
)
SHAPES = {
    '0.94M': _TINY,  # the embedded model's
    '2.9M': dataclasses.replace(
        _TINY,
        vocab_size=512,
        d_model=256,
        num_layers=4,
        num_heads=4,
        num_kv_heads=2,
        head_dim=64,
        d_ff=640,
    ),
    '20M': dataclasses.replace(
        _TINY,
        vocab_size=8192,
        d_model=384,
        num_layers=8,
        num_heads=6,
        num_kv_heads=2,
        head_dim=64,
        d_ff=1536,
    ),
    '47M': dataclasses.replace(
        _TINY,
        vocab_size=8192,
        d_model=512,
        num_layers=12,
        num_heads=8,
        num_kv_heads=2,
        head_dim=64,
        d_ff=1920,
    ),
    '135M': dataclasses.replace(
        presets.PRESETS['smollm2-135m'],
        remat='dots',  # faster than 'none', which moves all activations in and out of the scan
        dtype='float32',
        cache_tile=decoder.CPU_CACHE_TILE,
    ),
}
LOGP_CHUNKS = {'135M': 64}  # others compute all logits at once
WIDTH = 32  # rows of a slot group, as in experiments/st_ppo_tiny.py
_NOTHING = np.zeros((0,), np.int32)  # the observation after the last turn


class Sampling:
  """Samples with the engine; makes the model that both sides load."""

  def __init__(self, size, folder):
    self.config = SHAPES[size]
    self._params = decoder.init(jax.random.key(0), self.config)
    convert.save_hf(os.path.join(folder, 'actor'), self.config, self._params)
    self._samplers = {}

  def model(self):
    """Describes the model."""
    return describe(self.config)

  def greedy(self, prompts, num_new):
    """Returns the most likely tokens [B,num_new]."""
    return self._play(prompts, [], num_new, temperature=0.0)

  def sample(self, prompts, num_new):
    """Samples tokens [B,num_new] at temperature 1 after prompts [B,T]."""
    return self._play(prompts, [], num_new)

  def profile(self, repeats, prompts, num_new):
    """Profiles `sample`."""
    return ops.top(lambda: self.sample(prompts, num_new), repeats)

  def multi_turn(self, prompts, observations, num_new, wait_s=0.0):
    """Samples num_new tokens per turn and keeps the cache.

    Observations [K - 1,B,T] come between the turns, after `wait_s` each.
    """
    return self._play(prompts, observations, num_new, wait_s=wait_s)

  def multi_turn_resending(self, prompts, observations, num_new):
    """Does the same, but prefills the whole conversation again in every turn."""
    slots, context = _total(prompts, observations, num_new), prompts
    for observation in [*observations, None]:
      tokens = self._play(context, [], num_new, slots=slots)
      if observation is not None:
        context = np.concatenate([context, tokens, observation], axis=1)
    return tokens

  def _play(self, prompts, observations, num_new, temperature=1.0, wait_s=0.0, slots=None):
    """Returns the last turn's tokens [B,num_new]."""
    rows = len(prompts)
    slots = slots or _total(prompts, observations, num_new)
    sampler, last, turns = self._sampler(rows, slots, temperature), [None] * rows, [0] * rows

    def respond(said):
      if wait_s and any(turns[turn.index] < len(observations) for turn in said):
        time.sleep(wait_s)
      cues = []
      for turn in said:
        last[turn.index], k = turn.turn.tokens, turns[turn.index]
        turns[turn.index] += 1
        over = k == len(observations)
        cues.append(
            engine.Prompt((), 0) if over else engine.Prompt(observations[k][turn.index], num_new)
        )
      return cues

    engine.run(
        sampler,
        self._params,
        [engine.Prompt(prompt, num_new) for prompt in prompts.tolist()],
        jax.random.split(jax.random.key(1), rows),
        respond,
        threads=4 if wait_s else 0,
    )
    return np.stack(last)

  def _sampler(self, *key):
    if key not in self._samplers:
      self._samplers[key] = _make_sampler(self.config, *key)
    return self._samplers[key]


class Schedulers(Sampling):
  """The same episodes through the two schedulers of the package: training's and the server's."""

  def training(self, prompts, observations, budgets, wait_s):
    """Plays the episodes as a run does; their number of sampled tokens is that of `budgets` [K,B].

    An environment takes `wait_s`, in a thread.
    """
    rows = len(prompts)
    turns = [0] * rows
    sampler = self._sampler(rows, _total(prompts, observations, budgets.max()), 1.0)

    def respond(said):
      if wait_s:
        time.sleep(wait_s)
      cues = []
      for turn in said:
        turns[turn.index] += 1
        k = turns[turn.index]
        is_over = k == len(budgets)
        observation = () if is_over else observations[k - 1][turn.index]
        cues.append(engine.Prompt(observation, 0 if is_over else int(budgets[k, turn.index])))
      return cues

    starts = zip(prompts.tolist(), budgets[0].tolist())
    engine.run(
        sampler,
        self._params,
        [engine.Prompt(prompt, budget) for prompt, budget in starts],
        jax.random.split(jax.random.key(1), rows),
        respond,
        threads=4 if wait_s else 0,
    )

  def serving(self, prompts, observations, budgets, wait_s):
    """Plays the same episodes as agent programs would, without HTTP, as many at a time as rows."""
    tokenizer = SimpleNamespace(token_bytes=[b''] * self.config.vocab_size, eos_ids=())
    slots = _total(prompts, observations, budgets.max())
    if ('serving', slots) not in self._samplers:
      sampler = gateway.make_sampler(self.config, tokenizer, WIDTH, slots)
      self._samplers['serving', slots] = sampler
    sampler = self._samplers['serving', slots]
    keys = jax.device_get(jax.random.key_data(jax.random.split(jax.random.key(1), len(prompts))))
    texts = tokenizer.token_bytes
    with scheduler_lib.Scheduler(sampler, self._params, texts, (), 1024) as scheduler:

      def play(index):
        ids = prompts[index].tolist()
        for k, budget in enumerate(budgets[:, index].tolist()):
          done = threading.Event()

          def emit(tokens, unused_logp, finish, ids=ids, done=done):
            ids.extend(tokens)
            if finish is not None:
              done.set()

          key = np.asarray(keys[index]) + np.uint32(k)
          scheduler.submit([scheduler_lib.Request(list(ids), budget, key, emit, owner=str(index))])
          done.wait()
          if wait_s:
            time.sleep(wait_s)
          if k < len(observations):
            ids += observations[k][index].tolist()
        scheduler.release(str(index))

      with futures.ThreadPoolExecutor(WIDTH) as pool:
        list(pool.map(play, range(len(prompts))))


def _plain(name, **columns):
  """Returns a variant without entropy and KL terms, aggregated as the peers do."""
  return dataclasses.replace(
      variants.VARIANTS[name], entropy_coef=0.0, kl_in='none', aggregation='token-mean', **columns
  )


def _make_spec(variant, config, learning_rate, micro_batch, length, logp_chunk=None):
  """Returns the Spec of an actor of this shape and its critic, with the same optimizer."""
  optimizer, schedule = train_state.make_optimizer(learning_rate, 0, weight_decay=0.01)
  return train_state.Spec(
      variant=variant,
      actor=config,
      critic=dataclasses.replace(config, head='value'),
      actor_optimizer=optimizer,
      critic_optimizer=optimizer,
      actor_lr=schedule,
      critic_lr=schedule,
      actor_clip=1.0,
      critic_clip=1.0,
      micro_batch=micro_batch,
      length_buckets=(length,),
      temperature=1.0,
      logp_chunk=logp_chunk,
      critic_warmup=0,
      num_logged_turns=5,
  )


class Learning:
  """Update steps of several variants, each with its own state; makes the models and the batch."""

  def __init__(self, size, folder, rows, length, learning_rate, micro_batch):
    self._mesh = sharding.make_mesh(1, 1, 1, jax.devices()[:1])
    self._actor_config = SHAPES[size]
    self._critic_config = dataclasses.replace(self._actor_config, head='value')
    self._model = describe(self._actor_config)
    self._sizes = learning_rate, micro_batch, length, LOGP_CHUNKS.get(size)
    actor, critic = self._parameters()
    convert.save_hf(os.path.join(folder, 'actor'), self._actor_config, actor)
    convert.save_hf(os.path.join(folder, 'critic'), self._critic_config, critic)
    del actor, critic
    st_ppo = _plain('st_ppo')
    self._variants = {
        'ppo': _plain('ppo', log_bias=False),
        'st_ppo, clipped': st_ppo,
        # Bounds that no ratio reaches, however long the benchmark runs.
        'st_ppo, nothing clipped': dataclasses.replace(st_ppo, clip_low=1.0, clip_high=1e6),
    }
    self._states, self._functions = {}, {}
    # Rows of equal length, so each is a bin of its own: the peer does not pack.
    packed = packing.pack(np.full(rows, length), micro_batch, (length,))
    self._step = packing.OptimizerStep(np.arange(rows, dtype=np.int32), packed)
    self._batches = self._make_batches(self._actor_config.vocab_size, rows, length)

  def _parameters(self):
    actor = decoder.init(jax.random.key(0), self._actor_config)
    critic = decoder.init(jax.random.key(1), self._critic_config)
    head = critic['value_head']['kernel']
    critic['value_head']['kernel'] = 0.02 * jax.random.normal(jax.random.key(2), head.shape)
    return actor, critic

  def _compile(self, name):
    """Makes the state and the functions of a variant, unless they are there."""
    if name in self._states:
      return
    spec = _make_spec(self._variants[name], self._actor_config, *self._sizes)
    state = train_state.create_sharded(spec, *self._parameters(), self._mesh)
    self._functions[name] = update.compile_functions(spec, state, train_state.Frozen(), self._mesh)
    self._states[name] = state

  def model(self):
    """Describes the actor; the critic is the same with a value head."""
    return self._model

  def batch(self):
    """Returns the batch of 'ppo' as NumPy arrays, for the peer."""
    batch = jax.device_get(self._batches['ppo'])
    fields = {field.name: getattr(batch, field.name) for field in dataclasses.fields(batch)}
    return {name: x for name, x in fields.items() if x is not None}

  def log_probs(self):
    """Returns log-probs and values, 0 outside the agent's tokens."""
    self._compile('ppo')
    batch, _ = self._functions['ppo'].annotate(
        self._states['ppo'], train_state.Frozen(), self._batches['ppo'], packing.stack([self._step])
    )
    return jax.device_get((batch.old_logp, batch.old_values))

  def update(self, name):
    """Does one optimizer step; returns losses and gradient norms before norm clipping."""
    self._compile(name)
    self._states[name], metrics, _ = self._functions[name].update_step(
        self._states[name], train_state.Frozen(), self._batches[name], self._step
    )
    jax.block_until_ready(self._states[name])
    found = jax.device_get(metrics)
    if (found['actor/pg_clipfrac'] == 0) != (name == 'st_ppo, nothing clipped'):
      raise RuntimeError(f'{name}: the clipped share is {found["actor/pg_clipfrac"]}')
    wanted = ('actor/pg_loss', 'critic/vf_loss', 'stppo/grad_norm', 'critic/grad_norm')
    return {key: float(found[key]) for key in wanted}

  def profile(self, repeats, name):
    """Profiles `update`."""
    return ops.top(lambda: self.update(name), repeats)

  def _make_batches(self, vocab_size, rows, length):
    """Makes one batch per learner: off-policy where it must clip, near the policy where not."""
    rng = np.random.default_rng(0)
    batch = random_batch(vocab_size, rows, length, rng)
    mask, turn_ids = batch.action_mask, batch.turn_ids
    noise = lambda scale: (scale * rng.normal(size=mask.shape) * mask).astype(np.float32)
    self._batches = {'ppo': jax.device_put(batch, sharding.rows(self._mesh))}
    logp, values = self.log_probs()
    near = batch.replace(old_logp=logp, old_values=values + noise(0.5))
    # A shift per turn, which the turn's mean would otherwise average out, and one per token.
    shift = np.concatenate([np.zeros((rows, 1)), 0.4 * rng.normal(size=(rows, turn_ids.max()))], 1)
    shift = np.take_along_axis(shift, turn_ids, axis=1) * mask
    far = near.replace(old_logp=(logp + shift + noise(0.2)).astype(np.float32))
    batches = {'ppo': far, 'st_ppo, nothing clipped': near, 'st_ppo, clipped': far}
    return {
        name: jax.device_put(batch, sharding.rows(self._mesh)) for name, batch in batches.items()
    }


class PpoStep:
  """Complete PPO steps, as in training/loop.py; makes the models that both sides load."""

  def __init__(self, size, folder, rows, num_prompt, num_new, learning_rate, micro_batch):
    self._mesh = sharding.make_mesh(1, 1, 1, jax.devices()[:1])
    # Not tied: the peer's critic is an actor with another output layer.
    config = dataclasses.replace(SHAPES[size], tie_embeddings=False)
    self._model, self._num_new = describe(config), num_new
    actor = decoder.init(jax.random.key(0), config)
    convert.save_hf(os.path.join(folder, 'actor'), config, actor)
    critic = {name: jax.tree.map(jnp.copy, actor[name]) for name in actor if name != 'lm_head'}
    kernel = 0.02 * jax.random.normal(jax.random.key(1), (config.d_model, 1))
    critic['value_head'] = {'kernel': kernel, 'bias': jnp.zeros((1,))}
    self._value_head = np.asarray(kernel)
    variant = _plain('ppo', log_bias=False)
    spec = _make_spec(variant, config, learning_rate, micro_batch, num_prompt + num_new)
    self._spec = spec
    self._state = train_state.create_sharded(spec, actor, critic, self._mesh)
    self._functions = update.compile_functions(spec, self._state, train_state.Frozen(), self._mesh)
    self._samplers = {
        temperature: _make_sampler(config, rows, num_prompt + num_new, temperature)
        for temperature in (0.0, 1.0)
    }
    self._key = jax.random.key(1)

  def model(self):
    """Describes the actor; the critic is the same with a value head."""
    return self._model

  def value_head(self):
    """Returns the critic's head [D,1]; its other parameters are the actor's."""
    return self._value_head

  def step(self, prompts, greedy=False):
    """Does one PPO step on prompts [B,P]."""
    episodes = self._rollout(prompts, 0.0 if greedy else 1.0)
    batch, step = self._to_batch(episodes)
    batch, _ = self._annotate(batch, step)
    self._state, batch, summary = self._functions.with_advantages(self._state, batch)
    self._state, metrics, _ = self._functions.update_step(
        self._state, train_state.Frozen(), batch, step
    )
    jax.block_until_ready(self._state)
    return jax.device_get(summary | metrics)

  def profile(self, repeats, prompts):
    """Profiles `step`."""
    return ops.top(lambda: self.step(prompts), repeats)

  def log_probs(self, prompts, completions):
    """Returns log-probs of the completions' tokens [B,T] and values of the states before them."""
    turns = [
        [types.Turn(tokens, np.zeros(len(tokens), np.float32), _NOTHING)]
        for tokens in completions.astype(np.int32)
    ]
    batch, _ = self._annotate(*self._to_batch(_episodes(prompts, turns)))
    after = slice(prompts.shape[1], None)
    return jax.device_get((batch.old_logp[:, after], batch.old_values[:, after]))

  def _rollout(self, prompts, temperature):
    turns = [[] for _ in prompts]

    def respond(said):
      for turn in said:
        turns[turn.index].append(turn.turn)
      return [engine.Prompt((), 0) for _ in said]

    self._key, key = jax.random.split(self._key)
    engine.run(
        self._samplers[temperature],
        self._state.actor,
        [engine.Prompt(prompt, self._num_new) for prompt in prompts.tolist()],
        jax.random.split(key, len(prompts)),
        respond,
    )
    return _episodes(prompts, turns)

  def _to_batch(self, episodes):
    """Returns (batch, the optimizer step on all of it)."""
    batch = batching.to_turn_batch(
        episodes, self._spec.length_buckets, sharding=sharding.rows(self._mesh)
    )
    lengths = np.array([batching.trained_length(episode) for episode in episodes])
    packed = packing.pack(lengths, self._spec.micro_batch, self._spec.length_buckets)
    return batch, packing.OptimizerStep(np.arange(len(episodes), dtype=np.int32), packed)

  def _annotate(self, batch, step):
    return self._functions.annotate(self._state, train_state.Frozen(), batch, packing.stack([step]))


def _episodes(prompts, turns):
  """Returns episodes, every other one with score 1."""
  task = types.Task(id='', question='', answers=())
  for i, played in enumerate(turns):
    played[-1].reward = float(i % 2)
  return [
      types.Episode(task, i, prompt.astype(np.int32), turns[i]) for i, prompt in enumerate(prompts)
  ]


def _make_sampler(config, rows, slots, temperature):
  """Returns a sampler without stop strings: only the token budget ends a turn."""
  never = np.zeros((2, config.vocab_size), np.int32)  # state 1, stopped, is not reached
  return sampler_lib.Sampler(
      config,
      never,
      (),
      sampling.Sizes(
          slots, rows=rows, width=WIDTH, slot_buckets=sampling.default_slot_buckets(slots)
      ),
      sampling.Distribution(temperature),
  )


def random_batch(vocab_size, rows, length, rng):
  """Returns an unannotated host batch: 48-token prompts, 32-token turns and observations."""
  column = np.arange(length) - 48
  turn_ids = np.where((column >= 0) & (column // 32 % 2 == 0), column // 64 + 1, 0)
  turn_ids = np.tile(turn_ids, (rows, 1)).astype(np.int32)
  mask = (turn_ids > 0).astype(np.float32)
  noise = lambda: (rng.normal(size=mask.shape) * mask).astype(np.float32)
  zeros = np.zeros_like(mask)
  return types.TurnBatch(
      tokens=rng.integers(0, vocab_size, mask.shape).astype(np.int32),
      action_mask=mask,
      turn_ids=turn_ids,
      rewards=zeros,
      old_logp=zeros,
      ref_logp=zeros,
      old_values=zeros,
      advantages=noise(),
      returns=noise(),
      group_ids=np.arange(rows, dtype=np.int32),
      behaviour_logp=zeros,
  )


def describe(config):
  """Describes a model's shape and its number of parameters."""
  names = (
      'vocab_size',
      'd_model',
      'num_layers',
      'num_heads',
      'num_kv_heads',
      'head_dim',
      'd_ff',
      'tie_embeddings',
      'dtype',
  )
  return {'params': decoder.num_params(config)} | {name: getattr(config, name) for name in names}


def _total(prompts, observations, num_new):
  """Returns the number of tokens of a conversation."""
  observed = sum(observation.shape[1] for observation in observations)
  return prompts.shape[1] + observed + (len(observations) + 1) * num_new
