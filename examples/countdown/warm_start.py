"""Makes the small model of this experiment: bytes as tokens, imperfect demonstrations.

  python -m examples.countdown.warm_start       # writes examples/countdown/model in 2 minutes

Half of the demonstrations add all numbers, whatever the target. So the policy has something to
learn.
"""

import json
import pathlib

from absl import app
from absl import flags
import jax
import numpy as np
import tokenizers

from examples.countdown import env
from stppo_jax.models import convert
from stppo_jax.models import decoder
from stppo_jax.text import tokenizer as chat
from stppo_jax.training import supervised

FOLDER = pathlib.Path(__file__).parent / 'model'
_STEPS = flags.DEFINE_integer('steps', 1500, 'optimizer steps')
HABITS = {'right': 0.35, 'adds': 0.5, 'guesses': 0.1, 'forgets': 0.05}


def main(unused_argv):
  FOLDER.mkdir(exist_ok=True)
  write_tokenizer()
  tokenizer = chat.load_tokenizer(str(FOLDER))
  config = decoder.ModelConfig(
      vocab_size=tokenizer.vocab_size,
      d_model=64,
      num_layers=2,
      num_heads=4,
      num_kv_heads=2,
      head_dim=16,
      d_ff=192,
      tie_embeddings=True,
      family='llama',
      scan_layers=False,
  )
  rng = np.random.default_rng(0)
  tasks = [env.make_task('demonstration', seed) for seed in range(20_000)]
  pool = [
      supervised.encode(tokenizer, f'{t.question}:', [(demonstrate(t, rng), '')], 0) for t in tasks
  ]
  params = supervised.train(
      decoder.init(jax.random.key(0), config),
      config,
      pool,
      rows=128,
      length_buckets=(24,),
      steps=_STEPS.value,
      optimizer=supervised.make_optimizer(3e-3, _STEPS.value),
      seed=0,
  )
  convert.save_hf(str(FOLDER), config, jax.device_get(params))


def demonstrate(task, rng) -> str:
  """Returns the text of an agent with one of the HABITS."""
  numbers = env.numbers(task)
  target = int(task.question.partition('=')[2])
  sums = [f'{numbers[0]}{a}{numbers[1]}{b}{numbers[2]}' for a in '+-' for b in '+-']
  right = [text for text in sums if env.value(text, numbers) == target]
  habit = rng.choice(list(HABITS), p=list(HABITS.values()))
  if habit == 'right':
    return f'{rng.choice(right)};'
  if habit == 'adds':
    return f'{sums[0]};'
  if habit == 'guesses':
    return f'{rng.choice(sums)};'
  return f'{numbers[0]}+{numbers[1]};'


def write_tokenizer():
  """Writes a tokenizer of 256 bytes and an end."""
  library = tokenizers.Tokenizer(tokenizers.models.BPE())
  library.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
  library.decoder = tokenizers.decoders.ByteLevel()
  trainer = tokenizers.trainers.BpeTrainer(
      vocab_size=257,
      special_tokens=['<|end|>'],
      initial_alphabet=sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()),
      show_progress=False,
  )
  library.train_from_iterator([''], trainer)
  library.save(str(FOLDER / 'tokenizer.json'))
  settings = {'eos_token': '<|end|>', 'pad_token': '<|end|>'}
  (FOLDER / 'tokenizer_config.json').write_text(json.dumps(settings))


if __name__ == '__main__':
  app.run(main)
