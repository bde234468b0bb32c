"""The schema of a run: every setting with its default, meaning, unit, allowed values and bounds.

An experiment file builds one `Config` and states only what differs. Defaults are those of Search-R1
v0.2, the likely base of the paper's runs, unless a meaning states more. See also validation.py.
"""

from collections.abc import Mapping
import dataclasses
from typing import Any
from typing import TYPE_CHECKING

from absl import logging

from stppo_jax.algorithms import variants
from stppo_jax.types import Section
from stppo_jax.types import setting

LORA_TARGETS = ('q_proj', 'k_proj', 'v_proj', 'o_proj', 'gate_proj', 'up_proj', 'down_proj')


# A table, laid out by hand.
# fmt: off


@dataclasses.dataclass
class Data(Section):
  """Questions and passages."""

  source: str = setting(
      'embedded',
      'a folder with qa.jsonl and corpus.jsonl, a .jsonl, a Search-R1 .parquet, several of them '
      "with commas between, or a function (split) -> list of Task; 'embedded': ours, or the "
      "environment's own", plugin=True)
  corpus: str = setting('', 'folder or .jsonl of passages; empty: the same as `source`')
  train_split: str = setting('train', 'the questions to train on')
  eval_split: str = setting('dev', 'the questions to evaluate on')
  datasets: tuple[str, ...] = setting(
      (), "data sets to keep; empty: all. An experiment's choice does not apply to another "
      '--config.data.source')


@dataclasses.dataclass
class Env(Section):
  """The environment: what the agent reads, and its rewards."""

  kind: str = setting(
      'search', "the environment; a class of your own (envs/protocol.py), PREFIX:ID of another "
      "package, or an agent program, 'gateway:module:attribute' (envs/program.py)",
      allowed=('search', 'tools'), plugin=True,
      prefixes=('gem', 'textarena', 'reasoning_gym', 'openenv'))
  options: dict[str, Any] = setting(
      {}, "keyword arguments of the environment's class; --config.env.options.NAME=VALUE sets one")
  prompt: str = setting(
      'search_r1', "of the search environment: 'search_r1' is Search-R1's format in our own "
      "sentences, see envs/search.py; 'short' is for tiny models",
      allowed=('search_r1', 'short'))
  max_searches: int = setting(
      4, 'searches per episode, after which one more turn may only answer', at_least=0)
  reward: str = setting(
      'em', 'score of an answer; or a function of your own (task, answer, transcript) -> float',
      allowed=('em', 'sub_em', 'f1', 'format'), plugin=True)
  tools: tuple[str, ...] = setting(
      (), "of the environment 'tools': 'calculator', 'search', module:function, mcp:COMMAND",
      plugin=True, prefixes=('mcp',))
  tool_timeout_s: float = setting(10.0, 'seconds before a call is given up', above=0)
  tool_max_chars: int = setting(2000, 'a longer result is cut', at_least=1)


@dataclasses.dataclass
class Retriever(Section):
  """How passages are found."""

  kind: str = setting(
      'bm25', "'bm25' (words), 'dense' (vectors) and 'hybrid' (both) search in this process, "
      "'http' queries a server, 'none' loads no corpus; or your own make(settings, load_corpus) -> "
      'search(queries, top_k)',
      allowed=('bm25', 'http', 'dense', 'hybrid', 'none'), plugin=True)
  encoder: str = setting(
      '', "folder of a BERT-class model such as e5-base-v2, for 'dense' and 'hybrid'")
  embeddings: str = setting(
      '', "folder that keeps the passages' vectors between starts; empty: made at each start")
  top_k: int = setting(3, 'passages per search', at_least=1)
  url: str = setting(
      'http://127.0.0.1:8000/retrieve', 'address of an HTTP retriever', resume_allowed=True)
  dialect: str = setting('search_r1', 'JSON protocol over HTTP', allowed=('search_r1', 'ragen'))
  concurrency: int = setting(
      0, "HTTP requests in flight at once. 0: one for 'search_r1', because FAISS on GPUs needs it; "
      "eight for 'ragen'", at_least=0, resume_safe=True)
  max_queries: int = setting(
      32, "queries in one HTTP request of 'search_r1'; 'ragen' sends one query per request",
      at_least=1, resume_safe=True)
  timeout_s: float = setting(
      10.0, 'seconds that one HTTP request may take', above=0, resume_allowed=True)
  retries: int = setting(3, 'further attempts per request', at_least=0, resume_allowed=True)
  backoff_s: float = setting(0.5, 'seconds before the first of them; then doubled', at_least=0,
                             resume_allowed=True)
  max_failed_share: float = setting(
      0.5, "share of a batch's episodes; above it the run waits and plays the batch again",
      at_least=0, at_most=1, resume_safe=True)
  max_outage_s: float = setting(
      3600.0, 'seconds of waiting for the retriever, after which the run saves and stops',
      at_least=0, resume_safe=True)


@dataclasses.dataclass
class Model(Section):
  """The policy, and the trunk that its critic starts from."""

  folder: str = setting(
      'embedded', "a Hugging Face folder; 'embedded' is the tiny warm-started model")
  chat_template_kwargs: dict[str, Any] = setting(
      {}, "of its chat template: --config.model.chat_template_kwargs.enable_thinking=False")
  critic: str = setting(
      'separate', "'separate': a trunk of its own; 'shared': a second head on the policy's trunk",
      allowed=('separate', 'shared'))
  critic_folder: str = setting('', "empty: the policy's folder")
  role_parameters: str = setting(
      'shared', "of an environment with several roles: 'shared': one policy plays all of them; "
      "'own': each has a policy and a critic of its own, trained on its rows alone",
      allowed=('shared', 'own'))
  dtype: str = setting(
      'bfloat16', 'dtype of the passes; logits, log-probs and losses are always float32',
      allowed=('float32', 'bfloat16'))
  param_dtype: str = setting(
      'float32', "dtype of stored parameters; 'bfloat16' only for the frozen ones of LoRA",
      allowed=('float32', 'bfloat16'))
  remat: str = setting(
      'full', 'what the backward pass recomputes', allowed=('none', 'dots', 'full'))
  scan_layers: bool = setting(True, 'False unrolls the layers: slower to compile, faster on a CPU')
  logp_chunk: int = setting(
      512, 'tokens of a row whose logits are live at once; 0: all', at_least=0)
  attention: str = setting(
      'auto', "kernel for training: 'splash' (TPU), 'cudnn' (NVIDIA, bfloat16), 'plain'; "
      "'auto' takes the first that can run", allowed=('auto', 'splash', 'cudnn', 'plain'))
  attention_chunk: int = setting(
      512, 'tokens of a row whose scores are live at once in plain attention; 0: all', at_least=0)
  # LoRA trains low-rank adapters (and value heads) and freezes all else. Actor and critic share one
  # base where they start from the same folder, and the reference is that base. Learning rates
  # should be 10 to 100 times those of full training: 1e-4 and above.
  lora_rank: int = setting(0, 'rank of the adapters; 0: full training', at_least=0)
  lora_alpha: float = setting(16.0, 'adapters are scaled by alpha / rank', above=0)
  lora_targets: tuple[str, ...] = setting(
      LORA_TARGETS, "kernels with an adapter, by PEFT's names", items=LORA_TARGETS)


@dataclasses.dataclass
class Rollout(Section):
  """Sampling. Lengths in tokens."""

  group_size: int = setting(1, 'episodes per question', at_least=1)
  max_num_gen_batches: int = setting(
      1, 'above 1: a group whose scores are all equal is replaced by one of another question, in '
      "at most so many rounds of sampling per update (DAPO's dynamic sampling); for algorithms "
      'that compare the episodes of a group', at_least=1)
  temperature: float = setting(1.0, 'of sampling, in sampler and trainer alike', at_least=1e-3)
  top_k: int = setting(0, 'keep the k likeliest tokens; 0: off', at_least=0)
  top_p: float = setting(1.0, 'nucleus sampling; 1: off', above=0, at_most=1)
  max_prompt: int = setting(2048, 'a longer prompt is not played', at_least=1)
  max_turn: int = setting(500, 'new tokens per turn', at_least=1)
  max_observation: int = setting(500, 'a longer observation is cut', at_least=1)
  max_total: int = setting(4096, 'prompt, turns and observations together', at_least=1)
  rows: int = setting(0, 'episodes in progress at once; 0: the whole batch', at_least=0)
  width: int = setting(0, 'rows per decode call; 0: all. A CPU prefers few: 32', at_least=0)
  mesh: tuple[int, ...] = setting(
      (), '(data, tensor): devices over which the rows of a call, and the heads and vocabulary of '
      'the copy that is sampled from, are split; one may be -1; empty: chosen by the size of the '
      'model', at_least=-1, resume_safe=True)
  slot_buckets: tuple[int, ...] = setting(
      (), 'tokens that a row has room for, rising: programs are compiled for each; empty: at most '
      'four on accelerators, 128, 192, 256, 384, .. on a CPU', at_least=1)
  chunks: tuple[int, ...] = setting(
      (32, 128), 'tokens of a row that one prefill call may read', at_least=1)
  routing_replay: str = setting(
      'none', "of a mixture of experts: 'old_policy' reuses, in every optimizer step, the experts "
      "that the policy that sampled chose for each token, as the trainer recomputes them; "
      "'sampling' reuses those that the sampler itself chose while it read and wrote the token. "
      "The weights stay the current router's. Without experts it has no effect",
      allowed=('none', 'old_policy', 'sampling'))
  replay: str = setting(
      '', 'folder of saved batches, such as runs/NAME/episodes: update n trains on its '
      'train_<n>.jsonl, and nothing is sampled but evaluations; empty: off')
  max_failed: float = setting(
      0.5, "share of a batch's episodes in which the environment's code may raise: they are not "
      'trained on, and counted. Above it the run ends. 0: the first exception ends it',
      at_least=0, at_most=1, resume_safe=True)
  threads: int = setting(
      4, 'environments called at once; on one process other rows decode meanwhile. 0: one by one',
      at_least=0, resume_allowed=True)


def _with_overrides(section: type) -> type:
  """Adds the fields of a `Variant` to a section, each with None as its default."""
  for field in dataclasses.fields(variants.Variant):
    kind: Any = str if field.metadata['rules'].plugin else field.type
    section.__annotations__[field.name] = kind | None
    setattr(section, field.name, dataclasses.field(default=None, metadata=field.metadata))
  return section


@dataclasses.dataclass
@_with_overrides
class Algorithm(Section):
  """The objective: the name of a `Variant`, and values that override its fields.

  The section has every field of a Variant, see algorithms/variants.py. None means the variant's
  own value.
  """

  variant: str = setting(
      'st_ppo', 'a row of the table, or a custom Variant',
      allowed=tuple(variants.VARIANTS), plugin=True)
  options: dict[str, Any] = setting(
      {}, 'fields that a custom Variant adds; --config.algorithm.options.NAME=VALUE sets one')

  if TYPE_CHECKING:

    def __getattr__(self, name: str) -> Any: ...


@dataclasses.dataclass
class Optimizer(Section):
  """AdamW with a linear warm-up, then a constant or linearly decaying rate."""

  lr: float = setting(1e-6, 'learning rate', at_least=0)
  warmup: float = setting(
      0.285, 'share of all updates, or of train.schedule_updates', at_least=0, at_most=1)
  final_lr: float = setting(
      1.0, 'share of lr that is left at the last update; 1: constant', at_least=0, at_most=1)
  betas: tuple[float, float] = setting((0.9, 0.999), 'decay of the moments', at_least=0, below=1)
  eps: float = setting(1e-8, 'added to the root of the second moment', above=0)
  weight_decay: float = setting(0.01, 'decoupled weight decay', at_least=0)
  grad_clip: float = setting(
      1.0, "bound of the gradient's global norm; in the order of algorithm.divide", above=0)


@dataclasses.dataclass
class Train(Section):
  """The outer loop. An update is one rollout with its optimizer steps, each of which is a step."""

  updates: int = setting(1005, 'rollouts in all', at_least=0, resume_safe=True)
  schedule_updates: int = setting(
      0, 'what warm-up and decay of the rates are shares of; 0: updates. A run that has it may be '
      'prolonged: updates may then change on resumption', at_least=0)
  episodes: int = setting(512, 'episodes per rollout', at_least=1)
  mini_batch: int = setting(
      256, 'episodes per optimizer step: the reuse that makes the update off-policy', at_least=1)
  micro_batch: int = setting(
      64, 'bins per forward and backward pass: changes memory and speed, and the result only by '
      'rounding. A CPU prefers 4 to 8', at_least=1, resume_allowed=True)
  epochs: int = setting(1, 'passes over a rollout', at_least=1)
  length_buckets: tuple[int, ...] = setting(
      (1024, 2048, 4096), 'tokens per bin, rising; episodes are packed into bins, and the last '
      'size holds any episode. More sizes: less padding, more programs to compile', at_least=1)
  checkpoint_every: int = setting(100, 'updates; 0: only at the end', at_least=0, resume_safe=True)
  keep_checkpoints: int = setting(2, 'newest kept, beside the best', at_least=1, resume_safe=True)
  on_save_error: str = setting(
      'continue', "when a checkpoint cannot be written; 'continue' counts it in perf/failed_saves",
      allowed=('continue', 'stop'), resume_safe=True)
  accept_changed_plugins: bool = setting(
      False, 'resume with changed plug-ins, questions or weights of model.folder', resume_safe=True)
  max_nonfinite: int = setting(
      3, 'steps skipped in a row for non-finite gradients before `on_nonfinite` applies',
      at_least=1, resume_safe=True)
  on_nonfinite: str = setting(
      'stop', "'rollback' restores the newest checkpoint and continues with other questions",
      allowed=('stop', 'rollback'), resume_safe=True)
  critic_warmup: int = setting(0, 'updates that train the critic alone', at_least=0)
  deterministic: bool = setting(
      False, 'on GPUs: only operations that give the same bits in each run; slower. CPUs always do',
      resume_allowed=True)


@dataclasses.dataclass
class Pipeline(Section):
  """How far sampling runs ahead of training."""

  staleness: int = setting(
      0, 's: the batch of update n is sampled by the parameters after update n-1-s, in a thread, '
      'while others are trained on; holds up to s + 1 copies of the policy. 0: one after the other',
      at_least=0)


@dataclasses.dataclass
class Mesh(Section):
  """Devices: data * fsdp * tensor of them; one axis may be -1, meaning all that are left."""

  data: int = setting(1, 'copies of the model', at_least=-1, resume_safe=True)
  fsdp: int = setting(
      -1, 'shards of parameters, gradients and optimizer state', at_least=-1, resume_safe=True)
  tensor: int = setting(1, 'shards of each matrix product', at_least=-1, resume_safe=True)


@dataclasses.dataclass
class Placement(Section):
  """Where parts are kept while they are not used: on the device, or in its host's pinned memory.

  A step copies what it needs from the host and back: less device memory, more time.
  """

  optimizer: str = setting('device', 'moments of actor and critic; used at the end of a step',
      allowed=('device', 'host'), resume_safe=True)
  critic: str = setting('device', 'the separate critic; not used while sampling',
      allowed=('device', 'host'), resume_safe=True)
  reference: str = setting('device', 'used once per update, for its log-probs',
      allowed=('device', 'host'), resume_safe=True)


@dataclasses.dataclass
class Eval(Section):
  """Evaluation on held-out questions: greedy while a run trains, as asked for in --mode=eval."""

  every: int = setting(50, 'updates; 0: only before and after', at_least=0, resume_safe=True)
  episodes: int = setting(0, 'held-out questions; 0: the whole split', at_least=0)
  rows: int = setting(128, 'questions in progress at once', at_least=1)
  checkpoint: str = setting(
      'newest', "of --mode=eval, export, ..; 'best': with the highest held-out score of those "
      'saved right after an evaluation: let train.checkpoint_every divide `every`',
      allowed=('newest', 'best'), resume_safe=True)
  samples: int = setting(1, '--mode=eval: times a question is played', at_least=1, resume_safe=True)
  temperature: float | None = setting(
      None, '--mode=eval, chat; None: 0, of samples that of rollout', at_least=0, resume_safe=True)
  folder: str = setting('', 'for the files of --mode=eval; empty: in WORKDIR/eval', resume_safe=True)
  address: str = setting(
      '', '--mode=eval: of an OpenAI-compatible server that plays, http://HOST/v1', resume_safe=True)
  model: str = setting('', '--mode=eval: name of the model at that address', resume_safe=True)


@dataclasses.dataclass
class Log(Section):
  """What is written in addition to metrics.jsonl."""

  tensorboard: bool = setting(True, 'event files, where tensorboardX is installed', resume_safe=True)
  wandb_project: str = setting('', 'empty: off', resume_safe=True)
  episodes: bool = setting(
      True, 'every sampled episode with its per-token numbers', resume_safe=True)
  episodes_every: int = setting(
      1, 'updates: `episodes` of every k-th one only', at_least=1, resume_safe=True)


@dataclasses.dataclass
class Health(Section):
  """Limits of monitoring/health.py on means over `window` updates; 0 turns one off.

  Shares are of turns or of episodes. The limits were set by hand: wide enough for a run that
  learns.
  """

  window: int = setting(5, 'updates', at_least=1, resume_safe=True)
  stop_on: tuple[str, ...] = setting(
      (), 'names of the limits below that end the run instead of only warning', resume_safe=True)
  score_drop: float = setting(0.5, 'lost share of the best score', at_least=0)
  entropy_drop: float = setting(0.9, 'lost share of the first entropy', at_least=0)
  kl: float = setting(1.0, 'nats per token from the reference', at_least=0)
  ppo_kl: float = setting(0.1, 'nats per token from old_logp', at_least=0)
  sampler_gap: float = setting(
      0.01, 'k3 nats per token between sampler and trainer; rounding gives 1e-4', at_least=0)
  invalid: float = setting(0.5, 'share of turns without a valid action', at_least=0)
  repeated: float = setting(
      0.5, 'share of turns that equal an earlier one of their episode', at_least=0)
  empty: float = setting(0.1, 'share of turns without a visible character', at_least=0)
  cut: float = setting(0.3, 'share of turns that reached rollout.max_turn', at_least=0)
  truncated: float = setting(0.7, 'share of episodes that ended at a limit', at_least=0)
  retrieval_failed: float = setting(0.1, 'share of episodes in which a search failed', at_least=0)
  prompt_too_long: float = setting(
      0.01, 'share of episodes whose prompt exceeds rollout.max_prompt', at_least=0)


@dataclasses.dataclass
class Serve(Section):
  """The gateway: OpenAI's HTTP interface to a model, and to agent programs that are trained."""

  host: str = setting('127.0.0.1', "where it listens; '0.0.0.0': anybody may ask", resume_safe=True)
  hosts: tuple[str, ...] = setting(
      (), "further names that a server on loopback answers to, such as that of a proxy before it: "
      "\"('chat.example.org',)\"", resume_safe=True)
  rows: int = setting(32, 'requests in progress at once; others wait for a row', at_least=1)
  max_total: int = setting(0, '--mode=serve: tokens of prompt and answer; 0: 4096', at_least=0)
  role: str = setting('', 'whose policy is served, where each role has its own; empty: the first',
                      resume_safe=True)
  max_waiting: int = setting(256, 'requests in the queue; further ones get 429', at_least=1)
  max_body_mb: int = setting(4, 'megabytes of a request; larger ones get 413', at_least=1)
  tool_form: str = setting('hermes', 'how calls are written, see envs/tool_calls.py',
                           allowed=('hermes', 'llama3', 'tags'))
  agent_timeout_s: float = setting(300.0, 'time limit of an agent program, per episode', above=0)
  on_crash: str = setting('mask', 'an episode whose agent program raised is not trained on, or has '
                          'reward 0', allowed=('mask', 'zero'))


HEALTH_RULES = tuple(
    field.name for field in dataclasses.fields(Health) if field.name not in ('window', 'stop_on'))


@dataclasses.dataclass
class Config(Section):
  """One run."""

  name: str = setting('run', 'of the default work folder, runs/<name>')
  seed: int = setting(0, 'of everything random', at_least=0, at_most=2**32 - 1)
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
  serve: Serve = dataclasses.field(default_factory=Serve)


# fmt: on

# Old name -> new name. An old name still works in this version, with a warning.
RENAMED = {'env.max_turns': 'env.max_searches'}


def current_name(path: str) -> str:
  """Returns the present name of a setting, and logs a warning for an old name."""
  if path in RENAMED:
    logging.warning('config.%s is now called config.%s', path, RENAMED[path])
  return RENAMED.get(path, path)


def with_current_names(values: Mapping[str, Any]) -> dict[str, Any]:
  """Returns the nested dict of a config.json with old names replaced by the present ones."""
  renamed = {name: dict(x) if isinstance(x, dict) else x for name, x in values.items()}
  for old, new in RENAMED.items():
    section, old_name = old.split('.')
    _, new_name = new.split('.')
    settings = renamed.get(section)
    if isinstance(settings, dict) and old_name in settings:
      settings[new_name] = settings.pop(old_name)
  return renamed


def _set_old_names() -> None:
  """Lets sections accept old names where an experiment file assigns them."""
  sections = {field.name: field.type for field in dataclasses.fields(Config)}
  for old, new in RENAMED.items():
    section, old_name = old.split('.')
    kind: Any = sections[section]
    kind.RENAMED = {**kind.RENAMED, old_name: new.partition('.')[2]}


_set_old_names()
