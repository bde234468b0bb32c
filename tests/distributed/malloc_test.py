"""A program that restarts itself: once, as the same process, with the same arguments."""

import os
import platform
import shutil
import subprocess
import sys
import tempfile

from absl.testing import absltest
from absl.testing import parameterized

from stppo_jax.distributed import malloc

PROGRAM = """
import os, sys
print('started', os.getpid())
from stppo_jax.distributed import malloc
malloc.restart()
print('runs', os.getpid(), os.environ['GLIBC_TUNABLES'], sys.argv[1:], sys.stdin.read())
"""

FREES = """
import ctypes
from stppo_jax.distributed import malloc
from stppo_jax.monitoring import metrics
blocks = [ctypes.create_string_buffer(100_000) for _ in range(3000)]
last = blocks[-1]
del blocks
freed = metrics.host_memory_gb()
malloc.trim()
print(freed - metrics.host_memory_gb())
"""


class MallocTest(parameterized.TestCase):

  @parameterized.parameters(None, 'glibc.malloc.arena_max=2')
  def test_a_program_restarts_itself_once(self, value):
    given = {} if value is None else {malloc.VARIABLE: value}
    environment = {name: x for name, x in os.environ.items() if name != malloc.VARIABLE}
    folder = tempfile.mkdtemp()
    self.addCleanup(shutil.rmtree, folder)
    path = os.path.join(folder, 'program.py')
    with open(path, 'w', encoding='utf-8') as file:
      file.write(PROGRAM)
    process = subprocess.Popen(
        [sys.executable, path, '--a=b c', ''],
        env=environment | given | {'PYTHONPATH': os.getcwd()},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    said, _ = process.communicate('what it reads')
    self.assertEqual(process.returncode, 0)
    restarted = value is None and sys.platform == 'linux'
    expected = value or (malloc.VALUE if restarted else '')
    self.assertEqual(
        said.splitlines(),
        [f'started {process.pid}'] * (2 if restarted else 1)
        + [f"runs {process.pid} {expected} ['--a=b c', ''] what it reads"],
    )

  @absltest.skipUnless(platform.libc_ver()[0] == 'glibc', 'only glibc can give memory back')
  def test_freed_memory_goes_back_to_the_system(self):
    """The last block lies above 300 MB of freed ones, and keeps glibc from shrinking its heap."""
    done = subprocess.run([sys.executable, '-c', FREES], capture_output=True, text=True, check=True)
    self.assertGreater(float(done.stdout), 0.25)


if __name__ == '__main__':
  absltest.main()
