"""Algorithms of other papers: the parts that their rows of the table need.

parts.py                 the names of all built-in parts, also of those in algorithms/
bad.py                   GAE that discounts between turns
cispo.py                 the clipped ratio as a weight
dars.py                  more episodes for hard questions
distillation.py          a teacher's log-probs as advantages
dpo.py                   preferences of fresh pairs; ipo.py, tdpo.py and p3o.py are relatives
dppo.py                  bounds on probabilities
gem.py                   returns of turns
grao.py                  a reference answer
hl_gauss.py              a critic of bins
ospo.py                  turns compared with turns
ppo_max.py               normalised scores
reinforce_plus_plus.py   returns of tokens
rover.py                 values of the uniform policy
sppo.py                  won comparisons
superhf.py               the best of a group
"""
