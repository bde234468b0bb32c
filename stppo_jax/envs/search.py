"""The search environment: a question, a retriever, and a limited number of searches.

The style 'search_r1' has Search-R1's format: its tags, the order of its blocks, its white space,
the quotes around titles, and a message after an invalid action that is a line in the agent's own
voice. The wording is ours. For a checkpoint that was trained on another wording, set the options
`instructions` (all text before 'Question:') and `invalid_message`.

`reset` gives the prompt, and each `step` one observation, until an answer. Everything here is text.
Tokens and chat templates belong to the rollout. `components.ENVIRONMENTS` lists the short names of
`env.kind`.
"""

from collections.abc import Sequence
import dataclasses
import re
from typing import Any

from stppo_jax import types
from stppo_jax.data import tasks as tasks_lib
from stppo_jax.envs import protocol
from stppo_jax.envs import rewards
from stppo_jax.envs import stepping

NOT_SEARCHED = object()  # default of `passages`, where None means that the retriever failed

_OPENING = re.compile(r'([<\uff1c\ufe64])(?=\S|\Z)')
_BRACKET_MARKER = re.compile(
    r'\[(?=/?(?:INST|SYS|SYSTEM_PROMPT|AVAILABLE_TOOLS|TOOL_CALLS|TOOL_RESULTS)\])'
)
_MARKUP = re.compile(r'([<\uff1c\ufe64])(?=/?[A-Za-z_][^<>\s]*>|\|)')

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


@dataclasses.dataclass(eq=False)
class SearchEnv:
  """One question with GEM's `reset` and `step`.

  Turns 1..max_searches may search, be invalid, or answer. One more turn may only answer, and any
  other action there ends the episode with reward 0. So an episode has at most `max_searches`
  searches and `max_searches + 1` turns. `max_searches=0` is closed-book.
  """

  stop_strings = ('</search>', '</answer>')
  frame = 'inline'
  core_metrics = rewards.SCORES
  uses_global_random = False

  task: types.Task
  retriever: Any  # a retrieval.protocol.Retriever; None for closed-book
  max_searches: int = 4
  top_k: int = 3
  prompt: str = 'search_r1'
  reward: rewards.Reward = rewards.REWARDS['em']
  instructions: str | None = None  # before 'Question:'; None: those of the style
  invalid_message: str | None = None  # observation after an invalid action; None: of the style

  def __post_init__(self):
    self._instructions = self.instructions or ''
    if self.instructions is None and self.prompt == 'search_r1':
      self._instructions = (_INSTRUCTIONS if self.max_searches else _CLOSED_BOOK) + _FINISH
    self._invalid = _INVALID[self.prompt]
    if self.invalid_message is not None:
      self._invalid = self.invalid_message
    self._is_over = True

  def reset(self, seed: int | None = None) -> tuple[str, protocol.ResetInfo]:
    """Starts the episode and returns (the text of the user message, info). Nothing is random."""
    del seed
    self._is_over = False
    self._turns = 0
    self._searches = 0
    self._texts: list[str] = []  # make up the transcript
    return prompt_text(self.task, self.prompt, self._instructions), {}

  def query(self, action: str) -> str | None:
    """Returns the query that `step(action)` would send to the retriever, or None."""
    kind, content = parse_action(action)
    return content if kind == 'search' and self._turns < self.max_searches else None

  def step(self, action: str, passages: Any = NOT_SEARCHED) -> protocol.Step:
    """Plays one turn of the agent: (observation, reward, terminated, truncated, info).

    `passages` are the results for `query(action)` if the caller has fetched them. None says that
    the retriever failed. The agent then sees an empty block.
    """
    if self._is_over:
      raise RuntimeError('step() needs reset() first: no episode is running')
    kind, content = parse_action(action)
    query = self.query(action)
    self._turns += 1
    self._searches += kind == 'search'
    self._texts.append(action)
    metrics = dict.fromkeys(rewards.SCORES, 0.0) | {'searches': float(self._searches)}
    info: protocol.StepInfo = {
        'action': kind,
        'query': content if kind == 'search' else None,
        'answer': content if kind == 'answer' else None,
        'retrieval_failed': False,
        'passage_ids': [],
        'metrics': metrics,
    }
    if kind == 'answer':
      self._is_over = True
      metrics |= rewards.scores(self.task, content)
      transcript = ''.join(self._texts)
      reward = rewards.score_answer(self.reward, self.task, content, transcript)
      metrics |= reward.metrics
      return '', float(reward), True, False, info
    if self._turns > self.max_searches:
      self._is_over = True
      return '', 0.0, True, True, info
    if query is None:
      observation = self._invalid
    else:
      if passages is NOT_SEARCHED:
        passages = stepping.call_retriever(self.retriever, [query], self.top_k)[0]
      info['retrieval_failed'] = passages is None
      info['passage_ids'] = [passage.id for passage in passages or ()]
      observation = types.without_surrogates(observation_text(passages or (), self.prompt))
    self._texts.append(observation)
    return observation, 0.0, False, False, info


def parse_action(text: str) -> tuple[str, str]:
  """Returns the first complete action of a turn: ('search' | 'answer', its stripped content).

  Returns ('invalid', '') if there is none. A regular expression would take quadratic time, because
  it would search for the closing tag again from each opening tag.
  """
  actions = []
  for kind in ('search', 'answer'):
    before, _, rest = text.partition(f'<{kind}>')
    content, closing, _ = rest.partition(f'</{kind}>')
    if closing:
      actions.append((len(before), kind, content.strip()))
  _, kind, content = min(actions, default=(0, 'invalid', ''))
  return kind, content


def prompt_text(task: types.Task, style: str, instructions: str = '') -> str:
  """Returns the user message. Its question is stripped and ends in a question mark.

  In question and options, a space separates `<` from text that looks like a tag or a control token.
  """
  question = _neutralize_markup(task.question.strip())
  if not question.endswith('?'):
    question += '?'
  options = [f'{letter}) {_neutralize_markup(text)}' for letter, text in task.options]
  lines = [f'Question: {question}', *options]
  if style == 'short':
    return instructions + ' '.join(lines) + '\n'
  if options:
    instructions += _BY_LETTER
  return instructions + '\n'.join(lines) + '\n'


def observation_text(passages: Sequence[types.Passage], style: str) -> str:
  """Returns the `<information>` block that answers a search. No passage can close or imitate it."""
  text = ''
  if style == 'short':
    for passage in passages:
      text += f' {neutralize(passage.title)}: {neutralize(passage.text)}\n'
    return f'<information>{text}</information>\n'
  for i, passage in enumerate(passages, start=1):
    # The title is the first line of `contents`, with its quotes.
    title, _, body = tasks_lib.write_contents(passage).partition('\n')
    text += f'Doc {i}(Title: {title}) {body}\n'
  return f'\n\n<information>{neutralize(text.strip())}</information>\n\n'


def neutralize(text: str) -> str:
  """Returns passage text in which nothing reads as a tag or as a marker of a chat template.

  Inserts a space after every `<` before text (`<answer>`, `</s>`, `<|im_start|>`), after the two
  wide forms of `<` that Unicode normalisation maps to it, and into bracketed markers (`[INST]`).
  text/tokenizer.py independently ensures that an observation encodes to no special token.
  """
  return _BRACKET_MARKER.sub('[ ', _OPENING.sub(r'\1 ', text))


def _neutralize_markup(text):
  """Returns a question in which nothing is a tag. Other uses of `<` stay as they are."""
  return _BRACKET_MARKER.sub('[ ', _MARKUP.sub(r'\1 ', text))
