"""The environment `tools`: a question that the agent answers with the help of functions.

`config.env.tools` lists them: 'calculator', 'search' (in the run's retriever), Python functions as
'module:function', and all tools of an MCP server as 'mcp:COMMAND ARGUMENTS'. The schema of a Python
function is made of its signature and its docstring in Google's style. Calls are text in one of
tool_calls.FORMS, and tool_runners.py runs them. The final answer is the text between <answer> tags.
`config.env.reward` scores it.
"""

from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import functools
import json
from typing import Any

from stppo_jax import plugins
from stppo_jax import types
from stppo_jax.envs import packages
from stppo_jax.envs import protocol
from stppo_jax.envs import rewards
from stppo_jax.envs import search
from stppo_jax.envs import stepping
from stppo_jax.envs import tool_runners
from stppo_jax.text import tool_calls

CALCULATOR = 'stppo_jax.envs.calculator:calculator'
BUILT_IN = ('calculator', 'search')
INSTRUCTIONS = (
    'Answer the question at the end. Call tools where they help: what they return is shown to you, '
    'and you may call again. Finish with the bare answer between <answer> and </answer>.\n'
)

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
_MAX_REASON = 200  # characters
# Parts of a JSON schema that can describe arguments which its `properties` does not name.
_OPEN_KEYWORDS = {
    '$dynamicRef',
    '$ref',
    'allOf',
    'anyOf',
    'dependencies',
    'dependentRequired',
    'dependentSchemas',
    'else',
    'if',
    'not',
    'oneOf',
    'patternProperties',
    'propertyNames',
    'then',
    'unevaluatedProperties',
}
_MALFORMED = 'malformed'
_RETRIEVAL_FAILED = 'retrieval_failed'
_COUNTS = ('calls', _MALFORMED, tool_runners.FAILED, tool_runners.TIMED_OUT)


@dataclasses.dataclass(frozen=True)
class Tool:
  """A tool: its schema, and the function that runs it. None: the run's retriever does."""

  schema: tool_calls.Schema
  call: Callable[[Mapping[str, Any]], tool_runners.Outcome] | None

  @property
  def name(self) -> str:
    """The name that the agent calls it by."""
    return self.schema['function']['name']

  @property
  def parameters(self) -> dict[str, object]:
    """The JSON schema of its arguments. It allows no others if `properties` names all of them."""
    parameters = self.schema['function'].get('parameters')
    if parameters is None:  # it takes no arguments
      return {'additionalProperties': False}
    known = parameters.get('properties')
    required = parameters.get('required') or ()
    if not isinstance(known, dict) or _OPEN_KEYWORDS & parameters.keys():
      return dict(parameters)
    if any(name not in known for name in required):
      return dict(parameters)
    return {'additionalProperties': False, **parameters}


@functools.lru_cache
def load(names: tuple[str, ...], limits: tool_runners.ToolLimits) -> tuple[Tool, ...]:
  """Returns the tools of `config.env.tools`. UserError: one does not load, or two share a name."""
  workers = tool_runners.Workers(limits)
  tools: list[Tool] = []
  for name in names:
    if name == 'search':
      tools.append(Tool(_SEARCH, None))
    elif name.startswith('mcp:'):
      tools += _mcp_tools(name, limits)
    else:
      path = CALCULATOR if name == 'calculator' else name
      function = plugins.load('env.tools', path, dict.fromkeys(BUILT_IN))
      tools.append(Tool(_schema(name, function), functools.partial(workers.call, path)))
  import jsonschema  # takes a tenth of a second, and only this environment needs it

  tool_names = [tool.name for tool in tools]
  for tool in tools:
    if tool_names.count(tool.name) > 1:
      raise types.UserError(f'config.env.tools={names!r}: two tools are called {tool.name!r}')
    with packages.explain_errors(
        f'config.env.tools={names!r}: {tool.name!r} has no valid JSON schema', 'correct the tool'
    ):
      jsonschema.Draft202012Validator.check_schema(tool.parameters)
  return tuple(tools)


def _schema(name, function):
  from transformers.utils import get_json_schema

  with packages.explain_errors(
      f'config.env.tools names {name!r}, whose schema cannot be made',
      'annotate its arguments, and describe them under "Args:" in its docstring',
  ):
    return get_json_schema(function)


def _mcp_tools(name, limits):
  packages.import_package(f'config.env.tools={name!r}', 'mcp', 'mcp')
  server = tool_runners.McpServer(name.removeprefix('mcp:'), limits)
  with packages.explain_errors(
      f'config.env.tools names {name!r}, which lists no tools',
      'give a command that starts an MCP server on stdio',
  ):
    listed = server.list_tools()
  tools = []
  for tool in listed:
    function = {
        'name': tool.name,
        'description': tool.description or '',
        'parameters': tool.input_schema,
    }
    schema = {'type': 'function', 'function': function}
    tools.append(Tool(schema, functools.partial(server.call, tool.name)))
  return tools


@dataclasses.dataclass(eq=False)
class ToolEnv:
  """One question. In each turn the agent calls tools or answers. Otherwise it reads an error.

  Metrics: rewards.SCORES, and tools/calls, /malformed, /failed, /timed_out, counted over the
  episode.
  """

  core_metrics = rewards.SCORES
  uses_global_random = False
  stops_in_thoughts = False

  task: types.Task
  retriever: Any
  tools: Sequence[Tool]
  max_turns: int = 4
  top_k: int = 3
  reward: rewards.Reward = rewards.REWARDS['em']
  form: str = 'hermes'
  frame: str | None = None  # None: 'inline' for tags, else 'tool'
  instructions: str = INSTRUCTIONS
  max_calls: int = 8  # per turn; more are rejected
  template_shows_tools: bool = True  # False: it would ask for calls in another form

  @staticmethod
  def attributes(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns frame and stop strings. By default, calls as tags are inline, and end their turn."""
    form_name = settings.get('form', 'hermes')
    form = tool_calls.make_form(form_name, _schemas(settings['tools']))
    frame = settings.get('frame') or ('inline' if form_name == 'tags' else 'tool')
    stop_strings = (*form.stop_strings, '</answer>') if frame == 'inline' else ()
    return {'frame': frame, 'stop_strings': stop_strings}

  def __post_init__(self):
    attributes = self.attributes({'form': self.form, 'tools': self.tools, 'frame': self.frame})
    self.frame = attributes['frame']
    self.stop_strings = attributes['stop_strings']
    self._tools = {tool.name: tool for tool in self.tools}
    self._form = tool_calls.make_form(self.form, _schemas(self.tools))

  def reset(self, seed: int | None = None) -> tuple[str, protocol.ResetInfo]:
    """Returns the question, with the tools for the chat template and as a text."""
    del seed
    self._turns = 0
    self._texts: list[str] = []  # make up the transcript
    self._counts = dict.fromkeys(_COUNTS, 0)
    info: protocol.ResetInfo = {
        'tools': _schemas(self._tools.values()) if self.template_shows_tools else [],
        'declaration': self._form.declare(),
    }
    return search.prompt_text(self.task, 'short', self.instructions), info

  def query(self, action: str) -> str | None:
    """Returns the query of a turn whose only call is a search, which several episodes share."""
    _, calls = self._form.parse(action)
    if self._turns >= self.max_turns or len(calls) != 1 or self._complaint(calls[0]):
      return None
    if self._tools[calls[0].name].call is not None:
      return None
    return calls[0].arguments['query']

  def step(self, action: str, passages: object = search.NOT_SEARCHED) -> protocol.Step:
    """Runs the calls of a turn, or ends the episode with its answer."""
    content, calls = self._form.parse(action)
    answer = None if calls else rewards.extract_answer(content)
    self._turns += 1
    self._texts.append(action)
    if answer is not None:
      transcript = ''.join(self._texts)
      reward = rewards.score_answer(self.reward, self.task, answer, transcript)
      scores = rewards.scores(self.task, answer) | reward.metrics
      return '', float(reward), True, False, self._info('answer', scores)
    if self._turns > self.max_turns:
      return '', 0.0, True, True, self._info('tool' if calls else 'invalid')
    if not calls:
      text = 'Error: call a tool, or give the answer between <answer> and </answer>.'
      return self._observation(text), 0.0, False, False, self._info('invalid')
    outcomes = [self._run(i, call, passages) for i, call in enumerate(calls)]
    texts = [outcome.text for outcome in outcomes]
    if len(calls) > 1:
      texts = [f'{call.name}: {text}' for call, text in zip(calls, texts)]
    statuses = {outcome.status for outcome in outcomes}
    info = self._info('invalid' if statuses == {_MALFORMED} else 'tool')
    info['retrieval_failed'] = _RETRIEVAL_FAILED in statuses
    return self._observation('\n'.join(texts)), 0.0, False, False, info

  def _run(self, i, call, passages):
    """Runs the call number `i` of a turn, and counts it."""
    complaint = self._complaint(call)
    if complaint is None and i >= self.max_calls:
      complaint = f'at most {self.max_calls} calls per turn are run'
    if complaint is not None:
      self._counts[_MALFORMED] += 1
      return tool_runners.Outcome(f'Error: {complaint}', _MALFORMED)
    self._counts['calls'] += 1
    tool = self._tools[call.name]
    if tool.call is None:
      return self._search(call.arguments['query'], passages)
    outcome = tool.call(types.without_surrogates(call.arguments))
    if outcome.status == tool_runners.OK:
      return outcome
    self._counts[outcome.status] += 1
    return tool_runners.Outcome(f'Error: {outcome.text}', outcome.status)

  def _search(self, query, passages):
    if passages is search.NOT_SEARCHED:
      passages = stepping.call_retriever(self.retriever, [query], self.top_k)[0]
    if passages is None:
      return tool_runners.Outcome('', _RETRIEVAL_FAILED)
    lines = [f'{i}. {passage.title}: {passage.text}' for i, passage in enumerate(passages, start=1)]
    return tool_runners.Outcome('\n'.join(lines))

  def _complaint(self, call):
    """Returns what is wrong with a call as a text for the agent, or None."""
    import jsonschema  # see `load`
    import referencing

    if call.error:
      return f'the call is malformed, {call.error}. {self._form.advice}'
    if call.name not in self._tools:
      return f'there is no tool {call.name[:40]!r}; there are {", ".join(self._tools)}'
    # References to other addresses are not fetched.
    validator = jsonschema.Draft202012Validator(
        self._tools[call.name].parameters, registry=referencing.Registry()
    )
    try:
      error = jsonschema.exceptions.best_match(validator.iter_errors(call.arguments))
    except RecursionError:
      return f'the arguments of {call.name} are nested too deeply'
    except Exception:  # the schema itself is wrong, and then the tool decides
      return None
    if error is None:
      return None
    return f'the arguments of {call.name} do not fit, {error.message[:_MAX_REASON]}'

  def _observation(self, text):
    """Returns the text, inline between tags that nothing in it can close."""
    text = types.without_surrogates(text)
    if self.frame == 'inline':
      text = f'\n<information>{search.neutralize(text)}</information>\n'
    self._texts.append(text)
    return text

  def _info(self, action, scores=None) -> protocol.StepInfo:
    scores = scores or dict.fromkeys(rewards.SCORES, 0.0)
    counts = {f'tools/{name}': float(count) for name, count in self._counts.items()}
    return {'action': action, 'metrics': {**scores, **counts}}


def _schemas(tools: Iterable[Tool]) -> list[dict[str, object]]:
  return [json.loads(json.dumps(tool.schema)) for tool in tools]
