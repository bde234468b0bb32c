"""A retriever that is down: waited for, since a batch without passages teaches nothing but rubbish."""

import time
from collections.abc import Callable, Sequence

from absl import logging

from stppo_jax import hosts
from stppo_jax import types
from stppo_jax.retrieval import protocol

_FIRST_WAIT_S = 1.0
_LONGEST_WAIT_S = 60.0


def play_through(
    play: Callable[[], list[types.Episode]],
    retriever: protocol.Retriever,
    max_failed_share: float,
    max_outage_s: float,
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> tuple[list[types.Episode], int]:
  """(episodes, how often they were played again) of a batch whose searches were answered.

  If retrieval failed in more than `max_failed_share` of the episodes, they are thrown away; once the
  retriever answers a probe, `play()` is called again. Waits double from 1 s to 60 s. A RunError
  after `max_outage_s` of this; single failures below the share are the update's to mask.
  """
  episodes, replays = play(), 0
  started, wait_s = clock(), _FIRST_WAIT_S
  while (share := failed_share(episodes)) > max_failed_share:
    left_s = hosts.by_writer(lambda: max_outage_s - (clock() - started))
    if left_s <= 0:
      raise types.RunError(
          f'retrieval failed in {share:.0%} of the episodes, and did so for {max_outage_s:g} s '
          f'(config.retriever.max_outage_s): see to the retriever; the same command then resumes')
    wait_s = min(wait_s, left_s)
    logging.warning('retrieval failed in %.0f%% of the episodes: none is trained on; the retriever is '
                    'asked again in %.0f s', 100 * share, wait_s)
    sleep(wait_s)
    wait_s = min(2 * wait_s, _LONGEST_WAIT_S)
    if hosts.by_writer(answers, retriever):
      episodes, replays = play(), replays + 1
  return episodes, replays


def pause(seconds: float, stop_requested: Callable[[], bool],
          sleep: Callable[[float], None] = time.sleep) -> None:
  """Sleeps; raises Stopped within a second of `stop_requested()`."""
  while seconds > 0:
    hosts.end_if(stop_requested)
    sleep(min(seconds, 1.0))
    seconds -= 1.0


def failed_share(episodes: Sequence[types.Episode]) -> float:
  """The share of the episodes in which a search failed; prompts that were too long are no search."""
  failed = [episode.failed and not episode.metrics.get('prompt_too_long') for episode in episodes]
  return sum(failed) / max(len(failed), 1)


def answers(retriever: protocol.Retriever) -> bool:
  """Whether the retriever answers a query; each probe is another, lest a cache answer it."""
  return retriever.search([f'probe {time.time_ns()}'], 1)[0] is not None
