"""How two sources differ, what may be wrong with them, and a port with some of its changes taken back."""

from __future__ import annotations

import itertools
import random
import shutil
import subprocess
import textwrap
from pathlib import Path

import pytest

from matrix import changes
from matrix.changes import compare, script
from matrix.errors import UsageError
from matrix.journal import Changes

WORKLOADS = Path(__file__).parents[3] / "workloads"
PORTS = sorted(path for path in WORKLOADS.glob("*/*/*.py") if path.name != "train.py")


def counts(before: str, after: str) -> tuple[int, int, int]:
    found = compare(textwrap.dedent(before), textwrap.dedent(after)).counts
    return found.added, found.deleted, found.hunks


def code(text: str) -> list[tuple[int, str]]:
    return [unit.same for unit in script.parse(text).units]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("x = f(1, 2)\n", "x = f(\n    1,\n    2,\n)\n"),
        ("x = 'a'\n", 'x = "a"  # why\n'),
        ("x = 1\n", "# coding: utf-8\n\n\nx = 1\n\n"),
        ("x = 1\ny = 2\n", "x = 1; y = 2\n"),
        ("if a:\n    b\n", "if (a): b\n"),
        ("def f():\n    return 1\n", 'def f():\n    """Doc."""\n    return 1\n'),
        ('"""Doc."""\nx = 1\n', "x = 1"),
        ("x = 1\ny = 2\n", "x = 1\r\ny = 2\r\n"),
        ("if a:\n    b\n", "if a:\n\tb\n"),
        ("x = 1\n", "\ufeffx = 1\n".lstrip("\ufeff") + "\f\n"),
        ("x = 1 + \\\n    2\n", "x = 1 + 2\n"),
        ("a = 1\n'a note'\nb = 2\n", "a = 1\nb = 2\n"),
    ],
)
def test_formatting_comments_and_docstrings_cost_nothing(before: str, after: str) -> None:
    assert counts(before, after) == (0, 0, 0)


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ("a\nb\nc\n", "a\nx\nc\n", (1, 1, 1)),
        ("a\nb\nc\n", "a\nb\nc\nd\n", (1, 0, 1)),
        ("a\nb\nc\nd\n", "x\nb\nc\n", (1, 2, 2)),
        ("print(x)\n", "if rank == 0:\n    print(x)\n", (2, 1, 1)),  # a header, and the same line deeper
        ("def f(): pass\n", "@jit\ndef f(): pass\n", (1, 0, 1)),
        ("if a:\n    b\n", "if a:\n    b\nelse:\n    c\n", (2, 0, 1)),
        ("x = '''a\nb'''\n", "x = '''a\nc'''\n", (1, 1, 1)),
        ("try:\n    a\nfinally:\n    b\n", "try:\n    a\nexcept E as e:\n    pass\nfinally:\n    b\n", (2, 0, 1)),
        (
            "match x:\n    case 1:\n        a\n",
            "match x:\n    case 1:\n        a\n    case {'k': v} if v:\n        b\n",
            (2, 0, 1),
        ),
        ("async def f():\n    await g()\n", "async def f():\n    async with h() as i:\n        await g()\n", (2, 1, 1)),
        ("", "x = 1\n", (1, 0, 1)),
    ],
)
def test_lines_and_hunks_are_counted_by_statement(before: str, after: str, expected: tuple[int, int, int]) -> None:
    assert counts(before, after) == expected


def test_a_hunk_says_which_lines_of_both_files_it_covers() -> None:
    before = '"""Doc."""\n\nimport torch\n\nx = f(\n    1,\n)\nend\n'
    after = '"""Doc."""\n\nimport os\nimport torch\n\n# why\nx = f(\n    1,\n    2,\n)\ny = 1\nend\n'
    first, second = compare(before, after).hunks
    assert (first.old, first.new) == ((2, 1), (3, 3))
    assert (second.old, second.new) == ((5, 7), (7, 11))


def test_every_kind_of_header_is_found_on_its_own_line() -> None:
    text = textwrap.dedent(
        '''
        @decorator(
            1)
        def f(a: int = 1, *,  # a note: else
              b=lambda x: 0) -> dict[str,
            int]:
            """Doc
            of two lines"""
            if (a
                ):  # else:
                pass
            elif b: x = 1; y = 2
            else  :  # else
                z = """
        else:
        """
            for i in "else:": continue
            else:
                e
            try:
                a
            except (A, B) as e: pass
            except:
                b
            else: c
            finally  :
                d
            while c: break
            match x:
                case {"a": 1, **rest} if rest: y
                case _: pass
        '''
    )
    found = [(unit.first + 1, unit.end, unit.text) for unit in script.parse(text).units]
    assert [each for each in found if not each[2].startswith(("x", "y", "pass"))] == [
        (2, 3, "@decorator(1)"),
        (4, 8, "def f(a: int=1, *, b=lambda x: 0) -> dict[str, int]:"),
        (9, 10, "if a:"),
        (12, 12, "elif b:"),
        (13, 13, "else:"),
        (14, 16, "z = '\\nelse:\\n'"),
        (17, 17, "for i in 'else:':"),
        (17, 17, "continue"),
        (18, 18, "else:"),
        (19, 19, "e"),
        (20, 20, "try:"),
        (21, 21, "a"),
        (22, 22, "except (A, B) as e:"),
        (23, 23, "except:"),
        (24, 24, "b"),
        (25, 25, "else:"),
        (25, 25, "c"),
        (26, 26, "finally:"),
        (27, 27, "d"),
        (28, 28, "while c:"),
        (28, 28, "break"),
        (29, 29, "match x:"),
        (30, 30, "case {'a': 1, **rest} if rest:"),
        (31, 31, "case _:"),
    ]


# --- taking hunks back ---


@pytest.mark.parametrize("port", PORTS, ids=lambda path: "/".join(path.parts[-3:]))
def test_shipped_ports_can_be_taken_apart(port: Path) -> None:
    comparison = changes.compare_files(port.parent / "train.py", port)
    assert changes.without(comparison, []) == port.read_text()
    everything = changes.without(comparison, {hunk.id for hunk in comparison.hunks})
    assert code(everything) == code((port.parent / "train.py").read_text())
    for hunk in comparison.hunks:
        assert script.parses(changes.without(comparison, {hunk.id}))


@pytest.mark.parametrize(
    ("before", "after", "hunks", "expected"),
    [
        # comments above a statement go with it; the rest of the port stays as it is written
        ("a\nb\n", "a  # kept\n# gone\nx = (1,\n  2)\nb\n", {1}, "a  # kept\nb\n"),
        # statements on one line
        ("a = 1; b = 2\n", "a = 1; b = 3; c = 4\n", {1}, "a = 1\nb = 2\n"),
        ("if a: b\n", "if a:\n    b\n    c\n", {1}, "if a:\n    b\n"),
        ("if a:\n    b\n    c\n", "if a: b\n", {1}, "if a:\n    b\n    c\n"),
        # different indentation: the first statement of a block decides
        ("if a:\n\tb\n\tc\nend\n", "if a:\n  x\n  c\nend\n", {1}, "if a:\n\tb\n\tc\nend\n"),
        ("def f():\n  if a:\n    b\n", "def f():\n\tc\n", {1}, "def f():\n  if a:\n    b\n"),
        # a block that loses its last statement
        ("pass\nend\n", "if a:\n    b\nend\n", {1}, "pass\nend\n"),
        # line ends, and none at the end
        ("a\nb\n", "a\r\nx\r\nend\r\nb", {1}, "a\r\nb"),
        ("a\nz", "a\r\nx\r\n", {1}, "a\r\nz"),
        # a header with a docstring needs no statement
        (
            "class A:\n    x = 1\n",
            "class A:\n    '''Doc.'''\n    y = 1\n",
            {1},
            "class A:\n    '''Doc.'''\n    x = 1\n",
        ),
        # decorators and async
        ("async def f(): ...\n", "@a\n@b\nasync def f(): ...\n", {1}, "async def f(): ...\n"),
        # a line that goes on after a backslash
        ("a = 1; \\\nb = 2\n", "a = 1; \\\nb = 3\n", {1}, "a = 1\nb = 2\n"),
    ],
)
def test_a_hunk_taken_back_leaves_the_rest_as_it_is(before: str, after: str, hunks: set[int], expected: str) -> None:
    assert changes.without(compare(before, after), hunks) == expected


def test_a_block_that_is_left_without_a_statement_does_nothing() -> None:
    comparison = compare("class A:\n    'Doc.'\nend\n", "class A:\n    x = 1\nend\n")
    assert changes.without(comparison, {1}) == "class A:\n    pass\nend\n"


@pytest.mark.parametrize("port", PORTS, ids=lambda path: "/".join(path.parts[-3:]))
def test_any_hunks_of_random_edits_can_be_taken_back(port: Path) -> None:
    """All of them give the baseline; what parses has no line that is in neither file."""
    chance = random.Random(0)
    lines = code(port.read_text())
    kept = [line for line in lines if line[1].endswith(":") or chance.random() > 0.05]
    edited = "".join(f"{'  ' * depth}{each}\n" for depth, each in kept)
    for one, two in itertools.permutations((port.read_text(), edited if script.parses(edited) else "pass\n")):
        comparison = compare(one, two)
        ids = [hunk.id for hunk in comparison.hunks]
        assert code(changes.without(comparison, ids)) == code(one)
        some = changes.without(comparison, [each for each in ids if chance.random() < 0.5])
        if script.parses(some):
            assert {line for _, line in code(some)} <= {line for _, line in code(one) + code(two)}


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("a\nb\nc\n", "a\nx\nc\n"),
        ("a\nb", "a\nc"),
        ("a\r\nb\r\n", "a\r\nc\r\n"),
        ("a\nb\n", "a\nb"),
        ("", "a\n"),
        ("x = 'ä'\n", "x = 'ö'\n"),
    ],
)
@pytest.mark.parametrize("tool", [["git", "apply"], ["patch", "-p1", "--binary", "-i"]], ids=["git", "patch"])
def test_a_patch_turns_the_baseline_into_the_port(tmp_path: Path, before: str, after: str, tool: list[str]) -> None:
    if shutil.which(tool[0]) is None:
        pytest.skip(f"no {tool[0]}")
    file = tmp_path / "my scripts" / "train.py"
    file.parent.mkdir()
    file.write_bytes(before.encode())
    (tmp_path / "a.patch").write_bytes(changes.patch(script.parse(before), after, "my scripts/train.py").encode())
    subprocess.run([*tool, "a.patch"], cwd=tmp_path, check=True, capture_output=True)
    assert file.read_bytes() == after.encode()


# --- bad input ---


def refusal(path: Path) -> str:
    with pytest.raises(UsageError) as caught:
        script.read(path)
    return str(caught.value).replace(str(path), "FILE")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"x = (\n", "FILE:1:5: this does not parse: '(' was never closed"),
        (b"x = 1\n  y = 2\n", "FILE:2:2: this does not parse: unexpected indent"),
        (b"x = '\xff'\n", "FILE:1: this is no utf-8 text; other encodings are declared (PEP 263)"),
        (b"# coding: klingon\n", "FILE:1: it declares an unknown encoding: klingon"),
        (b"x = 1\0\n", "FILE: this does not parse: source code string cannot contain null bytes"),
        (b"x = " + b"(" * 5000, None),
        (b"x = " + b"-" * 100_000 + b"1", None),
        (b"#" * (script.MAX_BYTES + 1), "FILE: larger than 1 MiB, which no script is"),
    ],
    ids=range(8),
)
def test_what_is_no_script_is_refused_with_its_place(tmp_path: Path, content: bytes, message: str | None) -> None:
    path = tmp_path / "train.py"
    path.write_bytes(content)
    found = refusal(path)
    assert found.startswith("FILE") if message is None else found == message


def test_missing_files_folders_and_notebooks_are_refused(tmp_path: Path) -> None:
    assert refusal(tmp_path / "none.py") == "FILE: cannot be read: No such file or directory"
    assert refusal(tmp_path) == "FILE: expected a Python script, this is no regular file"
    message = "FILE: this is a notebook; `jupyter nbconvert --to script` makes a script of it"
    assert refusal(tmp_path / "train.ipynb") == message


def test_declared_encodings_and_byte_order_marks_are_read(tmp_path: Path) -> None:
    one, other = tmp_path / "one.py", tmp_path / "other.py"
    one.write_bytes("# -*- coding: latin-1 -*-\nx = 'ä'\n".encode("latin-1"))
    other.write_bytes("\ufeffx = 'ä'\n".encode())
    assert changes.count(one, other) == Changes(added=0, deleted=0, hunks=0)
    assert (script.read(one).encoding, script.read(other).encoding) == ("iso-8859-1", "utf-8-sig")


def test_the_cost_of_a_port_that_does_not_parse_is_counted_in_raw_lines(tmp_path: Path) -> None:
    one, other = tmp_path / "one.py", tmp_path / "other.py"
    one.write_text("a\nb\nc\n")
    other.write_bytes(b"a\nb\nx = (\n\xff\n")
    assert changes.count(one, other) == Changes(added=2, deleted=1, hunks=1)
    assert changes.count(one, tmp_path / "none.py") == Changes(added=0, deleted=3, hunks=1)
