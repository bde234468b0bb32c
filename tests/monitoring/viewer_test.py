"""The viewer's server: right answers, nothing outside of its folder, no other origin."""

import contextlib
import dataclasses
import io
import json
import os
import pathlib
import re
import shutil
import subprocess
import tempfile
import threading
from unittest import mock
from urllib import error
from urllib import request

from absl.testing import absltest
from absl.testing import parameterized

from stppo_jax import config as schema
from stppo_jax import types
from stppo_jax.monitoring import metrics
from stppo_jax.monitoring import report
from stppo_jax.monitoring import viewer
from stppo_jax.monitoring import workdir as workdir_lib
from stppo_jax.stop_signal import StopSignal
from tests.monitoring import report_test


class ViewerTest(parameterized.TestCase):

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    cls.folder = cls.enterClassContext(tempfile.TemporaryDirectory())
    for name, seed in (('a/seed_0', 0), ('a/seed_1', 1), ('b', 0)):
      path = os.path.join(cls.folder, name)
      os.makedirs(path)
      report_test.write_fake_run(path, updates=3)
      _change_config(path, seed=seed, train={'updates': 3 if name == 'b' else 9})
    server = cls.enterClassContext(viewer.make_server(cls.folder, 0))
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    cls.addClassCleanup(server.shutdown)
    cls.url = f'http://127.0.0.1:{server.server_port}'

  def _get(self, path, **headers):
    with request.urlopen(request.Request(self.url + path, headers=headers), timeout=20) as answer:
      return answer.read().decode()

  def _status(self, path, method='GET', **headers):
    wanted = request.Request(self.url + path, headers=headers, method=method)
    with self.assertRaises(error.HTTPError) as caught:
      request.urlopen(wanted, timeout=20)
    return caught.exception.code

  @parameterized.parameters(
      ({'train': {'checkpoint_folder': 'gs://bucket/1'}, 'name': 'other'}, True),
      ({'rollout': {'engine_folder': '/weights/1', 'engine': 'http://b:1'}}, True),
      ({'held_out_questions': '01', 'main_score': 'em'}, True),  # an older run does not have them
      ({'train': {'epochs': 7}}, False),
  )
  def test_seeds_with_folders_of_their_own_are_one_group(self, own, is_one):
    groups = []
    for seed, sections in enumerate(({}, own)):
      path = self.enterContext(tempfile.TemporaryDirectory())
      config = dataclasses.asdict(schema.Config(seed=seed))
      for name, value in sections.items():
        config[name] = config[name] | value if isinstance(value, dict) else value
      workdir_lib.write_whole(os.path.join(path, 'config.json'), json.dumps(config))
      groups.append(report.page_data(path)['seed_group'])
    self.assertNotEqual(groups[0], '')
    self.assertEqual(groups[0] == groups[1], is_one)

  def test_browser_that_leaves_is_no_error(self):
    server = self.enterContext(viewer.make_server(self.folder, 0))
    for failure, is_shown in ((ConnectionResetError(), False), (ValueError('a fault'), True)):
      with contextlib.redirect_stderr(io.StringIO()) as shown:
        try:
          raise failure
        except (OSError, ValueError):
          server.handle_error(None, ('127.0.0.1', 1))
      self.assertEqual('a fault' in shown.getvalue(), is_shown)
      self.assertEqual(bool(shown.getvalue()), is_shown)

  def test_runs_are_found_and_change_their_version(self):
    before = json.loads(self._get('/api/runs'))
    self.assertEqual([row['name'] for row in before], ['a/seed_0', 'a/seed_1', 'b'])
    self.assertEqual([row['updates'] for row in before], [3, 3, 3])
    self.assertEqual(before[0]['last'], 0.182)
    with metrics.MetricsWriter(os.path.join(self.folder, 'b')) as writer:
      writer.write(4, {'val-core/all/em': 0.9})
    after = json.loads(self._get('/api/runs'))
    changed = [x['name'] for x, y in zip(after, before) if x['version'] != y['version']]
    self.assertEqual(changed, ['b'])
    self.assertEqual([after[2]['updates'], after[2]['last']], [4, 0.9])
    self.assertEqual(json.loads(self._get('/api/run?name=b'))['updates'], 4)

  def test_one_unreadable_run_hides_no_other(self):
    for line in ({'step': '7', 'a': 1}, {'step': 5, 'val-core/all/em': 'high'}):
      folder = os.path.join(self.folder, 'c')
      os.makedirs(folder, exist_ok=True)
      rows = [{'step': 1, 'val-core/all/em': 0.5}, line]
      with open(os.path.join(folder, 'metrics.jsonl'), 'w', encoding='utf-8') as file:
        file.writelines(json.dumps(row) + '\n' for row in rows)
      names = [row['name'] for row in json.loads(self._get('/api/runs'))]
      self.assertContainsSubset(['a/seed_0', 'a/seed_1', 'b'], names)

  def test_run_is_what_the_report_shows(self):
    data = json.loads(self._get('/api/run?name=a/seed_1'))
    expected = json.loads(report.to_json(report.page_data(os.path.join(self.folder, 'a/seed_1'))))
    self.assertEqual(data, expected | {'name': 'a/seed_1'})

  def test_episodes_of_a_file_and_of_a_question(self):
    group = json.loads(self._get('/api/episodes?name=b&kind=train&update=3'))
    self.assertEqual([group['shown'], group['total']], [40, 40])
    task = group['episodes'][0]['task']
    episodes = json.loads(self._get(f'/api/question?name=b&task="{task}"'))
    self.assertEqual({episode['task'] for episode in episodes}, {task})
    self.assertGreater(len({(e['kind'], e['step']) for e in episodes}), 1)

  @parameterized.parameters(
      '/api/run?name=../b',
      '/api/run?name=/etc',
      '/api/run',
      '/api/episodes?name=b&kind=../../b/episodes/train&update=3',
      '/api/episodes?name=b&kind=train&update=77',
      '/api/episodes?name=b&kind=train&update=x',
      '/api/question?name=b&task={',
      '/config.json',
      '/../../etc/passwd',
  )
  def test_nothing_else_is_served(self, path):
    self.assertEqual(self._status(path), 404)

  def test_other_hosts_and_methods_are_rejected(self):
    self.assertEqual(self._status('/api/runs', Host='attacker.example'), 403)
    self.assertEqual(self._status('/', Host='127.0.0.1.attacker.example:80'), 403)
    self.assertEqual(self._status('/', method='POST'), 501)

  def test_folder_and_port_are_checked(self):
    with self.assertRaisesRegex(types.UserError, 'is not a folder'):
      viewer.serve(os.path.join(self.folder, 'nowhere'), 0, StopSignal(lambda: True))
    port = int(self.url.rsplit(':', 1)[1])
    with self.assertRaisesRegex(types.UserError, f'--port={port} is not available'):
      viewer.serve(self.folder, port, StopSignal(lambda: True))

  @parameterized.parameters(
      ({}, []),
      ({'of_episode': 2, 'segment': 1}, []),
      (
          {'of_episode': 2, 'segment': 3, 'branched_from': [1, 4]},
          [['of episode', 2], ['segment', 3], ['branch of segment', '1 after turn 4']],
      ),
      (
          {'of_episode': 2, 'segment': 1, 'agent_id': '<b>', 'parent': [0, 1]},
          [
              ['of episode', 2],
              ['segment', 1],
              ['agent', '<b>'],
              ['follows segment', '0 after turn 1'],
          ],
      ),
      (
          {'of_episode': 0, 'agent_id': 'main'},
          [['of episode', 0], ['segment', 0], ['agent', 'main']],
      ),
  )
  def test_place_in_tree_is_shown(self, episode, expected):
    node = shutil.which('node')
    if not node:
      self.skipTest('no Node.js')
    source = pathlib.Path(viewer.__file__).parent.joinpath('page', 'episodes.js').read_text()
    (function,) = re.findall(r'^function placeFacts.*?^}', source, re.DOTALL | re.MULTILINE)
    script = f'{function}\nconsole.log(JSON.stringify(placeFacts({json.dumps(episode)})))'
    shown = subprocess.run([node, '-e', script], capture_output=True, text=True, check=True)
    self.assertEqual(json.loads(shown.stdout), expected)

  def test_runs_that_are_too_many_are_named(self):
    folder = self.enterContext(tempfile.TemporaryDirectory())
    for name in ('a/seed_0', 'b/seed_0'):
      path = pathlib.Path(folder, name)
      path.mkdir(parents=True)
      path.joinpath('config.json').write_text('{}', encoding='utf-8')
    with mock.patch.object(viewer.logging, 'log_first_n') as told:
      self.assertLen(viewer.find_runs(folder), 2)
      told.assert_not_called()
      with mock.patch.object(viewer, '_MAX_RUNS', 1):
        self.assertEqual(list(viewer.find_runs(folder)), ['a/seed_0'])
    told.assert_called_once()
    self.assertEqual(told.call_args.args[-1], os.path.join(folder, 'b'))

  def test_run_that_cannot_be_read_hides_no_other(self):
    node = shutil.which('node')
    if not node:
      self.skipTest('no Node.js')
    folder = pathlib.Path(viewer.__file__).parent / 'page'
    source = folder.joinpath('start.js').read_text().rpartition('start();')[0]
    script = """
      const state = {runs: new Map(), listed: ['a', 'b'].map((name) => ({name, version: '1'})),
        chosen: ['a', 'b']};
      const server = {};
      const $ = () => server, plain = (text) => text;
      const fetch = async (path) => path.endsWith('a') ? {ok: false, text: async () => 'broken'}
        : {ok: true, json: async () => ({})};
    """
    end = """
      loadChosen().then(async (changed) => console.log(JSON.stringify(
        [changed, [...state.runs.keys()], server, await loadChosen()])));
    """
    command = [node, '-e', script + source + end]
    shown = subprocess.run(command, capture_output=True, text=True, check=True)
    text = 'a cannot be shown (broken).'
    self.assertEqual(
        json.loads(shown.stdout), [True, ['b'], {'textContent': text, 'hidden': False}, False]
    )

  @parameterized.parameters(
      # Equal steps: a gap counts for neither seed.
      ([1, 2, 3], [0, None, 4], [1, 2, 3], [2, 2, None], [1, 2, 3], [1, 2, 4], [0, 2, 4]),
      # Long series are thinned, each to steps of its own; the second seed is further ahead.
      ([1, 4, 6], [0, 0, 0], [1, 3, 8], [1, 1, 1], [1, 3, 4, 6, 8], [0.5] * 4 + [1], [0] * 4 + [1]),
  )
  def test_mean_of_seeds_is_over_all_of_them(self, x, y, x_2, y_2, steps, means, lows):
    node = shutil.which('node')
    if not node:
      self.skipTest('no Node.js')
    source = pathlib.Path(viewer.__file__).parent.joinpath('page', 'curves.js').read_text()
    functions = re.findall(r'^function (?:valuesAt|meanOf).*?^}', source, re.DOTALL | re.MULTILINE)
    parts = [{'x': x, 'y': y}, {'x': x_2, 'y': y_2}]
    call = f'console.log(JSON.stringify(meanOf({json.dumps(parts)})))'
    command = [node, '-e', '\n'.join([*functions, call])]
    shown = subprocess.run(command, capture_output=True, text=True, check=True)
    mean = json.loads(shown.stdout)
    self.assertEqual((mean['x'], mean['y'], mean['low']), (steps, means, lows))

  def test_browser_draws_runs_seeds_and_episodes(self):
    browser = shutil.which('chromium') or shutil.which('google-chrome')
    if not browser:
      self.skipTest('no Chromium')
    page = _drawn(browser, self.url)
    self.assertIn('a (2 seeds)', page)
    self.assertIn('train.updates', page)  # a difference of the configs
    self.assertGreater(page.count('class="chart'), 20)
    # Each chart of several runs names its metric, and none repeats a title.
    titles = re.findall(r'<h4>(.*?)</h4>', page)
    self.assertCountEqual(titles, set(titles))
    self.assertIn('· val-core/embedded/em<', page)
    self.assertNotRegex(page, r'· (val-)?outcome/program_failed<')  # 0 in all runs
    page = _drawn(browser, self.url + '/#run=b')
    self.assertIn('This question through training', page)
    self.assertIn('class="piece agent"', page)
    path = report.build(os.path.join(self.folder, 'b'))
    self.assertIn('class="piece agent"', _drawn(browser, f'file://{path}'))


def _drawn(browser, url):
  """Returns the page after its scripts have run."""
  command = [browser, '--headless=new', '--no-sandbox', '--disable-gpu', '--dump-dom']
  command += ['--virtual-time-budget=5000', url]
  return subprocess.run(command, capture_output=True, timeout=90, text=True, check=True).stdout


def _change_config(path, **changes):
  file_name = os.path.join(path, 'config.json')
  with open(file_name, encoding='utf-8') as file:
    config = json.load(file)
  with open(file_name, 'w', encoding='utf-8') as file:
    json.dump(config | changes, file)


if __name__ == '__main__':
  absltest.main()
