"""The page of a run: complete, self-contained, and clear about what is missing."""

import json
from html.parser import HTMLParser
from pathlib import Path

import pytest

from tools.report import main, page, points, read_run, short


def make_run(folder: Path, *rows: dict[str, object], tail: str = "") -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + tail)
    return folder


def row(step: int, **values: object) -> dict[str, object]:
    return {"training/global_step": step, "reward/mean": 0.5, **values}


class Balanced(HTMLParser):
    """Every tag that opens is closed, and nothing is fetched."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag not in ("script", "link")
        assert all(name != "href" and (name != "src" or str(value).startswith("data:")) for name, value in attrs)
        if tag not in ("meta", "img"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        pass


def test_a_broken_off_resumed_run_with_holes_and_a_timeline(tmp_path: Path) -> None:
    tokens = {"perf/total_num_tokens": 300, "branch/shared_tokens": 200}
    rows = [row(1, **tokens), row(2, **{"reward/mean": 9.0}), row(2, **{"reward/mean": None}), row(3)]
    run = make_run(tmp_path / "a<b", *rows, tail='{"training/gl')
    (run / "config.yaml").write_text("name: <script>\n")
    (run / "timeline").mkdir()
    events = [{"ph": "M", "tid": rank, "args": {"name": f"dp {rank}"}} for rank in (0, 1)]
    events += [
        {"ph": "X", "tid": rank, "cat": "tail", "name": "T<0>", "ts": 0, "dur": 1e6 * (1 + 2 * rank)} for rank in (0, 1)
    ]
    (run / "timeline/step_1.json").write_text(json.dumps({"traceEvents": events}))
    assert points(read_run(run), "reward/mean") == [(1, 0.5), (3, 0.5)]
    text = page(run)
    parser = Balanced()
    parser.feed(text)
    assert parser.open == []
    assert "x3.00 fewer" in text
    assert "<tr><th>tail</th><td>2.000</td><td>3.000</td><td>1.50</td><td>dp 1</td></tr>" in text
    assert "&lt;script&gt;" in text and "a&lt;b" in text and "T&lt;0&gt;" in text


def test_one_step_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path, row(1))
    assert main([str(run)]) == 0
    assert capsys.readouterr().out.strip() == str(run / "report.html")
    text = (run / "report.html").read_text()
    assert "tracking.profile_steps" in text and "no config.yaml" in text and 'class="dot"' in text


@pytest.mark.parametrize(
    ("content", "words"),
    [(None, "no metrics.jsonl"), ("", "no whole row"), ("[1]\n", "not a row"), ("{\n", "not a row")],
)
def test_what_is_no_run_is_refused(
    content: str | None, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if content is not None:
        (tmp_path / "metrics.jsonl").write_text(content)
    assert main([str(tmp_path)]) == 1
    assert words in capsys.readouterr().err
    assert not (tmp_path / "report.html").exists()


def test_a_broken_timeline_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path, row(1))
    (run / "timeline").mkdir()
    (run / "timeline/step_1.json").write_text("{}")
    assert main([str(run)]) == 1
    assert "step_1.json: not a timeline" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"), (-0.0765, "-0.0765"), (9.23e-07, "9.2e-07"), (999.0, "999"), (1365.5, "1,366"), (-1234.0, "-1,234"),
        (11097.0, "11.1k"), (123456.0, "123k"), (63544320.0, "63.5M"), (8.16e9, "8.16G"), (1.5e15, "1.5P"),
    ],
)  # fmt: skip
def test_labels_are_short(value: float, text: str) -> None:
    assert short(value) == text
