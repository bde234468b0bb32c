"""Writes the badge, the note on Colab and the first code cell of every tutorial.

  python -m scripts.notebook_heads

The address of the repository is `Repository` in pyproject.toml, [project.urls]. Run this program
when the address changes. In Colab the notebooks clone it. Without an address they unpack the source
distribution that `python -m build` writes, from the reader's Google Drive. Runs are kept there.
"""

import json
import pathlib
import tomllib
from typing import Any

ROOT = pathlib.Path(__file__).parent.parent
FOLDER = ROOT / 'notebooks'
COLAB = 'https://colab.research.google.com/'
BUILD = 'pip install build && python -m build --sdist'
NOTE = '**Where:** '

# Packages that a notebook needs besides requirements.txt: (what pip installs, modules).
PACKAGES = {'203_agent_program.ipynb': (('.[serve]', 'openai'), ('starlette', 'uvicorn', 'openai'))}

FIRST_CELL = """import importlib.util
import os
import subprocess
import sys


def find_repo():
  \"\"\"Returns the folder that holds run.py, or None.\"\"\"
  folders = (os.environ.get('STPPO_JAX', '.'), '..', 'stppo_jax')
  return next((folder for folder in folders if os.path.exists(f'{{folder}}/run.py')), None)


if 'google.colab' in sys.modules:
  from google.colab import drive

  drive.mount('/content/drive')
  DRIVE = '/content/drive/MyDrive/stppo_jax'  # runs are kept here
  os.environ.setdefault('STPPO_WORKDIR', f'{{DRIVE}}/runs/{number}')
  if find_repo() is None:
{get_repo}
assert find_repo(), 'start the notebook in a clone, or set STPPO_JAX to the folder of a clone'
os.chdir(find_repo())
REPO = os.getcwd()
sys.path.insert(0, REPO)
NEEDED = 'absl bm25s chex flax jax jinja2 jsonschema matplotlib ml_dtypes numpy optax orbax'
NEEDED += ' pyarrow requests safetensors tensorboardX tokenizers transformers{modules}'
if not all(map(importlib.util.find_spec, NEEDED.split())):
  packages = {packages}
  subprocess.run([sys.executable, '-m', 'pip', 'install', '-q', *packages], check=True)
  if 'numpy' in sys.modules:
    print('Restart the session, then run this cell again: pip may have replaced NumPy.')
SHORT = bool(os.environ.get('STPPO_SHORT'))  # tests set it, for a shorter run"""

# The folder in the archive is named stppo_jax-VERSION.
UNPACK = """    archives = [name for name in os.listdir(DRIVE) if name.endswith('.tar.gz')]
    assert len(archives) == 1, f'put the file stppo_jax-VERSION.tar.gz in {DRIVE}, and no other'
    subprocess.run(['tar', '-xzf', f'{DRIVE}/{archives[0]}'], check=True)
    os.rename(archives[0].removesuffix('.tar.gz'), 'stppo_jax')
"""
CLONE = """    command = ['git', 'clone', '-q', '--depth=1', '{address}', 'stppo_jax']
    subprocess.run(command, check=True)
"""


def repository() -> str:
  """Returns the public address of the repository, or an empty text."""
  project = tomllib.loads((ROOT / 'pyproject.toml').read_text(encoding='utf-8'))['project']
  return project.get('urls', {}).get('Repository', '').removesuffix('.git').rstrip('/')


def badge(name: str, address: str) -> str:
  """Returns the badge of a notebook. It opens the notebook in Colab if there is an address."""
  target = COLAB
  if address:
    target += address.removeprefix('https://').replace('github.com', 'github', 1)
    target += f'/blob/main/notebooks/{name}'
  return f'[![Open in Colab](../docs/_static/colab.svg)]({target})'


def colab_note(address: str) -> str:
  """Returns the sentences that say how to open a notebook in Colab."""
  keeps = 'mounts your Google Drive, in which runs are kept'
  if address:
    return f'In Colab the first cell {keeps}, and clones the repository.'
  return (
      f'For Colab, run `{BUILD}` in a clone. Put `dist/stppo_jax-*.tar.gz` in the folder '
      '`stppo_jax` of your Google Drive. Upload the notebook with *File > Upload notebook*. Its '
      f'first cell {keeps}, and unpacks the file.'
  )


def with_head(name: str, notebook: dict[str, Any], address: str) -> dict[str, Any]:
  """Returns a notebook with its badge below the title, its note and its first code cell."""
  title, code, *others = notebook['cells']
  paragraphs = ''.join(title['source']).split('\n\n')
  own = [text for text in paragraphs[1:] if not text.startswith(('[![', NOTE))]
  note = f'{NOTE}in a clone of the repository. {colab_note(address)}'
  text = '\n\n'.join([paragraphs[0], badge(name, address), *own, note])
  installs, modules = PACKAGES.get(name, ((), ()))
  source = FIRST_CELL.format(
      number=name.partition('_')[0],
      get_repo=CLONE.format(address=address) if address else UNPACK,
      modules=''.join(f' {module}' for module in modules),
      packages=['-r', 'requirements.txt', 'matplotlib', *installs],
  )
  title = title | {'source': text.splitlines(keepends=True)}
  code = code | {'source': source.splitlines(keepends=True)}
  return notebook | {'cells': [title, code, *others]}


def main() -> None:
  """Rewrites the notebooks."""
  address = repository()
  for path in sorted(FOLDER.glob('*.ipynb')):
    notebook = json.loads(path.read_text(encoding='utf-8'))
    notebook = with_head(path.name, notebook, address)
    path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + '\n', encoding='utf-8')


if __name__ == '__main__':
  main()
