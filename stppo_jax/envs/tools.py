"""The environment `tools`: a question that the agent answers with the help of functions.

`config.env.tools` lists them: 'calculator', 'search' (over the run's retriever), Python functions
as 'module:function' (their schema is made of signature and docstring, in Google's style), and all
tools of an MCP server as 'mcp:COMMAND ARGUMENTS'. Calls are text in one of tool_calls.FORMS, and
run as tool_runners says. The final answer is the text between <answer> tags, scored by
`config.env.reward`.
"""

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import functools
import json
from typing import Any

from stppo_jax import plugins
from stppo_jax import types
from stppo_jax.envs import protocol
from stppo_jax.envs import rewards
from stppo_jax.envs import search
from stppo_jax.envs import tool_calls
from stppo_jax.envs import tool_runners

CALCULATOR = 'stppo_jax.envs.tool_runners:calculator'
BUILT_IN = ('calculator', 'search')
INSTRUCTIONS = (
    'Answer the question at the end. Call tools where they help: what they return is shown to you, '
    'and you may call again. Finish with the bare answer between <answer> and </answer>.\n'
)

_OWN_SEARCH = object()  # `passages` was not given, while None means that the retriever failed
_SEARCH = {
    'type': 'function',
    'function': {
        'name': 'search',
        'description': 'Finds passages of text about a query.',
        'parameters': {
            'type': 'object',
            'properties': {'query': {'type': 'string', 'description': 'a few words'}},
            'required': ['query'],
        },
    },
}
_TYPES: dict[str, tuple[type, ...]] = {
    'string': (str,),
    'integer': (int,),
    'number': (int, float),
    'boolean': (bool,),
    'array': (list,),
    'object': (dict,),
}
_COUNTS = ('calls', 'malformed', 'failed', 'timed_out')


@dataclasses.dataclass(frozen=True)
class Tool:
  """A tool: its schema, and what runs it; None: the run's retriever does."""

  schema: tool_calls.Schema
  call: Callable[[Mapping[str, Any]], tool_runners.Outcome] | None

  @property
  def name(self) -> str:
    """The name that the agent calls it by."""
    return self.schema['function']['name']


@functools.lru_cache
def load(names: tuple[str, ...], limits: tool_runners.Limits) -> tuple[Tool, ...]:
  """Returns the tools of `config.env.tools`. UserError: one that cannot be had, or a name twice."""
  processes, found = tool_runners.Processes(limits), []
  for name in names:
    if name == 'search':
      found.append(Tool(_SEARCH, None))
    elif name.startswith('mcp:'):
      found += _mcp_tools(name, limits)
    else:
      path = CALCULATOR if name == 'calculator' else name
      function = plugins.load('env.tools', path, dict.fromkeys(BUILT_IN))
      found.append(Tool(_schema(name, function), functools.partial(processes.call, path)))
  known = [tool.name for tool in found]
  if twice := sorted({name for name in known if known.count(name) > 1}):
    raise types.UserError(f'config.env.tools={names!r}: two tools are called {twice[0]!r}')
  return tuple(found)


def _schema(name, function):
  from transformers.utils import get_json_schema

  try:
    return get_json_schema(function)
  except Exception as error:  # the library has its own kinds of error
    raise types.UserError(
        f'config.env.tools names {name!r}, whose schema cannot be made '
        f'({" ".join(str(error).split())[:200]}): annotate its arguments, and describe them under '
        '"Args:" in its docstring'
    ) from error


def _mcp_tools(name, limits):
  protocol.import_peer(name, 'mcp', 'mcp')
  server = tool_runners.McpServer(name.removeprefix('mcp:'), limits)
  try:
    listed = server.list_tools()
  except Exception as error:  # whatever the server or its client raises
    server.close()
    raise types.UserError(
        f'config.env.tools names {name!r}, which lists no tools ({type(error).__name__}: '
        f'{" ".join(str(error).split())[:200]}): give a command that starts an MCP server on stdio'
    ) from error
  found = []
  for tool in listed:
    parameters = getattr(tool, 'input_schema', None) or getattr(tool, 'inputSchema', None) or {}
    function = {'name': tool.name, 'description': tool.description or '', 'parameters': parameters}
    schema = {'type': 'function', 'function': function}
    found.append(Tool(schema, functools.partial(server.call, tool.name)))
  return found


class ToolEnv:
  """One question. A turn calls tools, answers, or is invalid and is told why.

  Metrics: rewards.SCORES, and tools/calls, /malformed, /failed, /timed_out, counted over the
  episode.
  """

  core_metrics = rewards.SCORES
  uses_global_random = False

  @staticmethod
  def attributes(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns frame and stop strings: a turn of tags stands inline, and ends where a tag closes."""
    form = tool_calls.make_form(_form_name(settings), _schemas(settings['tools']))
    is_inline = settings.get('frame', _default_frame(settings)) == 'inline'
    return {
        'frame': settings.get('frame', _default_frame(settings)),
        'stop_strings': (*form.stop_strings, '</answer>') if is_inline else (),
    }

  def __init__(
      self,
      task: types.Task,
      retriever: Any,
      tools: Sequence[Tool],
      max_turns: int = 4,
      top_k: int = 3,
      reward: str | rewards.Reward = 'em',
      form: str = 'hermes',
      frame: str | None = None,  # None: 'inline' for tags, else 'tool'
      instructions: str = INSTRUCTIONS,
      max_calls: int = 8,  # of a turn; more are refused
  ):
    if not tools:
      raise types.UserError(
          f"config.env.kind='tools' without tools: name some, as in --config.env.tools={BUILT_IN}"
      )
    settings = {'form': form, 'tools': tools} | ({} if frame is None else {'frame': frame})
    for name, value in self.attributes(settings).items():
      setattr(self, name, value)
    self.task, self.retriever, self.top_k = task, retriever, top_k
    self._tools = {tool.name: tool for tool in tools}
    self._form = tool_calls.make_form(form, _schemas(tools))
    self._reward = reward if callable(reward) else rewards.REWARDS[reward]
    self._max_turns, self._max_calls = max_turns, max_calls
    self._instructions = instructions
    self._turns, self._transcript = 0, ''
    self._counts = dict.fromkeys(_COUNTS, 0)

  def reset(self, seed: int | None = None) -> tuple[str, dict[str, Any]]:
    """Returns the question, with the tools for the chat template and as a text."""
    del seed
    self._turns, self._transcript = 0, ''
    self._counts = dict.fromkeys(_COUNTS, 0)
    info = {'tools': _schemas(self._tools.values()), 'declaration': self._form.declare()}
    return search.prompt_text(self.task, 'short', self._instructions), info

  def query(self, action: str) -> str | None:
    """Returns the query of a turn whose only call is a search, for a search with other episodes."""
    _, calls = self._form.parse(action)
    if self._turns >= self._max_turns or len(calls) != 1 or self._complaint(calls[0]):
      return None
    return calls[0].arguments['query'] if self._tools[calls[0].name].call is None else None

  def step(self, action: str, passages: Any = _OWN_SEARCH) -> protocol.Step:
    """Runs the calls of a turn, or ends the episode with its answer."""
    content, calls = self._form.parse(action)
    answer = None if calls else rewards.extract_answer(content)
    self._turns += 1
    self._transcript += action
    if answer is not None:
      reward = rewards.of_answer(self._reward, self.task, answer, self._transcript)
      return '', reward, True, False, self._info('answer', rewards.scores(self.task, answer))
    if self._turns > self._max_turns:
      return '', 0.0, True, True, self._info('tool' if calls else 'invalid')
    if not calls:
      observation = 'Error: call a tool, or give the answer between <answer> and </answer>.'
      return self._framed(observation), 0.0, False, False, self._info('invalid')
    outcomes = [self._run(i, call, passages) for i, call in enumerate(calls)]
    names = [call.name for call in calls]
    texts = [outcome.text for outcome in outcomes]
    if len(texts) > 1:
      texts = [f'{name}: {text}' for name, text in zip(names, texts)]
    bad = all(outcome.status == 'malformed' for outcome in outcomes)
    info = self._info('invalid' if bad else 'tool')
    info['retrieval_failed'] = any(outcome.status == 'retrieval_failed' for outcome in outcomes)
    return self._framed('\n'.join(texts)), 0.0, False, False, info

  def _run(self, i, call, passages):
    """Runs one call of a turn; counts it."""
    complaint = self._complaint(call)
    if complaint is None and i >= self._max_calls:
      complaint = f'at most {self._max_calls} calls per turn are run'
    if complaint is not None:
      self._counts['malformed'] += 1
      return tool_runners.Outcome(f'Error: {complaint}', 'malformed')
    self._counts['calls'] += 1
    tool = self._tools[call.name]
    if tool.call is None:
      return self._search(call.arguments['query'], passages)
    outcome = tool.call(call.arguments)
    if outcome.status == tool_runners.OK:
      return outcome
    self._counts[outcome.status] += 1
    return dataclasses.replace(outcome, text=f'Error: {outcome.text}')

  def _search(self, query, passages):
    if passages is _OWN_SEARCH:
      passages = self.retriever.search([query], self.top_k)[0]
    if passages is None:
      return tool_runners.Outcome('', 'retrieval_failed')
    lines = [f'{i}. {found.title}: {found.text}' for i, found in enumerate(passages, start=1)]
    return tool_runners.Outcome('\n'.join(lines))

  def _complaint(self, call):
    """Returns what is wrong with a call, for the agent to read; None: nothing."""
    if call.error:
      return f'the call is malformed, {call.error}. Write it like {self._example()}'
    if call.name not in self._tools:
      return f'there is no tool {call.name[:40]!r}; there are {", ".join(self._tools)}'
    parameters = self._tools[call.name].schema['function'].get('parameters') or {}
    properties = parameters.get('properties') or {}
    for name in parameters.get('required') or ():
      if name not in call.arguments:
        return f'{call.name} needs the argument {name!r}'
    for name, value in call.arguments.items():
      if name not in properties:
        return (
            f'{call.name} has no argument {name[:40]!r}; it has {", ".join(properties) or "none"}'
        )
      kind = properties[name].get('type')
      if isinstance(kind, str) and kind in _TYPES and not _is_of(value, kind):
        return f'{call.name} needs a JSON {kind} as {name!r}'
    return None

  def _example(self):
    tool = next(iter(self._tools.values()))
    properties = (tool.schema['function'].get('parameters') or {}).get('properties') or {}
    return self._form.write(tool_calls.Call(tool.name, dict.fromkeys(properties, '..')))

  def _framed(self, text):
    """Returns the observation; inline between tags that nothing in it can close."""
    if self.frame == 'inline':  # type: ignore[attr-defined]
      text = f'\n<information>{search.neutralize(text)}</information>\n'
    self._transcript += text
    return text

  def _info(self, action, scores=None):
    scores = scores or dict.fromkeys(rewards.SCORES, 0.0)
    counts = {f'tools/{name}': float(count) for name, count in self._counts.items()}
    return {'action': action, 'metrics': {**scores, **counts}}


def _schemas(tools):
  return [json.loads(json.dumps(tool.schema)) for tool in tools]


def _form_name(settings):
  name = settings.get('form', 'hermes')
  if name not in tool_calls.FORMS:
    raise types.UserError(
        f'config.env.options.form={name!r}: allowed are {", ".join(tool_calls.FORMS)}'
    )
  return name


def _default_frame(settings):
  return 'inline' if settings.get('form', 'hermes') == 'tags' else 'tool'


def _is_of(value, kind):
  return isinstance(value, _TYPES[kind]) and (kind == 'boolean' or not isinstance(value, bool))
