"""Runs one method of the toy task, all seeds in one program: `python -m research.toy DIR`.

Reads DIR/job.json and writes DIR/metrics.npz, arrays [seeds, updates] named as in metrics.jsonl.
"""

import json
import os
import sys

import numpy as np


def main(folder: str) -> None:
  """Runs the job of a folder."""
  os.environ.setdefault('JAX_COMPILATION_CACHE_DIR', os.path.expanduser('~/.cache/stppo_jax'))
  from research.toy import training  # JAX reads its environment on import.

  with open(os.path.join(folder, 'job.json'), encoding='utf-8') as file:
    job = json.load(file)
  metrics = training.run(job['overrides'], len(job['seeds']), job['seeds'][0])
  path = os.path.join(folder, 'metrics.npz')
  with open(path + '.part', 'wb') as out:
    np.savez_compressed(out, **metrics)  # type: ignore[arg-type]
  os.replace(path + '.part', path)


if __name__ == '__main__':
  main(sys.argv[1])
