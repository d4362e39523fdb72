"""Calls a command's `main` as rank after rank of a run, in one fresh process, and writes down what it said.

Reads `{"script": FILE, "world_size": N, "runs": [{"rank": R, "arguments": [...]}]}` on standard input; writes one JSON
list with `{code, out, err, loaded, slept_s}` per run. `loaded` are the heavy libraries that the process had imported by
then, so a process that runs only what is refused shows that refusing needs none of them.
"""

from __future__ import annotations

import importlib.util
import io
import json
import os
import sys
import time
import traceback
from contextlib import redirect_stderr, redirect_stdout
from typing import Any

HEAVY = ("megatron", "deepspeed", "wandb")


def main() -> None:
    """See above."""
    job = json.load(sys.stdin)
    slept: list[float] = []
    time.sleep = slept.append  # type: ignore[assignment]
    os.environ["WORLD_SIZE"] = str(job["world_size"])
    spec = importlib.util.spec_from_file_location("script", job["script"])
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    for name in ("train", "run_local_ranks"):
        if hasattr(script, name):
            setattr(script, name, _reached)
    json.dump([_call(script, run, slept) for run in job["runs"]], sys.stdout)


def _reached(*arguments: Any, **options: Any) -> int:
    print("training starts")
    return 0


def _call(script: Any, run: dict[str, Any], slept: list[float]) -> dict[str, Any]:
    os.environ["RANK"] = str(run["rank"])
    out, err = io.StringIO(), io.StringIO()
    slept.clear()
    with redirect_stdout(out), redirect_stderr(err):
        try:
            code = script.main(run["arguments"])
        except BaseException:  # a refusal that is no refusal; argparse's exit included
            code = None
            traceback.print_exc()
    loaded = [name for name in HEAVY if name in sys.modules]
    return {"code": code, "out": out.getvalue(), "err": err.getvalue(), "loaded": loaded, "slept_s": sum(slept)}


if __name__ == "__main__":
    main()
