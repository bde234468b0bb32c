"""What an optimizer step computes before it is applied. Arrays [b,T] are 0 outside their rows."""

from typing import Any
from typing import NamedTuple

import jax


class PolicyTokens(NamedTuple):
  """Numbers of the policy per token, [b,T]."""

  logp: jax.Array  # log-probs of the current policy
  entropy: jax.Array  # entropies of its distributions
  ratio: jax.Array | None = None  # importance ratios; None: not computed yet
  clipped: jax.Array | None = None  # whether the clip changed the gradient; None: as for the ratio
  bias_cotangent: jax.Array | None = None  # C as a cotangent; None: rows are compared
  kl: jax.Array | None = None  # KL penalty in the loss; None: there is none


class PolicySums(NamedTuple):
  """Sums over the tokens of a step."""

  num_nonzero: jax.Array  # [] cotangents that are not 0
  pg_loss: jax.Array | None = None  # [] -J, the policy's loss
  row_losses: jax.Array | None = None  # [b] its terms by row
  clipped_objective: jax.Array | None = None  # [] J_c, the part of J that was clipped
  imitation_loss: jax.Array | None = None  # [] None: there are no demonstrations
  num_pairs: jax.Array | None = None  # [] groups with a pair; None: no episodes are compared


class ValueTokens(NamedTuple):
  """Numbers of the critic per token, [b,T]."""

  values: jax.Array
  loss: jax.Array


class PolicyStep(NamedTuple):
  """The gradients of a step, and the numbers that they come with."""

  actor: Any  # g, the gradient of the policy's loss, a tree
  critic: Any  # the gradient of the critic's loss, a tree; None: nothing predicts values
  tokens: PolicyTokens
  sums: PolicySums
  values: ValueTokens | None  # None: nothing predicts values
