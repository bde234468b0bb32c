"""Models: tokens in, log-probs and values out. Weights of Hugging Face in and out.

decoder.py            the transformer as functions of a parameter tree; layers.py has its layers
attention.py          attention and rotary positions; attention_kernels.py has kernels
context_parallel.py   rows that several devices compute together
delta_net.py          gated delta nets
moe.py                mixtures of experts
lora.py               adapters
rope_scaling.py       rotary positions of long rows
categorical.py        log-prob and entropy; head_chunks.py has them without all logits
vocabulary.py         numbers of the whole vocabulary
sharding.py           the mesh, and where each array lies
convert.py            folders in and out, with hf_config.py, hf_weights.py, hf_export.py, families
presets.py            shapes of published models
"""
