"""Allocation: how many episodes each question of a batch gets, from the scores of its first ones.

DARS (arXiv 2508.13755; C, `ray_dars_trainer.py`) samples hard questions more often. In a group of N
with mean score a in [0, 1], the sum of absolute advantages without a standard deviation is N S with
S = 2 a (1 - a). It is largest, N / 2, at a = 1/2. Below, dN more episodes lift it to a target:

  dN = ceil((target - N S) / S),   target = N / 2 (ET) or (1 - a) N (HW)

a = 0 counts as 1 / (2 N). A question with a >= 1/2 gets dN = 0.
"""

from collections.abc import Sequence
import dataclasses
import math


def wanted_rows(score: float, first_rows: int, rule: str) -> int:
  """Returns dN of a question, see above. `score` is a, clipped to [0, 1], and `first_rows` is N."""
  a = min(max(score, 0.0), 1.0)
  if a >= 0.5:
    return 0
  if a == 0:
    a = 1 / (2 * first_rows)
  per_row = 2 * a * (1 - a)
  target = first_rows / 2
  if rule == 'dars_hw':
    target = (1 - a) * first_rows
  missing = target / per_row - first_rows
  return math.ceil(missing - 1e-9)  # less than rounding above a whole number is no further row


@dataclasses.dataclass(frozen=True)
class Allocation:
  """Divides the rows of a batch of fixed size among its questions.

  Choice: the authors let the size of the batch vary. Here it is fixed, since mini-batches and
  compiled programs rely on it. If the sum of all dN exceeds the rows that are left after the first
  ones, all dN are scaled down. If the sum is smaller, the questions with the fewest rows get the
  rest. Questions that are always or never solved stay in the batch, and the authors drop them. With
  z-scores (`grpo`) the authors use another S, 2 sqrt(a (1 - a)); here S is always that of centred
  scores.
  """

  rule: str  # 'dars_et' or 'dars_hw'
  first_rows: int  # episodes that every question gets first
  max_rows: int  # episodes of a question, at most

  def extra_rows(self, scores: Sequence[float], num_rows: int) -> list[int]:
    """Divides `num_rows` further episodes among questions with these mean scores."""
    most = self.max_rows - self.first_rows
    wishes = [min(wanted_rows(score, self.first_rows, self.rule), most) for score in scores]
    if sum(wishes) > num_rows:
      return _by_largest_remainder(wishes, num_rows)
    rows = wishes
    left = num_rows - sum(rows)
    while left:
      i = min(range(len(rows)), key=lambda i: rows[i])  # the first one that has the fewest
      rows[i] += 1
      left -= 1
    return rows


def _by_largest_remainder(wishes, total):
  """Returns whole numbers with this total in proportion to the wishes, none above its wish."""
  shares = [wish * total / sum(wishes) for wish in wishes]
  rows = [math.floor(share) for share in shares]
  by_remainder = sorted(range(len(rows)), key=lambda i: rows[i] - shares[i])
  for i in by_remainder[: total - sum(rows)]:
    rows[i] += 1
  return rows
