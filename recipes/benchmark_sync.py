"""Measure how weights get from trainers to rollouts, by ours and by others: python -m recipes.benchmark_sync"""

if not __package__:  # run by path: this folder comes first, and its inspect.py would hide the standard library's
    import sys
    from os.path import abspath, dirname

    sys.path[0] = dirname(dirname(abspath(__file__)))

from omegaconf import DictConfig

from recipes.cli import recipe


@recipe("benchmark_sync")
def main(cfg: DictConfig) -> None:
    from recipes.launch import launch
    from recipes.run_folder import RunFolder
    from recipes.sync_figures import show
    from recipes.sync_keys import checked_benchmark
    from recipes.sync_rounds import benchmark

    folder = RunFolder(cfg)
    result = launch(benchmark, checked_benchmark(cfg), folder)
    if result is not None:
        show(result)


if __name__ == "__main__":
    main()
