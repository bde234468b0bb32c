"""PPO-max on the embedded questions (arXiv 2307.04964, section 5.4).

  python run.py --config=experiments/ppo_max.py

Its parts are settings here: scores are normalised by running moments and clipped, the KL penalty is
in the reward, values are clipped, the critic is trained alone in the first updates, the gradient's
norm is clipped, batches are small, and an imitation loss on demonstrations stands for the loss on
pretraining data.
"""

import re

from experiments import st_ppo_tiny

# Between what is asked and the title of the passage that has it.
_LINK = ' of discovery of | discovered by | of | to | where '


class Reader:
  """Follows the steps of an embedded question, in the words of the embedded policy.

  The steps of 'the capital of the most populous neighbour of Bhutan' are 'most populous neighbour
  of Bhutan' and 'capital of #1'.
  """

  def __init__(self, rng):
    del rng
    self._actions = iter(())

  def begin(self, task):
    """Prepares the turns of a question."""
    actions = []
    found = []
    seen = ''
    for question, answer in task.steps:
      for i, earlier in enumerate(found, 1):
        question = question.replace(f'#{i}', earlier)
      asked, title = re.split(_LINK, question, maxsplit=1)
      title = re.sub(' (lies|was discovered)$', '', title)
      actions.append(f'<think> {seen}{question}</think><search> {title}</search>')
      seen = f'{re.sub("^(most|nearest) ", "", asked)} {answer}. '
      found.append(answer)
    actions.append(f'<think> {seen[:-2]}</think><answer> {task.answers[0]}</answer>')
    self._actions = iter(actions)

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
