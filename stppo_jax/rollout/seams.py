"""What the config names and a user may replace: environment, reward, retriever and questions.

`resolve` runs right after validation and before weights are loaded, so that a wrong name costs
nothing.
"""

from collections.abc import Callable
import dataclasses
import os
from typing import Any

from stppo_jax import plugins
from stppo_jax import tasks as task_files
from stppo_jax.envs import program
from stppo_jax.envs import protocol
from stppo_jax.envs import rewards
from stppo_jax.envs import search
from stppo_jax.envs import tool_runners
from stppo_jax.envs import tools
from stppo_jax.envs.adapters import gem
from stppo_jax.envs.adapters import openenv
from stppo_jax.envs.adapters import reasoning_gym
from stppo_jax.envs.adapters import textarena
from stppo_jax.retrieval import kinds
from stppo_jax.retrieval import protocol as retrieval_protocol
from stppo_jax.types import Task
from stppo_jax.types import UserError

# What stands before the first ':' of `env.kind` -> function (the rest) -> environment class.
ADAPTERS: dict[str, Callable[[str], Any]] = {
    'gem': gem.make,
    'openenv': openenv.make,
    'reasoning_gym': reasoning_gym.make,
    'textarena': textarena.make,
}
ENVIRONMENTS = {**search.ENVIRONMENTS, 'tools': tools.ToolEnv}


@dataclasses.dataclass(frozen=True)
class Seams:
  """The parts that a config names, checked; nothing is loaded yet."""

  config: Any
  env: protocol.Kind  # without its retriever
  retriever: Callable
  source: Callable[[str], list[Task]]  # split -> questions

  def make_retriever(self) -> retrieval_protocol.Retriever | None:
    """Returns the retriever, over its corpus if it has one; None where nothing would use it."""
    if 'retriever' not in self.env.settings:
      return None
    data = self.config.data
    corpus = data.corpus or data.source
    return kinds.make(self.retriever, self.config.retriever, lambda: task_files.load_corpus(corpus))

  def bind(self, retriever: retrieval_protocol.Retriever | None) -> protocol.Kind:
    """Returns the environment class with its retriever, if it takes one."""
    if 'retriever' not in self.env.settings:
      return self.env
    return dataclasses.replace(self.env, settings={**self.env.settings, 'retriever': retriever})

  def load_tasks(self, split: str) -> list[Task]:
    """Returns the questions of a split, of the data sets that the config names."""
    data = self.config.data
    own = self.env.load_tasks if data.source == 'embedded' else None
    tasks = (own or self.source)(split)
    known = sorted({task.dataset for task in tasks})
    if missing := sorted(set(data.datasets) - set(known)):
      raise UserError(
          f'config.data.datasets names {", ".join(missing)}: the split {split!r} has '
          f'{", ".join(known)}, to be given as "(\'{known[0]}\',)"; "()" keeps all of them'
      )
    return [task for task in tasks if not data.datasets or task.dataset in data.datasets]


def resolve(config) -> Seams:
  """Loads what the config names. Raises a UserError of one line for what is not there."""
  env, reward = config.env, config.env.reward
  offered = {
      'retriever': None,
      'top_k': config.retriever.top_k,
      'max_turns': env.max_turns,
      'prompt': env.prompt,
      'reward': _function('env.reward', reward, rewards.REWARDS),
  }
  if env.tools:
    limits = tool_runners.Limits(env.tool_timeout_s, env.tool_max_chars)
    offered['tools'] = tools.load(tuple(env.tools), limits)
  prefix, _, rest = env.kind.partition(':')
  if prefix == program.PREFIX:
    function = plugins.load('env.kind', rest, {})
    kind = program.make_kind(env.kind, function, env.options, offered['reward'])
  else:
    adapter = rest and ADAPTERS.get(prefix)
    make = adapter(rest) if adapter else plugins.load('env.kind', env.kind, ENVIRONMENTS)
    kind = protocol.make_kind(env.kind, make, offered, env.options)
  if env.tools and 'tools' not in kind.settings:
    raise UserError(
        f'config.env.tools={env.tools!r}: {env.kind} uses none, set --config.env.kind=tools'
    )
  takes_reward = 'reward' in kind.settings or isinstance(kind.make, program.Program)
  if ':' in reward and not takes_reward:
    raise UserError(
        f'config.env.reward={reward!r}: {env.kind} scores by itself, its constructor has no '
        '`reward`: leave it out'
    )
  retriever = _function('retriever.kind', config.retriever.kind, kinds.RETRIEVERS)
  return Seams(config, kind, retriever, _source(config.data.source))


def _function(field, name, built_in):
  found = plugins.load(field, name, built_in)
  if not callable(found):
    raise UserError(f'config.{field}={name!r}: a function is needed, not {found!r}')
  return found


def _source(name):
  """Returns a function split -> questions, which reads files or calls the user's function."""
  if ':' not in name or os.path.exists(name):
    return lambda split: task_files.load_tasks(name, split)
  load = _function('data.source', name, {})

  def load_checked(split):
    tasks = list(load(split))
    wrong = next((task for task in tasks if not isinstance(task, Task)), None)
    if not tasks or wrong is not None:
      raise UserError(
          f'config.data.source={name!r} gave {"no task" if not tasks else repr(wrong)} for the '
          f'split {split!r}: return a list of at least one stppo_jax.types.Task'
      )
    for task in tasks:
      texts = task.id, task.question, *task.answers
      if isinstance(task.answers, str) or not all(isinstance(text, str) for text in texts):
        raise UserError(
            f'config.data.source={name!r} gave {task!r}: id and question are texts, and answers a '
            "tuple of texts, as ('red',)"
        )
    blank = next((t for t in tasks if not all(answer.strip() for answer in t.answers)), None)
    if blank is not None:
      raise UserError(
          f'config.data.source={name!r}: the task {blank.id!r} has an answer without a text, and '
          'an empty answer would be right: leave it out'
      )
    ids = [task.id for task in tasks]
    if len(set(ids)) < len(ids):
      twice = next(i for i in ids if ids.count(i) > 1)
      raise UserError(
          f'config.data.source={name!r} gave two tasks with the id {twice!r} for the split '
          f'{split!r}: ids must be unique'
      )
    return tasks

  return load_checked
