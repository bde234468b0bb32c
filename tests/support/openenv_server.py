"""A server of OpenEnv's own package with a guessing game, for tests: PORT SESSIONS."""

import random
import sys

from openenv.core.env_server import http_server
from openenv.core.env_server import interfaces
from openenv.core.env_server import types
import uvicorn


class Guess(types.Action):
  """A number from 0 to 9."""

  guess: int


class Hint(types.Observation):
  """What the player reads, and a number."""

  text: str
  tries: int = 0


class Game(interfaces.Environment):
  """Pays .25 per try that is not right, and 1 for the number."""

  SUPPORTS_CONCURRENT_SESSIONS = True

  def reset(self, seed=None, episode_id=None, **unused):
    """Draws the number from the seed."""
    self._number, self._tries = random.Random(seed).randint(0, 9), 0
    return Hint(text=f'seed {seed}: guess')

  def step(self, action, timeout_s=None, **unused):
    """Answers a guess; 13 breaks the game."""
    if action.guess == 13:
      raise RuntimeError('broken')
    self._tries += 1
    right = action.guess == self._number
    text = '' if right else 'higher' if action.guess < self._number else 'lower'
    return Hint(text=text, tries=self._tries, done=right, reward=1.0 if right else 0.25)

  @property
  def state(self):
    """Nothing is kept beside the game."""
    return types.State()


if __name__ == '__main__':
  app = http_server.create_fastapi_app(Game, Guess, Hint, max_concurrent_envs=int(sys.argv[2]))
  uvicorn.run(app, host='127.0.0.1', port=int(sys.argv[1]), log_level='error')
