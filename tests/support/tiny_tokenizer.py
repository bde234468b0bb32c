"""Trains a byte-level BPE tokenizer of a few hundred tokens for tests."""

import functools
import json
import os
import tempfile

import tokenizers

from stppo_jax.text import tokenizer as tokenizer_lib

END = '<|im_end|>'
TEXTS = (
    '<think> I need the capital </think>\n<search> capital of France </search>',
    '\n\n<information>Doc 1(Title: Paris) Paris is the capital of France.\n</information>\n\n',
    '<answer> Paris </answer>',
    '<search>a</search>\n<answer>b</answer>\n',
    'Question: which town is it, and where does the river go?\n',
) * 4


def write(folder: str, vocab_size: int = 340, chat_template: str | None = None) -> str:
  """Writes tokenizer.json and tokenizer_config.json into `folder`; returns the folder."""
  library = tokenizers.Tokenizer(tokenizers.models.BPE())
  library.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
  library.decoder = tokenizers.decoders.ByteLevel()
  trainer = tokenizers.trainers.BpeTrainer(
      vocab_size=vocab_size,
      special_tokens=['<|pad|>', END],
      initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
      show_progress=False,
  )
  library.train_from_iterator(TEXTS, trainer)
  library.save(os.path.join(folder, 'tokenizer.json'))
  settings = {'eos_token': END, 'pad_token': {'__type': 'AddedToken', 'content': '<|pad|>'}}
  if chat_template:
    settings['chat_template'] = chat_template
  with open(os.path.join(folder, 'tokenizer_config.json'), 'w', encoding='utf-8') as file:
    json.dump(settings, file)
  return folder


@functools.cache
def load(chat_template: str | None = None) -> tokenizer_lib.Tokenizer:
  """Returns the tokenizer that `write` writes."""
  with tempfile.TemporaryDirectory() as folder:
    return tokenizer_lib.load_tokenizer(write(folder, chat_template=chat_template))
