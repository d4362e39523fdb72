from __future__ import annotations

from pathlib import Path

import pytest
import wandb

from megatron_branch.tracking.config import TrackingConfig
from megatron_branch.tracking.tracker import make_tracker
from megatron_branch.tracking.wandb_sink import WandbSink
from tests.wandb_file import history_rows, run_records


@pytest.fixture(autouse=True)
def _no_account(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No credentials and no mode from the machine that runs the tests."""
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_IDENTITY_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    wandb.teardown()


def test_offline_run_holds_one_row_per_step_on_our_axis(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    config = TrackingConfig(run_dir=tmp_path, wandb="offline", project="p", name="n")
    with make_tracker(config, writer=True, steps=3, run_config={"seed": 7}) as tracker:
        for step in (1, 2, 3):
            with tracker.progress(step, 5) as advance:
                for _ in range(5):
                    advance()
            tracker.log(step, {"actor/pg_loss": 0.5 * step, "perf/time_per_step": 1.0, "timing_s/checkpoint": 2.0})

    rows = history_rows(tmp_path)
    assert [row["training/global_step"] for row in rows] == [1, 2, 3]
    assert [row["_step"] for row in rows] == [1, 2, 3]
    assert [row["actor/pg_loss"] for row in rows] == [0.5, 1.0, 1.5]
    records = list(run_records(tmp_path))
    (run,) = [record.run for record in records if record.WhichOneof("record_type") == "run"][:1]
    assert (run.run_id, run.project, run.display_name) == (tracker.wandb_id, "p", "n")
    metrics = [record.metric for record in records if record.WhichOneof("record_type") == "metric"]
    assert any(metric.glob_name == "*" and metric.step_metric == "training/global_step" for metric in metrics)
    assert "WARNING" not in "".join(capfd.readouterr())


def test_ranks_that_do_not_write_leave_nothing(tmp_path: Path) -> None:
    config = TrackingConfig(run_dir=tmp_path / "run", wandb="offline")
    with make_tracker(config, writer=False, steps=1, run_config={}) as tracker:
        tracker.log(1, {"actor/pg_loss": 1.0})
        assert tracker.wandb_id is None
    assert not (tmp_path / "run").exists()


def test_resumed_offline_run_keeps_its_id_and_goes_on_after_the_saved_step(tmp_path: Path) -> None:
    for folder, first_step, run_id in (("a", 1, None), ("b", 3, "kept-id")):
        config = TrackingConfig(run_dir=tmp_path / folder, wandb="offline")
        with make_tracker(
            config, writer=True, steps=4, run_config={}, first_step=first_step, wandb_id=run_id
        ) as tracker:
            tracker.log(first_step, {"perf/time_per_step": 1.0})
    assert tracker.wandb_id == "kept-id"
    assert [row["_step"] for row in history_rows(tmp_path / "b")] == [3]
    assert list((tmp_path / "b" / "wandb").glob("offline-run-*-kept-id"))


@pytest.mark.parametrize("mode", ["offline", "disabled"])
def test_environment_turns_online_off(mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", mode)
    wandb.teardown()
    sink = WandbSink(TrackingConfig(run_dir=tmp_path, wandb="online", wandb_required=True), run_config={})
    sink.log(1, {"actor/pg_loss": 1.0})
    sink.close()
    assert len(list(tmp_path.glob("wandb/offline-run-*"))) == (mode == "offline")


def test_configured_offline_stays_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "online")
    wandb.teardown()
    WandbSink(TrackingConfig(run_dir=tmp_path, wandb="offline"), run_config={}).close()
    assert len(list(tmp_path.glob("wandb/offline-run-*"))) == 1


def _no_credentials(**_: object) -> bool:
    return False


def _unreachable(**_: object) -> bool:
    raise wandb.errors.AuthenticationError("Failed to authenticate with http://127.0.0.1:9")


@pytest.mark.parametrize("login", [_no_credentials, _unreachable])
def test_unreachable_is_one_warning_and_an_offline_run(
    login: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wandb, "login", login)
    with pytest.warns(UserWarning, match="recording offline") as warned:
        sink = WandbSink(TrackingConfig(run_dir=tmp_path, wandb="online"), run_config={})
    sink.log(1, {"actor/pg_loss": 1.0})
    sink.close()
    assert len([warning for warning in warned if "W&B" in str(warning.message)]) == 1
    assert len(history_rows(tmp_path)) == 1


def test_unreachable_stops_a_run_that_requires_it(tmp_path: Path) -> None:
    config = TrackingConfig(run_dir=tmp_path, wandb="online", wandb_required=True)
    with pytest.raises(ValueError, match=r"tracking\.wandb = online.*WANDB_API_KEY.*wandb_required=false"):
        WandbSink(config, run_config={})
    assert not list(tmp_path.glob("wandb/*run-*"))


def test_failed_run_is_marked(tmp_path: Path) -> None:
    config = TrackingConfig(run_dir=tmp_path, wandb="offline")
    with pytest.raises(ZeroDivisionError), make_tracker(config, writer=True, steps=1, run_config={}):
        raise ZeroDivisionError
    assert [
        record.exit.exit_code for record in run_records(tmp_path) if record.WhichOneof("record_type") == "exit"
    ] == [1]
