"""Makes the agent that plays the episodes of a config: an `Agent`, or a subclass of it."""

import jax

from stppo_jax import plugins
from stppo_jax.assembly.components import Components
from stppo_jax.config import Config
from stppo_jax.models import decoder
from stppo_jax.rollout import agent as agent_lib
from stppo_jax.rollout import sampling
from stppo_jax.text import tokenizer as tokenizer_lib

# The modules of these two are imported when a config names an agent program or engines.
_WITH_PROGRAM = 'stppo_jax.serving.rollouts:make_agent'
_WITH_ENGINES = 'stppo_jax.rollout.engines:with_engines'


def make_agent(
    config: Config,
    components: Components,
    model: decoder.ModelConfig,
    mesh: jax.sharding.Mesh | None = None,
) -> agent_lib.Agent:
  """Builds the agent of a policy of shape `model`, on the devices of `mesh`; None: on the first.

  The agent steps an environment, or it runs an agent program that talks to the gateway. This
  process samples the turns, or the engines of config.rollout.engine do.
  """
  if components.env.is_program:
    make = plugins.resolve(_WITH_PROGRAM)
    return make(config, components, model, mesh)
  tokenizer = components.tokenizer
  env = components.env_with_retriever
  stop_table = tokenizer_lib.joint_stop_automaton(tokenizer.token_bytes, env.turn_ends)
  num_policies = len(components.policies)
  sampler = agent_lib.make_sampler(
      config, model, stop_table, tokenizer.eos_ids, mesh, env.rows_per_episode, num_policies
  )
  eval_rows = agent_lib.fitting_episodes(
      config.eval.rows, config, model, mesh, env.rows_per_episode
  )
  eval_rows = sampling.round_up(eval_rows, sampler.width) * env.rows_per_episode
  agent = agent_lib.Agent(
      config=config,
      tokenizer=tokenizer,
      model=model,
      env=env,
      retriever=components.retriever,
      sampler=sampler,
      greedy=sampler.greedy(eval_rows),
  )
  if config.rollout.engine:
    add_engines = plugins.resolve(_WITH_ENGINES)
    return add_engines(agent)
  agent_lib.check_caches(sampler)
  return agent
