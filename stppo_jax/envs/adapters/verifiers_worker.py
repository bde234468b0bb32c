"""A process that plays episodes of a verifiers environment: `python verifiers_worker.py`.

adapters/verifiers.py starts it with the Python that has verifiers. Lines of JSON come on standard
input and go to standard output. The first line is the settings. A request {"number", "tasks"} is
answered by the tasks of a split. A request {"number", "index", "split", "base_url", "model"} plays
an episode, whose model is the gateway. When standard input closes, the process ends, and verifiers
ends its harnesses. It imports nothing of this package.
"""

import asyncio
import contextlib
import itertools
import json
import logging
import os
import sys
import threading

import verifiers.v1 as vf
from verifiers.v1.utils import loaders

_HELD_OUT = 10  # without settings of their own, the evaluation has each tenth task
_MAX_CLIENTS = 256  # verifiers keeps a client per address, until `serving` ends
_TRAIN = 'train'


class SettingsError(Exception):
  """A mistake in the settings of the run."""


class Environment:
  """A verifiers environment with its tasks."""

  def __init__(self, config, max_tasks):
    self._env = loaders.load_environment(config)
    self.tasks = list(itertools.islice(self._env.taskset, max_tasks))
    self._serving = None
    self._lock = asyncio.Lock()
    self._num_active = 0
    self._num_clients = 0

  async def play(self, task, base_url, model):
    """Returns verifiers' record of one episode."""
    client = vf.EvalClientConfig(base_url=base_url, api_key_var='STPPO_GATEWAY_NEEDS_NO_KEY')
    context = vf.ModelContext(client=client, model=model, sampling=vf.SamplingConfig())
    async with self._lock:
      if self._serving is None:
        serving = contextlib.AsyncExitStack()
        await serving.enter_async_context(self._env.serving())
        self._serving = serving  # after a failed start the next episode tries again
      self._num_active += 1
      self._num_clients += 1
    try:
      (slot,) = self._env.slots(task)
      return await self._env.run_slot(slot, context)
    finally:
      async with self._lock:
        self._num_active -= 1
        if not self._num_active and self._num_clients >= _MAX_CLIENTS:
          await self.close()

  async def close(self):
    """Ends what the environment has started for its episodes."""
    serving = self._serving
    self._serving = None
    self._num_clients = 0
    if serving is not None:
      await serving.aclose()


class RequestHandler:
  """Answers requests."""

  def __init__(self, settings):
    self._settings = settings
    self._environments = {}

  async def answer(self, request):
    """Returns the fields of an answer."""
    split = request.get('tasks') or request['split']
    environment = self._environment(split)
    numbered = [(i, task) for i, task in enumerate(environment.tasks) if self._has(split, i)]
    if 'tasks' in request:
      return {'tasks': [{'index': i, 'prompt': task.data.prompt_text} for i, task in numbered]}
    task = environment.tasks[request['index']]
    episode = await environment.play(task, request['base_url'], request['model'])
    return result(episode)

  async def close(self):
    """Ends all environments."""
    for environment in self._environments.values():
      await environment.close()

  def _environment(self, split):
    is_held_out = split != _TRAIN and self._settings['eval_taskset'] is not None
    if is_held_out not in self._environments:
      config = make_config(self._settings, is_held_out)
      self._environments[is_held_out] = Environment(config, self._settings['max_tasks'])
    return self._environments[is_held_out]

  def _has(self, split, index):
    """Returns whether a task belongs to a split."""
    if self._settings['eval_taskset'] is not None:
      return True
    return (index % _HELD_OUT == _HELD_OUT - 1) == (split != _TRAIN)


def make_config(settings, is_held_out):
  """Returns verifiers' config. SettingsError: it cannot be trained with."""
  taskset = {'id': settings['id'], **settings['taskset']}
  if is_held_out:
    taskset |= settings['eval_taskset']
  given = {**settings['env'], 'taskset': taskset}
  fields = loaders.env_config_type(settings['id'], given.get('id') or '').model_fields
  agents = [name for name, field in fields.items() if isinstance(field.default, vf.AgentConfig)]
  players = [name for name in agents if not (given.get(name) or {}).get('client')]
  if len(players) != 1:
    raise SettingsError(
        f'the agents {", ".join(players)} would all be the policy: set env.NAME.client for all but '
        'one of them'
    )
  harness = {'id': loaders.default_harness_id(settings['id'])}
  if harness['id'] == 'bash':  # verifiers' default, which runs the model's commands
    harness['id'] = 'null'
  for name in agents:
    given[name] = {'harness': harness, **(given.get(name) or {})}
    if 'runtime' not in given[name]:
      program = loaders.harness_class(given[name]['harness']['id'])
      if program.EXECUTES_CODE:
        raise SettingsError(
            f'the harness {given[name]["harness"]["id"]!r} runs programs that the model writes: '
            f'set env.{name}.runtime, such as {{"type": "docker"}}, or {{"type": "subprocess"}} '
            'for this machine'
        )
      given[name]['runtime'] = {'type': 'subprocess'}  # verifiers' default is a rented machine
  return loaders.resolve_env_config(given)


def result(episode):
  """Returns reward and metrics of an episode, or its error."""
  if not episode.ok:
    errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
    last = errors[-1] if errors else None
    return {'error': f'{last.type}: {last.message}' if last else 'the episode has failed'}
  traces = [trace for trace in episode.traces if trace.agent.trainable]
  metrics = {}
  for trace in traces:
    metrics |= {name: value for name, value in trace.metrics.items() if value is not None}
    metrics |= {name: reward.score for name, reward in trace.rewards.items() if reward is not None}
  return {'reward': sum(trace.reward for trace in traces), 'metrics': metrics}


def read_lines(loop, lines):
  """Puts lines of standard input into a queue, and None at its end."""
  for line in sys.stdin:
    loop.call_soon_threadsafe(lines.put_nowait, line)
  loop.call_soon_threadsafe(lines.put_nowait, None)


async def main(output):
  """Answers requests until standard input closes."""
  loop = asyncio.get_running_loop()
  lines = asyncio.Queue()
  threading.Thread(target=read_lines, args=(loop, lines), daemon=True).start()
  worker = RequestHandler(json.loads(await lines.get()))
  in_progress = set()

  async def answer(line):
    request = json.loads(line)
    fields = {'number': request['number']}
    try:
      fields |= await worker.answer(request)
    except Exception as error:  # an environment may raise anything
      text = ' '.join(str(error).split())
      fields |= {
          'error': text if isinstance(error, SettingsError) else f'{type(error).__name__}: {text}'
      }
    output.write(json.dumps(fields) + '\n')
    output.flush()

  while (line := await lines.get()) is not None:
    task = asyncio.create_task(answer(line))
    in_progress.add(task)
    task.add_done_callback(in_progress.discard)
  for task in in_progress:
    task.cancel()
  await asyncio.gather(*in_progress, return_exceptions=True)
  await worker.close()


if __name__ == '__main__':
  answers = os.fdopen(os.dup(1), 'w')
  os.dup2(2, 1)  # what environments print is no answer
  logging.basicConfig(level=logging.WARNING)
  asyncio.run(main(answers))
