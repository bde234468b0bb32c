#!/usr/bin/env bash
set -euo pipefail
# Expected: Rendering a conversation is repeatable: GemmaChatTemplateParser.parse gives the same text
#   for the same messages, and leaves them as they are, as apply_chat_template does.
# Happens: Gemma has no role for system texts, so the parser writes the text before that of the first
#   user, into the caller's message. The second rendering has the system text twice, the third one
#   three times.
# Versions: google-tunix 0.1.7
# Output seen:
#   rendering 1: 'Be brief.' 1 time
#   rendering 2: 'Be brief.' 2 times
#   rendering 3: 'Be brief.' 3 times
#   the user's message is now 'Be brief.\nBe brief.\nBe brief.\nWhy?'
# Seen on: 2026-11-29, Python 3.11, CPU

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check 'google-tunix==0.1.7'
cd "$folder"
JAX_PLATFORMS=cpu "$folder/venv/bin/python" - 2>errors <<'PYTHON' || { cat errors; exit 1; }
import types

from tunix.rl.agentic.parser.chat_template_parser import parser as parsers

tokenizer = types.SimpleNamespace(bos_token='<bos>', eos_token='<eos>')
parser = parsers.GemmaChatTemplateParser(tokenizer)
messages = [{'role': 'system', 'content': 'Be brief.'}, {'role': 'user', 'content': 'Why?'}]
counts = []
for number in (1, 2, 3):
  text = parser.parse(messages, add_generation_prompt=True, is_first_msg=True)
  counts.append(text.count('Be brief.'))
  print(f"rendering {number}: 'Be brief.' {counts[-1]} time{'s' * (counts[-1] != 1)}")
print(f"the user's message is now {messages[1]['content']!r}")
assert counts == [1, 2, 3], 'the messages stay as they are now'
PYTHON
