"""The grid of a study: reads an experiment file and plans its runs, all of them checked.

An experiment file becomes a study by a second function besides `get_config`:

  def get_study(mode=''):
    return grid.Study({
        'system': grid.Grid(
            methods={name: {'algorithm.variant': name} for name in ('ppo', 'st_ppo')},
            conditions={'calm': {'train.epochs': 1}, 'harsh': {'train.epochs': 4}},
            seeds=(0, 1, 2, 3, 4),
        ),
    })

A method and a condition are a set of overrides {path of a setting: value} of what `get_config`
returns. A run has one condition, one method and one seed. If both set a path, the method wins. A
study can have several grids, for example with another model or in the toy task.
"""

from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
import copy
import dataclasses
import difflib
import fnmatch
import hashlib
import importlib.util
import json
import re
import sys
from typing import Any

from research.toy import settings as toy_settings
from stppo_jax import config as schema
from stppo_jax.assembly import components
from stppo_jax.settings import objective
from stppo_jax.settings import validation
from stppo_jax.types import UserError

USUAL_SCORES = {'system': 'val-core/all/em', 'toy': 'toy/success'}
# Settings and folders were renamed after some records were written. Records are read with the new
# names. Digests use the old names, so that a rename alone repeats no run.
NEW_NAMES = {  # old path -> new path
    'mechanism.rewards': 'toy.rewards',
    'mechanism.warm_steps': 'toy.warm_steps',
    'env.max_turns': 'env.max_searches',
    'log.wandb_project': 'log.project',
}
NEW_FOLDERS = {'docs/study/model_5m': 'research/model_5m'}
_NAME = re.compile(r'[A-Za-z0-9][A-Za-z0-9_.+-]*')


@dataclasses.dataclass(frozen=True)
class Grid:
  """Methods x conditions x seeds."""

  methods: Mapping[str, Mapping[str, Any]]  # name -> {path: value}
  conditions: Mapping[str, Mapping[str, Any]] = dataclasses.field(
      default_factory=lambda: {'default': {}}
  )
  base: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # overrides of every run
  seeds: tuple[int, ...] = (0, 1, 2, 3, 4)
  # 'system': one ordinary run per seed. 'toy': one process per method and condition for all seeds,
  # in the toy task, which has settings `toy.NAME` of its own.
  task: str = 'system'
  score: str = ''  # the metric that final, best and collapsed are measured on; '': the usual one
  baseline: str = 'ppo'  # the method that the others of a condition are compared with
  drawn: tuple[str, ...] | None = None  # the methods in the figures; None: the first six
  only_complete: bool = False  # the page leaves the grid out until all of its runs are done


@dataclasses.dataclass(frozen=True)
class Study:
  """The grids of a study, and where its results are kept."""

  grids: Mapping[str, Grid]
  results: str = ''  # folder of the small result files, to be committed; '': WORKDIR/results
  page: str = ''  # folder of the pages; '': WORKDIR
  # Folder of the texts of the pages, see page/build.py; '': study.md with tables and figures only.
  templates: str = ''
  # Draws further figures into a folder, from the methods of the pages.
  draw: Callable[[Mapping[str, Any], str], None] | None = None
  published: str = ''  # folder of published results that a repeat is compared with
  keep_checkpoints: bool = False  # True keeps the large checkpoints of finished runs


@dataclasses.dataclass(frozen=True)
class Job:
  """One planned process: a run of the system, or a method of the toy task with all its seeds."""

  grid: str
  condition: str
  method: str
  seeds: tuple[int, ...]
  task: str
  score: str
  overrides: Mapping[str, Any]
  digest: str  # hash of the settings and sources that its numbers depend on
  arguments: tuple[str, ...] = ()  # for run.py, besides --config and --workdir
  updates: int = 0
  max_nonfinite: int = 0

  @property
  def group(self) -> str:
    """The name without the seed: 'system/calm/ppo'."""
    return f'{self.grid}/{self.condition}/{self.method}'

  @property
  def name(self) -> str:
    """The name of its folder in WORKDIR/runs."""
    if self.task == 'toy':
      return self.group
    return f'{self.group}/seed_{self.seeds[0]}'


def load(path: str) -> tuple[Study, schema.Config]:
  """Returns the results of get_study and get_config of an experiment file.

  Args:
    path: FILE, or FILE:MODE to pass a mode to both functions.
  """
  file, _, mode = path.partition(':')
  spec = importlib.util.spec_from_file_location('study_config', file)
  if spec is None or spec.loader is None:
    raise UserError(f'--config={file}: give a Python file')
  module = importlib.util.module_from_spec(spec)
  sys.modules[spec.name] = module
  try:
    spec.loader.exec_module(module)
    if not hasattr(module, 'get_study'):
      raise UserError(f'--config={file} has no get_study(mode), see research/study_stability.py')
    arguments = [mode] if mode else []
    study = module.get_study(*arguments)
    config = module.get_config(*arguments)
  except UserError:
    raise
  except Exception as error:  # A user's file can raise anything.
    raise UserError(f'--config={path}: {type(error).__name__}: {error}') from error
  if not isinstance(study, Study):
    raise UserError(f'get_study() of {file} returned {study!r}: return a study.grid.Study')
  return study, config


def plan(study: Study, config: schema.Config, only: Sequence[str] = ()) -> list[Job]:
  """Returns the valid jobs of a study in the order in which they start.

  All methods and conditions run with the first seed before any runs with the second one.

  Args:
    study: the grids.
    config: the settings that all runs share, from the file's get_config.
    only: shell patterns; a job is planned if one matches its name or its group.
  """
  jobs = []
  for grid_name, grid in study.grids.items():
    _check_grid(grid_name, grid)
    for condition, method in _pairs(grid):
      overrides = {**grid.base, **grid.conditions[condition], **grid.methods[method]}
      make = _toy_jobs if grid.task == 'toy' else _system_jobs
      try:
        jobs += make(grid_name, grid, condition, method, overrides, config)
      except UserError as error:
        raise UserError(f'study: {grid_name}/{condition}/{method}: {error}') from None
  for pattern in only:
    if not any(_matches(job, pattern) for job in jobs):
      raise UserError(f'--only={pattern}: no run of the study has such a name')
  if only:
    jobs = [job for job in jobs if any(_matches(job, pattern) for pattern in only)]
  return sorted(jobs, key=lambda job: study.grids[job.grid].seeds.index(job.seeds[0]))


def _pairs(grid: Grid) -> Iterator[tuple[str, str]]:
  for condition in grid.conditions:
    for method in grid.methods:
      yield condition, method


def _matches(job: Job, pattern: str) -> bool:
  return fnmatch.fnmatchcase(job.name, pattern) or fnmatch.fnmatchcase(job.group, pattern)


def _check_grid(name: str, grid: Grid) -> None:
  """Checks the form of a grid. Its settings are checked with each method."""
  place = f'study.grids[{name!r}]'
  if not isinstance(grid, Grid):
    raise UserError(f'{place} must be a study.grid.Grid')
  if grid.task not in USUAL_SCORES:
    raise UserError(f'{place}.task={grid.task!r}: allowed are {", ".join(USUAL_SCORES)}')
  whole = all(type(seed) is int and 0 <= seed < 2**32 for seed in grid.seeds)
  if not grid.seeds or not whole or len(set(grid.seeds)) < len(grid.seeds):
    raise UserError(f'{place}.seeds={grid.seeds!r:.200}: give different whole numbers, from 0 on')
  consecutive = tuple(range(grid.seeds[0], grid.seeds[0] + len(grid.seeds)))
  if grid.task == 'toy' and grid.seeds != consecutive:
    raise UserError(f'{place}.seeds={grid.seeds!r:.200}: the toy task takes consecutive seeds')
  for field in ('methods', 'conditions'):
    sets = getattr(grid, field)
    if not sets or not all(isinstance(overrides, Mapping) for overrides in sets.values()):
      raise UserError(
          f'{place}.{field}={sets!r:.200}: give one or more name -> overrides, as in '
          "{'harsh': {'train.epochs': 4}}"
      )
  for part in (name, *grid.methods, *grid.conditions):
    if not _NAME.fullmatch(part):
      raise UserError(
          f'study: {part!r} becomes the name of a folder: use letters, digits, _ . + and -'
      )
  for method in (grid.baseline, *(grid.drawn or ())):
    if method not in grid.methods:
      near = difflib.get_close_matches(method, grid.methods, n=1) or list(grid.methods)
      raise UserError(f'{place}: {method!r} is no method of it; did you mean {near[0]}?')


def _system_jobs(grid_name, grid, condition, method, overrides, config) -> list[Job]:
  """Returns a job per seed; raises a UserError if the run's config is not valid."""
  run_config = changed(config, overrides)
  run_config.name = f'{grid_name}_{condition}_{method}'
  objective.make_variant(validation.validate(run_config))
  core_metrics = components.resolve(run_config).env.core_metrics
  usual_score = f'val-core/all/{core_metrics[0]}' if core_metrics else USUAL_SCORES['system']
  jobs = []
  for seed in grid.seeds:
    seeded = changed(run_config, {'seed': seed})
    jobs.append(
        Job(
            grid=grid_name,
            condition=condition,
            method=method,
            seeds=(seed,),
            task='system',
            score=grid.score or usual_score,
            overrides=overrides,
            digest=_digest(_numbers_depend_on(seeded), grid),
            arguments=tuple(_flags(seeded, config)),
            updates=run_config.train.updates,
            max_nonfinite=run_config.train.max_nonfinite,
        )
    )
  return jobs


def _toy_jobs(grid_name, grid, condition, method, overrides, config) -> list[Job]:
  """Returns one job for all seeds. The toy task does not read the file's config."""
  shared = {path: value for path, value in overrides.items() if not path.startswith('toy.')}
  run_config = changed(config, shared)
  toy_settings.make(overrides)
  depends_on = {
      **overrides,
      'seeds': [grid.seeds[0], len(grid.seeds)],
      **_sources(components.plugin_digests(run_config)),
  }
  return [
      Job(
          grid=grid_name,
          condition=condition,
          method=method,
          seeds=grid.seeds,
          task='toy',
          score=grid.score or USUAL_SCORES['toy'],
          overrides=overrides,
          digest=_digest(depends_on, grid),
          max_nonfinite=run_config.train.max_nonfinite,
      )
  ]


def changed(config: schema.Config, overrides: Mapping[str, Any]) -> schema.Config:
  """Returns a copy of `config` with settings replaced; a UserError names an unknown path."""
  config = copy.deepcopy(config)
  known = validation.kinds()
  for path, value in overrides.items():
    if path not in known:
      last = path.split('.')[-1]
      near = [name for name in known if name.endswith('.' + last)]
      near = near or difflib.get_close_matches(path, known, n=3)
      hint = f'did you mean {" or ".join(near[:3])}?' if near else 'see --help'
      raise UserError(f'there is no setting {path!r}; {hint}')
    *parents, name = path.split('.')
    section: Any = validation.get(config, '.'.join(parents)) if parents else config
    if path in validation.FREE_DICTS and isinstance(value, dict):
      value = getattr(section, name) | value  # as the command line does
    setattr(section, name, copy.deepcopy(value))
  return config


def _numbers_depend_on(config: schema.Config) -> dict[str, Any]:
  """Returns the settings that change a run's numbers and differ from the defaults, with sources."""
  default = {path: value for path, _, value in validation.fields(schema.Config())}
  free = {path for path, rules, _ in validation.fields(config) if rules.resume_safe}
  free -= {'train.updates', 'eval.every'}
  free.add('name')
  found = {
      path: value
      for path, _, value in validation.fields(config)
      if path not in free and value != default[path]
  }
  return found | _sources(components.sources(config))


def _sources(digests: Mapping[str, str]) -> dict[str, str]:
  """Returns digests of source files under names that no setting has."""
  return {f'source of {path}': digest for path, digest in digests.items()}


def _digest(depends_on: Mapping[str, Any], grid: Grid) -> str:
  """Returns a digest of settings by the names that they had when the first records were written."""
  old_names = {new: old for old, new in NEW_NAMES.items()}
  old_folders = {new: old for old, new in NEW_FOLDERS.items()}
  values = {}
  for path, value in depends_on.items():
    if isinstance(value, str):
      value = old_folders.get(value, value)
    values[old_names.get(path, path)] = value
  if grid.score not in ('', USUAL_SCORES[grid.task]):
    values['score'] = grid.score
  return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:12]


def _flags(config: schema.Config, file_config: schema.Config) -> Iterator[str]:
  """Yields --config.PATH=VALUE for each setting in which a run differs from its file's config."""
  before = {path: value for path, _, value in validation.fields(file_config)}
  for path, _, value in validation.fields(config):
    if value != before[path]:
      text = json.dumps(value) if isinstance(value, dict) else str(value)
      yield f'--config.{path}={text}'
