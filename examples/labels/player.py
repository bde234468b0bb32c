"""Players of the classification: one that marks the ceiling, and one that is imitated."""

import itertools
import re

from examples.labels import env

EXAMPLE = re.compile(r'premise: (\w+) (\w+) (\w+)\. hypothesis: (.*)')


def label_of(text: str) -> str:
  """Returns the label of an example, by trying the forms of each label."""
  a, did, b, hypothesis = EXAMPLE.fullmatch(text).groups()
  do, done = env.VERBS[did]
  for label, forms in env.FORMS.items():
    for form, c, other in itertools.product(forms, env.NAMES, env.VERBS):
      candidate = form.format(a=a, b=b, c=c, did=did, do=do, done=done, other=other)
      if candidate == hypothesis and c not in (a, b) and other != did:
        return label
  raise ValueError(f'{text!r} has no form of env.FORMS')


class Player:
  """Is undecided: it says `maybe` too often, and forgets the tags in a few answers."""

  skill = 0.25  # share of episodes with the right label
  doubt = 0.5  # share of the other episodes with `maybe`; the rest has any label
  tidy = 0.9  # share of episodes with readable tags

  def __init__(self, rng):
    self._rng = rng

  def act(self, observation: str) -> str:
    """Returns a judgement."""
    label = self._rng.choice(env.LABELS)
    if self._rng.random() < self.skill:
      label = label_of(observation)
    elif self._rng.random() < self.doubt:
      label = 'maybe'
    if self._rng.random() < self.tidy:
      return f'<Judgement>{label}</Judgement>'
    return label


class Expert(Player):
  """Knows the forms: the ceiling."""

  skill = 1.0
  tidy = 1.0
