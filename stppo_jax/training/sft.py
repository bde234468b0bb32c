"""Supervised training on conversations before reinforcement learning: the mode `run.py sft`.

The loss is the mean negative log-prob of the assistant's tokens in a step. Conversations share bins
as the episodes of a run do (`packing`). The model, its adapters and its layout are those of a run.
Checkpoints hold the parameters and the moments, and the same command resumes from the newest one.
"""

import collections
from collections.abc import Iterable
import contextlib
import dataclasses
import functools
import hashlib
import json
import math
import os
import pathlib
import shutil
from typing import Any
from typing import NamedTuple

from absl import logging
import jax
import numpy as np

from stppo_jax import types
from stppo_jax.algorithms import variants
from stppo_jax.assembly import components
from stppo_jax.config import Config
from stppo_jax.data import conversations
from stppo_jax.data import row_files
from stppo_jax.data import tasks as tasks_lib
from stppo_jax.distributed import hosts
from stppo_jax.models import attention
from stppo_jax.models import decoder
from stppo_jax.models import hf_export
from stppo_jax.models import sharding
from stppo_jax.monitoring import metrics as metrics_lib
from stppo_jax.monitoring import workdir as workdir_lib
from stppo_jax.rollout import prepare
from stppo_jax.rollout import saved
from stppo_jax.settings import validation
from stppo_jax.stop_signal import NEVER
from stppo_jax.stop_signal import StopSignal
from stppo_jax.text import tokenizer as tokenizer_lib
from stppo_jax.training import checkpoint
from stppo_jax.training import learner as learner_lib
from stppo_jax.training import state as state_lib
from stppo_jax.training import supervised

_NO_CRITIC = variants.Variant(advantage='group_zscore', kl_in='none')
_MIN_HELD_OUT = 1


class Pools(NamedTuple):
  """The conversations to train on, and those that are held out."""

  train: list[supervised.Demonstration]
  held_out: list[supervised.Demonstration]


def start(config: Config, workdir: str, stop_signal: StopSignal = NEVER) -> str:
  """Trains, or resumes; returns the folder of the model, or a line if it was asked to stop.

  After a stop, the state after the last whole step is saved. After an interrupt, steps since the
  newest checkpoint (`train.checkpoint_every`) are lost.
  """
  validation.validate(config)
  if config.data.source == 'embedded':
    raise types.UserError(
        'sft trains on conversations, and config.data.source is not set: give a file with '
        'messages, conversations, or prompt and completion: --config.data.source=FILE'
    )
  workdir_lib.check_path(workdir)
  pools = load_pools(config)  # before the folder is made: a missing file leaves none
  folder = config.train.checkpoint_folder
  with workdir_lib.lock(workdir, folder) if hosts.is_writer() else contextlib.nullcontext():
    _claim(config, workdir, pools)
    return _run(config, workdir, pools, stop_signal)


def _claim(config, workdir, pools):
  """Checks that `workdir` belongs to this training, or writes config.json there."""
  own = validation.changeable_on_resume(config, with_critic=False)
  may_change = [name for name in own if not name.startswith('sft.')]
  digests = {'train_questions': _digest(pools.train), 'held_out_questions': _digest(pools.held_out)}
  hosts.require_same('conversations', digests)
  record = dataclasses.asdict(config)
  accepts_changes = config.train.accept_changed_plugins
  sources = components.sources(config)
  hosts.by_writer(
      workdir_lib.claim, workdir, record, may_change, sources, {'mode': 'sft'}, accepts_changes
  )
  hosts.by_writer(workdir_lib.claim_data, workdir, digests, accepts_changes)


def _digest(rows):
  digest = hashlib.sha256()
  for row in rows:
    digest.update(row.tokens.tobytes())
  return digest.hexdigest()[:16]


def load_pools(config: Config) -> Pools:
  """Reads and renders the conversations of config.data.source. UserError: there are none to use."""
  env = components.resolve(config).env
  tokenizer = prepare.load_tokenizer(config, env.frame)
  shape = prepare.load_shape(config)
  tokenizer_lib.check_matches(tokenizer, shape.vocab_size)
  tool_form = components.call_form(config, tokenizer.render)
  renderer = conversations.Renderer(
      tokenizer, config.rollout.max_observation, tool_form, tuple(env.stop_strings)
  )
  longest = min(config.train.length_buckets[-1], shape.max_positions)
  by_split: dict[str, list[supervised.Demonstration]] = {'train': [], 'held out': []}
  counts: collections.Counter[str] = collections.Counter()
  num_turns = 0
  for split, episode in _episodes(config, renderer):
    counts['all'] += 1
    if isinstance(episode, str):
      counts[episode] += 1
      continue
    shorter = conversations.fitted(episode, longest)
    if shorter is None:
      counts[f'a first turn beyond {longest} tokens'] += 1
      continue
    if tasks_lib.same_split(split, config.data.eval_split):
      pool = 'held out'
    elif not split or tasks_lib.same_split(split, config.data.train_split):
      pool = 'train'
    else:
      counts[f'the split {split!r}, which config.data.train_split may name'] += 1
      continue
    if len(shorter.turns) < len(episode.turns):
      counts['cut'] += 1
    num_turns += len(shorter.turns)
    by_split[pool].append(supervised.from_episode(shorter))
  for name in list(by_split):
    by_split[name] = [row for row in by_split[name] if (row.weights > 0).any()]
  total = counts.pop('all', 0)
  num_cut = counts.pop('cut', 0)
  left_out = ', '.join(f'{number} with {reason}' for reason, number in counts.items())
  usable = len(by_split['train']) + len(by_split['held out'])
  logging.info(
      '%d of %d conversations with %d turns to imitate; left out: %s; cut after their last turn '
      'within %d tokens: %d',
      usable,
      total,
      num_turns,
      left_out or 'none',
      longest,
      num_cut,
  )
  pools = _with_held_out(config, Pools(by_split['train'], by_split['held out']))
  if not pools.train:
    raise types.UserError(
        f'config.data.source={config.data.source!r}: none of {total} conversations can be trained '
        f'on ({left_out or "no row"}): give others'
    )
  return pools


def _with_held_out(config, pools):
  """Returns the pools with a share of the conversations held out, if none are.

  Conversations with one prompt, such as the episodes of a group, are on the same side. If all have
  the same one, as in an environment that opens alike for every seed, they are held out one by one.
  """
  if pools.held_out or not config.sft.held_out:
    return pools
  keys = list(map(_prompt, pools.train))
  if len(set(keys)) == 1:
    keys = list(range(len(keys)))
  units = list(dict.fromkeys(keys))
  order = np.random.default_rng(config.seed).permutation(len(units))
  number = max(_MIN_HELD_OUT, round(config.sft.held_out * len(units)))
  if number >= len(units):
    return pools
  chosen = {units[i] for i in order[:number]}
  rows = list(zip(keys, pools.train, strict=True))
  held_out = [row for key, row in rows if key in chosen]
  train = [row for key, row in rows if key not in chosen]
  return Pools(train, held_out)


def _prompt(row):
  """Returns the tokens before the first one to imitate, as bytes."""
  start = np.argmax(row.weights > 0)
  return row.tokens[:start].tobytes()


def _episodes(config, renderer) -> Iterable[tuple[str, types.Episode | str]]:
  """Yields (split, episode), or the reason why a conversation is left out."""
  parts = [part.strip() for part in config.data.source.split(',')]
  folders = [part for part in parts if saved.has_batches(part)]
  for folder in folders:
    yield from _saved_episodes(folder, renderer.tokenizer, config.sft.min_reward)
  others = [part for part in parts if part not in folders]
  if not others:
    return
  for path, split in tasks_lib.files_of(','.join(others)).items():
    for row, conversation in conversations.read(path, config.sft.min_reward, config.data.columns):
      if isinstance(conversation, str):
        yield '', conversation
        continue
      if not conversation.tools and any('tool_calls' in m for m in conversation.messages):
        logging.log_first_n(
            logging.WARNING,
            '%s:%d: a turn calls a tool, and the row has none in its columns tools or tool_defs: '
            'the prompt declares no tool, unless a message does',
            1,
            path,
            row.number,
        )
      with row_files.explain(path, row.number):
        episode = renderer.episode(conversation, f'{path.stem}-{row.number}')
      yield conversation.split or split, episode


def _saved_episodes(folder, tokenizer, min_score):
  for number in saved.numbers(folder):
    for episode in saved.read(saved.path_of(folder, number), tokenizer).episodes:
      score = episode.score if episode.whole_score is None else episode.whole_score
      if episode.failed or not episode.turns:
        yield '', 'no turn, or a failed environment'
      elif not score >= min_score:
        yield '', f'a score below {min_score:g}'
      else:
        yield '', episode


def _run(config, workdir, pools, stop_signal):
  """Trains on the pools; returns the folder of the model."""
  mesh = sharding.mesh_of(config.mesh)
  train = config.train
  if not train.micro_batch:
    train = dataclasses.replace(train, micro_batch=sharding.num_row_shards(mesh))
    config = dataclasses.replace(config, train=train)
  sharding.check_rows(mesh, micro_batch=train.micro_batch)
  place = functools.partial(sharding.tree_shardings, mesh=mesh)
  batch = min(config.sft.batch, len(pools.train))
  num_steps = math.ceil(config.sft.epochs * len(pools.train) / batch)
  models = _load_models(config, place)
  lengths = np.array([len(row.tokens) for row in pools.train])
  all_buckets = config.train.length_buckets
  longest = max(len(row.tokens) for row in (*pools.train, *pools.held_out))
  length_buckets = all_buckets[: int(np.searchsorted(all_buckets, longest)) + 1]
  model = supervised.with_kernel(models.model, config.model.attention, mesh, length_buckets)
  order = functools.partial(tasks_lib.in_epochs, len(pools.train), batch, config.seed)
  num_bins = supervised.choose_bins(
      lengths,
      order,
      config.train.micro_batch,
      sharding.num_row_shards(mesh),
      length_buckets,
      attention.takes_segments(model.attention),
  )
  trainer = supervised.Trainer(
      model,
      models.frozen,
      supervised.make_optimizer(config.sft.lr, num_steps),
      mesh,
      num_bins,
      length_buckets,
      config.model.logp_chunk or None,
      learner_lib.shares_prefixes(config.train.share_prefixes, [model]),
  )
  state = trainer.init(models.actor)
  del models
  num_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
  with checkpoint.Checkpoints(workdir, 2, config.train.on_save_error, num_bytes) as checkpoints:
    done = checkpoints.newest() or 0
    checkpoints.drop_after(done)  # damaged ones, whose numbers are needed again
    if done:
      like = sharding.shapes(state)
      del state
      state = checkpoints.restore(done, like)
      logging.info('resumed after %d of %d steps', done, num_steps)
    log = _Log(workdir, done, num_steps)

    def log_losses(n):
      loss = None
      if pools.held_out:
        loss = trainer.loss(state['actor'], pools.held_out, batch)
      log.losses(n, loss)

    if not done:
      log_losses(0)
    all_stop = hosts.together(stop_signal)
    pending: list[tuple[int, Any, float]] = []  # a step whose loss is not read yet

    def read_loss():
      while pending:
        n, loss, padding = pending.pop()
        if not math.isfinite(loss):
          raise types.RunError(
              f'the loss or the gradient of step {n} is not finite: lower '
              f'--config.sft.lr={config.sft.lr:g}, in another --workdir'
          )
        log.step(n, float(loss), padding)

    for n in range(done + 1, num_steps + 1):
      if all_stop.is_set():
        read_loss()
        checkpoints.save(n - 1, state, {})
        return f'stopped after {n - 1} of {num_steps} steps; the same command continues'
      chosen = [pools.train[i] for i in order(n - 1)]
      rows = trainer.rows(chosen, batch)
      state, loss = trainer.step(state, rows)
      read_loss()  # the device computes this step while the one before is logged
      pending.append((n, loss, trainer.padding(rows)))
      if _is_due(n, num_steps, config.eval.every):
        read_loss()
        log_losses(n)
      if _is_due(n, num_steps, config.train.checkpoint_every):
        read_loss()
        checkpoints.save(n, state, {})
    read_loss()
  return write(config, workdir, trainer.model, trainer.frozen, state['actor'])


def _is_due(n, num_steps, every):
  return n == num_steps or (every > 0 and n % every == 0)


def _load_models(config, place):
  """Loads the policy, or its adapters and their base."""

  def load_model(config, head, folder=None, unused_memory_kind=None):
    return prepare.load_policy(config, head, folder, place)

  def make(function):
    shapes = jax.eval_shape(function)
    return jax.jit(function, out_shardings=place(shapes))()

  return learner_lib.load(config, _NO_CRITIC, load_model, make)


def write(
    config: Config, workdir: str, model: decoder.ModelConfig, frozen: state_lib.Frozen, actor: dict
) -> str:
  """Writes the policy as a Hugging Face folder; returns its path. Adapters are merged."""
  folder = os.path.join(workdir, 'model')
  source = prepare.model_folder(config)
  params = actor
  if config.model.lora_rank:
    from stppo_jax.models import lora

    params = jax.jit(lora.merge, static_argnums=2)(frozen.actor, actor, model.lora_scale)
  dtype = hf_export.dtype_to_write(source, config.model.param_dtype)
  env = components.resolve(config).env
  tokenizer = prepare.load_tokenizer(config, env.frame)
  hf_export.save_hf(folder, model, params, source, dtype=dtype, eos_ids=tokenizer.eos_ids)
  if hosts.is_writer() and config.model.folder == 'embedded' and tokenizer.render is not None:
    path = pathlib.Path(folder, 'chat_template.jinja')
    shutil.copyfile(prepare.EMBEDDED_TEMPLATE, path)
  logging.info('a run starts from the model with --config.model.folder=%s', folder)
  return folder


class _Log:
  """Writes metrics.jsonl and the console's lines."""

  def __init__(self, workdir: str, done: int, num_steps: int):
    self._path = os.path.join(workdir, metrics_lib.FILE_NAME)
    self._num_steps = num_steps
    self._best = (math.inf, 0)
    self._losses: list[float] = []
    if hosts.is_writer():
      records = metrics_lib.read_metrics(workdir)
      kept = [record for record in records if record['step'] <= done and done]
      workdir_lib.write_parts(self._path, [json.dumps(record) + '\n' for record in kept])
      held_out = 'sft/held_out_loss'
      before = [(record[held_out], record['step']) for record in kept if held_out in record]
      self._best = min(before, default=self._best)

  def step(self, n: int, loss: float, padding: float) -> None:
    """Records the loss of a step, and its share of padding."""
    self._losses.append(loss)
    self._write({'step': n, 'sft/loss': loss, 'sft/padding': padding})

  def losses(self, n: int, loss: float | None) -> None:
    """Records the held-out loss after a step. A rise is a warning. None: nothing is held out."""
    held_out = 'no conversation is held out' if loss is None else f'held-out loss {loss:.4f}'
    train = f', {np.mean(self._losses):.4f} in training' if self._losses else ''
    self._losses = []
    logging.info('step %d/%d: %s%s', n, self._num_steps, held_out, train)
    if loss is None:
      return
    self._write({'step': n, 'sft/held_out_loss': loss})
    best, step = self._best
    if n == self._num_steps and loss > best:
      logging.warning(
          'the held-out loss was lower after step %d (%.4f): lower --config.sft.epochs or lr',
          step,
          best,
      )
    self._best = min(self._best, (loss, n))

  def _write(self, record):
    if hosts.is_writer():
      with open(self._path, 'a', encoding='utf-8') as file:
        file.write(json.dumps(record) + '\n')
