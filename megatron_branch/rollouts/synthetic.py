"""Made-up rollouts for tests and benchmarks, and the writer of the rollouts format.

Always true:
- the same arguments give the same rollouts;
- siblings begin with different tokens, so a requested prefix is shared as far as requested and no further;
- advantages have mixed sign, and behaviour log-probs lie on both sides of a uniform policy's;
- `read_rollouts` gives back what `write_rollouts` was given.
"""

from __future__ import annotations

import gzip
import json
import math
import os
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import cycle, islice, zip_longest
from pathlib import Path
from typing import Any

import numpy as np

from megatron_branch.rollouts.columns import read_only
from megatron_branch.rollouts.record import Flags, Ids, Reals, Rollout


@dataclass(frozen=True, slots=True, kw_only=True)
class SyntheticSpec:
    """What the rollouts look like.

    Each group is a full tree: a root of `prefix_tokens[0]` tokens with `fan_out[0]` children, and so on; the children
    of the last prefixes are the tails.

    Attributes:
        prefix_tokens: tokens of the shared nodes at each depth, each >= 1.
        fan_out: children of a node at each depth, as many entries.
        tail_tokens: lengths of the tails, cycled over the leaves; 0 is an empty response.
        groups: number of groups, which share nothing with each other.
        vocab_size: ids are below it.
        seed: of everything random.
        duplicates: rollouts of each group repeated with another mask, reward and behaviour log-probs.
        strict_prefixes: rollouts of each group repeated without the second half of their tail.
        train_shared: train every shared token below the root (multi-turn), not only the tails.
        mask_holes: leave the middle third of each tail untrained (a tool's output).
        logprobs: give behaviour log-probs.
        advantages: give advantages beside the rewards.
        interleave: alternate the rows of the groups.
    """

    prefix_tokens: tuple[int, ...] = (32,)
    fan_out: tuple[int, ...] = (4,)
    tail_tokens: tuple[int, ...] = (8,)
    groups: int = 1
    vocab_size: int = 97
    seed: int = 0
    duplicates: int = 0
    strict_prefixes: int = 0
    train_shared: bool = False
    mask_holes: bool = False
    logprobs: bool = False
    advantages: bool = False
    interleave: bool = False

    def __post_init__(self) -> None:
        if not self.prefix_tokens or len(self.prefix_tokens) != len(self.fan_out) or not self.tail_tokens:
            raise ValueError(
                f"prefix_tokens = {self.prefix_tokens}, fan_out = {self.fan_out}, tail_tokens = {self.tail_tokens}: "
                "need one fan-out per depth and at least one tail length; give lists of equal length"
            )
        lowest = {
            "prefix_tokens": 1,
            "fan_out": 1,
            "tail_tokens": 0,
            "groups": 1,
            "duplicates": 0,
            "strict_prefixes": 0,
        }
        for name, low in lowest.items():
            value = getattr(self, name)
            if np.min(value) < low:
                raise ValueError(f"{name} = {value}: must be at least {low}; raise it")
        if self.vocab_size < max(*self.fan_out, self.groups):
            rule = f"must be at least the fan-out and the number of groups, {max(*self.fan_out, self.groups)}"
            raise ValueError(f"vocab_size = {self.vocab_size}: {rule}, so that siblings differ; raise it")


def synthetic_rollouts(spec: SyntheticSpec) -> list[Rollout]:
    """Generate rollouts.

    Args:
        spec: what they look like.
    """
    maker = _Maker(np.random.default_rng(spec.seed), spec.vocab_size)
    groups = [_group(spec, maker, index) for index in range(spec.groups)]
    return _interleaved(groups) if spec.interleave else [rollout for group in groups for rollout in group]


def odd_rollouts(vocab_size: int, seed: int) -> list[Rollout]:
    """One step with everything that is easy to get wrong, small enough for float64.

    Nested prefixes to depth 5, tails of 1 to 29 tokens, trained tokens on shared nodes, tool spans without loss, an
    exact duplicate with another mask, advantage and behaviour log-probs, a strict prefix that ends at a fork and one
    that ends inside a tail, an empty response, forks inside the prompt within a group and across groups, a group
    without sharing, a group of one, a one-token prompt, a one-token rollout, interleaved groups, behaviour log-probs on
    some rows only.

    Args:
        vocab_size: at least 16.
        seed: of ids, rewards and log-probs; the shape is always the same.
    """
    if vocab_size < 16:
        raise ValueError(f"vocab_size = {vocab_size}: must be at least 16, so that siblings differ; raise it")
    maker = _Maker(np.random.default_rng(seed), vocab_size)
    prompt = _join(maker.run(7), maker.run(11))
    return _interleaved([_tools(maker, prompt), _forked(maker, prompt), *_small_groups(maker)])


def write_rollouts(path: str | Path, rollouts: Iterable[Rollout]) -> None:
    """Write rollouts in the JSONL format, gzipped where the name ends in `.gz`; the file appears when it is complete.

    Args:
        path: replaced if it exists.
        rollouts: rows, in this order.
    """
    path = Path(path)
    temporary = path.with_name(f"{path.name}.{uuid.uuid4().hex}.tmp")
    opener = gzip.open if path.suffix == ".gz" else open
    try:
        with opener(temporary, "wt", encoding="utf-8") as file:
            for rollout in rollouts:
                file.write(json.dumps(_row(rollout)) + "\n")
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _row(rollout: Rollout) -> dict[str, Any]:
    row = {
        "group_id": rollout.group_id,
        "rollout_id": rollout.rollout_id,
        "token_ids": rollout.token_ids.tolist(),
        "loss_mask": rollout.loss_mask.astype(int).tolist(),
        "logprobs": _nullable(rollout.logprobs),
        "ref_logprobs": _nullable(rollout.ref_logprobs),
        "reward": rollout.reward,
        "advantage": None if rollout.advantage is None else rollout.advantage.tolist(),
        "provenance": rollout.provenance or None,
        "finish": rollout.finish,
        "text": rollout.text,
        "metadata": rollout.metadata or None,
    }
    return {field: value for field, value in row.items() if value is not None}


def _nullable(values: Reals | None) -> list[float | None] | None:
    return None if values is None else [None if math.isnan(value) else value for value in values.tolist()]


def _interleaved(groups: Sequence[Sequence[Rollout]]) -> list[Rollout]:
    return [rollout for turn in zip_longest(*groups) for rollout in turn if rollout is not None]


def _join(*runs: Ids) -> Ids:
    return np.concatenate(runs)


def _trained(length: int, start: int, *, hole: tuple[int, int] = (0, 0)) -> Flags:
    """True from start on, but for the hole."""
    places = np.arange(length)
    return (places >= start) & ~((places >= hole[0]) & (places < hole[1]))


@dataclass(slots=True)
class _Maker:
    """Random runs of tokens and the rollouts made of them; consecutive runs begin with different ids."""

    rng: np.random.Generator
    vocab_size: int
    runs: int = 0
    made: int = 0

    def run(self, length: int) -> Ids:
        ids = self.rng.integers(0, self.vocab_size, length)
        ids[:1] = self.runs % self.vocab_size
        self.runs += 1
        return ids

    def _logprobs(self, loss_mask: Flags) -> Reals:
        """Within a factor of 2 of a uniform policy's, so that some ratios are clipped and others are not."""
        spread = self.rng.uniform(-0.69, 0.69, len(loss_mask))
        values = np.minimum(spread - math.log(self.vocab_size), -1e-3)
        return read_only(np.where(loss_mask, values, np.nan))

    def rollout(
        self,
        group_id: str,
        ids: Ids,
        loss_mask: Flags,
        *,
        logprobs: bool = False,
        ref_logprobs: bool = False,
        advantages: bool = False,
    ) -> Rollout:
        loss_mask[0] = False
        sign = -1.0 if self.made % 2 else 1.0
        advantage = np.where(loss_mask, sign * self.rng.uniform(0.3, 1.7, len(ids)), 0.0)
        self.made += 1
        return Rollout(
            group_id=group_id,
            rollout_id=f"{group_id}.{self.made}",
            token_ids=read_only(ids),
            loss_mask=read_only(loss_mask),
            prompt_length=int(loss_mask.argmax()) if loss_mask.any() else len(ids),
            logprobs=self._logprobs(loss_mask) if logprobs else None,
            ref_logprobs=self._logprobs(loss_mask) if ref_logprobs else None,
            reward=float(self.rng.normal()),
            advantage=read_only(advantage) if advantages else None,
            finish="stop",
            source=f"synthetic:{self.made}",
        )


def _group(spec: SyntheticSpec, maker: _Maker, index: int) -> list[Rollout]:
    # The root's first token is the group's number, so that groups share nothing.
    maker.runs = index
    prefixes = [maker.run(spec.prefix_tokens[0])]
    for tokens, fan_out in zip(spec.prefix_tokens[1:], spec.fan_out, strict=False):
        prefixes = [_join(prefix, maker.run(tokens)) for prefix in prefixes for _ in range(fan_out)]
    lengths = cycle(spec.tail_tokens)
    full = [_join(prefix, maker.run(next(lengths))) for prefix in prefixes for _ in range(spec.fan_out[-1])]
    shared = len(prefixes[0])
    halves = [ids[: (shared + len(ids)) // 2] for ids in islice(cycle(full), spec.strict_prefixes)]
    rows = [(ids, spec.mask_holes) for ids in [*full, *halves]]
    rows += [(ids, not spec.mask_holes) for ids in islice(cycle(full), spec.duplicates)]
    return [
        maker.rollout(
            f"g{index}",
            ids.copy(),
            _trained(
                len(ids),
                spec.prefix_tokens[0] if spec.train_shared else shared,
                hole=((2 * shared + len(ids)) // 3, (shared + 2 * len(ids)) // 3) if holed else (0, 0),
            ),
            logprobs=spec.logprobs,
            advantages=spec.advantages,
        )
        for ids, holed in rows
    ]


def _tools(maker: _Maker, prompt: Ids) -> list[Rollout]:
    """A multi-turn group: two first turns, the first one ending in a tool's output, and what followed them."""
    first, second, third = maker.run(9), maker.run(7), maker.run(6)
    long, medium = maker.run(29), maker.run(11)
    turn, other = _join(prompt, first), _join(prompt, second)
    deep = _join(turn, third)
    output = (23, 27)
    masks = {length: _trained(length, 18, hole=output) for length in (34, 38, 33, 31)}
    longest = _trained(62, 18, hole=output) & _trained(62, 18, hole=(43, 48))
    return [
        maker.rollout("tools", _join(deep, long), longest, logprobs=True, ref_logprobs=True),
        maker.rollout("tools", _join(deep, maker.run(1)), masks[34], ref_logprobs=True),
        maker.rollout("tools", _join(turn, medium), masks[38], logprobs=True, ref_logprobs=True),
        maker.rollout("tools", _join(other, maker.run(5)), _trained(30, 18), logprobs=True, ref_logprobs=True),
        maker.rollout("tools", _join(other, maker.run(2)), _trained(27, 25), ref_logprobs=True),
        # An exact duplicate of the first row in ids, and in nothing else.
        maker.rollout(
            "tools",
            _join(deep, long),
            _trained(62, 27, hole=(50, 53)),
            logprobs=True,
            ref_logprobs=True,
            advantages=True,
        ),
        maker.rollout("tools", deep.copy(), masks[33], ref_logprobs=True),
        maker.rollout("tools", _join(turn, medium[:4]), masks[31], logprobs=True, ref_logprobs=True),
        maker.rollout("tools", prompt.copy(), _trained(18, 18), ref_logprobs=True),
    ]


def _forked(maker: _Maker, prompt: Ids) -> list[Rollout]:
    """A group whose prompts part at position 7, from each other and from the other group's."""
    start = prompt[:7]
    left, right = maker.run(10), maker.run(13)
    return [
        maker.rollout("forked", _join(start, left), _trained(17, 13), logprobs=True, ref_logprobs=True),
        maker.rollout("forked", _join(start, right), _trained(20, 12), ref_logprobs=True, advantages=True),
    ]


def _small_groups(maker: _Maker) -> list[list[Rollout]]:
    """No sharing; a group of one; a one-token prompt with a rollout that is nothing else."""
    one = maker.run(1)
    apart = [(maker.run(21), 12), (maker.run(9), 3)]
    return [
        [maker.rollout("apart", ids, _trained(len(ids), start), ref_logprobs=True) for ids, start in apart],
        [maker.rollout("alone", maker.run(18), _trained(18, 8), logprobs=True, ref_logprobs=True)],
        [
            maker.rollout("one", _join(one, maker.run(length)), _trained(1 + length, 1), ref_logprobs=True)
            for length in (3, 7, 0)
        ],
    ]
