"""The schema of a run: every setting with its default, meaning, unit, allowed values and bounds.

An experiment file builds one `Config` and sets only what differs from the defaults, which are those
of Search-R1 v0.2, the likely base of the paper's runs. settings/ has the rules that span
settings.
"""

import dataclasses
import functools
from typing import Any
from typing import TYPE_CHECKING

from stppo_jax.algorithms import variants
from stppo_jax.algorithms.variant import BaseVariant
from stppo_jax.systems import parts
from stppo_jax.types import Section
from stppo_jax.types import setting

LORA_TARGETS = ('q_proj', 'k_proj', 'v_proj', 'o_proj', 'gate_proj', 'up_proj', 'down_proj')
DELTA_TARGETS = ('in_proj_qkv', 'in_proj_z', 'out_proj')  # matrices of gated delta-net layers
ADDRESS = r'https?://[^\s/]+(/\S*)?'  # the address of a server
ENGINES = rf'{ADDRESS}|dns://[^\s:/]+:\d{{1,5}}|file:.+'  # one engine, or where they are listed


# The formatter is off, so that each setting takes few lines.
# fmt: off


@dataclasses.dataclass
class DataSettings(Section):
  """Questions and passages."""

  source: str = setting(
      'embedded', 'folder with qa.jsonl and corpus.jsonl, a published set of questions (see '
      'docs/data.md) as a file or a folder, several of these separated by commas, or a function '
      "(split) -> list of Task. 'embedded': the environment's tasks, or else the questions of the "
      'package', plugin=True)
  corpus: str = setting(
      '', 'folder or file of passages; empty: those of `source`, which may come with the questions')
  train_split: str = setting('train', 'the questions to train on')
  eval_split: str = setting(
      'dev', "the questions to evaluate on; 'dev' is also called validation, valid and val")
  columns: dict[str, Any] = setting(
      {}, "the columns of `source`, where no published layout fits: {'question': .., "
      "'answers': .., 'answer_is': 'text', ..}; --config.data.columns.question=NAME sets one, see "
      'docs/data.md')
  datasets: tuple[str, ...] = setting(
      (), "names of the data sets to use; empty: all. An experiment's choice is dropped if the "
      'command sets another --config.data.source')
  max_hops: int = setting(
      0, 'the most facts that a question may need; 0: any number. A question that does not say '
      "its hops is kept. An experiment's choice is dropped as that of `datasets`", at_least=0)


@dataclasses.dataclass
class EnvSettings(Section):
  """The environment: observations, tools and rewards."""

  kind: str = setting(
      'search', 'a built-in environment, a custom class (envs/protocol.py), PREFIX:ID of another '
      "package, or an agent program: 'gateway:module:attribute' (envs/program.py) or "
      "'gateway:command:COMMAND' (envs/commands.py)",
      allowed=('search', 'tools'), plugin=True,
      prefixes=('gem', 'textarena', 'reasoning_gym', 'openenv', 'verifiers'))
  options: dict[str, Any] = setting(
      {}, "keyword arguments of the environment's class; --config.env.options.NAME=VALUE sets one")
  prompt: str = setting(
      'search_r1', "prompt of the search environment: 'search_r1' explains Search-R1's format, "
      "'short' is for tiny models, see envs/search.py", allowed=('search_r1', 'short'))
  max_searches: int = setting(
      4, 'searches per episode, after which one more turn may only answer', at_least=0)
  reward: str = setting(
      'em', 'score of an answer, or a function (task, answer, transcript) -> float',
      allowed=('em', 'sub_em', 'f1', 'format', 'search_r1'), plugin=True)
  branch_credit: str = setting(
      'episode', "agent programs: every row has the episode's reward ('episode'), or the rows of "
      "an agent have the reward that the program posts for it, if it does ('program')",
      allowed=('episode', 'program'))
  tools: tuple[str, ...] = setting(
      (), "tools of the environment 'tools': 'calculator', 'search', module:function, mcp:COMMAND",
      plugin=True, prefixes=('mcp',))
  tool_timeout_s: float = setting(10.0, 'seconds after which a tool call is aborted', above=0)
  tool_max_chars: int = setting(2000, 'characters of a tool result; the rest is cut', at_least=1)
  mix: tuple[dict[str, Any], ...] = setting(
      (), "several environments in one run: a dict of settings of this section for each, with "
      "'share' of the questions of a batch, 'weight' in the loss, 'name', and 'data' for "
      'data.source. Empty: the environment `kind`. See docs/environments.md', plugin=True)

  @property
  def is_program(self) -> bool:
    """Whether an agent program plays the episodes."""
    return self.kind.startswith(('gateway:', 'verifiers:'))

  @property
  def turn_limit(self) -> int | None:
    """The most turns of an episode; None: the classes of the environments decide."""
    is_built_in = self.kind in ('search', 'tools') and not self.mix
    if not is_built_in or self.options.keys() & {'max_searches', 'max_turns'}:
      return None
    return self.max_searches + 1


@dataclasses.dataclass
class RetrieverSettings(Section):
  """The search for passages."""

  kind: str = setting(
      'bm25', "'bm25' (words), 'dense' (vectors) and 'hybrid' (both) search in this process, "
      "'http' queries a server, 'none' loads no corpus; or a function (settings, load_corpus) -> "
      'search(queries, top_k)', allowed=('bm25', 'http', 'dense', 'hybrid', 'none'), plugin=True)
  encoder: str = setting(
      '', "folder of an encoder that sentence-transformers reads, such as e5-base-v2, for 'dense' "
      "and 'hybrid'")
  query_prompt: str | None = setting(
      None, "text before each query that the encoder reads, such as 'query: ' for E5; None: that "
      "of the encoder's folder")
  passage_prompt: str | None = setting(
      None, "text before each passage, such as 'passage: ' for E5; None: that of the folder")
  embeddings: str = setting(
      '', "folder that stores the passages' vectors; empty: they are computed at each start",
      written=True)
  device: str = setting(
      'cpu', "device of the encoder in torch's words, such as 'cuda:1'; JAX takes most of the "
      'memory of a GPU that it uses', resume_allowed=True)
  top_k: int = setting(3, 'passages per search', at_least=1)
  url: str = setting(
      'http://127.0.0.1:8000/retrieve', 'address of an HTTP retriever', resume_allowed=True,
      needs_trust=True)
  dialect: str = setting('search_r1', 'JSON protocol over HTTP', allowed=('search_r1', 'ragen'))
  concurrency: int = setting(
      0, "parallel HTTP requests; 0: one for 'search_r1', because FAISS on GPUs needs it, and "
      "eight for 'ragen'", at_least=0, resume_safe=True)
  max_queries: int = setting(
      32, "queries in one HTTP request of 'search_r1'; 'ragen' sends one query per request",
      at_least=1, resume_safe=True)
  timeout_s: float = setting(
      10.0, 'seconds that one HTTP request may take', above=0, resume_allowed=True)
  retries: int = setting(3, 'retries of a failed request', at_least=0, resume_allowed=True)
  backoff_s: float = setting(
      0.5, 'seconds before the first retry, doubled for each further retry', at_least=0,
      resume_allowed=True)
  max_failed_share: float = setting(
      0.5, "share of a batch's episodes with a failed search, above which the run waits and plays "
      'the batch again', at_least=0, at_most=1, resume_safe=True)
  max_outage_s: float = setting(
      3600.0, 'seconds of waiting for the retriever, after which the run saves and stops',
      at_least=0, resume_safe=True)


@dataclasses.dataclass
class ModelSettings(Section):
  """The policy, and the trunk that its critic starts from."""

  folder: str = setting(
      'embedded', "a Hugging Face folder; 'embedded' is the small model of the package")
  chat_template_kwargs: dict[str, Any] = setting(
      {}, "arguments of the model's chat template, as in "
      '--config.model.chat_template_kwargs.enable_thinking=False')
  critic: str = setting(
      'separate', "'separate': the critic has its own trunk; 'shared': it is a second head on the "
      "policy's trunk", allowed=('separate', 'shared'))
  critic_folder: str = setting('', "folder of the critic's trunk; empty: the policy's")
  role_parameters: str = setting(
      'shared', "for environments with several roles: 'shared': one policy plays all roles; 'own': "
      'each role has its own policy and critic, which train on its rows',
      allowed=('shared', 'own'))
  dtype: str = setting(
      'bfloat16', 'dtype of the computation; logits, log-probs and losses are always float32',
      allowed=('float32', 'bfloat16'))
  param_dtype: str = setting(
      'float32', "dtype of stored parameters; 'bfloat16' needs LoRA, for the frozen parameters",
      allowed=('float32', 'bfloat16'))
  remat: str = setting(
      'full', 'activations that the backward pass recomputes', allowed=('none', 'dots', 'full'))
  scan_layers: bool = setting(True, 'False unrolls the layers: slower to compile, faster on a CPU')
  logp_chunk: int = setting(
      512, 'tokens of a row whose logits are in memory at once; 0: all', at_least=0)
  attention: str = setting(
      'auto', "kernel for training: 'splash' (TPU), 'cudnn' (NVIDIA, bfloat16), 'plain'; 'auto' "
      'takes the first that can run', allowed=('auto', 'splash', 'cudnn', 'plain'))
  attention_chunk: int = setting(
      512, 'tokens of a row whose scores are in memory at once in plain attention; 0: all',
      at_least=0)
  # LoRA trains low-rank adapters and value heads, and freezes all other parameters. Actor and
  # critic share one base if they start from the same folder, and the reference is that base.
  # Learning rates should be 10 to 100 times those of full training: 1e-4 and above.
  lora_rank: int = setting(0, 'rank of the adapters; 0: full training', at_least=0)
  lora_alpha: float = setting(16.0, 'adapters are scaled by alpha / rank', above=0)
  lora_targets: tuple[str, ...] = setting(
      LORA_TARGETS, "kernels with an adapter, by PEFT's names",
      items=LORA_TARGETS + DELTA_TARGETS)


@dataclasses.dataclass
class RolloutSettings(Section):
  """Sampling. Lengths in tokens."""

  group_size: int = setting(1, 'episodes per question', at_least=1)
  max_num_gen_batches: int = setting(
      1, 'rounds of sampling per update, at most. Above 1, a group whose scores are all equal is '
      "replaced by a group of another task (DAPO's dynamic sampling). Only for algorithms that "
      'compare the episodes of a group', at_least=1)
  temperature: float = setting(
      1.0, 'temperature of sampling, and of the log-probs in the trainer', at_least=1e-3)
  top_k: int = setting(0, 'sample from the k most likely tokens; 0: off', at_least=0)
  top_p: float = setting(1.0, 'nucleus sampling; 1: off', above=0, at_most=1)
  max_prompt: int = setting(
      2048, 'tokens of a prompt; an episode with a longer prompt is not played. An agent program '
      'writes its own prompts, which only max_total limits', at_least=1)
  max_turn: int = setting(500, 'new tokens per turn', at_least=1)
  max_observation: int = setting(500, 'tokens of an observation; the rest is cut', at_least=1)
  max_total: int = setting(4096, 'tokens of prompt, turns and observations together', at_least=1)
  rows: int = setting(
      0, 'episodes in progress at once. 0: the whole batch, or half of it, and so on, until keys '
      'and values take at most a quarter of the memory', at_least=0)
  width: int = setting(0, 'rows per decode call; 0: all. On a CPU 32 is faster', at_least=0)
  mesh: tuple[int, ...] = setting(
      (), '(data, tensor): number of devices that share the rows of a call, and number that share '
      "the heads and vocabulary of the sampler's copy. One may be -1. Empty: chosen by the size of "
      'the model', at_least=-1, resume_safe=True)
  slot_buckets: tuple[int, ...] = setting(
      (), 'cache slots of a row, rising; a program is compiled for each size. Empty: at most four '
      'sizes on accelerators, 128, 192, 256, 384, .. on a CPU', at_least=1)
  chunks: tuple[int, ...] = setting(
      (32, 128), 'tokens of a row that one prefill call may read', at_least=1)
  routing_replay: str = setting(
      'none', "for a mixture of experts: 'old_policy' reuses, in every optimizer step, the experts "
      "of the old policy for each token, which the trainer recomputes; 'sampling' reuses the "
      "experts that the sampler chose. The weights of the experts are always the current router's",
      allowed=('none', 'old_policy', 'sampling'))
  engine: str = setting(
      '', 'addresses of engines in other processes that sample in place of our own sampler, as in '
      "'http://HOST:8000', separated by commas. 'dns://NAME:8000' are all addresses of a name, and "
      "'file:PATH' those in a file, looked up again during the run. Empty: off. A resumed run may "
      'give others',
      resume_allowed=True, needs_trust=True)
  engine_kind: str = setting(
      'vllm', "interface of the engines; 'stppo' is the gateway of --mode=serve",
      allowed=('vllm', 'sglang', 'stppo'), resume_allowed=True)
  engine_folder: str = setting(
      '', 'folder through which the engines get new weights. Trainer and engines must see it under '
      'the same path. Empty: WORKDIR/weights', resume_safe=True, written=True)
  engine_devices: int = setting(
      1, 'number of devices of each engine. Only --mode=plan uses it', at_least=1,
      resume_safe=True)
  engine_shares_devices: bool = setting(
      False, 'whether the engines have the devices of the trainer: they sleep while it trains, and '
      "its parameters and moments are in the host's memory while they sample", resume_safe=True)
  engine_push: str = setting(
      'turn', "when an engine loads new weights: 'turn' waits for the turns in progress, and their "
      "episodes continue with the new weights. 'batch' waits for the end of the batch, so one "
      'version samples the whole batch', allowed=('turn', 'batch'), resume_allowed=True)
  engine_gap: float = setting(
      0.05, 'largest mean difference between the log-probs of engine and trainer, in nats per '
      'token, at the start and at each evaluation. A larger difference ends the run', above=0,
      resume_safe=True)
  engine_timeout_s: float = setting(
      300.0, 'seconds that an engine may take for a turn', above=0, resume_safe=True)
  engine_outage_s: float = setting(
      3600.0, 'seconds without an answer from any engine, after which the run saves and stops',
      at_least=0, resume_safe=True)
  replay: str = setting(
      '', 'folder of saved batches, such as runs/NAME/episodes. Update n trains on the file '
      'train_<n>.jsonl of this folder, and only evaluations sample. Empty: off')
  allocation: str = setting(
      'even', 'how the episodes of a batch are distributed over its questions. DARS samples a '
      "first round and then gives more episodes to hard questions: 'dars_et' (equal treatment) or "
      "'dars_hw' (hardness weighted). With DARS scores are between 0 and 1, and group_size is the "
      'mean size of a group',
      allowed=('even', 'dars_et', 'dars_hw'))
  first_rows: int = setting(
      0, 'episodes of a question in the first round of DARS; 0: half of group_size', at_least=0)
  max_group: int = setting(
      0, 'episodes of a question with DARS, at most; 0: four times group_size', at_least=0)
  demonstrations: str = setting(
      '', "'module:Player', a class whose `act(observation)` returns the next action, or a file of "
      'recorded episodes. The environment scores the demonstrations, and they become rows of the '
      'batch. Empty: off', plugin=True)
  demonstrated: int = setting(
      1, 'number of demonstrations in a group; group_size includes them', at_least=1)
  demonstrate_every: int = setting(
      1, 'n: every n-th question of a batch has demonstrations', at_least=1)
  max_failed: float = setting(
      0.5, "share of a batch's episodes in which the environment's code may raise. These episodes "
      'are counted and not trained on. Above this share the run ends. 0: the first exception ends '
      'the run', at_least=0, at_most=1, resume_safe=True)
  env_timeout_s: float = setting(
      600.0, 'seconds that a call of an environment may take, with the rewards, judges and tools in'
      ' it. Then its episode fails, and its thread is abandoned. 0: no limit', at_least=0,
      resume_safe=True)
  threads: int = setting(
      4, 'environments called in parallel, while other rows decode (with one process). 0: one '
      'after the other', at_least=0, resume_allowed=True)

  @property
  def is_cut(self) -> bool:
    """Whether tokens are sampled from a part of the vocabulary."""
    return self.top_k > 0 or self.top_p < 1


def _with_overrides(section: type) -> type:
  """Adds the fields of a `Variant` to a section, each with None as its default."""
  for field in dataclasses.fields(BaseVariant):
    rules = field.metadata['rules']
    if field.name in parts.BUILT_IN:
      rules = dataclasses.replace(rules, allowed=tuple(parts.BUILT_IN[field.name]))
    kind: Any = str if rules.plugin else field.type
    section.__annotations__[field.name] = kind | None
    setattr(section, field.name, dataclasses.field(default=None, metadata={'rules': rules}))
  return section


@dataclasses.dataclass
@_with_overrides
class AlgorithmSettings(Section):
  """The objective: the name of a `Variant`, and values that override its fields.

  The section has every field of a Variant, see algorithms/variant.py. None means the variant's
  own value.
  """

  variant: str = setting(
      'st_ppo', 'name of an algorithm, or a custom Variant', allowed=tuple(variants.VARIANTS),
      plugin=True)
  options: dict[str, Any] = setting(
      {}, 'fields that a custom Variant adds; --config.algorithm.options.NAME=VALUE sets one')

  if TYPE_CHECKING:

    def __getattr__(self, name: str) -> Any: ...


@dataclasses.dataclass
class TeacherSettings(Section):
  """On-policy distillation: a teacher scores the tokens that the policy has sampled.

  The advantage of a token is the teacher's log-prob minus the policy's. The algorithm
  'distillation' has no other advantage. The teacher must have the policy's tokenizer.
  """

  folder: str = setting(
      '', 'Hugging Face folder of the teacher, whose weights are stored in `model.dtype`. Empty: '
      'none')
  address: str = setting(
      '', "http://HOST/v1 of a server with vLLM's `prompt_logprobs`, as the teacher. Empty: none",
      resume_allowed=True, needs_trust=True)
  model: str = setting('', 'name of the model at that address', resume_allowed=True)
  coef: float = setting(1.0, "weight of the teacher's advantages", above=0)
  max_outage_s: float = setting(
      3600.0, 'seconds without an answer from the server, after which the run saves and stops',
      at_least=0, resume_safe=True)

  @property
  def is_given(self) -> bool:
    """Whether there is a teacher."""
    return bool(self.folder or self.address)


@dataclasses.dataclass
class OptimizerSettings(Section):
  """AdamW with a linear warm-up, then a constant or linearly decaying rate."""

  lr: float = setting(1e-6, 'learning rate', at_least=0)
  warmup: float = setting(
      0.285, 'warm-up as a share of all updates, or of train.schedule_updates', at_least=0,
      at_most=1)
  final_lr: float = setting(
      1.0, 'learning rate at the last update as a share of lr; 1: constant', at_least=0, at_most=1)
  betas: tuple[float, float] = setting(
      (0.9, 0.999), 'decay rates of the moments', at_least=0, below=1)
  eps: float = setting(1e-8, 'added to the root of the second moment', above=0)
  weight_decay: float = setting(0.01, 'decoupled weight decay', at_least=0)
  grad_clip: float = setting(
      1.0, "bound of the gradient's global norm; algorithm.divide sets the order", above=0)


@dataclasses.dataclass
class TrainSettings(Section):
  """The training loop. An update is one rollout followed by several optimizer steps."""

  updates: int = setting(1005, 'number of updates', at_least=0, resume_safe=True)
  schedule_updates: int = setting(
      0, 'updates that warm-up and decay of the learning rates refer to; 0: `updates`. If it is '
      'set, a resumed run may change `updates`', at_least=0)
  episodes: int = setting(512, 'episodes per update', at_least=1)
  mini_batch: int = setting(
      256, 'episodes per optimizer step. With several steps per update the data become off-policy',
      at_least=1)
  micro_batch: int = setting(
      0, 'bins per forward and backward pass. It changes memory, speed and rounding. 0: one for '
      'each device or group of devices that computes rows, mesh.data * mesh.fsdp. On a CPU 4 to 8 '
      'are faster', at_least=0, resume_allowed=True)
  epochs: int = setting(1, 'passes over the episodes of an update', at_least=1)
  length_buckets: tuple[int, ...] = setting(
      (1024, 2048, 4096), 'tokens per bin, rising. Episodes are packed into bins, and the last '
      'size holds any episode. More sizes mean less padding and more programs to compile',
      at_least=1)
  share_prefixes: str = setting(
      'auto', 'compute what rows of a bin have in common at their beginning once, such as the '
      "prompt of a group: 'auto': with plain attention in all layers; 'always': also with splash, "
      "the kernel of TPUs, which then reads its masks from memory; 'never'. It changes memory, "
      'speed and rounding', allowed=('auto', 'always', 'never'), resume_allowed=True)
  checkpoint_every: int = setting(
      100, 'updates between checkpoints; 0: only at the end', at_least=0, resume_safe=True)
  keep_checkpoints: int = setting(
      2, 'newest checkpoints to keep, besides the best', at_least=1, resume_safe=True)
  checkpoint_folder: str = setting(
      '', "folder of the checkpoints of this run alone: a path, or 'gs://BUCKET/FOLDER' with the "
      'extra `bucket`. WORKDIR keeps all other files. Empty: WORKDIR/checkpoints',
      resume_safe=True, needs_trust=True)
  on_save_error: str = setting(
      'continue', "reaction to a checkpoint that cannot be written; 'continue' counts it in "
      'perf/failed_saves', allowed=('continue', 'stop'), resume_safe=True)
  accept_changed_plugins: bool = setting(
      False, 'resume with changed plug-ins, questions, passages or weights of model.folder',
      resume_safe=True)
  max_nonfinite: int = setting(
      3, 'steps skipped in a row for non-finite gradients before `on_nonfinite` applies',
      at_least=1, resume_safe=True)
  on_nonfinite: str = setting(
      'stop', "'stop' ends the run; 'rollback' restores the newest checkpoint and continues with "
      'other questions',
      allowed=('stop', 'rollback'), resume_safe=True)
  critic_warmup: int = setting(0, 'first updates, which train only the critic', at_least=0)
  deterministic: bool = setting(
      False, 'on GPUs, use only operations that give the same bits in each run, which is slower. '
      'CPUs always do', resume_allowed=True)


@dataclasses.dataclass
class SftSettings(Section):
  """Supervised training on conversations: `run.py sft`. RL reads none of it."""

  lr: float = setting(
      1e-5, 'highest learning rate; it rises in the first twentieth of the steps, then it falls as '
      'a cosine', above=0, resume_safe=True)
  epochs: int = setting(2, 'passes over the conversations', at_least=1, resume_safe=True)
  batch: int = setting(32, 'conversations per optimizer step', at_least=1, resume_safe=True)
  held_out: float = setting(
      0.05, 'share of the prompts whose conversations are held out, where none have '
      'data.eval_split', at_least=0, below=1, resume_safe=True)
  min_reward: float = setting(
      0.5, 'conversations with a lower `reward` and saved episodes with a lower score are left out',
      resume_safe=True)


@dataclasses.dataclass
class PipelineSettings(Section):
  """The number of updates that sampling runs ahead of training."""

  staleness: int = setting(
      0, 's: a thread samples the batch of update n with the parameters after update n-1-s, while '
      'the trainer uses earlier batches. It holds up to s + 1 copies of the policy. 0: sampling '
      'and training alternate', at_least=0)


@dataclasses.dataclass
class MeshSettings(Section):
  """The devices: data * fsdp * context * tensor. One may be -1: all remaining devices."""

  data: int = setting(1, 'copies of the model', at_least=-1, resume_safe=True)
  fsdp: int = setting(
      -1, 'shards of parameters, gradients and optimizer state', at_least=-1, resume_safe=True)
  context: int = setting(
      1, 'shards of each row, by its tokens, which split the parameters as fsdp does',
      at_least=-1, resume_safe=True)
  tensor: int = setting(1, 'shards of each matrix product', at_least=-1, resume_safe=True)


@dataclasses.dataclass
class PlacementSettings(Section):
  """Where parts are stored while they are not used: on the device or in the host's pinned memory.

  Copies between host and device cost time and save device memory.
  """

  optimizer: str = setting(
      'device', 'moments of actor and critic, used at the end of a step',
      allowed=('device', 'host'), resume_safe=True)
  critic: str = setting(
      'device', 'the separate critic, not used while sampling', allowed=('device', 'host'),
      resume_safe=True)
  reference: str = setting(
      'device', 'the reference policy and the teacher, used once per update',
      allowed=('device', 'host'),
      resume_safe=True)


@dataclasses.dataclass
class EvalSettings(Section):
  """Evaluation on held-out questions. It is greedy during training."""

  every: int = setting(
      50, 'updates between evaluations; 0: only before and after training', at_least=0,
      resume_safe=True)
  episodes: int = setting(0, 'number of questions; 0: the whole split', at_least=0)
  rows: int = setting(
      128, 'questions in progress at once; fewer if keys and values would take more than a quarter '
      'of the memory', at_least=1)
  checkpoint: str = setting(
      'newest', "checkpoint for --mode=eval, export, ..; 'best': the highest held-out score among "
      'those saved right after an evaluation (train.checkpoint_every should divide `every`)',
      allowed=('newest', 'best'), resume_safe=True)
  samples: int = setting(1, '--mode=eval: episodes per question', at_least=1, resume_safe=True)
  temperature: float | None = setting(
      None, '--mode=eval, chat; None: 0, or rollout.temperature if samples is above 1', at_least=0,
      resume_safe=True)
  folder: str = setting(
      '', 'folder for the files of --mode=eval; empty: in WORKDIR/eval', resume_safe=True,
      written=True)
  address: str = setting(
      '', '--mode=eval: http://HOST/v1 of an OpenAI-compatible server to evaluate',
      resume_safe=True, needs_trust=True)
  model: str = setting('', '--mode=eval: name of the model at that address', resume_safe=True)


@dataclasses.dataclass
class LogSettings(Section):
  """Output in addition to metrics.jsonl."""

  tensorboard: bool = setting(
      True, 'write event files, if tensorboardX is installed', resume_safe=True)
  project: str = setting(
      '', 'project that `tracker` also writes the metrics to; empty: off', resume_safe=True)
  tracker: str = setting(
      'wandb', "'wandb' is Weights & Biases; 'trackio' has the same API and needs no account",
      allowed=('wandb', 'trackio'), resume_safe=True)
  episodes: bool = setting(
      True, 'write every sampled episode with its numbers per token', resume_safe=True)
  episodes_every: int = setting(
      1, 'k: write the episodes of every k-th update', at_least=1, resume_safe=True)


@dataclasses.dataclass
class HealthLimits(Section):
  """The limits, see HealthSettings."""

  score_drop: float = setting(0.5, 'relative drop from the best score', at_least=0)
  entropy_drop: float = setting(0.9, 'relative drop from the first entropy', at_least=0)
  kl: float = setting(1.0, 'KL to the reference, in nats per token', at_least=0)
  ppo_kl: float = setting(0.1, 'KL to old_logp, in nats per token', at_least=0)
  sampler_gap: float = setting(
      0.01, 'k3 between sampler and trainer, in nats per token; rounding gives 1e-4', at_least=0)
  invalid: float = setting(0.5, 'share of turns without a valid action', at_least=0)
  repeated: float = setting(
      0.5, 'share of turns that equal an earlier turn of the episode', at_least=0)
  empty: float = setting(0.1, 'share of turns without a visible character', at_least=0)
  cut: float = setting(0.3, 'share of turns that reached rollout.max_turn', at_least=0)
  truncated: float = setting(0.7, 'share of episodes that ended at a limit', at_least=0)
  retrieval_failed: float = setting(0.1, 'share of episodes in which a search failed', at_least=0)
  prompt_too_long: float = setting(
      0.01, 'share of episodes whose prompt exceeds rollout.max_prompt', at_least=0)


HEALTH_RULES = tuple(field.name for field in dataclasses.fields(HealthLimits))


@dataclasses.dataclass
class HealthSettings(HealthLimits):
  """Limits of monitoring/health.py on means over `window` updates. 0 turns a limit off.

  The limits were chosen by hand, so that a run that learns stays within them.
  """

  window: int = setting(5, 'updates of the means', at_least=1, resume_safe=True)
  stop_on: tuple[str, ...] = setting(
      (), 'names of limits that end the run; the others only log a warning', items=HEALTH_RULES,
      resume_safe=True)


@dataclasses.dataclass
class ServeSettings(Section):
  """The gateway: an OpenAI-compatible server for a model, and for agent programs in training."""

  host: str = setting(
      '127.0.0.1', "address to listen on; '0.0.0.0' lets any machine connect", resume_safe=True,
      needs_trust=True)
  hosts: tuple[str, ...] = setting(
      (), 'further host names that a server on loopback accepts, such as that of a proxy, as in '
      "\"('chat.example.org',)\"", resume_safe=True, needs_trust=True)
  rows: int = setting(32, 'requests in progress; further requests wait', at_least=1)
  max_total: int = setting(0, '--mode=serve: tokens of prompt and completion; 0: 4096', at_least=0)
  role: str = setting(
      '', 'role to serve if each role has its own policy; empty: the first', resume_safe=True)
  weights_folder: str = setting(
      '', '--mode=serve: a trainer may pause the server and load weights from the folders in this '
      'folder. Empty: no client may', resume_safe=True, needs_trust=True)
  logprobs_mode: str = setting(
      'raw_logprobs', "--mode=serve: log-probs of the model ('raw_logprobs'), or of the sampling "
      "distribution with temperature and top_p ('processed_logprobs', for training)",
      allowed=('raw_logprobs', 'processed_logprobs'), resume_safe=True)
  max_waiting: int = setting(256, 'waiting requests; further requests get status 429', at_least=1)
  max_body_mb: int = setting(
      4, 'megabytes of a request; larger requests get status 413', at_least=1)
  tool_form: str = setting(
      'auto', "format of tool calls, see text/tool_calls.py; 'auto': that of the chat template",
      allowed=('auto', 'hermes', 'llama3', 'qwen_xml', 'tags'))
  forced_choice: str = setting(
      'refuse', "agent programs: a request that forces a tool call or a JSON text is an error "
      "('refuse'), or samples as if it forced nothing ('auto', counted as program/forced)",
      allowed=('refuse', 'auto'))
  agent_timeout_s: float = setting(300.0, 'time limit of an agent program, per episode', above=0)
  on_crash: str = setting(
      'mask', "an episode whose agent program raised is not trained on ('mask') or has reward 0 "
      "('zero')", allowed=('mask', 'zero'))
  thoughts: str = setting(
      'keep', "a turn that an agent program sends back without its <think>..</think> stays in the "
      "row as it was sampled ('keep'), or starts a row as the program sent it ('client')",
      allowed=('keep', 'client'))
  max_rows: int = setting(
      16, 'rows of an episode of an agent program; the turns of further conversations are not '
      'recorded', at_least=1)


def _section(kind: type, **settings: Any) -> Any:
  return dataclasses.field(default_factory=functools.partial(kind, **settings))


@dataclasses.dataclass
class Config(Section):
  """One run."""

  name: str = setting('run', 'name of the run; the default workdir is runs/<name>')
  seed: int = setting(0, 'seed of all random numbers', at_least=0, at_most=2**32 - 1)
  data: DataSettings = _section(DataSettings)
  env: EnvSettings = _section(EnvSettings)
  retriever: RetrieverSettings = _section(RetrieverSettings)
  model: ModelSettings = _section(ModelSettings)
  rollout: RolloutSettings = _section(RolloutSettings)
  algorithm: AlgorithmSettings = _section(AlgorithmSettings)
  teacher: TeacherSettings = _section(TeacherSettings)
  actor: OptimizerSettings = _section(OptimizerSettings)
  critic: OptimizerSettings = _section(OptimizerSettings, lr=1e-5, warmup=0.015)
  train: TrainSettings = _section(TrainSettings)
  sft: SftSettings = _section(SftSettings)
  pipeline: PipelineSettings = _section(PipelineSettings)
  mesh: MeshSettings = _section(MeshSettings)
  placement: PlacementSettings = _section(PlacementSettings)
  eval: EvalSettings = _section(EvalSettings)
  log: LogSettings = _section(LogSettings)
  health: HealthSettings = _section(HealthSettings)
  serve: ServeSettings = _section(ServeSettings)


# fmt: on
