"""Recognises quantised files by their tensors, to refuse them by name and say what they would need.

The tensors decide, not config.json: mixed files leave some layers in bfloat16. Source:
`checkpoints.md` 4.3.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

_ORIGINAL = "use the original bfloat16 release"


@dataclass(frozen=True)
class Scheme:
    """A way to quantise: its name, what marks it, and what loading it would need."""

    name: str
    suffixes: tuple[str, ...]  # the tensor names' ends, all of which are present
    dtypes: tuple[str, ...]  # the marked tensors' dtypes; empty for any
    needs: str


# In this order: the first scheme whose marks are present names the file.
_SCHEMES = (
    Scheme(
        "NVFP4 (compressed-tensors)",
        (".weight_packed", ".weight_global_scale"),
        (),
        "unpacking of 4-bit pairs with F8_E4M3 scales of 16 and a global scale",
    ),
    Scheme(
        "NVFP4 (ModelOpt)",
        (".weight_scale_2",),
        (),
        "unpacking of 4-bit pairs with F8_E4M3 scales of 16 and a second scale",
    ),
    Scheme(
        "W4A16 (compressed-tensors)",
        (".weight_packed",),
        ("I32",),
        "unpacking of eight 4-bit integers a word with their group scales",
    ),
    Scheme(
        "MXFP4 (AutoRound)",
        (".weight_packed",),
        (),
        "unpacking of 4-bit pairs with E8M0 scales of 32",
    ),
    Scheme(
        "GPTQ",
        (".qweight", ".g_idx"),
        (),
        "unpacking of 4-bit integers with zero points, scales and the group index",
    ),
    Scheme("AWQ", (".qweight",), (), "unpacking of 4-bit integers in AWQ's order with zero points"),
    Scheme(
        "MLX",
        (".scales",),
        (),
        "unpacking of 4- or 8-bit groups of 64, norms less one and conv1d moved back",
    ),
    Scheme("MLX", (".biases",), (), "unpacking of 4- or 8-bit groups of 64 with scales and biases"),
    Scheme(
        "FP8, block-scaled", ("_scale_inv",), (), "products with F8_E4M3 blocks, which targets have"
    ),
    Scheme("FP8", (".weight_scale",), (), "a product of F8_E4M3 rows or tensors with scales"),
    Scheme("NVFP4", (".weight_global_scale",), (), "the packed weights of the global scales"),
    Scheme("an unknown scheme", (".input_global_scale",), (), "its packed weights"),
    Scheme("an unknown scheme", (".input_scale",), (), "its packed weights"),
    Scheme("an unknown scheme", (".qzeros",), (), "its packed weights"),
    Scheme("an unknown scheme", (".g_idx",), (), "its packed weights"),
    Scheme("an unknown scheme", (".weight_shape",), (), "its packed weights"),
    Scheme("an unknown scheme", (".weight_zero_point",), (), "its packed weights"),
)
GGUF = Scheme(
    "GGUF", ("blk.",), (), "value heads reordered from tiled to grouped, norms less one, its dtypes"
)
# Names that belong to a scheme: no parameter takes them, and none needs a line of its own.
SUFFIXES = tuple(dict.fromkeys(end for scheme in _SCHEMES for end in scheme.suffixes)) + (
    "_scale_inv",
)


def recognise(dtypes: Mapping[str, str], *, block_scaled: bool = False) -> str | None:
    """One line on the scheme of a file, or None for dense ones.

    Args:
      dtypes: safetensors' dtype by stored name.
      block_scaled: FP8 with block scales is implemented for this kind of model, and so no scheme.
    """
    for scheme in _SCHEMES:
        if block_scaled and scheme.name == "FP8, block-scaled":
            continue
        marked = [[n for n in dtypes if n.endswith(end)] for end in scheme.suffixes]
        if not all(marked):
            continue
        if scheme.dtypes and not any(dtypes[name] in scheme.dtypes for name in marked[0]):
            continue
        return _line(sorted(marked[0]), scheme)
    if tiled := sorted(name for name in dtypes if name.startswith(GGUF.suffixes)):
        return _line(tiled, GGUF)
    scaled = block_scaled and any(name.endswith("_scale_inv") for name in dtypes)
    bare = sorted(name for name, dtype in dtypes.items() if dtype.startswith("F8_"))
    if bare and not scaled:
        return _line(bare, Scheme("FP8 without scales", (), (), "a dtype of its own"))
    return None


def recognise_files(folder: Path) -> str | None:
    """One line on a folder whose weights are not safetensors but GGUF, or None."""
    found = sorted(file.name for file in folder.glob("*.gguf"))
    return _line(found, GGUF, "files") if found else None


def _line(found: list[str], scheme: Scheme, what: str = "tensors") -> str:
    return (
        f"{found[0]}: quantised weights are not implemented, this is {scheme.name} "
        f"({len(found)} such {what}); needed: {scheme.needs}, or {_ORIGINAL}"
    )
