"""What a round of an official target launches for an H200, apart from products and our kernels.

A launch of a few numbers takes as long as reading megabytes, and there are dozens of layers.
"""

import collections
import dataclasses
import re

import jax
import pytest

from dflash_jax import config
from dflash_jax.config import LayerKind
from dflash_jax.sampling.params import SamplingArrays, SamplingParams
from dflash_jax.state.decode import Rows
from dflash_jax.steps import Models, decode_rounds
from dflash_jax.steps.init import abstract_params
from dflash_jax.steps.models import target_call
from dflash_jax.target import TargetColumns
from tests.pallas import h200
from tests.pallas.case import I32, shape

# Products and the sums of their parts: tuning on a device chooses others.
PRODUCT = re.compile(r"gemm|cublas|skinny|loop_reduce")
OURS = {
    "add_rmsnorm", "gated_delta_inputs", "gated_delta_verify", "norm_rope", "softmax_attention",
    "softmax_attention_join", "router", "route", "sparse_moe_gate_up", "sparse_moe_down",
}


@h200.NEEDS_PLUGIN
@pytest.mark.parametrize(
    "target", [config.qwen35_27b(), config.qwen35_35b_a3b()], ids=["dense", "moe"]
)
def test_a_target_of_two_layers_compiles_to_nothing_else_that_is_small(target):
    """A gated norm and the first norm (which adds nothing) are XLA's."""
    width, kinds = 8, (LayerKind.LINEAR, LayerKind.FULL)
    run = config.RunConfig(draft_tokens=0, batch=1, max_context=4096, implementation="pallas")
    models = Models(dataclasses.replace(target, layer_types=kinds), None, run)
    one = shape(1, dtype=I32)
    columns = TargetColumns(
        positions=shape(1, width, 3, dtype=I32), frontier=one, live=one, slot=one,
        parent=shape(1, width, dtype=I32), table=shape(1, run.max_pages, dtype=I32), chain=True,
    )

    def verify(params, embedded, columns, state):
        return target_call(models, params, "verify", embedded, columns, state)

    made = h200.compiled(
        verify, abstract_params(models), shape(1, width, target.hidden), columns,
        jax.eval_shape(models.zeros).target,
    )
    names = [re.sub(r"[._]*\d*$", "", name) for name in made.launches]
    small = collections.Counter(
        name for name in names if name not in OURS and not PRODUCT.match(name)
    )
    assert small == {"fusion": 2}


@h200.NEEDS_PLUGIN
def test_a_round_of_the_devices_loop_compiles_to_one_command_buffer(monkeypatch):
    """Each is a launch of the host's: between two of them the device may wait."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")  # by which `auto` chooses
    target = dataclasses.replace(
        config.qwen35_35b_a3b(), layer_types=(LayerKind.LINEAR, LayerKind.FULL)
    )
    draft = dataclasses.replace(
        config.dflash_35b_a3b(), layer_types=(LayerKind.SLIDING,), causal=(True,),
        target_layer_ids=(0, 1),
    )
    run = config.RunConfig(draft_tokens=7, batch=1, max_context=4096)
    models, rows = Models(target, draft, run), Rows.of(range(1))
    sampling = SamplingArrays.of([SamplingParams()], target.public_vocab)

    def loop(params, state, rows, sampling, eos_ids):
        return decode_rounds(models, params, state, rows, sampling, eos_ids, rounds=4)

    made = h200.compiled(
        loop, abstract_params(models), jax.eval_shape(models.zeros), rows, sampling,
        shape(1, 1, dtype=I32), donate_argnums=1,
    )
    _, body = made.thunks.split("  body:\n")
    inside = [line for line in body.splitlines() if line.startswith("    0")]
    assert len(inside) == 1 and "kCommandBuffer" in inside[0]
