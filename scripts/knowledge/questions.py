"""Questions of the embedded knowledge set: entities with facts in, rows of qa.jsonl out.

A question follows a chain of relations from title to title; hop k reads the passage of the k-th
entity. The tables below define the chains, their wordings and the number of questions.
"""

import collections
import hashlib

from scripts.knowledge import sources

_LETTERS = 'ABCD'

# (dataset, split) -> maximal number of questions with 1, 2 and 3 hops
_QUOTAS = {
    ('geo', 'train'): (620, 480, 280),
    ('geo', 'dev'): (60, 46, 26),
    ('geo', 'test'): (80, 62, 35),
    ('elements', 'train'): (200, 150, 90),
    ('elements', 'dev'): (18, 14, 8),
    ('elements', 'test'): (32, 26, 15),
    ('medical', 'train'): (430, 340, 170),
    ('medical', 'dev'): (45, 35, 18),
    ('medical', 'test'): (65, 50, 25),
}
# The sub-question for one fact, as an agent would ask it next.
_STEPS = {
    'capital': 'capital of {}',
    'currency': 'currency of {}',
    'language': 'language of {}',
    'continent': 'continent of {}',
    'calling_code': 'phone code of {}',
    'neighbour': 'most populous neighbour of {}',
    'largest_city': 'largest city of {}',
    'country': 'country of {}',
    'nearest_capital': 'nearest foreign capital to {}',
    'discoverer': 'discoverer of {}',
    'place': 'country where {} was discovered',
    'year': 'year of discovery of {}',
    'symbol': 'symbol of {}',
    'number': 'atomic number of {}',
    'latest': 'latest element discovered by {}',
    'gene': 'gene of {}',
    'disease': 'disease of gene {}',
    'mode': 'inheritance of {}',
    'other': 'other disease of gene {}',
}
# The last relation of a chain in a country: (relation, its name in the question)
_OF_COUNTRY = (
    ('currency', 'currency'),
    ('capital', 'capital'),
    ('language', 'language'),
    ('calling_code', 'phone code'),
    ('largest_city', 'largest city'),
    ('neighbour', 'most populous neighbour'),
    ('continent', 'continent'),
)
# (dataset, kind of the first entity, relations of the chain, paraphrases)
_CHAINS = [
    ('geo', 'city', ('country',), ('In which country is {}?', '{} is a city in which country?')),
    (
        'geo',
        'capital',
        ('country',),
        ('{} is the capital of which country?', 'Which country has {} as its capital?'),
    ),
    (
        'geo',
        'capital',
        ('nearest_capital',),
        ('Which foreign capital is nearest to {}?', 'What is the nearest foreign capital to {}?'),
    ),
    (
        'geo',
        'capital',
        ('nearest_capital', 'country'),
        (
            'The foreign capital nearest to {} is in which country?',
            'In which country is the foreign capital nearest to {}?',
        ),
    ),
    (
        'geo',
        'country',
        ('capital', 'nearest_capital'),
        (
            'Which foreign capital is nearest to the capital of {}?',
            'What is the nearest foreign capital to the capital of {}?',
        ),
    ),
    (
        'geo',
        'country',
        ('neighbour', 'capital', 'nearest_capital'),
        ('Which foreign capital is nearest to the capital of the most populous neighbour of {}?',),
    ),
    ('elements', 'element', ('discoverer',), ('Who discovered {}?', 'Name a discoverer of {}.')),
    (
        'elements',
        'element',
        ('place',),
        ('In which country was {} discovered?', 'Where was the element {} discovered?'),
    ),
    (
        'elements',
        'element',
        ('year',),
        ('In which year was {} discovered?', 'When was the element {} discovered?'),
    ),
    (
        'elements',
        'element',
        ('symbol',),
        ('What is the chemical symbol of {}?', 'Which symbol stands for the element {}?'),
    ),
    (
        'elements',
        'element',
        ('number',),
        ('What is the atomic number of {}?', 'Which atomic number does {} have?'),
    ),
    (
        'elements',
        'person',
        ('latest',),
        ('Which element did {} discover last?', 'What is the latest element discovered by {}?'),
    ),
    (
        'elements',
        'element',
        ('discoverer', 'latest'),
        (
            'Which element did the discoverer of {} discover last?',
            'What is the latest element found by the discoverer of {}?',
        ),
    ),
    (
        'elements',
        'person',
        ('latest', 'symbol'),
        (
            'What is the symbol of the latest element discovered by {}?',
            'Which symbol stands for the element that {} discovered last?',
        ),
    ),
    (
        'elements',
        'person',
        ('latest', 'number'),
        (
            'What is the atomic number of the latest element discovered by {}?',
            'Which atomic number does the element have that {} discovered last?',
        ),
    ),
    (
        'elements',
        'element',
        ('discoverer', 'latest', 'symbol'),
        ('What is the symbol of the element that the discoverer of {} discovered last?',),
    ),
    (
        'elements',
        'element',
        ('discoverer', 'latest', 'number'),
        ('What is the atomic number of the element that the discoverer of {} discovered last?',),
    ),
    (
        'elements',
        'element',
        ('place', 'capital', 'nearest_capital'),
        (
            'Which foreign capital is nearest to the capital of the country where {} was discovered?',
        ),
    ),
    (
        'medical',
        'disease',
        ('gene',),
        ('Which gene is associated with {}?', 'What is the gene of {}?'),
    ),
    (
        'medical',
        'disease',
        ('mode',),
        ('What is the mode of inheritance of {}?', 'How is {} inherited?'),
    ),
    (
        'medical',
        'gene',
        ('disease',),
        (
            'Which disease is associated with the gene {}?',
            'The gene {} is associated with which disease?',
        ),
    ),
    (
        'medical',
        'gene',
        ('disease', 'mode'),
        (
            'How is the disease associated with the gene {} inherited?',
            'What is the mode of inheritance of the disease of the gene {}?',
        ),
    ),
    (
        'medical',
        'disease',
        ('gene', 'other'),
        (
            'Which other disease is associated with the gene of {}?',
            'The gene of {} is also associated with which disease?',
        ),
    ),
    (
        'medical',
        'disease',
        ('gene', 'other', 'mode'),
        (
            'How is the other disease associated with the gene of {} inherited?',
            'What is the mode of inheritance of the other disease of the gene of {}?',
        ),
    ),
]
for _relation, _noun in _OF_COUNTRY:
  _CHAINS += [
      (
          'geo',
          'country',
          (_relation,),
          (f'What is the {_noun} of {{}}?', f'Name the {_noun} of {{}}.'),
      ),
      (
          'geo',
          'city',
          ('country', _relation),
          (
              f'What is the {_noun} of the country where {{}} lies?',
              f'{{}} lies in a country with which {_noun}?',
          ),
      ),
      (
          'elements',
          'element',
          ('place', _relation),
          (
              f'What is the {_noun} of the country where {{}} was discovered?',
              f'Name the {_noun} of the country in which the element {{}} was discovered.',
          ),
      ),
  ]
  if _relation != 'neighbour':
    _CHAINS += [
        (
            'geo',
            'country',
            ('neighbour', _relation),
            (
                f'What is the {_noun} of the most populous neighbour of {{}}?',
                f'Name the {_noun} of the most populous country next to {{}}.',
            ),
        ),
        (
            'geo',
            'city',
            ('country', 'neighbour', _relation),
            (
                f'What is the {_noun} of the most populous neighbour of the country where {{}} lies?',
            ),
        ),
        (
            'elements',
            'element',
            ('place', 'neighbour', _relation),
            (
                f'What is the {_noun} of the most populous neighbour of the country where {{}} was'
                ' discovered?',
            ),
        ),
    ]
  _CHAINS.append(
      (
          'geo',
          'capital',
          ('nearest_capital', 'country', _relation),
          (
              f'What is the {_noun} of the country whose capital is the nearest foreign one to {{}}?',
          ),
      )
  )


class Entity:
  """A title with its split, its passage and the facts that the passage states.

  A fact is a tuple of right answers; that of 'other' is a dict from the title one came from.
  """

  def __init__(self, kind, title, split, variants, facts):
    self.kind, self.title, self.split, self.facts = kind, title, split, facts
    self.text = pick(variants, title)
    self.id = ''


def questions(entities: dict[str, Entity]) -> list[dict]:
  """Returns the rows of qa.jsonl, at most the quota per split and number of hops."""
  pools = collections.defaultdict(lambda: collections.defaultdict(list))
  for chain in _CHAINS:
    dataset, kind, relations, paraphrases = chain
    for first in (e for e in entities.values() if e.kind == kind):
      walked = _walk(first, relations, entities)
      if walked:
        key = f'{first.title}|{"|".join(relations)}'
        question = pick(paraphrases, key).format(first.title)
        pools[dataset, first.split, len(relations)][relations].append(
            (key, question, relations, *walked)
        )
  rows = []
  for (dataset, split), quotas in _QUOTAS.items():
    for hops, quota in enumerate(quotas, start=1):
      chosen = _round_robin(pools[dataset, split, hops], quota)
      chosen.sort(key=lambda r: stable_hash(r[0]))
      for key, question, relations, subjects, answers in chosen:
        row = {
            'id': f'{dataset}-{split}-{hops}-{len(rows)}',
            'dataset': dataset,
            'split': split,
            'type': '-'.join(relations),
            'hops': hops,
            'question': question,
            'answers': list(answers[-1]),
            'gold': [e.id for e in subjects],
            'steps': _steps(subjects, relations, answers),
        }
        kind = 'disease' if relations[-1] == 'other' else relations[-1]
        if kind in ('mode', 'disease') or (kind == 'gene' and stable_hash(key) % 2):
          _add_options(row, kind, subjects[-1].split, entities)
        rows.append(row)
  return rows


def pick(variants, key: str):
  """Returns one of the variants, always the same one for the same key."""
  return variants[stable_hash(key + 'variant') % len(variants)]


def stable_hash(text: str) -> int:
  """Returns a hash that does not depend on the process, the machine or the Python version."""
  return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], 'big')


def _walk(first, relations, entities):
  """Returns the entities and the answer of each hop; None if the chain breaks."""
  subjects, answers = [first], []
  for i, relation in enumerate(relations):
    answer = subjects[-1].facts.get(relation)
    if isinstance(answer, dict):
      answer = answer.get(subjects[-2].title) if len(subjects) > 1 else None
    if not answer:
      return None
    answers.append(answer)
    if i + 1 < len(relations):
      if len(answer) > 1 or answer[0] not in entities:
        return None
      subjects.append(entities[answer[0]])
  titles = [e.title for e in subjects]
  if len({*titles}) < len(titles) or answers[-1][0] in titles:
    return None
  if {e.split for e in subjects} != {first.split} or first.split == 'none':
    return None
  return subjects, answers


def _steps(subjects, relations, answers):
  steps = []
  for i, (subject, relation, answer) in enumerate(zip(subjects, relations, answers)):
    about = subject.title if i == 0 else f'#{i}'
    steps.append({'q': _STEPS[relation].format(about), 'a': answer[0], 'p': subject.id})
  return steps


def _add_options(row, kind, split, entities):
  right = row['answers'][0]
  if kind == 'mode':
    options = list(sources.MODES.values())
  else:
    same = [
        e.title
        for e in entities.values()
        if e.kind == kind and e.split == split and e.title != right
    ]
    options = [right] + sorted(same, key=lambda t: stable_hash(row['question'] + t))[:3]
  options = sorted(options, key=lambda o: stable_hash(row['question'] + 'order' + o))
  row['options'] = dict(zip(_LETTERS, options))
  row['answer'] = _LETTERS[options.index(right)]


def _round_robin(pools, quota):
  """Returns at most `quota` rows, balanced over the kinds of chain as far as possible."""
  ranked = []
  for rows in pools.values():
    rows = sorted(rows, key=lambda r: stable_hash(r[0] + 'draw'))
    ranked += [(i, stable_hash(row[0]), row) for i, row in enumerate(rows)]
  return [row for _, _, row in sorted(ranked, key=lambda r: r[:2])[:quota]]
