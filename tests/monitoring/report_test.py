"""The report of a run: right numbers, incomplete runs, and hostile text that stays text."""

import base64
import dataclasses
import hashlib
import json
import math
import os
import random
import re
import shutil
import tempfile
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized

from stppo_jax import config as schema
from stppo_jax import types
from stppo_jax.monitoring import charts
from stppo_jax.monitoring import journal as journals
from stppo_jax.monitoring import metrics
from stppo_jax.monitoring import report
from stppo_jax.monitoring import viewer
from stppo_jax.monitoring import workdir as workdir_lib

_HOSTILE = (
    '</script><script>alert(1)</script>',
    '<img src=x onerror=alert(2)>',
    '<!--<script>',
    ']]>\u2028\u2029&lt;b&gt;',
    '{{title}} {{page_json}}',
    '\u202eevil\ufeff\x00\x1b[31m\ud800',
)


class WhenTest(absltest.TestCase):
  """A report is there after each evaluation and after a stop, not only at the end."""

  def test_report_is_written_during_and_after_the_run(self):
    workdir = self.enterContext(tempfile.TemporaryDirectory())
    config = dataclasses.asdict(schema.Config(log=schema.LogSettings(tensorboard=False)))
    path = os.path.join(workdir, 'report.html')
    with journals.Journal(workdir, config, 0, ('em',)) as journal:
      journal.write(0, {'val-core/all/em': 0.25})
      self.assertTrue(os.path.exists(path))
      os.remove(path)
      journal.write(1, {'critic/score/mean': 0.5})
      self.assertFalse(os.path.exists(path))
    journal.log_end(1)
    self.assertTrue(os.path.exists(path))
    with mock.patch.object(report, 'build', side_effect=OSError('no space')):
      with self.assertLogs('absl', 'WARNING') as logs:
        journal.log_end(1)
    self.assertIn('no report (no space)', logs.output[0])


class ReportTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.workdir = self.enterContext(tempfile.TemporaryDirectory())

  def _page(self):
    path = report.build(self.workdir)
    self.assertEqual(path, os.path.join(self.workdir, 'report.html'))
    with open(path, encoding='utf-8') as file:
      return file.read()

  def test_full_run(self):
    write_fake_run(self.workdir)
    page = self._page()
    self.assertLess(len(page.encode('utf-8')), 8e6)
    data = _page_json(page)
    self.assertEqual(
        [data['title'], data['updates'], data['results']['score']], ['st_ppo_tiny', 60, 'em']
    )
    whole, *by_hops = data['results']['rows']
    self.assertEqual(
        [whole['points'][0], whole['points'][-1], whole['n']], [[0, 0.182], [60, 0.463], 48]
    )
    self.assertEqual([row['label'] for row in by_hops], ['1 hop', '2 hops', '3 hops'])
    self.assertEqual(sum(row['n'] for row in by_hops), 48)
    self.assertIn(['algorithm.variant', 'st_ppo'], data['highlights'])
    titles = {chart['title'] for chart in data['charts']}
    of_environment = [c for c in data['charts'] if c['title'] == 'Metrics of the environment']
    self.assertNotIn('_length', json.dumps(of_environment))  # prompts and responses are no scores
    self.assertContainsSubset(
        {chart['title'] for chart in charts.CHARTS if chart['section'] != 'Roles'}, titles
    )
    self.assertIn('last training update (60): 24 of 40', _shown(data))
    self.assertIn('first training update (1): 24 of 40', _shown(data))
    self.assertIn('last evaluation (60): 24 of 48', _shown(data))
    self.assertLen(data['episodes'], 72)
    for kind in ('train', 'eval'):
      ems = {episode['right'] for episode in data['episodes'] if episode['kind'] == kind}
      self.assertEqual(ems, {0, 1}, 'right and wrong ones both')
    self.assertNotIn('{{', re.sub(r'(?s)<script.*?</script>', '', page))
    code = re.sub(r'(?s)/\*.*?\*/', '', page)
    self.assertNotRegex(code, r'(src|href)=|@import|url\(|https?://')

  def test_episodes_that_a_warning_names_can_be_opened(self):
    write_fake_run(self.workdir, updates=3)
    episodes = os.path.join(self.workdir, 'episodes')
    for step in (1, 2):
      shutil.copy(
          os.path.join(episodes, 'train_000003.jsonl'), f'{episodes}/train_{step:06d}.jsonl'
      )
    with open(os.path.join(self.workdir, metrics.FILE_NAME), 'a', encoding='utf-8') as file:
      for step in (2, 3):
        file.write(json.dumps({'step': step, 'health/cut': 1.0}) + '\n')
    shown = _shown(_page_json(self._page()))
    self.assertIn('update of a health warning (2): 24 of 40', shown)

  def test_files_of_an_abandoned_part_are_left_out(self):
    """The run went back to update 3 and has its metrics only, and later files are still there."""
    write_fake_run(self.workdir, updates=3)
    episodes = os.path.join(self.workdir, 'episodes')
    shutil.copy(f'{episodes}/train_000003.jsonl', f'{episodes}/train_000004.jsonl')
    rows = metrics.read_metrics(self.workdir)
    self.assertEqual(max(update for _, update in report.episode_files(self.workdir, rows)), 3)
    self.assertEqual(max(update for _, update in report.episode_files(self.workdir, [])), 4)

  def test_main_score_of_a_mix_is_what_all_have(self):
    names = ['all/won', 'all/won_hops2', 'guess/won', 'all/solved', 'sums/solved']
    names += [f'{part}/score' for part in ('all', 'guess', 'sums', 'macro')]
    names = [f'val-core/{name}' for name in names]
    self.assertEqual(report.main_score_name({}, [dict.fromkeys(names, 0.5)]), 'score')
    common = {f'val-core/{part}/em': 0.5 for part in ('all', 'a', 'b')}
    row = common | {'val-core/all/score': 1.0}
    self.assertEqual(report.main_score_name({}, [row]), 'em')

  def test_main_score_is_that_of_the_best_checkpoint(self):
    config = dataclasses.asdict(schema.Config(log=schema.LogSettings(tensorboard=False)))
    workdir_lib.claim(self.workdir, config)
    for _ in range(2):  # a resumed run keeps the name
      scores = {'val-core/all/cost': 9.0, 'val-core/all/solved': 0.5, 'val-core/all/em': 0.25}
      with journals.Journal(self.workdir, config, 0, ('solved', 'cost', 'em')) as journal:
        journal.write(0, scores)
      self.assertEqual(journal.main_score(scores), 0.5)
      workdir_lib.claim(self.workdir, config)
      self.assertEqual(_page_json(self._page())['results']['score'], 'solved')
      (row,) = viewer.list_runs(self.workdir)
      self.assertEqual((row['score'], row['best']), ('val-core/all/solved', 0.5))

  def test_only_data_set_appears_once(self):
    self._write_rows({'val-core/all/em': 0.5, 'val-core/nq/em': 0.5, 'val-core/all/em_hops2': 0.25})
    data = _page_json(self._page())
    self.assertEqual(_labels(data), ['nq', '2 hops'])
    self.assertLen(data['charts'][0]['series'], 1)

  @parameterized.parameters(
      ('em', ('a', 'nq', 'macro'), ['all questions', 'mean of the data sets', 'a', 'nq']),
      (
          'pass@1',
          ('openai/gsm8k', 'lighteval/MATH'),
          ['all questions', 'lighteval/MATH', 'openai/gsm8k'],
      ),
  )
  def test_all_questions_precede_data_sets(self, score, datasets, labels):
    self._write_rows({f'val-core/{name}/{score}': 0.5 for name in ('all', *datasets)})
    self.assertEqual(_labels(_page_json(self._page())), labels)

  def test_own_score_of_an_environment_is_a_curve(self):
    row = {'share/mean': 0.25}
    row |= {f'val-{name}/share': 0.5 for name in ('core/all', 'core/unnamed')}
    row |= {f'val-aux/{name}/reward/acc': 0.75 for name in ('all', 'unnamed')}
    self._write_rows(row)
    (chart,) = _page_json(self._page())['charts']
    self.assertEqual(chart['title'], 'Metrics of the environment')
    curves = {one['label']: one['y'] for one in chart['series']}
    expected = {'share': [0.25], 'held out: share, all': [0.5], 'held out: reward/acc': [0.75]}
    self.assertEqual(curves, expected)

  def _write_rows(self, *rows):
    with metrics.MetricsWriter(self.workdir) as writer:
      for step, row in enumerate(rows):
        writer.write(step, row)

  def test_policy_admits_the_script_as_written(self):
    write_fake_run(self.workdir, updates=2)
    page = self._page()
    scripts = re.findall(r'<script>(.*?)</script>', page, re.DOTALL)
    digests = [base64.b64encode(hashlib.sha256(x.encode()).digest()).decode() for x in scripts]
    self.assertIn("script-src 'sha256-{}' 'sha256-{}'\"".format(*digests), page)
    self.assertIn("default-src 'none'", page)

  def test_hostile_text_stays_text(self):
    write_fake_run(self.workdir, updates=2, hostile=True)
    page = self._page()
    for text in _HOSTILE[:3]:
      self.assertNotIn(text, page)
    self.assertEqual(page.count('<script'), 3)
    self.assertEqual(page.count('</script'), 3)
    self.assertNotIn('<img', page)
    self.assertNotIn('<!--', page)
    data = _page_json(page)
    self.assertEqual(data['episodes'][0]['question'], ' '.join(_HOSTILE).replace('\ud800', '?'))
    self.assertIn(_HOSTILE[0], data['episodes'][0]['pieces'])

  @parameterized.parameters(
      dict(with_eval=False),
      dict(with_episodes=False),
      dict(with_config=False),
      dict(updates=0),
      dict(updates=1),
  )
  def test_partial_runs(self, **kwargs):
    write_fake_run(self.workdir, **kwargs)
    data = _page_json(self._page())
    if kwargs.get('updates') == 0:
      self.assertEqual([len(row['points']) for row in data['results']['rows']], [1] * 4)
    if kwargs.get('with_eval') is False:
      self.assertEmpty(data['results']['rows'])
      self.assertNotIn('Held-out exact match by hops', [c['title'] for c in data['charts']])
    if kwargs.get('with_episodes') is False:
      self.assertEqual(data['episodes'], [])

  def test_empty_workdir(self):
    data = _page_json(self._page())
    self.assertIsNone(data['updates'])
    self.assertEqual([data[key] for key in ('charts', 'groups', 'episodes', 'warnings')], [[]] * 4)

  def test_missing_workdir_and_broken_config(self):
    with self.assertRaisesRegex(types.UserError, 'not a folder'):
      report.build(os.path.join(self.workdir, 'nowhere'))
    with open(os.path.join(self.workdir, 'config.json'), 'w', encoding='utf-8') as file:
      file.write('{')
    with self.assertRaisesRegex(types.UserError, 'config.json is not a JSON object') as caught:
      report.build(self.workdir)
    self.assertNotIn('\n', str(caught.exception))

  def test_torn_episode_line_and_bare_nan(self):
    write_fake_run(self.workdir, updates=2)
    path = os.path.join(self.workdir, 'episodes', 'train_000002.jsonl')
    episode = _fake_episode(random.Random(0), 2, 'train')
    episode['advantages'][0] = math.nan
    with open(path, 'w', encoding='utf-8') as file:
      file.write(json.dumps(episode) + '\n' + json.dumps(episode)[:200])
    data = _page_json(self._page())
    self.assertIn('last training update (2): 1 of 1', _shown(data))
    self.assertIsNone(data['episodes'][0]['advantages'][0])

  def test_nonfinite_metric_is_a_gap_and_a_warning(self):
    self._write_rows(*({'actor/entropy': x} for x in (1.0, math.nan, 1.0)))
    data = _page_json(self._page())
    self.assertEqual(data['warnings'], ['Non-finite: actor/entropy at update 1.'])
    (chart,) = data['charts']
    self.assertEqual(chart['series'][0]['y'], [1.0, None, 1.0])

  def test_broken_health_rules_are_shown(self):
    self._write_rows(*({'health/empty': x, 'health/kl': 0.0} for x in (0.0, 1.0, 1.0)))
    warnings = _page_json(self._page())['warnings']
    self.assertEqual(warnings, ['Health: empty beyond its limit at update 1, and at 1 more.'])

  def test_episodes_stay_within_their_bytes(self):
    write_fake_run(self.workdir, updates=1, with_eval=False)
    path = os.path.join(self.workdir, 'episodes', 'train_000001.jsonl')
    episode = _fake_episode(random.Random(0), 1, 'train')
    episode['question'] = 'x' * (report.BYTES_PER_FILE // 3)
    with open(path, 'w', encoding='utf-8') as file:
      file.writelines(json.dumps(episode) + '\n' for _ in range(10))
    self.assertIn('last training update (1): 2 of 10', _shown(_page_json(self._page())))

  def test_rows_of_an_episode_count_once(self):
    write_fake_run(self.workdir, updates=1, with_eval=False)
    path = os.path.join(self.workdir, 'episodes', 'train_000001.jsonl')
    episode = _fake_episode(random.Random(0), 1, 'train')
    rows = [episode | {'of_episode': number, 'segment': i} for number in (0, 1) for i in range(3)]
    with open(path, 'w', encoding='utf-8') as file:
      file.writelines(json.dumps(row) + '\n' for row in rows)
    group = report.episode_group(self.workdir, 'train', 1)
    self.assertEqual((len(group['episodes']), group['shown'], group['total']), (6, 2, 2))

  def test_first_episode_is_shown_however_long(self):
    write_fake_run(self.workdir, updates=1, with_eval=False)
    group = report.episode_group(self.workdir, 'train', 1, max_bytes=10)
    self.assertEqual(group['shown'], 1)


class ChoiceTest(parameterized.TestCase):

  @parameterized.parameters((10, 10, 4, 2, 2), (1, 10, 4, 1, 3), (10, 0, 4, 4, 0), (1, 1, 4, 1, 1))
  def test_half_right_half_wrong(self, num_right, num_wrong, limit, right, wrong):
    chosen = report._choose(list(range(num_right)), list(range(100, 100 + num_wrong)), limit)
    self.assertEqual(chosen, sorted(set(chosen)))
    self.assertEqual([sum(c < 100 for c in chosen), sum(c >= 100 for c in chosen)], [right, wrong])


class ChartsTest(absltest.TestCase):

  def test_thinning_keeps_spikes_and_ends(self):
    rows = [{'step': step, 'actor/entropy': 1.0} for step in range(5000)]
    rows[1234]['actor/entropy'] = 99.0
    (chart,) = charts.charts(rows)
    (series,) = chart['series']
    self.assertLessEqual(len(series['x']), charts.MAX_POINTS + 2)
    self.assertEqual([series['x'][0], series['x'][-1]], [0, 4999])
    self.assertEqual(series['y'][series['x'].index(1234)], 99.0)

  def test_later_line_of_a_step_wins(self):
    rows = [{'step': 1, 'actor/entropy': 1.0}, {'step': 1, 'actor/entropy': 2.0}]
    self.assertEqual(charts.charts(rows)[0]['series'][0]['y'], [2.0])

  def test_turns_sort_by_number_with_one_colour(self):
    names = [f'stppo/clipfrac_turn{turn}_{sign}' for turn in (10, 2) for sign in ('pos', 'neg')]
    for chart in charts.charts([{'step': 1} | dict.fromkeys(names, 0.5)]):
      self.assertEqual(
          [(one['label'], one['hue']) for one in chart['series']], [('turn 2', 0), ('turn 10', 1)]
      )

  def test_name_of_only_data_set_is_omitted(self):
    row = {'step': 1, 'val-core/nq/em_hops1': 0.5, 'val-core/nq/em_hops2': 0.5}
    labels = lambda row: [one['label'] for one in charts.charts(row)[0]['series']]
    self.assertEqual(labels([row]), ['1-hop', '2-hop'])
    row['val-core/trivia/em_hops1'] = 0.5
    self.assertEqual(labels([row]), ['nq · 1-hop', 'nq · 2-hop', 'trivia · 1-hop'])

  def test_layers_of_a_stack_keep_the_same_steps(self):
    rows = [{'step': s, 'timing_s/wait': s % 7, 'timing_s/adv': -s % 5} for s in range(2000)]
    (chart,) = charts.charts(rows)
    first, second = chart['series']
    self.assertEqual(first['x'], second['x'])
    self.assertLessEqual(len(first['x']), charts.MAX_POINTS + 1)

  def test_metrics_without_a_chart_are_still_shown(self):
    (chart,) = charts.charts([{'step': 1, 'my/own': 0.5}])
    self.assertEqual((chart['section'], chart['title']), ('Other series', 'my/own'))


def _page_json(page):
  text = re.search(r'id="page_json">(.*?)</script>', page, re.DOTALL).group(1)
  return json.loads(text)['runs'][0]


def _labels(data):
  return [row['label'] for row in data['results']['rows']]


def _shown(data):
  return [f'{group["label"]}: {group["shown"]} of {group["total"]}' for group in data['groups']]


# A made-up run, as the training loop would have written it.


def write_fake_run(
    workdir, updates=60, with_eval=True, with_episodes=True, with_config=True, hostile=False
):
  """Writes metrics, config and episodes of a run that learns; `updates`=0 is a run just begun."""
  random_state = random.Random(0)
  if with_config:
    with open(os.path.join(workdir, 'config.json'), 'w', encoding='utf-8') as file:
      json.dump(_fake_config(hostile), file, indent=2)
  with metrics.MetricsWriter(workdir) as writer:
    for step in range(updates + 1):
      row = _fake_training_row(random_state, step) if step else {}
      if with_eval and step % 10 == 0:
        row |= _fake_eval_row(step / 60)
      if row:
        writer.write(step, row)
  if with_episodes:
    os.mkdir(os.path.join(workdir, 'episodes'))
    for step in range(1, updates + 1, 1 if updates < 3 else updates - 1):
      _write_episodes(workdir, step, 'train', 40, hostile)
    if with_eval and updates:
      _write_episodes(workdir, updates, 'eval', 48, hostile)


def _write_episodes(workdir, step, kind, count, hostile):
  random_state = random.Random(step)
  path = os.path.join(workdir, 'episodes', f'{kind}_{step:06d}.jsonl')
  with open(path, 'w', encoding='utf-8') as file:
    for _ in range(count):
      file.write(json.dumps(_fake_episode(random_state, step, kind, hostile)) + '\n')


def _fake_config(hostile):
  return {
      'name': _HOSTILE[0] + _HOSTILE[1] if hostile else 'st_ppo_tiny',
      'seed': 0,
      'data': {'source': 'embedded'},
      'retriever': {'kind': 'bm25', 'top_k': 3, 'url': _HOSTILE[2] if hostile else ''},
      'algorithm': {'variant': 'st_ppo', 'ratio': None, 'kl_coef': 0.001},
      'train': {'updates': 60, 'episodes': 64, 'length_buckets': [512, 1024]},
  }


# Metrics of a training update.
_METRICS = """
  critic/score/mean critic/score/max critic/score/min em/mean actor/pg_loss actor/pg_clipfrac
  actor/ppo_kl actor/entropy actor/grad_norm actor/lr critic/lr critic/vf_loss
  critic/vf_explained_var critic/values/mean critic/values/max critic/values/min
  critic/returns/mean critic/returns/max critic/returns/min critic/advantages/mean
  critic/advantages/max critic/advantages/min stppo/grad_norm stppo/bias_norm stppo/cos_g_c
  stppo/divisor stppo/step_norm stppo/ratio_std_token stppo/ratio_std_turn
  stppo/ratio_std_sequence rollout_corr/kl rollout_corr/k3_kl rollout_corr/logp_diff_max
  response_length/mean format/mean response_length/max response_length/min
  stppo/agent_tokens/mean prompt_length/mean prompt_length/max prompt_length/min
  stppo/agent_turns/mean stppo/agent_turns/max stppo/agent_turns/min perf/throughput
  timing_s/step timing_s/gen timing_s/wait timing_s/old_log_prob timing_s/update_actor
  timing_s/gen_sample timing_s/gen_retrieve env/retrieval_failed env/truncated outcome/answered
  outcome/truncated outcome/program_failed env/searches/mean env/invalid_share f1/mean
  critic/rewards/mean
  stppo/clipfrac_turn1_pos stppo/clipfrac_turn1_neg stppo/clipfrac_turn2_pos
  stppo/clipfrac_turn2_neg""".split()


def _fake_training_row(random_state, step):
  row = {name: 0.5 + random_state.gauss(0, 0.1) for name in _METRICS}
  row |= {'outcome/answered': 60, 'outcome/truncated': 4, 'outcome/program_failed': 0}
  if step == 31:
    row['critic/vf_explained_var'] = math.nan
  return row


def _fake_eval_row(part):
  return {
      'val-core/embedded/em': 0.182 + 0.281 * part,
      'val-core/all/em': 0.182 + 0.281 * part,
      'val-core/all/em_hops1': 0.31 + 0.35 * part,
      'val-core/all/em_hops2': 0.15 + 0.25 * part * part,
      'val-core/all/em_hops3': 0.04 + 0.09 * part,
      'val-core/all/f1': 0.25 + 0.28 * part,
      'val-outcome/answered': 48,
      'timing_s/testing': 9.0,
  }


_WORLD = (
    ('Which currency is used in the country whose capital is Windhoek?', 'Namibian dollar', 2),
    ('What is the atomic number of tungsten?', '74', 1),
    (
        'In which time zone lies the most populous city of the country that borders both Benin and '
        'Chad?',
        'Africa/Lagos',
        3,
    ),
)


def _fake_episode(random_state, step, kind, hostile=False):
  question, answer, hops = random_state.choice(_WORLD)
  if hostile:
    question = ' '.join(_HOSTILE)
  em = float(random_state.random() < 0.2 + step / 200)
  pieces, turn_ids, actions = [], [], []

  def add(text, turn):
    cut = re.findall(r'\s?\w{1,6}|\n|\s?[^\w\s]+|\s', text)
    pieces.extend(cut)
    turn_ids.extend([turn] * len(cut))

  add(
      '<|im_start|>user\nAnswer the question. Think inside <think> and </think> first. Search with '
      f'<search> query </search>. Question: {question}\n<|im_end|>\n<|im_start|>assistant\n',
      0,
  )
  for turn in range(1, hops + 1):
    add(
        f'<think>\nI need fact {turn} of {hops} before I can answer.\n</think>\n'
        f'<search> fact {turn} about {question[:40].strip()} </search>',
        turn,
    )
    actions.append('search')
    documents = ''.join(
        f'Doc {i}(Title: Namibia) Namibia is a country in Southern Africa. Its capital is Windhoek '
        f'and its currency the Namibian dollar. Population about 2.6 million, passage {i}. '
        'It borders Angola and Zambia in the north, Botswana in the east, South Africa in the '
        f'south, and the Atlantic in the west. {"x" * 150 if i == 2 else ""}\n'
        for i in (1, 2, 3)
    )
    add(f'\n\n<information>{documents}</information>\n\n', 0)
  add(f'<think> Now I know. </think>\n<answer> {answer if em else "Euro"} </answer>', hops + 1)
  actions.append('answer')
  if hostile:
    pieces[0 : len(_HOSTILE)] = _HOSTILE
  episode = {
      'step': step,
      'kind': kind,
      'task': f'embedded-{random_state.randrange(999)}',
      'dataset': 'embedded',
      'hops': hops,
      'question': question,
      'answers': [answer],
      'score': em,
      'right': em > 0,
      'metrics': {'em': em},
      'failed': False,
      'truncated': False,
      'pieces': pieces,
      'turn_ids': turn_ids,
      'tokens': [random_state.randrange(8192) for _ in pieces],
      'actions': actions,
  }
  agent = sum(turn > 0 for turn in turn_ids)
  logp = [-random_state.expovariate(2.0) for _ in range(agent)]
  episode['behaviour_logp'] = logp
  if kind == 'train':
    ratio = [math.exp(random_state.gauss(0, 0.1)) for _ in logp]
    advantages = [em - 0.4 + random_state.gauss(0, 0.15) for _ in logp]
    episode |= {
        'old_logp': [x + random_state.gauss(0, 1e-4) for x in logp],
        'ratio': ratio,
        'values': [0.3 + 0.4 * em * i / agent for i in range(agent)],
        'advantages': advantages,
        'clipped': [int(r > 1.2 and a > 0 or r < 0.8 and a < 0) for r, a in zip(ratio, advantages)],
    }
  return episode


if __name__ == '__main__':
  absltest.main()
