"""Trajectories of ATIF, the format of the Harbor framework, to saved episodes.

A folder of documents in; a folder of train_000001.jsonl, .. out. A document of `atif_writer` gives
its episode back exactly. A document of another agent becomes a prompt and turns:

  with ids      each turn is its completion_token_ids, unchanged; a turn whose prompt does not
                continue the turn before starts another row
  without ids   the chat template of the model encodes the texts; texts of `atif_writer` hold their
                template, as the texts of control tokens

Turns that no model wrote for this trajectory (`is_copied_context`, `llm_call_count` 0) are context.
Without log-probs an episode can be imitated, but no policy gradient can use it.
"""

from collections.abc import Callable
from collections.abc import Iterator
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
from stppo_jax.rollout import pipeline
from stppo_jax.serving import template as template_lib
from stppo_jax.trajectories import atif_writer
from stppo_jax.trajectories import saved

_NO_IDS = np.zeros((0,), np.int32)
_MAX_PLACE = 2**31 - 1  # limit on the number of a step or row
_CONTROL = re.compile(r'<\|[^\s<>|]{1,40}\|>')  # how most families write control tokens

AtifStep = Mapping[str, Any]  # a step of a document
Part = tuple[np.ndarray, list[types.Turn]]  # (prompt, turns) of a row


class UnusableTrajectoryError(ValueError):
  """The reason why a trajectory cannot be read."""


class AtifRow(NamedTuple):
  """A row of a document."""

  episode: types.Episode
  own: Mapping[str, Any] | None  # the fields of `atif_writer.OWN_FIELDS`; None: of another agent


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
  documents: list[list[AtifRow]] = []
  unreadable: list[str] = []
  for file in sorted(path.rglob('*.json')) if path.is_dir() else [path]:
    try:
      document = _load(file)
      if document is not None:
        documents.append(_with_reward(reader.rows(document, file.stem), file))
    except types.UserError:
      raise
    except (UnusableTrajectoryError, OSError) as error:
      unreadable.append(f'{file} ({error})')
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
      unreadable.append(f'{file} (not ATIF: {type(error).__name__}: {error})')
  if unreadable:
    logging.warning('%d trajectories are left out, as %s', len(unreadable), unreadable[0])
  if not documents:
    example = f', as {unreadable[0]}' if unreadable else ': give JSON files of ATIF, or a folder'
    raise types.UserError(f'--input={source!r} holds no trajectory that can be read{example}')
  for name, number, batch in _batches(documents, episodes_per_file):
    records = _records(batch, reader.tokenizer, number)
    episodes_lib.write_lines(os.path.join(folder, name), records)
  num_rows = sum(map(len, documents))
  logging.info('%d trajectories are %d rows in %s', len(documents), num_rows, folder)
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
    self._retokenize = retokenize
    self._max_observation = max_observation
    self._form = tool_calls.make_form(tool_form)
    self._template = template_lib.Template(tokenizer, max_observation, tool_form)
    self._turn_end = _NO_IDS
    if tokenizer.render is not None:
      after = self._template.encode_after([], [{'role': 'user', 'content': 'Q'}])
      self._turn_end = np.array([i for i in after[:1] if i in tokenizer.eos_ids], np.int32)

  def rows(self, document: Mapping[str, Any], name: str) -> list[AtifRow]:
    """Returns the rows of a document: several if its context was rewritten."""
    steps = document['steps']
    turns = [step for step in steps if _is_turn(step)]
    own = (document.get('extra') or {}).get(atif_writer.EXTRA)
    if not turns and not own:
      raise UnusableTrajectoryError('no turn of an agent')
    has_ids = all(_ids(step, 'completion') and _ids(step, 'prompt') for step in turns)
    parts: list[Part]
    if self._retokenize or not has_ids:
      parts = [self._encode_own(steps, own) if own else self._encode(steps)]
    else:
      parts = _parts_of_ids(turns)
      if not turns and own:
        parts = [(np.array(own['prompt_token_ids'], np.int32), [])]
      self._check_ids(parts, _question(steps), name)
    if own:
      _check_place(own)
      task = None
    else:
      task_id = document.get('session_id') or name
      task = types.Task(task_id, _question(steps), dataset=document['agent']['name'])
    episodes = [_episode(task, *part, own) for part in parts]
    return [AtifRow(episode, None if self._retokenize else own) for episode in episodes]

  def _check_ids(self, parts: Sequence[Part], question: str, name: str) -> None:
    """Raises a UserError for ids of another tokenizer: the prompt has to hold the question."""
    ids = np.concatenate(
        [x for prompt, turns in parts for x in (prompt, *(turn.tokens for turn in turns))]
    )
    reason = ''
    if len(ids) and not 0 <= ids.min() <= ids.max() < self.tokenizer.vocab_size:
      reason = f'it has no id {ids.min() if ids.min() < 0 else ids.max()}'
    else:
      text = ' '.join(self.tokenizer.decode(parts[0][0]).split())
      if ' '.join(question.split()) not in text:
        reason = f'the first prompt would read {text[:40]!r}'
    if reason:
      raise types.UserError(
          f'{name}: token ids of another tokenizer than that of {self.tokenizer.folder!r}: '
          f'{reason}. Give the model that sampled them, or encode the texts instead: --retokenize'
      )

  def _encode_own(self, steps: Sequence[AtifStep], own: Mapping[str, Any]) -> Part:
    """Encodes our own texts, which hold everything that the policy read.

    Prompts and observations keep their ids if this tokenizer gives them the same text. Otherwise
    names of control tokens in them become tokens, because nothing tells the template's from a
    page's.
    """
    turn_steps = [step for step in steps if _is_turn(step)]
    recorded: list[np.ndarray] = []
    if all(_ids(step, 'prompt') for step in turn_steps):
      recorded = [turn.observation for _, turns in _parts_of_ids(turn_steps) for turn in turns]
    question = _question(steps)
    prompt = _ids(turn_steps[0], 'prompt') if turn_steps else own['prompt_token_ids']
    if self.tokenizer.decode(prompt) != question:
      for name in _CONTROL.findall(question):
        if self.tokenizer.control_library.token_to_id(name) is None:
          raise UnusableTrajectoryError(
              f'its prompt holds {name}, no token of {self.tokenizer.folder!r}'
          )
      prompt = self.tokenizer.encode(question, control=True)
    if not len(prompt):
      raise UnusableTrajectoryError('no text that an agent could have read')

    turns = []
    for i, step in enumerate(turn_steps):
      text = _text(step) + step['extra']['end']
      turn = _turn(step, self.tokenizer.encode(text, control=True))
      turn.routes = None
      results = (step.get('observation') or {}).get('results', ())
      observation = ''.join(_content(result.get('content')) for result in results)
      ids = recorded[i] if recorded else _NO_IDS
      turn.observation = np.array(self._observation_ids(observation, ids), np.int32)
      turns.append(turn)
    return np.array(prompt, np.int32), turns

  def _observation_ids(self, text: str, recorded: np.ndarray) -> Sequence[int] | np.ndarray:
    if self.tokenizer.decode(recorded) == text:
      return recorded
    if text.lstrip().startswith('<information>'):  # as the environment encodes it
      return tokenizer_lib.encode_observation(self.tokenizer, text, self._max_observation)
    return self.tokenizer.encode(text, control=True)

  def _encode(self, steps: Sequence[AtifStep]) -> Part:
    """Encodes the texts of another agent with the chat template."""
    prompt = _NO_IDS
    turns: list[types.Turn] = []
    messages: list[template_lib.Message] = []
    for step in steps:
      written = self._agent_text(step) if step['source'] == 'agent' else ''
      if not _is_turn(step):
        role = 'assistant' if step['source'] == 'agent' else 'user'
        if step['source'] == 'system' and not turns and not messages:
          role = 'system'
        text = written or _text(step)
        messages += [{'role': role, 'content': text}] if text else []
      elif written:
        if not turns:
          prompt = self._encode_messages(self._template.encode, messages)
        elif messages:
          last = turns[-1].tokens.tolist()
          after = lambda new: self._template.encode_after(last, new)
          turns[-1].observation = self._encode_messages(after, messages)
        messages = []
        turns.append(_turn(step, [*self.tokenizer.encode(written), *self._turn_end]))
      role = 'tool' if step.get('tool_calls') else 'user'
      for result in (step.get('observation') or {}).get('results', ()):
        if text := _content(result.get('content')):
          messages.append({'role': role, 'content': text})
    if not len(prompt):
      raise UnusableTrajectoryError('no text that an agent could have read')
    return prompt, turns

  def _encode_messages(
      self, encode: Callable[[list[template_lib.Message]], Any], messages: list
  ) -> np.ndarray:
    """Encodes messages. If the template has no turns of tools or a system, the user has them."""
    as_user = [
        message if message['role'] == 'assistant' else message | {'role': 'user'}
        for message in messages
    ]
    error: ValueError | None = None
    for form in (messages, as_user):
      try:
        return np.array(encode(form), np.int32)
      except ValueError as failure:
        error = failure
    raise UnusableTrajectoryError(str(error)) from error

  def _agent_text(self, step: AtifStep) -> str:
    """Returns the text of an agent's step: its reasoning, its message and its calls."""
    text = _text(step)
    if thought := step.get('reasoning_content'):
      text = f'<think>\n{thought}\n</think>\n\n{text}'
    calls = [
        self._form.write(tool_calls.Call(call['function_name'], call['arguments']))
        for call in step.get('tool_calls') or ()
    ]
    return '\n'.join([text, *calls] if text else calls)


def _load(path: pathlib.Path) -> dict[str, Any] | None:
  """Returns the document of a file; None: the file is something else."""
  try:
    document = json.loads(path.read_text(encoding='utf-8'))
  except (ValueError, RecursionError) as error:
    raise UnusableTrajectoryError(f'not JSON: {error}') from error
  version = document.get('schema_version') if isinstance(document, dict) else None
  is_atif = isinstance(version, str) and version.startswith('ATIF-v1.')
  return document if is_atif else None


def _check_place(own: Mapping[str, Any]) -> None:
  """Checks the place in a run, because its kind and step become the name of a file."""
  name = f'extra.{atif_writer.EXTRA}'
  if own['kind'] not in saved.KINDS:
    raise UnusableTrajectoryError(
        f'{name}.kind is {own["kind"]!r:.60}: one of {", ".join(saved.KINDS)} can be'
    )
  for field in ('step', 'row'):
    value = own[field]
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= _MAX_PLACE:
      raise UnusableTrajectoryError(
          f'{name}.{field} is {value!r:.60}: a whole number from 0 to {_MAX_PLACE} can be'
      )


def _is_turn(step: AtifStep) -> bool:
  """Returns whether a model wrote this step for this trajectory."""
  is_agent = step['source'] == 'agent' and not step.get('is_copied_context')
  return is_agent and step.get('llm_call_count') != 0


def _ids(step: AtifStep, kind: str) -> list[int]:
  return (step.get('metrics') or {}).get(f'{kind}_token_ids') or []


def _question(steps: Sequence[AtifStep]) -> str:
  """Returns the first message of the user."""
  return next((_text(step) for step in steps if step['source'] == 'user'), '')


def _text(step: AtifStep) -> str:
  return _content(step['message'])


def _content(content: Any) -> str:
  """Returns a text, or the texts of a list of parts."""
  if content is None or isinstance(content, str):
    return content or ''
  for part in content:
    if part['type'] != 'text':
      raise UnusableTrajectoryError(f'it holds {part["type"]}s, and only text is supported')
  return ''.join(part['text'] for part in content)


def _parts_of_ids(steps: Sequence[AtifStep]) -> list[Part]:
  """Returns the rows of steps with ids."""
  parts: list[Part] = []
  context: list[int] = []
  for step in steps:
    prompt = _ids(step, 'prompt')
    ids = _ids(step, 'completion')
    logp = step['metrics'].get('logprobs')
    if logp is not None and len(logp) != len(ids):
      raise UnusableTrajectoryError(
          f'step {step["step_id"]} has {len(logp)} log-probs of {len(ids)} tokens'
      )
    if parts and prompt[: len(context)] == context:
      parts[-1][1][-1].observation = np.array(prompt[len(context) :], np.int32)
    else:
      parts.append((np.array(prompt, np.int32), []))
    parts[-1][1].append(_turn(step, ids, logp))
    context = [*prompt, *ids]
  return parts


def _turn(step: AtifStep, ids: Sequence[int], logp: Sequence[float] | None = None) -> types.Turn:
  """Returns a turn. Only our own documents have fields in the step's `extra`."""
  extra = step.get('extra') or {}
  num_ids = len(_ids(step, 'prompt')) + len(_ids(step, 'completion'))
  try:
    routes = types.unpack_array(extra.get('routes'), num_ids)
  except ValueError as error:
    raise UnusableTrajectoryError(f'step {step["step_id"]} has {error}') from error
  return types.Turn(
      tokens=np.array(ids, np.int32),
      logp=np.array([np.nan] * len(ids) if logp is None else logp, np.float32),
      observation=np.array(extra.get('observation_token_ids', ()), np.int32),
      action=str(extra.get('action', 'tool' if step.get('tool_calls') else 'other')),
      reward=float(extra.get('reward', 0.0)),
      routes=routes,
  )


def _episode(
    task: types.Task | None,
    prompt: np.ndarray,
    turns: list[types.Turn],
    own: Mapping[str, Any] | None,
) -> types.Episode:
  if own is None:
    assert task is not None
    counts = dict.fromkeys(('invalid', 'repeated', 'empty', 'cut'), 0.0)
    return types.Episode(task, 0, prompt, turns, counts=counts)
  return dataclasses.replace(types.Episode.from_dict(own), prompt=prompt, turns=turns)


def _with_reward(rows: list[AtifRow], path: pathlib.Path) -> list[AtifRow]:
  """Gives another agent's episode the name of its task and the rewards of Harbor's trial.

  Choice: each row of a trajectory has the reward on its last turn, as the rows of a session have.
  The episode's score counts it once.
  """
  if rows[0].own is not None or rows[0].episode.metrics:
    return rows
  reward = 0.0
  if verdict := _verdict(path):
    task_id, rewards = verdict
    reward = rewards.get('reward', next(iter(rewards.values()), 0.0))
    for episode, _ in rows:
      episode.task = dataclasses.replace(episode.task, id=task_id)
      episode.metrics = dict(rewards)
      if episode.turns:
        episode.turns[-1].reward += reward
  whole_score = sum(row.episode.score for row in rows) - reward * (len(rows) - 1)
  for episode, _ in rows:
    episode.whole_score = whole_score
  return rows


def _verdict(path: pathlib.Path) -> tuple[str, dict[str, float]] | None:
  """Returns (task, rewards) of the trial that a trajectory is of; None if there is none."""
  if path.parent.name != 'agent':
    return None
  try:
    result = json.loads((path.parent.parent / 'result.json').read_text(encoding='utf-8'))
    rewards = result['verifier_result']['rewards']
    return str(result['task_name']), {name: float(x) for name, x in rewards.items()}
  except (OSError, ValueError, LookupError, TypeError, AttributeError):
    return None


def _batches(
    documents: Sequence[Sequence[AtifRow]], size: int
) -> Iterator[tuple[str, int, list[AtifRow]]]:
  """Yields (file name, number, rows) of each batch; other agents' have `size` documents."""
  files: dict[tuple[str, int], dict[int, AtifRow]] = {}
  others: list[Sequence[AtifRow]] = []
  for document in documents:
    if document[0].own is None:
      others.append(document)
    for row in document:
      if row.own is None:
        continue
      rows = files.setdefault((row.own['kind'], row.own['step']), {})
      if row.own['row'] in rows:
        raise types.UserError(
            'two trajectories are line {row} of {kind}_{step:06d}.jsonl: import those of one run '
            'at a time'.format_map(row.own)
        )
      rows[row.own['row']] = row
  for (kind, step), rows in sorted(files.items()):
    yield f'{kind}_{step:06d}.jsonl', step, [rows[i] for i in sorted(rows)]

  first = max((step for kind, step in files if kind == 'train'), default=0) + 1
  for number, start in enumerate(range(0, len(others), size), first):
    groups: dict[str, int] = {}
    batch = []
    for index, document in enumerate(others[start : start + size]):
      for row in document:
        row.episode.group = groups.setdefault(row.episode.task.id, len(groups))
        row.episode.number = index
        batch.append(row)
    yield os.path.basename(saved.path_of('', number)), number, batch


def _records(rows: Sequence[AtifRow], tokenizer: tokenizer_lib.Tokenizer, number: int) -> list:
  """Returns the lines of a batch."""
  own = rows[0].own or {}
  episodes = [row.episode for row in rows]
  batch = pipeline.Sampled(own.get('batch', number), own.get('staleness', 0), episodes, {})
  records = episodes_lib.batch_records(batch, tokenizer, number)
  return [record | {'kind': (row.own or record)['kind']} for record, row in zip(records, rows)]
