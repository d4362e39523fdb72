"""DeepSpeed's configuration: a user's file passed through, with what belongs to us filled in and conflicts refused.

One place owns each setting: keys that our own configuration or the schedule decides are refused by name when the file
says something else, because a setting without effect, or with two owners, is an error.
"""

from __future__ import annotations

import difflib
import json
from pathlib import Path
from typing import Any

from megatron_branch.config import Config, make_config

# Keys of a DeepSpeed file that cannot hold here, and why.
REFUSED: dict[str, str] = {
    "optimizer": "the optimizer is set by optimizer.name, lr, betas, eps, weight_decay",
    "scheduler": "the learning-rate schedule is set by optimizer.schedule, warmup_steps, min_lr",
    "pipeline": "pipeline stages are set by parallel.pp and run by the branch schedule",
    "wandb": "Weights & Biases is set by tracking.wandb; two writers would make two runs",
    "tensorboard": "metrics are written by tracking",
    "csv_monitor": "metrics are written by tracking",
    "comet": "metrics are written by tracking",
    "wall_clock_breakdown": "the metrics timing_s say where the time of a step goes",
    "flops_profiler": "the metrics perf/mfu/actor and perf/hfu/actor count the FLOPs",
    "fp16": "model.dtype is float32 or bfloat16",
    "amp": "model.dtype sets the precision",
    "torch_autocast": "model.dtype sets the precision",
    "sequence_parallel_size": "context parallelism is set by parallel.cp",
    "tensor_parallel": "tensor parallelism is set by parallel.tp",
    "prescale_gradients": "every denominator is computed once in the plan",
    "gradient_predivide_factor": "every denominator is computed once in the plan",
    "data_types": "gradients of low-precision models are accumulated in float32 here, and handed over once a step",
    "zero_allow_untested_optimizer": "every optimizer that optimizer.name can be is allowed",
    "checkpoint": "checkpoints are set by checkpoint.every_steps, at_end, keep",
    "managed_gradient_accumulation": "a tree of any number of passes is one optimizer step",
}

# Keys that have an effect here. Others are refused too: DeepSpeed itself says nothing about a misspelt one.
PASSED = (
    "zero_optimization",
    "gradient_clipping",
    "bf16",
    "communication_data_type",
    "zero_force_ds_cpu_optimizer",
    "aio",
    "comms_logger",
    "steps_per_print",
    "memory_breakdown",
    "dump_state",
    "disable_python_gc",
)

# Keys of `zero_optimization` that cannot hold with `zero.reduce: pass`, and why.
_NO_REDUCTION = "DeepSpeed reduces no gradients"
REFUSED_EACH_PASS: dict[str, str] = {
    "offload_optimizer": "reduced gradients are kept where the model is",
    "mics_shard_size": "every rank of dp * cp holds an equal part of each gradient",
    "zero_quantized_gradients": "gradients are reduced in float32",
    "allreduce_bucket_size": _NO_REDUCTION,
    "reduce_bucket_size": _NO_REDUCTION,
    "reduce_scatter": _NO_REDUCTION,
    "contiguous_gradients": _NO_REDUCTION,
    "overlap_comm": _NO_REDUCTION,
    "round_robin_gradients": _NO_REDUCTION,
}

# Keys of `activation_checkpointing` that our own store acts on; DeepSpeed's checkpointing itself is not used. It
# partitions what differs between ranks where they split a sequence, and its buffers assume that what is kept last is
# read first.
SWITCHES = ("partition_activations", "cpu_checkpointing")

# One optimizer step is one tree pass set: DeepSpeed's own accumulation must not count or divide.
FIXED: dict[str, int] = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1}


def with_deepspeed_file(config: Config, path: str | Path | None) -> tuple[Config, dict[str, Any]]:
    """Read a DeepSpeed file and reconcile it with the configuration.

    `zero_optimization.stage` and `gradient_clipping` may stand in either place; given in both they must agree.

    Returns:
        the configuration with the file's values taken over, and the file's content (empty without a file).

    Raises:
        ValueError: the file cannot be read, or a key cannot hold; the message names file, key, value and the way out.
    """
    if path is None:
        return config, {}
    where = f"deepspeed_config {path}"
    content = _read(path, where)
    for key, reason in REFUSED.items():
        value = content.get(key)
        if key in content and value is not False and not (isinstance(value, dict) and value.get("enabled") is False):
            raise ValueError(f"{where}: {key} = {json.dumps(value)[:80]}: {reason}; remove the key")
    for key, fixed in FIXED.items():
        if content.get(key, "auto") not in ("auto", fixed):
            raise ValueError(
                f"{where}: {key} = {content[key]}: a step is a set of trees with any number of passes, "
                f'and only data.groups_per_step sets its size; remove the key or write {fixed} or "auto"'
            )
    if content.get("train_batch_size", "auto") != "auto":
        raise ValueError(
            f"{where}: train_batch_size = {content['train_batch_size']}: the number of rollouts of a "
            'step is set by data.groups_per_step; remove the key or write "auto"'
        )
    known = [*PASSED, *REFUSED, *FIXED, "train_batch_size", "activation_checkpointing"]
    for key in content:
        if key not in known:
            close = difflib.get_close_matches(key, known, n=1)
            remedy = f"did you mean {close[0]}?" if close else "remove it"
            raise ValueError(f"{where}: {key}: has no effect here or is unknown to DeepSpeed; {remedy}")
    _check_reduction(config, content, where)
    return _take_over(config, content, where), content


def _check_reduction(config: Config, content: dict[str, Any], where: str) -> None:
    """Refuse what cannot hold when gradients are reduced in every pass, by us and in float32."""
    if config.zero.reduce != "pass":
        return
    dtype = content.get("communication_data_type", "fp32")
    faults = {} if dtype == "fp32" else {"communication_data_type": "gradients are reduced in float32"}
    zero = content.get("zero_optimization", {})
    faults |= {f"zero_optimization.{key}": reason for key, reason in REFUSED_EACH_PASS.items() if key in zero}
    for key, reason in faults.items():
        raise ValueError(f"{where}: {key} with zero.reduce=pass: {reason}; remove the key or set zero.reduce=step")


def _with_switches(values: dict[str, Any], config: Config, content: dict[str, Any], where: str) -> None:
    """Act on `activation_checkpointing` in the values of a configuration, in place."""
    section = f"{where}: activation_checkpointing"
    switches = content.get("activation_checkpointing", {})
    for key, value in switches.items():
        if key not in SWITCHES and value not in (False, None):
            raise ValueError(
                f"{section}.{key} = {json.dumps(value)}: the state store keeps what replays need, and acts on "
                f"{' and '.join(SWITCHES)} alone; remove the key"
            )
        if key in SWITCHES and not isinstance(value, bool):
            raise ValueError(f"{section}.{key} = {json.dumps(value)}: must be true or false")
    if switches.get("partition_activations") is False and config.parallel.tp > 1:
        raise ValueError(
            f"{section}.partition_activations = false with parallel.tp = {config.parallel.tp}: each tensor-parallel "
            "rank keeps its own rows of a stage input, always; remove the key"
        )
    to_host = switches.get("cpu_checkpointing")
    own = values.get("state", {}).get("placement")
    if to_host is not None and own is not None and to_host != (own == "host"):
        raise ValueError(
            f"{section}.cpu_checkpointing = {json.dumps(to_host)}, but state.placement = {own}; "
            "true stands for state.placement=host; set one of them, or both alike"
        )
    if to_host:
        values.setdefault("state", {})["placement"] = "host"


def _read(path: str | Path, where: str) -> dict[str, Any]:
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{where}: cannot be read ({error.strerror}); name a JSON file") from None
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{where}: is not JSON: {error}; correct it") from None
    if not isinstance(content, dict):
        raise ValueError(f"{where}: must be a JSON object, not {type(content).__name__}; write {{...}}")
    for key in ("zero_optimization", "bf16", "activation_checkpointing"):
        if not isinstance(content.get(key, {}), dict):
            raise ValueError(f"{where}: {key} = {json.dumps(content[key])}: must be an object; write {{...}}")
    return content


def _take_over(config: Config, content: dict[str, Any], where: str) -> Config:
    """The configuration with the values that the file gives, under the same rules as any other value."""
    values = config.model_dump(mode="json", exclude_unset=True)
    for theirs, given, section, ours in (
        ("zero_optimization.stage", content.get("zero_optimization", {}).get("stage"), "zero", "stage"),
        ("gradient_clipping", content.get("gradient_clipping"), "optimizer", "clip_grad"),
    ):
        if given is None or given == "auto":
            continue
        own = values.setdefault(section, {}).setdefault(ours, given)
        if own != given:
            raise ValueError(
                f"{where}: {theirs} = {json.dumps(given)}, but {section}.{ours} = {own}; set one of them, or both alike"
            )
    _with_switches(values, config, content, where)
    bf16 = content.get("bf16", {}).get("enabled", "auto")
    if bf16 != "auto" and bf16 != (config.model.dtype == "bfloat16"):
        raise ValueError(
            f"{where}: bf16.enabled = {json.dumps(bf16)}, but model.dtype = {config.model.dtype}; "
            "set model.dtype=bfloat16 with bf16, float32 without"
        )
    return make_config(values, source=where)


def engine_settings(config: Config, content: dict[str, Any]) -> dict[str, Any]:
    """What `deepspeed.initialize` is given."""
    ours = [*REFUSED, "train_batch_size", "activation_checkpointing"]
    settings = {key: value for key, value in content.items() if key not in ours}
    bf16 = {key: value for key, value in content.get("bf16", {}).items() if key != "enabled"}
    zero = {**content.get("zero_optimization", {}), "stage": config.zero.stage}
    if config.zero.reduce == "pass":
        zero["reduce_bucket_size"] = 1  # never filled
        settings["data_types"] = {"grad_accum_dtype": "fp32"}  # of its partitions, which are the sums
    return {
        "steps_per_print": None,
        **settings,
        **FIXED,
        "zero_optimization": zero,
        # Without the key DeepSpeed clips at 1.0.
        "gradient_clipping": config.optimizer.clip_grad,
        "bf16": {**bf16, "enabled": config.model.dtype == "bfloat16"},
        "communication_data_type": settings.get("communication_data_type", "fp32"),
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": settings.get("zero_force_ds_cpu_optimizer", False),
        "wall_clock_breakdown": False,
    }
