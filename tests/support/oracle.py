"""A second implementation of the paper's mathematics: float64 NumPy, plain loops, no stppo_jax.

Written from the formulas alone and imported by the tests only, so that an error must be made twice
to stay hidden. Gradients are derived by hand for one small policy, a linear softmax over the
vocabulary, logp_t = log softmax(features_t W)[token_t], whose derivative is
features_t (onehot(token_t) - p_t)^T. So g and C of Lemma 4.2 are sums of outer products, and the
finite differences of the loss are a third opinion.

Extra letter of the shape legend: F features of a token's context (rows of W [F,V]).
"""

import dataclasses

import numpy as np


@dataclasses.dataclass
class Batch:
  """A few short episodes with a linear-softmax policy; columns as in `types.TurnBatch`."""

  features: np.ndarray  # [B,T,F]
  tokens: np.ndarray  # [B,T]
  turn_ids: np.ndarray  # [B,T] 0 = not an agent token
  action_mask: np.ndarray  # [B,T]
  rewards: np.ndarray  # [B,T] on agent tokens only
  values: np.ndarray  # [B,T] noise on observation tokens too: nothing may read it
  old_logp: np.ndarray  # [B,T] likewise
  advantages: np.ndarray  # [B,T] likewise
  weights: np.ndarray  # [F,V] the parameters W


# Rows of the test batch: (turn id, number of tokens), 0 = prompt, observation or padding. Several
# turns, one-token turns, a row of one turn, a row of one token, a row without any agent token.
LAYOUT = (
    ((0, 2), (1, 3), (0, 2), (2, 1), (0, 1), (3, 4), (0, 3)),
    ((0, 1), (1, 1), (0, 1), (2, 1), (0, 1), (3, 1), (0, 10)),
    ((0, 3), (1, 8), (0, 5)),
    ((0, 16),),
    ((0, 4), (1, 2), (0, 3), (2, 5), (0, 2)),
    ((0, 9), (1, 1), (0, 6)),
)
NUM_TURNS = 3


def random_batch(seed, layout=LAYOUT, spread=0.5, num_features=5, num_vocab=7):
  """A batch whose ratios leave [0.8, 1.2] often, turn by turn as well as token by token."""
  rng = np.random.default_rng(seed)
  turn_ids = np.array([[k for k, n in row for _ in range(n)] for row in layout])
  shape = turn_ids.shape
  features = rng.normal(size=shape + (num_features,))
  tokens = rng.integers(num_vocab, size=shape)
  weights = rng.normal(size=(num_features, num_vocab))
  logp = token_logp(features, weights, tokens)
  drift = rng.normal(size=(shape[0], NUM_TURNS + 1)) * spread  # one shift per turn ...
  drift = np.take_along_axis(drift, turn_ids, axis=1)
  old_logp = logp - drift - rng.normal(size=shape) * spread  # ... and one per token
  action_mask = (turn_ids > 0).astype(np.float64)
  return Batch(
      features,
      tokens,
      turn_ids,
      action_mask,
      rewards=rng.normal(size=shape) * action_mask,
      values=rng.normal(size=shape),
      old_logp=old_logp,
      advantages=rng.normal(size=shape),
      weights=weights,
  )


def token_logp(features, weights, tokens):
  """log softmax(features_t W)[token_t] -> [B,T]."""
  logp = np.zeros(tokens.shape)
  for b, t in np.ndindex(*tokens.shape):
    logits = features[b, t] @ weights
    logp[b, t] = logits[tokens[b, t]] - np.log(np.sum(np.exp(logits)))
  return logp


def grad_logp(features_t, weights, token):
  """d logp_t / d W = features_t (onehot(token) - p)^T -> [F,V]."""
  logits = features_t @ weights
  residual = -np.exp(logits) / np.sum(np.exp(logits))
  residual[token] += 1.0
  return np.outer(features_t, residual)


def segments(turn_ids, level):
  """The agent tokens of each row as lists of positions, one list per segment -> [B][segment][t].

  2511.20718, notation of Section 4: tokens, turns y^1..y^K, or the whole of y; observations are in
  none of them.
  """
  rows = []
  for row in turn_ids:
    agent = [t for t in range(len(row)) if row[t] > 0]
    if level == 'turn':
      rows.append([[t for t in agent if row[t] == k] for k in sorted({row[t] for t in agent})])
    elif level == 'sequence':
      rows.append([agent] if agent else [])
    else:
      rows.append([[t] for t in agent])
  return rows


def segment_mean(x, turn_ids, level):
  """Mean of x over each agent token's own segment, 0 elsewhere -> [B,T]."""
  mean = np.zeros(np.shape(x))
  for b, row in enumerate(segments(turn_ids, level)):
    for segment in row:
      mean[b, segment] = sum(x[b, t] for t in segment) / len(segment)
  return mean


def ratio(logp, old_logp, turn_ids, level):
  """w^k = exp((1/|y^k|) sum_{t in k} (logp_t - old_logp_t)), 1 off the agent's tokens -> [B,T].

  2511.20718, the turn-level importance ratio (geometric mean); level 'token' is PPO's w_t, level
  'sequence' is the ratio of GSPO (2507.18071).
  """
  return np.exp(segment_mean(logp - old_logp, turn_ids, level))


def outside_b(w, advantage, clip_low, clip_high):
  """True for a token not in B, the set of tokens that the min leaves alone.

  2511.20718, Lemma 4.2: B = (A >= 0 and w <= 1+eps) or (A < 0 and w >= 1-eps).
  """
  in_b = (advantage >= 0 and w <= 1 + clip_high) or (advantage < 0 and w >= 1 - clip_low)
  return not in_b


def surrogate(w, advantage, clip_low, clip_high, dual_clip=None):
  """min(w A, clip(w) A); for A < 0 not below dual_clip A (1912.09729, eq. 5)."""
  value = min(w * advantage, min(max(w, 1 - clip_low), 1 + clip_high) * advantage)
  if dual_clip is not None and advantage < 0:
    value = max(value, dual_clip * advantage)
  return value


@dataclasses.dataclass
class Objective:
  """J, J_clipped, their gradients g and C with respect to W [F,V], and the tokens not in B."""

  j: float
  j_clipped: float
  g: np.ndarray
  c: np.ndarray
  clipped: np.ndarray  # [B,T] bool, tokens stopped by a dual clip included


def objective(
    batch, level, clip_low=0.2, clip_high=0.2, min_advantage='token', dual_clip=None, weights=None
):
  """J = mean over rows of (1/|y|) sum_k sum_{t in k} min(w^k A_t, clip(w^k) A_t), with g and C.

  2511.20718, Turn-PPO's objective; its gradient by Lemma 4.1 (through the mean: the gradient of w^k
  is w^k (1/|y^k|) sum_{s in k} grad logp_s) and Lemma 4.2 (tokens outside B pass no gradient),

    g = E[(1/|y|) sum_k w^k (1/|y^k|) (sum_{t in k, t in B} A_t) grad log pi(y^k | .)]
    C = E[(1/|y|) sum_k w^k (1/|y^k|) (sum_{t in k, t not in B} A_t) grad log pi(y^k | .)].

  Level 'none' is the plain policy gradient (1/|y|) sum_t A_t grad logp_t, whose C is 0 (its j is
  left out: 0). Rows without agent tokens are no episodes.

  Choice: C is all that clipping removed, the dual clip included.
  """
  w_matrix = batch.weights if weights is None else weights
  logp = token_logp(batch.features, w_matrix, batch.tokens)
  w = ratio(logp, batch.old_logp, batch.turn_ids, level)
  out = Objective(
      0.0, 0.0, np.zeros_like(w_matrix), np.zeros_like(w_matrix), np.zeros(w.shape, bool)
  )
  rows = segments(batch.turn_ids, level)
  num_rows = sum(bool(row) for row in rows)
  for b, row in enumerate(rows):
    length = sum(len(segment) for segment in row)
    for segment in row:
      scale = 1.0 / (num_rows * length)
      grad_segment = sum(
          grad_logp(batch.features[b, t], w_matrix, batch.tokens[b, t]) for t in segment
      )
      mean_advantage = sum(batch.advantages[b, t] for t in segment) / len(segment)
      for t in segment:
        a = mean_advantage if min_advantage == 'turn' else batch.advantages[b, t]
        if level == 'none':
          out.g += scale * a * grad_segment
          continue
        out.j += scale * surrogate(w[b, t], a, clip_low, clip_high, dual_clip)
        pull = scale * w[b, t] * a / len(segment) * grad_segment
        stopped = dual_clip is not None and a < 0 and w[b, t] > dual_clip
        if stopped or outside_b(w[b, t], a, clip_low, clip_high):
          out.clipped[b, t] = True
          out.j_clipped += scale * w[b, t] * a
          out.c += pull
        else:
          out.g += pull
  return out


def lemma_4_1(batch):
  """grad J = E[(1/|y|) sum_k w^k (A^k / |y^k|) grad log pi(y^k | x, y^<k)], A^k = sum_{t in k} A_t.

  2511.20718, Lemma 4.1: the gradient of Turn-PPO where nothing is clipped -> [F,V].
  """
  w = ratio(
      token_logp(batch.features, batch.weights, batch.tokens),
      batch.old_logp,
      batch.turn_ids,
      'turn',
  )
  grad = np.zeros_like(batch.weights)
  rows = [row for row in segments(batch.turn_ids, 'turn')]
  for b, row in enumerate(rows):
    for turn in row:
      total = sum(batch.advantages[b, t] for t in turn)
      grad_turn = sum(
          grad_logp(batch.features[b, t], batch.weights, batch.tokens[b, t]) for t in turn
      )
      length = sum(len(other) for other in row)
      grad += w[b, turn[0]] * total / len(turn) * grad_turn / length / sum(map(bool, rows))
  return grad


def gspo_token_gradient(batch):
  """E[(1/|y|) sum_k sum_{t in k} w^k A_t grad logp_t], unclipped: NOT what Turn-PPO does -> [F,V].

  2507.18071, GSPO-token: the value of the segment's ratio with the gradient of the token's own
  logp. Same loss value as Turn-PPO, another gradient.
  """
  w = ratio(
      token_logp(batch.features, batch.weights, batch.tokens),
      batch.old_logp,
      batch.turn_ids,
      'turn',
  )
  grad = np.zeros_like(batch.weights)
  rows = segments(batch.turn_ids, 'token')
  for b, row in enumerate(rows):
    for (t,) in row:
      grad += (
          w[b, t]
          * batch.advantages[b, t]
          / len(row)
          / sum(map(bool, rows))
          * grad_logp(batch.features[b, t], batch.weights, batch.tokens[b, t])
      )
  return grad


def finite_difference(value, weights, direction, step=1e-6):
  """(value(W + h D) - value(W - h D)) / 2h."""
  return (value(weights + step * direction) - value(weights - step * direction)) / (2 * step)


def token_gae(rewards, values, action_mask, gamma, lam):
  """A_i = sum_{j >= i} (gamma lam)^(j-i) (r_j + gamma V_{j+1} - V_j) over the AGENT tokens i, j.

  1506.02438, eq. 16, in its O(T^2) form; observation tokens are no time steps.
  """
  advantages, returns = np.zeros(values.shape), np.zeros(values.shape)
  for b in range(values.shape[0]):
    agent = [t for t in range(values.shape[1]) if action_mask[b, t]]
    r, v = rewards[b, agent], np.append(values[b, agent], 0.0)
    for i, t in enumerate(agent):
      advantages[b, t] = sum(
          (gamma * lam) ** (j - i) * (r[j] + gamma * v[j + 1] - v[j]) for j in range(i, len(agent))
      )
      returns[b, t] = advantages[b, t] + v[i]
  return advantages, returns


def turn_gae(rewards, values, turn_ids, gamma, lam):
  """A^k = sum_{l >= k} (gamma lam)^(l-k) (R^l + gamma V^{l+1} - V^l), V^k at its first token.

  2512.17008, turn-level GAE: R^k sums the rewards of turn k; both results broadcast to its tokens.
  """
  advantages, returns = np.zeros(values.shape), np.zeros(values.shape)
  for b, turns in enumerate(segments(turn_ids, 'turn')):
    r = [sum(rewards[b, t] for t in turn) for turn in turns]
    v = [values[b, turn[0]] for turn in turns] + [0.0]
    for k, turn in enumerate(turns):
      advantages[b, turn] = sum(
          (gamma * lam) ** (l - k) * (r[l] + gamma * v[l + 1] - v[l]) for l in range(k, len(turns))
      )
      returns[b, turn] = advantages[b, turn[0]] + v[k]
  return advantages, returns


def bad_gae(rewards, values, turn_ids, gamma, lam):
  """GAE over agent tokens whose gamma and lambda are 1 unless the token ends a turn.

  2405.15821, Bellman backup with action decomposition; the product of the factors between i and j
  stands for (gamma lam)^(j-i).
  """
  advantages, returns = np.zeros(values.shape), np.zeros(values.shape)
  for b, turns in enumerate(segments(turn_ids, 'turn')):
    agent = [t for turn in turns for t in turn]
    ends = [turn[-1] for turn in turns]
    v = np.append(values[b, agent], 0.0)
    for i, t in enumerate(agent):
      factor = 1.0
      for j in range(i, len(agent)):
        discount = gamma if agent[j] in ends else 1.0
        advantages[b, t] += factor * (rewards[b, agent[j]] + discount * v[j + 1] - v[j])
        factor *= discount * (lam if agent[j] in ends else 1.0)
      returns[b, t] = advantages[b, t] + v[i]
  return advantages, returns


def turn_returns(rewards, turn_ids, gamma):
  """G^k = sum_{l >= k} gamma^(l-k) R^l, on every token of turn k (2510.01051) -> [B,T]."""
  returns = np.zeros(rewards.shape)
  for b, turns in enumerate(segments(turn_ids, 'turn')):
    r = [sum(rewards[b, t] for t in turn) for turn in turns]
    for k, turn in enumerate(turns):
      returns[b, turn] = sum(gamma ** (l - k) * r[l] for l in range(k, len(turns)))
  return returns


def group_zscore(scores, group_ids, eps=1e-6):
  """(s - mean) / (std + eps) within a group, std with ddof 1; 0 for a group of one (2402.03300)."""
  out = np.zeros(len(scores))
  for i, group in enumerate(group_ids):
    peers = [s for s, other in zip(scores, group_ids) if other == group]
    if len(peers) > 1:
      out[i] = (scores[i] - np.mean(peers)) / (np.std(peers, ddof=1) + eps)
  return out


def leave_one_out(scores, group_ids):
  """s_i minus the mean of the OTHERS of its group; 0 for a group of one (2402.14740, eq. 7)."""
  out = np.zeros(len(scores))
  for i, group in enumerate(group_ids):
    others = [s for j, s in enumerate(scores) if group_ids[j] == group and j != i]
    if others:
      out[i] = scores[i] - sum(others) / len(others)
  return out


def aggregate(x, mask, mode, norm_length=None):
  """verl's four loss_agg_mode, row by row; a row without masked tokens is no sequence."""
  sums = [sum(x[b, mask[b] > 0]) for b in range(len(x)) if mask[b].any()]
  counts = [mask[b].sum() for b in range(len(x)) if mask[b].any()]
  if mode == 'token-mean':
    return sum(sums) / sum(counts)
  if mode == 'seq-mean-token-sum':
    return sum(sums) / len(sums)
  if mode == 'seq-mean-token-mean':
    return sum(s / n for s, n in zip(sums, counts)) / len(sums)
  if mode == 'seq-mean-token-sum-norm':
    return sum(sums) / len(sums) / (norm_length or x.shape[1])
  raise ValueError(mode)


def whiten(advantages, mask, eps=1e-8):
  """(A - mean) / sqrt(var + eps) over the masked tokens, var with ddof 1 (verl); masked only."""
  chosen = advantages[mask > 0]
  return (chosen - chosen.mean()) / np.sqrt(chosen.var(ddof=1) + eps)
