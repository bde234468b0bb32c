"""Where a model's activations and gradients lie, of which XLA's own choice costs memory."""

import functools

import jax


def spread(x, row_sharding):
  """x [B,...] with its rows over the devices; left alone XLA follows the weights and keeps all rows."""
  return x if row_sharding is None else jax.lax.with_sharding_constraint(x, row_sharding)


def gradient_over_rows(params, row_sharding, width):
  """The same parameters; their gradients have the axis of `width` D cut over the rows' devices.

  For one gradient that is summed over steps of a loop. Left alone XLA holds the sum whole: for the head
  of a 7B model [D,V] in float32, 2 GiB. Where D does not divide, nothing changes.
  """
  if row_sharding is None or width % row_sharding.num_devices:
    return params
  return jax.tree.map(lambda w: _gradient_over_rows(w, row_sharding, w.shape.index(width)), params)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _gradient_over_rows(w, row_sharding, axis):
  del row_sharding, axis
  return w


def _forward(w, row_sharding, axis):
  del row_sharding, axis
  return w, None


def _backward(row_sharding, axis, _, gradient):
  spec = [jax.P.UNCONSTRAINED] * gradient.ndim
  spec[axis] = row_sharding.spec[0]
  placed = jax.sharding.NamedSharding(row_sharding.mesh, jax.P(*spec))
  return (jax.lax.with_sharding_constraint(gradient, placed),)


_gradient_over_rows.defvjp(_forward, _backward)
