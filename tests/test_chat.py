"""The terminal chat: turns reuse the turns before, faults are one line, the bar counts tokens."""

import io

import pytest

from dflash_jax import chat, cli
from dflash_jax.engine.request import FinishReason
from tests.engine import scenes
from tests.engine.scenes import alone


class Contents(scenes.Letters):
    """A template that joins the contents of all messages."""

    chat_template = "joined"

    def chat(self, messages):
        return [token for message in messages for token in self.encode(message["content"])]


def talk(lines, *options, template=True):
    """An engine after a conversation of those lines, and the requests it ran."""
    engine = scenes.engine()
    engine.tokenizer = Contents() if template else scenes.Letters()
    requests, submit = [], engine.submit

    def recorded(*args, **kwargs):
        requests.append(submit(*args, **kwargs))
        return requests[-1]

    engine.submit = recorded
    arguments = cli.build_parser().parse_args(["chat", "--max-new-tokens", "9", *options])
    chat.Chat(engine, arguments).talk(lines)
    return engine, requests


@pytest.mark.parametrize("raw", [False, True])
def test_every_turn_starts_where_the_one_before_ended(capsys, raw):
    lines = ["abcabc", "hello", "xyz"]
    _, requests = talk(lines, *(["--raw"] if raw else []), template=not raw)
    ids, letters = [], scenes.Letters()
    for line, request in zip(lines, requests, strict=True):
        ids += letters.encode(line)
        assert list(request.prompt) == ids
        assert tuple(request.tokens) == alone(ids, 9).tokens
        reused = len(ids) - len(line) - 1 if line != lines[0] else 0
        assert request.statistics.reused_tokens == reused
        ids += request.tokens
    shown = capsys.readouterr()
    assert shown.out == "".join(request.text + "\n" for request in requests)
    assert shown.err.count("tokens a round") == 3


def test_new_forgets_quit_leaves_and_a_system_message_comes_first(capsys):
    _, requests = talk(["ab", "/new", "", "cd", "/quit", "ef"], "--system", "zz", "--quiet")
    letters = scenes.Letters()
    assert [list(r.prompt) for r in requests] == [letters.encode("zzab"), letters.encode("zzcd")]
    assert capsys.readouterr().err == ""


def test_a_conversation_that_becomes_too_long_is_one_line_and_can_start_over(capsys):
    _, requests = talk(["a" * 100, "b" * 50, "/new", "cd"])
    assert [len(request.prompt) for request in requests] == [100, 2]
    assert "max_context: expected at least 168" in capsys.readouterr().err


def test_an_interrupt_ends_the_answer_and_the_conversation_goes_on(monkeypatch, capsys):
    engine = scenes.engine()
    engine.tokenizer = Contents()
    arguments = cli.build_parser().parse_args(["chat", "--max-new-tokens", "40", "--quiet"])
    talking, steps, step = chat.Chat(engine, arguments), [], engine.step

    def interrupted():
        steps.append(1)
        if len(steps) == 3:
            raise KeyboardInterrupt
        return step()

    monkeypatch.setattr(engine, "step", interrupted)
    talking.talk(["abc"])
    assert engine.idle and len(steps) == 3
    talking.talk(["def"])
    first, second, _ = capsys.readouterr().out.split("\n")
    assert 0 < len(first) < len(second) == 40


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_the_bar_counts_the_tokens_read_and_is_gone_at_the_end():
    engine, screen = scenes.engine(), Terminal()
    request = engine.submit(scenes.prompts()[5], max_new_tokens=2)  # 41 tokens, chunks of 16
    bar, seen = chat.progress_bar(41, screen), []
    while not request.tokens:
        seen.append(engine.read(request))
        bar(seen[-1])
        engine.step()
    bar(engine.read(request))
    assert [*seen, engine.read(request)] == [0, 16, 32, 41]
    frames = screen.getvalue().split("\r")
    assert frames[1] == "prompt [" + "#" * 11 + "." * 19 + "] 16/41"
    assert frames[2].endswith("] 32/41") and frames[3].strip() == "" == frames[4]
    quiet = io.StringIO()
    chat.progress_bar(41, quiet)(16)
    assert quiet.getvalue() == ""


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--draft", "d"], "--draft: expected only with --target"),
        (["--target", "missing"], "target: expected a folder, got missing"),
        (["--max-new-tokens", "0"], "--max-new-tokens: expected at least 1, got 0"),
        (["--max-context", "99999999"], "max_context: expected"),
    ],
)
def test_faults_of_the_caller_are_one_line_with_status_2(capsys, options, message):
    assert cli.main(["chat", *options]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


@pytest.mark.parametrize(
    ("options", "template", "message"),
    [
        ([], False, "chat_template: expected one"),
        (["--raw", "--system", "a"], True, "--system: expected only without --raw"),
        (["--temperature", "-1"], True, "temperature: expected finite and >= 0"),
    ],
)
def test_options_that_do_not_fit_are_refused(options, template, message):
    with pytest.raises(ValueError, match=message):
        talk([], *options, template=template)


@pytest.mark.slow
def test_the_shipped_pair_talks_and_reuses_its_turns(monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", io.StringIO("def read_lines(path):\n    with open(\n"))
    assert cli.main(["chat", "--max-new-tokens", "40", "--dtype", "float32"]) == 0
    shown = capsys.readouterr()
    assert len(shown.out) > 50
    assert shown.err.count(FinishReason.LENGTH.value) == 2
    reused = int(shown.err.split("tokens, ")[-2].split(" reused")[0].split()[-1])
    assert reused > 30
