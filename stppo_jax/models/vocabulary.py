"""Numbers of the whole vocabulary that some objectives read: mean log-probs and the KL of heads."""

import jax
import jax.numpy as jnp

from stppo_jax.models import attention
from stppo_jax.models import decoder
from stppo_jax.models import head_chunks
from stppo_jax.models import sharding
from stppo_jax.types import UserError


def check_linear(config: decoder.ModelConfig) -> None:
  """Raises a UserError if the model caps its logits, which are then not linear in the states."""
  if config.logit_softcap:
    raise UserError(
        'this objective needs the mean log-prob over the vocabulary, and the model caps its logits '
        f'(final_logit_softcapping = {config.logit_softcap}): choose another objective or model'
    )


def uniform_logp(
    params: decoder.Params,
    config: decoder.ModelConfig,
    x: jax.Array,
    tokens: jax.Array,
    logp: jax.Array,
    temperature: float | jax.Array = 1.0,
    paths: attention.Paths | None = None,
) -> jax.Array:
  """Returns the mean log-prob over the vocabulary [B,T], a constant, where `logp` is the token's.

  mean_a log pi(a) = log pi(token) + (mean_a z_a - z_token) / temperature

  The logits z are linear in x, so the mean logit is that of the head's mean row. No other logits
  are computed. Column 0 is 0. `paths` as in `decoder.token_logp`. UserError: see `check_linear`.
  """
  check_linear(config)
  head = decoder.head_rows(params, config)
  mean_row = head.astype(config.dtype).mean(axis=0, dtype=jnp.float32)
  own_rows = head[tokens].astype(config.dtype)
  own_rows = own_rows.astype(jnp.float32)
  x = decoder.before(x, paths)
  x = x.astype(jnp.float32)
  gap = jnp.einsum('btd,btd->bt', x, mean_row - own_rows, precision='highest')
  return jax.lax.stop_gradient(logp + gap / temperature)


def reference_kl(
    params: decoder.Params,
    config: decoder.ModelConfig,
    x: jax.Array,
    reference: decoder.Params,
    reference_x: jax.Array,
    temperature: float | jax.Array = 1.0,
    chunk: int | None = None,
    paths: attention.Paths | None = None,
) -> jax.Array:
  """Returns KL(reference || policy) over the vocabulary [B,T] of the states x [B,T,D] of both.

  Column t is the prediction of token t, and column 0 is 0. `chunk` and `paths` are as in
  `decoder.token_logp`.
  """
  length = x.shape[1]
  num_chunks = -(-length // min(chunk or length, length))
  states = []
  for state in (x, reference_x):
    state = sharding.spread(state, config.row_sharding)
    states.append(state.reshape(-1, config.d_model))
  kl = head_chunks.head_kl(
      states[0],
      decoder.head_rows(params, config),
      states[1],
      decoder.head_rows(reference, config),
      temperature,
      num_chunks,
      config.row_sharding,
      config.logit_softcap,
  )
  kl = kl.reshape(x.shape[:2])
  return decoder.before(kl, paths)
