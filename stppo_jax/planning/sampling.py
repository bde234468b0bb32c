"""The sampling part of a plan: its programs, the bytes held meanwhile, the time of a rollout."""

from typing import Any

import jax.numpy as jnp

from stppo_jax import config as schema
from stppo_jax.planning import roofline
from stppo_jax.rollout import layout

AXES = ('data', 'tensor')


def ahead(plan: Any) -> int:
  """Returns the bytes per device of the copies held for batches that are sampled ahead.

  With staleness s these are the copies of the last s updates: see `pipeline.Pipeline.take`.
  """
  return plan.held_per_device['sampling copy'] * plan.config.pipeline.staleness


def programs(plan: Any, params: Any) -> tuple[tuple, ...]:
  """Returns (name, unit, runs per update, loop trips, bytes held by others, traced) of each."""
  config, held, sampler = plan.config, plan.held_per_device, plan.sampler
  lengths = config.rollout
  traced = sampler.trace(params, lengths.max_total)
  width, prefill_rows = sampler.width, sampler.prefill_rows
  chunk = sampler.chunk_buckets[-1]
  episodes = config.train.episodes
  decodes, prefills = -(-episodes // width), -(-episodes // prefill_rows)  # with full groups
  others = held['critic'] + held['optimizers'] + held['reference policy'] + ahead(plan)
  cache = held['KV cache']  # of all slot groups; one of them is an argument of the program
  other_groups = cache * (sampler.num_groups - 1) // sampler.num_groups
  others_and_policy = others + held['policy']
  observation_chunks = -(-lengths.max_observation // chunk)
  chunks = -(-lengths.max_prompt // chunk) + config.env.max_searches * observation_chunks
  return (
      (
          'copy',
          f'the policy in {plan.sampler.config.dtype}, over {_sampling_mesh(plan)}',
          1,
          1,
          others + cache * bool(config.pipeline.staleness),
          traced['copy'],
      ),
      (
          'prefill',
          f'{chunk} tokens of {prefill_rows} rows',
          prefills * chunks,
          1,
          others_and_policy + (other_groups if sampler.in_place else cache),
          traced['prefill'],
      ),
      (
          'decode',
          f'1 token of {width} rows of {lengths.max_total} slots',
          decodes * tokens_per_episode(config),
          1,
          others_and_policy + other_groups,
          traced['decode'],
      ),
      (
          'grow',
          'the last growth of a KV cache, which copies it',
          decodes * (len(sampler.slot_buckets) - 1),
          1,
          others_and_policy + held['sampling copy'] + other_groups,
          traced['grow'],
      ),
  )


def tokens_per_episode(config: schema.Config) -> int:
  """Returns the number of tokens that an episode samples, at most."""
  rollout = config.rollout
  return min((config.env.max_searches + 1) * rollout.max_turn, rollout.max_total)


def _sampling_mesh(plan):
  parts = (f'{axis} {layout.num_shards(plan.sampler.row_sharding, axis)}' for axis in AXES)
  return ' x '.join(parts)


def token(program: Any, plan: Any) -> roofline.Token:
  """Returns what a decoded token reads and sends; of an untied embedding it reads a few rows."""
  sampler, model = plan.sampler, plan.sampler.config
  weights = plan.held['sampling copy'][1]
  if not model.tie_embeddings:
    parts = layout.num_shards(sampler.row_sharding, 'tensor')
    weights -= model.vocab_size * model.d_model // parts * jnp.dtype(model.dtype).itemsize
  rows_and_slots = sampler.num_groups * sampler.slot_buckets[-1]
  return roofline.Token(
      weights,
      plan.held['KV cache'][1] // rows_and_slots,
      program.flops / plan.mesh.size,
      sum(c.bytes for c in program.collectives),
      sum(c.count for c in program.collectives),
  )


def rollout(plan: Any) -> roofline.Rollout | None:
  """Returns the time of a rollout from its programs' times; None without the chip's figures."""
  found = {program.name: program for program in plan.programs}
  seconds = {name: program.seconds for name, program in found.items()}
  if not plan.chip.flops or not all(seconds.get(name) for name in ('copy', 'prefill', 'decode')):
    return None
  config, lengths = plan.config, plan.config.rollout
  steps = tokens_per_episode(config)
  decode = roofline.decode_seconds(
      plan.token,
      steps,
      max(min(lengths.max_prompt, lengths.max_total - steps), 0),
      lengths.max_total,
      plan.sampler.slot_buckets,
      plan.chip,
  )
  other = sum(found[name].runs * seconds[name] for name in ('copy', 'prefill', 'grow'))
  calls = found['decode'].runs // steps
  return roofline.Rollout(decode * calls, other, config.train.episodes * steps)
