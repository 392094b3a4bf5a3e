"""Measure what saves beside training cost it, ours and others': python -m recipes.benchmark.background"""

if not __package__:  # run by path: this folder comes first, and would hide others' modules of the same names
    import sys
    from os.path import abspath, dirname

    sys.path[0] = dirname(dirname(dirname(abspath(__file__))))

from omegaconf import DictConfig

from recipes.benchmark.benchmarking import measure
from recipes.support.cli import recipe


@recipe("benchmark_async")
def main(cfg: DictConfig) -> None:
    from recipes.benchmark import async_rounds

    measure(cfg, async_rounds)


if __name__ == "__main__":
    main()
