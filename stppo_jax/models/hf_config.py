"""A Hugging Face folder: config.json to and from ModelConfig, its tensors' names, its tokenizer."""

import collections
import dataclasses
import hashlib
import json
import pathlib
import shutil
from typing import Any

import ml_dtypes
import numpy as np

from stppo_jax.models import decoder
from stppo_jax.types import UserError

# model_type -> prefix of the classes' names in transformers.
FAMILIES = {'qwen2': 'Qwen2', 'qwen3': 'Qwen3', 'qwen3_moe': 'Qwen3Moe', 'llama': 'Llama'}
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
# What a fingerprint takes whole, and how it samples weights: pieces of a file, bytes of a piece.
_SMALL_FILES = ('config.json', *TOKENIZER_FILES)
_PIECES, _PIECE = 64, 4096
_MAX_LAYERS = 1000  # more would take minutes until the weights are found to have fewer
HEADS = ('tokens', 'value', 'both')
DTYPES = {'float32': np.dtype(np.float32), 'bfloat16': np.dtype(ml_dtypes.bfloat16)}

# One tensor of a folder, with the folder's shape. Ours is reshaped, after a transpose if so marked.
# It is all of the parameter at `path`, or one layer of it, or one expert of a layer.
Entry = collections.namedtuple('Entry', 'name path layer shape transpose expert', defaults=(None,))
NOT_OURS = ''  # the path of a tensor that must be 0: our model is without it


def load(
    folder: str | pathlib.Path,
    head: str = 'tokens',
    param_dtype: str = 'float32',
    dtype: str = 'float32',
) -> decoder.ModelConfig:
  """Reads the ModelConfig from a folder's config.json. UserError: not a supported model."""
  _check_choice('head', head, HEADS)
  _check_choice('param_dtype', param_dtype, DTYPES)
  _check_choice('dtype', dtype, DTYPES)
  path = pathlib.Path(folder) / 'config.json'
  raw = read_json(path)
  family = raw.get('model_type')
  if not isinstance(family, str) or family not in FAMILIES:
    raise UserError(
        f'{path}: model_type {family!r} is not supported; allowed: '
        f'{", ".join(FAMILIES)}; choose a model of one of these'
    )
  _refuse_unsupported(path, raw)
  if head == 'tokens' and 'Classification' in str(raw.get('architectures')):
    raise UserError(
        f'{folder} holds a critic or reward model ({raw["architectures"]}), not a policy; load it '
        "with head='value' or give a policy's folder"
    )
  d_model = _number(path, raw, 'hidden_size')
  num_layers = _number(path, raw, 'num_hidden_layers')
  if num_layers > _MAX_LAYERS:
    raise UserError(
        f'{path}: num_hidden_layers = {num_layers}, and models have at most {_MAX_LAYERS} layers; '
        'use the config.json that belongs to the weights'
    )
  num_heads = _number(path, raw, 'num_attention_heads')
  num_kv_heads = num_heads if family == 'llama' else None
  num_kv_heads = _number(path, raw, 'num_key_value_heads', num_kv_heads)
  head_dim = _number(path, raw, 'head_dim', 128 if family == 'qwen3' else d_model // num_heads)
  _check_heads(path, d_model, num_heads, num_kv_heads, head_dim, 'head_dim' in raw)
  rope_theta, rope_scaling = _rope(path, raw)
  return decoder.ModelConfig(
      vocab_size=_number(path, raw, 'vocab_size'),
      d_model=d_model,
      num_layers=num_layers,
      num_heads=num_heads,
      num_kv_heads=num_kv_heads,
      head_dim=head_dim,
      **(_experts(path, raw) if family == 'qwen3_moe' else _dense(path, raw)),
      rope_theta=rope_theta,
      rope_scaling=rope_scaling,
      rms_norm_eps=_number(path, raw, 'rms_norm_eps', 1e-6, float),
      tie_embeddings=bool(raw.get('tie_word_embeddings', False)),
      qkv_bias=family == 'qwen2' or bool(raw.get('attention_bias')),
      qk_norm=family in ('qwen3', 'qwen3_moe'),
      family=family,
      head=head,
      dtype=dtype,
      param_dtype=param_dtype,
      max_positions=_number(path, raw, 'max_position_embeddings', 32_768),
  )


def stored_dtype(folder: str | pathlib.Path) -> str:
  """Returns the dtype that a folder's config.json names ('bfloat16'), or '' without one."""
  raw = read_json(pathlib.Path(folder) / 'config.json')
  return str(raw.get('dtype') or raw.get('torch_dtype') or '')  # transformers 5, and 4


def dtype_to_write(source: str | pathlib.Path, param_dtype: str) -> str:
  """Returns the dtype for weights that were trained from `source`: its own, if that is bfloat16."""
  return 'bfloat16' if stored_dtype(source) == 'bfloat16' else param_dtype


def fingerprint(folder: str | pathlib.Path) -> str:
  """Returns a digest of a model's folder, tokenizer included; '' where there is none.

  Of weights it takes every file's size, and pieces of it: training changes all of them, and to read
  all of a large model takes minutes.
  """
  total = hashlib.sha256()
  for path in sorted(pathlib.Path(folder).glob('*')):
    if path.suffix == '.safetensors':
      size = path.stat().st_size
      total.update(f'{path.name} {size}'.encode())
      with open(path, 'rb') as file:
        for start in range(0, size, max(size // _PIECES, _PIECE)):
          file.seek(start)
          total.update(file.read(_PIECE))
    elif path.name in _SMALL_FILES:
      total.update(path.name.encode() + path.read_bytes())
  return total.hexdigest()[:16] if (pathlib.Path(folder) / 'config.json').exists() else ''


def to_json(config: decoder.ModelConfig, dtype: str, token_ids: dict[str, Any]) -> dict[str, Any]:
  """Returns config.json as transformers 4 and 5 read it, with `token_ids` added."""
  kind = 'ForTokenClassification' if config.head == 'value' else 'ForCausalLM'
  rope_scaling = None
  if config.rope_scaling is not None:
    factor, low, high, original = config.rope_scaling
    rope_scaling = {
        'rope_type': 'llama3',
        'factor': factor,
        'low_freq_factor': low,
        'high_freq_factor': high,
        'original_max_position_embeddings': original,
    }
  raw = {
      'architectures': [FAMILIES[config.family] + kind],
      'model_type': config.family,
      'vocab_size': config.vocab_size,
      'hidden_size': config.d_model,
      'num_hidden_layers': config.num_layers,
      'num_attention_heads': config.num_heads,
      'num_key_value_heads': config.num_kv_heads,
      'head_dim': config.head_dim,
      'intermediate_size': config.d_ff,
      'hidden_act': 'silu',
      'rope_theta': config.rope_theta,
      'rope_scaling': rope_scaling,
      'rms_norm_eps': config.rms_norm_eps,
      'tie_word_embeddings': config.tie_embeddings,
      'max_position_embeddings': config.max_positions,
      'attention_dropout': 0.0,
      'torch_dtype': dtype,
  }
  if config.family == 'llama':
    raw['attention_bias'] = config.qkv_bias
  if config.num_experts:
    raw |= {
        'intermediate_size': config.d_ff * config.experts_per_token,  # of dense layers: none here
        'moe_intermediate_size': config.d_ff,
        'num_experts': config.num_experts,
        'num_experts_per_tok': config.experts_per_token,
        'norm_topk_prob': config.norm_topk_prob,
        'decoder_sparse_step': 1,
        'mlp_only_layers': [],
    }
  if config.head == 'value':
    raw |= {'id2label': {'0': 'value'}, 'label2id': {'value': 0}, 'classifier_dropout': 0.0}
  return raw | token_ids


def table(config: decoder.ModelConfig) -> list[Entry]:
  """Returns every tensor of a folder of this family and head, with its path in our tree."""
  d, f, v, h = config.d_model, config.d_ff, config.vocab_size, config.head_dim
  query, key = config.num_heads * h, config.num_kv_heads * h
  entries = [Entry('model.embed_tokens.weight', 'embed/embedding', None, (v, d), False)]
  layer_rows = [
      ('input_layernorm.weight', 'attention_norm/scale', (d,), False),
      ('self_attn.q_proj.weight', 'attention/query/kernel', (query, d), True),
      ('self_attn.k_proj.weight', 'attention/key/kernel', (key, d), True),
      ('self_attn.v_proj.weight', 'attention/value/kernel', (key, d), True),
      ('self_attn.o_proj.weight', 'attention/out/kernel', (d, query), True),
      ('post_attention_layernorm.weight', 'mlp_norm/scale', (d,), False),
  ]
  feed_forward = [('gate', (f, d)), ('up', (f, d)), ('down', (d, f))]
  if not config.num_experts:
    layer_rows += [
        (f'mlp.{name}_proj.weight', f'mlp/{name}/kernel', shape, True)
        for name, shape in feed_forward
    ]
  if config.qkv_bias and config.family == 'llama':  # where it comes with one of the output
    layer_rows.append(('self_attn.o_proj.bias', '', (d,), False))
  if config.qkv_bias:
    layer_rows += [
        ('self_attn.q_proj.bias', 'attention/query/bias', (query,), False),
        ('self_attn.k_proj.bias', 'attention/key/bias', (key,), False),
        ('self_attn.v_proj.bias', 'attention/value/bias', (key,), False),
    ]
  if config.qk_norm:
    layer_rows += [
        ('self_attn.q_norm.weight', 'attention/query_norm/scale', (h,), False),
        ('self_attn.k_norm.weight', 'attention/key_norm/scale', (h,), False),
    ]
  for l in range(config.num_layers):
    for name, path, shape, transpose in layer_rows:
      ours = f'layers/{path}' if path else NOT_OURS
      entries.append(Entry(f'model.layers.{l}.{name}', ours, l, shape, transpose))
    if config.num_experts:
      entries += _expert_entries(l, config.num_experts, d, feed_forward)
  entries.append(Entry('model.norm.weight', 'final_norm/scale', None, (d,), False))
  if config.head in ('tokens', 'both') and not config.tie_embeddings:
    entries.append(Entry('lm_head.weight', 'lm_head/kernel', None, (v, d), True))
  if config.head in ('value', 'both'):
    entries.append(Entry('score.weight', 'value_head/kernel', None, (1, d), True))
    entries.append(Entry('score.bias', 'value_head/bias', None, (1,), False))
  return entries


def readable_by_auto_tokenizer(
    config: decoder.ModelConfig, folder: pathlib.Path
) -> decoder.ModelConfig:
  """Returns the config under which AutoTokenizer gives the ids of `folder`'s tokenizer.json.

  Choice: for the model type qwen2, transformers 5 replaces its pre-tokenizer by Qwen2's, whatever
  the folder says. A model with another tokenizer is written as a Llama with biases: its output's
  bias is 0, so that it computes the same.
  """
  path = folder / 'tokenizer.json'
  if config.family != 'qwen2' or not path.is_file():
    return config
  found = read_json(path)
  is_qwens = _QWEN2_WORDS in json.dumps(found.get('pre_tokenizer'), ensure_ascii=False)
  if is_qwens or 'model' not in found:
    return config
  return dataclasses.replace(config, family='llama')


# Of the pre-tokenizer of Qwen2 and Qwen2.5 as JSON: a digit is a word, and a punctuation mark too.
_QWEN2_WORDS = r'|\\p{N}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|'


def check_has_tokenizer(folder: pathlib.Path) -> None:
  """Raises a UserError if none of the tokenizer's files is there."""
  if not any((folder / name).is_file() for name in TOKENIZER_FILES):
    raise UserError(f'{folder} holds no tokenizer; give a folder with tokenizer.json')


def copy_tokenizer(source: pathlib.Path, folder: pathlib.Path, config: decoder.ModelConfig) -> None:
  """Copies the tokenizer's files into the folder of a model with this config."""
  if not source.samefile(folder):
    for name in TOKENIZER_FILES:
      if (source / name).is_file():
        shutil.copyfile(source / name, folder / name)
  path = folder / 'tokenizer_config.json'
  if config.family == 'llama' and config.qkv_bias:  # the class that takes tokenizer.json as it is
    raw = read_json(path) if path.is_file() else {}
    write_json(path, raw | {'tokenizer_class': 'PreTrainedTokenizerFast'})


def read_json(path: pathlib.Path) -> dict[str, Any]:
  """Reads a JSON object. UserError: no such file, or not an object."""
  if not path.is_file():
    raise UserError(
        f'{path} does not exist; give a folder as transformers saves it, with config.json and '
        'model.safetensors; `hf download NAME --local-dir=FOLDER` makes it'
    )
  try:
    raw = json.loads(path.read_text(encoding='utf-8-sig'))
  except (ValueError, RecursionError) as error:
    raise UserError(f'{path} is not JSON ({error}); download it again') from error
  if not isinstance(raw, dict):
    raise UserError(f'{path} is not a JSON object; download it again')
  return raw


def write_json(path: pathlib.Path, raw: dict[str, Any]) -> None:
  """Writes indented JSON."""
  path.write_text(json.dumps(raw, indent=2) + '\n', encoding='utf-8')


def _expert_entries(layer, num_experts, d_model, feed_forward):
  """Returns the tensors of a layer's router and experts."""
  mlp, router = f'model.layers.{layer}.mlp', 'layers/moe/router/kernel'
  entries = [Entry(f'{mlp}.gate.weight', router, layer, (num_experts, d_model), True)]
  for expert in range(num_experts):
    for name, shape in feed_forward:
      theirs, ours = f'{mlp}.experts.{expert}.{name}_proj.weight', f'layers/moe/{name}'
      entries.append(Entry(theirs, ours, layer, shape, True, expert))
  return entries


def is_finite(tensor: np.ndarray) -> bool:
  """Whether all numbers are finite; of bfloat16 by their exponents, which is much faster."""
  if tensor.dtype != DTYPES['bfloat16']:
    return bool(np.isfinite(tensor).all())
  return not ((tensor.view(np.uint16) & 0x7F80) == 0x7F80).any()


def _refuse_unsupported(path, raw):
  """Raises UserError for settings that the decoder does not implement."""
  refused = {
      'use_sliding_window': bool(raw.get('use_sliding_window')),
      'attention_bias': bool(raw.get('attention_bias')) and raw.get('model_type') != 'llama',
      'mlp_bias': bool(raw.get('mlp_bias')),
      'quantization_config': raw.get('quantization_config') is not None,
      'hidden_act': raw.get('hidden_act', 'silu') != 'silu',
  }
  for name, is_refused in refused.items():
    if is_refused:
      allowed = "'silu'" if name == 'hidden_act' else 'none'
      raise UserError(
          f'{path}: {name} = {raw[name]!r} is not supported; allowed: {allowed}; '
          'choose another model'
      )


def _check_heads(path, d_model, num_heads, num_kv_heads, head_dim, is_given):
  """Raises UserError for numbers of heads that do not divide."""
  if num_heads % num_kv_heads:
    raise UserError(
        f'{path}: num_key_value_heads = {num_kv_heads} does not divide num_attention_heads = '
        f'{num_heads}; download config.json again'
    )
  if not is_given and d_model % num_heads:
    raise UserError(
        f'{path}: num_attention_heads = {num_heads} does not divide hidden_size = {d_model}; '
        'download config.json again'
    )
  if head_dim % 2:
    raise UserError(
        f'{path}: a head is {head_dim} wide, and rotary positions need an even number; download '
        'config.json again'
    )


def _dense(path, raw):
  return {'d_ff': _number(path, raw, 'intermediate_size')}


def _experts(path, raw):
  """Returns the fields of a mixture of experts. UserError: some of its layers are dense."""
  if raw.get('decoder_sparse_step', 1) != 1 or raw.get('mlp_only_layers'):
    raise UserError(
        f'{path}: decoder_sparse_step = {raw.get("decoder_sparse_step", 1)!r} and mlp_only_layers '
        f'= {raw.get("mlp_only_layers")!r} make some layers dense; allowed: 1 and []; choose a '
        'model whose layers all have experts'
    )
  # transformers names the same number twice.
  counts = {'num_experts': raw.get('num_experts', raw.get('num_local_experts'))}
  experts, active = _number(path, counts, 'num_experts'), _number(path, raw, 'num_experts_per_tok')
  if active > experts:
    raise UserError(
        f'{path}: num_experts_per_tok = {active} of num_experts = {experts}; download it again'
    )
  return {
      'd_ff': _number(path, raw, 'moe_intermediate_size'),
      'num_experts': experts,
      'experts_per_token': active,
      'norm_topk_prob': bool(raw.get('norm_topk_prob', False)),
  }


def _rope(path, raw):
  """Returns (rope_theta, rope_scaling), from `rope_parameters` (transformers 5) or two keys (4)."""
  given = [raw[name] for name in ('rope_parameters', 'rope_scaling') if raw.get(name)]
  for rope in given:
    if not isinstance(rope, dict):
      raise UserError(f'{path}: rope parameters {rope!r} are not an object; download it again')
  forms = [{'rope_theta': raw.get('rope_theta'), 'rope_type': 'default'} for _ in given]
  for form, rope in zip(forms, given):
    form |= {{'type': 'rope_type'}.get(name, name): value for name, value in rope.items()}
  if len(forms) == 2 and forms[1]['rope_theta'] is None:  # transformers 4 has it elsewhere
    forms[1]['rope_theta'] = forms[0]['rope_theta']
  if len(forms) == 2 and forms[0] != forms[1]:
    raise UserError(
        f'{path}: rope_parameters = {given[0]!r} and rope_scaling = {given[1]!r} differ; remove '
        'the one that does not hold'
    )
  rope = forms[0] if forms else {'rope_theta': raw.get('rope_theta')}
  theta = _number(path, rope, 'rope_theta', 10_000.0, float)
  kind = rope.get('rope_type', 'default')
  if kind == 'default':
    return theta, None
  if kind != 'llama3':
    raise UserError(
        f"{path}: rope type {kind!r} is not supported; allowed: 'default', 'llama3'; "
        'choose another model or remove the scaling'
    )
  names = ('factor', 'low_freq_factor', 'high_freq_factor')
  original = _number(path, rope, 'original_max_position_embeddings')
  return theta, (*(_number(path, rope, name, None, float) for name in names), original)


def _number(path, raw, name, default=None, kind=int):
  """Returns the positive number `raw[name]`, or the default. UserError: neither."""
  value = raw.get(name)
  value = default if value is None else value
  if value is None:
    raise UserError(f'{path}: {name} is missing; download config.json again')
  if isinstance(value, bool) or not isinstance(value, (int, kind)) or not (0 < value < 2**53):
    raise UserError(f'{path}: {name} = {value!r} is not a positive number; download it again')
  return kind(value)


def _check_choice(name, value, allowed):
  if value not in allowed:
    raise UserError(f'{name} {value!r} is unknown; allowed: {", ".join(allowed)}; choose one')
