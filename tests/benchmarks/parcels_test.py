"""The parcels to a machine without network, and the list of the wheels that travel in them."""

import importlib.metadata
import pathlib
import random
import re
import subprocess
import sys
import tempfile

from absl.testing import absltest
from absl.testing import parameterized
from packaging import requirements

from benchmarks import parcels

ROOT = pathlib.Path(__file__).parents[2]
MIB = parcels.MIB


class ParcelsTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    folder = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))
    self.cargo = folder / 'cargo'
    self.out = folder / 'parcels'
    self.store = folder / 'store'
    self.cargo.mkdir()
    r = random.Random(0)
    self.contents = {
        'a-1.0-py3-none-any.whl': r.randbytes(1000),
        'b.whl': r.randbytes(0x20000),
        'model.gguf': r.randbytes(5 * MIB // 2),
    }
    for name, content in self.contents.items():
      (self.cargo / name).write_bytes(content)

  def received(self):
    """Returns {name: content} of the complete files."""
    paths = [path for path in self.store.iterdir() if path.is_file()]
    return {path.name: path.read_bytes() for path in paths}

  def test_two_parcels_in_either_order(self):
    for order in ((0, 1), (1, 0)):
      with self.subTest(order=order):
        self.store = self.store.with_name(f'store{order[0]}')
        self.out = self.out.with_name(f'parcels{order[0]}')
        self.assertEqual(parcels.pack(self.cargo, self.out, 2 * MIB), 2)
        for number, expected in zip(order, (['model.gguf'], []), strict=True):
          self.assertEqual(parcels.receive(self.out / str(number), self.store), expected)
        self.assertEqual(self.received(), self.contents)

  def test_first_parcel_has_all_small_files(self):
    parcels.pack(self.cargo, self.out, MIB)
    parcels.receive(self.out / '0', self.store)
    wheels = {name: self.contents[name] for name in self.contents if name.endswith('.whl')}
    self.assertEqual(self.received(), wheels)

  def test_no_parcel_is_larger_than_its_room(self):
    number = parcels.pack(self.cargo, self.out, MIB)
    self.assertEqual(number, 3)
    for i in range(number):
      sizes = [path.stat().st_size for path in (self.out / str(i)).glob('*.[0-9]*')]
      self.assertBetween(sum(sizes), 1, MIB)

  def test_parcel_that_comes_twice_changes_nothing(self):
    parcels.pack(self.cargo, self.out, 2 * MIB)
    for number in (0, 0, 1, 1, 0):
      missing = parcels.receive(self.out / str(number), self.store)
    self.assertEqual(self.received(), self.contents)
    self.assertEqual(missing, [])

  def test_changed_piece_is_refused(self):
    parcels.pack(self.cargo, self.out, 2 * MIB)
    (piece,) = (self.out / '1').glob('model.gguf.*')
    content = piece.read_bytes()
    piece.write_bytes(b'x' * len(content))
    parcels.receive(self.out / '0', self.store)
    with self.assertRaisesRegex(ValueError, 'model.gguf differs .* send it again'):
      parcels.receive(self.out / '1', self.store)
    piece.write_bytes(content)
    for number in (0, 1):
      parcels.receive(self.out / str(number), self.store)
    self.assertEqual(self.received(), self.contents)

  def test_folder_without_manifest_is_refused(self):
    with self.assertRaisesRegex(ValueError, 'is no parcel: it has no manifest.json'):
      parcels.receive(self.cargo, self.store)

  @parameterized.parameters(('pack', 'has no file'), ('room', 'less than 1 MiB'))
  def test_nothing_to_pack_or_no_room(self, case, message):
    empty = self.cargo.with_name('empty')
    empty.mkdir()
    with self.assertRaisesRegex(ValueError, message):
      parcels.pack(empty if case == 'pack' else self.cargo, self.out, 10 * MIB * (case == 'pack'))

  @parameterized.parameters('', 'folder')
  def test_what_would_be_lost_is_refused(self, kind):
    path = self.cargo / 'more'
    if kind == 'folder':
      path.mkdir()
    else:
      path.touch()
    with self.assertRaisesRegex(ValueError, 'more is a folder or empty'):
      parcels.pack(self.cargo, self.out, 2 * MIB)

  def test_folder_that_exists_is_not_replaced(self):
    self.out.mkdir()
    with self.assertRaisesRegex(ValueError, 'is there already: delete it'):
      parcels.pack(self.cargo, self.out, 2 * MIB)
    self.assertTrue(self.out.exists())

  def test_room_is_the_limit_less_the_tree(self):
    readme = (ROOT / 'README.md').stat().st_size
    self.assertGreater(parcels.tree_bytes(), readme)
    command = [sys.executable, '-m', 'benchmarks.parcels', 'pack']
    arguments = [f'--cargo={self.cargo}', f'--out={self.out}', '--limit_mib=1']
    ran = subprocess.run([*command, *arguments], cwd=ROOT, capture_output=True, text=True)
    self.assertEqual(ran.returncode, 1)
    self.assertRegex(ran.stderr, '^parcels: the working tree leaves less than 1 MiB')


def canonical(name):
  """Returns a package name as an index compares it."""
  return re.sub('[-_.]+', '-', name).lower()


def lines(path):
  """Yields the requirements of a file."""
  for line in path.read_text(encoding='utf-8').splitlines():
    text = line.partition('#')[0].strip()
    if text and not text.startswith('-'):
      yield requirements.Requirement(text)


def needs(name):
  """Returns the names of the packages that a package needs, if it is installed here."""
  try:
    texts = importlib.metadata.requires(name) or []
  except importlib.metadata.PackageNotFoundError:
    return set()
  parsed = [requirements.Requirement(text) for text in texts]
  environment = {'extra': '', 'python_version': '3.12', 'python_full_version': '3.12.3'}
  return {
      canonical(one.name)
      for one in parsed
      if one.marker is None or one.marker.evaluate(environment)
  }


class WheelsTest(absltest.TestCase):

  def test_versions_are_exact(self):
    for one in lines(ROOT / 'benchmarks/requirements-gpu.txt'):
      self.assertRegex(str(one.specifier), '^==[0-9.]+$', one.name)

  def test_wheels_and_image_have_all_requirements(self):
    """The wheels are installed without a resolver, so what they need must be there."""
    wheels = {canonical(one.name) for one in lines(ROOT / 'benchmarks/requirements-gpu.txt')}
    needed = {canonical(one.name) for one in lines(ROOT / 'requirements.txt')}
    needed |= {'pytest', 'pytest-xdist', 'hypothesis'}  # the tests that run there need them
    for name in wheels:
      needed |= needs(name)
    self.assertContainsSubset(needed, wheels | parcels.IMAGE)
    self.assertEmpty(wheels & parcels.IMAGE)

  def test_wheels_are_in_the_tested_ranges(self):
    ranges = {canonical(one.name): one.specifier for one in lines(ROOT / 'requirements.txt')}
    for one in lines(ROOT / 'benchmarks/requirements-gpu.txt'):
      (version,) = (clause.version for clause in one.specifier)
      self.assertIn(version, ranges.get(canonical(one.name), one.specifier), one.name)


if __name__ == '__main__':
  absltest.main()
