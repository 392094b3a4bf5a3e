"""Measure copies between a device and the host: python -m recipes.benchmark_device"""

if not __package__:  # run by path: this folder comes first, and its inspect.py would hide the standard library's
    import sys
    from os.path import abspath, dirname

    sys.path[0] = dirname(dirname(abspath(__file__)))

from omegaconf import DictConfig

from recipes.benchmarking import measure
from recipes.cli import recipe


@recipe("benchmark_device")
def main(cfg: DictConfig) -> None:
    from recipes import copy_speeds

    measure(cfg, copy_speeds)


if __name__ == "__main__":
    main()
