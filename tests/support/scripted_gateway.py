"""A gateway whose model says given turns: the real server, service and sessions."""

import contextlib
import threading

import jax

from stppo_jax.net import http_server
from stppo_jax.rollout import prepare
from stppo_jax.serving import scheduler as scheduler_lib
from stppo_jax.serving import server as server_lib
from stppo_jax.serving import service as service_lib
from stppo_jax.serving import sessions
from stppo_jax.text import tokenizer as tokenizer_lib

_PIECE = 3  # tokens of a part of a stream


class ScriptedScheduler:
  """Stands for the scheduler. Each request samples the next turn, up to where it would stop."""

  max_total = 400_000
  max_waiting = 100
  running = 0
  waiting = 0
  drains = False
  is_alive = True
  can_reload = False
  score_rows = 4
  counts = scheduler_lib.Counts()

  def __init__(self, tokenizer, turns):
    self.vocab_size = len(tokenizer.token_bytes)
    self.sampled = []  # ids per request
    self._tokenizer = tokenizer
    self._turns = [*turns]

  def release(self, owner):
    """Nothing is held."""

  def submit(self, requests):
    """Answers requests from threads, as the real one does."""
    for request in requests:
      turn = self._turns.pop(0) if self._turns else 'I have nothing to add.'
      ids = [*self._tokenizer.encode(turn, control=True), self._tokenizer.eos_ids[0]]
      ids = ids[: self._end(request, ids)]
      self.sampled.append(ids)
      threading.Thread(target=self._emit, args=(request, ids)).start()

  def _end(self, request, ids):
    """Returns the number of tokens that are sampled."""
    calls = None
    if request.call_stop:
      calls = scheduler_lib.stop_strings.StopSearch(request.call_stop, request.in_thought)
    text = b''
    for number, token in enumerate(ids, start=1):
      piece = self._tokenizer.token_bytes[token]
      text += piece
      if any(stop.encode() in text for stop in request.stop) or (calls and calls.feed(piece)):
        return number
    return len(ids)

  def _emit(self, request, ids):
    for start in range(0, len(ids), _PIECE):
      piece = ids[start : start + _PIECE]
      is_last = start + _PIECE >= len(ids)
      request.emit(piece, [-0.1] * len(piece), 'stop' if is_last else None)


@contextlib.contextmanager
def session(turns, forced='refuse'):
  """Yields (address of a session, session, scheduler) of a model that says these turns."""
  tokenizer = tokenizer_lib.load_tokenizer(prepare.EMBEDDED_MODEL)
  scheduler = ScriptedScheduler(tokenizer, turns)
  settings = service_lib.ServiceSettings(
      'tiny', tool_form='hermes', forces_in_sessions=forced == 'auto'
  )
  service = service_lib.Service(scheduler, tokenizer, settings)
  app = server_lib.GatewayApp(service, http_server.ServerLimits(), '')
  with http_server.Server(app, '127.0.0.1', 0) as server:
    opened = service.open_session(jax.random.key(0), sessions.Sampling(max_turn=4000))
    yield f'{server.url}/s/{opened.name}/v1', opened, scheduler
    service.end_session(opened.name)
