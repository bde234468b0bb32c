"""Token reversal: our PPO compared with the published numbers of arXiv 2604.06159.

  python -m research.token_reversal dense --vocabulary=8 --seeds=20     # Table 1
  python -m research.token_reversal sparse --length=7 --seeds=5         # reward for an exact match
  python -m research.token_reversal groups --seeds=5                    # groups without a spread

The policy reads H tokens of a vocabulary of V and writes them in reverse. `dense` rewards each
right token with 1, `sparse` and `groups` reward the whole answer with 1 if all of its tokens are
right. The ratio, the surrogate, the aggregation, the group advantages and the KL of tokens are the
package's functions. Each seed adds a line to research/results/token_reversal.jsonl, and seeds that
have one are not run again. `--summary` prints the table of all lines.

The model is that of the authors: a pre-norm transformer of Flax linen with linen's default
initialisation, learned positions of standard deviation .02, two layers of width 64 with two heads.
The kernels of query, key and value have three axes, so optax's Muon trains them with Adam at the
same rate, as it trains all vectors.

Table 1 reports the first update at which the mean error of 20 seeds is below 1%. This is not the
mean of the updates at which each seed falls below 1%. `--summary` prints both.

`groups` has the ratio and the KL of whole answers, as the paper. It asks 32 questions of 6 tokens
and samples 8 answers to each. The paper asks 256 questions of 8 tokens and samples 32 answers to
each, which takes more than 32 times as long.

Choice: the error of an update is that of its sampled answers.
Choice: without groups, an advantage is the reward minus the mean over the batch (of its position,
with a reward per token).
"""

import argparse
import dataclasses
import functools
import json
import pathlib
import time
from typing import NamedTuple

from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib

from stppo_jax import requirements
from stppo_jax.algorithms import advantages as advantages_lib
from stppo_jax.algorithms import losses
from stppo_jax.algorithms import segments

RESULTS = pathlib.Path(__file__).parent / 'results' / 'token_reversal.jsonl'
EPOCHS = 4  # full-batch steps per update
CLIP = 0.2
LEARNING_RATE = 1e-3
LAYERS = 2
WIDTH = 64
ERROR_LEVEL = 0.01
LAST_UPDATES = 100  # the final error is the mean over these


@dataclasses.dataclass(frozen=True)
class Setting:
  """One row of a table of the paper.

  Attributes:
    experiment: 'dense', 'sparse' or 'groups'.
    vocabulary: V.
    length: H.
    answers: sampled answers per update.
    group_size: answers per question. 1: no groups.
    kl_coef: the coefficient of k3 to the policy that sampled.
    mask_equal: whether the loss leaves out the groups whose scores are equal.
    heads: attention heads.
    updates: updates of a run.
  """

  experiment: str
  vocabulary: int = 2
  length: int = 10
  answers: int = 100
  group_size: int = 1
  kl_coef: float = 0.0
  mask_equal: bool = False
  heads: int = 2
  updates: int = 2000


class Batch(NamedTuple):
  """Questions with their sampled answers: B rows of 2 H tokens."""

  tokens: jax.Array  # [B,2H]
  old_logp: jax.Array  # [B,H] of the answers
  advantages: jax.Array  # [B,H]
  mask: jax.Array  # [B,H]: 1 where the loss counts a token


class Policy(nn.Module):
  """The transformer of the authors.

  With `decode`, tokens [B,1] at position `start` continue the rows in the collection `cache`.
  """

  vocabulary: int
  heads: int
  max_length: int
  decode: bool = False

  @nn.compact
  def __call__(self, tokens: jax.Array, start: jax.typing.ArrayLike = 0) -> jax.Array:
    """Returns the logits [B,T,V] of the tokens that follow tokens [B,T]."""
    positions = self.param('positions', nn.initializers.normal(0.02), (self.max_length, WIDTH))
    positions = jax.lax.dynamic_slice_in_dim(positions, start, tokens.shape[1])
    x = nn.Embed(self.vocabulary, WIDTH)(tokens) + positions
    mask = None if self.decode else nn.make_causal_mask(tokens)
    for _ in range(LAYERS):
      normed = nn.LayerNorm()(x)
      attention = nn.MultiHeadDotProductAttention(num_heads=self.heads, decode=self.decode)
      x = x + attention(normed, mask=mask)
      normed = nn.LayerNorm()(x)
      hidden = nn.gelu(nn.Dense(4 * WIDTH)(normed))
      x = x + nn.Dense(WIDTH)(hidden)
    return nn.Dense(self.vocabulary)(nn.LayerNorm()(x))


def make_policy(setting: Setting, decode: bool = False) -> Policy:
  """Returns the policy of a setting."""
  return Policy(setting.vocabulary, setting.heads, 2 * setting.length, decode)


def answer_logp(params: dict, tokens: jax.Array, setting: Setting) -> jax.Array:
  """Returns the log-probs [B,H] of the answer's tokens. `tokens` are [B,2H]."""
  logits = make_policy(setting).apply(params, tokens)
  logp = jax.nn.log_softmax(logits[:, setting.length - 1 : -1])  # position t predicts token t + 1
  answers = tokens[:, setting.length :, None]
  return jnp.take_along_axis(logp, answers, axis=-1)[..., 0]


def sample(params: dict, key: jax.Array, setting: Setting) -> tuple[Batch, jax.Array]:
  """Draws questions and answers; returns the batch and its error (of tokens, or of answers)."""
  question_key, answer_key = jax.random.split(key)
  num_questions = setting.answers // setting.group_size
  shape = (num_questions, setting.length)
  questions = jax.random.randint(question_key, shape, 0, setting.vocabulary)
  questions = jnp.repeat(questions, setting.group_size, axis=0)
  tokens = jnp.concatenate([questions, jnp.zeros_like(questions)], axis=1)

  policy = make_policy(setting, decode=True)

  def write_next(t, state):
    tokens, cache = state
    token = jax.lax.dynamic_slice_in_dim(tokens, t, 1, axis=1)
    logits, changed = policy.apply(params | {'cache': cache}, token, t, mutable='cache')
    written = t + 1 - setting.length  # place in the answer, < 0 in the question
    drawn = jax.random.categorical(jax.random.fold_in(answer_key, written), logits[:, 0])
    token = jnp.where(written >= 0, drawn, tokens[:, t + 1])
    return tokens.at[:, t + 1].set(token), changed['cache']

  cache = policy.init(answer_key, tokens)['cache']
  tokens, _ = jax.lax.fori_loop(0, 2 * setting.length - 1, write_next, (tokens, cache))
  is_right = tokens[:, setting.length :] == questions[:, ::-1]
  advantages, mask, rewards = score(is_right, setting)
  old_logp = answer_logp(params, tokens, setting)
  return Batch(tokens, old_logp, advantages, mask), 1 - rewards.mean()


def score(is_right: jax.Array, setting: Setting) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Returns advantages [B,H], the mask [B,H] and rewards ([B,H] if dense, else [B])."""
  mask = jnp.ones(is_right.shape)
  if setting.experiment == 'dense':
    rewards = is_right.astype(jnp.float32)
    return rewards - rewards.mean(axis=0), mask, rewards
  rewards = is_right.all(axis=1).astype(jnp.float32)
  if setting.group_size == 1:
    advantages = rewards - rewards.mean()
    return advantages[:, None] * mask, mask, rewards
  group_ids = jnp.arange(setting.answers) // setting.group_size
  advantages = advantages_lib.group_zscore(rewards, group_ids)
  if setting.mask_equal:
    has_spread = advantages != 0
    mask = mask * has_spread[:, None]
  return advantages[:, None] * mask, mask, rewards


def loss(params: dict, batch: Batch, setting: Setting) -> jax.Array:
  """Returns PPO's clipped loss with the KL to the policy that sampled."""
  logp = answer_logp(params, batch.tokens, setting)
  mask = jnp.ones_like(batch.mask)
  has_groups = setting.group_size > 1
  level = 'sequence' if has_groups else 'token'
  ids, number = segments.segment_ids(level, mask, mask.astype(int))
  ratio = segments.importance_ratio(logp, batch.old_logp, mask, ids, number, product=has_groups)
  surrogate, _ = losses.clipped_surrogate(ratio, batch.advantages, CLIP, CLIP)
  kl = losses.kl(logp, batch.old_logp, 'k3')
  if has_groups:  # the k3 of whole answers is not bounded by losses.kl
    log_ratio = segments.bounded((logp - batch.old_logp).sum(axis=1, keepdims=True))
    kl = jnp.expm1(-log_ratio) + log_ratio
  objective = batch.mask * (surrogate - setting.kl_coef * kl)
  mode = 'seq-mean-token-mean' if has_groups else 'seq-mean-token-sum'
  return -losses.aggregate(objective, mask, mode)


@functools.partial(jax.jit, static_argnames='setting')
def train(seed: jax.Array, setting: Setting) -> jax.Array:
  """Returns the error of each update's sampled answers [updates]."""
  optimizer = optax.contrib.muon(LEARNING_RATE)
  init_key, run_key = jax.random.split(jax.random.key(seed))
  tokens = jnp.zeros((1, 2 * setting.length), int)
  params = make_policy(setting).init(init_key, tokens)

  def step(state, batch):
    params, opt_state = state
    gradient = jax.grad(loss)(params, batch, setting)
    changes, opt_state = optimizer.update(gradient, opt_state, params)
    return optax.apply_updates(params, changes), opt_state

  def update(state, n):
    batch, error = sample(state[0], jax.random.fold_in(run_key, n), setting)
    state = jax.lax.fori_loop(0, EPOCHS, lambda _, s: step(s, batch), state)
    return state, error

  start = params, optimizer.init(params)
  return jax.lax.scan(update, start, jnp.arange(setting.updates))[1]


def first_below(errors: np.ndarray) -> int | None:
  """Returns the first update whose error is below 1%; None if there is none."""
  below = np.flatnonzero(errors < ERROR_LEVEL)
  return int(below[0]) if len(below) else None


def bootstrap(curves: np.ndarray, measure, draws: int = 2000) -> tuple[float, float]:
  """Returns the 95% interval of measure(curves [S,U]) over seeds drawn with replacement."""
  rng = np.random.default_rng(0)
  num_seeds = len(curves)
  values = []
  for _ in range(draws):
    seeds = rng.integers(num_seeds, size=num_seeds)
    value = measure(curves[seeds])
    values.append(np.inf if value is None else value)
  return tuple(float(value) for value in np.quantile(values, (0.025, 0.975), method='nearest'))


def read_results(path: pathlib.Path = RESULTS) -> dict[Setting, dict[int, np.ndarray]]:
  """Returns {setting: {seed: errors}} of the lines in `path`."""
  results = {}
  lines = path.read_text(encoding='utf-8').splitlines() if path.exists() else []
  for line in lines:
    record = json.loads(line)
    setting = Setting(**record['setting'])
    # Answers are counted, so whole numbers lose nothing.
    errors = np.array(record['wrong']) / record['counted']
    results.setdefault(setting, {})[record['seed']] = errors
  return results


def run(setting: Setting, seed: int, path: pathlib.Path = RESULTS) -> None:
  """Trains one seed, and adds its line to `path`."""
  started = time.perf_counter()
  errors = np.asarray(train(jnp.uint32(seed), setting))
  versions = requirements.versions()
  counted = setting.answers * (setting.length if setting.experiment == 'dense' else 1)
  record = {
      'setting': dataclasses.asdict(setting),
      'seed': seed,
      'seconds': round(time.perf_counter() - started, 1),
      'versions': {
          'stppo_jax': requirements.own_version(),
          'jax': versions['jax'],
          'flax': versions['flax'],
          'optax': versions['optax'],
      },
      'counted': counted,
      'wrong': [round(float(error) * counted) for error in errors],
  }
  path.parent.mkdir(parents=True, exist_ok=True)
  with open(path, 'a', encoding='utf-8') as file:
    file.write(json.dumps(record, separators=(',', ':')) + '\n')


def summary(setting: Setting, runs: dict[int, np.ndarray]) -> str:
  """Returns the lines of a setting: what the paper measures, with bootstrap intervals."""
  curves = np.stack([runs[seed] for seed in sorted(runs)])
  name = (
      f'{setting.experiment}: V {setting.vocabulary}, H {setting.length}, heads {setting.heads}, '
      f'group masks {setting.mask_equal}, {len(curves)} seeds'
  )
  if setting.experiment == 'dense':
    mean_curve = lambda curves: first_below(curves.mean(axis=0))
    low, high = bootstrap(curves, mean_curve)
    firsts = [first_below(curve) for curve in curves]
    of_seeds = 'not all' if None in firsts else f'{np.mean(firsts):.1f}'
    return (
        f'{name}\n  mean of seeds below 1% at {mean_curve(curves)} [{low:g}, {high:g}]; '
        f'each seed at {firsts}, mean {of_seeds}'
    )
  last = lambda curves: float(curves[:, -LAST_UPDATES:].mean())
  low, high = bootstrap(curves, last)
  each = ' '.join(f'{curve[-LAST_UPDATES:].mean():.3f}' for curve in curves)
  return f'{name}\n  last error {last(curves):.3f} [{low:.3f}, {high:.3f}]; each seed {each}'


def main() -> None:
  """Runs the seeds that have no line yet, or prints the table."""
  parser = argparse.ArgumentParser(description=__doc__.partition('\n')[0])
  parser.add_argument('experiment', nargs='?', choices=('dense', 'sparse', 'groups'))
  parser.add_argument('--vocabulary', type=int, default=0)
  parser.add_argument('--length', type=int, default=0)
  parser.add_argument('--heads', type=int, default=2)
  parser.add_argument('--updates', type=int, default=0)
  parser.add_argument('--mask_equal', action='store_true')
  parser.add_argument('--seeds', type=int, default=5)
  parser.add_argument('--summary', action='store_true')
  args = parser.parse_args()
  if args.experiment:
    setting = setting_of(args)
    done = read_results().get(setting, {})
    for seed in range(args.seeds):
      if seed not in done:
        run(setting, seed)
        print(f'{setting}: seed {seed} done', flush=True)
  if args.summary:
    for setting, runs in read_results().items():
      print(summary(setting, runs))


def setting_of(args: argparse.Namespace) -> Setting:
  """Returns the setting that the flags name. A flag of 0 takes the paper's value."""
  setting = Setting(args.experiment, heads=args.heads)
  if args.experiment == 'dense':
    vocabulary = args.vocabulary or 8
    updates = args.updates or (1200 if vocabulary == 2 else 400)
    return dataclasses.replace(
        setting, vocabulary=vocabulary, length=args.length or 10, updates=updates
    )
  setting = dataclasses.replace(
      setting,
      vocabulary=args.vocabulary or 2,
      length=args.length or (8 if args.experiment == 'sparse' else 6),
      updates=args.updates or 2000,
  )
  if args.experiment == 'sparse':
    return setting
  return dataclasses.replace(
      setting, answers=256, group_size=8, kl_coef=0.04, mask_equal=args.mask_equal
  )


if __name__ == '__main__':
  main()
