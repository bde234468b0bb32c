"""The peer's side of the benchmarks: transformers and torch, used as their documentation says.

Float32, torch's `scaled_dot_product_attention`, eager mode. The weights are from the folder that
ours.py wrote.
"""

import functools
import os
import time

import numpy as np
import torch
import transformers


class Sampling:
  """Samples with `generate`."""

  def __init__(self, folder, threads):
    _set_threads(threads)
    self._model = _load(transformers.AutoModelForCausalLM, folder, 'actor').eval()

  def greedy(self, prompts, num_new):
    """Returns the most likely tokens [B,num_new]."""
    return self._generate(torch.from_numpy(prompts), num_new, do_sample=False)

  def sample(self, prompts, num_new):
    """Samples tokens [B,num_new] at temperature 1 after prompts [B,T]."""
    return self._generate(torch.from_numpy(prompts), num_new)

  @torch.no_grad()
  def products(self, prompts, num_new):
    """Computes the products of `sample` with the weights of all layers, and nothing else."""
    *layers, head = _weights(self._model)
    rows = len(prompts)
    for num_tokens in [prompts.size] + (num_new - 1) * [rows]:
      for weight in layers:
        torch.nn.functional.linear(_ones(num_tokens, weight.shape[1]), weight)
      torch.nn.functional.linear(_ones(rows, head.shape[1]), head)

  def multi_turn_resending(self, prompts, observations, num_new, wait_s=0.0):
    """Samples turns, each with a prefill of the whole conversation.

    Observations [K - 1,B,T] come between the turns, all rows' together after `wait_s`.
    """
    return self._multi_turn(prompts, observations, num_new, keep_cache=False, wait_s=wait_s)

  def multi_turn(self, prompts, observations, num_new):
    """Does the same with one cache for all turns; works only for rows of equal length."""
    return self._multi_turn(prompts, observations, num_new, keep_cache=True)

  def _multi_turn(self, prompts, observations, num_new, keep_cache, wait_s=0.0):
    context = prompts
    cache = transformers.DynamicCache(config=self._model.config) if keep_cache else None
    for observation in [*observations, None]:
      tokens = self._generate(torch.from_numpy(context), num_new, past_key_values=cache)
      if observation is not None:
        time.sleep(wait_s)
        context = np.concatenate([context, tokens, observation], axis=1)
    if keep_cache and cache.get_seq_length() < context.shape[1] + num_new - 1:
      raise RuntimeError('the peer did not keep its cache')
    return tokens

  def _generate(self, context, num_new, do_sample=True, **options):
    sampling = dict(temperature=1.0, top_k=0, top_p=1.0) if do_sample else {}
    tokens = self._model.generate(
        context,
        attention_mask=torch.ones_like(context),
        do_sample=do_sample,
        use_cache=True,
        max_new_tokens=num_new,
        min_new_tokens=num_new,
        pad_token_id=0,
        **sampling,
        **options,
    )
    if tokens.shape[1] != context.shape[1] + num_new:
      raise RuntimeError(f'the peer stopped early: {tuple(tokens.shape)}')
    return tokens[:, context.shape[1] :].numpy()


class Learning:
  """PPO steps on an actor and a critic (a TokenClassification model with one label)."""

  def __init__(self, folder, threads, learning_rate, batch, micro_batch):
    _set_threads(threads)
    self._actor = _load(transformers.AutoModelForCausalLM, folder, 'actor').train()
    self._critic = _load(transformers.AutoModelForTokenClassification, folder, 'critic').train()
    self._optimizers = [
        torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=0.01, fused=True)
        for model in (self._actor, self._critic)
    ]
    batch = {name: torch.from_numpy(np.array(x)) for name, x in batch.items()}
    mask = batch['action_mask']
    batch |= {'tokens': batch['tokens'].long(), 'weights': mask / mask.sum()}
    parts = {name: x.split(micro_batch) for name, x in batch.items()}
    self._micro_batches = [dict(zip(parts, values)) for values in zip(*parts.values())]

  @torch.no_grad()
  def log_probs(self):
    """Returns log-probs and values, 0 outside the agent's tokens."""

    def of_all(function):
      parts = [function(micro['tokens']) * micro['action_mask'] for micro in self._micro_batches]
      return torch.cat(parts).numpy()

    return of_all(self._logp), of_all(self._values)

  def update(self):
    """Does one optimizer step; returns losses and gradient norms before norm clipping."""
    for optimizer in self._optimizers:
      optimizer.zero_grad()
    policy_losses, value_losses = [], []
    for micro in self._micro_batches:
      policy_losses.append(self._policy_loss(micro))
      policy_losses[-1].backward()
      value_losses.append(self._value_loss(micro))
      value_losses[-1].backward()
    return {
        'actor/pg_loss': sum(loss.item() for loss in policy_losses),
        'critic/vf_loss': sum(loss.item() for loss in value_losses),
        'stppo/grad_norm': self._step(0, self._actor),
        'critic/grad_norm': self._step(1, self._critic),
    }

  @torch.no_grad()
  def products(self):
    """Computes the products of `update` with the weights of all layers, and nothing else."""
    for micro in self._micro_batches:
      for weight in [*_weights(self._actor), *_weights(self._critic)]:
        outputs, inputs = (_ones(micro['tokens'].numel(), width) for width in weight.shape)
        torch.nn.functional.linear(inputs, weight)
        outputs @ weight  # the gradient of the inputs
        outputs.T @ inputs  # and that of the weight

  def _policy_loss(self, micro):
    ratio = torch.exp((self._logp(micro['tokens']) - micro['old_logp']) * micro['action_mask'])
    advantages = micro['advantages']
    surrogate = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    return -(micro['weights'] * surrogate).sum()

  def _value_loss(self, micro):
    values, old_values, returns = (
        self._values(micro['tokens']),
        micro['old_values'],
        micro['returns'],
    )
    near = old_values + (values - old_values).clamp(-0.5, 0.5)
    error = torch.maximum((values - returns) ** 2, (near - returns) ** 2)
    return 0.5 * (micro['weights'] * error).sum()

  def _step(self, index, model):
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    self._optimizers[index].step()
    return norm.item()

  def _logp(self, tokens):
    """Returns log-probs [B,T]; column t belongs to token t, column 0 is 0."""
    logits = self._actor(tokens, use_cache=False).logits[:, :-1]
    logp = logits.log_softmax(-1).gather(-1, tokens[:, 1:, None])[..., 0]
    return torch.nn.functional.pad(logp, (1, 0))

  def _values(self, tokens):
    """Returns values [B,T] of the state before token t; column 0 is 0."""
    values = self._critic(tokens, use_cache=False).logits[:, :-1, 0]
    return torch.nn.functional.pad(values, (1, 0))


def _load(kind, folder, name):
  return kind.from_pretrained(
      os.path.join(folder, name), attn_implementation='sdpa', dtype=torch.float32
  )


def _weights(model):
  """Returns the weights [outputs,inputs] of all linear layers, the head last."""
  layers = [module for module in model.modules() if isinstance(module, torch.nn.Linear)]
  return [layer.weight for layer in layers]


@functools.cache
def _ones(num_tokens, width):
  return torch.ones(num_tokens, width)


def _set_threads(threads):
  torch.set_num_threads(threads)
  torch.set_num_interop_threads(1)
  torch.manual_seed(0)
  transformers.utils.logging.disable_progress_bar()
