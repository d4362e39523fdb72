"""One row of the rollouts format, validated.

Ids decide: text beside them is kept for people and never tokenised. Position 0 has no predictor, so its mask entry and
its values play no part. Adapter, media hash and routes go into the provenance key, since equal ids are not an equal
computation where they differ.

Always true:
- a row gives a rollout that obeys every rule of `record`, or an error with field, value, rule and remedy;
- nothing is repaired, cut or guessed, and a field outside the format has no effect.
"""

from __future__ import annotations

import hashlib
import json
import math
from typing import Any

import numpy as np

from megatron_branch.rollouts.columns import NumberList, RowError, read_only, shown
from megatron_branch.rollouts.record import Flags, Ids, Reals, Rollout

PROVENANCE_FIELDS = ("adapter", "media_hash", "routes", "provenance")
_TEXT_FIELDS = ("text", "prompt", "completion", "response", "messages")
_FINISH = ("stop", "length", "abort")
_MAX_ID = (1 << 63) - 1
_LONGEST_KEY = 128


def rollout_from_row(row: dict[str, Any], *, source: str, vocab_size: int | None = None) -> Rollout:
    """Validate a row.

    Args:
        row: the result of `parse_row`.
        source: `file:line`.
        vocab_size: number of token ids that the model knows, None where it is not known yet.

    Raises:
        RowError: a field is missing or not what the format says.
    """
    token_ids, prompt_tokens = _token_ids(row, vocab_size)
    loss_mask = _loss_mask(row, len(token_ids), prompt_tokens)
    advantage = _advantage(row, loss_mask)
    return Rollout(
        group_id=_name(row, "group_id"),
        rollout_id=_name(row, "rollout_id") if row.get("rollout_id") is not None else source,
        token_ids=token_ids,
        loss_mask=loss_mask,
        prompt_length=int(loss_mask.argmax()) if loss_mask.any() else len(token_ids),
        logprobs=_logprobs(row, "logprobs", loss_mask),
        ref_logprobs=_logprobs(row, "ref_logprobs", loss_mask),
        reward=_reward(row, required=advantage is None),
        advantage=advantage,
        provenance=_provenance(row),
        finish=_finish(row),
        text=_optional(row, "text", str, "must be text", "leave it out or quote it"),
        metadata=_optional(row, "metadata", dict, "must be an object", "write {...} or leave it out") or {},
        source=source,
    )


def _name(row: dict[str, Any], field: str) -> str:
    """A string or an integer, as a string."""
    if field not in row:
        raise RowError(field, "is missing", "every row names its group", f'add "{field}": NAME')
    value = row[field]
    if isinstance(value, bool) or not isinstance(value, (str, int)) or value == "":
        raise RowError(field, _value(value), "must be a string or an integer", "write a name that is not empty")
    return str(value)


def _optional(row: dict[str, Any], field: str, kind: type, rule: str, remedy: str) -> Any:
    value = row.get(field)
    if value is not None and not isinstance(value, kind):
        raise RowError(field, _value(value), rule, remedy)
    return value


def _value(value: object) -> str:
    return "is a list of numbers" if isinstance(value, NumberList) else shown(value)


def _list(row: dict[str, Any], field: str, length: int | None = None, *, of: str = "token_ids") -> NumberList:
    """A field that must be a flat list of numbers, with one entry per token where a length is given."""
    value = row[field]
    if not isinstance(value, NumberList):
        raise RowError(field, shown(value), "must be a flat JSON list of numbers", "write one number per token")
    if length is not None and len(value) != length:
        rule = f"must have one entry per token of {of}, which has {length}"
        raise RowError(field, f"has {len(value)} entries", rule, "write them all, null or 0 where not trained")
    return value


def _given(row: dict[str, Any], field: str) -> bool:
    """A field that is null counts as left out."""
    return row.get(field) is not None


def _ids(row: dict[str, Any], field: str, vocab_size: int | None) -> Ids:
    rule = "must be an integer >= 0"
    if vocab_size is not None:
        rule += f" and below the vocabulary size {vocab_size}"
    high = _MAX_ID if vocab_size is None else vocab_size - 1
    remedy = "write the ids of the tokenizer of the model that is trained"
    return _list(row, field).integers(field, np.int64, low=0, high=high, rule=rule, remedy=remedy)


def _token_ids(row: dict[str, Any], vocab_size: int | None) -> tuple[Ids, int | None]:
    """The ids, and the length of the prompt where the row gives it apart."""
    parts = [field for field in ("prompt_ids", "completion_ids") if _given(row, field)]
    if len(parts) == 1 and _given(row, "token_ids"):
        parts = []
    if len(parts) == 1:
        missing = "completion_ids" if parts[0] == "prompt_ids" else "prompt_ids"
        raise RowError(missing, "is missing", f"{parts[0]} comes with it", f'add "{missing}" ([] where there are none)')
    joined = None
    if parts:
        prompt, completion = (_ids(row, field, vocab_size) for field in parts)
        joined = np.concatenate([prompt, completion])
    if _given(row, "token_ids"):
        token_ids = _ids(row, "token_ids", vocab_size)
        if joined is not None and not np.array_equal(joined, token_ids):
            rule = "must equal prompt_ids followed by completion_ids"
            raise RowError("token_ids", "differs", rule, "keep either token_ids or the two parts")
    elif joined is not None:
        token_ids = joined
    else:
        raise _without_ids(row)
    if not len(token_ids):
        raise RowError("token_ids", "= []", "a rollout has at least one token", "remove the row")
    return read_only(token_ids), len(prompt) if parts else None


def _without_ids(row: dict[str, Any]) -> RowError:
    text = [field for field in _TEXT_FIELDS if _given(row, field)]
    if text:
        rule = f"text alone ({', '.join(text)}) does not say which tokens were sampled"
        return RowError("token_ids", "is missing", rule, "write the ids that the sampler used and produced")
    return RowError("token_ids", "is missing", "a row needs its token ids", 'add "token_ids": [...]')


def _bits(row: dict[str, Any], field: str, length: int, *, of: str = "token_ids") -> Flags:
    rule, remedy = "must be 0 or 1", "write 1 where the token is trained, 0 elsewhere"
    return _list(row, field, length, of=of).integers(field, np.bool_, low=0, high=1, rule=rule, remedy=remedy)


def _prompt_length(row: dict[str, Any], length: int) -> int:
    value = row["prompt_length"]
    if type(value) is not int or not 0 <= value <= length:
        rule = f"must be an integer from 0 to the number of tokens, {length}"
        raise RowError("prompt_length", _value(value), rule, "count the prompt in tokens of token_ids")
    return value


def _loss_mask(row: dict[str, Any], length: int, prompt_tokens: int | None) -> Flags:
    """The mask from the first source that is given; the others must not contradict it."""
    bounds = {} if prompt_tokens is None else {"prompt_ids": prompt_tokens}
    if _given(row, "prompt_length"):
        bounds["prompt_length"] = _prompt_length(row, length)
    if len(set(bounds.values())) > 1:
        rule = f"must be the length of prompt_ids, {prompt_tokens}"
        raise RowError("prompt_length", shown(row["prompt_length"]), rule, "remove it")
    bound = next(iter(bounds.values()), None)
    if _given(row, "loss_mask"):
        mask, field = _bits(row, "loss_mask", length), "loss_mask"
    elif prompt_tokens is not None and _given(row, "completion_mask"):
        mask, field = np.zeros(length, dtype=np.bool_), "completion_mask"
        mask[prompt_tokens:] = _bits(row, field, length - prompt_tokens, of="completion_ids")
    elif bound is not None:
        mask, field = np.ones(length, dtype=np.bool_), next(iter(bounds))
        mask[:bound] = False
    else:
        rule = "a row says which tokens are trained"
        raise RowError("loss_mask", "is missing", rule, 'add "loss_mask": [0/1 per token] or "prompt_length": N')
    mask[0] = False
    if bound is not None and mask[:bound].any():
        place = int(mask.argmax())
        rule = f"must be 0 in the prompt, which {next(iter(bounds))} ends at {bound}"
        raise RowError(f"{field}[{place}]", "= 1", rule, "correct one of the two")
    return read_only(mask)


def _logprobs(row: dict[str, Any], field: str, loss_mask: Flags) -> Reals | None:
    if not _given(row, field):
        return None
    values = _list(row, field, len(loss_mask)).reals(field)
    wrong = loss_mask & ~((values <= 0) & np.isfinite(values))
    if wrong.any():
        place = int(wrong.argmax())
        rule = "must be finite and <= 0 on a trained token (log-prob in nats)"
        remedy = "write what the sampler reported, or set the token's mask to 0"
        raise RowError(f"{field}[{place}]", _real(values[place]), rule, remedy)
    values[~loss_mask] = np.nan
    return read_only(values)


def _real(value: float) -> str:
    return "is null or NaN" if math.isnan(value) else f"= {value}"


def _number(field: str, value: object) -> float:
    """A finite JSON number."""
    rule = "must be a finite number"
    if isinstance(value, str):
        raise RowError(field, shown(value), rule, "remove the quotes")
    if isinstance(value, bool):
        raise RowError(field, shown(value), rule, f"write {int(value)}")
    if not isinstance(value, (int, float)):
        raise RowError(field, _value(value), rule, "reduce it to one number per rollout")
    if isinstance(value, int) and abs(value) >= 1 << 1023 or not math.isfinite(value):
        raise RowError(field, shown(value), rule, "repair the reward or remove the row")
    return float(value)


def _reward(row: dict[str, Any], *, required: bool) -> float | None:
    if not _given(row, "reward"):
        if required:
            value = "= null" if "reward" in row else "is missing"
            raise RowError("reward", value, "a row needs a reward or an advantage", 'add "reward": NUMBER')
        return None
    return _number("reward", row["reward"])


def _advantage(row: dict[str, Any], loss_mask: Flags) -> Reals | None:
    """One per token, 0 where not trained; a single number counts for every trained token."""
    value = row.get("advantage")
    if value is None:
        return None
    if not isinstance(value, NumberList):
        return read_only(np.where(loss_mask, _number("advantage", value), 0.0))
    values = _list(row, "advantage", len(loss_mask)).reals("advantage")
    wrong = loss_mask & ~np.isfinite(values)
    if wrong.any():
        place = int(wrong.argmax())
        rule = "must be finite on a trained token"
        raise RowError(f"advantage[{place}]", _real(values[place]), rule, "write a number, or set the mask to 0")
    values[~loss_mask] = 0.0
    return read_only(values)


def _finish(row: dict[str, Any]) -> str | None:
    value = row.get("finish")
    if value is not None and value not in _FINISH:
        raise RowError("finish", _value(value), "must be stop, length or abort", "translate it or leave it out")
    return value


def _provenance(row: dict[str, Any]) -> str:
    """One canonical string; a long one is replaced by its digest."""
    parts = {field: row[field] for field in PROVENANCE_FIELDS if _given(row, field) and row[field] != ""}
    if set(parts) == {"provenance"} and isinstance(parts["provenance"], str):
        return parts["provenance"]
    if not parts:
        return ""
    key = json.dumps(parts, sort_keys=True, separators=(",", ":"))
    return key if len(key) <= _LONGEST_KEY else f"sha256:{hashlib.sha256(key.encode()).hexdigest()}"
