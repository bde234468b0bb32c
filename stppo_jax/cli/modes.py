"""The modes of the command. Each is a function (config, workdir, flags) -> exit code or None.

Heavy modules are imported inside the functions, so that a mistake on the command line is reported
before JAX starts.
"""

from collections.abc import Callable
import dataclasses
import os

from absl import logging

from stppo_jax.cli import signals
from stppo_jax.cli.flags import Flags
from stppo_jax.config import Config


def train(config: Config, workdir: str, flags: Flags) -> None:
  """Trains, or resumes the run in the workdir."""
  from stppo_jax.training import loop

  with signals.handled() as stop_requested:
    loop.start(config, workdir, stop_requested, flags.profile)


def evaluate(config: Config, workdir: str, flags: Flags) -> None:
  """Scores a checkpoint, or the model at an address, on the held-out questions."""
  del flags
  import jax

  from stppo_jax.evaluation import job

  if config.eval.address:
    jax.config.update('jax_platforms', 'cpu')  # leaves the accelerator to the server
  with signals.handled() as stop_requested:
    results = job.evaluate(config, workdir, stop_requested)
  if results is not None:
    print(results.table)
    logging.info('episodes and results are in %s', results.folder)


def sample(config: Config, workdir: str, flags: Flags) -> None:
  """Plays episodes and trains on none."""
  from stppo_jax.evaluation import sample as sample_lib

  with signals.handled() as stop_requested:
    print(sample_lib.sample(config, workdir, flags.batches, stop_requested))


def export(config: Config, workdir: str, flags: Flags) -> None:
  """Writes a checkpoint in Hugging Face format."""
  del flags
  from stppo_jax.evaluation import policy as policy_lib

  print(policy_lib.export(config, workdir))


def serve(config: Config, workdir: str, flags: Flags) -> None:
  """Serves a checkpoint with an OpenAI-compatible interface."""
  from stppo_jax.evaluation import policy as policy_lib
  from stppo_jax.serving import gateway

  with signals.handled() as stop_requested:
    policy = policy_lib.policy(config, workdir)
    gateway.serve(
        config, policy.model, policy.params, policy.description, flags.port, stop_requested
    )


def chat(config: Config, workdir: str, flags: Flags) -> None:
  """Answers questions in the terminal, and shows the searches."""
  del flags
  from stppo_jax.evaluation import chat as chat_lib
  from stppo_jax.evaluation import policy as policy_lib

  policy = policy_lib.policy(config, workdir)
  chat_lib.chat(config, policy.model, policy.params, policy.description)


def plan(config: Config, workdir: str, flags: Flags) -> int:
  """Estimates memory and time on devices that need not be present."""
  del workdir
  import jax

  if flags.topology:
    # Leaves accelerators free. Programs for absent devices cannot be cached.
    jax.config.update('jax_platforms', 'cpu')
    jax.config.update('jax_enable_compilation_cache', False)
  from stppo_jax.planning import plan as plan_lib
  from stppo_jax.planning import table

  planned = plan_lib.make(config, flags.topology)
  print(table.text(planned))
  return 0 if planned.fits else 1


def report(config: Config, workdir: str, flags: Flags) -> None:
  """Writes report.html again."""
  del config, flags
  from stppo_jax.monitoring import report as report_lib

  print(report_lib.build(workdir))


def watch(config: Config, workdir: str, flags: Flags) -> None:
  """Shows a run, or a folder of runs, in a browser while they train."""
  del config
  from stppo_jax.monitoring import viewer

  with signals.handled() as stop_requested:
    viewer.serve(workdir, flags.port, stop_requested)


def export_atif(config: Config, workdir: str, flags: Flags) -> None:
  """Converts saved episodes to trajectories of Harbor's format."""
  from stppo_jax.rollout import prepare
  from stppo_jax.trajectories import atif_writer

  source = flags.input or os.path.join(workdir, 'episodes')
  folder = os.path.join(workdir, 'atif')
  tokenizer = prepare.load_tokenizer(config)
  atif_writer.write_folder(source, folder, tokenizer, config.model.folder)
  print(folder)


def import_atif(config: Config, workdir: str, flags: Flags) -> None:
  """Converts trajectories of Harbor's format to saved episodes."""
  from stppo_jax.rollout import prepare
  from stppo_jax.trajectories import atif_reader

  reader = atif_reader.AtifReader(
      prepare.load_tokenizer(config),
      config.serve.tool_form,
      config.rollout.max_observation,
      flags.retokenize,
  )
  folder = os.path.join(workdir, 'episodes')
  atif_reader.read_folder(flags.input, folder, reader, config.train.episodes)
  print(folder)


@dataclasses.dataclass(frozen=True)
class Mode:
  """A mode, and its use of the command line."""

  run: Callable[[Config, str, Flags], int | None]
  flags: tuple[str, ...] = ()  # flags that other modes reject
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
}
