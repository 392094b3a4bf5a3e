"""Measure weight updates from trainers to rollouts, ours and others': python -m recipes.benchmark.sync"""

if not __package__:  # run by path: this folder comes first, and would hide others' modules of the same names
    import sys

    sys.path[0] = __file__.rsplit("/recipes/", 1)[0]

from omegaconf import DictConfig

from recipes.support.cli import recipe


@recipe("benchmark_sync")
def main(cfg: DictConfig) -> None:
    from recipes.benchmark import harness, weight_updates

    harness.measure(cfg, weight_updates, weight_updates.check_run)


if __name__ == "__main__":
    main()
