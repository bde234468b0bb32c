"""The interface of an environment: `reset`, `step`, and the dict `info` that both return.

`config.env.kind` names an environment: 'search', 'tools', `PREFIX:ID` of another package (see
adapters/), or `module:attribute` of your own class. The methods are those of GEM:

  class Guess:
    stop_strings = ('.',)

    def __init__(self, task, tries=3):
      self.left = tries

    def reset(self, seed=None):
      self.digit = str(seed % 10)
      return 'Guess my digit.', {}

    def step(self, action):
      self.left -= 1
      right = self.digit in action
      return 'Wrong. ', float(right), right, self.left == 0, {'metrics': {'right': right}}

The constructor gets the task, then by keyword all of `config.env.options`. It also gets each of
`retriever`, `top_k`, `max_searches` (or `max_turns`), `prompt`, `reward` and `tools` for which it
has a parameter of that name. Options win over these.

The class may have these attributes:

  stop_strings   Strings that end a turn of the agent. The eos token always does.     Default: ()
  stops_in_thoughts  False: a stop string between <think> and </think> ends no turn. The environment
                 should then read no action in a thought.                      Default: True
  frame          Where an observation goes. 'inline' appends its text to the agent's turn. 'user'
                 and 'tool' make it a turn of the chat template.                Default: 'inline'
  core_metrics   Names in `info['metrics']` that are scores, the main one first.      Default: ()
  uses_global_random  With True, each environment has its own state of Python's and NumPy's global
                 random generators, and calls of environments do not overlap.       Default: True
  load_tasks     A function split -> list of Task, for an environment that generates its own tasks.
                 None: a task is a seed for `reset`, and no question. It is used while
                 `config.data.source` is 'embedded'.                                Default: absent
  attributes     A function of the constructor's keyword arguments. It returns a dict of the
                 attributes above that depend on them.                              Default: none
  roles          Names of the agents, if there are several. See `RoleStepInfo`.       Default: ()

A reward belongs to the turn for which `step` returned it. If the environment's code raises an
error, its episode ends and is masked out of the update. `config.rollout.max_failed` limits the
share of such episodes in a batch.
"""

from collections.abc import Mapping
from typing import Any
from typing import Protocol
from typing import runtime_checkable
from typing import TypedDict

PROGRAM_PREFIX = 'gateway'  # `env.kind` of an agent program starts with it, see program.py
COMMAND_PREFIX = f'{PROGRAM_PREFIX}:command:'  # a program that is a command, see commands.py
FRAMES = ('inline', 'user', 'tool')


class ResetInfo(TypedDict, total=False):
  """The dict that `reset` returns. All keys are optional, and other keys are ignored."""

  prefix: str  # text before the observation
  suffix: str  # text after the observation
  tools: list[dict[str, Any]]  # JSON schemas for the chat template
  declaration: str  # describes the tools where the chat template shows none


class StepInfo(TypedDict, total=False):
  """The dict that `step` returns. All keys are optional, and other keys are ignored."""

  prefix: str  # text before the observation
  suffix: str  # text after the observation
  action: str  # kind of the agent's action; 'invalid' if its text contains none
  metrics: dict[str, float]  # the last value of an episode counts
  retrieval_failed: bool  # masks the episode out of the update
  query: str | None  # the agent's search; --mode=chat shows it
  passage_ids: list[str]  # what the search found
  answer: str | None  # the final answer; --mode=chat shows it


Step = tuple[str, float, bool, bool, StepInfo]


@runtime_checkable
class Env(Protocol):
  """Plays one episode at a time."""

  def reset(self, seed: int | None = None) -> tuple[str, ResetInfo]:
    """Starts an episode and returns (first observation, info)."""
    ...

  def step(self, action: str) -> Step:
    """Takes the agent's text and returns (observation, reward, terminated, truncated, info).

    Both `terminated` and `truncated` may be true: a limit has ended the episode.
    """
    ...


def full_text(observation: str, info: Mapping[str, Any]) -> str:
  """Returns `info['prefix']`, the observation and `info['suffix']` as one text.

  Parts that would meet without white space are separated by a line break, as in GEM's wrappers.
  """
  text = ''
  for part in (info.get('prefix') or '', observation, info.get('suffix') or ''):
    if text and part and not text[-1].isspace() and not part[0].isspace():
      text += '\n'
    text += part
  return text


# Environments with several agents. An episode then has one row per role.


class RoleResetInfo(ResetInfo, total=False):
  """The dict that `reset` returns if the environment has roles."""

  role: str  # moves next and reads the observation


class RoleStepInfo(StepInfo, total=False):
  """The dict that `step` returns if the environment has roles.

  The observation is all that the next role learns about the time since its last turn. The first
  observation of a role is its prompt. `step` returns the reward of the role that has just moved. A
  token limit that one role reaches ends the episode for all roles.
  """

  role: str  # moves next and reads the observation
  rewards: dict[str, float]  # added to the last turn of each role named; ignored before its first
  role_metrics: dict[str, dict[str, float]]  # metrics of one role; `metrics` are those of all
