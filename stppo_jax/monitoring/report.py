"""The report of a run: metrics.jsonl, config.json and episodes/*.jsonl in, report.html out.

`page_data` collects everything that the page shows as JSON values. The files of page/ draw it.
`build` puts both into one file, which opens from disk, without a network, also during the run.
viewer.py serves the same page without data, and the page then asks the server for them.
Episode text comes from a model and a corpus and is not trusted. The data are JSON without `<`, the
page sets them with textContent, and its content security policy allows no other script.
"""

import base64
import collections
from collections.abc import Mapping
from collections.abc import Sequence
import hashlib
import json
import math
import os
import pathlib
import re
from typing import Any
from typing import TypedDict

from absl import logging

from stppo_jax.monitoring import charts
from stppo_jax.monitoring import episodes as episodes_lib
from stppo_jax.monitoring import metrics
from stppo_jax.monitoring import outcomes
from stppo_jax.monitoring import provenance
from stppo_jax.monitoring import workdir as workdir_lib

Rows = list[dict[str, Any]]  # lines of metrics.jsonl
EPISODES_PER_FILE = 24  # at most, of each of: first and last training update, last evaluation
BYTES_PER_FILE = 2_000_000  # limit on the JSON of these episodes, but for the first one
MAX_ALARMS = 4  # updates with a warning whose episodes are shown
_PAGE = pathlib.Path(__file__).parent / 'page'
# Held-out scores: of a data set or a role, by name, and some by hops.
_SCORE = re.compile(r'val-(core|role)/(?P<part>.+)/(?P<name>[^/]+?)(?:_hops(?P<hops>\d+))?')
_LABELS = {'all': 'all questions', 'macro': 'mean of the data sets'}
_HIGHLIGHTS = (  # settings, in the order in which the page shows them
    'algorithm.variant algorithm.advantage algorithm.ratio algorithm.divisor algorithm.norm_of '
    'algorithm.clip_low algorithm.clip_high algorithm.gamma algorithm.lam algorithm.kl_in '
    'algorithm.kl_coef algorithm.entropy_coef model.folder model.critic actor.lr critic.lr '
    'train.updates train.episodes train.mini_batch train.epochs rollout.group_size '
    'rollout.temperature rollout.top_p data.source env.kind env.prompt env.max_searches env.reward '
    'retriever.kind retriever.top_k seed'
).split()
# Settings in which the seeds of a sweep differ.
_OWN_SETTINGS = (
    'seed name train.checkpoint_folder rollout.engine_folder rollout.engine eval.folder'
).split()


class EpisodeGroup(TypedDict):
  """Chosen episodes of one file, and numbers of all."""

  label: str
  step: int
  kind: str  # 'train' or 'eval'
  shown: int  # episodes, of which each has one line or more
  total: int
  counts: collections.Counter[tuple[str, int]]  # by (data set or role, hops)
  episodes: list[dict[str, Any]]  # lines of the file


def build(workdir: str) -> str:
  """Writes `workdir`/report.html and returns its path."""
  path = os.path.join(workdir, 'report.html')
  page = _page({'live': False, 'runs': [page_data(workdir)]})
  workdir_lib.write_whole(path, page)
  return path


def live_page() -> str:
  """Returns the page of the viewer, which asks the server for its data."""
  return _page({'live': True, 'runs': []})


def _page(data: dict[str, object]) -> str:
  scripts = {
      'uplot': f'/*\nuPlot\n\n{_read("uPlot.LICENSE")}*/\n{_read("uPlot.iife.min.js")}',
      'script': ''.join(map(_read, ('page.js', 'curves.js', 'episodes.js', 'start.js'))),
  }
  parts = {
      **scripts,
      'style': _read('uPlot.min.css') + _read('page.css'),
      'hashes': ' '.join(map(_content_hash, scripts.values())),
      'page_json': to_json(data),
  }
  template = _read('page.html')
  return re.sub(r'\{\{(\w+)\}\}', lambda match: parts[match[1]], template)


def _read(name: str) -> str:
  return (_PAGE / name).read_text(encoding='utf-8')


def page_data(workdir: str) -> dict[str, object]:
  """Returns what the page shows, as JSON values. Whatever does not exist yet is left out."""
  rows = _merge_only_dataset(metrics.read_metrics(workdir))
  config = workdir_lib.read_config(workdir)
  groups = _episode_groups(workdir, rows)
  settings = workdir_lib.flatten(config)
  for name, value in config.get('objective', {}).items():
    settings[f'algorithm.{name}'] = value
  mix = config.get('env', {}).get('mix', ())
  highlights = []
  for name in _HIGHLIGHTS:
    value = settings.get(name)
    if mix and name.startswith('env.'):
      own = [item.get(name.removeprefix('env.'), value) for item in mix]
      value = ', '.join(map(str, dict.fromkeys(own)))
    if value not in (None, '') and not isinstance(value, list):
      highlights.append([name, str(value)])
  folder_name = os.path.basename(os.path.abspath(workdir))
  title = str(config.get('name') or folder_name)
  return {
      'name': title,
      'title': title,
      'updates': max((row['step'] for row in rows), default=None),
      'seconds': sum(row.get('timing_s/step') or 0.0 for row in rows),
      'warnings': warnings(rows),
      'results': _results(main_score_name(config, rows), rows, groups),
      'outcomes': outcomes.count_run(rows),
      'provenance': provenance.newest(workdir),
      'highlights': highlights,
      'settings': {name: json.dumps(value) for name, value in settings.items()},
      'seed_group': seed_group(settings),
      'config': json.dumps(config, indent=2, ensure_ascii=False) if config else '',
      'charts': charts.charts(rows),
      'files': episode_files(workdir, rows),
      'groups': [_pick(group, 'label', 'shown', 'total') for group in groups],
      'episodes': [episode for group in groups for episode in group['episodes']],
  }


def seed_group(settings: Mapping[str, object]) -> str:
  """Returns a digest that the seeds of a sweep have in common; '': the settings have no seed.

  Such runs differ only in the seed, the name, and the folders and engines that each has for itself.
  Digests of data are no settings.
  """
  if 'seed' not in settings:
    return ''
  own = (*_OWN_SETTINGS, *workdir_lib.RECORDED)
  common = {name: value for name, value in settings.items() if name not in own}
  return hashlib.sha256(json.dumps(common, sort_keys=True).encode()).hexdigest()[:16]


def _pick(record, *names):
  return {name: record[name] for name in names}


def _content_hash(script: str) -> str:
  digest = hashlib.sha256(script.encode('utf-8')).digest()
  return f"'sha256-{base64.b64encode(digest).decode('ascii')}'"


def to_json(value: object) -> str:
  """Returns JSON that no HTML parser can mistake for markup.

  Numbers are rounded to six significant digits, so that a rounding to three decimals in the page
  gives the number of the console. Non-finite numbers become null.
  """
  tidy = json.loads(json.dumps(value), parse_float=_rounded, parse_constant=lambda _: None)
  text = json.dumps(tidy, ensure_ascii=False, separators=(',', ':'))
  for character in '<>&\u2028\u2029':
    text = text.replace(character, f'\\u{ord(character):04x}')
  return text.encode('utf-8', 'replace').decode('utf-8')  # lone surrogates become '?'


def _rounded(digits):
  return float(f'{float(digits):.6g}')


def _merge_only_dataset(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
  """Renames 'all' to the only held-out data set, if there is one, so that scores appear once.

  A data set without a name is left out, and its scores are those of 'all'.
  """
  datasets = {match['part'] for match in _scores(rows) if match[1] == 'core'} - {'all'}
  if len(datasets) != 1:
    return rows
  dataset = datasets.pop()
  if dataset == 'unnamed':
    unnamed = re.compile('val-(core|aux)/unnamed/')
    return [{name: row[name] for name in row if not unnamed.match(name)} for row in rows]
  prefix = f'val-core/{dataset}/'
  return [{name.replace('val-core/all/', prefix): row[name] for name in row} for row in rows]


def _scores(rows):
  """Returns the matches of the names of held-out scores."""
  names = {name for row in rows for name in row}
  return [match for name in names if (match := _SCORE.fullmatch(name))]


# Warnings.


def _broken_rules(rows: list[dict[str, Any]]) -> dict[str, list[int]]:
  """Returns {rule of health.py: updates at which it was broken}."""
  broken: dict[str, list[int]] = {}
  for row in rows:
    for name, value in row.items():
      if name.startswith('health/') and value:
        broken.setdefault(name.removeprefix('health/'), []).append(row['step'])
  return dict(sorted(broken.items()))


def _first_alarms(rows: list[dict[str, object]]) -> list[int]:
  """Returns the updates at which a rule was first broken, at most MAX_ALARMS."""
  first = {steps[0] for steps in _broken_rules(rows).values()}
  return sorted(first)[:MAX_ALARMS]


def warnings(rows: Rows) -> list[str]:
  """Returns a line per kind of warning."""
  lines = []
  bad = [(row['step'], name) for row in rows for name in row.get('nonfinite', ())]
  if bad:
    step, name = bad[0]
    more = f', and {len(bad) - 1} more' if len(bad) > 1 else ''
    lines.append(f'Non-finite: {name} at update {step}{more}.')
  for name, steps in _broken_rules(rows).items():
    more = f', and at {len(steps) - 1} more' if len(steps) > 1 else ''
    lines.append(f'Health: {name} beyond its limit at update {steps[0]}{more}.')
  return lines


# Held-out scores.


def _results(
    main: str, rows: list[dict[str, Any]], groups: list[EpisodeGroup]
) -> dict[str, object]:
  """Returns the table of the main held-out score: {score, rows: [{label, is_hops, points, n}]}.

  A row is a data set, a number of hops in it, or an agent. `points` are (update, score).
  """
  points: dict[tuple, list[tuple[int, float]]] = {}  # by (is role, data set or role, hops or 0)
  for row in rows:
    for name, score in row.items():
      match = _SCORE.fullmatch(name)
      if match and match['name'] == main and score is not None:
        is_role = match[1] == 'role'
        part = f'role {match["part"]}' if is_role else match['part']
        key = (is_role, part, int(match['hops'] or 0))
        points.setdefault(key, []).append((row['step'], score))

  last = next((group for group in groups if group['kind'] == 'eval'), None)
  table = []
  order = sorted(points, key=lambda key: (key[1] not in _LABELS, *key))
  for is_role, part, hops in order:
    series = points[is_role, part, hops]
    label = f'{hops} hop{"s" * (hops > 1)}' if hops else _LABELS.get(part, part)
    n = None
    if last is not None and last['step'] == series[-1][0]:
      n = last['counts'].get((part, hops))
    table.append({'label': label, 'is_hops': bool(hops), 'points': series, 'n': n})
  return {'score': main, 'rows': table}


def main_score_name(config: Mapping[str, object], rows: list[dict[str, Any]]) -> str:
  """Returns the name of the main score of a run, such as em.

  `config` is its config.json. A run of an earlier version did not write the name there. For such a
  run it is a score that is also given by hops. Without one it is exact match, then any core metric,
  then the reward. Each data set has it, so the environments of a mix have it in common.
  """
  if name := config.get('main_score'):
    return str(name)
  matches = [match for match in _scores(rows) if match[1] == 'core']
  names_by_part: dict[str, set[str]] = collections.defaultdict(set)
  for match in matches:
    if match['part'] != 'macro' and not match['hops']:
      names_by_part[match['part']].add(match['name'])
  names = set.intersection(*names_by_part.values()) if names_by_part else set()
  by_hops = sorted(match['name'] for match in matches if match['hops'] and match['name'] in names)
  if by_hops:
    return by_hops[0]
  return min(names, key=lambda name: (name == 'score', name != 'em', name), default='score')


# Episodes.


def episode_files(workdir: str, rows: Sequence[dict[str, Any]] = ()) -> list[tuple[str, int]]:
  """Returns (kind, update) of the files of episodes, by update.

  With `rows`, the lines of metrics.jsonl, files of later updates are left out. The run has gone
  back to an earlier checkpoint, and these updates belong to the abandoned part.
  """
  last = max((row['step'] for row in rows), default=math.inf)
  folder = os.path.join(workdir, 'episodes')
  names = os.listdir(folder) if os.path.isdir(folder) else []
  files = []
  for name in names:
    if match := re.fullmatch(r'(train|eval)_(\d+)\.jsonl', name):
      files.append((match[1], int(match[2])))
  files = [file for file in files if file[1] <= last]
  return sorted(files, key=lambda file: (file[1], file[0]))


def _episode_groups(workdir: str, rows: Rows) -> list[EpisodeGroup]:
  """Returns chosen episodes of the last and first training update, of the last evaluation, and of
  the updates of the warnings that the page shows.
  """
  alarms = _first_alarms(rows)
  files = episode_files(workdir, rows)
  train = [step for kind, step in files if kind == 'train']
  evaluations = [step for kind, step in files if kind == 'eval']
  chosen = []
  if train:
    chosen.append(('train', train[-1], 'last training update'))
  if evaluations:
    chosen.append(('eval', evaluations[-1], 'last evaluation'))
  if len(train) > 1:
    chosen.append(('train', train[0], 'first training update'))
  for step in train[1:-1]:
    if step in alarms:
      chosen.append(('train', step, 'update of a health warning'))
  return [episode_group(workdir, kind, step, label) for kind, step, label in chosen]


def episode_group(
    workdir: str,
    kind: str,
    step: int,
    label: str = '',
    limit: int = EPISODES_PER_FILE,
    max_bytes: int = BYTES_PER_FILE,
) -> EpisodeGroup:
  """Returns chosen episodes of one file, and numbers of all.

  The file is read twice: for an index of where each episode starts, and for the chosen ones.
  """
  path = episodes_lib.record_path(workdir, kind, step)
  right: list[list[int]] = []  # episodes, as lists of where their lines start
  wrong: list[list[int]] = []
  counts: collections.Counter[tuple[str, int]] = collections.Counter()
  starts: dict[Any, list[int]] = {}  # where the lines of an episode start
  num_unreadable = 0
  with open(path, 'rb') as file:
    end = 0
    for raw in file:
      start = end
      end += len(raw)
      try:
        episode = json.loads(raw)
        if not episode['tokens']:  # an agent that never moved
          continue
        lengths = {len(episode[name]) for name in ('tokens', 'pieces', 'turn_ids')}
        if len(lengths) > 1:
          raise ValueError('tokens, pieces and turn_ids differ in length')
        number = episode.get('of_episode', f'line {start}')
        # Sampled episodes and demonstrations are both numbered from 0.
        key = (episode.get('task'), number, episode.get('demonstrated', False))
        if key not in starts:
          starts[key] = []
          group = right if episode.get('right') else wrong
          group.append(starts[key])
        starts[key].append(start)
        for part in ('all', episode.get('dataset'), f'role {episode.get("role")}'):
          for hops in {0, episode.get('hops') or 0}:
            counts[part, hops] += 1
      except (ValueError, KeyError, TypeError):
        num_unreadable += 1  # incomplete: the run is still writing, or was killed here
    if num_unreadable:
      logging.warning('%s: %d unreadable lines left out of the report', path, num_unreadable)
    episodes = []
    size = 0
    num_shown = 0
    for lines in _choose(right, wrong, limit):
      before = len(episodes)
      for start in lines:
        file.seek(start)
        episode = json.loads(file.readline())
        episode_size = len(to_json(episode))
        if not episodes or size + episode_size <= max_bytes:
          size += episode_size
          episodes.append(episode)
      num_shown += len(episodes) > before  # an episode may have several lines
  return {
      'label': f'{label} ({step})',
      'step': step,
      'kind': kind,
      'shown': num_shown,
      'total': len(right) + len(wrong),
      'counts': counts,
      'episodes': episodes,
  }


def _choose(right: list, wrong: list, limit: int) -> list:
  """Chooses at most `limit`, half right and half wrong if both exist, evenly, in file order."""
  num_right = min(len(right), max(limit // 2, limit - len(wrong)))
  num_wrong = min(len(wrong), limit - num_right)
  chosen = []
  for lines, number in ((right, num_right), (wrong, num_wrong)):
    chosen += [lines[i * len(lines) // number] for i in range(number)]
  return sorted(chosen)
