"""The addresses of the engines of a run, which may change during the run.

http://HOST:PORT   an engine
dns://NAME:PORT    an engine at each address of a name, such as that of a headless service
file:PATH          an engine per line of a file; an empty line or one that begins with # is none
"""

import socket
import urllib.parse

# A name without addresses: no engine is up yet, or none is left.
_NO_ADDRESS = (socket.EAI_NONAME, getattr(socket, 'EAI_NODATA', socket.EAI_NONAME))


def _parts(setting):
  return [part.strip() for part in setting.split(',')]


def _is_address(text):
  place = urllib.parse.urlsplit(text)
  return place.scheme in ('http', 'https') and bool(place.hostname)


def is_fixed(setting: str) -> bool:
  """Whether all engines are given by their addresses."""
  return all(_is_address(part) for part in _parts(setting))


def addresses(setting: str) -> list[str]:
  """Returns the addresses that `rollout.engine` means now, each once.

  Raises OSError where a name server or a file does not answer, and ValueError for a line of a file
  that is no address.
  """
  found: list[str] = []
  for part in _parts(setting):
    place = urllib.parse.urlsplit(part)
    if place.scheme == 'dns':
      found += _of_name(place.hostname, place.port)
    elif place.scheme == 'file':
      found += _of_file(part.partition(':')[2])
    else:
      found.append(part)
  plain = [address.rstrip('/').removesuffix('/v1') for address in found]
  return list(dict.fromkeys(plain))


def _of_name(name, port):
  try:
    infos = socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)
  except socket.gaierror as error:
    if error.errno in _NO_ADDRESS:
      return []
    raise
  hosts = {str(info[4][0]) for info in infos}
  return [
      f'http://[{host}]:{port}' if ':' in host else f'http://{host}:{port}'
      for host in sorted(hosts)
  ]


def _of_file(path):
  with open(path, encoding='utf-8') as file:
    lines = [line.strip() for line in file]
  found = [line for line in lines if line and not line.startswith('#')]
  for line in found:
    if not _is_address(line):
      raise ValueError(f'{path}: {line!r} is no http://HOST:PORT')
  return found
