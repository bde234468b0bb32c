"""Direct preference optimization of fresh pairs: the best and the worst episode of each group.

DPO (Rafailov et al., arXiv 2305.18290, paper) compares with the reference. The iterative form, with
`extrapolation` Accelerated Preference Optimization (He et al., arXiv 2410.06293, paper), compares
with the policy before the update. Notation as in algorithms/objectives.py. Pairs are sampled in the
run: there is no training on a file of given pairs.
"""

from collections.abc import Callable

import jax

from stppo_jax.algorithms import objectives
from stppo_jax.algorithms.variant import BaseVariant
from stppo_jax.algorithms.variant import RowObjective


def pair_objective(
    value_of: Callable[[jax.Array, BaseVariant], jax.Array], start: str
) -> RowObjective:
  """Returns the objective mean over pairs of value_of(h, variant), h the pair's log-ratio.

  h = (l - b)_best - (l - b)_worst,   b the sum of batch.<start>: 'ref_logp' or 'old_logp'

  Groups whose scores are all equal have no pair.
  """

  def compare(outputs, batch, variant):
    pairs = objectives.best_and_worst(batch)
    start_logp = getattr(batch, start)
    log_ratio = objectives.episode_sums(outputs.logp - start_logp, batch)
    h = log_ratio[pairs.best] - log_ratio[pairs.worst]
    values = value_of(h, variant)
    return pairs.terms(values), objectives.nothing_clipped(outputs)

  needs = ('reference',) if start == 'ref_logp' else ()
  return RowObjective(compare, needs, reads=('beta',))


def log_sigmoid(h: jax.Array, variant: BaseVariant) -> jax.Array:
  """Returns log sigmoid(beta h) of the pairs' log-ratios (Rafailov et al., arXiv 2305.18290).

  Accelerated Preference Optimization (arXiv 2410.06293, example 3.1) uses it with b = o and
  `extrapolation`. Length is not normalised.
  """
  return jax.nn.log_sigmoid(variant.beta * h)


DPO = pair_objective(log_sigmoid, 'ref_logp')
ITERATIVE_DPO = pair_objective(log_sigmoid, 'old_logp')
