"""The algorithms as pure functions of arrays: no model, no parameters, no devices.

variants.py        the table of algorithms; variant.py has the fields of a row
segments.py        which tokens share an importance ratio
advantages.py      one number per agent token, from rewards and values, or from scores alone
losses.py          surrogates, value losses, KL and means over tokens
correction.py      the clipping-bias correction: two cotangents and a divisor
objectives.py      objectives that compare the rows of a step
off_policy.py      weights and rejection of tokens that another policy has sampled
filters.py         which tokens the policy's loss counts
demonstrations.py  rows that the policy did not sample
checks.py          checks a user's function for a field of a variant
"""
