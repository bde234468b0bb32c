"""Training: batches of episodes in, a better policy out.

loop.py            the loop; run.py assembles a run from a config
learner.py         the policies of a run, and the functions that update them
minibatches.py     splits a batch into steps, and packing.py packs a step into bins
update.py          the compiled update: log-probs, advantages (transforms.py), steps
optimizer_step.py  gradients, clipping bias, division and optimizers of a step
state.py           the state of training
results.py         what a step computes; diagnostics.py and summary.py make metrics of it
ahead.py           compiles while the first episodes are played
offload.py         moves the state to the host while other programs use the devices
checkpoint.py      checkpoints; recovery.py gets a run back to where it was
teacher.py         a teacher behind an address
sft.py             supervised training on conversations; supervised.py has the step
"""
