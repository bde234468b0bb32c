"""Environments of other packages.

gem.py               GEM
openenv.py           OpenEnv; openenv_servers.py has the addresses and their sessions
reasoning_gym.py     Reasoning Gym; answer_text.py tells which answers it may compute
textarena.py         TextArena
verifiers.py         verifiers; verifiers_worker.py is its process
"""
