"""The text of a turn in progress: sampled tokens in, what a client may see out."""

import codecs
from collections.abc import Collection
from collections.abc import Sequence


class TurnText:
  """Decodes a turn piece by piece, without its eos token and, by default, without its stop string.

  Bytes of an unfinished character, and text that may become a stop string, are held back.
  """

  def __init__(
      self,
      token_bytes: Sequence[bytes],
      eos_ids: Collection[int],
      stops: Sequence[str] = (),
      keeps_stop: bool = False,
  ):
    self._token_bytes, self._eos_ids = token_bytes, eos_ids
    self._stops = () if keeps_stop else tuple(stops)
    self._longest = max(map(len, self._stops), default=0)
    self._decoder = codecs.getincrementaldecoder('utf-8')('replace')
    self.full = ''  # with the stop string
    self.shown = ''
    self.starts: list[int] = []  # of the tokens, in `full`

  def feed(self, tokens: Sequence[int], finish: str | None) -> str:
    """Returns the text that is new to the client; `finish` is set with the last tokens."""
    has_eos = finish == 'stop' and len(tokens) > 0 and tokens[-1] in self._eos_ids
    before = len(self.full)
    for token in tokens[: len(tokens) - has_eos]:
      self.starts.append(len(self.full))
      self.full += self._decoder.decode(self._bytes(token))
    if finish is not None:
      self.full += self._decoder.decode(b'', True)
    if has_eos:
      self.starts.append(len(self.full))
    end = self._visible(before, finish is not None)
    new, self.shown = self.full[len(self.shown) : end], self.full[:end]
    return new

  def _bytes(self, token: int) -> bytes:
    return self._token_bytes[token] if token < len(self._token_bytes) else b''

  def _visible(self, before: int, is_over: bool) -> int:
    """Returns the length of the text before a stop string, or what may become one."""
    start = max(0, before - self._longest)
    found = [at for stop in self._stops if (at := self.full.find(stop, start)) >= 0]
    if found:
      return min(found)
    held = 0
    if not is_over:
      for size in range(1, min(self._longest, len(self.full) + 1)):
        if any(stop.startswith(self.full[-size:]) for stop in self._stops):
          held = size
    return max(len(self.shown), len(self.full) - held)
