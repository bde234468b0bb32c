"""Arbitrary files and requests give an answer or one clear line, never a crash."""

import ast
import dataclasses
import json
import os
import pathlib
import re
import shutil
import struct
import tempfile

from absl.testing import absltest
import hypothesis
from hypothesis import strategies as st

from stppo_jax import config as schema
from stppo_jax import types
from stppo_jax.data import tasks
from stppo_jax.envs import rewards
from stppo_jax.envs import search
from stppo_jax.models import convert
from stppo_jax.models import hf_config
from stppo_jax.settings import validation
from stppo_jax.text import tokenizer as chat
from tests.support import tiny_run
from tests.support import tiny_tokenizer

ROOT = pathlib.Path(__file__).parents[2]
FIELDS = (
    'id',
    'title',
    'text',
    'contents',
    'question',
    'answers',
    'answer',
    'options',
    'hops',
    'gold',
    'steps',
    'split',
    'dataset',
)
json_values = st.recursive(
    st.one_of(
        st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=4), st.just('\ud800')
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.sampled_from((*FIELDS, 'q', 'a')), inner, max_size=3),
    ),
    max_leaves=6,
)
json_rows = st.one_of(
    st.dictionaries(st.sampled_from(FIELDS), json_values, max_size=8).map(
        lambda row: json.dumps(row).encode()
    ),
    json_values.map(lambda value: json.dumps(value).encode()),
    st.binary(max_size=30),
    st.sampled_from(
        [b'[' * 100_000, b'{"id": ' + b'9' * 5000 + b'}', b'{"id": 1e999}', b'\x00', b'']
    ),
)
many = hypothesis.settings(
    deadline=None,
    max_examples=100,
    derandomize=True,
    suppress_health_check=list(hypothesis.HealthCheck),
)


def user_errors(test, call):
  """Returns the result of `call()`, or None if it raised a UserError of one line."""
  try:
    return call()
  except types.UserError as error:
    test.assertNotIn('\n', str(error).strip())
    return None


class FuzzTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    self.folder = self.enterContext(tempfile.TemporaryDirectory())

  def path(self, name, content):
    path = os.path.join(self.folder, name)
    with open(path, 'wb') as file:
      file.write(content)
    return path

  @many
  @hypothesis.given(st.lists(json_rows, max_size=4))
  def test_questions_and_passages(self, rows):
    path = self.path('rows.jsonl', b'\n'.join(rows))
    for task in user_errors(self, lambda: tasks.load_tasks(path, 'train')) or ():
      self.assertTrue(search.prompt_text(task, 'search_r1'))
    for passage in user_errors(self, lambda: tasks.load_corpus(path)) or ():
      self.assertIsInstance(passage.text, str)

  @many
  @hypothesis.given(st.binary(max_size=200))
  def test_parquet(self, content):
    for rows in (content, b'PAR1' + content + b'PAR1'):
      path = self.path('rows.parquet', rows)
      self.assertIsNone(user_errors(self, lambda: tasks.load_tasks(path, 'train')))

  @many
  @hypothesis.given(
      st.lists(
          st.one_of(
              st.sampled_from(['<search>', '</search>', '<answer>', '</answer>', '\n', ' ', 'a']),
              st.text(),
          ),
          max_size=12,
      ).map(''.join)
  )
  def test_actions(self, text):
    kind, content = search.parse_action(text)
    self.assertIn(kind, ('search', 'answer', 'invalid'))
    if kind != 'invalid':
      self.assertIn(f'<{kind}>', text)
      self.assertNotIn(f'</{kind}>', content)
    self.assertEqual(content, content.strip())
    found = re.search(r'<(search|answer)>(.*?)</\1>', text, re.DOTALL)  # the definition
    self.assertEqual((kind, content), (found[1], found[2].strip()) if found else ('invalid', ''))
    spoken = text.split('</think>')[-1]
    answer = re.search(r'<answer>(.*?)</answer>', spoken, re.DOTALL)
    self.assertEqual(rewards.extract_answer(text), answer and answer[1].strip())

  def test_many_openings_take_little_time(self):
    text = '<search><answer>' * 100_000
    self.assertEqual(search.parse_action(text), ('invalid', ''))
    self.assertIsNone(rewards.extract_answer(text))
    self.assertFalse(rewards.well_formed(text))

  @many
  @hypothesis.given(st.integers(0, 10**6), st.binary(min_size=1, max_size=4), st.booleans())
  def test_tokenizer_files(self, place, broken, cut):
    tiny_tokenizer.write(self.folder) if not os.listdir(self.folder) else None
    path = pathlib.Path(self.folder, 'tokenizer.json')
    whole = path.read_bytes()
    at = place % len(whole)
    path.write_bytes(whole[:at] + broken + (b'' if cut else whole[at + len(broken) :]))
    try:
      tokenizer = user_errors(self, lambda: chat.load_tokenizer(self.folder))
    finally:
      path.write_bytes(whole)
    if tokenizer is not None:
      chat.encode_observation(tokenizer, 'x</information>', 100)

  @hypothesis.settings(many, max_examples=25)  # each writes and opens a folder
  @hypothesis.given(
      st.one_of(
          st.binary(max_size=60),
          st.tuples(st.integers(0, 2**64 - 1), st.binary(max_size=40)).map(
              lambda pair: struct.pack('<Q', pair[0]) + pair[1]
          ),
          st.dictionaries(
              st.sampled_from(['model.norm.weight', '__metadata__', 'x']),
              st.one_of(
                  json_values,
                  st.fixed_dictionaries(
                      {
                          'dtype': st.sampled_from(['F32', 'I64', 'F99', 3]),
                          'shape': st.lists(st.integers(-1, 2**63), max_size=3),
                          'data_offsets': st.lists(st.integers(-1, 2**63), max_size=3),
                      }
                  ),
              ),
              max_size=3,
          ).map(
              lambda header: struct.pack('<Q', len(json.dumps(header)))
              + json.dumps(header).encode()
          ),
      )
  )
  def test_safetensors(self, content):
    if not os.path.exists(os.path.join(self.folder, 'config.json')):
      shutil.copytree(f'{tiny_run.shared_folder()}/model', self.folder, dirs_exist_ok=True)
    self.path('model.safetensors', content)
    self.assertIsNone(user_errors(self, lambda: convert.load_hf(self.folder)))

  @many
  @hypothesis.given(
      st.one_of(
          st.binary(max_size=40),
          json_values.map(lambda x: json.dumps(x).encode()),
          st.dictionaries(
              st.sampled_from(
                  [
                      'model_type',
                      'hidden_size',
                      'num_hidden_layers',
                      'vocab_size',
                      'num_attention_heads',
                      'num_key_value_heads',
                      'rope_parameters',
                      'intermediate_size',
                      'rms_norm_eps',
                      'hidden_act',
                      'head_dim',
                  ]
              ),
              st.one_of(json_values, st.sampled_from(['qwen2', 'llama', 'silu', 8])),
              max_size=11,
          ).map(lambda x: json.dumps(x).encode()),
          st.just(b'[' * 100_000),
      )
  )
  def test_model_configs(self, content):
    self.path('config.json', content)
    user_errors(self, lambda: hf_config.load(self.folder))

  @many
  @hypothesis.given(
      st.dictionaries(
          st.sampled_from(
              sorted(
                  path
                  for path, rules, _ in validation.fields(schema.Config())
                  if (rules.at_least, rules.at_most, rules.above) != (None, None, None)
              )
          ),
          st.one_of(st.integers(-3, 3), st.integers(), st.floats()),
          max_size=5,
      )
  )
  def test_config_numbers(self, values):
    config = schema.Config()
    for path, value in values.items():
      section, name = ('', path) if '.' not in path else path.split('.')
      setattr(getattr(config, section) if section else config, name, value)
    user_errors(self, lambda: validation.validate(config))
    self.assertTrue(dataclasses.is_dataclass(config))


class NoPickleTest(absltest.TestCase):

  def test_nothing_reads_or_writes_pickles(self):
    for path in [
        *(ROOT / 'stppo_jax').rglob('*.py'),
        *(ROOT / 'experiments').rglob('*.py'),
        ROOT / 'run.py',
    ]:
      for node in ast.walk(ast.parse(path.read_text(encoding='utf-8'))):
        modules = (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else ([node.module] if isinstance(node, ast.ImportFrom) else [])
        )
        for module in modules:
          self.assertNotIn(
              module.split('.')[0], ('pickle', 'dill', 'joblib', 'shelve', 'marshal'), path
          )
        if isinstance(node, ast.keyword) and node.arg == 'allow_pickle':
          self.assertIs(node.value.value, False, path)


if __name__ == '__main__':
  absltest.main()
