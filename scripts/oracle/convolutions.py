"""Checks of the DFlash2 convolutions on given inputs."""

from __future__ import annotations

import jax.numpy as jnp

from dflash_jax.ops.dynamic_grouped_conv import apply_taps, finish, increments
from dflash_jax.steps import Models, Params

from .compare import Checks, Floats, Input
from .kit import Golden

# Golden prefix -> the convolution it shows: of the first layer's attention, the last layer's MLP.
_PLACES = {"conv_": (0, "attention_conv"), "mlp_conv_": (-1, "mlp_conv")}


def check_convolutions(golden: Golden, models: Models, params: Params, checks: Checks) -> None:
    """Both sides of two convolutions; the golden inputs are already normed."""
    if "conv_x" not in golden:
        return
    checks |= {"conv_x": [Input()], "conv_y": [Input()]}
    x, y = jnp.asarray(golden["conv_x"]), jnp.asarray(golden["conv_y"])
    for prefix, (layer, branch) in _PLACES.items():
        weights = params.draft[f"layers_{range(models.draft.draft_layers)[layer]}"][branch]
        delta = increments(x, weights["projection"]["kernel"], taps=models.draft.conv.taps)
        closing = delta[:, :, 1]
        checks |= {
            f"{prefix}prepared": [Floats(apply_taps(x, weights["base"][0], delta[:, :, 0]))],
            f"{prefix}finish_delta": [Floats(closing)],
            f"{prefix}finished": [Floats(finish(jnp.zeros_like(y), y, weights["base"], closing))],
        }
