"""Files of any content are read, or refused in one sentence with the place of what is wrong."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from matrix import yamlfile
from matrix.errors import UsageError


def read(folder: Path, content: str | bytes, **options: object) -> yamlfile.Document:
    path = folder / "file.yaml"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return yamlfile.read(path, **options)  # type: ignore[arg-type]


def refusal(folder: Path, content: str | bytes) -> str:
    with pytest.raises(UsageError) as caught:
        read(folder, content)
    return str(caught.value).removeprefix(f"{folder / 'file.yaml'}:")


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("1e-5", 1e-5),
        ("1.0e-5", 1e-5),
        ("1.", 1.0),
        (".5", 0.5),
        ("-3", -3),
        ("+7", 7),
        ("010", 10),
        ("0x10", 16),
        ("0o10", 8),
        ("true", True),
        ("False", False),
        ("null", None),
        ("~", None),
        ("on", "on"),
        ("No", "No"),
        ("y", "y"),
        ("2027-06-30", "2027-06-30"),
        ("1:30", "1:30"),
        ("1_000", "1_000"),
        ("'1'", "1"),
        ('"null"', "null"),
        ("!!str 1", "1"),
        (".inf", float("inf")),
        ("-.inf", float("-inf")),
        ("1.0.0", "1.0.0"),
        ("=", "="),
    ],
)
def test_a_scalar_means_what_the_core_schema_of_yaml_1_2_says(tmp_path: Path, written: str, value: object) -> None:
    data = read(tmp_path, f"key: {written}\n").data
    assert data == {"key": value}
    assert type(data["key"]) is type(value)


def test_not_a_number_is_a_float(tmp_path: Path) -> None:
    value = read(tmp_path, "key: .nan\n").data["key"]
    assert value != value


def test_keys_are_text_whatever_they_look_like(tmp_path: Path) -> None:
    assert read(tmp_path, "on: 1\n8: 2\n1.50: 3\ntrue: 4\n~: 5\n").data == {
        "on": 1,
        "8": 2,
        "1.50": 3,
        "true": 4,
        "~": 5,
    }


def test_scalars_stay_as_written_where_they_are_names(tmp_path: Path) -> None:
    text = "axis: {a: [1.50, true, 0x1, x]}\nruns: [{size: 1.0, steps: 1}, {size: [2]}]\nother: 1.50\nnone: {a: ~}\n"
    document = read(tmp_path, text, as_text=(("axis",), ("runs", "*", "size"), ("none",)))
    assert document.data == {
        "axis": {"a": ["1.50", "true", "0x1", "x"]},
        "runs": [{"size": "1.0", "steps": 1}, {"size": ["2"]}],
        "other": 1.5,
        "none": {"a": None},
    }


def test_a_byte_order_mark_is_no_part_of_the_first_key(tmp_path: Path) -> None:
    assert read(tmp_path, b"\xef\xbb\xbfa: 1\n").data == {"a": 1}


def test_windows_line_ends_keep_the_line_numbers(tmp_path: Path) -> None:
    document = read(tmp_path, b"a: 1\r\nb:\r\n  c: 2\r\n")
    assert document.data == {"a": 1, "b": {"c": 2}}
    assert document.place(("b", "c")) == (3, 6)


def test_an_alias_has_the_value_of_its_anchor_and_a_place_of_its_own(tmp_path: Path) -> None:
    document = read(tmp_path, "a: &x {k: [1, 2]}\nb: *x\n")
    assert document.data == {"a": {"k": [1, 2]}, "b": {"k": [1, 2]}}
    assert document.data["a"] is not document.data["b"]
    assert document.place(("b",)) == (2, 4)
    assert document.place(("b", "k", 1)) == (1, 15)


def test_places_are_those_of_values_or_keys_or_the_nearest_above(tmp_path: Path) -> None:
    document = read(tmp_path, "top:\n  list: [a, bb]\n  more: 1\n")
    assert document.place(()) == (1, 1)
    assert document.place(("top", "list", 1)) == (2, 13)
    assert document.place(("top", "list"), key=True) == (2, 3)
    assert document.place(("top", "list", 7)) == (2, 9)
    assert document.place(("top", "missing")) == (2, 3)
    assert document.place(("top", "function-before", "list", "union", 1)) == (2, 13)


def test_an_error_is_told_with_its_place(tmp_path: Path) -> None:
    document = read(tmp_path, "a: 1\nbb: 2\n")
    assert str(document.error("odd", ("bb",))) == f"{tmp_path / 'file.yaml'}:2:5: odd"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", " the file is empty"),
        (b"# nothing but a comment\n", " the file is empty"),
        (b"---\n", " the file is empty"),
        (b"null\n", "1:1: expected keys and values, got nothing"),
        (b"- a\n- b\n", "1:1: expected keys and values, got a list"),
        (b"hello\n", "1:1: expected keys and values, got 'hello'"),
        (b"a: 1\n\nb: \xff\n", "3:4: this is no UTF-8 text: byte 0xff"),
        ("a: 1\n".encode("utf-16"), "1:1: this is no UTF-8 text: byte 0xff"),
        (b"a: 1\nb: x\x00y\n", "2:5: the control character U+0000 is not allowed"),
        (b"a: \x1b[31m\n", "1:4: the control character U+001B is not allowed"),
        (b'a: "x\\0"\n', "1:4: the control character U+0000 is not allowed"),
        (b'a: "\\x1b"\n', "1:4: the control character U+001B is not allowed"),
        (b"a: 1\n---\nb: 2\n", "2:1: the file holds several documents, expected one"),
        (b"a: 1\nb: 2\na: 3\n", "3:1: the key 'a' is there twice, first in line 1"),
        (b"x: {true: 1, 'true': 2}\n", "1:14: the key 'true' is there twice, first in line 1"),
        (b"a: !!python/object/apply:os.system [ls]\n", None),
        (b"a: !thing x\n", "1:4: the tag '!thing' is not supported, expected plain data"),
        (b"a: !!int '3'\n", "1:4: the tag 'tag:yaml.org,2002:int' is not supported, expected plain data"),
        (b"a: !!set {b}\n", "1:4: the tag 'tag:yaml.org,2002:set' is not supported, expected plain data"),
        (b"a: &x {k: 1}\nb: {<<: *x}\n", "2:5: merge keys ('<<') are not supported: write the values out"),
        (b"? [a, b]\n: c\n", "1:3: a key must be plain text"),
        (b"? {a: b}\n: c\n", "1:3: a key must be plain text"),
        (b"!!int 1: c\n", "1:1: a key must be plain text"),
        (b"a: &x b\n*x : c\n", "2:1: a key must be plain text"),
        (b"a: *x\n", "1:4: the alias '*x' stands for nothing that is complete here"),
        (b"a: &x [*x]\n", "1:8: the alias '*x' stands for nothing that is complete here"),
        (b"&x a: {b: *x}\n&y c: &z {d: *z}\n", "2:14: the alias '*z' stands for nothing that is complete here"),
        (b"a: " + b"9" * 5000 + b"\n", "1:4: this number has more than 18 digits"),
        (b"a: 0x" + b"f" * 5000 + b"\n", "1:4: this number has more than 18 digits"),
        (b"a: [1, 2\nb: 3\n", None),
        (b"a:\n\t- b\n", None),
        (b"a: b: c\n", None),
        (b"a: {b]\n", None),
        (b"%YAML 9.9\n---\na: 1\n", None),
        (b"a: 'open\n", None),
    ],
)
def test_what_is_no_plain_yaml_is_refused_with_its_place(tmp_path: Path, content: bytes, message: str | None) -> None:
    said = refusal(tmp_path, content)
    if message is None:
        assert "not valid YAML: " in said or "is not supported" in said
        assert said[0].isdigit()
    else:
        assert said == message


@pytest.mark.parametrize("opening", ["[", "{a: ", "- ", "[{a: "])
def test_nesting_is_bounded(tmp_path: Path, opening: str) -> None:
    assert "nest" in refusal(tmp_path, "a:\n " + opening * 100_000)


def test_nesting_is_accepted_up_to_the_bound_and_not_beyond(tmp_path: Path) -> None:
    levels = yamlfile.MAX_DEPTH - 2  # of lists, below the top and above the value
    read(tmp_path, f"a: {'[' * levels}1{']' * levels}\n")
    assert refusal(tmp_path, f"a: {'[' * (levels + 1)}1{']' * (levels + 1)}\n") == (
        f"1:{levels + 5}: this nests deeper than 50 levels"
    )


def test_nesting_counts_what_aliases_stand_for(tmp_path: Path) -> None:
    chain = "".join(f"k{i}: &k{i} {'[' * 40}{f'*k{i - 1}' if i else 1}{']' * 40}\n" for i in range(60))
    assert refusal(tmp_path, chain) == "2:49: this nests deeper than 50 levels"


def test_values_are_counted_with_aliases_written_out(tmp_path: Path) -> None:
    bomb = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n"
    bomb += "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 30))
    assert refusal(tmp_path, bomb).endswith("the file holds more than 20,000 values, aliases written out")
    assert "20,000 values" in refusal(tmp_path, "a: [" + "1," * 400_000 + "]")


def test_a_file_over_one_mebibyte_is_refused(tmp_path: Path) -> None:
    assert refusal(tmp_path, b"#" * ((1 << 20) + 1)) == " the file is larger than 1 MiB"
    assert read(tmp_path, b"a: 1\n#" + b"#" * ((1 << 20) - 6)).data == {"a": 1}


def test_what_is_no_readable_regular_file_is_refused_without_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "loop").symlink_to("loop")
    expected = {
        str(tmp_path / "fifo"): "this is no regular file, expected a text file",
        str(tmp_path): "this is a folder, expected a text file",
        str(tmp_path / "none.yaml"): "there is no such file",
        str(tmp_path / "fifo" / "below"): "the file cannot be read: Not a directory",
        str(tmp_path / "loop"): "the file cannot be read: Too many levels of symbolic links",
        str(tmp_path / ("x" * 300)): "the file cannot be read: File name too long",
        "/dev/zero": "this is no regular file, expected a text file",
        "a\0b": "the file cannot be read: embedded null byte",
    }
    for path, message in expected.items():
        with pytest.raises(UsageError) as caught:
            yamlfile.read(Path(path))
        assert caught.value.message == message


@pytest.mark.skipif(os.geteuid() == 0, reason="nothing is unreadable to root")
def test_a_file_without_permission_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file.yaml").write_text("a: 1\n")
    (tmp_path / "file.yaml").chmod(0)
    with pytest.raises(UsageError, match="the file cannot be read: Permission denied"):
        yamlfile.read(tmp_path / "file.yaml")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "nothing"),
        (True, "true"),
        (3, "3"),
        ("x", "'x'"),
        ("a\nb", "'a b'"),
        ([], "an empty list"),
        ([1], "a list"),
        ({}, "keys and values"),
        ("x" * 100, "'" + "x" * 57 + "...'"),
    ],
)
def test_a_value_is_shown_short_and_on_one_line(value: object, text: str) -> None:
    assert yamlfile.shown(value) == text
