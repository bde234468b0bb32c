"""Tests of the Hugging Face conversion: round trips, what transformers reads, every refusal."""

import dataclasses
import functools
import importlib.util
import json
import os
import pathlib
import shutil
import socket
import subprocess
import sys
import tempfile
import textwrap
import tracemalloc
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized
import jax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
import transformers

from stppo_jax import config as schema
from stppo_jax.data import tasks
from stppo_jax.evaluation import policy as policy_lib
from stppo_jax.models import convert
from stppo_jax.models import decoder
from stppo_jax.models import hf_config
from stppo_jax.models import hf_export
from stppo_jax.models import sharding
from stppo_jax.rollout import prepare
from stppo_jax.text import tokenizer as chat
from stppo_jax.types import UserError
from tests.support import reference_models
from tests.support import tiny_tokenizer

pytestmark = pytest.mark.guests(
    what='Folders of Hugging Face',
    version='transformers==5.24.0',
    date='2026-11-28',
    touches='models/convert.py models/hf_config.py models/hf_weights.py models/hf_export.py',
)

ROOT = pathlib.Path(__file__).parents[2]
REFERENCES = reference_models.FOLDER
# What config.json of published models holds besides token ids and versions.
_COMMON = {'hidden_act': 'silu', 'attention_dropout': 0.0, 'initializer_range': 0.02}
_QWEN = _COMMON | {'rms_norm_eps': 1e-6, 'rope_theta': 1e6, 'use_sliding_window': False}
_LLAMA = _COMMON | {'model_type': 'llama', 'pretraining_tp': 1, 'rms_norm_eps': 1e-5}
_LLAMA3_SCALING = {
    'factor': 8.0,
    'high_freq_factor': 4.0,
    'low_freq_factor': 1.0,
    'original_max_position_embeddings': 8192,
    'rope_type': 'llama3',
}


_YARN = {
    'attention_factor': 1.2079441541679836,
    'beta_fast': 32,
    'beta_slow': 1,
    'factor': 8.0,
    'original_max_position_embeddings': 8192,
    'rope_type': 'yarn',
}
_GEMMA = {
    'attn_logit_softcapping': None,
    'final_logit_softcapping': None,
    'head_dim': 256,
    'hidden_activation': 'gelu_pytorch_tanh',
    'query_pre_attn_scalar': 256,
    'rope_local_base_freq': 10_000.0,
    'rope_theta': 1_000_000.0,
    'use_bidirectional_attention': False,
}


def _sizes(d_model, d_ff, layers, heads, kv_heads, vocab, positions):
  return {
      'hidden_size': d_model,
      'intermediate_size': d_ff,
      'num_hidden_layers': layers,
      'num_attention_heads': heads,
      'num_key_value_heads': kv_heads,
      'vocab_size': vocab,
      'max_position_embeddings': positions,
  }


LLAMA3 = {
    'rope_type': 'llama3',
    'factor': 8.0,
    'low_freq_factor': 1.0,
    'high_freq_factor': 4.0,
    'original_max_position_embeddings': 2048,
}
PUBLISHED = (
    _QWEN
    | _sizes(3584, 18944, 28, 28, 4, 152_064, 32_768)
    | {'model_type': 'qwen2', 'max_window_layers': 28, 'sliding_window': 131_072},
    _QWEN
    | _sizes(896, 4864, 24, 14, 2, 151_936, 32_768)
    | {'model_type': 'qwen2', 'max_window_layers': 21, 'sliding_window': 32_768, 'use_mrope': False}
    | {'tie_word_embeddings': True},
    _QWEN
    | _sizes(4096, 12288, 36, 32, 8, 151_936, 40_960)
    | {'model_type': 'qwen3', 'max_window_layers': 36, 'sliding_window': None, 'head_dim': 128}
    | {'attention_bias': False, 'rope_scaling': None},
    _QWEN
    | _sizes(2048, 6144, 48, 32, 4, 151_936, 40_960)
    | {'model_type': 'qwen3_moe', 'max_window_layers': 48, 'sliding_window': None, 'head_dim': 128}
    | {'attention_bias': False, 'decoder_sparse_step': 1, 'mlp_only_layers': []}
    | {'moe_intermediate_size': 768, 'norm_topk_prob': True, 'num_experts': 128}
    | {'num_experts_per_tok': 8, 'output_router_logits': False, 'router_aux_loss_coef': 0.001},
    _LLAMA | _sizes(4096, 11008, 32, 32, 32, 32_000, 4096) | {'rope_scaling': None},
    _LLAMA
    | _sizes(4096, 14336, 32, 32, 8, 128_256, 131_072)
    | {'attention_bias': False, 'mlp_bias': False, 'rope_theta': 5e5}
    | {'rope_scaling': _LLAMA3_SCALING},
    _LLAMA
    | _sizes(576, 1536, 30, 9, 3, 49_152, 8192)
    | {'is_llama_config': True, 'rope_interleaved': False, 'tie_word_embeddings': True}
    | {'rope_theta': 100_000},
    {'model_type': 'mistral', 'sliding_window': None, 'rope_theta': 1e6, 'rms_norm_eps': 1e-5}
    | _COMMON
    | _sizes(4096, 14336, 32, 32, 8, 32_768, 32_768),
    {'model_type': 'mistral', 'sliding_window': 4096, 'rms_norm_eps': 1e-5}
    | _COMMON
    | _sizes(4096, 14336, 32, 32, 8, 32_000, 32_768),
    {'model_type': 'smollm3', 'rope_theta': 5e6, 'rope_scaling': None, 'no_rope_layer_interval': 4}
    | _COMMON
    | _sizes(2048, 11008, 36, 16, 4, 128_256, 65_536)
    | {'no_rope_layers': [1, 1, 1, 0] * 9, 'use_sliding_window': False, 'sliding_window': None},
    {'model_type': 'olmo2', 'rope_theta': 5e5, 'rms_norm_eps': 1e-6}
    | _COMMON
    | _sizes(4096, 11008, 32, 32, 32, 100_352, 4096),
    {'model_type': 'olmo3', 'rope_theta': 5e5, 'rms_norm_eps': 1e-6, 'sliding_window': 4096}
    | _COMMON
    | _sizes(4096, 11008, 32, 32, 32, 100_278, 65_536)
    | {'rope_scaling': _YARN, 'layer_types': (['sliding_attention'] * 3 + ['full_attention']) * 8},
    {'model_type': 'gemma3_text', 'sliding_window': 512, 'sliding_window_pattern': 6}
    | _GEMMA
    | _sizes(640, 2048, 18, 4, 1, 262_144, 32_768),
    {'model_type': 'gemma3_text', 'sliding_window': 1024}
    | {'rope_scaling': {'factor': 8.0, 'rope_type': 'linear'}}
    | _sizes(2560, 10240, 34, 8, 4, 262_208, 131_072),
)
HAS_TORCH = importlib.util.find_spec('torch') is not None

forward = jax.jit(decoder.forward, static_argnums=1)


def with_value_head(params, seed=0):
  """The same parameters with a value head that is not zero."""
  rng = np.random.default_rng(seed)
  noise = lambda w: rng.normal(size=w.shape).astype(w.dtype)
  return {**params, 'value_head': jax.tree.map(noise, params['value_head'])}


def greedy(params, config, prompt, num_tokens):
  """prompt [B,T] -> the next most likely tokens [B,num_tokens], decoded against a cache."""
  cache = decoder.init_cache(config, len(prompt), prompt.shape[1] + num_tokens)
  tokens, answer = prompt, []
  for _ in range(num_tokens):
    logits, cache = forward(params, config, tokens, None, cache)
    tokens = np.argmax(logits[:, -1:], axis=-1).astype(np.int32)
    answer.append(tokens)
  return np.concatenate(answer, axis=1)


class TreeTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.folder = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))

  def assert_trees_equal(self, actual, expected):
    """Same names, dtypes and bits."""
    self.assertEqual(jax.tree.structure(actual), jax.tree.structure(expected))
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
      self.assertEqual(np.asarray(a).dtype, np.asarray(b).dtype)
      np.testing.assert_array_equal(a, b)


class ConvertTest(TreeTest):

  @parameterized.product(
      name=reference_models.NAMES, form=(('float32', 4 * 2**30), ('bfloat16', 20_000))
  )
  def test_round_trip(self, name, form):
    param_dtype, max_shard_bytes = form
    config, params = convert.load_hf(REFERENCES / name, param_dtype=param_dtype)
    convert.save_hf(self.folder, config, params, max_shard_bytes=max_shard_bytes)
    sharded = (self.folder / 'model.safetensors.index.json').exists()
    self.assertEqual(sharded, max_shard_bytes == 20_000)
    config_again, params_again = convert.load_hf(self.folder, param_dtype=param_dtype)
    self.assertEqual(config_again, config)
    self.assert_trees_equal(params_again, params)

  def test_parameters_are_rounded_to_the_given_dtype(self):
    config, params = convert.load_hf(REFERENCES / 'qwen2')
    convert.save_hf(self.folder, config, params, dtype='bfloat16')
    self.assertEqual(hf_export.stored_dtype(self.folder), 'bfloat16')
    tensors = safetensors.numpy.load_file(self.folder / 'model.safetensors')
    self.assertEqual({str(tensor.dtype) for tensor in tensors.values()}, {'bfloat16'})
    rounded = jax.tree.map(lambda x: x.astype(ml_dtypes.bfloat16).astype(np.float32), params)
    self.assert_trees_equal(convert.load_hf(self.folder)[1], rounded)

  def test_an_export_of_the_embedded_model_can_chat(self):
    source = prepare.EMBEDDED_MODEL
    config, params = convert.load_hf(source)
    convert.save_hf(self.folder, config, params, source, eos_ids=(0,))
    policy_lib.add_chat_template(schema.Config(), str(self.folder))
    tokenizer = transformers.AutoTokenizer.from_pretrained(self.folder)
    messages = [{'role': 'user', 'content': 'Who wrote it?'}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    self.assertEqual(text, 'Question: Who wrote it?\n')
    ends = transformers.GenerationConfig.from_pretrained(self.folder).eos_token_id
    self.assertEqual(ends, 0)
    self.assertEqual(chat.load_tokenizer(str(self.folder)).eos_ids, (0,))

  @parameterized.parameters(
      (None, 7, (7, 9), [7, 9]),
      ({'eos_token_id': 7, 'top_k': 3}, 7, (9, 7), [7, 9]),
      ({'eos_token_id': [7, 9]}, 7, (9,), [7, 9]),
      ({'top_k': 3}, 7, (), 7),
      (None, None, (9,), 9),
      (None, None, (), None),
  )
  def test_engines_read_all_end_tokens(self, generation, own, eos_ids, written):
    source = self.folder / 'source'
    source.mkdir()
    (source / 'tokenizer.json').write_text('{}')
    (source / 'config.json').write_text(json.dumps({'eos_token_id': own}))
    if generation is not None:
      (source / 'generation_config.json').write_text(json.dumps(generation))
    config, params = convert.load_hf(REFERENCES / 'qwen2')
    convert.save_hf(self.folder / 'out', config, params, source, eos_ids=eos_ids)
    path = self.folder / 'out/generation_config.json'
    if written is None:
      self.assertFalse(path.exists())
      return
    raw = json.loads(path.read_text())
    self.assertEqual(raw, (generation or {}) | {'eos_token_id': written})

  def test_the_dtype_that_a_folder_names(self):
    path = self.folder / 'config.json'
    for raw, named in (
        ({'torch_dtype': 'bfloat16'}, 'bfloat16'),
        ({'dtype': 'float16'}, 'float16'),
    ):
      path.write_text(json.dumps(raw))
      self.assertEqual(hf_export.stored_dtype(self.folder), named)
    path.write_text('{"torch_dtype": null}')
    self.assertEqual(hf_export.stored_dtype(self.folder), '')

  @parameterized.parameters(('qwen2_tied', 'value'), ('llama', 'both'))
  def test_round_trip_of_value_heads(self, name, head):
    config, params = convert.load_hf(REFERENCES / name, head=head)
    params = with_value_head(params)
    convert.save_hf(self.folder, config, params)
    config_again, params_again = convert.load_hf(self.folder, head=head)
    self.assertEqual(config_again, config)
    self.assert_trees_equal(params_again, params)

  @parameterized.parameters('qwen2', 'qwen2_tied')
  def test_a_critic_starts_from_its_policy(self, name):
    _, policy = convert.load_hf(REFERENCES / name)
    config, critic = convert.load_hf(REFERENCES / name, head='value')
    self.assertEqual(config.head, 'value')
    self.assertNotIn('lm_head', critic)
    for part in ('embed', 'layers', 'final_norm'):
      self.assert_trees_equal(critic[part], policy[part])
    tokens = np.arange(12).reshape(2, 6)
    values, _ = forward(critic, config, tokens, None)
    np.testing.assert_array_equal(values, np.zeros((2, 6)))

  def test_the_table_covers_every_parameter(self):
    for name in reference_models.NAMES:
      for head in ('tokens', 'value', 'both'):
        config, params = convert.load_hf(REFERENCES / name, head=head)
        paths, _ = jax.tree_util.tree_flatten_with_path(params)
        ours = {'/'.join(key.key for key in path) for path, _ in paths}
        self.assertEqual({entry.path for entry in hf_config.table(config)}, ours)

  def test_dtypes(self):
    config, params = convert.load_hf(REFERENCES / 'llama', param_dtype='bfloat16')
    self.assertEqual(config.param_dtype, 'bfloat16')
    self.assertEqual(params['lm_head']['kernel'].dtype, ml_dtypes.bfloat16)
    _, params = convert.load_hf(REFERENCES / 'llama')
    self.assertEqual(params['lm_head']['kernel'].dtype, np.float32)

  def test_rope_as_transformers_4_and_5_write_it(self):
    shutil.copytree(REFERENCES / 'llama', self.folder, dirs_exist_ok=True)
    expected = hf_config.load(self.folder)
    self.assertEqual(expected.rope_theta, 500.0)
    self.assertEqual(expected.rope_scaling, (8.0, 1.0, 4.0, 32))
    raw = json.loads((self.folder / 'config.json').read_text())
    rope = raw.pop('rope_parameters')
    raw['rope_theta'] = rope.pop('rope_theta')
    raw['rope_scaling'] = rope
    (self.folder / 'config.json').write_text(json.dumps(raw))
    self.assertEqual(hf_config.load(self.folder), expected)

  def test_rope_in_both_forms_that_agree(self):
    shutil.copytree(REFERENCES / 'llama', self.folder, dirs_exist_ok=True)
    expected = hf_config.load(self.folder)
    raw = json.loads((self.folder / 'config.json').read_text())
    rope = {k: v for k, v in raw['rope_parameters'].items() if k != 'rope_theta'}
    raw['rope_scaling'] = {'type': rope.pop('rope_type'), **rope}
    (self.folder / 'config.json').write_text(json.dumps(raw))
    self.assertEqual(hf_config.load(self.folder), expected)

  def test_fingerprint_covers_weights_and_tokenizer_only(self):
    folder = self.folder / 'copy'
    self.assertEqual(hf_config.fingerprint(folder), '')
    shutil.copytree(REFERENCES / 'qwen2', folder)
    first = hf_config.fingerprint(folder)
    self.assertEqual(hf_config.fingerprint(REFERENCES / 'qwen2'), first)
    (folder / 'README.md').write_text('a text')
    self.assertEqual(hf_config.fingerprint(folder), first)
    config, params = convert.load_hf(folder)
    moved = jax.tree.map(lambda w: w + 1e-3, params)
    convert.save_hf(folder, config, moved)
    trained = hf_config.fingerprint(folder)
    self.assertNotEqual(trained, first)
    (folder / 'chat_template.jinja').write_text('{{ messages }}')
    self.assertNotEqual(hf_config.fingerprint(folder), trained)

  def test_tokenizer_files_and_token_ids_come_along(self):
    config, params = convert.load_hf(REFERENCES / 'qwen2')
    source = self.folder / 'source'
    source.mkdir()
    (source / 'tokenizer.json').write_text('{"a": 1}')
    (source / 'config.json').write_text('{"eos_token_id": 7}')
    convert.save_hf(self.folder / 'out', config, params, source)
    self.assertEqual((self.folder / 'out/tokenizer.json').read_text(), '{"a": 1}')
    self.assertEqual(json.loads((self.folder / 'out/config.json').read_text())['eos_token_id'], 7)
    convert.save_hf(self.folder / 'out', config, params, self.folder / 'out')  # onto itself

  def test_templates_for_tools_come_along(self):
    """transformers 5 saves every template but the default one in a folder."""
    templates = {'default': 'A', 'tool_use': 'B'}
    source = self.folder / 'source'
    source.mkdir()
    tiny_tokenizer.write(str(source))
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(source)
    theirs.chat_template = templates
    theirs.save_pretrained(source)
    config, params = convert.load_hf(REFERENCES / 'llama')
    out = self.folder / 'out'
    convert.save_hf(out, config, params, source)
    again = transformers.PreTrainedTokenizerFast.from_pretrained(out)
    self.assertEqual(again.chat_template, templates)
    before = hf_config.fingerprint(out)
    (out / hf_config.MORE_TEMPLATES / 'tool_use.jinja').write_text('C')
    self.assertNotEqual(hf_config.fingerprint(out), before)

  def test_saving_again_leaves_no_old_shards(self):
    config, params = convert.load_hf(REFERENCES / 'qwen2')
    convert.save_hf(self.folder, config, params, max_shard_bytes=20_000)
    convert.save_hf(self.folder, config, params)
    files = sorted(path.name for path in self.folder.iterdir())
    self.assertEqual(files, ['config.json', 'model.safetensors'])

  @parameterized.parameters(*reference_models.NAMES)
  @absltest.skipUnless(HAS_TORCH, 'torch is not installed')
  def test_transformers_reads_what_we_save(self, name):
    import transformers

    from tests.support import make_reference_logits  # needs torch

    config, params = convert.load_hf(REFERENCES / name)
    convert.save_hf(self.folder, config, params, max_shard_bytes=20_000)
    model, loading = transformers.AutoModelForCausalLM.from_pretrained(
        self.folder, output_loading_info=True
    )
    self.assertEmpty(loading['missing_keys'])
    self.assertEmpty(loading['unexpected_keys'])
    reference = safetensors.numpy.load_file(REFERENCES / name / 'reference.safetensors')
    logits = make_reference_logits.logits_of(model.eval(), reference['tokens'])
    np.testing.assert_allclose(logits, reference['logits'], atol=1e-5)

  @parameterized.parameters('tokens', 'value')
  @absltest.skipUnless(HAS_TORCH, 'torch is not installed')
  def test_the_embedded_model_opens_with_auto_classes(self, head):
    """AutoTokenizer gave our ids for one question of 400: it put Qwen2's words in place of ours."""
    import transformers

    from tests.support import make_reference_logits  # needs torch

    config, params = convert.load_hf(prepare.EMBEDDED_MODEL, head=head)
    convert.save_hf(self.folder, config, params, prepare.EMBEDDED_MODEL)
    with mock.patch.dict(os.environ, {'HF_HUB_OFFLINE': '1'}):
      theirs = transformers.AutoTokenizer.from_pretrained(self.folder, local_files_only=True)
    ours = chat.load_tokenizer(prepare.EMBEDDED_MODEL)
    questions = [task.question for task in tasks.load_tasks('embedded', 'train')][:400]
    self.assertLen(questions, 400)
    for question in [*questions, '<search> a b </search>\n<answer> 1931 </answer>']:
      ids = theirs(question)['input_ids']
      self.assertEqual(ids, ours.encode(question))
      self.assertEqual(theirs.decode(ids), question)
    self.assertEqual(theirs.eos_token_id, ours.eos_ids[0])

    tokens = np.array([ours.encode(questions[0])], np.int32)
    auto = transformers.AutoModelForCausalLM
    if head == 'value':
      params, auto = with_value_head(params), transformers.AutoModelForTokenClassification
      convert.save_hf(self.folder, config, params, prepare.EMBEDDED_MODEL)
    logits = make_reference_logits.logits_of(auto.from_pretrained(self.folder).eval(), tokens)
    expected, _ = forward(params, config, tokens, None)
    np.testing.assert_allclose(logits.reshape(expected.shape), expected, atol=1e-4)
    again, loaded = convert.load_hf(self.folder, head=head)
    self.assertEqual(dataclasses.replace(again, family=config.family), config)
    self.assert_trees_equal(loaded, params)

  def test_tokenizer_of_same_family_keeps_the_model(self):
    words = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
        r'|\s*[\r\n]+|\s+(?!\S)|\s+'
    )
    split = {'type': 'Split', 'pattern': {'Regex': words}, 'behavior': 'Isolated'}
    pre_tokenizer = {'type': 'Sequence', 'pretokenizers': [split, {'type': 'ByteLevel'}]}
    source = self.folder / 'source'
    source.mkdir()
    for given, family in ((pre_tokenizer, 'qwen2'), ({'type': 'ByteLevel'}, 'llama')):
      text = json.dumps({'pre_tokenizer': given, 'model': {}})
      (source / 'tokenizer.json').write_text(text)
      config, params = convert.load_hf(REFERENCES / 'qwen2')
      convert.save_hf(self.folder / 'out', config, params, source)
      self.assertEqual(hf_config.load(self.folder / 'out').family, family)

  @parameterized.parameters('Qwen2Tokenizer', None)
  @absltest.skipUnless(HAS_TORCH, 'torch is not installed')
  def test_words_of_tokenizer_survive_qwen2_class(self, name):
    """Qwen3.5's folders name Qwen2's class, which cuts words at combining marks."""
    import transformers

    source = self.folder / 'source'
    source.mkdir()
    tiny_tokenizer.write(str(source))
    path = source / 'tokenizer_config.json'
    path.write_text(json.dumps(json.loads(path.read_text()) | {'tokenizer_class': name}))
    config, params = convert.load_hf(REFERENCES / 'qwen3')
    convert.save_hf(self.folder / 'out', config, params, source)
    with mock.patch.dict(os.environ, {'HF_HUB_OFFLINE': '1'}):
      theirs = transformers.AutoTokenizer.from_pretrained(self.folder / 'out')
    text = 'capital of France 1931\n'
    ids = chat.load_tokenizer(str(source)).encode(text)
    self.assertEqual(theirs(text)['input_ids'], ids)
    self.assertEqual(theirs.eos_token, tiny_tokenizer.END)

  def test_export_keeps_windows_of_qwen2(self):
    config, params = convert.load_hf(REFERENCES / 'qwen2')
    types = ('full',) + ('window',) * (config.num_layers - 1)
    config = dataclasses.replace(config, layer_types=types, window=3)
    source = self.folder / 'source'
    source.mkdir()
    text = json.dumps({'pre_tokenizer': {'type': 'ByteLevel'}, 'model': {}})
    (source / 'tokenizer.json').write_text(text)
    with self.assertLogs('absl', 'WARNING') as logs:
      convert.save_hf(self.folder / 'out', config, params, source)
    self.assertIn('PreTrainedTokenizerFast(tokenizer_file=..)', logs.output[0])
    again, loaded = convert.load_hf(self.folder / 'out')
    self.assertEqual((again.window, again.layer_types), (3, types))
    tokens = np.arange(1, 17)[None] % config.vocab_size
    expected, _ = forward(params, config, tokens, None)
    actual, _ = forward(loaded, again, tokens, None)
    np.testing.assert_array_equal(actual, expected)

  def test_llama_with_output_bias_is_refused(self):
    config, params = convert.load_hf(REFERENCES / 'qwen2')
    config = dataclasses.replace(config, family='llama')
    convert.save_hf(self.folder, config, params)
    convert.load_hf(self.folder)
    path = self.folder / 'model.safetensors'
    tensors = safetensors.numpy.load_file(path)
    tensors['model.layers.1.self_attn.o_proj.bias'][3] = 1.0
    safetensors.numpy.save_file(tensors, path)
    with self.assertRaisesRegex(UserError, 'layers.1.self_attn.o_proj.bias is not 0'):
      convert.load_hf(self.folder)

  @absltest.skipUnless(HAS_TORCH, 'torch is not installed')
  def test_transformers_reads_our_critic(self):
    import transformers

    from tests.support import make_reference_logits  # needs torch

    config, params = convert.load_hf(REFERENCES / 'llama', head='value')
    params = with_value_head(params)
    convert.save_hf(self.folder, config, params)
    model, loading = transformers.AutoModelForTokenClassification.from_pretrained(
        self.folder, output_loading_info=True
    )
    self.assertEmpty(loading['missing_keys'])
    self.assertEmpty(loading['unexpected_keys'])
    tokens = np.arange(20).reshape(2, 10)
    theirs = make_reference_logits.logits_of(model.eval(), tokens)
    ours, _ = forward(params, config, tokens, None)
    np.testing.assert_allclose(theirs[..., 0], ours, atol=1e-4)

  @parameterized.parameters('qwen2', 'qwen3_tied')
  @absltest.skipUnless(HAS_TORCH, 'torch is not installed')
  def test_greedy_text_is_that_of_transformers(self, name):
    self.check_greedy_text(name)

  @absltest.skipUnless(HAS_TORCH, 'torch is not installed')
  @pytest.mark.slow
  def test_greedy_text_of_experts_is_that_of_transformers(self):
    self.check_greedy_text(next(name for name in reference_models.NAMES if 'moe' in name))

  def check_greedy_text(self, name):
    """A model of transformers, loaded here and saved again: one text and one set of logits."""
    import torch
    import transformers

    from tests.support import make_reference_logits  # needs torch

    theirs = make_reference_logits.make_model(name)
    theirs.save_pretrained(self.folder / 'theirs')
    config, params = convert.load_hf(self.folder / 'theirs')
    convert.save_hf(self.folder / 'ours', config, params)
    again = transformers.AutoModelForCausalLM.from_pretrained(self.folder / 'ours')

    prompt = np.random.default_rng(1).integers(0, 48, (3, 9)).astype(np.int32)
    ours, _ = forward(params, config, prompt, None)
    text = greedy(params, config, prompt, 16)
    for model in (theirs, again.eval()):
      logits = make_reference_logits.logits_of(model, prompt)
      np.testing.assert_allclose(ours, logits, atol=1e-4)
      with torch.no_grad():
        generated = model.generate(
            torch.from_numpy(prompt.astype(np.int64)),
            max_new_tokens=16,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
      np.testing.assert_array_equal(text, generated[:, 9:].numpy())


class ShardedTest(TreeTest):
  """Parameters that are created in their shards, on eight simulated devices."""

  def setUp(self):
    super().setUp()
    if jax.device_count() < 8:
      self.skipTest('needs 8 devices: XLA_FLAGS=--xla_force_host_platform_device_count=8')

  def shardings(self, data, fsdp, tensor):
    mesh = sharding.make_mesh(data, fsdp, tensor, jax.devices()[:8])
    return functools.partial(sharding.tree_shardings, mesh=mesh)

  @parameterized.parameters(
      ('qwen2', 'both', 'float32', (2, 2, 2)),
      ('qwen3_tied', 'value', 'bfloat16', (1, 2, 4)),
      ('llama', 'both', 'bfloat16', (2, 2, 2)),
  )
  def test_load_is_that_on_the_host(self, name, head, param_dtype, mesh):
    config, expected = convert.load_hf(REFERENCES / name, head, param_dtype)
    config_again, params = convert.load_hf(
        REFERENCES / name, head, param_dtype, shardings=self.shardings(*mesh)
    )
    self.assertEqual(config_again, config)
    self.assert_trees_equal(params, expected)
    places = self.shardings(*mesh)(expected)
    jax.tree.map(lambda w, place: self.assertEqual(w.sharding, place), params, places)

  def test_every_axis_cut(self):
    """Rules of ours never cut L or H; a caller's may."""
    mesh = sharding.make_mesh(2, 2, 2, jax.devices()[:8])
    specs = {
        ('layers', 'attention', 'query', 'kernel'): P('data', None, 'fsdp', 'tensor'),  # [L,D,N,H]
        ('layers', 'attention', 'out', 'kernel'): P(None, 'data', 'fsdp', 'tensor'),  # [L,N,H,D]
        ('layers', 'attention', 'key', 'bias'): P(None, None, ('data', 'tensor')),  # [L,M,H]
        ('layers', 'mlp', 'up', 'kernel'): P(None, 'tensor', ('data', 'fsdp')),  # [L,D,F]
    }
    spec_of = lambda path, _: NamedSharding(mesh, specs.get(tuple(k.key for k in path), P()))
    shardings = functools.partial(jax.tree_util.tree_map_with_path, spec_of)
    _, params = convert.load_hf(REFERENCES / 'qwen2', shardings=shardings)
    self.assert_trees_equal(params, convert.load_hf(REFERENCES / 'qwen2')[1])
    up = params['layers']['mlp']['up']['kernel']
    self.assertEqual(up.addressable_shards[0].data.shape, (2, 16, 10))  # the whole is [2,32,40]

  @parameterized.product(name=('qwen2_tied', 'qwen3'), max_shard_bytes=(4 * 2**30, 20_000))
  def test_save_is_that_from_the_host(self, name, max_shard_bytes):
    config, params = convert.load_hf(REFERENCES / name)
    convert.save_hf(self.folder / 'host', config, params, max_shard_bytes=max_shard_bytes)
    _, params = convert.load_hf(REFERENCES / name, shardings=self.shardings(2, 2, 2))
    convert.save_hf(self.folder / 'sharded', config, params, max_shard_bytes=max_shard_bytes)
    files = sorted(path.name for path in (self.folder / 'host').iterdir())
    self.assertEqual(sorted(path.name for path in (self.folder / 'sharded').iterdir()), files)
    for file in files:
      self.assertEqual(
          (self.folder / 'sharded' / file).read_bytes(),
          (self.folder / 'host' / file).read_bytes(),
          file,
      )

  def test_loading_takes_the_memory_of_the_parameters(self):
    """A load holds the parameters and one more tensor of 1 MB."""
    config = decoder.ModelConfig(
        vocab_size=512,
        d_model=512,
        num_layers=16,
        num_heads=4,
        num_kv_heads=1,
        head_dim=128,
        d_ff=512,
        family='llama',
    )
    shapes = jax.eval_shape(functools.partial(decoder.init, config=config), jax.random.key(0))
    random = np.random.default_rng(0)
    params = jax.tree.map(lambda s: random.normal(size=s.shape).astype(s.dtype), shapes)
    total = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    convert.save_hf(self.folder, config, params)
    del params
    convert.load_hf(self.folder)  # traces the model, which takes memory too
    self.addCleanup(tracemalloc.stop)
    tracemalloc.start()
    _, params = convert.load_hf(self.folder)
    peak = tracemalloc.get_traced_memory()[1]
    del params
    self.assertBetween(peak, total, total + 2 * 2**20)

  def test_two_processes(self):
    """Each loads its devices' part; both gather and the first one writes."""
    with socket.socket() as free:
      free.bind(('127.0.0.1', 0))
      address = f'127.0.0.1:{free.getsockname()[1]}'
    program = textwrap.dedent(f"""
      import functools, sys
      import jax
      jax.config.update('jax_cpu_collectives_implementation', 'gloo')
      jax.distributed.initialize('{address}', 2, int(sys.argv[1]))
      from stppo_jax.models import convert
      from stppo_jax.models import sharding
      place = functools.partial(sharding.tree_shardings, mesh=sharding.make_mesh(1, 2, 2))
      config, params = convert.load_hf('{REFERENCES / 'qwen2'}', shardings=place)
      assert not params['lm_head']['kernel'].is_fully_addressable
      convert.save_hf('{self.folder}', config, params, '{self.folder}')
    """)
    (self.folder / 'tokenizer.json').write_text('{}')
    environment = {
        **os.environ,
        'JAX_PLATFORMS': 'cpu',
        'XLA_FLAGS': f'{os.environ["XLA_FLAGS"]} --xla_force_host_platform_device_count=2',
    }
    both = [
        subprocess.Popen(
            [sys.executable, '-c', program, str(i)],
            env=environment,
            stderr=subprocess.PIPE,
            cwd=ROOT,
            text=True,
        )
        for i in range(2)
    ]
    for process in both:
      _, errors = process.communicate(timeout=600)
      self.assertEqual(process.returncode, 0, errors[-2000:])
    self.assert_trees_equal(
        convert.load_hf(self.folder)[1], convert.load_hf(REFERENCES / 'qwen2')[1]
    )


class RefusalTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    root = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))
    self.folder = root / 'model'
    shutil.copytree(REFERENCES / 'qwen2', self.folder)

  def refuses(self, *parts, **kwargs):
    """Asserts that load_hf fails with one line that holds all the parts."""
    with self.assertRaises(UserError) as caught:
      convert.load_hf(self.folder, **kwargs)
    message = str(caught.exception)
    self.assertNotIn('\n', message)
    self.assertNotIn('UserError', message)  # one error in another
    for part in parts:
      self.assertIn(part, message)

  def edit_config(self, **changes):
    path = self.folder / 'config.json'
    raw = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({k: v for k, v in raw.items() if v is not None}))

  def edit_weights(self, edit):
    path = self.folder / 'model.safetensors'
    tensors = safetensors.numpy.load_file(path)
    edit(tensors)
    safetensors.numpy.save_file(tensors, path)

  def shard(self):
    config, params = convert.load_hf(self.folder)
    convert.save_hf(self.folder, config, params, max_shard_bytes=20_000)
    return sorted(self.folder.glob('model-*.safetensors'))

  def test_adapter_is_not_left_out(self):
    shutil.copytree(REFERENCES / 'qwen2', self.folder, dirs_exist_ok=True)
    (self.folder / 'adapter_config.json').write_text('{"peft_type": "LORA"}')
    with self.assertRaisesRegex(UserError, r'adapter of the PEFT library, [^\n]*merge_and_unload'):
      convert.load_hf(self.folder)

  def test_gguf_file_is_no_folder(self):
    with self.assertRaisesRegex(UserError, r'^[^\n]*x\.gguf is a GGUF file; [^\n]*docs/gguf\.md'):
      convert.load_hf('x.gguf')

  def test_a_byte_order_mark_is_no_error(self):
    path = self.folder / 'config.json'
    config = hf_config.load(self.folder)
    path.write_bytes(b'\xef\xbb\xbf' + path.read_bytes())
    self.assertEqual(hf_config.load(self.folder), config)

  def test_a_number_of_layers_that_no_model_has(self):
    self.edit_config(num_hidden_layers=10**9)
    self.refuses('config.json: num_hidden_layers = 1000000000', 'at most 1000')

  def test_no_config(self):
    (self.folder / 'config.json').unlink()
    self.refuses('config.json does not exist; give a folder', '`hf download NAME')

  @parameterized.parameters(('{', 'is not a JSON object'), ('[]', 'is not a JSON object'))
  def test_broken_config(self, text, message):
    (self.folder / 'config.json').write_text(text)
    self.refuses(message, 'download it again')

  @parameterized.parameters(
      (
          {'model_type': 'gpt2'},
          "model_type 'gpt2' is not supported; allowed: qwen2, qwen3, qwen3_moe, llama, mistral",
      ),
      ({'model_type': None}, 'model_type None is not supported'),
      ({'hidden_size': None}, 'hidden_size is missing'),
      ({'num_key_value_heads': None}, 'num_key_value_heads is missing'),
      ({'hidden_act': 'gelu'}, "hidden_act = 'gelu' is not supported; allowed: 'silu'"),
      ({'model_type': 'qwen3_moe', 'use_sliding_window': True}, 'use_sliding_window = True is not'),
      ({'model_type': 'olmo2', 'use_sliding_window': True}, 'use_sliding_window = True is not'),
      ({'model_type': 'qwen3', 'attention_bias': True}, 'attention_bias = True is not supported'),
      ({'mlp_bias': True}, 'mlp_bias = True is not supported'),
      ({'quantization_config': {'bits': 4}}, "quantization_config = {'bits': 4} is not supported"),
      ({'rope_parameters': {'rope_type': 'yarn'}}, 'factor is missing'),
      (
          {'rope_parameters': {'rope_type': 'longrope'}},
          "rope type 'longrope' is not supported; allowed",
      ),
      (
          {'rope_parameters': {'rope_type': 'linear', 'factor': 2, 'beta_fast': 3}},
          'have beta_fast = 3',
      ),
      (
          {'rope_parameters': {'rope_type': 'yarn', 'factor': 2, 'llama_4_scaling_beta': 0.1}},
          'have llama_4_scaling_beta = 0.1, which is not supported; allowed: attention_factor',
      ),
      (
          {'model_type': 'olmo3', 'rope_parameters': {'chunked_attention': {'rope_theta': 1e4}}},
          'rope_parameters has chunked_attention, which is not supported; allowed: full_attention',
      ),
      ({'model_type': 'smollm3', 'no_rope_layers': [1]}, 'allowed: 2 times 0 or 1'),
      (
          {'model_type': 'mistral', 'layer_types': ['full_attention', 'sliding_attention']},
          'layer_types',
      ),
      ({'model_type': 'olmo3', 'layer_types': ['full_attention'] * 3}, 'allowed: 2 times'),
      ({'model_type': 'olmo3', 'sliding_window_pattern': 2}, 'sliding_window_pattern = 2'),
      (
          {'model_type': 'gemma2', 'hidden_act': 'gelu_pytorch_tanh', 'sliding_window_pattern': 6},
          'sliding_window_pattern = 6',
      ),
      ({'model_type': 'gemma3_text', 'hidden_act': 'relu'}, "allowed: 'gelu_pytorch_tanh'"),
      (
          {
              'model_type': 'gemma3_text',
              'hidden_act': 'gelu_pytorch_tanh',
              'attn_logit_softcapping': 50.0,
          },
          'attn_logit_softcapping = 50.0',
      ),
      ({'rope_scaling': {'rope_type': 'yarn', 'factor': 4.0}}, 'remove the one that does not hold'),
      ({'rope_parameters': {'rope_type': 'llama3'}}, 'factor is missing'),
      ({'partial_rotary_factor': 0.5}, 'partial_rotary_factor = 0.5'),
      ({'rope_parameters': {'rope_theta': 1e4, 'partial_rotary_factor': 0.5}}, 'of whole heads'),
      ({'rope_parameters': {'full_attention': {'rope_theta': 1e6}}}, 'in all layers'),
      ({'layer_types': ['full_attention', 'sliding_attention']}, 'layer_types = '),
      ({'layer_types': ['chunked_attention'] * 2}, 'layer_types = '),
      ({'no_rope_layers': [1, 0]}, 'no_rope_layers = [1, 0]'),
      ({'no_rope_layer_interval': 4}, 'no_rope_layer_interval = 4'),
      ({'model_type': 'llama', 'sliding_window': 9}, 'sliding_window = 9'),
      ({'clip_qkv': 8.0}, 'clip_qkv = 8.0'),
      ({'final_logit_softcapping': 30.0}, 'final_logit_softcapping = 30.0'),
      ({'attn_logit_softcapping': 50.0}, 'attn_logit_softcapping = 50.0'),
      ({'logits_scaling': 8.0}, 'logits_scaling = 8.0'),
      ({'embedding_multiplier': 12.0}, 'embedding_multiplier = 12.0'),
      ({'residual_multiplier': 0.22}, 'residual_multiplier = 0.22'),
      ({'attention_multiplier': 1.0}, 'the scale of attention 1;'),
      ({'query_pre_attn_scalar': 1024}, 'query_pre_attn_scalar'),
      ({'is_causal': False}, 'is_causal = False is not supported; allowed: True'),
      ({'num_local_experts': 8}, 'num_local_experts = 8'),
      ({'dual_chunk_attention_config': {'chunk_size': 9}}, 'local_size is missing'),
      ({'model_type': 'gemma3'}, "model_type 'gemma3' has no text_config"),
      ({'tie_word_embeddings': 'false'}, "tie_word_embeddings = 'false' is not supported"),
      ({'max_position_embeddings': 4096.5}, '4096.5 is not a positive whole number'),
      ({'quantization_config': {'x': 'y' * 9999}}, 'yyy is not supported; allowed: none'),
      ({'draft_vocab_size': 9}, 'draft_vocab_size = 9'),
      (
          {'use_sliding_window': True, 'sliding_window': 9, 'max_window_layers': 'all'},
          'a setting has a value of another kind (TypeError: ',
      ),
      (
          {'rope_scaling': LLAMA3 | {'high_freq_factor': 1.0}, 'rope_parameters': None},
          'low_freq_factor = 1 is not below high_freq_factor = 1',
      ),
  )
  def test_config(self, changes, message):
    self.edit_config(**changes)
    self.refuses('config.json', message)

  @parameterized.parameters(
      {'partial_rotary_factor': 1.0, 'clip_qkv': None, 'logits_scaling': 1.0},
      {'layer_types': ['full_attention'] * 2, 'no_rope_layers': [1, 1]},
      {'sliding_window': 32768, 'use_sliding_window': False, 'max_window_layers': 1},
      {'final_logit_softcapping': None, 'attention_multiplier': 'of the head'},
      {'rope_parameters': {'rope_theta': 1e4, 'mrope_section': [1], 'partial_rotary_factor': 1}},
      {'rope_parameters': {'rope_theta': 1e4, 'mrope_section': [1], 'rope_type': 'mrope'}},
      {'rope_parameters': {'rope_theta': 1e4, 'factor': 2.0, 'rope_type': 'dynamic'}},
      {'attention_bias': True, 'hidden_act': 'swish', 'max_position_embeddings': 32768.0},
  )
  def test_settings_that_change_nothing_load(self, **changes):
    expected = hf_config.load(self.folder)
    if 'attention_multiplier' in changes:
      changes = changes | {'attention_multiplier': expected.head_dim**-0.5}
    self.edit_config(**changes)
    self.assertEqual(hf_config.load(self.folder).num_layers, expected.num_layers)

  @parameterized.parameters(
      (LLAMA3, 2048),
      (LLAMA3 | {'name': 'linear'}, 2048),
      (LLAMA3 | {'rope_type': 'default', 'type': 'llama3'}, None),  # rope_type wins, in any order
      ({'type': 'linear'} | LLAMA3, 2048),
      ({'type': 'yarn', 'finetuned': True, 'factor': 2.0}, 4096),
      (LLAMA3, 1024, {'original_max_position_embeddings': 1024}),  # wins over the nested one
      ({'type': 'linear', 'factor': 2.0}, None, {'original_max_position_embeddings': 1024}),
  )
  def test_scalings_as_published(self, scaling, original, changes=None):
    self.edit_config(
        rope_parameters=None, rope_scaling=scaling, max_position_embeddings=4096, **(changes or {})
    )
    found = hf_config.load(self.folder).rope_scaling
    self.assertEqual(getattr(found, 'original', None), original)

  @parameterized.parameters(({}, True), ({'truncate': None}, False), ({'truncate': False}, False))
  def test_null_in_truncate_is_false_as_in_transformers(self, more, expected):
    scaling = {'type': 'yarn', 'factor': 2.0, **more}
    self.edit_config(rope_parameters=None, rope_scaling=scaling)
    self.assertEqual(hf_config.load(self.folder).rope_scaling.truncate, expected)

  @parameterized.parameters((True,), (False,))
  def test_text_model_reads_its_own_part(self, is_tied):
    """The top level says only whether the embedding is the output matrix."""
    text = {
        'model_type': 'gemma3_text',
        'hidden_size': 32,
        'intermediate_size': 40,
        'num_hidden_layers': 6,
        'num_attention_heads': 4,
        'num_key_value_heads': 2,
        'vocab_size': 60,
        'tie_word_embeddings': not is_tied,
    }
    (self.folder / 'config.json').write_text(
        json.dumps(
            {
                'model_type': 'gemma3',
                'text_config': text,
                'vision_config': {},
                'tie_word_embeddings': is_tied,
                'rms_norm_eps': 0.5,
                'rope_scaling': {'rope_type': 'linear', 'factor': 8.0},
                'hidden_act': 'silu',
            }
        )
    )
    config = hf_config.load(self.folder)
    self.assertEqual(config.tie_embeddings, is_tied)
    self.assertEqual((config.rms_norm_eps, config.rope_scaling), (1e-6, None))

  @parameterized.parameters((None, None, 0.25), (None, 0.5, 0.5), (0.5, None, 0.5))
  def test_null_share_of_a_head_is_that_of_the_family(self, outer, inner, expected):
    config = {
        'model_type': 'qwen3_5_text',
        'hidden_size': 32,
        'intermediate_size': 40,
        'num_hidden_layers': 4,
        'num_attention_heads': 4,
        'num_key_value_heads': 2,
        'vocab_size': 60,
        'partial_rotary_factor': outer,
        'rope_parameters': {'rope_theta': 1e4, 'partial_rotary_factor': inner},
    }
    (self.folder / 'config.json').write_text(json.dumps(config))
    self.assertEqual(hf_config.load(self.folder).rotary_share, expected)

  def test_dual_chunk_attention_ends_at_its_first_chunk(self):
    """Qwen2.5-7B-Instruct-1M: 262,144 - 8,192 positions are those of plain attention."""
    chunks = {
        'chunk_size': 262_144,
        'local_size': 8_192,
        'original_max_position_embeddings': 262_144,
    }
    self.edit_config(max_position_embeddings=1_010_000, dual_chunk_attention_config=chunks)
    self.assertEqual(hf_config.load(self.folder).max_positions, 253_952)

  @parameterized.parameters(*PUBLISHED)
  def test_published_configs_load(self, **raw):
    """Each also loads as transformers writes it, with its own defaults filled in."""
    (self.folder / 'config.json').write_text(json.dumps(raw))
    expected = hf_config.load(self.folder)
    config_class = transformers.CONFIG_MAPPING[raw['model_type']]
    config_class(**raw).save_pretrained(self.folder)
    got = hf_config.load(self.folder)
    self.assertEqual(got, expected)

  @parameterized.parameters(
      ({'num_key_value_heads': 3}, 'num_key_value_heads = 3 does not divide num_attention_heads'),
      ({'num_attention_heads': 6, 'num_key_value_heads': 3, 'head_dim': None}, 'hidden_size'),
      ({'head_dim': 7}, '7 wide'),
  )
  def test_heads_that_do_not_fit(self, changes, message):
    self.edit_config(**changes)
    self.refuses(message, 'config.json')

  def test_written_weights_are_readable_by_group(self):
    config, params = convert.load_hf(self.folder)
    convert.save_hf(self.folder, config, params)
    mode = lambda name: (self.folder / name).stat().st_mode
    self.assertEqual(mode('model.safetensors'), mode('config.json'))

  def test_a_critic_folder_is_not_a_policy(self):
    config, params = convert.load_hf(self.folder, head='value')
    convert.save_hf(self.folder, config, params)
    self.refuses('holds a critic', "head='value'")

  def test_a_reward_model_is_not_a_policy(self):
    self.edit_config(architectures=['Qwen2ForSequenceClassification'])
    self.refuses('Qwen2ForSequenceClassification', 'not a policy')

  def test_no_weights(self):
    (self.folder / 'model.safetensors').unlink()
    self.refuses('has no weights', 'model.safetensors.index.json', 'save_pretrained')

  def test_truncated_weights(self):
    path = self.folder / 'model.safetensors'
    path.write_bytes(path.read_bytes()[:1000])
    self.refuses('model.safetensors is not a whole safetensors file', 'download it')

  def test_unknown_key(self):
    self.edit_weights(lambda t: t.update({'model.layers.2.mlp.up_proj.weight': np.ones(3)}))
    self.refuses('unknown key model.layers.2.mlp.up_proj.weight', 'model_type')

  def test_missing_keys(self):
    self.edit_weights(lambda t: t.pop('model.layers.1.self_attn.q_proj.bias'))
    self.refuses('missing key model.layers.1.self_attn.q_proj.bias')
    self.edit_weights(lambda t: [t.pop(k) for k in list(t) if 'layers.0' in k])
    self.refuses('missing keys model.layers.0.', 'and 10 more')  # 12 of layer 0, 1 of layer 1

  def test_missing_output_matrix(self):
    self.edit_weights(lambda t: t.pop('lm_head.weight'))
    self.refuses('missing key lm_head.weight')
    convert.load_hf(self.folder, head='value')  # a critic does not need it

  def test_misshapen_key(self):
    self.edit_weights(lambda t: t.update({'model.norm.weight': np.ones(31, np.float32)}))
    self.refuses('model.norm.weight has shape [31], config.json implies [32]')

  @parameterized.product(dtype=(np.float32, ml_dtypes.bfloat16), number=(np.nan, np.inf))
  def test_a_number_that_is_not_finite(self, dtype, number):
    name = 'model.norm.weight'

    def edit(tensors):
      tensors[name] = tensors[name].astype(dtype)
      tensors[name][-1] = number

    self.edit_weights(edit)
    self.refuses(name, 'not finite')

  def test_quantized_tensor(self):
    self.edit_weights(lambda t: t.update({'model.norm.weight': np.ones(32, np.int8)}))
    self.refuses('model.norm.weight is stored as I8; allowed: F32, BF16, F16')

  def test_output_matrix_that_contradicts_tying(self):
    self.edit_config(tie_word_embeddings=True)
    self.refuses('lm_head.weight differs from model.embed_tokens.weight', 'tie_word_embeddings')
    same = lambda t: t.update({'lm_head.weight': t['model.embed_tokens.weight']})
    self.edit_weights(same)
    convert.load_hf(self.folder)  # a copy is harmless

  def test_missing_shard(self):
    shards = self.shard()
    shards[1].unlink()
    self.refuses(f'{shards[1].name} is missing', 'model.safetensors.index.json lists it')

  def test_key_in_two_files(self):
    shards = self.shard()
    tensors = safetensors.numpy.load_file(shards[0])
    name = next(iter(tensors))
    second = safetensors.numpy.load_file(shards[1]) | {name: tensors[name]}
    safetensors.numpy.save_file(second, shards[1])
    self.refuses(f'{shards[1].name} and another file hold key {name}', f'names {shards[0].name}')

  def test_index_of_another_form(self):
    self.shard()
    index = self.folder / 'model.safetensors.index.json'
    for weight_map in (None, [], 'model.safetensors', 3, {'model.norm.weight': 1}):
      index.write_text(json.dumps({'weight_map': weight_map}), encoding='utf-8')
      self.refuses('weight_map is', 'an object of file names is needed')

  def test_no_tokenizer(self):
    config, params = convert.load_hf(self.folder)
    with self.assertRaisesRegex(UserError, 'holds no tokenizer; give a folder with tokenizer.json'):
      convert.save_hf(self.folder, config, params, self.folder)


if __name__ == '__main__':
  absltest.main()
