"""Environments of other packages.

gem.py               GEM
openenv.py           OpenEnv; openenv_servers.py has the addresses and their sessions
reasoning_gym.py     Reasoning Gym
textarena.py         TextArena
verifiers.py         verifiers; verifiers_worker.py is its process
"""
