"""Load on the retrieval server: BM25 over synthetic passages, by the public tool wrk.

  python -m benchmarks.retrieval --passages=100000 --connections=1,16,64 --seconds=15

Words follow Zipf's law: 200,000 words of which the most frequent are stop words, 100 per passage
and 6 per query, 20,000 different queries. Prints one JSON line per number of connections. Needs
`wrk` (a Debian package) and the extra `retrieval`. Pin the server and wrk to separate cores if
possible.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import urllib.request

from absl import app
from absl import flags
from bm25s import stopwords
import numpy as np

_PASSAGES = flags.DEFINE_integer('passages', 100_000, 'how many')
_CONNECTIONS = flags.DEFINE_list('connections', ['1', '16', '64'], 'one run of wrk for each')
_SECONDS = flags.DEFINE_integer('seconds', 15, 'of each run')
_SCRIPT = """
local bodies = {}
for line in io.lines('%s') do bodies[#bodies + 1] = line end
local n = 0
request = function()
  n = n %% #bodies + 1
  return wrk.format('POST', '/retrieve', {['Content-Type'] = 'application/json'}, bodies[n])
end
"""


def main(unused_argv):
  if not shutil.which('wrk'):
    sys.exit('benchmarks.retrieval: wrk is not installed; on Debian, apt-get install wrk')
  with tempfile.TemporaryDirectory() as folder:
    corpus, bodies, script = (
        os.path.join(folder, name) for name in ('c.jsonl', 'q.jsonl', 'q.lua')
    )
    words = _words(np.random.default_rng(0))
    _write_lines(
        corpus,
        ({'id': str(i), 'title': words(2), 'text': words(100)} for i in range(_PASSAGES.value)),
    )
    _write_lines(
        bodies, ({'queries': [words(6)], 'topk': 3, 'return_scores': True} for _ in range(20_000))
    )
    with open(script, 'w', encoding='utf-8') as file:
      file.write(_SCRIPT % bodies)
    with subprocess.Popen(
        [sys.executable, '-m', 'stppo_jax.retrieval.server', f'--corpus={corpus}', '--port=0'],
        stdout=subprocess.PIPE,
        text=True,
    ) as server:
      url = server.stdout.readline().split()[-1].removesuffix('/retrieve')
      for connections in _CONNECTIONS.value:
        text = subprocess.run(
            [
                'wrk',
                '-t1',
                f'-c{connections}',
                f'-d{_SECONDS.value}s',
                '--latency',
                '-s',
                script,
                url,
            ],
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        print(
            json.dumps(
                {
                    'benchmark': 'retrieval_server',
                    'passages': _PASSAGES.value,
                    'connections': int(connections),
                    'queries_per_s': float(re.search(r'Requests/sec:\s*(\S+)', text)[1]),
                    **{f'p{p}': re.search(rf'{p}%\s+(\S+)', text)[1] for p in (50, 99)},
                    'refused': int(
                        (re.search(r'Non-2xx or 3xx responses: (\d+)', text) or [0, 0])[1]
                    ),
                    'resident_bytes': _resident(url),
                }
            ),
            flush=True,
        )
      server.send_signal(signal.SIGTERM)


def _words(rng):
  """n -> n words of a Zipf distribution as one text."""
  stop = list(stopwords.STOPWORDS_EN)
  names = np.array(stop + [f'w{i}' for i in range(200_000 - len(stop))])
  weights = np.cumsum(1 / np.arange(1, len(names) + 1))
  return lambda n: ' '.join(names[np.searchsorted(weights, rng.random(n) * weights[-1])])


def _write_lines(path, rows):
  with open(path, 'w', encoding='utf-8') as file:
    file.writelines(json.dumps(row) + '\n' for row in rows)


def _resident(url):
  text = urllib.request.urlopen(f'{url}/metrics').read().decode()
  return int(float(re.search(r'^process_resident_memory_bytes (\S+)', text, re.MULTILINE)[1]))


if __name__ == '__main__':
  app.run(main)
