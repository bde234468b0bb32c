#!/usr/bin/env bash
set -euo pipefail
# Expected: Other threads of Python run while the Rust code of tokenizers encodes a long text.
# Happens: encode holds the interpreter lock for the whole call, so a thread that wakes up every
#   millisecond stands still for seconds. encode_batch of a list with the same text releases it.
# Versions: tokenizers 0.23.3
# Output seen:
#   encode: 3 ticks a second, encode_batch: 814 ticks a second
# Seen on: 2026-11-28, Python 3.11, CPU

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check 'tokenizers==0.23.3'
cd "$folder"
"$folder/venv/bin/python" - <<'PYTHON'
import threading
import time

from tokenizers import Tokenizer, models, pre_tokenizers, trainers

tokenizer = Tokenizer(models.BPE())
tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
sentence = 'the cat sat on the mat and the dog saw it '
tokenizer.train_from_iterator([sentence], trainers.BpeTrainer(vocab_size=100, show_progress=False))
text = sentence * 40_000


def count_ticks(function):
  """Returns how often another thread ran during the call, in ticks per second."""
  ticks = 0
  running = True

  def tick():
    nonlocal ticks
    while running:
      time.sleep(0.001)
      ticks += 1

  thread = threading.Thread(target=tick)
  thread.start()
  time.sleep(0.1)
  before = ticks
  start = time.perf_counter()
  function()
  seconds = time.perf_counter() - start
  rate = (ticks - before) / seconds
  running = False
  thread.join()
  return rate


alone = count_ticks(lambda: tokenizer.encode(text))
batch = count_ticks(lambda: tokenizer.encode_batch([text]))
print(f'encode: {alone:.0f} ticks a second, encode_batch: {batch:.0f} ticks a second')
assert alone < 20, 'encode releases the lock now'
assert batch > 5 * alone and batch > 50
PYTHON
