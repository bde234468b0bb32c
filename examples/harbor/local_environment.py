"""An environment of Harbor on this machine, without a container.

Commands of the model and of the task run as the user of this process, and reach its files and its
network. Use it for tasks that you wrote, on a machine that holds nothing else.
"""

import asyncio
import os
import pathlib
import shutil

from harbor.environments import base
from harbor.environments import capabilities


class LocalEnvironment(base.BaseEnvironment):
  """Runs commands in a shell, and copies files."""

  @staticmethod
  def type():
    """Returns the name."""
    return 'local'

  @property
  def capabilities(self):
    """Returns that it supports nothing optional."""
    return capabilities.EnvironmentCapabilities()

  def _validate_definition(self):
    pass

  async def start(self, force_build):
    """Makes the folder of the task."""
    del force_build
    os.makedirs(self.task_env_config.workdir or '/app', exist_ok=True)

  async def stop(self, delete):
    """Leaves everything as it is."""

  async def upload_file(self, source_path, target_path):
    """Copies a file."""
    pathlib.Path(target_path).parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(source_path, target_path)

  async def upload_dir(self, source_dir, target_dir):
    """Copies a folder."""
    shutil.copytree(source_dir, target_dir, dirs_exist_ok=True)

  async def download_file(self, source_path, target_path):
    """Copies a file."""
    await self.upload_file(source_path, str(target_path))

  async def download_dir(self, source_dir, target_dir):
    """Copies a folder."""
    await self.upload_dir(source_dir, str(target_dir))

  async def exec(self, command, cwd=None, env=None, timeout_sec=None, user=None):
    """Runs a command."""
    del user
    process = await asyncio.create_subprocess_exec(
        'bash',
        '-c',
        command,
        cwd=cwd or self.task_env_config.workdir or '/app',
        env={**os.environ, **(env or {})},
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
      out, err = await asyncio.wait_for(process.communicate(), timeout_sec)
    except TimeoutError:
      process.kill()
      raise
    return base.ExecResult(
        stdout=out.decode(errors='replace'),
        stderr=err.decode(errors='replace'),
        return_code=process.returncode,
    )
