"""A `BaseVariant` describes a whole objective by the parts it is made of.

Five fields take either the name of a built-in, or a function. systems/parts.py has the names.

  advantage  (batch, variant) -> (advantages, returns)
             Both are [B,T], and `returns` are the critic's targets. `advantages.from_groups` makes
             an estimator from a function (scores, group_ids) -> advantages, all [B]. A function
             that reads batch.old_values is wrapped in `advantages.from_values`, so that the run
             trains a critic. An `Estimator` declares what else a run has to know.
  ratio      (batch, variant) -> labels
             [B,T] integers, computed once per update. The agent's tokens of a row with the same
             label share an importance ratio, the geometric mean of their ratios. They need not be
             adjacent. The function may read batch.tokens, turn_ids, old_logp, ..
  surrogate  (ratio, logp, advantages, variant) -> (objective, clipped)
             All are [B,T], and `clipped` is true where the clip changed the gradient. The trainer
             ascends the objective, through `ratio` and `logp`. It calls the function with a few
             bins at a time, so the results for a token depend on this token alone.
  objective  (outputs, batch, variant) -> (row_values, clipped)
             [b] and [b,T] for the rows of an optimizer step, whose log-probs are outputs.logp. The
             trainer ascends the sum of the values, in place of the surrogate. A `RowObjective`
             declares what else it reads.
  divisor    (g_norm, c_norm, any_clipped) -> number
             All are scalars: ||g||, ||C||, and whether any token was clipped. The gradient g is
             divided by the result.

`value_loss` takes a name alone.

A function reads its own settings from a dataclass that inherits from `variants.Variant` and adds
fields. A run sets them by `--config.algorithm.options.NAME=VALUE`.
"""

from collections.abc import Callable
import dataclasses
from typing import Any
from typing import NamedTuple
from typing import Protocol

import jax

from stppo_jax.types import setting
from stppo_jax.types import UserError

RATIOS = ('none', 'token', 'turn', 'chunk', 'sequence', 'turn_product', 'sequence_product')
AGGREGATIONS = (
    'token-mean',
    'seq-mean-token-sum',
    'seq-mean-token-mean',
    'seq-mean-token-sum-norm',
    'turn-mean-token-mean',
    'seq-mean-turn-mean',
)
KL_ESTIMATORS = ('k1', 'k2', 'k3')
ORDERS = ('before_clip', 'after_clip', 'step')
STEP_SCALES = ('none', 'ess')
CORRECTION_LEVELS = ('none', 'token', 'turn', 'sequence', 'sequence_geometric', 'sequence_mean')
SCORE_NORMS = ('none', 'scale', 'normalise')

# Fields that take the name of a built-in, or a function. systems/parts.py has the names.
FUNCTION_FIELDS = ('advantage', 'ratio', 'surrogate', 'objective', 'divisor')
NEEDS = ('reference', 'uniform', 'reference_kl')  # see `RowObjective`


class TransformSpec(Protocol):
  """What transforms of a batch read of `training.state.Spec`."""

  @property
  def variant(self) -> 'BaseVariant':
    """The objective."""

  @property
  def teacher_coef(self) -> float:
    """Weight of a teacher's advantages."""


class _Declared:
  """A function with what it declares. Two objects are equal if both parts are equal."""

  function: Callable

  def __call__(self, *arguments: Any) -> Any:
    return self.function(*arguments)

  @property
  def __name__(self) -> str:
    return function_name(self.function)


@dataclasses.dataclass(frozen=True)
class Estimator(_Declared):
  """An advantage: (batch, variant) -> (advantages, returns), both [B,T].

  Attributes:
    function: the function.
    needs_critic: it reads batch.old_values, so that the run trains a critic.
    needs_groups: it compares several episodes of one task.
    breaks_ties: it prefers the first of equal episodes. The rows then keep the sampled order.
    uses_demonstrations: demonstrations are rows of the policy gradient, and not only imitated.
    compares_scores: it compares the scores of sampled episodes alone. A group whose scores are
      equal then has no advantage, and dynamic sampling may replace it.
  """

  function: Callable
  needs_critic: bool = False
  needs_groups: bool = False
  breaks_ties: bool = False
  uses_demonstrations: bool = False
  compares_scores: bool = True


@dataclasses.dataclass(frozen=True)
class RowObjective(_Declared):
  """An objective that compares rows, see objectives.py.

  Attributes:
    function: (outputs, batch, variant) -> (row_values, clipped).
    needs: what it reads besides log-probs. 'reference' is batch.ref_logp, 'uniform' is
      outputs.uniform and batch.old_uniform, and 'reference_kl' is outputs.reference_kl.
    reads: fields of the variant that it reads, so that a run can warn of settings without effect.
      One that reads 'aggregation' averages over tokens, and reads an advantage of each token.
  """

  function: Callable
  needs: tuple[str, ...] = ()
  reads: tuple[str, ...] = ()

  def __post_init__(self):
    for name in self.needs:
      if name not in NEEDS:
        raise UserError(f'RowObjective.needs has {name!r}; allowed are {", ".join(NEEDS)}')


@dataclasses.dataclass(frozen=True)
class ValueHead:
  """How a critic represents values by its outputs, [B,T] or [B,T,n], and how it is trained.

  Attributes:
    labels: variant -> a name of each output, see `ModelConfig.value_labels`.
    values: (outputs, variant) -> values [B,T].
    loss: (outputs, old_values, returns, variant) -> the loss of each token [B,T].
  """

  labels: Callable[[Any], tuple[str, ...]]
  values: Callable[[jax.Array, Any], jax.Array]
  loss: Callable[[jax.Array, jax.Array, jax.Array, Any], jax.Array]


class TokenOutputs(NamedTuple):
  """What the policy computes of each token: [R,P] in bins, [b,T] in rows.

  An objective reads the first three, and its gradient runs through `logp` and `reference_kl`.
  """

  logp: jax.Array  # log-prob of the token
  # The mean log-prob over the vocabulary, a constant. It is computed for the need 'uniform'.
  uniform: jax.Array | None = None
  # KL(reference || policy) over the vocabulary. It is computed for the need 'reference_kl'.
  reference_kl: jax.Array | None = None
  entropy: jax.Array | None = None  # entropy of its distribution
  value_outputs: jax.Array | None = None  # outputs of a value head on the policy's trunk


def function_name(function: Callable) -> str:
  """Returns the name of a function, never its address, because runs compare descriptions."""
  return getattr(function, '__name__', type(function).__name__)


# The formatter is off, so that each setting takes few lines.
# fmt: off


@dataclasses.dataclass(frozen=True)
class BaseVariant:
  """One objective, as choices of the few parts in which algorithms differ.

  It knows no built-in part by its name, because these parts read it: `variants.Variant` does. The
  defaults are those of Search-R1 v0.2, except for `aggregation`, which is the paper's. The
  section `algorithm` of a config has the same fields. A value there overrides the variant's.
  """

  advantage: str | Callable = setting(
      'token_gae', 'how credit is assigned', plugin=True)
  ratio: str | Callable = setting(
      'token', 'which tokens share an importance ratio: the geometric mean of their ratios, or the '
      "product. 'none' is the plain policy gradient", allowed=RATIOS, plugin=True)
  surrogate: str | Callable = setting(
      'clip', 'objective as a function of ratio and advantage', plugin=True)
  objective: str | Callable = setting(
      'surrogate', "the sum of the tokens' surrogates, or an objective that compares the rows of a "
      'step, see objectives.py', plugin=True)
  divisor: str | Callable = setting(
      'none', 'clipping-bias correction: the divisor of the gradient', plugin=True)
  norm_of: str = setting(
      'gradient', "||C|| is the norm of the 'gradient' that clipping removed, or the size of the "
      "clipped part of the 'loss'", allowed=('gradient', 'loss'))
  divide: str = setting(
      'before_clip', "what the divisor divides: the gradient 'before_clip' or 'after_clip' of its "
      "norm, or the optimizer's 'step', which Adam cannot cancel", allowed=ORDERS)
  step_scale: str = setting(
      'none', "factor of the optimizer's step: 'ess' is the root of the effective share of "
      'episodes, by their weights from the sampler to the current policy (VCPO)',
      allowed=STEP_SCALES)
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
      allowed=AGGREGATIONS)
  norm_length: int = setting(
      0, 'divisor of seq-mean-token-sum-norm, in tokens; 0: rollout.max_total', at_least=0)
  entropy_coef: float = setting(0.001, 'weight of the entropy bonus')
  kl_in: str = setting(
      'reward', 'where the KL penalty to the reference is added',
      allowed=('reward', 'loss', 'none'))
  kl_estimator: str = setting('k1', 'estimator of the KL penalty', allowed=KL_ESTIMATORS)
  kl_ratio: bool = setting(
      True, "with kl_in='loss': multiply the KL of a token by its ratio to the policy that sampled "
      'it, so that the gradient is that of KL(policy || reference), see losses.kl_penalty')
  kl_coef: float = setting(0.001, 'weight of the KL penalty', at_least=0)
  kl_target: float = setting(
      0.0, 'above 0 the weight adapts towards this KL per token, usually 0.1', at_least=0)
  kl_horizon: float = setting(
      10_000.0, 'episodes over which the weight adapts. Each agent of an episode counts',
      at_least=1)
  value_loss: str = setting(
      'mse', "the critic's loss: 'mse' regresses the return, 'hl_gauss' classifies it into bins "
      '(see systems/hl_gauss.py)')
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
      "ratio is 1 up to rounding; 'sampler' takes the sampler's",
      allowed=('trainer', 'sampler'))
  rollout_is: str = setting(
      'none', "level of the importance weights from the sampler's log-probs to old_logp, see "
      "off_policy.py; needs old_logp='trainer'", allowed=CORRECTION_LEVELS)
  rollout_is_threshold: float = setting(
      2.0, 'upper bound of the weights of rollout_is', at_least=1)
  rollout_is_low: float = setting(
      0.0, 'above 0, weights below it or above the threshold become 0', at_least=0, at_most=1)
  rollout_is_normalize: bool = setting(False, 'divide the weights by their mean over the batch')
  rollout_rs: str = setting(
      'none', "level of the rejection: tokens are dropped from the policy's loss if their ratio "
      'from the sampler to old_logp is out of bounds. A sequence level drops whole episodes',
      allowed=CORRECTION_LEVELS)
  rollout_rs_low: float = setting(
      0.5, 'lower bound of the ratio of rollout_rs', above=0, at_most=1)
  rollout_rs_high: float = setting(2.0, 'upper bound of the ratio of rollout_rs', at_least=1)
  extrapolation: float = setting(
      0.0, 'a: each update samples with and starts from the parameters p + a (p - p_before), '
      'where p_before are the parameters after the previous update (APO, arXiv 2410.06293)',
      at_least=0, below=1)
  mask_truncated: bool = setting(
      False, "drop episodes that ended at a limit from the policy's loss. Of a program's episode, "
      'only the rows that did are dropped')
  mask_zero_advantage: bool = setting(
      False, "drop episodes without any advantage from the policy's loss, and with them their KL "
      "penalty and entropy bonus. Their surrogate is 0, except for 'square', which would pull them "
      'back to the old policy')
  score_norm: str = setting(
      'none', "scores are divided by the deviation of all scores so far ('scale'), and their mean "
      "is subtracted first ('normalise')", allowed=SCORE_NORMS)
  score_clip: float = setting(0.0, 'bound of normalised scores; 0: off', at_least=0)
  imitation: float = setting(
      0.0, 'weight of the imitation loss: minus the mean log-prob of the agent tokens of '
      'demonstrations, see rollout.demonstrations', at_least=0)
  log_bias: bool = setting(
      True, 'measure ||C|| for every variant, not only for those that divide by it')

  def function(self, field: str) -> Any:
    """Returns the function of a field: its value, or the built-in that it names."""
    value = getattr(self, field)
    return value if callable(value) else self.built_in(field, value)

  def built_in(self, field: str, name: str) -> Any:
    """Returns the built-in part of this name: `variants.Variant` knows them."""
    raise NotImplementedError(f'{field}={name!r} is a name: use variants.Variant')

  def _advantage_has(self, attribute: str) -> bool:
    return getattr(self.function('advantage'), attribute, False)

  @property
  def needs_critic(self) -> bool:
    """Whether the advantages are built on learnt values."""
    return self._advantage_has('needs_critic')

  @property
  def value_head(self) -> ValueHead:
    """How the critic represents values."""
    return self.function('value_loss')

  @property
  def value_labels(self) -> tuple[str, ...]:
    """Names of the outputs of the value head, see `ModelConfig.value_labels`."""
    return self.value_head.labels(self)

  @property
  def needs_groups(self) -> bool:
    """Whether the advantages compare several episodes of one task."""
    return self._advantage_has('needs_groups')

  @property
  def uses_demonstrations(self) -> bool:
    """Whether demonstrations are rows of the policy gradient, and not only imitated."""
    return self._advantage_has('uses_demonstrations')

  @property
  def compares_scores(self) -> bool:
    """Whether a group whose scores are equal has no advantage."""
    return self.needs_groups and self._advantage_has('compares_scores')

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
    """What the objective reads besides log-probs, see `RowObjective`."""
    return getattr(self.function('objective'), 'needs', ())

  @property
  def objective_reads(self) -> tuple[str, ...]:
    """Fields that an objective that compares rows reads, see `RowObjective`."""
    return getattr(self.function('objective'), 'reads', ())

  @property
  def compares_episodes(self) -> bool:
    """Whether the objective compares rows by one advantage per episode, and not by tokens."""
    return self.compares_rows and 'aggregation' not in self.objective_reads

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

  def described(self) -> dict[str, object]:
    """Returns {field: value} as JSON. A function is described by its name."""
    description = {}
    for field in dataclasses.fields(self):
      value = getattr(self, field.name)
      description[field.name] = function_name(value) if callable(value) else value
    return description


# fmt: on
