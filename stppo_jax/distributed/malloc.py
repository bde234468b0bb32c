"""glibc's memory allocator: pages of 2 MB and few arenas, by an environment variable at start.

On a CPU XLA allocates hundreds of megabytes per call and frees them afterwards, with a page fault
per 4 kB. Huge pages make an update 1.4 times as fast (measured in docs/dev/notes/0.8.md). Linux
provides them where `transparent_hugepage` is `madvise`, the usual setting, or `always`. Each arena
keeps memory that its threads have freed. glibc has up to eight arenas per core, and with one per
core a run needs a sixth to a third less memory (docs/dev/notes/measurements.md). Freed memory below
memory in use stays with the process, so a long run grows unless it calls `trim`.
"""

import ctypes
import os
import sys

_NUM_CPUS = len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else 1
VARIABLE = 'GLIBC_TUNABLES'
VALUE = f'glibc.malloc.hugetlb=1:glibc.malloc.arena_max={max(2, _NUM_CPUS)}'


def restart() -> None:
  """Restarts this program with these settings; call it before doing anything else.

  The process, its arguments and its open files stay the same. On other systems, or if the variable
  is set already, nothing happens. Set the variable to an empty value to prevent the restart, as
  debuggers may need.
  """
  if sys.platform != 'linux' or VARIABLE in os.environ or not sys.executable:
    return
  os.environ[VARIABLE] = VALUE
  sys.stdout.flush()
  os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def trim() -> None:
  """Gives memory that the process has freed back to the system, where glibc can do so."""
  if sys.platform == 'linux' and (function := getattr(ctypes.CDLL(None), 'malloc_trim', None)):
    function(0)
