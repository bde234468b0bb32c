"""Small random models of transformers with their logits, which make_reference_logits.py wrote."""

import pathlib

FOLDER = pathlib.Path(__file__).parent / 'reference_logits'
NAMES = tuple(
    name + tied for name in ('qwen2', 'qwen3', 'qwen3moe', 'llama') for tied in ('', '_tied')
)
