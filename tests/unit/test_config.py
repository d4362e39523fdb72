from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from megatron_branch.config import Config, config_keys, config_table, load_config, make_config
from megatron_branch.engine.config import ParallelConfig

REQUIRED = {"model": {"path": "m"}, "data": {"rollouts": "r.jsonl"}}


def _write(folder: Path, text: str) -> Path:
    path = folder / "c.yaml"
    path.write_text(text)
    return path


def test_file_and_overrides_make_one_frozen_value(tmp_path: Path) -> None:
    path = _write(tmp_path, "model: {path: m}\ndata: {rollouts: r.jsonl}\noptimizer: {lr: 1e-6, betas: [0.9, 0.95]}\n")
    config = load_config(path, ["parallel.tp=2", "optimizer.lr=2e-5", "checkpoint.every_steps=null", "steps=3"])
    assert (config.parallel.tp, config.steps, config.checkpoint.every_steps) == (2, 3, None)
    assert config.optimizer.lr == 2e-5
    assert config.optimizer.betas == (0.9, 0.95)
    assert config.model.path == Path("m")
    with pytest.raises(ValidationError):
        config.seed = 3


def test_plain_values_give_the_same_configuration_back() -> None:
    config = make_config(REQUIRED, ["optimizer.name=sgd", "optimizer.momentum=0.5", "objective.clip_high=0.28"])
    assert make_config(config.model_dump(mode="json")) == config


@pytest.mark.parametrize("number", ["1e-6", "1E-6", "1.0e-6", "+1e-06", ".1e-5", "0.000001"])
def test_numbers_with_an_exponent_are_numbers(number: str) -> None:
    assert make_config(REQUIRED, [f"optimizer.lr={number}"]).optimizer.lr == pytest.approx(1e-6, rel=1e-15)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("branch.chunk_token=7", "branch.chunk_token: unknown key; did you mean branch.chunk_tokens"),
        ("lr=1", "lr: unknown key; did you mean optimizer.lr?"),
        ("optim.lr=1", "optim: unknown key; did you mean optimizer"),
        ("objective.tempreature=1", "objective.tempreature: unknown key; did you mean objective.temperature?"),
        ("zero.stage.x=1", "zero.stage = {"),
        ("qqq=1", "qqq: unknown key; remove it\n"),
        ("objective.temperature=0", "objective.temperature = 0: input should be greater than 0"),
        ("objective.advantage=ppo", "objective.advantage = \"ppo\": input should be 'grpo', 'grpo_no_std' or 'rloo'"),
        ("optimizer.clip_grad=-1", "optimizer.clip_grad = -1: input should be greater than or equal to 0"),
        ("optimizer.lr=.nan", "optimizer.lr = NaN: input should be a finite number"),
        ("optimizer.betas=[0.9, 1]", "optimizer.betas.1 = 1: input should be less than 1"),
        ("parallel.tp=true", "parallel.tp = true: input should be a valid integer"),
        ("parallel.tp='2'", 'parallel.tp = "2": input should be a valid integer'),
        ("parallel.cp=0", "parallel.cp = 0: input should be greater than or equal to 1"),
        ("zero.stage=4", "zero.stage = 4: input should be less than or equal to 3"),
        ("model.path=null", "model.path = null"),
        ("steps=1.5", "steps = 1.5: input should be a valid integer"),
    ],
)
def test_faults_name_key_value_and_rule(override: str, message: str) -> None:
    with pytest.raises(ValueError) as raised:
        make_config(REQUIRED, [override], source="config c.yaml")
    text = str(raised.value) + "\n"
    assert text.startswith(f"config c.yaml: override {override!r}: {message}")
    assert text.count("\n") == 1


def test_a_fault_of_the_file_is_not_blamed_on_an_override() -> None:
    values = {**REQUIRED, "optimizer": {"lr": -1, "clip_grad": -1}}
    with pytest.raises(ValueError) as raised:
        make_config(values, ["optimizer.eps=1e-9", "optimizer.clip_grad=-2", "steps=2"], source="config c.yaml")
    assert str(raised.value).splitlines() == [
        "config c.yaml: 2 errors",
        "  optimizer.lr = -1: input should be greater than or equal to 0",
        "  override 'optimizer.clip_grad=-2': optimizer.clip_grad = -2: input should be greater than or equal to 0",
    ]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["parallel.cp=4", "parallel.sequence_parallel=true"],
            r"parallel\.sequence_parallel=true has no effect with parallel\.tp=1: .*raise parallel\.tp",
        ),
        (
            ["parallel.cp=4", "parallel.ulysses_size=2"],
            r"parallel\.ulysses_size=2 has no effect with parallel\.cp_mode=pass_q; .*parallel\.cp_mode=ulysses",
        ),
        (
            ["parallel.cp=6", "parallel.cp_mode=ulysses", "parallel.ulysses_size=4"],
            r"parallel\.ulysses_size=4 does not divide parallel\.cp=6: .* one of 1, 2, 3, 6",
        ),
        (["zero.stage=3", "parallel.pp=2"], r"zero\.stage=3 with parallel\.pp=2: .*; set zero\.stage to 2 or less, or"),
        (["optimizer.momentum=0.9"], r"optimizer\.momentum=0\.9 has no effect with optimizer\.name=adamw"),
        (["optimizer.name=sgd", "optimizer.betas=[0.8, 0.9]"], r"optimizer\.betas has no effect"),
        (["optimizer.name=sgd", "optimizer.eps=1e-6"], r"optimizer\.eps has no effect"),
        (["optimizer.min_lr=1e-7"], r"optimizer\.min_lr=1e-07 has no effect with optimizer\.schedule=constant"),
        (
            ["optimizer.schedule=cosine", "optimizer.min_lr=1"],
            r"optimizer\.min_lr=1\.0 must not exceed optimizer\.lr=1e-06",
        ),
        (["steps=2", "optimizer.warmup_steps=3"], r"optimizer\.warmup_steps=3 must not exceed steps=2"),
        (["objective.kl_estimator=k1"], r"objective\.kl_estimator=k1 has no effect with objective\.kl_coefficient=0"),
        (["checkpoint.at_end=false", "checkpoint.export_hf=true"], r"checkpoint\.export_hf=true has no effect"),
        (
            ["tracking.wandb_required=true"],
            r"tracking\.wandb_required=true has no effect with tracking\.wandb=disabled",
        ),
    ],
)
def test_settings_that_contradict_or_do_nothing_are_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_config(REQUIRED, overrides)


def test_every_fault_is_listed() -> None:
    with pytest.raises(ValueError) as raised:
        make_config({"model": {"paths": "m"}}, ["parallel.tp=0"])
    assert str(raised.value).splitlines() == [
        "config: 4 errors",
        "  model.path: required; set it in the file or as model.path=VALUE",
        "  model.paths: unknown key; did you mean model.path or model.host?",
        "  data: required; set it in the file or as data.rollouts=VALUE",
        "  override 'parallel.tp=0': parallel.tp = 0: input should be greater than or equal to 1",
    ]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("steps", r"override 'steps': must be key=value"),
        ("=3", r"override '=3': must be key=value"),
        ("a..b=3", r"override 'a\.\.b=3': must be key=value"),
        ("seed.x=3", r"override 'seed\.x=3': seed is a value, not a section"),
        ("steps=[1", r"override 'steps=\[1': not valid YAML"),
    ],
)
def test_malformed_overrides(override: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_config({**REQUIRED, "seed": 1}, [override])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- a\n", r"c\.yaml: must be a mapping of sections, not list"),
        ("a: [\n", r"c\.yaml: not valid YAML"),
        ("seed: 1\nseed: 2\n", r"c\.yaml: not valid YAML: key 'seed' is given twice"),
        ("", r"c\.yaml: 2 errors"),
    ],
)
def test_malformed_files(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        load_config(_write(tmp_path, text))


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"none\.yaml: cannot be read \(No such file.*name a YAML file"):
        load_config(tmp_path / "none.yaml")


def test_size_of_ulysses_groups() -> None:
    assert ParallelConfig(cp=4).ulysses == 1
    assert ParallelConfig(cp=4, cp_mode="ulysses").ulysses == 4
    assert ParallelConfig(cp=4, cp_mode="ulysses", ulysses_size=2).ulysses == 2
    assert ParallelConfig(cp_mode="ulysses").ulysses == 1


def test_data_parallel_size_is_what_the_others_leave_over() -> None:
    assert ParallelConfig(tp=2, cp=2).data_parallel(8) == 2
    assert ParallelConfig(dp=3).data_parallel(8) == 3
    with pytest.raises(ValueError, match=r"pp=3 cp=1 tp=2 multiply to 6, which does not divide the 8 ranks"):
        ParallelConfig(tp=2, pp=3).data_parallel(8)


def test_clip_high_follows_clip_low() -> None:
    assert make_config(REQUIRED, ["objective.clip_low=0.1"]).objective.clip_above == 0.1
    assert make_config(REQUIRED, ["objective.clip_high=0.28"]).objective.clip_above == 0.28


def test_keys_are_few_and_described() -> None:
    keys = config_keys()
    assert len(keys) <= 70
    rows = config_table().splitlines()[2:]
    assert [row.split("`")[1] for row in rows] == keys
    assert not [row for row in rows if row.endswith("|  |")]
    assert "| `parallel.dp` | int >= 1, null | `null` |" in config_table()


def test_every_recipe_is_valid() -> None:
    recipes = sorted(Path(__file__).parents[2].glob("configs/**/*.yaml"))
    for recipe in recipes:
        assert isinstance(load_config(recipe), Config)
