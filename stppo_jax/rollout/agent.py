"""An agent made from a config, playing questions: the part that training and evaluation share.

Config in, Agent out (tokenizer, model shape, retriever, questions); parameters and tasks in, episodes
and scores out.
"""

import dataclasses
import math
import os

from absl import logging
import jax

from stppo_jax import chat
from stppo_jax import tasks as task_files
from stppo_jax.envs import search
from stppo_jax.models import convert
from stppo_jax.models import decoder
from stppo_jax.models import hf_config
from stppo_jax.models import shapes
from stppo_jax.retrieval import bm25
from stppo_jax.retrieval import http
from stppo_jax.rollout import engine
from stppo_jax.rollout import episode as episode_loop
from stppo_jax.rollout import sampler as sampling
from stppo_jax.runtime import hosts
from stppo_jax.types import UserError

EMBEDDED_MODEL = os.path.join(os.path.dirname(os.path.dirname(__file__)), 'assets', 'tiny')
STOP_STRINGS = ('</search>', '</answer>')


@dataclasses.dataclass
class Agent:
  """Everything that turns parameters and questions into episodes."""

  config: object  # the run's Config
  tokenizer: chat.Tokenizer
  model: decoder.ModelConfig  # of the policy
  retriever: object  # retrieval.protocol.Retriever
  sampler: sampling.Sampler  # at the training temperature
  greedy: sampling.Sampler
  report: engine.Report | None = None  # what the newest `play` took

  def play(self, params, tasks, keys, groups=None, greedy=False, give_up=None):
    """Plays one episode a task, `rows` at a time; keys [B] fix each episode's randomness.

    Raises Stopped at the end of a turn at which `give_up()` is true, where that is given.
    Choice: on many hosts no threads, whose timing would let the hosts' schedules part.
    """
    rollout = self.config.rollout
    limits = episode_loop.Limits(
        max_prompt_tokens=rollout.max_prompt,
        max_turn_tokens=rollout.max_turn,
        max_observation_tokens=rollout.max_observation,
        max_total_tokens=rollout.max_total,
    )
    groups = range(len(tasks)) if groups is None else groups
    envs = [self.make_env(task) for task in tasks]
    step_all = hosts.split_steps(envs)

    def step_envs(stepped, actions):
      if give_up is not None:
        hosts.end_if(give_up)
      return step_all(stepped, actions)

    episodes, self.report = episode_loop.play(
        self.greedy if greedy else self.sampler,
        params,
        self.tokenizer,
        envs,
        tasks,
        groups,
        keys,
        limits,
        step_envs,
        threads=rollout.threads if jax.process_count() == 1 else 0,
    )
    return episodes

  def make_env(self, task):
    """The search environment of one question."""
    env, top_k = self.config.env, self.config.retriever.top_k
    return search.SearchEnv(
        task,
        self.retriever,
        max_turns=env.max_turns,
        top_k=top_k,
        prompt=env.prompt,
        reward=env.reward,
    )


def model_folder(config):
  """The folder of the policy's weights."""
  return EMBEDDED_MODEL if config.model.folder == 'embedded' else config.model.folder


def load_policy(config, head='tokens', folder=None, shardings=None):
  """(ModelConfig, parameters) from the config's folder, with the run's compute settings.

  On the host, or where `shardings` (tree of shapes -> tree of NamedShardings) puts them.
  """
  model = config.model
  shape, params = convert.load_hf(
      folder or model_folder(config), head=head, param_dtype=model.param_dtype, shardings=shardings
  )
  return _computed_as(shape, model), params


def load_shape(config, head='tokens', folder=None):
  """The ModelConfig that `load_policy` would give, without weights.

  A folder that is not here is known by its name, where that is the name of a preset:
  'models/Qwen2.5-7B-Instruct' has the shape of 'qwen2.5-7b'.
  """
  model, folder = config.model, folder or model_folder(config)
  name = (
      os.path.basename(folder.rstrip('/')).lower().removesuffix('-instruct').removesuffix('-base')
  )
  if not os.path.isdir(folder) and name in shapes.PRESETS:
    shape = dataclasses.replace(shapes.PRESETS[name], head=head, param_dtype=model.param_dtype)
  elif not os.path.isdir(folder):
    raise UserError(
        f'{folder}: no such folder, and {name!r} is no known shape: give a folder with a '
        f'config.json, or a name that ends in one of {", ".join(shapes.PRESETS)}'
    )
  else:
    shape = hf_config.load(folder, head=head, param_dtype=model.param_dtype)
  return _computed_as(shape, model)


def _num_shards(row_sharding):
  """How many parts the first axis is split into."""
  return math.prod(row_sharding.mesh.shape[axis] for axis in row_sharding.spec[0])


def _computed_as(shape, model):
  return dataclasses.replace(
      shape,
      dtype=model.dtype,
      remat=model.remat,
      scan_layers=model.scan_layers,
      attention_chunk=model.attention_chunk,
      lora_scale=model.lora_alpha / (model.lora_rank or 1),
  )


def make_agent(config, model, row_sharding=None) -> Agent:
  """Tokenizer, retriever and samplers for a policy of shape `model`; rows laid out as given."""
  tokenizer = chat.load_tokenizer(model_folder(config))
  chat.check_matches(tokenizer, model.vocab_size)
  stop_table = chat.stop_automaton(tokenizer.token_bytes, STOP_STRINGS)
  make = lambda greedy: make_sampler(
      config, model, stop_table, tokenizer.eos_ids, row_sharding, greedy
  )
  return Agent(
      config=config,
      tokenizer=tokenizer,
      model=model,
      retriever=make_retriever(config),
      sampler=make(False),
      greedy=make(True),
  )


def make_sampler(config, model, stop_table, eos_ids, row_sharding=None, greedy=False):
  """The sampler of training, or the greedy one of evaluation.

  Choice: bands that `row_sharding` cannot split evenly are left where the compiler puts them. Rows that
  are not split at all are free to move: only those that have something to read are computed. On a CPU
  their keys lie in tiles; split rows' do not, because reading from tiles takes row after row.
  """
  rollout = config.rollout
  options = (
      dict(temperature=0.0)
      if greedy
      else dict(temperature=rollout.temperature, top_k=rollout.top_k, top_p=rollout.top_p)
  )
  rows, width = num_rows(config, greedy), band_width(config, greedy)
  device = jax.devices()[0] if row_sharding is None else row_sharding.mesh.devices.flat[0]
  shards = 1 if row_sharding is None else _num_shards(row_sharding)
  if shards == 1 or width % shards:
    row_sharding = None
  tiled = device.platform == 'cpu' and row_sharding is None
  cache_tile = decoder.CPU_CACHE_TILE if tiled else 0
  model = dataclasses.replace(model, row_sharding=row_sharding, cache_tile=cache_tile)
  return sampling.Sampler(
      model,
      stop_table,
      eos_ids,
      rollout.max_total,
      rows=rows,
      width=width,
      chunk_buckets=rollout.chunks,
      row_sharding=row_sharding,
      **options,
  )


def num_rows(config, greedy=False):
  """Episodes under way at once."""
  return config.eval.rows if greedy else config.rollout.rows or config.train.episodes


def band_width(config, greedy=False):
  """Rows that one device call decodes."""
  rows = num_rows(config, greedy)
  return min(config.rollout.width or rows, rows)


def make_retriever(config):
  """The retriever of the config: in-process BM25 over its corpus, or a client of a server."""
  settings = config.retriever
  if settings.kind == 'http':
    return http.HttpRetriever(
        settings.url,
        dialect=settings.dialect,
        timeout_s=settings.timeout_s,
        retries=settings.retries,
        backoff_s=settings.backoff_s,
    )
  passages = task_files.load_corpus(config.data.corpus or config.data.source)
  logging.info('BM25 over %d passages', len(passages))
  return bm25.Bm25Retriever(passages)


def load_tasks(config, split):
  """The questions of a split, of the data sets that the config names."""
  tasks = task_files.load_tasks(config.data.source, split)
  chosen = config.data.datasets
  known = sorted({task.dataset for task in tasks})
  if missing := sorted(set(chosen) - set(known)):
    raise UserError(
        f'config.data.datasets names {", ".join(missing)}: the split {split!r} has '
        f'{", ".join(known)}, to be given as "(\'{known[0]}\',)"'
    )
  return [task for task in tasks if not chosen or task.dataset in chosen]
