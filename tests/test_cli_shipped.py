"""``generate`` without a target: the shipped pair, its comparison, its marks and its picture."""

from pathlib import Path

import pytest

from dflash_jax import cli
from dflash_jax.assets import tiny_pair_path
from dflash_jax.cli import plot
from dflash_jax.cli.printing import (
    COLOURED,
    PLAIN,
    RoundRecorder,
    TextPrinter,
    comparison,
    marks_for,
)
from dflash_jax.cli.shipped import NEW_TOKENS, PROMPT, with_defaults
from dflash_jax.engine.request import FinishReason, Output, Statistics


def resolved(*options):
    def fail(message):
        raise AssertionError(message)

    return with_defaults(cli.build_parser().parse_args(["generate", *options]), fail)


def test_no_arguments_mean_the_shipped_pair_and_a_comparison():
    found = resolved()
    assert found.target == tiny_pair_path("target")
    assert found.draft == tiny_pair_path("dflash2")
    assert (found.prompt, found.raw, found.built_in) == (PROMPT, True, True)
    assert (found.max_new_tokens, found.dtype, found.compare) == (NEW_TOKENS, "float32", True)


@pytest.mark.parametrize(
    ("options", "fields"),
    [
        (("--draft", "dflash"), {"draft": tiny_pair_path("dflash"), "compare": True}),
        (("--draft", "./dflash"), {"draft": Path("dflash"), "compare": True}),
        (("--draft", "none"), {"draft": None, "compare": False}),
        (("--prompt", "import"), {"prompt": "import", "raw": True, "built_in": False}),
        (("--prompt-ids", "f"), {"prompt": None, "raw": False, "built_in": False}),
        (("--max-new-tokens", "5", "--dtype", "bfloat16"),
         {"max_new_tokens": 5, "dtype": "bfloat16"}),
        (("--quiet",), {"compare": False}),
        (("--no-compare",), {"compare": False}),
        (("--target", "t", "--draft", "dflash", "--prompt", "a", "--max-new-tokens", "5"),
         {"target": Path("t"), "draft": Path("dflash"), "raw": False, "dtype": "bfloat16",
          "compare": False}),
        (("--target", "t", "--prompt", "a", "--max-new-tokens", "5"), {"draft": None}),
    ],
)
def test_options_choose_parts_of_it(options, fields):
    found = vars(resolved(*options))
    assert {name: found[name] for name in fields} == fields


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--color", "never"), "--color: expected only with --show-accepted"),
        (("--draft", "none", "--show-accepted"), "--show-accepted: expected only with --draft"),
        (("--draft", "none", "--compare"), "--compare: expected only with --draft"),
        (("--draft", "none", "--plot", "a.svg"), "--plot: expected only with --draft"),
        (("--compare", "--quiet"), "--compare: expected without --quiet"),
        (("--draft", "absent"), "config.json"),
        (("--plot", "a.bmp"), "--plot: expected"),
    ],
)
def test_options_that_mean_nothing_are_one_line_and_status_2(capsys, options, message):
    assert cli.main(["generate", *options]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and message in err


def test_ids_cannot_be_marked(tmp_path, capsys):
    (tmp_path / "ids.json").write_text("[1]", "utf-8")
    options = ["--prompt-ids", str(tmp_path / "ids.json")]
    assert cli.main(["generate", *options, "--show-accepted"]) == 2
    assert "--show-accepted: expected only with --prompt" in capsys.readouterr().err
    assert cli.main(["generate", *options, "--raw"]) == 2
    assert "--raw: expected only with --prompt" in capsys.readouterr().err


def test_the_demo_shows_speculation_next_to_plain_decoding(capsys, tmp_path):
    options = ["--max-new-tokens", "24", "--max-context", "128", "--show-accepted"]
    assert cli.main(["generate", *options]) == 0
    out, err = capsys.readouterr()
    text = out.replace("{+", "").replace("+}", "")
    assert text == "# " + "-" * 79 + "\n\n    def __init__(self, tokens\n"
    assert out.startswith("#{+ +}--------{+---")
    assert "prompt, built in:\nclass Parser:" in err
    assert "same text: yes" in err
    assert "plain; prefill and compilation are left out" in err
    assert "tokens a round" in err


class Letters:
    """A tokenizer whose ids are characters."""

    def decode(self, ids):
        return "".join(map(chr, ids))


def test_marks_enclose_all_of_a_round_but_its_last_token(capsys):
    printer = TextPrinter(Letters(), ("<", ">"))
    for tokens in ("a", "bcd", "e", "fg"):
        printer.show(0, [ord(letter) for letter in tokens])
    printer.finish()
    assert capsys.readouterr().out == "a<bc>de<f>g\n"


def test_colour_is_for_terminals_unless_asked_for(monkeypatch):
    assert marks_for(None) == marks_for("auto") == marks_for("never") == PLAIN
    assert marks_for("always") == COLOURED
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    assert marks_for(None) == marks_for("auto") == COLOURED
    assert marks_for("never") == PLAIN


def outcome(tokens, *rounds, seconds):
    statistics = Statistics(new_tokens=len(tokens), decode_seconds=seconds)
    for proposals, accepted in rounds:
        statistics.count_round(proposals, accepted)
    return Output(tokens=tuple(tokens), finish_reason=FinishReason.LENGTH, statistics=statistics)


def test_a_comparison_states_both_speeds_and_the_first_difference():
    ours = outcome([1, 2, 3, 4, 5], (3, 2), (3, 0), seconds=0.5)
    plain = outcome([1, 2, 3, 4, 5], *[(0, 0)] * 4, seconds=1.0)
    text = comparison([ours], [plain], sampled=False)
    assert "8.0         4.0   2.00 x plain" in text
    assert "rounds                               2           4" in text
    assert "accepted by position: 50% 50% 0% of 2 rounds" in text
    last = outcome([1, 2, 3, 4, 5], (3, 2), (0, 0), (0, 0), seconds=0.5)
    assert "rounds                           1 + 2           4" in comparison(
        [last], [plain], sampled=False
    )
    assert text.endswith("same text: yes")
    other = outcome([1, 2, 3, 9, 9], *[(0, 0)] * 4, seconds=1.0)
    assert "same text: no, row 0 differs after 3 tokens" in comparison(
        [ours], [other], sampled=False
    )
    assert "two draws of the same distribution" in comparison([ours], [other], sampled=True)


def test_a_picture_needs_matplotlib_a_known_kind_and_a_folder(monkeypatch, tmp_path):
    with monkeypatch.context() as patch:
        patch.setattr("importlib.util.find_spec", lambda name: None)
        with pytest.raises(ValueError, match=r"not installed: pip install .*'dflash_jax\[plot\]'"):
            plot.check_plot(tmp_path / "a.svg")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: "there")
    with pytest.raises(ValueError, match=r"ends in \.pdf, \.png, \.svg, got .*a\.bmp"):
        plot.check_plot(tmp_path / "a.bmp")
    with pytest.raises(ValueError, match="expected a folder .*none, got none"):
        plot.check_plot(tmp_path / "none" / "a.svg")
    plot.check_plot(tmp_path / "a.SVG")


@pytest.mark.parametrize("rounds", [[(3, 2), (3, 0), (2, 2)], []])
def test_a_picture_is_written(tmp_path, rounds):
    pytest.importorskip("matplotlib", reason="pip install 'dflash_jax[plot]'")
    recorder = RoundRecorder()
    for tokens in ([1], [2, 3, 4], [5], [6, 7, 8])[: 1 + len(rounds)]:
        recorder.show(0, tokens)
    assert recorder.rounds == [3, 1, 3][: len(rounds)]
    statistics = outcome([1], *rounds, seconds=1.0).statistics
    plot.write_plot(tmp_path / "a.svg", statistics, recorder.rounds, "draft dflash2")
    assert "<svg" in (tmp_path / "a.svg").read_text("utf-8")
