"""Trajectories of ATIF, the format of the Harbor framework, to saved episodes.

A folder of documents in; a folder of train_000001.jsonl, .. out. A document of `writer` holds
its episode, and gives it back exactly. A document of another agent becomes a prompt and turns:

  with ids      each turn is its completion_token_ids, unchanged; a turn whose prompt does not
                continue the turn before starts another row
  without ids   the chat template of the model encodes the texts

The trajectories to which one refers are rows of its episode, with their parents: embedded ones,
and files (`subagent_trajectory_ref`, `continued_trajectory_ref`).

Turns that no model wrote for this trajectory (`is_copied_context`, `llm_call_count` 0) are context.
So are masked turns: those with `trainable: false`, and those whose log-probs are all exactly 0,
which stand for unknown ones. A trajectory of masked turns alone is not trained on.
Without log-probs an episode can be imitated, but no policy gradient can use it.
"""

from collections.abc import Mapping
from collections.abc import Sequence
import contextlib
import dataclasses
import functools
import json
import math
import os
import pathlib
import re
from typing import Any
from typing import NamedTuple

from absl import logging
import numpy as np

from stppo_jax import types
from stppo_jax.atif import writer
from stppo_jax.monitoring import episodes as episodes_lib
from stppo_jax.rollout import batching
from stppo_jax.rollout import saved
from stppo_jax.text import template as template_lib
from stppo_jax.text import tokenizer as tokenizer_lib
from stppo_jax.text import tool_calls

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
_MAX_PLACE = 2**31 - 1  # limit on the number of a step or row
_CONTROL = re.compile(r'<\|[^\s<>|]{1,40}\|>')  # how most families write control tokens

AtifStep = Mapping[str, Any]  # a step of a document
File = tuple[str, int]  # kind and step of a file of episodes


class _Reference(NamedTuple):
  """A reference of a document to another one."""

  position: int  # index of the step that has it
  path: str = ''  # a file
  trajectory_id: str = ''  # names an embedded document
  continues: bool = False  # the other document is of the same agent


class _Rows(NamedTuple):
  """The rows of a document."""

  episodes: list[types.Episode]
  positions: list[int]  # indices of the steps that are their turns

  def place(self, position: int) -> tuple[int, int]:
    """Returns (number of a row, turns of it) after a step."""
    num_turns = sum(turn <= position for turn in self.positions)
    for episode in self.episodes[:-1]:
      if num_turns <= len(episode.turns):
        return episode.segment, num_turns
      num_turns -= len(episode.turns)
    return self.episodes[-1].segment, num_turns


class _Branch(NamedTuple):
  """A document that is still to be read, and its place in its episode."""

  document: Mapping[str, Any]
  file: pathlib.Path
  agent_id: str
  parent: tuple[int, int] | None = None  # (number of a row, turns of it)


class OwnEpisode(NamedTuple):
  """An episode of a run, which goes back to its line."""

  episode: types.Episode
  record: Mapping[str, Any]  # what `writer` added


def read_folder(source: str, folder: str, reader: 'AtifReader', episodes_per_file: int) -> int:
  """Writes the trajectories of `source`, a folder or a file, to `folder`; returns their number.

  Our own episodes return to their batches. Other agents' episodes form batches of
  `episodes_per_file`, in which the episodes of a task are a group. The rows of a document, and of
  those to which it refers, are one episode of one batch. The function logs documents that cannot be
  read, and leaves them out.
  """
  if os.path.isdir(folder) and os.listdir(folder):
    raise types.UserError(f'{folder!r} holds files already: give another --workdir')
  path = pathlib.Path(source)
  if not source or not path.exists():
    raise types.UserError(f'--input={source!r}: no such file or folder: give trajectories of ATIF')
  paths = sorted(path.rglob('*.json')) if path.is_dir() else [path]
  own: list[OwnEpisode] = []
  others: dict[Any, list[types.Episode]] = {}
  unreadable: list[str] = []
  num_unrewarded = 0
  parents = _parents(paths)
  for file in paths:
    try:
      document = _load(file)
      if document is None or file in parents:
        continue
      record = own_record(document)
      if record is None:
        episodes = _read_tree(file, document, parents, reader, unreadable)
        has_reward = _add_reward(episodes, file)
      else:
        episodes = reader.episodes(document, file.stem)
      kind, step = (record['kind'], record['step']) if record else ('train', 0)
      lines = episodes_lib.to_records(episodes, reader.tokenizer, step, kind)
      json.dumps(lines)  # a document with fields of other types cannot be written
    except types.UserError:
      raise
    except _UNUSABLE as error:
      unreadable.append(_shown_error(file, error))
      continue
    if record is None:
      others[file] = episodes
      num_unrewarded += not has_reward
    elif reader.retokenize:  # other ids than those of the run: new batches
      number = episodes[0].number
      key = (kind, step, number) if episodes[0].is_segment else file
      others.setdefault(key, []).extend(episodes)
    else:
      own.append(OwnEpisode(episodes[0], record))
  num_episodes = len(own) + len(others)
  if reader.num_masked:
    logging.warning(
        '%d turns are masked, because they have `trainable: false` or log-probs that are all 0',
        reader.num_masked,
    )
  if unreadable:
    logging.warning('%d trajectories are left out, as %s', len(unreadable), unreadable[0])
  if num_unrewarded:
    logging.info(
        '%d trajectories have no reward in the result.json of a trial, and get 0', num_unrewarded
    )
  if not num_episodes:
    example = f', as {unreadable[0]}' if unreadable else ': give JSON files of ATIF, or a folder'
    raise types.UserError(f'--input={source!r} holds no trajectory that can be read{example}')
  files = _own_batches(own)
  files |= _new_batches(list(others.values()), episodes_per_file, first=_last_batch(files) + 1)
  for (kind, step), sampled in files.items():
    records = episodes_lib.batch_records(sampled, reader.tokenizer, step, kind)
    episodes_lib.write_lines(os.path.join(folder, f'{kind}_{step:06d}.jsonl'), records)
  logging.info('%d trajectories are in %s', num_episodes, folder)
  return num_episodes


class AtifReader:
  """Turns documents into episodes of one tokenizer.

  Args:
    tokenizer: of the model that is to read them.
    tool_form: one of tool_calls.FORMS, in which calls are written if no ids are given.
    max_observation: tokens of an observation at most, without a chat template.
    retokenize: encodes the texts although there are ids.
    vocab_size: of the model, which may have more ids than the tokenizer; 0: as many.
  """

  def __init__(
      self,
      tokenizer: tokenizer_lib.Tokenizer,
      tool_form: str = 'hermes',
      max_observation: int = 2**20,
      retokenize: bool = False,
      vocab_size: int = 0,
  ):
    self.tokenizer = tokenizer
    self.retokenize = retokenize
    self.num_masked = 0  # turns of all documents so far that are not trained on
    self._max_observation = max_observation
    self._vocab_size = vocab_size or tokenizer.vocab_size
    self._form = tool_calls.make_form(tool_form)
    self._template = template_lib.Template(tokenizer, max_observation, tool_form)
    self._turn_end: list[int] = []
    if tokenizer.render is not None:
      after = self._template.encode_after([], [{'role': 'user', 'content': 'Q'}])
      self._turn_end = [i for i in after[:1] if i in tokenizer.eos_ids]

  def episodes(self, document: Mapping[str, Any], name: str) -> list[types.Episode]:
    """Returns the rows of a document: several if its context was rewritten."""
    steps = document['steps']
    own = own_record(document)
    if own is not None:
      question = _question(steps)
      episode = types.Episode.from_dict(own)
      if self.retokenize:
        self._encode_own(episode, steps)
      else:
        self._check_ids([episode], question, name)
      if not all(map(_is_trainable, (document, *steps))):
        episode.failed = True
        self.num_masked += len(episode.turns)
      return [episode]
    return self.rows(document, name).episodes

  def rows(self, document: Mapping[str, Any], name: str) -> _Rows:
    """Returns the rows of another agent's document."""
    steps = document['steps']
    question = _question(steps)
    all_turns = [step for step in steps if _is_turn(step)]
    if not all_turns:
      raise ValueError('no turn of an agent')
    trained = [step for step in all_turns if self._is_trained(step)]
    is_masked = not trained or not _is_trainable(document)
    turns = all_turns if is_masked else trained
    self.num_masked += len(all_turns) if is_masked else len(all_turns) - len(trained)
    session_id = document.get('session_id') or name
    if not isinstance(session_id, str):
      raise ValueError(f'session_id is {types.shown(session_id)}, and a text is needed')
    task = types.Task(id=session_id, question=question, dataset=document['agent']['name'])
    has_ids = all(_ids(step, 'completion') and _ids(step, 'prompt') for step in turns)
    if self.retokenize or not has_ids:
      turns = [step for step in turns if self._agent_text(step)]
      episodes = [self._encode(task, steps, turns)]
    else:
      episodes = _episodes_of_ids(task, turns)
      self._check_ids(episodes, question, name)
    for episode in episodes:
      episode.failed = is_masked
    turn_steps = {id(step) for step in turns}
    positions = [i for i, step in enumerate(steps) if id(step) in turn_steps]
    return _Rows(episodes, positions)

  def _is_trained(self, step: AtifStep) -> bool:
    """Returns whether a turn is not masked."""
    logp = (step.get('metrics') or {}).get('logprobs') or []
    is_unknown = len(logp) > 0 and not any(logp) and not self.retokenize
    return _is_trainable(step) and not is_unknown

  def _check_ids(self, episodes: Sequence[types.Episode], question: str, name: str) -> None:
    """Raises a UserError for ids of another tokenizer: the prompt has to hold the question."""
    ids = np.concatenate([episode.unroll()[0] for episode in episodes])
    wrong = ids[(ids < 0) | (ids >= self._vocab_size)]
    if len(wrong):
      reason = f'the model has no id {wrong[0]}, and {self._vocab_size} ids'
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
      episode.prompt = _array(self.tokenizer.encode(question, control=True))
    turn_steps = [step for step in steps if _is_turn(step)]
    for turn, step in zip(episode.turns, turn_steps, strict=True):
      text = _content(step['message']) + step['extra']['end']
      turn.tokens = _array(self.tokenizer.encode(text, control=True))
      turn.logp = np.full(len(turn.tokens), np.nan, np.float32)
      turn.routes = None
      results = ''.join(_results(step))
      turn.observation = _array(self._observation_ids(results, turn.observation))

  def _observation_ids(self, text: str, recorded: np.ndarray) -> Sequence[int] | np.ndarray:
    if self.tokenizer.decode(recorded) == text:
      return recorded
    if text.lstrip().startswith('<information>'):  # as the environment encodes it
      return tokenizer_lib.encode_observation(self.tokenizer, text, self._max_observation)
    return self.tokenizer.encode(text, control=True)

  def _encode(
      self, task: types.Task, steps: Sequence[AtifStep], turn_steps: Sequence[AtifStep]
  ) -> types.Episode:
    """Encodes the texts of another agent with the chat template. `turn_steps` become turns."""
    turn_ids = {id(step) for step in turn_steps}
    episode = types.Episode(task, 0, _array(()), [])
    turns = episode.turns
    messages: list[template_lib.Message] = []  # since the last turn
    for step in steps:
      source = step['source']
      is_agent = source == 'agent'
      text = self._agent_text(step) if is_agent else _content(step['message'])
      if text and id(step) in turn_ids:
        if not turns:
          episode.prompt = self._encode_messages(messages, None)
        elif messages:
          turns[-1].observation = self._encode_messages(messages, turns[-1])
        messages = []
        turns.append(_turn(step, self.tokenizer.encode(text) + self._turn_end))
      elif text:
        role = 'assistant' if is_agent else 'user'
        if source == 'system' and not turns and not messages:
          role = 'system'
        messages.append({'role': role, 'content': text})
      role = 'tool' if step.get('tool_calls') else 'user'
      messages += [{'role': role, 'content': result} for result in _results(step)]
    if not len(episode.prompt):
      raise ValueError('no text that an agent could have read')
    return episode

  def _encode_messages(self, messages, after):
    """Encodes messages: the first ones, or those that follow a turn.

    If the template has no turns of tools or a system, the user has them.
    """
    encode = self._template.encode
    if after is not None:
      encode = functools.partial(self._template.encode_after, after.tokens.tolist())
    try:
      return _array(encode(messages))
    except ValueError:
      as_user: list[template_lib.Message] = []
      for message in messages:
        role = 'assistant' if message['role'] == 'assistant' else 'user'
        as_user.append({**message, 'role': role})
      return _array(encode(as_user))

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


def _load(path: pathlib.Path) -> dict[str, object] | None:
  """Returns the document of a file; None: the file is something else. ValueError: not ATIF-v1."""
  document = types.parse_json(path.read_text(encoding='utf-8'))
  version = document.get('schema_version') if isinstance(document, dict) else None
  if not isinstance(version, str) or not version.startswith('ATIF-'):
    return None
  if not version.startswith('ATIF-v1.'):
    raise ValueError(f'schema_version is {version!r:.40}: ATIF-v1 is needed')
  return document


def _shown_error(name: object, error: Exception) -> str:
  return f'{name} ({type(error).__name__}: {error})'


def _references(document: Mapping[str, Any]) -> list[_Reference]:
  """Returns the references of a document to others, in order."""
  references: list[_Reference] = []
  for position, step in enumerate(document['steps']):
    for result in (step.get('observation') or {}).get('results') or ():
      for record in result.get('subagent_trajectory_ref') or ():
        path = record.get('trajectory_path') or ''
        references.append(_Reference(position, path, record.get('trajectory_id') or ''))
  if path := document.get('continued_trajectory_ref'):
    references.append(_Reference(len(document['steps']), path, continues=True))
  return references


def _joined(file: pathlib.Path, path: str) -> pathlib.Path:
  """Returns the file to which a document refers as `path`."""
  return pathlib.Path(os.path.normpath(file.parent / path))


def _with_embedded(document: Mapping[str, Any]) -> list[Mapping[str, Any]]:
  """Returns a document and all that are embedded in it."""
  documents = [document]
  for each in documents:  # the list grows meanwhile
    documents += each.get('subagent_trajectories') or ()
  return documents


def _parents(paths: Sequence[pathlib.Path]) -> dict[pathlib.Path, pathlib.Path]:
  """Returns {file: the first one that refers to it}, without loops.

  A document of a run knows its place by itself. The function logs references without effect, whose
  documents are read as episodes.
  """
  references: dict[pathlib.Path, list[pathlib.Path]] = {}
  for path in paths:
    with contextlib.suppress(*_UNUSABLE):  # the file is read once more, and its error logged
      document = _load(path)
      if document is None or own_record(document) is not None:
        continue
      found = [one for each in _with_embedded(document) for one in _references(each)]
      references[path] = [_joined(path, one.path) for one in found if one.path]
  parents: dict[pathlib.Path, pathlib.Path] = {}
  lost: list[str] = []
  for path, files in references.items():
    for file in dict.fromkeys(files):
      ancestor: pathlib.Path | None = path
      while ancestor is not None and ancestor != file:
        ancestor = parents.get(ancestor)
      if file in references and file not in parents and ancestor is None:
        parents[file] = path
      else:
        lost.append(f'{path} to {file}')
  if lost:
    logging.warning(
        '%d references between trajectories have no effect, because --input has no such file, '
        'or another one refers to it already, or it refers back. The first one is from %s',
        len(lost),
        lost[0],
    )
  return parents


def _read_tree(
    file: pathlib.Path,
    document: Mapping[str, Any],
    parents: Mapping[pathlib.Path, pathlib.Path],
    reader: AtifReader,
    unreadable: list[str],
) -> list[types.Episode]:
  """Returns the rows of a document and of those to which it refers: those of one episode.

  A document below the first one that cannot be read is left out with those below it.
  """
  rows: list[types.Episode] = []
  branches = [_Branch(document, file, _agent_id(document, file))]
  files = {file}
  while branches:
    branch = branches.pop()
    try:
      own = reader.rows(branch.document, branch.file.stem)
      parent = branch.parent
      for number, episode in enumerate(own.episodes, start=len(rows)):
        episode.segment = number
        episode.agent_id = branch.agent_id
        episode.parent = parent
        parent = number, len(episode.turns)
      children = _children(branch, own, parents, files)
    except _UNUSABLE as error:
      if not rows:
        raise
      unreadable.append(_shown_error(branch.file, error))
      continue
    rows += own.episodes
    branches += reversed(children)
  for row in rows:
    row.task = rows[0].task
  if len(rows) == 1:
    rows[0].agent_id = ''
  return rows


def _children(
    branch: _Branch,
    own: _Rows,
    parents: Mapping[pathlib.Path, pathlib.Path],
    files: set[pathlib.Path],
) -> list[_Branch]:
  """Returns the documents to which one refers, and which are not among `files`. Adds theirs."""
  embedded = {}
  for child in branch.document.get('subagent_trajectories') or ():
    embedded[child['trajectory_id']] = child
  children = []
  references = _references(branch.document)
  last = len(branch.document['steps'])
  references += [_Reference(last, trajectory_id=name) for name in embedded]  # without a reference
  for reference in references:
    child = embedded.pop(reference.trajectory_id, None)
    file = branch.file
    if child is None and reference.path:
      path = _joined(branch.file, reference.path)
      if parents.get(path) == branch.file and path not in files:
        files.add(path)
        file = path
        child = _load(path)
    if child is None:
      continue
    agent_id = branch.agent_id if reference.continues else _agent_id(child, file)
    children.append(_Branch(child, file, agent_id, own.place(reference.position)))
  return children


def _agent_id(document: Mapping[str, Any], file: pathlib.Path) -> str:
  """Returns the id of the agent of a document."""
  agent_id = document.get('trajectory_id') or document.get('session_id') or file.stem
  if not isinstance(agent_id, str):
    raise ValueError(f'its id is {types.shown(agent_id)}, and a text is needed')
  return agent_id


def own_record(document: Mapping[str, Any]) -> Mapping[str, Any] | None:
  """Returns the record that `writer` added; None for a document of another agent.

  ValueError: it has no place in a run. The kind and step become the name of a file.
  """
  own = (document.get('extra') or {}).get(writer.EXTRA)
  if not own:
    return None
  numbers = (own['step'], own['row'])
  are_valid = all(type(number) is int and 0 <= number <= _MAX_PLACE for number in numbers)
  if own['kind'] not in saved.KINDS or not are_valid:
    place = ', '.join(f'{field} {own[field]!r:.60}' for field in ('kind', 'step', 'row'))
    raise ValueError(f'extra.{writer.EXTRA} has {place}: no place in a run')
  return own


def _is_turn(step: AtifStep) -> bool:
  """Returns whether a model wrote this step for this trajectory."""
  is_agent = step['source'] == 'agent' and not step.get('is_copied_context')
  return is_agent and step.get('llm_call_count') != 0


def _is_trainable(part: Mapping[str, Any]) -> bool:
  """Returns whether a document or step may be trained on: no `trainable` of it is false."""
  places = (part, part.get('extra'), part.get('metrics'))
  return all((place or {}).get('trainable') is not False for place in places)


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
      episodes[-1].turns[-1].observation = _array(prompt[len(context) :])
    else:
      episodes.append(types.Episode(task, 0, _array(prompt), []))
    episodes[-1].turns.append(_turn(step, ids, logp))
    context = [*prompt, *ids]
  return episodes


def _turn(step: AtifStep, ids: Sequence[int], logp: Sequence[float] | None = None) -> types.Turn:
  """Returns a turn of another agent, without log-probs if there are none."""
  if logp is None:
    logp = [np.nan] * len(ids)
  action = 'tool' if step.get('tool_calls') else 'other'
  return types.Turn(_array(ids), np.array(logp, np.float32), action=action)


def _array(ids):
  return np.array(ids, np.int32)


def _add_reward(episodes: Sequence[types.Episode], path: pathlib.Path) -> bool:
  """Gives another agent's episode the name of its task and the rewards of Harbor's trial.

  Returns whether there is a reward; without one it is 0. ValueError: it is uncertain which one, or
  it is not finite. Choice: each row of a trajectory has the reward on its last turn, as the rows of
  a session have. The episode's score counts it once.
  """
  result: dict[str, Any] = {}
  result_path = path.parent.parent / 'result.json'
  if path.parent.name == 'agent' and result_path.exists():
    result = json.loads(result_path.read_text(encoding='utf-8'))
  verdict = (result.get('verifier_result') or {}).get('rewards') or {}
  rewards = {name: float(x) for name, x in verdict.items()}
  if not all(map(math.isfinite, rewards.values())):
    raise ValueError(f'its rewards are {types.shown(verdict)}: finite numbers are needed')
  if len(rewards) > 1 and 'reward' not in rewards:
    raise ValueError(f"its rewards are {', '.join(rewards)}, and none of them is called 'reward'")
  reward = rewards.get('reward', next(iter(rewards.values()), 0.0))
  for episode in episodes:
    if result:
      episode.task = dataclasses.replace(episode.task, id=str(result['task_name']))
    episode.metrics = dict(rewards)
    episode.turns[-1].reward = reward
    episode.whole_score = reward
  return len(rewards) > 0


def _own_batches(own):
  """Returns the batches of a run, with their lines in order."""
  by_place: dict[tuple[str, int, int], OwnEpisode] = {}
  for one in own:
    place = (one.record['kind'], one.record['step'], one.record['row'])
    if place in by_place:
      raise types.UserError(
          'two trajectories are the same line of a file: import those of one run at a time'
      )
    by_place[place] = one
  files: dict[File, batching.Sampled] = {}
  for kind, step, row in sorted(by_place):
    episode, record = by_place[kind, step, row]
    if (kind, step) not in files:
      number = record.get('batch', step)
      staleness = record.get('staleness', 0)
      files[kind, step] = batching.Sampled(number, staleness, [], measured={})
    files[kind, step].episodes.append(episode)
  return files


def _last_batch(files):
  return max((step for kind, step in files if kind == 'train'), default=0)


def _new_batches(documents, size, first):
  """Returns batches of `size` documents each, with numbers from `first` on."""
  files: dict[File, batching.Sampled] = {}
  for number, start in enumerate(range(0, len(documents), size), first):
    groups: dict[str, int] = {}
    rows: list[types.Episode] = []
    for index, episodes in enumerate(documents[start : start + size]):
      for episode in episodes:
        episode.group = groups.setdefault(episode.task.id, len(groups))
        episode.number = index
        rows.append(episode)
    files['train', number] = batching.Sampled(number, 0, rows, measured={})
  return files
