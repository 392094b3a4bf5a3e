"""Measure our strategies beside megatron-core's own of the same names: python -m recipes.benchmark_megatron"""

if not __package__:  # run by path: this folder comes first, and its inspect.py would hide the standard library's
    import sys
    from os.path import abspath, dirname

    sys.path[0] = dirname(dirname(abspath(__file__)))

from omegaconf import DictConfig, OmegaConf, open_dict

from recipes.cli import recipe


@recipe("benchmark_megatron")
def main(cfg: DictConfig) -> None:
    from recipes.config import checked
    from recipes.launch import launch
    from recipes.megatron_contenders import benchmark, check_benchmark, show

    with open_dict(cfg):
        wanted = OmegaConf.to_container(cfg.pop("benchmark"))
    result = launch(benchmark, checked(cfg) | {"benchmark": check_benchmark(wanted)})
    if result is not None:
        show(result)


if __name__ == "__main__":
    main()
