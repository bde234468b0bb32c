"""A text encoder of sentence-transformers: texts in, vectors out.

Pooling, prompts, normalisation and length come from the encoder's folder, as E5, BGE, Arctic, GTE
and others publish them. The weights are float32 and not trained. They are on the CPU by default,
because JAX takes most of a GPU's memory. The encoder needs the extra `dense`.
"""

from collections.abc import Sequence
import json
import math
import os
import types as types_lib
from typing import Any

from absl import logging
import numpy as np
import transformers

from stppo_jax import types

MAX_TOKENS = 256  # a longer text is cut
ROWS = 32  # texts per call of the model
_PACKAGE = 'sentence_transformers.'
_ADVICE = (
    'give a Hugging Face folder of an encoder with config.json, model.safetensors and '
    'tokenizer.json, and modules.json if its model has one'
)


class Encoder:
  """Encodes queries and passages so that the inner product of two vectors is their similarity.

  Args:
    folder: of the encoder. Without a modules.json it is a model whose token vectors are averaged
      and scaled to length 1, as E5's are (arXiv 2212.03533).
    device: in torch's words.
    query_prompt: text before each query. None: the folder's.
    passage_prompt: text before each passage. None: the folder's.
  """

  def __init__(
      self,
      folder: str,
      device: str = 'cpu',
      query_prompt: str | None = None,
      passage_prompt: str | None = None,
  ):
    self.folder = folder
    library = _import_library()
    modules = _read_json(folder, 'modules.json', [])
    self.query_prompt, self.passage_prompt = _prompts(folder, query_prompt, passage_prompt)
    _check_modules(folder, modules)
    # Without `trust_remote_code` transformers asks whether to run the folder's code.
    settings: dict[str, Any] = {'local_files_only': True, 'trust_remote_code': False}
    # A pickle could run code.
    weights: dict[str, Any] = {'use_safetensors': True, 'dtype': 'float32'}
    try:
      missing = []
      if not modules or modules[0]['type'].endswith('.Transformer'):
        # sentence-transformers does not say which tensors a file lacks.
        transformer = os.path.join(folder, modules[0]['path'] if modules else '')
        _, loading = transformers.AutoModel.from_pretrained(
            transformer, **settings, **weights, output_loading_info=True
        )
        missing = [name for name in loading['missing_keys'] if not name.startswith('pooler.')]
      self._model = library.SentenceTransformer(
          folder, device='cpu', model_kwargs=weights, **settings
      )
    except Exception as error:  # a broken file can raise any kind
      reason = ' '.join(str(error).split())
      raise types.UserError(
          f'encoder: {folder!r} cannot be read ({reason[:200]}): {_ADVICE}'
      ) from error
    if missing:
      raise types.UserError(
          f'encoder: {folder!r} has no tensor {min(missing)!r}: download it again'
      )
    if self._model.similarity_fn_name not in ('cosine', 'dot'):
      raise types.UserError(
          f'encoder: {folder!r} compares by {self._model.similarity_fn_name!r}: give an encoder '
          "that compares by 'cosine' or 'dot'"
      )
    try:
      self._model.to(device)
    except (RuntimeError, AssertionError) as error:  # AssertionError: a torch without CUDA
      reason = str(error).partition('\n')[0]
      raise types.UserError(
          f"encoder: torch cannot use the device {device!r} ({reason}): give 'cpu' or another one"
      ) from error
    length = self._model.max_seq_length
    if length is None or MAX_TOKENS < length < math.inf:  # a mean of word vectors has no limit
      self._model.max_seq_length = MAX_TOKENS
    if not modules:
      logging.info('encoder: %s has no modules.json: the mean of its token vectors is used', folder)

  @property
  def width(self) -> int:
    """The length D of a vector."""
    return self._model.get_embedding_dimension()

  def encode_queries(self, texts: Sequence[str]) -> np.ndarray:
    """Returns vectors [len(texts), D] float32."""
    return self._encode(texts, self.query_prompt)

  def encode_passages(self, texts: Sequence[str]) -> np.ndarray:
    """Returns vectors [len(texts), D] float32."""
    return self._encode(texts, self.passage_prompt)

  def _encode(self, texts: Sequence[str], prompt: str) -> np.ndarray:
    if not texts:
      return np.zeros((0, self.width), np.float32)
    clean = [text.encode('utf-8', 'replace').decode() for text in texts]
    vectors = self._model.encode(
        clean,
        prompt=prompt,
        batch_size=ROWS,
        show_progress_bar=False,
        normalize_embeddings=self._model.similarity_fn_name == 'cosine',
    )
    vectors = np.asarray(vectors, np.float32)
    if not np.isfinite(vectors).all():  # no passage would be the nearest to such a vector
      raise types.UserError(
          f'encoder: {self.folder!r} gives vectors that are not finite: download it again'
      )
    return vectors


def _prompts(folder, query_prompt, passage_prompt):
  """Returns the prompts of queries and passages. UserError: nothing says them."""
  name = 'config_sentence_transformers.json'
  stated = _read_json(folder, name, {}).get('prompts') or {}
  if not isinstance(stated, dict) or not all(isinstance(x, str) for x in stated.values()):
    raise _unreadable(folder, name, 'its prompts are no texts by name')
  query = stated.get('query') if query_prompt is None else query_prompt
  passage = stated.get('document', stated.get('passage'))
  if passage_prompt is not None:
    passage = passage_prompt
  if query is None and passage is None:
    raise types.UserError(
        f'encoder: {folder!r} does not say which text comes before queries and passages: give '
        "query_prompt and passage_prompt as the model's page has them, such as 'query: ' and "
        "'passage: ' for E5, or '' for none"
    )
  return query or '', passage or ''


def _check_modules(folder, modules):
  """Refuses modules of other packages, because a folder must not choose what is imported."""
  for module in modules:
    if not isinstance(module, dict) or not {'type', 'path'} <= module.keys():
      raise _unreadable(folder, 'modules.json', 'a module has no type or path')
    if not str(module['type']).startswith(_PACKAGE):
      raise types.UserError(
          f'encoder: {folder!r} needs the module {module["type"]!r}, and only those of '
          'sentence-transformers are loaded: give another encoder'
      )


def _read_json(folder, name, default):
  try:
    with open(os.path.join(folder, name), encoding='utf-8') as file:
      value = json.load(file)
  except FileNotFoundError:
    return default
  except (OSError, ValueError, RecursionError) as error:
    raise _unreadable(folder, name, error) from error
  if not isinstance(value, type(default)):
    raise _unreadable(folder, name, f'it is {types.shown(value)}')
  return value


def _unreadable(folder, name, reason):
  path = os.path.join(folder, name)
  return types.UserError(f'encoder: {path!r} cannot be read ({reason}): {_ADVICE}')


def _import_library() -> types_lib.ModuleType:
  try:
    import sentence_transformers
  except ImportError as error:
    raise types.UserError(
        'dense retrieval needs sentence-transformers and torch: pip install "stppo-jax[dense]", or '
        'set --config.retriever.kind=bm25'
    ) from error
  return sentence_transformers
