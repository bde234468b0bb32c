"""What plays the episodes of a config: an environment's agent, or an agent program's."""

import jax

from stppo_jax.config import Config
from stppo_jax.envs import program
from stppo_jax.models import decoder
from stppo_jax.rollout import agent as agent_lib
from stppo_jax.rollout import prepare


def make_agent(
    config: Config,
    model: decoder.ModelConfig,
    mesh: jax.sharding.Mesh | None = None,
    prepared: prepare.Prepared | None = None,
) -> agent_lib.Agent:
  """Builds the agent that plays the episodes of a config.

  The agent steps an environment, or it runs an agent program that talks to the gateway.
  """
  prepared = prepared or prepare.prepare(config)
  if isinstance(prepared.env.make, program.Program):
    from stppo_jax.serving import rollouts  # the gateway, for agent programs only

    return rollouts.make_agent(config, model, mesh, prepared)
  return agent_lib.make_agent(config, model, mesh, prepared)
