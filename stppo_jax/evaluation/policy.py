"""A run's newest or best checkpoint: evaluated, sampled from, or exported."""

from collections.abc import Callable
import dataclasses
import functools
import json
import os
import shutil
import typing
from typing import Any
import zlib

from absl import logging
import jax

from stppo_jax import components
from stppo_jax import config as schema
from stppo_jax import types
from stppo_jax import validation
from stppo_jax.distributed import hosts
from stppo_jax.models import convert
from stppo_jax.models import decoder
from stppo_jax.models import hf_config
from stppo_jax.models import lora
from stppo_jax.models import sharding
from stppo_jax.monitoring import episodes as episodes_lib
from stppo_jax.monitoring import workdir as workdirs
from stppo_jax.rollout import prepare
from stppo_jax.training import checkpoint
from stppo_jax.training import learner as learner_lib
from stppo_jax.training import loop
from stppo_jax.training import recovery
from stppo_jax.trajectories import saved
from stppo_jax.types import Stopped
from stppo_jax.types import UserError


class Policy(typing.NamedTuple):
  """A policy to sample from."""

  model: decoder.ModelConfig
  params: Any  # a list of them, where each role has its own
  updates: int  # that trained it
  said: str  # which it is, for the log


def load(config: schema.Config, workdir: str) -> tuple[Policy, prepare.Prepared, list[types.Task]]:
  """Returns (policy, parts of its agent, held-out questions) of an evaluation.

  The policy is that of the checkpoint that config.eval.checkpoint names. The untrained one is given
  only for config.train.updates=0, so that a mistyped folder is an error. A config that the
  checkpoint does not fit is refused; other differences are logged. What a user may have got wrong
  comes before the weights.
  """
  if config.train.updates:
    hosts.by_writer(_check_trained, config, workdir)
    sources = prepare.sources(config)
    for field in hosts.by_writer(workdirs.changed_plugins, workdir, sources):
      logging.warning(
          'what config.%s names has changed since %s was trained: the scores are by the new one',
          field,
          workdir,
      )
  questions = loop.held_out(config, components.resolve(config))
  hosts.require_same('questions', [task.id for task in questions])
  prepared = prepare.prepare(config)
  prepare.check_prompts(config, prepared, questions)
  if not config.train.updates:
    return _untrained(config, of_all=True), prepared, questions
  return _trained(config, workdir, of_all=True), prepared, questions


# What a checkpoint's arrays depend on.
_SHAPES = (
    'model.folder model.critic model.critic_folder model.role_parameters model.param_dtype '
    'model.lora_rank model.lora_alpha model.lora_targets algorithm.variant algorithm.advantage'
).split()
# What the scores of a checkpoint depend on besides; others concern training alone.
SCORED_BY = ('env', 'retriever', 'rollout', 'model', 'data')


def _check_trained(config, workdir):
  """Raises a UserError unless `workdir` holds a checkpoint that fits; warns of other settings."""
  if not os.path.isdir(os.path.join(workdir, 'checkpoints')):
    raise UserError(
        f'--workdir={workdir!r} has no checkpoint to evaluate: give the folder of a run, or '
        '--config.train.updates=0 for the scores of the untrained model'
    )
  differences = workdirs.differences(workdir, dataclasses.asdict(config))
  if wrong := [text for name, text in differences.items() if name in _SHAPES]:
    raise UserError(
        f'--workdir={workdir!r} was trained with another config, whose checkpoint does not fit: '
        f'{", ".join(wrong)}. Give the --config that it was trained by, or none beside --workdir'
    )
  free = {path for path, rules, _ in validation.fields(config) if rules.resume_safe}
  others = [
      text
      for name, text in differences.items()
      if name.split('.')[0] in SCORED_BY and name not in free
  ]
  if others:
    logging.warning('the scores are by other settings than the run: %s', ', '.join(others))


def policy(config: schema.Config, workdir: str, of_all: bool = False) -> Policy:
  """Loads the policy of the checkpoint that config.eval.checkpoint names, and nothing else of it.

  Where `workdir` has no checkpoints, loads that of config.model.folder. Where each role has its
  own, loads that of config.serve.role, or those `of_all`.
  """
  validation.validate(config)
  if not os.path.isdir(os.path.join(workdir, 'checkpoints')):
    return _untrained(config, of_all)
  _check_trained(config, workdir)
  return _trained(config, workdir, of_all)


def _untrained(config, of_all) -> Policy:
  place = functools.partial(sharding.tree_shardings, mesh=sharding.mesh_of(config.mesh))
  model, params = prepare.load_policy(config, shardings=place)
  roles = _own_roles(config) if of_all else ()
  return Policy(model, [params] * len(roles) or params, 0, f'{config.model.folder}, untrained')


def _trained(config, workdir, of_all) -> Policy:
  parts, actors, updates = _read(config, workdir)
  said = f'{workdir} after {updates} updates'
  combine = parts.frozen.policy
  if '' in actors:
    return Policy(parts.model, combine(actors['']), updates, said)
  if of_all:
    return Policy(parts.model, list(map(combine, actors.values())), updates, said)
  role = config.serve.role or next(iter(actors))
  if role not in actors:
    raise UserError(
        f'config.serve.role={role!r}: the policies of {workdir} are of {", ".join(actors)}'
    )
  return Policy(parts.model, combine(actors[role]), updates, f'{said}, role {role}')


def _own_roles(config) -> tuple[str, ...]:
  """Returns the roles that have parameters of their own."""
  own = config.model.role_parameters == 'own'
  return tuple(components.resolve(config).env.roles) if own else ()


def _read(config, workdir) -> tuple[learner_lib.Parts, dict[str, dict], int]:
  """Returns (models, {role: trained parameters of its policy}, updates); '' is one that all share.

  Only these are read of the checkpoint. The models hold what is frozen of the policy, and shapes.
  """
  place = functools.partial(sharding.tree_shardings, mesh=sharding.mesh_of(config.mesh))

  def load_model(head, folder=None, unused_memory_kind=None):
    if config.model.lora_rank and head != 'value':  # the base is in no checkpoint
      return prepare.load_policy(config, head, folder, place)
    model = prepare.load_shape(config, head, folder)
    return model, jax.eval_shape(functools.partial(decoder.init, config=model), jax.random.key(0))

  variant = learner_lib.make_variant(config)
  parts = learner_lib.load(config, variant, load_model, make=jax.eval_shape)
  like = jax.tree.map(
      lambda x, where: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where),
      parts.actor,
      place(parts.actor),
  )
  roles = _own_roles(config)
  wanted = [like] * len(roles) if roles else like
  found, updates = recovery.saved(workdir, wanted, config.eval.checkpoint)
  if updates is None:
    raise UserError(f'--workdir={workdir!r} has no whole checkpoint yet: let the run go on')
  return parts, dict(zip(roles, found)) if roles else {'': found}, updates


def sample(
    config: schema.Config, workdir: str, num_batches: int, stop_requested: Callable[[], bool]
) -> str:
  """Plays batches 1 to `num_batches` of a run and trains on none of them; returns their folder.

  With the policy that `policy` loads, at the temperature of training. 0 batches: as many as it
  takes to play each question of config.data.train_split. A file that exists is kept, so the same
  command goes on where it was stopped; other settings have another folder.
  """
  validation.validate(config)
  hosts.require_same('config', dataclasses.asdict(config))
  questions = components.resolve(config).load_tasks(config.data.train_split)
  hosts.require_same('questions', [task.id for task in questions])
  prepared = prepare.prepare(config)
  prepare.check_prompts(config, prepared, questions)
  loaded = policy(config, workdir, of_all=True)
  folder = os.path.join(workdir, 'samples', _samples_name(config, workdir, loaded.updates))
  mesh = sharding.mesh_of(config.mesh)
  agent = components.make_agent(config, loaded.model, mesh, prepared)
  batches = loop.make_batches(config, agent, lambda params: params, questions, stop_requested)
  per_batch = config.train.episodes // config.rollout.group_size
  num_batches = num_batches or -(-len(questions) // per_batch)
  logging.info('%s plays %d batches of %d questions', loaded.said, num_batches, per_batch)
  params = batches.copy(loaded.params)
  for number in range(1, num_batches + 1):
    path = saved.path_of(folder, number)
    if hosts.by_writer(os.path.exists, path):
      continue
    try:
      hosts.end_if(stop_requested)
      batch = batches.sample(params, number, 0)
    except Stopped:
      logging.info('stopped before %s: the same command goes on there', path)
      break
    made = episodes_lib.Records(
        functools.partial(episodes_lib.of_batch, batch, agent.tokenizer, number)
    )
    if hosts.is_writer():
      episodes_lib.write_file(path, made)
    scores = [episode.main_score for episode in batch.episodes]
    logging.info('%s: %d episodes, mean score %.3f', path, len(scores), sum(scores) / len(scores))
  return folder


def _samples_name(config, workdir, updates):
  """Returns a folder's name: the split, the updates, and a digest of what episodes depend on."""
  values = dataclasses.asdict(config)
  depends = {name: values[name] for name in (*SCORED_BY, 'seed')}
  depends |= {'episodes': config.train.episodes} | prepare.sources(config)
  depends['weights'] = hosts.by_writer(checkpoint.fingerprint, workdir, updates)
  digest = zlib.crc32(json.dumps(depends, sort_keys=True).encode())
  return f'{config.data.train_split}_{updates:06d}_{digest:08x}'


def export(config: schema.Config, workdir: str) -> str:
  """Writes the policy of a checkpoint of `workdir` as a Hugging Face folder; returns its path.

  Adapters are merged into the weights, and a value head is left out. Where config.model.folder is
  in bfloat16, the weights are rounded to it. Roles with parameters of their own have a folder each,
  in that path.
  """
  validation.validate(config)
  if not os.path.isdir(os.path.join(workdir, 'checkpoints')):
    raise UserError(
        f'--workdir={workdir!r} has no checkpoint to export: give the folder of a run, with '
        'the --config that it was trained by'
    )
  _check_trained(config, workdir)
  parts, actors, updates = _read(config, workdir)
  folder, source = os.path.join(workdir, 'export'), prepare.model_folder(config)
  dtype = hf_config.dtype_to_write(source, config.model.param_dtype)
  bare = dataclasses.replace(parts.model, head='tokens')
  ends = prepare.load_tokenizer(config).eos_ids
  for role, actor in actors.items():
    params = actor
    if config.model.lora_rank:
      merge = jax.jit(lora.merge, static_argnums=2, donate_argnums=0 if not role else ())
      params = merge(parts.frozen.actor, actor, bare.lora_scale)
    convert.save_hf(os.path.join(folder, role), bare, params, source, dtype=dtype, eos_ids=ends)
    if hosts.is_writer():
      add_chat_template(config, os.path.join(folder, role))
  logging.info('the policy after %d updates is in %s, as %s', updates, folder, dtype)
  return folder


def add_chat_template(config: schema.Config, folder: str) -> None:
  """Adds the embedded model's chat template to a folder; other models have their own."""
  if config.model.folder == 'embedded':
    shutil.copyfile(prepare.EMBEDDED_TEMPLATE, os.path.join(folder, 'chat_template.jinja'))
