#!/usr/bin/env bash
set -euo pipefail
# Expected: A program that is sampled at temperature 1 asks its model server each time, above all if
#   the second call goes to another server. Reinforcement learning needs different samples of one
#   question, and samples of the newest weights.
# Happens: DSPy answers a request that it has seen from its cache, whatever the temperature. The
#   address is no part of the key, so another server that offers a model of the same name is never
#   asked. cache=False turns it off.
# Versions: dspy 3.4.1
# Output seen:
#   four calls of server A: A1 A1 A1 A1
#   four calls of server B, the same model name: A1 A1 A1 A1
#   two calls of server B with cache=False: B1 B2
#   requests: A 1, B 2
# Seen on: 2026-11-30, Python 3.11, CPU

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check 'dspy==3.4.1'
cd "$folder"
DSPY_CACHEDIR="$folder/cache" HOME="$folder" "$folder/venv/bin/python" -W ignore - <<'PYTHON'
import collections
from http import server
import json
import logging
import threading

logging.disable(logging.WARNING)
import dspy  # pylint: disable=g-import-not-at-top

requests = collections.Counter()


def start(name):
  """Returns the address of a chat server whose answers are `name` and a number."""

  class Handler(server.BaseHTTPRequestHandler):

    def log_message(self, *_):
      pass

    def do_POST(self):
      body = json.loads(self.rfile.read(int(self.headers['Content-Length'])))
      requests[name] += 1
      text = f'{name}{requests[name]}'
      choice = {'index': 0, 'finish_reason': 'stop'}
      choice['message'] = {'role': 'assistant', 'content': text}
      usage = {'prompt_tokens': 1, 'completion_tokens': 1, 'total_tokens': 2}
      answer = {'id': text, 'object': 'chat.completion', 'created': 1, 'model': body['model']}
      data = json.dumps({**answer, 'choices': [choice], 'usage': usage}).encode()
      self.send_response(200)
      self.send_header('Content-Type', 'application/json')
      self.send_header('Content-Length', str(len(data)))
      self.end_headers()
      self.wfile.write(data)

  httpd = server.ThreadingHTTPServer(('127.0.0.1', 0), Handler)
  threading.Thread(target=httpd.serve_forever, daemon=True).start()
  return f'http://127.0.0.1:{httpd.server_port}/v1'


def answers(address, number, **settings):
  samples = []
  for _ in range(number):
    policy = dspy.LM('openai/policy', api_base=address, api_key='x', temperature=1.0, **settings)
    samples.append(policy('Where is the tower?')[0])
  return ' '.join(samples)


a, b = start('A'), start('B')
outputs = {
    'four calls of server A': answers(a, 4),
    'four calls of server B, the same model name': answers(b, 4),
    'two calls of server B with cache=False': answers(b, 2, cache=False),
}
for name, output in outputs.items():
  print(f'{name}: {output}')
print('requests:', ', '.join(f'{name} {number}' for name, number in requests.items()))
assert list(outputs.values()) == ['A1 A1 A1 A1', 'A1 A1 A1 A1', 'B1 B2'], 'DSPy differs now'
PYTHON
