"""The mode that plans a run on devices."""

import jax

from stppo_jax.assembly import components
from stppo_jax.cli.command import Command
from stppo_jax.planning import plan as plan_lib
from stppo_jax.planning import table


def plan(command: Command) -> int:
  """Estimates memory and time on devices that need not be present."""
  topology = command.flags.topology
  if topology:
    # Leaves accelerators free. Programs for absent devices cannot be cached.
    jax.config.update('jax_platforms', 'cpu')
    jax.config.update('jax_enable_compilation_cache', False)
  env = components.resolve(command.config).env
  planned = plan_lib.make(command.config, topology, rows_per_episode=env.rows_per_episode)
  print(table.text(planned))
  return 0 if planned.fits else 1
