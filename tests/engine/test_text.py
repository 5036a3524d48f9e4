"""Tokenizer folders, chat templates and streaming, on a byte-level tokenizer made here."""

import json

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from dflash_jax.engine.text import TextStream, TextTokenizer, eos_ids

TEMPLATE = (
    "{% for message in messages %}\n"
    "<s>{{ message.role }}:{{ message.content }}{{ eos_token }}\n"
    "{% endfor %}\n"
    "{% if add_generation_prompt %}<s>assistant:{% endif %}"
)


@pytest.fixture
def folder(tmp_path):
    """A folder with one token a byte (ids 0..255 in alphabet order) and two special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {character: index for index, character in enumerate(alphabet)}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    settings = {"eos_token": {"content": "</s>"}, "chat_template": TEMPLATE}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings), "utf-8")
    return tmp_path


def test_text_survives_encode_and_decode(folder):
    tokenizer = TextTokenizer.load(folder)
    assert tokenizer.vocab_size == 258
    text = "Grüße, 世界 🙂\n"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert len(tokenizer.encode(text)) == len(text.encode())


def test_a_folder_without_a_tokenizer_is_refused(tmp_path):
    with pytest.raises(ValueError, match="tokenizer: expected .*tokenizer.json, got no such file"):
        TextTokenizer.load(tmp_path)


def test_stream_pieces_join_to_the_text_for_every_split(folder):
    tokenizer = TextTokenizer.load(folder)
    text = "aé世🙂b"
    ids = tokenizer.encode(text)
    for size in range(1, len(ids) + 1):
        stream = TextStream(tokenizer)
        pieces = [stream.push(ids[start : start + size]) for start in range(0, len(ids), size)]
        pieces.append(stream.finish())
        assert "".join(pieces) == text
        assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces)


def test_stream_holds_a_character_back_until_its_last_byte(folder):
    tokenizer = TextTokenizer.load(folder)
    stream = TextStream(tokenizer)
    pieces = [stream.push([token]) for token in tokenizer.encode("é🙂")]
    assert pieces == ["", "é", "", "", "", "🙂"]


def test_stream_shows_bytes_that_never_became_a_character_at_the_end(folder):
    tokenizer = TextTokenizer.load(folder)
    first_byte = tokenizer.encode("é")[0]
    stream = TextStream(tokenizer)
    assert stream.push([*tokenizer.encode("a"), first_byte]) == ""
    assert stream.finish() == "a\N{REPLACEMENT CHARACTER}"
    assert stream.finish() == ""


def test_special_tokens_are_not_shown(folder):
    tokenizer = TextTokenizer.load(folder)
    ids = tokenizer.encode("a</s>")
    assert len(ids) == 2
    stream = TextStream(tokenizer)
    assert [stream.push(ids[:1]), stream.push(ids[1:]), stream.finish()] == ["a", "", ""]


def test_chat_renders_the_template_and_opens_the_answer(folder):
    tokenizer = TextTokenizer.load(folder)
    ids = tokenizer.chat([{"role": "user", "content": "hi"}])
    expected = tokenizer.encode("<s>user:hi</s>\n<s>assistant:")
    assert ids == expected


def test_a_template_file_wins_over_the_settings(folder):
    (folder / "chat_template.jinja").write_text("{{ messages[0].content | tojson }}", "utf-8")
    tokenizer = TextTokenizer.load(folder)
    assert tokenizer.decode(tokenizer.chat([{"role": "user", "content": "ä"}])) == '"ä"'


def test_the_default_of_several_templates_is_used(folder):
    templates = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": templates}), "utf-8")
    assert TextTokenizer.load(folder).chat_template == "d"


def test_template_faults_are_value_errors(folder):
    message = [{"role": "user", "content": "hi"}]
    for source, expected in (
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{% for %}", "chat_template"),
        ("{{ messages.append(1) }}", "chat_template"),
        ("{{ ''.__class__.__mro__ }}", "chat_template"),
    ):
        (folder / "chat_template.jinja").write_text(source, "utf-8")
        with pytest.raises(ValueError, match=expected):
            TextTokenizer.load(folder).chat(message)


@pytest.mark.parametrize(
    "source",
    [
        "{{ 1 / 0 }}",
        "{{ messages + 1 }}",
        "{{ messages | tojson(depth=1) }}",
        "{{ range(10 ** 30) }}",
        "{{ messages[0].content.nothing() }}",
        "{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}",
        "{{ strftime_now(5) }}",
    ],
)
def test_a_template_that_fails_in_any_way_is_a_value_error(folder, source):
    (folder / "chat_template.jinja").write_text(source, "utf-8")
    tokenizer = TextTokenizer.load(folder)
    with pytest.raises(ValueError, match="^chat_template: expected one that renders, got "):
        tokenizer.chat([{"role": "user", "content": "hi"}])


@pytest.mark.parametrize("content", ["", "{", "{}", "[]", '{"model": {}}', '{"a":' * 5000])
def test_a_file_that_is_no_tokenizer_is_named(folder, content):
    (folder / "tokenizer.json").write_text(content, "utf-8")
    with pytest.raises(ValueError, match=r"^tokenizer\.json: expected a tokenizer, got "):
        TextTokenizer.load(folder)


def test_a_text_the_tokenizer_has_no_ids_for_is_a_value_error(folder):
    tokenizer = tokenizers.Tokenizer(models.WordLevel({"a": 0}, unk_token="absent"))
    tokenizer.save(str(folder / "tokenizer.json"))
    with pytest.raises(ValueError, match=r"^tokenizer\.json: expected ids for every prompt"):
        TextTokenizer.load(folder).encode("b")


@pytest.mark.parametrize("field", ["chat_template", "eos_token", "bos_token"])
@pytest.mark.parametrize("value", [5, True, {}, [{}], ["default"], {"content": 5}])
def test_a_setting_of_another_type_names_file_and_field(folder, field, value):
    (folder / "tokenizer_config.json").write_text(json.dumps({field: value}), "utf-8")
    with pytest.raises(ValueError, match=rf"^tokenizer_config\.json: {field}: expected "):
        TextTokenizer.load(folder)


@pytest.mark.parametrize("file", ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"])
def test_a_file_that_is_not_utf8_is_named(folder, file):
    (folder / file).write_bytes(b'{"a": "\xff"}')
    with pytest.raises(ValueError, match=rf"^{file}: expected UTF-8, got "):
        TextTokenizer.load(folder)


def test_half_a_surrogate_pair_in_a_prompt_is_named(folder):
    tokenizer = TextTokenizer.load(folder)
    expected = r"^prompt: expected text that UTF-8 can hold, got '\\ud83d' at character 2$"
    with pytest.raises(ValueError, match=expected):
        tokenizer.encode("ab\ud83d")
    with pytest.raises(ValueError, match="^prompt: "):
        tokenizer.chat([{"role": "user", "content": "ab\ud83d"}])


def test_missing_files_are_value_errors(tmp_path, folder):
    with pytest.raises(ValueError, match="target: expected a folder, got .*nowhere"):
        TextTokenizer.load(tmp_path / "nowhere")
    (folder / "tokenizer_config.json").write_text("{}", "utf-8")
    with pytest.raises(ValueError, match="chat_template: expected one"):
        TextTokenizer.load(folder).chat([])
    (folder / "tokenizer_config.json").write_text("{", "utf-8")
    with pytest.raises(ValueError, match=r"tokenizer_config\.json: expected JSON"):
        TextTokenizer.load(folder)


def test_eos_ids_come_from_the_first_file_that_names_them(tmp_path):
    assert eos_ids(tmp_path) == frozenset()
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"text_config": {"eos_token_id": 4}}), "utf-8")
    assert eos_ids(tmp_path) == {4}
    config.write_text(json.dumps({"eos_token_id": 3, "text_config": {"eos_token_id": 4}}), "utf-8")
    assert eos_ids(tmp_path) == {3}
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 2]}), "utf-8")
    assert eos_ids(tmp_path) == {1, 2}


@pytest.mark.parametrize("value", ["x", [None], -1, [1, -1], 1.5, True, [[1]], {"id": 1}, 2**31])
@pytest.mark.parametrize("nested", [False, True])
def test_eos_ids_that_are_no_ids_name_file_and_field(tmp_path, value, nested):
    content = {"eos_token_id": value}
    file = "config.json" if nested else "generation_config.json"
    field = "text_config.eos_token_id" if nested else "eos_token_id"
    (tmp_path / file).write_text(json.dumps({"text_config": content} if nested else content))
    with pytest.raises(ValueError, match=rf"^{file}: {field}: expected an id in "):
        eos_ids(tmp_path)


def test_eos_ids_are_rows_of_the_vocabulary(tmp_path):
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [0, 256]}')
    assert eos_ids(tmp_path, vocab_rows=257) == {0, 256}
    with pytest.raises(ValueError, match=r"^generation_config\.json: eos_token_id: .*\[0, 256\)"):
        eos_ids(tmp_path, vocab_rows=256)


@pytest.mark.parametrize("file", ["generation_config.json", "config.json"])
def test_eos_files_that_are_no_objects_are_named(tmp_path, file):
    (tmp_path / file).write_text("[]")
    with pytest.raises(ValueError, match=rf"^{file}: expected an object, got list$"):
        eos_ids(tmp_path)
    (tmp_path / file).unlink()
    (tmp_path / "config.json").write_text('{"text_config": 5}')
    with pytest.raises(ValueError, match=r"^config\.json: text_config: expected an object, got 5$"):
        eos_ids(tmp_path)
