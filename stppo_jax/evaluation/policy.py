"""Loads the policy of a run's newest or best checkpoint, and exports it."""

from collections.abc import Iterable
from collections.abc import Sequence
import dataclasses
import functools
import os
import shutil
from typing import Any
from typing import NamedTuple

from absl import logging
import jax

from stppo_jax import types
from stppo_jax.assembly import components as components_lib
from stppo_jax.config import Config
from stppo_jax.data import tasks as tasks_lib
from stppo_jax.distributed import hosts
from stppo_jax.models import decoder
from stppo_jax.models import hf_config
from stppo_jax.models import hf_export
from stppo_jax.models import sharding
from stppo_jax.monitoring import workdir as workdir_lib
from stppo_jax.rollout import prepare
from stppo_jax.settings import objective
from stppo_jax.settings import validation
from stppo_jax.training import checkpoint
from stppo_jax.training import learner as learner_lib
from stppo_jax.training import recovery
from stppo_jax.types import UserError


class Policy(NamedTuple):
  """A policy to sample from."""

  model: decoder.ModelConfig
  params: Any  # a list, if each role has its own parameters
  updates: int  # done in training
  description: str  # for the log: 'runs/x after 56 updates'


def load(config: Config, workdir: str) -> tuple[Policy, components_lib.Components]:
  """Returns (policy, components) of an evaluation.

  config.eval.checkpoint names the checkpoint. The untrained policy needs config.train.updates=0, so
  that a mistyped folder is an error. A config that does not fit the checkpoint is an error, and
  other differences are logged. The weights are loaded last, after all checks of the config.
  """
  if config.train.updates:
    hosts.by_writer(_check_trained, config, workdir)
    _check_sources(config, workdir, components_lib.sources(config))
  components = components_lib.resolve(config)
  hosts.require_same('questions', [task.id for task in components.held_out])
  components.load()
  components.check_prompts(components.held_out)
  if not config.train.updates:
    return _untrained(config, all_policies=True), components
  return _trained(config, workdir, all_policies=True), components


# The settings that determine a checkpoint's arrays.
_SHAPES = (
    'model.folder model.critic model.critic_folder model.role_parameters model.param_dtype '
    'model.lora_rank model.lora_alpha model.lora_targets algorithm.variant algorithm.advantage '
    'algorithm.value_loss algorithm.value_bins'
).split()
# Sections and settings that the episodes of a policy do not depend on: those of training, and the
# number of requests that a server accepts. Seed and evaluation are separate entries of a digest.
_NOT_PLAYED_BY = frozenset(
    'name seed algorithm teacher actor critic train sft pipeline health eval serve.rows '
    'serve.max_total serve.max_waiting serve.max_body_mb'.split()
)


def depends_on(config: Config, tasks: Sequence[types.Task]) -> dict[str, object]:
  """Returns what episodes depend on in addition to the player and the way of sampling."""
  settings = {path: value for path, _, value in validation.fields(config)}
  paths = _played_by(config, settings)
  return {
      'seed': config.seed,
      'questions': tasks_lib.digest(tasks),
      'sources': components_lib.plugin_digests(config),
      'settings': {path: settings[path] for path in paths},
  }


def identity(
    components: components_lib.Components, workdir: str, updates: int
) -> dict[str, object]:
  """Returns what distinguishes the policy after `updates` of `workdir`, and what it searches in.

  0 updates: the untrained policy. Choice: not the passages of a server.
  """
  config = components.config
  weights = hosts.by_writer(checkpoint.fingerprint, workdir, updates) if updates else ''
  base = hosts.by_writer(hf_config.fingerprint, prepare.model_folder(config))
  passages = components.passages_digest
  return {'updates': updates or None, 'weights': weights, 'folder': base, 'passages': passages}


def _played_by(config: Config, names: Iterable[str]) -> list[str]:
  """Returns the settings among `names` that episodes depend on."""
  free = {path for path, rules, _ in validation.fields(config) if rules.resume_safe}
  free |= _NOT_PLAYED_BY
  return [name for name in names if name not in free and name.split('.')[0] not in free]


def _check_trained(config: Config, workdir: str) -> None:
  """Raises a UserError unless `workdir` holds a checkpoint that fits; warns of other settings."""
  if not workdir_lib.has_checkpoint_folder(workdir):
    raise UserError(
        f'--workdir={workdir!r} has no checkpoint: give the folder of a run, or '
        '--config.train.updates=0 for the untrained model'
    )
  differences = workdir_lib.differences(workdir, dataclasses.asdict(config))
  if wrong := [text for name, text in differences.items() if name in _SHAPES]:
    raise UserError(
        f'--workdir={workdir!r} was trained with another config, and its checkpoint does not fit: '
        f'{", ".join(wrong)}. Give the --config of its training, or only --workdir'
    )
  if others := [differences[name] for name in _played_by(config, differences)]:
    logging.warning('the scores use other settings than the run: %s', ', '.join(others))


def _check_sources(config: Config, workdir: str, sources: dict[str, str]) -> None:
  """Warns of plug-ins and models that have changed since `workdir` was trained.

  `sources` is as in `components.sources`. UserError: adapters would be added to other weights.
  """
  for field in hosts.by_writer(workdir_lib.changed_plugins, workdir, sources):
    changed = f'what config.{field} names has changed since {workdir} was trained'
    is_base = field == 'model.folder' and config.model.lora_rank
    if is_base and not config.train.accept_changed_plugins:
      raise UserError(
          f'{changed}, and the adapters of the run belong to the former weights: restore them, or '
          'give --config.train.accept_changed_plugins'
      )
    logging.warning('%s: the new one is used', changed)


def _check_model(config: Config, workdir: str) -> None:
  """Does `_check_sources` for the model that the policy started from."""
  folder = prepare.model_folder(config)
  _check_sources(config, workdir, {'model.folder': hf_config.fingerprint(folder)})


def policy(
    config: Config, workdir: str, all_policies: bool = False, is_run: bool = False
) -> Policy:
  """Loads the policy of the checkpoint that config.eval.checkpoint names.

  Without checkpoints in `workdir`, loads the model of config.model.folder. If `is_run`, this needs
  config.train.updates=0, as in `load`. If each role has its own policy, loads that of
  config.serve.role, or those of `all_policies`.
  """
  validation.validate(config)
  is_needed = is_run and config.train.updates
  if not is_needed and not workdir_lib.has_checkpoint_folder(workdir):
    return _untrained(config, all_policies)
  _check_trained(config, workdir)
  _check_model(config, workdir)
  return _trained(config, workdir, all_policies)


def _untrained(config: Config, all_policies: bool) -> Policy:
  place = functools.partial(sharding.tree_shardings, mesh=sharding.mesh_of(config.mesh))
  model, params = prepare.load_policy(config, shardings=place)
  number = len(_policies(config)) if all_policies else 1
  return Policy(model, _one_or_list([params] * number), 0, f'{config.model.folder}, untrained')


def _trained(config: Config, workdir: str, all_policies: bool) -> Policy:
  models, actors, updates = _read(config, workdir)
  description = f'{workdir} after {updates} updates'
  roles = list(actors)
  if len(roles) > 1 and not all_policies:
    role = config.serve.role or roles[0]
    if role not in actors:
      raise UserError(
          f'config.serve.role={role!r}: the roles of {workdir} with a policy are {", ".join(roles)}'
      )
    roles = [role]
    description += f', role {role}'
  policies = [models.frozen.policy(actors[role]) for role in roles]
  return Policy(models.model, _one_or_list(policies), updates, description)


def _one_or_list(values):
  return values[0] if len(values) == 1 else values


def _policies(config: Config) -> tuple[str, ...]:
  """Returns `EnvFactory.policies`. Imports the environment only if each role has a policy."""
  if config.model.role_parameters == 'shared':
    return ('',)
  return components_lib.resolve(config).env.policies('own')


def _read(config: Config, workdir: str) -> tuple[learner_lib.Models, dict[str, dict], int]:
  """Returns (models, {policy: its trained parameters}, updates): see `EnvFactory.policies`.

  Nothing else of the checkpoint is read. The models hold the frozen parameters, and shapes.
  """
  place = functools.partial(sharding.tree_shardings, mesh=sharding.mesh_of(config.mesh))
  variant = objective.make_variant(config)

  def load_model(config, head, folder=None, unused_memory_kind=None):
    if config.model.lora_rank and head != 'value':  # the base is in no checkpoint
      return prepare.load_policy(config, head, folder, place, variant.value_labels)
    model = prepare.load_shape(config, head, folder, variant.value_labels)
    return model, decoder.shapes(model)

  models = learner_lib.load(config, variant, load_model, make=jax.eval_shape)
  like = sharding.placed(models.actor, place(models.actor))
  policies = _policies(config)
  wanted = {'actor': like}
  if len(policies) > 1:
    wanted = {name: {'actor': like} for name in policies}
  restored, updates = recovery.restore_part(workdir, wanted, config.eval.checkpoint)
  if updates is None:
    raise UserError(f'--workdir={workdir!r} has no whole checkpoint yet: let the run continue')
  if len(policies) == 1:
    return models, {'': restored['actor']}, updates
  return models, {name: restored[name]['actor'] for name in policies}, updates


def export(config: Config, workdir: str) -> str:
  """Writes the policy of a checkpoint of `workdir` as a Hugging Face folder; returns its path.

  Adapters are merged into the weights, and a value head is left out. If config.model.folder is in
  bfloat16, the weights are rounded to it. If each role has its own parameters, each has a folder in
  that path.
  """
  validation.validate(config)
  if not workdir_lib.has_checkpoint_folder(workdir):
    raise UserError(
        f'--workdir={workdir!r} has no checkpoint to export: give the folder of a run, with '
        'the --config of its training'
    )
  _check_trained(config, workdir)
  _check_model(config, workdir)
  models, actors, updates = _read(config, workdir)
  folder = os.path.join(workdir, 'export')
  source = prepare.model_folder(config)
  dtype = hf_export.dtype_to_write(source, config.model.param_dtype)
  bare = dataclasses.replace(models.model, head='tokens')
  ends = prepare.load_tokenizer(config).eos_ids
  for role, actor in actors.items():
    params = actor
    if config.model.lora_rank:
      from stppo_jax.models import lora

      merge = jax.jit(lora.merge, static_argnums=2, donate_argnums=0 if not role else ())
      params = merge(models.frozen.actor, actor, bare.lora_scale)
    hf_export.save_hf(os.path.join(folder, role), bare, params, source, dtype=dtype, eos_ids=ends)
    if hosts.is_writer():
      add_chat_template(config, os.path.join(folder, role))
  logging.info('the policy after %d updates is in %s, as %s', updates, folder, dtype)
  return folder


def add_chat_template(config: Config, folder: str) -> None:
  """Adds the embedded model's chat template to a folder. Other models have a template."""
  if config.model.folder == 'embedded':
    shutil.copyfile(prepare.EMBEDDED_TEMPLATE, os.path.join(folder, 'chat_template.jinja'))
