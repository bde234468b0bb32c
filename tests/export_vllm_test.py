"""vLLM reads an exported folder as this package does. It needs an environment of its own:

STPPO_VLLM_PYTHON=/path/of/venv/bin/python python -m pytest -m slow tests/export_vllm_test.py
"""

import json
import os
import pathlib
import tempfile

from absl.testing import absltest
from absl.testing import parameterized
import jax
import pytest
import requests

from benchmarks import servers
from stppo_jax import config as schema
from stppo_jax import tokenizer as tokenizer_lib
from stppo_jax.evaluation import policy as policy_lib
from stppo_jax.models import convert
from stppo_jax.models import decoder
from stppo_jax.rollout import prepare
from stppo_jax.serving import template as template_lib
from tests.support import tiny_tokenizer

PYTHON = os.environ.get('STPPO_VLLM_PYTHON', '')
CHATML = (
    '{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}'
    '<|im_end|>\n{% endif %}{% for message in messages %}<|im_start|>{{ message.role }}\n'
    '{{ message.content }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n'
)
USER = {'role': 'user', 'content': 'Question: which town, and  where\ndoes "it" go? Straße\n'}
CHATS = (
    [USER],
    [{'role': 'system', 'content': 'Be brief.'}, USER],
    [USER, {'role': 'assistant', 'content': '<search> a </search>'}, USER],
)
TOOL = {
    'type': 'function',
    'function': {
        'name': 'search',
        'description': 'Searches.',
        'parameters': {'type': 'object', 'properties': {'query': {'type': 'string'}}},
    },
}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PYTHON, reason='STPPO_VLLM_PYTHON names no Python with vLLM'),
]


def export_embedded(folder):
  shape, params = convert.load_hf(prepare.EMBEDDED_MODEL)
  eos_ids = tokenizer_lib.load_tokenizer(prepare.EMBEDDED_MODEL).eos_ids
  convert.save_hf(folder, shape, params, prepare.EMBEDDED_MODEL, eos_ids=eos_ids)
  policy_lib.add_chat_template(schema.Config(), folder)


def export_chatml(folder):
  """Exports random weights with a chat template and two tokens that end a turn."""
  source = folder + '_source'
  os.mkdir(source)
  tiny_tokenizer.write(source, chat_template=CHATML)
  path = pathlib.Path(source, 'generation_config.json')
  path.write_text(json.dumps({'eos_token_id': [0, 1]}), encoding='utf-8')
  shape = decoder.ModelConfig(
      vocab_size=340,
      d_model=64,
      num_layers=1,
      num_heads=2,
      num_kv_heads=2,
      head_dim=32,
      d_ff=64,
      family='llama',
      max_positions=512,
  )
  params = jax.jit(decoder.init, static_argnums=1)(jax.random.key(0), shape)
  eos_ids = tokenizer_lib.load_tokenizer(source).eos_ids
  convert.save_hf(folder, shape, params, source, eos_ids=eos_ids)


class ExportVllmTest(parameterized.TestCase):

  @parameterized.parameters((export_embedded, 1, False), (export_chatml, 2, True))
  def test_prompts_and_ends_are_ours(self, export, num_ends, shows_tools):
    parent = self.enterContext(tempfile.TemporaryDirectory())
    folder = os.path.join(parent, 'model')
    export(folder)
    port = servers.free_port()
    process = servers.start_vllm(PYTHON, folder, port, os.path.join(parent, 'vllm.log'))
    self.enterContext(servers.ended(process))
    address = servers.wait_until_healthy(process, port)
    tokenizer = tokenizer_lib.load_tokenizer(folder)
    template = template_lib.Template(tokenizer, 384)

    def ask(**fields):
      asked = {'messages': [USER], 'max_tokens': 8, 'return_token_ids': True, **fields}
      answer = requests.post(f'{address}/v1/chat/completions', json=asked, timeout=120)
      self.assertEqual(answer.status_code, 200, answer.text)
      return answer.json()

    for messages in CHATS:
      answer = ask(messages=messages)
      self.assertEqual(answer['prompt_token_ids'], template.encode(messages))
    if shows_tools:
      answer = ask(tools=[TOOL], tool_choice='none')
      self.assertEqual(answer['prompt_token_ids'], template.encode([USER], [TOOL]))
    self.assertLen(tokenizer.eos_ids, num_ends)
    for end in tokenizer.eos_ids:
      (choice,) = ask(logit_bias={str(end): 100})['choices']
      self.assertEqual((choice['finish_reason'], choice['token_ids']), ('stop', [end]))


if __name__ == '__main__':
  absltest.main()
