"""The page as a document: self-contained, complete without its script, and closed to hostile text."""

import base64
import datetime
import hashlib
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from matrix.failures import CAUSES
from matrix.journal import Changes, HunkProof, ProofRecord
from reports.build import build
from reports.html import page as page_module
from reports.html.data import as_json
from reports.html.page import environment, section_id, web_address
from reports.merge import merge

from ..hostile import hostile_run
from ..records import DAY, START, MadeUpRun, attempt, failure, planned
from ..showcase import showcase

VOID = {"meta", "input", "br", "link", "img", "hr", "col"}


class Document(HTMLParser):
    """Elements with their attributes, ids, links, visible text; and whether every element is closed in order."""

    def __init__(self, text: str):
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.words: list[str] = []
        self.scripts: list[tuple[dict[str, str | None], str]] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag == "script":
            self.scripts.append((dict(attrs), ""))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open[-1:] == ["script"]:
            attributes, text = self.scripts[-1]
            self.scripts[-1] = attributes, text + data
        elif self.open[-1:] != ["style"]:
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join("".join(self.words).split())

    def values(self, name: str) -> list[str]:
        return [value for _, attributes in self.elements if (value := attributes.get(name)) is not None]


def written(tmp_path: Path, *runs: MadeUpRun, today: datetime.date = DAY) -> Document:
    for run in runs:
        run.write(tmp_path / "results" / run.run)
    return Document(build([tmp_path / "results"], tmp_path / "out", today).page.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> Document:
    return written(tmp_path_factory.mktemp("shown"), *showcase())


def test_the_first_screen_has_the_answer(shown: Document) -> None:
    text = shown.text
    first = text[: text.index("By backend and accelerator")]
    for part in (
        "46 of 62 executed cells run, 22 of them unchanged.",
        "22 as is", "24 ported median 7 changed lines", "16 broken", "2 refused",
        "116 unproven 10 compiled, 6 traced, 100 without evidence", "1 error", "62 of 181 cells",
        "12 June 2026, 03:03 to 14:21 UTC", "gpu-4 Intel Xeon Platinum 8480+, 32 cores",
        "4 x NVIDIA H100 80GB", "18 cells are not as expected.",
    ):  # fmt: skip
        assert part in first


def test_every_cell_has_a_section_and_every_link_leads_somewhere(shown: Document) -> None:
    ids = shown.values("id")
    assert len(ids) == len(set(ids))
    links = [link for link in shown.values("href") if not link.startswith("#q=")]
    assert {link.removeprefix("#") for link in links} <= set(ids)
    assert len([name for name in ids if re.fullmatch("c-[0-9a-f]{12}", name)]) == 181


def test_nothing_is_fetched_and_only_our_script_may_run(shown: Document) -> None:
    assert shown.values("src") == []
    assert not [tag for tag, _ in shown.elements if tag in ("link", "img", "iframe", "object", "base", "form")][1:]
    assert not [name for _, attributes in shown.elements for name in attributes if name.startswith("on")]
    assert shown.values("style") == []  # the policy would block them
    (policy,) = [a["content"] for tag, a in shown.elements if tag == "meta" and a.get("http-equiv")]
    running = [text for attributes, text in shown.scripts if attributes.get("type") != "application/json"]
    digest = base64.b64encode(hashlib.sha256(running[0].encode()).digest()).decode()
    assert len(running) == 1
    assert policy is not None
    assert policy.startswith(f"default-src 'none'; script-src 'sha256-{digest}';")


def test_a_section_has_cause_advice_place_and_command(shown: Document) -> None:
    for part in (
        CAUSES["hang"].words,
        CAUSES["hang"].advice, "torch/ddp.py:23", "Stack of rank 2", "python torch/ddp.py --steps 30",
        "rank 0 of 4 starts", "+model = DDP(model)", "all_gather_into_tensor", "SyncBatchNorm needs a GPU",
    ):  # fmt: skip
        assert part in shown.text


def test_required_changes_are_shown_by_step_by_category_and_line_by_line(shown: Document) -> None:
    text = shown.text[shown.text.index("From one device to several") :]
    for part in (
        "gpt2 devices (data)", "\u25d0 +6 \u22121 3 hunks, 4 communication torch/ddp.py on cpu, cuda",
        "\u2715 lines not known, fails torch/ddp.py on cuda",
        "torch cpu/dp2","10 cells left out: the texts of the scripts are not known.",
        "Hunk 3 model wrapping and sharding annotations not proven: run with --prove-changes",
        "Navigation chart over the measured platforms", "Cascade of gpt", "undefined", "cuda/single unproven",
    ):  # fmt: skip
        assert part in text, part


@pytest.mark.parametrize(
    ("run", "today", "words"),
    [
        (MadeUpRun(ended=False), DAY, "Partial: run 2026-06-12-cpu on buildbox has no end record"),
        (MadeUpRun(), START.date() + datetime.timedelta(days=12), "Old: These data are 12 days old"),
    ],
)
def test_a_banner_says_what_limits_trust(tmp_path: Path, run: MadeUpRun, today: datetime.date, words: str) -> None:
    cell = planned()
    document = written(tmp_path, run.add(cell, attempt(cell)), today=today)
    assert words in document.text
    assert "banner" in " ".join(document.values("class"))


def test_hostile_text_is_text(tmp_path: Path) -> None:
    document = written(tmp_path, hostile_run())
    assert not [tag for tag, _ in document.elements if tag in ("img", "iframe", "b-evil")]
    assert len([1 for attributes, _ in document.scripts if attributes.get("type") != "application/json"]) == 1
    assert "<script>window.hacked=1</script>" in document.text
    assert "\\u202e" in document.text
    raw = (tmp_path / "out" / "index.html").read_text(encoding="utf-8")
    assert not re.search("[\0-\x08\x0b-\x1f\x7f-\x9f\u200b-\u200f\u202a-\u202e\u2066-\u2069\ufeff\ud800-\udfff]", raw)
    assert len(raw) < 3_000_000  # two tracebacks of 10 MB went in


def test_json_in_the_page_cannot_end_its_element() -> None:
    text = as_json({"</script>": ["<!--", "&", "\u2028", "\ud800"]})
    assert "<" not in text
    assert "&" not in text
    assert text.isascii()
    assert json.loads(text) == {"</script>": ["<!--", "&", "\u2028", "\ud800"]}


def test_a_template_escapes_and_makes_visible_what_it_prints() -> None:
    text = environment().from_string('<p title="{{ a }}">{{ a }}</p>').render(a='"><script>\u202e\0')
    shown = "&#34;&gt;&lt;script&gt;\\u202e\\x00"
    assert text == f'<p title="{shown}">{shown}</p>'


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("https://example.org/issues/1", "https://example.org/issues/1"),
        ("javascript:alert(1)", None),
        ("data:text/html,x", None),
        ("//example.org", None),
        ("https://", None),
        ("https://exam\u202eple.org", None),
        ("http://[bad", None),
    ],
)
def test_only_web_addresses_become_links(text: str, address: str | None) -> None:
    assert web_address(text) == address


def test_the_id_of_a_section_is_the_same_in_every_report() -> None:
    cell = planned()
    (row,) = merge([MadeUpRun().add(cell).journal()], DAY).rows
    assert section_id(row) == "c-" + hashlib.sha256(b"gpt/torch/cpu/single\0buildbox").hexdigest()[:12]


def test_a_large_report_holds_its_sections_as_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_module, "INLINE_CELLS", 10)
    document = written(tmp_path, *showcase())
    data: dict[str, Any] = {str(a["id"]): json.loads(text) for a, text in document.scripts if a.get("id")}
    assert set(data) == {"index", "chunk-0", "shared"}
    assert len(data["chunk-0"]) == len(data["index"]["rows"]) == 181
    headings = [heading for heading, _ in data["chunk-0"][0]]
    assert headings[:2] == ["Verdict", "Reproduce"]
    shared = [block for section in data["chunk-0"] for _, blocks in section for block in blocks if block[0] == "shared"]
    assert max(number for _, number in shared) == len(data["shared"]) - 1


def test_a_failure_without_anything_but_its_cause_has_a_section(tmp_path: Path) -> None:
    cell = planned()
    bare = failure("hang", "").model_copy(update={"frame": None, "excerpt": [], "traceback": None, "signature": ""})
    document = written(tmp_path, MadeUpRun().add(cell, attempt(cell, "fail", failure=bare, environment={}, devices={})))
    assert f"What failed hang: {CAUSES['hang'].words}" in document.text


def test_the_proof_of_a_port_says_which_hunks_are_needed(tmp_path: Path) -> None:
    cell = planned(layout="dp2")
    changes = Changes(added=6, deleted=1, hunks=2)
    idle = attempt(cell, "fail", failure=failure("idle-devices", "1 of 2 devices did work"))
    run = MadeUpRun().add(cell, idle, attempt(cell, role="port", changes=changes))
    hunks = [
        HunkProof(id=1, old=(5, 4), new=(5, 6), added=2, deleted=0, categories={"import": 2}, verdict="required",
                  why="NameError: name 'dist' is not defined"),
        HunkProof(id=2, old=(20, 20), new=(24, 24), added=1, deleted=1, verdict="idle", why="passes without it"),
    ]  # fmt: skip
    run.proofs.append(
        ProofRecord(run=run.run, machine=run.machine, cell=cell.cell, key="k", source="torch/ddp.py",
                    baseline="torch/train.py", changes=changes, hunks=hunks, complete=True,
                    minimal_changes=Changes(added=5, deleted=0, hunks=1))
    )  # fmt: skip
    document = written(tmp_path, run)
    assert (
        "Tried without each of its hunks: 1 required, 1 idle. The smallest port that passes: +5 \u22120."
        in document.text
    )
    line = ["1", "5 to 6", "+2 \u22120", "import 2", "required", "NameError: name 'dist' is not defined"]
    begin = document.words.index("5 to 6") - 1
    assert document.words[begin : begin + 6] == line
