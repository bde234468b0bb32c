"""Ranks of adapters that are sent over a radio channel, after AirLLM.

In the paper (arXiv 2507.11515, ZJUNICE; environment read in the authors' code, C) an agent sets the
rank of each LoRA matrix. A higher rank lowers the loss of the receiver, and costs more bits:

  cost   = bits / (B log2(1 + SNR) latency)
  reward = -loss - lambda cost, and a penalty where cost > 1

The agent reads the channel and the text, and writes a rank from 0 to 9 for each of two matrices:

  snr 7 band 3 entropy 4 novel 8 ranks 1 1
  > 2 5

Choice: the loss is a formula instead of a language model. There is no refinement by diffusion.
"""

import math
import random
import re

from examples import tasks

load = tasks.seeded('airwaves')
LAMBDA = 0.3
PENALTY = 1.0
BITS = 1.0  # size of one rank, in units of bandwidth times latency
RANKS = re.compile(r'(\d) (\d)')


def loss(entropy: int, novel: int, ranks: tuple[int, int]) -> float:
  """Returns the loss: the first matrix helps with entropy, the second one with novel words."""
  first, second = ranks
  return 0.1 * (entropy / (1 + first) + novel / (1 + second))


def cost(snr: int, band: int, ranks: tuple[int, int]) -> float:
  """Returns the share of the latency that sending the ranks takes."""
  return BITS * sum(ranks) / (band * math.log2(1 + snr))


def reward(state: dict[str, int], ranks: tuple[int, int]) -> float:
  """Returns the reward of ranks."""
  share = cost(state['snr'], state['band'], ranks)
  penalty = PENALTY * (share > 1)
  return -loss(state['entropy'], state['novel'], ranks) - LAMBDA * share - penalty


def best(state: dict[str, int]) -> tuple[int, int]:
  """Returns the ranks with the highest reward, by trying all."""
  pairs = [(first, second) for first in range(10) for second in range(10)]
  return max(pairs, key=lambda ranks: reward(state, ranks))


class Airwaves:
  """Some steps of a channel that changes. Each choice has its reward at once.

  Args:
    task: gives no more than its seed, to `reset`.
    max_turns: steps of an episode. The paper has 15.
  """

  frame = 'user'
  core_metrics = ('share',)
  uses_global_random = False

  def __init__(self, task, max_turns):
    del task
    self._max_turns = max_turns

  def reset(self, seed=None):
    """Draws the first state from the seed."""
    self._rng = random.Random(seed)
    self._ranks = (1, 1)
    self._turns = 0
    self._rewards = []
    self._best = []
    self._draw()
    return self._text(), {}

  def step(self, action):
    """Takes two ranks, and draws the next state. Unreadable ranks count as 0 0."""
    self._turns += 1
    match = RANKS.fullmatch(action)
    self._ranks = (int(match[1]), int(match[2])) if match else (0, 0)
    earned = reward(self.state, self._ranks)
    self._rewards.append(earned)
    self._best.append(reward(self.state, best(self.state)))
    used = cost(self.state['snr'], self.state['band'], self._ranks)
    self._draw()
    is_over = self._turns == self._max_turns
    info = {
        'action': 'ranks' if match else 'invalid',
        # A reward is negative. 1 is the optimum, and a half is twice as bad.
        'metrics': {'share': sum(self._best) / sum(self._rewards), 'cost': used},
    }
    return '' if is_over else self._text(), earned, is_over, False, info

  def _draw(self):
    """Draws a channel and a text."""
    self.state = {
        'snr': self._rng.randint(1, 9),
        'band': self._rng.randint(1, 4),
        'entropy': self._rng.randint(1, 9),
        'novel': self._rng.randint(1, 9),
    }

  def _text(self):
    numbers = ' '.join(f'{name} {value}' for name, value in self.state.items())
    return f'{numbers} ranks {self._ranks[0]} {self._ranks[1]}'
