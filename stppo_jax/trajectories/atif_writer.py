"""Saved episodes to ATIF, the trajectory format of the Harbor framework, laid out for its viewer.

Lines of episodes/*.jsonl in; documents of version 1.7 out, one per episode:

  atif/<file>/<episode>/agent/trajectory.json    the trajectory
  atif/<file>/<episode>/result.json              its rewards
  atif/<file>/result.json                        their means, by data set

To Harbor's viewer a file of episodes is a job, and an episode a trial. Step 1 is the prompt as the
policy reads it, each further step a turn with the observation that followed. Ids, log-probs and
rewards are exact, and `atif_reader` gives the same episode back.
"""

from collections.abc import Mapping
from collections.abc import Sequence
import datetime
import json
import os
import re
from typing import Any
import uuid

from absl import logging
import numpy as np

from stppo_jax import tokenizer as chat
from stppo_jax import types
from stppo_jax.envs import search
from stppo_jax.envs import tool_calls
from stppo_jax.trajectories import saved

VERSION = 'ATIF-v1.7'
EXTRA = 'stppo_jax'  # the key of our own data in the root's `extra`
AGENT = 'stppo-jax'
# What a record holds besides its tokens and turns.
KEPT = (
    'step kind task dataset hops question answers group metrics core_metrics counts failed '
    'truncated batch staleness role of_episode whole_score error'
).split()


def write_folder(
    source: str, folder: str, tokenizer: chat.Tokenizer, model: str, tool_form: str
) -> int:
  """Writes the episodes of a file, or of all files of a folder; returns their number.

  Args:
    source: the file or folder.
    folder: where the documents go.
    tokenizer: that the ids are of.
    model: its name, for the viewer.
    tool_form: one of tool_calls.FORMS, in which turns call tools.
  """
  paths = [source]
  if os.path.isdir(source):
    paths = [os.path.join(source, name) for name in sorted(os.listdir(source))]
    paths = [path for path in paths if path.endswith('.jsonl')]
  if not paths or not os.path.exists(source):
    raise types.UserError(
        f'{source!r} holds no episodes (*.jsonl): give --input=FOLDER, such as `episodes` of a run'
    )
  written = 0
  for path in paths:
    name = os.path.splitext(os.path.basename(path))[0]
    episodes, time = saved.read(path, tokenizer).episodes, _written_at(path)
    for row, (record, episode) in enumerate(zip(saved.read_records(path), episodes)):
      trial = f'{row:04d}_{re.sub("[^A-Za-z0-9-]+", "-", episode.task.id)[:60]}'
      written_to = os.path.join(folder, name, trial)
      kept = {key: record[key] for key in KEPT if key in record} | {'row': row}
      trajectory = document(episode, kept, tokenizer, model, f'{name}/{trial}', tool_form)
      _write(os.path.join(written_to, 'agent', 'trajectory.json'), trajectory)
      result = _result(episode, trial, model, written_to) | time
      _write(os.path.join(written_to, 'result.json'), result)
      written += 1
    _write(os.path.join(folder, name, 'result.json'), _job_result(episodes, name, model) | time)
    logging.info('%s: %d trajectories', path, len(episodes))
  return written


def document(
    episode: types.Episode,
    kept: Mapping[str, Any],
    tokenizer: chat.Tokenizer,
    model: str,
    name: str,
    tool_form: str = 'hermes',
) -> dict[str, Any]:
  """Returns the trajectory of an episode; `kept` is what its record holds besides."""
  context = episode.prompt.tolist()
  steps = [{'step_id': 1, 'source': 'user', 'message': tokenizer.decode(context)}]
  num_read = num_written = 0
  for k, turn in enumerate(episode.turns):
    is_last = k == len(episode.turns) - 1
    steps.append(_step(turn, context, tokenizer, k + 2, tool_form, is_last))
    num_read, num_written = num_read + len(context), num_written + len(turn.tokens)
    context = [*context, *turn.tokens.tolist(), *turn.observation.tolist()]
  own = dict(kept) | ({} if episode.turns else {'prompt_token_ids': context})
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
      'extra': {EXTRA: own},
  }


def _step(turn, context, tokenizer, number, tool_form, is_last):
  """Returns the step of a turn that was sampled after the ids `context`."""
  ids, text = turn.tokens.tolist(), turn_text(tokenizer, turn.tokens)
  metrics = {
      'prompt_tokens': len(context),
      'completion_tokens': len(ids),
      'prompt_token_ids': context,
      'completion_token_ids': ids,
  }
  if np.isfinite(turn.logp).all():
    metrics['logprobs'] = [float(str(x)) for x in turn.logp]  # nine digits hold a float32
  step = {
      'step_id': number,
      'source': 'agent',
      'message': text,
      'llm_call_count': 1,
      'metrics': metrics,
      'extra': {'action': turn.action, 'reward': float(turn.reward)},
  }
  step['extra']['end'] = tokenizer.decode(ids)[len(text) :]  # the eos token, where it was sampled
  if turn.routes is not None:
    step['extra']['routes'] = types.pack_array(turn.routes)
  calls = [
      {'tool_call_id': f'call_{number}_{i}', 'function_name': name, 'arguments': dict(arguments)}
      for i, (name, arguments) in enumerate(_calls(turn.action, text, tool_form), start=1)
  ]
  if calls:
    step['tool_calls'] = calls
  if len(turn.observation):
    result = {'content': tokenizer.decode(turn.observation)}
    if len(calls) == 1:
      result['source_call_id'] = calls[0]['tool_call_id']
    step['observation'] = {'results': [result]}
    if is_last:  # else it is in the next prompt
      step['extra']['observation_token_ids'] = turn.observation.tolist()
  return step


def turn_text(tokenizer: chat.Tokenizer, tokens: np.ndarray) -> str:
  """Returns the text of a turn without the eos token that may end it."""
  ends = len(tokens) > 0 and tokens[-1] in tokenizer.eos_ids
  return tokenizer.decode(tokens[:-1] if ends else tokens)


def _calls(action, text, tool_form) -> Sequence[tuple[str, Mapping[str, Any]]]:
  """Returns (name, arguments) of the calls of a turn: a search, or tools in this form."""
  if action == 'search':
    return [('search', {'query': search.parse_action(text)[1]})]
  if action in ('answer', 'invalid'):
    return []
  calls = tool_calls.make_form(tool_form).parse(text)[1]
  return [(call.name, call.arguments) for call in calls if not call.error]


def _result(episode, trial, model, path):
  """Returns what Harbor's viewer shows of a trial."""
  task = episode.task.id
  return {
      'task_name': task,
      'trial_name': trial,
      'trial_uri': f'file://{os.path.abspath(path)}',
      'task_id': {'path': task},
      'task_checksum': '',
      'source': episode.task.dataset,
      'config': {'task': {'path': task}, 'trial_name': trial},
      'agent_info': {'name': AGENT, 'version': '1', 'model_info': {'name': model}},
      'verifier_result': {'rewards': {**episode.metrics, 'reward': episode.score}},
  }


def _job_result(episodes, name, model):
  """Returns what Harbor's viewer shows of a job."""
  rewards: dict[str, list[dict[str, float]]] = {}
  for episode in episodes:
    of_data_set = rewards.setdefault(f'{AGENT}__{model}__{episode.task.dataset or "adhoc"}', [])
    of_data_set.append({**episode.metrics, 'reward': episode.score})
  evals = {}
  for key, found in rewards.items():
    names = dict.fromkeys(name for one in found for name in one)
    mean = {name: float(np.mean([one.get(name, 0.0) for one in found])) for name in names}
    evals[key] = {'n_trials': len(found), 'metrics': [mean]}
  return {
      'id': str(uuid.uuid5(uuid.NAMESPACE_OID, name)),
      'n_total_trials': len(episodes),
      'stats': {'n_completed_trials': len(episodes), 'evals': evals},
  }


def _written_at(path):
  """Returns when the episodes of a file were saved; a record has no time of its own."""
  time = datetime.datetime.fromtimestamp(os.path.getmtime(path), datetime.UTC)
  return {'started_at': time.isoformat(), 'finished_at': time.isoformat()}


def _write(path, value):
  os.makedirs(os.path.dirname(path), exist_ok=True)
  with open(path, 'w', encoding='utf-8') as file:
    json.dump(value, file, allow_nan=False)
