"""Draw the trees of a rollouts file.

Input: a JSONL file of rollouts (gzip where the name ends in .gz), read as one optimizer step.
Output: on stdout, a drawing of every tree and the statistics; with --json, the same as one JSON object.
A file that cannot be used ends the command with one line on stderr and exit code 1.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from megatron_branch.rollouts.reader import read_rollouts
from megatron_branch.rollouts.record import Rollout
from megatron_branch.tree.build import build_trees
from megatron_branch.tree.node import Node, Tree
from megatron_branch.tree.stats import tree_stats

LEGEND = """\
[start..end) own tokens of a node, by position    xN multiplicity: rollouts that pass through
trained: own tokens that at least one rollout trains    ends: rollouts whose last token is the node's last
"""
_SHOWN_IDS = 3
_SHOWN_ENDS = 4


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line and print; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", help="rollouts file")
    parser.add_argument("--width", type=int, help="columns of a line (default: those of the terminal)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a drawing")
    options = parser.parse_args(arguments)
    if options.width is not None and options.width < 20:
        parser.error("--width must be at least 20")
    try:
        rollouts = list(read_rollouts(options.file))
        trees = build_trees(rollouts)
    except ValueError as error:
        print(f"show_tree: {error}", file=sys.stderr)
        return 1
    stats = tree_stats(trees, rollouts)
    if options.json:
        print(json.dumps(_as_json(trees, rollouts) | {"stats": asdict(stats) | {"token_ratio": stats.token_ratio}}))
        return 0
    width = options.width or shutil.get_terminal_size((120, 24)).columns
    print(LEGEND)
    for tree in trees:
        for line in draw_tree(tree, rollouts):
            print(line if len(line) <= width else line[: width - 1] + "…")
        print()
    print(stats.text())
    return 0


def draw_tree(tree: Tree, rollouts: Sequence[Rollout]) -> Iterator[str]:
    """Yield a headline and a line per node, indented by depth.

    Args:
        tree: what to draw.
        rollouts: the rollouts of its step.
    """
    dense = sum(len(rollouts[index]) - 1 for index in tree.rollouts)
    inputs = sum(node.inputs for node in tree.nodes)
    groups = len({rollouts[index].group_id for index in tree.rollouts})
    yield f"tree {tree.index}: rollouts {len(tree.rollouts)}, groups {groups}, inputs {inputs} (dense {dense})"
    stems: list[str] = []
    for node in tree.nodes:
        if node.parent < 0:
            stems.append("")
            yield _describe(node, rollouts)
            continue
        last = tree.nodes[node.parent].children[-1] == node.index
        stem = stems[node.parent]
        stems.append(stem + ("   " if last else "│  "))
        yield f"{stem}{'└─ ' if last else '├─ '}{_describe(node, rollouts)}"


def _describe(node: Node, rollouts: Sequence[Rollout]) -> str:
    ids = rollouts[node.rollouts[0]].token_ids[node.start : node.end].tolist()
    if len(ids) > 2 * _SHOWN_IDS:
        ids = [*ids[:_SHOWN_IDS], "..", *ids[-_SHOWN_IDS:]]
    ends = [rollouts[index].rollout_id for index in _ending(node, rollouts)]
    more = f" and {len(ends) - _SHOWN_ENDS} more" if len(ends) > _SHOWN_ENDS else ""
    text = f"{node.index} [{node.start}..{node.end}) x{node.multiplicity}  trained {_trained(node, rollouts)}"
    text += f"  ids {' '.join(map(str, ids))}"
    return f"{text}  ends: {', '.join(ends[:_SHOWN_ENDS])}{more}" if ends else text


def _trained(node: Node, rollouts: Sequence[Rollout]) -> int:
    """Own tokens that at least one rollout trains."""
    masks = (rollouts[index].loss_mask[node.start : node.end] for index in node.rollouts)
    return int(np.logical_or.reduce(list(masks)).sum())


def _ending(node: Node, rollouts: Sequence[Rollout]) -> list[int]:
    return [index for index in node.rollouts if len(rollouts[index]) == node.end]


def _as_json(trees: Sequence[Tree], rollouts: Sequence[Rollout]) -> dict[str, Any]:
    return {
        "rollouts": [rollout.rollout_id for rollout in rollouts],
        "trees": [
            {
                "index": tree.index,
                "rollouts": tree.rollouts,
                "nodes": [asdict(node) | {"trained": _trained(node, rollouts)} for node in tree.nodes],
            }
            for tree in trees
        ],
    }


if __name__ == "__main__":
    try:
        code = main()
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader (`| head`) has seen enough; keep the interpreter from flushing into the closed pipe.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 0
    sys.exit(code)
