"""Offloading to the host: the same numbers, the same places, and less memory on a device."""

import dataclasses
import tempfile
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized
import chex
import jax
import numpy as np
import pytest

from stppo_jax.models import decoder
from stppo_jax.models import sharding
from stppo_jax.planning import plan
from stppo_jax.training import loop
from stppo_jax.training import state as train_state
from stppo_jax.training import update
from stppo_jax.types import UserError
from tests.support import tiny_run
from tests.training import update_test

ON_HOST = {'placement.optimizer': 'host', 'placement.critic': 'host', 'placement.reference': 'host'}


def kinds(tree):
  """Returns the memory kinds of a tree's arrays, except scalars."""
  return {x.sharding.memory_kind for x in jax.tree.leaves(tree) if x.ndim}


class UpdateTest(parameterized.TestCase):

  @parameterized.parameters((None,), ((2, 2, 2),))
  @pytest.mark.slow
  def test_the_place_changes_no_bit_and_is_kept(self, shape):
    mesh = sharding.make_mesh(*shape) if shape else update_test.one_device()
    optimizer, schedule = train_state.make_optimizer(1e-2, 0)
    spec = dataclasses.replace(
        update_test.make_spec(
            'st_ppo',
            actor=update_test.DEEP,
            critic=dataclasses.replace(update_test.DEEP, head='value'),
            kl_in='loss',
            micro_batch=4,
        ),
        actor_optimizer=optimizer,
        critic_optimizer=optimizer,
        actor_lr=schedule,
        critic_lr=schedule,
        actor_clip=1.0,
        critic_clip=1.0,
    )

    def steps(on_host):
      init = lambda key, model: decoder.init(jax.random.key(key), model)
      state = train_state.create_sharded(
          spec, init(1, spec.actor), init(2, spec.critic), mesh, on_host
      )
      reference = init(3, spec.actor)
      kind = sharding.HOST if 'reference' in on_host else None
      reference = jax.device_put(reference, sharding.tree_shardings(reference, mesh, kind))
      frozen = train_state.Frozen(reference=reference)
      functions = update.compile_functions(spec, state, frozen, mesh)
      batch = jax.device_put(update_test.make_batch(), sharding.rows(mesh))
      batch = update_test.annotate(functions, spec, state, batch, frozen=frozen)
      state, batch, _ = functions.with_advantages(state, batch)
      for _ in range(2):
        state, metrics, _ = update_test.step(functions, spec, state, batch, frozen=frozen)
      return state, batch, metrics

    here = steps(())
    self.assertEqual(kinds(here), {'device'})
    there = steps(('optimizer', 'critic', 'reference'))
    chex.assert_trees_all_equal(jax.device_get(there), jax.device_get(here))
    state = there[0]
    self.assertEqual(kinds((state.actor_opt, state.critic_opt, state.critic)), {sharding.HOST})
    self.assertEqual(kinds((state.actor, there[1:])), {'device'})

  def test_devices_without_host_memory_are_refused(self):
    device = mock.Mock(platform='abacus')
    device.addressable_memories.return_value = [mock.Mock(kind='beads')]
    mesh = mock.Mock(devices=np.array([device]))
    with self.assertRaisesRegex(
        UserError, r"^[^\n]*'pinned_host'[^\n]*abacus has beads[^\n]*'device'$"
    ):
      sharding.check_host_memory(mesh)


class RunTest(absltest.TestCase):

  @pytest.mark.slow
  def test_a_run_that_moves_to_the_host_halfway(self):
    """The numbers are those of a run that stays on the device, and both can use the checkpoint."""
    self.enterContext(tiny_run.on_one_device())
    here, moved = (self.enterContext(tempfile.TemporaryDirectory()) for _ in range(2))
    values = {'algorithm.kl_in': 'reward', 'eval.every': 0, 'train.mini_batch': 16}
    with tiny_run.updates_compiled_ahead():
      loop.start(tiny_run.make_config(**values), here)
    loop.start(tiny_run.make_config(**values, **{'train.updates': 1}), moved)
    config = tiny_run.make_config(**values, **ON_HOST)
    learners = tiny_run.load_learners(config)
    state = learners.state
    self.assertEqual(
        kinds((state.actor_opt, state.critic_opt, state.critic, learners.frozen.reference)),
        {sharding.HOST},
    )
    self.assertEqual(kinds(state.actor), {'device'})
    loop.start(config, moved)
    for ours, theirs in zip(*map(tiny_run.comparable_metrics, (moved, here)), strict=True):
      if ours['step'] != 1 or 'val-core/all/em' not in ours:  # one update ends with an evaluation
        self.assertEqual(ours, theirs)
    chex.assert_trees_all_equal(
        tiny_run.state_after(config, moved, 2), tiny_run.state_after(config, here, 2)
    )


class PlanTest(absltest.TestCase):

  def test_offloaded_bytes_are_counted_on_the_host(self):
    self.enterContext(mock.patch.object(plan, '_programs', return_value=()))  # nothing to compile
    here = plan.make(tiny_run.make_config(**{'algorithm.kl_in': 'reward'})).held
    there = plan.make(tiny_run.make_config(**{'algorithm.kl_in': 'reward', **ON_HOST})).held
    self.assertEqual(there['policy'], here['policy'])
    for name in ('optimizers', 'critic', 'reference policy'):
      self.assertEqual(here[f'{name}, on the host'], (0, 0))
      counts = 4 * 4 if name == 'optimizers' else 0  # AdamW: two counts for each model
      self.assertEqual(there[name], (counts, counts), name)
      self.assertEqual(there[f'{name}, on the host'], tuple(n - counts for n in here[name]))

  @pytest.mark.slow
  def test_adapters_share_a_base(self):
    """One base of policy, critic and reference; what is trained is counted, and moments are of
    that."""
    planned = plan.make(tiny_run.make_config(**{'algorithm.kl_in': 'reward', 'model.lora_rank': 2}))
    trained = planned.num_params['trained']
    adapters = 2 * (
        (16 + 16) + 2 * (16 + 8) + (16 + 16) + 3 * (16 + 32)
    )  # d 16, 2 heads of 8, 1 key head
    self.assertEqual(trained, 2 * adapters + 16 + 1)  # actor and critic, and the value head
    self.assertEqual(planned.held['critic'][0], 4 * (adapters + 16 + 1))
    self.assertEqual(planned.held['optimizers'][0], 4 * (2 * trained + 4))
    self.assertEqual(planned.held['reference policy'], (0, 0))
    self.assertEqual(planned.held['policy'][0], 4 * (planned.num_params['policy'] + adapters))
    update_program = planned.programs[0]
    self.assertEqual(update_program.resident, 0)
    self.assertLess(
        update_program.arguments,
        sum(each for _, each in planned.held.values()) + 16 * 192 * 4 * 12 // 8 + 4096,
    )


if __name__ == '__main__':
  absltest.main()
