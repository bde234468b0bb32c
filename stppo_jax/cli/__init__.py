"""The command: `main` is what run.py and the installed `stppo` call.

entry.py        reads the arguments (flags.py), starts JAX, runs a mode, reports errors in one line
command.py      what a mode reads: config, flags, signal
modes.py        the modes, which are in the files below
training.py     trains; sft.py imitates conversations
policies.py     plays with a checkpoint, or writes it; serving.py serves it
planning.py     plans a run
records.py      reads what runs have written, with compare.py; atif.py converts it
check_data.py   shows how a file is read
doctor.py       shows what this machine can do
env_server.py   serves an environment
texts.py        prints texts (help.py); new.py makes a first folder
config_file.py  the config of a command; saved_config.py is that of a run's folder
signals.py      what SIGTERM and Ctrl-C do
doc_pages.py    the pages that explain an error
"""

import sys

from stppo_jax import requirements
from stppo_jax.distributed import malloc


def main() -> None:
  """Runs the command."""
  malloc.restart()
  try:
    from stppo_jax.cli import entry  # imports JAX, which takes a second: not before the restart
  except ModuleNotFoundError as error:
    if str(error.name).startswith('stppo_jax'):
      raise
    sys.exit(f'{error}: {requirements.install_command("")}')
  entry.main()
