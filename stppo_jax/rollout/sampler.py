"""Reads forced tokens and samples new ones for many rows at once, with one cache kept across turns.

`feed` and `generate` alternate: feed(prompt), generate(turn), feed(observation), generate(turn), ..
No token is ever read twice. Token number i of a row is drawn with fold_in(row key, i): what a row
says depends on its key and its context, and not on its neighbours or its place in the batch.
(Up to rounding: another number of rows may sum a matmul in another order.)
"""

import functools
from collections.abc import Sequence

import chex
import flax
import jax
import jax.numpy as jnp
import numpy as np

from stppo_jax import hosts
from stppo_jax import types
from stppo_jax.models import decoder


_BLOCK = 128  # indices a block of `_draw`


@flax.struct.dataclass
class SamplerState:
  """What `feed` and `generate` hand to each other; made by `Sampler.start`."""

  cache: decoder.KVCache  # keys and values of each row's context; its `length` is the context's
  logits: jax.Array  # [B,V] float32, the model's word on each row's next token
  keys: jax.Array  # [B] random keys, fixed for a row's whole life


@flax.struct.dataclass
class _Turn:
  """One turn of all rows as the decode loop carries it; `state` goes along."""

  state: SamplerState
  alive: jax.Array  # [B] bool, rows that go on
  stop_state: jax.Array  # [B] int32, of the stop automaton
  counts: jax.Array  # [B] int32, tokens sampled so far
  tokens: jax.Array  # [B,max_new] int32
  logp: jax.Array  # [B,max_new] float32


class Sampler:
  """Compiled functions and what is fixed about them. Parameters are an argument, never a field.

  A program is compiled for each (rows, slots) that decode meets and each (rows, slots, chunk) that
  prefill meets; buckets keep these few. Attention costs what the longest live row needs: a turn
  starts with the cache it has and moves to the next slot bucket when a row fills it.
  """

  def __init__(
    self,
    config: decoder.ModelConfig,
    stop_table: np.ndarray,  # chat.stop_automaton's
    eos_ids: Sequence[int],  # each of them ends a turn
    max_new: int,  # tokens a turn
    max_slots: int,  # tokens a row may ever hold
    temperature: float = 1.0,  # 0 = greedy
    top_k: int = 0,  # 0 = off
    top_p: float = 1.0,  # 1 = off
    row_buckets: Sequence[int] = (64,),  # numbers of rows compiled for
    slot_buckets: Sequence[int] | None = None,  # None: doubling, with a step between, from 128
    chunk_buckets: Sequence[int] = (32, 128),  # tokens a row that one prefill call reads
    pad_id: int = 0,
    cache_dtype: str | None = None,  # None: that of the computation
    row_sharding: jax.sharding.Sharding | None = None,  # of the row axis; None: compiler's choice
  ):
    check_sampling(temperature, top_k, top_p)
    if stop_table.shape[1] > config.vocab_size:
      raise types.UserError(
        f'the stop table covers {stop_table.shape[1]} ids but the model has {config.vocab_size}: '
        'use the tokenizer that belongs to the model'
      )
    if min(max_new, max_slots, *row_buckets, *chunk_buckets) < 1:
      raise types.UserError('max_new, max_slots and all sampler buckets must be at least 1')
    if config.head == 'value':
      raise types.UserError("a model with head 'value' cannot sample: use head 'tokens' or 'both'")
    self.config = config
    self.max_new = max_new
    self.max_slots = max_slots
    self.temperature, self.top_k, self.top_p = temperature, top_k, top_p
    self.row_buckets = tuple(sorted(row_buckets))
    slot_buckets = slot_buckets or default_slot_buckets(max_slots)
    self.slot_buckets = (*sorted(b for b in slot_buckets if b < max_slots), max_slots)
    self.chunk_buckets = tuple(sorted(chunk_buckets))
    self.pad_id = pad_id
    self._cache_dtype = cache_dtype or config.dtype
    self._row_sharding = row_sharding
    # Ids beyond the tokenizer's (a padded vocabulary) have no bytes: the automaton stands still.
    missing = config.vocab_size - stop_table.shape[1]
    still = np.repeat(np.arange(len(stop_table), dtype=np.int32)[:, None], missing, axis=1)
    self._stop_table = jnp.asarray(np.concatenate([stop_table, still], axis=1), jnp.int32)
    is_eos = np.zeros((config.vocab_size,), bool)
    is_eos[list(eos_ids)] = True
    self._is_eos = jnp.asarray(is_eos)
    empty = functools.partial(_empty, config, self.slot_buckets[0], self._cache_dtype)
    self._start = jax.jit(empty, out_shardings=row_sharding)  # born in its shards
    compile_step = functools.partial(jax.jit, donate_argnums=1, out_shardings=row_sharding)
    self._prefill = compile_step(functools.partial(prefill, config))
    sample = functools.partial(sample_token, temperature=temperature, top_k=top_k, top_p=top_p)
    self._decode = compile_step(functools.partial(_decode, config, sample))
    self._grow = jax.jit(_grow, static_argnums=1, out_shardings=row_sharding)

  def row_bucket(self, rows: int) -> int:
    """The number of rows to run `rows` rows with: the next bucket, at most the largest."""
    return next((b for b in self.row_buckets if b >= rows), self.row_buckets[-1])

  def start(self, keys: jax.Array) -> SamplerState:
    """Empty rows, one for each key [B]."""
    return self._start(keys)

  def feed(self, params, state: SamplerState, ids: Sequence[Sequence[int]]) -> SamplerState:
    """Appends forced tokens to each row; rows with none stand still, pending logits included."""
    chex.assert_equal(len(ids), state.keys.shape[0])
    lengths = np.array([len(row) for row in ids])
    state = self._with_room(state, int((hosts.fetch(state.cache.length) + lengths).max()))
    start = 0
    while start < lengths.max():
      left = int(lengths.max()) - start
      chunk = next((c for c in self.chunk_buckets if c >= left), self.chunk_buckets[-1])
      tokens = np.full((len(ids), chunk), self.pad_id, np.int32)
      for row, row_ids in zip(tokens, ids):
        part = row_ids[start : start + chunk]
        row[: len(part)] = part
      real = np.clip(lengths - start, 0, chunk).astype(np.int32)
      state = self._prefill(params, state, tokens, real)
      start += chunk
    return state

  def generate(
    self, params, state: SamplerState, budgets: Sequence[int]
  ) -> tuple[SamplerState, list[np.ndarray], list[np.ndarray]]:
    """Samples one turn of each row: (state, tokens of each row, log-probs of each row).

    A row ends with the token that completes a stop string, with an eos token, or after
    min(budgets[b], max_new) tokens; a row with budget 0 stands still. The last token enters the
    cache too. The log-probs are those of the distribution sampled from (see `sample_token`).
    """
    rows = state.keys.shape[0]
    chex.assert_equal(len(budgets), rows)
    budgets = np.minimum(np.asarray(budgets, np.int32), self.max_new)
    lengths = hosts.fetch(state.cache.length)
    if (lengths + budgets)[budgets > 0].max(initial=0) > self.max_slots:
      raise ValueError(f'a row of {lengths.max()} tokens has no room for its budget: lower it')
    if (lengths[budgets > 0] == 0).any():
      raise ValueError('a row without any context cannot be sampled: feed it first')
    turn = _Turn(
      state=state,
      alive=jnp.asarray(budgets > 0),
      stop_state=jnp.zeros((rows,), jnp.int32),
      counts=jnp.zeros((rows,), jnp.int32),
      tokens=jnp.full((rows, self.max_new), self.pad_id, jnp.int32),
      logp=jnp.zeros((rows, self.max_new), jnp.float32),
    )
    while (alive := hosts.fetch(turn.alive)).any():  # once for each slot bucket that the turn enters
      needed = int(hosts.fetch(turn.state.cache.length)[alive].max()) + 1
      turn = turn.replace(state=self._with_room(turn.state, needed))
      turn = self._decode(params, turn, budgets, self._stop_table, self._is_eos)
    tokens, logp, counts = hosts.fetch((turn.tokens, turn.logp, turn.counts))
    tokens = [row[:count] for row, count in zip(tokens, counts)]
    logp = [row[:count] for row, count in zip(logp, counts)]
    return turn.state, tokens, logp

  def compiled_variants(self) -> dict[str, int]:
    """How many programs each function was compiled to so far, for logging."""
    return {'prefill': self._prefill._cache_size(), 'decode': self._decode._cache_size()}

  def trace(self, params, rows: int, slots: int) -> dict[str, jax.stages.Traced]:
    """'prefill' (of the largest chunk), 'decode' and 'grow' (the last) of so many rows, from shapes alone.

    `params`: ShapeDtypeStructs with shardings. For planning: lower, compile and weigh them.
    """
    place = lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=self._row_sharding)
    shape = lambda *axes, dtype=jnp.int32: jax.ShapeDtypeStruct(axes, dtype)
    make_state = lambda slots: lambda: _empty(
      self.config, slots, self._cache_dtype, jax.random.split(jax.random.key(0), rows)
    )
    state = jax.tree.map(place, jax.eval_shape(make_state(slots)))
    fewer = max((b for b in self.slot_buckets if b < slots), default=slots)
    small = jax.tree.map(place, jax.eval_shape(make_state(fewer)))
    per_row = place(shape(rows))
    turn = _Turn(
      state=state,
      alive=place(shape(rows, dtype=jnp.bool_)),
      stop_state=per_row,
      counts=per_row,
      tokens=place(shape(rows, self.max_new)),
      logp=place(shape(rows, self.max_new, dtype=jnp.float32)),
    )
    tables = (shape(*t.shape, dtype=t.dtype) for t in (self._stop_table, self._is_eos))
    chunk = shape(rows, self.chunk_buckets[-1])
    return {
      'prefill': self._prefill.trace(params, state, chunk, shape(rows)),
      'decode': self._decode.trace(params, turn, shape(rows), *tables),
      'grow': self._grow.trace(small, slots),
    }

  def _with_room(self, state: SamplerState, needed: int) -> SamplerState:
    """The state with at least `needed` slots a row, in a slot bucket."""
    if needed > self.max_slots:
      raise ValueError(f'{needed} tokens do not fit in max_slots={self.max_slots}')
    slots = state.cache.k[0].shape[2]
    if needed <= slots:
      return state
    return self._grow(state, next(b for b in self.slot_buckets if b >= needed))


def sample_token(logits, keys, temperature=1.0, top_k=0, top_p=1.0):
  """One token of each row and its log-prob: logits [B,V], keys [B] -> (token [B], logp [B]).

  The distribution is softmax(logits / temperature), cut to the top_k likeliest tokens, then to the
  fewest likeliest that hold a mass of top_p, then renormalised. The log-prob is that of this very
  distribution. Choice: among equal logits the lower id counts as likelier. Choice: temperature 0 is
  greedy and reports the model's plain log-prob, at temperature 1 and uncut.
  """
  chex.assert_rank(logits, 2)
  chex.assert_shape(keys, logits.shape[:1])
  logits = logits.astype(jnp.float32)
  if temperature == 0:
    token = jnp.argmax(logits, axis=-1)
    return token.astype(jnp.int32), _take(jax.nn.log_softmax(logits), token)
  logits = logits / temperature
  cut = 0 < top_k < logits.shape[1] or top_p < 1
  if cut:
    kept = top_k if 0 < top_k < logits.shape[1] else logits.shape[1]
    logits, ids = jax.lax.top_k(logits, kept)  # [B,kept], likeliest first
  if top_p < 1:
    probs = jax.nn.softmax(logits)
    mass_before = jnp.cumsum(probs, axis=-1) - probs
    first = jnp.arange(logits.shape[1]) == 0  # always kept, however small top_p is
    logits = jnp.where(first | (mass_before < top_p), logits, -jnp.inf)
  choice, logp = _draw(logits, keys)
  token = _take(ids, choice) if cut else choice
  return token.astype(jnp.int32), logp


def _draw(logits, keys):
  """A draw from softmax(logits) and its log-prob: logits [B,V], keys [B] -> (index [B], logp [B]).

  By inversion: first a block of indices by the blocks' masses, then an index in it, each with a
  uniform number of its own, so that the tail of a large vocabulary is not rounded away. One exp an
  index; Gumbel noise would be two logs and a random number an index.
  """
  rows, size = logits.shape
  peak = logits.max(axis=-1)
  blocks = -(-size // _BLOCK)
  mass = jnp.pad(jnp.exp(logits - peak[:, None]), ((0, 0), (0, blocks * _BLOCK - size)))
  mass = mass.reshape(rows, blocks, _BLOCK)
  block_mass = mass.sum(axis=-1)
  uniform = jax.vmap(lambda key: jax.random.uniform(key, (2,)))(keys)
  block = _invert(block_mass, uniform[:, 0])
  mass_here = jnp.take_along_axis(mass, block[:, None, None], axis=1)[:, 0]
  choice = block * _BLOCK + _invert(mass_here, uniform[:, 1])
  return choice, _take(logits, choice) - peak - jnp.log(block_mass.sum(axis=-1))


def _invert(mass, uniform):
  """The first index at which the summed mass [B,n] exceeds its share `uniform` [B]; never one without
  mass, whatever the rounding."""
  reached = jnp.cumsum(mass, axis=-1)
  beyond = (reached > uniform[:, None] * reached[:, -1:]) & (mass > 0)
  return jnp.where(beyond.any(axis=-1), jnp.argmax(beyond, axis=-1), jnp.argmax(mass, axis=-1))


def check_sampling(temperature: float, top_k: int, top_p: float) -> None:
  """UserError unless the three numbers describe a distribution."""
  if temperature < 0:
    raise types.UserError(f'temperature={temperature}: give 0 (greedy) or more')
  if top_k < 0:
    raise types.UserError(f'top_k={top_k}: give 0 (off) or more')
  if not 0 < top_p <= 1:
    raise types.UserError(f'top_p={top_p}: give more than 0 and at most 1 (off)')


def default_slot_buckets(max_slots: int) -> tuple[int, ...]:
  """128, 192, 256, 384, 512, 768, .. up to `max_slots`: at most half more than needed."""
  buckets = [b for i in range(7, 31) for b in (2**i, 3 * 2 ** (i - 1)) if b < max_slots]
  return (*buckets, max_slots)


def _empty(config, slots, dtype, keys):
  """Rows without any context, one for each key [B]."""
  rows = keys.shape[0]
  return SamplerState(
    cache=decoder.init_cache(config, rows, slots, dtype),
    logits=jnp.zeros((rows, config.vocab_size), jnp.float32),
    keys=jnp.copy(keys),  # the state's buffers are donated; the caller's keys are not
  )


def prefill(config, params, state, tokens, lengths):
  """Appends the first `lengths` [B] of `tokens` [B,T] to each row.

  Only the last real token's logits are computed; a row with length 0 keeps all it had.
  """
  chex.assert_shape(tokens, (state.keys.shape[0], None))
  chex.assert_shape(lengths, state.keys.shape)
  x, cache = decoder.hidden(params, config, tokens, None, state.cache, lengths)  # [B,T,D]
  last = jnp.maximum(lengths - 1, 0)[:, None, None]
  x = jnp.take_along_axis(x, last, axis=1)[:, 0]  # [B,D]
  logits = jnp.where(lengths[:, None] > 0, decoder.token_logits(params, config, x), state.logits)
  return state.replace(cache=cache, logits=logits)


def _decode(config, sample, params, turn, budgets, stop_table, is_eos):
  """Samples until no row is alive, or until a live row has filled its slots."""
  params = decoder.unstack_layers(_in_compute_dtype(params, config), config)
  slots = turn.state.cache.k[0].shape[2]
  stopped = stop_table.shape[0] - 1
  rows = jnp.arange(turn.alive.shape[0])

  def goes_on(turn):
    full = turn.alive & (turn.state.cache.length >= slots)
    return jnp.any(turn.alive) & ~jnp.any(full)

  def one_token(turn):
    state, alive = turn.state, turn.alive
    keys = jax.vmap(jax.random.fold_in)(state.keys, state.cache.length)
    token, logp = sample(state.logits, keys)
    x, cache = decoder.hidden(
      params, config, token[:, None], None, state.cache, alive.astype(jnp.int32)
    )
    logits = decoder.token_logits(params, config, x[:, 0])
    logits = jnp.where(alive[:, None], logits, state.logits)
    stop_state = jnp.where(alive, stop_table[turn.stop_state, token], turn.stop_state)
    column = jnp.where(alive, turn.counts, turn.tokens.shape[1])  # past the end: dropped
    counts = turn.counts + alive
    return _Turn(
      state=state.replace(cache=cache, logits=logits),
      alive=alive & (stop_state != stopped) & ~is_eos[token] & (counts < budgets),
      stop_state=stop_state,
      counts=counts,
      tokens=turn.tokens.at[rows, column].set(token, mode='drop'),
      logp=turn.logp.at[rows, column].set(logp, mode='drop'),
    )

  return jax.lax.while_loop(goes_on, one_token, turn)


def _in_compute_dtype(params, config):
  """The weights as the layers will cast them, cast once; norm scales are used in float32."""

  def cast(path, weight):
    return weight if path[-1].key == 'scale' else weight.astype(config.dtype)

  return jax.tree_util.tree_map_with_path(cast, params)


def _grow(state, slots):
  """The same state with a cache of `slots` slots."""
  more = slots - state.cache.k[0].shape[2]
  pad = lambda a: jnp.pad(a, ((0, 0), (0, 0), (0, more), (0, 0)))
  k, v = jax.tree.map(pad, (state.cache.k, state.cache.v))
  return state.replace(cache=state.cache.replace(k=k, v=v))


def _take(values, index):
  """values [B,V] at index [B] -> [B]."""
  return jnp.take_along_axis(values, index[:, None], axis=-1)[:, 0]
