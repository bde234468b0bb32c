"""The real loop with a policy of a few numbers: updates take milliseconds.

The tokens of an episode depend on the parameters and keys, as in a real run.
"""

import contextlib
import functools
import os
import sys
import time
import types
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax

from stppo_jax import config as schema
from stppo_jax.cli import entry
from stppo_jax.models import sharding
from stppo_jax.monitoring import report
from stppo_jax.rollout import agent as agent_lib
from stppo_jax.rollout import engine
from stppo_jax.stop_signal import NEVER
from stppo_jax.stop_signal import StopSignal
from stppo_jax.training import checkpoint
from stppo_jax.training import learner as learner_lib
from stppo_jax.training import loop
from stppo_jax.training import minibatches
from stppo_jax.training import run as run_lib
from stppo_jax.training import state as train_state
from stppo_jax.training import update as update_lib
from stppo_jax.types import Episode
from stppo_jax.types import Turn
from tests.support import tiny_run

LENGTH = 8
comparable_metrics = tiny_run.comparable_metrics


def make_config(folder, **values):
  """A run of 4 updates on `folder`/knowledge; each ends where an epoch of the 5 questions does."""
  config = schema.Config(
      name='micro', data=schema.DataSettings(source=os.path.join(folder, 'knowledge'))
  )
  config.train = schema.TrainSettings(
      updates=4,
      episodes=10,
      mini_batch=5,
      micro_batch=5,
      epochs=2,
      length_buckets=(LENGTH,),
      checkpoint_every=1,
      keep_checkpoints=3,
  )
  config.rollout = schema.RolloutSettings(max_prompt=1, max_turn=1, max_total=LENGTH)
  config.algorithm.rollout_is = 'token'  # or a stale run is warned
  config.actor.warmup = config.critic.warmup = 0.0  # so that a resumed run may train longer
  config.eval = schema.EvalSettings(every=2, rows=4)
  config.log = schema.LogSettings(tensorboard=False, episodes=False)
  return tiny_run.replace(config, values)


def write_knowledge(folder):
  tiny_run.write_knowledge(os.path.join(folder, 'knowledge'))


def train(config, workdir, stop_signal=NEVER, **options):
  """`loop.start` with the policy of a few numbers; no report."""
  with replacing_setup(**options):
    with mock.patch.object(report, 'build', lambda workdir: workdir):
      return loop.start(config, workdir, stop_signal)


@contextlib.contextmanager
def replacing_setup(**options):
  """Context manager: a run has the learners and the agent of `setup`, and no other inputs."""
  make = lambda parts, unused_variant: setup(parts, **options)
  with mock.patch.multiple(run_lib, setup=make, load_inputs=lambda *unused: None):
    yield


def compile_functions(optimizer):
  """The functions below, jitted, in place of those of a real policy."""
  jit = lambda function, donate=(): jax.jit(function, donate_argnums=donate)
  return update_lib.Functions(
      annotate=jit(annotate),
      with_advantages=jit(with_advantages, 0),
      update_step=jit(functools.partial(update_step, optimizer), 0),
  )


def setup(parts, mesh=(1, 1, 1), slow_s=0.0):
  """In place of `run.setup`. Episodes take `slow_s` longer."""
  return make_learners(parts.config, mesh), Agent(slow_s)


def make_learners(config, mesh=(1, 1, 1)):
  """The learners of a policy of a few numbers."""
  mesh = sharding.make_mesh(*mesh, jax.devices()[: int(np.prod(mesh))])
  optimizer = optax.adam(1e-2)
  spec = types.SimpleNamespace(
      variant=types.SimpleNamespace(
          kl_coef=0.1, extrapolation=0.0, score_norm='none', breaks_ties=False
      ),
      actor_optimizer=optimizer,
      critic_optimizer=None,
      has_values=False,
      routing_replay='none',
  )
  actor = {'mlp': {'up': {'kernel': jnp.linspace(0, 1, 64).reshape(1, 8, 8)}}}
  state = train_state.create_sharded(spec, actor, None, mesh)
  settings, rows = config.train, sharding.rows(mesh)
  bins = minibatches.Bins(
      settings.mini_batch, settings.epochs, settings.micro_batch, settings.length_buckets, 0, rows
  )
  functions = compile_functions(optimizer)
  return learner_lib.Learners(
      spec, train_state.Frozen(), mesh, functions, bins, {'': state}, config.seed
  )


class Agent(agent_lib.Agent):
  """Plays without a model: one turn of a few tokens."""

  def __init__(self, slow_s):
    self.report, self.retriever = engine.Report(), None
    self.env = types.SimpleNamespace(core_metrics=('em',), rows_per_episode=1, make=None, roles=())
    self.tokenizer = types.SimpleNamespace(pad_id=0, pieces=lambda ids: [str(i) for i in ids])
    self.sampler = types.SimpleNamespace(
        compiled_variants=dict, copy=functools.partial(jax.tree.map, jnp.copy)
    )
    self.slow_s = slow_s

  def play(self, params, tasks, keys, groups=None, greedy=False, stop_signal=NEVER):
    time.sleep(self.slow_s)
    weight = np.asarray(
        jax.tree.leaves(params)[0]
    ).sum()  # by NumPy, so that compiler options do not matter
    groups = range(len(tasks)) if groups is None else groups
    episodes = []
    for task, key, group in zip(tasks, np.asarray(jax.random.key_data(keys)), groups):
      rng = np.random.default_rng(key)
      n = int(rng.integers(1, LENGTH - 2))
      logp = (-rng.random(n) * (1 + np.abs(np.sin(weight)))).astype(np.float32)
      tokens = rng.integers(1, 9, n).astype(np.int32)
      score = float(rng.random() < abs(np.cos(weight)))
      turn = Turn(tokens, logp, np.zeros((0,), np.int32), 'answer', score)
      prompt, em = np.array([1, 2], np.int32), {'em': score}
      episodes.append(Episode(task, group, prompt, [turn], metrics=em, core_metrics=('em',)))
    return episodes


def annotate(state, frozen, batch, steps):
  del frozen, steps
  old_logp = (batch.behaviour_logp + jnp.sin(_total(state)) * 0.1) * batch.action_mask
  return batch.replace(old_logp=old_logp), {
      'rollout_corr/kl': jnp.mean(batch.behaviour_logp - old_logp)
  }


def with_advantages(state, batch):
  state = state.replace(kl_coef=state.kl_coef * 1.01)
  return state, batch.replace(advantages=batch.rewards - 0.3), {'actor/kl_coef': state.kl_coef}


def update_step(optimizer, state, frozen, batch, step):
  del frozen
  batch = jax.tree.map(lambda x: x[step.rows], batch)

  def loss(actor):
    signal = jnp.sum(batch.advantages * batch.old_logp * batch.tokens)
    return sum(jnp.sum(jnp.sin(x * signal)) for x in jax.tree.leaves(actor))

  value, grads = jax.value_and_grad(loss)(state.actor)
  finite = jnp.isfinite(value)
  updates, actor_opt = optimizer.update(grads, state.actor_opt)
  keep = lambda new, old: jnp.where(finite, new, old)
  state = state.replace(
      step=state.step + 1,
      actor=jax.tree.map(keep, optax.apply_updates(state.actor, updates), state.actor),
      actor_opt=jax.tree.map(keep, actor_opt, state.actor_opt),
      skipped=jnp.where(finite, 0, state.skipped + 1),
  )
  ones = jnp.ones_like(batch.old_logp)
  return (
      state,
      {'actor/pg_loss': value, 'actor/skipped': state.skipped},
      {'ratio': ones, 'clipped': ones > 2},
  )


def state_after(config, workdir, updates, **options):
  """The checkpointed state, on the host."""
  learners = make_learners(config, **options)
  with checkpoint.Checkpoints(workdir) as checkpoints:
    return jax.device_get(checkpoints.restore(updates, learners.state))


def killed_after(updates):
  """Returns a signal that ends the run when that many updates are done in it."""
  calls = iter(range(updates + 1))

  def is_set():
    if next(calls) == updates:
      raise Killed
    return False

  return StopSignal(is_set)


class Killed(BaseException):
  """An exception that no handler expects."""


def _total(state):
  return sum(x.sum() for x in jax.tree.leaves(state.actor))


def command(folder, workdir, stderr, overrides, slow_s=0.01):
  """Runs `python run.py` on `make_config`, in a child process, with slow saves so that kills hit
  them.
  """
  os.dup2(os.open(stderr, os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
  entry.configure_logging()
  experiment = os.path.join(folder, 'experiment.py')
  with open(f'{experiment}.{os.getpid()}', 'w', encoding='utf-8') as file:
    file.write(
        'from tests.support import micro_run\n'
        f'def get_config(mode=""):\n  return micro_run.make_config({folder!r})\n'
    )
  os.replace(file.name, experiment)
  checksums = checkpoint._checksums

  def slow_checksums(path):
    time.sleep(slow_s)
    return checksums(path)

  with mock.patch.object(checkpoint, '_checksums', slow_checksums):
    with replacing_setup(slow_s=slow_s):
      argv = ['run.py', f'--config={experiment}', f'--workdir={workdir}', *overrides]
      sys.exit(entry.run(argv))
