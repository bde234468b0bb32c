"""Does a run fit, and how long does an update take? No accelerator is needed.

plan.py        a config in, a plan out
programs.py    the programs of a run
topologies.py  devices to compile for
flops.py       counts operations; hlo.py counts collectives
roofline.py    the time of sampling
table.py       prints a plan
"""
