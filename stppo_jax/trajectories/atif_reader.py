"""Trajectories of ATIF, the format of the Harbor framework, to saved episodes.

A folder of documents in; a folder of train_000001.jsonl, .. out. A document of `atif_writer` holds
its episode, and gives it back exactly. A document of another agent becomes a prompt and turns:

  with ids      each turn is its completion_token_ids, unchanged; a turn whose prompt does not
                continue the turn before starts another row
  without ids   the chat template of the model encodes the texts

Turns that no model wrote for this trajectory (`is_copied_context`, `llm_call_count` 0) are context.
Without log-probs an episode can be imitated, but no policy gradient can use it.
"""

import collections
from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import json
import os
import pathlib
import re
from typing import Any
from typing import NamedTuple

from absl import logging
import numpy as np

from stppo_jax import tokenizer as tokenizer_lib
from stppo_jax import types
from stppo_jax.envs import tool_calls
from stppo_jax.monitoring import episodes as episodes_lib
from stppo_jax.serving import template as template_lib
from stppo_jax.trajectories import atif_writer
from stppo_jax.trajectories import saved

# The errors of a file that is no trajectory, or cannot be used.
_UNUSABLE = (
    ArithmeticError,
    AttributeError,
    LookupError,
    OSError,
    RecursionError,
    TypeError,
    ValueError,
)
_NO_IDS = np.zeros((0,), np.int32)
_MAX_PLACE = 2**31 - 1  # limit on the number of a step or row
_CONTROL = re.compile(r'<\|[^\s<>|]{1,40}\|>')  # how most families write control tokens

AtifStep = Mapping[str, Any]  # a step of a document


class AtifRow(NamedTuple):
  """A row of a document."""

  episode: types.Episode
  own: Mapping[str, Any] | None  # the record that `atif_writer` added; None: of another agent


def read_folder(source: str, folder: str, reader: 'AtifReader', episodes_per_file: int) -> int:
  """Writes the trajectories of `source`, a folder or a file, to `folder`; returns their number.

  Our own episodes return to their batches. Other agents' episodes form batches of
  `episodes_per_file`, in which the episodes of a task are a group. The rows of a document are one
  episode of one batch. The function logs documents that cannot be read, and leaves them out.
  """
  if os.path.isdir(folder) and os.listdir(folder):
    raise types.UserError(f'{folder!r} holds files already: give another --workdir')
  path = pathlib.Path(source)
  if not source or not path.exists():
    raise types.UserError(f'--input={source!r}: no such file or folder: give trajectories of ATIF')
  paths = sorted(path.rglob('*.json')) if path.is_dir() else [path]
  documents: list[list[AtifRow]] = []
  unreadable: list[str] = []
  for file in paths:
    try:
      document = _load(file)
      if document is not None:
        rows = reader.rows(document, file.stem)
        rows = _with_reward(rows, file)
        if reader.retokenize:  # other ids than those of the run: new batches
          rows = [row._replace(own=None) for row in rows]
        documents.append(rows)
    except types.UserError:
      raise
    except _UNUSABLE as error:
      unreadable.append(f'{file} ({type(error).__name__}: {error})')
  if unreadable:
    logging.warning('%d trajectories are left out, as %s', len(unreadable), unreadable[0])
  if not documents:
    example = f', as {unreadable[0]}' if unreadable else ': give JSON files of ATIF, or a folder'
    raise types.UserError(f'--input={source!r} holds no trajectory that can be read{example}')
  for (kind, step), rows in _batches(documents, episodes_per_file).items():
    episodes = [row.episode for row in rows]
    records = episodes_lib.to_records(episodes, reader.tokenizer, step, kind)
    own = rows[0].own or {}
    origin = {'batch': own.get('batch', step), 'staleness': own.get('staleness', 0)}
    lines = [record | origin for record in records]
    file_name = f'{kind}_{step:06d}.jsonl'
    episodes_lib.write_lines(os.path.join(folder, file_name), lines)
  logging.info('%d trajectories are in %s', len(documents), folder)
  return len(documents)


class AtifReader:
  """Turns documents into episodes of one tokenizer.

  Args:
    tokenizer: of the model that is to read them.
    tool_form: one of tool_calls.FORMS, in which calls are written if no ids are given.
    max_observation: tokens of an observation at most, without a chat template.
    retokenize: encodes the texts although there are ids.
  """

  def __init__(
      self,
      tokenizer: tokenizer_lib.Tokenizer,
      tool_form: str = 'hermes',
      max_observation: int = 2**20,
      retokenize: bool = False,
  ):
    self.tokenizer = tokenizer
    self.retokenize = retokenize
    self._max_observation = max_observation
    self._form = tool_calls.make_form(tool_form)
    self._template = template_lib.Template(tokenizer, max_observation, tool_form)
    self._turn_end: list[int] = []
    if tokenizer.render is not None:
      after = self._template.encode_after([], [{'role': 'user', 'content': 'Q'}])
      self._turn_end = [i for i in after[:1] if i in tokenizer.eos_ids]

  def rows(self, document: Mapping[str, Any], name: str) -> list[AtifRow]:
    """Returns the rows of a document: several if its context was rewritten."""
    steps = document['steps']
    question = _question(steps)
    own = (document.get('extra') or {}).get(atif_writer.EXTRA)
    if own:
      _check_place(own)
      episode = types.Episode.from_dict(own)
      if self.retokenize:
        self._encode_own(episode, steps)
      else:
        self._check_ids([episode], question, name)
      return [AtifRow(episode, own)]
    turns = [step for step in steps if _is_turn(step)]
    if not turns:
      raise ValueError('no turn of an agent')
    task = types.Task(
        id=document.get('session_id') or name, question=question, dataset=document['agent']['name']
    )
    has_ids = all(_ids(step, 'completion') and _ids(step, 'prompt') for step in turns)
    if self.retokenize or not has_ids:
      return [AtifRow(self._encode(task, steps), None)]
    episodes = _episodes_of_ids(task, turns)
    self._check_ids(episodes, question, name)
    return [AtifRow(episode, None) for episode in episodes]

  def _check_ids(self, episodes: Sequence[types.Episode], question: str, name: str) -> None:
    """Raises a UserError for ids of another tokenizer: the prompt has to hold the question."""
    ids = np.concatenate([episode.unroll()[0] for episode in episodes])
    wrong = ids[(ids < 0) | (ids >= self.tokenizer.vocab_size)]
    if len(wrong):
      reason = f'it has no id {wrong[0]}'
    else:
      text = ' '.join(self.tokenizer.decode(episodes[0].prompt).split())
      if ' '.join(question.split()) in text:
        return
      reason = f'the first prompt would read {text[:40]!r}'
    raise types.UserError(
        f'{name}: token ids of another tokenizer than that of {self.tokenizer.folder!r}: '
        f'{reason}. Give the model that sampled them, or encode the texts instead: --retokenize'
    )

  def _encode_own(self, episode: types.Episode, steps: Sequence[AtifStep]) -> None:
    """Encodes the texts of an own document, which hold everything that the policy read.

    Prompts and observations keep their ids if this tokenizer gives them the same text. Otherwise
    names of control tokens in a chat become tokens, because nothing tells the template's from a
    page's.
    """
    question = _question(steps)
    if self.tokenizer.decode(episode.prompt) != question:
      for name in _CONTROL.findall(question):
        if self.tokenizer.control_library.token_to_id(name) is None:
          raise ValueError(f'its prompt holds {name}, no token of {self.tokenizer.folder!r}')
      episode.prompt = np.array(self.tokenizer.encode(question, control=True), np.int32)
    turn_steps = [step for step in steps if _is_turn(step)]
    for turn, step in zip(episode.turns, turn_steps, strict=True):
      text = _content(step['message']) + step['extra']['end']
      turn.tokens = np.array(self.tokenizer.encode(text, control=True), np.int32)
      turn.logp = np.full(len(turn.tokens), np.nan, np.float32)
      turn.routes = None
      observation = self._observation_ids(''.join(_results(step)), turn.observation)
      turn.observation = np.array(observation, np.int32)

  def _observation_ids(self, text: str, recorded: np.ndarray) -> Sequence[int] | np.ndarray:
    if self.tokenizer.decode(recorded) == text:
      return recorded
    if text.lstrip().startswith('<information>'):  # as the environment encodes it
      return tokenizer_lib.encode_observation(self.tokenizer, text, self._max_observation)
    return self.tokenizer.encode(text, control=True)

  def _encode(self, task: types.Task, steps: Sequence[AtifStep]) -> types.Episode:
    """Encodes the texts of another agent with the chat template."""
    prompt = _NO_IDS
    turns: list[types.Turn] = []
    messages: list[template_lib.Message] = []
    for step in steps:
      source = step['source']
      text = self._agent_text(step) if source == 'agent' else _content(step['message'])
      if not text:
        pass
      elif not _is_turn(step):
        role = 'assistant' if source == 'agent' else 'user'
        if source == 'system' and not turns and not messages:
          role = 'system'
        messages.append({'role': role, 'content': text})
      else:
        if not turns:
          prompt = self._encode_messages(self._template.encode, messages)
        elif messages:
          last = turns[-1].tokens.tolist()
          after = lambda new: self._template.encode_after(last, new)
          turns[-1].observation = self._encode_messages(after, messages)
        messages = []
        ids = self.tokenizer.encode(text) + self._turn_end
        turns.append(_turn(step, ids))
      role = 'tool' if step.get('tool_calls') else 'user'
      messages += [{'role': role, 'content': result} for result in _results(step)]
    if not len(prompt):
      raise ValueError('no text that an agent could have read')
    return _episode(task, prompt, turns)

  def _encode_messages(
      self, encode: Callable[[list[template_lib.Message]], Any], messages: list
  ) -> np.ndarray:
    """Encodes messages. If the template has no turns of tools or a system, the user has them."""
    try:
      ids = encode(messages)
    except ValueError:
      as_user = []
      for message in messages:
        role = 'assistant' if message['role'] == 'assistant' else 'user'
        as_user.append(message | {'role': role})
      ids = encode(as_user)
    return np.array(ids, np.int32)

  def _agent_text(self, step: AtifStep) -> str:
    """Returns the text of an agent's step: its reasoning, its message and its calls."""
    text = _content(step['message'])
    if thought := step.get('reasoning_content'):
      text = f'<think>\n{thought}\n</think>\n\n{text}'
    parts = [text] if text else []
    for record in step.get('tool_calls') or ():
      call = tool_calls.Call(record['function_name'], record['arguments'])
      parts.append(self._form.write(call))
    return '\n'.join(parts)


def _load(path: pathlib.Path) -> dict[str, Any] | None:
  """Returns the document of a file; None: the file is something else."""
  document = json.loads(path.read_text(encoding='utf-8'))
  version = document.get('schema_version') if isinstance(document, dict) else None
  is_atif = isinstance(version, str) and version.startswith('ATIF-v1.')
  return document if is_atif else None


def _check_place(own: Mapping[str, Any]) -> None:
  """Checks the place in a run, because its kind and step become the name of a file."""
  name = f'extra.{atif_writer.EXTRA}'
  numbers = (own['step'], own['row'])
  are_valid = all(type(number) is int and 0 <= number <= _MAX_PLACE for number in numbers)
  if own['kind'] not in saved.KINDS or not are_valid:
    place = ', '.join(f'{field} {own[field]!r:.60}' for field in ('kind', 'step', 'row'))
    raise ValueError(f'{name} has {place}: no place in a run')


def _is_turn(step: AtifStep) -> bool:
  """Returns whether a model wrote this step for this trajectory."""
  is_agent = step['source'] == 'agent' and not step.get('is_copied_context')
  return is_agent and step.get('llm_call_count') != 0


def _ids(step: AtifStep, kind: str) -> list[int]:
  return (step.get('metrics') or {}).get(f'{kind}_token_ids') or []


def _question(steps: Sequence[AtifStep]) -> str:
  """Returns the first message of the user."""
  for step in steps:
    if step['source'] == 'user':
      return _content(step['message'])
  return ''


def _results(step: AtifStep) -> list[str]:
  """Returns the texts that an agent read after its step."""
  results = (step.get('observation') or {}).get('results', ())
  texts = [_content(result.get('content')) for result in results]
  return [text for text in texts if text]


def _content(content: Any) -> str:
  """Returns a text, or the texts of a list of parts."""
  if content is None or isinstance(content, str):
    return content or ''
  for part in content:
    if part['type'] != 'text':
      raise ValueError(f'it holds {part["type"]}s, and only text is supported')
  return ''.join(part['text'] for part in content)


def _episodes_of_ids(task: types.Task, steps: Sequence[AtifStep]) -> list[types.Episode]:
  """Returns the rows of steps with ids."""
  episodes: list[types.Episode] = []
  context: list[int] = []
  for step in steps:
    prompt = _ids(step, 'prompt')
    ids = _ids(step, 'completion')
    logp = step['metrics'].get('logprobs')
    if logp is not None and len(logp) != len(ids):
      raise ValueError(f'step {step["step_id"]} has {len(logp)} log-probs of {len(ids)} tokens')
    if episodes and prompt[: len(context)] == context:
      observation = prompt[len(context) :]
      episodes[-1].turns[-1].observation = np.array(observation, np.int32)
    else:
      episode = _episode(task, np.array(prompt, np.int32), [])
      episodes.append(episode)
    episodes[-1].turns.append(_turn(step, ids, logp))
    context = [*prompt, *ids]
  return episodes


def _turn(step: AtifStep, ids: Sequence[int], logp: Sequence[float] | None = None) -> types.Turn:
  """Returns a turn. Only our own documents have fields in the step's `extra`."""
  extra = step.get('extra') or {}
  if logp is None:
    logp = [np.nan] * len(ids)
  action = 'tool' if step.get('tool_calls') else 'other'
  num_ids = len(_ids(step, 'prompt')) + len(_ids(step, 'completion'))
  return types.Turn(
      tokens=np.array(ids, np.int32),
      logp=np.array(logp, np.float32),
      observation=np.array(extra.get('observation_token_ids', ()), np.int32),
      action=str(extra.get('action', action)),
      reward=float(extra.get('reward', 0.0)),
      routes=types.unpack_array(extra.get('routes'), num_ids),
  )


def _episode(task: types.Task, prompt: np.ndarray, turns: list[types.Turn]) -> types.Episode:
  counts = dict.fromkeys(('invalid', 'repeated', 'empty', 'cut'), 0.0)
  return types.Episode(task, 0, prompt, turns, counts=counts)


def _with_reward(rows: list[AtifRow], path: pathlib.Path) -> list[AtifRow]:
  """Gives another agent's episode the name of its task and the rewards of Harbor's trial.

  Choice: each row of a trajectory has the reward on its last turn, as the rows of a session have.
  The episode's score counts it once.
  """
  if rows[0].own is not None:
    return rows
  reward = 0.0
  result_path = path.parent.parent / 'result.json'
  if path.parent.name == 'agent' and result_path.exists():
    result = json.loads(result_path.read_text(encoding='utf-8'))
    verdict = (result.get('verifier_result') or {}).get('rewards') or {}
    rewards = {name: float(x) for name, x in verdict.items()}
    reward = rewards.get('reward', next(iter(rewards.values()), 0.0))
    for episode, _ in rows:
      episode.task = dataclasses.replace(episode.task, id=str(result['task_name']))
      episode.metrics = dict(rewards)
      episode.turns[-1].reward += reward
  whole_score = sum(row.episode.score for row in rows) - reward * (len(rows) - 1)
  for episode, _ in rows:
    episode.whole_score = whole_score
  return rows


def _batches(
    documents: Sequence[Sequence[AtifRow]], size: int
) -> dict[tuple[str, int], list[AtifRow]]:
  """Returns the rows of each file, by kind and step; other agents' have `size` documents."""
  by_place: dict[tuple[str, int, int], AtifRow] = {}
  others = []
  for document in documents:
    for row in document:
      if row.own is None:
        continue
      place = (row.own['kind'], row.own['step'], row.own['row'])
      if place in by_place:
        raise types.UserError(
            'two trajectories are the same line of a file: import those of one run at a time'
        )
      by_place[place] = row
    if document[0].own is None:
      others.append(document)
  files: dict[tuple[str, int], list[AtifRow]] = collections.defaultdict(list)
  for kind, step, line in sorted(by_place):
    files[kind, step].append(by_place[kind, step, line])
  first = max((step for kind, step in files if kind == 'train'), default=0) + 1
  for number, start in enumerate(range(0, len(others), size), first):
    groups: dict[str, int] = {}
    for index, document in enumerate(others[start : start + size]):
      for row in document:
        row.episode.group = groups.setdefault(row.episode.task.id, len(groups))
        row.episode.number = index
        files['train', number].append(row)
  return files
