"""Log-probs and KL of an output head whose logits [..,V] never exist: a chunk of V at a time."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp

from stppo_jax.models import categorical

NEVER = -1e30  # the logit of a column of padding


def head_logp_and_entropy(
    x: jax.Array,
    kernel: jax.Array,
    tokens: jax.Array,
    temperature: float | jax.Array,
    num_chunks: int,
    row_sharding: jax.sharding.NamedSharding | None = None,
    logit_softcap: float = 0.0,
) -> tuple[jax.Array, jax.Array]:
  """Returns `categorical.logp_and_entropy` of the logits x @ kernel^T / temperature, both [X].

  x [X,D], kernel [V,D], tokens [X]. The columns of the logits are computed in `num_chunks` chunks,
  once forward and once backward. So in each direction a sharded kernel is gathered once, and its
  gradient reduced once, a chunk at a time. A loop over rows of x would do both once per chunk of
  the rows. `row_sharding` is the placement of x; None leaves it to XLA. The logits are capped
  before the temperature, as in sampling. The temperature has no gradient.
  """
  chex.assert_rank([x, kernel, tokens], [2, 2, 1])
  vocab_size = len(kernel)
  chunks = _cut(kernel, num_chunks, row_sharding)
  ids = _cut(jnp.arange(vocab_size), num_chunks, row_sharding, padding_id=vocab_size)
  head = _Head(x.dtype, vocab_size, row_sharding, logit_softcap)
  x = x.astype(jnp.float32)  # so that its gradient is summed over the chunks in float32
  return _logp_and_entropy(head, x, chunks, ids, tokens, jnp.asarray(temperature))


@dataclasses.dataclass(frozen=True)
class _Head:
  """The settings of a head that are no arrays."""

  dtype: jnp.dtype  # products are computed in it, with sums in float32
  vocab_size: int
  row_sharding: jax.sharding.NamedSharding | None
  softcap: float

  def logits(self, x, chunk, ids, temperature):
    """Returns the logits [X,v] of a chunk [v,D] whose columns are the tokens `ids` [v]."""
    logits = _chunk_logits(x, chunk, self.dtype, self.row_sharding)
    logits = categorical.softcap(logits, self.softcap) / temperature
    return jnp.where(ids < self.vocab_size, logits, NEVER)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _logp_and_entropy(head, x, chunks, ids, tokens, temperature):
  """Returns (logp, entropy) [X] of chunks [chunks,v,D] with the tokens ids [chunks,v].

  With the log-sum-exp s_n and the entropy H_n of chunk n, and its share w_n = exp(s_n - s) of the
  probability, s = log sum exp(s_n) and H = sum w_n (H_n - log w_n).

  The backward pass computes the logits again, and the derivative from them and the s and H of the
  forward pass. It computes nothing where all cotangents are 0, as in the pass of a value loss.
  """
  return _forward(head, x, chunks, ids, tokens, temperature)[0]


def _forward(head, x, chunks, ids, tokens, temperature):

  def statistics_of_chunk(chunk_and_ids):
    chunk, ids = chunk_and_ids
    logits = head.logits(x, chunk, ids, temperature)
    return categorical.statistics(logits, tokens, ids)

  found = jax.lax.map(statistics_of_chunk, (chunks, ids))  # [chunks,X]
  peak = found.peak.max(axis=0)
  log_sums = found.peak - peak + found.log_sum
  log_sum = jax.nn.logsumexp(log_sums, axis=0)
  log_share = log_sums - log_sum
  num_chunks, chunk_size = chunks.shape[:2]
  shard_size = chunk_size // _num_shards(head.row_sharding)  # see `_cut`
  is_in_chunk = tokens // shard_size % num_chunks == jnp.arange(num_chunks)[:, None]
  logp = jnp.where(is_in_chunk, found.logp + log_share, 0)
  logp = jnp.sum(logp, axis=0)
  entropy = jnp.exp(log_share) * (found.entropy - log_share)
  entropy = jnp.sum(entropy, axis=0)
  found = categorical.Statistics(logp, entropy, peak, log_sum)
  return (logp, entropy), (x, chunks, ids, tokens, temperature, found)


def _backward(head, residuals, cotangents):
  x, chunks, ids, tokens, temperature, found = residuals

  def chunk_gradients(d_x, chunk_and_ids):
    chunk, ids = chunk_and_ids

    def logits_of(x, chunk):
      return head.logits(x, chunk, ids, temperature)

    logits, pull = jax.vjp(logits_of, x, chunk)
    d_logits = categorical.d_logits(logits, tokens, ids, found, *cotangents)
    own_d_x, d_chunk = pull(d_logits)
    return d_x + own_d_x, d_chunk

  def gradients():
    return jax.lax.scan(chunk_gradients, jnp.zeros_like(x), (chunks, ids))

  def zeros():
    return jnp.zeros_like(x), jnp.zeros_like(chunks)

  d_logp, d_entropy = cotangents
  has_cotangent = (d_logp != 0).any() | (d_entropy != 0).any()
  d_x, d_chunks = jax.lax.cond(has_cotangent, gradients, zeros)
  return d_x, d_chunks, None, None, None


_logp_and_entropy.defvjp(_forward, _backward)


def head_kl(
    x: jax.Array,
    kernel: jax.Array,
    reference_x: jax.Array,
    reference_kernel: jax.Array,
    temperature: float | jax.Array,
    num_chunks: int,
    row_sharding: jax.sharding.NamedSharding | None = None,
    logit_softcap: float = 0.0,
) -> jax.Array:
  """Returns KL(reference || policy) of the distributions of two heads, [X].

  x, reference_x [X,D], kernel, reference_kernel [V,D]. The logits are computed in chunks, as in
  `head_logp_and_entropy`.

  With the logits z and their log-sum-exp s, and q, y, r the reference's probabilities, logits and
  log-sum-exp:   KL = sum_v q (y - z) + s - r,   d KL / d z = softmax(z) - q
  """
  chex.assert_rank([x, kernel, reference_x, reference_kernel], 2)
  vocab_size = len(kernel)
  kernels = _cut(kernel, num_chunks, row_sharding)
  reference_kernels = _cut(reference_kernel, num_chunks, row_sharding)
  ids = _cut(jnp.arange(vocab_size), num_chunks, row_sharding, padding_id=vocab_size)
  dtype = x.dtype
  x = x.astype(jnp.float32)  # so that its gradient is summed over the chunks in float32

  @functools.partial(jax.checkpoint, prevent_cse=False)
  def sums_of_chunk(chunks):
    chunk, reference_chunk, ids = chunks
    logits = _chunk_logits(x, chunk, dtype, row_sharding)
    logits = categorical.softcap(logits, logit_softcap) / temperature
    reference = _chunk_logits(reference_x, reference_chunk, dtype, row_sharding)
    reference = categorical.softcap(reference, logit_softcap) / temperature
    is_token = ids < vocab_size
    logits = jnp.where(is_token, logits, NEVER)
    reference = jnp.where(is_token, reference, NEVER)
    probs = jax.nn.softmax(reference)
    gap = jnp.sum(probs * (reference - logits), axis=-1)
    log_sum = jax.nn.logsumexp(logits, axis=-1)
    reference_sum = jax.nn.logsumexp(reference, axis=-1)
    return gap, log_sum, reference_sum

  chunks = (kernels, reference_kernels, ids)
  gap, log_sum, reference_sum = jax.lax.map(sums_of_chunk, chunks)  # [chunks,X]
  total = jax.nn.logsumexp(log_sum, axis=0)
  reference_total = jax.nn.logsumexp(reference_sum, axis=0)
  share = jnp.exp(reference_sum - reference_total)
  return jnp.sum(share * gap, axis=0) + total - reference_total


def _num_shards(row_sharding):
  return 1 if row_sharding is None else row_sharding.mesh.shape['tensor']


def _cut(columns, num_chunks, row_sharding, padding_id=0):
  """Cuts [V,..], padded, into [chunks,v,..]. Each shard of `tensor` has its share of every chunk.

  With u = v / shards, column i is in chunk i // u % chunks, on shard i // (u chunks). So no column
  moves to another shard. With 2 shards, 3 chunks and u = 1 the result is [[0, 3], [1, 4], [2, 5]].
  """
  shards = _num_shards(row_sharding)
  rest = columns.shape[1:]
  padding = [(0, 0)] * columns.ndim
  padding[0] = (0, -len(columns) % (num_chunks * shards))
  columns = jnp.pad(columns, padding, constant_values=padding_id)
  columns = columns.reshape(shards, num_chunks, -1, *rest)
  columns = columns.swapaxes(0, 1)
  return columns.reshape(num_chunks, -1, *rest)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _chunk_logits(x, chunk, dtype, row_sharding):
  """Returns x [X,D] @ chunk [v,D]^T. All products are in `dtype` with sums in float32."""
  return _chunk_logits_forward(x, chunk, dtype, row_sharding)[0]


def _chunk_logits_forward(x, chunk, dtype, row_sharding):
  rows = x.astype(dtype)
  columns = _place(chunk.astype(dtype), None, row_sharding)
  return _product('xd,vd->xv', rows, columns), (rows, columns, chunk)


def _chunk_logits_backward(dtype, row_sharding, residuals, d):
  rows, columns, chunk = residuals
  d = d.astype(dtype)
  d_x = _product('xv,vd->xd', d, columns)
  d_chunk = _product('xv,xd->vd', d, rows)
  if row_sharding is not None:
    splits = chunk.shape[1] % row_sharding.num_devices == 0
    width_axes = row_sharding.spec[0] if splits else jax.P.UNCONSTRAINED
    d_chunk = _place(d_chunk, width_axes, row_sharding)
  return d_x, d_chunk.astype(chunk.dtype)


_chunk_logits.defvjp(_chunk_logits_forward, _chunk_logits_backward)


def _place(chunk, width_axes, row_sharding):
  """Splits a chunk [v,D] over `tensor` and over `width_axes`; None gathers it over them."""
  if row_sharding is None:
    return chunk
  mesh = row_sharding.mesh
  column_axis = 'tensor' if len(chunk) % mesh.shape['tensor'] == 0 else None
  placed = jax.sharding.NamedSharding(mesh, jax.P(column_axis, width_axes))
  return jax.lax.with_sharding_constraint(chunk, placed)


def _product(equation, a, b):
  return jnp.einsum(equation, a, b, preferred_element_type=jnp.float32)
