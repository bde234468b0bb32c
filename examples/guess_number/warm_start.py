"""Makes the small model that this experiment starts from: bytes as tokens and a chat template.

  python -m examples.guess_number.warm_start    # writes examples/guess_number/model in a minute

The demonstrations guess at random. Half of them ignore the answers, and none halves the range.
"""

import json
import pathlib

from absl import app
from absl import flags
import jax
import numpy as np
import tokenizers

from examples.guess_number import env
from stppo_jax.models import convert
from stppo_jax.models import decoder
from stppo_jax.text import tokenizer as chat
from stppo_jax.training import supervised
from stppo_jax.types import Task

FOLDER = pathlib.Path(__file__).parent / 'model'
TEMPLATE = (
    "{% for m in messages %}{{ '<|user|>' if m.role == 'user' else '<|agent|>' }}{{ m.content }}"
    '<|end|>{% endfor %}{% if add_generation_prompt %}<|agent|>{% endif %}'
)
_STEPS = flags.DEFINE_integer('steps', 600, 'optimizer steps')
CONSISTENT = 0.5  # share of the demonstrations that use the answers
MAX_TURNS = 5


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
  pool = [demonstrate(tokenizer, rng) for _ in range(10_000)]
  params = supervised.train(
      decoder.init(jax.random.key(0), config),
      config,
      pool,
      rows=32,
      length_buckets=(64,),
      steps=_STEPS.value,
      optimizer=supervised.make_optimizer(3e-3, _STEPS.value),
      seed=0,
  )
  convert.save_hf(str(FOLDER), config, jax.device_get(params))


def demonstrate(tokenizer, rng) -> supervised.Demonstration:
  """Plays the environment, well or badly, and returns the tokens with the weights of the loss."""
  framing = chat.make_framing(tokenizer, env.GuessNumber.frame, limit=32)
  game = env.GuessNumber(Task('', ''), MAX_TURNS)
  ids = chat.encode_prompt(tokenizer, game.reset(seed=int(rng.integers(2**31)))[0])
  weights = [0.0] * len(ids)
  low = 1
  high = 9
  is_over = False
  uses_answers = rng.random() < CONSISTENT
  while not is_over:
    guess = int(rng.integers(low, high + 1) if uses_answers else rng.integers(1, 10))
    turn = [*tokenizer.encode(str(guess)), tokenizer.eos_ids[0]]
    observation, _, is_over, _, _ = game.step(str(guess))
    if observation == 'higher':
      low = max(low, guess + 1)
    elif observation == 'lower':
      high = min(high, guess - 1)
    answer = [] if is_over else framing.encode(observation, turn)
    ids += [*turn, *answer]
    weights += [1.0] * len(turn) + [0.0] * len(answer)
  return supervised.Demonstration(np.array(ids, np.int32), np.array(weights, np.float32))


def write_tokenizer():
  """Writes a tokenizer of 256 bytes and three control tokens."""
  library = tokenizers.Tokenizer(tokenizers.models.BPE())
  library.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
  library.decoder = tokenizers.decoders.ByteLevel()
  trainer = tokenizers.trainers.BpeTrainer(
      vocab_size=259,
      special_tokens=['<|end|>', '<|user|>', '<|agent|>'],
      initial_alphabet=sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()),
      show_progress=False,
  )
  library.train_from_iterator([''], trainer)
  library.save(str(FOLDER / 'tokenizer.json'))
  settings = {'eos_token': '<|end|>', 'pad_token': '<|end|>', 'chat_template': TEMPLATE}
  (FOLDER / 'tokenizer_config.json').write_text(json.dumps(settings))


if __name__ == '__main__':
  app.run(main)
