"""Stop strings in bytes as they come: outside of the compiled automaton of an environment."""

from collections.abc import Sequence
import dataclasses

from stppo_jax.text import thoughts


@dataclasses.dataclass(frozen=True)
class TurnEnd:
  """How a turn of a run ends. The default of requests that are not in a session."""

  stop_strings: tuple[str, ...] = ()  # part of the text, as in the turns of the run
  skips_thoughts: bool = False  # a stop string in a thought ends no turn
  max_tokens: int | None = None  # None: as many as the model has room for


UNLIMITED = TurnEnd()  # eos tokens and the room of the model end the turn


@dataclasses.dataclass
class StopSearch:
  """Looks for stop strings in bytes as they come. In a thought there are none."""

  stop_strings: Sequence[str]
  in_thought: bool = False
  _tail: bytes = b''  # the end of the text, which a tag or stop string may have begun in

  def __post_init__(self):
    self._stops = [text.encode() for text in self.stop_strings]
    self._has_thoughts = thoughts.owns_tags(self.stop_strings)
    self._longest = max(map(len, [*self._stops, thoughts.CLOSE.encode()]))

  def feed(self, piece: bytes) -> bool:
    """Returns whether a stop string ends in the next bytes of the turn."""
    text = self._tail + piece
    start = 0
    while True:
      tag = thoughts.CLOSE if self.in_thought else thoughts.OPEN
      place = text.find(tag.encode(), start) if self._has_thoughts else -1
      end = place if place >= 0 else len(text)
      if not self.in_thought and any(text.find(stop, start, end) >= 0 for stop in self._stops):
        return True
      if place < 0:
        break
      start = place + len(tag)
      self.in_thought = not self.in_thought
    self._tail = text[start:][1 - self._longest :]
    return False


def cut(text: str, stop_strings: Sequence[str]) -> str:
  """Returns a text up to the first stop string that is in no thought, and with it."""
  search = StopSearch(stop_strings)
  for end, character in enumerate(text, start=1):
    if search.feed(character.encode('utf-8', 'replace')):
      return text[:end]
  return text
