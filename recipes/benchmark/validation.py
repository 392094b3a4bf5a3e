"""Measure what the doctor and each validation level cost: python -m recipes.benchmark.validation"""

if not __package__:  # run by path: this folder comes first, and would hide others' modules of the same names
    import sys
    from os.path import abspath, dirname

    sys.path[0] = dirname(dirname(dirname(abspath(__file__))))

from omegaconf import DictConfig

from recipes.benchmark.benchmarking import measure
from recipes.support.cli import recipe


@recipe("benchmark_validation")
def main(cfg: DictConfig) -> None:
    from recipes.benchmark import validation_costs

    measure(cfg, validation_costs)


if __name__ == "__main__":
    main()
