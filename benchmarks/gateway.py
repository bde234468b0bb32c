"""Load on the gateway with the embedded model, by the public tool wrk, beside the engine itself.

  python -m benchmarks.gateway --connections=1,16,64 --seconds=15
  python -m benchmarks.gateway --peer=http://127.0.0.1:8000/v1 --peer_model=/tmp/tiny

Each request is a question of the embedded data and at most 32 sampled tokens, at temperature 1. One
JSON line per server and number of connections: requests and tokens per second, and milliseconds of
the median and the 99th percentile. The engine's line plays as many questions without HTTP. Needs
`wrk` (a Debian package) and requirements-serve.txt.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time

from absl import app
from absl import flags
import jax

from experiments import st_ppo_tiny
from stppo_jax import chat
from stppo_jax.rollout import agent as agent_lib
from stppo_jax.rollout import engine
from stppo_jax.serving import gateway

_CONNECTIONS = flags.DEFINE_list('connections', ['1', '16', '64'], 'one run of wrk for each')
_SECONDS = flags.DEFINE_integer('seconds', 15, 'of each run')
_PEER = flags.DEFINE_string('peer', '', 'address of another server of the same model, with /v1')
_PEER_MODEL = flags.DEFINE_string('peer_model', '', 'its name there')
TOKENS, ROWS, MAX_TOTAL = 32, 64, 256
_SCRIPT = """
local bodies = {}
for line in io.lines('%s') do bodies[#bodies + 1] = line end
local n = math.random(#bodies)
request = function()
  n = n %% #bodies + 1
  return wrk.format('POST', '%s/completions', {['Content-Type'] = 'application/json'}, bodies[n])
end
local tokens = 0
local threads = {}
setup = function(thread) table.insert(threads, thread) end
sampled = 0
response = function(status, headers, body)
  sampled = sampled + tonumber(body:match('"completion_tokens": ?(%%d+)') or 0)
end
done = function(summary, latency, requests)
  for _, thread in ipairs(threads) do tokens = tokens + thread:get('sampled') end
  local wrong = summary.errors.status + summary.errors.timeout + summary.errors.read
  print(string.format('RESULT %%d %%d %%d %%d %%d %%d', summary.requests, tokens,
    summary.duration, latency:percentile(50), latency:percentile(99), wrong))
end
"""


def main(unused_argv):
  if not shutil.which('wrk'):
    sys.exit('benchmarks.gateway: wrk is not installed; on Debian, apt-get install wrk')
  config = st_ppo_tiny.get_config()
  config.rollout.max_total = MAX_TOTAL
  model, params = agent_lib.load_policy(config)
  params = jax.device_put(params)
  tokenizer = chat.load_tokenizer(agent_lib.EMBEDDED_MODEL)
  tasks = agent_lib.load_tasks(config, 'dev')
  prompts = [f'Question: {task.question}\n' for task in tasks]
  sampler = gateway.make_sampler(
      model, tokenizer, ROWS, MAX_TOTAL, chunks=(16, 64), slot_buckets=(MAX_TOTAL,)
  )
  print(json.dumps({'load': os.getloadavg()[0], 'cores': os.cpu_count()}))
  with tempfile.TemporaryDirectory() as folder:
    servers = [('peer', _PEER.value, _PEER_MODEL.value)] if _PEER.value else []
    with gateway.running(config, sampler, params, tokenizer, 'tiny') as server:
      for name, url, served in [('gateway', server.url + '/v1', 'tiny'), *servers]:
        bodies = _write_bodies(folder, name, prompts, served)
        for connections in map(int, _CONNECTIONS.value):
          _load(folder, url, bodies, connections, 2)  # compiles, and fills caches
          print(
              json.dumps({'server': name} | _load(folder, url, bodies, connections, _SECONDS.value))
          )
  for _ in range(2):
    figures = _play(config, model, params, tokenizer, prompts)
  print(json.dumps({'server': 'none: the engine'} | figures))


def _write_bodies(folder, name, prompts, served):
  path = os.path.join(folder, name)
  with open(path, 'w', encoding='utf-8') as file:
    for prompt in prompts:
      asked = {'model': served, 'prompt': prompt, 'max_tokens': TOKENS, 'temperature': 1.0}
      file.write(json.dumps(asked) + '\n')
  return path


def _load(folder, url, bodies, connections, seconds):
  """Runs wrk once; returns its figures."""
  script = os.path.join(folder, 'load.lua')
  with open(script, 'w', encoding='utf-8') as file:
    file.write(_SCRIPT % (bodies, re.sub(r'^https?://[^/]+', '', url)))
  command = ['wrk', '-t1', f'-c{connections}', f'-d{seconds}s', '--timeout=60s', '-s', script, url]
  found = subprocess.run(command, check=True, capture_output=True, text=True).stdout
  done, tokens, us, p50, p99, wrong = map(int, re.search(r'RESULT (.*)', found)[1].split())
  return {
      'connections': connections,
      'requests_per_s': round(done * 1e6 / us, 1),
      'tokens_per_s': round(tokens * 1e6 / us),
      'p50_ms': p50 / 1000,
      'p99_ms': p99 / 1000,
      'errors': wrong,
  }


def _play(config, model, params, tokenizer, prompts):
  """Samples one turn per prompt by `engine.run`; returns its figures."""
  config.rollout.slot_buckets, config.rollout.rows, config.rollout.width = (MAX_TOTAL,), ROWS, 32
  table = chat.stop_automaton(tokenizer.token_bytes, ())
  sampler = agent_lib.make_sampler(config, model, table, tokenizer.eos_ids)
  sequences = [engine.Prompt(tokenizer.encode(prompt), TOKENS) for prompt in prompts]
  keys = jax.random.split(jax.random.key(0), len(prompts))
  over = lambda turns: [engine.Prompt((), 0) for _ in turns]
  started = time.perf_counter()
  report = engine.run(sampler, params, sequences, keys, over)
  seconds = time.perf_counter() - started
  return {
      'rows': ROWS,
      'requests_per_s': round(len(prompts) / seconds, 1),
      'tokens_per_s': round(report.sampled_tokens / seconds),
  }


if __name__ == '__main__':
  app.run(main)
