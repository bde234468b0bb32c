"""Writes the page of a study from its results alone.

python -m research.page --config=research/study_stability.py
"""

import argparse
import sys

from research.study import command
from stppo_jax.types import UserError


def main() -> int:
  """Reads the command line and writes the page."""
  parser = argparse.ArgumentParser(prog='python -m research.page', description=__doc__)
  parser.add_argument('--config', required=True, help='FILE or FILE:MODE with a get_study function')
  parser.add_argument('--workdir', default='', help='folder of a study that names no other')
  args = parser.parse_args()
  try:
    print(command.write_page(args.config, args.workdir))
  except UserError as error:
    print(f'{parser.prog}: {error}', file=sys.stderr)
    return 2
  return 0


if __name__ == '__main__':
  sys.exit(main())
