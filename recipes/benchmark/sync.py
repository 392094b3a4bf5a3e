"""Measure how weights get from trainers to rollouts, by ours and by others: python -m recipes.benchmark.sync"""

if not __package__:  # run by path: this folder comes first, and would hide others' modules of the same names
    import sys
    from os.path import abspath, dirname

    sys.path[0] = dirname(dirname(dirname(abspath(__file__))))

from omegaconf import DictConfig

from recipes.support.cli import recipe


@recipe("benchmark_sync")
def main(cfg: DictConfig) -> None:
    from recipes.benchmark.sync_figures import show
    from recipes.benchmark.sync_keys import checked_benchmark
    from recipes.benchmark.sync_rounds import benchmark
    from recipes.support.launch import launch
    from recipes.support.run_folder import RunFolder

    folder = RunFolder(cfg)
    result = launch(benchmark, checked_benchmark(cfg), folder)
    if result is not None:
        show(result)


if __name__ == "__main__":
    main()
