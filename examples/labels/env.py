"""A classification task as an environment, after PPO for natural language understanding.

In the paper (arXiv 2410.11020) a model reads a GLUE example and writes its label between
`<Judgement>` tags. LoRA adapters are trained by PPO with the rewards of its authors' code (C): 1
for the right label, -1 for a wrong one, -3 for an answer that cannot be read. The examples here are
generated, with the three labels of entailment. Single words decide the label:

  premise: ann saw bob. hypothesis: bob was seen by ann.
  <Judgement>yes</Judgement>
"""

import dataclasses
import random
import re

from examples import tasks
from stppo_jax.types import Task

NAMES = ('ann', 'bob', 'eve', 'tom')
VERBS = {'saw': ('see', 'seen'), 'met': ('meet', 'met'), 'heard': ('hear', 'heard')}
LABELS = ('yes', 'no', 'maybe')
# Label -> forms of a hypothesis. {c} is another person, {other} another verb.
FORMS = {
    'yes': ('{b} was {done} by {a}.', 'someone {did} {b}.', '{a} {did} someone.'),
    'no': ('{a} did not {do} {b}.', 'nobody {did} {b}.', '{b} was not {done} by {a}.'),
    'maybe': ('{b} {did} {a}.', '{a} {did} {c}.', '{a} {other} {b}.'),
}
REWARDS = {'right': 1.0, 'wrong': -1.0, 'unreadable': -3.0}
MOST = 2.5  # reward of the right number; the distance is subtracted
JUDGEMENT = re.compile(r'<Judgement>(.*?)</Judgement>', re.DOTALL)


def load(split: str) -> list[Task]:
  """Makes the examples of a split from seeds. A .jsonl file of GLUE can take its place."""
  examples = []
  for task in tasks.seeded('labels')(split):
    text, label = make_example(random.Random(task.seed))
    examples.append(dataclasses.replace(task, question=text, answers=(label,)))
  return examples


def make_example(rng: random.Random) -> tuple[str, str]:
  """Returns the text of an example and its label."""
  a, b, c = rng.sample(NAMES, 3)
  did, other = rng.sample(sorted(VERBS), 2)
  do, done = VERBS[did]
  label = rng.choice(LABELS)
  form = rng.choice(FORMS[label])
  hypothesis = form.format(a=a, b=b, c=c, did=did, do=do, done=done, other=other)
  return f'premise: {a} {did} {b}. hypothesis: {hypothesis}', label


class Labels:
  """One example, one turn, and a reward by the label.

  Args:
    task: `question` is the text of the example, and its answer is the label.
    labels: all labels. Without any, a label is a number, as in the paper's regression task: the
      reward is 2.5 minus the distance, and -2.5 if the answer is no number.
  """

  frame = 'user'
  core_metrics = ('right',)
  uses_global_random = False

  def __init__(self, task, labels=LABELS):
    self._task = task
    self._labels = labels

  def reset(self, seed=None):
    """Returns the text of the example."""
    del seed
    return self._task.question, {}

  def step(self, action):
    """Takes a judgement."""
    match = JUDGEMENT.search(action)
    judgement = match[1].strip().lower() if match else ''
    judge = self._judge_label if self._labels else self._judge_number
    reward, is_right, is_readable = judge(judgement, self._task.answers[0])
    info = {
        'action': 'judge' if is_readable else 'invalid',
        'metrics': {'right': float(is_right), 'readable': float(is_readable)},
    }
    return '', reward, True, False, info

  def _judge_label(self, judgement, label):
    if judgement not in self._labels:
      return REWARDS['unreadable'], False, False
    is_right = judgement == label
    return REWARDS['right' if is_right else 'wrong'], is_right, True

  def _judge_number(self, judgement, number):
    if not re.fullmatch(r'\d+(\.\d+)?', judgement):
      return -MOST, False, False
    distance = abs(float(judgement) - float(number))
    return MOST - distance, distance < 0.5, True
