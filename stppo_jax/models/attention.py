"""Attention: queries, keys and values in, weighted values out; who may read whom is decided here.

Sampling (`cached`) reads a cache with slots of its own. Training (`causal`) reads whole rows, in which
several episodes may stand behind each other as segments.

Einsum letters are those of `types.py`, and g for the query heads that share one key head (N = M g).
"""

import jax
import jax.numpy as jnp


def causal(q, k, v, segments=None, chunk=0):
  """Each token reads itself and those before it in its segment: q [B,T,N,H], k and v [B,T,M,H] -> q's.

  `segments` [B,T] are any integers; None is one segment a row. Scores of `chunk` queries at a time
  exist, and again in the backward pass, so [B,M,g,T,T] never does; with 0, or where `chunk` does not
  divide T, those of all.
  """
  length, heads = q.shape[1], k.shape[2]
  q, k, v = _grouped(q, heads), jnp.swapaxes(k, 1, 2), jnp.swapaxes(v, 1, 2)
  if not chunk or length <= chunk or length % chunk:
    return _ungrouped(_attend(q, k, v, causal_mask(length, segments)))
  firsts = jnp.arange(0, length, chunk)
  parts = jnp.moveaxis(q.reshape(*q.shape[:3], len(firsts), chunk, q.shape[-1]), 3, 0)

  def attend(part_and_first):
    part, first = part_and_first  # [B,M,g,chunk,H]
    return _attend(part, k, v, causal_mask(length, segments, first, chunk))

  y = jax.lax.map(jax.checkpoint(attend, prevent_cse=False), (parts, firsts))
  return _ungrouped(jnp.moveaxis(y, 0, 3).reshape(q.shape))


def cached(q, k, v, slots):
  """Queries at `slots` [B,T] of a cache read it up to their own: q [B,T,N,H], k, v [B,M,S,H] -> q's."""
  return _ungrouped(_attend(_grouped(q, k.shape[1]), k, v, cache_mask(slots, k.shape[2])))


def causal_mask(length, segments=None, first=0, count=None):
  """[1 or B,1,1,T or count,T], true where the query (row) may read the key (column).

  Of a row with segments 5 5 7, and of the same row without:

    1 0 0    1 0 0
    1 1 0    1 1 0
    0 0 1    1 1 1

  `first` and `count` choose the queries.
  """
  count = length if count is None else count
  queries = first + jnp.arange(count)
  mask = (jnp.arange(length) <= queries[:, None])[None]
  if segments is not None:
    of_queries = jax.lax.dynamic_slice_in_dim(segments, first, count, axis=1)
    mask &= of_queries[:, :, None] == segments[:, None]
  return mask[:, None, None]


def cache_mask(slots, num_slots):
  """[B,1,1,T,S] from the queries' slots [B,T]; T = 2 queries of a row whose length was 1, S = 4:

    1 1 0 0
    1 1 1 0
  """
  return (jnp.arange(num_slots) <= slots[..., None])[:, None, None]


def _attend(q, k, v, mask):
  """q [B,M,g,T,H], k and v [B,M,S,H], mask [1 or B,1,1,T,S] -> [B,M,g,T,H]."""
  scores = jnp.einsum(
    'bmgth,bmsh->bmgts', q * q.shape[-1] ** -0.5, k, preferred_element_type=jnp.float32
  )
  scores = jnp.where(mask, scores, jnp.finfo(jnp.float32).min)
  weights = jax.nn.softmax(scores, axis=-1).astype(q.dtype)
  return jnp.einsum('bmgts,bmsh->bmgth', weights, v)


def _grouped(q, num_kv_heads):
  """[B,T,N,H] -> [B,M,g,T,H]."""
  rows, length, heads, width = q.shape
  return jnp.swapaxes(q, 1, 2).reshape(rows, num_kv_heads, heads // num_kv_heads, length, width)


def _ungrouped(y):
  """[B,M,g,T,H] -> [B,T,N,H]."""
  rows, kv_heads, group, length, width = y.shape
  return jnp.swapaxes(y.reshape(rows, kv_heads * group, length, width), 1, 2)
