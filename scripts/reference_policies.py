"""Exact match of policies that are not trained, as references for a trained agent.

python -m scripts.reference_policies --split=dev      # prints JSON lines

random       answers immediately with an answer drawn from the training questions
no_search    the warm-started model, greedy, without searches
warm_start   the same model with searches, which is where training starts
template     searches for each gold title in turn and answers with the last finding: a ceiling
"""

import json

from absl import app
from absl import flags
import jax
import numpy as np

from experiments import st_ppo_tiny
from stppo_jax import tasks as task_files
from stppo_jax.evaluation import scores as evaluation
from stppo_jax.rollout import agent as agent_lib
from stppo_jax.rollout import prepare

_SPLIT = flags.DEFINE_string('split', 'dev', 'of the questions')
_SEED = flags.DEFINE_integer('seed', 0, 'of the random policy')


def main(unused_argv):
  config = st_ppo_tiny.get_config()
  tasks = prepare.load_tasks(config, _SPLIT.value)
  model, params = prepare.load_policy(config)
  params = jax.device_put(params)
  agent = agent_lib.make_agent(config, model)
  _show('random', tasks, _random(agent, tasks, prepare.load_tasks(config, 'train')))
  closed_book = st_ppo_tiny.get_config()
  closed_book.env.max_searches = 0
  _show('no_search', tasks, _played(agent_lib.make_agent(closed_book, model), params, tasks))
  _show('warm_start', tasks, _played(agent, params, tasks))
  _show('template', tasks, _template(agent, tasks))


def _random(agent, tasks, known):
  rng = np.random.default_rng(_SEED.value)
  answers = sorted({answer for task in known for answer in task.answers})
  return [_step_all(agent, task, [f'<answer>{rng.choice(answers)}</answer>']) for task in tasks]


def _template(agent, tasks):
  titles = {passage.id: passage.title for passage in task_files.load_corpus('embedded')}
  return [
      _step_all(
          agent,
          task,
          [f'<search>{titles[gold]}</search>' for gold in task.gold]
          + [f'<answer>{task.steps[-1][1]}</answer>'],
      )
      for task in tasks
  ]


def _step_all(agent, task, actions):
  """Returns the EM of an episode with these actions; an answer counts only if a passage had it."""
  env = agent.env(task, seed=0)
  env.reset()
  shown = ''
  for action in actions:
    observation, _, _, _, info = env.step(action)
    shown += observation
  return info['metrics']['em'] * (len(actions) == 1 or task.answers[0] in shown)


def _played(agent, params, tasks):
  _, episodes = evaluation.evaluate(agent, params, tasks)
  return [episode.main_score for episode in episodes]


def _show(policy, tasks, scores):
  by_hops = {
      f'em_hops{hops}': round(
          float(np.mean([s for s, task in zip(scores, tasks) if task.hops == hops])), 3
      )
      for hops in (1, 2, 3)
  }
  print(
      json.dumps(
          {
              'policy': policy,
              'split': _SPLIT.value,
              'questions': len(tasks),
              'em': round(float(np.mean(scores)), 3),
              **by_hops,
          }
      )
  )


if __name__ == '__main__':
  app.run(main)
