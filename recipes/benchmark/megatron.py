"""Measure our strategies beside megatron-core's own of the same names: python -m recipes.benchmark.megatron"""

if not __package__:  # run by path: this folder comes first, and would hide others' modules of the same names
    import sys
    from os.path import abspath, dirname

    sys.path[0] = dirname(dirname(dirname(abspath(__file__))))

from omegaconf import DictConfig

from recipes.benchmark.benchmarking import measure
from recipes.support.cli import recipe


@recipe("benchmark_megatron")
def main(cfg: DictConfig) -> None:
    from recipes.benchmark import megatron_contenders

    measure(cfg, megatron_contenders)


if __name__ == "__main__":
    main()
