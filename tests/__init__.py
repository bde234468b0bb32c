"""Settings of JAX for the tests, made before JAX starts and inherited by child processes.

There are eight simulated devices, for the tests of sharding. Compiling is most of what the tests
do, so
- LLVM does not optimise, and gets a program in one piece; XLA's older emitter, which is faster,
  writes the loops: a training step compiles in a quarter of the time;
- compiled programs are kept in a folder that lasts as long as the tests, for all processes.

A jaxlib that does not know one of the flags goes without it: from 0.11.1 on there is only the newer
emitter. A flag that XLA_FLAGS names already is left as it is. To test the programs that a run
compiles, set XLA_FLAGS='--xla_backend_optimization_level=3
--xla_llvm_disable_expensive_passes=false', and with an older jaxlib also
--xla_cpu_use_fusion_emitters=true.
"""

import atexit
import os
import shutil
import tempfile

from stppo_jax.distributed import xla_flags

_FLAGS = {
    'xla_force_host_platform_device_count': '8',
    'xla_backend_optimization_level': '0',
    'xla_llvm_disable_expensive_passes': 'true',
    'xla_cpu_use_fusion_emitters': 'false',
    'xla_cpu_parallel_codegen_split_count': '1',
    # Eight devices on two busy cores may wait long for each other; after 40 s XLA would abort.
    'xla_cpu_collective_call_warn_stuck_timeout_seconds': '60',
    'xla_cpu_collective_call_terminate_timeout_seconds': '240',
}

os.environ.setdefault('JAX_PLATFORMS', 'cpu')
# XLA's threads, by default one per device. Each device's part of a program that waits in a
# collective keeps one, so that a few programs in flight would leave none and wait for ever.
os.environ.setdefault('NPROC', '64')
# The answer is kept for child processes, because each question takes a second.
if 'STPPO_TESTS_XLA_FLAGS' not in os.environ:
  _known = xla_flags.known(f'--{name}={value}' for name, value in _FLAGS.items())
  os.environ['STPPO_TESTS_XLA_FLAGS'] = ' '.join(_known)
_given = os.environ.get('XLA_FLAGS', '')
_added = os.environ['STPPO_TESTS_XLA_FLAGS'].split()
os.environ['XLA_FLAGS'] = ' '.join(
    [_given, *(flag for flag in _added if flag.partition('=')[0] not in _given)]
).strip()

if 'JAX_COMPILATION_CACHE_DIR' not in os.environ:
  _folder = tempfile.mkdtemp(prefix='stppo_tests_')
  atexit.register(shutil.rmtree, _folder, ignore_errors=True)
  os.environ['JAX_COMPILATION_CACHE_DIR'] = _folder
os.environ.setdefault('JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS', '0')
os.environ.setdefault('JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES', '-1')
