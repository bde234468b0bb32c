"""vLLM reads an exported folder as this package does. It needs an environment of its own:

STPPO_VLLM_PYTHON=/path/of/venv/bin/python python -m pytest -m slow tests/models/export_vllm_test.py
"""

import json
import os
import pathlib
import tempfile

from absl.testing import absltest
from absl.testing import parameterized
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import requests

from benchmarks import servers
from stppo_jax import config as schema
from stppo_jax.evaluation import policy as policy_lib
from stppo_jax.models import convert
from stppo_jax.models import decoder
from stppo_jax.models import hf_config
from stppo_jax.rollout import prepare
from stppo_jax.text import template as template_lib
from stppo_jax.text import tokenizer as tokenizer_lib
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
SIZES = {
    'vocab_size': 340,
    'hidden_size': 128,
    'intermediate_size': 80,
    'num_hidden_layers': 4,
    'num_attention_heads': 4,
    'num_key_value_heads': 2,
    'head_dim': 32,  # vLLM on a CPU takes no smaller heads
    'max_position_embeddings': 128,
    'rms_norm_eps': 1e-6,
    'tie_word_embeddings': False,
    'pad_token_id': 0,
    'bos_token_id': 1,
    'eos_token_id': 1,
    'hidden_act': 'silu',
    'torch_dtype': 'float32',
}
PLAIN = {'rope_type': 'default', 'rope_theta': 1e4}
YARN = PLAIN | {'rope_type': 'yarn', 'factor': 4.0, 'original_max_position_embeddings': 32}
GEMMA = {
    'hidden_act': 'gelu_pytorch_tanh',
    'hidden_activation': 'gelu_pytorch_tanh',
    'tie_word_embeddings': True,
    'query_pre_attn_scalar': 40,
    'sliding_window': 16,
    'layer_types': ['sliding_attention', 'full_attention'] * 2,
}
DELTA = {
    'layer_types': ['linear_attention', 'full_attention'] * 2,
    'linear_conv_kernel_dim': 4,
    'linear_num_key_heads': 2,
    'linear_num_value_heads': 4,
    'linear_key_head_dim': 128,
    'linear_value_head_dim': 128,
    'rope_parameters': PLAIN | {'partial_rotary_factor': 0.25},
}
# {family: what its config.json adds}. Windows are shorter than the rows.
FAMILIES = {
    'qwen2': {'rope_parameters': YARN},
    'qwen3': {'rope_parameters': YARN},
    'mistral': {'sliding_window': 16, 'rope_parameters': PLAIN},
    'smollm3': {'no_rope_layer_interval': 2, 'rope_parameters': PLAIN},
    'olmo2': {'rope_parameters': PLAIN},
    'olmo3': {
        'sliding_window': 16,
        'layer_types': ['sliding_attention', 'full_attention'] * 2,
        'rope_parameters': YARN,
    },
    'gemma2': GEMMA
    | {'attn_logit_softcapping': 2.0, 'final_logit_softcapping': 3.0, 'rope_parameters': PLAIN},
    'gemma3_text': GEMMA
    | {
        'rope_parameters': {
            'full_attention': PLAIN | {'rope_type': 'linear', 'factor': 8.0, 'rope_theta': 1e6},
            'sliding_attention': PLAIN,
        }
    },
    'qwen3_5_text': DELTA,
}
TOOL = {
    'type': 'function',
    'function': {
        'name': 'search',
        'description': 'Searches.',
        'parameters': {'type': 'object', 'properties': {'query': {'type': 'string'}}},
    },
}

pytestmark = [
    pytest.mark.guests(
        what='vLLM reads exported folders',
        version='vllm==0.32.0',
        date='2026-11-26',
        touches='models/hf_export.py',
        environment='vllm',
    ),
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

  def serve_family(self, family, rounds, *flags):
    """Returns (address of vLLM, our jitted logits of rows) of a random model."""
    parent = self.enterContext(tempfile.TemporaryDirectory())
    source = os.path.join(parent, 'source')
    folder = os.path.join(parent, 'model')
    os.mkdir(source)
    tiny_tokenizer.write(source)
    raw = SIZES | {'model_type': family} | FAMILIES[family]
    pathlib.Path(source, 'config.json').write_text(json.dumps(raw), encoding='utf-8')
    shape = hf_config.load(source)
    params = jax.jit(decoder.init, static_argnums=1)(jax.random.key(0), shape)
    noise = lambda w: rounds(w + 0.2 * jax.random.normal(jax.random.key(w.size), w.shape))
    params = jax.tree.map(noise, params)
    convert.save_hf(folder, shape, params, source, eos_ids=(1,))
    port = servers.free_port()
    log = os.path.join(parent, 'vllm.log')
    process = servers.start_vllm(PYTHON, folder, port, log, '--max-model-len=128', *flags)
    self.enterContext(servers.ended(process))
    forward = jax.jit(decoder.forward, static_argnums=1)
    logits = lambda rows: np.asarray(forward(params, shape, rows, None)[0])
    return servers.wait_until_healthy(process, port), logits

  def complete(self, address, **fields):
    asked = {'temperature': 0, 'ignore_eos': True, 'return_token_ids': True, **fields}
    answer = requests.post(f'{address}/v1/completions', json=asked, timeout=120)
    self.assertEqual(answer.status_code, 200, answer.text)
    return answer.json()['choices'][0]

  @parameterized.parameters(sorted(FAMILIES.keys() - {'qwen3_5_text'}))
  def test_family_continues_greedily_as_ours(self, family):
    address, logits = self.serve_family(family, lambda w: w)
    rows = np.random.default_rng(0).integers(2, 340, (3, 90))
    for t in range(40, 90):
      rows[:, t] = np.argmax(logits(rows)[:, t - 1], axis=-1)
    for row in rows.tolist():
      choice = self.complete(address, prompt=row[:40], max_tokens=50)
      self.assertEqual(choice['token_ids'], row[40:])

  def test_gated_delta_nets_score_tokens_as_ours(self):
    """vLLM's kernel for a CPU has bfloat16 alone. The log-probs have a deviation of 2.5."""
    rounds = lambda w: w.astype(jnp.bfloat16).astype(w.dtype)
    address, logits = self.serve_family('qwen3_5_text', rounds, '--dtype=bfloat16')
    rows = np.random.default_rng(0).integers(2, 340, (3, 90))
    logp = np.asarray(jax.nn.log_softmax(logits(rows)))
    for row, ours in zip(rows.tolist(), logp):
      choice = self.complete(address, prompt=row, max_tokens=1, prompt_logprobs=0)
      scores = zip(choice['prompt_logprobs'][1:], row[1:])
      theirs = np.array([score[str(token)]['logprob'] for score, token in scores])
      chosen = ours[np.arange(89), row[1:]]
      self.assertLess(np.mean(np.abs(theirs - chosen)), 0.08)
      self.assertGreater(np.corrcoef(theirs, chosen)[0, 1], 0.999)


if __name__ == '__main__':
  absltest.main()
