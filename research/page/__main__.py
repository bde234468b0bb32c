"""Writes the pages of a study from its results.

python -m research.page --config=research/study_stability.py
"""

import argparse
import sys

from research.page import build
from stppo_jax.types import UserError


def main() -> int:
  """Reads the command line and writes the pages."""
  parser = argparse.ArgumentParser(prog='python -m research.page')
  parser.add_argument('--config', required=True, help='FILE or FILE:MODE with a get_study function')
  parser.add_argument('--workdir', default='', help='folder of a study that names no other')
  args = parser.parse_args()
  try:
    print(build.write_pages(args.config, args.workdir))
  except UserError as error:
    print(f'{parser.prog}: {error}', file=sys.stderr)
    return 2
  return 0


if __name__ == '__main__':
  sys.exit(main())
