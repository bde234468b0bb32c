"""Plug-ins: a short name or module:attribute, and one line of error for anything else."""

import contextlib
import pathlib
import sys
import tempfile

from absl.testing import absltest
from absl.testing import parameterized

from stppo_jax import config as schema
from stppo_jax import plugins
from stppo_jax.types import UserError


class RaisedAtTest(absltest.TestCase):

  def test_the_line_is_of_the_user_and_not_of_a_library(self):
    """Their folder's name begins like that of the package."""
    path = pathlib.Path(plugins.__file__).parent.with_name('stppo_jax_envs') / 'mine.py'
    names = {}
    exec(compile('import json\ndef step():\n  json.loads("{")', path, 'exec'), names)
    try:
      names['step']()
    except ValueError as error:
      self.assertEqual(plugins.raised_at(error), f'{path}:3')
    else:
      self.fail('nothing was raised')


class PluginsTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.folder = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))
    sys.path.insert(0, str(self.folder))
    self.addCleanup(sys.path.remove, str(self.folder))

  def module(self, name, text):
    (self.folder / f'{name}.py').write_text(text, encoding='utf-8')
    sys.modules.pop(name, None)
    self.addCleanup(sys.modules.pop, name, None)

  def test_a_short_name_is_an_entry_of_the_table(self):
    self.assertEqual(plugins.load('env.kind', 'search', {'search': 7}), 7)

  def test_module_and_attribute_are_imported(self):
    self.module('plugged_in', 'class Outer:\n  inner = 3\n')
    self.assertEqual(plugins.load('env.kind', 'plugged_in:Outer.inner', {}), 3)

  @parameterized.parameters(
      ('serch', ['serch', 'did you mean search?', 'module:attribute']),
      ('no_such_module:Env', ['no_such_module', 'ModuleNotFoundError', 'folder that holds it']),
      ('fails:Env', ['fails.py:2', 'ZeroDivisionError']),
      ('at_length:Env', ['at_length.py:1', 'one two']),
      ('a name: of none', ['allowed are search', 'module:attribute']),
      ('json:no_such_name', ['no_such_name', 'json']),
  )
  def test_anything_else_is_refused_in_one_line(self, name, words):
    self.module('fails', '\n1 / 0\n')
    self.module('at_length', 'raise ValueError("one\\ntwo")\n')
    with self.assertRaises(UserError) as caught:
      plugins.load('env.kind', name, {'search': 7})
    message = str(caught.exception)
    self.assertNotIn('\n', message)
    for word in ['config.env.kind', *words]:
      self.assertIn(word, message)

  def test_a_digest_changes_with_the_source_and_built_ins_have_none(self):
    self.module('plugged_in', 'x = 1\n')
    first = plugins.digests({'env.kind': 'plugged_in:x', 'env.reward': 'em'})
    self.assertEqual(set(first), {'env.kind'})
    (self.folder / 'plugged_in.py').write_text('x = 2\n', encoding='utf-8')
    self.assertNotEqual(plugins.digests({'env.kind': 'plugged_in:x'}), first)

  def test_a_source_that_is_gone_is_one_line_as_well(self):
    with self.assertRaisesRegex(UserError, r'^config.env.kind=.no_such_module:x.: cannot import'):
      plugins.digests({'env.kind': 'no_such_module:x'})

  def test_a_file_of_the_same_name_hides_no_plug_in(self):
    """It hides a source of questions alone, which is read instead."""
    self.module('plugged_in', 'x = 1\n')
    with contextlib.chdir(self.folder):
      (self.folder / 'plugged_in:x').write_text('', encoding='utf-8')
      config = schema.Config()
      config.env.kind = config.data.source = 'plugged_in:x'
      config.env.tools = ('calculator', 'plugged_in:x')
      self.assertEqual(
          plugins.named(config), {'env.kind': 'plugged_in:x', 'env.tools[1]': 'plugged_in:x'}
      )


if __name__ == '__main__':
  absltest.main()
