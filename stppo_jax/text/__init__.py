"""Text and token ids, for everybody: it imports types alone.

tokenizer.py    text <-> ids of a tokenizer folder, and the turns of its chat template
template.py     messages -> ids: whole conversations, and what follows a sampled turn
turns.py        finds a recorded turn in the message with which a client sends it back
tool_calls.py   calls in an agent's text, in the forms of model families
thoughts.py     thoughts in an agent's text
"""
