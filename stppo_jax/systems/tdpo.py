"""TDPO (Zeng et al., arXiv 2404.11999, authors' code): DPO with a KL over the vocabulary."""

import jax

from stppo_jax.algorithms import objectives
from stppo_jax.algorithms.variant import BaseVariant
from stppo_jax.algorithms.variant import RowObjective
from stppo_jax.systems import dpo
from stppo_jax.types import TurnBatch


def tdpo(
    outputs: objectives.TokenOutputs, batch: TurnBatch, variant: BaseVariant
) -> tuple[jax.Array, jax.Array]:
  """Returns TDPO2's terms (arXiv 2404.11999, `trainers.py` `tdpo_loss`).

  mean log sigmoid( beta [ (l - f)_best - (l - f)_worst - alpha (K_worst - sg K_best) ] )

  Best and worst are episodes of a group. K sums KL(reference || policy), taken over
  the vocabulary, over the tokens of an episode, and has a gradient. With alpha 0 this is DPO.
  Choice: the authors train on given pairs, and these pairs are sampled.
  """
  assert outputs.reference_kl is not None  # declared in `needs`
  pairs = objectives.best_and_worst(batch)
  log_ratio = objectives.episode_sums(outputs.logp - batch.ref_logp, batch)
  kl = variant.alpha * objectives.episode_sums(outputs.reference_kl, batch)
  best_terms = log_ratio + jax.lax.stop_gradient(kl)
  worst_terms = log_ratio + kl
  h = best_terms[pairs.best] - worst_terms[pairs.worst]
  values = dpo.log_sigmoid(h, variant)
  return pairs.terms(values), objectives.nothing_clipped(outputs)


TDPO = RowObjective(tdpo, needs=('reference', 'reference_kl'), reads=('alpha', 'beta'))
