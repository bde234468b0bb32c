"""Settings of the documentation site.

pip install ".[docs]" && sphinx-build -W -b html docs docs/_build
"""

import os
import sys

DOCS = os.path.dirname(os.path.abspath(__file__))
sys.path[:0] = [DOCS, os.path.dirname(DOCS)]
os.environ.setdefault('JAX_PLATFORMS', 'cpu')

import references  # after sys.path

from scripts import notebook_heads

project = 'stppo_jax'
author = 'the authors of stppo_jax'
extensions = ['myst_nb', 'sphinx.ext.autodoc', 'references']
exclude_patterns = ['_build', '**/.ipynb_checkpoints']

myst_enable_extensions = ['colon_fence', 'deflist', 'substitution']
myst_heading_anchors = 3
myst_substitutions = references.variant_settings()
myst_substitutions['colab'] = notebook_heads.colab_note(notebook_heads.repository())
nb_execution_mode = 'off'

# Types such as Literal['text'] look like names of attributes.
suppress_warnings = ['ref.python']
autodoc_default_options = {'members': True, 'undoc-members': False, 'member-order': 'bysource'}
autodoc_typehints_format = 'short'
autodoc_preserve_defaults = True
autodoc_mock_imports = ['verifiers']  # only the Python of adapters/verifiers_worker.py has it
maximum_signature_line_length = 110
toc_object_entries = False  # the contents list modules and not their functions

smartquotes = False  # it would turn the dashes of flags into one long dash
html_theme = 'furo'
html_title = 'stppo_jax'
html_show_copyright = False
html_static_path = ['_static']
html_css_files = ['site.css']
