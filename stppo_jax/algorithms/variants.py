"""The table of algorithms. A `Variant` describes a whole objective by the parts it is made of.

To add an algorithm, write a Variant: either a row of VARIANTS, or an object in a file of your own
that a run selects with `--config.algorithm.variant=my_file:MY_VARIANT`. To change an algorithm for
one run, override a field (`--config.algorithm.ratio=turn`).

Five fields take either the name of a built-in from the table on the right, or a function:

  advantage  (batch, variant) -> (advantages, returns)                        advantages.ESTIMATORS
             Both are [B,T], and `returns` are the critic's targets. `advantages.from_groups` makes
             an estimator from a function (scores, group_ids) -> advantages, all [B]. A function
             that reads batch.old_values declares it by `function.needs_critic = True`, or with the
             decorator `advantages.from_values`, so that the run trains a critic. A function that
             prefers the first of equal episodes sets `breaks_ties`, see the property below.
  ratio      (batch, variant) -> labels                                       RATIOS
             [B,T] integers, computed once per update. The agent's tokens of a row with the same
             label share an importance ratio, the geometric mean of their ratios. They need not be
             adjacent. The function may read batch.tokens, turn_ids, old_logp, ..
  surrogate  (ratio, logp, advantages, variant) -> (objective, clipped)       losses.SURROGATES
             All are [B,T], and `clipped` is true where the clip changed the gradient. The trainer
             ascends the objective, through `ratio` and `logp`.
  objective  (outputs, batch, variant) -> (row_values, clipped)               objectives.OBJECTIVES
             [b] and [b,T] for the rows of an optimizer step, whose log-probs are outputs.logp. The
             trainer ascends the sum of the values, in place of the surrogate. With
             `objectives.needs` a function declares what else it reads.
  divisor    (g_norm, c_norm, any_clipped) -> number                          correction.DIVISORS
             All are scalars: ||g||, ||C||, and whether any token was clipped. The gradient g is
             divided by the result.

A function reads its own settings from a dataclass that inherits from Variant and adds fields. A run
sets them by `--config.algorithm.options.NAME=VALUE`.
"""

from collections.abc import Callable
import dataclasses
from typing import Any

from stppo_jax.algorithms import advantages
from stppo_jax.algorithms import correction
from stppo_jax.algorithms import losses
from stppo_jax.algorithms import objectives
from stppo_jax.algorithms import off_policy
from stppo_jax.algorithms import score_norm
from stppo_jax.algorithms import value_bins
from stppo_jax.types import setting

RATIOS = ('none', 'token', 'turn', 'chunk', 'sequence', 'turn_product', 'sequence_product')


# The formatter is off, so that each setting takes few lines.
# fmt: off


@dataclasses.dataclass(frozen=True)
class Variant:
  """One objective, as choices of the few parts in which algorithms differ.

  The defaults are those of Search-R1 v0.2, except for `aggregation`, which is the paper's. The
  section `algorithm` of a config has the same fields. A value there overrides the variant's.
  """

  advantage: str | Callable = setting(
      'token_gae', 'how credit is assigned', allowed=tuple(advantages.ESTIMATORS), plugin=True)
  ratio: str | Callable = setting(
      'token', 'which tokens share an importance ratio: the geometric mean of their ratios, or the '
      "product. 'none' is the plain policy gradient", allowed=RATIOS, plugin=True)
  surrogate: str | Callable = setting(
      'clip', 'objective as a function of ratio and advantage',
      allowed=tuple(losses.SURROGATES), plugin=True)
  objective: str | Callable = setting(
      'surrogate', "the sum of the tokens' surrogates, or an objective that compares the rows of a "
      'step, see objectives.py', allowed=tuple(objectives.OBJECTIVES), plugin=True)
  divisor: str | Callable = setting(
      'none', 'clipping-bias correction: the divisor of the gradient',
      allowed=tuple(correction.DIVISORS), plugin=True)
  norm_of: str = setting(
      'gradient', "||C|| is the norm of the 'gradient' that clipping removed, or the size of the "
      "clipped part of the 'loss'", allowed=('gradient', 'loss'))
  divide: str = setting(
      'before_clip', "what the divisor divides: the gradient 'before_clip' or 'after_clip' of its "
      "norm, or the optimizer's 'step', which Adam cannot cancel", allowed=correction.ORDERS)
  step_scale: str = setting(
      'none', "factor of the optimizer's step: 'ess' is the root of the effective share of "
      'episodes, by their weights from the sampler to the current policy (VCPO)',
      allowed=tuple(off_policy.STEP_SCALES))
  chunk_length: int = setting(
      8, "number of agent tokens that share a ratio 'chunk', across turns", at_least=1)
  min_advantage: str = setting(
      'token', "the advantage inside the min: the token's own, or the mean of its segment",
      allowed=('token', 'turn'))
  clip_low: float = setting(0.2, 'the ratio is clipped at 1 - clip_low', at_least=0)
  clip_high: float = setting(0.2, 'the ratio is clipped at 1 + clip_high', at_least=0)
  dual_clip: float = setting(
      0.0, 'c > 1 bounds the ratio where the advantage is negative; 0: off')
  beta: float = setting(
      0.1, "scale of the log-ratios in the surrogate 'square' and in the objectives of pairs. A "
      'higher value keeps the policy closer to where it starts', above=0)
  alpha: float = setting(
      0.5, "weight of the KL in 'tdpo', and of the next value in 'rover'", at_least=0)
  whiten: bool = setting(False, 'standardise advantages over the batch')
  whiten_over: str = setting(
      'tokens', 'the unit that counts once in the mean and variance of `whiten`',
      allowed=('tokens', 'turns'))
  gamma: float = setting(1.0, 'discount', at_least=0, at_most=1)
  lam: float = setting(1.0, 'lambda of GAE', at_least=0, at_most=1)
  lam_critic: float | None = setting(
      None, "lambda of the critic's targets (decoupled GAE), usually 1; None: lam",
      at_least=0, at_most=1)
  aggregation: str = setting(
      'seq-mean-token-mean', "mean over tokens and episodes: verl's loss_agg_mode and two means "
      "over turns, see losses.aggregation_weights. The default is the paper's 1/|y|",
      allowed=losses.AGGREGATIONS)
  norm_length: int = setting(
      0, 'divisor of seq-mean-token-sum-norm, in tokens; 0: rollout.max_total', at_least=0)
  entropy_coef: float = setting(0.001, 'weight of the entropy bonus')
  kl_in: str = setting(
      'reward', 'where the KL penalty to the reference is added',
      allowed=('reward', 'loss', 'none'))
  kl_estimator: str = setting('k1', 'estimator of the KL penalty', allowed=losses.KL_ESTIMATORS)
  kl_ratio: bool = setting(
      True, "with kl_in='loss': multiply the KL of a token by its ratio to the policy that sampled "
      'it, so that the gradient is that of KL(policy || reference), see losses.kl_penalty')
  kl_coef: float = setting(0.001, 'weight of the KL penalty', at_least=0)
  kl_target: float = setting(
      0.0, 'above 0 the weight adapts towards this KL per token, usually 0.1', at_least=0)
  kl_horizon: float = setting(10_000.0, 'episodes over which the weight adapts', at_least=1)
  value_loss: str = setting(
      'mse', "the critic's loss: 'mse' regresses the return, 'hl_gauss' classifies it into bins "
      '(see value_bins.py)', allowed=value_bins.VALUE_LOSSES)
  value_bins: int = setting(51, 'number of bins of hl_gauss', at_least=8)
  value_low: float = setting(
      -0.5, 'lower end of the bins. The range should exceed the returns by at least three bins on '
      'each side. The defaults are for rewards from 0 to 1')
  value_high: float = setting(1.5, 'upper end of the bins')
  value_clip: float = setting(0.5, 'bound of the change of a value; 0: off', at_least=0)
  value_coef: float = setting(
      0.5, "weight of the critic's loss on a shared trunk", at_least=0)
  old_logp: str = setting(
      'trainer', "log-probs that the ratio starts from: 'trainer' recomputes them, and the first "
      "ratio is 1 (exactly on CPUs, up to rounding on GPUs); 'sampler' takes the sampler's",
      allowed=('trainer', 'sampler'))
  rollout_is: str = setting(
      'none', "level of the importance weights from the sampler's log-probs to old_logp, see "
      "off_policy.py; needs old_logp='trainer'", allowed=off_policy.LEVELS)
  rollout_is_threshold: float = setting(
      2.0, 'upper bound of the weights of rollout_is', at_least=1)
  rollout_is_low: float = setting(
      0.0, 'above 0, weights below it or above the threshold become 0', at_least=0, at_most=1)
  rollout_is_normalize: bool = setting(False, 'divide the weights by their mean over the batch')
  rollout_rs: str = setting(
      'none', "level of the rejection: tokens are dropped from the policy's loss if their ratio "
      'from the sampler to old_logp is out of bounds. A sequence level drops whole episodes',
      allowed=off_policy.LEVELS)
  rollout_rs_low: float = setting(
      0.5, 'lower bound of the ratio of rollout_rs', above=0, at_most=1)
  rollout_rs_high: float = setting(2.0, 'upper bound of the ratio of rollout_rs', at_least=1)
  extrapolation: float = setting(
      0.0, 'a: each update samples with and starts from the parameters p + a (p - p_before), '
      'where p_before are the parameters after the previous update (APO, arXiv 2410.06293)',
      at_least=0, below=1)
  mask_truncated: bool = setting(
      False, "drop episodes that ended at a limit from the policy's loss")
  mask_zero_advantage: bool = setting(
      False, "drop episodes without any advantage from the policy's loss, and with them their KL "
      "penalty and entropy bonus. Their surrogate is 0, except for 'square', which would pull them "
      'back to the old policy')
  score_norm: str = setting(
      'none', "scores are divided by the deviation of all scores so far ('scale'), and their mean "
      "is subtracted first ('normalise')", allowed=score_norm.MODES)
  score_clip: float = setting(0.0, 'bound of normalised scores; 0: off', at_least=0)
  imitation: float = setting(
      0.0, 'weight of the imitation loss: minus the mean log-prob of the agent tokens of '
      'demonstrations, see rollout.demonstrations', at_least=0)
  log_bias: bool = setting(
      True, 'measure ||C|| for every variant, not only for those that divide by it')

  def function(self, column: str) -> Callable:
    """Returns the function of a column: the column itself, or the built-in that it names."""
    value = getattr(self, column)
    if callable(value):
      return value
    names = BUILT_IN[column]
    if value not in names:
      raise ValueError(f'{column} {value!r} is none of {", ".join(names)}')
    return names[value]

  def _advantage_has(self, attribute: str) -> bool:
    return getattr(self.function('advantage'), attribute, False)

  @property
  def needs_critic(self) -> bool:
    """Whether the advantages are built on learnt values."""
    return self._advantage_has('needs_critic')

  @property
  def value_labels(self) -> tuple[str, ...]:
    """Names of the outputs of the value head, see `ModelConfig.value_labels`."""
    return ('value',) if self.value_loss == 'mse' else value_bins.labels(self)

  @property
  def needs_groups(self) -> bool:
    """Whether the advantages compare several episodes of one task."""
    return self._advantage_has('needs_groups')

  @property
  def uses_demonstrations(self) -> bool:
    """Whether demonstrations are rows of the policy gradient, and not only imitated."""
    return self._advantage_has('uses_demonstrations')

  @property
  def compares_rows(self) -> bool:
    """Whether the objective needs the log-probs of all rows of a step before any gradient."""
    return self.objective != 'surrogate'

  @property
  def breaks_ties(self) -> bool:
    """Whether the first of equal episodes is preferred. The rows then keep the sampled order."""
    return self.compares_rows or self._advantage_has('breaks_ties')

  @property
  def needs(self) -> tuple[str, ...]:
    """What the objective reads besides log-probs, see `objectives.needs`."""
    return getattr(self.function('objective'), 'needs', ())

  @property
  def needs_reference(self) -> bool:
    """Whether ref_logp is computed."""
    return self.kl_in != 'none' or 'reference' in self.needs

  @property
  def measures_bias(self) -> bool:
    """Whether the gradient C that clipping removed is computed."""
    divides = self.divisor != 'none' and self.norm_of == 'gradient'
    has_clip = self.ratio != 'none' and not self.compares_rows
    return has_clip and (self.log_bias or divides)

  def described(self) -> dict[str, Any]:
    """Returns {field: value} as JSON. A function is described by its name."""
    description = {}
    for field in dataclasses.fields(self):
      value = getattr(self, field.name)
      description[field.name] = _name(value) if callable(value) else value
    return description


@dataclasses.dataclass(frozen=True)
class GraoVariant(Variant):
  """The variant of GRAO with its two weights, see `advantages.grao`."""

  grao_beta: float = setting(0.5, 'weight of the reference answer', at_least=0)
  grao_lambda: float = setting(0.6, 'weight of samples against the reference', at_least=0)


# fmt: on


# Column -> its built-ins by name, for the columns that may also hold a function.
BUILT_IN: dict[str, dict[str, Any]] = {
    'advantage': advantages.ESTIMATORS,
    'ratio': dict.fromkeys(RATIOS),  # names of segments, see `correction`
    'surrogate': losses.SURROGATES,
    'objective': objectives.OBJECTIVES,
    'divisor': correction.DIVISORS,
}


def _name(function: Callable) -> str:
  """Returns the name of a function, never its address, because runs compare descriptions."""
  return getattr(function, '__name__', type(function).__name__)


# An objective of pairs holds the policy near its start by itself, and reads only which score is
# higher.
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
    # This project's, docs/study.md. The applied step is multiplied by ||g|| / (||g|| + ||C||).
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
    # Wu et al., arXiv 2405.00675. Choice: eta is 10. The authors' 100 to 1,000 (C) ask for
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
    # add KL(reference || policy) over the vocabulary (C). The gradient of k3 estimates its gradient
    # on samples of the policy. On the best of a group alone, the estimate is biased.
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
    # Zheng et al., arXiv 2307.04964: normalised and clipped scores (P). The numbers are those of
    # the released script (C).
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
    'grao': GraoVariant(advantages.grao, 'none', kl_in='none', entropy_coef=0.0),
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
