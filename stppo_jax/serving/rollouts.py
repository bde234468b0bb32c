"""Episodes of agent programs: parameters and tasks in, recorded episodes out.

An `agent.Agent` whose episodes are played by a program of the user through the gateway. The loop
calls only `play`. Each episode is a session with an address of its own.

  thread per episode   program(task, base_url, model) -> reward
  gateway              records what the program's client samples, under the episode's session
  here                 starts programs, ends those that take too long, turns sessions into rows
"""

from collections.abc import Callable
from collections.abc import Sequence
import dataclasses
import math
import threading
import time
from typing import Any

from absl import logging
import jax

from stppo_jax import types
from stppo_jax.config import Config
from stppo_jax.distributed import hosts
from stppo_jax.envs import program as program_lib
from stppo_jax.envs import rewards
from stppo_jax.models import decoder
from stppo_jax.rollout import agent as agent_lib
from stppo_jax.rollout import engine
from stppo_jax.rollout import prepare
from stppo_jax.serving import gateway
from stppo_jax.serving import scheduler as scheduler_lib
from stppo_jax.serving import sessions
from stppo_jax.types import RunError
from stppo_jax.types import UserError


@dataclasses.dataclass(eq=False)
class _ProgramRun:
  """A program that plays an episode."""

  session_name: str
  session: sessions.Session
  task: types.Task
  started: float
  is_over: bool = False
  timed_out: bool = False
  error: str = ''  # what the program raised

  @property
  def crashed(self) -> bool:
    return bool(self.error) and not self.timed_out


@dataclasses.dataclass
class ProgramAgent(agent_lib.Agent):
  """Turns parameters and questions into episodes, which an agent program plays."""

  program: program_lib.Program = dataclasses.field(kw_only=True)

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
    with gateway.running(self.config, scheduler, self.tokenizer, self.config.name) as server:
      runs = self._run_programs(server, tasks, keys, sampling, give_up)
    counts = scheduler.counts
    self.report = engine.Report(
        {'prefill': 0.0, 'decode': time.perf_counter() - started, 'env': 0.0},
        counts.prefill_tokens,
        counts.reused_tokens,
        counts.sampled_tokens,
        counts.decode_steps,
    )
    _check_any_ran(self.config.env.kind, runs, trains=groups is not None)
    rows: list[types.Episode] = []
    for number, run in enumerate(runs):
      if groups is None:
        rows.append(self._rows(run, number, number, first_is_whole=True)[0])
      else:
        rows += self._rows(run, groups[number], number, first_is_whole=False)
    return rows

  def _run_programs(
      self,
      server: Any,  # http_server.Server, whose libraries may not be installed
      tasks: Sequence[types.Task],
      keys: jax.Array,
      sampling: sessions.Sampling,
      give_up: Callable[[], bool] | None,
  ) -> list[_ProgramRun]:
    """Runs a program per task, each in a thread, `config.serve.rows` at a time."""
    settings = self.config.serve
    service = server.app.service
    runs: list[_ProgramRun] = []
    active: list[_ProgramRun] = []
    changed = threading.Event()
    try:
      while active or len(runs) < len(tasks):
        if give_up is not None:
          hosts.end_if(give_up)
        while len(runs) < len(tasks) and len(active) < settings.rows:
          name, session = service.open_session(keys[len(runs)], sampling)
          run = _ProgramRun(name, session, tasks[len(runs)], time.monotonic())
          runs.append(run)
          active.append(run)
          arguments = (run, f'{server.url}/s/{name}/v1', changed)
          threading.Thread(target=self._run_program, args=arguments, daemon=True).start()
        now = time.monotonic()
        changed.wait(0.1)
        changed.clear()
        for run in list(active):
          run.timed_out = not run.is_over and now - run.started > settings.agent_timeout_s
          if run.is_over or run.timed_out:
            service.end_session(run.session_name)
            active.remove(run)
    finally:
      for run in runs:  # programs that continue get an error
        service.end_session(run.session_name)
    return runs

  def _run_program(self, run: _ProgramRun, url: str, changed: threading.Event) -> None:
    """Runs one program, and sets its reward."""
    try:
      reward = self.program.run(run.task, url, self.config.name)
      if reward is None and not run.session.has_reward:
        reward = self._reward(run)
      if reward is not None:
        run.session.reward(_finite(self.config.env.kind, reward))
    except sessions.Closed:
      pass  # The session took too long. Its episode is marked as truncated.
    except Exception as error:  # whatever a user's program may raise is data
      run.error = f'{type(error).__name__}: {" ".join(str(error).split())[:300]}'
    finally:
      run.is_over = True
      changed.set()

  def _reward(self, run: _ProgramRun) -> float:
    """Returns the score of the answer in the last turn; 0 without an answer."""
    text = run.session.last_text
    answer = rewards.extract_answer(text)
    return 0.0 if answer is None else self.program.reward(run.task, answer, text)

  def _rows(
      self, run: _ProgramRun, group: int, number: int, first_is_whole: bool
  ) -> list[types.Episode]:
    """Returns the rows of an episode, with what happened to it as metrics."""
    is_masked = run.crashed and self.config.serve.on_crash == 'mask'
    episodes = run.session.episodes(run.task, group, is_masked, first_is_whole)
    counts = run.session.counts
    metrics = {name: counts[name] for name in ('rewritten', 'branched', 'too_long')}
    metrics['segments'] = float(len(episodes))
    metrics['crashed'] = float(run.crashed)
    metrics['timed_out'] = float(run.timed_out)
    for episode in episodes:
      if run.crashed and not is_masked:  # rewards that were posted before do not count
        for turn in episode.turns:
          turn.reward = 0.0
        episode.whole_score = 0.0
      episode.number = number
      episode.metrics = {**metrics, **episode.metrics}
      episode.truncated |= run.timed_out
      episode.core_metrics = self.env.core_metrics
    return episodes


def make_agent(
    config: Config,
    model: decoder.ModelConfig,
    mesh: jax.sharding.Mesh | None = None,
    prepared: prepare.Prepared | None = None,
) -> ProgramAgent:
  """Builds the agent of a config whose episodes an agent program plays."""
  prepared = prepared or prepare.prepare(config)
  program = prepared.env.make
  assert isinstance(program, program_lib.Program)
  rollout = config.rollout
  allowed = {
      'pipeline.staleness': config.pipeline.staleness == 0,
      'rollout.routing_replay': rollout.routing_replay != 'sampling',
      'rollout.max_num_gen_batches': rollout.max_num_gen_batches == 1,
      f'{jax.process_count()} processes': jax.process_count() == 1,
  }
  wrong = [name for name, is_allowed in allowed.items() if not is_allowed]
  if wrong:
    raise UserError(
        f'config.env.kind={config.env.kind!r} does not support {", ".join(wrong)}: agent programs '
        "need one process, pipeline.staleness=0, rollout.routing_replay 'none' or 'old_policy', "
        'and rollout.max_num_gen_batches=1'
    )
  device = jax.devices()[0] if mesh is None else mesh.devices.flat[0]
  sampler = gateway.make_sampler(
      model,
      prepared.tokenizer,
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
      tokenizer=prepared.tokenizer,
      model=model,
      env=prepared.env,
      retriever=prepared.retriever,
      sampler=sampler,
      greedy=sampler,
      program=program,
  )


def _check_any_ran(kind: str, runs: Sequence[_ProgramRun], trains: bool) -> None:
  """Logs what programs raised, and how many did nothing. RunError: none has a row to train on."""
  errors = [run.error for run in runs if run.crashed]
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
