"""Settings of the documentation site.

pip install ".[docs]" && sphinx-build -W -b html docs docs/_build
"""

project = 'stppo_jax'
author = 'the authors of stppo_jax'
extensions = ['myst_parser']
myst_enable_extensions = ['dollarmath', 'colon_fence']
myst_heading_anchors = 3
exclude_patterns = ['_build']
html_theme = 'furo'
html_title = 'stppo_jax'
