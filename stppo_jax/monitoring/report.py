"""The report of a run: metrics.jsonl, config.json and episodes/*.jsonl in, report.html out.

The page is self-contained: it opens from disk, without a network, also while the run goes on.
Episode text comes from a model and a corpus and is not trusted: the data are JSON without `<`, the
page sets them with textContent, and its content security policy allows no script but its own.
"""

import base64
from collections.abc import Sequence
import hashlib
import html
import itertools
import json
import math
import os
import pathlib
import re
from typing import Any
from typing import TypeVar

from absl import logging

from stppo_jax import types
from stppo_jax.monitoring import metrics
from stppo_jax.monitoring import report_charts

T = TypeVar('T', int, list[int])
EPISODES_PER_FILE = 24  # at most, of each of: first and last training update, last evaluation
MAX_ALARMS = 4  # updates with a warning whose episodes are shown
BYTES_PER_FILE = 2_000_000  # of those episodes as JSON
_TEMPLATE = pathlib.Path(__file__).with_name('report_template.html')
_CORE_NAME = re.compile(r'val-core/(.+)/([^/]+?)(?:_hops(\d+))?')
_OF_ALL = {'all': 'all questions', 'macro': 'mean of the data sets'}
_ROLE_NAME = re.compile(r'val-role/(\w+)/(\w+)')
_HIGHLIGHTS = (  # of the config, in the order in which the page shows them
    'algorithm.variant algorithm.advantage algorithm.ratio algorithm.divisor algorithm.norm_of '
    'algorithm.clip_low algorithm.clip_high algorithm.gamma algorithm.lam algorithm.kl_in '
    'algorithm.kl_coef algorithm.entropy_coef model.folder model.critic actor.lr critic.lr '
    'train.updates train.episodes train.mini_batch train.epochs rollout.group_size '
    'rollout.temperature rollout.top_p data.source env.kind env.prompt env.max_searches env.reward '
    'retriever.kind retriever.top_k seed'
).split()


def build(workdir: str) -> str:
  """Writes `workdir`/report.html and returns its path. Whatever does not exist yet is left out."""
  rows = metrics.read_metrics(workdir)  # a UserError where there is no such folder
  rows = _merge_only_data_set(rows)
  config = _read_config(os.path.join(workdir, 'config.json'))
  name = str(config.get('name') or os.path.basename(os.path.abspath(workdir)))
  groups = _episode_groups(os.path.join(workdir, 'episodes'), _first_alarms(rows))
  page_json = _script_json(
      {
          'charts': report_charts.charts(rows),
          'groups': [{key: group[key] for key in ('label', 'shown', 'total')} for group in groups],
          'episodes': [episode for group in groups for episode in group['episodes']],
      }
  )
  template = _TEMPLATE.read_text(encoding='utf-8')
  (script,) = re.findall(r'<script>(.*?)</script>', template, re.DOTALL)
  digest = base64.b64encode(hashlib.sha256(script.encode('utf-8')).digest()).decode('ascii')
  parts = {
      'script_hash': digest,
      'title': html.escape(name),
      'status': _status_html(rows),
      'results': _results_html(rows, groups),
      'highlights': _highlights_html(config),
      'config': html.escape(json.dumps(config, indent=2, ensure_ascii=False)) if config else '',
      'page_json': page_json,
  }
  page = re.sub(r'\{\{(\w+)\}\}', lambda match: parts[match.group(1)], template)
  path = os.path.join(workdir, 'report.html')
  with open(path + '.tmp', 'w', encoding='utf-8') as file:
    file.write(page)
  os.replace(path + '.tmp', path)
  return path


def _merge_only_data_set(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
  """Where one data set is held out, renames 'all' to it, so that equal scores are shown once."""
  names = {name for row in rows for name in row}
  found = {match.group(1) for match in map(_CORE_NAME.fullmatch, names) if match}
  if len(found - {'all'}) != 1:
    return rows
  only = f'val-core/{(found - {"all"}).pop()}/'
  return [{name.replace('val-core/all/', only): row[name] for name in row} for row in rows]


def _read_config(path: str) -> dict[str, Any]:
  if not os.path.exists(path):
    return {}
  try:
    with open(path, encoding='utf-8') as file:
      config = json.load(file)
  except ValueError as error:
    raise types.UserError(f'{path} is not JSON ({error}); restore it or delete it.') from error
  return config if isinstance(config, dict) else {'config': config}


def _script_json(value: Any) -> str:
  """Returns JSON that no HTML parser can mistake for markup; non-finite numbers become null."""
  text = json.dumps(_tidy(value), ensure_ascii=False, allow_nan=False, separators=(',', ':'))
  for character in '<>&\u2028\u2029':
    text = text.replace(character, f'\\u{ord(character):04x}')
  return text.encode('utf-8', 'replace').decode('utf-8')  # lone surrogates become '?'


def _tidy(value: Any) -> Any:
  """Rounds to four significant digits; replaces non-finite numbers, unknown to JSON, by null."""
  if isinstance(value, float):
    return float(f'{value:.4g}') if math.isfinite(value) else None
  if isinstance(value, dict):
    return {key: _tidy(item) for key, item in value.items()}
  if isinstance(value, (list, tuple)):
    return [_tidy(item) for item in value]
  return value


# Episodes.


def _first_alarms(rows: list[dict[str, Any]]) -> list[int]:
  """Returns the updates at which a rule of health.py was first broken, at most MAX_ALARMS."""
  first = {}
  for row in rows:
    for name, value in row.items():
      if name.startswith('health/') and value:
        first.setdefault(name, row['step'])
  return sorted(set(first.values()))[:MAX_ALARMS]


def _episode_groups(folder: str, alarms: Sequence[int] = ()) -> list[dict[str, Any]]:
  """Returns chosen episodes of the last and first training update, of the last evaluation, and of
  the updates of the warnings that the page shows.
  """
  train = _numbered(folder, 'train')
  evaluations = _numbered(folder, 'eval')
  chosen = []
  if train:
    chosen.append((train[-1], 'last training update'))
  if evaluations:
    chosen.append((evaluations[-1], 'last evaluation'))
  if len(train) > 1:
    chosen.append((train[0], 'first training update'))
  taken = {number for (number, _), label in chosen if 'training' in label}
  chosen += [
      (found, 'update of a health warning')
      for found in train
      if found[0] in alarms and found[0] not in taken
  ]
  return [_episode_group(path, step, label) for (step, path), label in chosen]


def _numbered(folder: str, kind: str) -> list[tuple[int, str]]:
  names = sorted(os.listdir(folder)) if os.path.isdir(folder) else []
  found = [(name, re.fullmatch(kind + r'_(\d+)\.jsonl', name)) for name in names]
  return sorted((int(match.group(1)), os.path.join(folder, name)) for name, match in found if match)


def _episode_group(path: str, step: int, label: str) -> dict[str, Any]:
  """Reads one file twice: an index of where each episode starts, then only the chosen ones."""
  right: list[list[int]] = []  # where the lines of an episode start: one per role
  wrong: list[list[int]] = []
  counts: dict[Any, int] = {}
  unreadable = 0
  of_roles: dict[Any, list[int]] = {}
  with open(path, 'rb') as file:
    offset = 0
    for raw in file:
      try:
        episode = json.loads(raw)
        if episode.get('role') and not episode['tokens']:  # it never moved
          continue
        if {len(episode['pieces']), len(episode['turn_ids'])} != {len(episode['tokens'])}:
          raise ValueError('tokens, pieces and turn_ids differ in length')
        number = episode.get('task'), episode.get('of_episode')
        whole = of_roles.setdefault(number, []) if episode.get('role') else []
        if not whole:
          (right if episode.get('right') else wrong).append(whole)
        whole.append(offset)
        for dataset in ('all', episode.get('dataset'), _role_label(episode.get('role'))):
          for key in ((dataset, None), (dataset, episode.get('hops'))):
            counts[key] = counts.get(key, 0) + 1
      except (ValueError, KeyError, TypeError):
        unreadable += 1  # incomplete: the run is still writing, or was killed here
      finally:
        offset += len(raw)
    if unreadable:
      logging.warning('%s: %d unreadable lines left out of the report', path, unreadable)
    episodes, size = [], 0
    for offset in itertools.chain(*_choose(right, wrong, EPISODES_PER_FILE)):
      file.seek(offset)
      episode = json.loads(file.readline())
      episode_size = len(_script_json(episode))
      if size + episode_size <= BYTES_PER_FILE:
        size += episode_size
        episodes.append(episode)
  return {
      'label': f'{label} ({step})',
      'step': step,
      'kind': os.path.basename(path).split('_')[0],
      'shown': len(episodes),
      'total': sum(map(len, right + wrong)),
      'counts': counts,
      'episodes': episodes,
  }


def _choose(right: list[T], wrong: list[T], limit: int) -> list[T]:
  """Chooses at most `limit`, half right and half wrong where both exist, evenly, in file order."""
  num_right = min(len(right), max(limit // 2, limit - len(wrong)))
  num_wrong = min(len(wrong), limit - num_right)
  return sorted(
      offsets[index * len(offsets) // number]
      for offsets, number in ((right, num_right), (wrong, num_wrong))
      for index in range(number)
  )


# The header. Everything is escaped here; the template inserts it as it stands.


def _status_html(rows: list[dict[str, Any]]) -> str:
  if not rows:
    return '<p class="muted">No metrics yet.</p>'
  step_times = [row['timing_s/step'] for row in rows if row.get('timing_s/step')]
  last = max(row['step'] for row in rows)
  status = f'{last} update' + 's' * (last != 1)
  if step_times:
    minutes, seconds = divmod(round(sum(step_times)), 60)
    hours, minutes = divmod(minutes, 60)
    status += f' in {hours} h {minutes} min' if hours else f' in {minutes} min {seconds} s'
  bad = [(row['step'], name) for row in rows for name in row.get('nonfinite', ())]
  text = f'<p class="muted">{status}</p>'
  if bad:
    step, name = bad[0]
    more = f', and {len(bad) - 1} more' if len(bad) > 1 else ''
    text += f'<p class="warning">Non-finite: {html.escape(str(name))} at update {step}{more}.</p>'
  return text + _health_html(rows)


def _health_html(rows: list[dict[str, Any]]) -> str:
  """Returns the broken rules of monitoring/health.py as HTML: how often and since when."""
  broken = {}
  for row in rows:
    for name, value in row.items():
      if name.startswith('health/') and value:
        broken.setdefault(name.removeprefix('health/'), []).append(row['step'])
  return ''.join(
      f'<p class="warning">Health: {html.escape(name)} beyond its limit at update {steps[0]}'
      + (f', and at {len(steps) - 1} more' if len(steps) > 1 else '')
      + '.</p>'
      for name, steps in sorted(broken.items())
  )


def _results_html(rows: list[dict[str, Any]], groups: list[dict[str, Any]]) -> str:
  """Returns the table of the main held-out score, before and after, over all and by hops."""
  points = {}  # (dataset, hops or None) -> [(step, score)]
  main = _main_score(rows)
  for row in rows:
    for name, score in row.items():
      match = _CORE_NAME.fullmatch(name)
      if match and match.group(2) == main and score is not None:
        key = (match.group(1), int(match.group(3)) if match.group(3) else None)
        points.setdefault(key, []).append((row['step'], score))
      match = _ROLE_NAME.fullmatch(name)
      if match and match.group(2) == main and score is not None:
        points.setdefault((_role_label(match.group(1)), None), []).append((row['step'], score))
  if not points:
    return '<p class="muted">No evaluation yet.</p>'
  last_eval = next((group for group in groups if group['kind'] == 'eval'), None)
  several = any(len(series) > 1 for series in points.values())
  lines = []
  place = lambda key: (key[0] not in _OF_ALL, key[0].startswith('role '), key[0], key[1] or 0)
  for dataset, hops in sorted(points, key=place):
    series = points[dataset, hops]
    before, (last, after) = series[0][1], series[-1]
    best_step, best = max(series, key=lambda point: point[1])
    counted = last_eval if last_eval is not None and last_eval['step'] == last else None
    count = counted['counts'].get((dataset, hops), '') if counted else ''
    name = _OF_ALL.get(dataset) or html.escape(dataset)
    label = name if hops is None else f'{hops} hop{"s" if hops > 1 else ""}'
    cells = [f'<th scope="row">{label}</th>', f'<td>{count}</td>', f'<td>{before:.3f}</td>']
    if len(series) > 1:
      cells += [
          f'<td>{after:.3f}</td>',
          f'<td>{_signed(after - before)}</td>',
          f'<td>{best:.3f}<small>at {best_step}</small></td>',
      ]
    elif several:
      cells += ['<td>–</td>'] * 3
    lines.append(f'<tr class="{"all" if hops is None else "hops"}">{"".join(cells)}</tr>')
  firsts, lasts = ({series[end][0] for series in points.values()} for end in (0, -1))
  titles = (
      'Held-out exact match' if main == 'em' else f'Held-out {html.escape(main)}',
      'n',
      f'update {firsts.pop()}' if len(firsts) == 1 else 'first',
      f'update {lasts.pop()}' if len(lasts) == 1 else 'last',
      'change',
      'best<small>at</small>',
  )
  head = ''.join(f'<th scope="col">{title}</th>' for title in titles[: 6 if several else 3])
  return (
      '<div class="scroll"><table class="results">'
      f'<thead><tr>{head}</tr></thead><tbody>{"".join(lines)}</tbody></table></div>'
  )


def _role_label(role: str | None) -> str:
  return f'role {role}' if role else ''


def _main_score(rows: list[dict[str, Any]]) -> str:
  """Returns the name that is scored by hops; else exact match, any core metric, or the reward."""
  found = [match for row in rows for name in row if (match := _CORE_NAME.fullmatch(name))]
  by_hops = [match.group(2) for match in found if match.group(3)]
  names = sorted({match.group(2) for match in found}, key=lambda n: (n == 'score', n != 'em', n))
  return (by_hops or names or ['score'])[0]


def _signed(change: float) -> str:
  text = f'{change:+.3f}'
  return '0.000' if float(text) == 0 else text.replace('-', '−')


def _highlights_html(config: dict[str, Any]) -> str:
  flat = _flatten(config)
  flat |= {f'algorithm.{name}': x for name, x in config.get('objective', {}).items()}
  return ''.join(
      f'<div><dt>{html.escape(name)}</dt><dd>{_breakable(flat[name])}</dd></div>'
      for name in _HIGHLIGHTS
      if name in flat
  )


def _breakable(value: Any) -> str:
  """Escapes a text; a long path may wrap after a slash."""
  return html.escape(str(value)).replace('/', '/<wbr>')


def _flatten(config: dict[str, Any], prefix: str = '') -> dict[str, Any]:
  """Flattens {'a': {'b': 1}} to {'a.b': 1}; lists, nulls and empty strings are left out."""
  flat = {}
  for name, value in config.items():
    if isinstance(value, dict):
      flat.update(_flatten(value, f'{prefix}{name}.'))
    elif isinstance(value, (bool, int, float)) or (isinstance(value, str) and value):
      flat[prefix + name] = value
  return flat
