"""The device side of the rollout: compiled prefill and decode.

A `Context` holds the keys and values of some rows. `prefill` appends known tokens to it, `decode`
samples new tokens, `take` and `put` move rows between contexts. The small state stays on the host
with the caller (`engine`, or the scheduler of the gateway): which sequence is in which row, its
length, and the state of its turn.
"""

from collections.abc import Sequence
import copy as copy_lib
import dataclasses
import functools
from typing import Any

import chex
import flax
import jax
import jax.numpy as jnp
import numpy as np

from stppo_jax import types
from stppo_jax.distributed import hosts
from stppo_jax.models import decoder
from stppo_jax.models import moe
from stppo_jax.models import sharding
from stppo_jax.rollout import layout
from stppo_jax.rollout import sampling


@flax.struct.dataclass
class Context:
  """Keys and values of each row's context, as in `decoder.KVCache`, and the next token's logits."""

  k: tuple[jax.Array, ...]  # L arrays [B,M,C,H,c]; slots past a row's length hold garbage
  v: tuple[jax.Array, ...]  # [B,M,S,H]
  logits: jax.Array  # [B,V] float32, of each row's next token

  @property
  def slots(self) -> int:
    """Number of tokens that a row has room for."""
    return self.v[0].shape[2]


@flax.struct.dataclass
class DecodeRows:
  """The rows of one `decode` call; NumPy arrays."""

  lengths: Any  # [B] int32, of their contexts
  keys: Any  # [B,..] jax.random.key_data
  stop_state: Any  # [B] int32, of the stop automaton
  budgets: Any  # [B] int32, most tokens; a row with budget 0 does not change
  settings: Any = None  # [B,3] float32 of `sampling.make_draw`; None: the sampler's distribution


@flax.struct.dataclass
class DecodeResult:
  """The result of one `decode` call; the first counts[b] columns of row b are real."""

  tokens: jax.Array  # [B,steps] int32
  logp: jax.Array  # [B,steps] float32
  counts: jax.Array  # [B] int32
  stop_state: jax.Array  # [B] int32, of the stop automaton
  alive: jax.Array  # [B] bool, rows whose turn has not ended
  routes: jax.Array | None = None  # [B,steps,L,A] experts of the tokens, where they are recorded


@dataclasses.dataclass
class PrefillResult:
  """The result of one `prefill` call, on the device."""

  lengths: Any = None  # [B] int32, of the contexts after it, to wait for
  chunks: list[tuple[Any, np.ndarray]] = dataclasses.field(default_factory=list)  # routes, counts

  def routes(self, row: int) -> np.ndarray:
    """Returns the experts of the row's tokens [n,L,A]; waits for the device."""
    parts = [np.asarray(routes)[row, : count[row]] for routes, count in self.chunks]
    return np.concatenate(parts)


@flax.struct.dataclass
class Until:
  """When a decode call ends."""

  steps: Any  # [] int32
  enough: Any  # [] int32, rows that have stopped


@flax.struct.dataclass
class _StopRules:
  """What ends a turn."""

  stop_table: Any  # [states,V] int32, see tokenizer.stop_automaton
  is_eos: Any  # [V] bool


@flax.struct.dataclass
class _DecodeState:
  """State of the decode loop."""

  context: Context
  lengths: jax.Array  # [B] int32, of the rows' contexts
  sampled: DecodeResult
  step: jax.Array  # tokens sampled per row in this call
  stopped: jax.Array  # rows that stopped in this call


class Sampler:
  """Compiled prefill and decode with static settings. Parameters are an argument, not a field.

  They are the result of `copy`. On one device the policy's own parameters work too.

  All calls have fixed numbers of rows: `width` for decode, `prefill_rows` for prefill. So a row's
  numbers do not depend on how many other rows there are. A program is compiled for each number of
  slots in decode, and each (slots, chunk) in prefill; buckets keep these few. The cost of attention
  is set by the longest row of a call.
  """

  def __init__(
      self,
      config: decoder.ModelConfig,
      stop_table: np.ndarray,  # see tokenizer.stop_automaton
      eos_ids: Sequence[int],  # each of them ends a turn
      sizes: sampling.Sizes,
      distribution: sampling.Distribution = sampling.AS_IS,  # used for rows without settings
      row_sharding: jax.sharding.NamedSharding | None = None,  # see `layout`; None: one device
      records_routes: bool = False,  # only with a mixture of experts
  ):
    if stop_table.shape[1] > config.vocab_size:
      raise types.UserError(
          f'the stop table covers {stop_table.shape[1]} ids but the model has {config.vocab_size}: '
          'use the tokenizer that belongs to the model'
      )
    if config.head == 'value':
      raise types.UserError("a model with head 'value' cannot sample: use head 'tokens' or 'both'")
    self.config = config
    self.records_routes = records_routes
    self.row_sharding = row_sharding
    self.max_slots = sizes.max_slots
    self.steps = sizes.steps
    self._top_k = distribution.top_k
    self._row_settings = distribution.row_settings

    shards = layout.num_shards(row_sharding, 'data')
    width = min(sizes.width or sizes.rows, sizes.rows)
    self.width = sampling.round_up(width, shards)
    self.num_groups = -(-sizes.rows // self.width)
    # Rows that are spread over devices are prefilled in place. Moving them sends whole caches.
    self.prefill_rows = min(sizes.prefill_rows, self.width)
    if shards > 1:
      self.prefill_rows = self.width
    buckets = sizes.slot_buckets or sampling.default_slot_buckets(self.max_slots)
    buckets = [bucket for bucket in buckets if bucket < self.max_slots]
    buckets.append(self.max_slots)
    tile = config.cache_tile or 1
    self.slot_buckets = tuple(sorted({sampling.round_up(bucket, tile) for bucket in buckets}))
    self.chunk_buckets = tuple(sorted(sizes.chunk_buckets))

    # The sharding of arrays that every device holds and every host reads.
    mesh: Any = row_sharding and row_sharding.mesh
    self._everywhere = mesh and sharding.replicated(mesh)
    cache_sharding: Any = layout.of_context(row_sharding)
    logits_sharding: Any = row_sharding
    self._context_sharding = Context(cache_sharding, cache_sharding, logits_sharding)
    self._split_logits_sharding = cache_sharding
    is_eos = np.isin(np.arange(config.vocab_size), list(eos_ids))
    self._host_stop_rules = _StopRules(_all_ids(stop_table, config.vocab_size), is_eos)

    jit = functools.partial(jax.jit, out_shardings=self._context_sharding)
    jit_step = functools.partial(
        jax.jit, donate_argnums=1, out_shardings=(self._context_sharding, self._everywhere)
    )
    self._copy = layout.copy_function(config, row_sharding)
    self._empty = jit(functools.partial(_empty, config), static_argnums=(0, 1))
    self._prefill = jit_step(self._prefill_chunk)
    self._decode = jit_step(self._decode_rows)
    self._grow = jit(functools.partial(_grow, config), static_argnums=1)
    self._take = jit(lambda context, rows: jax.tree.map(lambda a: a[rows], context))
    self._put = jit(_put, donate_argnums=0)

  @functools.cached_property
  def _stop_rules(self) -> _StopRules:  # on all devices, or each call would send it to them
    return hosts.put(self._host_stop_rules, self._everywhere)

  def greedy(self, rows: int) -> 'Sampler':
    """Returns a sampler of likeliest tokens for so many rows, with the same compiled programs."""
    other = copy_lib.copy(self)
    other._row_settings = sampling.GREEDY.row_settings
    other.num_groups = -(-rows // self.width)
    other.records_routes = False  # nobody trains on what it samples
    return other

  def copy(self, params: Any) -> Any:
    """Returns the policy as `prefill` and `decode` read it best; a copy is returned as it is.

    A list may hold several policies. The copy shares no buffer with `params`.
    """
    if isinstance(params, list):
      return [self.copy(policy) for policy in params]
    return params if layout.is_copy(params) else self._copy(params)

  @property
  def in_place(self) -> bool:
    """Whether prefill works on a whole group where it is, not on rows taken out of it."""
    return self.prefill_rows == self.width

  def empty(self, rows: int, slots: int) -> Context:
    """Returns empty rows."""
    return self._empty(rows, slots)

  def idle_rows(self, rows: int) -> DecodeRows:
    """Returns rows that do not change in a decode call, as NumPy arrays for the caller to fill."""
    key = jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0)))
    settings = np.array(self._row_settings, np.float32)
    return DecodeRows(
        lengths=np.zeros(rows, np.int32),
        keys=np.zeros((rows, *key.shape), key.dtype),
        stop_state=np.zeros(rows, np.int32),
        budgets=np.zeros(rows, np.int32),
        settings=np.tile(settings, (rows, 1)),
    )

  def bucket(self, needed: int) -> int:
    """Returns the number of slots of a context with `needed` tokens per row."""
    if needed > self.slot_buckets[-1]:
      raise ValueError(f'{needed} tokens do not fit in max_slots={self.max_slots}')
    return next(b for b in self.slot_buckets if b >= needed)

  def with_room(self, context: Context, needed: int) -> Context:
    """Returns the context with at least `needed` slots per row."""
    slots = self.bucket(needed)
    return self._grow(context, slots) if slots > context.slots else context

  def take(self, context: Context, rows: Sequence[int]) -> Context:
    """Returns copies of at most `prefill_rows` rows, in a context of `prefill_rows` rows."""
    padded = np.zeros(self.prefill_rows, np.int32)
    padded[: len(rows)] = rows
    return self._take(context, padded)

  def put(
      self, context: Context, taken: Context, targets: Sequence[int], sources: Sequence[int]
  ) -> Context:
    """Copies rows sources[i] of `taken` to rows targets[i] of `context`; at most `prefill_rows`."""
    padded = np.zeros((2, self.prefill_rows), np.int32)
    padded[:, : len(targets)] = targets, sources
    return self._put(context, taken, *padded, np.int32(len(targets)))

  def prefill(
      self, params, context: Context, ids: Sequence[Sequence[int]], starts: Sequence[int]
  ) -> tuple[Context, PrefillResult]:
    """Appends ids[b] to row b, of which starts[b] slots are live; does not wait for the device.

    Rows without ids do not change, nor do their pending logits. `ids` may be shorter than the
    context. The chunks of a row depend only on its number of ids: as many as fit of the largest, of
    the next, the rest in the smallest.
    """
    rows = context.logits.shape[0]
    lengths = np.zeros(rows, np.int32)
    lengths[: len(ids)] = [len(row_ids) for row_ids in ids]
    live = np.zeros(rows, np.int32)
    live[: len(ids)] = starts
    done = np.zeros(rows, np.int32)
    prefilled = PrefillResult()
    for chunk in reversed(self.chunk_buckets):
      is_smallest = chunk == self.chunk_buckets[0]
      while True:
        left = lengths - done
        count = np.minimum(left, chunk)
        if not is_smallest:
          count = np.where(count == chunk, chunk, 0)
        if not count.any():
          break
        tokens = np.zeros((rows, chunk), np.int32)
        for b, row_ids in enumerate(ids):
          end = done[b] + count[b]
          tokens[b, : count[b]] = row_ids[done[b] : end]
        context, result = self._prefill(params, context, tokens, live + done, count)
        prefilled.lengths, routes = result
        prefilled.chunks.append((routes, count))
        done = done + count
    return context, prefilled

  def decode(
      self, params, context: Context, rows: DecodeRows, steps: int, enough: int
  ) -> tuple[Context, DecodeResult]:
    """Samples up to `steps` tokens of each row with a budget; ends once `enough` rows have stopped.

    A row stops with the token that completes a stop string, with an eos token, or after budgets[b]
    tokens. The last token enters the context too. Token number i of a row is drawn with
    fold_in(key, i). The log-probs are those of `sampling.make_draw`.
    """
    if rows.settings is None:
      settings = self.idle_rows(len(rows.lengths)).settings
      rows = dataclasses.replace(rows, settings=settings)
    steps = min(steps, self.steps)
    until = Until(np.int32(steps), np.int32(enough))
    return self._decode(params, context, rows, until, self._stop_rules)

  def compiled_variants(self) -> dict[str, int]:
    """Returns the number of compiled programs of each function, for logging."""
    return {
        'prefill': self._prefill._cache_size(),  # type: ignore[attr-defined]
        'decode': self._decode._cache_size(),  # type: ignore[attr-defined]
    }

  def shapes_of_copy(self, params) -> dict:
    """Returns the ShapeDtypeStructs, with shardings, of a `copy` of such parameters."""
    shapes = jax.eval_shape(self._copy, params)
    if self.row_sharding is None:
      return shapes
    places = layout.copy_shardings(self.config, self.row_sharding)
    return jax.tree.map(lambda x, place: x.update(sharding=place), shapes, places)

  def shapes_of_context(self, rows: int, slots: int) -> Context:
    """Returns the ShapeDtypeStructs, with shardings, of `empty`."""
    shapes = jax.eval_shape(functools.partial(_empty, self.config, rows, slots))
    if self.row_sharding is None:
      return shapes

    def with_sharding(place, branch):
      return jax.tree.map(lambda leaf: leaf.update(sharding=place), branch)

    return jax.tree.map(with_sharding, self._context_sharding, shapes)

  def num_programs(self) -> dict[str, int]:
    """Returns how many programs of each function a run may compile; small ones are left out."""
    slots = len(self.slot_buckets)
    return {
        'copy': 1,
        'prefill': slots * len(self.chunk_buckets),
        'decode': slots,
        'grow': slots * (slots - 1) // 2,
    }

  def trace(self, params, slots: int) -> dict[str, jax.stages.Traced]:
    """Traces 'copy', 'prefill' (the largest chunk), 'decode' and 'grow' (to so many slots).

    From shapes alone: `params` are ShapeDtypeStructs of the policy, with shardings. For planning,
    which lowers and compiles them to measure their memory.
    """
    rows = _shapes(self.idle_rows(self.width))
    until = _shapes(Until(np.int32(0), np.int32(0)))
    tokens = np.zeros((self.prefill_rows, self.chunk_buckets[-1]), np.int32)
    counts = np.zeros(self.prefill_rows, np.int32)
    smaller = max((bucket for bucket in self.slot_buckets if bucket < slots), default=slots)
    policy = self.shapes_of_copy(params)
    group = self.shapes_of_context(self.width, slots)
    taken = self.shapes_of_context(self.prefill_rows, slots)
    return {
        'copy': self._copy.trace(params),
        'prefill': self._prefill.trace(policy, taken, *_shapes((tokens, counts, counts))),
        'decode': self._decode.trace(policy, group, rows, until, _shapes(self._host_stop_rules)),
        'grow': self._grow.trace(self.shapes_of_context(self.width, smaller), slots),
    }

  def _prefill_chunk(self, params, context, tokens, starts, lengths):
    """Appends the first `lengths` [B] of `tokens` [B,T] to rows of `starts` [B] tokens.

    Only the last real token's logits are computed; a row with length 0 keeps all it had.
    """
    config = self.config
    chex.assert_shape(tokens, (context.logits.shape[0], None))
    chex.assert_shape([starts, lengths], context.logits.shape[:1])
    cache = decoder.KVCache(context.k, context.v, starts)
    x, cache, routing = decoder.cached_trunk(
        params, config, tokens, None, cache, lengths
    )  # [B,T,D]
    last = jnp.maximum(lengths - 1, 0)[:, None, None]
    x = jnp.take_along_axis(x, last, axis=1)[:, 0]  # [B,D]
    logits = self._next_logits(params, x)
    logits = jnp.where(lengths[:, None] > 0, logits, context.logits)
    context = Context(cache.k, cache.v, logits)
    return context, (cache.length, self._routes(routing))

  def _decode_rows(self, params, context, rows, until, stop_rules):
    """See `decode`."""
    config = self.config
    num_rows = context.logits.shape[0]
    chex.assert_shape([rows.lengths, rows.stop_state, rows.budgets], (num_rows,))
    params = decoder.unstack_layers(decoder.in_compute_dtype(params, config), config)
    keys = jax.random.wrap_key_data(rows.keys)
    draw = sampling.make_draw(rows.settings, self._top_k)
    stop_string_state = stop_rules.stop_table.shape[0] - 1

    def is_running(state):
      has_time = (state.step < until.steps) & (state.stopped < until.enough)
      return jnp.any(state.sampled.alive) & has_time

    def sample_one(state):
      context, sampled = state.context, state.sampled
      alive = sampled.alive
      token_keys = jax.vmap(jax.random.fold_in)(keys, state.lengths)
      token, logp = draw(context.logits, token_keys)
      cache = decoder.KVCache(context.k, context.v, state.lengths)
      x, cache, routing = decoder.cached_trunk(
          params, config, token[:, None], None, cache, alive.astype(jnp.int32)
      )
      logits = self._next_logits(params, x[:, 0])
      logits = jnp.where(alive[:, None], logits, context.logits)
      next_state = stop_rules.stop_table[sampled.stop_state, token]
      stop_state = jnp.where(alive, next_state, sampled.stop_state)
      counts = sampled.counts + alive
      is_stop = (stop_state == stop_string_state) | stop_rules.is_eos[token]
      still_alive = alive & ~is_stop & (counts < rows.budgets)

      def set_column(array, values):
        values = jnp.where(alive, values, 0)
        return array.at[:, state.step].set(values)

      routes = sampled.routes
      if routes is not None:
        token_routes = self._routes(routing)
        routes = jax.lax.dynamic_update_slice(routes, token_routes, (0, state.step, 0, 0))
      return _DecodeState(
          context=Context(cache.k, cache.v, logits),
          lengths=cache.length,
          sampled=DecodeResult(
              tokens=set_column(sampled.tokens, token),
              logp=set_column(sampled.logp, logp),
              counts=counts,
              stop_state=stop_state,
              alive=still_alive,
              routes=routes,
          ),
          step=state.step + 1,
          stopped=state.stopped + jnp.sum(alive & ~still_alive),
      )

    sampled = DecodeResult(
        tokens=jnp.zeros((num_rows, self.steps), jnp.int32),
        logp=jnp.zeros((num_rows, self.steps), jnp.float32),
        counts=jnp.zeros_like(rows.budgets),
        stop_state=rows.stop_state,
        alive=rows.budgets > 0,
        routes=self._no_routes(num_rows),
    )
    zero = jnp.zeros((), jnp.int32)
    state = _DecodeState(context, rows.lengths, sampled, step=zero, stopped=zero)
    state = jax.lax.while_loop(is_running, sample_one, state)
    return state.context, state.sampled

  def _next_logits(self, params, x):
    """Returns the logits [B,V] of x [B,D], whole on each device that has the row.

    Choice: as in vLLM, one gather per token. A device of a 7B model on 4 devices receives 7 MB for
    16 rows, much less than the weights that it reads.
    """
    logits = decoder.token_logits(params, self.config, x)
    if self.config.vocab_size % layout.num_shards(self.row_sharding, 'tensor') == 0:
      logits = sharding.spread(logits, self._split_logits_sharding)
    return sharding.spread(logits, self.row_sharding)

  def _routes(self, routing):
    """Returns the experts of each token [B,T,L,A]; None where they are not recorded."""
    return moe.routes(routing, self.config.num_experts) if self.records_routes else None

  def _no_routes(self, rows):
    """Returns the array of experts that decode fills."""
    if not self.records_routes:
      return None
    model = self.config
    shape = (rows, self.steps, model.num_layers, model.experts_per_token)
    return jnp.zeros(shape, moe.route_dtype(model.num_experts))


def _all_ids(stop_table, vocab_size):
  """Returns the stop table with a column per id [states,V]; ids without bytes keep the state."""
  missing = vocab_size - stop_table.shape[1]
  states = np.arange(len(stop_table))[:, None]
  columns = [stop_table, np.repeat(states, missing, axis=1)]
  return np.concatenate(columns, axis=1).astype(np.int32)


def _shapes(tree):
  return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)


def _empty(config, rows, slots):
  cache = decoder.init_cache(config, rows, slots)
  logits = jnp.zeros((rows, config.vocab_size), jnp.float32)
  return Context(cache.k, cache.v, logits)


def _grow(config, context, slots):
  """Returns the same rows with `slots` slots each, written into empty ones: faster than a `pad`."""

  def fill(new, old):
    origin = (0,) * old.ndim
    return jax.lax.dynamic_update_slice(new, old, origin)

  rows = context.logits.shape[0]
  return jax.tree.map(fill, _empty(config, rows, slots), context)


def _put(context, taken, targets, sources, count):
  """Rows may have fewer slots in `taken`: what lies past them is garbage anyway.

  Row after row: a scatter of gathered rows takes twice as long on a CPU.
  """

  def put_row(i, context):
    def put(array, rows):
      row = jax.lax.dynamic_slice_in_dim(rows, sources[i], 1)
      return jax.lax.dynamic_update_slice_in_dim(array, row, targets[i], axis=0)

    return jax.tree.map(put, context, taken)

  return jax.lax.fori_loop(0, count, put_row, context)
