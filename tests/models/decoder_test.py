"""Tests of the decoder: transformers' logits, the cache against one full forward, log-probs."""

import dataclasses
import functools
import importlib.util
import re
import tempfile

from absl.testing import absltest
from absl.testing import parameterized
import chex
import jax
import jax.numpy as jnp
import numpy as np
import safetensors.numpy

from stppo_jax.models import convert
from stppo_jax.models import decoder
from stppo_jax.models import presets
from stppo_jax.models import sharding
from tests.support import collectives
from tests.support import reference_models

REFERENCES = reference_models.FOLDER
HAS_TORCH = importlib.util.find_spec('torch') is not None

CONFIG = decoder.ModelConfig(
    vocab_size=40,
    d_model=32,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    d_ff=48,
    qkv_bias=True,
    qk_norm=True,
)


@functools.cache
def make_params(config=CONFIG):
  """Random parameters without zero biases, unit norms or a nearly uniform softmax."""
  shapes = jax.eval_shape(functools.partial(decoder.init, config=config), jax.random.key(0))
  rng = np.random.default_rng(0)

  def draw(path, leaf):
    mean = 1.0 if path[-1].key == 'scale' else 0.0
    return jnp.asarray(rng.normal(mean, 0.15, leaf.shape), leaf.dtype)

  return jax.tree_util.tree_map_with_path(draw, shapes)


def make_tokens(rows=3, length=14, vocab_size=CONFIG.vocab_size):
  return jax.random.randint(jax.random.key(2), (rows, length), 0, vocab_size)


forward = jax.jit(decoder.forward, static_argnums=1)  # op by op is slower than compiling


def full_logits(params, config, tokens):
  return forward(params, config, tokens, None)[0]


class TransformersTest(parameterized.TestCase):

  @parameterized.parameters(*reference_models.NAMES)
  def test_logits_equal_the_stored_ones(self, name):
    config, params = convert.load_hf(REFERENCES / name)
    reference = safetensors.numpy.load_file(REFERENCES / name / 'reference.safetensors')
    logits = full_logits(params, config, reference['tokens'])
    self.assertGreater(np.std(reference['logits']), 0.5)  # the comparison means something
    np.testing.assert_allclose(logits, reference['logits'], atol=1e-4)

  @parameterized.parameters('qwen2', 'qwen3moe', 'llama_tied')
  @absltest.skipUnless(HAS_TORCH, 'torch is not installed')
  def test_logits_equal_those_of_a_live_model(self, name):
    from tests.support import make_reference_logits  # needs torch

    model = make_reference_logits.make_model(name)
    folder = self.enterContext(tempfile.TemporaryDirectory())
    model.save_pretrained(folder)
    config, params = convert.load_hf(folder)
    tokens = np.asarray(make_tokens(2, 60))
    expected = make_reference_logits.logits_of(model, tokens)
    np.testing.assert_allclose(full_logits(params, config, tokens), expected, atol=1e-4)


class TrunkTest(parameterized.TestCase):

  def test_which_tokens_each_token_reads(self):
    """Row: a logit's column; column: the token whose change moves it."""
    params, tokens = make_params(), make_tokens(1, 4)
    before = full_logits(params, CONFIG, tokens)
    moves = np.zeros((4, 4), int)
    for t in range(4):
      changed = tokens.at[0, t].set((tokens[0, t] + 1) % CONFIG.vocab_size)
      after = full_logits(params, CONFIG, changed)
      moves[:, t] = jnp.max(jnp.abs(after - before), axis=(0, 2)) > 0
    np.testing.assert_array_equal(moves, [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1]])

  @parameterized.parameters(
      {'scan_layers': False, 'remat': 'dots'},
      {'attention_chunk': 7, 'remat': 'full'},
      {'attention_chunk': 5},
  )
  def test_scan_remat_and_chunks_of_queries_change_nothing(self, **changes):
    params, tokens = make_params(), make_tokens()

    def loss(params, config):
      return jnp.mean(jnp.sin(full_logits(params, config, tokens)))

    grad = jax.jit(jax.value_and_grad(loss), static_argnums=1)
    expected = grad(params, CONFIG)
    actual = grad(params, dataclasses.replace(CONFIG, **changes))
    chex.assert_trees_all_close(actual, expected, atol=1e-6)

  def test_flash_attention_over_devices_changes_nothing(self):
    """As on a TPU: layers scanned and recomputed, segments, a mesh; the kernel is interpreted."""
    mesh = sharding.make_mesh(2, 2, 2, jax.devices()[:8])
    config = dataclasses.replace(CONFIG, head_dim=64)
    params, tokens = make_params(config), make_tokens(4, 128)
    segments = np.repeat([[1, 2, 0]], [50, 60, 18], axis=1).repeat(4, axis=0)

    def loss(params, config):
      x, _ = decoder.trunk(params, config, tokens, None, segments=segments)
      logp, entropy = decoder.token_logp(params, config, x, tokens, chunk=32)
      return jnp.mean(jnp.sin(logp) + entropy)

    grad = jax.jit(jax.value_and_grad(loss), static_argnums=1)
    expected = grad(params, config)
    compiled = grad.lower(
        params,
        dataclasses.replace(
            config, attention='splash', remat='full', row_sharding=sharding.rows(mesh)
        ),
    ).compile()
    chex.assert_trees_all_close(compiled(params), expected, atol=1e-5)
    # Regression: the head's gradient [D,V] was summed over the chunks of logits on every device.
    whole = re.compile(r' f32\[(32,40|40,32)\]\S* add\(')
    self.assertIsNone(whole.search(compiled.as_text()))

  def test_chunks_of_queries_never_hold_all_scores(self):
    def program(config):
      loss = lambda params: full_logits(params, config, make_tokens()).sum()
      return str(jax.make_jaxpr(jax.grad(loss))(make_params()))

    scores = 'f32[3,2,2,14,14]'  # [B,M,g,T,T]
    self.assertIn(scores, program(CONFIG))
    self.assertNotIn(scores, program(dataclasses.replace(CONFIG, attention_chunk=7)))

  @parameterized.parameters({'attention_chunk': 7, 'remat': 'full'}, {'scan_layers': False})
  def test_a_packed_row_equals_its_parts(self, **changes):
    """Rows of 4, 7 and 3 tokens, and of 5 and 2 with 7 of padding; positions start at 0 in each."""
    config = dataclasses.replace(CONFIG, **changes)
    params, tokens = make_params(), make_tokens(2, 14)
    weights = jax.random.normal(jax.random.key(5), (2, 14, CONFIG.vocab_size))
    parts = [(0, 0, 4), (0, 4, 7), (0, 11, 3), (1, 0, 5), (1, 5, 2)]  # row, first token, length
    segments, positions = np.zeros((2, 14), np.int32), np.zeros((2, 14), np.int32)
    for number, (row, first, length) in enumerate(parts, 1):
      segments[row, first : first + length] = number
      positions[row, first : first + length] = np.arange(length)

    def packed(params):
      x, _ = decoder.trunk(params, config, tokens, positions, segments=segments)
      y = decoder.token_logits(params, config, x)
      return jnp.sum(weights * jnp.sin(y) * (segments > 0)[..., None]), y

    alone = np.zeros((5, 14), np.int32)  # a row for each part
    for number, (row, first, length) in enumerate(parts):
      alone[number, :length] = tokens[row, first : first + length]

    def apart(params):
      total, y = 0.0, jnp.zeros(weights.shape)
      logits, _ = decoder.forward(params, CONFIG, alone, None)
      for own, (row, first, length) in zip(logits, parts):
        part = np.s_[row, first : first + length]
        y = y.at[part].set(own[:length])
        total += jnp.sum(weights[part] * jnp.sin(own[:length]))
      return total, y

    (_, actual), actual_grad = jax.jit(jax.value_and_grad(packed, has_aux=True))(params)
    (_, expected), expected_grad = jax.jit(jax.value_and_grad(apart, has_aux=True))(params)
    real = segments > 0
    np.testing.assert_allclose(actual[real], expected[real], atol=1e-5)
    chex.assert_tree_all_finite(actual)  # also in the padding
    for x, y in zip(jax.tree.leaves(actual_grad), jax.tree.leaves(expected_grad), strict=True):
      # Sums over tokens in another order: rounding is of the leaf's scale.
      np.testing.assert_allclose(x, y, rtol=0, atol=4e-6 * np.abs(y).max())

  def test_unstacked_layers_change_nothing(self):
    params, tokens = make_params(), make_tokens()
    unstacked = decoder.unstack_layers(params, CONFIG)
    self.assertLen(unstacked['layers'], 2)
    chex.assert_trees_all_close(
        full_logits(unstacked, CONFIG, tokens), full_logits(params, CONFIG, tokens), atol=1e-5
    )

  def test_only_distances_between_positions_matter(self):
    params, tokens = make_params(), make_tokens()
    positions = jnp.broadcast_to(jnp.arange(100, 114), tokens.shape)
    shifted = forward(params, CONFIG, tokens, positions)[0]
    np.testing.assert_allclose(shifted, full_logits(params, CONFIG, tokens), atol=1e-3)

  def test_bfloat16_is_near(self):
    params, tokens = make_params(), make_tokens()
    config = dataclasses.replace(CONFIG, dtype='bfloat16')
    x, _ = jax.jit(decoder.trunk, static_argnums=1)(params, config, tokens, None)
    self.assertEqual(x.dtype, jnp.bfloat16)
    logits = decoder.token_logits(params, config, x)
    self.assertEqual(logits.dtype, jnp.float32)
    expected = full_logits(params, CONFIG, tokens)
    self.assertLess(jnp.max(jnp.abs(logits - expected)), 0.1 * jnp.std(expected) + 0.1)

  def test_published_sizes(self):
    # The parameter counts that the models' pages state.
    counts = {
        'qwen2.5-0.5b': 494_032_768,
        'qwen2.5-1.5b': 1_543_714_304,
        'qwen2.5-3b': 3_085_938_688,
        'qwen2.5-7b': 7_615_616_512,
        'qwen3-8b': 8_190_735_360,
        'qwen3-30b-a3b': 30_532_122_624,
        'llama3.2-1b': 1_235_814_400,
        'llama3.2-3b': 3_212_749_824,
        'llama3.1-8b': 8_030_261_248,
        'smollm2-135m': 134_515_008,
        'gemma-3-270m': 268_098_176,
        'gemma-3-1b': 999_885_952,
    }
    actual = {name: decoder.num_params(presets.PRESETS[name]) for name in counts}
    self.assertEqual(actual, counts)

  def test_heads_and_their_parameters(self):
    for head, tied, names in (
        ('tokens', False, {'lm_head'}),
        ('tokens', True, set()),
        ('value', False, {'value_head'}),
        ('value', True, {'value_head'}),
        ('both', False, {'lm_head', 'value_head'}),
    ):
      config = dataclasses.replace(CONFIG, head=head, tie_embeddings=tied)
      params = make_params(config)
      self.assertEqual(set(params) - {'embed', 'layers', 'final_norm'}, names)
      y, _ = jax.eval_shape(lambda p, c=config: decoder.forward(p, c, make_tokens(), None), params)
      self.assertEqual(y.shape, (3, 14) if head == 'value' else (3, 14, 40))

  def test_init(self):
    """Layers differ from each other, norms start at one, biases and the value head at zero."""
    config = dataclasses.replace(CONFIG, head='value', param_dtype='bfloat16')
    params = jax.jit(decoder.init, static_argnums=1)(jax.random.key(0), config)
    chex.assert_trees_all_equal_shapes_and_dtypes(params, make_params(config))
    kernel = np.asarray(params['layers']['mlp']['down']['kernel'], np.float32)
    self.assertGreater(np.max(np.abs(kernel[0] - kernel[1])), 0.01)
    np.testing.assert_allclose(np.std(kernel), 0.02 / np.sqrt(2 * 2), rtol=0.1)
    self.assertTrue((params['layers']['mlp_norm']['scale'] == 1).all())
    self.assertFalse(params['layers']['attention']['query']['bias'].any())
    self.assertFalse(params['value_head']['kernel'].any() or params['value_head']['bias'].any())


class CacheTest(parameterized.TestCase):

  @parameterized.parameters((True, 0), (False, 0), (True, 8))
  def test_ragged_chunks_and_single_tokens_equal_one_forward(self, unstacked, tile):
    params, tokens = make_params(), make_tokens(3, 20)
    expected = full_logits(params, CONFIG, tokens)
    if unstacked:
      params = decoder.unstack_layers(params, CONFIG)
    cache = decoder.init_cache(dataclasses.replace(CONFIG, cache_tile=tile), rows=3, slots=22)
    self.assertEqual(cache.v[0].shape[2], 24 if tile else 22)
    read = np.zeros(3, int)
    # Per call: how many real tokens the three rows read; a row with 0 must not change.
    for counts in ([7, 3, 5], [1, 1, 1], [1, 0, 1], [0, 7, 4], [1, 1, 1], [7, 7, 0], [3, 1, 0]):
      chunk = max(counts)
      block = np.full((3, chunk), 39)  # garbage where a row has fewer
      for row, count in enumerate(counts):
        block[row, :count] = tokens[row, read[row] : read[row] + count]
      logits, cache = forward(params, CONFIG, jnp.array(block), None, cache, jnp.array(counts))
      for row, count in enumerate(counts):
        np.testing.assert_allclose(
            logits[row, :count], expected[row, read[row] : read[row] + count], atol=1e-5
        )
      read += counts
      np.testing.assert_array_equal(cache.length, read)
    np.testing.assert_array_equal(read, [20, 20, 12])

  def test_padding_leaves_live_slots_alone(self):
    params, tokens = make_params(), make_tokens(2, 8)
    cache = decoder.init_cache(CONFIG, rows=2, slots=8)
    _, cache = forward(params, CONFIG, tokens, None, cache, jnp.array([6, 8]))
    # Row 0 has 2 free slots and row 1 none; both are given 4 tokens of padding.
    _, after = forward(params, CONFIG, tokens[:, :4], None, cache, jnp.array([0, 0]))
    np.testing.assert_array_equal(after.length, [6, 8])
    for l in range(CONFIG.num_layers):
      keys = lambda cache, l=l: cache.k[l][:, :, 0].mT
      for before_l, after_l in ((keys(cache), keys(after)), (cache.v[l], after.v[l])):
        np.testing.assert_array_equal(after_l[0, :, :6], before_l[0, :, :6])
        np.testing.assert_array_equal(after_l[1], before_l[1])
        self.assertGreater(float(jnp.max(jnp.abs(after_l[0, :, 6:] - before_l[0, :, 6:]))), 0)

  def test_default_length_and_dtype_of_the_cache(self):
    config = dataclasses.replace(CONFIG, dtype='bfloat16')
    cache = decoder.init_cache(config, rows=2, slots=8)
    self.assertEqual(cache.k[0].dtype, jnp.bfloat16)
    _, cache = forward(make_params(), config, make_tokens(2, 3), None, cache)
    np.testing.assert_array_equal(cache.length, [3, 3])
    self.assertEqual(cache.k[1].dtype, jnp.bfloat16)

  @parameterized.parameters((0, 17), (6, 18))
  def test_decode_loop_does_not_copy_its_cache(self, tile, slots):
    """The cache's shape is copied on entry at most, never inside the loop's body."""
    params = decoder.unstack_layers(make_params(), CONFIG)
    cache = decoder.init_cache(dataclasses.replace(CONFIG, cache_tile=tile), rows=5, slots=slots)

    def decode(params, cache, token):
      def body(carry):
        token, cache = carry
        logits, cache = decoder.forward(params, CONFIG, token, None, cache)
        return jnp.argmax(logits, -1), cache

      return jax.lax.while_loop(lambda carry: carry[1].length[0] < 9, body, (token, cache))

    decode = jax.jit(decode, donate_argnums=1)
    text = decode.lower(params, cache, jnp.zeros((5, 1), jnp.int32)).compile().as_text()
    entry = text.index('\nENTRY')
    copies = [
        line
        for line in text[:entry].splitlines()
        if re.search(r'f32\[5,2,(1[78],8|1,8,17|3,8,6)\]', line.split('=')[-1][:40])
        and ' copy(' in line
    ]
    self.assertEmpty(copies)


class LogpTest(parameterized.TestCase):

  @parameterized.product(chunk=(None, 4), tie_embeddings=(True, False))
  def test_equals_log_softmax_with_gradients(self, chunk, tie_embeddings):
    config = dataclasses.replace(CONFIG, tie_embeddings=tie_embeddings)
    params = {k: w for k, w in make_params(config).items() if k in ('embed', 'lm_head')}
    tokens = make_tokens()
    x = jax.random.normal(jax.random.key(4), (3, 14, 32))
    weights = jax.random.normal(jax.random.key(3), (2, 3, 14))
    temperature = 0.7

    def ours(params, x):
      return jnp.stack(decoder.token_logp(params, config, x, tokens, temperature, chunk))

    def oracle(params, x):
      logits = decoder.token_logits(params, config, x)[:, :-1] / temperature
      log_probs = jax.nn.log_softmax(logits)
      logp = jnp.take_along_axis(log_probs, tokens[:, 1:, None], -1)[..., 0]
      entropy = -jnp.sum(jnp.exp(log_probs) * log_probs, -1)
      return jnp.pad(jnp.stack([logp, entropy]), ((0, 0), (0, 0), (1, 0)))

    def outputs_and_gradients(f):
      y, pull = jax.vjp(f, params, x)
      return y, pull(weights)

    actual, expected = (jax.jit(lambda f=f: outputs_and_gradients(f))() for f in (ours, oracle))
    chex.assert_trees_all_close(actual, expected, atol=2e-5)

  @parameterized.parameters((True, (1, 8, 1)), (False, (2, 2, 2)))
  def test_head_is_gathered_and_reduced_once(self, tie_embeddings, mesh):
    """Both loops gather one of 4 parts of [D,V] per step; only copies over data move more, once."""
    config = dataclasses.replace(CONFIG, vocab_size=1024, tie_embeddings=tie_embeddings)
    mesh = sharding.make_mesh(*mesh, jax.devices()[:8])
    name = 'embed' if tie_embeddings else 'lm_head'
    params = {name: make_params(config)[name]}
    x = jax.random.normal(jax.random.key(4), (8, 16, 32))
    tokens = make_tokens(8, 16, 1024)
    places = sharding.tree_shardings(params, mesh)
    rows = sharding.rows(mesh)

    def program(config, **options):
      def loss(params, x, tokens):
        logp, entropy = decoder.token_logp(params, config, x, tokens, chunk=4)
        return jnp.mean(jnp.sin(logp) + entropy)

      return jax.jit(jax.value_and_grad(loss, argnums=(0, 1)), **options)

    expected = program(config)(params, x, tokens)
    spread = program(
        dataclasses.replace(config, row_sharding=rows),
        in_shardings=(places, rows, rows),
        out_shardings=((None, (places, rows))),
    )
    compiled = spread.lower(params, x, tokens).compile()
    placed = jax.device_put((params, x, tokens), (places, rows, rows))
    chex.assert_trees_all_close(compiled(*placed), expected, rtol=1e-4, atol=1e-6)
    part = 32 * 1024 // 4 // mesh.shape['tensor']
    moved = collectives.collectives(compiled.as_text())
    self.assertLen([op for op, size in moved if size > part], mesh.shape['data'] - 1, moved)
    self.assertEqual(moved.count(('all-gather', part)), 2, moved)

  def test_head_computes_no_gradient_of_a_loss_that_reads_other_outputs(self):
    """The backward pass would compute 0 * inf for the infinite x of a row."""
    config = dataclasses.replace(CONFIG, tie_embeddings=True)
    params = {'embed': make_params(config)['embed']}
    x = jnp.ones((1, 4, 32)).at[0, 0].set(jnp.inf)
    tokens = jnp.array([[1, 2, 3, 4]])

    def head(params, x):
      return decoder.token_logp(params, config, x, tokens, chunk=2)

    (logp, _), pull = jax.vjp(head, params, x)
    self.assertTrue(jnp.isnan(logp).any())
    no_cotangent = jnp.zeros((1, 4))
    gradients = pull((no_cotangent, no_cotangent))
    chex.assert_trees_all_equal(gradients, jax.tree.map(jnp.zeros_like, (params, x)))
    _, d_x = pull((no_cotangent, no_cotangent.at[0, 3].set(1.0)))
    self.assertTrue(jnp.isfinite(d_x[0, 2]).all())
    self.assertTrue((d_x[0, 2] != 0).any())

  def test_entropy_by_hand(self):
    # Logits all equal: entropy log V, every log-prob -log V; column 0 has neither.
    config = dataclasses.replace(CONFIG, tie_embeddings=True)
    params = {'embed': {'embedding': jnp.ones((40, 32))}}
    x, tokens = jnp.ones((1, 3, 32)), jnp.array([[1, 2, 3]])
    logp, entropy = decoder.token_logp(params, config, x, tokens)
    np.testing.assert_allclose(logp, [[0, -np.log(40), -np.log(40)]], rtol=1e-6)
    np.testing.assert_allclose(entropy, [[0, np.log(40), np.log(40)]], rtol=1e-6)

  def test_never_holds_all_logits(self):
    config = dataclasses.replace(CONFIG, vocab_size=5000)
    params = jax.eval_shape(lambda: decoder.init(jax.random.key(0), config))
    x = jax.ShapeDtypeStruct((2, 64, 32), jnp.float32)
    tokens = jax.ShapeDtypeStruct((2, 64), jnp.int32)

    def loss(params, x, tokens, chunk):
      logp, entropy = decoder.token_logp(params, config, x, tokens, 1.0, chunk)
      return jnp.sum(logp) + jnp.sum(entropy)

    def temporaries(chunk):
      grad = jax.jit(jax.grad(loss, argnums=(0, 1)), static_argnums=3)
      return grad.lower(params, x, tokens, chunk).compile().memory_analysis().temp_size_in_bytes

    self.assertLess(temporaries(4), temporaries(None) / 2)

  def test_a_value_belongs_to_the_token_after_it(self):
    config = dataclasses.replace(CONFIG, head='both')
    params, tokens = make_params(config), make_tokens()
    x, _ = jax.jit(decoder.trunk, static_argnums=1)(params, config, tokens, None)
    values = decoder.state_values(params, x)
    raw = np.asarray(x) @ np.asarray(params['value_head']['kernel'])[:, 0]
    raw += np.asarray(params['value_head']['bias'])
    np.testing.assert_array_equal(values[:, 0], np.zeros(3))
    np.testing.assert_allclose(values[:, 1:], raw[:, :-1], atol=1e-5)
    critic = dataclasses.replace(config, head='value')
    np.testing.assert_allclose(forward(params, critic, tokens, None)[0], raw, atol=1e-5)


if __name__ == '__main__':
  absltest.main()
