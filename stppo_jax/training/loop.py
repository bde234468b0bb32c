"""The training loop.

An *update* is one batch of episodes with its optimizer steps. A *step* is one optimizer step.
"""

import functools

from stppo_jax.config import Config
from stppo_jax.stop_signal import NEVER
from stppo_jax.stop_signal import StopSignal
from stppo_jax.training import recovery
from stppo_jax.training import run as run_lib


def train(run: run_lib.Run) -> dict[str, float]:
  """Runs the updates that are left; returns the scores of the last evaluation.

  tasks -> episodes (host) -> one TurnBatch (devices) -> old log-probs and values -> advantages
  -> a few optimizer steps -> metrics, and when they are due an evaluation and a checkpoint
  """
  with run.saving_on_error():
    run.begin()
  updates = run.remaining_updates()
  for n in updates:
    with run.saving_on_error():
      sampled = run.sample(n)
      policy_updates = run.learners.update(sampled, run.timing)
      metrics = run.measure(n, sampled, policy_updates)  # update n counts as done from here on
      if run.evaluation_is_due(n):
        metrics = run.evaluate(n, metrics)
      run.log(n, metrics)
      run.save(n)
  return run.finish()


def start(
    config: Config, workdir: str, stop_signal: StopSignal = NEVER, profile: int = 0
) -> dict[str, float]:
  """Starts, or resumes, the run of a config in `workdir`; returns what `train` returns.

  At the signal, the run finishes an update that is already training, and leaves episodes that are
  still being played. Then it saves, and the next call does the rest. A run whose gradients stay
  non-finite ends, or rolls back to its newest checkpoint. A trace of `profile` updates goes to
  workdir/profile.
  """
  variant, components = run_lib.check(config)
  load_inputs = functools.partial(run_lib.load_inputs, components, variant)
  with recovery.hold_workdir(config, variant, workdir, load_inputs):
    run_lib.free_devices(config, stop_signal)
    learners, agent = run_lib.setup(components, variant)
    recovery.claim_data(
        config, components.tasks, components.held_out, components.passages_digest, workdir
    )
    skip_through: int | None = None  # after a rollback, the batches up to this one are skipped
    rollbacks = recovery.Rollbacks(workdir, config.train.on_nonfinite)
    while True:
      opened = run_lib.open_run(
          components, learners, agent, workdir, stop_signal, profile, skip_through
      )
      try:
        with opened as run:
          return train(run)
      except recovery.Stuck as stuck:
        rollbacks.count(stuck)  # ends the run, unless it may go back to its newest checkpoint
        skip_through = stuck.batch_number
