"""Log-prob and entropy of a categorical distribution, with one pass for both derivatives.

`logp_and_entropy` takes logits. `head_logp_and_entropy` takes the input and the matrix of the
output head, and computes the logits of some columns of V at a time, so that [..,V] never exists.
"""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

NEVER = -1e30  # the logit of a column of padding


@dataclasses.dataclass(frozen=True)
class Chunks:
  """How `head_logp_and_entropy` cuts the output matrix; hashable."""

  count: int
  row_sharding: jax.sharding.NamedSharding | None = None  # placement of x; None: XLA's choice


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
  # In this order, because subtracting the log-sum-exp of large logits at once would lose digits.
  return (logits - peak[..., None]) - log_sum[..., None]


def _is_token(logits, tokens):
  return jnp.arange(logits.shape[-1]) == tokens[..., None]


logp_and_entropy.defvjp(_forward, _backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def head_logp_and_entropy(
    x: jax.Array, kernel: jax.Array, tokens: jax.Array, temperature: jax.Array, chunks: Chunks
) -> tuple[jax.Array, jax.Array]:
  """Returns `logp_and_entropy` of the logits x @ kernel^T / temperature, both [X].

  x [X,D], kernel [V,D], tokens [X]. The columns of the logits are computed in `chunks.count` parts,
  once forward and once backward, with a running maximum and sums (online softmax, Milakov and
  Gimelshein, arXiv 1805.02867). So in each direction a sharded kernel is gathered once, and its
  gradient reduced once, a part at a time. A loop over rows of x would do both once per part of the
  rows. Products in the backward pass are in x's dtype with sums in float32. The temperature gets no
  gradient.
  """
  return _head_forward(x, kernel, tokens, temperature, chunks)[0]


def _head_forward(x, kernel, tokens, temperature, chunks):
  chex.assert_rank([x, kernel, tokens], [2, 2, 1])

  def add(carry, numbered_part):
    peak, total, moment, picked = carry
    _, logits, is_token = _part_logits(numbered_part, x, kernel, tokens, temperature, chunks)
    new_peak = jnp.maximum(peak, logits.max(axis=-1))
    shrink = jnp.exp(peak - new_peak)
    below = logits - new_peak[:, None]
    weights = jnp.exp(below)
    moment = shrink * (moment + total * (peak - new_peak)) + jnp.sum(weights * below, axis=-1)
    total = shrink * total + jnp.sum(weights, axis=-1)
    picked += jnp.sum(jnp.where(is_token, logits, 0), axis=-1)
    return (new_peak, total, moment, picked), None

  zero = jnp.zeros(len(x))
  start = (jnp.full(len(x), NEVER), zero, zero, zero)
  (peak, total, moment, picked), _ = jax.lax.scan(add, start, _numbered_parts(x, kernel, chunks))
  log_sum = jnp.log(total)
  logp = (picked - peak) - log_sum
  entropy = log_sum - moment / total
  return (logp, entropy), (x, kernel, tokens, temperature, peak, log_sum, entropy)


def _head_backward(chunks, residuals, cotangents):
  x, kernel, tokens, temperature, peak, log_sum, entropy = residuals
  product = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)

  def add(d_x, numbered_part):
    part, logits, is_token = _part_logits(numbered_part, x, kernel, tokens, temperature, chunks)
    d = _d_logits(logits, is_token, peak, log_sum, entropy, cotangents) / temperature
    d = d.astype(x.dtype)
    d_x += product('xv,vd->xd', d, part)
    d_part = product('xv,xd->vd', d, x)
    return d_x, _place(d_part, kernel, chunks, split_width=True)

  start = jnp.zeros(x.shape, jnp.float32)
  d_x, d_parts = jax.lax.scan(add, start, _numbered_parts(x, kernel, chunks))
  shards, size, width = _cut(kernel.shape, chunks)
  d_kernel = d_parts.reshape(chunks.count, shards, width, -1).swapaxes(0, 1)
  d_kernel = d_kernel.reshape(shards, chunks.count * width, -1)[:, :size].reshape(kernel.shape)
  return d_x.astype(x.dtype), d_kernel.astype(kernel.dtype), None, jnp.zeros_like(temperature)


head_logp_and_entropy.defvjp(_head_forward, _head_backward)


def _part_logits(numbered_part, x, kernel, tokens, temperature, chunks):
  """Returns (part [v,D], its logits [X,v], is_token [X,v]: the column is the row's token)."""
  number, part = numbered_part
  part = _place(part, kernel, chunks)
  logits = jnp.einsum('xd,vd->xv', x, part, preferred_element_type=jnp.float32) / temperature
  shards, size, width = _cut(kernel.shape, chunks)
  column = number * width + jnp.arange(width)  # within a shard
  ids = jnp.arange(shards)[:, None] * size + column
  is_real = jnp.broadcast_to(column < size, ids.shape).reshape(-1)
  if chunks.count * width > size:
    logits = jnp.where(is_real, logits, NEVER)
  return part, logits, is_real & (ids.reshape(-1) == tokens[:, None])


def _cut(shape, chunks):
  """Returns (shards of V, columns of V per shard, columns per shard and part, rounded up)."""
  shards = 1
  if chunks.row_sharding is not None:
    shards = chunks.row_sharding.mesh.shape['tensor']
  if shape[0] % shards:
    shards = 1
  size = shape[0] // shards
  return shards, size, -(-size // chunks.count)


def _numbered_parts(x, kernel, chunks):
  """Returns (0, 1, .., parts [count,v,D]) in x's dtype; each part spreads over tensor."""
  shards, size, width = _cut(kernel.shape, chunks)
  padding = (0, chunks.count * width - size)
  parts = kernel.astype(x.dtype).reshape(shards, size, -1)
  parts = jnp.pad(parts, ((0, 0), padding, (0, 0)))
  parts = parts.reshape(shards, chunks.count, width, -1).swapaxes(0, 1)
  return jnp.arange(chunks.count), parts.reshape(chunks.count, shards * width, -1)


def _place(part, kernel, chunks, split_width=False):
  """Gathers a part over the devices that hold other rows, or splits its D over them."""
  rows = chunks.row_sharding
  if rows is None:
    return part
  columns = 'tensor' if _cut(kernel.shape, chunks)[0] > 1 else None
  width_axes = None
  if split_width:
    width_axes = jax.P.UNCONSTRAINED if part.shape[1] % rows.num_devices else rows.spec[0]
  placed = jax.sharding.NamedSharding(rows.mesh, P(columns, width_axes))
  return jax.lax.with_sharding_constraint(part, placed)
