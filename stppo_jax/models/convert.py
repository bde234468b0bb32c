"""Converts Hugging Face folders to and from (ModelConfig, params)."""

from stppo_jax.models.hf_export import save_hf
from stppo_jax.models.hf_weights import load_hf

__all__ = ['load_hf', 'save_hf']
