"""Plays batches of a run with a fixed policy, and saves them for training on them later."""

import dataclasses
import json
import os
import zlib

from absl import logging

from stppo_jax.assembly import agents
from stppo_jax.assembly import components as components_lib
from stppo_jax.config import Config
from stppo_jax.distributed import hosts
from stppo_jax.evaluation import policy
from stppo_jax.models import sharding
from stppo_jax.monitoring import episodes as episodes_lib
from stppo_jax.rollout import saved
from stppo_jax.settings import validation
from stppo_jax.stop_signal import StopSignal
from stppo_jax.training import run as run_lib
from stppo_jax.types import Stopped


def sample(
    config: Config, workdir: str, num_batches: int, stop_signal: StopSignal, is_run: bool = False
) -> str:
  """Plays batches 1 to `num_batches` of a run without training; returns their folder.

  Samples at the temperature of training, with the policy that `policy.policy` loads. 0 batches: as
  many as it takes to play each question of config.data.train_split. An existing file is kept, so
  that the same command continues after a stop. Other settings or questions have another folder.
  """
  validation.validate(config)
  hosts.require_same('config', dataclasses.asdict(config))
  components = components_lib.resolve(config)
  questions = components.tasks
  hosts.require_same('questions', [task.id for task in questions])
  components.load()
  components.check_prompts(questions)
  loaded = policy.policy(config, workdir, all_policies=True, is_run=is_run)
  name = folder_name(components, workdir, loaded.updates)
  folder = os.path.join(workdir, 'samples', name)
  mesh = sharding.mesh_of(config.mesh)
  own_sampler = dataclasses.replace(config.rollout, engine='')
  agent_config = dataclasses.replace(config, rollout=own_sampler)
  agent = agents.make_agent(agent_config, components, loaded.model, mesh)
  batches = run_lib.make_batches(agent_config, agent, lambda params: params, questions, stop_signal)
  per_batch = config.train.episodes // config.rollout.group_size
  num_batches = num_batches or -(-len(questions) // per_batch)
  logging.info('%s plays %d batches of %d questions', loaded.description, num_batches, per_batch)
  params = batches.copy(loaded.params)
  for number in range(1, num_batches + 1):
    path = saved.path_of(folder, number)
    if hosts.by_writer(os.path.exists, path):
      continue
    try:
      hosts.together(stop_signal).raise_if_set()
      batch = batches.sample(params, number, 0)
    except Stopped:
      logging.info('stopped before %s: the same command continues there', path)
      break
    if hosts.is_writer():
      records = episodes_lib.batch_records(batch, agent.tokenizer, number)
      episodes_lib.write_lines(path, records)
    scores = [episode.main_score for episode in batch.episodes]
    mean_score = sum(scores) / len(scores)
    logging.info('%s: %d episodes, mean score %.3f', path, len(scores), mean_score)
  return folder


def folder_name(components: components_lib.Components, workdir: str, updates: int) -> str:
  """Returns a folder's name: the split, the updates, and a digest of what episodes depend on."""
  config = components.config
  depends = {
      **policy.depends_on(config, components.tasks),
      'episodes': config.train.episodes,
      'player': policy.identity(components, workdir, updates),
  }
  text = json.dumps(depends, sort_keys=True)
  digest = zlib.crc32(text.encode())
  return f'{config.data.train_split}_{updates:06d}_{digest:08x}'
