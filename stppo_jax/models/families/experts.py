"""Mixtures of experts: Qwen3-MoE, and what Qwen3.5 shares with it."""

import pathlib
from typing import Any
from typing import Protocol

import numpy as np

from stppo_jax.models.families import family
from stppo_jax.models.families import qwen
from stppo_jax.types import UserError

COUNTS = dict.fromkeys(('num_experts', 'num_local_experts'), family.ANY)


class QwenMoe(family.Family):
  """Every layer has experts."""

  def feed_forward(self, path: pathlib.Path, raw: dict[str, Any]) -> dict[str, Any]:
    """Returns the fields of the experts."""
    return fields(path, raw)


def fields(path: pathlib.Path, raw: dict[str, Any]) -> dict[str, Any]:
  """Returns the fields of a mixture of experts. UserError: some of its layers are dense."""
  step = raw.get('decoder_sparse_step', 1)
  dense_layers = raw.get('mlp_only_layers')
  if step != 1 or dense_layers:
    raise UserError(
        f'{path}: decoder_sparse_step = {step!r} and mlp_only_layers = {dense_layers!r} make some '
        'layers dense; allowed: 1 and []; choose a model whose layers all have experts'
    )
  # transformers has two names for the same number.
  counts = {'num_experts': raw.get('num_experts', raw.get('num_local_experts'))}
  num_experts = family.number(path, counts, 'num_experts')
  active = family.number(path, raw, 'num_experts_per_tok')
  if active > num_experts:
    raise UserError(
        f'{path}: num_experts_per_tok = {active} of num_experts = {num_experts}; download it again'
    )
  return {
      'd_ff': family.number(path, raw, 'moe_intermediate_size'),
      'num_experts': num_experts,
      'experts_per_token': active,
      'norm_topk_prob': bool(raw.get('norm_topk_prob', False)),
      'shared_d_ff': raw.get('shared_expert_intermediate_size') or 0,
  }


Index = slice | tuple[slice, ...]


class LazyTensor(Protocol):
  """A tensor in a file, as safetensors gives it. An index reads a part of it."""

  def get_shape(self) -> list[int]:
    """Returns the shape of the tensor."""

  def get_dtype(self) -> str:
    """Returns the dtype of the tensor, by safetensors' name."""

  def __getitem__(self, index: Index, /) -> np.ndarray:
    """Reads a part of the tensor."""


class ExpertPart:
  """The rows first to last of one expert of a tensor [E,..,..], as a lazy safetensors slice."""

  def __init__(self, tensor: LazyTensor, expert: int, first: int, last: int):
    self._tensor = tensor
    self._expert = expert
    self._rows = slice(first, last)

  def get_shape(self) -> list[int]:
    """Returns the shape of the part."""
    return [self._rows.stop - self._rows.start, self._tensor.get_shape()[2]]

  def get_dtype(self) -> str:
    """Returns the dtype of the tensor, by safetensors' name."""
    return self._tensor.get_dtype()

  def __getitem__(self, index: Index, /) -> np.ndarray:
    return self._tensor[self._expert : self._expert + 1, self._rows][0][index]


def split(stem: str, kind: str, tensor: LazyTensor) -> dict[str, LazyTensor]:
  """Returns a tensor of all experts of a layer under the names of each expert's own tensors."""
  shape = tensor.get_shape()
  if len(shape) != 3:
    return {f'{stem}.{kind}': tensor}
  names = ['gate_proj', 'up_proj'] if kind == 'gate_up_proj' else ['down_proj']
  size = shape[1] // len(names)
  parts: dict[str, LazyTensor] = {}
  for expert in range(shape[0]):
    for i, name in enumerate(names):
      part = ExpertPart(tensor, expert, i * size, (i + 1) * size)
      parts[f'{stem}.{expert}.{name}.weight'] = part
  return parts


FAMILIES = {'qwen3_moe': QwenMoe('Qwen3Moe', {'qk_norm': True}, allowed=qwen.NORMS | COUNTS)}
