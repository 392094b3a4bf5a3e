"""Measure the plan of a save of 10^12 parameters on 1,024 ranks, in addresses alone: python -m recipes.benchmark.plan"""

if not __package__:  # run by path: this folder comes first, and would hide others' modules of the same names
    import sys

    sys.path[0] = __file__.rsplit("/recipes/", 1)[0]

from omegaconf import DictConfig

from recipes.support.cli import recipe


@recipe("benchmark_plan", writes=False)
def main(cfg: DictConfig) -> None:
    import json

    from recipes.benchmark.plan_costs import benchmark, keys_of, show

    keys = keys_of(cfg)
    result = benchmark(keys)
    if keys.json:
        print(json.dumps(result, indent=2))
    else:
        show(result)


if __name__ == "__main__":
    main()
