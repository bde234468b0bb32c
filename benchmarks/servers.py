"""Starts sampling servers in processes of their own: our gateway, and vLLM."""

from collections.abc import Iterator
import contextlib
import os
import re
import socket
import subprocess
import sys
import threading
import time

from absl import logging
import requests

_ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


@contextlib.contextmanager
def gateway(*flags: str, root: str = _ROOT) -> Iterator[tuple[int, subprocess.Popen]]:
  """Context manager of (port, process) of a `run.py --mode=serve` that accepts requests.

  `root` is the checkout whose run.py it is.
  """
  command = [sys.executable, 'run.py', '--mode=serve', '--port=0', *flags]
  with ended(subprocess.Popen(command, cwd=root, stderr=subprocess.PIPE, text=True)) as server:
    yield _port(server), server


def free_port() -> int:
  """Returns a port that no program uses."""
  with socket.socket() as some:
    some.bind(('127.0.0.1', 0))
    return some.getsockname()[1]


def start_engine(weights: str, port: int, log: str, *flags: str) -> subprocess.Popen:
  """Starts a gateway on the embedded model that loads weights from folders in `weights`."""
  command = [sys.executable, 'run.py', '--mode=serve', f'--port={port}']
  command += ['--config=experiments/st_ppo_tiny.py', '--config.serve.max_total=384']
  command += [f'--config.serve.weights_folder={weights}', '--config.serve.max_waiting=1024']
  command += ['--config.serve.logprobs_mode=processed_logprobs', *flags]
  with open(log, 'ab') as file:
    return subprocess.Popen(command, cwd=_ROOT, stdout=file, stderr=file, start_new_session=True)


def start_vllm(python: str, model: str, port: int, log: str, *flags: str) -> subprocess.Popen:
  """Starts vLLM on the folder of a small model, with one thread."""
  environment = {
      **os.environ,
      'VLLM_CPU_KVCACHE_SPACE': '1',
      'VLLM_SERVER_DEV_MODE': '1',
      'VLLM_ALLOW_RUNTIME_LORA_UPDATING': '1',
      'HF_HUB_OFFLINE': '1',
      'OMP_NUM_THREADS': '1',
  }
  environment.pop('PYTHONPATH', None)
  command = [python, '-m', 'vllm.entrypoints.openai.api_server', '--model', model]
  command += ['--port', str(port), '--dtype', 'float32', '--max-model-len', '384']
  command += ['--enforce-eager', '--logprobs-mode', 'processed_logprobs', *flags]
  folder = os.path.dirname(log)
  with open(log, 'ab') as file:
    return subprocess.Popen(
        command, env=environment, cwd=folder, stdout=file, stderr=file, start_new_session=True
    )


def wait_until_healthy(process: subprocess.Popen, port: int, timeout_s: float = 600) -> str:
  """Returns the address of a server once it answers."""
  address = f'http://127.0.0.1:{port}'
  deadline = time.monotonic() + timeout_s
  while time.monotonic() < deadline and process.poll() is None:
    with contextlib.suppress(requests.RequestException):
      if requests.get(f'{address}/health', timeout=5).ok:
        return address
    time.sleep(0.5)
  process.kill()
  raise SystemExit(f'the server at {address} has not started: its log says why')


@contextlib.contextmanager
def ended(process: subprocess.Popen) -> Iterator[subprocess.Popen]:
  """Context manager that ends a process at its exit."""
  try:
    yield process
  finally:
    process.terminate()
    process.wait()


def _port(server):
  """Returns the port that the server logs. A thread continues to read the log."""
  for line in server.stderr:
    if match := re.search(r'at http://127\.0\.0\.1:(\d+)/v1', line):
      threading.Thread(target=_pass_on, args=(server.stderr,), daemon=True).start()
      return int(match[1])
  raise SystemExit('the server has not started')


def _pass_on(log):
  for line in log:
    logging.info('%s', line.rstrip())
