"""What it saves to train the common prefixes of rows once: rows per second, and memory.

  python -m benchmarks.prefixes            # minutes on two cores
  python -m benchmarks.prefixes --quick    # a small case

Each case trains the same rows with `config.train.share_prefixes` and without, in turn, in one
process: an optimizer step of actor and critic, and log-probs and values before it. `ratio` above 1
means that sharing is faster. Memory is what the compiled program of the step needs beside its
arguments.
"""

from collections.abc import Sequence
import dataclasses
import json
import time
import typing

from absl import app
from absl import flags
import jax
import numpy as np

from benchmarks import ours
from benchmarks import side_by_side
from stppo_jax import types
from stppo_jax.algorithms import variants
from stppo_jax.models import decoder
from stppo_jax.models import sharding
from stppo_jax.training import minibatches
from stppo_jax.training import packing
from stppo_jax.training import state as state_lib
from stppo_jax.training import update

_CASES = flags.DEFINE_list('cases', [], 'names of cases, by their first words; all by default')


class Case(typing.NamedTuple):
  """Rows to train, and how they are packed."""

  variant: str
  groups: int
  group_size: int
  common: int  # tokens that all rows begin with
  prompt: int  # tokens that the rows of a group begin with
  lengths: tuple[float, float]  # mean and deviation of the tokens of a row
  bins: tuple[int, ...]  # tokens per bin
  micro_batch: int
  size: str = '20M'  # a name of `ours.SHAPES`


CASES = {
    'grpo, 8 attempts of 128 tokens after prompts of 512': Case(
        'grpo', 2, 8, 0, 512, (640, 0), (640, 1280, 1536), 2
    ),
    'st_ppo, rows of about 800 tokens that begin with the same 150': Case(
        'st_ppo', 32, 1, 150, 150, (800, 100), (1024, 1536), 2, '2.9M'
    ),
    'st_ppo, rows of about 800 tokens with nothing in common': Case(
        'st_ppo', 16, 1, 0, 0, (800, 100), (1024, 1536), 2, '2.9M'
    ),
}
QUICK = Case('grpo', 2, 4, 0, 16, (24, 0), (32, 48), 2, '0.94M')


def main(unused_argv):
  side_by_side.print_machine()
  cases = {'quick': QUICK} if side_by_side.QUICK.value else CASES
  for name, case in cases.items():
    if not _CASES.value or name.startswith(tuple(_CASES.value)):
      compare(name, case)


def compare(name: str, case: Case) -> None:
  """Prints a line for the log-probs of a case, and one for its optimizer step."""
  episodes = make_episodes(case)
  learners = {'shared': Learner(case, episodes, True), 'alone': Learner(case, episodes, False)}
  for what in ('log_probs', 'step'):
    seconds: dict[str, list[float]] = {kind: [] for kind in learners}
    for repeat in range(1 + side_by_side.REPEATS.value):
      for kind, learner in learners.items():
        start = time.perf_counter()
        getattr(learner, what)()
        if repeat:  # the first call compiles
          seconds[kind].append(time.perf_counter() - start)
    ratios = np.array(seconds['alone']) / seconds['shared']
    line = {
        'benchmark': 'prefixes',
        'what': f'{what}: {name}',
        'size': case.size,
        'rows_per_s': {kind: round(len(episodes) / np.median(s), 2) for kind, s in seconds.items()},
        'ratio': round(float(np.median(ratios)), 3),
        'spread': [round(float(ratios.min()), 3), round(float(ratios.max()), 3)],
        'tokens': {kind: learner.num_computed() for kind, learner in learners.items()},
    }
    if what == 'step':
      line['step_mb'] = {kind: learner.step_mb() for kind, learner in learners.items()}
    print(json.dumps(line), flush=True)


def make_episodes(case: Case) -> list[types.Episode]:
  """Returns episodes of one turn, every other one with a reward."""
  rng = np.random.default_rng(0)
  draw = lambda n: rng.integers(1, 500, n).astype(np.int32)
  common = draw(case.common)
  episodes = []
  for group in range(case.groups):
    prompt = np.concatenate([common, draw(case.prompt - case.common)])
    for attempt in range(case.group_size):
      mean, deviation = case.lengths
      length = int(np.clip(rng.normal(mean, deviation), mean - 400, mean + 400))
      tokens = draw(length - case.prompt)
      logp = np.full(len(tokens), -6.0, np.float32)
      turn = types.Turn(tokens, logp, np.zeros(0, np.int32), reward=float(attempt % 2))
      episodes.append(types.Episode(types.Task('', ''), group, prompt, [turn]))
  return episodes


class Learner:
  """Actor, critic and the batch of a case."""

  def __init__(self, case: Case, episodes: Sequence[types.Episode], share: bool):
    mesh = sharding.make_mesh(1, 1, 1, jax.devices()[:1])
    variant = dataclasses.replace(variants.VARIANTS[case.variant], entropy_coef=0.0, kl_in='none')
    model = ours.SHAPES[case.size]
    spec = ours._make_spec(variant, model, 1e-5, case.micro_batch, 0)
    spec = dataclasses.replace(spec, lengths=case.bins, share_prefixes=share)
    if not variant.needs_critic:
      spec = dataclasses.replace(spec, critic=None)
    actor = decoder.init(jax.random.key(0), model)
    critic = None
    if spec.critic is not None:
      critic = decoder.init(jax.random.key(1), spec.critic)
    self._spec = spec
    self._frozen = state_lib.Frozen()
    self._state = state_lib.create_sharded(spec, actor, critic, mesh)
    self._functions = update.compile_functions(spec, self._state, self._frozen, mesh)
    bins = minibatches.Bins(
        mini_batch=len(episodes),
        epochs=1,
        micro_batch=case.micro_batch,
        lengths=case.bins,
        pad_id=0,
        sharding=sharding.rows(mesh),
        share_prefixes=share,
    )
    self._batch, (self._step,) = minibatches.to_device(episodes, bins, jax.random.key(0))
    batch = self.log_probs()
    self._state, self._batch, _ = self._functions.with_advantages(self._state, batch)

  def log_probs(self) -> types.TurnBatch:
    """Returns the batch with log-probs and values."""
    steps = packing.stack([self._step])
    batch, _ = self._functions.annotate(self._state, self._frozen, self._batch, steps)
    return jax.block_until_ready(batch)

  def step(self) -> None:
    """Takes an optimizer step."""
    after = self._functions.update_step(self._state, self._frozen, self._batch, self._step)
    self._state = jax.block_until_ready(after)[0]

  def step_mb(self) -> int:
    """Returns the memory of the step beside its arguments, in MiB."""
    arguments = (self._state, self._frozen, self._batch, self._step)
    compiled = self._functions.update_step.lower(*arguments).compile()
    return round(compiled.memory_analysis().temp_size_in_bytes / 2**20)

  def num_computed(self) -> int:
    """Counts the tokens that a model computes in the step, padding included."""
    return packing.num_computed(self._step.packing, self._spec.micro_batch, self._spec.lengths)


if __name__ == '__main__':
  app.run(main)
