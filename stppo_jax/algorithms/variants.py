"""The table of algorithms.

To add an algorithm, write a `Variant`: either a row of VARIANTS, or an object in a file of your own
that a run selects with `--config.algorithm.variant=my_file:MY_VARIANT`. To change an algorithm for
one run, override a field (`--config.algorithm.ratio=turn`). variant.py explains the fields.
"""

import dataclasses
from typing import Any

from stppo_jax.algorithms.variant import BaseVariant
from stppo_jax.systems import parts
from stppo_jax.types import setting


@dataclasses.dataclass(frozen=True)
class Variant(BaseVariant):
  """A row of the table, which finds its parts by their names, see variant.py for its fields."""

  def built_in(self, field: str, name: str) -> Any:
    """Returns the built-in part of this name. ValueError: there is none."""
    return parts.find(field, name)


@dataclasses.dataclass(frozen=True)
class GraoVariant(Variant):
  """The variant of GRAO with its two weights, see systems/grao.py."""

  grao_beta: float = setting(0.5, 'weight of the reference answer', at_least=0)
  grao_lambda: float = setting(0.6, 'weight of samples against the reference', at_least=0)


# An objective of pairs holds the policy near its start without a penalty. It reads only which score
# is higher.
PAIRS: dict[str, Any] = {'kl_in': 'none', 'entropy_coef': 0.0}

# A z-score divides by the spread of its group. If the KL penalty were in the scores, it would be
# the only spread of a group whose episodes do equally well, so it is in the loss instead.
KL_IN_LOSS: dict[str, Any] = {'kl_in': 'loss', 'kl_estimator': 'k3'}

VARIANTS = {
    # Li et al., arXiv 2511.20718
    'ppo': Variant('token_gae', 'token', whiten=True),
    'turn_ppo': Variant('token_gae', 'turn', whiten=True),
    's_ppo': Variant('token_gae', 'token', divisor='paper', whiten=True),
    'st_ppo': Variant('token_gae', 'turn', divisor='paper', whiten=True),
    # The critic of Hyper++, arXiv 2512.14202, under token PPO. The row leaves out the paper's
    # other two parts.
    'hl_gauss_ppo': Variant(
        'token_gae', 'token', whiten=True, value_loss='hl_gauss', value_clip=0.0
    ),
    # The rule of this project, see docs/study.md. The applied step is multiplied by
    # ||g|| / (||g|| + ||C||).
    'rs_ppo': Variant('token_gae', 'token', divisor='relative', divide='step', whiten=True),
    # Shao et al., arXiv 2402.03300
    'grpo': Variant('group_zscore', 'token', **KL_IN_LOSS),
    # Li et al., arXiv 2511.20718v2
    'so_grpo': Variant('group_zscore', 'turn', divisor='paper', **KL_IN_LOSS),
    # Zheng et al., arXiv 2507.18071. Ratios of whole sequences are near 1, hence the narrow clip.
    'gspo': Variant('group_zscore', 'sequence', clip_low=3e-4, clip_high=4e-4, **KL_IN_LOSS),
    # Ahmadian et al., arXiv 2402.14740
    'rloo': Variant('leave_one_out', 'none'),
    # Liu et al., arXiv 2503.20783. Neither the group's spread nor an episode's length divides.
    'dr_grpo': Variant('group_centred', 'token', aggregation='seq-mean-token-sum-norm'),
    # MiniMax, arXiv 2506.13585. Bounds the weight from above and keeps every gradient.
    'cispo': Variant(
        'group_zscore',
        'token',
        'cispo',
        clip_low=1.0,
        clip_high=0.2,
        aggregation='token-mean',
        **KL_IN_LOSS,
    ),
    # arXiv 2602.04879. The bounds of the total variation are those of verl's example.
    'dppo': Variant(
        'group_zscore', 'token', 'dppo_tv', clip_low=0.15, clip_high=0.15, **KL_IN_LOSS
    ),
    # Hu, arXiv 2501.03262. Returns of tokens, whitened over the batch, without and with a group's
    # baseline.
    'reinforce_pp': Variant('token_returns', 'token', whiten=True),
    'reinforce_pp_baseline': Variant('group_centred', 'token', whiten=True),
    # Liu et al. (GEM), arXiv 2510.01051. Return to go of each turn, normalised over the batch.
    'reinforce': Variant('turn_returns', 'none'),
    # Wu et al., arXiv 2405.00675. Choice: eta is 10. The authors' 100 to 1,000 ask for
    # log-ratios beyond the bound of 20.
    'sppo': Variant('group_wins', 'sequence_product', 'square', kl_in='none', entropy_coef=0.0),
    # arXiv 2509.24981. `objective=surrogate` leaves out the value of the next state and saves a
    # forward pass.
    'rover': Variant(
        'group_centred',
        'token',
        'square',
        objective='rover',
        beta=1.0,
        alpha=1.0,
        aggregation='token-mean',
        kl_in='none',
        entropy_coef=0.0,
    ),
    # Mukobi et al., arXiv 2310.16763. Cross-entropy of the best episode of each group. The authors
    # add KL(reference || policy) over the vocabulary. The gradient of k3 estimates its gradient on
    # samples of the policy. On the best of a group alone, the estimate is biased.
    'superhf': Variant(
        'group_best',
        'none',
        aggregation='token-mean',
        mask_zero_advantage=True,
        entropy_coef=0.0,
        kl_ratio=False,
        **KL_IN_LOSS,
    ),
    # arXiv 2507.15351. Its fleet is a group here.
    'ospo': Variant('turn_zscore', 'token', clip_high=0.28, kl_in='none', entropy_coef=0.05),
    # Zheng et al., arXiv 2307.04964: normalised and clipped scores. The numbers are those of
    # the released script.
    'ppo_max': Variant(
        'token_gae',
        'token',
        lam=0.95,
        value_clip=0.2,
        kl_coef=0.01,
        score_norm='normalise',
        score_clip=0.8,
        entropy_coef=0.0,
    ),
    # arXiv 2508.07750. A demonstration in each group is its reference answer.
    'grao': GraoVariant('grao', 'none', kl_in='none', entropy_coef=0.0),
    # Rafailov et al., arXiv 2305.18290, on fresh pairs: the best and the worst of each group.
    'dpo': Variant('group_centred', objective='dpo', **PAIRS),
    # Azar et al., arXiv 2310.12036
    'ipo': Variant('group_centred', objective='ipo', **PAIRS),
    # Zeng et al., arXiv 2404.11999
    'tdpo': Variant('group_centred', objective='tdpo', **PAIRS),
    # Accelerated Preference Optimization (He et al., arXiv 2410.06293), and not TRL's apo_zero.
    'apo': Variant('group_centred', objective='iterative_dpo', extrapolation=0.3, **PAIRS),
    # Pairwise PPO (Wu et al., arXiv 2310.00212). The KL to the reference is in the reward.
    'p3o': Variant('group_centred', objective='p3o', entropy_coef=0.0),
    # Thinking Machines 2025; GKD, arXiv 2306.13649. The advantages are those of config.teacher.
    'distillation': Variant('none', 'token', kl_in='none', entropy_coef=0.0),
}
