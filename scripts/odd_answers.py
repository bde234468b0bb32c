"""Prints what environment packages pay for odd but valid answers, as tables in Markdown.

    python -m scripts.odd_answers

Each environment is played with the right answer and ten other kinds of answers, once by calling the
package and once by its adapter. The packages reasoning-gym, gem-llm and textarena must be
installed. The output is a part of docs/environments.md.
"""

from collections.abc import Callable
from collections.abc import Mapping
import contextlib
import importlib.metadata
import json
import os
from typing import Any
from typing import NamedTuple

from absl import logging

from stppo_jax import types
from stppo_jax.envs.adapters import gem as gem_adapter
from stppo_jax.envs.adapters import reasoning_gym as reasoning_gym_adapter
from stppo_jax.envs.adapters import textarena as textarena_adapter

PACKAGES = ('reasoning-gym', 'gem-llm', 'textarena')
SEED = 3
KINDS = (
    'right', 'empty', 'unknown', 'sentence', 'case', 'unit', 'thousands', 'wrong', 'json', 'twice',
    'long',
)  # fmt: skip
DATASETS: Mapping[str, dict[str, Any]] = {
    'chain_sum': {'min_digits': 4, 'max_digits': 4},
    'letter_counting': {},
    'spell_backward': {},
    'word_sorting': {},
    'mini_sudoku': {},
    'prime_factorization': {},
    'game_of_life': {},
    'boxnet': {},
    'game_of_life_halting': {},
}
LAST_TURN = {'max_turns': 1}  # the answer is the last of a game
MAX_REPEATS = 4  # TextArena asks again after an invalid move


class Play(NamedTuple):
  """An environment, and ways to get the reward of a text."""

  name: str
  right: str | None  # the right answer without its form; None: the package names no answer
  wrong: str
  form: str  # format of an answer
  by_package: Callable[[str], float]
  by_adapter: Callable[[str], float]


def make_answers(play: Play) -> dict[str, str]:
  """Returns a text of each of the KINDS. Without a right answer there are fewer."""
  form = play.form.format
  answers = {
      'empty': '',
      'unknown': 'I do not know',
      'thousands': form('1,234'),
      'wrong': form(play.wrong),
      'json': json.dumps({'answer': play.right or play.wrong}),
  }
  right = play.right
  if right is None:
    return answers
  if right.isdecimal() and int(right) >= 1000:
    answers['thousands'] = form(f'{int(right):,}')
  return answers | {
      'right': form(right),
      'sentence': f'I think that the answer is {form(right)}, because it fits.',
      'case': form(right.swapcase()),
      'unit': form(f'{right} apples'),
      'twice': f'{form(right)} {form(right)}',
      'long': 'so ' * 2000 + form(right),
  }


def play_reasoning_gym(name: str, options: Mapping[str, Any]) -> Play:
  """Returns the first question of a data set of Reasoning Gym."""
  import reasoning_gym

  data = reasoning_gym.create_dataset(name, seed=SEED, size=1, **options)
  entry = data[0]
  env_class = reasoning_gym_adapter.make(name)

  def by_package(text: str) -> float:
    return data.score_answer(text, entry)

  def by_adapter(text: str) -> float:
    env = env_class(types.Task('odd'), **options)
    env.reset(seed=SEED)
    return env.step(f'<answer>{text}</answer>')[1]

  right = entry['answer']
  wrong = '12345'
  if right is not None:
    right = str(right)
    if right.isdecimal():
      wrong = str(int(right) + 1)
  return Play(f'reasoning_gym:{name}', right, wrong, '{}', by_package, by_adapter)


def play_gem(name: str, hidden: str) -> Play:
  """Returns the last turn of a game of GEM. `hidden` is the attribute with the answer."""
  import gem

  def start():
    game = gem.make(name, **LAST_TURN)
    game.reset(seed=SEED)
    return game

  env_class = gem_adapter.make(name)

  def by_adapter(text: str) -> float:
    env = env_class(types.Task('odd'), **LAST_TURN)
    env.reset(seed=SEED)
    return env.step(text)[1]

  right, wrong = near_miss(getattr(start(), hidden))
  return Play(
      f'gem:{name}', right, wrong, '\\boxed{{{}}}', lambda text: start().step(text)[1], by_adapter
  )


def play_textarena(name: str, hidden: str) -> Play:
  """Returns the last turn of a game of TextArena. `hidden` is the entry with the answer."""
  import textarena

  def start():
    game = textarena.make(name, **LAST_TURN)
    game.reset(num_players=1, seed=SEED)
    return game

  def by_package(text: str) -> float:
    game = start()
    for _ in range(MAX_REPEATS):
      game.get_observation()
      is_over, _ = game.step(text)
      if is_over:
        break
    return game.close()[0][0]

  env_class = textarena_adapter.make(name)

  def by_adapter(text: str) -> float:
    env = env_class(types.Task('odd'), **LAST_TURN)
    env.reset(seed=SEED)
    for _ in range(MAX_REPEATS):
      _, reward, is_over, _, _ = env.step(text)
      if is_over:
        break
    return reward

  right, wrong = near_miss(start().state.game_state[hidden])
  return Play(f'textarena:{name}', right, wrong, '[{}]', by_package, by_adapter)


def near_miss(hidden: int | list[int]) -> tuple[str, str]:
  """Returns the right answer and a wrong one that is close to it."""
  if isinstance(hidden, int):
    return str(hidden), str(hidden - 1 if hidden > 1 else 2)
  swapped = [hidden[1], hidden[0], *hidden[2:]]
  return ' '.join(map(str, hidden)), ' '.join(map(str, swapped))


def evaluate(score: Callable[[str], float], text: str) -> str:
  """Returns a reward in digits, or the name of the exception."""
  try:
    reward = float(score(text))
  except Exception as error:  # the package may raise anything
    return type(error).__name__
  return f'{reward:.2g}'


def table_of_rewards(plays: list[Play]) -> list[str]:
  """Returns a table with the rewards of the packages, and those of the adapters in brackets."""
  lines = [f'| | {" | ".join(KINDS)} |', f'|---|{"---|" * len(KINDS)}']
  for play in plays:
    answers = make_answers(play)
    cells = []
    for kind in KINDS:
      if kind not in answers:
        cells.append('')
        continue
      cell = evaluate(play.by_package, answers[kind])
      by_adapter = evaluate(play.by_adapter, answers[kind])
      if by_adapter != cell:
        cell = f'{cell} ({by_adapter})'
      cells.append(cell)
    lines.append(f'| `{play.name}` | {" | ".join(cells)} |')
  return lines


def table_of_counts(plays: list[Play]) -> list[str]:
  """Returns a table with the number of data sets by kind of answer and reward of the package."""
  lines = ['| answer | raises | 0 | between | 1 |', '|---|---|---|---|---|']
  for kind in KINDS:
    raising = []
    counts = {'0': 0, 'between': 0, '1': 0}
    for play in plays:
      answers = make_answers(play)
      if kind not in answers:
        continue
      reward = evaluate(play.by_package, answers[kind])
      if reward.isidentifier():
        raising.append(f'`{play.name.partition(":")[2]}`')
      else:
        counts[reward if reward in counts else 'between'] += 1
    names = f'{len(raising)}: {", ".join(raising)}' if raising else '0'
    lines.append(f'| {kind} | {names} | {counts["0"]} | {counts["between"]} | {counts["1"]} |')
  return lines


def main() -> None:
  """Prints the versions and both tables."""
  from reasoning_gym import factory

  logging.set_verbosity(logging.ERROR)
  with open(os.devnull, 'w') as sink, contextlib.redirect_stdout(sink):
    plays = [play_reasoning_gym(name, options) for name, options in DATASETS.items()]
    plays += [
        play_gem('game:GuessTheNumber-v0-easy', 'game_number'),
        play_gem('game:Mastermind-v0-easy', 'game_code'),
        play_textarena('GuessTheNumber-v0', 'game_number'),
        play_textarena('Mastermind-v0', 'secret_code'),
    ]
    rewards = table_of_rewards(plays)
    names = sorted(set(factory.DATASETS) - {'composite'})  # composite needs other data sets
    counts = table_of_counts([play_reasoning_gym(name, {}) for name in names])
  versions = [f'{package} {importlib.metadata.version(package)}' for package in PACKAGES]
  print(', '.join(versions), *rewards, '', f'{len(names)} data sets', *counts, sep='\n')


if __name__ == '__main__':
  main()
