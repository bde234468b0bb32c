#!/usr/bin/env bash
set -euo pipefail
# Expected: A conversation of several turns is trained on as it was sampled: the model sees the token
#   that ends a turn, and each token has a position of its own. Only what was added to fill the rows
#   is hidden.
# Happens: TokenizerAdapter pads with the eos token if a tokenizer has no padding token, as that of
#   Llama 3, whose eos token <|eot_id|> ends every turn. process_ids, from which the learners get
#   attention mask and positions, takes every token with that id for padding. So no token attends to
#   an end of a turn, and what follows it has the position of the end.
# Versions: google-tunix 0.1.7, jax 0.10.2, flax 0.12.8, transformers 5.12.1
# Output seen:
#   padding token: <|eot_id|>
#   tokens:    <|eot_id|> user why <|eot_id|> model so <|eot_id|> user who <|eot_id|> model me <|eot_id|>
#   positions: 0 0 1 1 2 3 3 4 5 5 6 7 7
#   the last token but one sees: user why model so user who model me
# Seen on: 2026-11-29, Python 3.11, CPU

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check \
  'google-tunix==0.1.7' 'jax==0.10.2' 'flax==0.12.8' 'transformers==5.12.1'
cd "$folder"
JAX_PLATFORMS=cpu "$folder/venv/bin/python" - 2>errors <<'PYTHON' || { cat errors; exit 1; }
import jax.numpy as jnp
import numpy as np
import tokenizers
import transformers
from tunix.generate import tokenizer_adapter
from tunix.rl import common

WORDS = '<|eot_id|> user model why so who me'.split()
words = tokenizers.Tokenizer(tokenizers.models.WordLevel({w: i for i, w in enumerate(WORDS)}, 'me'))
words.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, eos_token='<|eot_id|>')
adapter = tokenizer_adapter.TokenizerAdapter(tokenizer)
pad = adapter.pad_id()
print('padding token:', WORDS[pad])

encode = lambda text: jnp.array([adapter.encode(text)])
prompt = encode('<|eot_id|> user why <|eot_id|> model so <|eot_id|> user who <|eot_id|> model')  # left-padded
answer = encode('me <|eot_id|>')
ids, positions, mask, _ = common.process_ids(prompt, answer, pad, adapter.eos_id())
ids, positions, mask = (np.asarray(x)[0] for x in (ids, positions, mask))
seen = ' '.join(WORDS[i] for i in ids[mask[-2]])
print('tokens:   ', *(WORDS[i] for i in ids))
print('positions:', *positions)
print('the last token but one sees:', seen)
assert WORDS[pad] == '<|eot_id|>', 'the padding token is another one now'
assert seen == 'user why model so user who model me', 'the ends of turns are seen now'
assert positions[2] == positions[3], 'the ends of turns have positions now'
PYTHON
