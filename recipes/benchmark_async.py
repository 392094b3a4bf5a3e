"""Measure what saves beside training cost it, ours and others': python -m recipes.benchmark_async"""

if not __package__:  # run by path: this folder comes first, and its inspect.py would hide the standard library's
    import sys
    from os.path import abspath, dirname

    sys.path[0] = dirname(dirname(abspath(__file__)))

from omegaconf import DictConfig

from recipes.benchmarking import measure
from recipes.cli import recipe


@recipe("benchmark_async")
def main(cfg: DictConfig) -> None:
    from recipes import async_rounds

    measure(cfg, async_rounds)


if __name__ == "__main__":
    main()
