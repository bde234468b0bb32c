"""The schema of a run: every setting with its default and its meaning. An experiment states what differs.

Defaults are those of Search-R1 v0.2, the likely base of the paper's runs, unless a comment says more.
`validate` holds the rules that span fields; it is called once, before anything heavy.
"""

import dataclasses

from stppo_jax.types import UserError


LORA_TARGETS = ('q_proj', 'k_proj', 'v_proj', 'o_proj', 'gate_proj', 'up_proj', 'down_proj')


@dataclasses.dataclass
class Data:
  """Questions and passages."""

  source: str = 'embedded'  # or a folder with qa.jsonl and corpus.jsonl, a .jsonl, a Search-R1 .parquet
  corpus: str = ''  # folder or .jsonl of passages; empty: the same as `source`
  train_split: str = 'train'
  eval_split: str = 'dev'
  datasets: tuple[str, ...] = ()  # keep only these; empty: all


@dataclasses.dataclass
class Env:
  """The task as the agent meets it."""

  prompt: str = 'search_r1'  # 'search_r1' | 'short' (for tiny models)
  max_turns: int = 4  # searches; one more generation may follow, in which a search gets nothing
  reward: str = 'em'  # 'em' | 'sub_em' | 'f1' | 'format'


@dataclasses.dataclass
class Retriever:
  """Where searches go."""

  kind: str = 'bm25'  # 'bm25' (in process) | 'http'
  top_k: int = 3
  url: str = 'http://127.0.0.1:8000/retrieve'
  dialect: str = 'search_r1'  # 'search_r1' | 'ragen'
  timeout_s: float = 10.0
  retries: int = 3
  backoff_s: float = 0.5
  max_failed_share: float = 0.5  # of a batch's episodes; above it the run waits and plays them anew
  max_outage_s: float = 3600.0  # of such waiting; then the run saves a checkpoint and stops


@dataclasses.dataclass
class Model:
  """The policy, and the trunk its critic starts from."""

  folder: str = 'embedded'  # 'embedded' (the tiny warm-started one) | a Hugging Face folder
  critic: str = 'separate'  # 'separate' trunk | 'shared' trunk with a second head
  critic_folder: str = ''  # empty: the policy's folder
  dtype: str = 'bfloat16'  # compute; logits, log-probs and losses are float32 always
  param_dtype: str = 'float32'
  remat: str = 'full'  # 'none' | 'dots' | 'full': what the backward pass recomputes
  scan_layers: bool = True  # False unrolls: slower to compile, faster on CPU
  logp_chunk: int = 512  # tokens of a row whose logits are live at once; 0: all
  # Of training: 'splash' (TPU), 'cudnn' (NVIDIA, bfloat16) | 'plain' | 'auto': the first that can run.
  attention: str = 'auto'
  attention_chunk: int = 512  # tokens of a row whose scores are live at once in plain attention; 0: all
  # LoRA: low-rank adapters (and value heads) are trained, and all else stands still. Then actor and critic
  # share one base where they start from the same folder, the reference is the base itself, and learning
  # rates want to be 10 to 100 times those of full training: 1e-4 and above.
  lora_rank: int = 0  # 0: full training
  lora_alpha: float = 16.0  # what adapters add is multiplied by alpha / rank
  lora_targets: tuple[str, ...] = LORA_TARGETS  # kernels with an adapter, by PEFT's names


@dataclasses.dataclass
class Rollout:
  """Sampling. Lengths in tokens."""

  group_size: int = 1  # episodes a question
  temperature: float = 1.0
  top_k: int = 0  # 0: off
  top_p: float = 1.0  # 1: off
  max_prompt: int = 2048
  max_turn: int = 500  # new tokens a turn
  max_observation: int = 500
  max_total: int = 4096
  rows: int = 0  # episodes under way at once; 0: all of the batch
  width: int = 0  # rows that one device call decodes; 0: all. A CPU wants few: 32
  chunks: tuple[int, ...] = (32, 128)  # tokens of a row that one call may read
  threads: int = 4  # retriever calls under way while other rows go on; 0: the rows wait for each


@dataclasses.dataclass
class Algorithm:
  """Which row of `variants.VARIANTS`, and the columns to override (None: the row's own)."""

  variant: str = 'st_ppo'
  advantage: str | None = None
  ratio: str | None = None  # 'none' | 'token' | 'turn' | 'sequence'
  divisor: str | None = None  # 'none' | 'paper' | 'floor' | 'relative'
  norm_of: str | None = None  # 'gradient' | 'loss'
  min_advantage: str | None = None  # 'token' | 'turn'
  clip_low: float | None = None
  clip_high: float | None = None
  whiten: bool | None = None
  dual_clip: float = 0.0  # c > 1 bounds the ratio where the advantage is negative; 0: off
  gamma: float = 1.0
  lam: float = 1.0
  aggregation: str = 'seq-mean-token-mean'  # the paper's; or another of verl's loss_agg_mode
  norm_length: int = 0  # divisor of seq-mean-token-sum-norm; 0: rollout.max_total
  entropy_coef: float = 0.001
  kl_in: str = 'reward'  # 'reward' | 'loss' | 'none'
  kl_estimator: str = 'k1'  # 'k1' | 'k2' | 'k3'
  kl_coef: float = 0.001
  kl_target: float = 0.0  # above 0: the coefficient adapts towards this KL (usual: 0.1)
  kl_horizon: float = 10_000.0  # episodes
  value_clip: float = 0.5  # 0: off
  value_coef: float = 0.5  # weight of the critic's loss on a shared trunk
  old_logp: str = 'trainer'  # 'trainer': recomputed, first ratio exactly 1; 'sampler': as reported
  # Weights that bridge behaviour_logp to old_logp, see `rollout_correction`; for old_logp 'trainer'.
  is_correction: str = 'none'  # 'none' | 'token' | 'turn' | 'sequence'
  is_threshold: float = 2.0  # they are truncated from above; verl's rollout_is_threshold
  log_bias: bool = True  # measure ||C|| for every variant, not only those that divide by it


@dataclasses.dataclass
class Optimizer:
  """AdamW with linear warm-up, then constant."""

  lr: float = 1e-6
  warmup: float = 0.285  # share of all updates
  betas: tuple[float, float] = (0.9, 0.999)
  eps: float = 1e-8
  weight_decay: float = 0.01
  grad_clip: float = 1.0  # global norm, after the divisor


@dataclasses.dataclass
class Train:
  """The outer loop. Counts of episodes."""

  updates: int = 1005  # rollouts; each is followed by epochs * episodes / mini_batch optimizer steps
  episodes: int = 512  # a rollout
  mini_batch: int = 256  # episodes an optimizer step: the reuse that makes the update off-policy
  # Bins of a forward and backward pass: changes memory and speed, never the result. A CPU likes 4 to 8.
  micro_batch: int = 64
  epochs: int = 1
  # Tokens of a bin, in which episodes are packed behind each other; all bins of a micro-batch are alike.
  # The last holds any episode. More of them: less padding, and longer to compile.
  length_buckets: tuple[int, ...] = (1024, 2048, 4096)
  checkpoint_every: int = 100  # updates; 0: only at the end
  keep_checkpoints: int = 2
  on_save_error: str = 'continue'  # 'continue' | 'stop', when a checkpoint cannot be written
  max_nonfinite: int = 3  # steps skipped in a row, their gradients not finite, until ..
  on_nonfinite: str = 'stop'  # .. the run 'stop's, or goes on from a 'rollback' with other questions
  critic_warmup: int = 0  # updates that train the critic alone


@dataclasses.dataclass
class Pipeline:
  """How far sampling runs ahead of training."""

  # s: the batch of update n is sampled with the parameters of update n-1-s while others are trained
  # on, by one thread more. 0: one after the other. Holds up to s + 1 copies of the policy.
  staleness: int = 0


@dataclasses.dataclass
class Mesh:
  """Devices: data * fsdp * tensor of them; one axis may be -1, meaning whatever is left."""

  data: int = 1
  fsdp: int = -1
  tensor: int = 1


@dataclasses.dataclass
class Placement:
  """Where parts wait while they are not used: 'device', or the 'host' memory of its machine.

  A step fetches what it needs from the host and puts it back: device memory against time.
  """

  optimizer: str = 'device'  # moments of actor and critic; used at the end of an optimizer step
  critic: str = 'device'  # the separate critic; not used while sampling
  reference: str = 'device'  # used once an update, for its log-probs


@dataclasses.dataclass
class Eval:
  """Greedy evaluation on held-out questions."""

  every: int = 50  # updates; 0: only before and after
  episodes: int = 0  # 0: the whole split
  rows: int = 128  # questions under way at once


@dataclasses.dataclass
class Log:
  """What is written beside metrics.jsonl."""

  tensorboard: bool = True
  wandb_project: str = ''  # empty: off
  episodes: bool = True  # every sampled episode, tokens and per-token numbers


@dataclasses.dataclass
class Health:
  """Limits of training/health.py, on means over `window` updates; 0 turns one off.

  Shares are of turns or of episodes. The limits were set by hand: wide enough for a run that learns.
  """

  window: int = 5
  stop_on: tuple[str, ...] = ()  # of the names below: those that end the run, not only warn
  score_drop: float = 0.5  # share of the best score that is lost
  entropy_drop: float = 0.9  # share of the first entropy that is lost
  kl: float = 1.0  # nats a token from the reference
  ppo_kl: float = 0.1  # nats a token from the policy that sampled
  sampler_gap: float = 0.01  # k3 nats a token between sampler and trainer; rounding gives 1e-4
  invalid: float = 0.5  # turns without a valid action
  repeated: float = 0.5  # turns that equal an earlier one of their episode
  empty: float = 0.1  # turns without a visible character
  cut: float = 0.3  # turns that ran into rollout.max_turn
  truncated: float = 0.7  # episodes that end at a limit
  retrieval_failed: float = 0.1  # episodes in which a search failed


@dataclasses.dataclass
class Config:
  """One run."""

  name: str = 'run'
  seed: int = 0
  data: Data = dataclasses.field(default_factory=Data)
  env: Env = dataclasses.field(default_factory=Env)
  retriever: Retriever = dataclasses.field(default_factory=Retriever)
  model: Model = dataclasses.field(default_factory=Model)
  rollout: Rollout = dataclasses.field(default_factory=Rollout)
  algorithm: Algorithm = dataclasses.field(default_factory=Algorithm)
  actor: Optimizer = dataclasses.field(default_factory=Optimizer)
  critic: Optimizer = dataclasses.field(
      default_factory=lambda: Optimizer(lr=1e-5, warmup=0.015))
  train: Train = dataclasses.field(default_factory=Train)
  pipeline: Pipeline = dataclasses.field(default_factory=Pipeline)
  mesh: Mesh = dataclasses.field(default_factory=Mesh)
  placement: Placement = dataclasses.field(default_factory=Placement)
  eval: Eval = dataclasses.field(default_factory=Eval)
  log: Log = dataclasses.field(default_factory=Log)
  health: Health = dataclasses.field(default_factory=Health)


CHOICES = {
    'env.prompt': ('search_r1', 'short'),
    'env.reward': ('em', 'sub_em', 'f1', 'format'),
    'retriever.kind': ('bm25', 'http'),
    'retriever.dialect': ('search_r1', 'ragen'),
    'model.critic': ('separate', 'shared'),
    'model.dtype': ('float32', 'bfloat16'),
    'model.param_dtype': ('float32', 'bfloat16'),
    'model.remat': ('none', 'dots', 'full'),
    'model.attention': ('auto', 'splash', 'cudnn', 'plain'),
    'algorithm.variant': ('ppo', 'turn_ppo', 's_ppo', 'st_ppo', 'grpo', 'so_grpo', 'gspo', 'rloo',
                          'reinforce'),
    'algorithm.advantage': (None, 'token_gae', 'turn_gae', 'bad_gae', 'group_zscore',
                            'leave_one_out', 'turn_returns'),
    'algorithm.ratio': (None, 'none', 'token', 'turn', 'sequence'),
    'algorithm.divisor': (None, 'none', 'paper', 'floor', 'relative'),
    'algorithm.norm_of': (None, 'gradient', 'loss'),
    'algorithm.min_advantage': (None, 'token', 'turn'),
    'algorithm.aggregation': ('token-mean', 'seq-mean-token-sum', 'seq-mean-token-mean',
                              'seq-mean-token-sum-norm'),
    'algorithm.kl_in': ('reward', 'loss', 'none'),
    'algorithm.kl_estimator': ('k1', 'k2', 'k3'),
    'algorithm.old_logp': ('trainer', 'sampler'),
    'algorithm.is_correction': ('none', 'token', 'turn', 'sequence'),
    'train.on_save_error': ('continue', 'stop'),
    'train.on_nonfinite': ('stop', 'rollback'),
    'placement.optimizer': ('device', 'host'),
    'placement.critic': ('device', 'host'),
    'placement.reference': ('device', 'host'),
}

HEALTH_RULES = tuple(
    field.name for field in dataclasses.fields(Health) if field.name not in ('window', 'stop_on'))

AT_LEAST = {  # field: smallest value allowed
    'seed': 0,
    'env.max_turns': 0,
    'retriever.top_k': 1, 'retriever.timeout_s': 0.001, 'retriever.retries': 0,
    'retriever.backoff_s': 0, 'retriever.max_failed_share': 0, 'retriever.max_outage_s': 0,
    'model.logp_chunk': 0, 'model.attention_chunk': 0, 'model.lora_rank': 0, 'model.lora_alpha': 1e-6,
    'rollout.group_size': 1, 'rollout.temperature': 1e-3, 'rollout.top_k': 0,
    'rollout.max_prompt': 1, 'rollout.max_turn': 1, 'rollout.max_observation': 1,
    'rollout.rows': 0, 'rollout.width': 0, 'rollout.threads': 0,
    'algorithm.clip_low': 0, 'algorithm.clip_high': 0, 'algorithm.gamma': 0, 'algorithm.lam': 0,
    'algorithm.norm_length': 0, 'algorithm.kl_coef': 0, 'algorithm.kl_target': 0,
    'algorithm.kl_horizon': 1, 'algorithm.value_clip': 0, 'algorithm.value_coef': 0,
    'algorithm.is_threshold': 1,
    'actor.lr': 0, 'actor.warmup': 0, 'actor.weight_decay': 0, 'actor.grad_clip': 1e-12,
    'critic.lr': 0, 'critic.warmup': 0, 'critic.weight_decay': 0, 'critic.grad_clip': 1e-12,
    'train.updates': 0, 'train.episodes': 1, 'train.mini_batch': 1, 'train.micro_batch': 1,
    'train.epochs': 1, 'train.checkpoint_every': 0, 'train.keep_checkpoints': 1,
    'train.max_nonfinite': 1, 'train.critic_warmup': 0, 'pipeline.staleness': 0,
    'eval.every': 0, 'eval.episodes': 0, 'eval.rows': 1,
    'health.window': 1, **{f'health.{name}': 0 for name in HEALTH_RULES},
}

AT_MOST = {
    'algorithm.gamma': 1, 'algorithm.lam': 1, 'actor.warmup': 1, 'critic.warmup': 1,
    'retriever.max_failed_share': 1,
}


def validate(config: Config) -> Config:
  """Returns `config` if it makes sense, else raises a UserError that says what to change."""
  for path, allowed in CHOICES.items():
    if (value := get(config, path)) not in allowed:
      raise UserError(f'config.{path}={value!r}: allowed are {", ".join(map(str, allowed))}')
  for path, least in AT_LEAST.items():
    if (value := get(config, path)) is not None and not value >= least:  # NaN is refused too
      raise UserError(f'config.{path}={value}: must be at least {least}')
  for path, most in AT_MOST.items():
    if get(config, path) > most:
      raise UserError(f'config.{path}={get(config, path)}: must be at most {most}')

  for name in config.health.stop_on:
    if name not in HEALTH_RULES:
      raise UserError(f'config.health.stop_on names {name!r}: allowed are {", ".join(HEALTH_RULES)}, '
                      'to be given as "(\'entropy_drop\',)"')

  rollout, train, algorithm = config.rollout, config.train, config.algorithm
  if not 0 < rollout.top_p <= 1:
    raise UserError(f'config.rollout.top_p={rollout.top_p}: must be in (0, 1]')
  if (rollout.top_p < 1 or rollout.top_k > 0) and algorithm.old_logp != 'sampler':
    raise UserError(
        f'config.rollout.top_p={rollout.top_p}, top_k={rollout.top_k} truncate the distribution that is '
        "sampled from, and old_logp='trainer' recomputes log-probs that do not reflect it: set "
        '--config.rollout.top_p=1 --config.rollout.top_k=0, or --config.algorithm.old_logp=sampler')
  for small, large in (('micro_batch', 'mini_batch'), ('mini_batch', 'episodes')):
    if getattr(train, large) % getattr(train, small):
      raise UserError(
          f'config.train.{small}={getattr(train, small)} does not divide config.train.{large}='
          f'{getattr(train, large)}: choose a divisor')
  if train.episodes % rollout.group_size:
    raise UserError(
        f'config.rollout.group_size={rollout.group_size} does not divide config.train.episodes='
        f'{train.episodes}: choose a divisor')
  buckets = train.length_buckets
  if not buckets or list(buckets) != sorted(set(buckets)) or buckets[-1] < rollout.max_total:
    raise UserError(
        f'config.train.length_buckets={buckets}: must rise and end at config.rollout.max_total='
        f'{rollout.max_total} or above')
  if not rollout.chunks or min(rollout.chunks) < 1:
    raise UserError(f'config.rollout.chunks={rollout.chunks}: give one number or more, each at least 1')
  if rollout.max_prompt + rollout.max_turn > rollout.max_total:
    raise UserError(
        f'config.rollout.max_total={rollout.max_total}: must hold at least max_prompt + max_turn = '
        f'{rollout.max_prompt + rollout.max_turn}')
  if algorithm.dual_clip and algorithm.dual_clip <= 1:
    raise UserError(f'config.algorithm.dual_clip={algorithm.dual_clip}: must be above 1, or 0 for off')
  if algorithm.is_correction != 'none' and algorithm.old_logp == 'sampler':
    raise UserError(
        f'config.algorithm.is_correction={algorithm.is_correction!r} bridges the sampler to the '
        "trainer's old_logp, and old_logp='sampler' leaves no gap: set "
        '--config.algorithm.is_correction=none, or --config.algorithm.old_logp=trainer')
  if train.on_nonfinite == 'rollback' and not train.checkpoint_every:
    raise UserError(
        "config.train.on_nonfinite='rollback' needs checkpoints to go back to, and "
        'config.train.checkpoint_every=0: set --config.train.checkpoint_every=1 or more')
  _check_adapters(config)
  grouped = algorithm.variant in ('grpo', 'so_grpo', 'gspo', 'rloo')
  if (algorithm.advantage or (grouped and 'group')) in (
      'group', 'group_zscore', 'leave_one_out') and rollout.group_size == 1:
    raise UserError(
        f'config.algorithm.variant={algorithm.variant!r} compares the episodes of a group, and '
        'config.rollout.group_size=1: set --config.rollout.group_size=4 or more')
  return config


def _check_adapters(config):
  """What LoRA adapts, and what can then be placed elsewhere."""
  model, placement = config.model, config.placement
  if not model.lora_targets or set(model.lora_targets) - set(LORA_TARGETS):
    raise UserError(f'config.model.lora_targets={model.lora_targets}: allowed are one or more of '
                    f'{", ".join(LORA_TARGETS)}, as in "(\'q_proj\', \'v_proj\')"')
  if model.lora_rank and placement.reference == 'host':
    raise UserError("config.placement.reference='host': with config.model.lora_rank above 0 the reference "
                    "is the policy's own base and takes no memory: set it to 'device'")
  if placement.critic == 'host' and model.critic == 'shared':
    raise UserError("config.placement.critic='host': with config.model.critic='shared' the critic is "
                    "part of the policy, which samples: set it to 'device', or the critic to 'separate'")
  if placement.critic == 'host' and model.lora_rank and not model.critic_folder:
    raise UserError("config.placement.critic='host': with config.model.lora_rank above 0 the critic stands "
                    "on the policy's base, which samples: set it to 'device', or give a critic_folder")


def get(config: Config, path: str):
  """The field at a dotted path: get(config, 'train.updates')."""
  for name in path.split('.'):
    config = getattr(config, name)
  return config
