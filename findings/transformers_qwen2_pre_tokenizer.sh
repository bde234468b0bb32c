#!/usr/bin/env bash
set -euo pipefail
# Expected: AutoTokenizer of a folder uses its tokenizer.json and gives the same ids as
#   tokenizers.Tokenizer.from_file, whatever the model type in config.json.
# Happens: If config.json says qwen2, a Qwen2Tokenizer is built from the vocabulary and merges
#   with its own pre-tokenizer. The one in tokenizer.json and the tokenizer_class of
#   tokenizer_config.json are ignored, and the text is cut into other ids without a warning. With
#   llama and qwen3 the ids are equal.
# Versions: transformers 5.24.0, tokenizers 0.23.3
# Output seen:
#   llama: TokenizersBackend, equal ids: True, (6, 6)
#   qwen3: TokenizersBackend, equal ids: True, (6, 6)
#   qwen2: Qwen2Tokenizer, equal ids: False, (14, 6)
# Seen on: 2026-11-28, Python 3.11, CPU

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check 'transformers==5.24.0' 'tokenizers==0.23.3'
cd "$folder"
HF_HUB_OFFLINE=1 TRANSFORMERS_VERBOSITY=error "$folder/venv/bin/python" - <<'PYTHON'
import json
import pathlib

from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import AutoTokenizer

tokenizer = Tokenizer(models.BPE())
tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
    pre_tokenizers.Whitespace(),
    pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
])
alphabet = pre_tokenizers.ByteLevel.alphabet()
trainer = trainers.BpeTrainer(
    vocab_size=320, initial_alphabet=alphabet, special_tokens=['<eos>'], show_progress=False
)
text = 'find 12 cats and 345 dogs'
tokenizer.train_from_iterator([text] * 20, trainer)
lengths = {}
for model_type in ('llama', 'qwen3', 'qwen2'):
  folder = pathlib.Path(model_type)
  folder.mkdir()
  tokenizer.save(str(folder / 'tokenizer.json'))
  (folder / 'config.json').write_text(json.dumps({'model_type': model_type}))
  settings = {'tokenizer_class': 'PreTrainedTokenizerFast', 'eos_token': '<eos>'}
  (folder / 'tokenizer_config.json').write_text(json.dumps(settings))
  auto = AutoTokenizer.from_pretrained(folder)
  ids = auto(text, add_special_tokens=False)['input_ids']
  expected = Tokenizer.from_file(str(folder / 'tokenizer.json')).encode(text).ids
  lengths[model_type] = (len(ids), len(expected))
  print(f'{model_type}: {type(auto).__name__}, equal ids: {ids == expected}, {lengths[model_type]}')
assert lengths['llama'][0] == lengths['llama'][1]
assert lengths['qwen3'][0] == lengths['qwen3'][1]
assert lengths['qwen2'][0] > lengths['qwen2'][1], 'qwen2 reads the pre-tokenizer now'
PYTHON
