"""Files of a model folder: every way to be broken names the file."""

import pytest

from dflash_jax.config import ConfigError
from dflash_jax.config.folder import read_json, read_text
from dflash_jax.sampling.presets import read_generation_config


def test_an_object_is_read_as_it_is(tmp_path):
    file = tmp_path / "some.json"
    file.write_text('{"é": [1, null]}', "utf-8")
    assert read_json(file) == {"é": [1, None]}
    assert read_text(file) == '{"é": [1, null]}'


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", "expected JSON, got "),
        (b"{", "expected JSON, got "),
        (b"\xef\xbb\xbf{}", "expected JSON, got "),
        (b'{"a": "\xff"}', "expected UTF-8, got "),
        (b'{"a": %s}' % (b"[" * 100_000), "expected JSON, got one nested too deeply"),
        (b'{"a": %s}' % (b"9" * 5000), "expected JSON, got "),
        (b"[]", "expected an object, got list"),
        (b"null", "expected an object, got NoneType"),
        (b'"text"', "expected an object, got str"),
    ],
    ids=["empty", "cut", "bom", "latin", "deep", "digits", "list", "null", "text"],
)
def test_a_file_that_is_no_json_object_is_named(tmp_path, content, expected):
    for name, read in (
        ("some.json", lambda: read_json(tmp_path / "some.json")),
        ("generation_config.json", lambda: read_generation_config(tmp_path)),
    ):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ConfigError, match=f"^{name}: {expected}"):
            read()


@pytest.mark.parametrize("read", [read_json, read_text])
def test_an_absent_file_or_a_folder_is_named(tmp_path, read):
    with pytest.raises(ConfigError, match="^some.json: expected a file in "):
        read(tmp_path / "some.json")
    (tmp_path / "some.json").mkdir()
    with pytest.raises(ConfigError, match="^some.json: expected a file in "):
        read(tmp_path / "some.json")
