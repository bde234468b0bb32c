"""Time of sampling: bytes and collectives of a decoded token in, seconds out.

An estimate from below: memory and links at their full public rates, nothing else. A decoded token
waits for its reads, and each all-reduce waits for what it sums, so their times add up.
"""

from collections.abc import Sequence
import dataclasses

from stppo_jax.planning import topologies


@dataclasses.dataclass(frozen=True)
class Token:
  """One step of a decode call: a token for each row of a group. Figures per device."""

  weights: int  # bytes read, independent of the number of rows
  cache: int  # bytes read per slot of the rows, live or not
  flops: float = 0.0
  sent: int = 0  # bytes of results of all-reduces
  collectives: int = 0

  def seconds(self, slots: float, chip: topologies.Chip) -> float:
    """Returns the time of the step while the rows have `slots` slots.

    max((weights + slots cache) / bandwidth, flops / peak) + 2 sent / link + collectives latency.
    An all-reduce sends its bytes twice.
    """
    read_s = (self.weights + slots * self.cache) / chip.bandwidth
    compute_s = self.flops / chip.flops
    link_s = 0.0
    if self.collectives:
      link_s = 2 * self.sent / chip.link + self.collectives * chip.latency
    return max(read_s, compute_s) + link_s


@dataclasses.dataclass(frozen=True)
class Rollout:
  """The sampling of one update, if every episode has its full length."""

  decode: float  # seconds
  other: float  # seconds of the copy, of prefills and of growing caches
  tokens: int  # sampled in all episodes

  @property
  def seconds(self) -> float:
    """Time of the rollout, without the environments'."""
    return self.decode + self.other

  @property
  def tokens_per_second(self) -> float:
    """Sampled tokens per second on all devices."""
    return self.tokens / self.seconds


def decode_seconds(
    token: Token, steps: int, first: int, last: int, buckets: Sequence[int], chip: topologies.Chip
) -> float:
  """Returns the time of the steps of a group, in which the rows grow from `first` to `last` tokens.

  Each step reads all slots of the smallest bucket that holds the rows. Prompts and observations
  make rows grow by more than a token per step.
  """
  total = 0.0
  for step in range(steps):
    length = first + (last - first) * (step + 1) / steps
    slots = next(bucket for bucket in buckets if bucket >= length)
    total += token.seconds(slots, chip)
  return total
