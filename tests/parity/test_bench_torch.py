"""The torch benchmark computes what our cases do, under their names, and prints what it timed."""

import re
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from scripts.ops import catalogue, draft, heads, products
from scripts.ops.case import Case

pytestmark = pytest.mark.parity

KEY = jax.random.key(0)
BFLOAT16 = 8e-3  # of scores that torch rounds and we do not


@pytest.fixture
def scripts(published):
    """The modules, imported where torch is known to be there."""
    from scripts import bench_torch, torch_ops

    return SimpleNamespace(bench=bench_torch, ops=torch_ops, torch=published.torch)


def operands_of(case: Case):
    return [np.asarray(x) for x in case.make(KEY)]


def tensors(torch, arrays):
    """NumPy's bfloat16 is none that torch knows."""
    narrow = {"bfloat16": torch.bfloat16, "float16": torch.bfloat16}
    return [
        torch.from_numpy(x.astype(np.float32)).to(narrow.get(x.dtype.name, torch.float32))
        for x in arrays
    ]


def assert_near(actual, expected):
    actual = actual.double().numpy()
    assert actual.shape == expected.shape
    assert np.linalg.norm(actual - expected) < BFLOAT16 * np.linalg.norm(expected)


@pytest.mark.parametrize("name, sizes", [
    ("added", (4, 24, 48)), ("swiglu", (4, 24, 48)), ("best", (2, 8)), ("lowest", (2, 8)),
    ("select", (2,)), ("experts", (3, (8, 2, 32, 16))),
])
def test_products_and_choices_agree_with_our_oracle(name, sizes, scripts):
    peer = getattr(scripts.ops, name)(*sizes)
    arrays = operands_of(peer.case)
    made = peer.make("cpu", scripts.torch.Generator().manual_seed(0))
    assert [x.shape for x in made] == [x.shape for x in arrays]
    for run in peer.forms.values():
        assert_near(run(*tensors(scripts.torch, arrays)), peer.case.exact(*arrays))


def test_context_rows_are_two_products_and_a_norm(scripts, monkeypatch):
    for name, value in (("HIDDEN", 32), ("FEATURES", 64), ("LAYERS", 1), ("DIM", 8)):
        monkeypatch.setattr(draft, name, value)
    peer = scripts.ops.context(2, 3)
    made = peer.make("cpu", scripts.torch.Generator().manual_seed(0))
    features, norm, first, second = made
    middle = features.double() @ first.double().T
    middle *= (middle.square().mean(dim=-1, keepdim=True) + 1e-6).rsqrt() * norm.double()
    for run in peer.forms.values():
        assert_near(run(*made), (middle @ second.double().T).numpy())


def test_attention_of_pages_agrees_with_our_oracle(scripts):
    peer = scripts.ops.paged(1, 3, 128)
    arrays = operands_of(peer.case)
    query, block_key, block_value, key_pool, value_pool, table = arrays[:6]
    context = [pool[:, table[0]].reshape(4, 128, 256) for pool in (key_pool, value_pool)]
    blocks = [block[0].swapaxes(0, 1) for block in (block_key, block_value)]
    whole = [np.concatenate(both, axis=1)[None] for both in zip(context, blocks, strict=True)]
    expected = peer.case.exact(*arrays).swapaxes(1, 2)
    check_attention(scripts, peer, [query.swapaxes(1, 2), *whole], expected, peer.forms)


def test_attention_of_a_ring_agrees_with_our_oracle(scripts):
    peer = scripts.ops.ring(1, 3, 64)
    arrays = operands_of(peer.case)
    query, block_key, block_value, key_ring, value_ring, _, frontier, _ = arrays
    oldest = np.arange(frontier[0] - 64, frontier[0]) % 64
    context = [ring[0][:, oldest].astype(np.float32) for ring in (key_ring, value_ring)]
    blocks = [block[0].swapaxes(0, 1).astype(np.float32) for block in (block_key, block_value)]
    whole = [
        np.concatenate(both, axis=1)[None].astype(block_key.dtype)
        for both in zip(context, blocks, strict=True)
    ]
    expected = peer.case.exact(*arrays).swapaxes(1, 2)
    made = check_attention(
        scripts, peer, [query.swapaxes(1, 2), *whole], expected, ["torch sdpa, window"]
    )
    everything = scripts.torch.ones(3, 67, dtype=scripts.torch.bool)
    free = peer.forms["torch sdpa, no mask"](*made)
    assert_near(free, scripts.ops.attend(*made, everything).double().numpy())


def check_attention(scripts, peer, arrays, expected, forms):
    made = peer.make("cpu", scripts.torch.Generator().manual_seed(0))
    assert [x.shape for x in made] == [x.shape for x in arrays]
    given = tensors(scripts.torch, arrays)
    for form in forms:
        assert_near(peer.forms[form](*given), expected)
    return given


def test_the_delta_rule_agrees_with_our_oracle(scripts, monkeypatch):
    # transformers' rules take the arguments of flash-linear-attention, and need no GPU.
    from transformers.models.qwen3_5 import modeling_qwen3_5 as published

    rules = {
        "fla recurrent": published.torch_recurrent_gated_delta_rule,
        "fla chunk": published.torch_chunk_gated_delta_rule,
    }
    monkeypatch.setattr(scripts.ops, "delta_rules", lambda: rules)
    peer = scripts.ops.delta(1, 4)
    arrays = operands_of(peer.case)
    query, key, value, gates, state = arrays[:5]
    query, key = (np.repeat(x, 3, axis=2) for x in (query, key))
    given = [query, key, value, gates[..., 0], gates[..., 1], state.swapaxes(2, 3)]
    made = peer.make("cpu", scripts.torch.Generator().manual_seed(0))
    assert [x.shape for x in made] == [x.shape for x in given]
    assert (made[3] < 0).all() and ((0 < made[4]) & (made[4] < 1)).all()
    for run in peer.forms.values():
        assert_near(run(*tensors(scripts.torch, given)), peer.case.exact(*arrays))
    assert [one.case.name for one in scripts.ops.peers(False)][-1] == (
        "gated_delta_verify chain B=1 W=8")


def test_cases_have_the_names_of_ours(scripts):
    for full in (False, True):
        ours = {case.name: case.bytes for case in catalogue.cases(full)}
        # The 35B's projections stand beside no case of ours.
        extra = {case.name for case in (
            products.added(8, 12352, 2048), products.added(8, 2048, 4096),
            products.mixed(8, 512, 2048),
        )}
        theirs = {peer.case.name: peer.case.bytes for peer in scripts.ops.peers(full)}
        assert set(theirs) - set(ours) == (extra if full else set())
        assert all(theirs[name] == ours[name] for name in set(theirs) & set(ours))


def test_what_is_printed_is_the_run(scripts, capsys, monkeypatch):
    def broken(*_):
        raise RuntimeError("no such kernel\nand more")

    small = scripts.ops.added(2, 16, 32)
    peers = [small, scripts.ops.Peer(case=small.case, make=small.make, forms={"broken": broken})]
    monkeypatch.setattr(scripts.ops, "peers", lambda full: peers)
    monkeypatch.setattr(scripts.ops, "microseconds", timed := Timed(scripts.ops.microseconds))
    monkeypatch.setattr(scripts.ops, "delta_rules", lambda: None)
    assert scripts.bench.main(["--device", "cpu"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("cpu, torch ") and lines[1].startswith("copy bandwidth ")
    for line, form in zip(lines[2:4], small.forms, strict=True):
        taken = timed.found[form]
        assert line.startswith(f"{small.case.name}, {form}: {taken:.1f} us, 0.0 MB, floor ")
        assert line.endswith(f"{small.case.bytes / taken / 1e6:.3f} TB/s")
        assert re.search(r"ratio \d+\.\d\d, ", line)
    assert lines[4] == f"{small.case.name}, broken: FAILED no such kernel"
    assert lines[5] == "gated_delta_verify: flash-linear-attention (fla) is absent, not timed"
    monkeypatch.setattr(scripts.ops, "peers", lambda full: peers[:1])
    assert scripts.bench.main(["--device", "cpu", "--only", small.case.name]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 2 + len(small.forms) + 1
    with pytest.raises(SystemExit, match="--only: expected parts of a case's name, got .'nothing'"):
        scripts.bench.main(["--device", "cpu", "--only", "nothing"])


class Timed:
    """A function that keeps what it returned, by form."""

    def __init__(self, function):
        self.function, self.found = function, {}

    def __call__(self, peer, form, *args, **options):
        self.found[form] = self.function(peer, form, *args, **options)
        return self.found[form]


def test_a_time_is_that_of_one_call(scripts, monkeypatch):
    # 2e8 bytes each: three sets, though one and a half would fill the cache.
    case = Case(name="x", bytes=2e8, make=None, forms={})
    calls = []
    peer = scripts.ops.Peer(
        case=case, forms={"f": calls.append},
        make=lambda device, generator: (scripts.torch.rand(1, generator=generator),),
    )
    monkeypatch.setattr(scripts.ops, "elapsed", lambda work, device: work() or 30.0)
    assert scripts.ops.microseconds(peer, "f", scripts.torch.device("cpu"), graph=True) == 10.0
    assert len({float(x) for x in calls}) == 3


def test_heads_are_those_of_the_catalogue():
    assert (heads.VOCABULARY, heads.PUBLIC) == (catalogue.VOCABULARY, catalogue.PUBLIC)


def test_an_absent_device_is_named(scripts, capsys, monkeypatch):
    monkeypatch.setattr(scripts.torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        scripts.bench.arguments([])
    assert "--device: expected a device of this machine, got cuda" in capsys.readouterr().err
