"""Measure copies between a device and the host: python -m recipes.benchmark.device"""

if not __package__:  # run by path: this folder comes first, and would hide others' modules of the same names
    import sys

    sys.path[0] = __file__.rsplit("/recipes/", 1)[0]

from omegaconf import DictConfig

from recipes.support.cli import recipe


@recipe("benchmark_device")
def main(cfg: DictConfig) -> None:
    from recipes.benchmark import device_copies, harness

    harness.measure(cfg, device_copies)


if __name__ == "__main__":
    main()
