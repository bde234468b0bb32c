"""Checks a config: each field by its own rules, then the rules that span fields.

`validate` is called once, before anything heavy; `check_variant` right after it, when the names of
the objective are resolved. An error is one line: given, allowed, what to do. The rules of optional
parts are in sections/, and the tables below say which setting imports them.
"""

from collections.abc import Callable
from collections.abc import Iterator
import contextlib
import dataclasses
import json
import math
import operator
import re
import typing
from typing import Any

from stppo_jax import plugins
from stppo_jax.algorithms.variants import Variant
from stppo_jax.config import ADDRESS
from stppo_jax.config import Config
from stppo_jax.config import EvalSettings
from stppo_jax.config import LORA_TARGETS
from stppo_jax.config import OptimizerSettings
from stppo_jax.config import TeacherSettings
from stppo_jax.types import described
from stppo_jax.types import hint
from stppo_jax.types import is_of
from stppo_jax.types import Rules
from stppo_jax.types import UserError

FREE_DICTS = ('env.options', 'algorithm.options', 'model.chat_template_kwargs')  # others' names


def fields(config: Any, prefix: str = '') -> Iterator[tuple[str, Rules, Any]]:
  """Yields (dotted path, rules, value) of every setting."""
  for field in dataclasses.fields(config):
    path = prefix + field.name
    value = getattr(config, field.name)
    kind: Any = field.type
    if 'rules' in field.metadata:
      yield path, field.metadata['rules'], value
    elif isinstance(value, kind):
      yield from fields(value, path + '.')
    else:
      raise UserError(f'config.{path}={value!r}: must be a {kind.__name__} of config.py')


def kinds(section: Any = Config, prefix: str = '') -> dict[str, Any]:
  """Returns {dotted path: annotated type} of every setting."""
  kind_by_path: dict[str, Any] = {}
  for field in dataclasses.fields(section):
    path = prefix + field.name
    if 'rules' in field.metadata:
      kind_by_path[path] = field.type
    else:
      kind_by_path |= kinds(field.type, path + '.')
  return kind_by_path


def changeable_on_resume(config: Config, with_critic: bool = True) -> list[str]:
  """Returns the paths of the settings that a resumed run of `config` may change.

  The number of updates is not among them if the schedule of a learning rate depends on it.
  """
  has_schedule = _has_schedule(config.actor) or (with_critic and _has_schedule(config.critic))
  updates_are_fixed = has_schedule and not config.train.schedule_updates
  paths = []
  for path, rules, _ in fields(config):
    if path == 'train.updates' and updates_are_fixed:
      continue
    if rules.resume_safe or rules.resume_allowed:
      paths.append(path)
  return paths


def has_critic(config: Config, variant: Variant) -> bool:
  """Returns whether a critic with a separate optimizer is trained."""
  return variant.needs_critic and config.model.critic == 'separate'


def has_shared_critic(config: Config, variant: Variant) -> bool:
  """Returns whether the critic is a second head on the policy's trunk."""
  return variant.needs_critic and config.model.critic == 'shared'


def _has_schedule(optimizer: OptimizerSettings) -> bool:
  return bool(optimizer.lr) and (optimizer.warmup > 0 or optimizer.final_lr < 1)


def _names_folders(config):
  return bool(config.train.checkpoint_folder or config.rollout.engine_folder)


def _has_engines(config):
  return bool(config.rollout.engine or config.rollout.engine_shares_devices)


_LONGEST_SHOWN = 500  # characters of a rejected value

# Rules of optional parts: whether a config has the part -> the function in sections/.
_CONFIG_SECTIONS: tuple[tuple[Callable[[Config], bool], str], ...] = (
    (_has_engines, 'engine:check'),
    (lambda config: bool(config.rollout.demonstrations), 'demonstrations:check'),
    (lambda config: config.rollout.allocation != 'even', 'allocation:check'),
    (lambda config: bool(config.data.columns), 'data_columns:check'),
    (lambda config: bool(config.env.mix), 'mix:check'),
    (_names_folders, 'folders:check'),
)
# The same for rules that also read the objective.
_VARIANT_SECTIONS: tuple[tuple[Callable[[Config, Variant], bool], str], ...] = (
    (lambda config, variant: variant.value_loss == 'hl_gauss', 'value_bins:check'),
    (lambda config, variant: config.teacher.is_given, 'teacher:check'),
    (lambda config, variant: bool(config.rollout.demonstrations), 'demonstrations:check_variant'),
    (lambda config, variant: variant.compares_rows, 'row_objective:check'),
    (lambda config, variant: bool(config.env.mix), 'mix:check_variant'),
)


def validate(config: Config) -> Config:
  """Returns `config` if it is valid, else raises a UserError that says what to change."""
  check_section('config.', config)
  _check_branch_credit(config)
  _check_environment(config)
  _check_roles(config)
  _check_replay(config)
  _check_address('eval', config.eval)
  _check_address('teacher', config.teacher)
  _check_sizes(config)
  _check_sections(_CONFIG_SECTIONS, config)
  _check_adapters(config)
  _check_mix(config)
  return config


def _check_mix(config):
  """Checks each environment of a mix as a run with this environment alone."""
  if not config.env.mix:
    return
  environments = plugins.resolve('stppo_jax.settings.sections.mix:environments')
  for member in environments(config):
    with explain(member.name):
      validate(member.config)


@contextlib.contextmanager
def explain(name: str) -> Iterator[None]:
  """Context manager in which errors name an environment of config.env.mix."""
  try:
    yield
  except UserError as error:
    raise UserError(f'{name} of config.env.mix: {error}') from error


def _check_sections(sections, *given):
  """Calls the rules of the optional parts that a config has."""
  for is_present, rule in sections:
    if is_present(*given):
      check = plugins.resolve(f'stppo_jax.settings.sections.{rule}')
      check(*given)


def check_section(prefix: str, section: Any) -> None:
  """Raises a UserError for the first field of a section that breaks its rules."""
  annotated = kinds(type(section))
  for path, rules, value in fields(section):
    _check_field(f'{prefix}{path}={value!r}', rules, value, annotated[path])


def _check_field(given: str, rules: Rules, value: Any, kind: object = Any) -> None:
  """Checks a value; `given` is how the message shows it."""
  if len(given) > _LONGEST_SHOWN:
    given = given[:_LONGEST_SHOWN] + '..'
  if value is None and (kind is Any or type(None) in typing.get_args(kind)):
    return
  is_plugin = rules.plugin and isinstance(value, str) and ':' in value
  if rules.allowed and value not in rules.allowed and not is_plugin:
    or_plugin = ', or module:attribute' if rules.plugin else ''
    allowed = [str(name) for name in rules.allowed]
    raise UserError(
        f'{given}: allowed are {", ".join(allowed)}{or_plugin}{hint(str(value), allowed)}'
    )
  is_tuple = isinstance(value, tuple)
  if rules.items and is_tuple and not all(item in rules.items for item in value):
    raise UserError(
        f'{given}: allowed are one or more of {", ".join(rules.items)}, as in '
        f'"({rules.items[0]!r}, {rules.items[-1]!r})"'
    )
  items = value if is_tuple else (value,)
  for number in items:
    if type(number) in (int, float):
      _check_bounds(given, rules, number)
  if not is_of(value, kind):
    not_this = '' if is_tuple else f', not {type(value).__name__}'
    raise UserError(f'{given}: must be {described(kind)}{not_this}')
  if isinstance(value, dict):
    _check_json(given, value)
  if rules.finite and not all(math.isfinite(x) for x in items if isinstance(x, float)):
    raise UserError(f'{given}: must be finite')


def _check_json(given: str, options: dict[str, object]) -> None:
  """Checks that config.json can hold a dict."""
  try:
    text = json.dumps(options)
  except (TypeError, ValueError) as error:
    raise UserError(f'{given}: numbers, texts, lists and dicts are allowed ({error})') from error
  if json.loads(text).keys() != options.keys():
    raise UserError(f'{given}: must be a dict with names as keys')


def _check_bounds(given: str, rules: Rules, number: float) -> None:
  bounds = (
      ('at least', operator.ge, rules.at_least),
      ('at most', operator.le, rules.at_most),
      ('above', operator.gt, rules.above),
      ('below', operator.lt, rules.below),
  )
  for words, holds, bound in bounds:
    if bound is not None and not holds(number, bound):  # never holds for NaN
      raise UserError(f'{given}: must be {words} {bound}')


def _check_environment(config: Config) -> None:
  """Checks settings of the environment and its retriever that need each other."""
  retriever = config.retriever
  if retriever.kind in ('dense', 'hybrid') and not retriever.encoder:
    raise UserError(
        f'config.retriever.kind={retriever.kind!r} needs a text encoder: set '
        '--config.retriever.encoder=FOLDER, a model such as e5-base-v2 in Hugging Face format'
    )
  if config.env.mix:  # each of its environments is checked alone
    return
  kind = config.env.kind
  tools = config.env.tools
  if kind == 'tools' and not tools:
    raise UserError(
        "config.env.kind='tools' needs tools: name some, as in "
        "--config.env.tools=\"('calculator', 'search')\""
    )
  searches = 'search' in tools or (kind == 'search' and config.env.max_searches)
  if retriever.kind == 'none' and searches:
    raise UserError(
        "config.retriever.kind='none' leaves nothing to search: give another retriever or "
        "environment, set --config.env.max_searches=0 (closed-book), or take 'search' out of "
        'config.env.tools'
    )


def _check_branch_credit(config: Config) -> None:
  """Checks that a program can post the rewards of its agents."""
  credit = config.env.branch_credit
  if credit != 'episode' and not config.env.kind.startswith('gateway:'):
    raise UserError(
        f'config.env.branch_credit={credit!r} needs an agent program that posts rewards, and '
        f"config.env.kind={config.env.kind!r} is none: use 'gateway:..', or branch_credit='episode'"
    )


def _check_roles(config: Config) -> None:
  """Checks settings that depend on the number of policies."""
  is_shared = config.model.role_parameters == 'shared'
  if config.serve.role and is_shared:
    raise UserError(
        f"config.serve.role={config.serve.role!r}: with config.model.role_parameters='shared' one "
        'policy plays all roles: leave it empty'
    )
  if config.rollout.engine and not is_shared:
    raise UserError(
        f'config.rollout.engine={config.rollout.engine!r}: an engine holds one policy: set '
        '--config.model.role_parameters=shared'
    )


def check_one_policy(config: Config) -> None:
  """Raises a UserError if several policies are trained, which no plan can be made for."""
  if config.model.role_parameters == 'own':
    raise UserError(
        "config.model.role_parameters='own': a plan is of one policy. Plan with 'shared', and "
        'count parameters and optimizers once per role'
    )


def _check_replay(config: Config) -> None:
  """Checks that nothing is set for sampling if saved batches are replayed."""
  rollout = config.rollout
  samples = rollout.engine or rollout.demonstrations or rollout.allocation != 'even'
  if rollout.replay and samples:
    raise UserError(
        f'config.rollout.replay={rollout.replay!r} samples nothing: leave it out, or leave out '
        'config.rollout.engine, demonstrations and allocation'
    )


def _check_address(name: str, section: EvalSettings | TeacherSettings) -> None:
  """Checks the address of a server with a model, in a section of the config."""
  address = section.address
  model = section.model
  if address and not re.fullmatch(ADDRESS, address):
    raise UserError(
        f'config.{name}.address={address!r}: give http://HOST:PORT/v1 or https://HOST/v1'
    )
  if bool(address) != bool(model):
    raise UserError(
        f'config.{name}.address={address!r} and config.{name}.model={model!r} need each other: '
        'give the name of a model at an address'
    )


def _check_sizes(config: Config) -> None:
  """Checks numbers that have to divide or to bound each other."""
  rollout = config.rollout
  train = config.train
  for small, large in (('micro_batch', 'mini_batch'), ('mini_batch', 'episodes')):
    if getattr(train, small) and getattr(train, large) % getattr(train, small):
      raise UserError(
          f'config.train.{small}={getattr(train, small)} does not divide config.train.{large}='
          f'{getattr(train, large)}: choose a divisor'
      )
  if train.episodes % rollout.group_size:
    raise UserError(
        f'config.rollout.group_size={rollout.group_size} does not divide config.train.episodes='
        f'{train.episodes}: choose a divisor'
    )
  buckets = train.length_buckets
  if not buckets or list(buckets) != sorted(set(buckets)) or buckets[-1] < rollout.max_total:
    raise UserError(
        f'config.train.length_buckets={buckets}: must rise and end at config.rollout.max_total='
        f'{rollout.max_total} or above'
    )
  if not rollout.chunks:
    raise UserError(f'config.rollout.chunks={rollout.chunks}: give one number or more')
  if rollout.max_prompt + rollout.max_turn > rollout.max_total:
    raise UserError(
        f'config.rollout.max_total={rollout.max_total}: must hold at least max_prompt + max_turn = '
        f'{rollout.max_prompt + rollout.max_turn}'
    )
  if train.on_nonfinite == 'rollback' and not train.checkpoint_every:
    raise UserError(
        "config.train.on_nonfinite='rollback' needs checkpoints to go back to, and "
        'config.train.checkpoint_every=0: set --config.train.checkpoint_every=1 or more'
    )


def check_variant(config: Config, variant: Variant) -> None:
  """Checks the fields of the resolved objective, then the rules that span fields and sections."""
  kind_by_name = kinds(type(config.algorithm))
  for field, rules, _ in fields(config.algorithm):
    if field != 'options' and not rules.plugin:
      value = getattr(variant, field)
      _check_field(f'config.algorithm.{field}={value!r}', rules, value, kind_by_name[field])
  rollout = config.rollout
  name = config.algorithm.variant
  sees_sampler = variant.old_logp == 'sampler' and variant.ratio != 'none'
  if config.rollout.is_cut and not sees_sampler:
    raise UserError(
        f'config.rollout.top_p={rollout.top_p}, top_k={rollout.top_k} truncate the distribution '
        "that is sampled from, which only a ratio to the sampler's log-probs reflects: set top_p=1 "
        'and top_k=0, or --config.algorithm.old_logp=sampler and a ratio'
    )
  if variant.extrapolation and rollout.engine:
    raise UserError(
        f'config.algorithm.extrapolation={variant.extrapolation} samples with other parameters '
        'than those that are evaluated, and engines hold one version: leave '
        'config.rollout.engine empty'
    )
  if variant.dual_clip and not variant.dual_clip > 1:
    raise UserError(
        f'config.algorithm.dual_clip={variant.dual_clip}: must be above 1, or 0 for off'
    )
  for field in ('rollout_is', 'rollout_rs'):
    if getattr(variant, field) != 'none' and variant.old_logp == 'sampler':
      raise UserError(
          f'config.algorithm.{field}={getattr(variant, field)!r} bridges the sampler to the '
          "trainer's old_logp, and old_logp='sampler' leaves no gap: set "
          f'--config.algorithm.{field}=none, or --config.algorithm.old_logp=trainer'
      )
  _check_teacher(config, variant)
  _check_kl(config, variant)
  _check_groups(config, variant)
  _check_sections(_VARIANT_SECTIONS, config, variant)
  _check_ratio(config, variant)
  _check_decay(config)
  _check_health(config, variant)
  if config.model.critic == 'shared' and config.model.critic_folder:
    raise UserError(
        f'config.model.critic_folder={config.model.critic_folder!r} needs a separate critic: leave '
        'it out, or set --config.model.critic=separate'
    )
  if config.train.critic_warmup and not has_critic(config, variant):
    without = 'has no critic' if not variant.needs_critic else "shares its critic's trunk"
    raise UserError(
        f'config.train.critic_warmup={config.train.critic_warmup} trains a separate critic alone, '
        f'and config.algorithm.variant={name!r} {without}: set --config.train.critic_warmup=0'
    )


def _check_teacher(config: Config, variant: Variant) -> None:
  """Checks the teacher of on-policy distillation, and the variant that has no other advantage."""
  teacher = config.teacher
  if teacher.folder and teacher.address:
    raise UserError(
        f'config.teacher.folder={teacher.folder!r} and config.teacher.address='
        f'{teacher.address!r} are two teachers: give one of them'
    )
  if variant.advantage == 'grao' and not hasattr(variant, 'grao_beta'):
    raise UserError(
        "config.algorithm.advantage='grao' reads weights that only the algorithm grao has: set "
        '--config.algorithm.variant=grao'
    )
  if variant.advantage == 'none' and not teacher.is_given:
    raise UserError(
        f'config.algorithm.variant={config.algorithm.variant!r} has no advantage but that of a '
        'teacher: set --config.teacher.folder or --config.teacher.address'
    )


def _check_kl(config: Config, variant: Variant) -> None:
  """Checks the KL penalty and its adaptive weight."""
  if variant.kl_in == 'loss' and variant.kl_estimator == 'k1' and not variant.kl_ratio:
    raise UserError(
        "config.algorithm.kl_estimator='k1' in the loss has a gradient that does not depend on the "
        'reference: set --config.algorithm.kl_ratio=True, or --config.algorithm.kl_estimator=k3'
    )
  if variant.kl_target and not variant.kl_coef:
    raise UserError(
        f'config.algorithm.kl_target={variant.kl_target} multiplies kl_coef, and 0 stays 0: set '
        '--config.algorithm.kl_coef'
    )


def _check_decay(config: Config) -> None:
  """Checks that decaying rates have updates to decay in."""
  updates = config.train.schedule_updates or config.train.updates
  for name, waits in (('actor', config.train.critic_warmup), ('critic', 0)):
    options = getattr(config, name)
    if options.final_lr != 1 and updates and options.warmup * updates + waits >= updates:
      raise UserError(
          f'config.{name}.final_lr={options.final_lr:g} is never reached: warmup='
          f'{options.warmup:g} after critic_warmup={waits} of {updates} updates leaves none to '
          f'decay in: lower them, or set --config.{name}.final_lr=1'
      )


def _check_health(config: Config, variant: Variant) -> None:
  """Checks that the limits that end a run are measured."""
  for name in config.health.stop_on:
    if not getattr(config.health, name):
      raise UserError(
          f'config.health.stop_on names {name!r}, and config.health.{name}=0 turns this limit off: '
          f'leave it out, or set --config.health.{name}'
      )
    if name == 'kl' and variant.kl_in == 'none':
      raise UserError(
          "config.health.stop_on names 'kl', and config.algorithm.kl_in='none' measures no KL to "
          'a reference: leave it out, or set --config.algorithm.kl_in=loss or reward'
      )


def _check_ratio(config: Config, variant: Variant) -> None:
  """Checks settings that need a certain ratio or surrogate."""
  if variant.dual_clip and variant.surrogate != 'clip':
    raise UserError(
        f'config.algorithm.dual_clip={variant.dual_clip:g} needs the surrogate clip, and this '
        f'surrogate is {variant.surrogate!r}: set --config.algorithm.dual_clip=0'
    )
  if variant.min_advantage == 'turn' and variant.ratio in ('none', 'token'):
    raise UserError(
        "config.algorithm.min_advantage='turn' takes the mean over the tokens that share a ratio, "
        f'and with ratio={variant.ratio!r} no two do: set --config.algorithm.ratio=turn or '
        'sequence, or --config.algorithm.min_advantage=token'
    )
  if variant.surrogate in ('dppo_tv', 'dppo_kl') and variant.ratio not in ('none', 'token'):
    raise UserError(
        f'config.algorithm.surrogate={variant.surrogate!r} bounds the change of a '
        f"token's probability, and ratio={variant.described()['ratio']!r} has none: set "
        '--config.algorithm.ratio=token'
    )
  if variant.whiten and variant.surrogate == 'square':
    raise UserError(
        "config.algorithm.whiten=True would standardise the targets of surrogate='square', which "
        'regresses the log-ratio on the advantage: set --config.algorithm.whiten=False'
    )
  if variant.ratio == 'none' and variant.surrogate != 'clip':
    raise UserError(
        f'config.algorithm.variant={config.algorithm.variant!r} has a surrogate that needs a '
        'ratio, and ratio=none: set --config.algorithm.ratio=token, turn or sequence, or '
        '--config.algorithm.surrogate=clip'
    )


def _check_groups(config: Config, variant: Variant) -> None:
  """Checks settings that need groups of episodes."""
  rollout = config.rollout
  name = config.algorithm.variant
  if variant.needs_groups and rollout.group_size == 1:
    raise UserError(
        f'config.algorithm.variant={name!r} compares the episodes of a group, and '
        'config.rollout.group_size=1: set --config.rollout.group_size=4 or more'
    )
  if variant.score_norm != 'none' and config.env.is_program:
    raise UserError(
        f'config.algorithm.score_norm={variant.score_norm!r} normalises the scores of rows, and an '
        "episode of an agent program may have several: set --config.algorithm.score_norm='none'"
    )
  if variant.advantage == 'turn_zscore' and config.env.is_program:
    raise UserError(
        "config.algorithm.advantage='turn_zscore' compares turns by their numbers, and the rows of "
        'an agent program start again at 1: set --config.algorithm.advantage=group_zscore'
    )
  reads_rows = not variant.needs_groups and variant.advantage != 'none'
  if config.env.branch_credit != 'episode' and not reads_rows:
    raise UserError(
        f'config.env.branch_credit={config.env.branch_credit!r} gives the rows of an episode '
        f'different rewards, and config.algorithm.variant={name!r} reads none of single rows: '
        'use another variant, such as st_ppo, or set --config.env.branch_credit=episode'
    )
  if variant.mask_zero_advantage and (variant.kl_in == 'reward' or variant.whiten):
    raise UserError(
        f'config.algorithm.mask_zero_advantage=True would drop nothing: with kl_in='
        f'{variant.kl_in!r} and whiten={variant.whiten} no advantage is exactly 0; set '
        '--config.algorithm.kl_in=none --config.algorithm.whiten=False'
    )
  if variant.uses_demonstrations and variant.whiten:
    raise UserError(
        f'config.algorithm.whiten=True would standardise the weights of {name!r}, which are no '
        'advantages: set --config.algorithm.whiten=False'
    )
  if variant.uses_demonstrations and variant.kl_in != 'none':
    raise UserError(
        f'config.algorithm.kl_in={variant.kl_in!r} estimates the KL on tokens that the policy '
        f'sampled, and demonstrations are rows of {name!r}: set --config.algorithm.kl_in=none'
    )
  if variant.mask_zero_advantage and not variant.needs_groups:
    raise UserError(
        'config.algorithm.mask_zero_advantage=True only works with group advantages, and '
        f'config.algorithm.variant={name!r} compares no groups: set '
        '--config.algorithm.mask_zero_advantage=False'
    )
  if rollout.max_num_gen_batches > 1 and not variant.compares_scores:
    why = 'compares no groups'
    if variant.needs_groups:
      why = f'(advantage={variant.advantage!r}) learns from such groups, too'
    raise UserError(
        f'config.rollout.max_num_gen_batches={rollout.max_num_gen_batches} replaces groups whose '
        f'scores are all equal, and config.algorithm.variant={name!r} {why}: set it to 1, or '
        '--config.algorithm.variant=grpo'
    )


def _check_adapters(config: Config) -> None:
  """Checks precision and placement against LoRA and the critic."""
  model = config.model
  placement = config.placement
  if model.param_dtype == 'bfloat16' and not model.lora_rank:
    raise UserError(
        "config.model.param_dtype='bfloat16' trains almost nothing: most steps are smaller than "
        "what it resolves (1/256 of a weight) and are rounded away. Set it to 'float32', or train "
        'adapters on a frozen bfloat16 model with --config.model.lora_rank=16'
    )
  if not model.lora_targets:
    raise UserError(f'config.model.lora_targets=(): give one or more of {", ".join(LORA_TARGETS)}')
  if model.lora_rank and placement.reference == 'host' and not config.teacher.folder:
    raise UserError(
        "config.placement.reference='host': with config.model.lora_rank above 0 the reference "
        "is the policy's own base and takes no memory: set it to 'device'"
    )
  if placement.critic == 'host' and model.critic == 'shared':
    raise UserError(
        "config.placement.critic='host': with config.model.critic='shared' the critic is "
        "part of the policy, which samples: set it to 'device', or the critic to 'separate'"
    )
  if placement.critic == 'host' and model.lora_rank and not model.critic_folder:
    raise UserError(
        "config.placement.critic='host': with config.model.lora_rank above 0 the critic stands "
        "on the policy's base, which samples: set it to 'device', or give a critic_folder"
    )


def get(config: Config, path: str):
  """Returns the field at a dotted path: get(config, 'train.updates')."""
  return operator.attrgetter(path)(config)
