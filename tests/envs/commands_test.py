"""Commands as agent programs: what they give, and that nothing of them outlives the episode."""

import contextlib
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized

from stppo_jax import config as schema
from stppo_jax import types
from stppo_jax.assembly import components
from stppo_jax.envs import commands
from stppo_jax.envs import program
from stppo_jax.envs import protocol
from stppo_jax.envs import rewards
from tests.support.processes import wait_for

PYTHON = [sys.executable, '-I', '-S', '-c']
# Starts a process in a session of its own, which leaves its id in a file and closes no stream.
LEAVES_CHILD = """
import subprocess, sys, time
child = subprocess.Popen(['sleep', '600'], start_new_session=True)
open(sys.argv[1], 'w').write(str(child.pid))
"""
# A trainer that starts a command and waits.
TRAINER = """
import sys, time
from stppo_jax.envs import commands
from stppo_jax.envs import program
process = commands.Process(sys.argv[1:], {}, 'http://x/v1', 'm')
time.sleep(600)
"""


@contextlib.contextmanager
def started(*command):
  process = commands.Process(list(command), {'id': '\u2028 \ud800'}, 'http://x/s/1/v1', 'm')
  try:
    yield process
  finally:
    process.end()


def result(text):
  """Returns the result of a Python program, which ends by itself."""
  with started(*PYTHON, text) as process:
    while not process.wait(1):
      pass
    return process.result(), process.log


def is_alive(pid):
  """Whether a process runs. One that nobody has waited for does not."""
  try:
    return pathlib.Path(f'/proc/{pid}/stat').read_text(encoding='utf-8').split()[2] not in 'ZX'
  except OSError:
    return False


class CommandTest(parameterized.TestCase):

  @parameterized.parameters(
      ('log\n0.5\n \n', 0.5),
      ('-1e-1', -0.1),
      ('0.5 points', None),
      ('true', None),
      ('[' * 60000, None),
      ('{"text": "no reward"}', None),
      ('{"reward": null}', None),
      ('{"reward": 1, "note": "\u2028"}', 1),
      ('\ufffd\n2', 2),
  )
  def test_reward_is_the_last_line(self, text, reward):
    self.assertEqual(commands.read_result(text), program.Result(reward))

  def test_metrics_are_read(self):
    found = commands.read_result('{"reward": 1, "metrics": {"steps": 3}}')
    self.assertEqual(found, program.Result(1.0, {'steps': 3.0}))

  @parameterized.parameters(
      ('NaN', 'finite numbers: NaN'),
      ('1e999', 'finite numbers'),
      ('9' * 400, 'finite numbers'),
      ('{"reward": "high"}', 'finite numbers'),
      ('{"reward": 1, "metrics": {"a": true}}', 'finite numbers'),
      ('{"reward": 1, "metrics": [1]}', 'metrics that are no object'),
  )
  def test_unusable_reward_is_a_crash(self, text, message):
    with self.assertRaisesRegex(commands.CommandFailed, message):
      commands.read_result(text)

  @parameterized.parameters(
      ("import os; os.write(1, b'\\xff\\xfe\\n0.25')", 0.25),
      ("import sys; sys.stdout.write('x' * 10**7 + '\\n1'); sys.stderr.write('y' * 10**7)", 1),
      ('import os; os.close(0); os.close(2); print(3)', 3),
      ('import os; os.close(1)', None),
      ("import sys, json; print(len(json.load(sys.stdin)), len(sys.stdin.read()), sep='')", 10),
  )
  def test_streams_of_any_kind(self, text, reward):
    found, log = result(text)
    self.assertEqual(found, program.Result(reward))
    self.assertLessEqual(len(log), 4000)

  @parameterized.parameters(
      ("print(1); raise SystemExit('gone')", 'exit status 1, standard error ends with: gone'),
      (
          'import os; print(1, flush=True); os.kill(os.getpid(), 9)',
          'ended by SIGKILL, standard output ends with: 1',
      ),
      ("import os; os.write(2, b'\\xff'); os._exit(3)", 'exit status 3'),
  )
  def test_crash_has_a_reason(self, text, message):
    with self.assertRaisesRegex(commands.CommandFailed, message):
      result(text)

  def test_missing_program_is_a_crash(self):
    with started('/no/such') as process:
      with self.assertRaisesRegex(commands.CommandFailed, 'does not run .*No such file'):
        process.result()

  def test_environment_is_the_gateway(self):
    secrets = {'STPPO_API_KEY': 'k', 'OPENAI_API_KEY': 'real', 'CLAUDE_CODE_OAUTH_TOKEN': 'real'}
    names = ('OPENAI', 'ANTHROPIC', 'CLAUDE', 'STPPO', 'NO_PROXY', 'MINE')
    text = (
        'import json, os, sys; json.dump({name: value for name, value in os.environ.items() '
        f'if name.startswith({names})}}, sys.stderr)'
    )
    with mock.patch.dict(os.environ, secrets | {'MINE': 'kept', 'NO_PROXY': 'here'}):
      _, log = result(text)
    names = ('OPENAI_BASE_URL', 'OPENAI_API_KEY', 'ANTHROPIC_BASE_URL', 'ANTHROPIC_API_KEY')
    for name, value in zip(names, ('http://x/s/1/v1', 'none', 'http://x/s/1', 'none')):
      self.assertIn(f'"{name}": "{value}"', log)
    self.assertIn('"NO_PROXY": "here,127.0.0.1,localhost"', log)
    self.assertIn('"MINE": "kept"', log)
    self.assertNotIn('STPPO_API_KEY', log)
    self.assertNotIn('real', log)


@absltest.skipUnless(sys.platform == 'linux', 'other systems do not hand over orphans')
class EndTest(parameterized.TestCase):

  @parameterized.parameters('', 'time.sleep(600)')
  def test_no_child_outlives_the_command(self, rest):
    path = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()), 'pid')
    with started(*PYTHON, LEAVES_CHILD + rest, str(path)) as process:
      pid = wait_for(lambda: path.exists() and path.read_text(encoding='utf-8'))
    self.assertTrue(process.wait(0))
    self.assertFalse(is_alive(pid))

  def test_log_of_killed_command_is_kept(self):
    text = "import os, time; os.write(2, b'begun'); open({!r}, 'w').write('x'); time.sleep(600)"
    path = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()), 'mark')
    with started(*PYTHON, text.format(str(path))) as process:
      wait_for(path.exists)
    self.assertEqual(process.log, 'begun')

  def test_killed_trainer_ends_its_commands(self):
    path = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()), 'pid')
    words = [*PYTHON, LEAVES_CHILD + 'time.sleep(600)', str(path)]
    root = str(pathlib.Path(commands.__file__).parents[2])
    trainer = subprocess.Popen([sys.executable, '-c', TRAINER, *words], cwd=root)
    pid = wait_for(lambda: path.exists() and path.read_text(encoding='utf-8'))
    self.assertTrue(is_alive(pid))
    trainer.send_signal(signal.SIGKILL)
    trainer.wait()
    wait_for(lambda: not is_alive(pid))


class SettingTest(parameterized.TestCase):

  @parameterized.parameters(
      ('', 'names no command'),
      ('   ', 'names no command'),
      ('node "agent', 'No closing quotation'),
      ('no-such-program x', "no program 'no-such-program'"),
  )
  def test_wrong_command_is_one_line(self, command, message):
    with self.assertRaisesRegex(types.UserError, message):
      commands.make_factory(protocol.COMMAND_PREFIX + command, {}, rewards.REWARDS['em'])

  def test_options_are_rejected(self):
    with self.assertRaisesRegex(types.UserError, 'write them into env.kind'):
      commands.make_factory(protocol.COMMAND_PREFIX + 'true', {'a': 1}, rewards.REWARDS['em'])

  def test_digest_is_that_of_the_script(self):
    script = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()), 'agent.py')
    script.write_text('1', encoding='utf-8')
    config = schema.Config()
    config.env.kind = f'gateway:command:{sys.executable} {script} --fast'
    self.assertEqual(components.plugin_names(config), {})
    first = components.plugin_digests(config)
    self.assertLen(first['env.kind'], 16)
    script.write_text('2', encoding='utf-8')
    self.assertNotEqual(components.plugin_digests(config), first)
    config.env.kind = 'gateway:command:true --fast'
    self.assertEqual(components.plugin_digests(config), {})


if __name__ == '__main__':
  absltest.main()
