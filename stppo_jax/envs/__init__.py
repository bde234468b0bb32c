"""Environments: an action in, an observation and a reward out.

protocol.py        the interface of an environment
factory.py         makes environments from settings; mix.py is one of several
stepping.py        calls environments, and turns their errors into ended episodes
guarded.py         the same through guard.py, which ends calls that never return
search.py          questions with a retriever
tools.py           questions with tools; calculator.py is one, tool_runners.py runs others
rewards.py         scores of an answer; numerals.py reads its numbers, formulas.py its groups
custom_rewards.py  rewards of users
program.py         agent programs in place of environments; commands.py runs one as a command
served.py          what an environment server and its client send each other
isolation.py       environments that draw from the global random generators
outages.py         tells errors of a network from other errors
packages.py        helpers for the environments of other packages, which are in adapters
tool_worker.py     the process of a Python tool
command_keeper.py  the process that keeps a command
"""
