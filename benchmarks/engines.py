"""Our sampler, our gateway and vLLM as sampling engines: throughput, pushes of weights, idle time.

  python -m benchmarks.engines --python=VENV/bin/python      # without --python vLLM is left out

All have the embedded model in float32 on the same cores. Prints JSON lines:

  throughput   tokens per second with so many sequences at once, median and range of the repeats
  push         seconds of writing the weights, and of pause, load, cache reset and resume
  idle         share of the time in which the trainer waits for a batch, and in which the engine has
               no batch in progress, for each staleness, over the updates after the first three
"""

import contextlib
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time

from absl import app
from absl import flags
import jax

from benchmarks import servers
from experiments import st_ppo_tiny
from stppo_jax.assembly import agents as agents_lib
from stppo_jax.assembly import components
from stppo_jax.models import convert
from stppo_jax.rollout import engine
from stppo_jax.rollout import engines as engines_lib
from stppo_jax.rollout import prepare
from stppo_jax.stop_signal import NEVER

_PYTHON = flags.DEFINE_string('python', '', 'Python of an environment with vLLM')
_SEQUENCES = flags.DEFINE_list('sequences', ['1', '8', '32'], 'sequences at once')
_STALENESS = flags.DEFINE_list('staleness', ['0', '1', '2', '4'], 'config.pipeline.staleness')
_REPEATS = flags.DEFINE_integer('repeats', 5, 'of each measurement')
_UPDATES = flags.DEFINE_integer('updates', 12, 'of each run that measures idle time')
_ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
TOKENS = 32


def main(unused_argv):
  _print({'load': os.getloadavg()[0], 'cores': os.cpu_count(), 'jax': jax.__version__})
  with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as resources:
    weights = os.path.join(folder, 'weights')
    addresses = {'stppo': _start(resources, folder, weights, 'stppo')}
    if _PYTHON.value:
      addresses['vllm'] = _start(resources, folder, weights, 'vllm')
    for number in map(int, _SEQUENCES.value):
      _measure_throughput(folder, weights, addresses, number)
    for kind, address in addresses.items():
      _measure_push(folder, weights, kind, address)
    for staleness in _STALENESS.value:
      for kind, address in addresses.items():
        _measure_idle(folder, weights, kind, address, staleness)


def _start(resources, folder, weights, kind):
  """Starts an engine; returns its address."""
  port = servers.free_port()
  log = os.path.join(folder, f'{kind}.log')
  if kind == 'vllm':
    model = os.path.join(folder, 'model')
    shape, params = convert.load_hf(prepare.EMBEDDED_MODEL)
    convert.save_hf(model, shape, params, prepare.EMBEDDED_MODEL)
    process = servers.start_vllm(_PYTHON.value, model, port, log)
  else:
    process = servers.start_engine(weights, port, log)
  resources.enter_context(servers.ended(process))
  return servers.wait_until_healthy(process, port)


def _make_config(weights, number):
  config = st_ppo_tiny.get_config()
  config.rollout.rows = number
  config.rollout.width = number
  config.rollout.engine_folder = weights
  return config


def _agents(weights, addresses, number):
  """Returns {name: agent}, and the parameters."""
  config = _make_config(weights, number)
  model, params = prepare.load_policy(config)
  params = jax.tree.map(jax.numpy.asarray, params)
  own = agents_lib.make_agent(config, components.resolve(config), model)
  agents = {'ours': own}
  for kind, address in addresses.items():
    config = _make_config(weights, number)  # an agent reads its own when it is opened
    config.rollout.engine = address
    config.rollout.engine_kind = kind
    agent = dataclasses.replace(own, config=config)
    agents[kind] = engines_lib.with_engines(agent)
  return agents, params


def _measure_throughput(folder, weights, addresses, number):
  agents, params = _agents(weights, addresses, number)
  tokenizer = agents['ours'].tokenizer
  tasks = components.resolve(agents['ours'].config).load_tasks('train')[: 4 * number]
  prompts = [tokenizer.encode(f'Question: {task.question}\n') for task in tasks]
  prompts = [engine.Prompt(prompt, TOKENS) for prompt in prompts]
  keys = jax.random.split(jax.random.key(0), len(prompts))
  over = lambda completions: [engine.Prompt((), 0) for _ in completions]
  rates = {name: [] for name in agents}
  for name, agent in agents.items():
    with _opened(agent, folder, params, tasks):
      copy = agent.sampler.copy(params)
      for repeat in range(_REPEATS.value + 1):  # the first compiles
        started = time.perf_counter()
        report = agent.run(agent.sampler, copy, prompts, keys, over)
        seconds = time.perf_counter() - started
        if repeat:
          rates[name].append(report.sampled_tokens / seconds)
  for name, values in rates.items():
    figures = {'tokens_per_s': statistics.median(values), 'range': [min(values), max(values)]}
    _print({'measure': 'throughput', 'engine': name, 'sequences': number, **figures})


def _opened(agent, folder, params, tasks):
  """Returns a context manager of a run of the agent."""
  if isinstance(agent, engines_lib.RemoteAgent):
    return agent.opened(folder, 0, params, tasks, NEVER)
  return contextlib.nullcontext()


def _measure_push(folder, weights, kind, address):
  agents, params = _agents(weights, {kind: address}, 8)
  agent = agents[kind]
  tasks = components.resolve(agent.config).load_tasks('train')[:8]
  write_s = []
  push_s = []
  with agent.opened(folder, 0, params, tasks, NEVER):
    fleet = agent.sampler.fleet
    for _ in range(2 * _REPEATS.value):
      started = time.perf_counter()
      copy = agent.sampler.copy(jax.tree.map(lambda x: x + 0, params))
      write_s.append(time.perf_counter() - started)
      fleet.take_push_s()
      fleet.engines[0].ensure(copy)
      push_s.append(fleet.take_push_s())
  figures = {'write_s': statistics.median(write_s), 'push_s': statistics.median(push_s)}
  _print({'measure': 'push', 'engine': kind, **figures})


def _measure_idle(folder, weights, kind, address, staleness):
  workdir = os.path.join(folder, f'run_{kind}_{staleness}')
  settings = {
      'train.updates': _UPDATES.value,
      'train.checkpoint_every': 0,
      'eval.every': 0,
      'eval.episodes': 8,
      'log.episodes': False,
      'log.tensorboard': False,
      'pipeline.staleness': staleness,
      'rollout.engine': address,
      'rollout.engine_kind': kind,
      'rollout.engine_folder': weights,
  }
  command = [sys.executable, 'run.py', '--config=experiments/st_ppo_tiny.py']
  command += [f'--workdir={workdir}']
  command += [f'--config.{name}={value}' for name, value in settings.items()]
  subprocess.run(command, cwd=_ROOT, check=True, capture_output=True)
  with open(os.path.join(workdir, 'metrics.jsonl'), encoding='utf-8') as file:
    updates = [json.loads(line) for line in file][4:]
  seconds = sum(update['timing_s/step'] for update in updates)
  figures = {
      'update_s': seconds / len(updates),
      'trainer_idle': sum(update['timing_s/wait'] for update in updates) / seconds,
      'engine_idle': 1 - sum(update['timing_s/gen'] for update in updates) / seconds,
      'turn_age': statistics.mean(update['engine/turn_age/mean'] for update in updates),
  }
  _print({'measure': 'idle', 'engine': kind, 'staleness': int(staleness), **figures})


def _print(line):
  rounded = {name: round(x, 4) if isinstance(x, float) else x for name, x in line.items()}
  print(json.dumps(rounded), flush=True)


if __name__ == '__main__':
  app.run(main)
