"""Measure conversions between formats, on one rank and on all, beside a copy of the files: python -m recipes.benchmark.convert"""

if not __package__:  # run by path: this folder comes first, and would hide others' modules of the same names
    import sys

    sys.path[0] = __file__.rsplit("/recipes/", 1)[0]

from omegaconf import DictConfig

from recipes.support.cli import recipe


@recipe("benchmark_convert")
def main(cfg: DictConfig) -> None:
    from recipes.benchmark import conversions, harness

    harness.measure(cfg, conversions, scratch=True)


if __name__ == "__main__":
    main()
