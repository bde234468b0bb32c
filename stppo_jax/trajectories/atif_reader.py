"""Trajectories of ATIF, the format of the Harbor framework, to saved episodes.

A folder of documents in; a folder of train_000001.jsonl, .. out. A document of `atif_writer` gives
its episode back exactly. One of another agent becomes a prompt and turns:

  ids given          each turn is its completion_token_ids, as they are; a turn whose prompt does
                     not continue the one before starts another row
  no ids             the texts are encoded by the chat template of the model that is to read them;
                     those of `atif_writer` hold their template, as the control tokens' texts

Turns that no model wrote for this trajectory (`is_copied_context`, `llm_call_count` 0) are context.
Without log-probs an episode can be imitated, and no policy gradient can be taken on it.
"""

from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import functools
import json
import os
import pathlib
import re
from typing import Any

from absl import logging
import numpy as np

from stppo_jax import tokenizer as chat
from stppo_jax import types
from stppo_jax.envs import tool_calls
from stppo_jax.monitoring import episodes as episodes_lib
from stppo_jax.rollout import pipeline
from stppo_jax.serving import template as template_lib
from stppo_jax.trajectories import atif_writer
from stppo_jax.trajectories import saved

_NO_IDS = np.zeros((0,), np.int32)
_MOST = 2**31 - 1  # of a step or row
_CONTROL = re.compile(r'<\|[^\s<>|]{1,40}\|>')  # how most families write control tokens
_MISMATCH = (
    'token ids of another tokenizer than that of {folder!r}: {why}. Give the model that they were '
    'sampled from, or encode the texts instead: --retokenize'
)


class _Unusable(ValueError):
  """Why a trajectory cannot be read."""


@dataclasses.dataclass(frozen=True)
class _Row:
  """An episode, and where it was: (file, line) of the run that sampled it; None: of another."""

  episode: types.Episode
  kept: Mapping[str, Any] | None


def read_folder(source: str, folder: str, reader: 'Reader', episodes_per_file: int) -> int:
  """Writes the trajectories of `source`, a folder or a file, to `folder`; returns their number.

  Episodes of our runs go to the batches that they were in, others to batches of
  `episodes_per_file`, where those of one task are a group. All rows of a document are one episode
  of one batch. A document that cannot be read is logged and left out.
  """
  if os.path.isdir(folder) and os.listdir(folder):
    raise types.UserError(f'{folder!r} holds files already: give another --workdir')
  documents: list[list[_Row]] = []
  left_out: list[str] = []
  for path in _paths(source):
    try:
      document = _load(path)
      if document is None:
        continue
      documents.append(_with_reward(reader.rows(document, path.stem), path))
    except types.UserError:
      raise
    except (_Unusable, OSError) as error:
      left_out.append(f'{path} ({error})')
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
      left_out.append(f'{path} (not ATIF: {type(error).__name__}: {error})')
  if left_out:
    logging.warning('%d trajectories are left out, as %s', len(left_out), left_out[0])
  if not documents:
    raise types.UserError(
        f'--input={source!r} holds no trajectory that can be read'
        + (f', as {left_out[0]}' if left_out else ': give JSON files of ATIF, or a folder of them')
    )
  for name, number, batch in _batches(documents, episodes_per_file):
    records = _records(batch, reader.tokenizer, number)
    episodes_lib.write_lines(os.path.join(folder, name), records)
  num_rows = sum(map(len, documents))
  logging.info('%d trajectories are %d rows in %s', len(documents), num_rows, folder)
  return len(documents)


class Reader:
  """Turns documents into episodes of one tokenizer.

  Args:
    tokenizer: of the model that is to read them.
    tool_form: one of tool_calls.FORMS, in which calls are written where no ids are given.
    max_observation: tokens of an observation at most, where there is no chat template.
    retokenize: encodes the texts although there are ids.
  """

  def __init__(
      self,
      tokenizer: chat.Tokenizer,
      tool_form: str = 'hermes',
      max_observation: int = 2**20,
      retokenize: bool = False,
  ):
    self.tokenizer, self._retokenize = tokenizer, retokenize
    self._max_observation = max_observation
    self._form = tool_calls.make_form(tool_form)
    self._template = template_lib.Template(tokenizer, max_observation, tool_form)
    self._end = _NO_IDS  # of a turn, where the chat template has one
    if tokenizer.render is not None:
      after = self._template.encode_after([], [{'role': 'user', 'content': 'Q'}])
      self._end = np.array([i for i in after[:1] if i in tokenizer.eos_ids], np.int32)

  def rows(self, document: Mapping[str, Any], name: str) -> list[_Row]:
    """Returns the episodes of a document: several where its context was rewritten."""
    steps = document['steps']
    turns = [step for step in steps if _is_turn(step)]
    kept = (document.get('extra') or {}).get(atif_writer.EXTRA)
    if not turns and not kept:
      raise _Unusable('no turn of an agent')
    has_ids = all(_ids(step, 'completion') and _ids(step, 'prompt') for step in turns)
    if has_ids and not self._retokenize:
      parts = _by_ids(turns)
      if not turns:
        parts = [(np.array((kept or {})['prompt_token_ids'], np.int32), [])]
      self._check_ids(parts, _asked(steps), name)
    else:
      parts = [self._encoded_again(steps, kept) if kept else self._encoded(steps)]
    if kept:
      _check_place(kept)
      task = types.Task(
          kept['task'], kept['question'], tuple(kept['answers']), kept['dataset'], hops=kept['hops']
      )
    else:
      agent = document['agent']['name']
      task = types.Task(document.get('session_id') or name, _asked(steps), dataset=agent)
    episodes = [_episode(task, prompt, turns, kept) for prompt, turns in parts]
    return [_Row(episode, None if self._retokenize else kept) for episode in episodes]

  def _check_ids(self, parts, asked, name):
    """Refuses ids of another tokenizer: the prompt has to hold what the user asks."""
    ids = np.concatenate(
        [x for prompt, turns in parts for x in (prompt, *(t.tokens for t in turns))]
    )

    def mismatch(why):
      return types.UserError(f'{name}: ' + _MISMATCH.format(folder=self.tokenizer.folder, why=why))

    if len(ids) and not 0 <= ids.min() <= ids.max() < self.tokenizer.vocab_size:
      raise mismatch(f'it has no id {ids.max() if ids.min() >= 0 else ids.min()}')
    read = ' '.join(self.tokenizer.decode(parts[0][0]).split())
    if ' '.join(asked.split()) not in read:
      raise mismatch(f'the first prompt would read {read[:40]!r}')

  def _encoded_again(self, steps, kept):
    """Returns (prompt, turns) of our own texts, which hold all that the policy read.

    What it read keeps its ids where they are this tokenizer's. Else names of control tokens in it
    become tokens, as nothing tells those of the template from a page's.
    """
    asked, written = _asked(steps), [step for step in steps if _is_turn(step)]
    exact = _by_ids(written) if all(_ids(step, 'prompt') for step in written) else []
    observed = [turn.observation for _, turns in exact for turn in turns]
    observed += [_NO_IDS] * (len(written) - len(observed))
    recorded = _ids(written[0], 'prompt') if written else kept['prompt_token_ids']
    is_token = lambda name: self.tokenizer.control_library.token_to_id(name) is not None
    foreign = [name for name in _CONTROL.findall(asked) if not is_token(name)]
    if foreign and self.tokenizer.decode(recorded) != asked:
      raise _Unusable(f'its prompt holds {foreign[0]}, no token of {self.tokenizer.folder!r}')
    turns: list[types.Turn] = []
    for step, read in zip(written, observed):
      results = (step.get('observation') or {}).get('results', ())
      seen = ''.join(_content(result.get('content')) for result in results)
      end = (step.get('extra') or {}).get('end')
      if end is None:  # a document of an earlier version
        end = self.tokenizer.decode(self._end)
        end = '' if seen.startswith(end) else end
      tokens = np.array(self.tokenizer.encode(_text(step) + end, control=True), np.int32)
      turn = _turn(step, tokens, np.full(tokens.shape, np.nan, np.float32))
      turn.observation, turn.routes = self._seen_again(seen, read), None
      turns.append(turn)
    if self.tokenizer.decode(recorded) == asked:
      prompt = np.array(recorded, np.int32)
    else:
      prompt = np.array(self.tokenizer.encode(asked, control=True), np.int32)
    if not len(prompt):
      raise _Unusable('no text that an agent could have read')
    return prompt, turns

  def _seen_again(self, text, recorded):
    """Returns the ids of an observation; one inside its tags is encoded as the environment did."""
    if self.tokenizer.decode(recorded) == text:
      return recorded
    if text.lstrip().startswith('<information>'):
      ids = chat.encode_observation(self.tokenizer, text, self._max_observation)
    else:
      ids = self.tokenizer.encode(text, control=True)
    return np.array(ids, np.int32)

  def _encoded(self, steps):
    """Returns (prompt, turns) of texts."""
    prompt: Any = None
    turns: list[types.Turn] = []
    messages: list[template_lib.Message] = []
    for step in steps:
      if not _is_turn(step):
        is_context = step['source'] == 'agent'
        text = self._written(step) if is_context else _text(step)
        is_first = step['source'] == 'system' and prompt is None and not messages
        role = 'assistant' if is_context else 'system' if is_first else 'user'
        messages += [{'role': role, 'content': text}] if text else []
      elif written := self._written(step):
        if prompt is None:
          prompt = self._ids_of(self._template.encode, messages)
        elif messages:
          last = turns[-1]
          after = functools.partial(self._template.encode_after, last.tokens.tolist())
          last.observation = self._ids_of(after, messages)
        messages = []
        tokens = np.array([*self.tokenizer.encode(written), *self._end], np.int32)
        turns.append(_turn(step, tokens, np.full(tokens.shape, np.nan, np.float32)))
      for result in (step.get('observation') or {}).get('results', ()):
        if text := _content(result.get('content')):
          messages.append({'role': 'tool' if step.get('tool_calls') else 'user', 'content': text})
    if prompt is None or not len(prompt):
      raise _Unusable('no text that an agent could have read')
    return prompt, turns

  def _ids_of(self, encode, messages):
    """Encodes messages; as those of a user where the template has no turns of tools or a system."""
    try:
      return np.array(encode(messages), np.int32)
    except ValueError:
      as_user = lambda role: role if role == 'assistant' else 'user'
      try:
        return np.array(encode([m | {'role': as_user(m['role'])} for m in messages]), np.int32)
      except ValueError as error:
        raise _Unusable(str(error)) from error

  def _written(self, step):
    """Returns the text of an agent's step: its reasoning, its message and its calls."""
    text = _text(step)
    if thought := step.get('reasoning_content'):
      text = f'<think>\n{thought}\n</think>\n\n{text}'
    for call in step.get('tool_calls') or ():
      written = self._form.write(tool_calls.Call(call['function_name'], call['arguments']))
      text += ('\n' if text else '') + written
    return text


def _load(path):
  """Returns the document of a file; None: it is something else."""
  try:
    with open(path, encoding='utf-8') as file:
      document = json.load(file)
  except (ValueError, RecursionError) as error:
    raise _Unusable(f'not JSON: {error}') from error
  version = document.get('schema_version') if isinstance(document, dict) else None
  if not isinstance(version, str) or not version.startswith('ATIF-v1.'):
    return None
  return document


def _check_place(kept: Mapping[str, Any]) -> None:
  """Refuses a place that no run writes: its kind and step become the name of a file."""
  given = f'extra.{atif_writer.EXTRA}'
  if kept['kind'] not in saved.KINDS:
    raise _Unusable(f'{given}.kind is {kept["kind"]!r:.60}: one of {", ".join(saved.KINDS)} can be')
  for name in ('step', 'row'):
    value = kept[name]
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= _MOST:
      raise _Unusable(f'{given}.{name} is {value!r:.60}: a whole number from 0 to {_MOST} can be')


def _paths(source) -> list[pathlib.Path]:
  path = pathlib.Path(source)
  if not source or not path.exists():
    raise types.UserError(f'--input={source!r}: no such file or folder: give trajectories of ATIF')
  return sorted(path.rglob('*.json')) if path.is_dir() else [path]


def _is_turn(step) -> bool:
  """Whether a model wrote this step here."""
  written = step['source'] == 'agent' and not step.get('is_copied_context')
  return written and step.get('llm_call_count') != 0


def _ids(step, what) -> list[int]:
  return (step.get('metrics') or {}).get(f'{what}_token_ids') or []


def _asked(steps) -> str:
  """Returns the first message of the user."""
  return next((_text(step) for step in steps if step['source'] == 'user'), '')


def _text(step) -> str:
  return _content(step['message'])


def _content(content) -> str:
  """Returns a text, or the texts of a list of parts."""
  if content is None or isinstance(content, str):
    return content or ''
  if media := [part['type'] for part in content if part['type'] != 'text']:
    raise _Unusable(f'it holds {media[0]}s, and only text is supported')
  return ''.join(part['text'] for part in content)


def _by_ids(steps) -> list[tuple[np.ndarray, list[types.Turn]]]:
  """Returns (prompt, turns) of each row of steps that have ids."""
  parts: list[tuple[np.ndarray, list[types.Turn]]] = []
  context: list[int] = []
  for step in steps:
    prompt, ids = _ids(step, 'prompt'), _ids(step, 'completion')
    logp = step['metrics'].get('logprobs')
    if logp is not None and len(logp) != len(ids):
      raise _Unusable(f'step {step["step_id"]} has {len(logp)} log-probs of {len(ids)} tokens')
    logp = [np.nan] * len(ids) if logp is None else logp
    turn = _turn(step, np.array(ids, np.int32), np.array(logp, np.float32))
    if parts and prompt[: len(context)] == context:
      parts[-1][1][-1].observation = np.array(prompt[len(context) :], np.int32)
      parts[-1][1].append(turn)
    else:
      parts.append((np.array(prompt, np.int32), [turn]))
    context = [*prompt, *ids]
  return parts


def _turn(step, tokens, logp) -> types.Turn:
  """Returns a turn; what only our own documents have is in the step's `extra`."""
  extra = step.get('extra') or {}
  after = np.array(extra.get('observation_token_ids', ()), np.int32)
  action = extra.get('action', 'tool' if step.get('tool_calls') else 'other')
  routes = _routes(step, extra.get('routes'))
  return types.Turn(tokens, logp, after, str(action), float(extra.get('reward', 0.0)), routes)


def _routes(step, record) -> np.ndarray | None:
  """Returns the experts [p+n,L,A] of a turn."""
  if record is None:
    return None
  num_ids = len(_ids(step, 'prompt')) + len(_ids(step, 'completion'))
  try:
    return types.unpack_array(record, num_ids)
  except ValueError as error:
    raise _Unusable(f'step {step["step_id"]} has {error}') from error


def _episode(
    task: types.Task, prompt: np.ndarray, turns: list[types.Turn], kept: Mapping[str, Any] | None
) -> types.Episode:
  if kept is None:
    counts = dict.fromkeys(('invalid', 'repeated', 'empty', 'cut'), 0.0)
    return types.Episode(task, 0, prompt, turns, counts=counts)
  episode = types.Episode.from_dict(kept, task)
  episode.prompt = prompt
  episode.turns = turns
  return episode


def _with_reward(rows: list[_Row], path: pathlib.Path) -> list[_Row]:
  """Gives another agent's episode the name of its task and the rewards of Harbor's trial.

  Choice: each row of a trajectory has the reward on its last turn, as those of a session have. The
  episode's score counts it once.
  """
  if rows[0].kept is not None or rows[0].episode.metrics:
    return rows
  verdict = _verdict(path)
  reward = 0.0
  if verdict is not None:
    task_name, rewards = verdict
    task = dataclasses.replace(rows[0].episode.task, id=task_name)
    reward = rewards.get('reward', next(iter(rewards.values()), 0.0))
    for row in rows:
      row.episode.task, row.episode.metrics = task, dict(rewards)
      if row.episode.turns:
        row.episode.turns[-1].reward += reward
  repeats = reward * (len(rows) - 1)
  whole_score = sum(row.episode.score for row in rows) - repeats
  for row in rows:
    row.episode.whole_score = whole_score
  return rows


def _verdict(path: pathlib.Path) -> tuple[str, dict[str, float]] | None:
  """Returns (task, rewards) of the trial that a trajectory is of; None without them."""
  result = path.parent.parent / 'result.json'
  if path.parent.name != 'agent' or not result.is_file():
    return None
  try:
    found = json.loads(result.read_text(encoding='utf-8'))
    rewards = {k: float(x) for k, x in found['verifier_result']['rewards'].items()}
    return str(found['task_name']), rewards
  except (ValueError, LookupError, TypeError, AttributeError):
    return None


def _batches(
    documents: Sequence[Sequence[_Row]], size: int
) -> Iterator[tuple[str, int, list[_Row]]]:
  """Yields (file name, number, rows) of each batch; others' have `size` documents."""
  ours: dict[tuple[str, int], dict[int, _Row]] = {}
  for row in (row for document in documents for row in document):
    if row.kept is not None:
      place = ours.setdefault((row.kept['kind'], row.kept['step']), {})
      if row.kept['row'] in place:
        raise types.UserError(
            'two trajectories are line {row} of {kind}_{step:06d}.jsonl: import those of one run '
            'at a time'.format_map(row.kept)
        )
      place[row.kept['row']] = row
  for (kind, step), found in sorted(ours.items()):
    yield f'{kind}_{step:06d}.jsonl', step, [found[i] for i in sorted(found)]
  first = max((step for kind, step in ours if kind == 'train'), default=0) + 1
  others = [document for document in documents if document[0].kept is None]
  for number, start in enumerate(range(0, len(others), size), first):
    groups: dict[str, int] = {}
    batch = []
    for index, document in enumerate(others[start : start + size]):
      for row in document:
        row.episode.group = groups.setdefault(row.episode.task.id, len(groups))
        row.episode.number = index
        batch.append(row)
    yield os.path.basename(saved.path_of('', number)), number, batch


def _records(rows: Sequence[_Row], tokenizer, number) -> list[dict]:
  """Returns the lines of a batch."""
  kept = rows[0].kept or {}
  batch = pipeline.Sampled(
      kept.get('batch', number), kept.get('staleness', 0), [row.episode for row in rows], {}
  )
  records = episodes_lib.batch_records(batch, tokenizer, number)
  return [record | {'kind': (row.kept or record)['kind']} for record, row in zip(records, rows)]
