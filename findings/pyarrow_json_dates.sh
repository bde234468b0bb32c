#!/usr/bin/env bash
set -euo pipefail
# Expected: A JSON text is a text. The reader of JSON Lines gives the column the type string.
# Happens: If all texts of a column look like dates, the column becomes timestamp[s], and
#   '2021-01-01' is read as a datetime. One text of another form makes the whole column string. So
#   the answers of a question set have another type by split.
# Versions: pyarrow 26.0.1
# Output seen:
#   dates: timestamp[s], first value datetime.datetime(1969, 7, 20, 0, 0)
#   mixed: string, first value '1969-07-20'
# Seen on: 2026-11-28, Python 3.11, CPU

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check 'pyarrow==26.0.1'
cd "$folder"
"$folder/venv/bin/python" - <<'PYTHON'
import io

from pyarrow import json

dates = b'{"answer": "1969-07-20"}\n{"answer": "1989-11-09"}\n'
mixed = dates + b'{"answer": "in 1066"}\n'
results = {}
for name, text in (('dates', dates), ('mixed', mixed)):
  table = json.read_json(io.BytesIO(text))
  results[name] = str(table.schema.field('answer').type)
  print(f'{name}: {results[name]}, first value {table["answer"][0].as_py()!r}')
assert results == {'dates': 'timestamp[s]', 'mixed': 'string'}, 'texts stay texts now'
PYTHON
