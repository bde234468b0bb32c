"""The search environment: a question, a retriever, and a limited number of turns.

The style 'search_r1' has Search-R1's format: its tags, the order of its blocks, its white space,
the quotes around titles, and a message on an invalid action in the agent's own voice, on a line of
its own. Its sentences are ours. For a checkpoint that was trained on others, set the options
`instructions` (all before 'Question:') and `invalid_message`.

`reset` gives the prompt, each `step` one observation, until an answer. Everything here is text;
tokens and chat templates are the rollout's part. ENVIRONMENTS lists the short names of `env.kind`.
"""

from collections.abc import Sequence
import re
from typing import Any

from stppo_jax import tasks as task_files
from stppo_jax import types
from stppo_jax.envs import rewards

STYLES = ('search_r1', 'short')

_OPENING = re.compile(r'([<\uff1c\ufe64])(?=\S|\Z)')
_BRACKET_MARKER = re.compile(
    r'\[(?=/?(?:INST|SYS|SYSTEM_PROMPT|AVAILABLE_TOOLS|TOOL_CALLS|TOOL_RESULTS)\])'
)
_MARKUP = re.compile(r'([<\uff1c\ufe64])(?=/?[A-Za-z_][^<>\s]*>|\|)')
_OWN_SEARCH = object()  # `passages` was not given, while None means that the retriever failed

_INSTRUCTIONS = (
    'Find the answer to the question at the end. Begin each step, and react to every piece of new '
    'information, by thinking it through between <think> and </think>. When a fact is missing, '
    'write <search> your query </search>: a search engine then shows you its best passages between '
    '<information> and </information>. There is no limit to how often you may ask it, and no need '
    'to ask when you already know. '
)
_CLOSED_BOOK = (
    'Find the answer to the question at the end. First think it through between <think> and '
    '</think>. '
)
_FINISH = (
    'To finish, put the bare answer between <answer> and </answer>, with no explanation around it: '
    'for example, <answer> Beijing </answer>. '
)
_BY_LETTER = 'Answer with the letter of the right option. '
_INVALID = {
    'search_r1': (
        '\nThe step above holds no valid action. For a search I have to write the query between '
        '<search> and </search>. For the final answer I have to write it between <answer> and '
        '</answer>. I will try once more.\n'
    ),
    'short': 'Invalid: use <search>query</search> or <answer>answer</answer>\n',
}


class SearchEnv:
  """One question with GEM's `reset` and `step`.

  Actions 1..max_turns may search, be invalid, or answer; one more generation may only answer, and
  anything else there ends the episode with reward 0. So an episode has at most `max_turns`
  searches and `max_turns + 1` generations; `max_turns=0` is closed-book.
  """

  stop_strings = ('</search>', '</answer>')
  frame = 'inline'
  core_metrics = rewards.SCORES
  uses_global_random = False

  def __init__(
      self,
      task: types.Task,
      retriever: Any,  # a retrieval.protocol.Retriever; None for closed-book
      max_turns: int = 4,
      top_k: int = 3,
      prompt: str = 'search_r1',
      reward: str | rewards.Reward = 'em',
      observation: str | None = None,  # None: the style of the prompt
      instructions: str | None = None,  # before 'Question:'; None: those of the style
      invalid_message: str | None = None,  # the observation after an invalid action; None: as above
  ):
    observation = prompt if observation is None else observation
    _require(prompt in STYLES, f'prompt={prompt!r}', f'one of {STYLES}')
    _require(observation in STYLES, f'observation={observation!r}', f'one of {STYLES}')
    known = callable(reward) or reward in rewards.REWARDS
    _require(known, f'reward={reward!r}', f'one of {tuple(rewards.REWARDS)}, or a function')
    _require(max_turns >= 0, f'max_turns={max_turns}', '0 (closed-book) or more')
    _require(top_k >= 1, f'top_k={top_k}', '1 or more')
    _require(
        retriever is not None or max_turns == 0,
        f'max_turns={max_turns} without a retriever',
        'a retriever, or max_turns=0',
    )
    _require(
        not task.options or task.letter in dict(task.options),
        f'task {task.id!r} with letter={task.letter!r}',
        f'one of its options {tuple(dict(task.options))}',
    )
    self.task = task
    self.retriever = retriever
    self.max_turns = max_turns
    self.top_k = top_k
    self._prompt_style = prompt
    self._observation_style = observation
    if instructions is None and prompt == 'search_r1':
      instructions = (_INSTRUCTIONS if max_turns else _CLOSED_BOOK) + _FINISH
    self._instructions = instructions or ''
    self._invalid = _INVALID[observation] if invalid_message is None else invalid_message
    self._reward = reward if callable(reward) else rewards.REWARDS[reward]
    self._over = True
    self._turns = self._searches = 0
    self._transcript = ''

  def reset(self, seed: int | None = None) -> tuple[str, dict[str, Any]]:
    """Starts the episode: (the text of the user message, info). Nothing here is random."""
    del seed
    self._over, self._turns, self._searches, self._transcript = False, 0, 0, ''
    return prompt_text(self.task, self._prompt_style, self._instructions), {'suffix': ''}

  def query(self, action: str) -> str | None:
    """Returns the query that `step(action)` would send to the retriever, or None."""
    kind, content = parse_action(action)
    return content if kind == 'search' and self._turns < self.max_turns else None

  def step(
      self, action: str, passages: Any = _OWN_SEARCH
  ) -> tuple[str, float, bool, bool, dict[str, Any]]:
    """Carries out one turn of the agent: (observation, reward, terminated, truncated, info).

    `passages` are the results for `query(action)` where the caller has fetched them. None says that
    the retriever failed; the agent then sees an empty block.
    """
    if self._over:
      raise RuntimeError('step() needs reset() first: no episode is running')
    kind, content = parse_action(action)
    query = self.query(action)
    self._turns += 1
    self._searches += kind == 'search'
    self._transcript += action
    metrics = dict.fromkeys(rewards.SCORES, 0.0) | {'searches': float(self._searches)}
    info = {
        'action': kind,
        'query': content if kind == 'search' else None,
        'answer': content if kind == 'answer' else None,
        'retrieval_failed': False,
        'metrics': metrics,
        'passage_ids': [],
        'suffix': '',
    }
    if kind == 'answer':
      self._over = True
      metrics |= rewards.scores(self.task, content)
      reward = rewards.of_answer(self._reward, self.task, content, self._transcript)
      return '', reward, True, False, info
    if self._turns > self.max_turns:
      self._over = True
      return '', 0.0, True, True, info
    if query is None:
      observation = self._invalid
    else:
      if passages is _OWN_SEARCH:
        passages = self.retriever.search([query], self.top_k)[0]
      info['retrieval_failed'] = passages is None
      info['passage_ids'] = [passage.id for passage in passages or ()]
      observation = observation_text(passages or (), self._observation_style)
    self._transcript += observation
    return observation, 0.0, False, False, info


ENVIRONMENTS = {'search': SearchEnv}


def parse_action(text: str) -> tuple[str, str]:
  """Returns the first complete action of a turn: ('search' | 'answer', its stripped content).

  ('invalid', '') where there is none. A regular expression would take quadratic time here: it would
  search for the end again from each opening tag.
  """
  found = []
  for kind in ('search', 'answer'):
    before, _, rest = text.partition(f'<{kind}>')
    content, closing, _ = rest.partition(f'</{kind}>')
    if closing:
      found.append((len(before), kind, content.strip()))
  return min(found)[1:] if found else ('invalid', '')


def prompt_text(task: types.Task, style: str, instructions: str = '') -> str:
  """Returns the user message. Its question is stripped and ends in a question mark.

  In question and options a space follows the `<` of whatever looks like a tag or a control token.
  """
  question = _unmarked(task.question.strip())
  question = question if question.endswith('?') else question + '?'
  options = [f'{letter}) {_unmarked(text)}' for letter, text in task.options]
  if style == 'short':
    return instructions + ' '.join([f'Question: {question}', *options]) + '\n'
  by_letter = _BY_LETTER if options else ''
  return instructions + by_letter + '\n'.join([f'Question: {question}', *options]) + '\n'


def observation_text(passages: Sequence[types.Passage], style: str) -> str:
  """Returns the `<information>` block that answers a search. No passage can close or imitate it."""
  if style == 'short':
    shown = [(neutralize(passage.title), neutralize(passage.text)) for passage in passages]
    lines = ''.join(f' {title}: {text}\n' for title, text in shown)
    return f'<information>{lines}</information>\n'
  lines = ''
  for i, passage in enumerate(passages, start=1):
    # The first line of `contents`, with the quotes that a title has there.
    title, _, text = task_files.write_contents(passage).partition('\n')
    lines += f'Doc {i}(Title: {title}) {text}\n'
  return f'\n\n<information>{neutralize(lines.strip())}</information>\n\n'


def neutralize(text: str) -> str:
  """Returns passage text in which nothing reads as a tag or as a marker of a chat template.

  Inserts a space after every `<` that is followed by text (`<answer>`, `</s>`, `<|im_start|>`),
  also after the two wide forms of `<` that Unicode normalisation maps to it, and into the bracketed
  markers (`[INST]`). chat.py independently ensures that an observation encodes to no special token.
  """
  return _BRACKET_MARKER.sub('[ ', _OPENING.sub(r'\1 ', text))


def _unmarked(text: str) -> str:
  """Returns a question in which nothing is a tag; other uses of `<` stay as they are."""
  return _BRACKET_MARKER.sub('[ ', _MARKUP.sub(r'\1 ', text))


def _require(holds: bool, given: str, allowed: str) -> None:
  if not holds:
    raise types.UserError(f'search environment: got {given}; it needs {allowed}')
