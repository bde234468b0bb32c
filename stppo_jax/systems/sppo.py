"""SPPO (Wu et al., arXiv 2405.00675): the log-ratio regressed on the share of won comparisons."""

import jax
import jax.numpy as jnp

from stppo_jax.algorithms import advantages as advantages_lib
from stppo_jax.algorithms import losses
from stppo_jax.algorithms.variant import BaseVariant


def group_wins(scores: jax.Array, group_ids: jax.Array) -> jax.Array:
  """Returns the share of its group that an episode beats, less 1/2, [B] (SPPO, arXiv 2405.00675).

  P_i - 1/2,   P_i = (1/G) sum_j P(i beats j);   a tie counts 1/2, and so does j = i

  The advantage of SPPO's regression, see `square` (authors' code).
  Choice: P(i beats j) is 1, 1/2 or 0 by the scores. The authors take a preference model's
  probabilities, and train on the best and the worst of five samples (authors' code). The paper's
  algorithm 1 takes all samples, as here.
  """
  same = losses.is_same(group_ids)
  own = scores[:, None]
  gaps = own - scores[None, :]
  beats = jnp.sign(gaps) / 2
  sizes = same.sum(axis=1)
  return advantages_lib.over_groups(jnp.sum, beats, same) / sizes


def square(
    ratio: jax.Array, logp: jax.Array, advantages: jax.Array, variant: BaseVariant
) -> tuple[jax.Array, jax.Array]:
  """Returns -(log w - A / beta)^2, which regresses the log-ratio on the advantage.

  With the ratio of sequences it is SPPO's loss, where eta = 1 / beta (arXiv 2405.00675, authors'
  code, `loss_type='sppo'`). With that of tokens and beta 1 it is ROVER's without the value of the
  next state (arXiv 2509.24981, authors' code, `target_adv_only`). Nothing is clipped.
  Choice: log w is kept within +-20, as in every ratio, so that beyond it the square has no
  gradient.
  """
  del logp
  error = jnp.log(ratio) - advantages / variant.beta
  return -jnp.square(error), jnp.zeros(ratio.shape, bool)


GROUP_WINS = advantages_lib.from_groups(group_wins)
