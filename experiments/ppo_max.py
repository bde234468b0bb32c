"""PPO-max on the embedded questions (arXiv 2307.04964, section 5.4).

  python run.py --config=experiments/ppo_max.py

Its parts are settings here: scores are normalised by running moments and clipped, the KL penalty is
in the reward, values are clipped, the critic is trained alone in the first updates, the gradient's
norm is clipped, batches are small, and an imitation loss on demonstrations stands for the loss on
pretraining data.
"""

from experiments import st_ppo_tiny


class Reader:
  """Searches for the question, and then gives its answer."""

  def __init__(self, rng):
    del rng
    self._actions = iter(())

  def begin(self, task):
    """Prepares the two turns of a question."""
    self._actions = iter(
        (f'<search> {task.question} </search>', f'<answer> {task.answers[0]} </answer>')
    )

  def act(self, observation: str) -> str:
    """Returns the next turn."""
    del observation
    return next(self._actions, '')


def get_config(mode=''):
  config = st_ppo_tiny.base(mode)
  config.name = config.name.replace('st_ppo_tiny', 'ppo_max')
  config.algorithm.variant = 'ppo_max'
  config.algorithm.kl_in = 'reward'
  config.algorithm.imitation = 0.05
  config.rollout.demonstrations = 'experiments.ppo_max:Reader'
  config.rollout.demonstrate_every = 8
  config.train.critic_warmup = 1
  if not mode:
    config.train.updates = 24
    config.train.episodes = 64
    config.train.mini_batch = 16
    config.eval.every = 4
  return config
