"""The components that a config names: environment, retriever, reward, tools, tasks and tokenizer.

A user replaces a component by naming one in the config, as in `env.kind='my_module:MyEnv'`.
`resolve` runs right after validation, so that a wrong name costs nothing. `Components.load` runs
before weights are loaded, so that a component that does not fit the model costs seconds.
"""

from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import functools
import hashlib
import os
import pathlib
import traceback
from typing import Any

from absl import logging
import jax
import numpy as np

from stppo_jax import plugins
from stppo_jax.config import Config
from stppo_jax.data import tasks as tasks_lib
from stppo_jax.distributed import hosts
from stppo_jax.envs import factory
from stppo_jax.envs import protocol
from stppo_jax.envs import rewards
from stppo_jax.models import hf_config
from stppo_jax.retrieval import kinds
from stppo_jax.retrieval import protocol as retrieval_lib
from stppo_jax.rollout import prepare
from stppo_jax.settings import validation
from stppo_jax.text import tokenizer as tokenizer_lib
from stppo_jax.types import RunError
from stppo_jax.types import Stopped
from stppo_jax.types import Task
from stppo_jax.types import UserError
from stppo_jax.types import without_surrogates

# Prefix of `env.kind` before the first ':' -> function (the rest of the name) -> environment class.
# These modules are imported when a config names them.
ADAPTERS = {
    'gem': 'stppo_jax.envs.adapters.gem:make',
    'openenv': 'stppo_jax.envs.adapters.openenv:make',
    'reasoning_gym': 'stppo_jax.envs.adapters.reasoning_gym:make',
    'textarena': 'stppo_jax.envs.adapters.textarena:make',
}
# Short name of `env.kind` -> environment class. A new built-in environment is added here.
ENVIRONMENTS = {
    'search': 'stppo_jax.envs.search:SearchEnv',
    'tools': 'stppo_jax.envs.tools:ToolEnv',
}
# Settings of JAX -> the values with which the compiled functions run. NaN and infinity are numbers
# here: an absent cosine is NaN, and steps that are not finite are skipped.
_JAX_SETTINGS: dict[str, tuple[Any, ...]] = {
    'jax_enable_x64': (False,),
    'jax_debug_nans': (False,),
    'jax_disable_jit': (False,),
    'jax_numpy_dtype_promotion': ('standard',),
    'jax_numpy_rank_promotion': ('allow', 'warn'),
    'jax_transfer_guard': ('allow', None, 'log', 'log_explicit'),
}
_MAY_BE_FILES = ('data.source', 'rollout.demonstrations')


@dataclasses.dataclass(frozen=True)
class Components:
  """The components of a config. What needs files or a server is loaded when it is first used."""

  config: Config
  env: factory.EnvFactory  # without its retriever
  make_retriever: Callable[..., Any]
  source: Callable[[str], list[Task]]  # split -> tasks

  @functools.cached_property
  def tokenizer(self) -> tokenizer_lib.Tokenizer:
    """The tokenizer of the policy."""
    return prepare.load_tokenizer(self.config, self.env.frame)

  @functools.cached_property
  def retriever(self) -> retrieval_lib.Retriever | None:
    """The retriever with its corpus, or None if the environment does not search."""
    if 'retriever' not in self.env.settings:
      return None
    data = self.config.data
    corpus = data.corpus or data.source
    columns = data.columns if corpus == data.source else {}

    def load_corpus():
      if corpus == data.source and _is_function(corpus):
        raise UserError(
            f'config.data.source={corpus!r} is a function, which brings no passages to search: set '
            '--config.data.corpus=FOLDER, or another --config.retriever.kind'
        )
      passages = tasks_lib.load_corpus(corpus, columns)
      self._loaded['passages'] = tasks_lib.digest(passages)
      return passages

    return kinds.make(self.make_retriever, self.config.retriever, load_corpus)

  @functools.cached_property
  def _loaded(self) -> dict[str, str]:
    return {}

  @property
  def passages_digest(self) -> str:
    """The digest of the passages that the retriever has read here. '': it has read none."""
    return self._loaded.get('passages', '')

  @functools.cached_property
  def env_with_retriever(self) -> factory.EnvFactory:
    """The environment class with its retriever, if it takes one."""
    return self.bind(self.retriever)

  @property
  def policies(self) -> tuple[str, ...]:
    """The names of the policies that are trained, see `EnvFactory.policies`."""
    return self.env.policies(self.config.model.role_parameters)

  @functools.cached_property
  def tasks(self) -> list[Task]:
    """The tasks to train on."""
    return self.load_tasks(self.config.data.train_split)

  @functools.cached_property
  def held_out(self) -> list[Task]:
    """The tasks to evaluate on: a fixed sample of the split, or all of it."""
    tasks = self.load_tasks(self.config.data.eval_split)
    number = self.config.eval.episodes or len(tasks)
    order = np.random.default_rng(0).permutation(len(tasks))[:number]
    return [tasks[i] for i in sorted(order)]

  @functools.cached_property
  def have_several_answers(self) -> bool:
    """Whether a task of the run has several answers."""
    for name in ('tasks', 'held_out'):
      try:
        tasks = getattr(self, name)
      except (RunError, Stopped):
        raise
      except Exception:  # a run may have only one of the splits, and reports an error of that one
        continue
      if any(len(task.answers) > 1 for task in tasks):
        return True
    return False

  def load(self) -> 'Components':
    """Loads the tokenizer and the retriever, and returns itself. No weights are read.

    UserError: a component does not fit the model's config.json, or the retriever does not answer.
    """
    prepare.check_positions(self.config)
    for frame in self.env.frames:
      prepare.check_tokenizer(self.config, self.tokenizer, frame)
    if self.config.env.kind == 'tools' and self.config.model.folder == 'embedded':
      logging.warning(
          'the embedded model was not trained to call tools, and will hardly call one: '
          '--config=examples/calculator/config.py has a small model that does'
      )
    check = getattr(self.retriever, 'check_server', None)
    if check is not None and self.config.retriever.max_failed_share < 1:  # else no failure matters
      hosts.by_writer(check, self.config.retriever.top_k)
    return self

  def check_prompts(self, tasks: Sequence[Task]) -> None:
    """Encodes prompts of tasks and logs how many are too long. UserError: all of them."""
    prepare.check_prompts(self.config, self.env_with_retriever, self.tokenizer, tasks)

  def bind(self, retriever: retrieval_lib.Retriever | None) -> factory.EnvFactory:
    """Returns the environment class with its retriever, if it takes one."""
    if 'retriever' not in self.env.settings:
      return self.env
    return dataclasses.replace(self.env, settings={**self.env.settings, 'retriever': retriever})

  def load_tasks(self, split: str) -> list[Task]:
    """Returns the tasks of a split that `config.data.datasets` and `max_hops` select."""
    data = self.config.data
    source = self.source
    has_own_tasks = False
    if data.source == 'embedded' and self.env.load_tasks is not None:
      has_own_tasks = True
      given = f'config.env.kind={self.config.env.kind!r}, its load_tasks'
      source = _checked(given, self.env.load_tasks, may_share_ids=True)
    tasks = [without_surrogates(task) for task in source(split)]
    if data.max_hops and not (tasks := [task for task in tasks if task.hops <= data.max_hops]):
      raise UserError(
          f'config.data.max_hops={data.max_hops} leaves no question of the split {split!r}: '
          'give a larger number, or 0 for all questions'
      )
    known = sorted({task.dataset for task in tasks})
    if has_own_tasks and set(data.datasets) <= _embedded_datasets() - set(known):
      return tasks  # data.datasets names those of the embedded questions
    if missing := sorted(set(data.datasets) - set(known)):
      raise UserError(
          f'config.data.datasets names {", ".join(missing)}: the split {split!r} has '
          f'{", ".join(known)}, to be given as "(\'{known[0]}\',)"; "()" keeps all of them'
      )
    return [task for task in tasks if not data.datasets or task.dataset in data.datasets]


@dataclasses.dataclass(frozen=True)
class MixComponents(Components):
  """The components of config.env.mix: those of each environment, as of a run with it alone.

  The environments share the tokenizer and the retriever.
  """

  environments: Mapping[str, Components] = dataclasses.field(default_factory=dict)

  @functools.cached_property
  def retriever(self) -> retrieval_lib.Retriever | None:
    """The retriever of the environments that search, or None. UserError: they need several."""
    searching = {name: own for name, own in self.environments.items() if _searches(own)}
    if not searching:
      return None
    data = [own.config.data for own in searching.values()]
    sources = {settings.corpus or settings.source for settings in data}
    if len(sources) > 1 and self.config.retriever.kind != 'http':
      raise UserError(
          f'config.env.mix: {", ".join(searching)} search in the passages of different data, and a '
          'run has one retriever: name all passages in config.data.corpus'
      )
    return next(iter(searching.values())).retriever

  @property
  def passages_digest(self) -> str:
    """See `Components.passages_digest`. The environments share the retriever of the first."""
    return ''.join(own.passages_digest for own in self.environments.values())

  @functools.cached_property
  def tasks(self) -> list[Task]:
    """The tasks to train on: those of each environment."""
    return self._tag_all(lambda own: own.tasks)

  @functools.cached_property
  def held_out(self) -> list[Task]:
    """The tasks to evaluate on: those of each environment."""
    return self._tag_all(lambda own: own.held_out)

  def load(self) -> 'MixComponents':
    """See `Components.load`. Logs what a batch consists of."""
    super().load()
    counts = mix_rules().questions_per_batch(self.config)
    texts = [f'{number} of {name}' for name, number in counts.items()]
    logging.info('questions of a batch: %s', ', '.join(texts))
    return self

  def check_prompts(self, tasks: Sequence[Task]) -> None:
    """See `Components.check_prompts`: no environment may have only prompts that are too long."""
    for name in self.environments:
      own_tasks = [task for task in tasks if task.environment == name]
      with validation.explain(name):
        super().check_prompts(own_tasks)

  def bind(self, retriever: retrieval_lib.Retriever | None) -> factory.EnvFactory:
    """Returns the environments, with the retriever for those that take one."""
    from stppo_jax.envs import mix

    return mix.combine({name: own.bind(retriever) for name, own in self.environments.items()})

  def load_tasks(self, split: str) -> list[Task]:
    """Returns the tasks of all environments, which know theirs."""
    return self._tag_all(lambda own: own.load_tasks(split))

  def _tag_all(self, tasks_of):
    from stppo_jax.data import mix

    tagged = []
    for name, own in self.environments.items():
      with validation.explain(name):
        tagged += mix.tag(name, tasks_of(own))
    return tagged


def mix_rules() -> Any:
  """Returns the module with the rules of config.env.mix, which few runs need."""
  from stppo_jax.settings.sections import mix

  return mix


def _searches(components: Components) -> bool:
  """Returns whether the episodes of an environment may search."""
  env = components.config.env
  if env.kind == 'tools' and 'search' not in env.tools:
    return False
  return 'retriever' in components.env.settings


def _resolve_mix(config: Config) -> MixComponents:
  """Returns the components of a mix. UserError: its environments do not fit together."""
  from stppo_jax.envs import mix

  environments = {}
  for member in mix_rules().environments(config):
    with validation.explain(member.name):
      environments[member.name] = resolve(member.config)
  env = mix.combine({name: components.env for name, components in environments.items()})
  first = next(iter(environments.values()))
  return MixComponents(config, env, first.make_retriever, first.source, environments)


def resolve(config: Config) -> Components:
  """Loads the classes and functions that the config names. UserError: a name does not exist."""
  if config.env.mix:
    return _resolve_mix(config)
  env = config.env
  source = _task_source(config.data.source, config.data.columns)
  reward = _load_function('env.reward', env.reward, rewards.REWARDS)
  if env.reward not in rewards.REWARDS:
    from stppo_jax.envs import custom_rewards  # most runs have none

    reward = custom_rewards.CustomReward(
        env.reward,
        reward,
        config.retriever.max_outage_s,
        have_several=lambda: components.have_several_answers,  # assigned below
    )
  available: dict[str, Any] = {
      'retriever': None,
      'top_k': config.retriever.top_k,
      'max_searches': env.max_searches,
      'max_turns': env.max_searches,  # the name in environments that count turns
      'prompt': env.prompt,
      'reward': reward,
  }
  if env.tools:
    from stppo_jax.envs import tool_runners
    from stppo_jax.envs import tools

    limits = tool_runners.ToolLimits(env.tool_timeout_s, env.tool_max_chars)
    available['tools'] = tools.load(tuple(env.tools), limits)

  kind = _resolve_environment(config, available)
  if env.tools and 'tools' not in kind.settings:
    raise UserError(
        f'config.env.tools={env.tools!r}: {env.kind} uses none, set --config.env.kind=tools'
    )
  takes_reward = 'reward' in kind.settings
  if kind.is_program:
    make: Any = kind.make
    takes_reward = not make.scores_by_itself
  if env.reward != type(env)().reward and not takes_reward:
    raise UserError(
        f'config.env.reward={env.reward!r}: {env.kind} scores by itself, its constructor has no '
        '`reward`: leave it out'
    )
  retriever = _load_function('retriever.kind', config.retriever.kind, kinds.RETRIEVERS)
  check_jax()  # after the imports of plug-ins, which may change its settings
  components = Components(config, kind, retriever, source)
  return components


def check_jax() -> None:
  """Checks the settings of JAX. UserError: with one of them, compiled functions raise errors."""
  for name, needed in _JAX_SETTINGS.items():
    value = getattr(jax.config, name)
    value = getattr(value, 'value', value)  # some are enums
    if value not in needed:
      raise UserError(
          f'JAX runs with {name}={value!r}, by the variable {name.upper()} of the environment or '
          f'by jax.config.update in a module: a run needs {needed[0]!r}, so leave it out'
      )


def plugin_names(config: Config) -> dict[str, str]:
  """Returns {setting: name} of the settings that hold a `module:attribute`.

  A setting with several names, such as env.tools, gives {'env.tools[0]': name, ..}.
  """
  names_by_setting = {}
  for path, rules, value in validation.fields(config):
    if not rules.plugin:
      continue
    is_tuple = isinstance(value, tuple)
    for i, name in enumerate(value if is_tuple else (value,)):
      if not isinstance(name, str) or ':' not in name:
        continue
      if path == 'env.kind' and name.startswith(protocol.COMMAND_PREFIX):  # started, not imported
        continue
      is_file = path in _MAY_BE_FILES and os.path.exists(name)  # read, not imported
      prefix = name.partition(':')[0]
      if not is_file and prefix not in rules.prefixes:
        setting = f'{path}[{i}]' if is_tuple else path
        names_by_setting[setting] = name.removeprefix(f'{protocol.PROGRAM_PREFIX}:')
  if config.env.mix:
    for i, member in enumerate(mix_rules().environments(config)):
      for setting, name in plugin_names(member.config).items():
        section = setting.partition('.')[0]
        if section in ('env', 'data'):  # the other settings are those of the run
          names_by_setting[f'env.mix[{i}].{setting}'] = name
  return names_by_setting


def plugin_digests(config: Config) -> dict[str, str]:
  """Returns {setting: digest of the source file} of the plug-ins that a config names.

  The work folder stores them, so that a run is not resumed with a changed plug-in unnoticed.
  Choice: only the module's own file is read, and not the files that it imports.
  """
  digests = {}
  for field, name in plugin_names(config).items():
    module = plugins.import_module(f'config.{field}={name!r}', name.partition(':')[0])
    source = getattr(module, '__file__', None)
    if source:
      digests[field] = _digest(source)
  if config.env.kind.startswith(protocol.COMMAND_PREFIX):
    from stppo_jax.envs import commands

    scripts = map(_digest, commands.files(config.env.kind))
    if joined := ' '.join(scripts):
      digests['env.kind'] = joined
  recorded = config.rollout.demonstrations
  if os.path.isfile(recorded):
    digests['rollout.demonstrations'] = _digest(recorded)
  return digests


def sources(config: Config) -> dict[str, str]:
  """Returns {setting: digest} of the plug-in files and model folders that the settings name."""
  folders = {
      'model.folder': prepare.model_folder(config),
      'model.critic_folder': config.model.critic_folder,
      'teacher.folder': config.teacher.folder,
  }
  digests = plugin_digests(config)
  for setting, folder in folders.items():
    if folder:
      digests[setting] = hf_config.fingerprint(folder)
  return {setting: digest for setting, digest in digests.items() if digest}


def _digest(path: str) -> str:
  return hashlib.sha256(pathlib.Path(path).read_bytes()).hexdigest()[:16]


def _resolve_environment(config: Config, available: dict[str, Any]) -> factory.EnvFactory:
  env = config.env
  prefix, _, rest = env.kind.partition(':')
  if env.kind.startswith(protocol.COMMAND_PREFIX):
    from stppo_jax.envs import commands

    return commands.make_factory(env.kind, env.options, available['reward'])
  if rest and prefix == 'verifiers':
    from stppo_jax.envs.adapters import verifiers

    if config.data.source != 'embedded':
      raise UserError(
          f'config.env.kind={env.kind!r} has tasks of its own: leave out config.data.source'
      )
    return verifiers.make_factory(env.kind, env.options, available['reward'])
  if prefix == protocol.PROGRAM_PREFIX:
    from stppo_jax.envs import program

    function = plugins.load('env.kind', rest, {}, prefix=f'{prefix}:')
    return program.make_factory(env.kind, function, env.options, available['reward'])
  if rest and prefix in ADAPTERS:
    make = plugins.resolve(ADAPTERS[prefix])(rest)
  else:
    make = plugins.load('env.kind', env.kind, ENVIRONMENTS)
  options = dict(env.options)
  if env.kind == 'tools':
    options |= _tool_options(config)
  return factory.make_factory(env.kind, make, available, options)


def _tool_options(config: Config) -> dict[str, object]:
  """Returns how calls are written, which the model's chat template may choose."""
  from stppo_jax.text import tool_calls

  render = None
  if os.path.isdir(config.model.folder):
    render = prepare.load_tokenizer(config).render
  form = call_form(config, render)
  turn = tool_calls.shown_call(render)
  return {'form': form, 'template_shows_tools': not turn or tool_calls.reads(form, turn)}


def call_form(config: Config, render: Callable[..., str] | None) -> str:
  """Returns the form in which turns of a run call tools, one of tool_calls.FORMS.

  The environment `tools` has a setting of its own. `render` is Tokenizer.render.
  """
  from stppo_jax.text import tool_calls

  setting = config.serve.tool_form
  if config.env.kind == 'tools':
    setting = config.env.options.get('form') or tool_calls.AUTO
  return tool_calls.form_name(setting, render)


def _load_function(field: str, name: str, built_in: Mapping[str, object]) -> Callable[..., Any]:
  function = plugins.load(field, name, built_in)
  if not callable(function):
    raise UserError(f'config.{field}={name!r}: a function is needed, not {function!r}')
  return function


def _task_source(name: str, columns: Mapping[str, object]) -> Callable[[str], list[Task]]:
  """Returns a function split -> tasks, which reads files or calls the user's function."""
  if not _is_function(name):
    return lambda split: tasks_lib.load_tasks(name, split, columns)
  if columns:
    raise UserError(
        f'config.data.columns={dict(columns)!r} names columns of files, and config.data.source='
        f'{name!r} is a function: leave config.data.columns out'
    )
  return _checked(f'config.data.source={name!r}', _load_function('data.source', name, {}))


@functools.cache
def _embedded_datasets() -> set[str]:
  """Returns the names of the data sets of the embedded questions, which experiments select."""
  return {task.dataset for task in tasks_lib.load_all('embedded').tasks}


def _is_function(source: str) -> bool:
  """Returns whether config.data.source names a user's function of tasks, and no files."""
  return ':' in source and not os.path.exists(source)


def _checked(
    given: str, load: Callable[[str], Iterable[Task]], may_share_ids: bool = False
) -> Callable[[str], list[Task]]:
  """Returns a user's function of tasks with checks of what it returns. `given` names it."""

  def load_checked(split: str) -> list[Task]:
    try:
      tasks = [without_surrogates(task) for task in load(split)]
    except (UserError, RunError, Stopped):
      raise
    except Exception as error:  # a user's function may raise anything
      message = ' '.join(str(error).split())
      line = plugins.user_line(traceback.extract_tb(error.__traceback__))
      place = f'; {line}' if line else ''
      raise UserError(
          f'{given}: the tasks of the split {split!r} cannot be loaded '
          f'({type(error).__name__}: {message}{place}): a function that takes the split and '
          'returns a list of stppo_jax.types.Task is needed'
      ) from error
    if not tasks:
      raise UserError(f'{given} gives no task of the split {split!r}')
    seen: set[tuple[str, str]] = set()
    for task in tasks:
      try:
        tasks_lib.check_types(task)
        tasks_lib.check_task(task, set() if may_share_ids else seen)
      except ValueError as error:
        raise UserError(f'{given}: the tasks of {split!r} hold {task!r:.200}: {error}') from error
    return tasks

  return load_checked
