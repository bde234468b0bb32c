"""The models of benchmarks.gpu and how much of each fits in 80 GB."""

import dataclasses
import typing

from stppo_jax.models import presets


class Size(typing.NamedTuple):
  """The sizes for a model, chosen to fit in 80 GB."""

  preset: str
  rows: int  # per update
  micro_batch: int
  rollout_rows: int
  param_dtype: str  # The update uses it. The rollout uses bfloat16.
  variant: str  # st_ppo has a separate critic, as large again; so_grpo has none
  layers: int = 0  # The update uses the first layers. 0: all.
  dtype: str = 'bfloat16'  # The computation uses it.


SIZES = {
    '135M': Size('smollm2-135m', 32, 16, 128, 'float32', 'st_ppo'),
    '1.5B': Size('qwen2.5-1.5b', 16, 4, 64, 'float32', 'so_grpo'),
    # Weights, two moments, gradient and bias, the last two again per micro-batch: 16 bytes per
    # parameter even in bfloat16. Ten of 28 layers are 3.4 B parameters. All layers need LoRA or
    # several GPUs.
    '7B': Size('qwen2.5-7b', 8, 2, 32, 'bfloat16', 'so_grpo', 10),
}
QUICK = Size('tiny', 4, 2, 4, 'float32', 'st_ppo', dtype='float32')  # on a CPU


def shape_of(size, param_dtype, num_layers=0):
  """Returns the published shape with the settings of a GPU run."""
  shape = presets.PRESETS[size.preset]
  return dataclasses.replace(
      shape,
      dtype=size.dtype,
      param_dtype=param_dtype,
      remat='full',
      attention_chunk=512,
      num_layers=num_layers or shape.num_layers,
  )
