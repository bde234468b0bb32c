"""Servers: the gateway to a model for clients and agent programs, and environment servers.

gateway.py        puts a gateway together; server.py is its HTTP, service.py is the rest
api.py            OpenAI's chat and completions; responses.py and messages.py are two more
sessions.py       what a client did under one id, as rows of training data
rollouts.py       episodes of agent programs
scheduler.py      continuous batching
answers.py        answers in progress; stop_strings.py ends them
grammars.py       answers that follow a schema, with text_schemas.py
prompt_scores.py  log-probs of known tokens
env_server.py     serves environments
"""
