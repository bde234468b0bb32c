"""Thoughts in an agent's text, from <think> to </think>. A call that is drafted there is no call.

A chat template may open the thought at the end of the prompt, as those of Qwen3-Thinking-2507 and
DeepSeek-R1 do. The sampled turn then has the closing tag alone.
"""

from collections.abc import Sequence
import dataclasses
import re

OPEN = '<think>'
CLOSE = '</think>'
NUM_TAIL = 16  # tokens at the end of a prompt that hold its opening tag, if it has one

_OPENING = re.compile(r'<think>\s*\Z')


def opening(prompt: str) -> str:
  """Returns the tag with which a prompt opens a thought, and its white space; '': it opens none."""
  match = _OPENING.search(prompt)
  return match[0] if match else ''


def outside(text: str) -> str:
  """Returns the text after the last closed thought, and before a thought that is still open."""
  after = text.rpartition(CLOSE)[2]
  return after.partition(OPEN)[0]


def cut(text: str, stop_strings: Sequence[str]) -> str:
  """Returns a text up to the first stop string that is in no thought, and with it."""
  search = StopSearch(stop_strings)
  for end, character in enumerate(text, start=1):
    if search.feed(character.encode('utf-8', 'replace')):
      return text[:end]
  return text


def completed(text: str) -> str:
  """Returns a turn of a server whose template may have opened the thought, with its opening tag."""
  before, close, _ = text.partition(CLOSE)
  if close and OPEN not in before:
    return f'{OPEN}\n{text}'
  return text


def owns_tags(stop_strings: Sequence[str]) -> bool:
  """Returns whether the tags are those of a thought, and not of a tool that is called think."""
  return CLOSE not in stop_strings


@dataclasses.dataclass
class StopSearch:
  """Looks for stop strings in bytes as they come. In a thought there are none."""

  stop_strings: Sequence[str]
  in_thought: bool = False
  _tail: bytes = b''  # the end of the text, which a tag or stop string may have begun in

  def __post_init__(self):
    self._stops = [text.encode() for text in self.stop_strings]
    self._has_thoughts = owns_tags(self.stop_strings)
    self._longest = max(map(len, [*self._stops, CLOSE.encode()]))

  def feed(self, piece: bytes) -> bool:
    """Returns whether a stop string ends in the next bytes of the turn."""
    text = self._tail + piece
    start = 0
    while True:
      tag = CLOSE if self.in_thought else OPEN
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
