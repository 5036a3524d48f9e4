"""The peer benchmark runs the published loop on the published models, under our schedule."""

import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from dflash_jax import config
from dflash_jax.config.presets import tiny_draft, tiny_target
from dflash_jax.weights import hf_config, hf_draft_config
from scripts import bench_peer, bench_round, round_cases

pytestmark = pytest.mark.parity

SMALL = ["--device", "cpu", "--context", "20", "--rounds", "4", "--draft-tokens", "5"]


@pytest.fixture(params=list(bench_peer.TINY))
def args(request, published):
    return bench_peer.arguments(["--model", request.param, *SMALL, "--tau", "3.3"])


def test_the_published_loop_publishes_the_schedule(args):
    from scripts import torch_rounds

    pair, counts = bench_peer.build(args), round_cases.accepted_counts(args)
    assert len(set(counts)) > 1
    result = torch_rounds.measure(pair, args.context, args.seed, counts, args.draft_tokens + 1)
    assert result.published == [accepted + 1 for accepted in counts]
    assert result.tau == np.mean([accepted + 1 for accepted in counts[round_cases.WARMUP :]])
    assert list(result.steps) == ["draft", "propose", "verify", "accept"]
    assert all(taken > 0 for taken in result.steps.values())
    # Medians of parts, so only about the median of the whole; without the first calls.
    assert 0.5 * result.total < sum(result.steps.values()) < 2 * result.total


@pytest.mark.parametrize("counts", [[0, 5, 5, 0, 2, 1, 5], [5, 5, 5, 5, 5, 5, 0]])
def test_every_count_of_the_schedule_can_be_had_last(counts, published):
    from scripts import torch_rounds

    args = bench_peer.arguments(["--model", "tiny-dflash2", *SMALL])
    result = torch_rounds.measure(bench_peer.build(args), 20, 0, counts, 6)
    assert result.published == [accepted + 1 for accepted in counts]


def test_a_loop_that_accepts_otherwise_is_an_error(monkeypatch, published):
    from scripts import torch_rounds

    monkeypatch.setattr(torch_rounds, "force", lambda *_: None)
    args = bench_peer.arguments(["--model", "tiny-dflash2", *SMALL])
    with pytest.raises(RuntimeError, match="published: expected"):
        torch_rounds.measure(bench_peer.build(args), 20, 0, [3] * 6, 6)


@pytest.mark.parametrize("accepted", range(4))
def test_forced_scores_agree_with_so_many_proposals(accepted, published):
    from scripts import torch_rounds

    torch = published.torch
    proposals = torch.tensor([4, 4, 1])
    # The untouched scores would accept all three, and then take id 0.
    logits = torch.zeros(4, 6).scatter_(1, torch.tensor([[4], [4], [1], [0]]), 1.0)
    torch_rounds.force(logits, proposals, accepted)
    agrees = (logits.argmax(1)[:3] == proposals).int().cumprod(0)
    assert int(agrees.sum()) == accepted


def test_what_is_printed_is_the_run(capsys, published):
    assert bench_peer.main(["--model", "tiny-dflash2", *SMALL, "--tau", "3.3"]) == 0
    printed = capsys.readouterr().out
    total = bench_peer.figure("peer", printed, bench_peer.PEER)
    counts = round_cases.accepted_counts(SimpleNamespace(tau=3.3, draft_tokens=5, rounds=4))
    tau = np.mean(counts[round_cases.WARMUP :]) + 1
    (rate,) = [line for line in printed.splitlines() if "tokens/s" in line]
    assert f"at tau {tau:.2f}:" in rate
    assert float(rate.split()[-1]) == pytest.approx(tau / total * 1e3, rel=0.01)
    assert "blocks of 6;" in printed and "plain: blocks of 1;" in printed


@pytest.mark.parametrize("name", round_cases.PAIRS)
def test_configs_state_the_official_geometry(name, published):
    from scripts import torch_models

    target, draft = (make() for make in round_cases.PAIRS[name])
    raw = torch_models.target_config(target).to_dict()
    raw["architectures"] = [f"Qwen3_5{'Moe' if target.moe else ''}ForCausalLM"]
    assert target == hf_config.target_config(raw, public_vocab=target.public_vocab, source="here")
    raw = torch_models.draft_config(draft, target).to_dict()
    raw["architectures"] = [draft.kind.value]
    assert draft == hf_draft_config.draft_config(raw, target)


def test_weights_are_random_and_frequencies_are_not(published):
    from scripts import torch_models

    torch, target = published.torch, tiny_target(moe=True)
    model = torch_models.make_target(target, "cpu", 0)
    again, other = (torch_models.make_target(target, "cpu", seed) for seed in (0, 1))
    for name, weight in model.named_parameters():
        assert weight.dtype == torch.bfloat16 and weight.isfinite().all(), name
        assert (weight != 0).float().mean() > 0.9, name
        assert torch.equal(weight, again.get_parameter(name)), name
        assert not torch.equal(weight, other.get_parameter(name)), name
    rotary = target.rope.rotary_dim(target.head_dim)
    expected = target.rope.theta ** -(np.arange(0, rotary, 2) / rotary)
    np.testing.assert_allclose(model.model.rotary_emb.inv_freq.numpy(), expected, rtol=1e-6)


def test_a_causality_that_the_package_cannot_state_is_an_error(published):
    from scripts import torch_models

    draft = tiny_draft(config.DraftKind.DFLASH, causal=(False, True))
    with pytest.raises(ValueError, match="causal: expected flags that config.json can"):
        torch_models.draft_config(draft, tiny_target())


@pytest.mark.parametrize("argv, message", [
    (["--rounds", "0"], "--rounds: expected at least 1, got 0"),
    (["--draft-tokens", "0"], "--draft-tokens: expected at least 1"),
    (["--tau", "nan"], "--tau: expected at least 1, got nan"),
    (["--model", "tiny-dflash", "--aba"], "--aba: expected a model of bench_round"),
    (["--device", "cuda"], "--device: expected a device of this machine"),
    (["--model", "7b"], "invalid choice"),
])
def test_arguments_out_of_range_are_named(argv, message, capsys, monkeypatch, published):
    monkeypatch.setattr(published.torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        bench_peer.arguments(argv)
    assert message in capsys.readouterr().err


def test_a_package_path_without_the_package_is_an_error(tmp_path, published):
    argv = ["--model", "tiny-dflash2", *SMALL, "--package-path", str(tmp_path)]
    with pytest.raises(ValueError, match="--package-path: expected a folder that holds dflash/"):
        bench_peer.build(bench_peer.arguments(argv))


def test_three_processes_take_turns(capsys, monkeypatch):
    ours = iter([15.0, 17.0])
    turns = []

    def output_of(name, command):
        turns.append((name, command))
        return "round: 119.84 ms (spread 1.00)" if name == "peer" else (
            f"round: queued {next(ours):.2f} ms (spread 0.10)")

    monkeypatch.setattr(bench_peer, "output_of", output_of)
    argv = ["--aba", "--model", "35b-dflash", "--rounds", "32", "--random-context",
            "--package-path", "where"]
    assert bench_peer.main(argv) == 0
    assert [name for name, _ in turns] == ["ours", "peer", "ours"]
    for name, command in turns:
        assert command[2].endswith("bench_peer.py" if name == "peer" else "bench_round.py")
        assert ("--package-path" in command) == (name == "peer") and "--aba" not in command
        assert ("--random-context" in command) == (name == "ours")
        assert command[command.index("--rounds") + 1] == "32"
        # The same schedule on both sides.
        assert command[command.index("--tau") + 1] == "4.8"
    printed = capsys.readouterr().out
    assert "ours 15.00 ms, peer 119.84 ms, ours 17.00 ms a round" in printed
    assert "ratio 7.49 (peer over the mean of ours), 7.05 over the slower" in printed
    turns.clear()
    assert bench_peer.main([*argv, "--skip-ours"]) == 0
    assert [name for name, _ in turns] == ["peer"]


def test_our_figure_is_found_in_what_our_benchmark_prints(capsys):
    result = {"round": 15.314, "spread": 0.1, "blocking": 16.0, "round compile": 1.0, "peak GB": 1}
    models = SimpleNamespace(target=tiny_target())
    args = SimpleNamespace(context=4, batch=1)
    weights = {"embedding": np.zeros((2, 2))}
    bench_round._report("plain", result | {"round": 99.0}, weights, {}, models, args, 1e12)
    bench_round._report("round", result, weights, {}, models, args, 1e12)
    assert bench_peer.figure("ours", capsys.readouterr().out, bench_peer.OURS) == 15.31


def test_a_process_that_fails_or_prints_no_figure_is_an_error(capsys):
    assert bench_peer.output_of("peer", [sys.executable, "-c", "print('x')"]) == "x\n"
    assert capsys.readouterr().out == "peer| x\n"
    with pytest.raises(RuntimeError, match="peer: expected exit status 0, got 3"):
        bench_peer.output_of("peer", [sys.executable, "-c", "raise SystemExit(3)"])
    with pytest.raises(RuntimeError, match="peer: expected a line like"):
        bench_peer.figure("peer", "nothing", bench_peer.PEER)


def test_the_torch_benchmarks_leave_the_accelerator_to_torch(repository_root, published):
    # jax would take three quarters of a GPU's memory as soon as it looked at it.
    program = ("import scripts.bench_peer, scripts.torch_rounds; from scripts import torch_ops; "
               "torch_ops.peers(True); from jax._src import xla_bridge; "
               "raise SystemExit(xla_bridge.backends_are_initialized())")
    subprocess.run([sys.executable, "-c", program], cwd=repository_root, check=True)
