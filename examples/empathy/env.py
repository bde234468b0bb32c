"""A simulated user with a hidden need and an emotion, after RLVER.

In the paper (arXiv 2507.03112) a language model plays a user. It judges each reply, changes its
emotion, and the emotion at the end is the reward. Its authors' code also defines a table of changes
(read in a copy of that code, where the model's own judgement is used instead). This user follows
that table, and a rule instead of a model judges the reply:

  mood     emotion     good reply   neutral   bad
  low      10 to 39        +20          0     -10
  middle   40 to 69        +15          0     -20
  high     70 to 100       +10         +5     -10

The emotion starts at 30. An episode ends at 100 (success), below 10 (failure), or at the last turn.
The reward is the emotion / 100, paid at the end.

The user does not say what it needs. A reply that asks reveals it. The need changes once, when the
mood becomes high.
"""

import random
import re

from examples import tasks

load = tasks.seeded('empathy')
START, SUCCESS, FAILURE = 30, 100, 10
CHANGES = {  # least emotion of the mood -> changes by a good, a neutral and a bad reply
    70: (10, 5, -10),
    40: (15, 0, -20),
    FAILURE: (20, 0, -10),
}
TOPICS = ('exam', 'job', 'friend', 'move', 'dog', 'team')
# Need -> what the user says if it is asked, and the reply that meets the need.
NEEDS = {
    'listening': ('i only want to talk', 'i hear you'),
    'advice': ('i do not know what to do', 'you could make a plan'),
    'praise': ('i doubt myself', 'you did well'),
    'company': ('i feel alone', 'i am with you'),
}
# The other needs are met neutrally, except the one that hurts.
HURTS = {'listening': 'advice', 'advice': 'praise', 'praise': 'company', 'company': 'listening'}
QUESTION = 'what do you need'
REPLIES = {meets: need for need, (_, meets) in NEEDS.items()}
REPLY = re.compile(rf'({"|".join(map(re.escape, REPLIES))}) with the (\w+)\.')


def change(emotion: int, feeling: int) -> int:
  """Returns the emotion after a reply; feeling 0 is good, 1 neutral, 2 bad."""
  least = next(least for least in CHANGES if emotion >= least)
  return min(emotion + CHANGES[least][feeling], SUCCESS)


class User:
  """The simulated user: a topic, two needs and an emotion."""

  def __init__(self, rng: random.Random):
    self.topic = rng.choice(TOPICS)
    self.needs = rng.sample(sorted(NEEDS), 2)
    self.emotion = START
    self.is_high = False

  @property
  def need(self) -> str:
    """The present need: the second one from the first high mood on."""
    return self.needs[self.is_high]

  def judge(self, reply: str) -> int:
    """Returns how a reply feels: 0 good, 1 neutral, 2 bad."""
    if reply == f'{QUESTION}?':
      return 1
    match = REPLY.fullmatch(reply)
    if match is None or match[2] != self.topic:
      return 2
    given = REPLIES[match[1]]
    if given == self.need:
      return 0
    return 2 if given == HURTS[self.need] else 1

  def hear(self, reply: str) -> str:
    """Changes the emotion by a reply and returns what the user says."""
    feeling = self.judge(reply)
    self.emotion = change(self.emotion, feeling)
    was_high = self.is_high
    self.is_high = self.is_high or self.emotion >= 70
    if reply == f'{QUESTION}?':
      return f'{NEEDS[self.need][0]}.'
    if self.is_high and not was_high:
      return 'better. but something else is wrong.'
    return ('that helps.', 'hm.', 'that hurts.')[feeling]


class Empathy:
  """A talk with a simulated user. Only the last turn pays.

  Args:
    task: gives no more than its seed, to `reset`.
    max_turns: replies of an episode.
  """

  frame = 'user'
  core_metrics = ('emotion',)
  uses_global_random = False

  def __init__(self, task, max_turns):
    del task
    self._max_turns = max_turns

  def reset(self, seed=None):
    """Draws the user from the seed."""
    self.user = User(random.Random(seed))
    self._turns = 0
    self._asked = 0
    return f'it is about the {self.user.topic}.', {}

  def step(self, action):
    """Takes a reply of the agent and returns the user's."""
    self._turns += 1
    is_question = action == f'{QUESTION}?'
    self._asked += is_question
    text = self.user.hear(action)
    emotion = self.user.emotion
    is_final = emotion >= SUCCESS or emotion < FAILURE
    is_last = self._turns >= self._max_turns
    is_over = is_final or is_last
    kind = 'ask' if is_question else 'reply' if REPLY.fullmatch(action) else 'invalid'
    score = max(0, emotion) / 100
    info = {
        'action': kind,
        'metrics': {
            'emotion': score,
            'success': float(emotion >= SUCCESS),
            'asked': float(self._asked),
        },
    }
    return text, score * is_over, is_over, is_last and not is_final, info
