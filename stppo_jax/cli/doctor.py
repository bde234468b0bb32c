"""Shows whether this machine can run the package: devices, packages, and the plan of a run."""

import platform

from stppo_jax import requirements
from stppo_jax.cli.command import Command
from stppo_jax.config import Config


def doctor(command: Command) -> int:
  """Shows devices, packages, what is missing, and whether the run of the config fits."""
  return check(command.config, command.flags.topology)


def check(config: Config, topology: str) -> int:
  """Prints the state of this machine. Returns 1 if something is missing or the run does not fit."""
  print(f'stppo_jax {requirements.own_version()}, Python {platform.python_version()}')
  text, is_complete = packages_text()
  print(text)
  if not is_complete:
    return 1

  import jax

  from stppo_jax.assembly import components
  from stppo_jax.planning import plan as plan_lib
  from stppo_jax.planning import table
  from stppo_jax.planning import topologies

  devices, chip = topologies.devices_of('')
  print(f'\ndevices: {len(devices)} x {chip.name}, {chip.memory / topologies.GIB:.1f} GiB each')
  print(f'does {config.name} fit? The plan compiles its programs.', flush=True)
  if topology:
    jax.config.update('jax_enable_compilation_cache', False)
  rows_per_episode = components.resolve(config).env.rows_per_episode
  planned = plan_lib.make(config, topology, rows_per_episode=rows_per_episode)
  print(table.verdict(planned))
  return 0 if planned.fits else 1


def packages_text() -> tuple[str, bool]:
  """Returns the table of packages, and whether those that every run needs are installed."""
  groups = requirements.groups()
  lines = [f'{"":24}{"installed":16}tested']
  for package in [requirements.python(), *groups['']]:
    state = requirements.state(package)
    lines.append(
        f'{package.name:24}{package.installed or "missing":16}{package.tested}  {state}'.rstrip()
    )
  is_complete = all(package.installed for package in groups[''])
  for extra, packages in groups.items():
    title = f'extra {extra}' if extra else 'every run'
    names = [package.name for package in packages if not package.is_tested]
    state = 'complete'
    if names:
      command = requirements.install_command(extra)
      state = f'missing, or not in the tested range: {", ".join(names)}: {command}'
    lines.append(f'{title:24}{state}')
  return '\n'.join(lines), is_complete
