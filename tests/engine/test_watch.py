"""Stop sequences and stop strings at every index of a block, split across tokens and rounds.

The decoder is a toy: id i is `PIECES[i]`, some of them half a character, and the text of ids is the
UTF-8 text of their bytes joined.
"""

import itertools
import random

import pytest

from dflash_jax.engine.preview import preview
from dflash_jax.engine.publish import account
from dflash_jax.engine.request import FinishReason, Request

SMILE = "\N{WINKING FACE}".encode()
PIECES = [b"a", b"b", b"ab", b"ba", b"", b"c\n", SMILE[:2], SMILE[2:], b"aab"]
EOS = 4
A, B, AB, BA, C, HALF, REST, AAB = 0, 1, 2, 3, 5, 6, 7, 8
BLOCK = 4


def decode(ids):
    return b"".join(PIECES[i] for i in ids).decode(errors="replace")


def request(**fields):
    fields = {"max_new_tokens": 100, "eos_ids": frozenset([EOS]), "decode": decode, **fields}
    return Request(row=0, prompt=(1,), **fields)


def run(request, tokens, block):
    """Rounds of `block` licensed outputs until the request ends; every N < L must end it."""
    for start in range(0, len(tokens), block):
        if request.finish_reason is not None:
            return
        outputs = tokens[start : start + block]
        before = (list(request.tokens), request.watch, list(request.pieces))
        decision = preview(request, outputs, len(outputs))
        assert before == (request.tokens, request.watch, request.pieces)  # pure
        assert 0 < decision.committed <= len(outputs)
        assert decision.committed == len(outputs) or decision.reason is not None
        account(request, decision)


def naive(tokens, *, strings=(), sequences=(), budget=100, eos=EOS):
    """(tokens, text, reason) by looking at everything again after every token."""
    for end in range(1, len(tokens) + 1):
        seen = tuple(tokens[:end])
        text = decode(seen)
        places = [text.find(string) for string in strings if string in text]
        if seen[-1] == eos:
            return list(seen), decode(seen[:-1]), FinishReason.EOS
        if places:
            return list(seen), text[: min(places)], FinishReason.STOP
        if any(seen[-len(one) :] == one for one in sequences):
            return list(seen), text, FinishReason.STOP
        if end == budget:
            return list(seen), text, FinishReason.LENGTH
    return list(tokens), None, None


@pytest.mark.parametrize("index", range(2 * BLOCK))
@pytest.mark.parametrize("stop", ["string", "sequence", "eos", "budget"])
def test_e7_each_reason_at_every_index_ends_the_request_there(stop, index):
    tokens, fields = [A] * 9, {}
    reason = {"eos": FinishReason.EOS, "budget": FinishReason.LENGTH}.get(stop, FinishReason.STOP)
    if stop == "budget":
        fields = {"max_new_tokens": index + 1}
    else:
        tokens[index] = EOS if stop == "eos" else C
        fields = {"string": {"stop_strings": ("c",)}, "sequence": {"stop_sequences": ((C,),)}}.get(
            stop, {}
        )
    ended = request(**fields)
    run(ended, tokens, BLOCK)
    assert ended.tokens == tokens[: index + 1]
    assert ended.finish_reason is reason
    assert ended.text == decode(tokens[: index + 1]).removesuffix("c\n") + (
        "c\n" if stop == "sequence" else ""
    )


@pytest.mark.parametrize("block", range(1, 6))
def test_a_string_split_across_tokens_and_rounds_is_held_back_and_never_shown(block):
    ended = request(stop_strings=("bab",))
    run(ended, [A, B, A, A, AB, AB, A], block)  # a b a a ab ab: the string ends inside a token
    assert (ended.tokens, ended.text) == ([A, B, A, A, AB, AB], "abaaa")
    assert ended.finish_reason is FinishReason.STOP


def test_text_that_might_become_a_stop_is_shown_once_it_cannot():
    going = request(stop_strings=("bab",))
    run(going, [A, B], 1)
    assert going.text == "a"
    run(going, [A], 1)
    assert going.text == "a"  # "ba" may still become "bab"
    run(going, [A], 1)
    assert going.text == "abaa"


@pytest.mark.parametrize("block", range(1, 5))
def test_a_sequence_split_across_rounds_ends_the_request(block):
    ended = request(stop_sequences=((A, B, A), (C, C)))
    run(ended, [B, A, B, B, A, B, A, A], block)
    assert ended.tokens == [B, A, B, B, A, B, A]
    assert ended.text == decode(ended.tokens)


@pytest.mark.parametrize("block", range(1, 4))
def test_half_a_character_is_no_replacement_character_that_a_stop_could_mean(block):
    """However the rounds are cut; a whole one in the text is."""
    going = request(stop_strings=("\N{REPLACEMENT CHARACTER}",))
    run(going, [A, HALF, REST, B], block)
    assert (going.text, going.finish_reason) == ("a\N{WINKING FACE}b", None)
    run(going, [HALF, A], block)
    assert (going.text, going.finish_reason) == ("a\N{WINKING FACE}b", FinishReason.STOP)


def test_tokens_without_a_stop_are_decoded_once_a_round():
    """The decision of a round is what the device waits for."""
    calls = []

    def counting(ids):
        calls.append(ids)
        return decode(ids)

    going = request(stop_strings=("zz",), stop_sequences=((C, C),), decode=counting)
    run(going, [A, B, AB, BA] * 3, 4)
    assert going.text == decode(going.tokens) and len(calls) <= 2 * 3


def test_half_a_character_is_held_back_until_it_is_whole():
    going = request()
    run(going, [A, HALF], 1)
    assert going.text == "a"
    run(going, [REST, B], 1)
    assert going.text == "a\N{WINKING FACE}b"
    run(going, [HALF], 1)
    going.end(FinishReason.CANCELLED)
    assert going.text == "a\N{WINKING FACE}b\N{REPLACEMENT CHARACTER}"
    assert going.output().text == going.text


@pytest.mark.parametrize("eos", [EOS, B], ids=["EOS without text", "EOS with text"])
def test_every_way_to_cut_a_text_into_rounds_agrees_with_the_naive_search(eos):
    """The text of an EOS id does not count, whatever it is: here also the letter "b"."""
    rng = random.Random(2)
    ended = 0
    for _ in range(400):
        tokens = [rng.choice([A, B, AB, BA, C, HALF, REST, AAB, EOS]) for _ in range(9)]
        strings = tuple(
            "".join(rng.choice("abc") for _ in range(rng.randint(1, 4)))
            for _ in range(rng.randint(0, 2))
        )
        sequences = tuple(
            tuple(rng.choice([A, B, AB]) for _ in range(rng.randint(1, 3)))
            for _ in range(rng.randint(0, 2))
        )
        budget = rng.choice([3, 7, 100])
        expected = naive(tokens, strings=strings, sequences=sequences, budget=budget, eos=eos)
        for block in (1, 2, 3, 9):
            one = request(
                stop_strings=strings, stop_sequences=sequences, max_new_tokens=budget,
                eos_ids=frozenset([eos]),
            )
            run(one, tokens, block)
            text = one.text if one.finish_reason else None
            assert (one.tokens, text, one.finish_reason) == expected, (tokens, strings, block)
            shown = itertools.accumulate(piece.text for piece in one.pieces)
            assert all(decode(one.tokens).startswith(part) for part in shown)
        ended += expected[2] is FinishReason.STOP
    assert ended > 100


@pytest.mark.parametrize("block", range(1, 4))
def test_an_eos_id_has_no_text_and_completes_no_stop_string(block):
    ended = request(stop_strings=("ab",), eos_ids=frozenset([B]))
    run(ended, [C, A, B], block)
    assert (ended.text, ended.finish_reason) == ("c\na", FinishReason.EOS)
    assert ended.tokens == [C, A, B]


def test_a_stop_string_ahead_of_an_eos_id_comes_first_and_a_sequence_with_it_does_not():
    ended = request(stop_strings=("c",))
    run(ended, [A, C, EOS], 3)
    assert (ended.tokens, ended.finish_reason) == ([A, C], FinishReason.STOP)
    ended = request(stop_sequences=((A, EOS),))
    run(ended, [B, A, EOS], 3)
    assert (ended.tokens, ended.finish_reason) == ([B, A, EOS], FinishReason.EOS)


def test_an_eos_id_is_still_an_id_of_the_sequences_of_who_goes_on_behind_it():
    ended = request(stop_sequences=((EOS, A),))
    run(ended, [B, EOS], 2)
    on = ended.continued(1, eos_ids=frozenset())
    run(on, [A, B], 1)
    assert (on.tokens, on.finish_reason) == ([B, EOS, A], FinishReason.STOP)


def test_other_stops_hold_back_what_they_must_of_the_text_so_far():
    going = request(stop_strings=("bc",))
    run(going, [A, AB], 1)
    assert (going.text, going.watch.held) == ("aa", "b")
    on = going.continued(1, stop_strings=("aabb", "bx"), stop_sequences=((AB, A, B),))
    assert (on.text, on.watch.held) == ("", "aab")
    run(on, [B], 1)
    assert (on.text, on.finish_reason) == ("", FinishReason.STOP)
    on = going.continued(1, stop_strings=(), stop_sequences=((AB, A, B),))
    assert on.text == "aab"
    run(on, [A, B], 1)
    assert (on.text, on.finish_reason) == ("aabab", FinishReason.STOP)
    for stops in ({"stop_strings": ("ab",)}, {"stop_sequences": ((A, AB),)}):
        with pytest.raises(ValueError, match="expected none that has come already"):
            going.continued(1, **stops)


def test_without_a_decoder_ids_alone_are_watched():
    ended = request(decode=None, stop_sequences=((B, B),))
    run(ended, [A, B, B, A], 3)
    assert (ended.tokens, ended.text) == ([A, B, B], "")


@pytest.mark.parametrize("reason", [FinishReason.CANCELLED, FinishReason.FAULT])
def test_an_ended_request_keeps_nothing_and_lets_its_held_text_out(reason):
    ended = request(stop_strings=("ab",))
    run(ended, [B, A], 1)
    assert ended.text == "b"
    ended.end(reason)
    assert ended.text == "ba"
    decision = preview(ended, [A, B], 2)
    assert (decision.committed, decision.reason) == (0, reason)
    account(ended, decision)
    assert ended.tokens == [B, A]
