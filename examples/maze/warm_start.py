"""Makes the policy that all runs of the maze start from.

  python -m examples.maze.warm_start    # writes examples/maze/model

The model imitates episodes of both views, in which the players walk almost at random. It predicts
the observations as well, with a smaller weight. A policy that only imitates a random walk does not
have to read its square, and would have to learn that from rewards.
"""

import pathlib

from absl import app
from absl import flags
import jax
import numpy as np

from examples.maze import env
from examples.maze import player
from scripts import warm_start
from stppo_jax.envs import factory
from stppo_jax.models import convert
from stppo_jax.models import decoder
from stppo_jax.text import tokenizer as chat
from stppo_jax.training import supervised
from stppo_jax.types import Task

FOLDER = pathlib.Path(__file__).parent / 'model'
_STEPS = flags.DEFINE_integer('steps', 200, 'optimizer steps')
PLAYERS = {'fully': player.Player, 'partly': player.Descent}
EPISODES = 1000  # episodes of each view
ROWS = 16  # episodes per step
OBSERVATION_WEIGHT = 0.3
LENGTHS = (160, 320)


def main(unused_argv):
  FOLDER.mkdir(exist_ok=True)
  episodes = [episode for observed in env.OBSERVED for episode in play(observed)]
  warm_start.write_tokenizer(FOLDER, episodes, vocabulary=1000, words=True)
  tokenizer = chat.load_tokenizer(str(FOLDER))
  framing = chat.make_framing(tokenizer, env.Maze.frame, limit=4)
  pool = [demonstrate(tokenizer, framing, *episode) for episode in episodes]
  config = decoder.ModelConfig(
      vocab_size=tokenizer.vocab_size,
      d_model=208,
      num_layers=2,
      num_heads=4,
      num_kv_heads=2,
      head_dim=52,
      d_ff=624,
      tie_embeddings=True,
      family='llama',
      scan_layers=False,
  )
  params = supervised.train(
      decoder.init(jax.random.key(0), config),
      config,
      pool,
      rows=ROWS,
      length_buckets=LENGTHS,
      steps=_STEPS.value,
      optimizer=supervised.make_optimizer(3e-3, _STEPS.value),
      seed=0,
      log_every=20,
  )
  convert.save_hf(str(FOLDER), config, jax.device_get(params))


def play(observed: str) -> list[warm_start.Played]:
  """Returns episodes of the view's player."""
  make_env = factory.EnvFactory(env.Maze, {'observed': observed})
  episodes = []
  for seed in range(EPISODES):
    task = Task(str(seed), seed=seed)
    episodes += warm_start.play(make_env, PLAYERS[observed], task, seed)
  return episodes


def demonstrate(tokenizer, framing, prompt, turns) -> supervised.Demonstration:
  """Returns the tokens of an episode. Those of observations have a smaller weight."""
  row = warm_start.encode(tokenizer, framing, prompt, turns)
  return supervised.Demonstration(row.tokens, np.maximum(row.weights, OBSERVATION_WEIGHT))


if __name__ == '__main__':
  app.run(main)
