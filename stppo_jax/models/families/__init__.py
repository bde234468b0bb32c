"""Families of models: what their config.json means, as flags of ModelConfig, and the way back.

A file is imported when a folder names one of its families. The values are those of the classes in
transformers.

family.py    what all families share; windowed.py is for those with windows in some layers
qwen.py      Qwen2, Qwen2.5 and Qwen3
qwen35.py    Qwen3.5
experts.py   mixtures of experts of Qwen3
llama.py     Llama and Mistral
gemma.py     Gemma 2 and 3
olmo.py      OLMo 2 and 3
smollm.py    SmolLM3
"""

import importlib

from stppo_jax.models.families.family import Family

# model_type of config.json -> the file of its family.
FILES = {
    'qwen2': 'qwen',
    'qwen3': 'qwen',
    'qwen3_moe': 'experts',
    'llama': 'llama',
    'mistral': 'llama',
    'smollm3': 'smollm',
    'olmo2': 'olmo',
    'olmo3': 'olmo',
    'gemma2': 'gemma',
    'gemma3_text': 'gemma',
    'qwen3_5_text': 'qwen35',
    'qwen3_5_moe_text': 'qwen35',
}
# Checkpoints with parts for images: model_type -> that of their text_config.
TEXT_PARTS = {'gemma3': 'gemma3_text', 'qwen3_5': 'qwen3_5_text', 'qwen3_5_moe': 'qwen3_5_moe_text'}


def find(model_type: str) -> Family:
  """Returns the family of a model_type, a key of FILES."""
  module = importlib.import_module(f'stppo_jax.models.families.{FILES[model_type]}')
  return module.FAMILIES[model_type]
