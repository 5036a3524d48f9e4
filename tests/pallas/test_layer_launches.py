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
from dflash_jax.steps import Models
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


@pytest.mark.skipif(not h200.HAVE_PLUGIN, reason="jax's CUDA plugin is not installed")
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
