"""pytest imports this, and so tests/__init__.py, before it starts workers, which share a folder."""

import collections

from absl import logging
import hypothesis
import jax
import pytest

# The same examples each time; `pytest --hypothesis-profile=default` searches for others.
hypothesis.settings.register_profile('tests', derandomize=True, database=None)
hypothesis.settings.load_profile('tests')

# What takes longest starts first: a long file at the end would keep one worker alone.
FIRST = (
    'update_test',
    'loop_test',
    'objectives_test',
    'examples_test',
    'lora_test',
    'placement_test',
    'hosts_test',
    'readme_test',
    'learning_test',
    'attention_test',
    'faults_test',
    'decoder_test',
)


def pytest_configure(config):
  config.option.loadscopereorder = False  # pytest-xdist's: files with many tests first


@pytest.hookimpl(tryfirst=True)  # before pytest looks at the marks
def pytest_collection_modifyitems(items):
  num_seen = collections.Counter()
  for item in items:
    for mark in item.iter_markers('slow_after'):
      test = item.nodeid.rstrip('0123456789')
      if num_seen[test] >= mark.args[0]:
        item.add_marker(pytest.mark.slow)
      num_seen[test] += 1
  order = {name: i for i, name in enumerate(FIRST)}
  items.sort(key=lambda item: order.get(item.path.stem, len(order)))


def pytest_runtest_teardown(item, nextitem):
  if nextitem is None or nextitem.path != item.path:
    jax.clear_caches()  # compiled programs would take gigabytes
    logging.set_verbosity(logging.WARNING)  # a file may have set another; tests read warnings
