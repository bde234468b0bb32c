"""A shell that exists only in Python: a tree of files in a dict, and a few commands on it.

No command leaves it. The module opens no file and starts no process, and a path is a key of the
dict. `..` stops at the root. Supported are pipes, `>`, `>>` and `&&`. Every other character of a
shell, such as `$` and `*`, is an ordinary one.
"""

from collections.abc import Callable
import posixpath
import shlex

MAX_TEXT = 2000  # characters of a file or of an output
MAX_FILES = 50
OPERATORS = ('|', '>', '>>', '&&')


class ShellError(Exception):
  """A command failed. The message is what the shell prints."""


class Shell:
  """A tree of text files.

  Args:
    files: {absolute path: text}. Their folders are made.
    folders: further folders.
  """

  def __init__(self, files: dict[str, str], folders: tuple[str, ...] = ()):
    self.files = dict(files)
    self.folders = {'/'}
    self.here = '/'
    for path in [*files, *(f'{folder}/x' for folder in folders)]:
      while (path := posixpath.dirname(path)) != '/':
        self.folders.add(path)

  def state(self) -> tuple[dict[str, str], set[str]]:
    """Returns copies of the files and the folders."""
    return dict(self.files), set(self.folders)

  def run(self, line: str) -> str:
    """Runs a line and returns its output, with the message of the command that failed."""
    try:
      lexer = shlex.shlex(line[:MAX_TEXT], posix=True, punctuation_chars='|>&')
      lexer.whitespace_split = True
      lexer.commenters = ''
      words = list(lexer)
    except ValueError:
      return 'quotes are not closed\n'
    output = ''
    try:
      for part in _split(words, '&&'):
        output += self._run_pipe(part)
    except ShellError as error:
      output += f'{error}\n'
    return output[:MAX_TEXT]

  def _run_pipe(self, words):
    """Runs the commands of a pipe and returns what the last one prints."""
    text = ''
    for part in _split(words, '|'):
      mode = next((word for word in part if word in ('>', '>>')), '')
      target = None
      if mode:
        place = part.index(mode)
        if place != len(part) - 2:
          raise ShellError(f'{mode}: needs one file at the end')
        target = self._path(part[-1])
        part = part[:place]
      text = self._run_command(part, text)
      if target is not None:
        self._write(target, self.files.get(target, '') + text if mode == '>>' else text)
        text = ''
    return text

  def _run_command(self, words, stdin):
    if not words or any(set(word) <= set('|>&') for word in words):
      raise ShellError('syntax error')
    name, *arguments = words
    if name not in COMMANDS:
      raise ShellError(f'{name}: not found')
    options = [word for word in arguments if word.startswith('-') and len(word) > 1]
    operands = [word for word in arguments if word not in options]
    return COMMANDS[name](self, options, operands, stdin)[:MAX_TEXT]

  def _path(self, name: str) -> str:
    """Returns the absolute path of a name. It cannot leave the root."""
    if '\0' in name or len(name) > 200:
      raise ShellError('bad name')
    return '/' + posixpath.normpath(posixpath.join(self.here, name)).lstrip('/')

  def _read(self, name: str) -> str:
    path = self._path(name)
    if path not in self.files:
      raise ShellError(f'{name}: no such file')
    return self.files[path]

  def _write(self, path: str, text: str) -> None:
    if path in self.folders or posixpath.dirname(path) not in self.folders:
      raise ShellError(f'{path}: cannot write')
    if path not in self.files and len(self.files) >= MAX_FILES:
      raise ShellError('no space left')
    self.files[path] = text[:MAX_TEXT]

  def _inside(self, folder: str) -> list[str]:
    """Returns the paths of all files and folders below a folder."""
    prefix = folder.rstrip('/') + '/'
    paths = [*self.files, *self.folders]
    return [path for path in paths if path.startswith(prefix) and path != folder]


def _split(words: list[str], operator: str) -> list[list[str]]:
  """Splits a list of words at an operator."""
  parts: list[list[str]] = [[]]
  for word in words:
    if word == operator:
      parts.append([])
    else:
      parts[-1].append(word)
  return parts


def _lines(shell, operands, stdin):
  """Returns the lines of the named files, or of the pipe."""
  text = ''.join(shell._read(name) for name in operands) if operands else stdin
  return text.splitlines()


def _joined(lines):
  return ''.join(f'{line}\n' for line in lines)


def _number(name, options, operands, default):
  """Takes the number out of `-n 2`, `-n2` or `-2`."""
  for option in options:
    digits = option.lstrip('-n')
    if option == '-n' and operands:
      digits = operands.pop(0)
    if not (digits.isascii() and digits.isdigit() and len(digits) < 5):
      raise ShellError(f'{name}: bad number')
    return int(digits)
  return default


def _ls(shell, options, operands, stdin):
  del options, stdin
  name = operands[0] if operands else '.'
  folder = shell._path(name)
  if folder in shell.files:
    return f'{name}\n'
  if folder not in shell.folders:
    raise ShellError(f'ls: {name}: no such file')
  start = len(folder.rstrip('/')) + 1
  return _joined(sorted({path[start:].partition('/')[0] for path in shell._inside(folder)}))


def _cat(shell, options, operands, stdin):
  del options
  return ''.join(shell._read(name) for name in operands) if operands else stdin


def _echo(shell, options, operands, stdin):
  del shell, stdin
  return ' '.join([*options, *operands]) + '\n'


def _grep(shell, options, operands, stdin):
  if not operands:
    raise ShellError('grep: needs a word')
  word, *names = operands
  keeps = '-v' not in options
  found = [line for line in _lines(shell, names, stdin) if (word in line) == keeps]
  return f'{len(found)}\n' if '-c' in options else _joined(found)


def _wc(shell, options, operands, stdin):
  lines = _lines(shell, operands, stdin)
  num_words = sum(len(line.split()) for line in lines)
  counts = {'-l': len(lines), '-w': num_words}
  chosen = [str(counts[option]) for option in options if option in counts]
  return ' '.join(chosen or [str(count) for count in counts.values()]) + '\n'


def _sort(shell, options, operands, stdin):
  lines = _lines(shell, operands, stdin)
  if '-u' in options:
    lines = list(set(lines))
  return _joined(sorted(lines, reverse='-r' in options))


def _uniq(shell, options, operands, stdin):
  del options
  lines = _lines(shell, operands, stdin)
  return _joined(line for i, line in enumerate(lines) if i == 0 or line != lines[i - 1])


def _head(shell, options, operands, stdin):
  count = _number('head', options, operands, 10)
  return _joined(_lines(shell, operands, stdin)[:count])


def _tail(shell, options, operands, stdin):
  count = _number('tail', options, operands, 10)
  lines = _lines(shell, operands, stdin)
  return _joined(lines[max(0, len(lines) - count) :])


def _cut(shell, options, operands, stdin):
  """Prints one field of each line: `cut -d , -f 2`, or `cut -f2` at spaces."""
  values = {'-d': ' ', '-f': '1'}
  for option in options:
    if option[:2] not in values:
      raise ShellError(f'cut: {option}: unknown option')
    if len(option) > 2:
      values[option[:2]] = option[2:]
    elif operands:
      values[option] = operands.pop(0)
  field = values['-f']
  if not (field.isascii() and field.isdigit() and 0 < len(field) < 5 and int(field)):
    raise ShellError('cut: bad field')
  rows = [line.split(values['-d']) for line in _lines(shell, operands, stdin)]
  return _joined(row[int(field) - 1] if len(row) >= int(field) else '' for row in rows)


def _mkdir(shell, options, operands, stdin):
  del options, stdin
  for name in operands:
    path = shell._path(name)
    is_taken = path in shell.files or path in shell.folders
    if is_taken or posixpath.dirname(path) not in shell.folders:
      raise ShellError(f'mkdir: {name}: cannot make')
    if len(shell.folders) >= MAX_FILES:
      raise ShellError('no space left')
    shell.folders.add(path)
  return ''


def _copy(shell, name, operands):
  """Copies a file and returns the paths of the source and the copy."""
  if len(operands) != 2:
    raise ShellError(f'{name}: needs two names')
  text = shell._read(operands[0])
  target = shell._path(operands[1])
  if target in shell.folders:
    target = shell._path(f'{target}/{posixpath.basename(operands[0])}')
  shell._write(target, text)
  return shell._path(operands[0]), target


def _cp(shell, options, operands, stdin):
  del options, stdin
  _copy(shell, 'cp', operands)
  return ''


def _mv(shell, options, operands, stdin):
  del options, stdin
  source, target = _copy(shell, 'mv', operands)
  if source != target:
    del shell.files[source]
  return ''


def _rm(shell, options, operands, stdin):
  del stdin
  for name in operands:
    path = shell._path(name)
    if path in shell.files:
      del shell.files[path]
    elif path in shell.folders - {'/'} and {'-r', '-rf'} & set(options):
      for inside in shell._inside(path):
        shell.files.pop(inside, None)
        shell.folders.discard(inside)
      shell.folders.discard(path)
      if shell.here not in shell.folders:
        shell.here = '/'
    else:
      raise ShellError(f'rm: {name}: cannot remove')
  return ''


def _cd(shell, options, operands, stdin):
  del options, stdin
  path = shell._path(operands[0] if operands else '/')
  if path not in shell.folders:
    raise ShellError(f'cd: {operands[0]}: no such folder')
  shell.here = path
  return ''


def _pwd(shell, options, operands, stdin):
  del options, operands, stdin
  return f'{shell.here}\n'


COMMANDS: dict[str, Callable[[Shell, list[str], list[str], str], str]] = {
    'ls': _ls,
    'cat': _cat,
    'echo': _echo,
    'grep': _grep,
    'wc': _wc,
    'sort': _sort,
    'uniq': _uniq,
    'head': _head,
    'tail': _tail,
    'cut': _cut,
    'mkdir': _mkdir,
    'cp': _cp,
    'mv': _mv,
    'rm': _rm,
    'cd': _cd,
    'pwd': _pwd,
}
