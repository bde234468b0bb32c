"""Log-prob and entropy of a categorical distribution, with one pass for both derivatives.

`logp_and_entropy` takes logits. `of_head` takes what the output matrix is multiplied with, and
computes the logits of some columns of V at a time, so that [..,V] never exists.
"""

import dataclasses
import functools
from typing import Any

import chex
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

NEVER = -1e30  # the logit of a column of padding


@dataclasses.dataclass(frozen=True)
class Chunks:
  """How `of_head` cuts the output matrix; hashable."""

  count: int
  tied: bool  # the matrix is an embedding [V,D] instead of [D,V]
  row_sharding: jax.sharding.NamedSharding | None = None  # of x; None: XLA's choice


@jax.custom_vjp
def logp_and_entropy(logits: jax.Array, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Returns (log softmax(logits)[tokens], entropy of softmax(logits)), both [..].

  logits [..,V] are float32, tokens [..]. The derivative is written by hand as one pass over [..,V]
  with one exp for both cotangents. With probabilities p and entropy H,
    d logp[v] / d logits[u] = 1{u=v} - p[u],   d H / d logits[u] = -p[u] (log p[u] + H).
  """
  return _forward(logits, tokens)[0]


def _forward(logits, tokens):
  peak = logits.max(axis=-1)
  log_sum = jnp.log(jnp.sum(jnp.exp(logits - peak[..., None]), axis=-1))
  log_probs = _log_probs(logits, peak, log_sum)
  logp = jnp.sum(jnp.where(_is_token(logits, tokens), log_probs, 0), axis=-1)
  entropy = -jnp.sum(jnp.exp(log_probs) * log_probs, axis=-1)
  return (logp, entropy), (logits, tokens, peak, log_sum, entropy)


def _backward(residuals, cotangents):
  logits, tokens, peak, log_sum, entropy = residuals
  is_token = _is_token(logits, tokens)
  return _d_logits(logits, is_token, peak, log_sum, entropy, cotangents), None


def _d_logits(logits, is_token, peak, log_sum, entropy, cotangents):
  d_logp, d_entropy = (x[..., None] for x in cotangents)
  log_probs = _log_probs(logits, peak, log_sum)
  spread = jnp.exp(log_probs) * (d_logp + d_entropy * (log_probs + entropy[..., None]))
  return jnp.where(is_token, d_logp, 0) - spread


def _log_probs(logits, peak, log_sum):
  # In this order, since subtracting the log-sum-exp of large logits at once would lose digits.
  return (logits - peak[..., None]) - log_sum[..., None]


def _is_token(logits, tokens):
  return jnp.arange(logits.shape[-1]) == tokens[..., None]


logp_and_entropy.defvjp(_forward, _backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def of_head(
    x: jax.Array, kernel: jax.Array, tokens: jax.Array, temperature: jax.Array, chunks: Chunks
) -> tuple[jax.Array, jax.Array]:
  """Returns `logp_and_entropy` of the logits x @ kernel / temperature, both [X], of x [X,D].

  The columns of the kernel go by in `chunks.count` parts, once forward and once backward, with a
  running maximum and sums (online softmax, Milakov and Gimelshein, arXiv 1805.02867). So in each
  direction a sharded kernel is gathered once, and its gradient reduced once, a part at a time. A
  loop over rows of x would do both once per part of the rows. Products in the backward pass are in
  x's dtype with sums in float32; temperature gets no gradient.
  """
  return _head_forward(x, kernel, tokens, temperature, chunks)[0]


def _head_forward(x, kernel, tokens, temperature, chunks):
  chex.assert_rank([x, kernel, tokens], [2, 2, 1])

  def add(carry, part):
    peak, total, moment, picked = carry
    logits, is_token, _ = _logits_of_part(x, part, tokens, temperature, kernel, chunks)
    new_peak = jnp.maximum(peak, logits.max(axis=-1))
    shrink, below = jnp.exp(peak - new_peak), logits - new_peak[:, None]
    weights = jnp.exp(below)
    moment = shrink * (moment + total * (peak - new_peak)) + jnp.sum(weights * below, axis=-1)
    total = shrink * total + jnp.sum(weights, axis=-1)
    picked += jnp.sum(jnp.where(is_token, logits, 0), axis=-1)
    return (new_peak, total, moment, picked), None

  zero = jnp.zeros(len(x))
  start = (jnp.full(len(x), NEVER), zero, zero, zero)
  (peak, total, moment, picked), _ = jax.lax.scan(add, start, _parts(x, kernel, chunks))
  log_sum = jnp.log(total)
  logp, entropy = (picked - peak) - log_sum, log_sum - moment / total
  return (logp, entropy), (x, kernel, tokens, temperature, peak, log_sum, entropy)


def _head_backward(chunks, residuals, cotangents):
  x, kernel, tokens, temperature, peak, log_sum, entropy = residuals

  def add(d_x, part):
    logits, is_token, part = _logits_of_part(x, part, tokens, temperature, kernel, chunks)
    d = _d_logits(logits, is_token, peak, log_sum, entropy, cotangents) / temperature
    d = d.astype(x.dtype)
    product = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
    d_x += product('xv,vd->xd' if chunks.tied else 'xv,dv->xd', d, part)
    d_part = product('xv,xd->vd', d, x) if chunks.tied else product('xd,xv->dv', x, d)
    return d_x, _placed(d_part, kernel, chunks, rows=True)

  start = jnp.zeros(x.shape, jnp.float32)
  d_x, d_parts = jax.lax.scan(add, start, _parts(x, kernel, chunks))
  d_kernel = _joined(d_parts, kernel.shape, chunks).astype(kernel.dtype)
  return d_x.astype(x.dtype), d_kernel, None, jnp.zeros_like(temperature)


of_head.defvjp(_head_forward, _head_backward)


def _logits_of_part(x, part, tokens, temperature, kernel, chunks):
  """Returns logits [X,v] of a part of the columns, where they are the tokens', and the part."""
  number, part = part
  part = _placed(part, kernel, chunks)
  equation = 'xd,vd->xv' if chunks.tied else 'xd,dv->xv'
  logits = jnp.einsum(equation, x, part, preferred_element_type=jnp.float32) / temperature
  shards, size, width = _cut(kernel.shape, chunks)
  column = number * width + jnp.arange(width)  # within a shard
  ids = jnp.arange(shards)[:, None] * size + column
  live = jnp.broadcast_to(column < size, ids.shape).reshape(-1)
  if chunks.count * width > size:
    logits = jnp.where(live, logits, NEVER)
  return logits, live & (ids.reshape(-1) == tokens[:, None]), part


def _cut(shape, chunks):
  """Returns (shards of V, columns of V per shard, columns per shard and part, rounded up)."""
  vocab = shape[0] if chunks.tied else shape[1]
  shards = 1
  if chunks.row_sharding is not None:
    shards = chunks.row_sharding.mesh.shape['tensor']
    shards = 1 if vocab % shards else shards
  size = vocab // shards
  return shards, size, -(-size // chunks.count)


def _parts(x, kernel, chunks):
  """Returns (0, 1, .., parts [count,D,v] or [count,v,D]) in x's dtype; each spreads over tensor."""
  shards, size, width = _cut(kernel.shape, chunks)
  kernel, padding = kernel.astype(x.dtype), (0, chunks.count * width - size)
  if chunks.tied:
    kernel = jnp.pad(kernel.reshape(shards, size, -1), ((0, 0), padding, (0, 0)))
    kernel = kernel.reshape(shards, chunks.count, width, -1).swapaxes(0, 1)
    parts = kernel.reshape(chunks.count, shards * width, -1)
  else:
    kernel = jnp.pad(kernel.reshape(-1, shards, size), ((0, 0), (0, 0), padding))
    kernel = jnp.moveaxis(kernel.reshape(-1, shards, chunks.count, width), 2, 0)
    parts = kernel.reshape(chunks.count, -1, shards * width)
  return jnp.arange(chunks.count), parts


def _joined(parts, shape, chunks):
  """Puts parts together again to a matrix of this shape."""
  shards, size, width = _cut(shape, chunks)
  if chunks.tied:
    whole = parts.reshape(chunks.count, shards, width, -1).swapaxes(0, 1)
    return whole.reshape(shards, chunks.count * width, -1)[:, :size].reshape(shape)
  whole = jnp.moveaxis(parts.reshape(chunks.count, -1, shards, width), 0, 2)
  return whole.reshape(-1, shards, chunks.count * width)[:, :, :size].reshape(shape)


def _placed(part, kernel, chunks, rows=False):
  """Gathers a part over the devices that hold other rows, or, with `rows`, splits D over them."""
  if chunks.row_sharding is None:
    return part
  mesh: Any = chunks.row_sharding.mesh
  columns = 'tensor' if _cut(kernel.shape, chunks)[0] > 1 else None
  over = chunks.row_sharding.spec[0] if rows else None
  if rows and part.shape[1 if chunks.tied else 0] % chunks.row_sharding.num_devices:
    over = jax.P.UNCONSTRAINED
  spec = P(columns, over) if chunks.tied else P(over, columns)
  return jax.lax.with_sharding_constraint(part, jax.sharding.NamedSharding(mesh, spec))
