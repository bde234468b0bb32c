"""The rules of folders that may be outside of WORKDIR."""

import re

from stppo_jax.config import Config
from stppo_jax.types import UserError

_ADDRESS = r'[A-Za-z][A-Za-z0-9+.-]*:/'
_BUCKET = r'gs://[a-z0-9][a-z0-9._-]+(/.*)?'


def check(config: Config) -> None:
  """Checks that the folders of checkpoints and of engines are such that somebody can write."""
  folder = config.train.checkpoint_folder
  if re.match(_ADDRESS, folder) and not re.fullmatch(_BUCKET, folder):
    raise UserError(
        f'config.train.checkpoint_folder={folder!r}: Orbax writes buckets of Google Cloud Storage '
        'and paths, and no other object store: give gs://BUCKET/FOLDER, or a folder on a local '
        'disk, NFS, Filestore or Lustre'
    )
  folder = config.rollout.engine_folder
  if re.match(_ADDRESS, folder):
    raise UserError(
        f'config.rollout.engine_folder={folder!r}: engines load new weights from a path: give a '
        'folder that trainer and engines see under the same path, such as one on NFS'
    )
