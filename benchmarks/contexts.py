"""Plans of a run with rows of 65,536 tokens: memory and traffic by the devices that share a row.

  python -m benchmarks.contexts --topology=h100:1x1x8 --contexts=1,4,8 --records=FILE.jsonl
  python -m benchmarks.contexts --records=FILE.jsonl    # prints the table

Each plan compiles the update and the annotation of `st_ppo_qwen3_8b` with its critic, 64 episodes
and an engine that samples. A micro-batch has one row for each group of devices that computes rows.
Needs the extra `plan`. A record is appended for each plan, and all records make the table of
docs/scaling.md. Below it is the line through the temporaries over the tokens of a device: what
is left at 0 tokens are gradients and gathered parameters.
"""

import importlib.metadata
import json
import pathlib

from absl import app
from absl import flags
import jax
import numpy as np

from stppo_jax.cli import config_file
from stppo_jax.cli import flags as flags_lib
from stppo_jax.planning import plan as plan_lib

_TOPOLOGY = flags.DEFINE_string('topology', 'h100:1x1x8', 'devices')
_CONTEXTS = flags.DEFINE_list('contexts', [], 'values of config.mesh.context to plan')
_RECORDS = flags.DEFINE_string('records', 'benchmarks/contexts.jsonl', 'file of records')
ROOT = pathlib.Path(__file__).parent.parent
TOKENS = 65_536
GIB = 2**30


def plan(topology: str, context: int) -> dict[str, object]:
  """Returns the record of a plan."""
  settings = (
      f'mesh.context={context}',
      f'train.length_buckets={TOKENS}',
      f'rollout.max_total={TOKENS}',
      'train.episodes=64',
      'train.mini_batch=64',
      'rollout.engine=http://127.0.0.1:8000',
      'rollout.engine_folder=weights',
  )
  arguments = [f'--config={ROOT}/experiments/st_ppo_qwen3_8b.py']
  arguments += [f'--config.{setting}' for setting in settings]
  config = config_file.load(flags_lib.parse(arguments), reads_run=False)
  planned = plan_lib.make(config, topology)
  update, annotate = planned.programs
  gathered = 0
  for program in (update, annotate):
    sent = [c.bytes for c in program.collectives if c.kind == 'all-gather']
    gathered += program.runs * sum(sent)
  return {
      'topology': topology,
      'context': context,
      'micro_batch': planned.config.train.micro_batch,
      'tokens_per_device': TOKENS // context,
      'temporaries': update.temporaries,
      'peak': max(program.peak for program in planned.programs),
      'memory': planned.chip.memory,
      'fits': planned.fits,
      'gathered': gathered,
      'seconds': planned.update_seconds,
      'jax': importlib.metadata.version('jax'),
  }


def fit(records: list[dict]) -> tuple[float, float]:
  """Returns the line through the temporaries: bytes per token of a device, and the rest."""
  tokens = [r['tokens_per_device'] for r in records]
  slope, rest = np.polyfit(tokens, [r['temporaries'] for r in records], 1)
  return float(slope), float(rest)


def table(records: list[dict]) -> str:
  """Returns the table of records."""
  lines = [
      '| `--topology`, `mesh.context` | temporaries of the update, GiB | most that is used, GiB | '
      'gathered per update, TB per device | seconds per update, at least |',
      '|---|---|---|---|---|',
  ]
  for r in records:
    fits = 'fits' if r['fits'] else 'does not fit'
    gathered = seconds = 'unknown'  # the compiler rejected a program for its size
    if r['seconds']:
      gathered = f'{r["gathered"] / 1e12:.1f}'
      seconds = f'{r["seconds"]:.0f}'
    lines.append(
        f'| `{r["topology"]}`, {r["context"]} | {r["temporaries"] / GIB:.2f} '
        f'| {r["peak"] / GIB:.2f} of {r["memory"] / GIB:.2f}, {fits} | {gathered} '
        f'| {seconds} |'
    )
  for topology in dict.fromkeys(r['topology'] for r in records):
    own = [r for r in records if r['topology'] == topology]
    tokens = [r['tokens_per_device'] for r in own]
    if len(set(tokens)) > 1:
      slope, rest = fit(own)
      lines.append(f'{topology}: {rest / GIB:.2f} GiB and {slope / 2**20:.3f} MiB per token')
  return '\n'.join(lines)


def read(path: str | pathlib.Path) -> list[dict]:
  """Returns the records of a file."""
  return [json.loads(line) for line in pathlib.Path(path).read_text(encoding='utf-8').splitlines()]


def main(unused_argv):
  jax.config.update('jax_platforms', 'cpu')
  jax.config.update('jax_enable_compilation_cache', False)
  for context in map(int, _CONTEXTS.value):
    record = plan(_TOPOLOGY.value, context)
    with open(_RECORDS.value, 'a', encoding='utf-8') as file:
      file.write(json.dumps(record) + '\n')
  print(table(read(_RECORDS.value)))


if __name__ == '__main__':
  app.run(main)
