"""The rollout: from tasks to episodes, and from episodes to a TurnBatch.

batches.py            picks the tasks of a batch, plays its groups and waits for a failed retriever
pipeline.py           samples batches ahead of training, in a thread
demonstrations.py     episodes of a scripted player, or recorded ones, as rows
agent.py              makes an environment per task and plays them (prepare.py loads what it needs)
episode.py            task -> prompt; turn and environment step -> next prompt; keeps each Episode
sequences.py          the protocol between episodes and what samples their turns
engine.py             decides which sequences are prefilled and decoded together
slots.py              sequences as rows of a KV cache
remote.py             samples turns with engines elsewhere, which engines.py runs; servers.py speaks
                      their HTTP, directory.py finds them, weight_folders.py has their weights,
                      shared_devices.py shares devices with them
env_pool.py           steps environments while the device samples
split_envs.py         steps them in many processes
sampler.py            compiled prefill and decode; sampling.py draws one token per row
sampling_sharding.py  where the sampled copy of the policy lies (sampling_mesh.py)
batching.py           Episodes -> TurnBatch; saved.py reads batches of an earlier run
"""
