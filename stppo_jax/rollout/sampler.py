"""The device side of the rollout: compiled prefill and decode.

A `Context` holds the keys and values of some rows. `prefill` appends known tokens to it, `decode`
samples new tokens, `take` and `put` move rows between contexts. The small state stays on the host
with the caller (`slots`): which sequence is in which row, its length, and the state of its turn.
"""

from collections.abc import Iterator
from collections.abc import Sequence
import copy as copy_lib
import dataclasses
import functools
from typing import Any

import flax
import jax
import jax.numpy as jnp
import numpy as np

from stppo_jax.distributed import hosts
from stppo_jax.models import decoder
from stppo_jax.models import sharding
from stppo_jax.rollout import sampling
from stppo_jax.rollout import sampling_sharding

Numbers = Sequence[int]


@flax.struct.dataclass
class Context:
  """Keys and values of each row's context, as in `decoder.KVCache`, and the next token's logits."""

  k: tuple[jax.Array, ...]  # L arrays as in KVCache; slots past a row's length hold garbage
  v: tuple[jax.Array, ...]
  logits: jax.Array  # [B,V] float32, of each row's next token

  @property
  def slots(self) -> int:
    """Cache slots per row: the number of tokens that a row has room for."""
    return max(array.shape[2] for array in self.v)  # a delta-net layer has a short tail there


@flax.struct.dataclass
class DecodeRows:
  """The rows of one `decode` call; NumPy arrays."""

  lengths: Any  # [B] int32, of their contexts
  keys: Any  # [B,..] jax.random.key_data
  stop_state: Any  # [B] int32, of the stop automaton
  budgets: Any  # [B] int32, most tokens; a row with budget 0 does not change
  settings: Any  # [B,3] float32 of `sampling.make_draw`


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
  # (routes, counts [B]) of each chunk, where experts are recorded.
  chunks: list[Any] = dataclasses.field(default_factory=list)


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
      eos_ids: Numbers,  # each of them ends a turn, as a stop string does
      sizes: sampling.Sizes,
      distribution: sampling.Distribution = sampling.AS_IS,  # used for rows without settings
      row_sharding: jax.sharding.NamedSharding | None = None,  # see `sampling_sharding`; None: one
      records_routes: bool = False,  # only with a mixture of experts
  ):
    self.config = config
    self.records_routes = records_routes
    self.row_sharding = row_sharding
    self.max_slots = sizes.max_slots
    self.steps = sizes.steps
    self._top_k = distribution.top_k
    self._row_settings = distribution.row_settings
    no_key = jax.random.key(0)
    key_data = jax.random.key_data(no_key)
    self._no_key = np.asarray(key_data)

    shards = sampling_sharding.num_shards(row_sharding, 'data')
    width = sizes.width or sizes.rows
    width = min(width, sizes.rows)
    width = sampling.round_up(width, shards)
    num_rows = sampling.round_up(sizes.rows, width)
    prefill_rows = min(sizes.prefill_rows, width)
    if shards > 1:  # rows are prefilled in place, because moving them would send whole caches
      prefill_rows = width
    self.width = width
    self.num_groups = num_rows // width
    self.prefill_rows = prefill_rows
    # Numbers of rows that `take` can copy out of a group, to decode fewer rows than it has. On a
    # CPU the time of a call grows with its rows. An accelerator mostly reads weights, and its
    # programs compile for minutes.
    few_rows = [prefill_rows]
    while config.cache_tile and 2 * few_rows[-1] < width:
      few_rows.append(2 * few_rows[-1])
    self.few_rows = tuple(size for size in few_rows if size < width)
    # Whether prefill works on a whole group where it is, not on rows taken out of it.
    self.in_place = prefill_rows == width
    tile = config.cache_tile or 1
    buckets = {sampling.round_up(self.max_slots, tile)}
    for bucket in sizes.slot_buckets:
      bucket = min(bucket, self.max_slots)
      bucket = sampling.round_up(bucket, tile)
      buckets.add(bucket)
    self.slot_buckets = tuple(sorted(buckets))
    self.chunk_buckets = tuple(sorted(sizes.chunk_buckets))

    num_states, num_ids = stop_table.shape
    states = np.arange(num_states, dtype=np.int32)
    states = states[:, None]
    table = np.repeat(states, config.vocab_size, axis=1)  # ids without bytes keep the state
    table[:, :num_ids] = stop_table
    for i in eos_ids:
      if 0 <= i < config.vocab_size:
        table[:, i] = num_states - 1
    self.stop_table = table  # [states,V] on the host; its last state means that a turn has ended

    everywhere = None  # every host reads these results
    if row_sharding is not None:
      mesh: Any = row_sharding.mesh
      everywhere = sharding.replicated(mesh)
    cache_sharding: Any = sampling_sharding.context_sharding(row_sharding)
    logits_sharding: Any = row_sharding
    context_sharding = Context(cache_sharding, cache_sharding, logits_sharding)
    self._everywhere = everywhere
    self._split_logits_sharding = cache_sharding
    self._copy = sampling_sharding.copy_function(config, row_sharding)
    empty = functools.partial(_empty, config)
    grow = functools.partial(_grow, config)
    jit = functools.partial(jax.jit, out_shardings=context_sharding)
    # empty(rows, slots) returns the Context of empty rows.
    self.empty = jit(empty, static_argnums=(0, 1))
    self._grow = jit(grow, static_argnums=1)
    self._take = jit(_take)
    self._put = jit(_put, donate_argnums=0)
    results = (context_sharding, everywhere)
    # Jits (params, context, ..) -> (context, results), which reuses the buffers of the context.
    self.jit_in_place = functools.partial(jax.jit, donate_argnums=1, out_shardings=results)
    self._prefill = self.jit_in_place(self._append)
    self._decode = self.jit_in_place(self._decode_rows)
    self._mask = jax.jit(_mask, out_shardings=(logits_sharding, everywhere))

  @functools.cached_property
  def _stop_table(self) -> jax.Array:  # on all devices, or each call would send it to them
    return hosts.put(self.stop_table, self._everywhere)

  def greedy(self, rows: int) -> 'Sampler':
    """Returns a sampler of likeliest tokens for `rows` rows, with the same compiled programs."""
    other = copy_lib.copy(self)
    other._row_settings = sampling.GREEDY.row_settings
    other.num_groups = -(-rows // self.width)
    other.records_routes = False  # nobody trains on what it samples
    return other

  def copy(self, params: object) -> object:
    """Returns the policy as `prefill` and `decode` read it best; a copy is returned as it is.

    A list may hold several policies. The copy shares no buffer with `params`.
    """
    if isinstance(params, list):
      return [self.copy(policy) for policy in params]
    if sampling_sharding.is_copy(params):
      return params
    return self._copy(params)

  def idle_rows(self, rows: int) -> DecodeRows:
    """Returns rows that do not change in a decode call, as NumPy arrays for the caller to fill."""
    shape = (3, rows)
    lengths, stop_state, budgets = np.zeros(shape, np.int32)
    copies = (rows, 1)
    settings = np.array(self._row_settings, np.float32)
    return DecodeRows(
        lengths=lengths,
        keys=np.tile(self._no_key, copies),
        stop_state=stop_state,
        budgets=budgets,
        settings=np.tile(settings, copies),
    )

  def with_room(self, context: Context, needed: int) -> Context:
    """Returns the context with at least `needed` slots per row, as many as a bucket has."""
    if needed <= context.slots:
      return context
    larger = [bucket for bucket in self.slot_buckets if bucket >= needed]
    slots = larger[0]
    return self._grow(context, slots)

  def take(self, context: Context, rows: Numbers, size: int = 0) -> Context:
    """Returns copies of rows, in a context of `size` rows, by default `prefill_rows`."""
    padded = self._padded(rows, size or self.prefill_rows)
    return self._take(context, padded)

  def put(self, context: Context, taken: Context, targets: Numbers, sources: Numbers) -> Context:
    """Copies rows sources[i] of `taken` to rows targets[i] of `context`, at most all of them."""
    count = np.int32(len(targets))
    size = len(taken.logits)
    targets = self._padded(targets, size)
    sources = self._padded(sources, size)
    return self._put(context, taken, targets, sources, count)

  def _padded(self, rows, size):
    """Returns the numbers of rows, padded to `size`."""
    count = len(rows)
    padded = np.zeros(size, np.int32)
    padded[:count] = rows
    return padded

  def prefill(
      self, params, context: Context, ids: Sequence[Numbers], starts: Numbers
  ) -> tuple[Context, PrefillResult]:
    """Appends ids[b] to row b, of which starts[b] slots are live; does not wait for the device.

    Rows without ids do not change, nor do their pending logits. `ids` may be shorter than the
    context. The chunks of a row depend only on its number of ids: as many as fit of the largest, of
    the next, the rest in the smallest.
    """
    prefilled = PrefillResult()
    for tokens, live, counts in self.chunks(ids, starts, len(context.logits)):
      context, result = self._prefill(params, context, tokens, live, counts)
      prefilled.lengths, routes = result
      if self.records_routes:
        prefilled.chunks.append((routes, counts))
    return context, prefilled

  def chunks(
      self, ids: Sequence[Numbers], starts: Numbers, rows: int
  ) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Yields (tokens [rows,chunk], live slots [rows], new tokens [rows]) of each prefill call."""
    num_given = len(ids)
    left = np.zeros(rows, np.int32)
    left[:num_given] = [len(row_ids) for row_ids in ids]
    live = np.zeros(rows, np.int32)
    live[:num_given] = starts
    for chunk in reversed(self.chunk_buckets):
      least = chunk
      if chunk == self.chunk_buckets[0]:
        least = 1  # only the smallest is not filled
      while left.max() >= least:
        counts = np.minimum(left, chunk)
        counts[left < least] = 0
        shape = (rows, chunk)
        tokens = np.zeros(shape, np.int32)
        for b, row_ids in enumerate(ids):
          count = counts[b]
          start = len(row_ids) - left[b]
          end = start + count
          tokens[b, :count] = row_ids[start:end]
        yield tokens, live, counts
        live = live + counts
        left = left - counts

  def decode(
      self, params, context: Context, rows: DecodeRows, steps: int, enough: int
  ) -> tuple[Context, DecodeResult]:
    """Samples up to `steps` tokens of each row with a budget; ends once `enough` rows have stopped.

    A row stops with the token that completes a stop string, with an eos token, or after budgets[b]
    tokens. The last token enters the context too. Token number i of a row is drawn with
    fold_in(key, i). The log-probs are those of `sampling.make_draw`.
    """
    steps = min(steps, self.steps)
    limits = np.array([steps, enough], np.int32)
    table = self._stop_table
    context, result = self._decode(params, context, rows, limits, table)
    if not self.records_routes:  # the programs may be those of a sampler that does: see `greedy`
      result = dataclasses.replace(result, routes=None)
    return context, result

  def mask(self, context: Context, allowed: np.ndarray) -> tuple[Context, jax.Array]:
    """Leaves only some tokens as the next ones: allowed [B,bytes] uint8 has a bit per token.

    The bits of a byte begin with the lowest. Returns also the log of the mass that is left [B].
    """
    logits, log_mass = self._mask(context.logits, allowed)
    return dataclasses.replace(context, logits=logits), log_mass

  def compiled_variants(self) -> dict[str, int]:
    """Returns the number of compiled programs of each function, for logging."""
    prefill: Any = self._prefill
    decode: Any = self._decode
    sizes = {}
    sizes['prefill'] = prefill._cache_size()
    sizes['decode'] = decode._cache_size()
    return sizes

  def shapes_of_copy(self, params) -> dict:
    """Returns the ShapeDtypeStructs, with shardings, of a `copy` of such parameters."""
    return jax.eval_shape(self._copy, params)

  def trace(self, params, slots: int) -> dict[str, jax.stages.Traced]:
    """Traces 'copy', 'prefill' (the largest chunk), 'decode' and 'grow' (to so many slots).

    From shapes alone: `params` are ShapeDtypeStructs of the policy, with shardings. For planning,
    which lowers and compiles them to measure their memory.
    """
    smaller = slots
    for bucket in self.slot_buckets:
      if bucket < slots:
        smaller = bucket
    policy = self.shapes_of_copy(params)
    group = self.empty.eval_shape(self.width, slots)
    small_group = self.empty.eval_shape(self.width, smaller)
    taken = self.empty.eval_shape(self.prefill_rows, slots)
    if self.row_sharding is None:  # shapes without a sharding are lowered for the devices here
      policy, small_group = _placed_like(params, (policy, small_group))
    largest_chunk = self.chunk_buckets[-1]
    chunk_shape = (self.prefill_rows, largest_chunk)
    tokens = np.zeros(chunk_shape, np.int32)
    counts = np.zeros(self.prefill_rows, np.int32)
    rows = self.idle_rows(self.width)
    limits = np.zeros(2, np.int32)
    traced = {}
    traced['copy'] = self._copy.trace(params)
    traced['prefill'] = self._prefill.trace(policy, taken, tokens, counts, counts)
    table = self.stop_table
    traced['decode'] = self._decode.trace(policy, group, rows, limits, table)
    traced['grow'] = self._grow.trace(small_group, slots)
    return traced

  def _append(self, params, context, tokens, starts, counts):
    """Appends the first counts[b] of `tokens` [B,T] to row b, of which starts[b] slots are live.

    Returns (context, (lengths [B], experts [B,T,L,A] where they are recorded)). Only the logits of
    each row's last token are computed. A row without tokens keeps all it had.

    Choice: each device has the whole logits of its rows. As in vLLM, this takes one gather per
    token. A device of a 7B model on 4 devices receives 7 MB for 16 rows, much less than the weights
    that it reads.
    """
    config = self.config
    cache = decoder.KVCache(context.k, context.v, starts)
    x, cache, routing = decoder.cached_trunk(params, config, tokens, cache, counts)
    length = tokens.shape[1]
    if length > 1:
      last = jnp.maximum(counts - 1, 0)
      last = last[:, None, None]
      x = jnp.take_along_axis(x, last, axis=1)
    x = x[:, 0]
    logits = decoder.token_logits(params, config, x)
    num_parts = sampling_sharding.num_shards(self.row_sharding, 'tensor')
    rest = config.vocab_size % num_parts
    if not rest:
      logits = sharding.spread(logits, self._split_logits_sharding)
    logits = sharding.spread(logits, self.row_sharding)
    is_new = counts > 0
    is_new = is_new[:, None]
    logits = jnp.where(is_new, logits, context.logits)
    routes = None
    if self.records_routes and routing is not None:
      from stppo_jax.models import moe

      routes = moe.recorded_routes(routing, config.num_experts)
    context = Context(cache.k, cache.v, logits)
    return context, (cache.length, routes)

  def _decode_rows(self, params, context, rows, limits, stop_table):
    """See `decode`."""
    config = self.config
    params = decoder.in_compute_dtype(params, config)
    params = decoder.unstack_layers(params, config)
    keys = jax.random.wrap_key_data(rows.keys)
    fold_in = jax.vmap(jax.random.fold_in)
    draw = sampling.make_draw(rows.settings, self._top_k)
    max_steps, enough = limits
    stopped_state = len(stop_table) - 1
    is_decoded = rows.budgets > 0
    num_decoded = jnp.sum(is_decoded)
    alive_at_end = num_decoded - enough
    alive_at_end = jnp.maximum(alive_at_end, 0)

    def is_running(state):
      _, sampled, step = state
      num_alive = jnp.sum(sampled.alive)
      has_steps = step < max_steps
      needs_more = num_alive > alive_at_end
      return has_steps & needs_more

    def sample_one(state):
      context, sampled, step = state
      alive = sampled.alive
      lengths = rows.lengths + sampled.counts
      token_keys = fold_in(keys, lengths)
      token, logp = draw(context.logits, token_keys)
      tokens = token[:, None]
      one = alive.astype(jnp.int32)
      context, (_, routes) = self._append(params, context, tokens, lengths, one)
      next_state = stop_table[sampled.stop_state, token]
      stop_state = jnp.where(alive, next_state, sampled.stop_state)
      counts = sampled.counts + one
      is_open = stop_state != stopped_state
      has_budget = counts < rows.budgets
      still_alive = alive & is_open & has_budget

      def set_column(array, values):
        values = jnp.where(alive, values, 0)
        return array.at[:, step].set(values)

      if routes is not None:
        origin = (0, step, 0, 0)
        routes = jax.lax.dynamic_update_slice(sampled.routes, routes, origin)
      all_tokens = set_column(sampled.tokens, token)
      all_logp = set_column(sampled.logp, logp)
      sampled = DecodeResult(
          tokens=all_tokens,
          logp=all_logp,
          counts=counts,
          stop_state=stop_state,
          alive=still_alive,
          routes=routes,
      )
      step = step + 1
      return context, sampled, step

    num_rows = len(rows.budgets)
    shape = (num_rows, self.steps)
    routes = None
    if self.records_routes:
      from stppo_jax.models import moe

      routes = moe.no_routes(config, *shape)
    sampled = DecodeResult(
        tokens=jnp.zeros(shape, jnp.int32),
        logp=jnp.zeros(shape, jnp.float32),
        counts=jnp.zeros_like(rows.budgets),
        stop_state=rows.stop_state,
        alive=is_decoded,
        routes=routes,
    )
    first_step = jnp.zeros((), jnp.int32)
    state = (context, sampled, first_step)
    context, sampled, _ = jax.lax.while_loop(is_running, sample_one, state)
    return context, sampled


def _placed_like(params, shapes):
  """Returns the ShapeDtypeStructs on the device of the parameters, if those have one."""
  place = jax.tree.leaves(params)[0].sharding
  if place is None:
    return shapes
  (device,) = place.device_set
  places = jax.tree.map(lambda _: jax.sharding.SingleDeviceSharding(device), shapes)
  return sharding.placed(shapes, places)


def _empty(config, rows, slots):
  cache = decoder.init_cache(config, rows, slots)
  shape = (rows, config.vocab_size)
  logits = jnp.zeros(shape, jnp.float32)
  return Context(cache.k, cache.v, logits)


def _grow(config, context, slots):
  """Returns the same rows with `slots` slots each, written into empty ones: faster than a `pad`."""

  def fill(new, old):
    origin = (0,) * old.ndim
    return jax.lax.dynamic_update_slice(new, old, origin)

  rows = len(context.logits)
  empty = _empty(config, rows, slots)
  return jax.tree.map(fill, empty, context)


def _mask(logits, allowed):
  bits = jnp.unpackbits(allowed, axis=1, count=logits.shape[1], bitorder='little')
  masked = jnp.where(bits > 0, logits, -jnp.inf)
  log_mass = jax.nn.logsumexp(masked, axis=1) - jax.nn.logsumexp(logits, axis=1)
  return masked, log_mass


def _take(context, rows):
  take = lambda array: array[rows]
  return jax.tree.map(take, context)


def _put(context, taken, targets, sources, count):
  """Copies rows; the first `count` targets and sources are real.

  Rows may have fewer slots in `taken`, since their remaining slots are garbage anyway. Choice: one
  row at a time, because a scatter of gathered rows takes twice as long on a CPU.
  """

  def put_row(i, context):
    target = targets[i]
    source = sources[i]

    def put(array, rows):
      row = jax.lax.dynamic_slice_in_dim(rows, source, 1)
      return jax.lax.dynamic_update_slice_in_dim(array, row, target, axis=0)

    return jax.tree.map(put, context, taken)

  return jax.lax.fori_loop(0, count, put_row, context)
