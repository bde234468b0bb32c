#!/usr/bin/env bash
set -euo pipefail
# Expected: A JSON Lines file with texts in the column 'answer' keeps them as texts. One row with
#   a list of texts changes that row only, or is refused.
# Happens: The list makes the column one of the type Json, whose values are decoded when they are
#   read. The text '42' of another row becomes the number 42 and the text 'null' becomes None.
# Versions: datasets 5.2.0, pyarrow 26.0.1
# Output seen:
#   texts: ['42', 'null', 'Paris'] Value('string')
#   mixed: [42, None, 'Paris', ['red', 'blue']] Json(decode=True)
# Seen on: 2026-11-28, Python 3.11, CPU

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check 'datasets==5.2.0' 'pyarrow==26.0.1'
cd "$folder"
HF_HUB_OFFLINE=1 "$folder/venv/bin/python" - <<'PYTHON'
import json

import datasets

datasets.disable_progress_bars()
rows = [
    {'question': 'six times seven', 'answer': '42'},
    {'question': 'the empty reference of JSON', 'answer': 'null'},
    {'question': 'the capital of France', 'answer': 'Paris'},
]
mixed = rows + [{'question': 'a primary colour', 'answer': ['red', 'blue']}]
answers = {}
for name, table in (('texts', rows), ('mixed', mixed)):
  with open(f'{name}.jsonl', 'w') as file:
    file.write('\n'.join(map(json.dumps, table)))
  data = datasets.load_dataset('json', data_files=f'{name}.jsonl', split='train', cache_dir=name)
  answers[name] = data[:]['answer']
  print(f'{name}: {answers[name]} {data.features["answer"]}')
assert answers['texts'] == ['42', 'null', 'Paris']
assert answers['mixed'][:3] == [42, None, 'Paris'], 'texts stay texts now'
PYTHON
