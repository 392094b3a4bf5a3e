"""Compare the results of two benchmark runs: python -m recipes.benchmark.compare a=<before> b=<after>"""

if not __package__:  # run by path: this folder comes first, and would hide others' modules of the same names
    import sys

    sys.path[0] = __file__.rsplit("/recipes/", 1)[0]

from omegaconf import DictConfig

from recipes.support.cli import recipe


@recipe("benchmark_compare", writes=False, trouble=2)
def main(cfg: DictConfig) -> int:
    from recipes.benchmark.comparison import compare, keys_of

    return compare(keys_of(cfg))


if __name__ == "__main__":
    main()
