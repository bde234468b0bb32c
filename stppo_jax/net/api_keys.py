"""Keys of servers, from environment variables."""

import os
import re

from stppo_jax import types

_VISIBLE_ASCII = re.compile('[!-~]*')  # what a header takes; libraries show others in their errors


def read(name: str) -> str:
  """Returns the key in an environment variable, without the white space around it; '': none.

  Raises UserError, without the key, if a header cannot hold it.
  """
  key = os.environ.get(name, '').strip()
  if not _VISIBLE_ASCII.fullmatch(key):
    raise types.UserError(
        f'the environment variable {name} has white space or other characters in its middle that '
        'no key has: set it to the key alone'
    )
  return key
