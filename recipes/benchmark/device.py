"""Measure copies between a device and the host: python -m recipes.benchmark.device"""

if not __package__:  # run by path: this folder comes first, and would hide others' modules of the same names
    import sys
    from os.path import abspath, dirname

    sys.path[0] = dirname(dirname(dirname(abspath(__file__))))

from omegaconf import DictConfig

from recipes.benchmark.benchmarking import measure
from recipes.support.cli import recipe


@recipe("benchmark_device")
def main(cfg: DictConfig) -> None:
    from recipes.benchmark import copy_speeds

    measure(cfg, copy_speeds)


if __name__ == "__main__":
    main()
