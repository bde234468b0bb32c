#!/usr/bin/env bash
set -euo pipefail
# Expected: parse_response returns all text that a model wrote around a call, and all of its
#   thoughts. A response template that meets a part twice appends, or raises.
# Happens: With the response template of transformers' own server for Qwen3, the last text replaces
#   the text before the call, and the last thought replaces the first. Nothing is logged. A field
#   keeps all of its parts only with "repeats" and "join", which these templates do not have.
# Versions: transformers 5.24.0
# Output seen:
#   text, call: content 'Before.', calls ['look']
#   text, call, text: content 'After.', calls ['look']
#   two thoughts: reasoning_content 'second', content 'After.'
# Seen on: 2026-11-28, Python 3.11, CPU

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check 'transformers==5.24.0'
cd "$folder"
HF_HUB_OFFLINE=1 TRANSFORMERS_VERBOSITY=error "$folder/venv/bin/python" - <<'PYTHON'
from transformers.cli.serving import utils
from transformers.utils.chat_parsing import parse_response

templates = utils._RESPONSE_TEMPLATE_FALLBACKS
template = next(value for types, value in templates.items() if 'qwen3' in types)
call = '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'
end = '<|im_end|>'
for name, text in (
    ('text, call', f'Before.\n{call}{end}'),
    ('text, call, text', f'Before.\n{call}\nAfter.{end}'),
):
  message = parse_response(text, template, prefix='')
  calls = [item['function']['name'] for item in message['tool_calls']]
  print(f'{name}: content {message["content"]!r}, calls {calls}')
assert message['content'] == 'After.', 'the text before a call is kept now'
text = f'<think>first</think>Before.<think>second</think>After.{end}'
message = parse_response(text, template, prefix='')
thought = message['reasoning_content']
print(f'two thoughts: reasoning_content {thought!r}, content {message["content"]!r}')
assert (thought, message['content']) == ('second', 'After.'), 'the first thought is kept now'
PYTHON
