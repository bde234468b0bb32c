"""Adapters: zero at first, then equal to merged weights; the base is frozen; whole runs."""

import dataclasses
import json
import math
import os
import pathlib
import shutil
import tempfile

from absl.testing import absltest
from absl.testing import parameterized
import chex
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

from stppo_jax.assembly import components
from stppo_jax.evaluation import job
from stppo_jax.evaluation import policy as policy_lib
from stppo_jax.models import convert
from stppo_jax.models import decoder
from stppo_jax.models import layers
from stppo_jax.models import lora
from stppo_jax.models import sharding
from stppo_jax.monitoring import metrics as metrics_lib
from stppo_jax.training import loop
from stppo_jax.training import state as train_state
from stppo_jax.training import update
from stppo_jax.types import UserError
from tests.support import tiny_run
from tests.training import update_test

# No two widths are equal, so that a shape says what an array is.
MODEL = decoder.ModelConfig(
    vocab_size=32,
    d_model=24,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    d_ff=40,
    tie_embeddings=True,
    qkv_bias=True,
    lora_scale=0.5,
)
CRITIC = dataclasses.replace(MODEL, head='value')
RANK = 3


def make_adapters(params, key=1, targets=tuple(lora.TARGETS)):
  """Adapters whose B is not zero, so that they do something."""
  adapters = lora.init(jax.random.key(key), params, RANK, targets)
  noise = iter(jax.random.split(jax.random.key(key), 99))
  return jax.tree.map(lambda x: x + 0.1 * jax.random.normal(next(noise), x.shape), adapters)


def logits_of(params, config=MODEL):
  tokens = jax.random.randint(jax.random.key(7), (3, 11), 0, config.vocab_size)
  return decoder.forward(params, config, tokens, None)[0]


def made_by(jaxpr):
  """Returns the sorted shapes that products and scatters of a jaxpr make, inner ones included."""
  for eqn in jaxpr.eqns:
    if eqn.primitive.name in ('dot_general', 'scatter-add'):
      yield tuple(sorted(eqn.outvars[0].aval.shape))
    for value in eqn.params.values():
      for item in value if isinstance(value, (tuple, list)) else (value,):
        inner = getattr(item, 'jaxpr', item)
        if hasattr(inner, 'eqns'):
          yield from made_by(inner)


class AdapterTest(parameterized.TestCase):

  @parameterized.parameters(True, False)
  def test_fresh_adapters_change_no_bit(self, scan_layers):
    config = dataclasses.replace(MODEL, scan_layers=scan_layers)
    params = decoder.init(jax.random.key(0), config)
    adapters = lora.init(jax.random.key(1), params, RANK, lora.TARGETS)
    np.testing.assert_array_equal(
        logits_of(lora.combine(params, adapters), config), logits_of(params, config)
    )

  def test_shapes_and_size_of_adapters(self):
    """A is [inputs,r], B is [r,outputs]: r (in + out) numbers per kernel."""
    params = jax.eval_shape(lambda: decoder.init(jax.random.key(0), MODEL))
    adapters = lora.init(jax.random.key(1), params, RANK, lora.TARGETS)
    attention = adapters['layers']['attention']
    self.assertEqual(attention['query']['lora_a'].shape, (2, 24, RANK))
    self.assertEqual(attention['key']['lora_b'].shape, (2, RANK, 2, 8))
    self.assertEqual(attention['out']['lora_a'].shape, (2, 4, 8, RANK))
    self.assertEqual(attention['out']['lora_b'].shape, (2, RANK, 24))
    widths = (24 + 32) + (24 + 16) + (24 + 16) + (32 + 24) + 3 * (24 + 40)
    self.assertEqual(sum(x.size for x in jax.tree.leaves(adapters)), 2 * RANK * widths)
    largest = float(jnp.abs(adapters['layers']['mlp']['down']['lora_a']).max())
    self.assertBetween(largest, 0.8 / 40**0.5, 1 / 40**0.5)

  def test_adapter_is_independent_of_other_targets(self):
    params = decoder.init(jax.random.key(0), MODEL)
    every = lora.init(jax.random.key(1), params, RANK, lora.TARGETS)
    one = lora.init(jax.random.key(1), params, RANK, ('v_proj',))
    self.assertEqual(
        jax.tree.map(jnp.shape, one),
        {'layers': {'attention': {'value': {'lora_a': (2, 24, RANK), 'lora_b': (2, RANK, 2, 8)}}}},
    )
    chex.assert_trees_all_equal(
        one['layers']['attention']['value'], every['layers']['attention']['value']
    )

  @parameterized.parameters(((24, 4, 8), 1), ((4, 8, 24), 2), ((24, 40), 1))
  def test_projection_and_gradients_equal_merged_kernel(self, shape, contracted):
    """y = x (W + s A B), dA = s dW B^T, dB = s A^T dW, to the last digits of float64."""
    with jax.enable_x64(True):
      config = dataclasses.replace(MODEL, dtype='float64', param_dtype='float64')
      draw = lambda key, *axes: jax.random.normal(jax.random.key(key), axes, jnp.float64)
      x, kernel = draw(0, 3, 5, *shape[:contracted]), draw(1, *shape)
      adapter = {
          'lora_a': draw(2, *shape[:contracted], RANK),
          'lora_b': draw(3, RANK, *shape[contracted:]),
      }
      project = layers.Project(config, shape, contracted)
      beside = lambda a: project.apply({'params': {'kernel': kernel, **a}}, x)
      whole = lambda a: jnp.tensordot(
          x, kernel + 0.5 * jnp.tensordot(a['lora_a'], a['lora_b'], axes=1), axes=contracted
      )
      np.testing.assert_allclose(beside(adapter), whole(adapter), rtol=1e-12, atol=1e-12)
      y_weights = draw(4, *beside(adapter).shape)
      gradient = lambda f: jax.grad(lambda a: jnp.sum(y_weights * jnp.sin(f(a))))(adapter)
      chex.assert_trees_all_close(gradient(beside), gradient(whole), rtol=1e-10, atol=1e-10)

  @parameterized.parameters(('k_proj',), ('o_proj',), tuple(lora.TARGETS))
  def test_merged_weights_compute_the_same(self, *targets):
    params = decoder.init(jax.random.key(0), MODEL)
    adapters = make_adapters(params, targets=targets)
    beside = logits_of(lora.combine(params, adapters))
    merged = lora.merge(params, adapters, MODEL.lora_scale)
    chex.assert_trees_all_equal_shapes_and_dtypes(merged, params)
    self.assertGreater(float(jnp.abs(beside - logits_of(params)).max()), 1e-4)
    np.testing.assert_allclose(logits_of(merged), beside, rtol=1e-5, atol=1e-6)

  def test_merging_keeps_the_weights_dtype(self):
    params = decoder.init(jax.random.key(0), dataclasses.replace(MODEL, param_dtype='bfloat16'))
    merged = lora.merge(params, make_adapters(params), 0.5)
    chex.assert_trees_all_equal_shapes_and_dtypes(merged, params)

  def test_trained_parameters_are_float32_beside_bfloat16(self):
    model = dataclasses.replace(MODEL, head='both', param_dtype='bfloat16')
    arrays = decoder.init(jax.random.key(0), model)
    for params in (arrays, jax.eval_shape(lambda: arrays)):
      base, value_head = lora.split(params)
      self.assertEqual({x.dtype for x in jax.tree.leaves(base)}, {jnp.dtype('bfloat16')})
      self.assertEqual({x.dtype for x in jax.tree.leaves(value_head)}, {jnp.dtype('float32')})
      adapters = jax.eval_shape(lambda base=base: make_adapters(base))
      self.assertEqual({x.dtype for x in jax.tree.leaves(adapters)}, {jnp.dtype('float32')})

  def test_gradients_are_those_through_the_merged_weights(self):
    params = decoder.init(jax.random.key(0), MODEL)
    adapters = make_adapters(params)
    weights = jax.random.normal(jax.random.key(2), (3, 11, 32))
    through = lambda params: jnp.sum(weights * logits_of(params))
    beside = jax.jit(jax.grad(lambda a: through(lora.combine(params, a))))(adapters)
    merged = jax.jit(jax.grad(lambda a: through(lora.merge(params, a, MODEL.lora_scale))))(adapters)
    chex.assert_trees_all_close(beside, merged, rtol=1e-4, atol=1e-4)

  def test_the_cache_sees_adapters_too(self):
    """What the sampler reads in chunks is what the trainer reads at once."""
    params = decoder.init(jax.random.key(0), MODEL)
    params = lora.combine(params, make_adapters(params))
    tokens = jax.random.randint(jax.random.key(7), (3, 11), 0, 32)
    cache = decoder.init_cache(MODEL, 3, 16)
    unstacked = decoder.unstack_layers(params, MODEL)
    forward = jax.jit(decoder.forward, static_argnums=1)
    first, cache = forward(unstacked, MODEL, tokens[:, :6], None, cache)
    second, _ = forward(unstacked, MODEL, tokens[:, 6:], None, cache)
    np.testing.assert_allclose(np.concatenate([first, second], 1), logits_of(params), atol=1e-5)

  @parameterized.parameters(('none', False), ('full', True), ('dots', True))
  def test_no_gradient_has_a_kernels_shape(self, remat, scan_layers):
    config = dataclasses.replace(MODEL, remat=remat, scan_layers=scan_layers)
    params = decoder.init(jax.random.key(0), config)
    adapters = make_adapters(params)
    loss = lambda a, p: jnp.sum(logits_of(lora.combine(p, a), config) ** 2)
    of_gradients = {(24, 32), (24, 16), (24, 40)}  # kernels as matrices, and the embedding

    def found(wanted):
      made = set(made_by(jax.make_jaxpr(jax.grad(loss, argnums=wanted))(adapters, params).jaxpr))
      return {shape for shape in of_gradients if tuple(sorted(shape)) in made}

    self.assertEmpty(found(0))
    self.assertEqual(found(1), of_gradients)

  def test_combine_joins_what_split_separates(self):
    params = decoder.init(jax.random.key(0), CRITIC)
    base, value_head = lora.split(params)
    chex.assert_trees_all_equal(lora.combine(base, value_head), params)


def make_spec(actor=MODEL, critic=CRITIC, **options):
  return update_test.make_spec('st_ppo', actor=actor, critic=critic, **options)


def start(spec, mesh, on_host=()):
  """(TrainState, Frozen): adapters that do something, on one base under both models."""
  params = decoder.init(jax.random.key(1), dataclasses.replace(MODEL, head='both'))
  base, value_head = lora.split(params)
  base = jax.device_put(base, sharding.tree_shardings(base, mesh))
  actor, critic = make_adapters(base, key=2), None
  if spec.critic is not None:
    critic = make_adapters(base, key=3) | value_head
  elif spec.shared_trunk:
    actor |= value_head
  state = train_state.create_sharded(spec, actor, critic, mesh, on_host)
  return state, train_state.Frozen(actor=base)


def annotated(functions, spec, state, frozen, mesh, noise=0.5):
  """A batch with old_logp pushed away, so that some ratios are clipped."""
  batch = jax.device_put(update_test.make_batch(), sharding.rows(mesh))
  batch = update_test.annotate(functions, spec, state, batch, frozen=frozen)
  change = noise * jax.random.normal(jax.random.key(3), batch.old_logp.shape)
  return functions.with_advantages(
      state, batch.replace(old_logp=batch.old_logp + change * batch.action_mask)
  )[:2]


class UpdateTest(parameterized.TestCase):

  @parameterized.parameters((True, 'tokens'), (False, 'both'))
  @pytest.mark.slow_after(1)
  def test_only_trained_parameters_have_state(self, separate, head):
    """No bit of the base changes. Adam keeps two numbers per trained one, and its counts."""
    mesh = update_test.one_device()
    optimizer, schedule = train_state.make_optimizer(1e-2, 0)
    spec = dataclasses.replace(
        make_spec(
            actor=dataclasses.replace(MODEL, head=head),
            critic=CRITIC if separate else None,
            kl_in='loss',
            micro_batch=2,
        ),
        actor_optimizer=optimizer,
        critic_optimizer=optimizer,
        actor_lr=schedule,
        critic_lr=schedule,
        actor_clip=1.0,
        critic_clip=1.0,
    )
    state, frozen = start(spec, mesh)
    before, base = jax.device_get((state, frozen))
    functions = update.compile_functions(spec, state, frozen, mesh)
    state, batch = annotated(functions, spec, state, frozen, mesh, noise=0.0)
    state, metrics, seen = update_test.step(functions, spec, state, batch, frozen=frozen)
    np.testing.assert_array_equal(seen['ratio'], np.ones((8, 24), np.float32))
    self.assertGreater(float(metrics['stppo/grad_norm']), 0)
    state, metrics, _ = update_test.step(functions, spec, state, batch, frozen=frozen)
    chex.assert_trees_all_equal(jax.device_get(frozen), base)
    for name in ('actor', 'critic'):
      for old, new in zip(
          jax.tree.leaves(getattr(before, name)), jax.tree.leaves(getattr(state, name))
      ):
        self.assertTrue((np.asarray(new) != old).all())
    size = lambda tree: sum(x.size for x in jax.tree.leaves(tree))
    widths = (24 + 32) + (24 + 16) + (24 + 16) + (32 + 24) + 3 * (24 + 40)
    self.assertEqual(size(state.actor), 2 * RANK * widths + (0 if separate else 25))
    self.assertEqual(size(state.actor_opt), 2 * size(state.actor) + 2)
    self.assertEqual(size(state.critic_opt), 2 * size(state.critic) + 2 if separate else 0)
    self.assertGreater(float(metrics['actor/kl_loss']), 0)  # against the base without adapters

  def test_a_critic_on_a_base_of_its_own(self):
    """The value of the critic's adapters on the critic's base, not on the actor's."""
    mesh = update_test.one_device()
    spec = make_spec()
    state, frozen = start(spec, mesh)
    state = state.replace(
        critic=state.critic | {'value_head': {'kernel': jnp.ones((24, 1)), 'bias': jnp.zeros((1,))}}
    )
    other, _ = lora.split(decoder.init(jax.random.key(9), MODEL))
    values = []
    for critic in (None, other):
      frozen = frozen.replace(critic=critic)
      functions = update.compile_functions(
          spec, state, jax.device_put(frozen, sharding.replicated(mesh)), mesh
      )
      batch = update_test.annotate(
          functions, spec, state, jax.device_put(update_test.make_batch()), frozen=frozen
      )
      values.append(batch.old_values)

      @jax.jit
      def expected(base, adapters, batch=batch):
        params = lora.merge(base, adapters, CRITIC.lora_scale)
        x, _ = decoder.trunk(params, CRITIC, batch.tokens, None)
        return decoder.state_values(params, x) * batch.action_mask

      wanted = expected(critic or frozen.actor, state.critic)
      np.testing.assert_allclose(batch.old_values, wanted, atol=2e-5)
    self.assertGreater(float(jnp.abs(values[0] - values[1]).max()), 0.1)

  @parameterized.parameters(((1, 8, 1),), ((2, 2, 2),))
  @pytest.mark.slow
  def test_eight_devices_equal_one(self, shape):
    spec = make_spec(kl_in='loss', entropy_coef=0.01)

    def step(mesh):
      state, frozen = start(spec, mesh)
      functions = update.compile_functions(spec, state, frozen, mesh)
      state, batch = annotated(functions, spec, state, frozen, mesh)
      return jax.device_get(update_test.step(functions, spec, state, batch, frozen=frozen))

    alone, together = step(update_test.one_device()), step(sharding.make_mesh(*shape))
    self.assertGreater(float(alone[1]['actor/pg_clipfrac']), 0)
    chex.assert_trees_all_close(alone, together, rtol=1e-4, atol=1e-6)

  def test_adapters_are_sharded_like_their_kernels(self):
    mesh = sharding.make_mesh(2, 2, 2)
    base = jax.eval_shape(lambda: decoder.init(jax.random.key(0), MODEL))
    places = sharding.tree_shardings(
        lora.combine(base, lora.init(jax.random.key(0), base, RANK, lora.TARGETS)), mesh
    )
    for path, contracted in lora.TARGETS.values():
      part, module = path.split('/')
      here = places['layers'][part][module]
      kernel, a, b = (here[name].spec for name in ('kernel', 'lora_a', 'lora_b'))
      self.assertEqual(tuple(a)[1:-1], tuple(kernel)[1 : 1 + contracted], path)
      self.assertEqual(tuple(b)[2:], tuple(kernel)[1 + contracted :], path)


class RunTest(absltest.TestCase):
  """Whole runs of the tiny model."""

  def setUp(self):
    super().setUp()
    self.enterContext(tiny_run.on_one_device())
    self.workdir = self.enterContext(tempfile.TemporaryDirectory())

  @pytest.mark.slow
  def test_a_run_its_resumption_and_its_export(self):
    values = {
        'model.lora_rank': 2,
        'model.lora_alpha': 4.0,
        'algorithm.kl_in': 'reward',
        'eval.every': 0,
        'train.mini_batch': 16,
    }
    config = tiny_run.make_config(**values)
    with self.assertRaisesRegex(UserError, r'^[^\n]*no checkpoint to export[^\n]*--config[^\n]*$'):
      policy_lib.export(config, self.workdir)
    loop.start(config, self.workdir)
    rows = metrics_lib.read_metrics(self.workdir)

    with self.subTest('the reference is the policy before training'):
      self.assertEqual(rows[1]['actor/reward_kl_penalty'], 0)
      self.assertNotEqual(rows[2]['actor/reward_kl_penalty'], 0)

    with self.subTest('a checkpoint holds what is trained'):
      state = tiny_run.state_after(config, self.workdir, 2)
      leaves = {path[-1].key for path, _ in jax.tree_util.tree_leaves_with_path(state.actor)}
      self.assertEqual(leaves, {'lora_a', 'lora_b'})
      self.assertEqual(state.critic.keys(), {'layers', 'value_head'})
      folder = pathlib.Path(self.workdir, 'checkpoints', '2', 'state')
      saved = jax.tree.leaves(ocp.StandardCheckpointer().metadata(folder).item_metadata.tree)
      sizes = [math.prod(array.shape) * array.dtype.itemsize for array in saved]
      self.assertCountEqual(sizes, [x.nbytes for x in jax.tree.leaves(state)])
      self.assertLess(sum(sizes), 30_000)  # full training has 150,000

    with self.subTest('another alpha is another run'):
      with self.assertRaisesRegex(UserError, 'lora_alpha'):
        policy_lib.export(tiny_run.make_config(**values | {'model.lora_alpha': 8.0}), self.workdir)

    with self.subTest('three at once equal two and one more'):
      config = tiny_run.make_config(**values | {'train.updates': 3})
      loop.start(config, self.workdir)
      with tempfile.TemporaryDirectory() as whole:
        loop.start(config, whole)
        chex.assert_trees_all_equal(
            tiny_run.state_after(config, self.workdir, 3), tiny_run.state_after(config, whole, 3)
        )

    with self.subTest('an evaluation has the scores of training'):
      with tiny_run.reading_policies_alone():
        scores = job.evaluate(config, self.workdir).scores
      row = metrics_lib.read_metrics(self.workdir)[-1]
      self.assertEqual({name: row[name] for name in scores}, scores)

    with self.subTest('the export computes what base and adapters do'):
      with tiny_run.reading_policies_alone():
        folder = policy_lib.export(config, self.workdir)
      learner = tiny_run.load_learners(config)
      state = tiny_run.state_after(config, self.workdir, 3)
      exported, params = convert.load_hf(folder)
      tokens = jax.random.randint(jax.random.key(0), (2, 20), 0, exported.vocab_size)
      logits = lambda params, model: decoder.forward(params, model, tokens, None)[0]
      wanted = logits(learner.frozen.policy(state.actor), learner.spec.actor)
      np.testing.assert_allclose(logits(params, exported), wanted, atol=1e-5)
      untrained = logits(learner.frozen.actor, learner.spec.actor)
      self.assertGreater(float(jnp.abs(wanted - untrained).max()), 1e-3)  # 100 tolerances
      self.assertTrue(os.path.isfile(os.path.join(folder, 'tokenizer.json')))

  @pytest.mark.slow
  def test_adapters_are_not_added_to_other_weights(self):
    source = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()), 'model')
    shutil.copytree(tiny_run.make_config().model.folder, source)
    values = {'model.folder': str(source), 'model.lora_rank': 2}
    config = tiny_run.make_config(**values, **{'train.updates': 1, 'eval.every': 0})
    loop.start(config, self.workdir)
    model, params = convert.load_hf(source)
    convert.save_hf(source, model, jax.tree.map(lambda x: x + 0.1, params))
    for use in (policy_lib.export, policy_lib.policy, policy_lib.load):
      with self.assertRaisesRegex(UserError, r'^[^\n]*model\.folder [^\n]*adapters[^\n]*$'):
        use(config, self.workdir)
    config.train.accept_changed_plugins = True
    with self.assertLogs('absl', 'WARNING') as logs:
      policy_lib.export(config, self.workdir)
    self.assertIn('the new one is used', logs.output[0])

  @pytest.mark.slow
  def test_full_training_exports_its_policy_too(self):
    source = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()), 'model')
    shutil.copytree(tiny_run.make_config().model.folder, source)
    values = {'train.updates': 1, 'model.critic': 'shared', 'eval.every': 0}
    config = tiny_run.make_config(**values, **{'model.folder': str(source)})
    loop.start(config, self.workdir)
    with tiny_run.reading_policies_alone():
      folder = policy_lib.export(config, self.workdir)
    exported, params = convert.load_hf(folder)
    trained = tiny_run.state_after(config, self.workdir, 1).actor
    self.assertEqual(exported.head, 'tokens')
    ends = json.loads(pathlib.Path(folder, 'config.json').read_text())['eos_token_id']
    self.assertIn(ends, components.resolve(config).tokenizer.eos_ids)  # the source names none
    del trained['value_head']
    chex.assert_trees_all_equal(params, trained)
    raw = json.loads((source / 'config.json').read_text())
    (source / 'config.json').write_text(json.dumps(raw | {'torch_dtype': 'bfloat16'}))
    with self.assertLogs('absl', 'INFO') as logs:
      _, params = convert.load_hf(policy_lib.export(config, self.workdir))
    self.assertIn('as bfloat16', logs.output[-1])
    round_off = lambda x: x.astype(jnp.bfloat16).astype(np.float32)
    chex.assert_trees_all_equal(params, jax.tree.map(round_off, trained))
    self.assertNotEqual(params['lm_head']['kernel'][0, 0], trained['lm_head']['kernel'][0, 0])

  def test_models_of_one_folder_share_one_base(self):
    shared = tiny_run.load_learners(tiny_run.make_config(**{'model.lora_rank': 2})).frozen
    self.assertIsNone(shared.critic)
    self.assertIsNone(shared.reference)
    folder = tiny_run.make_config().model.folder
    apart = tiny_run.load_learners(
        tiny_run.make_config(
            **{
                'model.lora_rank': 2,
                'model.critic_folder': folder,
                'model.lora_targets': ('q_proj',),
            }
        )
    )
    self.assertNotIn('lm_head', apart.frozen.critic)
    self.assertEqual(apart.state.actor['layers'].keys(), {'attention'})
    in_loss = {'algorithm.kl_in': 'loss', 'algorithm.kl_estimator': 'k3'}
    full = tiny_run.load_learners(tiny_run.make_config(**in_loss)).frozen
    self.assertEmpty(full.actor)
    self.assertContainsSubset(('embed', 'layers', 'lm_head'), full.reference)


if __name__ == '__main__':
  absltest.main()
