"""The pages of the documentation that explain an error."""

import re

# (pattern of a message, page). The first match is used.
PAGES = (
    (
        r"no conversation in|column '(messages|conversations|completion|tools)"
        r'|config\.sft|conversations',
        'warm_start',
    ),
    (r'rollout\.demonstrat', 'demonstrations'),
    (r'\.(json|jsonl|ndjson|csv|tsv|parquet)(\.gz)?:\d+: ', 'data'),
    (r'--topology|--coordinator|--distributed|config\.(mesh|placement|rollout\.mesh)', 'scaling'),
    (r'belongs to a run|since the run began|checkpoint|--trust_workdir', 'checkpoints'),
    (r'--input|rollout\.replay|eval\.folder', 'episodes'),
    (r'config\.eval|holds an evaluation|held-out', 'evaluation'),
    (r'config\.algorithm|group_size', 'algorithms'),
    (r'config\.(data|retriever)|qa\.jsonl|corpus\.jsonl|\.parquet', 'data'),
    (r'config\.env|environment', 'environments'),
    (r'config\.model|tokenizer|safetensors|weights', 'models'),
)


def with_page(message: str) -> str:
  """Returns the message with the address of the page that explains it, if there is one."""
  for pattern, page in PAGES:
    if re.search(pattern, message):
      return f'{message.rstrip(".")}; see docs/{page}.md'
  return message
