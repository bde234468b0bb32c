"""Sends broken and hostile requests to a gateway in a process of its own; watches its memory.

  python -m benchmarks.hostile --requests=10000

Most requests are mutations of a valid body of a route: a value somewhere in it is replaced, removed
or repeated. The others have broken JSON or lengths, or another path. Prints one JSON line per tenth
of the requests: how many had each HTTP status, how many connections were closed by our side on
purpose and how many by the server, and the server's resident memory. The last line says whether the
server still answers as at first, how many answers had a status of 500 or more, and the share of the
mutated bodies that reached the model (status 200).
"""

import collections
import copy
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
_QUESTION = [{'role': 'user', 'content': 'Where is Paris?'}]
_CALL = {'id': 'c1', 'type': 'function', 'function': {'name': 'add', 'arguments': '{"a": 1}'}}
_SCHEMA = {'type': 'object', 'properties': {'a': {'type': 'integer'}}, 'required': ['a']}
_TOOL = {'name': 'add', 'description': 'Adds.', 'parameters': _SCHEMA}
_SAMPLING = {'temperature': 1.0, 'top_p': 0.9}
_CHAT = [
    {'role': 'system', 'content': [{'type': 'text', 'text': 'Be brief.'}]},
    *_QUESTION,
    {'role': 'assistant', 'content': 'Hm', 'reasoning_content': 'Why?', 'tool_calls': [_CALL]},
    {'role': 'tool', 'tool_call_id': 'c1', 'content': '3'},
]
_BLOCKS = [
    *_QUESTION,
    {
        'role': 'assistant',
        'content': [
            {'type': 'thinking', 'thinking': 'Why?', 'signature': ''},
            {'type': 'tool_use', 'id': 'c1', 'name': 'add', 'input': {'a': 1}},
        ],
    },
    {'role': 'user', 'content': [{'type': 'tool_result', 'tool_use_id': 'c1', 'content': '3'}]},
]
_ITEMS = [
    *_QUESTION,
    {'type': 'function_call', 'call_id': 'c1', 'name': 'add', 'arguments': '{"a": 1}'},
    {'type': 'function_call_output', 'call_id': 'c1', 'output': '3'},
]
_SHORT = {'max_tokens': 4, 'stop': ['x'], 'n': 2, 'seed': 1, 'stream': False}
_ANTHROPIC = _SAMPLING | {
    'messages': _BLOCKS,
    'system': [{'type': 'text', 'text': 'Be brief.'}],
    'max_tokens': 4,
    'stop_sequences': ['x'],
    'tools': [{'name': 'add', 'description': 'Adds.', 'input_schema': _SCHEMA}],
    'tool_choice': {'type': 'auto', 'disable_parallel_tool_use': True},
    'context_management': {'edits': [{'type': 'clear_thinking_20251015', 'keep': 'all'}]},
}
# A valid body of each route.
_BODIES: dict[str, dict[str, Any]] = {
    '/v1/chat/completions': _SAMPLING
    | _SHORT
    | {
        'messages': _CHAT,
        'tools': [{'type': 'function', 'function': _TOOL}],
        'tool_choice': 'auto',
        'logprobs': True,
        'stream_options': {'include_usage': True},
    },
    '/v1/completions': _SAMPLING | _SHORT | {'prompt': ['Where?', 'Who?'], 'logprobs': 1},
    '/v1/responses': _SAMPLING
    | {
        'input': _ITEMS,
        'instructions': 'Be brief.',
        'max_output_tokens': 4,
        'tools': [{'type': 'function'} | _TOOL],
        'include': [],
        'metadata': {},
    },
    '/v1/messages': _ANTHROPIC,
    '/v1/messages/count_tokens': _ANTHROPIC,
}
_PATHS = tuple(_BODIES)
_JSON = {'Content-Type': 'application/json'}
_ELSEWHERE = (
    '/',
    '/v1',
    '/v1/files',
    '/../../etc/passwd',
    '/s//v1/models',
    '/s/nobody/v1/completions',
    '/s/nobody/reward',
    '/%00',
    '/' + 'a' * 5000,
)
_JUNK: tuple[Any, ...] = (
    None, True, -1, 0, 2**70, 1e308, float('nan'), '', 'x', '\ud800', '\0', [], {}, [[]],
    ['a', 1], {'a': {}}, [None] * 50, 'é' * 2000,
)  # fmt: skip
_FIELDS = ('stream', 'return_token_ids', 'user', 'echo', 'top_logprobs', 'ignore_eos', 'min_tokens')
_FIELDS += ('response_format', 'reasoning_effort', 'modalities', 'chat_template_kwargs', 'store')


def main(argv):
  del argv
  rng = random.Random(_SEED.value)
  with servers.gateway('--config.serve.max_total=256') as (port, server):
    first = _greedy(port)
    total: collections.Counter = collections.Counter()
    mutated: collections.Counter = collections.Counter()
    block = max(_REQUESTS.value // 10, 1)
    for start in range(0, _REQUESTS.value, block):
      seen: collections.Counter = collections.Counter()
      for _ in range(block):
        kind, status = _one(port, rng)
        seen[status] += 1
        if kind == 'mutated':
          mutated[status] += 1
      total += seen
      time.sleep(1)  # requests whose client has gone end soon
      print(json.dumps({'requests': start + block, **seen, 'rss_mb': _resident(port)}), flush=True)
    num_failed = sum(count for status, count in total.items() if status.startswith('5'))
    last = {'alive': server.poll() is None, 'same_answer': _greedy(port) == first}
    last |= {'status_5xx': num_failed, 'mutated': mutated.total()}
    last |= {'reached_model': round(mutated['200'] / max(mutated.total(), 1), 3)}
    print(json.dumps(last))


def _one(port, rng):
  """Sends one request; returns its kind and its status, or how the connection ended."""
  others = ('text', 'bytes', 'length', 'leave', 'elsewhere')
  kind = rng.choice(('mutated',) * 15 + others)
  path = rng.choice(_PATHS)
  body = json.dumps(_mutate(rng, _BODIES[path]), ensure_ascii=rng.random() < 0.5)
  data = body.encode('utf-8', 'surrogatepass')
  if kind == 'text':
    data = rng.choice(
        (b'', b'{', b'[' * 50_000, b'"', data[: len(data) // 2], b'null', b'0' * 9999)
    )
  elif kind == 'bytes':
    data = rng.randbytes(rng.randrange(500))
  elif kind == 'elsewhere':
    path = rng.choice(_ELSEWHERE)
  if kind in ('length', 'leave'):
    return kind, _raw(port, rng, path, data, kind)
  connection = http.client.HTTPConnection('127.0.0.1', port, timeout=60)
  try:
    method = 'POST' if kind == 'mutated' else rng.choice(('POST', 'GET', 'PUT'))
    connection.request(method, path, data, _JSON)
    answer = connection.getresponse()
    answer.read()
    return kind, str(answer.status)
  except (OSError, http.client.HTTPException) as error:
    return kind, type(error).__name__
  finally:
    connection.close()


def _mutate(rng, body):
  """Returns a body with up to two changes, each anywhere in it."""
  body = copy.deepcopy(body)
  for _ in range(rng.randrange(3)):
    places = list(_places(body))
    parent, key = rng.choice(places)
    change = rng.choice(('junk', 'junk', 'remove', 'repeat', 'swap', 'add'))
    if change == 'junk':
      parent[key] = copy.deepcopy(rng.choice(_JUNK))
    elif change == 'remove':
      del parent[key]
    elif change == 'repeat' and isinstance(parent, list):
      parent.append(copy.deepcopy(parent[key]))
    elif change == 'swap':
      other, other_key = rng.choice(places)
      parent[key] = copy.deepcopy(other[other_key])
    else:
      body[rng.choice(_FIELDS)] = copy.deepcopy(rng.choice(_JUNK))
    if not body:
      break
  return body


def _places(value):
  """Yields (container, key) of each value in a JSON value."""
  keys = list(value) if isinstance(value, dict) else range(len(value))
  for key in keys:
    yield value, key
    if isinstance(value[key], (dict, list)):
      yield from _places(value[key])


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
