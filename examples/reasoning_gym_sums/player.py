"""The player that the first policy imitates: more than half of the time it overlooks the signs."""

import re


class Player:
  """Adds the numbers, mostly as if each sign were a plus. It is sometimes off by one or two."""

  def __init__(self, rng):
    self._rng = rng

  def act(self, observation: str) -> str:
    """Returns a sum and the line break that ends an answer."""
    terms = re.findall(r'([+-]?) ?(\d+)', observation)
    sees_signs = self._rng.random() < 0.35
    total = 0
    for sign, number in terms:
      total += -int(number) if sees_signs and sign == '-' else int(number)
    if self._rng.random() < 0.1:
      total += self._rng.choice((-2, -1, 1, 2))
    return f'{total}\n'
