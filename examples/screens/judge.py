"""The process reward model: a small model that says `positive` or `negative` about a step."""

from collections.abc import Callable
import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np

from stppo_jax.models import convert
from stppo_jax.models import decoder
from stppo_jax.text import tokenizer as tokenizer_lib

FOLDER = pathlib.Path(__file__).parent / 'judge_model'
LENGTH = 64  # tokens of a question, at most


@functools.cache
def load(folder: str = str(FOLDER)) -> Callable[[str], float]:
  """Returns a function question -> probability that the step is positive.

  The probability is that of the first token of `positive` against the first one of `negative`.
  """
  tokenizer = tokenizer_lib.load_tokenizer(folder)
  model, params = convert.load_hf(folder)
  params = jax.device_put(params)
  first = [tokenizer.encode(label)[0] for label in ('positive', 'negative')]
  assert first[0] != first[1], 'the labels start with the same token'

  @jax.jit
  def probability(params, tokens, last):
    logits, _ = decoder.forward(params, model, tokens, jnp.arange(LENGTH)[None])
    return jax.nn.softmax(logits[0, last, jnp.array(first)])[0]

  @functools.lru_cache(maxsize=100_000)
  def judge(question: str) -> float:
    ids = tokenizer_lib.encode_prompt(tokenizer, question)[-LENGTH:]
    tokens = np.zeros((1, LENGTH), np.int32)
    tokens[0, : len(ids)] = ids
    return float(probability(params, tokens, len(ids) - 1))

  return judge
