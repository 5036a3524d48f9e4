"""Reading keys of a config.json: required, typed, nested before flat, never a default.

Source: `checkpoints.md` 2.1 and 4.1 (a key that would change the math and is not implemented is an
error, not ignored).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from dflash_jax.config import ConfigError
from dflash_jax.config.rules import is_int

# Keys that change the computation, with the values under which they do not. Anything else is
# refused by name: such a file would run and be wrong.
NEUTRAL = {
    "output_multiplier": (None, 1, 1.0),
    "final_logit_softcapping": (None,),
    "input_embedding_scale": (None, 1, 1.0),
    "attention_sink_bias": (None, False),
    "attention_value_scale": (None, 1, 1.0),
    "attention_bias": (None, False),
    "mlp_bias": (None, False),
    "hidden_act": (None, "silu"),
    "sample_from_anchor": (None, False),
    "norm_topk_prob": (None, True),
    "decoder_sparse_step": (None, 1),
    "mlp_only_layers": (None, []),
    "attn_output_gate": (None, True),
    "mrope_interleaved": (None, True),
    "use_aux_hidden_state": (None, True),
}
# More layers than any model has; a wrong count must not become a list of that length.
MAX_LAYERS = 4096
# What a rotation section may say without a `rope_type`. Everything else is, or may be, a scaling.
_UNSCALED = {
    "rope_theta",
    "partial_rotary_factor",
    "mrope_section",
    "mrope_interleaved",
    "rotary_dim",
    "rope_dim",
}


@dataclass(frozen=True)
class Keys:
    """The sections of one config.json, the one that wins first. A null counts as absent."""

    sections: tuple[Mapping, ...]

    def given(self, *names: str) -> object:
        """The first value that is not null, section by section; None if there is none."""
        for section in self.sections:
            for name in names:
                if section.get(name) is not None:
                    return section[name]
        return None

    def required(self, *names: str) -> object:
        """The value of a key that must be there and not null.

        Raises: ConfigError that names the key.
        """
        value = self.given(*names)
        if value is None:
            raise ConfigError(f"{names[0]}: expected a value in config.json, got none")
        return value

    def layer_count(self) -> int:
        """`num_hidden_layers`.

        Raises: ConfigError unless it is an integer in 1..MAX_LAYERS.
        """
        count = self.required("num_hidden_layers")
        if not is_int(count) or not 1 <= count <= MAX_LAYERS:
            expected = f"an integer in 1..{MAX_LAYERS}"
            raise ConfigError(f"num_hidden_layers: expected {expected}, got {count!r}")
        return count

    def refuse_unimplemented(self) -> None:
        """Raises ConfigError for a key of `NEUTRAL` with a value that changes the computation."""
        for section in self.sections:
            for name, neutral in NEUTRAL.items():
                value = section.get(name)
                if value not in neutral:
                    raise ConfigError(f"{name}: expected one of {neutral}, got {value!r}")


def architecture(raw: Mapping, known: Collection[str]) -> str:
    """The only entry of `architectures`, out of `known`."""
    names = raw.get("architectures")
    if not isinstance(names, list) or len(names) != 1:
        raise ConfigError(f"architectures: expected exactly one entry, got {names!r}")
    return choice("architectures", names[0], known)


def choice(field: str, value: object, known: Collection[str]) -> str:
    """The value, a string out of `known`.

    Raises: ConfigError for anything else, whatever its type.
    """
    if not isinstance(value, str) or value not in known:
        raise ConfigError(f"{field}: expected one of {list(known)}, got {value!r}")
    return value


def subsection(raw: Mapping, name: str) -> Mapping | None:
    """A nested object, or None when absent or null.

    Raises: ConfigError if the value is something else.
    """
    value = raw.get(name)
    if value is not None and not isinstance(value, Mapping):
        raise ConfigError(f"{name}: expected an object, got {value!r}")
    return value


def rope_sections(raw: Mapping) -> Keys:
    """The rotation keys: `rope_parameters` before `rope_scaling` before the flat keys.

    Raises: ConfigError for any scaling that is not null or "default", by its name, and for keys
      beside the rotation's own where no type says that they scale nothing.
    """
    nested = []
    for name in ("rope_parameters", "rope_scaling"):
        section = subsection(raw, name)
        if section is None:
            continue
        if any(isinstance(value, Mapping) for value in section.values()):
            raise ConfigError(f"{name}: expected one set of keys, got one per layer kind")
        for key in ("rope_type", "type"):
            if section.get(key) not in (None, "default"):
                expected = 'null or "default" (RoPE scaling is not implemented)'
                raise ConfigError(f"{name}.{key}: expected {expected}, got {section[key]!r}")
        stated = {key for key, value in section.items() if value is not None}
        if not stated & {"rope_type", "type"} and (unknown := sorted(stated - _UNSCALED)):
            key = unknown[0]
            expected = "none without a rope_type (RoPE scaling is not implemented)"
            raise ConfigError(f"{name}.{key}: expected {expected}, got {section[key]!r}")
        nested.append(section)
    return Keys((*nested, raw))
