"""Log-probs of known tokens, as evaluation harnesses ask for them."""

from collections.abc import Sequence
from typing import Any
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from stppo_jax.models import decoder
from stppo_jax.rollout import sampler as sampler_lib
from stppo_jax.rollout import sampling_sharding

TOP = 5  # likeliest tokens per place of `PromptScores`


class PromptScores(NamedTuple):
  """The log-probs of n tokens, each given those before it. A row's first token has none."""

  logp: np.ndarray  # [n-1] float32
  top_ids: np.ndarray  # [n-1,TOP], the likeliest first
  top_logp: np.ndarray  # [n-1,TOP]


class PromptScorer:
  """Scores tokens with the layout, the chunks and the contexts of a sampler."""

  def __init__(self, sampler: sampler_lib.Sampler):
    self._sampler = sampler
    self._score_rows = sampler.jit_in_place(self._append)

  def score(self, params: object, ids: Sequence[sampler_lib.Numbers]) -> list[PromptScores]:
    """Returns the model's log-probs of known tokens, as they are without temperature and cuts.

    Takes at most `prefill_rows` rows, each with as many tokens as a context has room for.
    """
    sampler = self._sampler
    rows = 1
    if len(ids) > 1 or sampling_sharding.num_shards(sampler.row_sharding, 'data') > 1:
      rows = sampler.prefill_rows
    known = [row_ids[:-1] for row_ids in ids]
    targets = [row_ids[1:] for row_ids in ids]
    starts = [0] * len(ids)
    context = sampler.empty(rows, sampler.slot_buckets[0])
    context = sampler.with_room(context, max(map(len, ids)))
    parts: list[Any] = []
    chunks = sampler.chunks(known, starts, rows)
    target_chunks = sampler.chunks(targets, starts, rows)
    for (tokens, live, counts), (next_tokens, *_) in zip(chunks, target_chunks):
      context, scores = self._score_rows(params, context, tokens, next_tokens, live, counts)
      parts.append((scores, counts))
    parts = jax.device_get(parts)
    columns = []
    for row in range(len(ids)):
      arrays = [[array[row, : counts[row]] for array in scores] for scores, counts in parts]
      columns.append(arrays)
    empty = (np.zeros(0), np.zeros((0, TOP), int), np.zeros((0, TOP)))
    return [PromptScores(*map(np.concatenate, zip(empty, *arrays))) for arrays in columns]

  def _append(self, params, context, tokens, next_tokens, starts, counts):
    """Appends tokens [B,T] as prefill does. Returns (context, fields of `PromptScores`).

    Choice: the logits of one row at a time, because those of a batch take more memory than the
    model's weights.
    """
    config = self._sampler.config
    cache = decoder.KVCache(context.k, context.v, starts)
    x, cache, _ = decoder.cached_trunk(params, config, tokens, cache, counts)

    def score_row(row):
      x, next_tokens = row
      logits = decoder.token_logits(params, config, x[None])[0]
      logp = jax.nn.log_softmax(logits)
      top_logp, top_ids = jax.lax.top_k(logp, TOP)
      chosen = jnp.take_along_axis(logp, next_tokens[:, None], axis=1)
      return chosen[:, 0], top_ids, top_logp

    scores = jax.lax.map(score_row, (x, next_tokens))
    return sampler_lib.Context(cache.k, cache.v, context.logits), scores
