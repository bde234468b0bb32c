"""Memory in pages of 2 MB, which glibc requests if an environment variable is set at start.

On a CPU XLA allocates hundreds of megabytes per call and frees them afterwards, with a page fault
per 4 kB. Huge pages make an update 1.4 times as fast (measured in docs/dev/notes/0.8.md). Linux
provides them where `transparent_hugepage` is `madvise`, the usual setting, or `always`.
"""

import os
import sys

VARIABLE, VALUE = 'GLIBC_TUNABLES', 'glibc.malloc.hugetlb=1'


def restart() -> None:
  """Restarts this program with huge pages; call it before doing anything else.

  The process, its arguments and its open files stay the same. On other systems, or if the variable
  is set already, nothing happens. Set the variable to an empty value to prevent the restart, as
  debuggers may need.
  """
  if sys.platform != 'linux' or VARIABLE in os.environ or not sys.executable:
    return
  os.environ[VARIABLE] = VALUE
  sys.stdout.flush()
  os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
