"""The text encoder against loops in NumPy, with what its folder says; exact search; rank fusion."""

import errno
import importlib.util
import json
import math
import os
import pathlib
import tempfile
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized
import numpy as np
import pytest
from safetensors import numpy as safetensors
import tokenizers

from stppo_jax import types
from stppo_jax.retrieval import dense
from stppo_jax.retrieval import encoder as encoders
from stppo_jax.retrieval import protocol

pytestmark = pytest.mark.guests(
    what='Encoders of sentence-transformers',
    version='sentence-transformers==6.2.0 torch==2.13.0',
    date='2026-11-28',
    touches='retrieval/encoder.py',
)

HAS_LIBRARY = importlib.util.find_spec('sentence_transformers') is not None
WORDS = 'query passage capital of france paris the is lima peru element carbon : " . ,'.split()
SIZES = dict(
    vocab_size=5 + len(WORDS),
    hidden_size=16,
    num_hidden_layers=2,
    num_attention_heads=4,
    intermediate_size=24,
    max_position_embeddings=40,
    type_vocab_size=2,
)
PASSAGES = [
    types.Passage(str(i), title, text)
    for i, (title, text) in enumerate(
        [
            ('Paris', 'the capital of france .'),
            ('Lima', 'the capital of peru .'),
            ('Carbon', 'the element carbon .'),
            ('Lima', 'the capital of peru .'),
        ]
    )
]


PROMPTS = {'query': 'query: ', 'passage': 'passage: '}  # E5's


def write_json(folder, name, value):
  path = os.path.join(folder, name)
  os.makedirs(os.path.dirname(path), exist_ok=True)
  with open(path, 'w', encoding='utf-8') as file:
    json.dump(value, file)


def write_modules(folder, pooling, *others, prompts=None, similarity='cosine'):
  """Writes what sentence-transformers reads besides the model: pooling and prompts."""
  kinds = ['Transformer', 'Pooling', *others]
  paths = ['', '1_Pooling', *(f'{n}_{kind}' for n, kind in enumerate(others, start=2))]
  modules = [
      {'idx': n, 'name': str(n), 'path': path, 'type': f'sentence_transformers.models.{kind}'}
      for n, (kind, path) in enumerate(zip(kinds, paths))
  ]
  write_json(folder, 'modules.json', modules)
  modes = {f'pooling_mode_{name}': name == pooling for name in ('cls_token', 'mean_tokens')}
  write_json(folder, '1_Pooling/config.json', {'word_embedding_dimension': 16} | modes)
  settings = {'prompts': prompts or {}, 'similarity_fn_name': similarity}
  write_json(folder, 'config_sentence_transformers.json', settings)


def write_encoder(folder, seed=0):
  """A random BERT of two layers with a word-piece tokenizer and the prompts of E5."""
  os.makedirs(folder, exist_ok=True)
  write_json(folder, 'config_sentence_transformers.json', {'prompts': PROMPTS})
  vocab = {word: i for i, word in enumerate(['[PAD]', '[UNK]', '[CLS]', '[SEP]', '[MASK]', *WORDS])}
  library = tokenizers.Tokenizer(tokenizers.models.WordPiece(vocab, unk_token='[UNK]'))
  library.normalizer = tokenizers.normalizers.BertNormalizer()
  library.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
  library.post_processor = tokenizers.processors.TemplateProcessing(
      single='[CLS] $A [SEP]', special_tokens=[('[CLS]', 2), ('[SEP]', 3)]
  )
  library.save(os.path.join(folder, 'tokenizer.json'))
  with open(os.path.join(folder, 'config.json'), 'w', encoding='utf-8') as file:
    json.dump({'model_type': 'bert', 'hidden_act': 'gelu', 'layer_norm_eps': 1e-12, **SIZES}, file)
  rng = np.random.default_rng(seed)
  width, hidden = SIZES['hidden_size'], SIZES['intermediate_size']
  shapes = {
      'embeddings.word_embeddings.weight': (SIZES['vocab_size'], width),
      'embeddings.position_embeddings.weight': (40, width),
      'embeddings.token_type_embeddings.weight': (2, width),
      'pooler.dense.weight': (width, width),
      'pooler.dense.bias': (width,),
  }

  def add(name, *shape):
    shapes[name + '.weight'], shapes[name + '.bias'] = shape, shape[:1]

  add('embeddings.LayerNorm', width)
  for n in range(SIZES['num_hidden_layers']):
    layer = f'encoder.layer.{n}.'
    for name in ('query', 'key', 'value'):
      add(f'{layer}attention.self.{name}', width, width)
    add(layer + 'attention.output.dense', width, width)
    add(layer + 'attention.output.LayerNorm', width)
    add(layer + 'intermediate.dense', hidden, width)
    add(layer + 'output.dense', width, hidden)
    add(layer + 'output.LayerNorm', width)
  tensors = {
      name: rng.normal(size=shape).astype(np.float32) * 0.5 for name, shape in shapes.items()
  }
  safetensors.save_file(tensors, os.path.join(folder, 'model.safetensors'))
  return folder


def reference(tensors, ids, pool=lambda x: x.mean(0)):
  """One text in float64, token by token and head by head; no padding."""
  tensors = {name: tensor.astype(np.float64) for name, tensor in tensors.items()}
  dense_ = lambda x, name: x @ tensors[name + '.weight'].T + tensors[name + '.bias']

  def norm(x, name):
    x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-12)
    return x * tensors[name + '.weight'] + tensors[name + '.bias']

  x = norm(
      tensors['embeddings.word_embeddings.weight'][ids]
      + tensors['embeddings.position_embeddings.weight'][: len(ids)]
      + tensors['embeddings.token_type_embeddings.weight'][0],
      'embeddings.LayerNorm',
  )
  for n in range(SIZES['num_hidden_layers']):
    layer = f'encoder.layer.{n}.'
    heads = []
    for head in np.split(np.arange(SIZES['hidden_size']), SIZES['num_attention_heads']):
      q, k, v = (
          dense_(x, f'{layer}attention.self.{name}')[:, head] for name in ('query', 'key', 'value')
      )
      weights = np.exp(q @ k.T / math.sqrt(len(head)))
      heads.append(weights / weights.sum(-1, keepdims=True) @ v)
    x = norm(
        x + dense_(np.concatenate(heads, -1), layer + 'attention.output.dense'),
        layer + 'attention.output.LayerNorm',
    )
    up = dense_(x, layer + 'intermediate.dense')
    gelu = up * 0.5 * (1 + np.vectorize(math.erf)(up / math.sqrt(2)))
    x = norm(x + dense_(gelu, layer + 'output.dense'), layer + 'output.LayerNorm')
  vector = pool(x)
  return vector / np.linalg.norm(vector)


@absltest.skipUnless(HAS_LIBRARY, 'sentence-transformers is not installed')
class EncoderTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.folder = write_encoder(self.enterContext(tempfile.TemporaryDirectory()))
    self.texts = ['capital of france', '"paris" is the capital', '', 'lima', 'the ' * 25]

  def test_equals_loops_in_float64(self):
    self.enterContext(mock.patch.object(encoders, 'ROWS', 2))
    self.check(encoders.Encoder(self.folder, 'cpu', '', '').encode_queries(self.texts), '')
    encoder = encoders.Encoder(self.folder)
    self.check(encoder.encode_queries(self.texts), 'query: ')
    self.check(encoder.encode_passages(self.texts), 'passage: ')

  def check(self, vectors, prompt, pool=lambda x: x.mean(0), unit=True):
    tensors = safetensors.load_file(os.path.join(self.folder, 'model.safetensors'))
    library = tokenizers.Tokenizer.from_file(os.path.join(self.folder, 'tokenizer.json'))
    for text, vector in zip(self.texts, vectors, strict=True):
      ids = library.encode(prompt + text).ids
      found = vector if unit else vector / np.linalg.norm(vector)
      np.testing.assert_allclose(found, reference(tensors, ids, pool), atol=2e-6)

  def test_folder_says_pooling_and_prompts(self):
    """As those of BGE and Arctic: the first token, and a prompt for queries alone."""
    write_modules(self.folder, 'cls_token', 'Normalize', prompts={'query': 'capital of '})
    encoder = encoders.Encoder(self.folder)
    self.check(encoder.encode_queries(self.texts), 'capital of ', lambda x: x[0])
    self.check(encoder.encode_passages(self.texts), '', lambda x: x[0])

  def test_inner_product_keeps_lengths(self):
    write_modules(self.folder, 'cls_token', prompts={'document': ''}, similarity='dot')
    vectors = encoders.Encoder(self.folder).encode_passages(self.texts)
    self.check(vectors, '', lambda x: x[0], unit=False)
    self.assertGreater(np.ptp(np.linalg.norm(vectors, axis=1)), 0.01)

  def test_encoder_without_layers(self):
    import sentence_transformers
    from sentence_transformers.sentence_transformer import modules

    library = tokenizers.Tokenizer.from_file(os.path.join(self.folder, 'tokenizer.json'))
    vectors = np.random.default_rng(0).normal(size=(SIZES['vocab_size'], 8)).astype(np.float32)
    module = modules.StaticEmbedding(library, embedding_weights=vectors)
    folder = self.enterContext(tempfile.TemporaryDirectory())
    sentence_transformers.SentenceTransformer(modules=[module]).save(folder)
    found = encoders.Encoder(folder, 'cpu', '', '').encode_queries(['lima peru ' * 300])
    words = library.encode('lima peru', add_special_tokens=False).ids
    mean = vectors[words].mean(0)
    np.testing.assert_allclose(found[0], mean / np.linalg.norm(mean), atol=1e-5)

  def test_prompts_must_be_said(self):
    write_modules(self.folder, 'mean_tokens')
    with self.assertRaisesRegex(types.UserError, "'query: ' and 'passage: ' for E5, or ''"):
      encoders.Encoder(self.folder)
    encoder = encoders.Encoder(self.folder, 'cpu', 'query: ', 'passage: ')
    self.check(encoder.encode_queries(self.texts), 'query: ')

  @parameterized.parameters(
      ('modules.json', 'sentence_transformers.models.Pooling', 'json.JSONDecoder', 'only those of'),
      ('config_sentence_transformers.json', 'cosine', 'manhattan', "'cosine' or 'dot'"),
      ('modules.json', '[', '{[', 'cannot be read'),
      ('modules.json', '"path"', '"place"', 'a module has no type or path'),
      (
          'config_sentence_transformers.json',
          '"prompts": {',
          '"prompts": 3, "x": {',
          'no texts by name',
      ),
      ('config_sentence_transformers.json', '"query: "', '1', 'no texts by name'),
  )
  def test_folders_that_are_refused(self, name, before, after, message):
    write_modules(self.folder, 'mean_tokens', prompts=PROMPTS)
    path = pathlib.Path(self.folder, name)
    path.write_text(path.read_text(encoding='utf-8').replace(before, after), encoding='utf-8')
    with self.assertRaisesRegex(types.UserError, message):
      encoders.Encoder(self.folder)

  def test_long_and_odd_texts(self):
    encoder = encoders.Encoder(self.folder)  # 40 positions
    vectors = encoder.encode_queries(['the ' * 500, 'the ' * 600, 'a \ud800 b'])
    np.testing.assert_array_equal(vectors[0], vectors[1])
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-6)
    self.assertEqual(encoder.encode_queries([]).shape, (0, 16))
    with mock.patch.object(encoders, 'MAX_TOKENS', 8):
      vectors = encoders.Encoder(self.folder).encode_queries(['the ' * 8 + 'lima', 'the ' * 9])
    np.testing.assert_array_equal(vectors[0], vectors[1])

  def test_vectors_that_are_not_finite_are_refused(self):
    path = os.path.join(self.folder, 'model.safetensors')
    tensors = safetensors.load_file(path)
    tensors['embeddings.LayerNorm.bias'][0] = np.nan
    safetensors.save_file(tensors, path)
    passages = [types.Passage('1', '', 'lima'), types.Passage('2', '', 'paris')]
    with self.assertRaisesRegex(types.UserError, 'not finite: download it again'):
      retriever = dense.DenseRetriever(passages, encoders.Encoder(self.folder))
      self.assertLen(retriever.search(['lima'], 1)[0], 1)

  @parameterized.parameters(
      ('config.json', lambda t: '{', 'cannot be read'),
      (
          'config.json',
          lambda t: t.replace('"num_hidden_layers": 2', '"num_hidden_layers": 3'),
          "no tensor 'encoder.layer.2",
      ),
      ('tokenizer.json', lambda t: '{}', 'cannot be read'),
  )
  def test_unreadable_folders(self, name, change, message):
    path = os.path.join(self.folder, name)
    with open(path, encoding='utf-8') as file:
      text = file.read()
    with open(path, 'w', encoding='utf-8') as file:
      file.write(change(text))
    with self.assertRaisesRegex(types.UserError, f'^[^\n]*{message}'):
      encoders.Encoder(self.folder)

  def test_unknown_device(self):
    with self.assertRaisesRegex(types.UserError, "^encoder: torch cannot use the device 'cuda:99'"):
      encoders.Encoder(self.folder, 'cuda:99')

  def test_no_weights(self):
    os.remove(os.path.join(self.folder, 'model.safetensors'))
    with self.assertRaisesRegex(types.UserError, 'cannot be read'):
      encoders.Encoder(self.folder)


@absltest.skipUnless(HAS_LIBRARY, 'sentence-transformers is not installed')
class DenseTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.folder = write_encoder(self.enterContext(tempfile.TemporaryDirectory()))
    self.cache = self.enterContext(tempfile.TemporaryDirectory())

  def test_ranks_by_inner_product(self):
    encoder = encoders.Encoder(self.folder)
    retriever = dense.DenseRetriever(PASSAGES, encoder)
    self.assertIsInstance(retriever, protocol.Retriever)
    found = retriever.search(['lima', 'the element'], 4)
    rows = encoder.encode_passages([f'"{p.title}"\n{p.text}' for p in PASSAGES])
    for query, passages in zip(['lima', 'the element'], found):
      scores = rows @ encoder.encode_queries([query])[0]
      self.assertEqual(
          [p.id for p in passages], [str(i) for i in np.argsort(-scores, kind='stable')]
      )
      np.testing.assert_allclose([p.score for p in passages], np.sort(scores)[::-1], atol=1e-6)
    self.assertEqual(retriever.search([], 3), [])
    self.assertLen(retriever.search(['lima'], 2)[0], 2)

  def test_passage_is_embedded_as_shown(self):
    """As an agent reads it and as a server sends it: without a title it is its text alone."""
    passages = [PASSAGES[0], types.Passage('x', '', 'the lima .'), types.Passage('y', '', 'a\nb')]
    with mock.patch.object(dense, 'embed', return_value=np.zeros((3, 16))) as embed:
      dense.DenseRetriever(passages, encoders.Encoder(self.folder), self.cache)
    texts = ['"Paris"\nthe capital of france .', 'the lima .', '""\na\nb']
    self.assertEqual(embed.call_args.args[1], texts)

  def test_hosts_write_different_files(self):
    parts, replace = [], os.replace
    with mock.patch.object(os, 'replace', lambda a, b: (parts.append(a), replace(a, b))):
      for _ in range(2):
        with mock.patch.object(os.path, 'exists', return_value=False):  # neither has ended
          dense.embed(encoders.Encoder(self.folder), ['lima'], self.cache)
    self.assertLen(set(parts), 2)

  def test_full_disk_is_an_error_and_leaves_no_file(self):
    encoder = mock.Mock(folder=self.folder, passage_prompt='', width=3)
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with mock.patch.object(os, 'posix_fallocate', side_effect=full) as reserve:
      with self.assertRaisesRegex(OSError, 'No space left'):
        dense.embed(encoder, ['lima', 'paris'], self.cache)
    self.assertEqual(reserve.call_args.args[2], 128 + 2 * 3 * 4)  # a header, and two vectors
    encoder.encode_passages.assert_not_called()
    self.assertEmpty(os.listdir(self.cache))

  def retriever(self, passages=PASSAGES, **prompts):
    encoder = encoders.Encoder(self.folder, **prompts)
    return dense.DenseRetriever(passages, encoder, self.cache)

  def test_vectors_are_made_once(self):
    self.retriever()
    (first,) = os.listdir(self.cache)
    with open(os.path.join(self.cache, first), 'rb') as file:
      made = file.read()
    before = os.stat(os.path.join(self.cache, first)).st_mtime_ns
    again = self.retriever()
    self.assertEqual(os.stat(os.path.join(self.cache, first)).st_mtime_ns, before)
    self.assertNotEmpty(made)
    self.assertLen(again.search(['lima'], 3)[0], 3)
    self.retriever(PASSAGES[:2])  # another corpus
    write_encoder(self.folder, seed=1)  # another encoder
    self.retriever()
    write_modules(self.folder, 'cls_token', prompts=PROMPTS)  # another pooling
    self.retriever()
    self.retriever(passage_prompt='the ')
    self.assertLen(os.listdir(self.cache), 5)

  @parameterized.parameters(1, 3, 7, 50)
  def test_nearest_over_many_blocks(self, top_k):
    """Small whole numbers: products are exact and tie often; ties go to the first row."""
    rng = np.random.default_rng(0)
    queries = rng.integers(-2, 3, (5, 4)).astype(np.float32)
    vectors = rng.integers(-2, 3, (41, 4)).astype(np.float32)
    with mock.patch.object(dense, '_BLOCK', 8):
      rows, scores = dense.nearest(queries, vectors, top_k)
    products = queries @ vectors.T
    expected = np.argsort(-products, axis=1, kind='stable')[:, :top_k]
    np.testing.assert_array_equal(rows, expected)
    np.testing.assert_array_equal(scores, np.take_along_axis(products, expected, axis=1))

  def test_no_passages(self):
    with self.assertRaisesRegex(types.UserError, '0 passages'):
      dense.DenseRetriever([], encoders.Encoder(self.folder))


class _Fixed:
  """Returns the same rankings for every query."""

  def __init__(self, *ids):
    self._ids = ids

  def search(self, queries, top_k):
    return [
        None if ids is None else [types.Passage(i, i, '') for i in ids][:top_k] for ids in self._ids
    ]


class HybridTest(absltest.TestCase):

  def test_reciprocal_rank_fusion(self):
    retriever = dense.HybridRetriever([_Fixed('abc'), _Fixed('cbd')])
    found = retriever.search(['q'], 3)[0]
    # a: 1/61. b: 1/62 + 1/62. c: 1/63 + 1/61. d: 1/63. So c (.03227), b (.03226), a, d.
    self.assertEqual([passage.id for passage in found], ['c', 'b', 'a'])
    self.assertAlmostEqual(found[0].score, 1 / 63 + 1 / 61)
    self.assertAlmostEqual(found[1].score, 2 / 62)

  def test_ties_and_failures(self):
    retriever = dense.HybridRetriever([_Fixed('a', None, None, ''), _Fixed('b', 'x', None, '')])
    ids = [
        None if found is None else [p.id for p in found] for found in retriever.search(['q'] * 4, 5)
    ]
    self.assertEqual(ids, [['a', 'b'], ['x'], None, []])

  def test_single_ranking_is_unchanged(self):
    self.assertEqual(
        [p.id for p in dense.HybridRetriever([_Fixed('world')]).search(['q'], 9)[0]],
        ['w', 'o', 'r', 'l', 'd'],
    )


if __name__ == '__main__':
  absltest.main()
