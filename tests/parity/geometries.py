"""Geometries of the random models: odd on purpose, because real ones hide mistakes.

Head ratios of three and one, vocabularies and widths that are no powers of two, two rotary
fractions, GDN kernels 3 to 5 with key dim != value dim, experts with different top-k; drafts with
one to three convolution taps, with and without a causal flag.
"""

LINEAR, FULL, SLIDING = "linear_attention", "full_attention", "sliding_attention"

TARGET_BASE = dict(
    rms_norm_eps=1e-6,
    max_position_embeddings=512,
    attention_bias=False,
    hidden_act="silu",
    tie_word_embeddings=False,
)
VISION = dict(
    depth=1,
    hidden_size=16,
    intermediate_size=16,
    num_heads=2,
    patch_size=4,
    num_position_embeddings=16,
)

ATTENTION = {
    "grouped": dict(
        hidden_size=48,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=16,
        vocab_size=131,
        layer_types=[LINEAR, LINEAR, FULL, LINEAR, FULL],
        linear_num_key_heads=2,
        linear_num_value_heads=6,
        linear_key_head_dim=8,
        linear_value_head_dim=12,
        linear_conv_kernel_dim=4,
        rope_parameters=dict(
            rope_type="default",
            rope_theta=1e4,
            partial_rotary_factor=0.5,
            mrope_section=[2, 1, 1],
            mrope_interleaved=True,
        ),
    ),
    "single_kv": dict(
        hidden_size=64,
        num_attention_heads=3,
        num_key_value_heads=1,
        head_dim=32,
        vocab_size=97,
        layer_types=[FULL, LINEAR, LINEAR],
        linear_num_key_heads=3,
        linear_num_value_heads=3,
        linear_key_head_dim=16,
        linear_value_head_dim=8,
        linear_conv_kernel_dim=3,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        rope_parameters=dict(
            rope_type="default",
            rope_theta=1e6,
            partial_rotary_factor=0.25,
            mrope_section=[2, 1, 1],
            mrope_interleaved=True,
        ),
    ),
    "ungrouped": dict(
        hidden_size=40,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=24,
        vocab_size=113,
        layer_types=[LINEAR, LINEAR, LINEAR, FULL],
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=12,
        linear_value_head_dim=20,
        linear_conv_kernel_dim=5,
        rope_parameters=dict(
            rope_type="default",
            rope_theta=5e5,
            partial_rotary_factor=0.5,
            mrope_section=[2, 2, 2],
            mrope_interleaved=True,
        ),
    ),
}
MOE = {
    "grouped": dict(num_experts=5, num_experts_per_tok=1),
    "single_kv": dict(num_experts=8, num_experts_per_tok=3),
    "ungrouped": dict(num_experts=6, num_experts_per_tok=2),
}
TARGET_GEOMETRIES = tuple(ATTENTION)
# The multimodal class nests its names and config; the text-only class does not.
MULTIMODAL = {"grouped", "ungrouped"}

DRAFT_GEOMETRIES = {
    # No `is_causal`: the published rule makes the sliding layers causal.
    "mixed": dict(
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=16,
        intermediate_size=56,
        layer_types=[SLIDING, SLIDING, FULL],
        sliding_window=7,
        rope_theta=1e4,
        block_size=6,
        rms_norm_eps=1e-6,
        conv_kernel_size=2,
        conv_group_size=8,
        selector_rank=5,
        selector_top_k=6,
    ),
    "full": dict(
        num_attention_heads=3,
        num_key_value_heads=1,
        head_dim=24,
        intermediate_size=40,
        layer_types=[FULL, FULL],
        sliding_window=None,
        rope_theta=1e7,
        block_size=5,
        rms_norm_eps=1e-5,
        conv_kernel_size=3,
        conv_group_size=4,
        selector_rank=8,
        selector_top_k=4,
    ),
    # The window is narrower than the block, so it also cuts inside the block.
    "narrow": dict(
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        intermediate_size=48,
        layer_types=[SLIDING, SLIDING, SLIDING],
        sliding_window=4,
        is_causal=False,
        rope_theta=5e5,
        block_size=8,
        rms_norm_eps=1e-6,
        conv_kernel_size=1,
        conv_group_size=2,
        selector_rank=16,
        selector_top_k=3,
    ),
}
# Taps by number of target layers: not ascending, one of them the first block.
TAPS = {5: [1, 3, 0], 3: [1, 0], 4: [2, 0, 1]}
