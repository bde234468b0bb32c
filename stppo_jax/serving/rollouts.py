"""Episodes of agent programs: parameters and tasks in, recorded episodes out.

An `agent.Agent` whose episodes are played by a program of the user through the gateway. The loop
calls only `play`. Each episode is a session with its own address.

  thread per episode   program(task, base_url, model) -> reward
  gateway              records what the program's client samples, under the episode's session
  here                 starts programs, ends those that take too long, turns sessions into rows

With several processes the programs and the gateway are on process 0. The schedulers of all
processes launch the same programs of JAX, and all processes get the rows.
"""

from collections.abc import Callable
from collections.abc import Sequence
from concurrent import futures
import dataclasses
import math
import time
from typing import Any

from absl import logging
import jax

from stppo_jax import types
from stppo_jax.assembly.components import Components
from stppo_jax.config import Config
from stppo_jax.distributed import hosts
from stppo_jax.envs import commands
from stppo_jax.envs import factory
from stppo_jax.envs import guard as guard_lib
from stppo_jax.envs import program as program_lib
from stppo_jax.envs import rewards
from stppo_jax.models import decoder
from stppo_jax.net import calls
from stppo_jax.rollout import agent as agent_lib
from stppo_jax.rollout import sampler as sampler_lib
from stppo_jax.rollout import sequences
from stppo_jax.serving import gateway
from stppo_jax.serving import scheduler as scheduler_lib
from stppo_jax.serving import sessions
from stppo_jax.stop_signal import NEVER
from stppo_jax.stop_signal import StopSignal
from stppo_jax.types import RunError
from stppo_jax.types import UserError

_POLL_S = 0.1


@dataclasses.dataclass(eq=False)
class _ProgramRun:
  """A program that plays an episode."""

  task: types.Task
  session: sessions.Session
  timed_out: bool = False
  error: str = ''  # what the program raised in time
  log: str = ''  # the end of a command's standard error


@dataclasses.dataclass
class ProgramAgent(agent_lib.Agent):
  """Turns parameters and questions into episodes, which an agent program plays."""

  sampler: sampler_lib.Sampler
  program: program_lib.Program = dataclasses.field(kw_only=True)
  warnings: set[str] = dataclasses.field(default_factory=set, kw_only=True)  # logged so far

  def play(
      self,
      params: object,
      tasks: Sequence[types.Task],
      keys: jax.Array,  # [episodes]
      groups: Sequence[int] | None = None,
      greedy: bool = False,
      stop_signal: StopSignal = NEVER,
  ) -> list[types.Episode]:
    """Plays one episode per task, `config.serve.rows` programs at a time.

    With `groups`, which training gives, every segment of a session is a row. Without, the longest
    segment stands for the episode, with the rewards of all turns.
    """
    assert isinstance(params, dict)
    started = time.perf_counter()
    rollout = self.config.rollout
    sampling = sessions.Sampling(rollout.temperature, rollout.top_p, rollout.max_turn)
    if greedy:
      sampling = dataclasses.replace(sampling, temperature=0.0, top_p=1.0)
    scheduler = scheduler_lib.Scheduler(
        self.sampler,
        params,
        self.tokenizer.token_bytes,
        self.tokenizer.eos_ids,
        self.config.serve.max_waiting,
        shares_prefixes=False,
    )
    stop_anywhere = hosts.anywhere(stop_signal)

    def play_here() -> list[types.Episode]:
      with gateway.running(self.config, scheduler, self.tokenizer) as server:
        runs = self._run_programs(server, tasks, keys, sampling, stop_anywhere)
      return self._rows_of(runs, groups)

    rows = _by_writer(play_here, scheduler, stop_anywhere)
    counts = scheduler.counts
    self.report = sequences.Report(
        {'prefill': 0.0, 'decode': time.perf_counter() - started, 'env': 0.0},
        counts.prefill_tokens,
        counts.reused_tokens,
        counts.sampled_tokens,
        counts.decode_steps,
    )
    return rows

  def _rows_of(
      self, runs: Sequence[_ProgramRun], groups: Sequence[int] | None
  ) -> list[types.Episode]:
    """Returns the rows of all episodes, see `play`."""
    _check_any_ran(self.config.env.kind, runs, trains=groups is not None)
    self._warn_of_rows(runs)
    rows: list[types.Episode] = []
    for number, run in enumerate(runs):
      if groups is None:
        rows.append(self._rows(run, number, number, first_is_whole=True)[0])
      else:
        rows += self._rows(run, groups[number], number, first_is_whole=False)
    return rows

  def _warn_of_rows(self, runs: Sequence[_ProgramRun]) -> None:
    """Logs once why episodes have many rows."""
    counts = {name: sum(run.session.counts[name] for run in runs) for name in sessions.COUNTS}
    kind = self.config.env.kind
    if counts['unrecorded'] and 'unrecorded' not in self.warnings:
      self.warnings.add('unrecorded')
      logging.warning(
          '%s: %d turns are not recorded, because their episodes have config.serve.max_rows=%d '
          'rows, or because the program ended their streams early',
          kind,
          counts['unrecorded'],
          self.config.serve.max_rows,
      )
    if counts['wrong_parents'] and 'wrong_parents' not in self.warnings:
      self.warnings.add('wrong_parents')
      logging.warning(
          '%s: %d rows are recorded without the parent that their headers name, because it is not '
          'another agent with a recorded turn, or not the parent of the first row of their agent. '
          'The first such parent: %r',
          kind,
          counts['wrong_parents'],
          next(filter(None, (run.session.wrong_parent for run in runs))),
      )
    may_reward_agents = self.config.env.branch_credit == 'program'
    has_rewarded_agents = any(run.session.has_agent_rewards for run in runs)
    branches = any(run.session.num_segments > 1 for run in runs)
    if may_reward_agents and branches and not has_rewarded_agents:
      if 'branch_credit' not in self.warnings:
        self.warnings.add('branch_credit')
        logging.warning(
            "%s: config.env.branch_credit='program', and no program of the batch has posted the "
            'reward of an agent ({"reward": 1.0, "session": ID}). So all rows have the reward of '
            'their episode',
            kind,
        )
    num_turns = sum(run.session.num_turns for run in runs)
    if 2 * counts['rewritten'] >= num_turns > 0 and 'rewritten' not in self.warnings:
      self.warnings.add('rewritten')
      logging.warning(
          '%s: %d of %d turns start a new row, because the program rewrites its history. '
          'The first difference: %s',
          kind,
          counts['rewritten'],
          num_turns,
          next(run.session.difference for run in runs if run.session.counts['rewritten']),
      )

  def _run_programs(
      self,
      server: Any,  # http_server.Server, whose libraries may not be installed
      tasks: Sequence[types.Task],
      keys: jax.Array,
      sampling: sessions.Sampling,
      stop_signal: StopSignal,
  ) -> list[_ProgramRun]:
    """Runs a program per task, `config.serve.rows` at a time."""
    programs_over = StopSignal()  # ends the programs, also after an error

    with futures.ThreadPoolExecutor(self.config.serve.rows) as pool:
      runs = []
      for task, key in zip(tasks, keys):
        run = pool.submit(self._run_program, server, sampling, programs_over, task, key)
        runs.append(run)
      waiting = set(runs)
      try:
        while waiting:
          done, waiting = futures.wait(waiting, _POLL_S, futures.FIRST_EXCEPTION)
          for run in done:
            run.result()  # an error that ends the run does not wait for the other programs
          stop_signal.raise_if_set()
          # The programs get errors, which they may catch and answer with a reward.
          server.app.service.scheduler.raise_if_failed()
      finally:
        programs_over.set()
        pool.shutdown(cancel_futures=True)
    return [run.result() for run in runs]

  def _run_program(
      self,
      server: Any,
      sampling: sessions.Sampling,
      programs_over: StopSignal,
      task: types.Task,
      key: jax.Array,
  ) -> _ProgramRun:
    """Runs one program in its own session. A program that continues after it gets an error."""
    service = server.app.service
    session = service.open_session(key, sampling)
    run = _ProgramRun(task, session)
    deadline = time.monotonic() + self.config.serve.agent_timeout_s
    url = f'{server.url}/s/{session.name}/v1'
    process: commands.Process | None = None
    is_done = False
    try:
      call: calls.ThreadedCall | commands.Process
      if isinstance(self.program, commands.CommandProgram):
        call = process = self.program.start(task, url, self.config.name)
      else:
        call = calls.ThreadedCall(lambda: self._play(run, url))
      while not (is_done := call.wait(_POLL_S)):
        run.timed_out = time.monotonic() > deadline
        if run.timed_out or programs_over.is_set():
          break
      if is_done:
        run.session.leave_streams()
      if is_done and process is not None:
        result = process.result()
        if result.reward is not None:
          run.session.reward(result.reward)
        run.session.measure(result.metrics)
      if is_done and not run.session.has_reward:
        self._score(run, guard_lib.Guard(self.config.rollout.env_timeout_s, programs_over))
    except factory.ENDS_RUN as error:
      if is_done:  # the reward cannot be had
        raise
      run.error = f'{type(error).__name__}: {error}'
    except (rewards.RewardError, guard_lib.TimedOut) as error:
      run.error = str(error)
    except Exception as error:  # whatever a user's program may raise is data
      run.error = f'{type(error).__name__}: {" ".join(str(error).split())[:300]}'
    finally:
      if process is not None:
        process.end()
        run.log = process.log
      service.end_session(session.name)
    return run

  def _play(self, run: _ProgramRun, url: str) -> None:
    """Runs the program itself, and sets the reward that it returns."""
    reward = self.program.run(run.task, url, self.config.name)
    if isinstance(reward, program_lib.Result):
      run.session.measure(reward.metrics)
      reward = reward.reward
    if reward is not None:
      run.session.reward(_finite(self.config.env.kind, reward))

  def _score(self, run: _ProgramRun, guard: guard_lib.Guard) -> None:
    """Sets the score of the answer in the last turn; 0 without an answer."""
    answer = rewards.extract_answer(run.session.last_text)
    if answer is None:
      run.session.reward(0.0)
      return
    score = guard.call(
        'the reward',
        rewards.score_answer,
        self.program.reward,
        run.task,
        answer,
        run.session.transcript,
    )
    run.session.reward(float(score), metrics=score.metrics)

  def _rows(
      self, run: _ProgramRun, group: int, number: int, first_is_whole: bool
  ) -> list[types.Episode]:
    """Returns the rows of an episode, and counts what happened to it."""
    has_crashed = run.error != ''
    is_masked = has_crashed and self.config.serve.on_crash == 'mask'
    episodes = run.session.episodes(run.task, group, is_masked, first_is_whole)
    happened = {'crashed': float(has_crashed), 'timed_out': float(run.timed_out)}
    for episode in episodes:
      if has_crashed and not is_masked:  # rewards that were posted before do not count
        for turn in episode.turns:
          turn.reward = 0.0
        episode.whole_score = 0.0
      episode.number = number
      episode.counts |= happened
      episode.truncated |= run.timed_out
      episode.core_metrics = self.env.core_metrics
      episode.log = run.log
    return episodes


def make_agent(
    config: Config,
    components: Components,
    model: decoder.ModelConfig,
    mesh: jax.sharding.Mesh | None = None,
) -> ProgramAgent:
  """Builds the agent of a config whose episodes an agent program plays."""
  program = components.env.make
  assert isinstance(program, program_lib.Program)
  rollout = config.rollout
  allowed = {
      'rollout.routing_replay': rollout.routing_replay != 'sampling',
      'rollout.max_num_gen_batches': rollout.max_num_gen_batches == 1,
  }
  wrong = [name for name, is_allowed in allowed.items() if not is_allowed]
  if wrong:
    raise UserError(
        f'config.env.kind={config.env.kind!r} does not support {", ".join(wrong)}: agent programs '
        "need rollout.routing_replay 'none' or 'old_policy', and rollout.max_num_gen_batches=1"
    )
  device = jax.devices()[0] if mesh is None else mesh.devices.flat[0]
  sampler = gateway.make_sampler(
      model,
      components.tokenizer,
      config.serve.rows,
      rollout.max_total,
      top_k=rollout.top_k,
      chunks=rollout.chunks,
      slot_buckets=rollout.slot_buckets,
      platform=device.platform,
      row_sharding=agent_lib.row_sharding(config, model, mesh),
  )
  return ProgramAgent(
      config=config,
      tokenizer=components.tokenizer,
      model=model,
      env=components.env,
      retriever=None,
      sampler=sampler,
      greedy=sampler,
      program=program,
  )


def _by_writer(
    play: Callable[[], list[types.Episode]],
    scheduler: scheduler_lib.Scheduler,
    stop_anywhere: StopSignal,
) -> list[types.Episode]:
  """Returns the episodes that `play` returns on process 0, on all processes.

  Until its scheduler has ended as that of process 0 has, a process exchanges nothing else.
  """
  if hosts.num_processes() == 1:
    return play()
  if not hosts.is_writer():
    with scheduler:
      while scheduler.is_alive:
        scheduler.wait(_POLL_S)
        stop_anywhere.is_set()  # if this process has to stop, it tells process 0
  records = hosts.by_writer(lambda: [episode.to_dict() for episode in play()])
  return list(map(types.Episode.from_dict, records))


def _check_any_ran(kind: str, runs: Sequence[_ProgramRun], trains: bool) -> None:
  """Logs what programs raised, and how many did nothing. RunError: none has a row to train on."""
  errors = [run.error for run in runs if run.error]
  num_late = sum(run.timed_out for run in runs)
  num_idle = sum(not (run.session.num_turns or run.session.counts['too_long']) for run in runs)
  problems = (
      f'{kind}: of {len(runs)} programs {len(errors)} raised, {num_late} took longer than '
      f'config.serve.agent_timeout_s, and {num_idle} had no answer of the policy'
  )
  if errors:
    problems += f'. The first error: {errors[0]}'
  is_idle = trains and num_idle == len(runs)
  if is_idle or len(errors) == len(runs) > 0:
    raise RunError(problems)
  if errors or num_late or num_idle:
    logging.warning('%s', problems)


def _finite(kind: str, reward: Any) -> float:
  """Returns a program's reward as a float, or raises ValueError."""
  number = float(reward)
  if not math.isfinite(number):
    raise ValueError(f'{kind} returned the reward {reward!r}: a finite number is needed')
  return number
