"""The search environment: a question, a retriever, and a limited number of turns.

Task in, episode out: the prompt from `reset`, then one observation a `step`, until an answer. It
is single-agent text, so the policy's side (tokens, chat template) is nowhere in here.
"""

from collections.abc import Sequence
import re
from typing import Any

from stppo_jax import types
from stppo_jax.envs import rewards

STYLES = ('search_r1', 'short')
REWARDS = ('em', 'sub_em', 'f1', 'format')

_OPENING = re.compile(r'([<\uff1c\ufe64])(?=\S|\Z)')
_BRACKET_MARKER = re.compile(
    r'\[(?=/?(?:INST|SYS|SYSTEM_PROMPT|AVAILABLE_TOOLS|TOOL_CALLS|TOOL_RESULTS)\])'
)
_OWN_SEARCH = object()  # `passages` was not given; None would mean: the retriever failed

_INSTRUCTIONS = (
    'Find the answer to the question at the end. Begin each step, and react to every piece of new '
    'information, by thinking it through between <think> and </think>. When a fact is missing, '
    'write <search> your query </search>: a search engine then shows you its best passages between '
    '<information> and </information>. There is no limit to how often you may ask it, and no need '
    'to ask when you already know. To finish, put the bare answer between <answer> and </answer>, '
    'with no explanation around it: for example, <answer> Beijing </answer>. '
)
_BY_LETTER = 'Answer with the letter of the right option. '
_INVALID = {
    'search_r1': (
        '\n\nThat text holds no action I can carry out. A search must be written as '
        '<search> query </search>, and a final answer as <answer> answer </answer>. '
        'Please try once more.\n\n'
    ),
    'short': 'Invalid: use <search>query</search> or <answer>answer</answer>\n',
}


class SearchEnv:
  """One question with GEM's `reset` and `step`.

  Actions 1..max_turns may search, be invalid, or answer; one more generation may only answer, and
  anything else there ends the episode with reward 0. So an episode has at most `max_turns`
  searches and `max_turns + 1` generations; `max_turns=0` is closed-book.
  """

  def __init__(
      self,
      task: types.Task,
      retriever: Any,  # a retrieval.protocol.Retriever; None for closed-book
      max_turns: int = 4,
      top_k: int = 3,
      prompt: str = 'search_r1',
      reward: str = 'em',
      observation: str | None = None,  # None: the style of the prompt
  ):
    observation = prompt if observation is None else observation
    _require(prompt in STYLES, f'prompt={prompt!r}', f'one of {STYLES}')
    _require(observation in STYLES, f'observation={observation!r}', f'one of {STYLES}')
    _require(reward in REWARDS, f'reward={reward!r}', f'one of {REWARDS}')
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
    self._reward = reward
    self._over = True
    self._turns = 0
    self._transcript = ''

  def reset(self, seed: int | None = None) -> tuple[str, dict[str, Any]]:
    """Starts the episode anew: (the text of the user message, info). Nothing here is random."""
    del seed
    self._over, self._turns, self._transcript = False, 0, ''
    return prompt_text(self.task, self._prompt_style), {'suffix': ''}

  def query(self, action: str) -> str | None:
    """What `step(action)` would ask the retriever, or None if it would not ask."""
    kind, content = parse_action(action)
    return content if kind == 'search' and self._turns < self.max_turns else None

  def step(
      self, action: str, passages: Sequence[types.Passage] | None | object = _OWN_SEARCH
  ) -> tuple[str, float, bool, bool, dict[str, Any]]:
    """Carries out one turn of the agent: (observation, reward, terminated, truncated, info).

    `passages` are the results for `query(action)` where the caller has fetched them; None says
    that the retriever failed, which the agent sees as an empty block and nothing more.
    """
    if self._over:
      raise RuntimeError('step() needs reset() first: no episode is running')
    kind, content = parse_action(action)
    query = self.query(action)
    self._turns += 1
    self._transcript += action
    info = {
        'action': kind,
        'query': content if kind == 'search' else None,
        'answer': content if kind == 'answer' else None,
        'retrieval_failed': False,
        'em': 0.0,
        'f1': 0.0,
        'passage_ids': [],
        'suffix': '',
    }
    if kind == 'answer':
      self._over = True
      info['em'] = rewards.exact_match(*_spelled_out(content, self.task))
      info['f1'] = rewards.f1(*_spelled_out(content, self.task))
      return '', self._score(content, info), True, False, info
    if self._turns > self.max_turns:
      self._over = True
      return '', 0.0, True, True, info
    if query is None:
      observation = _INVALID[self._observation_style]
    else:
      if passages is _OWN_SEARCH:
        passages = self.retriever.search([query], self.top_k)[0]
      info['retrieval_failed'] = passages is None
      info['passage_ids'] = [passage.id for passage in passages or ()]
      observation = observation_text(passages or (), self._observation_style)
    self._transcript += observation
    return observation, 0.0, False, False, info

  def _score(self, answer: str, info: dict[str, Any]) -> float:
    if self._reward == 'f1':
      return info['f1']
    if self._reward == 'sub_em':
      return max(info['em'], rewards.sub_exact_match(*_spelled_out(answer, self.task)))
    if self._reward == 'format':
      return rewards.format_reward(info['em'] == 1.0, rewards.well_formed(self._transcript))
    return info['em']


def parse_action(text: str) -> tuple[str, str]:
  """The first complete action of a turn: ('search' | 'answer', its stripped content), or
  ('invalid', '') where there is none. No regular expression: it would look for the end anew from each
  of a thousand openings."""
  found = []
  for kind in ('search', 'answer'):
    before, _, rest = text.partition(f'<{kind}>')
    content, closing, _ = rest.partition(f'</{kind}>')
    if closing:
      found.append((len(before), kind, content.strip()))
  return min(found)[1:] if found else ('invalid', '')


def prompt_text(task: types.Task, style: str) -> str:
  """The user message. Its question is stripped and ends in a question mark."""
  question = task.question.strip()
  question = question if question.endswith('?') else question + '?'
  options = [f'{letter}) {text}' for letter, text in task.options]
  if style == 'short':
    return ' '.join([f'Question: {question}', *options]) + '\n'
  by_letter = _BY_LETTER if options else ''
  return _INSTRUCTIONS + by_letter + '\n'.join([f'Question: {question}', *options]) + '\n'


def observation_text(passages: Sequence[types.Passage], style: str) -> str:
  """The `<information>` block that answers a search, which no passage can close or imitate."""
  shown = [(neutralize(passage.title), neutralize(passage.text)) for passage in passages]
  if style == 'short':
    lines = ''.join(f' {title}: {text}\n' for title, text in shown)
    return f'<information>{lines}</information>\n'
  lines = ''.join(f'Doc {i}(Title: {title}) {text}\n' for i, (title, text) in enumerate(shown, 1))
  return f'\n\n<information>{lines}</information>\n\n'


def neutralize(text: str) -> str:
  """Passage text in which nothing reads as a tag or as a marker of a chat template.

  A space goes in after every `<` that has none (`<answer>`, `</s>`, `<|im_start|>`), the
  two wide forms of `<` that Unicode normalisation turns into one included, and into the bracketed
  markers (`[INST]`). This is the level of text; that encoding an observation never yields a
  special token is the tokenizer's part, and each holds without the other.
  """
  return _BRACKET_MARKER.sub('[ ', _OPENING.sub(r'\1 ', text))


def _spelled_out(answer: str, task: types.Task) -> tuple[str, tuple[str, ...]]:
  """(answer, golds), with a letter replaced by its option's text in multiple choice.

  `B`, `b`, `(B)`, `B.` and `B) Paris` all mean option B, the last only if B is Paris; a marked
  letter with another option's text answers nothing. Letters are looked at first since answer
  normalisation, made for words, would drop `A` as an article.
  """
  if not task.options:
    return answer, task.answers
  golds = (dict(task.options)[task.letter],)
  texts = [text for _, text in task.options]
  for letter, text in task.options:
    named = re.fullmatch(rf'\(?{re.escape(letter)}([).:]|\b)\s*(.*)', answer, re.I | re.S)
    if not named:
      continue
    mark, rest = named.groups()
    if not rest or rewards.exact_match(rest, [text]):
      return text, golds
    if mark and rewards.exact_match(rest, texts):
      return '', golds
  return answer, golds


def _require(holds: bool, given: str, allowed: str) -> None:
  if not holds:
    raise types.UserError(f'search environment: got {given}; it needs {allowed}')
