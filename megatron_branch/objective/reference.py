"""The slow twin of `logprobs.token_scores`: plain `log_softmax` over the whole vocabulary, on one rank.

Shapes: T rows, E hidden size, V rows of the whole output weight (padding included).
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_branch.objective.logprobs import HeadSettings, TokenScores


def reference_scores(hidden_TE: Tensor, weight_VE: Tensor, targets_T: Tensor, *, settings: HeadSettings) -> TokenScores:
    """Same result as `token_scores` on one rank, differentiated by autograd; `settings.chunk_tokens` is not used."""
    precise = torch.promote_types(hidden_TE.dtype, torch.float32)
    logits_TV = (hidden_TE @ weight_VE.t())[:, : settings.vocab].to(precise) / settings.temperature
    logp_TV = torch.log_softmax(logits_TV, dim=-1)
    entropy_T = -(logp_TV.exp() * logp_TV).sum(-1) if settings.entropy else None
    return TokenScores(logp_TV.gather(-1, targets_T[:, None])[:, 0], entropy_T)
