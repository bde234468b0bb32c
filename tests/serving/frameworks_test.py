"""Frameworks of others as agent programs, in environments of their own; skipped without them.

`scripts/client_envs.sh` makes the environments.
"""

import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time
from typing import Any
from typing import NamedTuple

from absl.testing import absltest
from absl.testing import parameterized
import jax
import numpy as np
import pytest

from stppo_jax import types
from stppo_jax.atif import reader as atif_reader
from stppo_jax.envs import commands
from stppo_jax.models import convert
from stppo_jax.models import decoder
from stppo_jax.monitoring import metrics as metrics_lib
from stppo_jax.rollout import prepare
from stppo_jax.rollout import saved
from stppo_jax.text import tokenizer as tokenizer_lib
from stppo_jax.training import loop
from tests.serving import gateway_test
from tests.support import client_envs
from tests.support import scripted_gateway
from tests.support import tiny_run

pytestmark = [
    pytest.mark.guests(
        what='OpenAI Agents SDK, LangChain, pydantic-ai and Anthropic SDK as agent programs',
        version='openai-agents==0.24.0 langchain-openai==1.7.4 langgraph==1.2.24 '
        'pydantic-ai-slim[openai,anthropic]==2.68.0 anthropic==2.14.0 langchain==1.5.2',
        date='2026-11-28',
        touches='serving/api.py serving/messages.py serving/responses.py text/turns.py',
        environment='agents',
    ),
    pytest.mark.guests(
        what='smolagents and litellm',
        version='smolagents[openai,litellm]==1.26.0 litellm==1.110.2',
        date='2026-11-26',
        touches='serving/api.py text/turns.py',
        environment='smol',
    ),
    pytest.mark.guests(
        what='AutoGen',
        version='autogen-agentchat==0.7.5 autogen-ext[openai]==0.7.5',
        date='2026-11-26',
        touches='serving/api.py text/turns.py',
        environment='autogen',
    ),
    pytest.mark.guests(
        what='inspect-ai as an agent program',
        version='inspect-ai==0.3.285 openai==3.57.0',
        date='2026-11-28',
        touches='serving/api.py text/turns.py',
        environment='inspect',
    ),
    pytest.mark.guests(
        what='lm-eval',
        version='lm-eval[api]==0.4.13 transformers==5.24.0',
        date='2026-11-28',
        touches='serving/prompt_scores.py',
        environment='lm_eval',
    ),
    pytest.mark.guests(
        what='Harbor',
        version='harbor==0.25',
        date='2026-11-26',
        touches='serving/api.py atif/reader.py',
        environment='harbor',
    ),
    pytest.mark.guests(
        what='Claude Code',
        version='Claude Code 2.1.197 (npm)',
        date='2026-11-28',
        touches='serving/messages.py serving/server.py',
    ),
]

TASK = {'id': 't', 'question': 'What is the capital of France?', 'answers': ['Paris']}
TOOL_LOOP = (
    client_envs.thought('I look it up.') + client_envs.call('search', query='capital of  "France"'),
    client_envs.thought('Again.') + 'Now é.\n' + client_envs.call('search', query='Paris é'),
    client_envs.thought('I know it.') + 'The answer is Paris.',
)
FINAL_ANSWER = client_envs.thought('I know it.') + client_envs.call('final_answer', answer='Paris')
CODE = (
    client_envs.thought('Search.') + 'Thought: search\n<code>\nprint(search("a  b"))\n</code>',
    client_envs.thought('Again.') + 'Thought: é\n<code>\nx = search("é")\nprint(x)\n</code>',
    client_envs.thought('End.') + 'Thought: end\n<code>\nfinal_answer("Paris")\n</code>',
)
BASH = (
    client_envs.thought('Files.') + client_envs.call('Bash', command='echo "a  é" > a && ls'),
    client_envs.thought('Read.') + 'I read.\n' + client_envs.call('Bash', command='cat a'),
    client_envs.thought('Done.') + 'The answer is Paris.',
)
HARBOR = pathlib.Path(__file__).parents[2] / 'examples' / 'harbor'


def in_terminal(*keystrokes, is_done=False):
  """Returns a turn of Terminus 2."""
  typed = [{'keystrokes': keys, 'duration': 0.5} for keys in keystrokes]
  turn = {'analysis': 'a', 'plan': 'é', 'commands': typed, 'task_complete': is_done}
  return client_envs.thought('I write.') + json.dumps(turn)


TERMINAL = (
    in_terminal('echo hello > /app/word.txt\n'),
    in_terminal(is_done=True),
    in_terminal(is_done=True),  # it is asked whether it is sure
)
# (environment and program, arguments, turns, serve.forced_choice), the last two with defaults
CASES = (
    ('agents', 'openai_agents', 'responses'),
    ('agents', 'openai_agents', 'responses_stream'),
    ('agents', 'openai_agents', 'chat'),
    ('agents', 'openai_agents', 'chat_stream'),
    ('agents', 'langchain_agent', 'chat'),
    ('agents', 'langchain_agent', 'stream'),
    ('agents', 'langchain_agent', 'responses'),
    ('agents', 'pydantic_agent', 'chat'),
    ('agents', 'pydantic_agent', 'responses'),
    ('agents', 'pydantic_agent', 'anthropic'),
    ('agents', 'anthropic_agent', 'create'),
    ('agents', 'anthropic_agent', 'stream'),
    ('agents', 'anthropic_agent', 'runner'),
    ('smol', 'litellm_agent', 'chat'),
    ('smol', 'litellm_agent', 'stream'),
    ('smol', 'smol_agent', 'code', CODE),
    ('smol', 'smol_agent', 'tools', (*TOOL_LOOP[:2], FINAL_ANSWER), 'auto'),
    ('autogen', 'autogen_agent', 'run'),
    ('autogen', 'autogen_agent', 'stream'),
    ('inspect', 'inspect_agent', ''),
)


def command(environment, program, *arguments):
  """Returns the words that start a program of tests/support/clients."""
  python = client_envs.find(f'{environment}/bin/python')
  return [python, str(client_envs.SCRIPTS / f'{program}.py'), *filter(None, arguments)]


class Played(NamedTuple):
  """An episode of a program."""

  result: Any
  rows: list[types.Episode]
  sampled: list[list[int]]  # ids of all answers, in order
  difference: str  # the first rewritten history


def play(words, turns, forced='refuse', question=TASK['question']):
  """Plays an episode with a model that says these turns."""
  with scripted_gateway.session(turns, forced) as (url, session, scheduler):
    process = commands.Process(words, TASK | {'question': question}, url, 'tiny')
    try:
      end = time.monotonic() + 300
      while not process.wait(1.0):
        assert time.monotonic() < end
      result = process.result()
    finally:
      process.end()
    rows = session.episodes(types.Task('t', TASK['question'], ('Paris',)), 0)
    return Played(result, rows, scheduler.sampled, session.difference)


@pytest.mark.slow
class ToolLoopTest(parameterized.TestCase):
  """Three turns with two calls and thoughts are one row, whose ids are the sampled ones."""

  def check(self, words, turns, forced, question=TASK['question']):
    """Plays an episode; returns its result and the sampled ids."""
    played = play(words, turns, forced, question)
    recorded = [turn.tokens.tolist() for row in played.rows for turn in row.turns]
    self.assertEqual(recorded, played.sampled)
    self.assertLen(recorded, len(turns))
    self.assertEqual(played.rows[0].counts['rewritten'], 0, played.difference)
    self.assertLen(played.rows, 1)
    self.assertEqual(played.result.reward, 1.0)
    return played.result, recorded

  @parameterized.parameters(*CASES)
  def test_tool_loop_is_one_row(
      self, environment, program, argument, turns=TOOL_LOOP, forced='refuse'
  ):
    result, _ = self.check(command(environment, program, argument), turns, forced)
    self.assertEqual(result.metrics, {'calls': 2})

  def test_claude_code_is_one_row(self):
    program = client_envs.find('claude/node_modules/.bin/claude')
    script = str(client_envs.SCRIPTS / 'claude_code.py')
    self.check([sys.executable, script, program], BASH, 'refuse')

  def test_harbor_trial_is_one_row(self):
    """A trial without a container. The row that is imported from its ATIF is the recorded one."""
    python = client_envs.find('harbor/bin/python')
    mount = ['unshare', '--map-root-user', '--mount', 'true']
    if not (shutil.which('tmux') and shutil.which('unshare') and not subprocess.call(mount)):
      self.skipTest('tmux and a mount namespace are needed')
    if not all(map(os.path.isdir, ('/app', '/logs', '/tests'))):
      self.skipTest('the empty folders /app, /logs and /tests are needed')
    folder = self.enterContext(tempfile.TemporaryDirectory())
    words = [python, str(HARBOR / 'episode.py'), f'{folder}/trials']
    words += ['--env', 'local_environment:LocalEnvironment']
    words += ['--agent-kwarg', 'collect_rollout_details=true']
    _, sampled = self.check(words, TERMINAL, 'refuse', str(HARBOR / 'hello'))

    tokenizer = tokenizer_lib.load_tokenizer(prepare.EMBEDDED_MODEL)
    reader = atif_reader.AtifReader(tokenizer, 'hermes', 1024, False, len(tokenizer.token_bytes))
    atif_reader.read_folder(f'{folder}/trials', f'{folder}/episodes', reader, 1)
    (path,) = pathlib.Path(folder, 'episodes').iterdir()
    (record,) = map(json.loads, path.read_text(encoding='utf-8').splitlines())
    self.assertEqual((record['task'], record['rewards']), ('hello', [0.0, 0.0, 1.0]))
    agent = [token for token, turn in zip(record['tokens'], record['turn_ids']) if turn]
    self.assertEqual(agent, sum(sampled, []))


SUB_AGENTS = (
    TOOL_LOOP[0],
    client_envs.thought('I search.') + client_envs.call('search', query='é'),
    client_envs.thought('I know.') + 'It is Paris.',
    TOOL_LOOP[1],
    'Paris, again.',
    TOOL_LOOP[2],
)
COMPACTION = (*TOOL_LOOP[:2], 'A summary é.', TOOL_LOOP[0], 'Another summary.', TOOL_LOOP[2])
CLAUDE_AGENT = (
    client_envs.thought('I ask.')
    + client_envs.call(
        'Agent', description='look', prompt='Which capital?', subagent_type='general-purpose'
    ),
    'The capital is Paris.',
    'The answer is Paris.',
)


@pytest.mark.slow
class BranchTest(absltest.TestCase):
  """Sub-agents and summaries are rows with parents, whose ids are the sampled ones."""

  def check(self, words, turns, expected):
    """`expected` has (agent, parent, numbers of its answers) of each row."""
    played = play(words, turns)
    self.assertEqual(played.result.reward, 1.0)
    self.assertLen(played.sampled, len(turns))
    rows = {row.segment: row for row in played.rows}
    self.assertLen(rows, len(expected))
    for number, (agent, parent, answers) in enumerate(expected):
      row = rows[number]
      self.assertEqual((row.agent_id, row.parent, row.branched_from), (agent, parent, None))
      sampled = [played.sampled[i] for i in answers]
      self.assertEqual([turn.tokens.tolist() for turn in row.turns], sampled)
    self.assertEqual(played.rows[0].counts['wrong_parents'], 0)
    return played

  def test_sub_agents_of_pydantic_ai_have_parent(self):
    expected = [('main', None, (0, 3, 5)), ('sub-0', (0, 1), (1, 2)), ('sub-1', (0, 2), (4,))]
    played = self.check(command('agents', 'pydantic_sub_agent'), SUB_AGENTS, expected)
    self.assertEqual(played.result.metrics, {'calls': 1})

  def test_summaries_of_langchain_follow_their_row(self):
    expected = [
        ('main', None, (0, 1)),
        ('main', (0, 2), (2,)),  # the summary
        ('main', (1, 1), (3,)),  # the history that begins with it
        ('main', (2, 1), (4,)),
        ('main', (3, 1), (5,)),
    ]
    self.check(command('agents', 'langchain_compaction'), COMPACTION, expected)

  def test_agent_of_claude_code_has_parent(self):
    program = client_envs.find('claude/node_modules/.bin/claude')
    script = str(client_envs.SCRIPTS / 'claude_code.py')
    played = play([sys.executable, script, program, 'Agent'], CLAUDE_AGENT)
    main, child = sorted(played.rows, key=lambda row: row.segment)
    self.assertEqual((main.parent, child.parent), (None, (0, 1)))
    self.assertNotIn(child.agent_id, ('', main.agent_id))
    recorded = [turn.tokens.tolist() for turn in (main.turns[0], *child.turns, main.turns[1])]
    self.assertEqual(recorded, played.sampled)
    self.assertEqual(played.result.reward, 1.0)


@pytest.mark.slow
class LmEvalTest(absltest.TestCase):
  """lm-eval's numbers over HTTP are those of a plain forward pass of the served model."""

  QUESTIONS = ('What is the capital of France?', 'Who wrote the play Hamlet?', 'Where is é?')
  LENGTH = 64  # rows of the forward pass have it
  MAX_TOKENS = 12

  def setUp(self):
    super().setUp()
    self.program = client_envs.find('lm_eval/bin/lm_eval')
    self.tokenizer, _, _ = gateway_test.embedded()
    model, params = prepare.load_policy(gateway_test.embedded_config())
    # An export: of the served folder, a Qwen2 with its own tokenizer, transformers reads other ids.
    self.folder = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))
    convert.save_hf(self.folder / 'model', model, params, prepare.EMBEDDED_MODEL)
    params = jax.device_put(params)
    self.forward = jax.jit(lambda tokens: decoder.forward(params, model, tokens, None)[0])

  def logp(self, ids):
    """Returns the log-probs [token, vocabulary] after each of these ids."""
    tokens = np.zeros((1, self.LENGTH), np.int32)
    tokens[0, : len(ids)] = ids
    return np.asarray(jax.nn.log_softmax(self.forward(tokens)[0, : len(ids)]))

  def greedy(self, prompt):
    """Returns the text that the model writes."""
    ids = self.tokenizer.encode(prompt)
    start = len(ids)
    while len(ids) < start + self.MAX_TOKENS and ids[-1] not in self.tokenizer.eos_ids:
      ids.append(int(self.logp(ids)[-1].argmax()))
    return self.tokenizer.decode(ids[start:])

  def score(self, prompt, choice):
    """Returns (log-prob, whether it is greedy) of a choice after a prompt."""
    ids = self.tokenizer.encode(prompt + choice)
    start = len(self.tokenizer.encode(prompt))
    table = self.logp(ids)[start - 1 : -1]
    chosen = ids[start:]
    is_greedy = table.argmax(-1).tolist() == chosen
    return float(table[np.arange(len(chosen)), chosen].sum()), is_greedy

  def run_lm_eval(self, url, tasks):
    """Returns {name of a task: (results, samples)}."""
    folder = self.folder
    for name, (fields, questions) in tasks.items():
      data = folder / f'{name}.jsonl'
      data.write_text(''.join(json.dumps(question) + '\n' for question in questions))
      fields |= {
          'task': name,
          'dataset_path': 'json',
          'dataset_kwargs': {'data_files': {'test': str(data)}},
          'test_split': 'test',
          'doc_to_text': 'prompt',
          'target_delimiter': '',
      }
      (folder / f'{name}.yaml').write_text(json.dumps(fields))
    model = {
        'model': 'tiny',
        'base_url': f'{url}/v1/completions',
        'tokenizer': folder / 'model',
        'max_length': 256,
    }
    words = [self.program, '--model', 'local-completions', '--tasks', ','.join(tasks)]
    words += ['--model_args', ','.join(f'{name}={value}' for name, value in model.items())]
    words += ['--include_path', str(folder), '--output_path', str(folder), '--log_samples']
    offline = {'HF_HOME': str(folder), 'HF_HUB_OFFLINE': '1', 'OPENAI_API_KEY': 'none'}
    process = subprocess.run(
        words, env=os.environ | offline, capture_output=True, text=True, check=False
    )
    self.assertEqual(process.returncode, 0, process.stderr[-3000:])
    (results,) = folder.rglob('results_*.json')
    found = {}
    for name in tasks:
      (samples,) = folder.rglob(f'samples_{name}_*.jsonl')
      lines = [json.loads(line) for line in samples.read_text().splitlines()]
      lines.sort(key=lambda line: line['doc_id'])
      found[name] = json.loads(results.read_text())['results'][name], lines
    return found

  def test_scores_and_texts_are_those_of_the_model(self):
    questions = []
    for question in self.QUESTIONS:
      prompt = f'Question: {question}'  # lm-eval moves white space from its end to the choices
      choices = ['<answer> Paris</answer>', self.greedy(prompt), 'An é.']
      questions.append({'prompt': prompt, 'choices': choices})
    scored = {'output_type': 'multiple_choice', 'doc_to_choice': 'choices', 'doc_to_target': 1}
    scored['metric_list'] = [{'metric': 'acc'}]
    written = {'output_type': 'generate_until', 'doc_to_target': 'prompt'}
    written['generation_kwargs'] = {'until': ['\n\n\n'], 'max_gen_toks': self.MAX_TOKENS}
    written['metric_list'] = [{'metric': 'exact_match'}]
    with gateway_test.running() as server:
      found = self.run_lm_eval(
          server.url, {'scored': (scored, questions), 'written': (written, questions)}
      )

    expected = [
        [self.score(question['prompt'], choice) for choice in question['choices']]
        for question in questions
    ]
    results, samples = found['scored']
    for scores, sample in zip(expected, samples, strict=True):
      for (value, is_greedy), (response,) in zip(scores, sample['resps'], strict=True):
        self.assertAlmostEqual(float(response[0]), value, places=3)
        self.assertEqual(str(response[1]), str(is_greedy))
      self.assertEqual([is_greedy for _, is_greedy in scores], [False, True, False])
    right = [max(scores) == scores[1] for scores in expected]
    self.assertAlmostEqual(results['acc,none'], np.mean(right))

    _, samples = found['written']
    texts = [sample['resps'][0][0] for sample in samples]
    self.assertEqual(texts, [self.greedy(question['prompt']) for question in questions])


# What the model of TrainingTest writes, and how likely it is. Greedy turns are the last one.
CALL = client_envs.thought('I look it up.') + client_envs.call('search', query='sky')
RED = client_envs.thought('I know it.') + 'It is red.'
BLUE = client_envs.thought('I know it.') + 'It is blue.'
ACTIONS = {CALL: 3.0, RED: 3.0, BLUE: 3.1}


@pytest.mark.slow
class TrainingTest(parameterized.TestCase):
  """Two updates of a model that thinks in each turn, and may call the tool."""

  @parameterized.parameters(
      ('agents', 'openai_agents', 'responses'),
      ('agents', 'langchain_agent', 'chat'),
      ('agents', 'pydantic_agent', 'chat'),
      ('agents', 'anthropic_agent', 'create'),
      ('smol', 'litellm_agent', 'chat'),
      ('autogen', 'autogen_agent', 'stream'),
  )
  def test_two_updates_have_whole_rows(self, environment, program, argument):
    _, updates = self.train(command(environment, program, argument))
    for row in updates:
      self.assertEqual(row['program/segments/mean'], 1, json.dumps(row))
      self.assertEqual(row['program/rewritten/mean'], 0)
      self.assertEqual(row['program/crashed/mean'], 0)
    self.assertGreater(max(row['env/calls/mean'] for row in updates), 0)

  @parameterized.parameters(('pydantic_sub_agent', 'rewards'), ('langchain_compaction', ''))
  def test_two_updates_train_branches(self, program, argument):
    """All recorded ids have the log-probs that the trainer computes for them."""
    settings = {'env__branch_credit': 'program'} if argument else {}
    words = command('agents', program, argument)
    records, updates = self.train(
        words, train__length_buckets=(1024,), rollout__max_total=1024, **settings
    )
    self.assertGreater(max(row['program/segments/mean'] for row in updates), 1)
    for row in updates:
      self.assertEqual(row['program/crashed/mean'], 0, json.dumps(row))
      self.assertEqual(row['program/wrong_parents/mean'], 0)
    children = 0
    for batch in records:
      ends = {(record['of_episode'], record.get('segment', 0)): record for record in batch}
      for record in batch:
        old_logp = np.array(record['old_logp'])
        np.testing.assert_allclose(record['behaviour_logp'], old_logp, atol=1e-4)
        if 'parent' not in record:
          self.assertEqual(record['agent_id'], 'main')
          continue
        children += 1
        number, num_turns = record['parent']
        parent = ends[record['of_episode'], number]
        self.assertBetween(num_turns, 1, len(parent['rewards']))
        is_sub_agent = record['agent_id'] != 'main'
        self.assertEqual(is_sub_agent, program == 'pydantic_sub_agent')
        reward = 0.25 if is_sub_agent else record['whole_score']
        self.assertEqual(record['rewards'][-1], reward)
        self.assertEqual(parent['agent_id'], 'main')
    self.assertGreater(children, 0)

  def train(self, words, **settings):
    """Returns the records of the episodes of two updates, and their metrics."""
    folder = self.enterContext(tempfile.TemporaryDirectory())
    tiny_run.write_knowledge(os.path.join(folder, 'knowledge'))
    tiny_run.write_model(
        os.path.join(folder, 'model'), ACTIONS, [*ACTIONS.values()], last=(RED, BLUE)
    )
    values = dict(
        env__kind=f'gateway:command:{" ".join(words)}',
        retriever__kind='none',
        serve__rows=2,
        serve__tool_form='hermes',
        rollout__max_total=512,
        rollout__group_size=2,
        train__length_buckets=(512,),
        train__episodes=4,
        train__mini_batch=4,
        train__micro_batch=2,
        eval__every=0,
        eval__episodes=1,
    )
    config = tiny_run.make_config(folder, **values | settings)
    workdir = os.path.join(folder, 'run')
    with tiny_run.on_one_device():
      loop.start(config, workdir)
    updates = [row for row in metrics_lib.read_metrics(workdir) if 'program/segments/mean' in row]
    self.assertLen(updates, 2)
    episodes = os.path.join(workdir, 'episodes')
    records = [saved.read_records(saved.path_of(episodes, number)) for number in (1, 2)]
    return records, updates


if __name__ == '__main__':
  absltest.main()
