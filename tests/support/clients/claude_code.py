"""Claude Code: `claude_code.py PROGRAM [TOOL]`, in a folder of its own."""

import os
import subprocess
import sys
import tempfile

import common

tool = sys.argv[2] if len(sys.argv) > 2 else 'Bash'
bare = ['--bare'] if tool == 'Bash' else []  # the bare form has no agents
with tempfile.TemporaryDirectory() as folder:
  process = subprocess.run(
      [common.KIND, *bare, '-p', common.PROMPT, '--model', common.MODEL] + ['--allowedTools', tool],
      cwd=folder,
      env={**os.environ, 'HOME': folder},
      stdin=subprocess.DEVNULL,
      capture_output=True,
      text=True,
      check=True,
  )
common.end(process.stdout)
