#!/usr/bin/env bash
set -euo pipefail
# Expected: renderers reads the turn that it has written for a call of Qwen3.5, and returns an equal
#   call, as its documentation says of all its renderers.
# Happens: The white space around a text value is removed, so indented code loses the indentation of
#   its first line. Such a call counts as well-formed. The renderer of Qwen3, whose calls are JSON,
#   returns the text as it was.
# Versions: renderers 0.1.12, transformers 5.24.0, tokenizers 0.23.3, httpx 0.28.1 (which renderers
#   imports without requiring it)
# Output seen:
#   Qwen3RendererConfig: ok, '    return 1\n'
#   Qwen35RendererConfig: ok, 'return 1'
# Seen on: 2026-11-28, Python 3.11, CPU

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check 'renderers[transformers]==0.1.12' 'transformers==5.24.0' 'tokenizers==0.23.3' 'httpx==0.28.1'
cd "$folder"
HF_HUB_OFFLINE=1 TRANSFORMERS_VERBOSITY=error "$folder/venv/bin/python" - <<'PYTHON'
from renderers import base
from renderers import configs
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

tokenizer = Tokenizer(models.BPE())
tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
tokenizer.decoder = decoders.ByteLevel()
names = (
    '<|endoftext|> <|im_start|> <|im_end|> <|vision_start|> <|vision_end|> <|image_pad|> '
    '<|video_pad|> <think> </think> <tool_call> </tool_call> <tool_response> </tool_response>'
).split()
trainer = trainers.BpeTrainer(
    vocab_size=256 + len(names),
    initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    special_tokens=names,
    show_progress=False,
)
tokenizer.train_from_iterator([''], trainer)
fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token='<|im_end|>')
properties = {'text': {'type': 'string'}}
function = {'name': 'write', 'description': 'Writes.', 'parameters': {'properties': properties}}
tools = [{'type': 'function', 'function': function}]
text = '    return 1\n'
call = {'type': 'function', 'function': {'name': 'write', 'arguments': {'text': text}}}
question = {'role': 'user', 'content': 'Write.'}
turn = {'role': 'assistant', 'content': '', 'reasoning_content': 'So.', 'tool_calls': [call]}
values = []
for config in (configs.Qwen3RendererConfig(), configs.Qwen35RendererConfig()):
  renderer = base.create_renderer(fast, config)
  prompt = renderer.render_ids([question], tools=tools, add_generation_prompt=True)
  ids = renderer.render_ids([question, turn], tools=tools)
  assert ids[: len(prompt)] == prompt
  parsed = renderer.parse_response(ids[len(prompt) :], tools=tools, prompt_ids=prompt)
  (read,) = parsed.tool_calls
  values.append(read.arguments['text'])
  print(f'{type(config).__name__}: {read.status}, {values[-1]!r}')
assert values == [text, text.strip()], 'white space around a value is kept now'
PYTHON
