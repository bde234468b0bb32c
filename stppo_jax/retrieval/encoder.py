"""A BERT-class text encoder (E5 and others with mean pooling) in JAX: texts in, unit vectors out.

It loads a Hugging Face folder: config.json (model_type bert), tokenizer.json, model.safetensors.
The weights are float32 and on one device; the encoder is not trained.
"""

from collections.abc import Sequence
import dataclasses
import functools
import json
import os

import jax
import jax.numpy as jnp
import numpy as np
from safetensors import numpy as safetensors
from safetensors import SafetensorError
import tokenizers

from stppo_jax import types

_UNUSED = ('pooler.', 'cls.', 'embeddings.position_ids')  # weights for other tasks
_LAYER = {  # our name -> Hugging Face's, below encoder.layer.N.
    'query': 'attention.self.query',
    'key': 'attention.self.key',
    'value': 'attention.self.value',
    'attended': 'attention.output.dense',
    'attended_norm': 'attention.output.LayerNorm',
    'up': 'intermediate.dense',
    'down': 'output.dense',
    'norm': 'output.LayerNorm',
}


@dataclasses.dataclass(frozen=True)
class Shape:
  """The settings of config.json that the computation needs."""

  num_layers: int
  num_heads: int
  max_positions: int
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
    max_tokens = min(max_tokens, self._shape.max_positions)
    self._tokenizer.enable_truncation(max_tokens)
    self._tokenizer.no_padding()
    self._lengths = [*(n for n in (16, 32, 64, 128, 256) if n < max_tokens), max_tokens]

  @property
  def width(self) -> int:
    """The length D of a vector."""
    return self._params['words'].shape[1]

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
      tokens, mask = np.zeros((2, self._rows, length), np.int32)
      for row, i in enumerate(chosen):
        tokens[row, : len(ids[i])], mask[row, : len(ids[i])] = ids[i], 1
      vectors[chosen] = forward(self._params, self._shape, tokens, mask)[: len(chosen)]
    return vectors


@functools.partial(jax.jit, static_argnames='shape')
def forward(params, shape: Shape, tokens: jax.Array, mask: jax.Array) -> jax.Array:
  """Runs post-norm BERT, mean pooling over `mask` and L2 norm: tokens, mask [B,T] -> [B,D]."""
  x = params['words'][tokens] + params['positions'][: tokens.shape[1]] + params['types'][0]
  x = _norm(x, params['norm'], shape.norm_eps)
  split = lambda y: y.reshape(*y.shape[:2], shape.num_heads, -1)  # [B,T,D] -> [B,T,N,H]
  for layer in params['layers']:
    query, key, value = (split(_dense(x, layer[name])) for name in ('query', 'key', 'value'))
    scores = jnp.einsum('BTNH,BSNH->BNTS', query, key) / jnp.sqrt(query.shape[-1])
    weights = jax.nn.softmax(jnp.where(mask[:, None, None] > 0, scores, -1e9))
    attended = jnp.einsum('BNTS,BSNH->BTNH', weights, value).reshape(x.shape)
    x = _norm(x + _dense(attended, layer['attended']), layer['attended_norm'], shape.norm_eps)
    hidden = jax.nn.gelu(_dense(x, layer['up']), approximate=False)
    x = _norm(x + _dense(hidden, layer['down']), layer['norm'], shape.norm_eps)
  mean = jnp.einsum('BTD,BT->BD', x, mask.astype(x.dtype)) / jnp.maximum(
      mask.sum(axis=1, keepdims=True), 1
  )
  return mean / jnp.maximum(jnp.linalg.norm(mean, axis=1, keepdims=True), 1e-12)


def load(folder: str) -> tuple[Shape, dict]:
  """Loads (Shape, parameters) from a folder. UserError: it does not contain a plain BERT."""
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
  tensors = {
      name: np.asarray(tensor, np.float32)
      for name, tensor in tensors.items()
      if not name.startswith(_UNUSED)
  }

  def take(name):
    if name not in tensors:
      raise types.UserError(f'encoder: {path!r} has no tensor {name!r}: a plain BERT is needed')
    return tensors.pop(name)

  pair = lambda name: (take(name + '.weight'), take(name + '.bias'))
  params = {
      'words': take('embeddings.word_embeddings.weight'),
      'positions': take('embeddings.position_embeddings.weight'),
      'types': take('embeddings.token_type_embeddings.weight'),
      'norm': pair('embeddings.LayerNorm'),
      'layers': [
          {ours: pair(f'encoder.layer.{n}.{theirs}') for ours, theirs in _LAYER.items()}
          for n in range(config['num_hidden_layers'])
      ],
  }
  if tensors:
    raise types.UserError(
        f'encoder: {path!r} has the unknown tensor {min(tensors)!r}: a plain BERT is needed'
    )
  shape = Shape(
      config['num_hidden_layers'],
      config['num_attention_heads'],
      len(params['positions']),
      config['layer_norm_eps'],
  )
  return shape, jax.tree.map(jnp.asarray, params)


def _read_config(path):
  try:
    with open(path, encoding='utf-8-sig') as file:
      config = json.load(file)
  except (OSError, ValueError, RecursionError) as error:
    raise types.UserError(
        f'encoder: {path!r} cannot be read ({error}): give a Hugging Face folder '
        'of a BERT-class encoder'
    ) from None
  wanted = {'model_type': 'bert', 'hidden_act': 'gelu', 'position_embedding_type': 'absolute'}
  for name, value in wanted.items():
    if config.get(name, value if name != 'model_type' else None) != value:
      raise types.UserError(
          f'encoder: {path!r} says {name}={config.get(name)!r}; supported is {value!r}'
      )
  return {'layer_norm_eps': 1e-12, **config}


def _load_tokenizer(folder):
  path = os.path.join(folder, 'tokenizer.json')
  try:
    return tokenizers.Tokenizer.from_file(path)
  except Exception as error:  # the library raises bare Exception
    raise types.UserError(
        f'encoder: {path!r} cannot be read ({error}): a fast tokenizer is needed'
    ) from None


def _dense(x, weight_and_bias):
  weight, bias = weight_and_bias  # [out, in], as in torch
  return x @ weight.T + bias


def _norm(x, scale_and_bias, eps):
  scale, bias = scale_and_bias
  centred = x - x.mean(axis=-1, keepdims=True)
  variance = jnp.square(centred).mean(axis=-1, keepdims=True)
  return centred * jax.lax.rsqrt(variance + eps) * scale + bias
