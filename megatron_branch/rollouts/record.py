"""One rollout as the sampler hands it over.

Always true:
- every array has one entry per token and is read-only;
- `loss_mask[0]` is False: token 0 has no predictor and is never trained;
- `logprobs` and `ref_logprobs`, where given, are finite and <= 0 on every trained token, NaN elsewhere;
- `reward` or `advantage` is given.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]
Reals = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class Rollout:
    """A sampled token sequence with what training needs of it.

    Attributes:
        group_id: the prompt it was sampled from; rollouts of one group share a baseline.
        rollout_id: unique within the file (`FILE:LINE` where the row has none).
        token_ids: prompt and response together, int64 `[L]`.
        loss_mask: True where the token is trained, `[L]`; entry i belongs to token i, whose predictor is token i - 1.
        logprobs: behaviour log-probs in nats, `[L]`, or None.
        ref_logprobs: log-probs of the reference policy in nats, `[L]`, or None.
        reward: scalar outcome, or None when `advantage` is given.
        advantage: per-token advantage `[L]` that overrides the estimator, or None.
        provenance: what else must agree before two equal token prefixes may be shared (adapter, media hash, routes).
        prompt_length: number of tokens before the first trained one (all of them when none is trained).
        source: `file:line`, for error messages.
    """

    group_id: str
    rollout_id: str
    token_ids: Ids
    loss_mask: Flags
    prompt_length: int
    logprobs: Reals | None = None
    ref_logprobs: Reals | None = None
    reward: float | None = None
    advantage: Reals | None = None
    provenance: str = ""
    finish: str | None = None
    text: str | None = None
    metadata: dict[str, Any] = field(default_factory=dict)
    source: str = ""

    def __len__(self) -> int:
        return int(self.token_ids.shape[0])

    @property
    def trained_tokens(self) -> int:
        """Number of tokens that carry loss."""
        return int(self.loss_mask.sum())
