"""Measure the cost of the doctor and of each validation level: python -m recipes.benchmark.validation"""

if not __package__:  # run by path: this folder comes first, and would hide others' modules of the same names
    import sys

    sys.path[0] = __file__.rsplit("/recipes/", 1)[0]

from omegaconf import DictConfig

from recipes.support.cli import recipe


@recipe("benchmark_validation")
def main(cfg: DictConfig) -> None:
    from recipes.benchmark import harness, validation_costs

    harness.measure(cfg, validation_costs)


if __name__ == "__main__":
    main()
