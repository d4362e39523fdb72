"""At the start, a Hugging Face model computes a few tokens with its own attention and with ours, cut into two passes.

It finds what no setting tells: other multipliers and caps, positions that do not come from `position_ids`, layers that
carry a state from token to token.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_branch.attention.descriptor import PassDescriptor
from megatron_branch.attention.kernel import Kernel
from megatron_branch.engine.transformers_host import ATTENTION, TransformersModel
from megatron_branch.plan.shard import shard_unit
from megatron_branch.state.page import Page
from megatron_branch.state.store import StateStore

_TOKENS, _PREFIX = 12, 5
# Relative L2. Hugging Face's own attention takes its softmax in float32; bfloat16 rounds to 2**-8 in every layer.
_LIMIT = {torch.float64: 1e-4, torch.float32: 1e-3, torch.bfloat16: 0.1}


@torch.no_grad()
def probe(model: TransformersModel, kernel: Kernel, *, vocab: int, source: str) -> None:
    """Compare the logits of a prefix and a tail with those of the model's own attention.

    Args:
        model: whole, weights loaded.
        kernel: the attention kernel.
        vocab: ids are below.
        source: where the model came from, for messages.

    Raises:
        ValueError: they differ, or the model gives its attention function what is not computed.
    """
    weight = model.hf.get_output_embeddings().weight
    ids = (torch.arange(_TOKENS, device=weight.device)[None] * 7919 + 11) % vocab
    try:
        model.hf.set_attn_implementation("eager")
        expected = model.hf(input_ids=ids, use_cache=False).logits[0]
        model.hf.set_attn_implementation(ATTENTION)
        hidden = _two_passes(model, kernel, ids)
    except ValueError as error:
        raise ValueError(f"{source}: {error}") from error
    found = hidden @ weight.T * model.logit_factor
    error = float((found.double() - expected.double()).norm() / expected.double().norm())
    if not error <= _LIMIT[weight.dtype]:
        raise ValueError(
            f"{source}: logits of {_TOKENS} tokens differ by {error:.1e} (relative) from those of the model's own "
            "attention: it computes something between tokens or after its head that model.host=transformers does not "
            "know; use another model"
        )


def _two_passes(model: TransformersModel, kernel: Kernel, ids: Tensor) -> Tensor:
    """Normalised hidden states `[t, hidden]`: a prefix that leaves its state, and a tail that reads it."""
    store = StateStore(ids.device)
    positions = torch.arange(ids.shape[1], device=ids.device)

    def run(cut: slice, context: tuple[Page, ...], capture: Page | None) -> Tensor:
        at = positions[cut]
        shard = shard_unit((len(at),), cp=1, rank=0)
        unit = PassDescriptor(at, shard, context, kernel, capture=capture)
        return model.hidden(ids[:, cut], at[None], unit)[0]

    with store.step():
        page = store.open(0, differentiable=False)
        first = run(slice(0, _PREFIX), (), page)
        store.settle()
        second = run(slice(_PREFIX, None), (page,), None)
        store.release(0)
    return torch.cat([first, second])
