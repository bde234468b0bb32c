"""The modes of the command. Each is a function Command -> exit code or None.

Heavy modules are imported inside the functions, so that a mistake on the command line is reported
before JAX starts.
"""

from collections.abc import Callable
from collections.abc import Sequence
import contextlib
import dataclasses
import os
import sys
from typing import NamedTuple

from absl import logging

from stppo_jax.cli.flags import Flags
from stppo_jax.config import Config
from stppo_jax.stop_signal import StopSignal


class Command(NamedTuple):
  """What the user has asked for."""

  config: Config  # the defaults, for modes without a config
  workdir: str
  flags: Flags
  operands: Sequence[str]  # words after the mode
  stop_signal: StopSignal  # see signals.handled


def show(text: str) -> None:
  """Prints a long text, of which `| head` may read a part."""
  try:
    print(text, flush=True)
  except BrokenPipeError:
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, sys.stdout.fileno())  # for the flush at exit


def train(command: Command) -> None:
  """Trains, or resumes the run in the workdir."""
  from stppo_jax.training import loop

  profile = command.flags.profile
  loop.start(command.config, command.workdir, command.stop_signal, profile)


def sft(command: Command) -> None:
  """Trains the model on conversations, and writes WORKDIR/model, from which a run may start."""
  from stppo_jax.training import imitation

  print(imitation.start(command.config, command.workdir, command.stop_signal))


def evaluate(command: Command) -> None:
  """Scores a checkpoint, or the model at an address, on the held-out questions."""
  import jax

  from stppo_jax.evaluation import job

  config = command.config
  if config.eval.address:
    jax.config.update('jax_platforms', 'cpu')  # leaves the accelerator to the server
  results = job.evaluate(config, command.workdir, command.stop_signal)
  if results is not None:
    print(results.table)
    logging.info('episodes and results are in %s', results.folder)


def sample(command: Command) -> None:
  """Plays episodes and trains on none."""
  from stppo_jax.evaluation import sample as sample_lib

  batches = command.flags.batches
  text = sample_lib.sample(command.config, command.workdir, batches, command.stop_signal)
  print(text)


def export(command: Command) -> None:
  """Writes a checkpoint in Hugging Face format."""
  from stppo_jax.evaluation import policy as policy_lib

  print(policy_lib.export(command.config, command.workdir))


def serve(command: Command) -> None:
  """Serves a checkpoint with an OpenAI-compatible interface."""
  from stppo_jax.evaluation import policy as policy_lib
  from stppo_jax.serving import gateway

  config = command.config
  port = command.flags.port
  load = lambda: policy_lib.policy(config, command.workdir)
  gateway.serve(config, load, port, command.stop_signal)


def chat(command: Command) -> None:
  """Answers questions in the terminal, and shows the searches."""
  from stppo_jax.evaluation import chat as chat_lib
  from stppo_jax.evaluation import policy as policy_lib

  config = command.config
  policy = policy_lib.policy(config, command.workdir)
  chat_lib.chat(config, policy.model, policy.params, policy.description)


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

  with contextlib.suppress(KeyboardInterrupt):
    viewer.serve(command.workdir, command.flags.port, command.stop_signal)


def export_atif(command: Command) -> None:
  """Converts saved episodes to trajectories of Harbor's format."""
  from stppo_jax.envs import tool_calls
  from stppo_jax.rollout import prepare
  from stppo_jax.trajectories import atif_writer

  config = command.config
  workdir = command.workdir
  source = command.flags.input or os.path.join(workdir, 'episodes')
  folder = os.path.join(workdir, 'atif')
  tokenizer = prepare.load_tokenizer(config)
  form = tool_calls.form_name(config.serve.tool_form, tokenizer.template)
  atif_writer.write_folder(source, folder, tokenizer, config.model.folder, form)
  print(folder)


def import_atif(command: Command) -> None:
  """Converts trajectories of Harbor's format to saved episodes."""
  from stppo_jax.envs import tool_calls
  from stppo_jax.rollout import prepare
  from stppo_jax.trajectories import atif_reader

  config = command.config
  source = command.flags.input
  tokenizer = prepare.load_tokenizer(config)
  reader = atif_reader.AtifReader(
      tokenizer,
      tool_calls.form_name(config.serve.tool_form, tokenizer.template),
      config.rollout.max_observation,
      command.flags.retokenize,
      prepare.load_shape(config).vocab_size,
  )
  folder = os.path.join(command.workdir, 'episodes')
  atif_reader.read_folder(source, folder, reader, config.train.episodes)
  print(folder)


def new(command: Command) -> None:
  """Makes a folder NAME with an environment, a config, a test and a README."""
  from stppo_jax.cli import new as new_lib

  (name,) = command.operands
  print(new_lib.make(name))


def doctor(command: Command) -> int:
  """Shows devices, packages, what is missing, and whether the run of the config fits."""
  from stppo_jax.cli import doctor as doctor_lib

  return doctor_lib.check(command.config, command.flags.topology)


def compare(command: Command) -> None:
  """Compares the configs and the held-out scores of two runs, or of two evaluation folders."""
  from stppo_jax.cli import compare as compare_lib

  first, second = command.operands
  show(compare_lib.text(first, second))


def list_all(command: Command) -> None:
  """Lists experiments and algorithms."""
  del command
  from stppo_jax.cli import help as help_lib

  show(help_lib.catalogue())


def completion(command: Command) -> None:
  """Prints the completion for a SHELL: bash or zsh."""
  from stppo_jax.cli import help as help_lib

  (shell,) = command.operands
  show(help_lib.completion(shell, [*MODES]))


@dataclasses.dataclass(frozen=True)
class Mode:
  """A mode, and its use of the command line."""

  run: Callable[[Command], int | None]
  flags: tuple[str, ...] = ()  # flags that other modes reject
  operands: tuple[str, ...] = ()  # names of the words after the mode
  reads_config: bool = True
  reads_run: bool = False  # without --config it uses WORKDIR/config.json
  starts_jax: bool = False  # as one of several processes, or alone
  suffix: str = ''  # what follows the config's name in the default workdir
  stops: bool = False  # it looks at the signal. Other modes end at SIGTERM as any program


MODES = {
    'train': Mode(train, flags=('profile',), starts_jax=True, stops=True),
    'sft': Mode(sft, starts_jax=True, suffix='_sft', stops=True),
    'eval': Mode(evaluate, reads_run=True, starts_jax=True, stops=True),
    'sample': Mode(sample, flags=('batches',), reads_run=True, starts_jax=True, stops=True),
    'export': Mode(export, reads_run=True, starts_jax=True),
    'serve': Mode(serve, flags=('port',), reads_run=True, starts_jax=True, stops=True),
    'chat': Mode(chat, reads_run=True, starts_jax=True),
    'plan': Mode(plan, flags=('topology',)),
    'report': Mode(report),
    'watch': Mode(watch, flags=('port',), stops=True),
    'export_atif': Mode(export_atif, flags=('input',)),
    'import_atif': Mode(import_atif, flags=('input', 'retokenize')),
    'new': Mode(new, operands=('NAME',), reads_config=False),
    'doctor': Mode(doctor, flags=('topology',)),
    'compare': Mode(compare, operands=('RUN', 'RUN'), reads_config=False),
    'list': Mode(list_all, reads_config=False),
    'completion': Mode(completion, operands=('SHELL',), reads_config=False),
}
