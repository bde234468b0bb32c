"""Modes that convert saved episodes to trajectories of Harbor's format, and back."""

import os

from stppo_jax.assembly import components
from stppo_jax.atif import reader as reader_lib
from stppo_jax.atif import writer as writer_lib
from stppo_jax.cli.command import Command
from stppo_jax.rollout import prepare


def export_atif(command: Command) -> None:
  """Converts saved episodes to trajectories of Harbor's format."""
  config = command.config
  workdir = command.workdir
  source = command.flags.input or os.path.join(workdir, 'episodes')
  folder = os.path.join(workdir, 'atif')
  tokenizer = prepare.load_tokenizer(config)
  form = components.call_form(config, tokenizer.render)
  writer_lib.write_folder(source, folder, tokenizer, config.model.folder, form)
  print(folder)


def import_atif(command: Command) -> None:
  """Converts trajectories of Harbor's format to saved episodes."""
  config = command.config
  source = command.flags.input
  tokenizer = prepare.load_tokenizer(config)
  reader = reader_lib.AtifReader(
      tokenizer,
      components.call_form(config, tokenizer.render),
      config.rollout.max_observation,
      command.flags.retokenize,
      prepare.load_shape(config).vocab_size,
  )
  folder = os.path.join(command.workdir, 'episodes')
  reader_lib.read_folder(source, folder, reader, config.train.episodes)
  print(folder)
