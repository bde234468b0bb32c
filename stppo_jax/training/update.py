"""The update: TrainState and TurnBatch in, TrainState and metrics out. Runs on the devices.

`compile_functions` compiles three pure functions: `annotate` (log-probs and values before the
update), `with_advantages`, and `update_step`, which takes one step of optimizer_step.py.

Models compute bins of several rows each, in layout [R,P] (see `packing`). Everything else works on
rows [B,T], of which a step has b.
"""

from collections.abc import Callable
import dataclasses
import functools
import types
from typing import Any
from typing import NamedTuple

import jax
import jax.numpy as jnp

from stppo_jax import plugins
from stppo_jax.algorithms import demonstrations
from stppo_jax.algorithms import filters
from stppo_jax.algorithms import variant as variant_lib
from stppo_jax.models import decoder
from stppo_jax.models import sharding
from stppo_jax.training import diagnostics
from stppo_jax.training import optimizer_step
from stppo_jax.training import packing as packing_lib
from stppo_jax.training import transforms
from stppo_jax.training.state import Frozen
from stppo_jax.training.state import Spec
from stppo_jax.training.state import TrainState
from stppo_jax.types import TurnBatch
from stppo_jax.types import UserError

Metrics = dict[str, jax.Array]


class Functions(NamedTuple):
  """The compiled functions of a run. Each is the function below without `spec` and `mesh`."""

  annotate: Any  # (state, frozen, batch, steps) -> (batch, metrics)
  with_advantages: Any  # (state, batch) -> (state, batch, metrics)
  update_step: Any  # (state, frozen, batch, step) -> (state, metrics, tokens)

  def num_compilations(self) -> int:
    """Programs compiled so far in this process: one per function and shape of batch."""
    return sum(function._cache_size() for function in self)


def compile_functions(
    spec: Spec, state: TrainState, frozen: Frozen, mesh: jax.sharding.Mesh
) -> Functions:
  """Jits the three functions over the mesh. `with_advantages` and `update_step` donate the state.

  Only the structure and the shardings of `state` and `frozen` are read. Their leaves may be arrays
  or shapes.
  Runs of one process share their programs if their settings and shardings are equal. Choice: they
  share none if the objective has a callable that is not a plain function. Such an object may change
  between two runs, and the programs hold what it was when they were traced.
  """

  def sharding_of(x):
    return x.sharding

  trees = (state, frozen)
  shardings = jax.tree.map(sharding_of, trees)
  places, tree = jax.tree.flatten(shardings)
  make: Callable = _jitted
  for field in variant_lib.FUNCTION_FIELDS:
    part = getattr(spec.variant, field)
    function = getattr(part, 'function', part)
    if not isinstance(function, (str, types.FunctionType)):
      make = _jitted.__wrapped__  # without the cache
  return make(spec, mesh, tree, tuple(places))


@functools.lru_cache(maxsize=32)
def _jitted(spec, mesh, tree, places):  # a tree of shardings and its leaves
  state_sharding, frozen_sharding = jax.tree.unflatten(tree, places)
  rows = sharding.rows(mesh)
  whole = sharding.replicated(mesh)

  def over_devices(model):
    if model is None:
      return None
    return dataclasses.replace(model, row_sharding=sharding.context_rows(mesh))

  spec = dataclasses.replace(
      spec,
      actor=over_devices(spec.actor),
      critic=over_devices(spec.critic),
      teacher=over_devices(spec.teacher),
      context_shards=packing_lib.context_shards_of(mesh),
  )
  ins = (state_sharding, frozen_sharding, rows, whole)
  annotate_batch = functools.partial(annotate, spec)
  add_advantages = functools.partial(with_advantages, spec)
  take_one_step = functools.partial(update_step, spec, mesh)
  return Functions(
      annotate=jax.jit(annotate_batch, in_shardings=ins, out_shardings=(rows, whole)),
      with_advantages=jax.jit(
          add_advantages,
          in_shardings=(state_sharding, rows),
          out_shardings=(state_sharding, rows, whole),
          donate_argnums=0,
      ),
      update_step=jax.jit(
          take_one_step,
          in_shardings=ins,
          out_shardings=(state_sharding, whole, whole),
          donate_argnums=0,
      ),
  )


def annotate(
    spec: Spec,
    state: TrainState,
    frozen: Frozen,
    batch: TurnBatch,
    steps: packing_lib.OptimizerStep,
) -> tuple[TurnBatch, Metrics]:
  """Fills in old_logp, ref_logp and old_values [B,T]; measures the gap of sampler and trainer.

  `steps` are the steps of the first epoch, stacked. Rows are computed in the bins of these steps,
  so that every sum is rounded as in the steps themselves. The first ratio is then exactly 1 on CPUs
  (with old_logp 'trainer'). On GPUs it is 1 up to rounding: the products of two programs may be
  computed by different kernels.

  With routing replay the batch also gets `routes` [B,T,L,A], the experts that the actor uses in all
  steps of the update. Reference and critic choose their own experts.
  """
  variant = spec.variant
  sampled_routes = _sampled_routes(spec, batch)
  fields, own_routes, load = _model_fields(spec, state, frozen, batch, steps, sampled_routes)
  logp = fields['old_logp']
  batch = demonstrations.split(batch, logp, variant)
  assert batch.behaviour_logp is not None
  sampled_mask = demonstrations.sampled_mask(batch)
  metrics = diagnostics.sampler_gap(
      logp, batch.behaviour_logp, sampled_mask, batch.turn_ids, variant
  )
  if load is not None:
    from stppo_jax.models import moe

    is_replay = sampled_routes is not None
    metrics |= moe.load_metrics(load, spec.actor.experts_per_token, is_replay)
  routes = sampled_routes if own_routes is None else own_routes
  if variant.old_logp == 'sampler':
    fields['old_logp'] = batch.behaviour_logp
    if variant.kl_in != 'none':
      fields['policy_logp'] = logp

  def keep_agent_tokens(x):
    return x * batch.action_mask

  fields = jax.tree.map(keep_agent_tokens, fields)
  return dataclasses.replace(batch, routes=routes, **fields), metrics


def _sampled_routes(spec, batch):
  """Returns the experts [B,T,L,A] that the sampler chose, if they are replayed; else None."""
  if spec.routing_replay != 'sampling':
    return None
  if batch.routes is None:
    raise UserError(
        "config.rollout.routing_replay='sampling': the batch was saved without the experts that "
        "the sampler chose: set it to 'old_policy' or 'none'"
    )
  return batch.routes


def _model_fields(spec, state, frozen, batch, steps, sampled_routes):
  """Runs all models on a batch: (fields of the batch {name: [B,T]}, routes [B,T,..], load).

  `routes` are the experts that the policy chose, and `load` is how often it chose each one. Both
  are None where they are not recorded. `one_step` computes the rows of a step, [b,T].
  """
  frozen = sharding.to_device(frozen)
  actor = frozen.policy(state.actor)
  critic = None
  if state.critic is not None:
    critic = frozen.value_model(state.critic)
    critic = sharding.to_device(critic)

  def one_step(step):
    def take_rows(x):
      return x[step.rows]

    tokens = take_rows(batch.tokens)
    routes = jax.tree.map(take_rows, sampled_routes)

    def one_micro_batch(layout):
      return _bin_fields(spec, actor, critic, frozen, tokens, layout, routes)

    return packing_lib.sum_over(
        one_micro_batch, step.packing, spec.micro_batch, spec.length_buckets, spec.context_shards
    )

  def in_order(x):  # [steps,b,T,..] -> [B,T,..], the rows at their places in the batch
    rows = steps.rows.reshape(-1)
    row_shape = x.shape[2:]
    values = x.reshape(-1, *row_shape)
    num_rows = len(batch.tokens)
    ordered = jnp.zeros((num_rows, *row_shape), x.dtype)
    return ordered.at[rows].set(values)

  def sum_of_steps(x):  # [steps,..] -> [..]
    return x.sum(axis=0)

  fields, own_routes, load = jax.lax.map(one_step, steps)
  fields = jax.tree.map(in_order, fields)
  own_routes = jax.tree.map(in_order, own_routes)
  load = jax.tree.map(sum_of_steps, load)
  return fields, own_routes, load


def _bin_fields(spec, actor, critic, frozen, tokens, layout, routes):
  """Runs all models on the bins of a micro-batch; returns what `_model_fields` does, in [b,T]."""
  variant = spec.variant
  outputs, routing = _policy(spec, actor, tokens, layout, routes)
  bins = {}
  bins['old_logp'] = outputs.logp
  bins['ref_logp'] = outputs.logp
  bins['old_uniform'] = outputs.uniform
  if variant.needs_reference:
    reference = frozen.reference_policy()
    bins['ref_logp'] = _logp(spec, spec.actor, reference, tokens, layout)
  if spec.teacher is not None:
    bins['teacher_logp'] = _logp(spec, spec.teacher, frozen.teacher, tokens, layout)
  if spec.has_values:
    value_outputs = outputs.value_outputs
    if critic is not None:
      value_outputs = _critic(spec, critic, tokens, layout)
    bins['old_values'] = variant.value_head.values(value_outputs, variant)
  fields = jax.tree.map(layout.unpack, bins)
  if routing is None:
    return fields, None, None
  from stppo_jax.models import moe

  num_experts = spec.actor.num_experts
  load = moe.routing_sums(routing, layout.num_rows, num_experts)
  own_routes = None
  if spec.routing_replay == 'old_policy':
    own_routes = moe.recorded_routes(routing, num_experts)
    own_routes = layout.unpack_all(own_routes)
  return fields, own_routes, load


def with_advantages(
    spec: Spec, state: TrainState, batch: TurnBatch
) -> tuple[TrainState, TurnBatch, Metrics]:
  """Fills in advantages and returns, and the masks, weights and labels of the policy's loss.

  Runs the transforms of a batch that the run needs, one after the other: see transforms.py.
  """
  metrics = {}
  for is_needed, transform in transforms.TRANSFORMS:
    if is_needed(spec, state, batch):
      function = plugins.resolve(transform) if isinstance(transform, str) else transform
      state, batch, own_metrics = function(spec, state, batch)
      metrics |= own_metrics
  metrics |= diagnostics.batch_summary(batch, spec.has_values)
  return state, batch, metrics


def update_step(
    spec: Spec,
    mesh: jax.sharding.Mesh,
    state: TrainState,
    frozen: Frozen,
    batch: TurnBatch,
    step: packing_lib.OptimizerStep,
) -> tuple[TrainState, Metrics, dict[str, jax.Array]]:
  """Takes one optimizer step of actor and critic on the step's rows of the batch.

  g is the gradient of the policy's loss (surrogate, entropy, KL). C is the gradient of the
  objective that clipping removed. Both are summed over micro-batches with weights of the whole
  mini-batch, so the split does not change the result. Then g / divisor is clipped and goes into the
  optimizer, or in another order: see `correction.divide`.

  Returns the state, metrics (scalars), and the tokens' `ratio` and `clipped` [b,T] in this step.
  """
  critic = sharding.to_device(state.critic)
  state = dataclasses.replace(state, critic=critic)
  frozen = sharding.to_device(frozen)

  def take_rows(x):
    return x[step.rows]

  batch = jax.tree.map(take_rows, batch)
  reference = None
  if 'reference_kl' in spec.variant.needs:
    reference = frozen.reference_policy()

  def policy(actor, layout):
    params = frozen.policy(actor)
    tokens = batch.tokens
    outputs, _ = _policy(spec, params, tokens, layout, batch.routes, reference)
    return outputs

  def values(critic, layout):
    params = frozen.value_model(critic)
    return _critic(spec, params, batch.tokens, layout)

  inputs = optimizer_step.StepInputs(
      spec=spec,
      state=state,
      batch=batch,
      weights=filters.weights(batch, spec.variant),
      policy=policy,
      values=values,
      packing=step.packing,
      mesh=mesh,
  )
  return optimizer_step.take_step(inputs)


def _policy(spec, params, tokens, layout, routes=None, reference=None):
  """Runs the policy on tokens [b,T] in their bins: (TokenOutputs [R,P], Routing).

  A shared trunk has the outputs of its value head. `routes` [b,T,L,A] replays the experts of an
  earlier pass. With the parameters `reference` the outputs have its KL.
  """
  model = spec.actor
  binned, x, routing = _trunk(spec, model, params, tokens, layout, routes)
  temperature = spec.temperature
  chunk = spec.logp_chunk
  paths = layout.paths
  logp, entropy = decoder.token_logp(params, model, x, binned, temperature, chunk, paths)
  values = None
  if spec.shared_trunk:
    values = decoder.state_values(params, x, paths)
  uniform = None
  if 'uniform' in spec.variant.needs:
    from stppo_jax.models import vocabulary

    uniform = vocabulary.uniform_logp(params, model, x, binned, logp, temperature, paths)
  reference_kl = None
  if reference is not None:
    from stppo_jax.models import vocabulary

    _, reference_x, _ = _trunk(spec, model, reference, tokens, layout)
    reference_kl = vocabulary.reference_kl(
        params, model, x, reference, reference_x, temperature, chunk, paths
    )
  outputs = variant_lib.TokenOutputs(
      logp=logp, uniform=uniform, reference_kl=reference_kl, entropy=entropy, value_outputs=values
  )
  return outputs, routing


def _logp(spec, model, params, tokens, layout):
  """Runs another model than the policy on tokens [b,T] in their bins: log-probs [R,P]."""
  binned, x, _ = _trunk(spec, model, params, tokens, layout)
  temperature = spec.temperature
  chunk = spec.logp_chunk
  paths = layout.paths
  logp, _ = decoder.token_logp(params, model, x, binned, temperature, chunk, paths)
  return logp


def _critic(spec, params, tokens, layout):
  """Runs the critic on tokens [b,T] in their bins: its outputs [R,P,..] before each token."""
  model = spec.critic
  _, x, _ = _trunk(spec, model, params, tokens, layout)
  return decoder.state_values(params, x, layout.paths)


def _trunk(spec, model, params, tokens, layout, routes=None):
  """Runs the trunk on tokens [b,T]: tokens in their bins [R,P], output [R,P,D], and Routing."""
  tokens = layout.pack(tokens)
  if routes is not None:
    routes = layout.pack(routes)
  segments = layout.paths
  if segments is None and spec.shared_bins:
    segments = layout.segments
  x, routing = decoder.trunk(params, model, tokens, segments=segments, routes=routes)
  return tokens, x, routing
