"""What one prefix unit leaves behind on one rank.

Shapes: P own tokens of the unit (this rank's share, padding excluded), G local KV heads, D head size.

Always true:
- a page holds exactly the tokens that its rank owns, in local order, for every layer of its stage;
- keys are stored after the rotary embedding, so a page can be attended to in any order;
- adjoints are float32 (float64 for a float64 model) and start as the first contribution, later ones are added in place.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from megatron_branch.state.bytes import ByteCount


def adjoint_dtype(dtype: torch.dtype) -> torch.dtype:
    """Adjoints and merges are accumulated in float32, in float64 for a float64 model."""
    return torch.float64 if dtype == torch.float64 else torch.float32


@dataclass(eq=False)
class Page:
    """Keys, values, their adjoints and the stage input of one prefix unit.

    Attributes:
        unit: index of the unit, for messages.
        count: where its bytes are counted.
        differentiable: a gradient flows into it; a page of a constant unit has no adjoint.
        keys, values: layer number to `[P, G, D]`.
        key_adjoints, value_adjoints: likewise, in `adjoint_dtype`.
        stage_input: hidden states that entered this pipeline stage, `[t, 1, hidden]` (t with padding); None on the
            first stage, which embeds the token ids again.
    """

    unit: int
    count: ByteCount
    differentiable: bool
    keys: dict[int, Tensor] = field(default_factory=dict)
    values: dict[int, Tensor] = field(default_factory=dict)
    key_adjoints: dict[int, Tensor] = field(default_factory=dict)
    value_adjoints: dict[int, Tensor] = field(default_factory=dict)
    stage_input: Tensor | None = None

    def write(self, layer: int, k_PGD: Tensor, v_PGD: Tensor) -> None:
        """Store a layer's keys and values; each layer is written once.

        Raises:
            AssertionError: the layer is there already (a recomputed forward must not append again).
        """
        assert layer not in self.keys, f"state of unit {self.unit}, layer {layer} written twice"
        self.keys[layer], self.values[layer] = k_PGD, v_PGD
        self.count.add("state", k_PGD.nbytes + v_PGD.nbytes)

    def add_adjoint(self, layer: int, dk_PGD: Tensor, dv_PGD: Tensor) -> None:
        """Add a reader's gradient in place."""
        assert self.differentiable, f"unit {self.unit} is constant, nothing may flow into it"
        for adjoints, part in ((self.key_adjoints, dk_PGD), (self.value_adjoints, dv_PGD)):
            if layer in adjoints:
                adjoints[layer].add_(part)
            else:
                adjoints[layer] = part.to(adjoint_dtype(part.dtype), copy=True, memory_format=torch.contiguous_format)
                self.count.add("adjoint", adjoints[layer].nbytes)

    def keep_input(self, hidden: Tensor) -> None:
        """Keep the hidden states that entered this stage, the unit's only activation checkpoint."""
        self.stage_input = hidden
        self.count.add("stage_input", hidden.nbytes)

    def bytes_by_kind(self) -> dict[str, int]:
        """Bytes that this page holds now."""
        return {
            "state": sum(t.nbytes for d in (self.keys, self.values) for t in d.values()),
            "adjoint": sum(t.nbytes for d in (self.key_adjoints, self.value_adjoints) for t in d.values()),
            "stage_input": 0 if self.stage_input is None else self.stage_input.nbytes,
        }
