"""Modes that convert saved episodes to trajectories of Harbor's format, and back."""

import os

from stppo_jax.cli.modes import Command
from stppo_jax.envs import tool_calls
from stppo_jax.rollout import prepare
from stppo_jax.trajectories import atif_reader
from stppo_jax.trajectories import atif_writer


def export_atif(command: Command) -> None:
  """Converts saved episodes to trajectories of Harbor's format."""
  config = command.config
  workdir = command.workdir
  source = command.flags.input or os.path.join(workdir, 'episodes')
  folder = os.path.join(workdir, 'atif')
  tokenizer = prepare.load_tokenizer(config)
  form = tool_calls.form_name(config.serve.tool_form, tokenizer.render)
  atif_writer.write_folder(source, folder, tokenizer, config.model.folder, form)
  print(folder)


def import_atif(command: Command) -> None:
  """Converts trajectories of Harbor's format to saved episodes."""
  config = command.config
  source = command.flags.input
  tokenizer = prepare.load_tokenizer(config)
  reader = atif_reader.AtifReader(
      tokenizer,
      tool_calls.form_name(config.serve.tool_form, tokenizer.render),
      config.rollout.max_observation,
      command.flags.retokenize,
      prepare.load_shape(config).vocab_size,
  )
  folder = os.path.join(command.workdir, 'episodes')
  atif_reader.read_folder(source, folder, reader, config.train.episodes)
  print(folder)
