r"""Sampling and training with vLLM. It needs an environment of its own, see docs/engines.md:

STPPO_VLLM_PYTHON=/path/of/venv/bin/python \
  python -m pytest -m slow tests/rollout/engines_vllm_test.py
"""

import json
import os
import tempfile
from unittest import mock

from absl.testing import absltest
import jax
import numpy as np
import pytest

from benchmarks import servers
from experiments import st_ppo_tiny
from stppo_jax import types
from stppo_jax.assembly import agents
from stppo_jax.assembly import components
from stppo_jax.models import convert
from stppo_jax.net import http_client
from stppo_jax.rollout import engines as engines_lib
from stppo_jax.rollout import episode as episode_lib
from stppo_jax.rollout import prepare
from stppo_jax.rollout import servers as servers_lib
from stppo_jax.stop_signal import NEVER
from stppo_jax.training import loop
from tests.support import tiny_run

PYTHON = os.environ.get('STPPO_VLLM_PYTHON', '')

pytestmark = [
    pytest.mark.guests(
        what='vLLM as sampling engine',
        version='vllm==0.32.0',
        date='2026-11-24',
        touches='rollout/engines.py rollout/remote.py rollout/servers.py',
        environment='vllm',
    ),
    pytest.mark.slow,
    pytest.mark.skipif(not PYTHON, reason='STPPO_VLLM_PYTHON names no Python with vLLM'),
]


class VllmTest(absltest.TestCase):

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    cls.enterClassContext(tiny_run.on_one_device())
    cls.folder = cls.enterClassContext(tempfile.TemporaryDirectory())
    model = os.path.join(cls.folder, 'model')
    shape, params = convert.load_hf(prepare.EMBEDDED_MODEL)
    convert.save_hf(model, shape, params, prepare.EMBEDDED_MODEL)
    port = servers.free_port()
    process = servers.start_vllm(PYTHON, model, port, os.path.join(cls.folder, 'vllm.log'))
    cls.enterClassContext(servers.ended(process))
    cls.address = servers.wait_until_healthy(process, port)

  def test_greedy_tokens_and_log_probs_equal_ours(self):
    config = st_ppo_tiny.get_config()
    config.rollout.temperature = 0.8
    model, params = prepare.load_policy(config)
    params = jax.tree.map(lambda x: np.asarray(x) * 1.02, params)
    parts = components.resolve(config)
    own = agents.make_agent(config, parts, model)
    config.rollout.engine = self.address
    agent = engines_lib.with_engines(own)
    tasks = parts.load_tasks('train')[:200]
    keys = episode_lib.row_keys(jax.random.key(0), tasks)
    expected = own.play(params, tasks, keys, greedy=True)
    with agent.opened(self.folder, 0, params, tasks, NEVER):
      played = agent.play(params, tasks, keys, greedy=True)
    self.assertLen(played, 200)
    for ours, theirs in zip(expected, played):
      self.assertEqual(ours.unroll()[0].tolist(), theirs.unroll()[0].tolist())
      np.testing.assert_allclose(ours.unroll()[2], theirs.unroll()[2], atol=1e-4)

  def test_default_experiment_learns(self):
    config = st_ppo_tiny.get_config()
    config.rollout.engine = self.address
    config.pipeline.staleness = 2
    config.train.updates = 8
    config.eval.every = 8
    workdir = os.path.join(self.folder, 'run')
    scores = loop.start(config, workdir)
    self.assertGreater(scores['val-core/all/em'], 0.65)  # .43 before
    with open(os.path.join(workdir, 'metrics.jsonl'), encoding='utf-8') as file:
      records = [json.loads(line) for line in file]
    self.assertLess(records[1]['rollout_corr/logp_diff_max'], 1e-4)  # the first batch is fresh

  def test_engine_sleeps_between_batches(self):
    """On a CPU vLLM stops its scheduler and wakes it as on a GPU, but it frees no memory.

    It does not start with --enable-sleep-mode there, so the check of this flag is left out.
    """
    config = st_ppo_tiny.get_config()
    config.rollout.engine = self.address
    config.rollout.engine_shares_devices = True
    config.pipeline.staleness = 0
    config.train.updates = 2
    config.eval.every = 2
    workdir = os.path.join(self.folder, 'shared')
    with self.assertRaisesRegex(types.UserError, 'its sleep mode is off'):
      loop.start(config, workdir)
    with mock.patch.object(servers_lib.VllmApi, 'check_sleep_mode'):
      loop.start(config, workdir)
    with open(os.path.join(workdir, 'metrics.jsonl'), encoding='utf-8') as file:
      records = [json.loads(line) for line in file]
    self.assertLen(records, 3)
    self.assertLess(records[-1]['engine/gap'], 1e-4)
    self.assertLess(records[-1]['rollout_corr/logp_diff_max'], 1e-4)
    server = http_client.Connection(self.address, http_client.ClientLimits(5.0, 3.0), 4)
    self.assertTrue(json.loads(server.ask('/is_sleeping', None))['is_sleeping'])
    request = {'prompt': [1, 2], 'max_tokens': 2}
    with self.assertRaises(http_client.Temporary):
      server.ask('/v1/completions', request)  # it waits
    server.ask('/wake_up', {})
    self.assertIn('choices', json.loads(server.ask('/v1/completions', request, total_s=60.0)))


if __name__ == '__main__':
  absltest.main()
