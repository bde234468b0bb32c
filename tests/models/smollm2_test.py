"""A real model: SmolLM2-135M-Instruct from its Hugging Face folder.

Opt-in, because it needs the weights and a few minutes of one core. Nothing is downloaded:

  STPPO_SMOLLM2=FOLDER python -m pytest tests/models/smollm2_test.py

STPPO_PASSAGES may name a file of JSON lines with a `text` each, on which perplexity is measured.
"""

import importlib.util
import json
import os

from absl.testing import absltest
from absl.testing import parameterized
import jax
import numpy as np

from stppo_jax.models import convert
from stppo_jax.models import decoder
from stppo_jax.models import presets
from stppo_jax.text import tokenizer as chat
from tests.models import convert_test

FOLDER = os.environ.get('STPPO_SMOLLM2', '')
PASSAGES = os.environ.get('STPPO_PASSAGES', '')
HAS_TORCH = importlib.util.find_spec('torch') is not None

QUESTIONS = ('What is the capital of France?', 'Tell me about the moon in two sentences.')


@absltest.skipUnless(FOLDER, 'set STPPO_SMOLLM2 to the folder of the model')
class SmolLm2Test(parameterized.TestCase):

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    cls.folder = FOLDER
    cls.tokenizer = chat.load_tokenizer(cls.folder)
    cls.config, cls.params = convert.load_hf(cls.folder)

  def test_shape(self):
    self.assertEqual(self.config, presets.PRESETS['smollm2-135m'])
    chat.check_matches(self.tokenizer, self.config.vocab_size)
    self.assertEqual(self.tokenizer.eos_ids, (2,))

  @parameterized.parameters(  # ids of the tokenizer that its makers published
      (
          '1234567890 + 3.14159',
          [33, 34, 35, 36, 37, 38, 39, 40, 41, 32, 1232, 216, 35, 30, 33, 36, 33, 37, 41],
      ),
      ("don't can't I'm", [12420, 982, 416, 982, 339, 5248]),
      ('  multiple   spaces  and\ttabs\n', [216, 2701, 256, 5600, 216, 284, 197, 100, 7366, 198]),
      ("```python\nprint('hello')\n```", [3725, 5367, 198, 3272, 1305, 28120, 1465, 198, 3725]),
      (
          '<|im_start|>user\nこんにちは、調子はどう?<|im_end|>\n',
          [
              1,
              4093,
              198,
              7365,
              237,
              10391,
              237,
              41152,
              7365,
              111,
              7365,
              124,
              29917,
              179,
              120,
              140,
              47222,
              7365,
              124,
              7365,
              119,
              7365,
              224,
              47,
              2,
              198,
          ],
      ),
  )
  def test_ids(self, text, ids):
    self.assertEqual(self.tokenizer.encode(text, control=True), ids)
    self.assertEqual(self.tokenizer.decode(ids), text)

  def test_it_knows_the_capital_of_france(self):
    self.assertEqual(self.answer(QUESTIONS[0]), 'The capital of France is Paris.')

  @parameterized.parameters(*QUESTIONS)
  @absltest.skipUnless(HAS_TORCH, 'torch is not installed')
  def test_greedy_text_is_that_of_transformers(self, question):
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(self.folder, dtype=torch.float32)
    prompt = chat.encode_prompt(self.tokenizer, question)
    library = transformers.AutoTokenizer.from_pretrained(self.folder)
    messages = [{'role': 'user', 'content': question}]
    text = library.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    self.assertEqual(library(text, add_special_tokens=False).input_ids, prompt)
    with torch.no_grad():
      ids = model.eval().generate(torch.tensor([prompt]), max_new_tokens=64, do_sample=False)
    theirs = library.decode(ids[0, len(prompt) :], skip_special_tokens=True)
    self.assertEqual(self.answer(question), theirs)

  def answer(self, question):
    prompt = np.array([chat.encode_prompt(self.tokenizer, question)], np.int32)
    params = decoder.unstack_layers(self.params, self.config)
    ids = convert_test.greedy(params, self.config, prompt, 64)[0].tolist()
    end = ids.index(self.tokenizer.eos_ids[0]) if self.tokenizer.eos_ids[0] in ids else None
    return self.tokenizer.decode(ids[:end])

  @absltest.skipUnless(PASSAGES, 'set STPPO_PASSAGES to a file of JSON lines with a text each')
  def test_perplexity(self):
    """Of the first 128 tokens of the first 16 passages of 100 words or more."""
    with open(PASSAGES, encoding='utf-8') as file:
      texts = [json.loads(line)['text'] for line in file]
    rows = [self.tokenizer.encode(text)[:128] for text in texts if len(text.split()) >= 100]
    tokens = np.array([row for row in rows if len(row) == 128][:16], np.int32)

    @jax.jit
    def logp(params, tokens):
      x, _ = decoder.trunk(params, self.config, tokens, None)
      return decoder.token_logp(params, self.config, x, tokens, chunk=64)[0]

    mean = np.mean([np.asarray(logp(self.params, row[None]))[0, 1:] for row in tokens])
    print(f'perplexity {np.exp(-mean):.2f} on {tokens.size} tokens')
    self.assertBetween(np.exp(-mean), 15, 30)


if __name__ == '__main__':
  absltest.main()
