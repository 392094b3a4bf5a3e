"""Measure what a phase costs on many ranks, and reckon it on thousands: python -m recipes.benchmark.ranks"""

if not __package__:  # run by path: this folder comes first, and would hide others' modules of the same names
    import sys

    sys.path[0] = __file__.rsplit("/recipes/", 1)[0]

from omegaconf import DictConfig

from recipes.support.cli import recipe


@recipe("benchmark_ranks", writes=False)
def main(cfg: DictConfig) -> None:
    import json

    from recipes.benchmark.agreements import benchmark, keys_of, show

    keys = keys_of(cfg)
    result = benchmark(keys)
    if keys.json:
        print(json.dumps(result, indent=2))
    else:
        show(result)


if __name__ == "__main__":
    main()
