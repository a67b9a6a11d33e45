"""What is shown of a text: everything, and nothing invisible."""

import pytest

from reports.text import clipped, count, listing, one_line, visible


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain text", "plain text"),
        ("naïve 東京 ✓", "naïve 東京 ✓"),
        ("tab\tand\nnewline", "tab\tand\nnewline"),
        ("null\0byte", "null\\x00byte"),
        ("\x1b[31mred\x1b[0m", "red"),
        ("\x1b]0;title\x07", "\\x1b]0;title\\x07"),
        ("user\u202egpj.exe", "user\\u202egpj.exe"),
        ("\u2066isolated\u2069", "\\u2066isolated\\u2069"),
        ("zero\u200bwidth\ufeff", "zero\\u200bwidth\\ufeff"),
        ("lone \ud800 surrogate", "lone \\ud800 surrogate"),
        ("line\u2028separator", "line\\u2028separator"),
        ("\U000e0041 tag", "\\U000e0041 tag"),
        ("10 %\r100 %\r\n", "10 %\n100 %\n"),
    ],
)
def test_controls_and_invisible_characters_become_escapes(text: str, shown: str) -> None:
    assert visible(text) == shown


def test_making_visible_twice_is_the_same_as_once() -> None:
    text = "".join(map(chr, range(0x3000))) + "\ud800\ufffe\U000e0001"
    assert visible(visible(text)) == visible(text)


def test_a_long_text_loses_its_middle_and_says_how_much() -> None:
    assert clipped("a" * 25 + "b" * 1000 + "c" * 75, 100) == "a" * 25 + "\n… 1,000 characters left out …\n" + "c" * 75


def test_one_line_joins_lines_and_ends_in_an_ellipsis_where_cut() -> None:
    assert one_line("first\n  second\tthird") == "first second third"
    assert one_line("x" * 50, 10) == "x" * 9 + "…"


def test_a_message_of_ten_megabytes_is_cut_without_being_read_whole() -> None:
    assert one_line("y" * 10_000_000, 20) == "y" * 19 + "…"


def test_lists_and_counts_read_as_a_person_writes_them() -> None:
    assert listing(["a"]) == "a"
    assert listing(["a", "b", "c"]) == "a, b and c"
    assert count(1, "cell") == "1 cell"
    assert count(1200, "cell") == "1,200 cells"
