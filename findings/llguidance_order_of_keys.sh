#!/usr/bin/env bash
set -euo pipefail
# Expected: The grammar of a JSON schema admits the texts that are valid by the schema: keys in
#   any order, and 1.0 where an integer is asked for.
# Happens: Keys must stand in the order of `properties`, and an integer has no decimal point. Both
#   texts are valid by jsonschema. A recorded call of another model can therefore be valid and
#   impossible under the grammar.
# Versions: llguidance 1.9.1, tokenizers 0.23.3, transformers 5.24.0, jsonschema 4.26.0
# Output seen:
#   {"city": "Oslo", "days": 3}: valid, admitted by the grammar: True
#   {"days": 3, "city": "Oslo"}: valid, admitted by the grammar: False
#   {"city": "Oslo", "days": 3.0}: valid, admitted by the grammar: False
# Seen on: 2026-11-28, Python 3.11, CPU

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check 'llguidance==1.9.1' 'tokenizers==0.23.3' 'transformers==5.24.0' 'jsonschema==4.26.0'
cd "$folder"
HF_HUB_OFFLINE=1 TRANSFORMERS_VERBOSITY=error "$folder/venv/bin/python" - <<'PYTHON'
import json

import jsonschema
import llguidance
import llguidance.hf
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

tokenizer = Tokenizer(models.BPE())
tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
tokenizer.decoder = decoders.ByteLevel()
alphabet = pre_tokenizers.ByteLevel.alphabet()
trainer = trainers.BpeTrainer(
    vocab_size=257, initial_alphabet=alphabet, special_tokens=['<eos>'], show_progress=False
)
tokenizer.train_from_iterator([''], trainer)
fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token='<eos>')
ll_tokenizer = llguidance.hf.from_tokenizer(fast)
schema = {
    'type': 'object',
    'properties': {'city': {'type': 'string'}, 'days': {'type': 'integer'}},
    'required': ['city', 'days'],
}
grammar = llguidance.LLMatcher.grammar_from_json_schema(json.dumps(schema))
admitted = []
for text in ('{"city": "Oslo", "days": 3}', '{"days": 3, "city": "Oslo"}', '{"city": "Oslo", "days": 3.0}'):
  jsonschema.validate(json.loads(text), schema)
  matcher = llguidance.LLMatcher(ll_tokenizer, grammar)
  ids = tokenizer.encode(text).ids
  is_whole = matcher.try_consume_tokens(ids) == len(ids)
  admitted.append(is_whole and matcher.is_accepting())
  print(f'{text}: valid, admitted by the grammar: {admitted[-1]}')
assert admitted == [True, False, False], 'the grammar admits other texts now'
PYTHON
