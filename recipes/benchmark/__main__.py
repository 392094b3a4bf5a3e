"""Measure saves and loads beside others', and beside the machine's limits: python -m recipes.benchmark"""

if not __package__:  # run by path: this folder comes first, and would hide others' modules of the same names
    import sys

    sys.path[0] = __file__.rsplit("/recipes/", 1)[0]

from omegaconf import DictConfig

from recipes.support.cli import recipe


@recipe("benchmark")
def main(cfg: DictConfig) -> None:
    from recipes.benchmark import harness, saves_and_loads

    harness.measure(cfg, saves_and_loads, scratch=True)


if __name__ == "__main__":
    main()
