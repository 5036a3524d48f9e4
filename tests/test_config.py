"""Every rule of contracts 1.1, 1.4 and 11 raises an error that names the field."""

import dataclasses

import jax.numpy as jnp
import pytest

from dflash_jax.config import (
    ConfigError,
    ConvConfig,
    DraftKind,
    DtypePolicy,
    Fp8Config,
    GdnConfig,
    LayerKind,
    MoeConfig,
    RopeConfig,
    RunConfig,
    SelectorConfig,
    check_pair,
    check_run,
    describe,
    dflash2_27b,
    dflash2_35b_a3b,
    dflash_27b,
    dflash_35b_a3b,
    qwen35_4b,
    qwen35_9b,
    qwen35_27b,
    qwen35_35b_a3b,
    tiny_draft,
    tiny_target,
)

FULL, LINEAR, LOCAL = LayerKind.FULL, LayerKind.LINEAR, LayerKind.SLIDING
FIRST, SECOND = DraftKind.DFLASH, DraftKind.DFLASH2
ROPE = RopeConfig(theta=1e4, partial_factor=0.25, mrope_section=(2, 1, 1))
MOE = MoeConfig(num_experts=4, experts_per_token=2, intermediate=8, shared_intermediate=8)
GDN = dict(key_heads=2, value_heads=4, key_dim=16, value_dim=16, conv_kernel=4)
EXPERTS = dict(num_experts=4, experts_per_token=2, intermediate=8, shared_intermediate=8)
RUN = dict(draft_tokens=3, batch=2, max_context=100)


def rope(**overrides):
    return dataclasses.replace(ROPE, **overrides)


@pytest.mark.parametrize(
    ("field", "overrides"),
    [
        ("hidden", dict(hidden=0)),
        ("hidden", dict(hidden=64.0)),
        ("hidden", dict(hidden=True)),
        ("hidden", dict(hidden=2**31)),
        ("public_vocab", dict(public_vocab=258)),
        ("query_heads", dict(query_heads=5)),
        ("norm_eps", dict(norm_eps=0.0)),
        ("norm_eps", dict(norm_eps=1e-60)),
        ("norm_eps", dict(norm_eps=float("nan"))),
        ("norm_eps", dict(norm_eps="1e-6")),
        ("layer_types", dict(layer_types=())),
        ("layer_types", dict(layer_types=(LINEAR, LOCAL))),
        ("layer_types", dict(layer_types=[LINEAR, FULL])),
        ("layer_types", dict(layer_types=("linear_attention",))),
        ("rope.partial_factor", dict(head_dim=4)),
        ("rope.partial_factor", dict(rope=rope(partial_factor=0.03))),
        ("rope.mrope_section", dict(rope=rope(mrope_section=(2, 2, 1)))),
        ("rope.mrope_section", dict(rope=rope(mrope_section=(1, 2, 1)))),
        ("gdn", dict(gdn=None)),
        ("gdn", dict(layer_types=(FULL,))),
        ("intermediate", dict(intermediate=None)),
        ("intermediate", dict(moe=MOE)),
        ("tie_embeddings", dict(tie_embeddings=1)),
        ("max_positions", dict(max_positions=-1)),
    ],
)
def test_target_rule_names_its_field(field, overrides):
    with pytest.raises(ConfigError, match=rf"^{field}: expected .*, got "):
        dataclasses.replace(tiny_target(), **overrides)


@pytest.mark.parametrize(
    ("field", "build"),
    [
        ("rope.theta", lambda: rope(theta=float("inf"))),
        ("rope.theta", lambda: rope(theta=1e39)),
        ("rope.partial_factor", lambda: rope(partial_factor=1.5)),
        ("rope.mrope_section", lambda: rope(mrope_section=(4, 0))),
        ("rope.mrope_section", lambda: rope(mrope_section=(5, -1, 0))),
        ("gdn.value_heads", lambda: GdnConfig(**GDN | dict(value_heads=3))),
        ("gdn.conv_kernel", lambda: GdnConfig(**GDN | dict(conv_kernel=0))),
        ("moe.experts_per_token", lambda: MoeConfig(**EXPERTS | dict(experts_per_token=5))),
        ("conv.taps", lambda: ConvConfig(taps=0, group_width=16)),
        ("selector.rank", lambda: SelectorConfig(rank=0, num_candidates=16)),
        ("dtypes.logits", lambda: DtypePolicy(logits="int8")),
    ],
)
def test_part_rule_names_its_field(field, build):
    with pytest.raises(ConfigError, match=rf"^{field}: expected .*, got "):
        build()


@pytest.mark.parametrize(
    ("field", "kind", "overrides"),
    [
        ("kind", FIRST, dict(kind="DFlashDraftModel")),
        ("query_heads", FIRST, dict(query_heads=3)),
        ("head_dim", FIRST, dict(head_dim=31)),
        ("norm_eps", FIRST, dict(norm_eps=-1e-6)),
        ("rope_theta", FIRST, dict(rope_theta=None)),
        ("layer_types", FIRST, dict(layer_types=(LINEAR, FULL))),
        ("window", FIRST, dict(window=None)),
        ("window", FIRST, dict(window=0, layer_types=(FULL, FULL))),
        ("causal", FIRST, dict(causal=(True,))),
        ("causal", FIRST, dict(causal=(1, 0))),
        ("target_layer_ids", FIRST, dict(target_layer_ids=())),
        ("target_layer_ids", FIRST, dict(target_layer_ids=(1, 1))),
        ("target_layer_ids", FIRST, dict(target_layer_ids=(-1,))),
        ("mask_token_id", FIRST, dict(mask_token_id=257)),
        ("mask_token_id", FIRST, dict(mask_token_id=None)),
        ("conv", FIRST, dict(conv=ConvConfig(taps=2, group_width=16))),
        ("selector", FIRST, dict(selector=SelectorConfig(rank=2, num_candidates=2))),
        ("conv", SECOND, dict(conv=None)),
        ("selector", SECOND, dict(selector=None)),
        ("hidden", SECOND, dict(conv=ConvConfig(taps=2, group_width=10))),
        ("head_rows", FIRST, dict(head_rows=-1)),
        ("block_size", FIRST, dict(block_size=1)),
    ],
)
def test_draft_rule_names_its_field(field, kind, overrides):
    with pytest.raises(ConfigError, match=rf"^{field}: expected .*, got "):
        dataclasses.replace(tiny_draft(kind), **overrides)


@pytest.mark.parametrize(
    ("field", "kind", "overrides"),
    [
        ("hidden", FIRST, dict(hidden=32)),
        ("vocab_rows", FIRST, dict(vocab_rows=258)),
        ("target_layer_ids", FIRST, dict(target_layer_ids=(4,))),
        ("head_rows", FIRST, dict(head_rows=251)),
        (
            "selector.num_candidates",
            SECOND,
            dict(selector=SelectorConfig(rank=2, num_candidates=251)),
        ),
        ("selector.num_candidates", SECOND, dict(head_rows=7)),
    ],
)
def test_pair_rule_names_its_field(field, kind, overrides):
    with pytest.raises(ConfigError, match=rf"^{field}: expected .*, got "):
        check_pair(tiny_target(), tiny_draft(kind, **overrides))


@pytest.mark.parametrize(
    ("field", "overrides"),
    [
        ("draft_tokens", dict(draft_tokens=-1)),
        ("batch", dict(batch=0)),
        ("max_context", dict(max_context=0)),
        ("page_size", dict(page_size=0)),
        ("chunk", dict(chunk=0)),
        ("lanes", dict(lanes=1)),
        ("slots", dict(lanes=3, slots=2)),
        ("implementation", dict(implementation="mosaic")),
        ("tree_nodes", dict(tree_nodes=4)),
        ("tree_nodes", dict(tree_nodes=33)),
        ("tree_nodes", dict(tree_nodes=True)),
        ("tree_nodes", dict(draft_tokens=31, tree_nodes=32)),
        ("tree_paths", dict(tree_paths=1)),
        ("tree_paths", dict(tree_paths=9)),
    ],
)
def test_run_rule_names_its_field(field, overrides):
    with pytest.raises(ConfigError, match=rf"^{field}: expected .*, got "):
        RunConfig(**RUN | overrides)


def test_backend_options_need_a_backend_and_capacity_is_bounded():
    target, draft, run = tiny_target(), tiny_draft(FIRST), RunConfig(**RUN)
    check_run(target, draft, run)
    check_run(target, None, RunConfig(**RUN | dict(draft_tokens=0)))
    for pair, choice in (
        ((target, None), "draft_tokens"),
        ((tiny_target(max_positions=99), draft), "max_context"),
        ((target, tiny_draft(FIRST, max_positions=99)), "max_context"),
    ):
        with pytest.raises(ConfigError, match=rf"^{choice}: "):
            check_run(*pair, run)
    with pytest.raises(ConfigError, match="^draft_tokens: "):
        check_run(target, draft, RunConfig(**RUN | dict(draft_tokens=0)))


def test_trees_need_a_lattice():
    target, run = tiny_target(), RunConfig(**RUN | dict(tree_nodes=5))
    check_run(target, tiny_draft(SECOND), run)
    check_run(target, tiny_draft(SECOND), RunConfig(**RUN | dict(tree_nodes=32, tree_paths=2)))
    message = r"0 with DFlashDraftModel \(trees need DFlash2DraftModel\), got 5"
    with pytest.raises(ConfigError, match=f"^tree_nodes: expected {message}"):
        check_run(target, tiny_draft(FIRST), run)
    with pytest.raises(ConfigError, match="^tree_nodes: expected 0 with no draft"):
        check_run(target, None, RunConfig(**RUN | dict(draft_tokens=0, tree_nodes=5)))
    assert "tree 5 columns, 8 paths" in describe(target, tiny_draft(SECOND), run)


@pytest.mark.parametrize("block_size, told", [(None, False), (8, False), (4, True)])
def test_more_proposals_than_the_draft_was_trained_for_are_named(block_size, told):
    draft, run = tiny_draft(FIRST, block_size=block_size), RunConfig(**RUN | dict(draft_tokens=4))
    text = describe(tiny_target(), draft, run)
    assert ("  K 4 is more than block_size - 1 = 3" in text) == told


def test_run_defaults_and_derived_counts():
    run = RunConfig(**RUN)
    assert (run.lanes, run.slots, run.page_size, run.chunk) == (2, 2, 64, 1024)
    assert (run.block_width, run.max_pages, run.pages) == (4, 2, 4)
    assert RunConfig(**RUN | dict(pool_pages=3)).pages == 3
    with pytest.raises(ConfigError, match="pool_pages"):
        RunConfig(**RUN | dict(pool_pages=0))


def test_legal_corners_are_accepted():
    assert tiny_draft(FIRST, mask_token_id=0, target_layer_ids=(0,)).feature_width == 64
    assert tiny_draft(SECOND, conv=ConvConfig(taps=5, group_width=64)).conv.taps == 5
    assert tiny_draft(FIRST, layer_types=(FULL, FULL), window=None).local_layers == ()
    assert tiny_target(tie_embeddings=True, layer_types=(FULL,), gdn=None).linear_layers == ()
    assert tiny_target(public_vocab=257).public_vocab == 257


def test_causality_default_is_bidirectional_everywhere():
    assert tiny_draft(FIRST).causal == (False, False)


def test_layer_indices_and_gdn_widths():
    target, draft = qwen35_27b(), dflash_35b_a3b()
    assert target.num_layers == 64
    assert target.full_layers == tuple(range(3, 64, 4))
    assert len(target.linear_layers) == 48
    assert (target.gdn.channels, target.gdn.value_width) == (10240, 6144)
    assert target.rope.rotary_dim(target.head_dim) == 64
    assert (draft.local_layers, draft.full_layers) == ((0, 1, 2, 3, 4), (5,))
    assert draft.feature_width == 8 * 2048


def test_presets_fit_their_targets_and_are_hashable():
    pairs = (
        (qwen35_27b(), dflash2_27b()),
        (qwen35_27b(), dflash_27b()),
        (qwen35_35b_a3b(), dflash_35b_a3b()),
        (qwen35_35b_a3b(), dflash2_35b_a3b()),
        (tiny_target(), tiny_draft(FIRST)),
        (tiny_target(moe=True), tiny_draft(SECOND)),
    )
    for target, draft in pairs:
        check_pair(target, draft)
        assert hash(target) == hash(dataclasses.replace(target))
        assert hash(draft) == hash(dataclasses.replace(draft))
    assert qwen35_4b().tie_embeddings and not qwen35_9b().tie_embeddings


def test_dtype_policies():
    policy = DtypePolicy()
    assert policy.activation_dtype == policy.param_dtype == policy.logits_dtype == jnp.bfloat16
    assert policy.context_value_dtype == jnp.float16
    exact = dataclasses.asdict(DtypePolicy.exact())
    assert set(exact.values()) == {"float32"}


def test_description_shows_causality_of_each_layer():
    run = RunConfig(draft_tokens=15, batch=1, max_context=4096)
    text = describe(qwen35_35b_a3b(), dflash_35b_a3b(), run)
    lines = text.splitlines()
    assert "  layer 4: sliding_attention, window 4096, causal" in lines
    assert "  layer 5: full_attention, bidirectional" in lines
    assert "K 15, W 16" in text and "public 248077" in text


def test_block_scaled_matrices_are_those_that_a_layer_has():
    config = tiny_target(moe=True).with_fp8(16, 32)
    assert config.fp8.layers[0] == (
        "delta_net/in_proj", "delta_net/output",
        "moe/gate_up", "moe/down", "moe/shared/gate_up", "moe/shared/down",
    )  # fmt: skip
    assert config.fp8_block(3, "attention/qgkv") == (16, 32)
    assert config.fp8_block(3, "delta_net/in_proj") is None
    assert tiny_target().fp8_block(0, "mlp/down") is None
    assert "  fp8: 24 matrices in blocks of 16 x 32" in describe(config).splitlines()
    few = Fp8Config(block_rows=1, block_columns=1, layers=((), (), ("mlp/down",), ()))
    assert tiny_target(fp8=few).fp8_block(2, "mlp/down") == (1, 1)


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"block_rows": 0}, "fp8.block_rows: expected a positive"),
        ({"block_columns": 1.5}, "fp8.block_columns: expected a positive"),
        ({"layers": ((),)}, "fp8.layers: expected 4 layers, got 1"),
        ({"layers": [()] * 4}, "fp8.layers: expected a tuple of names"),
        ({"layers": ((), (), (), ("delta_net/output",))}, r"fp8.layers\[3\]: expected distinct"),
        ({"layers": (("mlp/down",) * 2, (), (), ())}, r"fp8.layers\[0\]: expected distinct"),
        ({"layers": (("embedding",), (), (), ())}, r"fp8.layers\[0\]: expected distinct"),
    ],
)
def test_block_scaled_matrices_that_a_layer_has_not_are_errors(change, fault):
    fields = dict(block_rows=128, block_columns=128, layers=((),) * 4) | change
    with pytest.raises(ConfigError, match=fault):
        tiny_target(fp8=Fp8Config(**fields))
