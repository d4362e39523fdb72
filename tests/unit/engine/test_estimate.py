"""What the configuration changes in the bytes of a shard."""

from megatron_branch.config import make_config
from megatron_branch.engine.estimate import held_by_model


def test_reduction_in_every_pass_keeps_a_part_of_the_gradients() -> None:
    elements = [12, 5]
    held = {}
    for stage in (2, 3):
        for reduce in ("step", "pass"):
            values = {"model": {"path": "m"}, "data": {"rollouts": "r"}, "zero": {"stage": stage, "reduce": reduce}}
            held[stage, reduce] = held_by_model(make_config(values), elements, ranks=4, zero=stage)
    assert [held[stage, "step"].gradients for stage in (2, 3)] == [4 * 17, 4 * 17]
    assert [held[stage, "pass"].gradients for stage in (2, 3)] == [4 * (3 + 2), 0]  # with ZeRO 3 in DeepSpeed's buffer
    assert held[3, "pass"].optimizer == held[3, "step"].optimizer + (4 - 2) * (3 + 2)
