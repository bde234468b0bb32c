"""A text encoder of transformers with mean pooling (E5 and others): texts in, unit vectors out.

The weights are float32 and not trained. They are on the CPU by default, because JAX takes most of a
GPU's memory. The encoder needs the extra `dense` (torch).
"""

from collections.abc import Sequence
import types as types_lib
from typing import Any

import numpy as np
import transformers

from stppo_jax import types

MAX_TOKENS = 256  # a longer text is cut
ROWS = 32  # texts per call of the model


class Encoder:
  """Encodes a text as the mean of its last layer's token vectors, scaled to length 1.

  Source: E5 (arXiv 2212.03533), whose models expect 'query: ' or 'passage: ' before each text.
  """

  def __init__(self, folder: str, device: str = 'cpu'):
    self.folder = folder
    self._torch = _import_torch()
    try:
      # Without `trust_remote_code` transformers asks whether to run the folder's code.
      settings: dict[str, Any] = {'local_files_only': True, 'trust_remote_code': False}
      self._tokenizer = transformers.AutoTokenizer.from_pretrained(folder, **settings)
      model, loading = transformers.AutoModel.from_pretrained(
          folder,
          **settings,
          use_safetensors=True,  # a pickle could run code
          dtype='float32',
          output_loading_info=True,
      )
    except Exception as error:  # a broken file can raise any kind
      reason = ' '.join(str(error).split())
      raise types.UserError(
          f'encoder: {folder!r} cannot be read ({reason[:200]}): give a Hugging Face folder of a '
          'BERT-class encoder with config.json, model.safetensors and tokenizer.json'
      ) from error
    missing = sorted(name for name in loading['missing_keys'] if not name.startswith('pooler.'))
    if missing:
      raise types.UserError(f'encoder: {folder!r} has no tensor {missing[0]!r}: download it again')
    try:
      self._model = model.eval().to(device)
    except (RuntimeError, AssertionError) as error:  # AssertionError: a torch without CUDA
      reason = str(error).partition('\n')[0]
      raise types.UserError(
          f"encoder: torch cannot use the device {device!r} ({reason}): give 'cpu' or another one"
      ) from error
    self._max_tokens = min(MAX_TOKENS, model.config.max_position_embeddings)

  @property
  def width(self) -> int:
    """The length D of a vector."""
    return self._model.config.hidden_size

  def encode(self, texts: Sequence[str]) -> np.ndarray:
    """Returns vectors [len(texts), D] float32."""
    vectors = np.zeros((len(texts), self.width), np.float32)
    by_length = np.argsort([len(text) for text in texts], kind='stable')  # less padding
    for start in range(0, len(texts), ROWS):
      rows = by_length[start : start + ROWS]
      clean = [texts[row].encode('utf-8', 'replace').decode() for row in rows]
      vectors[rows] = self._encode_batch(clean)
    return vectors

  def _encode_batch(self, texts: list[str]) -> np.ndarray:
    batch = self._tokenizer(
        texts, padding=True, truncation=True, max_length=self._max_tokens, return_tensors='pt'
    )
    batch = batch.to(self._model.device)
    with self._torch.inference_mode():
      x = self._model(**batch).last_hidden_state
      mask = batch['attention_mask'].unsqueeze(-1)
      mean = (x * mask).sum(1) / mask.sum(1)
      return self._torch.nn.functional.normalize(mean, dim=-1).cpu().numpy()


def _import_torch() -> types_lib.ModuleType:
  try:
    import torch
  except ImportError as error:
    raise types.UserError(
        'dense retrieval needs torch: pip install "stppo-jax[dense]", or set '
        '--config.retriever.kind=bm25'
    ) from error
  return torch
