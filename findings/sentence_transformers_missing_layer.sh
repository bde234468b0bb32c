#!/usr/bin/env bash
set -euo pipefail
# Expected: An encoder whose file of weights lacks the tensors of a layer that config.json names is
#   not loaded, or its vectors are those of a smaller model.
# Happens: SentenceTransformer draws the layer at random and raises nothing. Each load of the same
#   folder gives other vectors. Only a table on stderr names the tensors.
# Versions: sentence-transformers 6.2.0, transformers 5.17.0, torch 2.13.0
# Output seen:
#   whole folder: two loads agree: True
#   a layer is missing: loaded: True, two loads agree: False
# Seen on: 2026-11-28, Python 3.11, CPU

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check \
  'torch==2.13.0' 'transformers==5.17.0' 'sentence-transformers==6.2.0'
cd "$folder"
HF_HUB_OFFLINE=1 "$folder/venv/bin/python" - 2>stderr.txt <<'PYTHON'
import json
import pathlib

import numpy as np
import sentence_transformers
import tokenizers
import transformers

words = ['[PAD]', '[UNK]', '[CLS]', '[SEP]', '[MASK]', 'what', 'is', 'the', 'capital']
library = tokenizers.Tokenizer(
    tokenizers.models.WordLevel({word: i for i, word in enumerate(words)}, unk_token='[UNK]')
)
library.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
tokenizer = transformers.PreTrainedTokenizerFast(
    tokenizer_object=library, pad_token='[PAD]', unk_token='[UNK]'
)
config = transformers.BertConfig(
    vocab_size=len(words),
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    intermediate_size=64,
    initializer_range=0.5,
)
transformers.BertModel(config).save_pretrained('encoder')
tokenizer.save_pretrained('encoder')


def two_loads():
  vectors = []
  for _ in range(2):
    model = sentence_transformers.SentenceTransformer('encoder', device='cpu')
    vectors.append(model.encode(['what is the capital'], show_progress_bar=False))
  return bool(np.allclose(*vectors, atol=1e-6))


whole = two_loads()
print('whole folder: two loads agree:', whole)
path = pathlib.Path('encoder/config.json')
settings = json.loads(path.read_text()) | {'num_hidden_layers': 3}
path.write_text(json.dumps(settings))
missing = two_loads()
print(f'a layer is missing: loaded: True, two loads agree: {missing}')
assert whole and not missing, 'the behaviour has changed'
PYTHON
