"""Thoughts in an agent's text, from <think> to </think>. A call that is drafted there is no call.

A chat template may open the thought at the end of the prompt, as those of Qwen3-Thinking-2507 and
DeepSeek-R1 do. The sampled turn then has the closing tag alone.
"""

from collections.abc import Sequence
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


def completed(text: str) -> str:
  """Returns a turn of a server whose template may have opened the thought, with its opening tag."""
  before, close, _ = text.partition(CLOSE)
  if close and OPEN not in before:
    return f'{OPEN}\n{text}'
  return text


def owns_tags(stop_strings: Sequence[str]) -> bool:
  """Returns whether the tags are those of a thought, and not of a tool that is called think."""
  return CLOSE not in stop_strings
