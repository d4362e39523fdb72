"""DeepSpeed's configuration: a user's file passed through, with what belongs to us filled in and conflicts refused.

One place owns each setting: keys that our own configuration or the schedule decides are refused by name when the file
says something else, because a setting without effect, or with two owners, is an error.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from megatron_branch.config import Config

# Keys of a DeepSpeed file that cannot hold here, and why.
REFUSED: dict[str, str] = {
    "optimizer": "the optimizer is set by optimizer.name, lr, betas, eps, weight_decay",
    "scheduler": "the learning-rate schedule is set by optimizer.schedule, warmup_steps, min_lr",
    "pipeline": "pipeline stages are set by parallel.pp and run by the branch schedule",
    "wandb": "Weights & Biases is set by tracking.wandb; two writers would make two runs",
    "tensorboard": "metrics are written by tracking",
    "csv_monitor": "metrics are written by tracking",
    "fp16": "model.dtype is float32 or bfloat16",
    "amp": "model.dtype sets the precision",
    "torch_autocast": "model.dtype sets the precision",
    "sequence_parallel_size": "context parallelism is set by parallel.cp",
    "tensor_parallel": "tensor parallelism is set by parallel.tp",
    "activation_checkpointing": "prefix activations are kept by the state store; branch.activations sets how",
    "prescale_gradients": "every denominator is computed once in the plan",
    "gradient_predivide_factor": "every denominator is computed once in the plan",
    "managed_gradient_accumulation": "a tree of any number of passes is one optimizer step",
}

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
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"deepspeed_config {path}: cannot be read: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"deepspeed_config {path}: must be a JSON object, not {type(content).__name__}")
    for key, reason in REFUSED.items():
        value = content.get(key)
        if key in content and value is not False and not (isinstance(value, dict) and value.get("enabled") is False):
            raise ValueError(f"deepspeed_config {path}: {key} = {json.dumps(value)[:80]}: {reason}; remove the key")
    for key, fixed in FIXED.items():
        if content.get(key, "auto") not in ("auto", fixed):
            raise ValueError(
                f"deepspeed_config {path}: {key} = {content[key]}: a step is a set of trees with any number of passes, "
                f'and only data.groups_per_step sets its size; remove the key or write {fixed} or "auto"'
            )
    if "train_batch_size" in content and content["train_batch_size"] != "auto":
        raise ValueError(
            f"deepspeed_config {path}: train_batch_size = {content['train_batch_size']}: the number of rollouts of a "
            'step is set by data.groups_per_step; remove the key or write "auto"'
        )
    return _take_over(config, content, str(path)), content


def _take_over(config: Config, content: dict[str, Any], path: str) -> Config:
    stage = content.get("zero_optimization", {}).get("stage", 0)
    if "stage" in config.zero.model_fields_set and config.zero.stage != stage:
        raise ValueError(
            f"deepspeed_config {path}: zero_optimization.stage = {stage}, but zero.stage = {config.zero.stage}; "
            "set one of them, or both alike"
        )
    clip = content.get("gradient_clipping", "auto")
    optimizer = config.optimizer
    if clip != "auto":
        if "clip_grad" in optimizer.model_fields_set and optimizer.clip_grad != clip:
            raise ValueError(
                f"deepspeed_config {path}: gradient_clipping = {clip}, but optimizer.clip_grad = "
                f"{optimizer.clip_grad}; set one of them, or both alike"
            )
        optimizer = optimizer.model_copy(update={"clip_grad": float(clip)})
    bf16 = content.get("bf16", {}).get("enabled", "auto")
    if bf16 != "auto" and bf16 != (config.model.dtype == "bfloat16"):
        raise ValueError(
            f"deepspeed_config {path}: bf16.enabled = {json.dumps(bf16)}, but model.dtype = {config.model.dtype}; "
            "set model.dtype=bfloat16 with bf16, float32 without"
        )
    values = config.model_dump(mode="json", exclude_unset=True)
    values["zero"] = {"stage": stage}
    values["optimizer"] = optimizer.model_dump(mode="json", exclude_unset=True) | {"clip_grad": optimizer.clip_grad}
    return Config.model_validate_json(json.dumps(values))


def engine_settings(config: Config, content: dict[str, Any]) -> dict[str, Any]:
    """What `deepspeed.initialize` is given."""
    settings = {key: value for key, value in content.items() if key not in REFUSED and key != "train_batch_size"}
    bf16 = {key: value for key, value in content.get("bf16", {}).items() if key != "enabled"}
    return {
        **settings,
        **FIXED,
        "zero_optimization": {**content.get("zero_optimization", {}), "stage": config.zero.stage},
        # Without the key DeepSpeed clips at 1.0.
        "gradient_clipping": config.optimizer.clip_grad,
        "bf16": {**bf16, "enabled": config.model.dtype == "bfloat16"},
        "communication_data_type": settings.get("communication_data_type", "fp32"),
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": settings.get("zero_force_ds_cpu_optimizer", False),
        "steps_per_print": None,
        "wall_clock_breakdown": False,
    }
