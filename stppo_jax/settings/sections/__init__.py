"""Rules of optional parts. The tables in `validation` say which setting imports which file.

allocation.py      two rounds of sampling
data_columns.py    what the columns of a file mean
demonstrations.py  rows that the policy did not sample
engine.py          engines in other processes
folders.py         folders outside of WORKDIR
mix.py             several environments
row_objective.py   objectives that compare rows
teacher.py         on-policy distillation
value_bins.py      a critic of bins
"""
