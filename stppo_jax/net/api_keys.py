"""Keys of servers, from environment variables."""

import os
import re

from stppo_jax import types

_PRINTED_ASCII = re.compile('[ -~]*')  # what a header takes; libraries show others in their errors


def read(name: str) -> str:
  """Returns the key in an environment variable, without the white space around it; '': none.

  Raises UserError, without the key, if a header cannot hold it.
  """
  key = os.environ.get(name, '').strip()
  if not _PRINTED_ASCII.fullmatch(key):
    raise types.UserError(
        f'the environment variable {name} has a line break or another character that no header of '
        'HTTP holds: set it to the key alone, in ASCII'
    )
  return key
