"""The objective of a run: the `Variant` that the config names, resolved and checked."""

from collections.abc import Callable
import dataclasses
from typing import Any

from absl import logging

from stppo_jax import config as config_lib
from stppo_jax import plugins
from stppo_jax import types
from stppo_jax.algorithms import variant as variant_lib
from stppo_jax.algorithms import variants
from stppo_jax.algorithms.variants import Variant
from stppo_jax.config import Config
from stppo_jax.settings import validation
from stppo_jax.systems import parts


def _has_function(variant: Variant) -> bool:
  """Returns whether a user's function may read any field."""
  return any(callable(getattr(variant, field)) for field in variant_lib.FUNCTION_FIELDS)


def _clips(variant: Variant) -> bool:
  """Returns whether the bounds of a clip are read."""
  if variant.compares_rows:
    return 'clip_low' in variant.objective_reads
  return variant.ratio != 'none' and variant.surrogate != 'square'


def _reads_beta(variant: Variant) -> bool:
  """Returns whether beta scales a log-ratio."""
  if variant.compares_rows:
    return 'beta' in variant.objective_reads
  return variant.surrogate == 'square'


def _aggregates(variant: Variant) -> bool:
  """Returns whether the weights of tokens are read: the loss of pairs is a mean over pairs."""
  if variant.kl_in == 'loss' or variant.entropy_coef != 0 or not variant.compares_rows:
    return True
  return callable(variant.objective) or 'aggregation' in variant.objective_reads


# Fields that change nothing without another setting, with a test whether a variant has that one.
_NEEDED: tuple[tuple[str, str, Callable[[Variant], bool]], ...] = (
    (
        'gamma',
        'an advantage that discounts',
        lambda v: not v.needs_groups and v.advantage != 'none',
    ),
    ('lam', 'a critic', lambda v: v.needs_critic or callable(v.advantage)),
    ('lam_critic value_clip value_loss', 'a critic', lambda v: v.needs_critic),
    (
        'value_bins value_low value_high',
        'value_loss=hl_gauss',
        lambda v: v.value_loss == 'hl_gauss',
    ),
    ('clip_low clip_high', 'a clipped ratio', lambda v: _clips(v) or _has_function(v)),
    ('dual_clip', 'a clipped ratio', lambda v: _clips(v) or _has_function(v) or not v.dual_clip),
    (
        'beta',
        'surrogate=square or an objective of pairs',
        lambda v: _reads_beta(v) or _has_function(v),
    ),
    ('ratio surrogate min_advantage', 'objective=surrogate', lambda v: not v.compares_rows),
    (
        'alpha',
        'an objective that reads it, such as tdpo or rover',
        lambda v: 'alpha' in v.objective_reads or _has_function(v),
    ),
    ('divisor', 'a clipped ratio', lambda v: _clips(v) or v.divisor == 'none'),
    ('chunk_length', 'ratio=chunk', lambda v: v.ratio == 'chunk' or callable(v.ratio)),
    ('divide norm_of', 'a divisor', lambda v: v.divisor != 'none'),
    ('whiten score_norm', 'an advantage of the reward', lambda v: v.advantage != 'none'),
    ('whiten_over', 'whiten=True', lambda v: v.whiten),
    ('aggregation', 'a loss that is a mean over tokens', _aggregates),
    (
        'norm_length',
        'aggregation=seq-mean-token-sum-norm',
        lambda v: v.aggregation == 'seq-mean-token-sum-norm' and _aggregates(v),
    ),
    ('score_clip', 'score_norm=scale or normalise', lambda v: v.score_norm != 'none'),
    ('kl_coef kl_estimator kl_target', 'kl_in=reward or loss', lambda v: v.kl_in != 'none'),
    ('kl_ratio', 'kl_in=loss', lambda v: v.kl_in == 'loss'),
    ('kl_horizon', 'kl_target', lambda v: v.kl_target > 0 and v.kl_in != 'none'),
    (
        'rollout_is_threshold rollout_is_low rollout_is_normalize',
        'rollout_is',
        lambda v: v.rollout_is != 'none',
    ),
    ('rollout_rs_low rollout_rs_high', 'rollout_rs', lambda v: v.rollout_rs != 'none'),
)

# Settings of other sections that change nothing without another setting, with a test for that one.
_NEEDED_SETTINGS: tuple[tuple[str, str, Callable[[Config, Variant], bool]], ...] = (
    (
        'rollout.first_rows rollout.max_group',
        'rollout.allocation=dars_et or dars_hw',
        lambda c, v: c.rollout.allocation != 'even',
    ),
    (
        'rollout.demonstrated rollout.demonstrate_every',
        'rollout.demonstrations',
        lambda c, v: bool(c.rollout.demonstrations),
    ),
    (
        'rollout.engine_kind rollout.engine_folder rollout.engine_push rollout.engine_gap '
        'rollout.engine_timeout_s rollout.engine_outage_s',
        'rollout.engine',
        lambda c, v: bool(c.rollout.engine),
    ),
    (
        'pipeline.staleness rollout.max_num_gen_batches',
        'sampling: rollout.replay trains on saved batches',
        lambda c, v: not c.rollout.replay,
    ),
    ('teacher.coef', 'teacher.folder or teacher.address', lambda c, v: c.teacher.is_given),
    ('teacher.max_outage_s', 'teacher.address', lambda c, v: bool(c.teacher.address)),
    ('model.critic model.critic_folder', 'a critic', lambda c, v: v.needs_critic),
    ('algorithm.value_coef', 'model.critic=shared', validation.has_shared_critic),
    ('placement.critic', 'a separate critic', validation.has_critic),
    (
        'placement.reference',
        'a reference or a teacher in a folder',
        lambda c, v: v.needs_reference or bool(c.teacher.folder),
    ),
    ('model.lora_alpha model.lora_targets', 'model.lora_rank', lambda c, v: c.model.lora_rank > 0),
    (
        'retriever.encoder retriever.embeddings retriever.device retriever.query_prompt '
        'retriever.passage_prompt',
        'retriever.kind=dense or hybrid',
        lambda c, v: c.retriever.kind in ('dense', 'hybrid') or ':' in c.retriever.kind,
    ),
    (
        'retriever.url retriever.dialect retriever.concurrency retriever.max_queries '
        'retriever.timeout_s retriever.retries retriever.backoff_s',
        'retriever.kind=http',
        lambda c, v: c.retriever.kind == 'http' or ':' in c.retriever.kind,
    ),
    (
        'data.corpus',
        'a retriever in this process',
        lambda c, v: c.retriever.kind not in ('http', 'none'),
    ),
    (
        'env.tool_timeout_s env.tool_max_chars',
        'env.tools',
        lambda c, v: bool(c.env.tools or c.env.mix),
    ),
    (
        'serve.agent_timeout_s serve.on_crash',
        'env.kind=gateway:.. or verifiers:..',
        lambda c, v: c.env.is_program,
    ),
    ('log.tracker', 'log.project', lambda c, v: bool(c.log.project)),
    ('log.episodes_every', 'log.episodes=True', lambda c, v: c.log.episodes),
)


def make_variant(config: Config) -> Variant:
  """Resolves and checks the objective that the config names, with the fields it overrides."""
  algorithm = config.algorithm
  variant = plugins.load('algorithm.variant', algorithm.variant, variants.VARIANTS)
  if not isinstance(variant, Variant):
    raise types.UserError(
        f'config.algorithm.variant={algorithm.variant!r} is a {type(variant).__name__}: '
        'give the name of a stppo_jax.algorithms.variants.Variant'
    )
  variant = dataclasses.replace(variant, **_overrides(algorithm, variant))
  _check_hashable(algorithm.variant, variant)
  functions = {}
  for field in variant_lib.FUNCTION_FIELDS:
    names = parts.BUILT_IN[field]
    part = getattr(variant, field)
    if isinstance(part, str) and part not in names:
      part = plugins.load(f'algorithm.{field}', part, names)
      functions[field] = part
    if not isinstance(part, str) and not callable(part):
      raise types.UserError(
          f'config.algorithm.{field}={getattr(variant, field)!r}: must name a function, see '
          'stppo_jax/algorithms/variant.py'
      )
  variant_with_names = variant  # the fields as they are given, for messages
  variant = dataclasses.replace(variant, **functions)
  is_corrected = variant.rollout_is != 'none' or variant.rollout_rs != 'none'
  # Mean log-probs over the vocabulary are the trainer's, so the ratios have to be, too.
  has_ratio = variant.ratio != 'none' and 'uniform' not in variant.needs
  if config.rollout.engine and algorithm.old_logp is None and has_ratio and not is_corrected:
    # Choice: the study's rule for stale batches is the default wherever another program samples.
    if variant.old_logp != 'sampler':
      logging.log_first_n(
          logging.INFO,
          "config.rollout.engine: the ratios start from the engine's log-probs, see "
          '--config.algorithm.old_logp',
          1,
      )
    variant = dataclasses.replace(variant, old_logp='sampler')
  validation.check_variant(config, variant)
  for field in variant_lib.FUNCTION_FIELDS:
    function = getattr(variant, field)
    if not callable(function):
      continue
    from stppo_jax.algorithms import checks  # built-in parts need none

    if wrong := checks.check(field, function, variant, config.rollout.group_size):
      where = f'config.algorithm.{field}={getattr(variant_with_names, field)!r}'
      if field not in functions:
        where = f'config.algorithm.variant={algorithm.variant!r}, its {field}'
      raise types.UserError(f'{where}: {wrong}')
  return dataclasses.replace(variant, norm_length=variant.norm_length or config.rollout.max_total)


def _check_hashable(name: str, variant: Variant) -> None:
  """Refuses a field that cannot be a static part of a compiled function."""
  # Functions may be any objects.
  for field in vars(variant).keys() - set(variant_lib.FUNCTION_FIELDS):
    try:
      hash(getattr(variant, field))
    except TypeError:
      kind = type(getattr(variant, field)).__name__
      raise types.UserError(
          f'config.algorithm.variant={name!r}: its field {field} holds a {kind}, which cannot be '
          'hashed: make it a tuple, a number or a text'
      ) from None


def _overrides(algorithm: config_lib.AlgorithmSettings, variant: Variant) -> dict[str, Any]:
  """Returns the fields of the variant that the config sets."""
  names = [field.name for field in dataclasses.fields(Variant)]
  own = {field.name for field in dataclasses.fields(variant)} - set(names)
  for name, value in algorithm.options.items():
    if name not in own:
      raise types.UserError(
          f'config.algorithm.options.{name}: the fields that {algorithm.variant!r} adds to a '
          f'Variant are {", ".join(sorted(own)) or "none"}'
      )
    if not isinstance(value, (bool, int, float, str, type(None))):
      raise types.UserError(
          f'config.algorithm.options.{name}={value!r}: give a number, a text, true, false or null'
      )
  given = {name: getattr(algorithm, name) for name in names}
  return {k: v for k, v in given.items() if v is not None} | algorithm.options


def warn_of_settings(config: Config, variant: Variant) -> None:
  """Logs settings that are allowed and seldom meant."""
  train = config.train
  name = config.algorithm.variant
  for fields, needed, has_needed in _NEEDED:
    for field in fields.split():
      if getattr(config.algorithm, field) is not None and not has_needed(variant):
        logging.warning('config.algorithm.%s has no effect without %s', field, needed)
  defaults = Config()
  for paths, needed, is_there in _NEEDED_SETTINGS:
    for path in paths.split():
      is_set = validation.get(config, path) != validation.get(defaults, path)
      if is_set and not is_there(config, variant):
        logging.warning('config.%s has no effect without %s', path, needed)
  steps_per_update = train.epochs * train.episodes // train.mini_batch
  if variant.ratio == 'none' and steps_per_update > 1:
    logging.warning(
        '%s has no importance ratio, and only the first of its %d optimizer steps per update is '
        'on-policy: set --config.train.mini_batch=%d --config.train.epochs=1',
        name,
        steps_per_update,
        train.episodes,
    )
  learns_from_demonstrations = variant.imitation or variant.uses_demonstrations
  has_demonstrations = config.rollout.demonstrations or config.rollout.replay
  if learns_from_demonstrations and not has_demonstrations:
    logging.warning(
        '%s learns from demonstrations, and there are none: set --config.rollout.demonstrations',
        name,
    )
  is_corrected = variant.rollout_is != 'none' or variant.rollout_rs != 'none'
  starts_at_sampler = variant.old_logp == 'sampler' and variant.ratio != 'none'
  is_older = config.rollout.replay or config.pipeline.staleness
  if is_older and not (is_corrected or starts_at_sampler):
    given = f'config.pipeline.staleness={config.pipeline.staleness}'
    sampled_by, advice = 'an older policy', 'set --config.pipeline.staleness=0'
    if config.rollout.replay:
      given = f'config.rollout.replay={config.rollout.replay!r}'
      sampled_by, advice = 'the policy that sampled them', 'sample new ones'
    if not variant.compares_rows:
      advice = 'set --config.algorithm.rollout_is=turn'
    if not variant.compares_rows and variant.ratio != 'none':
      advice = (
          'set --config.algorithm.old_logp=sampler (docs/study.md has what it prevents), or '
          '--config.algorithm.rollout_is=turn'
      )
    logging.warning(
        "%s trains on episodes of %s, and %s treats them as the current one's: %s",
        given,
        sampled_by,
        name,
        advice,
    )
  if config.rollout.is_cut:
    logging.warning(
        'config.rollout.top_p=%g, top_k=%d: the log-probs of the sampler are those of the cut '
        'distribution, and the log-probs of the trainer are those of the whole one. Every ratio '
        'starts below 1, at the probability of the tokens that are kept (at least top_p), so part '
        'of the clip is used up before the first step. Set --config.rollout.top_p=1 '
        '--config.rollout.top_k=0, and lower rollout.temperature for less random turns: both sides '
        'use it',
        config.rollout.top_p,
        config.rollout.top_k,
    )
  if variant.needs_critic and config.model.critic == 'shared':
    logging.warning(
        'config.model.critic=shared: one optimizer, that of config.actor, trains policy and value '
        'head; config.critic has no effect'
    )
  if variant.advantage == 'group_zscore' and variant.kl_in == 'reward':
    logging.warning(
        'config.algorithm.kl_in=reward puts the KL into the scores that %s divides by their spread '
        'in a group: a group whose episodes all do equally well trains on the KL alone, at full '
        'strength. Set --config.algorithm.kl_in=loss --config.algorithm.kl_estimator=k3',
        name,
    )
  if variant.mask_zero_advantage and variant.kl_in == 'loss' and steps_per_update > 1:
    logging.warning(
        'config.algorithm.mask_zero_advantage=True with kl_in=loss and %d optimizer steps per '
        'update: episodes of equal scores have no surrogate, and their KL is what holds the policy '
        'where the other steps move it (arXiv 2604.06159 reports an error of .297 without them, '
        '.063 with them). Set --config.algorithm.mask_zero_advantage=False, or kl_in=none',
        steps_per_update,
    )
  if variant.divide == 'step' and variant.divisor == 'paper':
    logging.warning(
        "config.algorithm.divide='step' with divisor='paper' multiplies the learning rate by "
        '1 / ||C||, without a bound where little is clipped: --config.algorithm.divisor=floor or '
        'relative never exceeds the rate'
    )
