#!/usr/bin/env bash
set -euo pipefail
# Expected: SummarizationMiddleware shows the model the messages that it replaces as they were said.
# Happens: The messages are written into XML with escapes, so that code and the tags of thoughts
#   reach the model as '&lt;' and '&gt;'. A model that copies what it reads puts escapes into the
#   summary, and no token of its own earlier turns comes back.
# Versions: langchain 1.5.2, langchain-core 1.8.3
# Output seen:
#   said: <think>2 is more</think> print(1 < 2)
#   read: &lt;think&gt;2 is more&lt;/think&gt; print(1 &lt; 2)
# Seen on: 2026-11-28, Python 3.11, CPU

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check 'langchain==1.5.2' 'langchain-core==1.8.3'
cd "$folder"
"$folder/venv/bin/python" - <<'PYTHON'
import re

from langchain.agents import create_agent
from langchain.agents.middleware import SummarizationMiddleware
from langchain_core.language_models.fake_chat_models import GenericFakeChatModel
from langchain_core.messages import AIMessage
from langchain_core.messages import HumanMessage

requests = []


class Recorder(GenericFakeChatModel):

  def _generate(self, messages, *args, **kwargs):
    requests.append(messages)
    return super()._generate(messages, *args, **kwargs)


said = '<think>2 is more</think> print(1 < 2)'
model = Recorder(messages=iter([AIMessage('a summary'), AIMessage('done')]))
summarise = SummarizationMiddleware(model=model, trigger=('messages', 3), keep=('messages', 1))
agent = create_agent(model, tools=[], middleware=[summarise])
agent.invoke({'messages': [HumanMessage('Compare.'), AIMessage(said), HumanMessage('Go on.')]})
(request,) = requests[0]
read = re.search(r'<message type="ai">(.*?)</message>', request.content, re.DOTALL)[1]
print(f'said: {said}')
print(f'read: {read}')
assert said not in request.content and '&lt;think&gt;' in read, 'the history is as it was said now'
PYTHON
