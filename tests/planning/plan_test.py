"""The plan of a run on eight simulated devices: sizes and counts by hand, and the printed table."""

import contextlib
import io
import os
import tempfile
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized
import jax
from jax.experimental import topologies as jax_topologies
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from stppo_jax.cli import entry
from stppo_jax.models import attention
from stppo_jax.models import sharding
from stppo_jax.planning import flops as flops_lib
from stppo_jax.planning import hlo
from stppo_jax.planning import plan
from stppo_jax.planning import programs
from stppo_jax.planning import table
from stppo_jax.planning import topologies
from stppo_jax.training import minibatches
from stppo_jax.types import RunError
from stppo_jax.types import UserError
from tests.support import tiny_run

# A loop of 5 around an all-gather, told by the compiler; one of 3, told by its condition; inside it
# a collective cut into two fusions (one channel); outside, an asynchronous and a scattering one.
HLO = """
HloModule made_by_hand

%body (p: (s32[], f32[2,4])) -> (s32[], f32[2,4]) {
  %p = (s32[], f32[2,4]) parameter(0)
  %all-gather.1 = f32[8,4]{1,0:T(8,128)} all-gather(%x), channel_id=1, replica_groups={{0,1,2,3}}, dimensions={0}
}

%condition (p: (s32[], f32[2,4])) -> pred[] {
  ROOT %less = pred[] compare(%i, %n), direction=LT
}

%piece.1 (p: bf16[16]) -> bf16[16] {
  %all-reduce.7 = bf16[16]{0} all-reduce(%p), channel_id=7, to_apply=%add
}

%piece.2 (p: bf16[16]) -> bf16[16] {
  %all-reduce.8 = bf16[16]{0} all-reduce(%p), channel_id=7, to_apply=%add
}

%body.2 (p: (s32[], bf16[16])) -> (s32[], bf16[16]) {
  %fusion.1 = bf16[16]{0} fusion(%p), kind=kCustom, calls=%piece.1
  %fusion.2 = bf16[16]{0} fusion(%fusion.1), kind=kCustom, calls=%piece.2
}

%condition.2 (p: (s32[], bf16[16])) -> pred[] {
  %three = s32[]{:T(128)} constant(3)
  %i = s32[] get-tuple-element(%p), index=0
  ROOT %less.2 = pred[] compare(%i, %three), direction=LT
}

ENTRY %main (a: f32[2,4]) -> f32[2,4] {
  %while.1 = (s32[], f32[2,4]) while(%t), condition=%condition, body=%body, backend_config={"known_trip_count":{"n":"5"}}
  %while.2 = (s32[], bf16[16]) while(%t), condition=%condition.2, body=%body.2
  %all-gather-start.2 = (f32[2,4]{1,0}, f32[8,4]{1,0}) all-gather-start(%a), channel_id=2
  %all-gather-done.2 = f32[8,4]{1,0} all-gather-done(%all-gather-start.2)
  %send.2 = (f32[4,8]{1,0}, u32[], token[]) send(%c, %token), channel_id=2, is_host_transfer=true, frontend_attributes={_xla_host_transfer_handler_name="xla_megascale_runtime"}
  %send.4 = (f32[4,8]{1,0}, u32[], token[]) send(%c, %token), channel_id=4, is_host_transfer=true
  ROOT %reduce-scatter.3 = f32[2,4]{1,0} reduce-scatter(%b), channel_id=3, replica_groups=mesh['a'=2,'b'=4] {'b'}, dimensions={0}
}
"""  # noqa: E501


# An all-gather that begins before a loop of seven and ends after it.
HLO_OVERLAPPED = """
HloModule made_by_hand

%start (p: f32[2,4]) -> f32[8,4] {
  %all-gather.1 = f32[8,4]{1,0} all-gather(%p), channel_id=5, dimensions={0}
}

%step (p: f32[2,4]) -> f32[8,4] {
  %all-gather.2 = f32[8,4]{1,0} all-gather(%p), channel_id=5, dimensions={0}
}

%body (p: (s32[], f32[8,4])) -> (s32[], f32[8,4]) {
  %fusion.2 = f32[8,4]{1,0} fusion(%p), kind=kCustom, calls=%step
  %all-reduce.3 = f32[4]{0} all-reduce(%q), channel_id=6, to_apply=%add
}

ENTRY %main (a: f32[2,4]) -> f32[8,4] {
  %fusion.1 = f32[8,4]{1,0} fusion(%a), kind=kCustom, calls=%start
  ROOT %while.1 = (s32[], f32[8,4]) while(%t), condition=%less, body=%body, backend_config={"known_trip_count":{"n":"7"}}
}
"""  # noqa: E501


class CountsTest(absltest.TestCase):

  def test_collective_overlapped_with_a_loop_counts_once(self):
    found = {c.kind: (c.count, c.bytes) for c in hlo.collectives(HLO_OVERLAPPED)}
    self.assertEqual(found, {'all-gather': (1, 8 * 4 * 4), 'all-reduce': (7, 7 * 4 * 4)})

  def test_collectives_of_a_text(self):
    found = {c.kind: (c.count, c.bytes) for c in hlo.collectives(HLO)}
    self.assertEqual(
        found,
        {
            'all-gather': (5 + 1, 6 * 8 * 4 * 4),  # six results of [8,4] float32
            'all-reduce': (3, 3 * 16 * 2),
            'reduce-scatter': (1, 4 * 2 * 4 * 4),  # four times the result goes in
            'send': (1, 4 * 8 * 4),  # to another slice, and on a channel that is not its own
        },
    )

  def test_a_sharded_contraction_needs_an_all_reduce(self):
    mesh = sharding.make_mesh(1, 8, 1)
    place = lambda *spec: jax.sharding.NamedSharding(mesh, P(*spec))
    multiply = jax.jit(
        jnp.dot, in_shardings=(place(None, 'fsdp'), place('fsdp', None)), out_shardings=place()
    )
    x = jax.ShapeDtypeStruct((16, 32), jnp.float32)
    y = jax.ShapeDtypeStruct((32, 64), jnp.float32)
    traced = multiply.trace(x, y)
    (found,) = hlo.collectives(traced.lower().compile().as_text())
    self.assertEqual((found.kind, found.count, found.bytes), ('all-reduce', 1, 16 * 64 * 4))
    self.assertEqual(flops_lib.matmul_flops(traced.jaxpr), 2 * 16 * 32 * 64)

  def test_flops_of_scan_branch_and_gradient(self):
    def function(w, x):  # w [7,4,4], x [3,4]: seven products of 2 * 3 * 4 * 4
      x, _ = jax.lax.scan(lambda x, layer: (x @ layer, None), x, w)
      return jax.lax.cond(x[0, 0] > 0, lambda x: (x @ w[0]).sum(), lambda x: x.sum(), x)

    w, x = jnp.ones((7, 4, 4)), jnp.ones((3, 4))
    one = 2 * 3 * 4 * 4
    flops = lambda f: flops_lib.matmul_flops(jax.make_jaxpr(f)(w, x))
    self.assertEqual(flops(function), 8 * one)
    self.assertEqual(flops(jax.grad(function)), 3 * 8 * one)  # w and x have two more each

  def test_flops_of_a_kernel_on_every_device(self):
    """Causal blocks: 8 devices of 2 heads, 256 queries in 1 block; 2 products forward, 3 + 4
    back."""
    mesh = sharding.make_mesh(4, 1, 2)
    q = jnp.ones((4, 256, 4, 64))
    attend = lambda q: attention.causal(
        q, q, q, backend='splash', row_sharding=sharding.rows(mesh)
    ).sum()
    one = 4 * 4 * 2 * 256 * 256 * 64  # all rows and heads
    flops = lambda f: flops_lib.matmul_flops(jax.make_jaxpr(f)(q))
    self.assertEqual(flops(attend), 2 * one)
    # The dq kernel makes scores, d weights and dq; the dkv kernel the first two again, dk and dv;
    # before them each query's output is multiplied with its own derivative.
    self.assertEqual(flops(jax.grad(attend)), (2 + 3 + 4) * one + 2 * q.size)
    two = 4 * 4 * 2 * 1024 * 1024 * 64 * 3 / 4  # 2 x 2 blocks of 512, of which 3 are not skipped
    q = jnp.ones((4, 1024, 4, 64))
    self.assertEqual(flops(attend), 2 * two)

  def test_flops_of_experts_count_each_row_once(self):
    """6 rows [4] and 3 experts [4,5]: 2 * 6 * 4 * 5, and as much for each gradient."""
    x, w, sizes = jnp.ones((6, 4)), jnp.ones((3, 4, 5)), jnp.array([1, 2, 3])
    product = lambda x, w: jax.lax.ragged_dot(x, w, sizes).sum()
    flops = lambda f: flops_lib.matmul_flops(jax.make_jaxpr(f)(x, w))
    self.assertEqual(flops(product), 2 * 6 * 4 * 5)
    self.assertEqual(flops(jax.grad(product, argnums=(0, 1))), 3 * 2 * 6 * 4 * 5)

  def test_unknown_loop_count_uses_given_count(self):
    def function(n, x):  # x [4,4]
      return jax.lax.fori_loop(0, n, lambda _, y: y @ x, x)

    jaxpr = jax.make_jaxpr(function)(3, jnp.ones((4, 4)))
    self.assertEqual(flops_lib.matmul_flops(jaxpr, 5), 5 * 2 * 4**3)
    text = jax.jit(function).lower(3, jnp.ones((4, 4))).compile().as_text()
    while_line = next(line for line in text.splitlines() if ' while(' in line)
    self.assertEqual(hlo._trips(while_line, hlo._computations(text)[1], 5), 5)


class RefusedTest(absltest.TestCase):

  def test_policies_of_roles(self):
    config = tiny_run.make_config('', model__role_parameters='own')
    with self.assertRaisesRegex(UserError, 'a plan is of one policy'):
      plan.make(config)


class PlanTest(parameterized.TestCase):

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    cls.tmp = cls.enterClassContext(tempfile.TemporaryDirectory())
    tiny_run.write(cls.tmp)
    cls.config = tiny_run.make_config(cls.tmp)
    cls.config.algorithm.kl_in = 'reward'
    cls.plan = plan.make(cls.config)

  def test_parameters_are_counted_exactly(self):
    """d 16, 1 layer, 2 heads of 8, 1 key head, f 32."""
    vocabulary = plan.prepare.load_shape(self.config).vocab_size
    layer = (
        2 * 16
        + 2 * 16 * 8
        + 2 * 8
        + 2 * (16 * 8 + 8)  # norms; query, key, value with biases
        + 2 * 8 * 16
        + 3 * 16 * 32
    )  # out; gate, up, down
    trunk = vocabulary * 16 + layer + 16  # embedding, layer, final norm
    self.assertEqual(
        self.plan.num_params, {'policy': trunk + 16 * vocabulary, 'critic': trunk + 16 + 1}
    )

  def test_bytes_of_a_device(self):
    """Over fsdp 8 every D of 16 is cut to 2; norms, biases and the value head are whole."""
    vocabulary = plan.prepare.load_shape(self.config).vocab_size
    layer = 2 * 16 + 2 * 2 * 8 + 2 * 8 + 2 * (2 * 8 + 8) + 2 * 8 * 2 + 3 * 2 * 32
    policy = 4 * (2 * vocabulary * 2 + layer + 16)
    critic = 4 * (vocabulary * 2 + layer + 16 + 16 + 1)
    held = {name: each for name, (_, each) in self.plan.held.items()}
    self.assertEqual(held['policy'], policy)
    self.assertEqual(held['reference policy'], policy)
    self.assertEqual(held['critic'], critic)
    self.assertEqual(held['optimizers'], 2 * (policy + critic) + 2 * 2 * 4)  # AdamW: 2 counts each
    # 16 rows over 8 devices, 1 layer, keys and values, 1 key head of 8, 192 slots.
    self.assertEqual(held['KV cache'], 2 * (2 * 8 * 192 * 4))
    # So small a copy is not split: each device has all of it.
    self.assertEqual(held['sampling copy'], 4 * self.plan.num_params['policy'])

  def test_argument_bytes_are_those_of_the_compiler(self):
    update = self.plan.programs[0]
    state = sum(self.plan.held[name][1] for name in ('policy', 'critic', 'optimizers'))
    self.assertBetween(update.arguments, state, state + 16 * 192 * 4 * 12 // 8 + 4096)
    self.assertEqual(update.resident, self.plan.held['reference policy'][1])

  @parameterized.parameters(
      ({'algorithm__variant': 'tdpo'}, 0, 0),  # the step reads the reference: it is an argument
      ({'algorithm__variant': 'dpo'}, 1, 0),
      ({'algorithm__variant': 'grpo', 'algorithm__extrapolation': 0.3}, 0, 1),
  )
  def test_copies_of_the_policy_beside_a_step(self, values, num_references, num_previous):
    class Done(Exception):
      pass

    seen = []

    def compiler(program, planned):
      seen.append((program, planned.held_per_device))
      raise Done

    config = tiny_run.make_config(
        self.tmp, rollout__group_size=4, algorithm__kl_in='none', **values
    )
    with self.assertRaises(Done):
      plan.make(config, compiler=compiler)
    ((update, held),) = seen
    self.assertEqual(update.name, 'update')
    self.assertEqual(held.get('previous policy', 0), num_previous * held['policy'])
    self.assertEqual(update.resident, (num_references + num_previous) * held['policy'])

  def test_programs_of_one_device_are_compiled_for_it(self):
    """Not for the first device here, which may be of another kind than the one to plan for."""
    device = jax.devices()[1]
    found = {}

    def compile_program(program, unused_plan):
      places = jax.tree.leaves(program.traced.lower().compile().input_shardings)
      found[program.name] = set().union(*(place.device_set for place in places))

    chip = topologies.Chip('one', 2**40)
    plan.make(self.config, devices=([device], chip), compiler=compile_program)
    self.assertEqual(found, {program.name: {device} for program in self.plan.programs})

  def test_every_program_is_there_and_fits_this_machine(self):
    self.assertEqual(
        [p.name for p in self.plan.programs],
        ['update', 'annotate', 'copy', 'prefill', 'decode', 'grow'],
    )
    for program in (p for p in self.plan.programs if p.name not in ('copy', 'grow')):
      self.assertGreater(program.flops, 0)
      self.assertGreater(program.temporaries, 0)
    kinds = {c.kind for c in self.plan.programs[0].collectives}
    self.assertIn('all-gather', kinds)  # parameters are gathered
    self.assertTrue(self.plan.fits)
    self.assertEqual(self.plan.tpu_limit_mib, 0)  # nothing to tell a CPU's compiler
    text = table.text(self.plan)
    for words in (
        '8 x cpu',
        'in training: plain',
        'policy',
        'KV cache',
        'PFLOP',
        'all-gather',
        'FITS',
    ):
      self.assertIn(words, text)

  def test_the_work_of_a_decoded_token(self):
    """2 for each weight of the matrices, and for scores and values of 192 slots; not once per
    micro-batch."""
    vocabulary = plan.prepare.load_shape(self.config).vocab_size
    weights = 16 * (2 * 2 * 8 + 2 * 8 + 3 * 32 + vocabulary)
    (decode,) = (p for p in self.plan.programs if p.name == 'decode')
    self.assertEqual(decode.flops, 16 * 2 * (weights + 2 * 2 * 8 * 192))

  def test_each_agent_of_an_episode_has_rows(self):
    """What a run compiles ahead has the same rows."""
    config = tiny_run.make_config(self.tmp)
    with mock.patch.object(plan, 'compile_program'):
      one, two = (plan.make(config, rows_per_episode=n) for n in (1, 2))
    self.assertEqual(two.held['KV cache'][0], 2 * one.held['KV cache'][0])
    traced = {program.name: program for program in two.programs}
    batch, _ = traced['annotate'].traced.out_info
    learners = tiny_run.load_learners(config)
    expected, step = minibatches.shapes(learners.bins, 16, 4, ('a', 'b'))
    self.assertEqual(batch.tokens.shape, expected.tokens.shape)
    train = config.train
    self.assertEqual(traced['update'].trips, len(step.rows) // train.micro_batch)
    runs = lambda planned: {program.name: program.runs for program in planned.programs}
    self.assertEqual(runs(two), runs(one))  # all rows of a batch are sampled together
    self.assertEqual(two.largest_rows, 2 * one.largest_rows)
    self.assertIn('rollout.rows 16\n', table.text(two))  # episodes

  def test_staleness_holds_copies_and_the_cache_while_training(self):
    """With staleness 2 two copies wait; the old plan counted neither them nor the cache."""
    config = tiny_run.make_config(self.tmp)
    config.pipeline.staleness = 2
    with mock.patch.object(plan, 'compile_program'):
      stale = plan.make(config)
      config.pipeline.staleness = 0
      fresh = plan.make(config)
    held = fresh.held_per_device
    more = [a.resident - b.resident for a, b in zip(stale.programs, fresh.programs, strict=True)]
    copies, cache = 2 * held['sampling copy'], held['KV cache']
    self.assertEqual(more, [copies + cache] * 3 + [copies] * 3)
    decode = next(p for p in fresh.programs if p.name == 'decode')
    self.assertEqual(decode.resident, held['policy'] + held['critic'] + held['optimizers'])

  def test_staleness_runs_training_and_sampling_at_once(self):
    """The largest temporaries of one kind are held by others while one of the other kind runs."""
    config = tiny_run.make_config(self.tmp)
    temporaries = {'update': 7, 'annotate': 5, 'copy': 3, 'prefill': 20, 'decode': 10, 'grow': 30}

    def compiled(program, *unused):
      program.temporaries = temporaries[program.name]

    residents = []
    for given in (compiled, lambda *unused: None):
      with mock.patch.object(plan, 'compile_program', given):
        config.pipeline.staleness = 1
        residents.append({program.name: program.resident for program in plan.make(config).programs})
    more = {name: residents[0][name] - residents[1][name] for name in temporaries}
    training, sampling = dict.fromkeys(('update', 'annotate', 'copy'), 30), ('prefill', 'decode')
    self.assertEqual(more, training | dict.fromkeys((*sampling, 'grow'), 7))

  def test_engines_take_other_devices(self):
    """They hold the cache and the copy, and run the programs of sampling."""
    config = tiny_run.make_config(self.tmp)
    config.pipeline.staleness = 1
    config.rollout.engine = 'http://a,http://b'
    config.rollout.engine_devices = 4
    with mock.patch.object(plan, 'compile_program'):
      planned = plan.make(config)
    self.assertEqual([program.name for program in planned.programs], ['update', 'annotate'])
    self.assertEqual(planned.held['KV cache'], (0, 0))
    self.assertEqual(planned.programs[0].resident, planned.held_per_device['reference policy'])
    self.assertIsNone(planned.rollout)
    text = table.text(planned)
    self.assertIn('engines on 8 other devices, which makes 16', text)
    self.assertNotIn('rollout.rows', text)

  def test_the_caches_of_a_larger_evaluation_are_counted(self):
    config = tiny_run.make_config(self.tmp)
    held = lambda: plan.make(config).held_per_device['KV cache']
    with mock.patch.object(plan, 'compile_program'):
      config.eval.rows = 16  # as many as training has
      as_in_training = held()
      config.eval.rows = 80
      config.eval.every = 0  # the loop still evaluates before and after
      self.assertEqual(held(), 5 * as_in_training)

  def test_times_are_printed_as_estimates(self):
    chip = topologies.Chip('chip', 2**40, 1e12, 1e9, 1e9, 1e-6)
    with (
        mock.patch.object(topologies, '_local_devices', return_value=(jax.devices(), chip)),
        mock.patch.object(plan, 'compile_program'),
    ):
      planned = plan.make(self.config)
    # 16 rows of 3 turns of 6 tokens; nothing was compiled, so copy and prefill take no time.
    self.assertIsNone(planned.rollout)
    for program in planned.programs:
      program.seconds = 1.0
    planned.rollout = plan.estimate_rollout(planned)
    self.assertEqual(planned.rollout.tokens, 16 * 3 * 6)
    self.assertEqual(planned.rollout.other, 1 + (1 + 2) + 1)  # copy, prefills, growth
    vocabulary = plan.prepare.load_shape(self.config).vocab_size
    read = 4 * (planned.num_params['policy'] - 16 * vocabulary)  # the embedding is read by rows
    # Rows grow from 64 tokens by 128 / 18 per step: 128 slots hold the first 9.
    early, late = (read + n * 2 * 2 * 8 * 4 for n in (128, 192))
    self.assertAlmostEqual(planned.rollout.decode, (9 * early + 9 * late) / 1e9, delta=1e-9)
    text = table.text(planned)
    for words in ('estimate', 'tokens/s on all devices', 'of which sampling', 'rollout takes'):
      self.assertIn(words, text)

  def test_a_gpu_leaves_jax_three_quarters(self):
    chip = topologies.Chip('gpu', 1000)
    with mock.patch.dict(os.environ, clear=True):
      self.assertEqual(topologies.usable(chip).memory, 750)
    with mock.patch.dict(os.environ, {'XLA_PYTHON_CLIENT_MEM_FRACTION': '.9'}):
      self.assertEqual(topologies.usable(chip).memory, 900)

  def test_an_absent_gpu_is_planned_with_plain_attention(self):
    """Tracing cuDNN's asks the GPU. Regression: the share of memory hid which chip it was."""
    chip = topologies.usable(topologies.CHIPS['h100'])
    with (
        mock.patch.object(plan, '_programs', return_value=()),
        mock.patch.object(topologies, 'devices_of', return_value=(jax.devices(), chip)),
    ):
      self.assertIn('without a GPU', plan.make(self.config, 'h100:1x1x8').attention)

  def test_activations_and_gradients_stay_in_their_shards(self):
    """Regression: without constraints each of 8 devices computed all rows and kept whole
    gradients."""
    text = self.plan.programs[0].traced.lower().compile().as_text()
    queries, columns = 64, 192
    scores = lambda rows: f'f32[{rows},1,2,{queries},{columns}]'  # [B,M,g,T,S] of the last block
    self.assertEqual(text.count(scores(self.config.train.micro_batch)), 0)
    self.assertGreater(text.count(scores(1)), 0)

  def too_large(self, program, unused_plan):
    program.temporaries = 2**21

  @parameterized.parameters(
      'RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 20.50G of 15.75G hbm.',
      'RESOURCE_EXHAUSTED: E1000: the total memory required for HLO temporaries (20.50G) exceeds '
      'available HBM (15.75G). HLO module: jit_step.',
  )
  def test_a_program_that_the_compiler_refuses(self, message):
    program = mock.Mock(temporaries=0)
    error = jax.errors.JaxRuntimeError(message)
    program.traced.lower.return_value.compile.side_effect = error
    plan.compile_program(program, mock.Mock(tpu_limit_mib=0))
    self.assertEqual(program.temporaries, 20.5 * 2**30)

  def test_a_run_that_does_not_fit(self):
    experiment = os.path.join(self.tmp, 'experiment.py')
    with open(experiment, 'w', encoding='utf-8') as file:
      file.write(
          'from tests.support import tiny_run\n'
          f'def get_config(mode=""):\n  return tiny_run.make_config({self.tmp!r})\n'
      )
    small = topologies.Chip('small', 2**20, 1e12, 1e12, 1e12)
    stdout = io.StringIO()
    with (
        mock.patch.object(plan, 'compile_program', self.too_large),
        contextlib.redirect_stdout(stdout),
        mock.patch.object(topologies, '_local_devices', return_value=(jax.devices(), small)),
    ):
      code = entry.run(['run.py', f'--config={experiment}', '--mode=plan', '--topology='])
    self.assertEqual(code, 1)
    last = stdout.getvalue().splitlines()[-1]
    for words in ('DOES NOT FIT', 'GiB per device', '--config.'):
      self.assertIn(words, last)

  def test_the_micro_batch_to_try(self):
    """fixed 10 + others 20 + 80 for 8 rows, so 10 per row: 4 rows need 70, 2 need 50."""
    program = programs.CompiledProgram('update', '', 1, resident=15, arguments=5, temporaries=90)
    largest = lambda limit: plan._largest(limit, [program], 8, 10, (2, 4, 8, 16))
    self.assertEqual([largest(n) for n in (49, 50, 69, 70, 110, 190)], [0, 2, 2, 4, 8, 16])

  @parameterized.parameters('v9:2x2', 'v5e', 'v5e:8by8', 'h100:8', '8x8')
  def test_an_unknown_topology(self, topology):
    with self.assertRaises(UserError) as caught:
      topologies.devices_of(topology)
    message = str(caught.exception)
    self.assertNotIn('\n', message)
    for words in (topology, 'v5e:8x8', 'v5p:4x4x4', 'v7x:2x2x4', 'h100:1x1x8', 'b200:1x1x8'):
      self.assertIn(words, message)

  @parameterized.parameters('v5e:8x8', 'v7x:2x2x4', 'h100:1x1x8', 'h200:1x1x8', 'b200:1x1x8')
  def test_a_compiler_that_is_not_installed(self, topology):
    with mock.patch.object(topologies, '_installed', return_value=False):
      with self.assertRaisesRegex(UserError, r'\.\[plan\]'):
        topologies.devices_of(topology)

  @parameterized.parameters(
      ('h100:1x1x8', 'jax_plugins.xla_cuda12', 'cuda'),
      ('h100:1x1x8', 'jax_plugins.xla_cuda13', 'cuda'),
      ('b200:1x1x8', 'jax_plugins.xla_cuda13', 'cuda'),
      ('v7x:2x2x4', 'libtpu', 'tpu7x:2x2x4'),
      ('2xv7x:2x2x4', 'libtpu', 2),
      ('16xv5e:4x4', 'libtpu', 16),
  )
  def test_each_plugin_and_chip_is_accepted(self, topology, package, asked):
    described = mock.Mock(devices=['device'])
    with (
        mock.patch.object(topologies, '_installed', side_effect=lambda name: name == package),
        mock.patch.object(jax_topologies, 'get_topology_desc', return_value=described) as describe,
        mock.patch.dict(os.environ),
    ):
      devices, chip = topologies.devices_of(topology)
    self.assertEqual(devices, ['device'])
    self.assertIn(chip.name, [known.name for known in topologies.CHIPS.values()])
    self.assertIn(asked, [*describe.call_args.args, *describe.call_args.kwargs.values()])

  @parameterized.parameters('0xv5e:4x4', '2xh100:1x1x8', '2x2xv5e:4x4', 'xv5e:4x4', '2xv5e')
  def test_other_numbers_of_slices_are_refused(self, topology):
    with self.assertRaisesRegex(UserError, '2xv5e:8x8 for two slices'):
      topologies.devices_of(topology)

  def test_slices_hold_whole_copies_of_the_model(self):
    """Two slices of 2 x 2 chips, whose ids alternate."""
    chips = [
        mock.Mock(
            platform='tpu',
            device_kind='TPU v5 lite',
            id=2 * number + slice_index,
            process_index=slice_index,
            slice_index=slice_index,
            coords=(number % 2, number // 2, 0),
            core_on_chip=0,
        )
        for number in range(4)
        for slice_index in range(2)
    ]
    placed = sharding._over_slices((4, 2, 1), 2, chips)
    slices = [chip.slice_index for chip in placed.flat]
    self.assertEqual(placed.shape, (4, 2, 1))
    self.assertEqual(slices, [0, 0, 0, 0, 1, 1, 1, 1])
    for sizes in ((1, 8, 1), (-1, 8, 1)):
      with self.assertRaisesRegex(UserError, 'data=1 cannot be split over 2 slices'):
        sharding.make_mesh(*sizes, chips)

  def test_compiler_errors_are_explained(self):
    taken = topologies.explained(
        RuntimeError('ABORTED: libtpu multi-process\nlockfile.'), 'v5e:8x8'
    )
    self.assertIsInstance(taken, RunError)
    self.assertIn('another process', str(taken))
    wrong = topologies.explained(RuntimeError('INVALID_ARGUMENT: not\ndivisible'), 'v5e:9x7')
    self.assertIsInstance(wrong, UserError)
    self.assertIn('v5e:9x7: INVALID_ARGUMENT: not divisible', str(wrong))

  def test_a_missing_model_is_known_by_its_name(self):
    self.config.model.folder, here = 'models/Qwen2.5-7B-Instruct', self.config.model.folder
    self.assertEqual(plan.prepare.load_shape(self.config).d_model, 3584)
    self.config.model.folder = 'models/Qwen9'
    with self.assertRaisesRegex(UserError, 'qwen2.5-7b'):
      plan.prepare.load_shape(self.config)
    self.config.model.folder = here


if __name__ == '__main__':
  absltest.main()
