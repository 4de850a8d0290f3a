"""Files of others are read within bounds, and what is wrong with them is said."""

import os

import pytest

from zjax.files import parse_json, read_text


def test_a_file_is_read_up_to_its_bound(tmp_path):
    path = tmp_path / "a"
    path.write_text("é" * 4)
    assert read_text(path, 8) == "éééé"
    with pytest.raises(ValueError, match="it has more than 7 bytes"):
        read_text(path, 7)


def test_what_is_no_text_is_said(tmp_path):
    (tmp_path / "a").write_bytes(b"\xff")
    with pytest.raises(ValueError, match="it is not UTF-8 text"):
        read_text(tmp_path / "a")


def test_pipes_devices_and_folders_are_not_read(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", "/dev/zero", tmp_path):
        with pytest.raises(OSError, match="it is not a regular file"):
            read_text(path)


@pytest.mark.parametrize("text", ["[" * 10**6, '{"a":' * 10**6, "{", "", "9" * 5000])
def test_json_that_cannot_be_read_is_a_value_error(text):
    with pytest.raises(ValueError):
        parse_json(text)
