"""An agent program that is a command in a separate process.

`env.kind='gateway:command:COMMAND'` starts the command once per episode, without a shell. Its
standard input is the task as JSON, and its environment has the address of the gateway. The last
line of its standard output may be its reward: a number, or {"reward": number, "metrics": {..}}.
"""

from collections.abc import Mapping
import dataclasses
import json
import math
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from typing import Any

from stppo_jax import types
from stppo_jax.envs import command_keeper
from stppo_jax.envs import factory
from stppo_jax.envs import program as program_lib
from stppo_jax.envs import protocol
from stppo_jax.envs import rewards

_END_S = 15.0  # after this time the keeper itself is killed
_MAX_LOG = 4000  # characters of standard error in an episode's record
_MAX_SHOWN = 200  # characters of standard error in an error
# Not passed on: the key of --mode=serve, and logins that Claude Code prefers to a key.
_REMOVED = ('STPPO_API_KEY', 'ANTHROPIC_AUTH_TOKEN', 'CLAUDE_CODE_OAUTH_TOKEN')
_LOOPBACK = '127.0.0.1,localhost'


class CommandFailed(Exception):
  """The command ended with an error, or gave a reward that is none."""


class Process:
  """A command that plays one episode. The caller must call `end`."""

  def __init__(self, command: list[str], task: Mapping[str, object], base_url: str, model: str):
    self.log = ''  # the end of standard error, once the process has ended
    self._output = tempfile.TemporaryFile()
    self._report: dict[str, Any] = {}
    self._process = subprocess.Popen(
        [sys.executable, '-I', '-S', command_keeper.__file__, *command],
        stdin=subprocess.PIPE,
        stdout=self._output,
        start_new_session=True,  # Ctrl-C asks the trainer alone to stop
        env=_environment(base_url, model),
    )
    assert self._process.stdin is not None
    try:
      self._process.stdin.write(json.dumps(task).encode() + b'\n')
      self._process.stdin.flush()
    except OSError:  # the keeper has died, which `result` reports
      pass

  def wait(self, timeout_s: float) -> bool:
    """Waits up to `timeout_s`; returns whether the command has ended."""
    try:
      self._process.wait(timeout_s)
    except subprocess.TimeoutExpired:
      return False
    return True

  def end(self) -> None:
    """Kills the command and the processes that it has started, and reads its log."""
    if self._output.closed:
      return
    try:
      self._process.stdin.close()  # type: ignore[union-attr]
    except OSError:
      pass  # the keeper has died
    if not self.wait(_END_S):
      self._process.kill()
      self._process.wait()
    with self._output:
      self._output.seek(0)
      text = self._output.read()
    self._report = json.loads(text) if text.endswith(b'\n') else {'error': 'it was killed'}
    self.log = self._report.get('stderr', '')[-_MAX_LOG:]

  def result(self) -> program_lib.Result:
    """Returns the reward of a command that has ended. CommandFailed: it has crashed."""
    self.end()
    if 'error' in self._report:
      raise CommandFailed(f'the command does not run ({self._report["error"]})')
    if status := self._report['status']:
      stream, text = 'error', self.log
      if not text.strip():  # Claude Code writes its errors to the other one
        stream, text = 'output', self._report['stdout'][-_MAX_LOG:]
      lines = ' | '.join(filter(None, map(str.strip, text.splitlines())))
      raise CommandFailed(f'{describe(status)}, standard {stream} ends with: {lines[-_MAX_SHOWN:]}')
    return read_result(self._report['stdout'])


class CommandProgram(program_lib.Program):
  """An agent program whose `function` starts a command."""

  def start(self, task: types.Task, base_url: str, model: str) -> Process:
    """Starts one episode."""
    return self.function(dataclasses.asdict(task), base_url, model)


def make_factory(
    kind: str, options: Mapping[str, object], reward: rewards.Reward
) -> factory.EnvFactory:
  """Returns the factory of `env.kind`. UserError: its command cannot be started."""
  command = split(kind)
  if options:
    raise types.UserError(
        f'config.env.options={dict(options)!r}: a command has none, write them into env.kind'
    )

  def start(task: Mapping[str, object], base_url: str, model: str) -> Process:
    return Process(command, task, base_url, model)

  return factory.EnvFactory(CommandProgram(start, {}, reward), {}, uses_global_random=False)


def split(kind: str) -> list[str]:
  """Returns the words of the command. UserError: there is none, or no such program."""
  try:
    words = shlex.split(kind.removeprefix(protocol.COMMAND_PREFIX))
  except ValueError as error:
    raise types.UserError(f'config.env.kind={kind!r}: {error}: quote it as in a shell') from error
  if not words or '\0' in kind:
    raise types.UserError(
        f'config.env.kind={kind!r} names no command: give one, as in '
        f'{protocol.COMMAND_PREFIX}node agent.mjs'
    )
  if shutil.which(words[0]) is None:
    raise types.UserError(
        f'config.env.kind={kind!r}: there is no program {words[0]!r} that can be run: give its '
        'path, or add its folder to PATH'
    )
  return words


def files(kind: str) -> list[str]:
  """Returns the files among the words of the command, such as a script, but not the program."""
  program, *words = split(kind)
  if os.sep in program and not os.path.isabs(program):  # the user's own
    words.insert(0, program)
  return [word for word in words if os.path.isfile(word)]


def base_environment() -> dict[str, str]:
  """Returns the user's variables without keys of the gateway, for a program that calls it."""
  variables = {name: value for name, value in os.environ.items() if name not in _REMOVED}
  for name in ('NO_PROXY', 'no_proxy'):  # a proxy cannot reach the gateway
    variables[name] = ','.join(filter(None, (variables.get(name), _LOOPBACK)))
  return variables


def _environment(base_url, model):
  """Returns the variables of the command: those of the user, with the gateway in place of APIs."""
  return base_environment() | {
      'OPENAI_BASE_URL': base_url,
      'OPENAI_API_KEY': 'none',
      'OPENAI_MODEL': model,
      'ANTHROPIC_BASE_URL': base_url.removesuffix('/v1'),
      'ANTHROPIC_API_KEY': 'none',
      'ANTHROPIC_MODEL': model,
  }


def describe(status: int) -> str:
  """Returns an exit status in words."""
  if status > 0:
    return f'exit status {status}'
  try:
    return f'ended by {signal.Signals(-status).name}'
  except ValueError:
    return f'ended by signal {-status}'


def read_result(stdout: str) -> program_lib.Result:
  """Returns the result in the last line; without a reward if that line is anything else."""
  lines = stdout.split('\n')  # other separators may stand within a line of JSON
  last = next((line for line in reversed(lines) if line.strip()), '')
  try:
    value = json.loads(last)
  except (ValueError, RecursionError):
    return program_lib.Result(None)
  if isinstance(value, dict) and 'reward' in value:
    metrics = value.get('metrics') or {}
    if not isinstance(metrics, dict):
      raise CommandFailed(f'its last line has metrics that are no object: {last[:_MAX_SHOWN]}')
    numbers = {str(name): _finite(number, last) for name, number in metrics.items()}
    reward = value['reward']
    return program_lib.Result(None if reward is None else _finite(reward, last), numbers)
  return program_lib.Result(_finite(value, last) if _is_number(value) else None)


def _is_number(value):
  return isinstance(value, (int, float)) and not isinstance(value, bool)


def _finite(value, line):
  """Returns a number of a line as a float. CommandFailed: it is none, or not finite."""
  try:
    if _is_number(value) and math.isfinite(value):
      return float(value)
  except OverflowError:
    pass  # an integer beyond the range of a float
  raise CommandFailed(f'its last line needs finite numbers: {line[:_MAX_SHOWN]}')
