"""The table of algorithms: a `Variant` is a whole objective, described by the parts it is made of.

To add an algorithm, write a Variant: a row of VARIANTS, or a name in a file of your own, which a
run picks by `--config.algorithm.variant=my_file:MY_VARIANT`. To change one for a run, override a
column (`--config.algorithm.ratio=turn`).

Four columns take the name of a built-in from the table on the right, or a function of your own:

  advantage  (batch, variant) -> (advantages, returns)                        advantages.ESTIMATORS
             Both [B,T]; `returns` are the critic's targets. `advantages.from_groups` makes one from
             a function (scores, group_ids) -> advantages, all [B]; `advantages.from_values` marks
             one that reads batch.old_values, so that the run makes a critic.
  ratio      (batch, variant) -> labels                                       RATIOS
             [B,T] integers, once per update: the agent's tokens of a row with the same label,
             adjacent or not, share an importance ratio, the geometric mean of theirs. What tells
             them apart is in batch.tokens, turn_ids, old_logp, ..
  surrogate  (ratio, logp, advantages, variant) -> (objective, clipped)       losses.SURROGATES
             All [B,T]; `clipped` is true where the clip changed the gradient. The trainer ascends
             the objective: its gradient is taken through `ratio` and `logp`, whichever the
             surrogate uses.
  divisor    (g_norm, c_norm, any_clipped) -> number                          correction.DIVISORS
             All scalars: ||g||, ||C||, and whether any token was clipped. The gradient g is divided
             by it.

A function reads its own settings from a dataclass that inherits from Variant and adds fields; a run
sets those by `--config.algorithm.options.NAME=VALUE`.
"""

from collections.abc import Callable
import dataclasses
from typing import Any

from stppo_jax.algorithms import advantages
from stppo_jax.algorithms import correction
from stppo_jax.algorithms import losses

RATIOS = ('none', 'token', 'turn', 'chunk', 'sequence', 'turn_product', 'sequence_product')
NORMS = ('gradient', 'loss')
# Column -> the names that it may have, where it may also be a function.
BUILT_IN = {
    'advantage': tuple(advantages.ESTIMATORS),
    'ratio': RATIOS,
    'surrogate': tuple(losses.SURROGATES),
    'divisor': tuple(correction.DIVISORS),
}


@dataclasses.dataclass(frozen=True)
class Variant:
  """One objective, as choices of the few parts in which algorithms differ.

  Defaults are those of Search-R1 v0.2, unless the comment says otherwise.
  """

  advantage: str | Callable  # how credit is assigned
  # The tokens that share an importance ratio, their geometric mean or their product; 'none' is the
  # policy gradient.
  ratio: str | Callable
  surrogate: str | Callable = 'clip'  # what is maximised in place of ratio x advantage
  divisor: str | Callable = 'none'  # clipping-bias correction: what the gradient is divided by
  norm_of: str = 'gradient'  # one of NORMS: what ||C|| is the norm of
  divide: str = 'before_clip'  # one of correction.ORDERS: what the divisor divides
  step_scale: str = 'none'  # one of off_policy.STEP_SCALES: what multiplies the optimizer's step
  chunk_length: int = 8  # agent tokens that share a ratio 'chunk', whichever turn they are of
  min_advantage: str = 'token'  # 'token' | 'turn': the advantage inside the min, see `correction`
  clip_low: float = 0.2
  clip_high: float = 0.2
  dual_clip: float = 0.0  # c > 1 bounds the ratio where the advantage is negative; 0: off
  whiten: bool = False  # advantages to mean 0 and variance 1 over the batch
  whiten_over: str = 'tokens'  # 'tokens' | 'turns': what counts once in that mean and variance
  gamma: float = 1.0  # discount
  lam: float = 1.0  # of GAE
  lam_critic: float | None = None  # of the critic's targets (decoupled GAE); None: lam
  aggregation: str = 'seq-mean-token-mean'  # the paper's 1/|y|; or another of losses.AGGREGATIONS
  norm_length: int = 0  # of 'seq-mean-token-sum-norm'; 0: the longest episode allowed
  entropy_coef: float = 0.001
  kl_in: str = 'reward'  # 'reward' | 'loss' | 'none': where the KL to the reference goes
  kl_estimator: str = 'k1'  # one of losses.KL_ESTIMATORS
  kl_coef: float = 0.001
  kl_target: float = 0.0  # above 0 the coefficient adapts towards this KL
  kl_horizon: float = 10_000.0  # episodes over which it adapts
  value_clip: float = 0.5  # range of a step's change of a value; 0: off
  value_coef: float = 0.5  # of the critic's loss on a shared trunk
  old_logp: str = 'trainer'  # 'trainer' | 'sampler': whose log-probs the ratio starts from
  rollout_is: str = 'none'  # one of off_policy.LEVELS: weights from the sampler to old_logp
  rollout_is_threshold: float = 2.0  # their upper bound
  rollout_is_low: float = 0.0  # above 0, weights outside [low, threshold] become 0
  rollout_is_normalize: bool = False  # divide them by their mean over the batch
  rollout_rs: str = 'none'  # one of off_policy.REJECTIONS: level at which tokens are rejected
  rollout_rs_low: float = 0.5  # whose ratio from the sampler to old_logp is below
  rollout_rs_high: float = 2.0  # or above
  mask_truncated: bool = False  # drop episodes that ended at a limit from the policy's loss
  mask_zero_advantage: bool = False  # and episodes without any advantage
  log_bias: bool = True  # measure ||C|| also where nothing is divided by it

  @property
  def needs_critic(self) -> bool:
    """Whether its advantages are built on learnt values."""
    return advantages.estimator(self.advantage).needs_critic

  @property
  def needs_groups(self) -> bool:
    """Whether its advantages compare several episodes of one question."""
    return advantages.estimator(self.advantage).needs_groups

  @property
  def measures_bias(self) -> bool:
    """Whether the gradient C that clipping removed is computed."""
    divides = self.divisor != 'none' and self.norm_of == 'gradient'
    return self.ratio != 'none' and (self.log_bias or divides)

  def described(self) -> dict[str, Any]:
    """Returns the columns as JSON values; functions by their names."""
    columns = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
    return {k: _name(v) if callable(v) else v for k, v in columns.items()}


def _name(function):
  """Returns its name, never an address: runs compare descriptions."""
  return getattr(function, '__name__', type(function).__name__)


# With z-scores of a group the KL is in the loss: in the scores it would be all that is left of a
# group whose episodes do equally well, divided by its own small spread.
KL_IN_LOSS: dict[str, Any] = {'kl_in': 'loss', 'kl_estimator': 'k3'}
VARIANTS = {
    # Li et al., arXiv 2511.20718
    'ppo': Variant('token_gae', 'token', whiten=True),
    'turn_ppo': Variant('token_gae', 'turn', whiten=True),
    's_ppo': Variant('token_gae', 'token', divisor='paper', whiten=True),
    'st_ppo': Variant('token_gae', 'turn', divisor='paper', whiten=True),
    # ours, docs/study.md: the applied step times ||g|| / (||g|| + ||C||)
    'rs_ppo': Variant('token_gae', 'token', divisor='relative', divide='step', whiten=True),
    # Shao et al., arXiv 2402.03300
    'grpo': Variant('group_zscore', 'token', **KL_IN_LOSS),
    # arXiv 2511.20718v2
    'so_grpo': Variant('group_zscore', 'turn', divisor='paper', **KL_IN_LOSS),
    # Zheng et al., arXiv 2507.18071: ratios of whole sequences are near 1, hence the narrow clip
    'gspo': Variant('group_zscore', 'sequence', clip_low=3e-4, clip_high=4e-4, **KL_IN_LOSS),
    # Ahmadian et al., arXiv 2402.14740
    'rloo': Variant('leave_one_out', 'none'),
    # Liu et al., arXiv 2503.20783: neither the group's spread nor an episode's length divides
    'dr_grpo': Variant('group_centred', 'token', aggregation='seq-mean-token-sum-norm'),
    # MiniMax, arXiv 2506.13585: bounds the weight from above and keeps every gradient
    'cispo': Variant(
        'group_zscore',
        'token',
        'cispo',
        clip_low=1.0,
        clip_high=0.2,
        aggregation='token-mean',
        **KL_IN_LOSS,
    ),
    # arXiv 2602.04879; bounds of the total variation as in verl's example
    'dppo': Variant(
        'group_zscore', 'token', 'dppo_tv', clip_low=0.15, clip_high=0.15, **KL_IN_LOSS
    ),
    # Hu, arXiv 2501.03262: returns of tokens, whitened over the batch; and with a group's baseline
    'reinforce_pp': Variant('token_returns', 'token', whiten=True),
    'reinforce_pp_baseline': Variant('group_centred', 'token', whiten=True),
    # Liu et al. (GEM), arXiv 2510.01051: return to go per turn, normalised over the batch
    'reinforce': Variant('turn_returns', 'none'),
}
