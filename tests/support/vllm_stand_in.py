"""Stands for vLLM's server: its command line and the routes that a trainer calls.

  python tests/support/vllm_stand_in.py --model FOLDER --port 8000 ..

Each turn is one action of a model of `tiny_run`, which depends on the context and the weights. Its
log-prob is that of a uniform choice. It imports no JAX, so that a test can start many.

Its sleep mode does what vLLM 0.32 does on a GPU. A request to an engine that sleeps waits. Work on
memory that is not there ends the process. Weights are lost at level 2, and turns without weights
are made of any tokens. Without --enable-sleep-mode, /sleep frees nothing and reports success.
"""

import argparse
from collections.abc import Sequence
from http import server
import json
import math
import os
import random
import signal
import sys
import threading
import urllib.parse

import tokenizers

TAGS = frozenset(('weights', 'kv_cache'))


class Engine(server.ThreadingHTTPServer):
  """An engine: the actions that it samples, its weights with their label, and what is asleep."""

  daemon_threads = True
  request_queue_size = 128

  def __init__(self, flags: argparse.Namespace):
    super().__init__((flags.host, flags.port), Handler)
    tokenizer = tokenizers.Tokenizer.from_file(os.path.join(flags.model, 'tokenizer.json'))
    vocabulary = sorted(tokenizer.get_vocab().items())  # its own order differs between processes
    self.actions = [i for text, i in vocabulary if text.startswith(('<search> ', '<answer> '))]
    self.has_dev_mode = os.environ.get('VLLM_SERVER_DEV_MODE') == '1'
    self.has_sleep_mode = flags.enable_sleep_mode
    self.delay_s = 0.0  # a turn takes it
    self.failing = ''  # a route that fails once
    self.label = 'default'
    self.weights = os.path.basename(flags.model)
    self.asleep: set[str] = set()  # tags of memory
    self.is_paused = False
    self.num_aborts = 0
    self.state = threading.Condition()  # guards the five fields above
    self.log: list[str] = []  # paths, and what they do to the memory

  def crash(self, cause: str) -> None:
    """Ends the process, as an illegal memory access does."""
    print('illegal memory access:', cause, flush=True)
    os._exit(1)

  def use(self, tags: Sequence[str], cause: str) -> None:
    """Works on memory."""
    if self.has_sleep_mode and self.asleep.intersection(tags):
      self.crash(cause)

  def sleep(self, level: int) -> None:
    """Aborts all turns, and releases memory."""
    with self.state:
      self.is_paused = True
      self.num_aborts += 1
      if 'weights' not in self.asleep:
        if level == 2 and self.has_sleep_mode:
          self.weights = ''
        self.asleep |= TAGS
      self.state.notify_all()

  def wake(self, tags: Sequence[str]) -> None:
    """Maps memory. A tag that is awake makes the call do nothing."""
    with self.state:
      if self.asleep.issuperset(tags):
        self.asleep -= set(tags or TAGS)
      if not self.asleep:
        self.is_paused = False
      self.state.notify_all()

  def sample(self, prompt: Sequence[int]) -> tuple[list[int], str]:
    """Returns (tokens, reason of the end) of a turn, when the engine is not paused."""
    with self.state:
      num_aborts = self.num_aborts
      self.state.wait_for(lambda: not self.is_paused)
      self.use(('weights', 'kv_cache'), 'a turn')
      if self.state.wait_for(lambda: self.num_aborts > num_aborts, self.delay_s):
        return [], 'abort'
      if not self.weights:
        return [random.randrange(100)], 'stop'
      seed = json.dumps([self.weights, list(prompt)])
      return [random.Random(seed).choice(self.actions)], 'stop'


class Handler(server.BaseHTTPRequestHandler):
  """Answers one request."""

  protocol_version = 'HTTP/1.1'
  server: Engine

  def log_message(self, format: str, *args: object) -> None:
    """Logs no request."""

  def do_GET(self) -> None:
    """Answers /health, /weight_info, /is_sleeping and /server_info."""
    engine = self.server
    path = self.path.partition('?')[0]
    if path == '/is_sleeping' and engine.has_dev_mode:
      self._answer({'is_sleeping': engine.is_paused or bool(engine.asleep)})
    elif path == '/server_info' and engine.has_dev_mode:
      model_config = {'enable_sleep_mode': engine.has_sleep_mode}
      self._answer({'vllm_config': {'model_config': model_config}})
    elif path == '/health' or path == '/weight_info' and engine.has_dev_mode:
      self._answer({'weight_version': engine.label})
    else:
      self._answer({'detail': 'Not Found'}, 404)

  def do_POST(self) -> None:
    """Samples a turn, loads weights, or changes what is awake."""
    engine = self.server
    body = json.loads(self.rfile.read(int(self.headers['Content-Length'])))
    path, _, query = self.path.partition('?')
    parameters = urllib.parse.parse_qs(query)
    engine.log.append(self.path)
    if path != '/v1/completions' and not engine.has_dev_mode:
      self._answer({'detail': 'Not Found'}, 404)
    elif path == engine.failing:
      engine.failing = ''
      self._answer({'error': 'it failed'}, 500)
    elif path == '/v1/completions':
      tokens, reason = engine.sample(body['prompt'])
      logp = [-math.log(len(engine.actions))] * len(tokens)
      logprobs = {'token_logprobs': logp}
      choice = {'token_ids': tokens, 'logprobs': logprobs, 'finish_reason': reason}
      self._answer({'choices': [choice]})
    elif path == '/update_weight_version':
      engine.label = body['new_version']
      self._answer({})
    elif path == '/collective_rpc':
      folder = body['kwargs']['weights_path']
      assert any(name.endswith('.safetensors') for name in os.listdir(folder)), folder
      engine.use(('weights',), 'a load')
      engine.weights = os.path.basename(folder)
      print('loaded', folder, flush=True)
      self._answer({})
    elif path == '/sleep':
      engine.sleep(int(parameters['level'][0]))
      self._answer({'status': 'sleeping'})
    elif path == '/wake_up':
      engine.wake(parameters.get('tags', []))
      self._answer({'status': 'sleeping' if engine.asleep else 'awake'})
    elif path in ('/pause', '/resume'):
      with engine.state:
        engine.is_paused = path == '/pause'
        engine.state.notify_all()
      self._answer({})
    else:
      assert path == '/reset_prefix_cache', path
      self._answer({'success': True})

  def _answer(self, value: object, status: int = 200) -> None:
    data = json.dumps(value).encode()
    self.send_response(status)
    self.send_header('Content-Length', str(len(data)))
    self.end_headers()
    self.wfile.write(data)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
  """Returns the flags of a command line."""
  parser = argparse.ArgumentParser()
  parser.add_argument('--host', required=True)
  parser.add_argument('--port', type=int, required=True)
  parser.add_argument('--model', required=True)
  parser.add_argument('--dtype', required=True, choices=['bfloat16'])
  parser.add_argument('--max-model-len', type=int, required=True)
  parser.add_argument('--logprobs-mode', required=True, choices=['processed_logprobs'])
  parser.add_argument('--enable-sleep-mode', action='store_true')
  parser.add_argument('--gpu-memory-utilization', type=float)
  return parser.parse_args(arguments)


def main() -> None:
  """Serves until SIGTERM."""
  flags = parse()
  assert os.environ['VLLM_SERVER_DEV_MODE'] == '1', 'the routes that load weights are closed'
  signal.signal(signal.SIGTERM, lambda *unused: sys.exit(0))
  Engine(flags).serve_forever()


if __name__ == '__main__':
  main()
