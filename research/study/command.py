"""Plans a grid, runs what is left of it, and writes its page."""

from collections.abc import Callable
from collections.abc import Sequence

from research.page import page
from research.page import summary
from research.study import grid as grids
from research.study import results
from research.study import runner
from research.toy import cell


def run(
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
    file: FILE[:MODE] of the experiment.
    workdir: the folder of the study.
    command: starts an ordinary run of the file.
    num_jobs: at once; 0: one per core.
    devices: 'cpu', 'gpu' or 'tpu'.
    only: patterns of names of jobs; empty: all.
    stop_requested: whether to end now; the same command continues.
  """
  study, config = grids.load(file)
  jobs = grids.plan(study, config, tuple(only), cell.make)
  page.read_template(study.claims)  # or an error now
  runs = runner.Runner(workdir, study, jobs, command, runner.make_slots(num_jobs, devices))
  runs.run(stop_requested)
  print(runs.table())
  if study.published:
    print(_beside(study, jobs, workdir))
  print(write_page(file, workdir))
  return 1 if runs.counts()['failed'] else 0


def write_page(file: str, workdir: str) -> str:
  """Writes the page of a study from its results alone; returns the path of study.html.

  Results of settings that are no longer planned are left out.
  """
  study, config = grids.load(file)
  jobs = grids.plan(study, config, (), cell.make)
  records = results.read(results.folder(study.results, workdir))
  made = results.of_jobs(jobs, records)
  return page.build(planned_cells(study, jobs), made, study.page or workdir, study.claims)


def _beside(study, jobs, workdir) -> str:
  """Returns the results of a repeat beside the published ones, of the same cells and seeds."""
  made, published = (
      results.of_jobs(jobs, results.read(folder))
      for folder in (results.folder(study.results, workdir), study.published)
  )
  return page.beside(planned_cells(study, jobs), made, published)


def planned_cells(study, jobs) -> list[summary.Planned]:
  """Returns the cells of these jobs."""
  numbers: dict[tuple[str, str, str], int] = {}
  for job in jobs:
    key = job.grid, job.regime, job.cell
    numbers[key] = numbers.get(key, 0) + len(job.seeds)
  return [
      summary.Planned(*key, study.grids[key[0]].baseline, number) for key, number in numbers.items()
  ]
