"""Evaluation of a policy, and playing with one.

job.py         a checkpoint or an address in, scores with intervals out
players.py     plays the questions; remote.py does so at an address, with client.py
policy.py      loads the policy of a checkpoint, and exports it
estimates.py   scores in groups and over all, with statistics.py; table.py prints them
records.py     the folder of an evaluation
sample.py      saves batches of a fixed policy for a later training
chat.py        a conversation in the terminal
"""
