"""Measure our strategies beside megatron-core's own of the same names: python -m recipes.benchmark_megatron"""

if not __package__:  # run by path: this folder comes first, and its inspect.py would hide the standard library's
    import sys
    from os.path import abspath, dirname

    sys.path[0] = dirname(dirname(abspath(__file__)))

from omegaconf import DictConfig

from recipes.benchmarking import measure
from recipes.cli import recipe


@recipe("benchmark_megatron")
def main(cfg: DictConfig) -> None:
    from recipes import megatron_contenders

    measure(cfg, megatron_contenders)


if __name__ == "__main__":
    main()
