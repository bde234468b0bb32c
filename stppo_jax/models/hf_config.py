"""Hugging Face folders: config.json to ModelConfig, and the names of tensors.

hf_export.py writes such folders.
"""

import functools
import hashlib
import pathlib
from typing import Any
from typing import NamedTuple

from absl import logging
import ml_dtypes
import numpy as np

from stppo_jax import types
from stppo_jax.models import decoder
from stppo_jax.models import families
from stppo_jax.models.families import family as family_lib
from stppo_jax.types import UserError

# Settings that change a model, and the values that change nothing in this decoder. Configs of other
# families have them, and so have models that carry the name of a family and are changed.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    'hidden_act': ('silu', 'swish'),
    'hidden_activation': ('silu', 'swish'),
    'use_sliding_window': (False,),
    'attention_chunk_size': (),
    'attention_bias': (False,),
    'mlp_bias': (False,),
    'quantization_config': (),
    'clip_qkv': (),
    'draft_vocab_size': (),
    'eagle_config': (),
    'dflash_config': (),
    'is_causal': (True,),
    'use_bidirectional_attention': (False,),
    'alibi': (False,),
    'partial_rotary_factor': (1,),
    'rotary_pct': (1,),
    'rope_interleaved': (False,),
    'rope_local_base_freq': (),
    'use_qk_norm': (False,),
    'qk_norm': (False,),
    'qk_layernorm': (False,),
    'parallel_attn': (False,),
    'use_parallel_residual': (False,),
    'logits_scaling': (1,),
    'logit_scale': (1,),
    'embedding_multiplier': (1,),
    'residual_multiplier': (1,),
    'scale_emb': (1,),
    'scale_depth': (),
    'dim_model_base': (),
    'num_experts': (0, 1),
    'num_local_experts': (0, 1),
    'n_shared_experts': (0,),
    'shared_expert_intermediate_size': (0,),
    'routed_scaling_factor': (1,),
    'scoring_func': ('softmax',),
    'n_group': (1,),
    'topk_group': (1,),
}
# What a checkpoint with parts for images says at its top level of the text model, too. Whether the
# embedding is the output matrix is said there only.
_TOP_LEVEL = (
    'architectures',
    'auto_map',
    'dtype',
    'torch_dtype',
    'id2label',
    'quantization_config',
    'bos_token_id',
    'eos_token_id',
    'pad_token_id',
    'tie_word_embeddings',
)
# Up to max_position_embeddings a dynamic scaling changes nothing, and longer rows are refused. For
# text mrope changes nothing.
_UNSCALED = ('default', 'dynamic', 'mrope')
_NULL_IS_FALSE = ('truncate',)  # keys of a rotation, as in transformers; absent it is true
_MAX_LAYERS = 1000  # more would take minutes until the weights turn out to have fewer
TOKENIZER_FILES = (
    'tokenizer.json',
    'tokenizer_config.json',
    'special_tokens_map.json',
    'added_tokens.json',
    'vocab.json',
    'merges.txt',
    'tokenizer.model',
    'chat_template.jinja',
    'generation_config.json',
)
MORE_TEMPLATES = 'additional_chat_templates'  # a folder with a file per template, as 'tool_use'
_PIECES = 64  # a fingerprint reads this many parts of a weights file
_PIECE_BYTES = 4096
DTYPES = {'float32': np.dtype(np.float32), 'bfloat16': np.dtype(ml_dtypes.bfloat16)}


class Entry(NamedTuple):
  """One tensor of a folder: all of a parameter of our tree, or one layer or expert of it."""

  name: str
  path: str  # path of the parameter in our tree
  layer: int | None
  shape: tuple[int, ...]  # in the folder; ours is a reshape, after a transpose if `transpose`
  transpose: bool
  expert: int | None = None


def load(
    folder: str | pathlib.Path,
    head: str = 'tokens',
    param_dtype: str = 'float32',
    dtype: str = 'float32',
    value_labels: tuple[str, ...] = ('value',),
) -> decoder.ModelConfig:
  """Reads the ModelConfig from a folder's config.json. UserError: not a supported model."""
  check_is_model(folder)
  path = pathlib.Path(folder) / 'config.json'
  raw = read_model(folder)
  try:
    return _load(folder, path, raw, head, param_dtype, dtype, value_labels)
  except UserError:  # a ValueError
    raise
  except (TypeError, ValueError, LookupError, ArithmeticError, AttributeError) as error:
    raise UserError(
        f'{path}: a setting has a value of another kind ({type(error).__name__}: {error}); use the '
        'config.json that belongs to the weights'
    ) from error


def _load(folder, path, raw, head, param_dtype, dtype, value_labels):
  model_type = raw.get('model_type')
  if model_type in families.TEXT_PARTS:
    raise UserError(
        f'{path}: model_type {model_type!r} has no text_config; give the file that belongs to the '
        f'weights, or model_type {families.TEXT_PARTS[model_type]!r} for a text model'
    )
  if not isinstance(model_type, str) or model_type not in families.FILES:
    raise UserError(
        f'{path}: model_type {model_type!r} is not supported; allowed: '
        f'{", ".join((*families.FILES, *families.TEXT_PARTS))}; choose a model of one of these'
    )
  family = families.find(model_type)
  raw = dict(family.defaults) | raw
  _check_supported(path, raw, family)
  if raw.get('auto_map'):
    logging.warning(
        '%s names code of its own in auto_map, which is not used: the model is read as %s',
        path,
        model_type,
    )
  if head == 'tokens' and 'Classification' in str(raw.get('architectures')):
    raise UserError(
        f'{folder} holds a critic or reward model ({raw["architectures"]}), not a policy; load it '
        "with head='value' or give a policy's folder"
    )
  if head == 'value':
    _check_bins(path, raw, value_labels)
  number = functools.partial(family_lib.number, path, raw)
  d_model = number('hidden_size')
  num_layers = number('num_hidden_layers')
  if num_layers > _MAX_LAYERS:
    raise UserError(
        f'{path}: num_hidden_layers = {num_layers}, and models have at most {_MAX_LAYERS} layers; '
        'use the config.json that belongs to the weights'
    )
  num_heads = number('num_attention_heads')
  may_lack = family.shares_no_keys or 'num_key_value_heads' in raw  # null is one per head
  num_kv_heads = number('num_key_value_heads', num_heads if may_lack else None)
  head_dim = number('head_dim', d_model // num_heads)
  _check_heads(path, raw, num_heads, num_kv_heads, head_dim)
  layers = family.layer_fields(path, raw, num_layers)
  rotations = family.rope_fields(path, raw, functools.partial(_rope, path))
  return decoder.ModelConfig(
      vocab_size=number('vocab_size'),
      d_model=d_model,
      num_layers=num_layers,
      num_heads=num_heads,
      num_kv_heads=num_kv_heads,
      head_dim=head_dim,
      **family.feed_forward(path, raw),
      **layers,
      **rotations,
      **family.score_fields(path, raw, head_dim),
      rms_norm_eps=number('rms_norm_eps', 1e-6, float),
      tie_embeddings=family_lib.flag(path, raw, 'tie_word_embeddings'),
      family=model_type,
      head=head,
      value_labels=value_labels,
      dtype=dtype,
      param_dtype=param_dtype,
      max_positions=_positions(path, raw, rotations['rope_scaling']),
  )


def check_is_model(folder: str | pathlib.Path) -> None:
  """Raises a UserError for a GGUF file in place of a folder, and for a folder with an adapter."""
  path = pathlib.Path(folder)
  if path.suffix == '.gguf':
    raise UserError(
        f'{folder} is a GGUF file; give a folder as transformers saves it; docs/gguf.md shows the '
        'four lines that convert the file'
    )
  if (path / 'adapter_config.json').is_file():
    raise UserError(
        f'{folder} holds an adapter of the PEFT library, which is not read; merge it into its '
        'model with merge_and_unload(), and give the folder of the result'
    )


def fingerprint(folder: str | pathlib.Path) -> str:
  """Returns a digest of a model's folder, tokenizer included; '' without a config.json.

  The digest covers the size of each file of weights and pieces of it. Training changes all pieces,
  and reading all of a large model takes minutes.
  """
  folder = pathlib.Path(folder)
  if not (folder / 'config.json').exists():
    return ''
  digest = hashlib.sha256()
  for path in sorted([*folder.iterdir(), *folder.glob(f'{MORE_TEMPLATES}/*.jinja')]):
    if path.suffix == '.safetensors':
      size = path.stat().st_size
      digest.update(f'{path.name} {size}'.encode())
      with open(path, 'rb') as file:
        for start in range(0, size, max(size // _PIECES, _PIECE_BYTES)):
          file.seek(start)
          digest.update(file.read(_PIECE_BYTES))
    elif path.name in ('config.json', *TOKENIZER_FILES) or path.parent != folder:
      digest.update(path.name.encode() + path.read_bytes())
  return digest.hexdigest()[:16]


def table(config: decoder.ModelConfig) -> list[Entry]:
  """Returns every tensor of a folder of this family and head, with its path in our tree."""
  d = config.d_model
  f = config.d_ff
  v = config.vocab_size
  h = config.head_dim
  query = config.num_heads * h
  key = config.num_kv_heads * h
  path = 'layers/attention'
  gates = 2 if config.attention_gate else 1
  layer_rows: list[family_lib.Row] = [
      ('self_attn.q_proj.weight', f'{path}/query/kernel', (query * gates, d), True),
      ('self_attn.k_proj.weight', f'{path}/key/kernel', (key, d), True),
      ('self_attn.v_proj.weight', f'{path}/value/kernel', (key, d), True),
      ('self_attn.o_proj.weight', f'{path}/out/kernel', (d, query), True),
  ]
  norms = {'input_layernorm': 'attention_norm', 'post_attention_layernorm': 'mlp_norm'}
  if config.norm_after:
    norms = {
        'post_attention_layernorm': 'attention_post_norm',
        'post_feedforward_layernorm': 'mlp_post_norm',
    }
    if config.norm_before:
      norms['input_layernorm'] = 'attention_norm'
      norms['pre_feedforward_layernorm'] = 'mlp_norm'
  for name, module in norms.items():
    layer_rows.append((f'{name}.weight', f'layers/{module}/scale', (d,), False))
  feed_forward: dict[str, tuple[int, ...]] = {'gate': (f, d), 'up': (f, d), 'down': (d, f)}
  if not config.num_experts:
    for name, shape in feed_forward.items():
      layer_rows.append((f'mlp.{name}_proj.weight', f'layers/mlp/{name}/kernel', shape, True))
  if shared := config.shared_d_ff:
    layer_rows.append(
        ('mlp.shared_expert_gate.weight', 'layers/moe/shared_gate/kernel', (1, d), True)
    )
    for name, shape in {'gate': (shared, d), 'up': (shared, d), 'down': (d, shared)}.items():
      row = f'mlp.shared_expert.{name}_proj.weight'
      layer_rows.append((row, f'layers/moe/shared/{name}/kernel', shape, True))
  if config.qkv_bias:
    layer_rows += [
        ('self_attn.q_proj.bias', f'{path}/query/bias', (query,), False),
        ('self_attn.k_proj.bias', f'{path}/key/bias', (key,), False),
        ('self_attn.v_proj.bias', f'{path}/value/bias', (key,), False),
    ]
  if config.qk_norm:
    whole = config.qk_norm_whole
    layer_rows += [
        ('self_attn.q_norm.weight', f'{path}/query_norm/scale', (query if whole else h,), False),
        ('self_attn.k_norm.weight', f'{path}/key_norm/scale', (key if whole else h,), False),
    ]
  layer_rows += families.find(config.family).layer_rows(config)
  entries = [Entry('model.embed_tokens.weight', 'embed/embedding', None, (v, d), False)]
  ranks = {'attention': 0, 'delta': 0}  # layers of each kind so far
  for l, kind in enumerate(config.layer_kinds):
    prefix = f'model.layers.{l}'
    mixer = 'delta' if kind.is_delta else 'attention'
    other = 'attention' if kind.is_delta else 'delta'
    for name, parameter, shape, transpose in layer_rows:
      part = parameter.split('/')[1] if parameter else mixer
      if part != other:
        number = ranks[mixer] if part == mixer else l
        entries.append(Entry(f'{prefix}.{name}', parameter, number, shape, transpose))
    ranks[mixer] += 1
    if config.num_experts:
      router_shape = (config.num_experts, d)
      router = 'layers/moe/router/kernel'
      entries.append(Entry(f'{prefix}.mlp.gate.weight', router, l, router_shape, True))
    for expert in range(config.num_experts):
      for part, shape in feed_forward.items():
        name = f'{prefix}.mlp.experts.{expert}.{part}_proj.weight'
        entries.append(Entry(name, f'layers/moe/{part}', l, shape, True, expert))
  entries.append(Entry('model.norm.weight', 'final_norm/scale', None, (d,), False))
  if config.head in ('tokens', 'both') and not config.tie_embeddings:
    entries.append(Entry('lm_head.weight', 'lm_head/kernel', None, (v, d), True))
  if config.head in ('value', 'both'):
    n = len(config.value_labels)
    entries.append(Entry('score.weight', 'value_head/kernel', None, (n, d), True))
    entries.append(Entry('score.bias', 'value_head/bias', None, (n,), False))
  return entries


def check_has_tokenizer(folder: pathlib.Path) -> None:
  """Raises a UserError if none of the tokenizer's files is there."""
  if not any((folder / name).is_file() for name in TOKENIZER_FILES):
    raise UserError(f'{folder} holds no tokenizer; give a folder with tokenizer.json')


def read_json(path: pathlib.Path) -> dict[str, Any]:
  """Reads a JSON object. UserError: no such file, or not an object."""
  if not path.is_file():
    raise UserError(
        f'{path} does not exist; give a folder as transformers saves it, with config.json and '
        'model.safetensors; `hf download NAME --local-dir=FOLDER` makes it'
    )
  return types.read_json(path, 'download it again')


def read_model(folder: str | pathlib.Path) -> dict[str, Any]:
  """Reads config.json; of a model with parts for images its text_config."""
  raw = read_json(pathlib.Path(folder) / 'config.json')
  text = raw.get('text_config')
  kind = families.TEXT_PARTS.get(str(raw.get('model_type')))
  if kind is None or not isinstance(text, dict):
    return raw
  own = {name: raw[name] for name in _TOP_LEVEL if name in raw}
  text = {name: value for name, value in text.items() if name != 'tie_word_embeddings'}
  return own | {'model_type': kind} | text


def _check_bins(path, raw, value_labels):
  """Raises UserError for a critic whose bins have other edges. Another number of bins is allowed.

  `hf_weights.load_hf` reports the number, after it has looked at the weights.
  """
  names = raw.get('id2label')
  labels = list(names.values()) if isinstance(names, dict) else []
  has_bins = len(labels) == len(value_labels) and str(labels[0]).startswith('bin from')
  if has_bins and labels != list(value_labels):
    raise UserError(
        f'{path}: the first output of its value head is {labels[0]!r}, and algorithm.value_low and '
        f'value_high make it {value_labels[0]!r}; set them as in its training'
    )


def _check_supported(path, raw, family):
  """Raises UserError for settings that change the model, and that the decoder does not have.

  A setting that is absent or null changes nothing.
  """
  allowed_values = dict(_NEUTRAL)
  for name in raw:
    if name.endswith(('_softcapping', '_softcap')):
      allowed_values[name] = (0,)
  allowed_values |= family.allowed
  for name, values in allowed_values.items():
    if values is family_lib.ANY:
      continue
    if raw.get(name) is not None and raw[name] not in values:
      allowed = ', '.join(map(repr, values)) or 'none'
      raise UserError(
          f'{path}: {name} = {raw[name]!r:.200} is not supported; allowed: {allowed}; '
          'choose another model'
      )


def _positions(path, raw, scaling):
  """Returns the longest row. Beyond the first chunk, dual chunk attention is another model."""
  positions = family_lib.number(path, raw, 'max_position_embeddings', 32_768)
  if scaling is not None:
    positions = max(positions, scaling.longest_row())
  chunks = raw.get('dual_chunk_attention_config')
  if chunks is None:
    return positions
  if not isinstance(chunks, dict):
    raise UserError(
        f'{path}: dual_chunk_attention_config = {chunks!r} is not an object; download it again'
    )
  number = functools.partial(family_lib.number, path, chunks)
  first_chunk = number('chunk_size') - number('local_size')
  return min(positions, first_chunk, number('original_max_position_embeddings', positions))


def _check_heads(path, raw, num_heads, num_kv_heads, head_dim):
  """Raises UserError for numbers of heads that do not divide."""
  problem = ''
  if num_heads % num_kv_heads:
    problem = (
        f'num_key_value_heads = {num_kv_heads} does not divide num_attention_heads = {num_heads}'
    )
  elif raw.get('head_dim') is None and raw['hidden_size'] % num_heads:
    problem = (
        f'num_attention_heads = {num_heads} does not divide hidden_size = {raw["hidden_size"]}'
    )
  elif head_dim % 2:
    problem = f'a head is {head_dim} wide, and rotary positions need an even number'
  if problem:
    raise UserError(f'{path}: {problem}; download config.json again')


def _rope(path, raw):
  """Returns (rope_theta, rope_scaling).

  transformers 5 writes `rope_parameters`. transformers 4 writes `rope_theta` and `rope_scaling`.
  """
  defaults = {'rope_theta': raw.get('rope_theta'), 'rope_type': 'default'}
  forms = []
  for name in ('rope_parameters', 'rope_scaling'):
    rope = raw.get(name) or {}
    if not isinstance(rope, dict):
      raise UserError(
          f'{path}: {name} = {rope!r:.200} is not an object; use the config.json that belongs to '
          'the weights'
      )
    for key, value in rope.items():
      is_partial = key == 'partial_rotary_factor' and value not in (None, 1)
      is_partial &= not raw.get('partial_rotary_factor')  # a family that rotates a part
      if is_partial or isinstance(value, dict):
        raise UserError(
            f'{path}: {name} has {key} = {value!r}, which is not supported; allowed: one rotation '
            'of whole heads in all layers; choose another model'
        )
    if rope:
      form = defaults | {'rope_type': rope.get('type') or 'default'}
      form |= {
          key: value
          for key, value in rope.items()
          if key != 'type' and (value is not None or key in _NULL_IS_FALSE)
      }
      forms.append(form)
  if len(forms) == 2:
    forms[1]['rope_theta'] = forms[1]['rope_theta'] or forms[0]['rope_theta']
    if forms[0] != forms[1]:
      raise UserError(
          f'{path}: rope_parameters = {raw["rope_parameters"]!r} and rope_scaling = '
          f'{raw["rope_scaling"]!r} differ; remove the one that does not hold'
      )
  rope = forms[0] if forms else defaults
  number = functools.partial(family_lib.number, path, rope)
  theta = number('rope_theta', 10_000.0, float)
  if rope['rope_type'] in _UNSCALED:
    return theta, None
  from stppo_jax.models import rope_scaling

  original = raw.get('original_max_position_embeddings')
  if original is not None and rope['rope_type'] in ('llama3', 'yarn'):  # linear has none
    rope['original_max_position_embeddings'] = original
  positions = raw.get('max_position_embeddings')
  return theta, rope_scaling.read(path, rope, positions, number)
