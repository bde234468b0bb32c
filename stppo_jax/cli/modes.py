"""The modes of the command. Each is a function Command -> exit code or None.

Heavy modules are imported inside the functions, so that a mistake on the command line is reported
before JAX starts.
"""

from collections.abc import Callable
from collections.abc import Sequence
import contextlib
import dataclasses
import functools
import os
import sys
from typing import NamedTuple

from absl import logging

from stppo_jax.cli import signals
from stppo_jax.cli.flags import Flags
from stppo_jax.config import Config


class Command(NamedTuple):
  """What the user has asked for."""

  config: Config  # the defaults, for modes without a config
  workdir: str
  flags: Flags
  operands: Sequence[str]  # words after the mode


def show(text: str) -> None:
  """Prints a long text, of which `| head` may read a part."""
  try:
    print(text, flush=True)
  except BrokenPipeError:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the flush at exit


def train(command: Command) -> None:
  """Trains, or resumes the run in the workdir."""
  from stppo_jax.training import loop

  with signals.handled() as stop_requested:
    loop.start(command.config, command.workdir, stop_requested, command.flags.profile)


def evaluate(command: Command) -> None:
  """Scores a checkpoint, or the model at an address, on the held-out questions."""
  import jax

  from stppo_jax.evaluation import job

  if command.config.eval.address:
    jax.config.update('jax_platforms', 'cpu')  # leaves the accelerator to the server
  with signals.handled() as stop_requested:
    results = job.evaluate(command.config, command.workdir, stop_requested)
  if results is not None:
    print(results.table)
    logging.info('episodes and results are in %s', results.folder)


def sample(command: Command) -> None:
  """Plays episodes and trains on none."""
  from stppo_jax.evaluation import sample as sample_lib

  batches = command.flags.batches
  with signals.handled() as stop_requested:
    print(sample_lib.sample(command.config, command.workdir, batches, stop_requested))


def export(command: Command) -> None:
  """Writes a checkpoint in Hugging Face format."""
  from stppo_jax.evaluation import policy as policy_lib

  print(policy_lib.export(command.config, command.workdir))


def serve(command: Command) -> None:
  """Serves a checkpoint with an OpenAI-compatible interface."""
  from stppo_jax.evaluation import policy as policy_lib
  from stppo_jax.serving import gateway

  load = functools.partial(policy_lib.policy, command.config, command.workdir)
  with signals.handled() as stop_requested:
    gateway.serve(command.config, load, command.flags.port, stop_requested)


def chat(command: Command) -> None:
  """Answers questions in the terminal, and shows the searches."""
  from stppo_jax.evaluation import chat as chat_lib
  from stppo_jax.evaluation import policy as policy_lib

  policy = policy_lib.policy(command.config, command.workdir)
  chat_lib.chat(command.config, policy.model, policy.params, policy.description)


def plan(command: Command) -> int:
  """Estimates memory and time on devices that need not be present."""
  import jax

  topology = command.flags.topology
  if topology:
    # Leaves accelerators free. Programs for absent devices cannot be cached.
    jax.config.update('jax_platforms', 'cpu')
    jax.config.update('jax_enable_compilation_cache', False)
  from stppo_jax.planning import plan as plan_lib
  from stppo_jax.planning import table

  planned = plan_lib.make(command.config, topology)
  print(table.text(planned))
  return 0 if planned.fits else 1


def report(command: Command) -> None:
  """Writes report.html again."""
  from stppo_jax.monitoring import report as report_lib

  print(report_lib.build(command.workdir))


def watch(command: Command) -> None:
  """Shows a run, or a folder of runs, in a browser while they train."""
  from stppo_jax.monitoring import viewer

  with signals.handled() as stop_requested, contextlib.suppress(KeyboardInterrupt):
    viewer.serve(command.workdir, command.flags.port, stop_requested)


def export_atif(command: Command) -> None:
  """Converts saved episodes to trajectories of Harbor's format."""
  from stppo_jax.rollout import prepare
  from stppo_jax.trajectories import atif_writer

  source = command.flags.input or os.path.join(command.workdir, 'episodes')
  folder = os.path.join(command.workdir, 'atif')
  config = command.config
  tokenizer = prepare.load_tokenizer(config)
  atif_writer.write_folder(source, folder, tokenizer, config.model.folder, config.serve.tool_form)
  print(folder)


def import_atif(command: Command) -> None:
  """Converts trajectories of Harbor's format to saved episodes."""
  from stppo_jax.rollout import prepare
  from stppo_jax.trajectories import atif_reader

  config = command.config
  reader = atif_reader.AtifReader(
      prepare.load_tokenizer(config),
      config.serve.tool_form,
      config.rollout.max_observation,
      command.flags.retokenize,
  )
  folder = os.path.join(command.workdir, 'episodes')
  atif_reader.read_folder(command.flags.input, folder, reader, config.train.episodes)
  print(folder)


def new(command: Command) -> None:
  """Makes a folder NAME with an environment, a config, a test and a README."""
  from stppo_jax.cli import new as new_lib

  print(new_lib.make(command.operands[0]))


def doctor(command: Command) -> int:
  """Shows devices, packages, what is missing, and whether the run of the config fits."""
  from stppo_jax.cli import doctor as doctor_lib

  return doctor_lib.check(command.config, command.flags.topology)


def compare(command: Command) -> None:
  """Compares the configs and the held-out scores of two runs, or of two evaluation folders."""
  from stppo_jax.cli import compare as compare_lib

  show(compare_lib.text(*command.operands))


def list_all(command: Command) -> None:
  """Lists experiments and algorithms."""
  del command
  from stppo_jax.cli import help as help_lib

  show(help_lib.catalogue())


def completion(command: Command) -> None:
  """Prints the completion for a SHELL: bash or zsh."""
  from stppo_jax.cli import help as help_lib

  show(help_lib.completion(command.operands[0]))


@dataclasses.dataclass(frozen=True)
class Mode:
  """A mode, and its use of the command line."""

  run: Callable[[Command], int | None]
  flags: tuple[str, ...] = ()  # flags that other modes reject
  operands: tuple[str, ...] = ()  # names of the words after the mode
  reads_config: bool = True
  reads_run: bool = False  # without --config it uses WORKDIR/config.json
  one_process: bool = False


MODES = {
    'train': Mode(train, flags=('profile',)),
    'eval': Mode(evaluate, reads_run=True),
    'sample': Mode(sample, flags=('batches',), reads_run=True),
    'export': Mode(export, reads_run=True),
    'serve': Mode(serve, flags=('port',), reads_run=True),
    'chat': Mode(chat, reads_run=True),
    'plan': Mode(plan, flags=('topology',), one_process=True),
    'report': Mode(report, one_process=True),
    'watch': Mode(watch, flags=('port',), one_process=True),
    'export_atif': Mode(export_atif, flags=('input',), one_process=True),
    'import_atif': Mode(import_atif, flags=('input', 'retokenize'), one_process=True),
    'new': Mode(new, operands=('NAME',), reads_config=False, one_process=True),
    'doctor': Mode(doctor, flags=('topology',), one_process=True),
    'compare': Mode(compare, operands=('RUN', 'RUN'), reads_config=False, one_process=True),
    'list': Mode(list_all, reads_config=False, one_process=True),
    'completion': Mode(completion, operands=('SHELL',), reads_config=False, one_process=True),
}
