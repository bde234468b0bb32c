"""Episodes of agent programs: parameters and tasks in, recorded episodes out.

An `agent.Agent` whose episodes are played by a program of the user through the gateway. The loop
does not know: it calls `play`. Each episode is a session with an address of its own.

  thread per episode   program(task, base_url, model) -> reward
  gateway              records what the program's client samples, under the episode's session
  here                 starts programs, ends those that take too long, turns sessions into rows
"""

from collections.abc import Callable
from collections.abc import Sequence
import contextlib
import dataclasses
import math
import queue
import threading
import time

from absl import logging
import jax

from stppo_jax import types
from stppo_jax.distributed import hosts
from stppo_jax.envs import program as programs
from stppo_jax.envs import rewards
from stppo_jax.models import decoder
from stppo_jax.rollout import agent as agent_lib
from stppo_jax.rollout import engine
from stppo_jax.rollout import prepare
from stppo_jax.serving import gateway
from stppo_jax.serving import sessions as sessions_lib
from stppo_jax.types import RunError
from stppo_jax.types import UserError


@dataclasses.dataclass
class _Run:
  """An episode in progress, and how it ended."""

  name: str  # of its session
  session: sessions_lib.Session
  started: float
  error: str = ''  # what the program raised
  timed_out: bool = False


@dataclasses.dataclass
class ProgramAgent(agent_lib.Agent):
  """Turns parameters and questions into episodes, which an agent program plays."""

  program: programs.Program = dataclasses.field(kw_only=True)

  def play(
      self,
      params: dict,
      tasks: Sequence[types.Task],
      keys: jax.Array,  # [episodes]
      groups: Sequence[int] | None = None,
      greedy: bool = False,
      give_up: Callable[[], bool] | None = None,
  ) -> list[types.Episode]:
    """Plays one episode per task, `config.serve.rows` programs at a time.

    With `groups`, which training gives, every segment of a session is a row. Without, the longest
    segment stands for the episode, with the rewards of all turns.
    """
    started = time.perf_counter()
    rollout = self.config.rollout
    sampling = sessions_lib.Sampling(
        0.0 if greedy else rollout.temperature, 1.0 if greedy else rollout.top_p, rollout.max_turn
    )
    with gateway.running(
        self.config, self.sampler, params, self.tokenizer, self.config.name, shares_prefixes=False
    ) as server:
      url = server.url
      runs = self._run_programs(server.app.service, url, tasks, keys, sampling, give_up)
      counts = server.app.service.scheduler.counts
    self.report = engine.Report(
        {'prefill': 0.0, 'decode': time.perf_counter() - started, 'env': 0.0},
        counts.prefill_tokens,
        counts.reused_tokens,
        counts.sampled_tokens,
        counts.decode_steps,
    )
    _check_any_ran(self.config.env.kind, runs, trains=groups is not None)
    group_of = range(len(tasks)) if groups is None else groups
    rows = [
        self._rows(*of_run, n, groups is None)
        for n, of_run in enumerate(zip(runs, tasks, group_of))
    ]
    if groups is None:
      return [first for first, *_ in rows]
    return [row for of_task in rows for row in of_task]

  def _run_programs(self, service, url, tasks, keys, sampling, give_up) -> list[_Run]:
    """Runs a program per task, each in a thread; returns how they ended, in their order."""
    config, waiting = self.config.serve, list(range(len(tasks)))[::-1]
    runs: dict[int, _Run] = {}
    going: set[int] = set()
    ended: queue.SimpleQueue[int] = queue.SimpleQueue()
    try:
      while waiting or going:
        if give_up is not None:
          hosts.end_if(give_up)
        while waiting and len(going) < config.rows:
          i = waiting.pop()
          name, session = service.open_session(keys[i], sampling)
          runs[i] = _Run(name, session, time.monotonic())
          going.add(i)
          start = (runs[i], tasks[i], f'{url}/s/{name}/v1', lambda i=i: ended.put(i))
          threading.Thread(target=self._run_program, args=start, daemon=True).start()
        now = time.monotonic()  # what has ended since is found below
        late = {i for i in going if now - runs[i].started > config.agent_timeout_s}
        over: set[int] = set()
        with contextlib.suppress(queue.Empty):
          over.add(ended.get(timeout=0.1))
          while True:
            over.add(ended.get_nowait())
        for j in (over | late) & going:
          runs[j].timed_out = j not in over
          service.end_session(runs[j].name)
          going.remove(j)
    finally:
      for run in runs.values():  # programs that go on get an error
        service.end_session(run.name)
    return [runs[i] for i in range(len(tasks))]

  def _run_program(self, run: _Run, task: types.Task, url: str, end: Callable[[], None]) -> None:
    """Runs one program, and sets its reward."""
    try:
      given = self.program.run(task, url, self.config.name)
      if given is None and not run.session.has_reward:
        given = self._reward(task, run.session)
      if given is not None:
        run.session.reward(_finite(self.config.env.kind, given))
    except sessions_lib.Closed:
      pass  # it took too long
    except Exception as error:  # whatever a user's program may raise is data
      run.error = f'{type(error).__name__}: {" ".join(str(error).split())[:300]}'
    finally:
      end()

  def _reward(self, task, session) -> float:
    """Returns the score of the answer in the last turn; 0 without one."""
    answer = rewards.extract_answer(session.last_text)
    return 0.0 if answer is None else self.program.reward(task, answer, session.last_text)

  def _rows(
      self, run: _Run, task: types.Task, group: int, number: int, first_is_whole: bool
  ) -> list[types.Episode]:
    """Returns the rows of an episode, with what happened to it as metrics."""
    crashed = bool(run.error) and not run.timed_out
    is_masked = crashed and self.config.serve.on_crash == 'mask'
    episodes = run.session.episodes(task, group, is_masked, first_is_whole)
    counts = run.session.counts
    seen = {name: counts[name] for name in ('rewritten', 'branched', 'too_long')}
    seen |= {'segments': float(len(episodes)), 'crashed': float(crashed)}
    seen['timed_out'] = float(run.timed_out)
    for episode in episodes:
      if crashed and not is_masked:  # whatever was posted before
        for turn in episode.turns:
          turn.reward = 0.0
        episode.whole_score = 0.0
      episode.number = number
      episode.metrics = {**seen, **episode.metrics}
      episode.truncated |= run.timed_out
      episode.core_metrics = self.env.core_metrics
    return episodes


def make_agent(
    config,
    model: decoder.ModelConfig,
    mesh: jax.sharding.Mesh | None = None,
    prepared: prepare.Prepared | None = None,
) -> ProgramAgent:
  """Builds the agent of a config whose episodes an agent program plays."""
  prepared = prepared or prepare.prepare(config)
  program = prepared.env.make
  assert isinstance(program, programs.Program)
  if jax.process_count() > 1:
    raise UserError(
        f'config.env.kind={config.env.kind!r} on {jax.process_count()} processes: agent programs '
        'run on one, whose devices may be many'
    )
  if config.pipeline.staleness:
    raise UserError(
        f'config.env.kind={config.env.kind!r} with config.pipeline.staleness='
        f'{config.pipeline.staleness}: agent programs are sampled for while nothing trains: set '
        '--config.pipeline.staleness=0'
    )
  if config.rollout.routing_replay == 'sampling':
    raise UserError(
        f'config.env.kind={config.env.kind!r} with config.rollout.routing_replay=sampling: the '
        "gateway records no experts: set it to 'none' or 'old_policy'"
    )
  if config.rollout.max_num_gen_batches > 1:
    raise UserError(
        f'config.env.kind={config.env.kind!r} with config.rollout.max_num_gen_batches='
        f'{config.rollout.max_num_gen_batches}: an episode may have several rows: set it to 1'
    )
  rollout, tokenizer = config.rollout, prepared.tokenizer
  sampler = gateway.make_sampler(
      model,
      tokenizer,
      config.serve.rows,
      rollout.max_total,
      top_k=rollout.top_k,
      chunks=rollout.chunks,
      slot_buckets=rollout.slot_buckets,
      platform=(jax.devices()[0] if mesh is None else mesh.devices.flat[0]).platform,
      row_sharding=agent_lib.row_sharding(config, model, mesh),
  )
  return ProgramAgent(
      config=config,
      tokenizer=tokenizer,
      model=model,
      env=prepared.env,
      retriever=prepared.retriever,
      sampler=sampler,
      greedy=sampler,
      program=program,
  )


def _check_any_ran(kind: str, runs: Sequence[_Run], trains: bool) -> None:
  """Logs what programs raised, and how many did nothing. RunError: none has a row to train on."""
  errors = [run.error for run in runs if run.error and not run.timed_out]
  late = sum(run.timed_out for run in runs)
  idle = sum(not (run.session.num_turns or run.session.counts['too_long']) for run in runs)
  if errors and len(errors) == len(runs):
    raise RunError(f'config.env.kind={kind!r}: all {len(runs)} programs raised, as {errors[0]}')
  if trains and idle == len(runs):
    raise RunError(
        f'config.env.kind={kind!r}: none of {len(runs)} programs had an answer of the policy; '
        f'{late} took longer than config.serve.agent_timeout_s, {len(errors)} raised'
    )
  if errors:
    logging.warning('%d of %d programs raised, as %s', len(errors), len(runs), errors[0])
  if idle:
    logging.warning('%d of %d programs had no answer of the policy', idle, len(runs))
  if late:
    logging.warning('%d of %d programs took too long', late, len(runs))


def _finite(kind: str, given) -> float:
  """Returns a program's reward as a float, or raises ValueError."""
  number = float(given)
  if not math.isfinite(number):
    raise ValueError(f'{kind} returned the reward {given!r}: a finite number is needed')
  return number
