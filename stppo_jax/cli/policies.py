"""Modes that play with a checkpoint, or write it."""

from absl import logging
import jax

from stppo_jax.cli.command import Command
from stppo_jax.evaluation import chat as chat_lib
from stppo_jax.evaluation import job
from stppo_jax.evaluation import policy as policy_lib
from stppo_jax.evaluation import sample as sample_lib
from stppo_jax.types import UserError


def evaluate(command: Command) -> None:
  """Scores a checkpoint, or the model at an address, on the held-out questions."""
  config = command.config
  if config.eval.address:
    jax.config.update('jax_platforms', 'cpu')  # leaves the accelerator to the server
  results = job.evaluate(config, command.workdir, command.stop_signal)
  if results is not None:
    print(results.table)
    logging.info('episodes and results are in %s', results.folder)


def sample(command: Command) -> None:
  """Plays episodes and trains on none."""
  batches = command.flags.batches
  text = sample_lib.sample(
      command.config, command.workdir, batches, command.stop_signal, command.names_run
  )
  print(text)


def export(command: Command) -> None:
  """Writes a checkpoint in Hugging Face format."""
  print(policy_lib.export(command.config, command.workdir))


def chat(command: Command) -> None:
  """Answers questions in the terminal, and shows the searches."""
  config = command.config
  if jax.process_count() > 1:  # each would read its own questions, and wait for the other
    raise UserError('chat is for one process: leave out --distributed and --coordinator')
  policy = policy_lib.policy(config, command.workdir, is_run=command.names_run)
  chat_lib.chat(config, policy.model, policy.params, policy.description)
