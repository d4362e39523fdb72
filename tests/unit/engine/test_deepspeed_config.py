"""A DeepSpeed file is passed through; what cannot hold is refused by name."""

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_branch.config import Config, make_config
from megatron_branch.engine.deepspeed_config import engine_settings, with_deepspeed_file


def config(**sections: Any) -> Config:
    return make_config({"model": {"path": "m", "dtype": "float32"}, "data": {"rollouts": "r"}, **sections})


def file(folder: Path, content: Any) -> Path:
    path = folder / "ds.json"
    path.write_text(json.dumps(content))
    return path


REFUSED = {
    "accumulation": ({"gradient_accumulation_steps": 4}, "gradient_accumulation_steps = 4"),
    "micro batch": ({"train_micro_batch_size_per_gpu": 2}, "train_micro_batch_size_per_gpu = 2"),
    "batch": ({"train_batch_size": 64}, "train_batch_size = 64"),
    "own wandb": ({"wandb": {"enabled": True}}, "wandb"),
    "pipeline": ({"pipeline": {"stages": 2}}, "parallel.pp"),
    "optimizer": ({"optimizer": {"type": "Adam"}}, "optimizer.name"),
    "fp16": ({"fp16": {"enabled": True}}, "model.dtype"),
    "bf16 against float32": ({"bf16": {"enabled": True}}, "model.dtype = float32"),
    "accumulation dtype": ({"data_types": {"grad_accum_dtype": "fp32"}}, "data_types"),
    "untested optimizers": ({"zero_allow_untested_optimizer": True}, "optimizer.name"),
    "activations": ({"activation_checkpointing": {"contiguous_memory_optimization": True}}, "contiguous_memory"),
    "activation switch": ({"activation_checkpointing": {"cpu_checkpointing": "yes"}}, "cpu_checkpointing"),
    "activations as text": ({"activation_checkpointing": "cpu"}, "activation_checkpointing"),
}


@pytest.mark.parametrize(("content", "named"), REFUSED.values(), ids=REFUSED.keys())
def test_what_cannot_hold_is_refused_by_name(tmp_path: Path, content: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match="ds.json") as raised:
        with_deepspeed_file(config(), file(tmp_path, content))
    assert named in str(raised.value)


@pytest.mark.parametrize("gas", [1, "auto"])
def test_one_and_auto_are_ours(tmp_path: Path, gas: Any) -> None:
    content = {"gradient_accumulation_steps": gas, "train_micro_batch_size_per_gpu": gas, "fp16": {"enabled": False}}
    same, read = with_deepspeed_file(config(), file(tmp_path, content))
    settings = engine_settings(same, read)
    assert settings["gradient_accumulation_steps"] == settings["train_micro_batch_size_per_gpu"] == 1
    assert "fp16" not in settings


def test_stage_and_clipping_may_stand_in_either_place(tmp_path: Path) -> None:
    content = {"zero_optimization": {"stage": 2, "reduce_bucket_size": 1000}, "gradient_clipping": 0.5}
    taken, read = with_deepspeed_file(config(), file(tmp_path, content))
    assert (taken.zero.stage, taken.optimizer.clip_grad) == (2, 0.5)
    settings = engine_settings(taken, read)
    assert settings["zero_optimization"] == {"stage": 2, "reduce_bucket_size": 1000}
    assert settings["gradient_clipping"] == 0.5
    with pytest.raises(ValueError, match=r"zero\.stage = 1"):
        with_deepspeed_file(config(zero={"stage": 1}), file(tmp_path, content))
    with pytest.raises(ValueError, match=r"optimizer\.clip_grad"):
        with_deepspeed_file(config(optimizer={"clip_grad": 2.0}), file(tmp_path, content))


def test_a_stage_from_the_file_meets_the_cross_field_rules(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"parallel\.pp"):
        with_deepspeed_file(config(parallel={"pp": 2}), file(tmp_path, {"zero_optimization": {"stage": 3}}))


def test_clipping_is_said_even_when_it_is_off() -> None:
    assert engine_settings(config(optimizer={"clip_grad": 0.0}), {})["gradient_clipping"] == 0.0


EACH_PASS = {
    "offload": ({"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}, "offload_optimizer"),
    "other partitions": ({"zero_optimization": {"stage": 3, "mics_shard_size": 2}}, "mics_shard_size"),
    "bucket": ({"zero_optimization": {"stage": 2, "reduce_bucket_size": 1000}}, "reduce_bucket_size"),
    "dtype": ({"communication_data_type": "bf16"}, "communication_data_type"),
}


@pytest.mark.parametrize(("content", "named"), EACH_PASS.values(), ids=EACH_PASS.keys())
def test_reduction_in_every_pass_is_not_deepspeeds(tmp_path: Path, content: dict[str, Any], named: str) -> None:
    each_pass = config(zero={"reduce": "pass"})
    with pytest.raises(ValueError, match=rf"ds\.json: .*{named} with zero\.reduce=pass: .*; remove the key"):
        with_deepspeed_file(each_pass, file(tmp_path, content))
    assert with_deepspeed_file(config(), file(tmp_path, content))[1] == content


def test_activation_keys_are_switches_of_the_state_store(tmp_path: Path) -> None:
    on = file(tmp_path, {"activation_checkpointing": {"partition_activations": True, "cpu_checkpointing": True}})
    taken, read = with_deepspeed_file(config(parallel={"tp": 2}), on)
    assert taken.state.placement == "host"
    assert "activation_checkpointing" not in engine_settings(taken, read)
    assert with_deepspeed_file(config(state={"placement": "host"}), on)[0].state.placement == "host"
    with pytest.raises(ValueError, match=r"cpu_checkpointing = true, but state\.placement = device"):
        with_deepspeed_file(config(state={"placement": "device"}), on)
    off = file(tmp_path, {"activation_checkpointing": {"cpu_checkpointing": False, "partition_activations": False}})
    assert with_deepspeed_file(config(), off)[0].state.placement == "device"
    with pytest.raises(ValueError, match=r"cpu_checkpointing = false, but state\.placement = host"):
        with_deepspeed_file(config(state={"placement": "host"}), off)
    with pytest.raises(ValueError, match=r"partition_activations = false with parallel\.tp = 2"):
        with_deepspeed_file(config(parallel={"tp": 2}), off)


@pytest.mark.parametrize("text", ["[1]", "{", ""])
def test_unreadable_files(tmp_path: Path, text: str) -> None:
    path = tmp_path / "ds.json"
    path.write_text(text)
    with pytest.raises(ValueError, match="ds.json"):
        with_deepspeed_file(config(), path)
    with pytest.raises(ValueError, match="absent"):
        with_deepspeed_file(config(), tmp_path / "absent.json")
