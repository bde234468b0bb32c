"""The rules of config.env.mix: several environments in one run.

An environment of a mix is a config of its own. It is that of the run, in which the settings of the
item replace those of config.env and config.data. So the rules of a run with this environment alone
hold for it.
"""

from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import math
import re
import typing
from typing import Any
from typing import NamedTuple

from stppo_jax.algorithms.variants import Variant
from stppo_jax.config import Config
from stppo_jax.config import DataSettings
from stppo_jax.config import EnvSettings
from stppo_jax.types import Episode
from stppo_jax.types import hint
from stppo_jax.types import shown
from stppo_jax.types import UserError

_OWN_KEYS = ('name', 'share', 'weight', 'data')
_NAME = re.compile(r'[A-Za-z_][\w-]*')
_RESERVED = ('all', 'macro')  # parts of the names of held-out scores


class MixEnvironment(NamedTuple):
  """An environment of a mix."""

  name: str
  share: float  # relative to the other shares, the questions that it has in a batch
  weight: float  # multiplies the policy's loss of its tokens
  config: Config  # a run with this environment alone has it


def environments(config: Config) -> list[MixEnvironment]:
  """Returns the environments of a mix. UserError: an item has unknown keys or wrong values."""
  items = enumerate(config.env.mix)
  return [_environment(config, f'config.env.mix[{i}]', item) for i, item in items]


def check(config: Config) -> None:
  """Checks what a run with one environment does not have: names, shares and weights."""
  kind = config.env.kind
  if kind != EnvSettings().kind:
    raise UserError(
        f'config.env.kind={kind!r} is one environment, and config.env.mix names several: leave out '
        'one of them, or write this one into the mix'
    )
  if config.rollout.allocation != 'even':
    raise UserError(
        f'config.rollout.allocation={config.rollout.allocation!r} would move episodes from one '
        'environment of config.env.mix to another: set it to even'
    )
  members = environments(config)
  names = [member.name for member in members]
  for name in names:
    count = names.count(name)
    if count > 1:
      raise UserError(
          f"config.env.mix: {count} environments are called {name!r}: give each its own 'name'"
      )
  for member in members:
    if member.config.env.is_program:
      raise UserError(
          f'config.env.mix: {member.name} is an agent program ({member.config.env.kind!r}), which '
          'writes its own prompts: train it in a run of its own, with --config.env.kind'
      )
  questions_per_batch(config)


def check_variant(config: Config, variant: Variant) -> None:
  """Checks that the objective has weights of tokens."""
  weights = {member.name: member.weight for member in environments(config)}
  if variant.compares_rows and set(weights.values()) != {1}:
    raise UserError(
        f'config.env.mix has the weights {weights}, which multiply the loss of tokens, and '
        f'config.algorithm.variant={config.algorithm.variant!r} compares rows instead: leave out '
        "'weight'"
    )


def questions_per_batch(config: Config) -> dict[str, int]:
  """Returns the number of questions of each environment in a batch.

  Choice: the shares of a batch are exact, so UserError where they give no whole numbers.
  """
  members = environments(config)
  total = config.train.episodes // config.rollout.group_size
  whole_share = sum(member.share for member in members)
  counts = {}
  for member in members:
    exact = total * member.share / whole_share
    counts[member.name] = round(exact)
    if not math.isclose(exact, counts[member.name], rel_tol=1e-9) or not counts[member.name]:
      shares = {member.name: member.share for member in members}
      raise UserError(
          f'config.env.mix has the shares {shares}, which divide the {total} questions of a batch '
          f'(config.train.episodes / config.rollout.group_size) into {exact:.3g} of {member.name}: '
          'give shares that make whole numbers, or another config.train.episodes'
      )
  return counts


def weigh(config: Config, episodes: Sequence[Episode]) -> None:
  """Gives each episode the weight of its environment. UserError: it belongs to none of the mix."""
  weights = {member.name: member.weight for member in environments(config)}
  for episode in episodes:
    name = episode.task.environment
    if name not in weights:
      raise UserError(
          f'an episode on question {episode.task.id!r} belongs to the environment {name!r}, and '
          f'config.env.mix has {", ".join(weights)}: give batches that were sampled with this mix'
      )
    episode.weight = weights[name]


def _environment(config: Config, given: str, item: Mapping[str, Any]) -> MixEnvironment:
  """Returns an environment. `given` is how an error shows the item."""
  env_kinds = typing.get_type_hints(EnvSettings)
  known = [*_OWN_KEYS, *(name for name in env_kinds if name != 'mix')]
  for key in item:
    if key not in known:
      near = hint(str(key), known) or f'; there are {", ".join(known)}'
      raise UserError(f'{given} has no setting {key!r}{near}')
  kind = item.get('kind')
  if not isinstance(kind, str):
    raise UserError(f"{given}={shown(item)}: give 'kind', as config.env.kind names an environment")
  name = item.get('name', kind.rpartition(':')[2])
  if not isinstance(name, str) or not _NAME.fullmatch(name) or name in _RESERVED:
    raise UserError(
        f'{given}: the environment is called {name!r}. Its metrics need a name that begins with a '
        f"letter and has letters, digits, _ and -, other than {' and '.join(_RESERVED)}: give it "
        "another 'name'"
    )
  settings = {key: value for key, value in item.items() if key not in _OWN_KEYS}
  for key, value in settings.items():
    if typing.get_origin(env_kinds[key]) is tuple and isinstance(value, list):
      settings[key] = tuple(value)  # JSON has no tuples
  env = dataclasses.replace(config.env, mix=(), **settings)
  data = config.data
  if 'data' in item:
    data = _data(config.data, given, item['data'])
  return MixEnvironment(
      name=name,
      share=_positive(given, item, 'share'),
      weight=_positive(given, item, 'weight'),
      config=dataclasses.replace(config, env=env, data=data),
  )


def _data(run: DataSettings, given: str, value: object) -> DataSettings:
  """Returns config.data of an environment with questions of its own.

  The passages are those of the run. What selects among its questions belongs to its own source.
  """
  fields = {'source': value} if isinstance(value, str) else value
  known = [field.name for field in dataclasses.fields(DataSettings) if field.name != 'corpus']
  if not isinstance(fields, Mapping) or not set(fields) <= set(known):
    raise UserError(
        f"{given}: 'data' is {shown(value)}: give a name as for config.data.source, or a dict of "
        f'{", ".join(known)}'
    )
  own: dict[str, Any] = {'train_split': run.train_split, 'eval_split': run.eval_split}
  own |= fields
  if isinstance(own.get('datasets'), list):
    own['datasets'] = tuple(own['datasets'])
  return DataSettings(corpus=run.corpus, **own)


def _positive(given: str, item: Mapping[str, Any], key: str) -> float:
  """Returns a number of an item, 1 by default."""
  number = item.get(key, 1)
  if type(number) not in (int, float) or not 0 < number < math.inf:
    raise UserError(f'{given}: {key!r} is {shown(number)}: a number above 0 is needed')
  return number
