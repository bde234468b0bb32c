"""google-tunix's side of the benchmarks: its sampler and PPO learner, as in its examples.

Runs in a separate environment (see README.md), whose Python is passed to the Worker. Float32, with
the weights from the folder that ours.py wrote.
"""

import json
import os
import queue
import threading
import time

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from tunix.generate import sampler as sampler_lib
from tunix.models.qwen2 import model as qwen2
from tunix.models.qwen2 import params as qwen2_params
from tunix.rl import rl_cluster
from tunix.rl import utils as rl_utils
from tunix.rl.ppo import ppo_learner
from tunix.rl.rollout import base_rollout


class Sampling:
  """Samples with `tunix.generate.sampler.Sampler`."""

  def __init__(self, folder):
    self._model = load(os.path.join(folder, 'actor'))
    self._samplers = {}

  def greedy(self, prompts, num_new):
    """Returns the most likely tokens [B,num_new]."""
    return self._generate(prompts, num_new, temperature=0.0)

  def sample(self, prompts, num_new):
    """Samples tokens [B,num_new] at temperature 1 after prompts [B,T]."""
    return self._generate(prompts, num_new, temperature=1.0, top_p=1.0)

  def multi_turn_resending(self, prompts, observations, num_new, wait_s=0.0):
    """Samples turns, each with a prefill of the whole conversation.

    Observations [K - 1,B,T] come between the turns, all rows' together after `wait_s`.
    """
    context = prompts
    for observation in [*observations, None]:
      tokens = self.sample(context, num_new)
      if observation is not None:
        time.sleep(wait_s)
        context = np.concatenate([context, tokens, observation], axis=1)
    return tokens

  def _generate(self, context, num_new, **options):
    config, slots = self._model.config, context.shape[1] + num_new
    if slots not in self._samplers:
      self._samplers[slots] = sampler_lib.Sampler(
          self._model,
          Ids(config.vocab_size),
          sampler_lib.CacheConfig(slots, config.num_layers, config.num_kv_heads, config.head_dim),
      )
    found = self._samplers[slots](
        [row.tolist() for row in context],
        max_generation_steps=num_new,
        max_prompt_length=context.shape[1],  # its own padding to a power of two would be slower
        seed=0,
        **options,
    )
    return np.stack(found.tokens)


class PpoStep:
  """Complete steps of `PPOLearner`: rollout, log-probs, values, advantages, both updates.

  The learner fetches prompts itself, so it runs in a thread. A step ends when it asks for more.
  """

  def __init__(self, folder, rows, num_prompt, num_new, learning_rate, micro_batch, value_head):
    actor = load(os.path.join(folder, 'actor'))
    critic = rl_utils.create_critic_model(actor)
    critic.lm_head.kernel.value = jnp.asarray(value_head)
    roles = (rl_cluster.Role.ACTOR, rl_cluster.Role.CRITIC, rl_cluster.Role.ROLLOUT)

    def optimizer():
      adamw = optax.adamw(learning_rate, weight_decay=0.01)
      return optax.chain(optax.clip_by_global_norm(1.0), adamw)

    self._rollout = base_rollout.RolloutConfig(
        max_tokens_to_generate=num_new,
        max_prompt_length=num_prompt,
        kv_cache_size=num_prompt + num_new,
        temperature=1.0,
        top_p=1.0,
    )
    self._cluster = rl_cluster.RLCluster(
        actor=actor,
        critic=critic,
        tokenizer=Ids(actor.config.vocab_size),
        cluster_config=rl_cluster.ClusterConfig(
            role_to_mesh={role: _mesh() for role in roles},
            training_config=rl_cluster.RLTrainingConfig(
                actor_optimizer=optimizer(),
                critic_optimizer=optimizer(),
                mini_batch_size=rows,
                rollout_micro_batch_size=rows,
                train_micro_batch_size=micro_batch,
                compute_logps_micro_batch_size=micro_batch,
                eval_every_n_steps=10**9,
                max_steps=10**9,
            ),
            rollout_config=self._rollout,
        ),
    )
    # Integers, because it stores rewards as integers.
    score = lambda prompts, completions, **unused: [float(i % 2) for i in range(len(prompts))]
    learner = ppo_learner.PPOLearner(
        self._cluster,
        ppo_learner.PPOConfig(
            beta=0.0, gamma=1.0, gae_lambda=1.0, epsilon=0.2, clip_range_value=0.5
        ),
        reward_fns=score,
    )
    self._given, self._asked = queue.Queue(), queue.Queue()
    self._thread = threading.Thread(target=self._learn, args=(learner,), daemon=True)
    self._thread.start()
    self._wait()

  def step(self, prompts, greedy=False):
    """Does one PPO step on prompts [B,P]."""
    self._rollout.top_p = None if greedy else 1.0  # None means greedy
    # As a text, because a list of numbers would be split up on the way.
    self._given.put({'prompts': np.array([' '.join(map(str, row)) for row in prompts])})
    self._wait()
    trainers = self._cluster.actor_trainer, self._cluster.critic_trainer
    jax.block_until_ready([nnx.state(trainer.model) for trainer in trainers])

  def log_probs(self, prompts, completions):
    """Returns log-probs of the completions' tokens [B,T] and values of the states before them."""
    cluster, pad = self._cluster, self._cluster.rollout.pad_id()
    prompts, completions = jnp.asarray(prompts), jnp.asarray(completions)
    logp = cluster.get_old_per_token_logps(prompts, completions)
    values = cluster.get_values(prompts, completions, pad, pad)
    return np.asarray(logp), np.asarray(values)[:, -completions.shape[1] - 1 : -1]

  def _learn(self, learner):
    def batches():
      while True:
        self._asked.put(None)
        yield self._given.get()

    try:
      learner.train(batches())
    except BaseException as error:  # raised in `step`  # pylint: disable=broad-except
      self._asked.put(error)

  def _wait(self):
    error = self._asked.get()
    if error is not None:
      raise RuntimeError('the learner stopped') from error


class Ids:
  """A tokenizer for prompts that are already ids, or ids in a text.

  Padding and end have an id past the vocabulary, which no sampled token can have.
  """

  def __init__(self, vocab_size):
    self._none = vocab_size

  def encode(self, ids, **unused_options):
    """Returns the ids."""
    return [int(i) for i in (ids.split() if isinstance(ids, str) else ids)]

  def decode(self, ids, **unused_options):
    """Returns no text: it is not used, and its time should not count."""
    del ids
    return ''

  def bos_id(self):
    """Returns 0: no BOS is added."""
    return 0

  def eos_id(self):
    """Returns an id of no token."""
    return self._none

  def pad_id(self):
    """Returns an id of no token."""
    return self._none


def load(folder):
  """Loads the Qwen2 model of a Hugging Face folder."""
  with open(os.path.join(folder, 'config.json'), encoding='utf-8') as file:
    config = json.load(file)
  shape = qwen2.ModelConfig(
      num_layers=config['num_hidden_layers'],
      vocab_size=config['vocab_size'],
      embed_dim=config['hidden_size'],
      hidden_dim=config['intermediate_size'],
      num_heads=config['num_attention_heads'],
      num_kv_heads=config['num_key_value_heads'],
      head_dim=config['hidden_size'] // config['num_attention_heads'],
      rope_theta=config.get('rope_theta') or config['rope_parameters']['rope_theta'],
      norm_eps=config['rms_norm_eps'],
      use_tied_embedding=config['tie_word_embeddings'],
  )
  with _mesh() as mesh:
    return qwen2_params.create_model_from_safe_tensors(folder, shape, mesh, dtype=np.float32)


def _mesh():
  return jax.make_mesh(
      (1, 1),
      ('fsdp', 'tp'),
      axis_types=(jax.sharding.AxisType.Auto,) * 2,
      devices=jax.devices()[:1],
  )
