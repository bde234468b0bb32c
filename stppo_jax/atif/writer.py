"""Saved episodes to ATIF, the trajectory format of the Harbor framework, laid out for its viewer.

Lines of episodes/*.jsonl in; documents of version 1.7 out, one per episode:

  atif/<file>/<episode>/agent/trajectory.json    the trajectory
  atif/<file>/<episode>/result.json              its rewards
  atif/<file>/result.json                        their means, by data set

In Harbor's viewer a file of episodes is a job, and an episode a trial. Step 1 is the prompt as the
policy reads it. Each further step is a turn with the observation that followed. The root's `extra`
holds the episode itself, which `reader` gives back exactly. A row that another agent of its episode
has started is a `subagent_trajectory_ref` of the step after which it began, and the row with which
an agent continues is the `continued_trajectory_ref` of the row before.
"""

import collections
from collections.abc import Mapping
from collections.abc import Sequence
import datetime
import json
import os
import re
import shutil
from typing import Any
from typing import NamedTuple
import uuid

from absl import logging
import numpy as np

from stppo_jax import types
from stppo_jax.envs import search
from stppo_jax.rollout import episode as episode_lib
from stppo_jax.rollout import saved
from stppo_jax.text import tokenizer as tokenizer_lib
from stppo_jax.text import tool_calls

VERSION = 'ATIF-v1.7'
EXTRA = 'stppo_jax'  # the key of our own fields in the root's `extra`
AGENT = 'stppo-jax'
# Fields of a record that say where in a run the episode belongs.
_ORIGIN = ('step', 'kind', 'batch', 'staleness')
_TRIAL = re.compile('[0-9]{4,}_[A-Za-z0-9-]*')  # the name of an episode's folder


def write_folder(
    source: str, folder: str, tokenizer: tokenizer_lib.Tokenizer, model: str, tool_form: str
) -> int:
  """Writes the episodes of a file, or of all files of a folder; returns their number.

  An export replaces the trials of an earlier one of the same file, which a rollback or another run
  may have written anew.

  Args:
    source: the file or folder.
    folder: where the documents go.
    tokenizer: of the ids.
    model: its name, for the viewer.
    tool_form: one of tool_calls.FORMS, in which turns call tools.
  """
  paths = [source]
  if os.path.isdir(source):
    names = sorted(os.listdir(source))
    paths = [os.path.join(source, name) for name in names if name.endswith('.jsonl')]
  if not paths or not os.path.exists(source):
    raise types.UserError(
        f'{source!r} holds no episodes (*.jsonl): give --input=FOLDER, such as `episodes` of a run'
    )
  num_written = 0
  for path in paths:
    file_name = os.path.splitext(os.path.basename(path))[0]
    episodes = saved.read(path, tokenizer).episodes
    first = saved.read_records(path)[0]
    origin = {key: first[key] for key in _ORIGIN if key in first}  # equal in all lines
    # A record has no time.
    modified = datetime.datetime.fromtimestamp(os.path.getmtime(path), datetime.UTC)
    saved_at = modified.isoformat()
    time = {'started_at': saved_at, 'finished_at': saved_at}
    trials = []
    for row, episode in enumerate(episodes):
      task_name = re.sub('[^A-Za-z0-9-]+', '-', episode.task.id)[:60]
      trials.append(f'{row:04d}_{task_name}')  # as _TRIAL
    references = _references(episodes, trials)
    for row, (episode, trial) in enumerate(zip(episodes, trials)):
      trial_folder = os.path.join(folder, file_name, trial)
      place = origin | {'row': row}
      trajectory = document(episode, place, tokenizer, model, f'{file_name}/{trial}', tool_form)
      _refer(trajectory, references[row])
      _write(os.path.join(trial_folder, 'agent', 'trajectory.json'), trajectory)
      result = _trial_result(episode, trial, model, trial_folder)
      _write(os.path.join(trial_folder, 'result.json'), result | time)
    num_written += len(episodes)
    job_folder = os.path.join(folder, file_name)
    for name in os.listdir(job_folder):
      if _TRIAL.fullmatch(name) and name not in trials:
        shutil.rmtree(os.path.join(job_folder, name))
    job_result = _job_result(episodes, file_name, model)
    _write(os.path.join(job_folder, 'result.json'), job_result | time)
    logging.info('%s: %d trajectories', path, len(episodes))
  return num_written


class _References(NamedTuple):
  """The documents that come after a document."""

  sub_agents: dict[int, list[str]]  # number of a turn -> paths
  continuations: list[str]


def _references(episodes: Sequence[types.Episode], trials: Sequence[str]) -> list[_References]:
  """Returns what each row of a file refers to. `trials` are the names of their folders."""
  references = [_References(collections.defaultdict(list), []) for _ in episodes]
  rows = {(one.number, one.segment): row for row, one in enumerate(episodes) if one.is_segment}
  for episode, trial in zip(episodes, trials):
    place = episode.parent or episode.branched_from
    if place is None or (episode.number, place[0]) not in rows:
      continue
    row = rows[episode.number, place[0]]
    num_turns = place[1]
    path = f'../../{trial}/agent/trajectory.json'
    if episode.agent_id != episodes[row].agent_id:
      references[row].sub_agents[num_turns].append(path)
    elif episode.parent is not None and num_turns == len(episodes[row].turns):
      references[row].continuations.append(path)
  return references


def _refer(trajectory: dict[str, Any], references: _References) -> None:
  """Adds references to a document. Of several continuations it names the first one."""
  steps = trajectory['steps']
  for num_turns, paths in references.sub_agents.items():
    if 0 < num_turns < len(steps):  # the first step is the prompt
      results = steps[num_turns].setdefault('observation', {'results': []})['results']
      results.append({'subagent_trajectory_ref': [{'trajectory_path': path} for path in paths]})
  if references.continuations:
    trajectory['continued_trajectory_ref'] = references.continuations[0]


def document(
    episode: types.Episode,
    place: Mapping[str, object],
    tokenizer: tokenizer_lib.Tokenizer,
    model: str,
    name: str,
    tool_form: str = 'hermes',
) -> dict[str, Any]:
  """Returns the trajectory of an episode; `place` is its step, kind, batch and row in a run."""
  context = episode.prompt.tolist()
  steps: list[dict[str, Any]] = [
      {'step_id': 1, 'source': 'user', 'message': tokenizer.decode(context)}
  ]
  num_read = 0
  num_written = 0
  for turn in episode.turns:
    steps.append(_step(turn, context, tokenizer, len(steps) + 1, tool_form))
    num_read += len(context)
    num_written += len(turn.tokens)
    context = [*context, *turn.tokens.tolist(), *turn.observation.tolist()]
  return {
      'schema_version': VERSION,
      'session_id': name,
      'trajectory_id': name,
      'agent': {'name': AGENT, 'version': '1', 'model_name': model},
      'steps': steps,
      'final_metrics': {
          'total_prompt_tokens': num_read,
          'total_completion_tokens': num_written,
          'total_steps': len(steps),
          'extra': {'score': episode.score, **episode.metrics},
      },
      'extra': {EXTRA: {**place, **episode.to_dict()}},
  }


def _step(
    turn: types.Turn,
    context: list[int],
    tokenizer: tokenizer_lib.Tokenizer,
    number: int,
    tool_form: str,
) -> dict[str, object]:
  """Returns the step of a turn that was sampled after the ids `context`."""
  ids = turn.tokens.tolist()
  text = episode_lib.action_text(tokenizer, turn.tokens)
  metrics = {
      'prompt_tokens': len(context),
      'completion_tokens': len(ids),
      'prompt_token_ids': context,
      'completion_token_ids': ids,
  }
  if np.isfinite(turn.logp).all():
    # The text of a float32 has at most nine digits and holds it exactly.
    metrics['logprobs'] = [float(str(x)) for x in turn.logp]
  step: dict[str, Any] = {
      'step_id': number,
      'source': 'agent',
      'message': text,
      'llm_call_count': 1,
      'metrics': metrics,
      'extra': {
          'action': turn.action,
          'reward': float(turn.reward),
          'end': tokenizer.decode(ids)[len(text) :],  # the eos token, if it was sampled
      },
  }
  calls = []
  in_thought = tokenizer.opening(context) != ''
  for index, call in enumerate(_calls(turn.action, text, tool_form, in_thought), start=1):
    calls.append(
        {
            'tool_call_id': f'call_{number}_{index}',
            'function_name': call.name,
            'arguments': dict(call.arguments),
        }
    )
  if calls:
    step['tool_calls'] = calls
  if len(turn.observation):
    result: dict[str, Any] = {'content': tokenizer.decode(turn.observation)}
    if len(calls) == 1:
      result['source_call_id'] = calls[0]['tool_call_id']
    step['observation'] = {'results': [result]}
  return step


def _calls(action: str, text: str, tool_form: str, in_thought: bool) -> list[tool_calls.Call]:
  """Returns the calls of a turn: a search, or tools in this form."""
  if action == 'search':
    return [tool_calls.Call('search', {'query': search.parse_action(text)[1]})]
  if action in ('answer', 'invalid'):
    return []
  _, calls = tool_calls.make_form(tool_form).parse(text, in_thought)
  return [call for call in calls if not call.error]


def _trial_result(episode: types.Episode, trial: str, model: str, folder: str) -> dict[str, object]:
  """Returns what Harbor's viewer shows of a trial."""
  task = episode.task.id
  return {
      'task_name': task,
      'trial_name': trial,
      'trial_uri': f'file://{os.path.abspath(folder)}',
      'task_id': {'path': task},
      'task_checksum': '',
      'source': episode.task.dataset,
      'config': {'task': {'path': task}, 'trial_name': trial},
      'agent_info': {'name': AGENT, 'version': '1', 'model_info': {'name': model}},
      'verifier_result': {'rewards': _rewards(episode)},
  }


def _rewards(episode):
  return episode.metrics | {'reward': episode.score}


def _job_result(episodes: Sequence[types.Episode], file_name: str, model: str) -> dict[str, object]:
  """Returns what Harbor's viewer shows of a job."""
  by_dataset: dict[str, list[dict[str, float]]] = {}
  for episode in episodes:
    by_dataset.setdefault(episode.task.dataset or 'adhoc', []).append(_rewards(episode))
  evals = {}
  for dataset, rewards in by_dataset.items():
    means = {}
    for name in {name: None for one in rewards for name in one}:
      means[name] = float(np.mean([one.get(name, 0.0) for one in rewards]))
    evals[f'{AGENT}__{model}__{dataset}'] = {'n_trials': len(rewards), 'metrics': [means]}
  return {
      'id': str(uuid.uuid5(uuid.NAMESPACE_OID, file_name)),
      'n_total_trials': len(episodes),
      'stats': {'n_completed_trials': len(episodes), 'evals': evals},
  }


def _write(path: str, value: Mapping[str, object]) -> None:
  os.makedirs(os.path.dirname(path), exist_ok=True)
  with open(path, 'w', encoding='utf-8') as file:
    json.dump(value, file, allow_nan=False)
