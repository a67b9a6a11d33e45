"""summary.md: harmless Markdown of bounded size."""

import datetime

from matrix.failures import CAUSES
from matrix.journal import Changes
from reports.markdown import LIMIT, code, plain, summary
from reports.merge import merge
from reports.overview import banners

from .records import DAY, MadeUpRun, attempt, failure, planned, processes
from .showcase import showcase


def text_of(*runs: MadeUpRun, today: datetime.date = DAY) -> str:
    evidence = merge([run.journal() for run in runs], today)
    return summary(evidence, banners(evidence, today))


def test_the_summary_begins_with_the_answer_and_has_every_part() -> None:
    single, dp2 = planned(layout="single"), planned(layout="dp2")
    run = MadeUpRun()
    run.add(single, attempt(single), *processes(single, [41_300.0, 41_000.0, 41_500.0]))
    run.add(dp2, attempt(dp2, "fail", failure=failure("hang", "no progress for 60 s")))
    assert text_of(run) == (
        "## 1 of 2 executed cells runs, unchanged.\n"
        "\n"
        "1 broken. **1 cell is not as expected.**\n"
        "\n"
        "2 of 2 cells executed · definition `cpu` · on `buildbox` · portmatrix 0.1.0\n"
        "\n"
        "### By backend and accelerator\n"
        "\n"
        "| backend | accelerator | ● as is | ◐ ported | ✕ broken | ⊘ refused | ○ unproven | ! error |\n"
        "|---|---|---|---|---|---|---|---|\n"
        "| `torch` | `cpu` | 1 |  | 1 |  |  |  |\n"
        "\n"
        "### Not as expected\n"
        "\n"
        "| cell | verdict | why |\n"
        "|---|---|---|\n"
        "| `gpt/torch/cpu/dp2` | ✕ broken `hang` | no progress for 60 s |\n"
        "\n"
        "### Matrix\n"
        "\n"
        "|  | `torch`<br>`cpu`<br>`single` | `torch`<br>`cpu`<br>`dp2` |\n"
        "|---|---|---|\n"
        "| `gpt` | ● | ✕ hang |\n"
        "\n"
        "### Failures by signature\n"
        "\n"
        "| cells | cause | message | where | for example |\n"
        "|---|---|---|---|---|\n"
        f"| 1 | `hang` {plain(CAUSES['hang'].words, 160)} | "
        "`no progress for 60 s` | `torch/train.py:18` | `gpt/torch/cpu/dp2` |\n"
        "\n"
        "### Throughput\n"
        "\n"
        "| cell | throughput | processes | step | start-up | peak memory |\n"
        "|---|---|---|---|---|---|\n"
        "| `gpt/torch/cpu/single` | 41.3 k tokens/s (41.0 k to 41.5 k) | 3 | 124 ms | 3.10 s | 734 MiB |\n"
        "\n"
        "<sub>● as is: the baseline script passed, unchanged · ◐ ported: the baseline failed, a port of it passed · "
        "✕ broken: it was executed, and everything failed · ⊘ refused: not executed; the target's compiler, or a "
        "trace, refuses it · ○ unproven: not executed here, or with nothing to hold the result against · ! error: the "
        "tool itself failed; says nothing about the script</sub>\n"
    )


def test_markup_html_mentions_and_references_are_text() -> None:
    shown = plain("<img src=x onerror=alert(1)> @team #12 [a](http://x) `b` *c* | d\u202e")
    assert shown == (
        "&lt;img src=x onerror=alert(1)&gt; &#64;team &#35;12 \\[a\\](http&#58;//x) \\`b\\` \\*c\\* &#124; d\\\\u202e"
    )


def test_a_code_span_holds_backticks_and_bars() -> None:
    assert code("a|b") == "`a\\|b`"
    assert code("a`b") == "``a`b``"
    assert code("``") == "``` `` ```"
    assert code("line\nbreak") == "`line break`"


def test_a_hostile_name_can_neither_end_its_table_nor_begin_html() -> None:
    cell = planned("x` | <script>\n\n# y", layout="single")
    run = MadeUpRun(machine="</table>").add(cell, attempt(cell, "error", reason="<!-- |\n\n> quote"))
    lines = [line for line in text_of(run).splitlines() if "script" in line and line.startswith("|")]
    assert lines
    assert all(line.startswith("| ") and line.endswith(" |") for line in lines)
    assert "\n# y" not in text_of(run)
    assert "&lt;!--" in text_of(run)


def test_a_large_report_stays_below_the_limit_and_says_what_it_left_out() -> None:
    run = MadeUpRun()
    for number in range(2_000):
        cell = planned(f"workload-with-a-rather-long-name-{number}", layout="single")
        run.add(cell, attempt(cell, "fail", failure=failure("hang", f"message {number} " + "x" * 150)))
    text = text_of(run)
    assert len(text) <= LIMIT
    assert "cells left out here; all are in `index.html`" in text
    assert "workloads left out here" in text
    assert "groups left out here" in text


def test_more_columns_than_a_comment_can_hold_leave_the_matrix_to_the_page() -> None:
    run = MadeUpRun()
    for number in range(1_500):
        cell = planned(layout=f"layout-{number}")
        run.add(cell, attempt(cell))
    text = text_of(run)
    assert len(text) <= LIMIT
    assert "_Matrix: 1 workload, too large to show here; all are in `index.html`._" in text


def test_caveats_stand_before_the_numbers() -> None:
    cell = planned()
    text = text_of(MadeUpRun(ended=False).add(cell, attempt(cell)), today=DAY + datetime.timedelta(days=30))
    assert text.index("**Old: These data are 30 days old") < text.index("**Partial: run") < text.index("### By backend")


def test_several_machines_are_named_beside_their_cells() -> None:
    text = text_of(*showcase())
    assert "`gpt/jax/cuda/single` on `gpu-4`" in text
    assert "lines)" in text
    assert "not comparable" in text
    assert len(text) < LIMIT


def test_lines_that_had_to_change_stand_beside_the_ported_cells() -> None:
    cell = planned(layout="dp2")
    idle = attempt(cell, "fail", failure=failure("idle-devices", "1 of 2 devices did work"))
    port = attempt(cell, role="port", changes=Changes(added=6, deleted=1, hunks=3))
    text = text_of(MadeUpRun().add(cell, idle, port))
    assert "| `torch` | `cpu` |  | 1 (7 lines) |  |  |  |  |" in text
    assert "| `gpt` | ◐ +6 \u22121 |" in text
