"""Measure our strategies beside megatron-core's own of the same names: python -m recipes.benchmark.megatron"""

if not __package__:  # run by path: this folder comes first, and would hide others' modules of the same names
    import sys

    sys.path[0] = __file__.rsplit("/recipes/", 1)[0]

from omegaconf import DictConfig

from recipes.support.cli import recipe


@recipe("benchmark_megatron")
def main(cfg: DictConfig) -> None:
    from recipes.benchmark import harness, megatron_strategies

    harness.measure(cfg, megatron_strategies, scratch=True)


if __name__ == "__main__":
    main()
