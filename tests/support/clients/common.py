"""What the programs of this folder share: the task, a tool, and the end of an episode.

Each program is an agent program for `gateway:command:PYTHON PROGRAM`, in an environment that has
its framework.
"""

import json
import os
import sys

QUERIES = []
TASK = json.load(sys.stdin)
PROMPT = f'Question: {TASK["question"]}\n'
BASE_URL = os.environ['OPENAI_BASE_URL']
ANTHROPIC_URL = os.environ['ANTHROPIC_BASE_URL']
MODEL = os.environ['OPENAI_MODEL']
KIND = sys.argv[1] if len(sys.argv) > 1 else ''
os.environ.update(OTEL_SDK_DISABLED='true', LITELLM_LOCAL_MODEL_COST_MAP='True')


def search(query: str) -> str:
  """Searches for facts.

  Args:
    query: the words to look for
  """
  QUERIES.append(query)
  return f'<information> {query.strip()}: {" ".join(TASK["answers"])}\n</information>\n'


def end(answer):
  """Prints the reward."""
  is_right = any(text.lower() in str(answer).lower() for text in TASK['answers'])
  print(json.dumps({'reward': float(is_right), 'metrics': {'calls': len(QUERIES)}}))
