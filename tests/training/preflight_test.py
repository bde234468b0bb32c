"""What a user may have got wrong is found before weights are loaded, and by an evaluation too."""

import contextlib
import dataclasses
import http.server
import importlib.util
import json
import os
import pathlib
import shutil
import tempfile
import threading
import unittest
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized
import numpy as np

from experiments import st_ppo_tiny
from stppo_jax import types
from stppo_jax.assembly import agents
from stppo_jax.assembly import components
from stppo_jax.evaluation import job
from stppo_jax.evaluation import policy as policy_lib
from stppo_jax.monitoring import episodes as episodes_lib
from stppo_jax.monitoring import scores as evaluation
from stppo_jax.monitoring import workdir as workdir_lib
from stppo_jax.rollout import batches as batches_lib
from stppo_jax.rollout import prepare
from stppo_jax.training import learner
from stppo_jax.training import loop
from stppo_jax.training import recovery
from stppo_jax.training import sft
from stppo_jax.types import RunError
from stppo_jax.types import UserError
from tests.support import processes
from tests.support import tiny_run

make_config = tiny_run.make_config


class PreflightCase(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.workdir = os.path.join(self.enterContext(tempfile.TemporaryDirectory()), 'run')
    loaded = AssertionError('weights were loaded')
    for owner, name in ((learner, 'build'), (prepare, 'load_policy'), (recovery, 'restore_part')):
      self.enterContext(mock.patch.object(owner, name, side_effect=loaded))

  def refused(self, config, *words, run=loop.start):
    folders = os.listdir(os.path.dirname(self.workdir))
    with self.assertRaises(UserError) as caught:
      run(config, self.workdir)
    message = str(caught.exception)
    self.assertNotIn('\n', message)
    for word in words:
      self.assertIn(word, message)
    self.assertEqual(os.listdir(os.path.dirname(self.workdir)), folders, 'a folder is left')


@contextlib.contextmanager
def serving(status, body):
  """Yields the URL of a server that gives every request the same answer."""

  class Handler(http.server.BaseHTTPRequestHandler):

    def do_POST(self):
      self.rfile.read(int(self.headers['Content-Length']))
      self.send_response(status)
      self.end_headers()
      self.wfile.write(body)

    def log_message(self, *unused):
      pass

  with http.server.ThreadingHTTPServer(('127.0.0.1', 0), Handler) as server:
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield f'http://127.0.0.1:{server.server_port}/retrieve'
    server.shutdown()


class OwnDataTest(PreflightCase):
  """The README's commands for a user's own data, up to the weights."""

  def start(self, **data):
    config = st_ppo_tiny.get_config()
    for name, value in {'datasets': (), **data}.items():
      setattr(config.data, name, value)
    with self.assertRaisesRegex(AssertionError, 'weights were loaded'):
      loop.start(config, self.workdir)

  def test_a_folder(self):
    self.start(source=os.path.join(tiny_run.shared_folder(), 'knowledge'))

  @unittest.skipUnless(importlib.util.find_spec('pyarrow'), 'pyarrow is not installed')
  def test_train_and_test_parquet_of_search_r1(self):
    import pyarrow
    from pyarrow import parquet

    folder = self.enterContext(tempfile.TemporaryDirectory())
    for split in ('train', 'test'):
      row = {
          'data_source': 'nq',
          'prompt': [{'role': 'user', 'content': f'Search. Question: the {split} of what?'}],
          'reward_model': {'ground_truth': {'target': ['x']}},
          'extra_info': {'split': split, 'index': 0},
      }
      parquet.write_table(pyarrow.Table.from_pylist([row]), f'{folder}/{split}.parquet')
    source = f'{folder}/train.parquet,{folder}/test.parquet'
    self.start(
        source=source, corpus=os.path.join(tiny_run.shared_folder(), 'knowledge'), eval_split='test'
    )
    config = st_ppo_tiny.get_config()
    config.data.source, config.data.eval_split = source, 'test'
    self.refused(config, 'datasets names elements, geo', "('nq',)", '"()" keeps all')
    config.data.datasets = ()
    self.refused(config, 'train.parquet', 'no passages come with them', '--config.data.corpus')


class BeforeWeightsTest(PreflightCase):

  @parameterized.parameters(
      {'data__source': '/absent'},
      {'data__corpus': '/absent.jsonl'},
      {'model__folder': '/absent'},
      {'model__critic_folder': '/absent'},
      {
          'algorithm__variant': 'distillation',
          'algorithm__advantage': 'none',
          'teacher__folder': '/absent',
      },
      {'rollout__replay': '/absent'},
      {
          'rollout__demonstrations': '/absent.jsonl',
          'rollout__group_size': 4,
          'algorithm__variant': 'grao',
      },
  )
  def test_missing_file_leaves_no_folder(self, **values):
    self.refused(make_config(**values), 'absent')

  def test_missing_encoder_leaves_no_folder(self):
    has_packages = all(map(importlib.util.find_spec, ('torch', 'sentence_transformers')))
    config = make_config(retriever__kind='dense', retriever__encoder='/absent')
    self.refused(config, 'absent' if has_packages else 'needs sentence-transformers and torch')

  @parameterized.parameters('model__folder', 'model__critic_folder')
  def test_missing_weights_leave_no_folder(self, setting):
    folder = os.path.join(self.enterContext(tempfile.TemporaryDirectory()), 'model')
    shutil.copytree(os.path.join(tiny_run.shared_folder(), 'model'), folder)
    path = pathlib.Path(folder, 'model.safetensors')
    path.write_bytes(path.read_bytes()[:-1])
    self.refused(make_config(**{setting: folder}), 'not a whole safetensors file')
    path.unlink()
    self.refused(make_config(**{setting: folder}), folder, 'has no weights')

  def test_sft_without_its_file_leaves_no_folder(self):
    self.refused(make_config(data__source='/absent.jsonl'), 'absent', run=sft.start)

  def test_other_config_is_refused_before_loading(self):
    config = make_config()
    os.makedirs(os.path.join(self.workdir, 'checkpoints', '2'))
    workdir_lib.write_whole(
        os.path.join(self.workdir, 'config.json'), json.dumps(dataclasses.asdict(config))
    )
    self.refused(make_config(seed=1, data__corpus='/absent'), 'belongs to a run with another')

  @parameterized.parameters(
      (404, b'not here', '404'), (200, b'{"result": [[{"document": 3}]]}', 'malformed document')
  )
  def test_a_wrong_retriever(self, status, body, reason):
    with serving(status, body) as url:
      config = make_config(retriever__kind='http', retriever__url=url)
      for run in (loop.start, job.evaluate):
        if run is job.evaluate:
          config.train.updates = 0
        self.refused(config, url, reason, 'retriever.dialect', run=run)

  def test_a_retriever_that_is_not_there(self):
    url = self.enterContext(processes.unused_address()) + '/retrieve'
    config = make_config(retriever__kind='http', retriever__url=url, retriever__retries=0)
    self.refused(config, url, 'ConnectionError')

  def test_prompts_that_are_all_too_long(self):
    self.refused(make_config(rollout__max_prompt=3), 'max_prompt=3', 'all 5 questions', 'raise')

  def test_some_overlong_prompts_are_a_warning(self):
    config = make_config()
    tasks = [types.Task('a', 'Who?', ('x',)), types.Task('b', 'Who is ' + 'he ' * 200, ('x',))]
    with self.assertLogs('absl', 'WARNING') as logs:
      components.resolve(config).check_prompts(tasks)
    self.assertIn('1 of 2 prompts', logs.output[0])

  def test_words_that_the_embedded_model_does_not_know(self):
    config = st_ppo_tiny.get_config('smoke')
    parts = components.resolve(config)
    with self.assertNoLogs('absl', 'WARNING'):
      parts.check_prompts(parts.tasks[:200])
    task = types.Task('t', 'Who wrote Middlemarch?', ('Eliot',))
    with self.assertLogs('absl', 'WARNING') as logs:
      parts.check_prompts([task])
    self.assertRegex(logs.output[0], r'does not know [1-9] of the [1-9] words .*Middlemarch')

  def test_unplayable_prompts_are_counted(self):
    turn = types.Turn(np.zeros(3, np.int32), np.zeros(3), np.zeros(0, np.int32))
    make = lambda turns, **counts: types.Episode(
        types.Task('a'),
        0,
        np.zeros(2, np.int32),
        turns,
        failed=True,
        counts=counts,
        metrics={'em': 1.0} if turns else {},  # a right answer without the passages
        core_metrics=('em',),
    )
    episodes = [make([turn]), make([], prompt_too_long=1.0), make([], prompt_too_long=1.0)]
    metrics = episodes_lib.summarize(episodes)
    self.assertAlmostEqual(metrics['env/retrieval_failed'], 1 / 3)
    self.assertAlmostEqual(metrics['env/prompt_too_long'], 2 / 3)
    scores = evaluation.scores(episodes)
    self.assertAlmostEqual(scores['val-aux/retrieval_failed'], 1 / 3)
    self.assertAlmostEqual(scores['val-aux/prompt_too_long'], 2 / 3)
    self.assertAlmostEqual(scores['val-core/all/em'], 1 / 3)

    agent = mock.Mock(**{'play.return_value': episodes[1:], 'retriever': None})
    stream = mock.Mock(**{'take.return_value': [types.Task('a'), types.Task('b')]})
    batches = batches_lib.Batches(agent, lambda params: params, stream, 1, 0)
    with self.assertRaisesRegex(RunError, 'all 2 episodes of batch 1 .*max_prompt.*nothing'):
      batches.sample({}, 1, 0)

  def test_a_critic_with_another_vocabulary(self):
    folder = os.path.join(self.enterContext(tempfile.TemporaryDirectory()), 'critic')
    tiny_run.write_model(folder, vocab_size=1000)
    self.refused(make_config(model__critic_folder=folder), 'critic_folder', '1000')

  def test_critic_with_other_tokens_is_refused(self):
    folder = os.path.join(self.enterContext(tempfile.TemporaryDirectory()), 'critic')
    shutil.copytree(os.path.join(tiny_run.shared_folder(), 'model'), folder)
    path = pathlib.Path(folder, 'tokenizer.json')
    saved = json.loads(path.read_text())
    ids = saved['model']['vocab']
    first, second = (token for token, i in ids.items() if i in (50, 51))
    ids[first], ids[second] = ids[second], ids[first]
    path.write_text(json.dumps(saved))
    self.refused(
        make_config(model__critic_folder=folder), 'critic_folder', 'another tokenizer', 'id 50'
    )

  def test_more_tokens_than_the_model_has_positions(self):
    folder = os.path.join(self.enterContext(tempfile.TemporaryDirectory()), 'model')
    shutil.copytree(os.path.join(tiny_run.shared_folder(), 'model'), folder)
    path = pathlib.Path(folder, 'config.json')
    path.write_text(json.dumps(json.loads(path.read_text()) | {'max_position_embeddings': 100}))
    self.refused(make_config(model__folder=folder), 'max_total=192', '100 positions')


class EvaluateTest(PreflightCase):

  def refused(self, config, *words):
    super().refused(config, *words, run=job.evaluate)

  def trained(self, config):
    """Writes what a run of `config` leaves, except for its checkpoint's arrays."""
    os.makedirs(os.path.join(self.workdir, 'checkpoints', '2'))
    with open(os.path.join(self.workdir, 'config.json'), 'w', encoding='utf-8') as file:
      json.dump(dataclasses.asdict(config), file)

  def test_a_folder_without_a_run(self):
    self.refused(make_config(), self.workdir, 'has no checkpoint', 'train.updates=0')

  def test_the_untrained_model_on_request(self):
    with self.assertRaisesRegex(AssertionError, 'weights were loaded'):  # nothing is refused
      job.evaluate(make_config(train__updates=0), self.workdir)

  @parameterized.parameters(
      ({'model__lora_rank': 4}, 'model.lora_rank (0 there, 4 here)'),
      ({'model__critic': 'shared'}, "model.critic ('separate' there, 'shared' here)"),
      ({'algorithm__advantage': 'turn_gae'}, 'algorithm.advantage'),
  )
  def test_a_checkpoint_of_another_shape(self, values, words):
    self.trained(make_config())
    self.refused(make_config(**values), words, 'does not fit')

  def test_other_settings_are_told(self):
    self.trained(make_config())
    with self.assertLogs('absl', 'WARNING') as logs:
      with self.assertRaisesRegex(AssertionError, 'weights were loaded'):
        job.evaluate(make_config(env__max_searches=1, train__episodes=8), self.workdir)
    self.assertIn('other settings than the run: env.max_searches (2 there, 1 here)', logs.output[0])
    self.assertNotIn('train.episodes', logs.output[0])

  def test_a_retriever_that_dies_meanwhile(self):
    episode = types.Episode(types.Task('a'), 0, np.zeros(2, np.int32), [], failed=True)
    policy = mock.Mock(updates=0, description='untrained')
    agent = mock.Mock(**{'play.return_value': [episode], 'env.rows_per_episode': 1})
    config = make_config(train__updates=0)
    loaded = (policy, mock.Mock(config=config, held_out=[types.Task('a')], passages_digest=''))
    self.enterContext(mock.patch.object(policy_lib, 'load', return_value=loaded))
    self.enterContext(mock.patch.object(agents, 'make_agent', return_value=agent))
    with self.assertRaisesRegex(RunError, 'retrieval failed in 100% of the held-out episodes'):
      job.evaluate(config, self.workdir)


if __name__ == '__main__':
  absltest.main()
