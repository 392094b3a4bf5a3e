"""Measure saves and loads, or what measure= names, beside others and the machine's limits: python -m recipes.benchmark"""

if not __package__:  # run by path: this folder comes first, and would hide others' modules of the same names
    import sys

    sys.path[0] = __file__.rsplit("/recipes/", 1)[0]

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from recipes.support.cli import recipe


@recipe("benchmark", trouble=2)
def main(cfg: DictConfig) -> int:
    from recipes.benchmark.harness import measure

    return measure(cfg, HydraConfig.get().runtime.choices["measure"])


if __name__ == "__main__":
    main()
