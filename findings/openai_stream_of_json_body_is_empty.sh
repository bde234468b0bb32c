#!/usr/bin/env bash
set -euo pipefail
# Expected: If a server answers a request for a stream with a plain JSON completion, the client
#   raises an error or yields the completion.
# Happens: The loop over the stream ends at once, without a chunk and without an exception. The
#   answer of the model is lost and looks like an empty completion.
# Versions: openai 3.57.0, httpx2 2.16.2
# Output seen:
#   stream=False: hello
#   stream=True: 0 chunks
# Seen on: 2026-11-28, Python 3.11, CPU

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check 'openai==3.57.0' 'httpx2==2.16.2'
cd "$folder"
"$folder/venv/bin/python" - <<'PYTHON'
import httpx2
import openai

BODY = {
    'id': 'c', 'object': 'chat.completion', 'created': 1, 'model': 'm',
    'choices': [{'index': 0, 'finish_reason': 'stop', 'message': {'role': 'assistant', 'content': 'hello'}}],
}
http = httpx2.Client(transport=httpx2.MockTransport(lambda request: httpx2.Response(200, json=BODY)))
client = openai.OpenAI(api_key='-', base_url='http://localhost/v1', http_client=http)
messages = [{'role': 'user', 'content': 'say hello'}]
plain = client.chat.completions.create(model='m', messages=messages)
print('stream=False:', plain.choices[0].message.content)
chunks = list(client.chat.completions.create(model='m', messages=messages, stream=True))
print('stream=True:', len(chunks), 'chunks')
assert plain.choices[0].message.content == 'hello'
assert chunks == [], 'the client reads or refuses the body now'
PYTHON
