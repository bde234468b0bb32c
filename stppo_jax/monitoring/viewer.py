"""The viewer: serves the page of report.py for runs that may still train.

  python run.py --mode=watch --workdir=FOLDER

FOLDER is the folder of a run, or a folder that contains such folders. All numbers are read from
files: metrics.jsonl, config.json and episodes/*.jsonl. The server does not connect to the process
that trains. The page requests these addresses:

  /api/runs                                       the runs, with their newest scores
  /api/run?name=RUN                               `report.page_data` of a run
  /api/episodes?name=RUN&kind=train&update=3      the episodes of one file
  /api/question?name=RUN&task=TASK                the episodes of one task in all files

The server listens on the loopback interface, answers GET only, and checks the Host header, so that
a page of another origin cannot read the answers through DNS rebinding.
"""

import functools
import http
import http.server
import json
import os
import sys
import time
from typing import Any
from urllib import parse

from absl import logging

from stppo_jax.monitoring import episodes as episodes_lib
from stppo_jax.monitoring import metrics
from stppo_jax.monitoring import report
from stppo_jax.monitoring import workdir as workdir_lib
from stppo_jax.stop_signal import StopSignal
from stppo_jax.types import UserError

_LOOPBACK = ('localhost', '127.0.0.1')
_MAX_DEPTH = 4  # levels of folders below FOLDER in which runs are looked for
_MAX_RUNS = 200
_MAX_FILES_OF_QUESTION = 40
_MAX_EPISODES = 256  # per file
_MAX_BYTES = 16_000_000  # limit on the JSON of these episodes


class NotFoundError(Exception):
  """There is no such page, run or file."""


def serve(folder: str, port: int, stop_signal: StopSignal) -> None:
  """Serves the page until a stop is requested. UserError: no such folder, or the port is in use."""
  if not os.path.isdir(folder):
    raise UserError(f'--workdir={folder!r} is not a folder: give a run, or a folder of runs')
  try:
    server = make_server(folder, port)
  except OSError as error:
    raise UserError(
        f'--port={port} is not available ({error.strerror}): give another, or 0'
    ) from error
  with server:
    logging.info('viewer of %s: http://127.0.0.1:%d (Ctrl-C ends it)', folder, server.server_port)
    while not stop_signal.is_set():
      server.handle_request()


class _Server(http.server.ThreadingHTTPServer):
  """Says nothing of browsers that close a connection."""

  def handle_error(self, request: Any, client_address: Any) -> None:
    if not isinstance(sys.exception(), ConnectionError):
      super().handle_error(request, client_address)


def make_server(folder: str, port: int) -> http.server.ThreadingHTTPServer:
  """Returns the server, whose `handle_request` returns after half a second at the latest."""
  server = _Server(('127.0.0.1', port), functools.partial(_Handler, folder=folder))
  server.timeout = 0.5
  server.daemon_threads = True
  return server


def find_runs(folder: str) -> dict[str, str]:
  """Returns {name: path} of the runs at or below a folder, by name."""
  top = os.path.abspath(folder)
  found = {}
  for path, folders, files in os.walk(top):
    relative = os.path.relpath(path, top)
    if metrics.FILE_NAME in files or 'config.json' in files:
      found[os.path.basename(top) if relative == '.' else relative] = path
      folders.clear()
    if len(found) >= _MAX_RUNS and folders:
      logging.log_first_n(
          logging.WARNING,
          '%s has more than %d runs, and those of %s are not shown: watch a folder with fewer',
          1,
          folder,
          len(found),
          path,
      )
    if relative.count(os.sep) + 1 >= _MAX_DEPTH or len(found) >= _MAX_RUNS:
      folders.clear()
    folders.sort()
  return dict(sorted(found.items()))


def list_runs(folder: str) -> list[dict[str, object]]:
  """Returns the rows of the page's table of runs."""
  rows = []
  for name, path in find_runs(folder).items():
    state = _file_state(path)
    size, time_ns, _ = state
    age_s = None
    if size:
      age_s = time.time() - time_ns / 1e9
    try:
      summary = _summary(name, path, state)
    except (
        Exception
    ) as error:  # another program may have written the file, and other runs are shown
      logging.log_first_n(logging.WARNING, '%s is not shown: %r', 1, path, error)
      continue
    rows.append({**summary, 'age_s': age_s})
  return rows


def run_data(folder: str, name: str) -> dict[str, object]:
  """Returns the page's data of a run."""
  path = _find_run(folder, name)
  return {**_page_data(path, _file_state(path)), 'name': name}


def episodes(folder: str, name: str, kind: str, step: int) -> dict[str, object]:
  """Returns {shown, total, episodes} of one file."""
  path = _find_run(folder, name)
  if (kind, step) not in report.episode_files(path):
    raise NotFoundError
  group = report.episode_group(path, kind, step, limit=_MAX_EPISODES, max_bytes=_MAX_BYTES)
  return {'shown': group['shown'], 'total': group['total'], 'episodes': group['episodes']}


def question(folder: str, name: str, task: object) -> list[dict[str, object]]:
  """Returns the episodes of a task from all files, or from evenly chosen ones if there are many."""
  path = _find_run(folder, name)
  files = report.episode_files(path, metrics.read_metrics(path))
  stride = -(-len(files) // _MAX_FILES_OF_QUESTION) or 1
  answers = []
  for kind, step in files[::stride]:
    with open(episodes_lib.record_path(path, kind, step), encoding='utf-8') as file:
      for line in file:
        try:
          episode = json.loads(line)
        except ValueError:
          continue  # the run is still writing this line
        if episode.get('task') == task and episode.get('tokens'):
          answers.append(episode)
  return answers


def _find_run(folder: str, name: str) -> str:
  runs = find_runs(folder)
  if name not in runs:
    raise NotFoundError
  return runs[name]


def _file_state(path):
  """Returns (size and time in ns of the metrics, number of files of episodes).

  If it does not change, the files have not changed.
  """
  num_files = len(report.episode_files(path))
  try:
    status = os.stat(os.path.join(path, metrics.FILE_NAME))
  except FileNotFoundError:
    return 0, 0, num_files
  return status.st_size, status.st_mtime_ns, num_files


@functools.lru_cache(maxsize=_MAX_RUNS)
def _summary(name, path, file_state):
  rows = metrics.read_metrics(path)
  main = f'val-core/all/{report.main_score_name(workdir_lib.read_config(path), rows)}'
  scores = [row[main] for row in rows if row.get(main) is not None]
  return {
      'name': name,
      'version': str(file_state),
      'updates': max((row['step'] for row in rows), default=None),
      'score': main,
      'last': scores[-1] if scores else None,
      'best': max(scores, default=None),
      'warnings': len(report.warnings(rows)),
  }


@functools.lru_cache(maxsize=32)
def _page_data(path, file_state):
  del file_state  # a key of the cache
  return report.page_data(path)


class _Handler(http.server.BaseHTTPRequestHandler):
  """Answers one connection."""

  protocol_version = 'HTTP/1.1'
  timeout = 30.0  # seconds, for a connection without a request

  def __init__(self, *args: Any, folder: str):
    self._folder = folder
    super().__init__(*args)

  def do_GET(self) -> None:
    """Answers one of the addresses above."""
    host = self.headers.get('Host', '').rsplit(':', 1)[0]
    if host not in _LOOPBACK:
      self._answer(http.HTTPStatus.FORBIDDEN, 'text/plain', 'only for this machine')
      return
    address = parse.urlsplit(self.path)
    query = dict(parse.parse_qsl(address.query))
    try:
      if address.path == '/':
        self._answer(http.HTTPStatus.OK, 'text/html', report.live_page())
      else:
        answer = report.to_json(self._api(address.path, query))
        self._answer(http.HTTPStatus.OK, 'application/json', answer)
    except NotFoundError:
      self._answer(http.HTTPStatus.NOT_FOUND, 'text/plain', 'there is no such page or run')
    except UserError as error:
      self._answer(http.HTTPStatus.INTERNAL_SERVER_ERROR, 'text/plain', str(error))

  def _api(self, path: str, query: dict[str, str]) -> object:
    name = query.get('name', '')
    try:
      step = int(query.get('update', '0'))
      task = json.loads(query.get('task', 'null'))
    except ValueError as error:
      raise NotFoundError from error
    if path == '/api/runs':
      return list_runs(self._folder)
    if path == '/api/run':
      return run_data(self._folder, name)
    if path == '/api/episodes':
      return episodes(self._folder, name, query.get('kind', ''), step)
    if path == '/api/question':
      return question(self._folder, name, task)
    raise NotFoundError

  def _answer(self, status: http.HTTPStatus, kind: str, text: str) -> None:
    body = text.encode('utf-8', 'replace')
    self.send_response(status)
    self.send_header('Content-Type', f'{kind}; charset=utf-8')
    self.send_header('Content-Length', str(len(body)))
    self.send_header('Cache-Control', 'no-store')
    self.send_header('X-Content-Type-Options', 'nosniff')
    self.end_headers()
    self.wfile.write(body)

  def log_message(self, *unused_args: Any) -> None:
    """Writes nothing, because the page asks every few seconds."""
