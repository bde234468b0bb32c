"""An agent for any OpenAI-compatible server, which answers a question after searches of its own.

It does not import the trainer. `openai` is its only library, and `tool.search` its only tool.
"""

import re

import openai

from examples.agent_program import tool

MAX_TURNS = 5


def run(task, base_url, model):
  """Plays one question. Returns 1.0 if the answer is right, else 0.0."""
  client = openai.OpenAI(base_url=base_url, api_key='none', max_retries=0)
  messages = [{'role': 'user', 'content': f'Question: {task["question"]}\n'}]
  for _ in range(MAX_TURNS):
    completion = client.chat.completions.create(
        model=model, messages=messages, stop=['</search>', '</answer>']
    )
    text = completion.choices[0].message.content
    if answer := re.search(r'<answer>(.*)', text, re.S):
      return float(answer[1].strip().lower() in [gold.lower() for gold in task['answers']])
    query = re.search(r'<search>(.*)', text, re.S)
    result = tool.search(query[1].strip()) if query else 'Invalid: search, or answer.'
    messages += [
        {'role': 'assistant', 'content': text},
        {'role': 'user', 'content': f'<information> {result}\n</information>\n'},
    ]
  return 0.0
