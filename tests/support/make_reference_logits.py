"""Writes support/reference_logits/: small random models of transformers, and their logits.

  python tests/support/make_reference_logits.py        needs torch and transformers; takes seconds

One folder per model: config.json and model.safetensors as transformers saves them, and
reference.safetensors with `tokens` [B,T] and `logits` [B,T,V]. The tests read the folders, so that
they compare with transformers where torch is not installed.
"""

import pathlib

import numpy as np
import safetensors.numpy
import torch
import transformers

FOLDER = pathlib.Path(__file__).parent / 'reference_logits'
SIZES = {
    'vocab_size': 48,
    'hidden_size': 32,
    'intermediate_size': 40,
    'num_hidden_layers': 2,
    'num_attention_heads': 4,
    'num_key_value_heads': 2,
    'head_dim': 8,
    'max_position_embeddings': 256,
}
LLAMA3_ROPE = {
    'rope_type': 'llama3',
    'rope_theta': 500.0,
    'factor': 8.0,
    'low_freq_factor': 1.0,
    'high_freq_factor': 4.0,
    'original_max_position_embeddings': 32,
}
EXPERTS = {
    'moe_intermediate_size': 12,
    'num_experts': 4,
    'num_experts_per_tok': 2,
    'norm_topk_prob': False,
}
# name -> (transformers' prefix, what differs from SIZES).
MODELS = {
    'qwen2': ('Qwen2', {'tie_word_embeddings': False}),
    'qwen2_tied': ('Qwen2', {'tie_word_embeddings': True, 'rms_norm_eps': 1e-5}),
    'qwen3': ('Qwen3', {'tie_word_embeddings': False, 'head_dim': 12}),
    'qwen3_tied': ('Qwen3', {'tie_word_embeddings': True, 'num_key_value_heads': 1}),
    'llama': ('Llama', {'tie_word_embeddings': False, 'rope_parameters': LLAMA3_ROPE}),
    'llama_tied': ('Llama', {'tie_word_embeddings': True, 'num_key_value_heads': 4}),
    'qwen3moe': ('Qwen3Moe', {**EXPERTS, 'tie_word_embeddings': False, 'num_experts': 5}),
    'qwen3moe_tied': ('Qwen3Moe', {**EXPERTS, 'tie_word_embeddings': True, 'norm_topk_prob': True}),
}


def make_model(name, kind='ForCausalLM'):
  """A float32 transformers model with random weights that bfloat16 holds exactly."""
  prefix, changes = MODELS[name]
  torch.manual_seed(sorted(MODELS).index(name))
  config = getattr(transformers, f'{prefix}Config')(**{**SIZES, **changes}, num_labels=1)
  model = getattr(transformers, f'{prefix}{kind}')(config).eval()
  with torch.no_grad():
    for parameter in model.parameters():
      noise = torch.randn_like(parameter) * 0.2 + (parameter.ndim == 1)
      parameter.copy_(noise.bfloat16().float())
  return model


def logits_of(model, tokens):
  """tokens [B,T] -> transformers' logits [B,T,V] (a critic's: [B,T,1])."""
  with torch.no_grad():
    return model(torch.from_numpy(tokens.astype(np.int64))).logits.numpy()


def main():
  tokens = np.random.default_rng(0).integers(0, SIZES['vocab_size'], (2, 40)).astype(np.int32)
  for name in MODELS:
    model = make_model(name)
    reference = {'tokens': tokens, 'logits': logits_of(model, tokens)}
    model.bfloat16().save_pretrained(FOLDER / name)  # half the size, and nothing is lost
    (FOLDER / name / 'generation_config.json').unlink(missing_ok=True)
    safetensors.numpy.save_file(reference, FOLDER / name / 'reference.safetensors')


if __name__ == '__main__':
  main()
