"""The gateway under load, beside transformers' own server and the engine called directly.

  python -m venv /tmp/load && /tmp/load/bin/pip install -r benchmarks/requirements-gateway.txt
  python -m benchmarks.gateway --python=/tmp/load/bin/python --connections=1,16,64 --repeats=3

The load comes from GuideLLM. Every server has the embedded model in float32, gets the embedded
questions at /v1/completions, and samples 32 tokens for each at temperature 1. The servers take
turns, and so many clients at once each send their next question when the last one is answered.
One JSON line per server and number of clients: requests and tokens per second, milliseconds of
the median and the 99th percentile. The last line is the engine without HTTP.
"""

import contextlib
import json
import os
import socket
import subprocess
import tempfile
import time
import urllib.request

from absl import app
from absl import flags
import jax
import numpy as np

from benchmarks import figures
from benchmarks import servers
from experiments import st_ppo_tiny
from stppo_jax.assembly import components
from stppo_jax.rollout import agent as agent_lib
from stppo_jax.rollout import engine
from stppo_jax.rollout import prepare
from stppo_jax.text import tokenizer as chat

_PYTHON = flags.DEFINE_string('python', '', 'of an environment with requirements-gateway.txt')
_CONNECTIONS = flags.DEFINE_list('connections', ['1', '16', '64'], 'clients at once')
_SECONDS = flags.DEFINE_integer('seconds', 15, 'of each load')
_REPEATS = flags.DEFINE_integer('repeats', 3, 'of each load')
TOKENS, ROWS, MAX_TOTAL, WARM_UP = 32, 64, 256, 5
OURS = (
    '--config.name=tiny',
    f'--config.serve.rows={ROWS}',
    f'--config.serve.max_total={MAX_TOTAL}',
)


def main(argv):
  del argv
  config = st_ppo_tiny.get_config()
  tasks = components.resolve(config).load_tasks('dev')
  prompts = [f'Question: {task.question}\n' for task in tasks]
  figures.print_line({'load': os.getloadavg()[0], 'cores': os.cpu_count(), 'jax': jax.__version__})
  found: dict = {}
  with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
    questions = os.path.join(folder, 'questions.jsonl')
    with open(questions, 'w', encoding='utf-8') as file:
      file.writelines(json.dumps({'prompt': prompt}) + '\n' for prompt in prompts)
    port, _ = stack.enter_context(servers.gateway(*OURS))
    peer_port = stack.enter_context(_transformers(batching=True))
    ask = {'temperature': 1.0}
    loads = {
        'gateway': (port, 'tiny', ask | {'ignore_eos': True}),
        'transformers': (peer_port, prepare.EMBEDDED_MODEL, ask),  # its model has no eos there
    }
    for connections in map(int, _CONNECTIONS.value):
      for repeat in range(_REPEATS.value + 1):  # the first compiles, and fills caches
        for name, load in loads.items():
          seconds = _SECONDS.value if repeat else WARM_UP
          figure = _load(folder, questions, *load, connections, seconds)
          if repeat:
            found.setdefault((name, connections), []).append(figure)
      for name in loads:
        _report(name, connections, found[name, connections], found['transformers', connections])
  engine_runs = [_play(config, prompts) for _ in range(_REPEATS.value + 1)][1:]
  _report('engine, no HTTP', ROWS, engine_runs)


@contextlib.contextmanager
def _transformers(batching):
  """Context manager of the port of transformers' server, once it answers."""
  with socket.socket() as free:
    free.bind(('127.0.0.1', 0))
    port = free.getsockname()[1]
  tool = os.path.join(os.path.dirname(_PYTHON.value), 'transformers')
  command = [tool, 'serve', prepare.EMBEDDED_MODEL, '--device=cpu', '--dtype=float32']
  command += [f'--port={port}', *(['--continuous-batching'] if batching else [])]
  process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
  with servers.ended(process):
    for _ in range(120):
      with contextlib.suppress(OSError):
        urllib.request.urlopen(f'http://127.0.0.1:{port}/health', timeout=5).close()
        yield port
        return
      time.sleep(1)
    raise SystemExit('the server of transformers has not started')


def _load(folder, questions, port, model, body, connections, seconds):
  """Loads a server with so many clients; returns its figures."""
  report = os.path.join(folder, 'report.json')
  backend = {
      'kind': 'openai_http',
      'target': f'http://127.0.0.1:{port}',
      'model': model,
      'request_format': '/v1/completions',
      'stream': False,
      'max_tokens': TOKENS,
      'extras': {'body': body},
  }
  tool = os.path.join(os.path.dirname(_PYTHON.value), 'guidellm')
  command = [tool, 'run', '--disable-console', '--backend', json.dumps(backend)]
  command += ['--profile', f'kind=concurrent,streams={connections}']
  command += ['--constraint', f'kind=max_duration,seconds={seconds}']
  command += ['--data', f'kind=json_file,path={questions}', '--output', f'kind=json,path={report}']
  command += ['--tokenizer', f'kind=hf_auto,model={prepare.EMBEDDED_MODEL}']
  subprocess.run(command, check=True, capture_output=True, env=os.environ | {'HF_HUB_OFFLINE': '1'})
  with open(report, encoding='utf-8') as file:
    (benchmark,) = json.load(file)['benchmarks']
  metrics, duration = benchmark['metrics'], benchmark['duration']
  latency = metrics['request_latency']['successful']['percentiles']
  return {
      'requests_per_s': metrics['request_totals']['successful'] / duration,
      'tokens_per_s': metrics['output_token_count']['successful']['total_sum'] / duration,
      'p50_ms': latency['p50'] * 1000,
      'p99_ms': latency['p99'] * 1000,
      'errors': metrics['request_totals']['errored'],
  }


def _play(config, prompts):
  """Samples one turn per prompt by `engine.run`; returns its figures."""
  config.rollout.max_total, config.rollout.slot_buckets = MAX_TOTAL, (MAX_TOTAL,)
  config.rollout.rows, config.rollout.width = ROWS, 32
  model, params = prepare.load_policy(config)
  tokenizer = chat.load_tokenizer(prepare.EMBEDDED_MODEL)
  table = chat.stop_automaton(tokenizer.token_bytes, ())
  sampler = agent_lib.make_sampler(config, model, table, (model.vocab_size - 1,))  # nearly no eos
  turns = [engine.Prompt(tokenizer.encode(prompt), TOKENS) for prompt in prompts] * 4
  keys = jax.random.split(jax.random.key(0), len(turns))
  copy = sampler.copy(params)
  for _ in range(2):  # the first compiles
    started = time.perf_counter()
    report = engine.run(
        sampler, copy, turns, keys, lambda ended: [engine.Prompt((), 0) for _ in ended]
    )
    seconds = time.perf_counter() - started
  return {'requests_per_s': len(turns) / seconds, 'tokens_per_s': report.sampled_tokens / seconds}


def _report(name, connections, repeats, peer=None):
  line = {'server': name, 'clients': connections}
  for what in repeats[0]:
    line[what] = figures.short(np.median([repeat[what] for repeat in repeats]))
  speeds = [repeat['tokens_per_s'] for repeat in repeats]
  spread = {'tokens_per_s': figures.min_max(speeds)}
  if peer is not None and peer is not repeats:
    ratios = [a['tokens_per_s'] / b['tokens_per_s'] for a, b in zip(repeats, peer)]
    line['ratio'], spread['ratio'] = figures.short(np.median(ratios)), figures.min_max(ratios)
  figures.print_line(line | {'spread': spread, 'unreliable': figures.unreliable(spread)})


if __name__ == '__main__':
  app.run(main)
