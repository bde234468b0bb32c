"""The packages that this one needs: the tested ranges, and the installed versions.

The module imports no package that may be missing, so that the command can say which one is.
"""

from collections.abc import Iterator
from collections.abc import Mapping
from importlib import metadata
import pathlib
import platform
import re
import tomllib
from typing import NamedTuple

NAME = 'stppo-jax'
_PYPROJECT = pathlib.Path(__file__).parent.parent / 'pyproject.toml'  # in a clone
_DEVELOPMENT = ('dev', 'docs', 'study', 'clients')


class Package(NamedTuple):
  """A required package."""

  name: str
  tested: str  # range of versions
  installed: str  # '': it is missing
  is_tested: bool  # whether the installed version is in the range


def groups() -> dict[str, list[Package]]:
  """Returns {extra: packages}. '' stands for the packages that every run needs."""
  texts = {extra: lines for extra, lines in _texts().items() if extra not in _DEVELOPMENT}
  return {extra: [x for line in lines for x in _packages(line)] for extra, lines in texts.items()}


def install_command(extra: str) -> str:
  """Returns the command that installs the packages of an extra, or for '' those of every run."""
  name = '.' if _PYPROJECT.exists() else NAME
  return f'pip install "{name}[{extra}]"' if extra else f'pip install "{name}"'


def versions() -> dict[str, str]:
  """Returns {package: installed version} of this package and of those that are required."""
  packages = [package for group in groups().values() for package in group]
  return {package.name: package.installed for package in packages if package.installed}


def own_version() -> str:
  """Returns the version of this package."""
  if _PYPROJECT.exists():
    return _project()['version']
  return metadata.version(NAME)


def tested_python() -> str:
  """Returns the range of Python versions that the package is tested with."""
  if _PYPROJECT.exists():
    return _project()['requires-python']
  return metadata.metadata(NAME)['Requires-Python']


def state(package: Package) -> str:
  """Returns what is to be said about an installed version: '' if it is in the tested range."""
  from packaging import specifiers
  from packaging import version

  if package.is_tested:
    return ''
  if not package.installed:
    return 'missing'
  bounds = [bound for bound in specifiers.SpecifierSet(package.tested) if bound.operator == '<']
  if any(version.Version(package.installed) >= version.Version(bound.version) for bound in bounds):
    return 'newer than tested'
  return 'not tested'


def python() -> Package:
  """Returns the Python that runs, as a package."""
  from packaging import specifiers

  running, tested = platform.python_version(), tested_python()
  return Package('Python', tested, running, running in specifiers.SpecifierSet(tested))


def _project() -> Mapping:
  return tomllib.loads(_PYPROJECT.read_text(encoding='utf-8'))['project']


def _texts() -> dict[str, list[str]]:
  """Returns {extra: lines of requirements}, from pyproject.toml or from the installed package."""
  if _PYPROJECT.exists():
    project = _project()
    return {'': project['dependencies'], **project['optional-dependencies']}
  texts: dict[str, list[str]] = {}
  for line in metadata.requires(NAME) or ():
    text, _, marker = line.partition(';')
    extra = re.search(r'extra == ["\'](\w+)', marker)
    texts.setdefault(extra[1] if extra else '', []).append(text)
  return texts


def _packages(line: str) -> Iterator[Package]:
  """Yields the package of a line, and the packages of its extras, as in jax[cuda12]."""
  from packaging import requirements  # comes with transformers

  requirement = requirements.Requirement(line)
  yield _package(requirement)
  for extra in requirement.extras:
    try:
      lines = metadata.requires(requirement.name) or ()
    except metadata.PackageNotFoundError:
      return
    for text in lines:
      inner = requirements.Requirement(text)
      marker = inner.marker
      if marker and 'extra' in str(marker) and marker.evaluate({'extra': extra}):
        yield _package(inner)


def _package(requirement) -> Package:
  tested = str(requirement.specifier)
  try:
    installed = metadata.version(requirement.name)
  except metadata.PackageNotFoundError:
    return Package(requirement.name, tested, '', False)
  return Package(requirement.name, tested, installed, installed in requirement.specifier)
