"""renderers: prompts, continuations and calls of a tokenizer folder.

The standard input is a JSON text with `folder`, `name` and `settings` of a config class, and three
lists of keyword arguments: `prompts`, `continuations` and `turns`. The standard output has the
lists of answers. An answer that is an error is its text.
"""

import json
import sys

from renderers import base
from renderers import configs
import transformers

request = json.load(sys.stdin)
tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(request['folder'])
config = getattr(configs, request['name'])(**request['settings'])
renderer = base.create_renderer(tokenizer, config)


def prompt(**arguments):
  return renderer.render_ids(add_generation_prompt=True, **arguments)


def continuation(**arguments):
  return renderer.bridge_to_next_turn(**arguments).token_ids


def turn(**arguments):
  parsed = renderer.parse_response(**arguments)
  calls = [[call.status, call.name, call.arguments] for call in parsed.tool_calls]
  return {'content': parsed.content, 'thought': parsed.reasoning_content, 'calls': calls}


def answer(function, arguments):
  try:
    return function(**arguments)
  except Exception as error:
    return f'{type(error).__name__}: {error}'


answers = {
    'prompts': [answer(prompt, arguments) for arguments in request['prompts']],
    'continuations': [answer(continuation, arguments) for arguments in request['continuations']],
    'turns': [answer(turn, arguments) for arguments in request['turns']],
}
print(json.dumps(answers))
