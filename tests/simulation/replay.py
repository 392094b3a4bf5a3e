"""Replay a schedule, step by step: python -m tests.simulation.replay SEED [MUTANT]."""

from __future__ import annotations

import sys

from ckpt.ranks.agreement import Agreement
from tests.simulation.mutants import MUTANTS
from tests.simulation.schedules import Schedule

if __name__ == "__main__":
    machines = {mutant.__name__: mutant for mutant in MUTANTS}
    schedule = Schedule(int(sys.argv[1]), machine=machines[sys.argv[2]] if len(sys.argv) > 2 else Agreement, tell=print)
    print("; ".join(schedule.faults) or "no fault")
    schedule.run()
