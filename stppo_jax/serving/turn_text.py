"""The text of a turn in progress: sampled tokens in, what a client may see out."""

import codecs
from collections.abc import Collection
from collections.abc import Sequence


class TurnText:
  """Decodes a turn token by token, without its eos token and, by default, without its stop string.

  Bytes of an unfinished character, and text that may become a stop string, are held back.
  """

  def __init__(
      self,
      token_bytes: Sequence[bytes],
      eos_ids: Collection[int],
      stops: Sequence[str] = (),
      keeps_stop: bool = False,
  ):
    self._token_bytes = token_bytes
    self._eos_ids = eos_ids
    self._stops = stops
    self._keeps_stop = keeps_stop
    self._longest = max(map(len, stops), default=0)
    self._decoder = codecs.getincrementaldecoder('utf-8')('replace')
    self.full = ''  # with the stop string
    self.shown = ''
    self.stop: str | None = None  # the stop string that comes first
    self.starts: list[int] = []  # place of each token in `full`

  def feed(self, tokens: Sequence[int], finish: str | None) -> str:
    """Returns the text that is new to the client; `finish` is set with the last tokens."""
    has_eos = finish == 'stop' and len(tokens) > 0 and tokens[-1] in self._eos_ids
    before = len(self.full)
    for token in tokens[: len(tokens) - has_eos]:
      self.starts.append(len(self.full))
      data = self._token_bytes[token] if token < len(self._token_bytes) else b''
      self.full += self._decoder.decode(data)
    if finish is not None:
      self.full += self._decoder.decode(b'', True)
    if has_eos:
      self.starts.append(len(self.full))
    shown = self._visible(max(0, before - self._longest), finish is not None)
    new = shown[len(self.shown) :]
    self.shown = shown
    return new

  def _visible(self, start: int, is_over: bool) -> str:
    """Returns the text before a stop string, or before a text that may become one."""
    places = [(at, stop) for stop in self._stops if (at := self.full.find(stop, start)) >= 0]
    if places:
      end, self.stop = min(places)
    if self._keeps_stop:
      return self.full
    if places:
      return self.full[:end]
    held = 0
    if not is_over:
      for size in range(1, min(self._longest, len(self.full) + 1)):
        if any(stop.startswith(self.full[-size:]) for stop in self._stops):
          held = size
    end = max(len(self.shown), len(self.full) - held)
    return self.full[:end]
