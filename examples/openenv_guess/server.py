"""A game behind OpenEnv's own server: find a number from 1 to 20 in four tries.

pip install openenv-core uvicorn && python examples/openenv_guess/server.py
"""

import random
import sys

from openenv.core.env_server import http_server
from openenv.core.env_server import interfaces
from openenv.core.env_server import types
import uvicorn

NUMBERS, TRIES, SESSIONS = 20, 4, 300


class Guess(types.Action):
  """A number."""

  guess: int


class Answer(types.Observation):
  """The text that the player reads."""

  text: str
  found: float = 0.0


class Game(interfaces.Environment):
  """Pays 1 for the number."""

  SUPPORTS_CONCURRENT_SESSIONS = True

  def reset(self, seed=None, episode_id=None, **unused):
    """Draws the number from the seed."""
    self._number = random.Random(seed).randint(1, NUMBERS)
    self._left = TRIES
    return Answer(text=f'A number from 1 to {NUMBERS}, {TRIES} tries, each as {{"guess": 7}}.')

  def step(self, action, timeout_s=None, **unused):
    """Answers a guess."""
    self._left -= 1
    right = action.guess == self._number
    text = 'higher' if action.guess < self._number else 'lower'
    if right:
      text = 'right'
    is_over = right or not self._left
    return Answer(text=text, found=float(right), done=is_over, reward=float(right))

  @property
  def state(self):
    """Returns no state."""
    return types.State()


if __name__ == '__main__':
  port = int(sys.argv[1]) if len(sys.argv) > 1 else 8000
  app = http_server.create_fastapi_app(Game, Guess, Answer, max_concurrent_envs=SESSIONS)
  uvicorn.run(app, host='127.0.0.1', port=port, log_level='error')
