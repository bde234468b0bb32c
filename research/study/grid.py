"""The grid of a study: an experiment file in, the planned runs out, all of them checked.

An experiment file becomes a study by a second function beside `get_config`:

  def get_study(mode=''):
    return grid.Study(
        grids={
            'system': grid.Grid(
                regimes={'calm': {'train.epochs': 1}, 'harsh': {'train.epochs': 4}},
                cells={name: {'algorithm.variant': name} for name in ('ppo', 'st_ppo')},
                seeds=(0, 1, 2, 3, 4),
            ),
        },
    )

Regimes and cells are names of overrides, {path of a setting: value}, of what `get_config` returns.
A run is one regime with one cell and one seed; where both set a path, the cell wins. A study may
have several grids: other cells in other regimes, another model, or the other instrument.
"""

from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Mapping
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

from stppo_jax import components
from stppo_jax import config as schema
from stppo_jax import validation
from stppo_jax.rollout import prepare
from stppo_jax.training import learner
from stppo_jax.types import Section
from stppo_jax.types import UserError

USUAL_SCORES = {'system': 'val-core/all/em', 'mechanism': 'mechanism/success'}
INSTRUMENTS = tuple(USUAL_SCORES)
_NAME = re.compile(r'[A-Za-z0-9][A-Za-z0-9_.+-]*')
# Settings and folders were renamed after some records were written. The page finds those records by
# their new names. Digests use the old names, so that a rename alone repeats no run.
NEW_NAMES: dict[str, str] = {}  # old path -> new path
NEW_FOLDERS = {'docs/study/model_5m': 'research/model_5m'}
_LONGEST_SHOWN = 200  # characters of a refused value


@dataclasses.dataclass
class Grid(Section):
  """Regimes x cells x seeds of one instrument."""

  cells: dict[str, dict[str, Any]]  # name -> {path: value}
  regimes: dict[str, dict[str, Any]] = dataclasses.field(default_factory=lambda: {'default': {}})
  base: dict[str, Any] = dataclasses.field(default_factory=dict)  # overrides of every run
  seeds: tuple[int, ...] = (0, 1, 2, 3, 4)
  # 'system': a run of the ordinary command per seed. 'mechanism': one job per cell for all seeds,
  # in the small task of mechanism/, whose settings have paths `mechanism.NAME`.
  instrument: str = 'system'
  score: str = 'val-core/all/em'  # the metric that final, best and collapse are of
  baseline: str = 'ppo'  # the cell that the others of its regime are compared with


@dataclasses.dataclass
class Study(Section):
  """The grids of a study, and where its results are kept."""

  grids: dict[str, Grid]
  results: str = ''  # folder of the small result files, to be committed; '': WORKDIR/results
  page: str = ''  # folder of study.md and study.html; '': WORKDIR
  claims: str = ''  # a text with placeholders, see page.py; '': the page has numbers only
  published: str = ''  # folder of results that a repeat is shown beside
  keep_checkpoints: bool = False  # of finished runs; they are large


@dataclasses.dataclass(frozen=True)
class Job:
  """One planned process: a run of the system, or a cell of the mechanism with all its seeds."""

  grid: str
  regime: str
  cell: str
  seeds: tuple[int, ...]
  instrument: str
  score: str
  overrides: Mapping[str, Any]  # of the schema or, for the mechanism, as the cell has them
  digest: str  # of the settings that its numbers depend on
  arguments: tuple[str, ...] = ()  # of the ordinary command, besides --config and --workdir
  updates: int = 0
  max_nonfinite: int = 0

  @property
  def group(self) -> str:
    """The name of its cell within the study: 'system/calm/ppo'."""
    return f'{self.grid}/{self.regime}/{self.cell}'

  @property
  def name(self) -> str:
    """The name of its folder under WORKDIR/runs."""
    return self.group + (f'/seed_{self.seeds[0]}' if self.instrument == 'system' else '')


def load(path: str) -> tuple[Study, schema.Config]:
  """Returns what get_study and get_config of an experiment file give; `path` is FILE[:MODE]."""
  file, colon, mode = path.partition(':')
  spec = importlib.util.spec_from_file_location('study_config', file)
  assert spec is not None and spec.loader is not None, file  # it was read before, as --config
  module = importlib.util.module_from_spec(spec)
  sys.modules[spec.name] = module
  spec.loader.exec_module(module)
  if not hasattr(module, 'get_study'):
    raise UserError(
        f'--config={file} has no get_study(mode): write one, as research/study_stability.py'
    )
  try:
    study = module.get_study(*[mode] * bool(colon))
  except UserError:
    raise
  except Exception as error:  # whatever a user's file may raise
    raise UserError(f'get_study() of {file}: {type(error).__name__}: {error}') from error
  if not isinstance(study, Study):
    raise UserError(f'get_study() of {file} returned {study!r}: return a study.grid.Study')
  return study, module.get_config(*[mode] * bool(colon))


def plan(
    study: Study,
    config: schema.Config,
    only: tuple[str, ...] = (),
    check_mechanism: Callable[[Mapping[str, Any]], Any] = lambda overrides: None,
) -> list[Job]:
  """Returns the jobs of a study in the order in which they start, each cell validated.

  The first seed of every cell comes before the second of any, so that a study that is broken off
  has seeds of all cells.

  Args:
    study: the grids.
    config: what the runs have in common, from the file's get_config. A run receives its
      differences from it as flags.
    only: patterns as of a shell; a job is planned if one matches its name or its cell's name.
    check_mechanism: raises a UserError for the overrides of a cell of the mechanism.
  """
  _check_study(study)
  jobs = []
  for grid_name, grid in study.grids.items():
    make = _system_jobs if grid.instrument == 'system' else _mechanism_jobs
    for regime, cell, overrides in _cells(grid):
      place = f'study: {grid_name}/{regime}/{cell}'
      try:
        if grid.instrument == 'mechanism':
          check_mechanism(overrides)
        jobs += make(grid_name, grid, regime, cell, overrides, config)
      except UserError as error:
        raise UserError(f'{place}: {error}') from None
  for pattern in only:
    if not any(_chosen(job, (pattern,)) for job in jobs):
      raise UserError(f'--only={pattern}: no run of the study has such a name')
  jobs = [job for job in jobs if _chosen(job, only)]
  return sorted(jobs, key=lambda job: _rank(study, job))  # a stable sort


def _cells(grid: Grid) -> Iterator[tuple[str, str, dict[str, Any]]]:
  for regime, of_regime in grid.regimes.items():
    for cell, of_cell in grid.cells.items():
      yield regime, cell, grid.base | of_regime | of_cell


def _chosen(job: Job, only: tuple[str, ...]) -> bool:
  return not only or any(
      fnmatch.fnmatchcase(name, pattern) for pattern in only for name in (job.name, job.group)
  )


def _rank(study: Study, job: Job) -> int:
  return study.grids[job.grid].seeds.index(job.seeds[0])


def _check_study(study: Study) -> None:
  """Checks the form of the grids; their settings are checked with each cell."""
  if not isinstance(study.grids, dict) or not study.grids:
    raise UserError(f'study.grids={study.grids!r}: give a dict of one Grid or more')
  for name, grid in study.grids.items():
    if not isinstance(grid, Grid):
      raise UserError(f'study.grids[{name!r}]={_shown(grid)}: must be a study.grid.Grid')
    if grid.instrument not in INSTRUMENTS:
      raise UserError(
          f'study.grids[{name!r}].instrument={grid.instrument!r}: allowed are '
          f'{", ".join(INSTRUMENTS)}'
      )
    seeds = tuple(grid.seeds)
    whole = all(type(seed) is int and 0 <= seed < 2**32 for seed in seeds)
    if not seeds or not whole or len(set(seeds)) < len(seeds):
      raise UserError(
          f'study.grids[{name!r}].seeds={_shown(seeds)}: give whole numbers from 0 on, no two equal'
      )
    if grid.instrument == 'mechanism' and seeds != tuple(range(seeds[0], seeds[0] + len(seeds))):
      raise UserError(f'study.grids[{name!r}].seeds={_shown(seeds)}: the mechanism takes a range')
    for what in ('cells', 'regimes'):
      _check_overrides(f'study.grids[{name!r}].{what}', getattr(grid, what))
    for part in (name, *grid.cells, *grid.regimes):
      if not isinstance(part, str) or not _NAME.fullmatch(part):
        raise UserError(
            f'study: {part!r} becomes the name of a folder: use letters, digits, _ . + and -'
        )
    if grid.baseline not in grid.cells:
      near = difflib.get_close_matches(grid.baseline, grid.cells, n=1)
      hint = f'did you mean {near[0]}?' if near else f'there are {", ".join(grid.cells)}'
      raise UserError(f'study.grids[{name!r}].baseline={grid.baseline!r} is no cell of it; {hint}')


def _check_overrides(place: str, named: Any) -> None:
  if not isinstance(named, dict) or not named:
    raise UserError(f'{place}={_shown(named)}: give a dict of name -> overrides, one or more')
  for name, overrides in named.items():
    if not isinstance(overrides, dict):
      raise UserError(
          f'{place}[{name!r}]={_shown(overrides)}: give a dict of path -> value, as in '
          "{'train.epochs': 4}"
      )


def _shown(value: Any) -> str:
  text = repr(value)
  return text if len(text) <= _LONGEST_SHOWN else text[:_LONGEST_SHOWN] + '..'


def _system_jobs(grid_name, grid, regime, cell, overrides, config) -> list[Job]:
  """Returns a job per seed; raises a UserError where the run's config is not valid."""
  unchanged = config
  config = changed(config, overrides)
  config.name = f'{grid_name}_{regime}_{cell}'
  learner.make_variant(validation.validate(config))
  components.resolve(config)
  jobs = []
  for seed in grid.seeds:
    seeded = changed(config, {'seed': seed})
    jobs.append(
        Job(
            grid=grid_name,
            regime=regime,
            cell=cell,
            seeds=(seed,),
            instrument='system',
            score=grid.score,
            overrides=overrides,
            digest=_digest(_numbers_depend_on(seeded) | _score_of(grid)),
            arguments=tuple(overridden(seeded, unchanged)),
            updates=config.train.updates,
            max_nonfinite=config.train.max_nonfinite,
        )
    )
  return jobs


def _mechanism_jobs(grid_name, grid, regime, cell, overrides, config) -> list[Job]:
  """Returns one job for all seeds. Its paths are those of the schema, or begin with `mechanism.`"""
  made = changed(config, {k: v for k, v in overrides.items() if not k.startswith('mechanism.')})
  depends = overrides | {'seeds': [grid.seeds[0], len(grid.seeds)]} | _score_of(grid)
  return [
      Job(
          grid=grid_name,
          regime=regime,
          cell=cell,
          seeds=tuple(grid.seeds),
          instrument='mechanism',
          score=grid.score,
          overrides=overrides,
          digest=_digest(depends | _named(components.plugin_digests(made))),
          max_nonfinite=made.train.max_nonfinite,
      )
  ]


def changed(config: schema.Config, overrides: Mapping[str, Any]) -> schema.Config:
  """Returns a copy of `config` with settings replaced; a UserError names a path that is none."""
  config, known = copy.deepcopy(config), validation.kinds()
  for path, value in overrides.items():
    if path not in known:
      last = str(path).split('.')[-1]
      near = [name for name in known if name.endswith('.' + last)]
      near = near or difflib.get_close_matches(str(path), known, n=3)
      hint = f'did you mean {" or ".join(near[:3])}?' if near else 'see --help'
      raise UserError(f'there is no setting {path!r}; {hint}')
    *parents, name = path.split('.')
    section: Any = validation.get(config, '.'.join(parents)) if parents else config
    if path in validation.FREE_DICTS and isinstance(value, dict):
      value = getattr(section, name) | value  # as the command line does
    setattr(section, name, copy.deepcopy(value))
  return config


def _score_of(grid: Grid) -> dict[str, str]:
  """Returns the score of the grid where it is not the usual one of its instrument."""
  return {} if grid.score == USUAL_SCORES[grid.instrument] else {'score': grid.score}


def _named(sources: Mapping[str, str]) -> dict[str, str]:
  """Returns digests of sources under names that settings do not have."""
  return {f'source of {path}': digest for path, digest in sources.items()}


def _numbers_depend_on(config: schema.Config) -> dict[str, Any]:
  """Returns what changes a run's numbers: settings that are not the default, and their sources."""
  default = {path: value for path, _, value in validation.fields(schema.Config())}
  free = {path for path, rules, _ in validation.fields(config) if rules.resume_safe}
  free = free - {'train.updates', 'eval.every'} | {'name'}
  return {
      path: value
      for path, _, value in validation.fields(config)
      if path not in free and value != default[path]
  } | _named(prepare.sources(config))


def _digest(values: Mapping[str, Any]) -> str:
  names = {new: old for old, new in NEW_NAMES.items()}
  folders = {new: old for old, new in NEW_FOLDERS.items()}
  values = {
      names.get(path, path): folders.get(value, value) if isinstance(value, str) else value
      for path, value in values.items()
  }
  return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:12]


def overridden(config: schema.Config, unchanged: schema.Config) -> Iterator[str]:
  """Yields --config.PATH=VALUE for each setting in which a run differs from its file's config."""
  before = {path: value for path, _, value in validation.fields(unchanged)}
  for path, _, value in validation.fields(config):
    if value != before[path]:
      text = json.dumps(value) if isinstance(value, dict) else str(value)
      yield f'--config.{path}={text}'
