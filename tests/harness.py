"""Run a function on several ranks of one machine; the tools' own launcher under the tests' names."""

from megatron_branch.engine.local_ranks import LocalRanksError as RankError
from megatron_branch.engine.local_ranks import run_local_ranks as run_ranks

__all__ = ["RankError", "run_ranks"]
