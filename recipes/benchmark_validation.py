"""Measure what the doctor and each validation level cost: python -m recipes.benchmark_validation"""

if not __package__:  # run by path: this folder comes first, and its inspect.py would hide the standard library's
    import sys
    from os.path import abspath, dirname

    sys.path[0] = dirname(dirname(abspath(__file__)))

from omegaconf import DictConfig, OmegaConf, open_dict

from recipes.cli import recipe


@recipe("benchmark_validation")
def main(cfg: DictConfig) -> None:
    from recipes.config import checked
    from recipes.launch import launch
    from recipes.validation_costs import benchmark, check_benchmark, show

    with open_dict(cfg):
        wanted = OmegaConf.to_container(cfg.pop("benchmark"))
    result = launch(benchmark, checked(cfg) | {"benchmark": check_benchmark(wanted)})
    if result is not None:
        show(result)


if __name__ == "__main__":
    main()
