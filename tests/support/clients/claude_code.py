"""Claude Code: `claude_code.py PROGRAM`, in a folder of its own."""

import os
import subprocess
import tempfile

import common

with tempfile.TemporaryDirectory() as folder:
  process = subprocess.run(
      [common.KIND, '--bare', '-p', common.PROMPT, '--model', common.MODEL]
      + ['--allowedTools', 'Bash'],
      cwd=folder,
      env={**os.environ, 'HOME': folder},
      stdin=subprocess.DEVNULL,
      capture_output=True,
      text=True,
      check=True,
  )
common.end(process.stdout)
