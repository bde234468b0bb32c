"""Runs one cell of the mechanism, all seeds in one program: `python -m research.study.worker DIR`.

DIR/job.json in, DIR/metrics.npz out: arrays [seeds, updates] by the names of metrics.jsonl.
"""

import json
import os
import sys

import numpy as np

JOB, METRICS = 'job.json', 'metrics.npz'


def main(folder: str) -> None:
  """Runs the cell that DIR/job.json describes."""
  os.environ.setdefault('JAX_COMPILATION_CACHE_DIR', os.path.expanduser('~/.cache/stppo_jax'))
  from research.toy import instrument  # here: JAX reads its environment on import

  with open(os.path.join(folder, JOB), encoding='utf-8') as file:
    job = json.load(file)
  metrics = instrument.run(job['overrides'], len(job['seeds']), job['seeds'][0])
  path = os.path.join(folder, METRICS)
  with open(path + '.part', 'wb') as out:
    np.savez_compressed(out, **metrics)  # type: ignore[arg-type]
  os.replace(path + '.part', path)


if __name__ == '__main__':
  main(sys.argv[1])
