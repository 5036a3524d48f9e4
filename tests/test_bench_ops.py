"""The op benchmark judges a form before it times it."""

import dataclasses
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from dflash_jax.sampling.params import SamplingParams
from scripts import bench_ops, bench_round, round_cases
from scripts.ops import between, catalogue
from scripts.ops.case import Case
from tests import cases

KEY = jax.random.key(0)


def double():
    return Case(
        name="double", bytes=1e9, make=lambda key: (jax.random.normal(key, (8,)),),
        exact=lambda x: 2.0 * x.astype("float64"), tolerance=1e-6,
        forms={"right": lambda x: x + x, "wrong": lambda x: x * 2.001,
               "nan": lambda x: x * jnp.nan},
    )


def test_a_form_within_the_tolerance_is_timed(capsys):
    assert bench_ops.report(double(), "right", 1e12)
    line = capsys.readouterr().out
    assert line.startswith("double, right: ") and "floor 1000.0 us" in line


@pytest.mark.parametrize("form", ["wrong", "nan"])
def test_a_form_beyond_it_is_reported_and_not_timed(form, capsys, monkeypatch):
    monkeypatch.setattr(Case, "time", lambda *args: pytest.fail("timed"))
    assert not bench_ops.report(double(), form, 1e12)
    assert f"double, {form}: FAILED" in capsys.readouterr().out


@pytest.mark.parametrize("case", [
    catalogue.verify(1, 8, chain=True), catalogue.verify(1, 6, chain=False),
    catalogue.fold(1, 4, 3), catalogue.prefill(1, 66, 16),
    catalogue.ring(1, 2, 64), catalogue.paged(1, 2, 64), between.add_norm(2, 224),
    catalogue.blocks(3, 64, 48, block=16), between.target_heads(1, 2, 3, 1, dim=12, rotary=8),
    between.draft_heads(1, 2, 2, 1, dim=4), catalogue.experts(3, (6, 2, 32, 16)),
], ids=lambda case: case.name)
def test_cases_agree_with_their_oracle(case):
    case.check("xla", KEY)


def test_a_form_that_leaves_parts_is_judged_by_their_sum():
    case = catalogue.experts(3, (6, 2, 32, 16))
    forms = {"interpret": catalogue.experts_by("interpret")}
    dataclasses.replace(case, forms=forms).check("interpret", KEY)


@pytest.mark.parametrize("options", [["--only", "no such"], ["--forms", "no such"]])
def test_names_of_nothing_are_refused(options, capsys):
    """Before the device is measured; a misspelt name is no success."""
    with pytest.raises(SystemExit, match="2"):
        bench_ops.main(options)
    assert "--only, --forms: expected parts of a case's name" in capsys.readouterr().err


@pytest.mark.parametrize("option, value", [
    ("--rounds", "0"), ("--batch", "-1"), ("--context", "0"), ("--chunk", "0"), ("--tau", "nan"),
    ("--draft-tokens", "0"),
])
def test_a_round_that_cannot_be_measured_is_refused_before_a_model_is_made(option, value, capsys):
    with pytest.raises(SystemExit, match="2"):
        round_cases.arguments([option, value])
    number = float(value) if option == "--tau" else int(value)
    assert f"{option}: expected at least 1, got {number}" in capsys.readouterr().err


@pytest.mark.parametrize("option, value, expected", [
    ("--tau", "inf", "a finite number"), ("--temperature", "nan", "finite and >= 0"),
    ("--temperature", "inf", "finite and >= 0"), ("--temperature", "-0.5", "finite and >= 0"),
    ("--top-k", "-1", "an integer >= 0"), ("--top-p", "nan", "in (0, 1]"),
    ("--presence-penalty", "inf", "finite"),
])
def test_numbers_that_sampling_or_a_schedule_cannot_take_are_refused_by_name(
    option, value, expected, capsys
):
    """As are the others, before a model is made; a temperature of NaN would time no sampled round.
    """
    with pytest.raises(SystemExit, match="2"):
        round_cases.arguments([option, value])
    assert f"{option}: expected {expected}, got {value}" in capsys.readouterr().err


def test_a_rounds_sampling_controls_are_those_of_the_command_line():
    options = "--temperature 0.7 --top-k 5 --top-p 0.5 --presence-penalty 0.25".split()
    assert round_cases.arguments(options).controls == SamplingParams(
        temperature=0.7, top_k=5, top_p=0.5, presence_penalty=0.25
    )
    assert round_cases.arguments([]).controls.temperature == 0


@pytest.mark.parametrize("context, lengths", [(40, {16, 8}), (16, {16}), (7, {7})])
def test_every_length_of_a_chunk_is_compiled_before_the_prefill_is_timed(
    context, lengths, monkeypatch
):
    calls = []
    monkeypatch.setattr(
        bench_round, "prefill_chunk",
        lambda models, params, state, rows, chunk: calls.append(chunk.tokens.shape[1]),
    )
    monkeypatch.setattr(bench_round, "begin", lambda *args: calls.append("timed from here"))
    args = round_cases.arguments(["--context", str(context), "--chunk", "16"])
    models = cases.tiny_models("dense", "dflash2", 3, 1)
    bench_round._prefilled(models, None, None, None, args)
    assert set(calls[: calls.index("timed from here")]) == lengths


def test_a_loop_whose_trace_has_no_kernels_has_no_idle_time(monkeypatch):
    """As on a CPU, which would else be never idle."""
    monkeypatch.setattr(bench_round, "_loop_program", lambda *_: lambda *given: (given[1], None))
    models = SimpleNamespace(run=SimpleNamespace(batch=1))
    taken, idle = bench_round._looped(models, *[None] * 4, profile=True)
    assert taken > 0 and idle is None
