"""ST-PPO in one file: play turns, compare policies turn by turn, measure what the clip removes.

  python -m examples.minimal

The file is the algorithm of Li et al. (arXiv 2511.20718) from top to bottom, with the functions of
`stppo_jax.algorithms` that the trainer uses. It runs in under a minute on a CPU. The trainer adds
what a large model needs: a KV cache, sharding, packing, micro-batches, checkpoints.

The task is a small conversation. In each of three turns the environment shows a digit x_k, and the
agent writes two: x_k, then the digit of the turn before, x_{k-1}. Each right digit earns 1/6.

  x_1 | a a | x_2 | a a | x_3 | a a          x: the environment's tokens, a: the agent's

Shapes: B episodes, T = 9 tokens of an episode, V = 4 digits.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax

from stppo_jax.algorithms import advantages as advantages_lib
from stppo_jax.algorithms import correction
from stppo_jax.algorithms import losses
from stppo_jax.algorithms import segments
from stppo_jax.models import decoder
from stppo_jax.types import TurnBatch

NUM_DIGITS = 4
NUM_TURNS = 3
TURN_TOKENS = 2

UPDATES = 60
EPISODES = 128  # per update
MINI_BATCH = 32  # episodes per optimizer step
EPOCHS = 4  # passes over the episodes of an update, so the data become off-policy
CLIP = 0.2
GAMMA = 1.0
LAMBDA = 0.95
MEAN = 'seq-mean-token-mean'  # the paper's mean over episodes of the mean over tokens

POLICY = decoder.ModelConfig(
    vocab_size=NUM_DIGITS,
    d_model=64,
    num_layers=2,
    num_heads=2,
    num_kv_heads=2,
    head_dim=32,
    d_ff=128,
    scan_layers=False,
)
CRITIC = dataclasses.replace(POLICY, head='value')
OPTIMIZER = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(5e-4))

# A turn is one token of the environment, then the tokens of the agent. turn_ids is 0 where the
# environment writes, and k in the agent's k-th turn.
ONE_TURN = [0] + [1] * TURN_TOKENS
ACTION_MASK = np.array(ONE_TURN * NUM_TURNS, np.float32)
TURN_IDS = np.concatenate([k * np.array(ONE_TURN) for k in range(1, NUM_TURNS + 1)])


# --- The rollout: the agent and the environment take turns. ---------------------------------------


def play(policy_params, rng, key):
  """Plays a batch of episodes; returns tokens, the sampler's log-probs and rewards, all [B,T]."""
  digits = rng.integers(NUM_DIGITS, size=(EPISODES, NUM_TURNS))
  tokens = np.zeros((EPISODES, len(ACTION_MASK)), np.int32)
  logp = np.zeros(tokens.shape, np.float32)
  rewards = np.zeros(tokens.shape, np.float32)

  for k in range(NUM_TURNS):
    start = k * len(ONE_TURN)
    tokens[:, start] = digits[:, k]

    for t in range(start + 1, start + 1 + TURN_TOKENS):
      key, token_key = jax.random.split(key)
      tokens[:, t], logp[:, t] = sample_token(policy_params, tokens, t, token_key)

    before = digits[:, k - 1] if k else np.zeros(EPISODES)
    rewards[:, start + 1] = tokens[:, start + 1] == digits[:, k]
    rewards[:, start + 2] = tokens[:, start + 2] == before

  return tokens, logp, rewards / (NUM_TURNS * TURN_TOKENS)


@jax.jit
def sample_token(policy_params, tokens, t, key):
  """Samples token t of each episode; returns the token and its log-prob, both [B]."""
  logits, _ = decoder.forward(policy_params, POLICY, tokens, positions=None)
  all_logp = jax.nn.log_softmax(logits[:, t - 1])
  token = jax.random.categorical(key, all_logp)
  return token, jnp.take_along_axis(all_logp, token[:, None], axis=1)[:, 0]


# --- From episodes to training data: values and advantages. ---------------------------------------


@jax.jit
def annotate(critic_params, tokens, logp, rewards):
  """Returns the TurnBatch of an update: GAE over the agent's tokens, advantages whitened."""
  action_mask = jnp.broadcast_to(ACTION_MASK, tokens.shape)
  turn_ids = jnp.broadcast_to(TURN_IDS, tokens.shape)

  values = state_values(critic_params, tokens) * action_mask
  advantages, returns = advantages_lib.token_gae(rewards, values, action_mask, GAMMA, LAMBDA)
  advantages = advantages_lib.whiten_tokens(advantages, action_mask)

  return TurnBatch(
      tokens=tokens,
      action_mask=action_mask,
      turn_ids=turn_ids,
      rewards=rewards,
      old_logp=logp,
      ref_logp=logp,
      old_values=values,
      advantages=advantages,
      returns=returns,
      group_ids=jnp.arange(len(tokens)),
  )


# --- The objective and the clipping bias. ---------------------------------------------------------


def token_logp(policy_params, tokens):
  """Returns the log-prob of each token under the policy [B,T]."""
  x, _ = decoder.trunk(policy_params, POLICY, tokens)
  logp, _ = decoder.token_logp(policy_params, POLICY, x, tokens)
  return logp


def state_values(critic_params, tokens):
  """Returns the critic's value of the state before each token [B,T]."""
  x, _ = decoder.trunk(critic_params, CRITIC, tokens)
  return decoder.state_values(critic_params, x)


def clipped_objective(policy_params, batch):
  """Returns J, and (J_c, clipped): the part that the clip removes, and where it does, [B,T].

  J   = mean of min(w A, clip(w) A), and w is the geometric mean of the ratios of a turn's tokens
  J_c = mean of w A over the clipped tokens. Its gradient is the clipping bias C (Lemma 4.2).
  """
  logp = token_logp(policy_params, batch.tokens)
  ids, num_segments = segments.segment_ids('turn', batch.action_mask, batch.turn_ids)
  ratio = segments.importance_ratio(logp, batch.old_logp, batch.action_mask, ids, num_segments)

  surrogate, clipped = losses.clipped_surrogate(ratio, batch.advantages, CLIP, CLIP)
  removed = jnp.where(clipped, ratio * batch.advantages, 0)

  objective = losses.aggregate(surrogate, batch.action_mask, MEAN)
  removed_objective = losses.aggregate(removed, batch.action_mask, MEAN)
  return objective, (removed_objective, clipped)


def policy_gradient(policy_params, batch):
  """Returns ST-PPO's gradient, g divided by the norm of C, and what was measured on the way."""
  ascent, (_, clipped) = jax.grad(clipped_objective, has_aux=True)(policy_params, batch)
  bias = jax.grad(lambda params: clipped_objective(params, batch)[1][0])(policy_params)

  g_norm = correction.norm(ascent)
  c_norm = correction.norm(bias)
  divisor = correction.divisor('paper', g_norm, c_norm, clipped.any())
  descent = jax.tree.map(lambda g: -g / divisor, ascent)

  clip_fraction = clipped.sum() / batch.action_mask.sum()
  return descent, {'clip': clip_fraction, '|g|': g_norm, '|C|': c_norm, 'divisor': divisor}


def value_gradient(critic_params, batch):
  """Returns the gradient of the critic's squared error."""

  def loss(params):
    values = state_values(params, batch.tokens)
    error = losses.value_loss(values, batch.old_values, batch.returns)
    return losses.aggregate(error, batch.action_mask, MEAN)

  return jax.grad(loss)(critic_params)


# --- The update: a few Adam steps on each batch. --------------------------------------------------


@functools.partial(jax.jit, donate_argnums=0)
def train_step(state, batch):
  """Takes one Adam step of the policy and one of the critic."""
  gradient, metrics = policy_gradient(state['policy'], batch)
  changes, policy_opt = OPTIMIZER.update(gradient, state['policy_opt'])
  policy = optax.apply_updates(state['policy'], changes)

  gradient = value_gradient(state['critic'], batch)
  changes, critic_opt = OPTIMIZER.update(gradient, state['critic_opt'])
  critic = optax.apply_updates(state['critic'], changes)

  state = {'policy': policy, 'policy_opt': policy_opt, 'critic': critic, 'critic_opt': critic_opt}
  return state, metrics


def init_state(key):
  """Returns a new policy, a new critic and their optimizers' states."""
  policy_key, critic_key = jax.random.split(key)
  policy = decoder.init(policy_key, POLICY)
  critic = decoder.init(critic_key, CRITIC)
  return {
      'policy': policy,
      'policy_opt': OPTIMIZER.init(policy),
      'critic': critic,
      'critic_opt': OPTIMIZER.init(critic),
  }


def train(updates=UPDATES, seed=0, report=print):
  """Trains from scratch; returns the mean reward of each update's episodes."""
  rng = np.random.default_rng(seed)
  key = jax.random.key(seed)
  state = init_state(key)
  mean_rewards = []

  for n in range(updates):
    tokens, logp, rewards = play(state['policy'], rng, jax.random.fold_in(key, n))
    batch = annotate(state['critic'], tokens, logp, rewards)

    for _ in range(EPOCHS):
      for rows in rng.permutation(EPISODES).reshape(-1, MINI_BATCH):
        mini_batch = jax.tree.map(lambda x: x[rows], batch)
        state, metrics = train_step(state, mini_batch)

    mean_rewards.append(float(rewards.sum(axis=1).mean()))
    if n % 5 == 0 or n == updates - 1:
      numbers = '  '.join(f'{name} {float(value):.3f}' for name, value in metrics.items())
      report(f'update {n:3d}  reward {mean_rewards[-1]:.3f}  {numbers}')

  return mean_rewards


if __name__ == '__main__':
  train()
