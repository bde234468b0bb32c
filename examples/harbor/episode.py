"""Plays one episode as a trial of Harbor 0.25: an agent program for `gateway:command:..`.

  .harbor/bin/python examples/harbor/episode.py TRIALS [OPTIONS]

The `question` of a task is the folder of a Harbor task. OPTIONS go to `harbor trial start`. The
trial is kept in the folder TRIALS, with Harbor's ATIF in agent/trajectory.json. The agent is
Terminus 2, which calls the model from this machine, so it reaches the gateway on loopback.
"""

import json
import os
import pathlib
import subprocess
import sys
import uuid

HERE = pathlib.Path(__file__).parent
# A trial without a container has its own /app, /logs and /tests, which hide those of the machine.
MOUNTS = """
for folder in /app /logs /tests; do mount -t tmpfs none $folder || exit; done
mkdir /logs/agent /logs/verifier /logs/artifacts
exec "$@"
"""

task = json.load(sys.stdin)
trials, *options = sys.argv[1:]
name = f'{task["id"]}-{uuid.uuid4().hex[:8]}'
command = [str(pathlib.Path(sys.executable).parent / 'harbor'), 'trial', 'start']
command += ['--path', task['question'], '--trials-dir', trials, '--trial-name', name]
command += ['--agent', 'terminus-2', '--agent-kwarg', 'record_terminal_session=false']
command += ['--model', f'openai/{os.environ["OPENAI_MODEL"]}']
command += ['--base-url', os.environ['OPENAI_BASE_URL'], *options]
environment = {**os.environ, 'LITELLM_LOCAL_MODEL_COST_MAP': 'True'}
if any('local_environment:' in option for option in options):
  command = ['unshare', '--map-root-user', '--mount', 'sh', '-c', MOUNTS, 'sh', *command]
  environment['PYTHONPATH'] = str(HERE)
  environment['TMUX_TMPDIR'] = '/logs'  # a terminal of its own
subprocess.run(command, env=environment, stdin=subprocess.DEVNULL, stdout=sys.stderr, check=True)

result = json.loads((pathlib.Path(trials) / name / 'result.json').read_text(encoding='utf-8'))
if result['verifier_result'] is None:
  sys.exit(f'the trial has no reward: {result["exception_info"]}')
rewards = result['verifier_result']['rewards']
metrics = {key: value for key, value in rewards.items() if key != 'reward'}
print(json.dumps({'reward': rewards.get('reward', 0.0), 'metrics': metrics}))
