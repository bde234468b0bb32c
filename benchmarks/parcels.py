"""Carries files to a machine without network that receives a limited number of bytes at a time.

  python -m benchmarks.parcels pack --cargo=runs/cargo --out=runs/parcels
  python -m benchmarks.parcels receive runs/parcels/0 --store=runs/gpu/cargo     # on that machine

The machine receives the working tree with each parcel, so a parcel has --limit_mib less the size of
the tree. Small files travel whole, and first. A larger file is cut, and arrives when all of its
pieces have. The parcels may arrive in any order, and more than once. The module needs the standard
library alone.
"""

import argparse
import hashlib
import json
import pathlib
import shutil
import subprocess
import sys
from typing import NamedTuple

ROOT = pathlib.Path(__file__).parent.parent
MIB = 2**20
MARGIN = MIB  # names, folders and the manifests
MANIFEST = 'manifest.json'
# Packages of the GPU machine's image, with all that they need. The list has those that
# requirements.txt names, and those that the wheels of requirements-gpu.txt need.
IMAGE = frozenset(
    'absl-py attrs chex flax hypothesis jax jaxlib jaxtyping jinja2 ml-dtypes numpy opt-einsum '
    'optax orbax-checkpoint packaging protobuf pyarrow pytest pytest-xdist pyyaml requests '
    'safetensors tokenizers tqdm transformers'.split()
)


class Piece(NamedTuple):
  """Bytes `start` to `start + size` of a file."""

  name: str
  start: int
  size: int
  file_size: int
  file_sha256: str

  def parcel_name(self) -> str:
    """Returns the name of the piece in its parcel and among the pieces that wait."""
    return f'{self.name}.{self.start}'


def main() -> None:
  """Packs or receives."""
  parser = argparse.ArgumentParser(description=__doc__.partition('\n')[0])
  commands = parser.add_subparsers(dest='command', required=True)
  packs = commands.add_parser('pack', help='cuts the files of a folder into parcels')
  packs.add_argument('--cargo', type=pathlib.Path, required=True, help='folder with the files')
  packs.add_argument('--out', type=pathlib.Path, required=True, help='folder of the parcels')
  packs.add_argument('--limit_mib', type=float, default=64, help='of a parcel and the working tree')
  receives = commands.add_parser('receive', help='takes in a parcel')
  receives.add_argument('parcel', type=pathlib.Path)
  receives.add_argument('--store', type=pathlib.Path, required=True, help='folder for the files')
  args = parser.parse_args()
  try:
    if args.command == 'pack':
      room = int(args.limit_mib * MIB) - tree_bytes() - MARGIN
      number = pack(args.cargo, args.out, room)
      print(f'{number} parcels of at most {room / MIB:.1f} MiB in {args.out}')
    else:
      missing = receive(args.parcel, args.store)
      print(f'not complete yet: {", ".join(missing)}' if missing else 'all files are complete')
  except (OSError, ValueError) as error:
    sys.exit(f'parcels: {error}')


def tree_bytes() -> int:
  """Returns the size of the files that travel with each parcel: tracked, or not ignored."""
  command = ['git', '-C', str(ROOT), 'ls-files', '-z', '--cached', '--others', '--exclude-standard']
  names = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split('\0')
  paths = [ROOT / name for name in names if name]
  return sum(path.stat().st_size for path in paths if path.is_file())


def pack(cargo: pathlib.Path, out: pathlib.Path, room: int) -> int:
  """Writes the files of `cargo` to the folders 0, 1, .. of `out`; returns their number.

  Raises:
    ValueError: there is no room, `out` exists, or `cargo` has no file or something else.
  """
  paths = sorted(cargo.iterdir(), key=_size)
  if not paths:
    raise ValueError(f'{cargo} has no file: put the wheels and the model there')
  for path in paths:
    if not path.is_file() or not _size(path):
      raise ValueError(f'{path} is a folder or empty: only files with content travel')
  if out.exists():
    raise ValueError(f'{out} is there already: delete it, or give another --out')
  if room < MIB:
    raise ValueError('the working tree leaves less than 1 MiB: raise --limit_mib or ignore files')
  parcels: list[list[Piece]] = [[]]
  left = room
  for path in paths:
    size = _size(path)
    digest = _digest(path)
    start = 0
    while start < size:
      if not left:
        parcels.append([])
        left = room
      length = min(left, size - start)
      parcels[-1].append(Piece(path.name, start, length, size, digest))
      start += length
      left -= length
  for number, pieces in enumerate(parcels):
    folder = out / str(number)
    folder.mkdir(parents=True)
    for piece in pieces:
      with (cargo / piece.name).open('rb') as file:
        file.seek(piece.start)
        (folder / piece.parcel_name()).write_bytes(file.read(piece.size))
    manifest = [piece._asdict() for piece in pieces]
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1), encoding='utf-8')
  return len(parcels)


def receive(parcel: pathlib.Path, store: pathlib.Path) -> list[str]:
  """Takes a parcel into `store`; returns the names of the files of which pieces are missing.

  Raises:
    ValueError: the parcel has no manifest, or a file is not the one that was packed. Its pieces
      are deleted then.
  """
  if not (parcel / MANIFEST).is_file():
    raise ValueError(f'{parcel} is no parcel: it has no {MANIFEST}')
  waiting = store / 'pieces'
  waiting.mkdir(parents=True, exist_ok=True)
  for fields in json.loads((parcel / MANIFEST).read_text(encoding='utf-8')):
    piece = Piece(**fields)
    path = store / piece.name
    if path.is_file() and _digest(path) == piece.file_sha256:
      continue
    shutil.copyfile(parcel / piece.parcel_name(), waiting / piece.parcel_name())
    starts = sorted(_starts(waiting, piece.name))
    arrived = [waiting / f'{piece.name}.{start}' for start in starts]
    if sum(_size(part) for part in arrived) < piece.file_size:
      continue
    joined = store / f'.{piece.name}'
    with joined.open('wb') as file:
      for part in arrived:
        file.write(part.read_bytes())
        part.unlink()
    if _digest(joined) != piece.file_sha256:
      joined.unlink()
      raise ValueError(f'{piece.name} differs from the file that was packed: send it again')
    joined.rename(path)
  return sorted({path.name.rpartition('.')[0] for path in waiting.iterdir()})


def _starts(waiting: pathlib.Path, name: str) -> list[int]:
  """Returns where the pieces of a file begin that have arrived."""
  names = [path.name for path in waiting.iterdir() if path.name.startswith(f'{name}.')]
  starts = [own.removeprefix(f'{name}.') for own in names]
  return [int(start) for start in starts if start.isdecimal()]


def _size(path: pathlib.Path) -> int:
  return path.stat().st_size


def _digest(path: pathlib.Path) -> str:
  with path.open('rb') as file:
    return hashlib.file_digest(file, 'sha256').hexdigest()


if __name__ == '__main__':
  main()
