"""Measure what the doctor and each validation level cost: python -m recipes.benchmark_validation"""

if not __package__:  # run by path: this folder comes first, and its inspect.py would hide the standard library's
    import sys
    from os.path import abspath, dirname

    sys.path[0] = dirname(dirname(abspath(__file__)))

from omegaconf import DictConfig

from recipes.benchmarking import measure
from recipes.cli import recipe


@recipe("benchmark_validation")
def main(cfg: DictConfig) -> None:
    from recipes import validation_costs

    measure(cfg, validation_costs)


if __name__ == "__main__":
    main()
