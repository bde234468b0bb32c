"""Topologies to compile for without the hardware: 'v5e:8x8' in, devices and chip figures out.

TPU topologies need libtpu; GPU topologies need JAX's plug-in for CUDA 12 or 13, and ptxas. See the
extra `plan` in pyproject.toml.
"""

import dataclasses
import importlib.util
import os
import re
from typing import NamedTuple

import jax

from stppo_jax.models import sharding
from stppo_jax.types import RunError
from stppo_jax.types import UserError

GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Chip:
  """Public figures of one device; a speed of 0 is unknown and gives no time."""

  name: str
  memory: int  # bytes that programs can use
  flops: float = 0.0  # bf16, dense, per second
  bandwidth: float = 0.0  # bytes of memory per second
  link: float = 0.0  # bytes per second to other chips, all links in one direction
  latency: float = 0.0  # seconds of a small all-reduce between a few neighbours, assumed


# Google's system pages and NVIDIA's data sheets; memory as the compilers and drivers report it. A
# device of v7x is one of a chip's two halves. Latencies are assumptions, not published figures.
CHIPS = {
    'v5e': Chip('TPU v5e', int(15.75 * GIB), 197e12, 0.819e12, 0.2e12, 5e-6),
    'v5p': Chip('TPU v5p', int(95.74 * GIB), 459e12, 2.765e12, 0.6e12, 5e-6),
    'v6e': Chip('TPU v6e', int(31.25 * GIB), 918e12, 1.64e12, 0.448e12, 5e-6),
    'v7x': Chip('TPU7x core', int(94.74 * GIB), 1153.5e12, 3.69e12, 0.3e12, 5e-6),
    'h100': Chip('H100 80GB SXM', 84_942_979_072, 989e12, 3.35e12, 0.45e12, 10e-6),
    'h200': Chip('H200 141GB SXM', 151_397_597_184, 989e12, 4.8e12, 0.45e12, 10e-6),
    'b200': Chip('B200 180GB SXM', 191_514_411_008, 2250e12, 7.67e12, 0.9e12, 10e-6),
}
# JAX's programs get this share of a GPU's memory, preallocated or not.
FRACTIONS = ('XLA_PYTHON_CLIENT_MEM_FRACTION', 'XLA_CLIENT_MEM_FRACTION')
DEFAULT_FRACTION = 0.75
KINDS = {
    'TPU v5 lite': 'v5e',
    'TPU v5': 'v5p',
    'TPU v5p': 'v5p',
    'TPU v6 lite': 'v6e',
    'TPU7x': 'v7x',
}
FORMS = (
    'v5e:8x8, v6e:4x4, v5p:4x4x4, v7x:2x2x4 and other sizes (even numbers of chips), 2xv5e:8x8 for '
    'two slices, h100:1x1x8, h200:1x1x8, b200:1x1x8 (1 x hosts x GPUs per host), or nothing for '
    'the devices here'
)
# Stops libtpu from querying the network for the kind of machine, and from logging about it.
TPU_ENVIRONMENT = {
    'TPU_SKIP_MDS_QUERY': '1',
    'TPU_ACCELERATOR_TYPE': 'v5litepod-64',
    'TPU_WORKER_HOSTNAMES': 'localhost',
    'TPU_STDERR_LOG_LEVEL': '3',
    'TPU_MIN_LOG_LEVEL': '3',
}

# What XLA's CUDA compiler needs to know of an absent device. All have SXM sockets.
TARGET = """
gpu_device_info {{
  name: "{name}"
  cuda_compute_capability {{ major: {major} minor: 0 }}
  device_memory_size: {memory} memory_bandwidth: {bandwidth} l2_cache_size: {l2}
  core_count: {cores} fpus_per_core: 128 clock_rate_ghz: {clock} threads_per_warp: 32
  threads_per_block_limit: 1024 threads_per_core_limit: 2048
  registers_per_block_limit: 65536 registers_per_core_limit: 65536
  shared_memory_per_block: 49152 shared_memory_per_block_optin: 232448
  shared_memory_per_core: 233472
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 8 }}
runtime_version {{ major: 12 minor: 8 }}
device_description_str: "{name}"
"""


class Gpu(NamedTuple):
  """Figures of a GPU that its compiler asks for."""

  name: str
  major: int  # first number of the compute capability
  bandwidth: int  # bytes of memory per second
  l2: int  # bytes of the cache
  cores: int
  clock: float  # GHz


GPUS = {
    'h100': Gpu('NVIDIA H100 80GB HBM3', 9, 3352320000000, 52428800, 132, 1.98),
    'h200': Gpu('NVIDIA H200', 9, 4800000000000, 52428800, 132, 1.98),
    'b200': Gpu('NVIDIA B200', 10, 7672320000000, 132644864, 148, 1.965),
}
PLUGINS = ('jax_plugins.xla_cuda13', 'jax_plugins.xla_cuda12')  # JAX needs one of them


def devices_of(topology: str) -> tuple[list[jax.Device], Chip]:
  """Returns (devices, Chip) for a topology such as 'v5e:8x8', or for '' the attached devices."""
  if not topology:
    return _local_devices()
  has_slices = re.fullmatch(r'([1-9]\d*)x(v\w+:.*)', topology)
  num_slices, one_slice = has_slices.groups() if has_slices else (1, topology)
  name, _, shape = one_slice.partition(':')
  forms = r'\d+x\d+x\d+' if name in ('v5p', 'v7x', *GPUS) else r'\d+x\d+'
  if name not in CHIPS or not re.fullmatch(forms, shape):
    raise UserError(f'--topology={topology}: no such topology; give {FORMS}')
  packages = PLUGINS if name in GPUS else ('libtpu',)
  if not any(map(_installed, packages)):
    raise UserError(
        f'--topology={topology} needs the package {" or ".join(packages)}: pip install ".[plan]"'
    )
  os.environ.update(TPU_ENVIRONMENT)
  from jax.experimental import topologies

  try:
    if name in GPUS:
      target = TARGET.format(memory=CHIPS[name].memory, **GPUS[name]._asdict())
      description = topologies.get_topology_desc(name, 'cuda', target_config=target, topology=shape)
    else:
      known_as = one_slice.replace('v7x', 'tpu7x')
      options = {'num_slices': int(num_slices)} if has_slices else {}
      description = topologies.get_topology_desc(known_as, 'tpu', **options)
  except jax.errors.JaxRuntimeError as error:
    raise explained(error, topology) from error
  chip = CHIPS[name]
  return description.devices, usable(chip) if name in GPUS else chip


def usable(gpu: Chip) -> Chip:
  """Returns the chip with the share of its memory that JAX takes on a GPU."""
  settings = [os.environ[name] for name in FRACTIONS if os.environ.get(name)]
  fraction = float(settings[0]) if settings else DEFAULT_FRACTION
  return dataclasses.replace(gpu, memory=int(gpu.memory * fraction))


def explained(error: Exception, topology: str) -> UserError | RunError:
  """Returns the UserError or RunError to raise for a compiler's exception."""
  text = ' '.join(str(error).split())
  if 'lockfile' in text or 'already in use' in text:
    return RunError(
        'another process on this machine is compiling for TPU or uses one, and libtpu '
        'allows one at a time: wait for it, or remove /tmp/libtpu_lockfile if it died'
    )
  if 'INVALID_ARGUMENT' in text:
    return UserError(f'--topology={topology}: {text[:200]}; give {FORMS}')
  return RunError(f'the compiler for {topology} failed: {text[:400]}')


def _local_devices():
  """Returns the attached devices; simulated devices share the machine's memory."""
  devices = jax.devices()
  kind = devices[0].device_kind
  if kind in KINDS:
    return devices, CHIPS[KINDS[kind]]
  memory = sharding.memory_of(devices[0])
  found = (CHIPS[name] for name in GPUS if name.upper() in kind)
  chip = next(found, Chip(kind, memory))
  return devices, dataclasses.replace(chip, memory=memory)


def _installed(package):
  parent = package.partition('.')[0]
  return bool(importlib.util.find_spec(parent) and importlib.util.find_spec(package))
