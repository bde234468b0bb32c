"""Stands for vLLM's server: its command line and the routes that a trainer calls.

  python tests/support/vllm_stand_in.py --model FOLDER --port 8000 ..

Each turn is one random action of a model of `tiny_run`. Its log-prob is that of a uniform choice.
It imports no JAX, so that a test can start many.
"""

import argparse
from http import server
import json
import math
import os
import random
import signal
import sys

import tokenizers


class Engine(server.ThreadingHTTPServer):
  """An engine with the actions that it samples and the label of its weights."""

  daemon_threads = True
  request_queue_size = 128

  def __init__(self, flags: argparse.Namespace):
    super().__init__((flags.host, flags.port), Handler)
    tokenizer = tokenizers.Tokenizer.from_file(os.path.join(flags.model, 'tokenizer.json'))
    vocabulary = tokenizer.get_vocab().items()
    self.actions = [i for text, i in vocabulary if text.startswith(('<search> ', '<answer> '))]
    self.label = ''


class Handler(server.BaseHTTPRequestHandler):
  """Answers one request."""

  protocol_version = 'HTTP/1.1'
  server: Engine

  def log_message(self, format: str, *args: object) -> None:
    """Logs no request."""

  def do_GET(self) -> None:
    """Answers /health and /weight_info."""
    self._answer({'weight_version': self.server.label})

  def do_POST(self) -> None:
    """Samples a turn, or loads weights."""
    body = json.loads(self.rfile.read(int(self.headers['Content-Length'])))
    path = self.path.partition('?')[0]
    if path == '/v1/completions':
      logp = -math.log(len(self.server.actions))
      choice = {
          'token_ids': [random.choice(self.server.actions)],
          'logprobs': {'token_logprobs': [logp]},
          'finish_reason': 'stop',
      }
      self._answer({'choices': [choice]})
    elif path == '/update_weight_version':
      self.server.label = body['new_version']
      self._answer({})
    elif path == '/collective_rpc':
      folder = body['kwargs']['weights_path']
      assert any(name.endswith('.safetensors') for name in os.listdir(folder)), folder
      print('loaded', folder, flush=True)
      self._answer({})
    else:
      assert path in ('/pause', '/resume', '/reset_prefix_cache'), path
      self._answer({'success': True})

  def _answer(self, value: object) -> None:
    data = json.dumps(value).encode()
    self.send_response(200)
    self.send_header('Content-Length', str(len(data)))
    self.end_headers()
    self.wfile.write(data)


def main() -> None:
  """Serves until SIGTERM."""
  parser = argparse.ArgumentParser()
  parser.add_argument('--host', required=True)
  parser.add_argument('--port', type=int, required=True)
  parser.add_argument('--model', required=True)
  parser.add_argument('--dtype', required=True, choices=['bfloat16'])
  parser.add_argument('--max-model-len', type=int, required=True)
  parser.add_argument('--logprobs-mode', required=True, choices=['processed_logprobs'])
  flags = parser.parse_args()
  assert os.environ['VLLM_SERVER_DEV_MODE'] == '1', 'the routes that load weights are closed'
  signal.signal(signal.SIGTERM, lambda *unused: sys.exit(0))
  Engine(flags).serve_forever()


if __name__ == '__main__':
  main()
