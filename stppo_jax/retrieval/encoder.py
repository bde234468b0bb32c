"""A BERT-class text encoder (E5 and others with mean pooling) in JAX: texts in, unit vectors out.

It loads a Hugging Face folder: config.json (model_type bert), tokenizer.json, model.safetensors.
The weights are float32 and on one device; the encoder is not trained.
"""

from collections.abc import Sequence
import dataclasses
import functools
import json
import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from safetensors import numpy as safetensors
from safetensors import SafetensorError
import tokenizers

from stppo_jax import types

Params = dict[str, jax.Array]

_ACTIVATION = {'hidden_act': 'gelu', 'position_embedding_type': 'absolute'}
_SUPPORTED = {'model_type': 'bert', **_ACTIVATION}
_DEFAULTS = {'layer_norm_eps': 1e-12, **_ACTIVATION}
_UNUSED = ('pooler.', 'cls.', 'embeddings.position_ids')  # weights for other tasks
_EMBEDDINGS = ('word_embeddings', 'position_embeddings', 'token_type_embeddings')
_LAYER = (  # modules with a weight and a bias
    'attention.self.query',
    'attention.self.key',
    'attention.self.value',
    'attention.output.dense',
    'attention.output.LayerNorm',
    'intermediate.dense',
    'output.dense',
    'output.LayerNorm',
)


@dataclasses.dataclass(frozen=True)
class EncoderShape:
  """The settings of config.json that the computation needs."""

  num_layers: int
  num_heads: int
  norm_eps: float


class Encoder:
  """Encodes a text as the mean of its last layer's token vectors, scaled to length 1.

  Source: E5 (arXiv 2212.03533), whose models expect 'query: ' or 'passage: ' before each text.
  """

  def __init__(self, folder: str, max_tokens: int = 256, rows: int = 32):
    self.folder = folder
    self._shape, self._params = load(folder)
    self._rows = rows
    self._tokenizer = _load_tokenizer(folder)
    max_tokens = min(max_tokens, len(self._params['embeddings.position_embeddings.weight']))
    self._tokenizer.enable_truncation(max_tokens)
    self._tokenizer.no_padding()
    shorter = [n for n in (16, 32, 64, 128, 256) if n < max_tokens]
    self._lengths = [*shorter, max_tokens]

  @property
  def width(self) -> int:
    """The length D of a vector."""
    return self._params['embeddings.word_embeddings.weight'].shape[1]

  def encode(self, texts: Sequence[str]) -> np.ndarray:
    """Returns vectors [len(texts), D] float32. Texts are cut at `max_tokens`."""
    clean = [text.encode('utf-8', 'replace').decode('utf-8') for text in texts]
    ids = [encoding.ids for encoding in self._tokenizer.encode_batch(clean)]
    vectors = np.zeros((len(texts), self.width), np.float32)
    # Similar lengths together: little padding.
    order = np.argsort([len(row) for row in ids], kind='stable')
    for start in range(0, len(order), self._rows):
      chosen = order[start : start + self._rows]
      longest = max(len(ids[i]) for i in chosen)
      length = next(n for n in self._lengths if n >= longest)
      tokens = np.zeros((self._rows, length), np.int32)
      mask = np.zeros_like(tokens)
      for row, i in enumerate(chosen):
        tokens[row, : len(ids[i])] = ids[i]
        mask[row, : len(ids[i])] = 1
      encoded = forward(self._params, self._shape, tokens, mask)
      vectors[chosen] = encoded[: len(chosen)]
    return vectors


@functools.partial(jax.jit, static_argnames='shape')
def forward(params: Params, shape: EncoderShape, tokens: jax.Array, mask: jax.Array) -> jax.Array:
  """Runs post-norm BERT, mean pooling over `mask` and L2 norm: tokens, mask [B,T] -> [B,D]."""

  def dense(x, name):
    return x @ params[f'{name}.weight'].T + params[f'{name}.bias']  # weight [out, in]

  def norm(x, name):
    centred = x - x.mean(axis=-1, keepdims=True)
    variance = jnp.square(centred).mean(axis=-1, keepdims=True)
    normed = centred * jax.lax.rsqrt(variance + shape.norm_eps)
    return normed * params[f'{name}.weight'] + params[f'{name}.bias']

  def split_heads(x):
    return x.reshape(*x.shape[:2], shape.num_heads, -1)  # [B,T,D] -> [B,T,N,H]

  words, positions, kinds = (params[f'embeddings.{name}.weight'] for name in _EMBEDDINGS)
  x = words[tokens] + positions[: tokens.shape[1]] + kinds[0]
  x = norm(x, 'embeddings.LayerNorm')
  for n in range(shape.num_layers):
    layer = f'encoder.layer.{n}'
    query = split_heads(dense(x, f'{layer}.attention.self.query'))
    key = split_heads(dense(x, f'{layer}.attention.self.key'))
    value = split_heads(dense(x, f'{layer}.attention.self.value'))
    scores = jnp.einsum('BTNH,BSNH->BNTS', query, key) / jnp.sqrt(query.shape[-1])
    scores = jnp.where(mask[:, None, None] > 0, scores, -1e9)
    weights = jax.nn.softmax(scores)
    attended = jnp.einsum('BNTS,BSNH->BTNH', weights, value).reshape(x.shape)
    attended = dense(attended, f'{layer}.attention.output.dense')
    x = norm(x + attended, f'{layer}.attention.output.LayerNorm')
    hidden = jax.nn.gelu(dense(x, f'{layer}.intermediate.dense'), approximate=False)
    x = norm(x + dense(hidden, f'{layer}.output.dense'), f'{layer}.output.LayerNorm')
  num_tokens = jnp.maximum(mask.sum(axis=1, keepdims=True), 1)
  mean = jnp.einsum('BTD,BT->BD', x, mask.astype(x.dtype)) / num_tokens
  length = jnp.linalg.norm(mean, axis=1, keepdims=True)
  return mean / jnp.maximum(length, 1e-12)


def load(folder: str) -> tuple[EncoderShape, Params]:
  """Loads (shape, parameters by their names in the file). UserError: it is not a plain BERT."""
  config = _read_config(os.path.join(folder, 'config.json'))
  path = os.path.join(folder, 'model.safetensors')
  try:
    tensors = safetensors.load_file(path)
  except (OSError, SafetensorError) as error:
    raise types.UserError(
        f'encoder: {path!r} cannot be read ({error}): give a folder with '
        'model.safetensors, config.json and tokenizer.json'
    ) from None
  tensors = {name.removeprefix('bert.'): tensor for name, tensor in tensors.items()}
  params = {
      name: jnp.asarray(tensor, jnp.float32)
      for name, tensor in tensors.items()
      if not name.startswith(_UNUSED)
  }
  shape = EncoderShape(
      config['num_hidden_layers'], config['num_attention_heads'], config['layer_norm_eps']
  )
  layers = [f'encoder.layer.{n}.{name}' for n in range(shape.num_layers) for name in _LAYER]
  modules = ['embeddings.LayerNorm', *layers]
  names = {f'embeddings.{name}.weight' for name in _EMBEDDINGS}
  names |= {f'{module}.{part}' for module in modules for part in ('weight', 'bias')}
  if wrong := names ^ params.keys():
    what = 'no tensor' if min(wrong) in names else 'the unknown tensor'
    raise types.UserError(f'encoder: {path!r} has {what} {min(wrong)!r}: a plain BERT is needed')
  return shape, params


def _read_config(path: str) -> dict[str, Any]:
  try:
    with open(path, encoding='utf-8-sig') as file:
      config = _DEFAULTS | json.load(file)
  except (OSError, ValueError, RecursionError, TypeError) as error:
    raise types.UserError(
        f'encoder: {path!r} cannot be read ({error}): give a Hugging Face folder '
        'of a BERT-class encoder'
    ) from None
  for name, value in _SUPPORTED.items():
    if config.get(name) != value:
      raise types.UserError(
          f'encoder: {path!r} has {name}={config.get(name)!r}; supported is {value!r}'
      )
  return config


def _load_tokenizer(folder: str) -> tokenizers.Tokenizer:
  path = os.path.join(folder, 'tokenizer.json')
  try:
    return tokenizers.Tokenizer.from_file(path)
  except Exception as error:  # the library raises bare Exception
    raise types.UserError(
        f'encoder: {path!r} cannot be read ({error}): a fast tokenizer is needed'
    ) from None
