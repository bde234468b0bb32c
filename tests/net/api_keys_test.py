"""Keys in environment variables."""

import os
from unittest import mock

from absl.testing import absltest

from stppo_jax import types
from stppo_jax.net import api_keys


class ReadTest(absltest.TestCase):

  def test_white_space_around_a_key_is_no_part_of_it(self):
    for text, key in ((' sk-1\r\n', 'sk-1'), ("a 'key' $x ", "a 'key' $x"), ('\n', ''), ('', '')):
      with mock.patch.dict(os.environ, {'OPENAI_API_KEY': text}):
        self.assertEqual(api_keys.read('OPENAI_API_KEY'), key)
    with mock.patch.dict(os.environ):
      os.environ.pop('OPENAI_API_KEY', None)
      self.assertEqual(api_keys.read('OPENAI_API_KEY'), '')

  def test_key_that_no_header_holds_is_refused_without_it(self):
    for text in ('sk-1\nsk-2', 'sk-é', '“sk-1”'):
      with mock.patch.dict(os.environ, {'OPENAI_API_KEY': text}):
        with self.assertRaisesRegex(types.UserError, 'OPENAI_API_KEY has') as caught:
          api_keys.read('OPENAI_API_KEY')
        self.assertNotIn('sk', str(caught.exception))


if __name__ == '__main__':
  absltest.main()
