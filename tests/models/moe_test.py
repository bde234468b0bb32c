"""Tests of the mixture of experts: all experts computed, replay, load, devices, refusals."""

import dataclasses
import functools
import json
import pathlib
import tempfile

from absl.testing import absltest
from absl.testing import parameterized
import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stppo_jax import types
from stppo_jax.models import convert
from stppo_jax.models import decoder
from stppo_jax.models import lora
from stppo_jax.models import moe
from stppo_jax.models import sharding
from stppo_jax.monitoring import metrics as metrics_lib
from stppo_jax.rollout import batches as batches_lib
from stppo_jax.rollout import batching
from stppo_jax.rollout import engine
from stppo_jax.rollout import sampler as sampler_lib
from stppo_jax.rollout import sampling
from stppo_jax.training import loop
from stppo_jax.training import packing
from stppo_jax.types import UserError
from tests.support import tiny_run
from tests.training import update_test

trunk = jax.jit(decoder.trunk, static_argnums=1)
token_logp = jax.jit(decoder.token_logp, static_argnums=1)
REFERENCES = pathlib.Path(__file__).parents[1] / 'support' / 'reference_logits'
CONFIG = decoder.ModelConfig(
    vocab_size=40,
    d_model=32,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    d_ff=16,
    num_experts=4,
    experts_per_token=2,
    qk_norm=True,
    family='qwen3_moe',
)


@functools.cache
def make_params(config=CONFIG, seed=0):
  """Random parameters whose router has clear preferences."""
  shapes = jax.eval_shape(functools.partial(decoder.init, config=config), jax.random.key(0))
  rng = np.random.default_rng(seed)

  def draw(path, leaf):
    mean = 1.0 if path[-1].key == 'scale' else 0.0
    return jnp.asarray(rng.normal(mean, 0.2, leaf.shape), leaf.dtype)

  return jax.tree_util.tree_map_with_path(draw, shapes)


def make_tokens(rows=4, length=12):
  return jax.random.randint(jax.random.key(2), (rows, length), 0, CONFIG.vocab_size)


def all_experts(x, weights, chosen, kernels):
  """Another implementation: every expert for every token, weighted by 0 where it was not chosen."""
  gate, up, down = kernels
  hidden = jax.nn.silu(jnp.einsum('btd,edf->btef', x, gate)) * jnp.einsum('btd,edf->btef', x, up)
  y = jnp.einsum('btef,efd->bted', hidden, down)
  of_expert = jnp.sum(jax.nn.one_hot(chosen, len(gate)) * weights[..., None], axis=2)
  return jnp.einsum('bted,bte->btd', y, of_expert)


def draw_inputs(rows=4, length=6, width=8, hidden=12, experts=4, active=2):
  draw = lambda i, *shape: jax.random.normal(jax.random.key(i), shape)
  kernels = (
      0.3 * draw(0, experts, width, hidden),
      0.3 * draw(1, experts, width, hidden),
      0.3 * draw(2, experts, hidden, width),
  )
  chosen = jax.lax.top_k(draw(3, rows, length, experts), active)[1]
  return (
      draw(4, rows, length, width),
      jax.nn.softmax(draw(5, rows, length, active)),
      chosen,
      kernels,
  )


class RouterTest(absltest.TestCase):

  def test_weights_worked_by_hand(self):
    """Softmax .5 .2 .3 over three experts; the best two are 0 and 2."""
    logits = jnp.log(jnp.array([[[0.5, 0.2, 0.3]]]))
    weights, routing = moe.route(logits, 2, renormalise=False)
    np.testing.assert_array_equal(routing.chosen, [[[0, 2]]])
    np.testing.assert_allclose(weights, [[[0.5, 0.3]]], rtol=1e-6)
    weights, _ = moe.route(logits, 2, renormalise=True)
    np.testing.assert_allclose(weights, [[[0.625, 0.375]]], rtol=1e-6)
    entropy = -(0.5 * np.log(0.5) + 0.2 * np.log(0.2) + 0.3 * np.log(0.3))
    np.testing.assert_allclose(routing.entropy, [[entropy]], rtol=1e-6)

  def test_replay_fixes_choices_but_not_weights(self):
    before, after = jnp.log(jnp.array([[[[0.5, 0.2, 0.3]]], [[[0.1, 0.6, 0.3]]]]))
    _, routing = moe.route(before, 2, renormalise=False)
    weights, again = moe.route(after, 2, renormalise=False, chosen=routing.chosen.astype(jnp.uint8))
    np.testing.assert_array_equal(again.chosen, [[[0, 2]]])
    np.testing.assert_allclose(weights, [[[0.1, 0.3]]], rtol=1e-6)
    # d p[0] / d logits = p[0] (1{u=0} - p[u])
    grad = jax.grad(lambda x: moe.route(x, 2, False, routing.chosen)[0][0, 0, 0])(after)
    np.testing.assert_allclose(grad, [[[0.09, -0.06, -0.03]]], atol=1e-6)

  def test_replaced_experts_worked_by_hand(self):
    """The best two are 0 and 2: of the choice (2, 1) one is another, of (2, 0) none."""
    logits = jnp.log(jnp.array([[[0.5, 0.2, 0.3]] * 3]))
    chosen = jnp.array([[[2, 1], [2, 0], [1, 1]]], jnp.uint8)
    _, routing = moe.route(logits, 2, renormalise=False, chosen=chosen)
    np.testing.assert_allclose(routing.replaced, [[0.5, 0, 1]])
    layers = jax.tree.map(lambda x: jnp.stack([x, 0 * x]), routing)
    sums = moe.routing_sums(layers, jnp.array([[True, True, False]]), 3)
    metrics = moe.load_metrics(sums, 2, is_replay=True)
    self.assertEqual(metrics['moe/replaced_experts'], 0.25 / 2)
    self.assertEqual(metrics['moe/tokens_routed_otherwise'], 1 / 2)

  def test_load_worked_by_hand(self):
    """One layer, three live tokens with two of four experts each; the last token is padding."""
    chosen = jnp.array([[[[0, 1], [0, 2], [0, 1], [3, 2]]]])
    routing = moe.Routing(chosen, jnp.array([[[0.1, 0.2, 0.6, 9.0]]]), jnp.zeros((1, 1, 4)))
    sums = moe.routing_sums(routing, jnp.array([[True, True, True, False]]), 4)
    np.testing.assert_array_equal(sums['tokens'], [[3, 2, 1, 0]])
    metrics = moe.load_metrics(sums, 2)
    # Shares of the tokens 1, 2/3, 1/3, 0, times E / A = 2.
    np.testing.assert_allclose(metrics['moe/load_max'], 2.0, rtol=1e-6)
    np.testing.assert_allclose(metrics['moe/load_min'], 0.0, atol=1e-6)
    std = np.std([2, 4 / 3, 2 / 3, 0])
    np.testing.assert_allclose(metrics['moe/load_std'], std, rtol=1e-6)
    np.testing.assert_allclose(metrics['moe/unused_experts'], 0.25)
    np.testing.assert_allclose(metrics['moe/router_entropy'], 0.3, rtol=1e-6)


class ExpertsTest(parameterized.TestCase):

  @parameterized.parameters(({},), ({'active': 1},), ({'experts': 8},))
  def test_values_and_gradients_equal_all_experts_computed(self, sizes):
    x, weights, chosen, kernels = draw_inputs(**sizes)
    loss = lambda f: lambda *args: jnp.sum(jnp.sin(f(args[0], args[1], chosen, args[2])))
    grad = lambda f: jax.jit(jax.value_and_grad(loss(f), argnums=(0, 1, 2)))(x, weights, kernels)
    chex.assert_trees_all_close(grad(moe.experts), grad(all_experts), rtol=1e-4, atol=1e-5)

  def test_unused_expert_has_zero_gradient(self):
    x, weights, chosen, kernels = draw_inputs(experts=3)
    chosen = jnp.where(chosen == 2, 1, chosen)
    grads = jax.jit(jax.grad(lambda k: jnp.sum(moe.experts(x, weights, chosen, k))))(kernels)
    for grad in grads:
      np.testing.assert_array_equal(grad[2], 0)
      self.assertTrue(jnp.isfinite(grad).all())

  @parameterized.parameters((2, 2, 2), (1, 8, 1))
  def test_devices_change_nothing(self, *sizes):
    """8 experts over fsdp, their width over tensor; values and gradients of all inputs."""
    mesh = sharding.make_mesh(*sizes, jax.devices()[:8])
    x, weights, chosen, kernels = draw_inputs(rows=8, experts=8)

    def loss(x, weights, kernels, rows):
      return jnp.sum(jnp.sin(moe.experts(x, weights, chosen, kernels, rows)))

    grad = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2)), static_argnums=3)
    expected = grad(x, weights, kernels, None)
    actual = grad(x, weights, kernels, sharding.rows(mesh))
    chex.assert_trees_all_close(actual, expected, rtol=1e-4, atol=1e-5)


class DecoderTest(parameterized.TestCase):

  @parameterized.parameters(False, True)
  def test_cached_decoding_equals_the_whole_row(self, renormalise):
    config = dataclasses.replace(CONFIG, norm_topk_prob=renormalise)
    params, tokens = make_params(config), make_tokens(2, 9)
    forward = jax.jit(decoder.forward, static_argnums=1)
    expected, _ = forward(params, config, tokens, None)
    cache, parts = decoder.init_cache(config, 2, 9), []
    for first, end in ((0, 4), (4, 5), (5, 9)):
      logits, cache = forward(params, config, tokens[:, first:end], None, cache)
      parts.append(logits)
    np.testing.assert_allclose(jnp.concatenate(parts, axis=1), expected, atol=1e-5)

  @parameterized.parameters({'scan_layers': False}, {'remat': 'full'}, {'remat': 'dots'})
  def test_scan_and_remat_change_nothing(self, **changes):
    params, tokens = make_params(), make_tokens()

    def loss(params, config):
      x, routing = decoder.trunk(params, config, tokens)
      return jnp.mean(jnp.sin(x)), routing.chosen

    grad = jax.jit(jax.value_and_grad(loss, has_aux=True), static_argnums=1)
    expected = grad(params, CONFIG)
    self.assertEqual(expected[0][1].shape, (2, *tokens.shape, 2))  # [L,B,T,A]
    actual = grad(params, dataclasses.replace(CONFIG, **changes))
    chex.assert_trees_all_close(actual, expected, atol=1e-5)

  def test_replaying_own_routes_is_identity(self):
    params, tokens = make_params(), make_tokens()
    x, routing = trunk(params, CONFIG, tokens)
    routes = jnp.moveaxis(routing.chosen, 0, 2)
    again, _ = trunk(params, CONFIG, tokens, routes=routes)
    np.testing.assert_array_equal(again, x)
    moved = make_params(seed=1)
    own, own_routing = trunk(moved, CONFIG, tokens)
    replayed, routing_again = trunk(moved, CONFIG, tokens, routes=routes)
    self.assertGreater(jnp.mean(own_routing.chosen != routing.chosen), 0.2)
    np.testing.assert_array_equal(routing_again.chosen, routing.chosen)
    self.assertGreater(jnp.abs(replayed - own).max(), 0.1)


class FolderTest(parameterized.TestCase):

  @parameterized.parameters((2, 2, 2), (1, 5, 1))
  def test_loading_in_shards_equals_loading_on_the_host(self, *mesh):
    mesh = sharding.make_mesh(*mesh, jax.devices()[: int(np.prod(mesh))])
    place = functools.partial(sharding.tree_shardings, mesh=mesh)
    _, expected = convert.load_hf(REFERENCES / 'qwen3moe')
    _, actual = convert.load_hf(REFERENCES / 'qwen3moe', shardings=place)
    chex.assert_trees_all_equal(jax.device_get(actual), expected)
    folder = self.enterContext(tempfile.TemporaryDirectory())
    convert.save_hf(folder, *convert.load_hf(REFERENCES / 'qwen3moe', shardings=place))
    chex.assert_trees_all_equal(convert.load_hf(folder)[1], expected)

  @parameterized.parameters(
      ({'decoder_sparse_step': 2}, 'decoder_sparse_step = 2 and'),
      ({'mlp_only_layers': [0]}, r'mlp_only_layers = \[0\] make some layers dense'),
      ({'num_experts_per_tok': 9}, 'num_experts_per_tok = 9 of num_experts = 5'),
  )
  def test_refusals(self, changes, message):
    folder = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))
    for path in (REFERENCES / 'qwen3moe').iterdir():
      (folder / path.name).write_bytes(path.read_bytes())
    raw = json.loads((folder / 'config.json').read_text()) | changes
    (folder / 'config.json').write_text(json.dumps(raw))
    with self.assertRaisesRegex(UserError, message):
      convert.load_hf(folder)

  def test_adapters_on_experts_are_refused(self):
    targets = ('q_proj', 'v_proj')
    adapters = lora.init(jax.random.key(0), make_params(), 2, targets)
    self.assertEqual(set(adapters['layers']), {'attention'})
    with self.assertRaisesRegex(UserError, "names 'up_proj', and experts take no adapters"):
      lora.init(jax.random.key(0), make_params(), 2, ('q_proj', 'up_proj'))


MODEL = dataclasses.replace(
    update_test.DEEP, num_experts=4, experts_per_token=2, qk_norm=True, family='qwen3_moe'
)
CRITIC = dataclasses.replace(MODEL, head='value')


def first_actor(spec, moved=0.0):
  """Parameters with larger experts and clearer choices, and the router's kernel `moved`."""
  actor = jax.tree.map(jnp.copy, update_test.first_state(spec, update_test.one_device()).actor)
  parts = jax.tree.map(lambda w: 15 * w, actor['layers']['moe'])
  parts['router'] = {'kernel': parts['router']['kernel'] + moved}
  return actor | {'layers': actor['layers'] | {'moe': parts}}


class ReplayTest(absltest.TestCase):
  """Routing replay in the update, and the metrics of the router."""

  def run_step(self, replay, moved=0.0):
    """Returns (annotated batch, metrics, actor, what the step saw); the router moves in between."""
    spec = update_test.make_spec('grpo', actor=MODEL, routing_replay=replay)
    mesh, rows = update_test.one_device(), update_test.ALL_ROWS
    functions = update_test.functions_of(spec, mesh)
    batch = update_test.make_batch()
    state = update_test.make_state(spec, mesh).replace(actor=first_actor(spec))
    steps = packing.stack([update_test.one_step(spec, batch, rows)])
    batch, metrics = functions.annotate(state, update_test.NOTHING, batch, steps)
    state, batch, _ = functions.with_advantages(state, batch)
    state = state.replace(actor=first_actor(spec, moved))
    step = update_test.one_step(spec, batch, rows)
    state, _, seen = functions.update_step(state, update_test.NOTHING, batch, step)
    return batch, metrics, jax.device_get(state.actor), seen

  def test_first_step_equals_step_without_replay(self):
    batch, _, without, _ = self.run_step('none')
    self.assertIsNone(batch.routes)
    batch, _, replayed, seen = self.run_step('old_policy')
    self.assertEqual(batch.routes.shape, (*batch.tokens.shape, 2, 2))  # [B,T,L,A]
    np.testing.assert_array_equal(seen['ratio'], 1.0)
    chex.assert_trees_all_close(replayed, without, rtol=1e-6, atol=1e-7)

  @pytest.mark.slow
  def test_changed_router_keeps_old_experts(self):
    moved = jax.random.normal(jax.random.key(7), (2, 16, 4))
    batch, _, _, seen = self.run_step('old_policy', moved)
    actor = first_actor(update_test.make_spec('grpo', actor=MODEL), moved)

    def ratio(routes):
      x, _ = trunk(actor, MODEL, batch.tokens, routes=routes)
      logp, _ = token_logp(actor, MODEL, x, batch.tokens)
      return np.exp(logp - batch.old_logp)[mask]

    mask = np.asarray(batch.action_mask) > 0
    replayed = ratio(batch.routes)
    np.testing.assert_allclose(np.asarray(seen['ratio'])[mask], replayed, rtol=1e-4)
    self.assertGreater(np.abs(ratio(None) - replayed).max(), 0.01)  # the router chooses others

  def test_the_metrics_of_the_router(self):
    batch, metrics, _, _ = self.run_step('none')
    # Rows end with their last agent token: what is before it is routed, padding is not counted.
    actor = first_actor(update_test.make_spec('grpo', actor=MODEL))
    _, routing = trunk(actor, MODEL, batch.tokens)
    ends = ((np.asarray(batch.action_mask) > 0) * np.arange(1, 25)).max(axis=1)
    live = jnp.arange(24) < ends[:, None]
    expected = moe.load_metrics(moe.routing_sums(routing, live, 4), 2)
    self.assertLen(expected, 5)
    self.assertNotIn('moe/replaced_experts', metrics)
    for name, value in expected.items():
      np.testing.assert_allclose(metrics[name], value, rtol=1e-4, err_msg=name)


class SamplerRoutesTest(parameterized.TestCase):
  """Routing replay of the sampler's own choices: recorded, carried, replayed."""

  PROMPTS = ([5, 6, 7, 8, 9, 1, 2], [4, 3], [5, 6, 7, 8, 9, 1, 2], [1], [5, 6, 7, 8, 9, 1, 2])
  OBSERVATIONS = ([7, 7, 8], [9], [2, 2, 2, 2, 2, 2], [6, 1], [])

  def play(self, **sizes):
    """Plays two turns of 4 tokens per prompt; returns [(all tokens, routes [n,L,A])]."""
    stops = np.zeros((2, CONFIG.vocab_size), np.int32)
    sizes = sampling.Sizes(32, slot_buckets=(16, 32), chunk_buckets=(2, 4), steps=3, **sizes)
    sampler = sampler_lib.Sampler(CONFIG, stops, (), sizes, records_routes=True)
    tokens, routes = [list(prompt) for prompt in self.PROMPTS], [[] for _ in self.PROMPTS]

    def respond(turns):
      following = []
      for turn in turns:
        i = turn.index
        tokens[i] += turn.turn.tokens.tolist()
        routes[i].append(turn.turn.routes)
        over = len(routes[i]) == 2
        observation = () if over else self.OBSERVATIONS[i]
        tokens[i] += observation
        following.append(engine.Prompt(observation, 0 if over else 4))
      return following

    prompts = [engine.Prompt(ids, 4) for ids in self.PROMPTS]
    keys = jax.random.split(jax.random.key(3), len(prompts))
    engine.run(sampler, sampler.copy(make_params()), prompts, keys, respond)
    return [(row, np.concatenate(parts)) for row, parts in zip(tokens, routes)]

  @parameterized.parameters(
      {'rows': 2, 'prefill_rows': 1},  # slots are used again; equal prompts are copied
      {'rows': 5, 'prefill_rows': 2},
      {'rows': 4, 'width': 2, 'prefill_rows': 2},  # in place
  )
  @pytest.mark.slow_after(1)
  def test_recorded_experts_equal_those_of_one_pass(self, **sizes):
    for row, routes in self.play(**sizes):
      padded = np.pad(row, (0, 32 - len(row)))[None]
      _, routing = trunk(make_params(), CONFIG, padded)
      self.assertEqual(routes.dtype, np.uint8)
      np.testing.assert_array_equal(routes, moe.recorded_routes(routing, 4)[0, : len(row)])

  def test_experts_reach_their_batch_row(self):
    ids = lambda *values: np.array(values, np.int32)
    routes = np.arange(4 * 2 * 2, dtype=np.uint8).reshape(4, 2, 2)
    later = 100 + np.arange(3 * 2 * 2, dtype=np.uint8).reshape(3, 2, 2)
    logp = np.zeros(2, np.float32)
    turns = [
        types.Turn(ids(3, 4), logp, ids(5), routes=routes),  # a prompt of 2, and 2 tokens
        types.Turn(ids(6, 7), logp, ids(), routes=later),  # an observation of 1, and 2 tokens
    ]
    episode = types.Episode(types.Task('t', 'q', ('a',)), 0, ids(1, 2), turns)
    again = batches_lib.from_json(
        json.loads(json.dumps(batches_lib.to_json(batching.Sampled(1, 0, [episode], {})))),
        [episode.task],
    )
    for played in (episode, again.episodes[0]):
      failed = types.Episode(episode.task, 1, ids(1), [], failed=True)
      batch = batching.to_turn_batch([played, failed], (8,))
      self.assertEqual(batch.routes.dtype, np.uint8)
      np.testing.assert_array_equal(batch.routes[0, :7], np.concatenate([routes, later]))
      np.testing.assert_array_equal(batch.routes[0, 7:], 0)
      np.testing.assert_array_equal(batch.routes[1], 0)

  def run_step(self, routes, moved=0.0):
    """Returns (annotated batch, metrics, what the step saw) with the sampler's routes."""
    spec = update_test.make_spec('ppo', actor=MODEL, critic=CRITIC, routing_replay='sampling')
    mesh, rows = update_test.one_device(), update_test.ALL_ROWS
    functions = update_test.functions_of(spec, mesh)
    batch = dataclasses.replace(update_test.make_batch(), routes=routes)
    state = update_test.make_state(spec, mesh).replace(actor=first_actor(spec))
    steps = packing.stack([update_test.one_step(spec, batch, rows)])
    batch, metrics = functions.annotate(state, update_test.NOTHING, batch, steps)
    state, batch, _ = functions.with_advantages(state, batch)
    state = state.replace(actor=first_actor(spec, moved))
    step = update_test.one_step(spec, batch, rows)
    _, _, seen = functions.update_step(state, update_test.NOTHING, batch, step)
    return batch, metrics, seen

  def test_training_reuses_recorded_experts(self):
    """The routes are those of a router that the trainer never had."""
    spec = update_test.make_spec('ppo', actor=MODEL, critic=CRITIC)
    tokens, other = update_test.make_batch().tokens, jax.random.normal(
        jax.random.key(7), (2, 16, 4)
    )
    _, routing = trunk(first_actor(spec, other), MODEL, tokens)
    routes = moe.recorded_routes(routing, 4)
    batch, metrics, seen = self.run_step(routes)
    np.testing.assert_array_equal(batch.routes, routes)
    np.testing.assert_array_equal(seen['ratio'], 1.0)  # old_logp has the same experts
    actor = first_actor(spec)
    x, own = trunk(actor, MODEL, tokens, routes=routes)
    mask = np.asarray(batch.action_mask) > 0
    expected = token_logp(actor, MODEL, x, tokens)[0]
    np.testing.assert_allclose(batch.old_logp[mask], expected[mask], rtol=1e-4, atol=1e-5)
    ends = (mask * np.arange(1, 25)).max(axis=1)
    live = np.arange(24) < ends[:, None]
    replaced = np.asarray(own.replaced)[:, live]  # [L,tokens]
    self.assertGreater(replaced.mean(), 0.1)
    np.testing.assert_allclose(metrics['moe/replaced_experts'], replaced.mean(), rtol=1e-4)
    share = (replaced > 0).any(axis=0).mean()
    np.testing.assert_allclose(metrics['moe/tokens_routed_otherwise'], share, rtol=1e-4)
    with self.subTest('a router that moves before the step changes only the weights'):
      moved = 0.3 * jax.random.normal(jax.random.key(8), (2, 16, 4))
      batch, _, seen = self.run_step(routes, moved)
      x, _ = trunk(first_actor(spec, moved), MODEL, tokens, routes=routes)
      logp, _ = token_logp(first_actor(spec, moved), MODEL, x, tokens)
      ratio = np.exp(logp - batch.old_logp)[mask]
      np.testing.assert_allclose(np.asarray(seen['ratio'])[mask], ratio, rtol=1e-3)

  def test_batch_without_routes_is_an_error(self):
    with self.assertRaisesRegex(UserError, "saved without the experts.*'old_policy' or 'none'"):
      self.run_step(None)

  def test_the_routes_of_ones_own_router_replace_nothing(self):
    spec = update_test.make_spec('ppo', actor=MODEL, critic=CRITIC)
    _, routing = trunk(first_actor(spec), MODEL, update_test.make_batch().tokens)
    _, metrics, seen = self.run_step(moe.recorded_routes(routing, 4))
    self.assertEqual(metrics['moe/replaced_experts'], 0)
    self.assertEqual(metrics['moe/tokens_routed_otherwise'], 0)
    np.testing.assert_array_equal(seen['ratio'], 1.0)


class RunTest(absltest.TestCase):

  @pytest.mark.slow
  def test_replay_resumes_with_batches_ahead(self):
    folder = self.enterContext(tempfile.TemporaryDirectory())
    experts = dict(num_experts=4, experts_per_token=2, qk_norm=True, family='qwen3_moe')
    tiny_run.write(folder)
    model = str(pathlib.Path(folder, 'experts'))
    tiny_run.write_model(model, qkv_bias=False, **experts)

    def train(workdir, updates):
      config = tiny_run.make_config(
          folder, model__folder=model, rollout__routing_replay='sampling', train__updates=updates
      )
      config.rollout.group_size, config.algorithm.variant = 2, 'grpo'
      config.pipeline.staleness, config.algorithm.rollout_is = 1, 'token'
      with tiny_run.on_one_device():
        loop.start(config, f'{folder}/{workdir}')
      return metrics_lib.read_metrics(f'{folder}/{workdir}')

    straight = train('straight', 3)
    for updates in (2, 3):  # the batch of update 3 is sampled before the first run ends
      resumed = train('resumed', updates)
    for row, again in zip(straight[1:], resumed[1:], strict=True):
      self.assertEqual(row['moe/replaced_experts'], again['moe/replaced_experts'])
      self.assertEqual(row['actor/pg_loss'], again['actor/pg_loss'])
      self.assertBetween(row['moe/tokens_routed_otherwise'], 0, 0.9)
    self.assertLess(straight[1]['moe/replaced_experts'], 0.01)  # sampled by the same parameters


if __name__ == '__main__':
  absltest.main()
