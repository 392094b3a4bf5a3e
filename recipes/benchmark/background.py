"""Measure saves beside training, ours and DCP's, by the delay of its steps: python -m recipes.benchmark.background"""

if not __package__:  # run by path: this folder comes first, and would hide others' modules of the same names
    import sys

    sys.path[0] = __file__.rsplit("/recipes/", 1)[0]

from omegaconf import DictConfig

from recipes.support.cli import recipe


@recipe("benchmark_async")
def main(cfg: DictConfig) -> None:
    from recipes.benchmark import background_saves, harness

    harness.measure(cfg, background_saves, scratch=True)


if __name__ == "__main__":
    main()
