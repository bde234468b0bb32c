#!/usr/bin/env bash
set -euo pipefail
# Expected: Both clients wait for the seconds that Retry-After names and try again, or both cap
#   the wait.
# Happens: openai obeys values up to 120 and does not try again above that, although two attempts
#   are left. anthropic obeys any value, so a worker may sleep for an hour per attempt.
# Versions: openai 3.57.0, anthropic 2.14.0, httpx2 2.16.2
# Output seen:
#   openai, Retry-After 120: 3 requests, waits [120.0, 120.0]
#   openai, Retry-After 121: 1 requests, waits []
#   openai, Retry-After 3600: 1 requests, waits []
#   anthropic, Retry-After 120: 3 requests, waits [120.0, 120.0]
#   anthropic, Retry-After 121: 3 requests, waits [121.0, 121.0]
#   anthropic, Retry-After 3600: 3 requests, waits [3600.0, 3600.0]
# Seen on: 2026-11-28, Python 3.11, CPU

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check 'openai==3.57.0' 'anthropic==2.14.0' 'httpx2==2.16.2'
cd "$folder"
"$folder/venv/bin/python" - <<'PYTHON'
import time

import anthropic
import httpx2
import openai

sleeps = []
time.sleep = sleeps.append  # nothing waits here
results = {}
for library in ('openai', 'anthropic'):
  for seconds in (120, 121, 3600):
    requests = []

    def answer(request, seconds=seconds, requests=requests):
      requests.append(request)
      return httpx2.Response(429, headers={'retry-after': str(seconds)}, json={'error': {'message': 'slow down'}})

    http = httpx2.Client(transport=httpx2.MockTransport(answer))
    messages = [{'role': 'user', 'content': 'hello'}]
    sleeps.clear()
    try:
      if library == 'openai':
        client = openai.OpenAI(api_key='-', base_url='http://localhost/v1', http_client=http, max_retries=2)
        client.chat.completions.create(model='m', messages=messages)
      else:
        client = anthropic.Anthropic(api_key='-', base_url='http://localhost', http_client=http, max_retries=2)
        client.messages.create(model='m', max_tokens=8, messages=messages)
    except (openai.RateLimitError, anthropic.RateLimitError):
      pass
    results[library, seconds] = (len(requests), list(sleeps))
    print(f'{library}, Retry-After {seconds}: {len(requests)} requests, waits {sleeps}')
assert results['openai', 120] == (3, [120, 120])
assert results['openai', 121] == (1, []), 'openai tries again now'
assert results['anthropic', 3600] == (3, [3600, 3600]), 'anthropic caps the wait now'
PYTHON
