"""The table of algorithms: a variant is a row, not a class.

To add one, add a row; to change one for a run, override a column (`--config.algorithm.ratio=turn`).
"""

import dataclasses

ADVANTAGES = ('token_gae', 'turn_gae', 'bad_gae', 'group_zscore', 'leave_one_out', 'turn_returns')
RATIOS = ('none', 'token', 'turn', 'sequence')
DIVISORS = ('none', 'paper', 'floor', 'relative')
NORMS = ('gradient', 'loss')


@dataclasses.dataclass(frozen=True)
class Variant:
  """One algorithm, as choices of the few parts in which these algorithms differ."""

  advantage: str  # one of ADVANTAGES: how credit is assigned
  ratio: (
      str  # one of RATIOS: which tokens share an importance ratio; 'none' = plain policy gradient
  )
  divisor: str = (
      'none'  # one of DIVISORS: clipping-bias correction, what the gradient is divided by
  )
  norm_of: str = 'gradient'  # one of NORMS: what ||C|| is the norm of
  min_advantage: str = 'token'  # 'token' | 'turn': the advantage inside the min, see `correction`
  clip_low: float = 0.2
  clip_high: float = 0.2
  whiten: bool = False  # advantages to mean 0 and variance 1 over the batch's agent tokens

  @property
  def needs_critic(self) -> bool:
    """Whether its advantages are built on learnt values."""
    return self.advantage in ('token_gae', 'turn_gae', 'bad_gae')


VARIANTS = {
    # Li et al., arXiv 2511.20718
    'ppo': Variant('token_gae', 'token', whiten=True),
    'turn_ppo': Variant('token_gae', 'turn', whiten=True),
    's_ppo': Variant('token_gae', 'token', divisor='paper', whiten=True),
    'st_ppo': Variant('token_gae', 'turn', divisor='paper', whiten=True),
    # Shao et al., arXiv 2402.03300
    'grpo': Variant('group_zscore', 'token'),
    # arXiv 2511.20718v2
    'so_grpo': Variant('group_zscore', 'turn', divisor='paper'),
    # Zheng et al., arXiv 2507.18071: ratios of whole sequences hug 1, hence the narrow clip
    'gspo': Variant('group_zscore', 'sequence', clip_low=3e-4, clip_high=4e-4),
    # Ahmadian et al., arXiv 2402.14740
    'rloo': Variant('leave_one_out', 'none'),
    # Liu et al. (GEM), arXiv 2510.01051: return to go per turn, normalised over the batch
    'reinforce': Variant('turn_returns', 'none'),
}
