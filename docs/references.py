"""A Sphinx extension that writes the reference pages from the code, at each build.

  reference/settings.md       from config.py
  reference/command_line.md   from the flags and modes
  reference/metrics.md        from monitoring/metric_names.py
  reference/api/*.md          one page per folder of the package, from docstrings
  tutorials/*.ipynb           copies of notebooks/

Git ignores these files.
"""

from collections.abc import Iterator
import dataclasses
import pathlib
import pkgutil
import re
from typing import Any

import stppo_jax
from stppo_jax import config as config_lib
from stppo_jax.algorithms import variants
from stppo_jax.cli.flags import Flags
from stppo_jax.cli.modes import MODES
from stppo_jax.monitoring import metric_names
from stppo_jax.settings import validation
from stppo_jax.types import Rules

DOCS = pathlib.Path(__file__).parent
NOTEBOOKS = DOCS.parent / 'notebooks'
GENERATED = '<!-- This page is made by docs/references.py. -->\n\n'


def setup(app) -> dict[str, Any]:
  """Connects the extension to Sphinx."""
  app.connect('builder-inited', lambda app: write_all())
  app.connect('autodoc-process-docstring', keep_line_breaks)
  return {'parallel_read_safe': True}


def write_all() -> None:
  """Writes all pages. A page that has not changed is left as it is, so Sphinx does not read it."""
  write('reference/settings.md', settings_page())
  write('reference/command_line.md', command_line_page())
  write('reference/metrics.md', metrics_page())
  for path, text in api_pages():
    write(path, text)
  for notebook in NOTEBOOKS.glob('*.ipynb'):
    # Links of a notebook are relative to its own folder.
    text = notebook.read_text(encoding='utf-8').replace('(../docs/', '(../')
    write(f'tutorials/{notebook.name}', text)


def write(name: str, text: str) -> None:
  """Writes a file below docs/."""
  path = DOCS / name
  path.parent.mkdir(parents=True, exist_ok=True)
  if not path.exists() or path.read_text(encoding='utf-8') != text:
    path.write_text(text, encoding='utf-8')


# --- Settings. ------------------------------------------------------------------------------------


def settings_page() -> str:
  """Returns the page of all settings."""
  lines = [
      GENERATED + '# Settings\n',
      'This page is generated from `stppo_jax/config.py`. A command sets a value with '
      '`--config.SECTION.NAME=VALUE`, and an experiment file with `config.SECTION.NAME = VALUE`. '
      '`--help=SECTION` prints the values of your run.\n',
      'A resumed run may change the settings that say so. It rejects a change of any other.\n',
  ]
  config = config_lib.Config()
  kinds = validation.kinds()
  section = None
  for path, rules, value in validation.fields(config):
    name = path.rpartition('.')[0]
    if name != section:
      section = name
      lines.append(_section_heading(config, name))
    is_override = name == 'algorithm' and path not in ('algorithm.variant', 'algorithm.options')
    default = shown(value)
    if is_override:
      field = path.partition('.')[2]
      default = f"the variant's own or else {shown(getattr(variants.Variant(), field))}"
    lines.append(entry(path, _type_name(kinds[path]), default, rules))
  return '\n'.join(lines)


def _section_heading(config: config_lib.Config, name: str) -> str:
  if not name:
    return '## Run\n'
  docstring = type(getattr(config, name)).__doc__ or ''
  if name == 'critic':
    docstring = 'The optimizer of the critic. The settings are those of `actor`.'
  return f'## {name}\n\n{plain(docstring)}\n'


def entry(path: str, kind: str, default: str, rules: Rules) -> str:
  """Returns the entry of a setting or a flag."""
  notes = [f'Type `{kind}`, default {default}.', *_notes(rules)]
  return f'```{{confval}} {path}\n\n{sentence(rules.meaning)}\n\n{" ".join(notes)}\n```\n'


def _notes(rules: Rules) -> Iterator[str]:
  """Yields sentences about the values that are allowed."""
  choices = [f'`{choice}`' for choice in rules.allowed or rules.items]
  choices += [f'`{prefix}:..`' for prefix in rules.prefixes]
  if rules.plugin:
    choices.append('`module:attribute`')
  if choices:
    yield f'Allowed: {", ".join(choices)}.'
  bounds = {
      'at least': rules.at_least,
      'at most': rules.at_most,
      'above': rules.above,
      'below': rules.below,
  }
  bounds = {words: bound for words, bound in bounds.items() if bound is not None}
  if bounds:
    yield f'Bounds: {" and ".join(f"{words} {bound}" for words, bound in bounds.items())}.'
  if rules.resume_safe:
    yield 'A resumed run may change it.'
  if rules.resume_allowed:
    yield 'A resumed run may change it, but results may differ.'


def shown(value: Any) -> str:
  """Returns a default as code. An empty text is named, because `''` is easy to miss."""
  return 'empty' if value == '' else f'`{value!r}`'


def _type_name(kind: Any) -> str:
  return kind.__name__ if isinstance(kind, type) and not hasattr(kind, '__args__') else str(kind)


def sentence(text: str) -> str:
  """Returns a meaning as a sentence, with text in single quotes as code."""
  text = re.sub(r"(?<![\w`])'([^' ]+)'(?!\w)", r"`'\1'`", text)
  text = re.sub(r"(?<![\w`'])(--[\w.]+(?:=[\w./:]+)?)", r'`\1`', text)
  # Without these, Markdown would read <..> as HTML, and [..] and * as its own.
  text = text.replace('<', r'\<').replace('*', r'\*').replace('[', r'\[')
  return text[0].upper() + text[1:] + '.'


def plain(docstring: str) -> str:
  """Returns a docstring as paragraphs."""
  paragraphs = re.split(r'\n\s*\n', docstring.strip())
  return '\n\n'.join(' '.join(paragraph.split()) for paragraph in paragraphs)


def variant_settings() -> dict[str, str]:
  """Returns {name: settings in which a row of VARIANTS differs from the defaults}."""
  texts = {}
  for name, variant in variants.VARIANTS.items():
    default = type(variant)()
    changed = []
    for field in dataclasses.fields(variant):
      value = getattr(variant, field.name)
      always_shown = field.name in ('advantage', 'ratio')
      if always_shown or value != getattr(default, field.name):
        changed.append(f'`{field.name}={value}`')
    texts[name] = ', '.join(changed)
  return texts


# --- The command line. ----------------------------------------------------------------------------


def command_line_page() -> str:
  """Returns the page of commands and flags."""
  lines = [
      GENERATED + '# Command line\n',
      'This page is generated from the flags of the command. `python run.py` in a clone and '
      '`stppo` after an installation are the same command.\n',
      '## Commands\n',
      'The first word is the command: `python run.py eval`. `--mode=eval` is the same.\n',
      '| command | what it does | its own flags |',
      '|---|---|---|',
  ]
  for name, mode in MODES.items():
    flags = ', '.join(f'`--{flag}`' for flag in mode.flags)
    lines.append(f'| `{name}` | {plain(mode.load().__doc__ or "")} | {flags} |')
  lines.append('\n## Flags\n')
  kinds = validation.kinds(Flags)
  for path, rules, value in validation.fields(Flags()):
    lines.append(entry(f'--{path}', _type_name(kinds[path]), shown(value), rules))
  lines.append(
      '`--config.SECTION.NAME=VALUE` overrides a setting. [Settings](settings.md) has all of them.'
  )
  return '\n'.join(lines)


# --- Metrics. -------------------------------------------------------------------------------------


def metrics_page() -> str:
  """Returns the page of all metrics."""
  lines = [
      GENERATED + '# Metrics\n',
      '`metrics.jsonl` has one line per update with these names. Names are those of verl where the '
      'quantity is the same. The names `stppo/..` are our own. Lengths are in tokens, KL in nats '
      'per token. A metric of an update with several optimizer steps is their mean. A number that '
      'is not finite is written as null, and its name is in the list `nonfinite` of the line.\n',
  ]
  for title, metrics in metric_names.GROUPS.items():
    lines += [f'## {title}\n', '| metric | meaning |', '|---|---|']
    lines += [f'| `{name}` | {escaped(text)} |' for name, text in metrics.items()]
    lines.append('')
  return '\n'.join(lines)


def escaped(text: str) -> str:
  """Returns a text for a cell of a Markdown table."""
  parts = text.split('`')
  parts[::2] = [part.replace('<', r'\<').replace('|', r'\|') for part in parts[::2]]
  return '`'.join(parts)


# --- The API. -------------------------------------------------------------------------------------


def api_pages() -> Iterator[tuple[str, str]]:
  """Yields (path, text): the index, and a page for each folder of the package."""
  folders: dict[str, list[str]] = {}
  for module in pkgutil.walk_packages(stppo_jax.__path__, 'stppo_jax.'):
    if not module.ispkg and not module.name.startswith('stppo_jax.shipped'):
      folders.setdefault(module.name.rpartition('.')[0], []).append(module.name)
  names = []
  for folder, modules in folders.items():
    names.append(folder)
    # config.py has the settings reference, whose classes would only repeat it.
    modules = [module for module in modules if module != 'stppo_jax.config']
    lines = [GENERATED + f'# {folder}\n']
    for module in modules:
      title = module.removeprefix(folder + '.')
      lines += [f'## {title}\n', f'```{{eval-rst}}\n.. automodule:: {module}\n```\n']
    yield f'reference/api/{folder}.md', '\n'.join(lines)
  entries = '\n'.join(names)
  yield 'reference/api/index.md', (
      GENERATED + '# API\n\nThe public functions and classes of each module, from their '
      'docstrings. The letters of array shapes are explained in [types](stppo_jax.md#types).\n\n'
      f'```{{toctree}}\n:maxdepth: 2\n\n{entries}\n```\n'
  )


def keep_line_breaks(app, what, name, obj, options, lines: list[str]) -> None:
  """Shows the paragraphs of a docstring as text, but equations and tables as they are written.

  The docstrings are plain text and not reStructuredText.
  """
  del app, what, name, obj, options
  result = []
  for paragraph in re.split(r'\n\s*\n', '\n'.join(lines).strip()):
    if re.search(r'^ |   | = .*\n', paragraph, re.MULTILINE):
      result += ['.. code-block:: text', '']
      result += ['   ' + line for line in paragraph.splitlines()]
    else:
      result.append(re.sub(r'([\\`*_|])', r'\\\1', ' '.join(paragraph.split())))
    result.append('')
  lines[:] = result
