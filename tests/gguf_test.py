"""GGUF files made here: their models, their tokenizers, and every refusal."""

import contextlib
import dataclasses
import functools
import importlib.util
import io
import json
import pathlib
import tempfile
import unittest
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized
import jax
import numpy as np
import safetensors.numpy
import tokenizers

from stppo_jax import tokenizer as chat
from stppo_jax.models import convert
from stppo_jax.models import decoder
from stppo_jax.models import gguf as ours
from stppo_jax.models import hf_config
from stppo_jax.types import UserError

try:
  import gguf
except ImportError as error:
  raise unittest.SkipTest(f'needs the extra `gguf`: {error}') from error

REFERENCES = pathlib.Path(__file__).parent / 'support' / 'reference_logits'
# llama.cpp's names, by hand: the code takes them from the package.
NAMES = {
    'embed_tokens': 'token_embd',
    'norm': 'output_norm',
    'lm_head': 'output',
    'input_layernorm': 'attn_norm',
    'post_attention_layernorm': 'ffn_norm',
    'q_proj': 'attn_q',
    'k_proj': 'attn_k',
    'v_proj': 'attn_v',
    'o_proj': 'attn_output',
    'q_norm': 'attn_q_norm',
    'k_norm': 'attn_k_norm',
    'gate_proj': 'ffn_gate',
    'up_proj': 'ffn_up',
    'down_proj': 'ffn_down',
}
NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5

forward = jax.jit(decoder.forward, static_argnums=1)


def header_of(config):
  """Returns the keys of a GGUF header for a model: key without architecture -> value."""
  return {
      'block_count': config.num_layers,
      'context_length': 256,
      'embedding_length': config.d_model,
      'feed_forward_length': config.d_ff,
      'attention.head_count': config.num_heads,
      'attention.head_count_kv': config.num_kv_heads,
      'attention.key_length': config.head_dim,
      'attention.value_length': config.head_dim,
      'rope.dimension_count': config.head_dim,
      'rope.freq_base': config.rope_theta,
      'attention.layer_norm_rms_epsilon': config.rms_norm_eps,
  }


def tokenizer_of(num_tokens):
  """Three control tokens, then single characters; 'a' and 'b' merge into 'ab'."""
  tokens = ['<|start|>', '<|end|>', '<|pad|>', 'a', 'b', 'ab']
  tokens += [chr(0x30 + i) for i in range(num_tokens - len(tokens))]
  return {
      'model': 'gpt2',
      'pre': 'smollm',
      'tokens': tokens,
      'merges': ['a b'],
      'token_type': [CONTROL] * 3 + [NORMAL] * (num_tokens - 3),
      'bos_token_id': 0,
      'eos_token_id': 1,
      'padding_token_id': 2,
  }


def tensors_of(folder, config, quantised=()):
  """Tensors of a Hugging Face folder under their GGUF names: name -> (array, type)."""
  tensors = {}
  for name, tensor in safetensors.numpy.load_file(folder / 'model.safetensors').items():
    tensor = tensor.astype(np.float32)
    *_, part, kind = name.split('.')
    if config.family == 'llama' and part in ('q_proj', 'k_proj'):
      tensor = pair_up(tensor, config.head_dim)
    name = (
        f'{NAMES[part]}.{kind}'
        if 'layers' not in name
        else (f'blk.{name.split(".")[2]}.{NAMES[part]}.{kind}')
    )
    kind = gguf.GGMLQuantizationType.Q8_0 if part in quantised else gguf.GGMLQuantizationType.F32
    tensors[name] = (gguf.quants.quantize(tensor, kind), kind)
  return tensors


def pair_up(rows, head_dim):
  """Rows (i, i + H/2) of each head become neighbours, one by one as llama.cpp wants them."""
  out = np.empty_like(rows)
  for head in range(0, len(rows), head_dim):
    for i in range(head_dim // 2):
      out[head + 2 * i] = rows[head + i]
      out[head + 2 * i + 1] = rows[head + head_dim // 2 + i]
  return out


def write(path, family, header, tokenizer, tensors, chat_template=None):
  """A GGUF file."""
  writer = gguf.GGUFWriter(path, family)
  values = {f'{family}.{name}': value for name, value in header.items()}
  values |= {f'tokenizer.ggml.{name}': value for name, value in tokenizer.items()}
  if chat_template:
    values['tokenizer.chat_template'] = chat_template
  for name, value in values.items():
    kinds = {
        bool: writer.add_bool,
        int: writer.add_uint32,
        float: writer.add_float32,
        str: writer.add_string,
        list: writer.add_array,
    }
    kinds[type(value)](name, value)
  for name, (tensor, kind) in tensors.items():
    writer.add_tensor(name, tensor, raw_dtype=kind)
  writer.write_header_to_file()
  writer.write_kv_data_to_file()
  writer.write_tensors_to_file()
  writer.close()


class GgufTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.root = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))
    self.path, self.folder = self.root / 'model.gguf', self.root / 'folder'

  def write_reference(self, name, quantised=(), **changes):
    """Writes a file with the random model of that name; `changes` are keys of its parts."""
    config = hf_config.load(REFERENCES / name)
    parts = {
        'family': config.family,
        'header': header_of(config),
        'tokenizer': tokenizer_of(config.vocab_size),
        'tensors': tensors_of(REFERENCES / name, config, quantised),
    }
    for part, change in changes.items():
      if isinstance(change, dict):  # a key that is None goes
        change = {k: v for k, v in (parts[part] | change).items() if v is not None}
      parts[part] = change
    write(self.path, **parts)


class ModelTest(GgufTest):

  @parameterized.parameters('llama_tied', 'qwen2', 'qwen2_tied', 'qwen3', 'qwen3_tied')
  def test_logits_are_those_of_the_original(self, name):
    """transformers' own logits of the model, from before it became GGUF and a folder again."""
    self.write_reference(name)
    ours.convert_file(self.path, self.folder)
    config, params = convert.load_hf(self.folder)
    expected = hf_config.load(REFERENCES / name)
    self.assertEqual(dataclasses.replace(config, max_positions=expected.max_positions), expected)
    reference = safetensors.numpy.load_file(REFERENCES / name / 'reference.safetensors')
    logits, _ = forward(params, config, reference['tokens'], None)
    np.testing.assert_allclose(logits, reference['logits'], atol=1e-4)

  def test_llama_3(self):
    """Grouped heads, an untied output matrix and rope_freqs.weight.

    By hand: theta 500,000 and H 8 have wavelengths 2 pi 500000^(i/4) = 6.3, 167, 4443 and 118,143.
    Those below 8192 / 4 stay; above 8192 / 1 they are stretched 8 times; 4443 lies between, at 8192
    / 4443 = 1.844 turns, so s = (1.844 - 1) / 3 = .2813 and it is stretched 1 / ((1 - s) / 8 + s).
    """
    config = decoder.ModelConfig(
        vocab_size=48,
        d_model=32,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        d_ff=40,
        rope_theta=500_000.0,
        rope_scaling=(8.0, 1.0, 4.0, 8192),
        family='llama',
        max_positions=256,
    )
    shapes = jax.eval_shape(functools.partial(decoder.init, config=config), jax.random.key(0))
    random = np.random.default_rng(0)
    params = jax.tree.map(lambda s: random.normal(size=s.shape).astype(np.float32), shapes)
    convert.save_hf(self.root / 'original', config, params)
    tensors = tensors_of(self.root / 'original', config)
    s = (8192 / (2 * np.pi * 500_000**0.5) - 1) / 3
    divisors = np.array([1, 1, 1 / ((1 - s) / 8 + s), 8], np.float32)
    self.assertAlmostEqual(s, 0.2813, places=3)
    tensors['rope_freqs.weight'] = (divisors, gguf.GGMLQuantizationType.F32)
    write(self.path, 'llama', header_of(config), tokenizer_of(48), tensors)
    ours.convert_file(self.path, self.folder)
    config_again, params_again = convert.load_hf(self.folder)
    self.assertEqual(config_again, config)
    jax.tree.map(np.testing.assert_array_equal, params_again, params)

  def test_quantised(self):
    """Quantised values come back with the error of rounding.

    Half a step of 1/127 of the block's largest, and the step is a float16: 127 * 2^-11 = .06 more.
    """
    self.write_reference('llama_tied', quantised=('embed_tokens', 'q_proj'))
    ours.convert_file(self.path, self.folder)
    tensors = safetensors.numpy.load_file(self.folder / 'model.safetensors')
    original = safetensors.numpy.load_file(REFERENCES / 'llama_tied/model.safetensors')
    for name, tensor in tensors.items():
      difference = np.abs(tensor - original[name].astype(np.float32))
      if 'embed_tokens' in name or 'q_proj' in name:  # rows of 32 are one block
        largest = np.abs(original[name].astype(np.float32)).max(axis=1, keepdims=True)
        self.assertTrue(np.all(difference <= 0.565 * largest / 127), name)
        self.assertGreater(difference.max(), 0)
      else:
        self.assertEqual(difference.max(), 0, name)

  def test_bfloat16(self):
    self.write_reference('qwen2')  # whose numbers bfloat16 holds exactly
    self.assertEqual(ours.main([str(self.path), str(self.folder), '--dtype=bfloat16']), 0)
    written = json.loads((self.folder / 'config.json').read_text())
    self.assertEqual(written['torch_dtype'], 'bfloat16')
    expected = convert.load_hf(REFERENCES / 'qwen2')[1]
    jax.tree.map(np.testing.assert_array_equal, convert.load_hf(self.folder)[1], expected)

  @absltest.skipUnless(importlib.util.find_spec('torch'), 'torch is not installed')
  def test_transformers_reads_the_folder(self):
    import transformers

    from tests.support import make_reference_logits  # needs torch

    self.write_reference('llama_tied', chat_template="{{ messages[0]['content'] }}<|end|>")
    ours.convert_file(self.path, self.folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(self.folder).eval()
    reference = safetensors.numpy.load_file(REFERENCES / 'llama_tied/reference.safetensors')
    logits = make_reference_logits.logits_of(model, reference['tokens'])
    np.testing.assert_allclose(logits, reference['logits'], atol=1e-4)
    tokenizer = transformers.AutoTokenizer.from_pretrained(self.folder)
    self.assertEqual(tokenizer('abba<|end|>').input_ids, [5, 4, 3, 1])
    self.assertEqual(tokenizer.eos_token_id, 1)
    self.assertEqual(model.generation_config.pad_token_id, 2)


class TokenizerTest(GgufTest):

  def load(self, **tokenizer):
    self.write_reference('llama_tied', tokenizer=tokenizer)
    ours.convert_file(self.path, self.folder)
    return chat.load_tokenizer(str(self.folder))

  @parameterized.parameters(
      ('gpt-2', ['It', "'s", ' 2024', ',', ' in', '   ', ' Rome', '!', '\n', '\n', 'OK']),
      (
          'smollm',
          ['It', "'s", ' ', '2', '0', '2', '4', ',', ' in', '   ', ' Rome', '!', '\n', '\n', 'OK'],
      ),
      ('qwen2', ['It', "'s", ' ', '2', '0', '2', '4', ',', ' in', '   ', ' Rome', '!\n\n', 'OK']),
      ('llama-bpe', ['It', "'s", ' ', '202', '4', ',', ' in', '   ', ' Rome', '!\n\n', 'OK']),
  )
  def test_text_is_cut_where_the_original_cuts(self, pre, expected):
    """Digits one by one (SmolLM2, Qwen), by threes (Llama 3) or together (GPT-2)."""
    cutter = tokenizers.pre_tokenizers.Sequence(ours.PRE_TOKENIZERS[pre])
    pieces = [piece for piece, _ in cutter.pre_tokenize_str("It's 2024, in    Rome!\n\nOK")]
    decode = tokenizers.decoders.ByteLevel().decode
    self.assertEqual([decode([piece]) for piece in pieces], expected)

  @parameterized.parameters('gpt-2', 'smollm', 'qwen2', 'llama-bpe')
  def test_ids_are_those_of_a_trained_tokenizer(self, pre):
    """A byte-level BPE trained here, taken apart into a GGUF file and put together again."""
    texts = ["It's 2024: the moon's 29 days.", 'naïve café, the moon\n\n\tthe 1,234 moons'] * 3
    original = tokenizers.Tokenizer(tokenizers.models.BPE())
    original.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(ours.PRE_TOKENIZERS[pre])
    original.train_from_iterator(
        texts,
        tokenizers.trainers.BpeTrainer(
            vocab_size=320,
            special_tokens=['<|end|>', '<tool>'],
            show_progress=False,
            initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        ),
    )
    written = json.loads(original.to_str())['model']
    tokens = sorted(written['vocab'], key=written['vocab'].get)
    config = dataclasses.replace(
        hf_config.load(REFERENCES / 'llama_tied'), vocab_size=len(tokens) + 1
    )
    shapes = jax.eval_shape(functools.partial(decoder.init, config=config), jax.random.key(0))
    params = jax.tree.map(lambda s: np.ones(s.shape, np.float32), shapes)
    convert.save_hf(self.root / 'original', config, params)
    write(
        self.path,
        'llama',
        header_of(config),
        {
            'model': 'gpt2',
            'pre': pre,
            'tokens': [*tokens, '[unused]'],
            'merges': [' '.join(pair) for pair in written['merges']],
            'token_type': [CONTROL, USER_DEFINED] + [NORMAL] * (len(tokens) - 2) + [UNUSED],
            'eos_token_id': 0,
            'bos_token_id': 0,
            'add_bos_token': True,
        },
        tensors_of(self.root / 'original', config),
    )
    ours.convert_file(self.path, self.folder)
    again = tokenizers.Tokenizer.from_file(str(self.folder / 'tokenizer.json'))
    for text in [*texts, 'unseen 56789 wörds <tool> <|end|>\r\n ends', '[unused]']:
      ids = original.encode(text).ids
      self.assertEqual(again.encode(text, add_special_tokens=False).ids, ids)
      self.assertEqual(again.encode(text).ids, [0, *ids])
      self.assertEqual(again.decode(ids, skip_special_tokens=False), text)
    self.assertLen(chat.load_tokenizer(str(self.folder)).token_bytes, len(tokens))

  def test_control_tokens(self):
    tokenizer = self.load(eot_token_id=2)
    self.assertEqual(tokenizer.encode('ab<|end|>', control=True), [5, 1])
    self.assertEqual(tokenizer.eos_ids, (1, 2))
    self.assertEqual(tokenizer.pad_id, 2)

  def test_chat_template(self):
    template = "{% for m in messages %}<|start|>{{ m['content'] }}<|end|>{% endfor %}"
    self.write_reference('llama_tied', chat_template=template)
    ours.convert_file(self.path, self.folder)
    tokenizer = chat.load_tokenizer(str(self.folder))
    self.assertEqual(chat.encode_prompt(tokenizer, 'ab'), [0, 5, 1])


class RefusalTest(GgufTest):

  def refuses(self, *parts):
    """Asserts exit status 2, one line that holds all the parts, and no output."""
    stderr = io.StringIO()
    with contextlib.redirect_stderr(stderr):
      self.assertEqual(ours.main([str(self.path), str(self.folder)]), 2)
    self.assertEqual(stderr.getvalue().count('\n'), 1)
    for part in parts:
      self.assertIn(part, stderr.getvalue())
    self.assertFalse(self.folder.exists())

  def test_no_file(self):
    self.refuses('model.gguf cannot be read (No such file or directory); give a GGUF file')

  def test_a_folder_that_is_a_file(self):
    self.write_reference('llama_tied')
    with self.assertRaisesRegex(UserError, 'is a file; give the name of a folder'):
      ours.convert_file(self.path, self.path)

  def test_unknown_dtype(self):
    with self.assertRaisesRegex(UserError, "dtype 'int8' is unknown; allowed: float32, bfloat16"):
      ours.convert_file(self.path, self.folder, 'int8')

  @parameterized.parameters(
      b'', b'GGUF', b'a text, and not a model', b'GGUF\x09\0\0\0' + b'\0' * 64
  )
  def test_another_file(self, content):
    self.path.write_bytes(content)
    self.refuses('is not a whole GGUF file', 'download it again')

  def test_other_byte_order(self):
    self.path.write_bytes(b'GGUF\0\0\0\x03' + b'\0' * 16)
    self.refuses('other byte order')

  def test_truncated_anywhere(self):
    self.write_reference('llama_tied')
    whole = self.path.read_bytes()
    for end in [
        *range(0, 4000, 61),
        *range(4000, len(whole) - 1, len(whole) // 40),
        len(whole) - 1,
    ]:
      self.path.write_bytes(whole[:end])
      self.refuses('is not a whole GGUF file')

  def test_endless_array(self):
    """An array said to be of 2^60 bytes: the package would go on past the end of the file."""
    self.path.write_bytes(
        b'GGUF\x03\0\0\0'
        + np.array([0, 1, 1], np.uint64).tobytes()
        + b'k'
        + np.array([9, 0], np.uint32).tobytes()
        + np.array([2**60], np.uint64).tobytes()
        + b'\0' * 64
    )
    self.refuses('is not a whole GGUF file (it ends before byte')

  def test_broken_bytes(self):
    """Changes one byte of the header: the file converts, or one line says what is wrong."""
    self.write_reference('llama_tied')
    whole = self.path.read_bytes()
    random = np.random.default_rng(0)
    refused = 0
    for _ in range(300):
      content = bytearray(whole)
      content[random.integers(4, 4500)] = random.integers(256)
      self.path.write_bytes(content)
      with contextlib.redirect_stderr(io.StringIO()) as stderr:
        status = ours.main([str(self.path), str(self.folder)])
      self.assertEqual(stderr.getvalue().count('\n'), 1 if status else 0)
      refused += status == 2
    self.assertGreater(refused, 100)

  @parameterized.parameters(
      ({'family': 'gpt2'}, "architecture 'gpt2' is not supported; allowed: llama, qwen2, qwen3"),
      ({'header': {'block_count': None}}, 'llama.block_count is missing'),
      ({'header': {'block_count': 'two'}}, 'llama.block_count is of type str, not int'),
      ({'header': {'block_count': 0}}, 'llama.block_count = 0 is not a positive number'),
      ({'header': {'block_count': 2**31}}, 'but the file holds only 20 tensors'),
      ({'header': {'block_count': 1}}, 'unknown tensor blk.1.attn_k.weight (9 in all)'),
      ({'header': {'attention.head_count': [4, 4]}}, 'head_count is of type list, not int'),
      (
          {'header': {'attention.head_count': 2}},
          'attn_q.weight has shape [32, 32], the header implies',
      ),
      ({'header': {'rope.dimension_count': 4}}, 'llama.rope.dimension_count = 4 of 8 channels'),
      ({'header': {'rope.scaling.type': 'yarn'}}, "rope scaling 'yarn' is not supported"),
      ({'header': {'rope.scaling.factor': 4.0}}, "rope scaling 'linear' is not supported"),
      ({'header': {'rope.scale_linear': 4.0}}, "rope scaling 'linear' is not supported"),
      ({'header': {'rope.freq_base': -1.0}}, 'rope.freq_base = -1.0 is not a positive number'),
      ({'tokenizer': {'model': 'llama'}}, "tokenizer 'llama' with pre-tokenizer 'smollm' is not"),
      ({'tokenizer': {'pre': None}}, "with pre-tokenizer '' is not supported; allowed: 'gpt2'"),
      ({'tokenizer': {'tokens': ['a'] * 48}}, '48 tokens, 1 different ones, 48 token types'),
      ({'tokenizer': {'tokens': ['a', 'b']}}, 'token_embd.weight has shape [48, 32], the header'),
      ({'tokenizer': {'token_type': [1]}}, '48 different ones, 1 token types'),
      ({'tokenizer': {'merges': [1, 2]}}, 'tokenizer.ggml.merges is not a list of texts'),
      ({'chat_template': 7}, 'tokenizer.chat_template is of type int, not str'),
      ({'tokenizer': {'merges': ['a c']}}, 'tokens and merges do not agree'),
      ({'tokenizer': {'merges': ['ab']}}, 'tokens and merges do not agree'),
      ({'tokenizer': {'eos_token_id': 48}}, 'eos_token_id = 48, but there are 48 tokens'),
      ({'tensors': {'blk.1.ffn_up.weight': None}}, 'missing tensor blk.1.ffn_up.weight'),
      (
          {'tensors': {'blk.0.ffn_gate_inp.weight': (np.ones(3, np.float32), None)}},
          'unknown tensor blk.0.ffn_gate_inp.weight (1 in all), not part of llama',
      ),
      (
          {'tensors': {'rope_freqs.weight': (np.ones(4, np.float32) * 3, None)}},
          'rope_freqs.weight is not the scaling of Llama 3',
      ),
  )
  def test_header(self, changes, message):
    self.write_reference('llama_tied', **changes)
    self.refuses('model.gguf', message)

  def test_quantisation_that_the_package_cannot_read(self):
    self.write_reference('llama_tied')
    with mock.patch.object(gguf.quants, 'dequantize', side_effect=NotImplementedError):
      with self.assertRaisesRegex(
          UserError, 'is stored as F32, which the package gguf cannot read'
      ):
        ours.convert_file(self.path, self.folder)

  def test_without_the_package(self):
    self.path.write_bytes(b'')
    with mock.patch.dict('sys.modules', {'gguf': None}):
      self.refuses('the package gguf is missing', 'pip install ".[gguf]"')


if __name__ == '__main__':
  absltest.main()
