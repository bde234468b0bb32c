"""Sends broken and hostile requests to a gateway in a process of its own; watches its memory.

  python -m benchmarks.hostile --requests=10000

Prints one JSON line per tenth of the requests: how many had each HTTP status, how many connections
were closed by our side on purpose and how many by the server, and the server's resident memory. The
last line says whether the server still answers as at first.
"""

import collections
import http.client
import json
import random
import re
import socket
import time
from typing import Any
import urllib.request

from absl import app
from absl import flags

from benchmarks import servers

_REQUESTS = flags.DEFINE_integer('requests', 10_000, 'how many')
_SEED = flags.DEFINE_integer('seed', 0, 'of the requests')
_PATHS = ('/v1/chat/completions', '/v1/completions', '/s/nobody/v1/completions', '/s/x/reward')
_ELSEWHERE = (
    '/',
    '/v1',
    '/v1/files',
    '/../../etc/passwd',
    '/s//v1/models',
    '/%00',
    '/' + 'a' * 5000,
)
_JUNK: tuple[Any, ...] = (
    None, True, -1, 0, 2**70, 1e308, float('nan'), '', 'x', '\ud800', '\0', [], {}, [[]],
    ['a', 1], {'a': {}}, [None] * 50, 'é' * 2000,
)  # fmt: skip
_FIELDS = ('model', 'messages', 'prompt', 'max_tokens', 'temperature', 'top_p', 'n', 'stop', 'seed')
_FIELDS += ('stream', 'logprobs', 'tools', 'stream_options', 'return_token_ids', 'user', 'echo')
_ROLES = ('system', 'user', 'assistant', 'tool', 'nobody')


def main(argv):
  del argv
  rng = random.Random(_SEED.value)
  with servers.gateway('--config.serve.max_total=256') as (port, server):
    first = _greedy(port)
    block = max(_REQUESTS.value // 10, 1)
    for start in range(0, _REQUESTS.value, block):
      seen: collections.Counter = collections.Counter()
      for _ in range(block):
        seen[_one(port, rng)] += 1
      time.sleep(1)  # requests whose client has gone end soon
      print(json.dumps({'requests': start + block, **seen, 'rss_mb': _resident(port)}), flush=True)
    print(json.dumps({'alive': server.poll() is None, 'same_answer': _greedy(port) == first}))


def _one(port, rng):
  """Sends one request; returns its status, or how the connection ended."""
  kind = rng.choice(('fields', 'fields', 'good', 'text', 'bytes', 'length', 'leave', 'elsewhere'))
  path = rng.choice(_PATHS)
  body = json.dumps(_body(rng, kind == 'fields'), ensure_ascii=rng.random() < 0.5)
  data = body.encode('utf-8', 'surrogatepass')
  if kind == 'text':
    data = rng.choice(
        (b'', b'{', b'[' * 50_000, b'"', data[: len(data) // 2], b'null', b'0' * 9999)
    )
  elif kind == 'bytes':
    data = rng.randbytes(rng.randrange(500))
  elif kind == 'elsewhere':
    path = rng.choice(_ELSEWHERE)
  elif kind == 'good':
    path = rng.choice(_PATHS[:2])
  if kind in ('length', 'leave'):
    return _raw(port, rng, path, data, kind)
  connection = http.client.HTTPConnection('127.0.0.1', port, timeout=60)
  try:
    connection.request(rng.choice(('POST',) * 8 + ('GET', 'PUT')), path, data)
    answer = connection.getresponse()
    answer.read()
    return str(answer.status)
  except (OSError, http.client.HTTPException) as error:
    return type(error).__name__
  finally:
    connection.close()


def _body(rng, broken):
  message = {'role': rng.choice(_ROLES[:3]), 'content': rng.choice(('Hi', 'Where?', 'é 你好'))}
  body: dict[str, Any] = {'max_tokens': rng.randrange(1, 9), 'stream': rng.random() < 0.3}
  body |= {'messages': [message], 'prompt': 'The capital of'}
  body |= {'temperature': rng.choice((0, 1)), 'n': rng.choice((1, 1, 2))}
  del body[rng.choice(('messages', 'prompt'))]
  for _ in range(rng.randrange(1, 4) if broken else 0):
    body[rng.choice(_FIELDS)] = rng.choice(_JUNK)
  return body


def _raw(port, rng, path, data, kind):
  """Announces another length than it sends, or leaves before the answer."""
  length = len(data) + rng.choice((-3, 5, 10**12)) if kind == 'length' else len(data)
  head = f'POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n'.encode()
  head += f'Content-Length: {length}\r\n\r\n'.encode()
  with socket.create_connection(('127.0.0.1', port), timeout=5) as connection:
    try:
      connection.sendall(head + data)
      if kind == 'leave' or rng.random() < 0.9:
        time.sleep(rng.choice((0, 0.01)))
        return 'left'
      connection.settimeout(0.5)
      return connection.recv(20)[9:12].decode() or 'closed'
    except OSError as error:
      return type(error).__name__


def _greedy(port):
  """Returns a greedy answer."""
  body = {'prompt': 'The capital of', 'max_tokens': 8, 'temperature': 0}
  url = f'http://127.0.0.1:{port}/v1/completions'
  headers = {'Content-Type': 'application/json'}
  request = urllib.request.Request(url, json.dumps(body).encode(), headers)
  with urllib.request.urlopen(request, timeout=120) as answer:
    return json.load(answer)['choices'][0]['text']


def _resident(port):
  """Returns the server's resident memory in MB, as it says itself."""
  with urllib.request.urlopen(f'http://127.0.0.1:{port}/metrics', timeout=60) as answer:
    text = answer.read().decode()
  return round(float(re.search(r'^process_resident_memory_bytes (\S+)', text, re.M)[1]) / 1e6, 1)


if __name__ == '__main__':
  app.run(main)
