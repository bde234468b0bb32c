"""Environments of several processes: each process steps its own share, and all get the outcomes."""

from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Sequence

import jax

from stppo_jax import types
from stppo_jax.distributed import hosts
from stppo_jax.envs import protocol
from stppo_jax.envs import stepping


def split_steps(envs: Sequence[protocol.Env]) -> Callable[..., list]:
  """Returns a `stepping.step_all` for `envs` in which each process steps its own share.

  Environment i, and so its state, belongs to process i modulo their number. `map_all` steps the
  environments of one process. The outcomes are sent to all processes as JSON.
  """
  count = hosts.num_processes()
  owners = {id(env): i % count for i, env in enumerate(envs)}

  def step_all(stepped, actions, map_all=map):
    step_owners = [owners[id(env)] for env in stepped]
    own = [i for i, owner in enumerate(step_owners) if owner == jax.process_index()]
    own_envs = [stepped[i] for i in own]
    own_actions = [actions[i] for i in own]
    own_outcomes: list = []
    failure = None
    try:
      own_outcomes = stepping.step_all(own_envs, own_actions, map_all)
    except types.RunError as error:  # all raise it, so that they can save together
      failure = str(error)
    shares, failures = zip(*hosts.share([own_outcomes, failure]))
    if failure := next(filter(None, failures), None):
      raise types.RunError(failure)
    # Each process returns outcomes in the order of its environments, so we can take them one by
    # one.
    outcomes = [iter(outcomes_of_process) for outcomes_of_process in shares]
    return [tuple(next(outcomes[owner])) for owner in step_owners]

  return step_all


def split_resets(map_all: Callable[..., Iterable]) -> Callable[..., Iterable]:
  """Returns `map_all`(reset, envs, seeds) in which each process resets its own share.

  The share is that of `split_steps`, and the openings are sent to all processes as JSON. So an
  environment on a server has one session, however many processes there are.
  """
  count = hosts.num_processes()

  def map_resets(reset, envs, seeds):
    own = slice(jax.process_index(), None, count)
    shares = hosts.share(list(map_all(reset, envs[own], seeds[own])))
    return [tuple(shares[i % count][i // count]) for i in range(len(envs))]

  return map_resets
