"""OLMo 2 (arXiv 2501.00656) and OLMo 3: norms after attention and feed-forward."""

from stppo_jax.models.families import family
from stppo_jax.models.families import windowed

_FLAGS = {'norm_before': False, 'norm_after': True, 'qk_norm': True, 'qk_norm_whole': True}
_DEFAULTS = {'rms_norm_eps': 1e-5, 'max_position_embeddings': 2048}

FAMILIES = {
    'olmo2': family.Family('Olmo2', _FLAGS, _DEFAULTS, shares_no_keys=True),
    'olmo3': windowed.TwoRotations(
        'Olmo3',
        _FLAGS,
        _DEFAULTS | {'rope_theta': 500_000.0, 'sliding_window': 4096},
        {'sliding_window_pattern': (4,)},
        shares_no_keys=True,
        window_period=4,
    ),
}
