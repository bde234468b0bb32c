"""The modes of the command. Each names a function Command -> exit code or None.

The module of a mode is imported when the mode runs, so that a mistake on the command line is
reported before JAX starts.
"""

from collections.abc import Callable
import dataclasses

from stppo_jax import plugins
from stppo_jax.cli.command import Command


@dataclasses.dataclass(frozen=True)
class Mode:
  """A mode, and its use of the command line."""

  function: str  # 'module:function' in the package stppo_jax.cli
  flags: tuple[str, ...] = ()  # flags that other modes reject
  operands: tuple[str, ...] = ()  # names of the words after the mode
  reads_config: bool = True
  reads_run: bool = False  # without --config it uses WORKDIR/config.json
  starts_jax: bool = False  # as one of several processes, or alone
  suffix: str = ''  # what follows the config's name in the default workdir
  stops: bool = False  # it looks at the signal. Other modes end at SIGTERM as any program
  reads: tuple[str, ...] = ()  # sections and settings. Others have no effect; empty: all are read

  def load(self) -> Callable[[Command], int | None]:
    """Imports the function."""
    return plugins.resolve(f'stppo_jax.cli.{self.function}')


# Validation reads the kind of the retriever and the length of an episode, which bounds the buckets.
_SFT_SETTINGS = tuple(
    'name seed data.source data.train_split data.eval_split data.columns env retriever.kind '
    'model.folder model.chat_template_kwargs model.dtype model.param_dtype model.remat '
    'model.scan_layers model.logp_chunk model.attention model.attention_chunk model.lora_rank '
    'model.lora_alpha model.lora_targets rollout.max_observation rollout.max_total '
    'train.micro_batch train.length_buckets train.share_prefixes train.checkpoint_every '
    'train.checkpoint_folder train.on_save_error train.accept_changed_plugins train.deterministic '
    'sft mesh eval.every serve.tool_form'.split()
)

MODES = {
    'train': Mode('training:train', flags=('profile',), starts_jax=True, stops=True),
    'sft': Mode('sft:sft', starts_jax=True, suffix='_sft', stops=True, reads=_SFT_SETTINGS),
    'eval': Mode('policies:evaluate', reads_run=True, starts_jax=True, stops=True),
    'sample': Mode(
        'policies:sample', flags=('batches',), reads_run=True, starts_jax=True, stops=True
    ),
    'export': Mode('policies:export', reads_run=True, starts_jax=True),
    'serve': Mode('serving:serve', flags=('port',), reads_run=True, starts_jax=True, stops=True),
    'env-server': Mode(
        'env_server:serve', flags=('port', 'sessions'), operands=('MODULE:CLASS',), stops=True
    ),
    'chat': Mode('policies:chat', reads_run=True, starts_jax=True),
    'plan': Mode('planning:plan', flags=('topology',)),
    'report': Mode('records:report'),
    'watch': Mode('records:watch', flags=('port',), stops=True),
    'export_atif': Mode('atif:export_atif', flags=('input',)),
    'import_atif': Mode('atif:import_atif', flags=('input', 'retokenize')),
    'new': Mode('texts:new', operands=('NAME',), reads_config=False),
    'doctor': Mode('doctor:doctor', flags=('topology',)),
    'compare': Mode('records:compare', operands=('RUN', 'RUN'), reads_config=False),
    'check-data': Mode('check_data:check_data', operands=('FILE',)),
    'list': Mode('texts:list_all', reads_config=False),
    'completion': Mode('texts:completion', operands=('SHELL',), reads_config=False),
}
