"""The command --mode=study: plans the grid, runs what is left of it, and writes its page."""

from collections.abc import Callable
from collections.abc import Sequence

from stppo_jax import config as schema
from stppo_jax.study import grid as grids
from stppo_jax.study import runner


def run(
    config: schema.Config,
    file: str,
    workdir: str,
    command: Sequence[str],
    num_jobs: int = 0,
    devices: str = 'cpu',
    only: Sequence[str] = (),
    stop_requested: Callable[[], bool] = lambda: False,
) -> int:
  """Runs the study of an experiment file; returns the exit code: 0 unless a job failed.

  Args:
    config: what the runs have in common: the file's config with the flags' overrides.
    file: FILE[:MODE] of the experiment.
    workdir: the folder of the study.
    command: starts an ordinary run of the file.
    num_jobs: at once; 0: one per core.
    devices: 'cpu', 'gpu' or 'tpu'.
    only: patterns of names of jobs; empty: all.
    stop_requested: whether to end now; the same command goes on.
  """
  study, unchanged = grids.load(file)
  jobs = grids.plan(study, config, unchanged, tuple(only))
  runs = runner.Runner(workdir, study, jobs, command, runner.make_slots(num_jobs, devices))
  runs.run(stop_requested)
  print(runs.table())
  return 1 if runs.counts()['failed'] else 0
